"""The layers' operations in PyTorch, on any device.

Sums are float32, float64 for float64 inputs. Forward keeps the gradients of the cross-entropy; of
the others backward computes everything again, and autograd finds the gradients. On a CPU with a C++
compiler `cpu_kernel` computes float32 calls, and keeps one number a row of the norms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from delta_trn.backends.gated_delta_rule.contract import state_dtype
from delta_trn.backends.layers import cpu_kernel
from delta_trn.backends.layers.contract import Convolution, GatedNorm, Readout, Shapes, SumNorm

# How many logits are in memory at a time: a CPU works from its caches, and a GPU is busy only with
# a thousand tokens of a large vocabulary. On Neuron every part adds a sum to dweight, and 2^28 hold
# a sequence of 4,096.
LOGITS = {"cpu": 2**20, "other": 2**26, "neuron": 2**28}
NEURON = ("xla", "neuron")
TAKES_SUBCLASSES = ("short_convolution", "gated_rms_norm", "add_rms_norm")


def short_convolution_forward(call: Convolution, *, save: bool) -> tuple[Tensor, list[Tensor]]:
    """Returns y."""
    if cpu_kernel.takes_convolution(call):
        return cpu_kernel.convolution_forward(call), []
    return _convolve(call), []


def short_convolution_backward(
    dy: Tensor, call: Convolution, saved: list[Tensor]
) -> tuple[Tensor | None, ...]:
    """Returns dx, dweight, dprefix."""
    if cpu_kernel.takes_convolution(call):
        return cpu_kernel.convolution_backward(dy, call)
    return _differentiate(_convolve, call, ("x", "weight", "prefix"), [dy])


def gated_rms_norm_forward(call: GatedNorm, *, save: bool) -> tuple[Tensor, list[Tensor]]:
    """Returns y; saves the reciprocal norm of every row where the C++ kernel computes it."""
    if cpu_kernel.takes(call.x, call.gate, call.weight):
        y, _, r = cpu_kernel.norm_forward(call)
        return y, [r] if save else []
    return _gated_norm(call), []


def gated_rms_norm_saved_shapes(call: GatedNorm) -> Shapes:
    """Returns the shape of the reciprocal norms."""
    kernel = cpu_kernel.takes(call.x, call.gate, call.weight)
    return [((*call.x.shape[:-1], 1), call.x.dtype)] if kernel else []


def gated_rms_norm_backward(
    dy: Tensor, call: GatedNorm, saved: list[Tensor]
) -> tuple[Tensor | None, ...]:
    """Returns dx, dgate, dweight."""
    if saved:
        silu = call.activation == "swish"
        return cpu_kernel.norm_backward(
            dy, None, call.x, call.gate, call.weight, saved[0], silu=silu
        )
    return _differentiate(_gated_norm, call, ("x", "gate", "weight"), [dy])


def add_rms_norm_forward(call: SumNorm, *, save: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Returns y and total; saves the reciprocal norms of total for the C++ kernel,
    and for Neuron's host.
    """
    if cpu_kernel.takes(call.x, call.residual, call.weight):
        y, total, r = cpu_kernel.norm_forward(call)
        assert total is not None
        return y, total, [r] if save else []
    total = call.residual + call.x
    y, root = _norm(total, call.weight, call.eps)
    return y.to(total.dtype), total, [root] if save and total.device.type in NEURON else []


def add_rms_norm_saved_shapes(call: SumNorm) -> Shapes:
    """Returns the shape of the reciprocal norms."""
    keeps = call.residual.device.type in NEURON or cpu_kernel.takes(
        call.x, call.residual, call.weight
    )
    return [((*call.residual.shape[:-1], 1), state_dtype(call.residual.dtype))] if keeps else []


def add_rms_norm_backward(
    dy: Tensor, dtotal: Tensor, call: SumNorm, saved: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """Returns the gradient of the sum, and so of both its terms, and dweight."""
    total, *r = saved
    if r and total.device.type not in NEURON:
        dx, _, dweight = cpu_kernel.norm_backward(dy, dtotal, total, None, call.weight, r[0])
        return dx, dweight
    x = total.to(state_dtype(total.dtype))
    root = r[0] if r else torch.rsqrt(x.square().mean(-1, keepdim=True) + call.eps)
    h, dy = x * root, dy.to(x.dtype)
    n = dy * call.weight
    dx = (n - h * (n * h).mean(-1, keepdim=True)) * root
    dweight = (dy * h).sum(tuple(range(x.dim() - 1)))
    return (dtotal + dx).to(total.dtype), dweight.to(call.weight.dtype)


def linear_cross_entropy_forward(call: Readout, *, save: bool) -> tuple[Tensor, list[Tensor]]:
    """Returns the mean loss; saves dhidden and dweight, times the number of targets,
    and that number.
    """
    softmax_ = cpu_kernel.softmax_ if cpu_kernel.takes(call.hidden) else _softmax_
    if call.hidden.device.type in NEURON:
        softmax_ = compare_softmax_
    return tokenwise_cross_entropy(call, save, softmax_)


def linear_cross_entropy_saved_shapes(call: Readout) -> Shapes:
    """Returns the shapes of dhidden, dweight and the number of targets."""
    full = state_dtype(call.hidden.dtype)
    return [(call.hidden.shape, call.hidden.dtype), (call.weight.shape, full), ((), full)]


def linear_cross_entropy_backward(
    dloss: Tensor, call: Readout, saved: list[Tensor]
) -> tuple[Tensor, Tensor]:
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

    softmax_(logits [n, vocabulary], targets [n, 1], kept [n, 1], save) returns the sum of their
    losses and, in the dtype of the logits, softmax(z) - onehot, zero where kept is.
    """
    hidden, weight = call.hidden, call.weight
    full = state_dtype(hidden.dtype)
    w = weight.to(hidden.dtype)
    kept = call.targets != call.ignore_index
    targets = call.targets.where(kept, 0)[:, None]
    kept = kept.to(full)[:, None]
    count = kept.sum().clamp(min=1)
    total = torch.zeros((), dtype=full, device=hidden.device)
    dhidden = []
    dweight = None
    rows = count_tokens(hidden.device.type, weight.shape[0])
    for h, target, keep in zip(
        hidden.split(rows), targets.split(rows), kept.split(rows), strict=True
    ):
        loss, dz = softmax_(h @ w.t(), target, keep, save)
        total += loss
        if save and dz is not None:
            dhidden.append(dz @ w)
            product = dz.t() @ h
            dweight = product.to(full) if dweight is None else dweight.add_(product)
    return total / count, [] if dweight is None else [torch.cat(dhidden), dweight, count]


def count_tokens(device: str, vocabulary: int) -> int:
    """Returns of how many tokens the logits are in memory at a time;
    whole tiles of 128 on Neuron.
    """
    if device in NEURON:
        return max(LOGITS["neuron"] // vocabulary // 128, 1) * 128
    return max(LOGITS["cpu" if device == "cpu" else "other"] // vocabulary, 1)


def compare_softmax_(
    logits: Tensor, target: Tensor, keep: Tensor, save: bool
) -> tuple[Tensor, Tensor | None]:
    """Computes what `_softmax_` does without a gather or a scatter, for Neuron,
    where it has not yet run.
    """
    log_p = torch.log_softmax(logits.to(keep.dtype), dim=1)
    here = target == torch.arange(logits.shape[1], device=logits.device)
    loss = -(log_p.masked_fill(~here, 0.0) * keep).sum()
    dz = ((log_p.exp() - here.to(log_p.dtype)) * keep).to(logits.dtype) if save else None
    return loss, dz


def _softmax_(
    logits: Tensor, target: Tensor, keep: Tensor, save: bool
) -> tuple[Tensor, Tensor | None]:
    log_p = torch.log_softmax(logits.to(keep.dtype), dim=1)
    loss = -(log_p.gather(1, target) * keep).sum()
    # the mean's 1 / count comes last, where it cannot underflow
    dz = log_p.exp_().mul_(keep).scatter_add_(1, target, -keep).to(logits.dtype) if save else None
    return loss, dz


def _differentiate(
    compute: Callable[[Any], Tensor], call: Any, names: Sequence[str], douts: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Returns the gradients of the call's tensors of these names;
    None for those that are absent.
    """
    given = {name: getattr(call, name) for name in names}
    leaves = {name: x.detach().requires_grad_() for name, x in given.items() if x is not None}
    with torch.enable_grad():
        y = compute(replace(call, **leaves))
    gradients = torch.autograd.grad([y], list(leaves.values()), list(douts), materialize_grads=True)
    by_name = dict(zip(leaves, gradients, strict=True))
    return tuple(by_name.get(name) for name in names)


def _gated_norm(call: GatedNorm) -> Tensor:
    """Returns weight x / |x|, times SiLU or the sigmoid of the gate."""
    y = _norm(call.x, call.weight, call.eps)[0]
    if call.gate is not None:
        z = call.gate.to(torch.promote_types(y.dtype, call.gate.dtype))
        y = y * (z.sigmoid() if call.activation == "sigmoid" else F.silu(z))
    return y.to(call.x.dtype)


def _norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns weight x / |x|, and the reciprocals of the rows' norms."""
    x = x.to(state_dtype(x.dtype))
    root = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x * root * weight, root


def _convolve(call: Convolution) -> Tensor:
    """Returns y: W shifted multiply-adds take a quarter of the time
    of conv1d with groups on a CPU.
    """
    x, weight, position = call.x.to(state_dtype(call.x.dtype)), call.weight, call.position
    W, T = weight.shape[1], x.shape[1]
    before = (
        x.new_zeros((x.shape[0], W - 1, x.shape[2]))
        if call.prefix is None
        else call.prefix.to(x.dtype)
    )
    joined, taps = torch.cat([before, x], 1), weight.to(x.dtype).t()
    z = x * taps[W - 1]
    for j in range(W - 1):
        part = joined[:, j : j + T]
        if position is not None:  # 0 for tokens with fewer others before them in their sequence
            part = part * (position >= W - 1 - j)[:, None]
        z = z + part * taps[j]
    return (z if call.activation == "linear" else F.silu(z)).to(call.x.dtype)
