"""Checks that sequences packed into one row of a model do not see each other."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

LENGTHS = (5, 64, 1, 130, 2, 63)
PADS = 3
# A packed row may differ from its sequences alone by this many times what a longer row changes by
# rounding.
SPREAD = 8
# All but the first four are what collators and callers add to position_ids, or give in their place.
Way = Literal[
    "position_ids",
    "cu_seqlens",
    "cu_seq_lens_q",
    "seq_idx",
    "default cache",
    "mask of ones",
    "padding",
    "places from 5",
    "bounds alone",
    "numbered mask",
    "three axes",
]


@dataclass(frozen=True)
class Packed:
    """One packed sequence: errors are root mean squares of differences in logits, over that of the
    logits.

    error       packed against alone
    rounding    alone against alone with other tokens after it, which a causal model must not see
                either
    leak        one sequence with all that stand before it, against alone: what ignored bounds do
    """

    way: str
    length: int
    error: float
    rounding: float
    leak: float


@dataclass(frozen=True)
class PackingReport:
    """Has what `check_packing` measured: true if no sequence sees another, whichever way the model
    is told.

    refused     the ways that the model refuses, each with its words
    """

    sequences: tuple[Packed, ...]
    allowed: float
    refused: dict[str, str]

    def __bool__(self) -> bool:
        return all(row.error <= self.allowed for row in self.sequences)

    def __str__(self) -> str:
        lines = [f"{'told by':13} {'tokens':>7} {'packed':>9} {'rounding':>9} {'if leaked':>9}"]
        lines += [
            f"{row.way:13} {row.length:7} {row.error:9.1e} {row.rounding:9.1e} {row.leak:9.1e}"
            + ("" if row.error <= self.allowed else "  sees its neighbors")
            for row in self.sequences
        ]
        lines += [f"{way:13} refused: {words}" for way, words in self.refused.items()]
        leaking = dict.fromkeys(row.way for row in self.sequences if row.error > self.allowed)
        verdict = (
            f"packed sequences see each other, told by {', '.join(leaking)}"
            if leaking
            else "packed equals alone"
        )
        return "\n".join([*lines, f"{verdict} (allowed: {self.allowed:.1e})"])


def check_packing(
    model: nn.Module, lengths: Sequence[int] = LENGTHS, by: Way | None = None, seed: int = 0
) -> PackingReport:
    """Compares the logits of packed sequences with those of each sequence alone, for any causal
    model.

        lengths     tokens of each sequence; all are packed into one row
        by          how the model is told; None: every way that its arguments allow
            position_ids    they start again at 0, with use_cache=False
            cu_seqlens      its argument of that name
            cu_seq_lens_q   and what belongs to it, as transformers' DataCollatorWithFlattening
                            makes them
            seq_idx         the number of each token's sequence, beside position_ids
            default cache   position_ids, and nothing said of a cache
            mask of ones    position_ids, and the attention_mask that tokenizers add
            padding         position_ids, and a row that ends with padding
            places from 5   position_ids that start again elsewhere than at 0
            bounds alone    cu_seq_lens_q without position_ids
            numbered mask   an attention_mask with the number of each token's sequence in place of 1
            three axes      position_ids of time, height and width, for a model that reads images

    The allowed error comes from controls in the same run. A way that the model refuses is no leak.
    Raises ValueError for lengths that cannot show anything. Weights, mode and gradients stay as
    they are.

        >>> from delta_trn import DeltaConfig, DeltaForCausalLM, check_packing
        >>> model = DeltaForCausalLM(DeltaConfig(vocab_size=320, hidden_size=32, num_hidden_layers=2))
        >>> bool(check_packing(model))
        True
    """
    if len(lengths) < 2 or min(lengths) < 1:
        raise ValueError(
            f"lengths={tuple(lengths)}; give at least two sequences of at least one token"
        )
    if by is not None and by not in get_args(Way):
        raise ValueError(f"by={by!r}; name one of {', '.join(get_args(Way))}")
    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
    device = embedding.weight.device
    generator = torch.Generator().manual_seed(seed)
    row = torch.randint(0, embedding.weight.shape[0], (sum(lengths),), generator=generator).to(
        device
    )
    tail = torch.randint(0, embedding.weight.shape[0], (64,), generator=generator).to(device)
    ways = {way: given for way, given in _ways(model, lengths, device).items() if by in (None, way)}
    was_training, found, refused = model.training, [], {}
    model.eval()
    try:
        with torch.no_grad():
            unaware = _logits(model, row, use_cache=False)
            pieces = list(pairwise(accumulate(lengths, initial=0)))
            alone = [_logits(model, row[a:b], use_cache=False) for a, b in pieces]
            longer = [
                _logits(model, torch.cat([row[a:b], tail]), use_cache=False)[: b - a]
                for a, b in pieces
            ]
            for way, given in ways.items():
                try:
                    packed = _logits(
                        model, torch.cat([row, row[:PADS]]) if way == "padding" else row, **given
                    )
                except (TypeError, ValueError, NotImplementedError) as refusal:
                    refused[way] = str(refusal)
                    continue
                for (a, b), single, more in zip(pieces, alone, longer, strict=True):
                    errors = (_error(x, single) for x in (packed[a:b], more, unaware[a:b]))
                    found.append(Packed(way, b - a, *errors))
    finally:
        model.train(was_training)
    if not found:
        raise ValueError(f"the model refuses to pack: {refused}")
    allowed = max(4 * torch.finfo(unaware.dtype).eps, SPREAD * max(x.rounding for x in found))
    largest = max(x.leak for x in found)
    if not largest > allowed:
        raise ValueError(
            f"what stands before a sequence changes its logits by {largest:.1e}, no more than the "
            f"allowed {allowed:.1e}; check a model whose weights have been trained, or draw larger "
            "ones"
        )
    return PackingReport(tuple(found), allowed, refused)


def _logits(model: nn.Module, row: Tensor, **options: Any) -> Tensor:
    return model(input_ids=row[None], **options).logits[0].float()


def _ways(
    model: nn.Module, lengths: Sequence[int], device: torch.device
) -> dict[str, dict[str, Any]]:
    """Returns what a model is told in each way: those that its forward,
    or its configuration, knows.
    """
    parameters = inspect.signature(model.forward).parameters
    takes_any = any(x.kind is x.VAR_KEYWORD for x in parameters.values())
    places = torch.cat([torch.arange(n, device=device) for n in lengths])[None]
    numbers = torch.cat([torch.full((n,), i + 1, device=device) for i, n in enumerate(lengths)])[
        None
    ]
    ends = torch.tensor([0, *accumulate(lengths)], device=device)
    bounds = {"cu_seq_lens_q": ends.int(), "cu_seq_lens_k": ends.int()}
    bounds |= {"max_length_q": max(lengths), "max_length_k": max(lengths)}
    more = torch.arange(PADS, device=device)[None]
    padding = {"position_ids": torch.cat([places, more], dim=1)}
    padding |= {
        "attention_mask": torch.cat([torch.ones_like(places), torch.zeros_like(more)], dim=1)
    }
    apart: dict[str, Any] = {"position_ids": places, "use_cache": False}
    ways: dict[str, dict[str, Any]] = {}
    if "cu_seqlens" in parameters:
        ways["cu_seqlens"] = {"cu_seqlens": ends, "use_cache": False}
    if "position_ids" in parameters or takes_any:
        ways |= {
            "position_ids": apart,
            "default cache": {"position_ids": places},
            "mask of ones": apart | {"attention_mask": torch.ones_like(places)},
            "padding": padding | {"use_cache": False},
            "places from 5": {"position_ids": places + 5, "use_cache": False},
            "numbered mask": {"attention_mask": numbers, "use_cache": False},
        }
    if "cu_seq_lens_q" in parameters or takes_any:
        ways["cu_seq_lens_q"] = apart | bounds
        ways["bounds alone"] = bounds | {"use_cache": False}
        ways["seq_idx"] = apart | {"seq_idx": (numbers - 1).int()}
    if _has_three_axes(getattr(model, "config", None)):
        ways["three axes"] = {"position_ids": places.expand(3, -1, -1), "use_cache": False}
    return ways


def _has_three_axes(config: Any) -> bool:
    rope = getattr(config, "rope_parameters", None) or {}
    return "mrope_section" in rope


def _error(x: Tensor, y: Tensor) -> float:
    difference = (x - y).double().square().mean().sqrt()
    return (difference / y.double().square().mean().sqrt()).item()
