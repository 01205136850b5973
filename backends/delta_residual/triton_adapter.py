"""Triton's side of `delta_residual`: allocates and launches; saves nothing but the inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from delta_trn.backends.delta_residual.contract import Gradients, Residual
from delta_trn.triton_kernels import delta_residual


def forward(call: Residual, *, save: bool) -> tuple[Tensor, list[Tensor]]:
    """Returns X', and nothing to save."""
    x, k, v, beta = (y.contiguous() for y in (call.x, call.k, call.v, call.beta))
    out = torch.empty_like(x)
    delta_residual.forward(x, k, v, beta, out, k_eps=call.k_eps)
    return out, []


def backward(dout: Tensor, call: Residual, saved: list[Tensor]) -> Gradients:
    """Returns dx, dk, dv, dbeta."""
    x, k, v, beta = (y.contiguous() for y in (call.x, call.k, call.v, call.beta))
    dx, dk, dv, dbeta = (torch.empty_like(y) for y in (x, k, v, beta))
    delta_residual.backward(
        dout.contiguous(), x, k, v, beta, dx=dx, dk=dk, dv=dv, dbeta=dbeta, k_eps=call.k_eps
    )
    return dx, dk, dv, dbeta
