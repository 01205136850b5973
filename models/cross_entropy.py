"""Cross-entropy of a linear readout, without ever keeping the logits of all tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from delta_trn import backends


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, multiplier: float, ignore_index: int = -100
) -> Tensor:
    """`backends.linear_cross_entropy` of the logits multiplier W h.

        hidden      [N, d]
        weight      [vocabulary, d]
        targets     [N] int64
        returns     [] float32 (float64 for float64), nats; 0 if every target is ignored

    Products are in the dtype of `hidden`, under autocast in its; everything else is in float32.
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        hidden = hidden.to(torch.get_autocast_dtype(device))
    with torch.autocast(device, enabled=False):
        hidden = hidden * multiplier
    return backends.linear_cross_entropy(hidden, weight, targets, ignore_index=ignore_index)
