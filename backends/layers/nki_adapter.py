"""NKI's side of the layers' operations that have a kernel: short convolution, gated RMS norm,
cross-entropy.

Only the cross-entropy saves more than its inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from delta_trn.backends.layers.contract import Convolution, GatedNorm, Readout
from delta_trn.backends.layers.pytorch import (
    linear_cross_entropy_backward,
    linear_cross_entropy_saved_shapes,
)
from delta_trn.backends.nki_runtime_adapter import (
    require_norms_within_rsqrt,
    require_within_rsqrt,
    run,
)
from delta_trn.nki_kernels import cross_entropy, plan
from delta_trn.nki_kernels.cross_entropy import cross_entropy_bwd, cross_entropy_fwd
from delta_trn.nki_kernels.gated_rms_norm import gated_rms_norm_bwd, gated_rms_norm_fwd
from delta_trn.nki_kernels.short_convolution import short_convolution_bwd, short_convolution_fwd

__all__ = ["linear_cross_entropy_backward", "linear_cross_entropy_saved_shapes"]


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

    The kernel knows SiLU of a gate. PyTorch multiplies by a sigmoid, in float32, what the kernel
    normalizes. Raises BackendRefusal for an eps, or norms of rows, that rsqrt does not take.
    """
    require_within_rsqrt("eps", call.eps, plan.LEAST_RSQRT)
    require_norms_within_rsqrt({"x": call.x}, call.eps)
    if call.activation == "sigmoid":
        assert call.gate is not None
        normed = run(gated_rms_norm_fwd, call.x.float(), None, call.weight, call.eps, False)
        return (normed * call.gate.float().sigmoid()).to(call.x.dtype), []
    return run(
        gated_rms_norm_fwd, call.x, call.gate, call.weight, call.eps, call.gate is not None
    ), []


def gated_rms_norm_backward(
    dy: Tensor, call: GatedNorm, saved: list[Tensor]
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Returns dx, dgate, dweight."""
    if call.activation == "sigmoid":
        assert call.gate is not None
        x, z, dy = (y.float() for y in (call.x, call.gate, dy))
        opened = z.sigmoid()
        normed = run(gated_rms_norm_fwd, x, None, call.weight, call.eps, False)
        dx, dweight = run(gated_rms_norm_bwd, dy * opened, x, None, call.weight, call.eps, False)
        dgate = dy * normed * (opened * (-z).sigmoid())  # 1 - sigmoid would lose digits
        return dx.to(call.x.dtype), dgate.to(call.gate.dtype), dweight
    gated = call.gate is not None
    dx, *dgate, dweight = run(
        gated_rms_norm_bwd, dy, call.x, call.gate, call.weight, call.eps, gated
    )
    return dx, dgate[0] if gated else None, dweight


def linear_cross_entropy_forward(call: Readout, *, save: bool) -> tuple[Tensor, list[Tensor]]:
    """Returns the mean loss; saves dhidden and dweight, times the number of targets, and that
    number.

    The kernels compute logsumexp(z) of each token and the gradients; z[target] is one product per
    token.
    """
    hidden, targets = call.hidden, call.targets
    w = call.weight.to(hidden.dtype)
    w_t = w.t().contiguous()
    kept = targets != call.ignore_index
    count = kept.sum().to(torch.float32).clamp(min=1)
    # the kernel compares goals with places as float32 numbers; a negative one does not count
    goals = targets.where(kept, -1).to(torch.float32)[:, None]
    named = w.index_select(0, targets.where(kept, 0))
    saved: list[Tensor] = []
    if save:
        lse, *saved = run(cross_entropy_bwd, hidden.t().contiguous(), hidden, w_t, w, goals)
        saved.append(count)
    else:
        lse = run(cross_entropy_fwd, hidden.t().contiguous(), w_t)
    loss = lse - (hidden.to(torch.float32) * named.to(torch.float32)).sum(1, keepdim=True)
    return (loss * (goals >= 0)).sum() / count, saved


def readout_block(width: int) -> int:
    """Returns how many words of the vocabulary the kernel takes at a time,
    each block in the same way.
    """
    return cross_entropy.cut_words(2**24, width)[0][1]


def _kernel_options(call: Convolution) -> tuple[Tensor | bool | None, ...]:
    """Returns the kernels' position, packed, prefix, continued."""
    places = None if call.position is None else call.position.to(torch.int32)
    prefix = call.prefix if call.weight.shape[1] > 1 else None  # one tap looks back at nothing
    return places, places is not None, prefix, prefix is not None
