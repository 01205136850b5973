"""Which tokens of a batch belong together: padding, packing, and what came before."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Padding:
    """Padding is as if it were not there. Wherever it lies, the layers see it left of a row's real tokens.

    order   [B, T] which token stands where in the layers' arrangement: padding first, otherwise as given
    real    [B, T] bool in that arrangement, False at padding
    """

    order: Tensor
    real: Tensor

    @classmethod
    def of(cls, attention_mask: Tensor | None, B: int, T: int, offset: int) -> Padding | None:
        """From transformers' mask, [B, offset + T] or [B, T], 0 at padding; None if no new token is."""
        if attention_mask is None:
            return None
        given = tuple(attention_mask.shape)
        if given not in ((B, offset + T), (B, T)):
            raise ValueError(
                f"attention_mask is {given}, expected {(B, offset + T)}: one entry for each of {offset} "
                f"cached and {T} new tokens"
            )
        real = attention_mask[:, -T:].bool()
        if real.all():
            return None
        order = real.int().argsort(dim=1, stable=True)
        return cls(order, real.gather(1, order))

    def arrange(self, x: Tensor) -> Tensor:
        """[B, T, d] as given -> padding first, and zero."""
        return x.gather(1, self.order[..., None].expand_as(x)) * self.real[..., None]

    def restore(self, x: Tensor) -> Tensor:
        """[B, T, d] padding first -> as given."""
        return torch.empty_like(x).scatter(1, self.order[..., None].expand_as(x), x)


@dataclass(frozen=True)
class Sequences:
    """How the T tokens of each row are to be read; the same for every layer.

    cu_seqlens  [N + 1] int64: sequence n is tokens cu_seqlens[n] to cu_seqlens[n + 1] of the one row;
                None: a row is a sequence
    position    [B or 1, T] each token's place in its own sequence, for convolutions over packed ones and RoPE
    real        [B, T, 1] bool, False at padding, which lies left; None: there is none
    attendable  [B or 1, 1, T, offset + T] bool, True where an attention layer's query may look; None: at all
                up to it, or there is no attention layer
    """

    cu_seqlens: Tensor | None
    position: Tensor
    real: Tensor | None
    attendable: Tensor | None

    @classmethod
    def packed(cls, cu_seqlens: Tensor, T: int, *, attention: bool) -> Sequences:
        """N sequences in one row; `attention`: whether any layer is. Raises ValueError for other shapes."""
        if cu_seqlens.dim() != 1 or cu_seqlens.dtype != torch.int64:
            raise ValueError(
                f"cu_seqlens is {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}, expected int64 [N + 1]: the "
                "bounds of N sequences, from 0 to T"
            )
        tokens = torch.arange(T, device=cu_seqlens.device)
        owner = torch.searchsorted(cu_seqlens, tokens, right=True) - 1
        position = (tokens - cu_seqlens[owner])[None]
        if not attention:
            return cls(cu_seqlens, position, None, None)
        allowed = (owner[:, None] == owner) & (tokens <= tokens[:, None])
        return cls(cu_seqlens, position, None, allowed[None, None])

    @classmethod
    def rows(
        cls,
        T: int,
        device: torch.device,
        *,
        offset: int = 0,
        real: Tensor | None = None,
        padded: bool = False,
        attention: bool = False,
    ) -> Sequences:
        """A sequence a row, of which `offset` tokens came before; real [B, offset + T], False at padding.

        padded      whether any of the T tokens are padding, not only of those before
        attention   whether any layer is
        """
        now = None if real is None or not padded else real[:, offset:, None]
        if not attention:
            return cls(None, torch.arange(T, device=device)[None], now, None)
        keys = torch.arange(offset + T, device=device)
        queries = keys[offset:, None]
        if real is None:
            allowed = (keys <= queries)[None, None] if offset else None
            return cls(None, keys[None, offset:], None, allowed)
        # a padding query sees itself: softmax over nothing would be NaN
        allowed = (keys <= queries) & (real[:, None, None, :] | (keys == queries))
        return cls(None, (real.cumsum(1)[:, offset:] - 1).clamp(min=0), now, allowed)

    def conv_input(self, x: Tensor, before: Tensor) -> Tensor:
        """[B, W - 1 + T, C]: the W - 1 inputs before, moved right before the first real one of x, then x."""
        joined = torch.cat([before, x], dim=1)
        if self.real is None:
            return joined
        pads = x.shape[1] - self.real.sum(1)  # [B, 1]
        at = torch.arange(joined.shape[1], device=x.device)[None]
        source = torch.where(at < pads + before.shape[1], (at - pads).clamp(min=0), at)
        return joined.gather(1, source[..., None].expand_as(joined))
