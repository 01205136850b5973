"""Deep Delta Learning's residual update as it is written; judges in float64, itself by finite differences.

    X' = X + beta y (v - X^T y)^T       y = k, or k / sqrt(|k|^2 + k_eps^2)

Everything in float32, float64 for float64 inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from delta_trn.backends.delta_residual.contract import Gradients, Residual


def forward(call: Residual, *, save: bool) -> tuple[Tensor, list[Tensor]]:
    """Returns X', and nothing to save."""
    X, k_, v_, beta_ = _full(call.x, call.k, call.v, call.beta)
    y = k_ / _norm(k_, call.k_eps)
    missing = v_ - torch.einsum("md,mdv->mv", y, X)
    return (X + beta_[:, None, None] * y[:, :, None] * missing[:, None, :]).to(call.x.dtype), []


def backward(dout: Tensor, call: Residual, saved: list[Tensor]) -> Gradients:
    """Returns dx, dk, dv, dbeta; an operator runs below autograd, so the chain rule is written out."""
    X, k_, v_, beta_, dX = _full(call.x, call.k, call.v, call.beta, dout)
    n = _norm(k_, call.k_eps)
    y = k_ / n
    missing = v_ - torch.einsum("md,mdv->mv", y, X)
    dwrite = torch.einsum("md,mdv->mv", y, dX)  # gradient of beta (v - X^T y)
    dmissing = beta_[:, None] * dwrite
    dy = torch.einsum("mdv,mv->md", dX, beta_[:, None] * missing) - torch.einsum("mdv,mv->md", X, dmissing)
    dk = dy / n
    if call.k_eps is not None:
        dk = dk - k_ * (k_ * dy).sum(-1, keepdim=True) / n**3
    dx = dX - y[:, :, None] * dmissing[:, None, :]
    dbeta = (dwrite * missing).sum(-1)
    return dx.to(call.x.dtype), dk.to(call.k.dtype), dmissing.to(call.v.dtype), dbeta.to(call.beta.dtype)


def _norm(k: Tensor, k_eps: float | None) -> Tensor:
    """[M, 1]; 1 where the operation does not normalize."""
    if k_eps is None:
        return k.new_ones((k.shape[0], 1))
    return (k.square().sum(-1, keepdim=True) + k_eps**2).sqrt()


def _full(*tensors: Tensor) -> tuple[Tensor, ...]:
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    return tuple(y.to(dtype) for y in tensors)
