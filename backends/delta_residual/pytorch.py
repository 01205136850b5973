"""Deep Delta Learning's residual update in a few passes over X, gradients derived by hand.

With y = r k, r = (|k|^2 + k_eps^2)^-1/2 (r = 1 where the operation does not normalize), p = X^T y:

    X' = X + y w^T,  w = beta (v - p)

and with s = dX'^T y, e = v - p:

    dX = dX' - beta y s^T       dv = beta s       dbeta = s . e
    dy = beta (dX' e - X s)     dk = r (dy - y (y . dy)),  y . dy = beta (s . e - p . s)

Sums are float32, float64 for float64 inputs. Nothing is saved but the inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from delta_trn.backends.delta_residual.contract import Gradients, Residual

TAKES_SUBCLASSES = ("delta_residual",)


def forward(call: Residual, *, save: bool) -> tuple[Tensor, list[Tensor]]:
    """Returns X', and nothing to save."""
    X, k_, v_, beta_ = _full(call.x, call.k, call.v, call.beta)
    y = k_ * _reciprocal_norm(k_, call.k_eps)
    w = beta_[:, None] * (v_ - _along(X, y))
    return torch.addcmul(X, y[:, :, None], w[:, None, :]).to(call.x.dtype), []


def backward(dout: Tensor, call: Residual, saved: list[Tensor]) -> Gradients:
    """Returns dx, dk, dv, dbeta."""
    X, k_, v_, beta_, dX = _full(call.x, call.k, call.v, call.beta, dout)
    r = _reciprocal_norm(k_, call.k_eps)
    y = k_ * r
    p, s = _along(X, y), _along(dX, y)
    e, dv = v_ - p, beta_[:, None] * s
    dbeta = (s * e).sum(-1)
    dy = _across(dX, beta_[:, None] * e) - _across(X, dv)
    if call.k_eps is not None:
        dy = r * (dy - y * (beta_ * (dbeta - (p * s).sum(-1)))[:, None])
    dx = torch.addcmul(dX, y[:, :, None], dv[:, None, :], value=-1)
    return dx.to(call.x.dtype), dy.to(call.k.dtype), dv.to(call.v.dtype), dbeta.to(call.beta.dtype)


def _reciprocal_norm(k: Tensor, k_eps: float | None) -> Tensor:
    if k_eps is None:
        return k.new_ones((k.shape[0], 1))
    return (k.square().sum(-1, keepdim=True) + k_eps**2).rsqrt()


def _along(X: Tensor, y: Tensor) -> Tensor:
    """X^T y [M, DV]."""
    return (y[:, None, :] @ X).squeeze(1)


def _across(X: Tensor, w: Tensor) -> Tensor:
    """X w [M, D]."""
    return (X @ w[:, :, None]).squeeze(2)


def _full(*tensors: Tensor) -> tuple[Tensor, ...]:
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    return tuple(t.to(dtype) for t in tensors)
