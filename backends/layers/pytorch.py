"""The layers' operations in PyTorch, on any device: few passes over memory, gradients derived by hand.

Sums are float32, float64 for float64 inputs. What forward keeps besides its inputs: z of a float32
convolution, one number a row of the norms, the gradients of the cross-entropy.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

# How many logits at once. A CPU works from its caches, a GPU wants a thousand tokens of a large vocabulary.
AT_ONCE = {"cpu": 2**20, "other": 2**26}


def short_convolution_forward(
    x: Tensor, weight: Tensor, prefix: Tensor | None, position: Tensor | None, activation: str, save: bool
) -> tuple[Tensor, ...]:
    """W shifted multiply-adds: on a CPU a quarter of the time of conv1d with groups, forward and backward."""
    z = _convolved(_joined(x, weight.shape[1], prefix), _taps(x, weight), position)
    if activation == "linear":
        return (z.to(x.dtype),)
    y = F.silu(z).to(x.dtype)
    return (y, z) if _keeps_z(x, activation, save) else (y,)


def short_convolution_saved(
    x: Tensor, weight: Tensor, prefix: Tensor | None, position: Tensor | None, activation: str, save: bool
) -> list[tuple[torch.Size, torch.dtype]]:
    """z."""
    return [(x.shape, x.dtype)] if _keeps_z(x, activation, save) else []


def short_convolution_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    prefix: Tensor | None,
    position: Tensor | None,
    *kept: Tensor | str | bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """dx, dweight, dprefix; `kept` ends in the two options."""
    full, W, T = _full(x.dtype), weight.shape[1], x.shape[1]
    joined, taps = _joined(x, W, prefix), _taps(x, weight)
    dz = dy.to(full)
    if kept[-2] == "silu":
        z = kept[0] if isinstance(kept[0], Tensor) else _convolved(joined, taps, position)
        dz = torch.ops.aten.silu_backward(dz, z)
    dx = dz.new_zeros(joined.shape)
    dtaps = []
    for j in range(W):
        part = _own(dz, position, W - 1 - j)
        dx[:, j : j + T].addcmul_(part, taps[j])
        dtaps.append((part * joined[:, j : j + T]).sum((0, 1)))
    dx = dx.to(x.dtype)
    dprefix = None if prefix is None else dx[:, : W - 1]
    return dx[:, W - 1 :], torch.stack(dtaps, dim=1).to(weight.dtype), dprefix


def gated_rms_norm_forward(
    x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, save: bool
) -> tuple[Tensor, ...]:
    """y, and r of every row, which backward wants."""
    full = x.to(_full(x.dtype))
    r = _reciprocal_norm(full, eps)
    y = (full * r).mul_(weight)
    if gate is not None:
        y = y * F.silu(gate.to(_full(gate.dtype)))
    return y.to(x.dtype), *([r] if save else [])


def gated_rms_norm_saved(
    x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, save: bool
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """r."""
    return [((*x.shape[:-1], 1), _full(x.dtype))] if save else []


def gated_rms_norm_backward(
    dy: Tensor, x: Tensor, gate: Tensor | None, weight: Tensor, r: Tensor, eps: float, save: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """dx, dgate, dweight."""
    dn, dgate = dy.to(_full(x.dtype)), None
    if gate is not None:
        z = gate.to(_full(gate.dtype))
        dgate = torch.ops.aten.silu_backward(dn * ((x * r) * weight), z).to(gate.dtype)
        dn = dn * F.silu(z)
    dx, dweight = _norm_backward(dn, x, r, weight)
    return dx.to(x.dtype), dgate, dweight


def add_rms_norm_forward(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, save: bool
) -> tuple[Tensor, ...]:
    """y, total, and r of every row of total."""
    total = residual + x
    y, *kept = gated_rms_norm_forward(total, None, weight, eps, save)
    return y, total, *kept


def add_rms_norm_saved(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, save: bool
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """r."""
    return gated_rms_norm_saved(residual, None, weight, eps, save)


def add_rms_norm_backward(
    dy: Tensor, dtotal: Tensor, total: Tensor, weight: Tensor, r: Tensor, eps: float, save: bool
) -> tuple[Tensor, Tensor]:
    """The gradient of the sum, and so of both its terms; dweight."""
    dx, dweight = _norm_backward(dy.to(_full(total.dtype)), total, r, weight)
    return dtotal + dx.to(total.dtype), dweight


def linear_cross_entropy_forward(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, save: bool
) -> tuple[Tensor, ...]:
    """The mean loss, and where asked for dhidden, dweight, both times count, and count."""
    return tokenwise_cross_entropy(hidden, weight, targets, ignore_index, save, _softmax_)


def linear_cross_entropy_saved(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, save: bool
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """dhidden, dweight, count."""
    full = _full(hidden.dtype)
    return [(hidden.shape, hidden.dtype), (weight.shape, full), ((), full)] if save else []


def linear_cross_entropy_backward(
    dloss: Tensor, dhidden: Tensor, dweight: Tensor, count: Tensor, ignore_index: int, save: bool
) -> tuple[Tensor, Tensor]:
    """dhidden, and dweight in full precision."""
    share = dloss / count
    return (dhidden * share).to(dhidden.dtype), dweight * share


def tokenwise_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int,
    save: bool,
    softmax_: Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor | None]],
) -> tuple[Tensor, ...]:
    """Some tokens at a time; softmax_(logits [n, vocabulary], targets [n, 1], kept [n, 1], save) gives the
    sum of their losses and, in the dtype of the logits, softmax(z) - onehot, zero where kept is.
    """
    full = _full(hidden.dtype)
    w = weight.to(hidden.dtype)
    kept = targets != ignore_index
    goals = targets.where(kept, 0)[:, None]
    kept = kept.to(full)[:, None]
    count = kept.sum().clamp(min=1)
    total = torch.zeros((), dtype=full, device=hidden.device)
    dhidden = []
    dweight = torch.zeros(weight.shape, dtype=full, device=weight.device) if save else None
    chunk = max(AT_ONCE["cpu" if hidden.device.type == "cpu" else "other"] // weight.shape[0], 1)
    for h, goal, keep in zip(hidden.split(chunk), goals.split(chunk), kept.split(chunk), strict=True):
        loss, dz = softmax_(h @ w.t(), goal, keep, save)
        total += loss
        if dweight is not None and dz is not None:
            dhidden.append(dz @ w)
            dweight += dz.t() @ h
    if dweight is None:
        return (total / count,)
    return total / count, torch.cat(dhidden), dweight, count


def _softmax_(logits: Tensor, goal: Tensor, keep: Tensor, save: bool) -> tuple[Tensor, Tensor | None]:
    log_p = torch.log_softmax(logits.to(keep.dtype), dim=1)
    loss = -(log_p.gather(1, goal) * keep).sum()
    # the mean's 1 / count comes last, where it cannot underflow
    dz = log_p.exp_().mul_(keep).scatter_add_(1, goal, -keep).to(logits.dtype) if save else None
    return loss, dz


def _norm_backward(dn: Tensor, x: Tensor, r: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """With h = x r, n = dn w:  dx = r (n - h mean(n h)),  dw = sum(dn h)."""
    h = x * r
    dweight = (dn * h).sum(tuple(range(dn.dim() - 1)))
    n = dn * weight
    along = (n * h).mean(-1, keepdim=True)
    return n.addcmul_(h, along, value=-1).mul_(r), dweight.to(weight.dtype)


def _reciprocal_norm(x: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _convolved(joined: Tensor, taps: Tensor, position: Tensor | None) -> Tensor:
    """z [B, T, C] in full precision."""
    W, T = taps.shape[0], joined.shape[1] - taps.shape[0] + 1
    z = joined[:, W - 1 :] * taps[W - 1]
    for j in range(W - 1):
        z.addcmul_(_own(joined[:, j : j + T], position, W - 1 - j), taps[j])
    return z


def _keeps_z(x: Tensor, activation: str, save: bool) -> bool:
    """Narrower inputs make it again: rounded to them it would cost dweight a thousand times its error."""
    return save and activation == "silu" and x.dtype == _full(x.dtype)


def _joined(x: Tensor, W: int, prefix: Tensor | None) -> Tensor:
    """[B, W - 1 + T, C]: what came before, or zeros, then x."""
    return F.pad(x, (0, 0, W - 1, 0)) if prefix is None else torch.cat([prefix, x], dim=1)


def _taps(x: Tensor, weight: Tensor) -> Tensor:
    return weight.to(_full(x.dtype)).t().contiguous()


def _own(part: Tensor, position: Tensor | None, back: int) -> Tensor:
    """[B, T, C], zero for tokens that do not have `back` others before them in their sequence."""
    return part if position is None or back == 0 else part * (position >= back)[:, None]


def _full(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
