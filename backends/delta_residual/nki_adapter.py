"""NKI's side of `delta_residual`: cuts a call into kernel calls of `plan.TOKENS` tokens,
joins results.
"""

from __future__ import annotations

import torch
from torch import Tensor

from delta_trn.backends.delta_residual.contract import Gradients, Residual
from delta_trn.backends.nki_runtime_adapter import (
    require_norms_within_rsqrt,
    require_within_rsqrt,
    run,
)
from delta_trn.nki_kernels import plan
from delta_trn.nki_kernels.delta_residual import LEAST_EPS, delta_residual_bwd, delta_residual_fwd


def forward(call: Residual, *, save: bool) -> tuple[Tensor, list[Tensor]]:
    """Returns X', and nothing to save.

    Raises BackendRefusal for a k_eps, or norms of k, whose squares rsqrt does not take.
    """
    if call.k_eps is not None:
        require_within_rsqrt("k_eps", call.k_eps, LEAST_EPS)
        require_norms_within_rsqrt({"k": call.k}, call.k_eps**2)
    tensors = (call.x, call.k, call.v, call.beta)
    pieces = zip(*(y.split(plan.TOKENS) for y in tensors), strict=True)
    return torch.cat([run(delta_residual_fwd, *piece, call.k_eps or 0.0) for piece in pieces]), []


def backward(dout: Tensor, call: Residual, saved: list[Tensor]) -> Gradients:
    """Returns dx, dk, dv, dbeta."""
    tensors = (dout, call.x, call.k, call.v, call.beta)
    pieces = zip(*(y.split(plan.TOKENS) for y in tensors), strict=True)
    parts = [run(delta_residual_bwd, *piece, call.k_eps or 0.0) for piece in pieces]
    dx, dk, dv, dbeta = (torch.cat(part) for part in zip(*parts, strict=True))
    return dx, dk, dv, dbeta
