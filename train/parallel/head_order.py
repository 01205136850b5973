"""What both kinds of tensor parallelism by heads share: the order of channels, and a layer's own forward."""

from typing import Any

import torch
from torch import Tensor, nn


def channels(sizes: tuple[int, ...], parts: int) -> Tensor:
    """Returns channels [q, k, v] in the order process by process: [q0, k0, v0, q1, k1, v1, ...].

    >>> channels((2, 2, 4), 2).tolist()
    [0, 2, 4, 5, 1, 3, 6, 7]
    """
    segments = torch.arange(sum(sizes)).split(list(sizes))
    return torch.cat([segment.chunk(parts)[part] for part in range(parts) for segment in segments])


class Holder(nn.Module):
    """Gives functional_call a module whose forward is its class's, not the one that was put in its place."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, *arguments: Any) -> Tensor:
        return type(self.module).forward(self.module, *arguments)
