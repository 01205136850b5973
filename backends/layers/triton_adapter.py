"""Triton's side of the layers' operations: allocates, flattens to rows, launches `triton_kernels`, adds up.

Nothing is kept for backward but inputs. Partial sums of a weight's gradient, one row a program, are added
here, in one order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from delta_trn.backends.gated_delta_rule.triton_adapter import on_its_device
from delta_trn.backends.layers.pytorch import (
    linear_cross_entropy_backward,
    linear_cross_entropy_saved,
    tokenwise_cross_entropy,
)
from delta_trn.triton_kernels import cross_entropy, rms_norm, short_convolution

__all__ = ["linear_cross_entropy_backward", "linear_cross_entropy_saved"]


@on_its_device
def short_convolution_forward(
    x: Tensor, weight: Tensor, prefix: Tensor | None, position: Tensor | None, activation: str, save: bool
) -> Tensor:
    """y [B, T, C]; shapes as in `backends.short_convolution`."""
    x, weight, prefix, position = x.contiguous(), weight.contiguous(), _dense(prefix), _dense(position)
    y = torch.empty_like(x)
    short_convolution.forward(x, weight, prefix, position, y, silu=activation == "silu")
    return y


@on_its_device
def short_convolution_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    prefix: Tensor | None,
    position: Tensor | None,
    activation: str,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """dx, dweight, dprefix."""
    x, weight, prefix, position = x.contiguous(), weight.contiguous(), _dense(prefix), _dense(position)
    dx, dprefix = torch.empty_like(x), None if prefix is None else torch.empty_like(prefix)
    B, T, C = x.shape
    P, _ = short_convolution.parts(B, T, C, weight.shape[1], prefix=prefix is not None)
    dweight = x.new_empty((P, *weight.shape), dtype=torch.float32)
    short_convolution.backward(
        dy.contiguous(), x, weight, prefix, position,
        dx=dx, dprefix=dprefix, dweight=dweight, silu=activation == "silu",
    )  # fmt: skip
    return dx, dweight.sum(0).to(weight.dtype), dprefix


@on_its_device
def gated_rms_norm_forward(x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, save: bool) -> Tensor:
    """y [..., N]."""
    rows = _rows(x)
    y = torch.empty_like(rows)
    rms_norm.forward(rows, None if gate is None else _rows(gate), None, weight.contiguous(), y, None, eps=eps)
    return y.view(x.shape)


@on_its_device
def gated_rms_norm_backward(
    dy: Tensor, x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, save: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """dx, dgate, dweight."""
    dx, dgate, dweight = _norm_gradients(dy, None, x, gate, weight, eps)
    return dx, dgate, dweight


@on_its_device
def add_rms_norm_forward(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, save: bool
) -> tuple[Tensor, Tensor]:
    """y, total."""
    rows, stream = _rows(x), _rows(residual)
    y, total = torch.empty_like(stream), torch.empty_like(stream)
    rms_norm.forward(rows, None, stream, weight.contiguous(), y, total, eps=eps)
    return y.view(x.shape), total.view(x.shape)


@on_its_device
def add_rms_norm_backward(
    dy: Tensor, dtotal: Tensor, total: Tensor, weight: Tensor, eps: float, save: bool
) -> tuple[Tensor, Tensor]:
    """The gradient of both terms; dweight."""
    dx, _, dweight = _norm_gradients(dy, dtotal, total, None, weight, eps)
    return dx, dweight


@on_its_device
def linear_cross_entropy_forward(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, save: bool
) -> tuple[Tensor, ...]:
    """The mean loss, and where asked for dhidden, dweight, both times count, and count."""
    return tokenwise_cross_entropy(hidden, weight, targets, ignore_index, save, _softmax_)


def _softmax_(logits: Tensor, goal: Tensor, keep: Tensor, save: bool) -> tuple[Tensor, Tensor | None]:
    logits, loss = logits.contiguous(), torch.empty_like(keep)
    cross_entropy.softmax_(logits, goal.contiguous(), keep.contiguous(), loss, gradient=save)
    return loss.sum(), logits if save else None


def _norm_gradients(
    dy: Tensor, dtotal: Tensor | None, x: Tensor, gate: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor | None, Tensor]:
    rows, z, given = (
        _rows(x),
        None if gate is None else _rows(gate),
        None if dtotal is None else _rows(dtotal),
    )
    dx, dgate = torch.empty_like(rows), None if z is None else torch.empty_like(z)
    P, _ = rms_norm.parts(*rows.shape)
    dweight = x.new_empty((P, rows.shape[1]), dtype=torch.float32)
    rms_norm.backward(
        _rows(dy), given, rows, z, weight.contiguous(), dx=dx, dgate=dgate, dweight=dweight, eps=eps
    )
    dgate = None if dgate is None else dgate.view(x.shape)
    return dx.view(x.shape), dgate, dweight.sum(0).to(weight.dtype)


def _rows(x: Tensor) -> Tensor:
    """[M, N]."""
    return x.reshape(-1, x.shape[-1]).contiguous()


def _dense(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()
