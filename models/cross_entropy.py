"""Cross-entropy of a linear readout, without ever keeping the logits of all tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# How many logits at once. A CPU works from its caches, a GPU wants a thousand tokens of a large vocabulary.
AT_ONCE = {"cpu": 2**20, "other": 2**26}


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, multiplier: float, ignore_index: int = -100
) -> Tensor:
    """mean over targets != ignore_index of  logsumexp(z) - z[target],  z = multiplier W h.

        hidden      [N, d]
        weight      [vocabulary, d]
        targets     [N] int64
        returns     [] float32 (float64 for float64), nats; 0 if every target is ignored

    Gradients are computed together with the loss, chunk by chunk: one softmax, no recomputation, no stored
    logits. Products are in the dtype of `hidden`, under autocast in its; everything else is in float32.
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        hidden = hidden.to(torch.get_autocast_dtype(device))
    gradients = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    with torch.autocast(device, enabled=False):
        return _LinearCrossEntropy.apply(hidden * multiplier, weight, targets, ignore_index, gradients)  # type: ignore[no-any-return]


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, gradients: bool
    ) -> Tensor:
        full = torch.promote_types(hidden.dtype, torch.float32)
        w = weight.to(hidden.dtype)
        kept = targets != ignore_index
        goals = targets.where(kept, 0)[:, None]
        kept = kept.to(full)[:, None]
        count = kept.sum().clamp(min=1)
        total = torch.zeros((), dtype=full, device=hidden.device)
        dhidden = []
        dweight = torch.zeros(weight.shape, dtype=full, device=weight.device) if gradients else None
        chunk = max(AT_ONCE["cpu" if hidden.device.type == "cpu" else "other"] // weight.shape[0], 1)
        for h, goal, keep in zip(hidden.split(chunk), goals.split(chunk), kept.split(chunk), strict=True):
            log_p = torch.log_softmax((h @ w.t()).to(full), dim=1)
            total -= (log_p.gather(1, goal) * keep).sum()
            if dweight is not None:
                # dz = softmax(z) - onehot; the mean's 1 / count comes last, where it cannot underflow
                dz = log_p.exp_().mul_(keep).scatter_add_(1, goal, -keep)
                dz = dz.to(hidden.dtype)
                dhidden.append(dz @ w)
                dweight += dz.t() @ h
        if dweight is not None:
            ctx.dtypes = hidden.dtype, weight.dtype
            ctx.save_for_backward(torch.cat(dhidden), dweight, count)
        return total / count

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        dhidden, dweight, count = ctx.saved_tensors
        share = dloss / count
        return (dhidden * share).to(ctx.dtypes[0]), (dweight * share).to(ctx.dtypes[1]), None, None, None
