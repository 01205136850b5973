"""Triton's side of the layers' operations: allocates, flattens to rows, launches `triton_kernels`,
adds up.

Only the cross-entropy saves more than its inputs. Each program writes its own row of partial sums
of a weight's gradient, and the rows are added here, in a fixed order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from delta_trn.backends.layers.contract import Convolution, GatedNorm, Readout, SumNorm
from delta_trn.backends.layers.pytorch import (
    linear_cross_entropy_backward,
    linear_cross_entropy_saved_shapes,
    tokenwise_cross_entropy,
)
from delta_trn.triton_kernels import cross_entropy, rms_norm, short_convolution

__all__ = ["linear_cross_entropy_backward", "linear_cross_entropy_saved_shapes"]


def short_convolution_forward(call: Convolution, *, save: bool) -> tuple[Tensor, list[Tensor]]:
    """Returns y [B, T, C]."""
    x, weight, prefix, position = _dense(call)
    y = torch.empty_like(x)
    short_convolution.forward(x, weight, prefix, position, y, silu=call.activation == "silu")
    return y, []


def short_convolution_backward(
    dy: Tensor, call: Convolution, saved: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns dx, dweight, dprefix."""
    x, weight, prefix, position = _dense(call)
    dx, dprefix = torch.empty_like(x), None if prefix is None else torch.empty_like(prefix)
    B, T, C = x.shape
    P, _ = short_convolution.parts(B, T, C, weight.shape[0], prefix=prefix is not None)
    dweight = x.new_empty((P, *weight.shape), dtype=torch.float32)
    short_convolution.backward(
        dy.contiguous(), x, weight, prefix, position,
        dx=dx, dprefix=dprefix, dweight=dweight, silu=call.activation == "silu",
    )  # fmt: skip
    return dx, dweight.sum(0).t().to(weight.dtype).contiguous(), dprefix


def gated_rms_norm_forward(call: GatedNorm, *, save: bool) -> tuple[Tensor, list[Tensor]]:
    """Returns y [..., N]."""
    x, gate = _rows(call.x), None if call.gate is None else _rows(call.gate)
    y = torch.empty_like(x)
    rms_norm.forward(
        x, gate, None, call.weight.contiguous(), y, None,
        eps=call.eps, silu=call.activation == "swish",
    )  # fmt: skip
    return y.view(call.x.shape), []


def gated_rms_norm_backward(
    dy: Tensor, call: GatedNorm, saved: list[Tensor]
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Returns dx, dgate, dweight."""
    silu = call.activation == "swish"
    return _norm_gradients(dy, None, call.x, call.gate, call.weight, call.eps, silu=silu)


def add_rms_norm_forward(call: SumNorm, *, save: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Returns y and total."""
    x, residual = _rows(call.x), _rows(call.residual)
    y, total = torch.empty_like(residual), torch.empty_like(residual)
    rms_norm.forward(x, None, residual, call.weight.contiguous(), y, total, eps=call.eps)
    return y.view(call.x.shape), total.view(call.x.shape), []


def add_rms_norm_backward(
    dy: Tensor, dtotal: Tensor, call: SumNorm, saved: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """Returns the gradient of both terms, and dweight."""
    dx, _, dweight = _norm_gradients(dy, dtotal, saved[0], None, call.weight, call.eps)
    return dx, dweight


def linear_cross_entropy_forward(call: Readout, *, save: bool) -> tuple[Tensor, list[Tensor]]:
    """Returns the mean loss; saves what `layers.pytorch` saves."""
    return tokenwise_cross_entropy(call, save, _softmax_)


def _softmax_(
    logits: Tensor, target: Tensor, keep: Tensor, save: bool
) -> tuple[Tensor, Tensor | None]:
    logits, loss = logits.contiguous(), torch.empty_like(keep)
    cross_entropy.softmax_(logits, target.contiguous(), keep.contiguous(), loss, gradient=save)
    return loss.sum(), logits if save else None


def _norm_gradients(
    dy: Tensor,
    dtotal: Tensor | None,
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor,
    eps: float,
    *,
    silu: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor]:
    rows = _rows(x)
    z = None if gate is None else _rows(gate)
    dsum = None if dtotal is None else _rows(dtotal)
    dx, dgate = torch.empty_like(rows), None if z is None else torch.empty_like(z)
    P, _ = rms_norm.parts(*rows.shape)
    dweight = x.new_empty((P, rows.shape[1]), dtype=torch.float32)
    rms_norm.backward(
        _rows(dy), dsum, rows, z, weight.contiguous(),
        dx=dx, dgate=dgate, dweight=dweight, eps=eps, silu=silu,
    )  # fmt: skip
    dgate = None if dgate is None else dgate.view(x.shape)
    return dx.view(x.shape), dgate, dweight.sum(0).to(weight.dtype)


def _rows(x: Tensor) -> Tensor:
    """Returns x as [M, N]."""
    return x.reshape(-1, x.shape[-1]).contiguous()


def _dense(call: Convolution) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Returns x, weight [W, C], prefix and position as the kernels read them."""
    prefix = None if call.prefix is None else call.prefix.contiguous()
    position = None if call.position is None else call.position.contiguous()
    return call.x.contiguous(), call.weight.t().contiguous(), prefix, position
