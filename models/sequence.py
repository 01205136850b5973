"""Describes which tokens of a batch belong together: padding, packing,
and tokens of earlier calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Padding:
    """Moves padding, wherever it lies, to the left of a row's real tokens, where layers can ignore
    it.

    order   [B, T] index of the token that stands at each place of that arrangement
    real    [B, T] bool in that arrangement, False at padding
    """

    order: Tensor
    real: Tensor

    @classmethod
    def of(cls, attention_mask: Tensor | None, B: int, T: int, offset: int) -> Padding | None:
        """Reads transformers' mask, [B, offset + T] or [B, T], 0 at padding;
        returns None without padding.
        """
        if attention_mask is None:
            return None
        shape = tuple(attention_mask.shape)
        if shape not in ((B, offset + T), (B, T)):
            raise ValueError(
                f"attention_mask is {shape}, expected {(B, offset + T)}: one entry for each of "
                f"{offset} cached and {T} new tokens"
            )
        real = attention_mask[:, -T:].bool()
        if real.all():
            return None
        order = real.int().argsort(dim=1, stable=True)
        return cls(order, real.gather(1, order))

    def arrange(self, x: Tensor) -> Tensor:
        """Returns x [B, T, d] with padding first, and zero."""
        return x.gather(1, self.order[..., None].expand_as(x)) * self.real[..., None]

    def restore(self, x: Tensor) -> Tensor:
        """Undoes `arrange`: returns x [B, T, d] with padding where it was."""
        return torch.empty_like(x).scatter(1, self.order[..., None].expand_as(x), x)


def sequence_bounds(position_ids: Tensor, real: Tensor | None = None) -> Tensor | None:
    """Returns the bounds of packed sequences, int64 [N + 1] over rows put end to end; None if none
    is packed.

    position_ids is [B, T], or [3, B, T] for time, height and width, or [4, B, T] for text and
    these; real is
    [B, T] bool, False at padding. A sequence begins where a row begins, and where the place in the text is 0,
    or all of three axes are. Padding before, between or after sequences is a sequence of its own.
    This is how `DataCollatorWithFlattening` of transformers packs.

        >>> sequence_bounds(torch.tensor([[0, 1, 2, 0, 1]]))
        tensor([0, 3, 5])
        >>> sequence_bounds(torch.tensor([[0, 1, 0, 0]]), torch.tensor([[True, True, True, False]]))
        tensor([0, 2, 3, 4])
    """
    if position_ids.shape[-1] < 2:
        return None
    begins, is_packed = _begins(position_ids, real)
    if not bool(is_packed):
        return None
    firsts = begins.flatten().nonzero().flatten()
    return torch.cat([firsts, firsts.new_full((1,), begins.numel())])


def _begins(position_ids: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns where sequences begin, [B, T] bool, and whether any row has several, [] bool."""
    axes = position_ids.flatten(0, -3) if position_ids.dim() > 2 else position_ids[None]
    begins = (axes[:1] if len(axes) == 4 else axes).eq(0).all(0)
    if real is None:
        is_packed = begins[:, 1:].any()
    else:
        begins = begins & real
        is_packed = (begins & (real.cumsum(1) > 1)).any()
        begins[:, 1:] |= real.diff(dim=1)
    begins[:, 0] = True
    return begins, is_packed


def places_in_sequences(bounds: Tensor, shape: tuple[int, int]) -> Tensor:
    """Returns each token's place in its own sequence, int64 [B, T], for bounds over rows put end to
    end.

    Raises ValueError for bounds of another shape or dtype.
    """
    if bounds.dim() != 1 or bounds.dtype != torch.int64:
        raise ValueError(
            f"cu_seqlens is {bounds.dtype} {tuple(bounds.shape)}, expected int64 [N + 1]: the "
            "bounds of N sequences in rows put end to end, from 0 to the number of tokens"
        )
    tokens = torch.arange(shape[0] * shape[1], device=bounds.device)
    return (tokens - bounds[torch.searchsorted(bounds, tokens, right=True) - 1]).view(shape)


def packed_bounds(options: dict[str, Any], attention_mask: Any, rows: int) -> Tensor | None:
    """Takes cu_seq_lens_q, position_ids and seq_idx out of `options`; returns the bounds that they
    state.

        seq_idx         [B, T] the number of a token's sequence in its row
        attention_mask  [B, T] 0 at padding. Numbers above 1 are those of sequences, and pack like
                        seq_idx. Masks of other shapes are for attention layers alone: they say
                        nothing of sequences
        rows            B; position_ids of one row hold for all
        returns         int64 [N + 1] over rows put end to end, or None where no sequence is packed

    While torch.compile traces, numbers in a mask cannot be looked at: the compiled model refuses
    them.
    """
    bounds, places, real = _told(options, attention_mask, rows)
    return bounds if places is None else sequence_bounds(places, real)


def packed_places(
    options: dict[str, Any], attention_mask: Any, shape: tuple[int, int]
) -> tuple[Tensor, Tensor] | None:
    """Returns each token's place in its own sequence, [B, T], and whether any row has several, []
    bool.

    Arguments are those of `packed_bounds`. No shape depends on what tensors hold, and nothing is
    asked of them, so that torch.compile needs no break; None where nothing tells of sequences.
    """
    bounds, places, real = _told(options, attention_mask, shape[0])
    if bounds is not None:
        return places_in_sequences(bounds, shape), torch.ones_like(bounds[0], dtype=torch.bool)
    if places is None or shape[1] < 2:
        return None
    begins, is_packed = _begins(places, real)
    index = torch.arange(shape[1], device=begins.device)
    return index - index.where(begins, 0).cummax(1).values, is_packed


def _told(
    options: dict[str, Any], attention_mask: Any, rows: int
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Takes out of `options` what tells of sequences: bounds; or places,
    and [B, T] what is no padding.
    """
    names = ("cu_seq_lens_q", "position_ids", "seq_idx")
    bounds, places, seq_idx = (options.pop(name, None) for name in names)
    if bounds is not None:
        return bounds.long(), None, None
    mask = (
        attention_mask if isinstance(attention_mask, Tensor) and attention_mask.dim() == 2 else None
    )
    if mask is not None and _numbers_sequences(mask):
        places, seq_idx = None, mask
    if places is None and seq_idx is not None:
        places = (
            seq_idx.diff(dim=1, prepend=seq_idx[:, :1] - 1) == 0
        )  # 0 where another number begins
    if places is None:
        return None, None, None
    if places.shape[-2] != rows:
        places = places.expand(*places.shape[:-2], rows, -1)
    return None, places, None if mask is None else mask[:, -places.shape[-1] :].bool()


def _numbers_sequences(mask: Tensor) -> bool:
    """Returns whether a mask [B, T] holds numbers of sequences, rather than 0 and 1."""
    if mask.dtype == torch.bool:
        return False
    if torch.compiler.is_compiling():
        torch._assert_async(
            (mask <= 1).all(),
            "attention_mask numbers sequences; under torch.compile pass position_ids instead",
        )
        return False
    return bool((mask > 1).any())


@dataclass(frozen=True)
class Sequences:
    """Says how every layer has to read the T tokens of each row.

    position    [B or 1, T] index of each token in its own sequence, for RoPE and for packed
                convolutions
    begins      [B, T, 1] bool, where a row's sequences begin, so that a layer forgets what was
                before; None: a row is one sequence
    real        [B, T, 1] bool, False at padding, which lies left; None: there is no padding
    attendable  [B or 1, 1, T, offset + T] bool, True where an attention layer's query may look;
                None: at every token up to its own, or there is no attention layer
    noise       [B, T] int32, a random number per token, which dropout turns into masks; None: it
                has none
    """

    position: Tensor
    real: Tensor | None
    attendable: Tensor | None
    noise: Tensor | None = None
    begins: Tensor | None = None

    @property
    def is_packed(self) -> bool:
        """Says whether a row may have several sequences."""
        return self.begins is not None

    @classmethod
    def documents(cls, position_ids: Tensor, *, attention: bool) -> Sequences:
        """Describes rows of several sequences each, by the place of every token in its own: int [B,
        T].

        Shapes do not depend on where sequences begin, so that compiled graphs stay, and rows stay
        rows, so that they can be divided among micro-batches and processes. A place above 0 at the
        start of a row belongs to a sequence that another process begins.
        """
        position, T = position_ids.long(), position_ids.shape[1]
        begins = (position == 0)[..., None]
        if not attention:
            return cls(position, None, None, begins=begins)
        tokens = torch.arange(T, device=position.device)
        first = tokens - position  # [B, T] where a token's sequence begins
        allowed = (first[:, :, None] == first[:, None]) & (tokens <= tokens[:, None])
        return cls(position, None, allowed[:, None], begins=begins)

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
        """Describes rows of one sequence each, of which `offset` tokens were seen in earlier calls.

        real        [B, offset + T], False at padding
        padded      whether any of the T new tokens is padding
        attention   whether any layer is attention
        """
        now = None if real is None or not padded else real[:, offset:, None]
        if not attention:
            return cls(torch.arange(T, device=device)[None], now, None)
        keys = torch.arange(offset + T, device=device)
        queries = keys[offset:, None]
        if real is None:
            allowed = (keys <= queries)[None, None] if offset else None
            return cls(keys[None, offset:], None, allowed)
        # A padding query attends to itself, because softmax over no key would be NaN.
        allowed = (keys <= queries) & (real[:, None, None, :] | (keys == queries))
        return cls((real.cumsum(1)[:, offset:] - 1).clamp(min=0), now, allowed)

    def conv_input(self, x: Tensor, before: Tensor) -> Tensor:
        """Returns [B, W - 1 + T, C]: the W - 1 inputs before,
        next to the first real one of x, and x.
        """
        joined = torch.cat([before, x], dim=1)
        if self.real is None:
            return joined
        pads = x.shape[1] - self.real.sum(1)  # [B, 1]
        at = torch.arange(joined.shape[1], device=x.device)[None]
        source = torch.where(at < pads + before.shape[1], (at - pads).clamp(min=0), at)
        return joined.gather(1, source[..., None].expand_as(joined))
