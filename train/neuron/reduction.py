"""Data parallelism on XLA: one all-reduce for each flat bucket of gradients, in the graph of the
update.

AWS asks for torch's DistributedDataParallel to be removed: it reduces by hooks between graphs, and
each of 32 processes then compiles a graph of its own (torch-neuronx's release notes and its
programming guide).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from delta_trn.backends import machine
from delta_trn.train.settings.errors import ConfigError

# AWS's own variable and its default, in MB of 2^20 bytes
VARIABLE, DEFAULT = "ALLREDUCE_GRADIENTS_BUCKET_SIZE_MB", 50


def replica_groups(world: int, tensor: int) -> list[list[int]] | None:
    """Returns the ranks that have the same part of the model, group by group; None where all have
    it.

    >>> replica_groups(4, 2)
    [[0, 2], [1, 3]]
    """
    return None if tensor == 1 else [list(range(first, world, tensor)) for first in range(tensor)]


def bucket_bytes() -> int:
    """Returns the largest size of a bucket. ConfigError
    where its variable is no positive whole number.
    """
    text = os.environ.get(VARIABLE, str(DEFAULT))
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(
            f"{VARIABLE}={text}: expected a whole number of MB from 1, or none for {DEFAULT}"
        )
    return int(text) * 2**20


def buckets(gradients: Iterable[Tensor], most: int) -> Iterator[list[Tensor]]:
    """Yields gradients of one dtype and at most `most` bytes together; a larger one is alone.

    They come last first, as a backward pass finishes them, so that reductions can overlap with it.
    """
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        by_dtype.setdefault(gradient.dtype, []).append(gradient)
    for same in by_dtype.values():
        bucket: list[Tensor] = []
        filled = 0
        for gradient in reversed(same):
            size = gradient.numel() * gradient.element_size()
            if bucket and filled + size > most:
                yield bucket
                bucket, filled = [], 0
            bucket.append(gradient)
            filled += size
        yield bucket


@torch.no_grad()
def average(
    parameters: Iterable[nn.Parameter], count: int, groups: list[list[int]] | None, most: int
) -> None:
    """Replaces each gradient by its mean over the `count` processes of this one's group.

    most    bytes of a bucket, see `buckets`

    All processes must have gradients of the same parameters, which they have where they trace one
    program.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    for bucket in buckets(gradients, most):
        flat = torch.cat([gradient.flatten() for gradient in bucket])
        means = machine.all_reduce(flat, scale=1 / count, groups=groups)
        for gradient, mean in zip(bucket, means.split([g.numel() for g in bucket]), strict=True):
            gradient.copy_(mean.view_as(gradient))
