"""Which tokens of a batch belong together: padding, packing and what came before."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sequences:
    """How the T tokens of each row are to be read.

    offset      tokens that came before, in the cache
    real        [B, offset + T] bool, False at padding; None: there is none
    cu_seqlens  [N + 1] int64, sequence n is cu_seqlens[n] to cu_seqlens[n + 1] of the one row; None: a row is a sequence
    """

    offset: int = 0
    real: Tensor | None = None
    cu_seqlens: Tensor | None = None

    def real_now(self, T: int) -> Tensor | None:
        """[B, T, 1] bool: which of the new tokens are not padding."""
        return None if self.real is None else self.real[:, -T:, None]

    def owner(self, T: int) -> Tensor | None:
        """[T] which packed sequence each token belongs to."""
        if self.cu_seqlens is None:
            return None
        tokens = torch.arange(T, device=self.cu_seqlens.device)
        return torch.searchsorted(self.cu_seqlens, tokens, right=True) - 1

    def position(self, T: int) -> Tensor | None:
        """[T] each token's place in its packed sequence."""
        owner = self.owner(T)
        if owner is None or self.cu_seqlens is None:
            return None
        return torch.arange(T, device=owner.device) - self.cu_seqlens[owner]

    def attendable(self, T: int, device: torch.device) -> Tensor | None:
        """[B or 1, 1, T, offset + T] bool, True where a query may look; None: plain causal from the start."""
        if self.real is None and self.cu_seqlens is None and self.offset == 0:
            return None
        keys = torch.arange(self.offset + T, device=device)
        queries = keys[self.offset :, None]
        allowed = (keys <= queries)[None, None]
        owner = self.owner(T)
        if owner is not None:
            allowed = allowed & (owner[:, None] == owner)[None, None]
        if self.real is not None:
            # a padding query sees itself: softmax over nothing would be NaN
            allowed = allowed & (self.real[:, None, None, :] | (keys == queries)[None, None])
        return allowed
