"""What follows from a tensor of boundaries is computed once,
not in every layer and again in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

Made = TypeVar("Made")
# tensor -> its version -> what was made of it; goes with the tensor
_MADE: WeakIdKeyDictionary = WeakIdKeyDictionary()


def once(x: Tensor, key: Hashable, make: Callable[[], Made]) -> Made:
    """Returns make(), or what it returned for this tensor and key, while nobody has written to x.

    What counts as a write is what torch counts: operations in place, as copy_, and set_. A write
    through x.data, or by another library that shares the memory, as DLPack's do, is not seen. On a
    CPU nothing is kept, since loaders refill NumPy's buffers, and to make it again waits for
    nothing.

    make must depend on nothing else, and its result must not hold x, which would live for ever.
    Where a CUDA graph is captured, it is called: the graph's own launches must follow an x that
    changes between replays, and what they write is of use to no one else. So it is where torch
    keeps no count of writes, in inference mode, and once for each stream.

        >>> x = torch.tensor([1, 2])
        >>> [once(x, "sum", lambda: int(x.sum())) for _ in range(2) if x.add_(1) is not None]
        [5, 7]
    """
    if not _keeps(x):
        return make()
    stream = None
    if x.is_cuda:
        if torch.cuda.is_current_stream_capturing():
            return make()
        stream = torch.cuda.current_stream(x.device).cuda_stream
    if x.is_inference():
        return make()
    if x not in _MADE or _MADE[x][0] != x._version:
        _MADE[x] = x._version, {}
    made = _MADE[x][1]
    if (stream, key) not in made:
        made[stream, key] = make()
    return made[stream, key]


def _keeps(x: Tensor) -> bool:
    """Returns whether it would wait for a device to make again what follows from x."""
    return x.device.type != "cpu"
