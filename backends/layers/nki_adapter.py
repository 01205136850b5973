"""NKI's side of the layers' operations that have a kernel: short convolution, gated RMS norm, cross-entropy.

Kernels are unrolled, so the norm and the cross-entropy are cut into kernel calls of bounded length. Only the
cross-entropy saves more than its inputs. The weight stands for tensors that a call does not have and its
kernel does not read: None would be compiled again at every call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from delta_trn.backends.layers.contract import Convolution, GatedNorm, Readout
from delta_trn.backends.layers.pytorch import linear_cross_entropy_backward, linear_cross_entropy_saved_shapes
from delta_trn.backends.nki_runtime_adapter import require_norms_within_rsqrt, require_within_rsqrt, run
from delta_trn.nki_kernels import cross_entropy, plan
from delta_trn.nki_kernels.cross_entropy import cross_entropy_bwd, cross_entropy_fwd
from delta_trn.nki_kernels.gated_rms_norm import gated_rms_norm_bwd, gated_rms_norm_fwd
from delta_trn.nki_kernels.short_convolution import short_convolution_bwd, short_convolution_fwd

__all__ = ["linear_cross_entropy_backward", "linear_cross_entropy_saved_shapes"]

READOUT_TOKENS = cross_entropy.MOST_TOKENS  # per kernel call


def short_convolution_forward(call: Convolution, *, save: bool) -> tuple[Tensor, list[Tensor]]:
    """Returns y [B, T, C]."""
    return run(short_convolution_fwd, call.x, call.weight, *_kernel_options(call)), []


def short_convolution_backward(
    dy: Tensor, call: Convolution, saved: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns dx, dweight, dprefix."""
    outputs = run(short_convolution_bwd, dy, call.x, call.weight, *_kernel_options(call))
    dx, dweight, *dprefix = outputs
    if call.prefix is None:
        return dx, dweight, None
    return dx, dweight, dprefix[0] if dprefix else torch.zeros_like(call.prefix)


def gated_rms_norm_forward(call: GatedNorm, *, save: bool) -> tuple[Tensor, list[Tensor]]:
    """Returns y [..., N].

    Raises BackendRefusal for an eps, or norms of rows, that rsqrt does not take.
    """
    require_within_rsqrt("eps", call.eps, plan.LEAST_RSQRT)
    require_norms_within_rsqrt({"x": call.x}, call.eps)
    gated = call.gate is not None
    parts = [
        run(gated_rms_norm_fwd, x, gate, call.weight, call.eps, gated)
        for x, gate in zip(_pieces(call.x), _gate_pieces(call), strict=True)
    ]
    return torch.cat(parts).reshape(call.x.shape), []


def gated_rms_norm_backward(
    dy: Tensor, call: GatedNorm, saved: list[Tensor]
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Returns dx, dgate, dweight."""
    parts = [
        run(gated_rms_norm_bwd, dy_rows, x, gate, call.weight, call.eps, call.gate is not None)
        for dy_rows, x, gate in zip(_pieces(dy), _pieces(call.x), _gate_pieces(call), strict=True)
    ]
    dx, *dgate, dweight = zip(*parts, strict=True)
    shape = call.x.shape
    dgate = None if call.gate is None else torch.cat(dgate[0]).reshape(shape)
    return torch.cat(dx).reshape(shape), dgate, torch.stack(dweight).sum(0)


def linear_cross_entropy_forward(call: Readout, *, save: bool) -> tuple[Tensor, list[Tensor]]:
    """Returns the mean loss; saves dhidden and dweight, times the number of targets, and that number.

    The kernels compute logsumexp(z) of each token and the gradients; z[target] is one product per token.
    """
    hidden, targets = call.hidden, call.targets
    w = call.weight.to(hidden.dtype)
    w_t = w.t().contiguous()
    kept = targets != call.ignore_index
    count = kept.sum().to(torch.float32).clamp(min=1)
    # the kernel compares goals with places as float32 numbers; a negative one does not count
    goals = targets.where(kept, -1).to(torch.float32)[:, None]
    named = w.index_select(0, targets.where(kept, 0))
    total = torch.zeros((), device=hidden.device)
    dhidden: list[Tensor] = []
    dweight: Tensor | None = None
    pieces = (y.split(READOUT_TOKENS) for y in (hidden, goals, named))
    for x, goal, at_goal in zip(*pieces, strict=True):
        if not x.shape[0]:
            continue
        x, x_t = x.contiguous(), x.t().contiguous()
        if save:
            lse, dx, dw = run(cross_entropy_bwd, x_t, x, w_t, w, goal)
            dhidden.append(dx)
            dweight = dw if dweight is None else dweight + dw
        else:
            lse = run(cross_entropy_fwd, x_t, w_t)
        loss = lse - (x.to(torch.float32) * at_goal.to(torch.float32)).sum(1, keepdim=True)
        total = total + (loss * (goal >= 0)).sum()
    if not save:
        return total / count, []
    if dweight is None:
        return total / count, [torch.zeros_like(hidden), w.to(torch.float32) * 0, count]
    return total / count, [torch.cat(dhidden), dweight, count]


def readout_block(width: int) -> int:
    """Returns how many words of the vocabulary the kernel takes at a time, each block in the same way."""
    return cross_entropy.cut_words(2**24, width)[0][1]


def _pieces(x: Tensor) -> tuple[Tensor, ...]:
    """Returns x as rows [M, N], as many in a piece as a kernel call takes."""
    N = x.shape[-1]
    return x.reshape(-1, N).split(max(1, plan.ELEMENTS // N))


def _gate_pieces(call: GatedNorm) -> tuple[Tensor, ...]:
    return (call.weight,) * len(_pieces(call.x)) if call.gate is None else _pieces(call.gate)


def _kernel_options(call: Convolution) -> tuple[Tensor | bool, ...]:
    """Returns the kernels' position, packed, prefix, continued."""
    places = call.weight if call.position is None else call.position.to(torch.int32)
    prefix = call.prefix if call.weight.shape[1] > 1 else None  # one tap looks back at nothing
    return places, call.position is not None, call.weight if prefix is None else prefix, prefix is not None
