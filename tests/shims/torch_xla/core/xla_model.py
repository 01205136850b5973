"""Collectives over groups of ranks, which gloo makes of its own; `calls` counts them."""

from collections import Counter
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

REDUCE_SUM = "sum"
calls: Counter[str] = Counter()


@cache
def _group(groups: tuple[tuple[int, ...], ...]) -> dist.ProcessGroup | None:
    """Returns this process's group. All processes make all groups, in one order."""
    made = {ranks: dist.new_group(list(ranks), backend="gloo") for ranks in groups}
    return next((group for ranks, group in made.items() if dist.get_rank() in ranks), None)


def all_reduce(
    reduce_type: str,
    inputs: Tensor | list[Tensor],
    scale: float = 1.0,
    groups: list[list[int]] | None = None,
    pin_layout: bool = True,
) -> Tensor | list[Tensor]:
    """Returns a new tensor for a tensor, and changes those of a list."""
    assert reduce_type == REDUCE_SUM
    calls["all_reduce"] += 1
    group = _group(tuple(map(tuple, groups))) if groups else None
    if isinstance(inputs, Tensor):
        total = inputs.clone()
        dist.all_reduce(total, group=group)
        return total * scale
    with torch.no_grad():
        for x in inputs:
            dist.all_reduce(x, group=group)
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
