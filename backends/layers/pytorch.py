"""The layers' operations in PyTorch, on any device: few passes over memory, gradients derived by hand.

Sums are float32, float64 for float64 inputs. What forward keeps besides its inputs: z of a float32
convolution, one number a row of the norms, the gradients of the cross-entropy. On a CPU with a C++ compiler
`cpu_kernel` computes float32 calls, and keeps no z.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from delta_trn.backends.layers import cpu_kernel
from delta_trn.backends.layers.contract import Convolution, GatedNorm, Readout, Shapes, SumNorm

# How many logits are in memory at a time: a CPU works from its caches, and a GPU is busy only with a thousand
# tokens of a large vocabulary. On Neuron every part adds a sum to dweight, and 2^28 hold a sequence of 4,096.
LOGITS = {"cpu": 2**20, "other": 2**26, "neuron": 2**28}
NEURON = ("xla", "neuron")


def short_convolution_forward(call: Convolution, *, save: bool) -> tuple[Tensor, list[Tensor]]:
    """Returns y; saves z of float32 inputs.

    W shifted multiply-adds take a quarter of the time of conv1d with groups on a CPU, forward and backward.
    """
    if cpu_kernel.takes_convolution(call):
        return cpu_kernel.convolution_forward(call), []
    x, weight = call.x, call.weight
    z = _convolve(_with_prefix(x, weight.shape[1], call.prefix), _taps(x, weight), call.position)
    y = (z if call.activation == "linear" else F.silu(z)).to(x.dtype)
    return y, [z] if save and _saves_z(call) else []


def short_convolution_saved_shapes(call: Convolution) -> Shapes:
    """Returns the shape of z, where it is saved."""
    return [(call.x.shape, call.x.dtype)] if _saves_z(call) else []


def short_convolution_backward(
    dy: Tensor, call: Convolution, saved: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns dx, dweight, dprefix."""
    if cpu_kernel.takes_convolution(call):
        return cpu_kernel.convolution_backward(dy, call)
    x, weight, position = call.x, call.weight, call.position
    full, W, T = _full(x.dtype), weight.shape[1], x.shape[1]
    joined, taps = _with_prefix(x, W, call.prefix), _taps(x, weight)
    dz = dy.to(full)
    if call.activation == "silu":
        z = saved[0] if saved else _convolve(joined, taps, position)
        dz = torch.ops.aten.silu_backward(dz, z)
    dx = dz.new_zeros(joined.shape)
    dtaps = []
    for j in range(W):
        part = _within_sequence(dz, position, W - 1 - j)
        dx[:, j : j + T].addcmul_(part, taps[j])
        dtaps.append((part * joined[:, j : j + T]).sum((0, 1)))
    dx = dx.to(x.dtype)
    dprefix = None if call.prefix is None else dx[:, : W - 1]
    return dx[:, W - 1 :], torch.stack(dtaps, dim=1).to(weight.dtype), dprefix


def gated_rms_norm_forward(call: GatedNorm, *, save: bool) -> tuple[Tensor, list[Tensor]]:
    """Returns y; saves the reciprocal norm of every row."""
    if cpu_kernel.takes(call.x, call.gate, call.weight):
        y, _, r = cpu_kernel.norm_forward(call)
        return y, [r] if save else []
    y, r = _normalize(call.x, call.weight, call.eps)
    if call.gate is not None:
        y = y * F.silu(call.gate.to(torch.promote_types(y.dtype, call.gate.dtype)))
    return y.to(call.x.dtype), [r] if save else []


def gated_rms_norm_saved_shapes(call: GatedNorm) -> Shapes:
    """Returns the shape of the reciprocal norms."""
    return [((*call.x.shape[:-1], 1), _full(call.x.dtype))]


def gated_rms_norm_backward(
    dy: Tensor, call: GatedNorm, saved: list[Tensor]
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Returns dx, dgate, dweight."""
    x, weight, (r,) = call.x, call.weight, saved
    if cpu_kernel.takes(dy, x, call.gate, weight):
        return cpu_kernel.norm_backward(dy, None, x, call.gate, weight, r)
    dn, dgate = dy.to(_full(x.dtype)), None
    if call.gate is not None:
        z = call.gate.to(torch.promote_types(dn.dtype, call.gate.dtype))
        dgate = torch.ops.aten.silu_backward(dn * ((x * r) * weight), z).to(call.gate.dtype)
        dn = dn * F.silu(z)
    dx, dweight = _norm_backward(dn, x, r, weight)
    return dx.to(x.dtype), dgate, dweight


def add_rms_norm_forward(call: SumNorm, *, save: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Returns y and total; saves the reciprocal norm of every row of total."""
    if cpu_kernel.takes(call.x, call.residual, call.weight):
        y, total, r = cpu_kernel.norm_forward(call)
        assert total is not None
        return y, total, [r] if save else []
    total = call.residual + call.x
    y, r = _normalize(total, call.weight, call.eps)
    return y.to(total.dtype), total, [r] if save else []


def add_rms_norm_saved_shapes(call: SumNorm) -> Shapes:
    """Returns the shape of the reciprocal norms."""
    return [((*call.residual.shape[:-1], 1), _full(call.residual.dtype))]


def add_rms_norm_backward(
    dy: Tensor, dtotal: Tensor, call: SumNorm, saved: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """Returns the gradient of the sum, and so of both its terms, and dweight."""
    total, r = saved
    if cpu_kernel.takes(dy, dtotal, total, call.weight):
        dx, _, dweight = cpu_kernel.norm_backward(dy, dtotal, total, None, call.weight, r)
        return dx, dweight
    dx, dweight = _norm_backward(dy.to(_full(total.dtype)), total, r, call.weight)
    return (dtotal + dx).to(total.dtype), dweight


def linear_cross_entropy_forward(call: Readout, *, save: bool) -> tuple[Tensor, list[Tensor]]:
    """Returns the mean loss; saves dhidden and dweight, times the number of targets, and that number."""
    softmax_ = cpu_kernel.softmax_ if cpu_kernel.takes(call.hidden) else _softmax_
    if call.hidden.device.type in NEURON:
        softmax_ = compare_softmax_
    return tokenwise_cross_entropy(call, save, softmax_)


def linear_cross_entropy_saved_shapes(call: Readout) -> Shapes:
    """Returns the shapes of dhidden, dweight and the number of targets."""
    full = _full(call.hidden.dtype)
    return [(call.hidden.shape, call.hidden.dtype), (call.weight.shape, full), ((), full)]


def linear_cross_entropy_backward(dloss: Tensor, call: Readout, saved: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Returns dhidden, and dweight in full precision."""
    dhidden, dweight, count = saved
    share = dloss / count
    return (dhidden * share).to(dhidden.dtype), dweight * share


def tokenwise_cross_entropy(
    call: Readout,
    save: bool,
    softmax_: Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor | None]],
) -> tuple[Tensor, list[Tensor]]:
    """Returns the mean loss, and what is saved, from the logits of some tokens at a time.

    softmax_(logits [n, vocabulary], targets [n, 1], kept [n, 1], save) returns the sum of their losses and,
    in the dtype of the logits, softmax(z) - onehot, zero where kept is.
    """
    hidden, weight = call.hidden, call.weight
    full = _full(hidden.dtype)
    w = weight.to(hidden.dtype)
    kept = call.targets != call.ignore_index
    targets = call.targets.where(kept, 0)[:, None]
    kept = kept.to(full)[:, None]
    count = kept.sum().clamp(min=1)
    total = torch.zeros((), dtype=full, device=hidden.device)
    dhidden = []
    dweight = None
    rows = count_tokens(hidden.device.type, weight.shape[0])
    for h, target, keep in zip(hidden.split(rows), targets.split(rows), kept.split(rows), strict=True):
        loss, dz = softmax_(h @ w.t(), target, keep, save)
        total += loss
        if save and dz is not None:
            dhidden.append(dz @ w)
            product = dz.t() @ h
            dweight = product.to(full) if dweight is None else dweight.add_(product)
    return total / count, [] if dweight is None else [torch.cat(dhidden), dweight, count]


def count_tokens(device: str, vocabulary: int) -> int:
    """Returns of how many tokens the logits are in memory at a time; whole tiles of 128 on Neuron."""
    if device in NEURON:
        return max(LOGITS["neuron"] // vocabulary // 128, 1) * 128
    return max(LOGITS["cpu" if device == "cpu" else "other"] // vocabulary, 1)


def compare_softmax_(
    logits: Tensor, target: Tensor, keep: Tensor, save: bool
) -> tuple[Tensor, Tensor | None]:
    """Computes what `_softmax_` does without a gather or a scatter, for Neuron, where it has not yet run."""
    log_p = torch.log_softmax(logits.to(keep.dtype), dim=1)
    here = target == torch.arange(logits.shape[1], device=logits.device)
    loss = -(log_p.masked_fill(~here, 0.0) * keep).sum()
    dz = ((log_p.exp() - here.to(log_p.dtype)) * keep).to(logits.dtype) if save else None
    return loss, dz


def _softmax_(logits: Tensor, target: Tensor, keep: Tensor, save: bool) -> tuple[Tensor, Tensor | None]:
    log_p = torch.log_softmax(logits.to(keep.dtype), dim=1)
    loss = -(log_p.gather(1, target) * keep).sum()
    # the mean's 1 / count comes last, where it cannot underflow
    dz = log_p.exp_().mul_(keep).scatter_add_(1, target, -keep).to(logits.dtype) if save else None
    return loss, dz


def _norm_backward(dn: Tensor, x: Tensor, r: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """With h = x r, n = dn w:  dx = r (n - h mean(n h)),  dw = sum(dn h)."""
    h = x * r
    dweight = (dn * h).sum(tuple(range(dn.dim() - 1)))
    n = dn * weight
    along = (n * h).mean(-1, keepdim=True)
    return n.addcmul_(h, along, value=-1).mul_(r), dweight.to(weight.dtype)


def _normalize(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns weight x / |x| and the reciprocal norm of every row, in full precision."""
    full = x.to(_full(x.dtype))
    r = torch.rsqrt(full.square().mean(-1, keepdim=True) + eps)
    return (full * r).mul_(weight), r


def _convolve(joined: Tensor, taps: Tensor, position: Tensor | None) -> Tensor:
    """Returns z [B, T, C] in full precision."""
    W, T = taps.shape[0], joined.shape[1] - taps.shape[0] + 1
    z = joined[:, W - 1 :] * taps[W - 1]
    for j in range(W - 1):
        z.addcmul_(_within_sequence(joined[:, j : j + T], position, W - 1 - j), taps[j])
    return z


def _saves_z(call: Convolution) -> bool:
    """Returns whether z is saved: only for wide inputs.

    Rounded to a narrower dtype, z would make the error of dweight a thousand times as large.
    """
    wide = call.x.dtype == _full(call.x.dtype)
    return call.activation == "silu" and wide and not cpu_kernel.takes_convolution(call)


def _with_prefix(x: Tensor, W: int, prefix: Tensor | None) -> Tensor:
    """Returns [B, W - 1 + T, C]: what came before, or zeros, then x."""
    return F.pad(x, (0, 0, W - 1, 0)) if prefix is None else torch.cat([prefix, x], dim=1)


def _taps(x: Tensor, weight: Tensor) -> Tensor:
    return weight.to(_full(x.dtype)).t().contiguous()


def _within_sequence(part: Tensor, position: Tensor | None, back: int) -> Tensor:
    """Returns `part`, zero for tokens with fewer than `back` others before them in their sequence."""
    return part if position is None or back == 0 else part * (position >= back)[:, None]


def _full(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
