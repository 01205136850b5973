"""Collectives, by gloo; `calls` counts them."""

from collections import Counter

import torch
import torch.distributed as dist
from torch import Tensor

REDUCE_SUM = "sum"
calls: Counter[str] = Counter()


def all_reduce(
    reduce_type: str,
    inputs: Tensor | list[Tensor],
    scale: float = 1.0,
    groups: list[list[int]] | None = None,
    pin_layout: bool = True,
) -> Tensor | list[Tensor]:
    """Returns a new tensor for a tensor, and changes those of a list."""
    assert reduce_type == REDUCE_SUM and groups is None
    calls["all_reduce"] += 1
    if isinstance(inputs, Tensor):
        total = inputs.clone()
        dist.all_reduce(total)
        return total * scale
    with torch.no_grad():
        for x in inputs:
            dist.all_reduce(x)
            x.mul_(scale)
    return inputs


def collective_broadcast(
    tensors: list[Tensor],
    root_ordinal: int = 0,
    groups: list[list[int]] | None = None,
    pin_layout: bool = True,
) -> None:
    """As the package does it: all but the root's values become 0, and all are summed."""
    calls["collective_broadcast"] += 1
    with torch.no_grad():
        for x in tensors:
            x.mul_(dist.get_rank() == root_ordinal)
    all_reduce(REDUCE_SUM, tensors, groups=groups, pin_layout=pin_layout)
