"""Checks that sequences packed into one row of a model do not see each other."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn

LENGTHS = (5, 64, 1, 130, 2, 63)
# A packed row may differ from its sequences alone by this many times what a longer row changes by rounding.
SPREAD = 8
By = Literal["position_ids", "cu_seqlens", "cu_seq_lens_q"]


@dataclass(frozen=True)
class Packed:
    """One packed sequence: errors are root mean squares of differences in logits, over that of the logits.

    error       packed against alone
    rounding    alone against alone with other tokens after it, which a causal model must not see either
    leak        one sequence with all that stand before it, against alone: what ignored bounds do
    """

    length: int
    error: float
    rounding: float
    leak: float


@dataclass(frozen=True)
class PackingReport:
    """What `check_packing` measured. It is true if no sequence sees another."""

    sequences: tuple[Packed, ...]
    allowed: float

    def __bool__(self) -> bool:
        return all(row.error <= self.allowed for row in self.sequences)

    def __str__(self) -> str:
        lines = [f"{'tokens':>7} {'packed':>9} {'rounding':>9} {'if leaked':>9}"]
        lines += [
            f"{row.length:7} {row.error:9.1e} {row.rounding:9.1e} {row.leak:9.1e}"
            + ("" if row.error <= self.allowed else "  sees its neighbors")
            for row in self.sequences
        ]
        verdict = "packed equals alone" if self else "packed sequences see each other"
        return "\n".join([*lines, f"{verdict} (allowed: {self.allowed:.1e})"])


def check_packing(
    model: nn.Module, lengths: Sequence[int] = LENGTHS, by: By | None = None, seed: int = 0
) -> PackingReport:
    """Compares the logits of packed sequences with those of each sequence alone, for any causal model.

        lengths     tokens of each sequence; all are packed into one row
        by          how the model is told: position_ids that start again at 0, its argument cu_seqlens, or
                    cu_seq_lens_q and what belongs to it, as transformers' DataCollatorWithFlattening makes
                    them; None: cu_seqlens if the model's forward has it, else position_ids

    The allowed error comes from controls in the same run. Raises ValueError for lengths that cannot show
    anything. Weights, mode and gradients of the model stay as they are.

        >>> from delta_trn import DeltaConfig, DeltaForCausalLM, check_packing
        >>> model = DeltaForCausalLM(DeltaConfig(vocab_size=320, hidden_size=32, num_hidden_layers=2))
        >>> bool(check_packing(model))
        True
    """
    if len(lengths) < 2 or min(lengths) < 1:
        raise ValueError(f"lengths={tuple(lengths)}; give at least two sequences of at least one token")
    parameters = inspect.signature(model.forward).parameters
    by = by or ("cu_seqlens" if "cu_seqlens" in parameters else "position_ids")
    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
    device = embedding.weight.device
    generator = torch.Generator().manual_seed(seed)
    row = torch.randint(0, embedding.weight.shape[0], (sum(lengths),), generator=generator).to(device)
    tail = torch.randint(0, embedding.weight.shape[0], (64,), generator=generator).to(device)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            packed = _logits(model, row, **_bounds(by, lengths, device))
            unaware = _logits(model, row)
            rows = []
            for a, b in pairwise(accumulate(lengths, initial=0)):
                alone = _logits(model, row[a:b])
                longer = _logits(model, torch.cat([row[a:b], tail]))[: b - a]
                errors = (_error(x, alone) for x in (packed[a:b], longer, unaware[a:b]))
                rows.append(Packed(b - a, *errors))
    finally:
        model.train(was_training)
    least = 4 * torch.finfo(packed.dtype).eps
    allowed = max(least, SPREAD * max(sequence.rounding for sequence in rows))
    largest = max(sequence.leak for sequence in rows[1:])
    if not largest > allowed:
        raise ValueError(
            f"what stands before a sequence changes its logits by {largest:.1e}, no more than the allowed "
            f"{allowed:.1e}; check a model whose weights have been trained, or draw larger ones"
        )
    return PackingReport(tuple(rows), allowed)


def _logits(model: nn.Module, row: Tensor, **bounds: Any) -> Tensor:
    return model(input_ids=row[None], use_cache=False, **bounds).logits[0].float()


def _bounds(by: By, lengths: Sequence[int], device: torch.device) -> dict[str, Any]:
    """Returns the arguments that tell a model where sequences begin."""
    position_ids = torch.cat([torch.arange(n, device=device) for n in lengths])[None]
    ends = torch.tensor([0, *accumulate(lengths)], device=device)
    if by == "position_ids":
        return {"position_ids": position_ids}
    if by == "cu_seqlens":
        return {"cu_seqlens": ends}
    ends, longest = ends.int(), max(lengths)
    return {
        "position_ids": position_ids,
        **{"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest},
    }


def _error(x: Tensor, y: Tensor) -> float:
    difference = (x - y).double().square().mean().sqrt()
    return (difference / y.double().square().mean().sqrt()).item()
