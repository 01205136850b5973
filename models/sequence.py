"""Describes which tokens of a batch belong together: padding, packing,
and tokens of earlier calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from delta_trn.backends import stand_ins
from delta_trn.backends.gated_delta_rule.once import once

# asserts by a tensor of one bool, and waits for no device
assert_later = torch.ops.aten._assert_async.msg
HIDDEN = -9999.0  # what is added to a logit, or more, where a query may look
ACROSS = (
    "attention_mask lets a token see across the beginning of its sequence, where a layer with a "
    "state remembers nothing: sequences have to lie end to end in a row, and a token has to see the "
    "one before it in its own. Pass position_ids that start again in place of the mask"
)


def check_mask(attention_mask: Any) -> None:
    """Raises TypeError or ValueError for a mask that only attention layers could read."""
    advice = (
        "pass [B, T], 0 at padding, and for packed sequences position_ids that start again at 0"
    )
    if not isinstance(attention_mask, Tensor):
        raise TypeError(f"attention_mask is a {type(attention_mask).__name__}; {advice}")
    if attention_mask.dim() != 2:
        raise ValueError(f"attention_mask is {tuple(attention_mask.shape)}; {advice}")


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

        position_ids    [B, T], or [3, B, T] for time, height and width, or [4, B, T] for text and
                        these
        real            [B, T] bool, False at padding; None: there is none

    A sequence begins where a row begins, and where a place in the text is not the one after the
    place before, as transformers' attention has it. Of three axes, on which an image moves by other
    steps, it begins where all are 0. Padding before, between or after sequences is a sequence of
    its own. This is how `DataCollatorWithFlattening` of transformers packs.

        >>> sequence_bounds(torch.tensor([[0, 1, 2, 0, 1]]))
        tensor([0, 3, 5])
        >>> sequence_bounds(torch.tensor([[5, 6, 1, 2, 3]]))
        tensor([0, 2, 5])
        >>> sequence_bounds(torch.tensor([[0, 1, 0, 0]]), torch.tensor([[True, True, True, False]]))
        tensor([0, 2, 3, 4])
    """
    begins = _begins(position_ids, real, False)
    return None if position_ids.shape[-1] < 2 else _bounds(*_mark(begins, real))


def _bounds(begins: Tensor, is_packed: Tensor) -> Tensor | None:
    if not bool(is_packed):
        return None
    firsts = begins.flatten().nonzero().flatten()
    return torch.cat([firsts, firsts.new_full((1,), begins.numel())])


def _begins(position_ids: Tensor, real: Tensor | None, continues: bool) -> Tensor:
    """Returns where places say that a sequence begins, [B, T] bool; at padding it is meaningless.

    continues   whether the tokens continue a cache, whose steps transformers does not look at: then
                only a place of 0 begins one
    """
    axes = position_ids.flatten(0, -3) if position_ids.dim() > 2 else position_ids[None]
    text = axes[0] if len(axes) in (1, 4) else None
    if text is None or continues:
        return (axes if text is None else text[None]).eq(0).all(0)
    begins = text.diff(dim=1, prepend=text[:, :1] - 1) != 1
    if real is None:
        return begins
    # Places may count padding between two tokens of a sequence, or leave it out.
    index = torch.arange(text.shape[1], device=text.device)
    last = index.where(real, -1).cummax(1).values.roll(1, 1)  # [B, T] the real token before
    last[:, 0] = -1
    return begins & (text - text.gather(1, last.clamp(min=0)) != 1)


def _mark(begins: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns where sequences and padding begin, [B, T] bool,
    and whether any row has several, [] bool.
    """
    if real is None:
        begins, is_packed = begins.clone(), begins[:, 1:].any()
    else:
        begins = begins & real
        is_packed = (begins & (real.cumsum(1) > 1)).any()
        begins[:, 1:] |= real.diff(dim=1)
    begins[:, 0] = True
    return begins, is_packed


def check_bounds(name: str, bounds: Any, tokens: int) -> None:
    """Raises TypeError or ValueError unless these are the bounds of sequences over so many tokens.

    On accelerators the numbers are read once for a tensor, since that waits for the device. Where
    torch.compile traces or a CUDA graph is captured, nothing can wait: the graph asserts it.
    """
    if not isinstance(bounds, Tensor):
        raise TypeError(
            f"{name} is a {type(bounds).__name__}; pass an int64 tensor [N + 1]: the bounds of N "
            f"sequences, from 0 to the number of tokens, {tokens}"
        )
    integers = bounds.dtype in (torch.int64, torch.int32)
    if bounds.dim() != 1 or len(bounds) < 2 or not integers:
        raise ValueError(
            f"{name} is {bounds.dtype} {tuple(bounds.shape)}, expected int64 [N + 1]: the bounds "
            f"of N sequences in rows put end to end, from 0 to the number of tokens, {tokens}"
        )
    if torch.compiler.is_compiling() or _is_captured(bounds):
        rises = (bounds.diff() >= 0).all() & (bounds[0] == 0) & (bounds[-1] == tokens)
        assert_later(rises, f"{name} must rise from 0 to the number of tokens")
    elif stand_ins.may_read(bounds):
        once(bounds, ("bounds", tokens), lambda: _check_numbers(name, bounds.tolist(), tokens))


def _is_captured(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _check_numbers(name: str, bounds: list[int], tokens: int) -> None:
    lengths = sum(bounds) == tokens and min(bounds) >= 0
    hint = ", the running sum of the lengths" if lengths else ""
    if bounds[0] != 0 or bounds[-1] != tokens:
        raise ValueError(
            f"{name} runs from {bounds[0]} to {bounds[-1]}; it must run from 0 to the number of "
            f"tokens, {tokens}: pass the bounds of the sequences{hint}"
        )
    for n, (before, bound) in enumerate(pairwise(bounds)):
        if before > bound:
            raise ValueError(
                f"{name} falls from {before} at {n} to {bound} at {n + 1}; pass the running sum of "
                "the lengths"
            )


def places_in_sequences(bounds: Tensor, shape: tuple[int, int]) -> Tensor:
    """Returns each token's place in its own sequence, int64 [B, T], for bounds over rows put end to
    end.

    Raises ValueError for bounds of another shape or dtype; `check_bounds` reads their numbers.
    """
    if bounds.dim() != 1 or bounds.dtype != torch.int64:
        raise ValueError(
            f"cu_seqlens is {bounds.dtype} {tuple(bounds.shape)}, expected int64 [N + 1]: the "
            "bounds of N sequences in rows put end to end, from 0 to the number of tokens"
        )
    tokens = torch.arange(shape[0] * shape[1], device=bounds.device)
    return (tokens - bounds[torch.searchsorted(bounds, tokens, right=True) - 1]).view(shape)


def packed_bounds(
    options: dict[str, Any],
    attention_mask: Any,
    shape: tuple[int, int],
    *,
    continues: bool = False,
) -> Tensor | None:
    """Takes cu_seq_lens_q, position_ids and seq_idx out of `options`; returns the bounds that they
    state.

        position_ids    [B, T] or [1, T], or with three or four axes before; see `sequence_bounds`
        seq_idx         [B, T] or [1, T], the number of a token's sequence in its row
        attention_mask  [B, T] 0 at padding. Numbers above 1 are those of sequences, and pack like
                        seq_idx.
                        Or [B or 1, heads or 1, T, T], True, or 0 to be added, where a query sees a
                        key: a sequence begins at each token that does not see the one before.
                        Or a dict of both, one for each kind of layer
        shape           B, T
        continues       whether the tokens continue a cache
        returns         int64 [N + 1] over rows put end to end, or None where no sequence is packed

    Raises TypeError or ValueError for bounds, places or masks that cannot be read so.

    While torch.compile traces, numbers in a mask cannot be looked at: the compiled model refuses
    them.
    """
    bounds, begins, real = _told(options, attention_mask, shape, continues)
    return bounds if begins is None or shape[1] < 2 else _bounds(*_mark(begins, real))


def packed_places(
    options: dict[str, Any],
    attention_mask: Any,
    shape: tuple[int, int],
    *,
    continues: bool = False,
) -> tuple[Tensor, Tensor] | None:
    """Returns each token's place in its own sequence, [B, T], and whether any row has several, []
    bool.

    Arguments are those of `packed_bounds`. No shape depends on what tensors hold, and nothing is
    asked of them, so that torch.compile needs no break; None where nothing tells of sequences.
    """
    bounds, begins, real = _told(options, attention_mask, shape, continues)
    if bounds is not None:
        return places_in_sequences(bounds, shape), torch.ones_like(bounds[0], dtype=torch.bool)
    if begins is None or shape[1] < 2:
        return None
    begins, is_packed = _mark(begins, real)
    index = torch.arange(shape[1], device=begins.device)
    return index - index.where(begins, 0).cummax(1).values, is_packed


def _told(
    options: dict[str, Any], attention_mask: Any, shape: tuple[int, int], continues: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Takes out of `options` what tells of sequences: bounds; or where they begin,
    and [B, T] what is no padding.
    """
    names = ("cu_seq_lens_q", "position_ids", "seq_idx")
    bounds, places, numbers = (options.pop(name, None) for name in names)
    masks = [*attention_mask.values()] if isinstance(attention_mask, dict) else [attention_mask]
    blocks = next((x for mask in masks if (x := _blocks(mask, shape)) is not None), None)
    if bounds is not None:
        check_bounds("cu_seq_lens_q", bounds, shape[0] * shape[1])
        if blocks is None and places is None:
            return bounds.long(), None, None
        firsts = torch.zeros(shape[0] * shape[1] + 1, dtype=torch.bool, device=bounds.device)
        begins = firsts.index_fill_(0, bounds.long(), True)[:-1].view(shape)
        if places is not None:
            _check_agreement(places, begins, masks)
        if blocks is None:
            return bounds.long(), None, None
        return None, _begins_of_blocks(blocks, begins, shape), None
    mask = next((x for x in masks if isinstance(x, Tensor) and x.dim() == 2), None)
    if mask is not None and _numbers_sequences(mask):
        places, numbers = None, mask[:, -shape[1] :]
    real = None if mask is None else mask[:, -shape[1] :].bool()
    begins = None
    if places is not None:
        _check_rows("position_ids", places, shape, axes=True)
        begins = _begins(places.expand(*places.shape[:-2], *shape), real, continues)
    elif numbers is not None:
        _check_rows("seq_idx", numbers, shape)
        numbers = numbers.expand(shape)
        begins = numbers.diff(dim=1, prepend=numbers[:, :1] - 1) != 0
    if blocks is not None:
        begins = _begins_of_blocks(blocks, begins, shape)
    return None, begins, None if begins is None else real


def _check_agreement(places: Any, begins: Tensor, masks: list[Any]) -> None:
    """Raises ValueError where places start again within a sequence that bounds state.

    Places that go on from one sequence to the next number the tokens of a row, and say nothing. A 0
    before another, or at the end of a row, may be padding.

    begins  [B, T] bool, where sequences begin by the bounds
    """
    shape = (begins.shape[0], begins.shape[1])
    _check_rows("position_ids", places, shape, axes=True)
    places = places.expand(*places.shape[:-2], *shape)
    mask = next((x for x in masks if isinstance(x, Tensor) and x.dim() == 2), None)
    real = None if mask is None else mask[:, -shape[1] :].bool()
    told = _begins(places, real, False)
    told[:, 0] = False
    text = places.flatten(0, -3)[0] if places.dim() > 2 else places
    told &= ~begins & ~((text == 0) & (pad(text[:, 1:], (0, 1)) == 0))
    if real is not None:
        told &= real
    if torch.compiler.is_compiling() or _is_captured(told):
        assert_later(~told.any(), "position_ids start again where the bounds state no sequence")
    elif stand_ins.may_read(told) and bool(told.any()):
        row, at = told.nonzero()[0].tolist()
        raise ValueError(
            f"position_ids go from {int(text[row, at - 1])} to {int(text[row, at])} at token {at} "
            f"of row {row}, within a sequence that the bounds state; pass one of both, or bounds "
            "at which the places start again"
        )


def _check_rows(name: str, x: Any, shape: tuple[int, int], axes: bool = False) -> None:
    """Raises TypeError or ValueError unless x has a number for each token."""
    if not isinstance(x, Tensor):
        raise TypeError(
            f"{name} is a {type(x).__name__}; pass an int64 tensor {shape}: one number for each "
            "token"
        )
    rows = x.dim() == 2 or (axes and x.dim() == 3)
    if not rows or x.shape[-1] != shape[1] or x.shape[-2] not in (1, shape[0]):
        more = f", or three or four of them: (3, {shape[0]}, {shape[1]})" if axes else ""
        raise ValueError(
            f"{name} is {tuple(x.shape)}, expected {shape} or {(1, shape[1])}: one number for each "
            f"token{more}"
        )


def _blocks(mask: Any, shape: tuple[int, int]) -> Tensor | None:
    """Returns a mask of attention layers, [B or 1, heads or 1, T, T]; None if it is of other kind,
    or sees a cache.
    """
    if hasattr(mask, "mask_mod"):  # a BlockMask of flex attention
        from torch.nn.attention.flex_attention import create_mask

        if shape[1] < 2 or tuple(mask.shape[-2:]) != (shape[1], shape[1]):
            return None
        B, device = mask.shape[0], mask.kv_num_blocks.device
        return create_mask(mask.mask_mod, B, 1, shape[1], shape[1], device=str(device))
    if not isinstance(mask, Tensor) or mask.dim() != 4:
        return None
    if shape[1] < 2 or tuple(mask.shape[-2:]) != (shape[1], shape[1]):
        return None
    return mask


def _begins_of_blocks(mask: Tensor, told: Tensor | None, shape: tuple[int, int]) -> Tensor:
    """Returns where sequences begin, [B, T] bool: at each token that does not see the one before.

    told    [B, T] bool, where they begin by what else was passed, which counts as well

    Raises ValueError where a token sees past the beginning of its sequence: a layer with a state
    could not. A token that sees nothing, or tokens behind it, is padding to transformers.
    """
    if not (mask.is_floating_point() or mask.dtype == torch.bool):
        raise ValueError(
            f"attention_mask is {mask.dtype} {tuple(mask.shape)}; with four axes pass bool, True "
            "where a query sees a key, or numbers to add to the logits, 0 there and -inf elsewhere"
        )
    allowed = mask if mask.dtype == torch.bool else mask > HIDDEN
    allowed = allowed.any(1).expand(shape[0], -1, -1)
    begins = pad(~allowed.diagonal(-1, 1, 2), (1, 0), value=True)
    if told is not None:
        begins = begins | told
    index = torch.arange(shape[1], device=mask.device)
    start = index.where(begins, 0).cummax(1).values
    first = allowed.int().argmax(-1).where(allowed.any(-1), index)
    ahead = (allowed & (index > index[:, None])).any(-1)
    across = ((first < start) & ~ahead).any()
    if torch.compiler.is_compiling():
        assert_later(~across, ACROSS)
    elif bool(across):
        raise ValueError(ACROSS)
    return begins


def _numbers_sequences(mask: Tensor) -> bool:
    """Returns whether a mask [B, T] holds numbers of sequences, rather than 0 and 1."""
    if mask.dtype == torch.bool:
        return False
    if torch.compiler.is_compiling():
        assert_later(
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
