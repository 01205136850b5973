"""How the Triton kernels cut time: chunks, and segments of chunks where heads are few.

Counts come from shapes alone; tables of packed sequences are made by tensor operations where
cu_seqlens lies, so nothing waits for the device.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from delta_trn.backends.gated_delta_rule.once import once
from delta_trn.triton_kernels.chunks import Chunks, Segments, chunks_per_segment
from delta_trn.triton_kernels.launch import Config

# How many chunks make a segment; segments of a sequence are scanned side by side. "auto" cuts where
# the scans of whole sequences would leave most of the device idle; None never cuts. Backward must
# cut as forward did.
SEGMENT: Literal["auto"] | int | None = "auto"


def chunk_counts(q: Tensor, cu_seqlens: Tensor | None, C: int) -> Chunks:
    """Returns the chunks of C tokens, without tables."""
    B, T = q.shape[:2]
    per_sequence = -(-T // C)
    if cu_seqlens is None:
        return Chunks(C, B * per_sequence, B, T, per_sequence, packed=False, span=T)
    sequences = cu_seqlens.shape[0] - 1
    return Chunks(C, T // C + sequences, sequences, T, per_sequence, packed=True)


def chunk_tables(q: Tensor, cu_seqlens: Tensor | None, C: int) -> Chunks:
    """Returns the same with the tables of packed sequences, which are made once for all layers."""
    chunks = chunk_counts(q, cu_seqlens, C)
    if cu_seqlens is None:
        return chunks
    bounds = cu_seqlens.contiguous()

    def make() -> dict[str, Tensor]:
        offsets = _first_of_each((bounds.diff() + C - 1) // C)
        sequence, place = _slots(offsets, chunks.count)
        start = bounds[sequence] + place * C
        return {
            "offsets": offsets,
            "start": start,
            "length": (bounds[sequence + 1] - start).clamp_(max=C),
        }

    return replace(chunks, cu_seqlens=bounds, **once(bounds, ("chunks", C, chunks.count), make))


def spread_over_chunks(x: Tensor, chunks: Chunks) -> Tensor:
    """Returns for each chunk what x [sequences, ...] has of its sequence;
    packed, `chunks` has its tables.
    """
    if chunks.packed:
        return x[_slots(chunks.offsets, chunks.count)[0]]
    return x.repeat_interleave(chunks.per_sequence, 0)


def segment_count(chunks: Chunks, HV: int, K: int, V: int, config: Config) -> int:
    """Returns how many segments there are, unused slots included; 0: sequences stay whole."""
    length = segment_length(chunks, HV, K, V, config)
    return length and _count(chunks, length)


def segment_tables(chunks: Chunks, HV: int, K: int, V: int, config: Config) -> Segments | None:
    """Returns the segments of `chunks`, which has its tables; None: sequences stay whole."""
    length = segment_length(chunks, HV, K, V, config)
    if not length:
        return None
    count, span = _count(chunks, length), length * chunks.size
    if not chunks.packed:
        each = count // chunks.sequences
        return Segments(
            replace(chunks, sequences=count, segments=each, span=span), chunks.sequences
        )
    bounds = chunks.cu_seqlens

    def make() -> tuple[Tensor, Tensor, Tensor]:
        offsets = _first_of_each((chunks.offsets.diff() + length - 1) // length)
        sequence, place = _slots(offsets, count + 1)
        # a slot that no segment uses begins and ends where the last sequence ends
        start = torch.minimum(bounds[sequence] + place * span, bounds[-1])
        return offsets, start, chunks.offsets[sequence] + place * length

    offsets, start, first = once(bounds, ("segments", chunks.size, length, count), make)
    cut = replace(chunks, sequences=count, cu_seqlens=start, offsets=first)
    return Segments(cut, chunks.sequences, offsets)


def _count(chunks: Chunks, length: int) -> int:
    """Returns how many segments of `length` chunks there are, for packed sequences at most.

    Their lengths stay on the device.
    """
    if chunks.packed:
        return chunks.count // length + chunks.sequences
    return chunks.sequences * -(-chunks.per_sequence // length)


def segment_length(chunks: Chunks, HV: int, K: int, V: int, config: Config) -> int:
    """Returns the chunks per segment; 0: sequences stay whole."""
    if SEGMENT != "auto":
        return SEGMENT or 0
    NV, NK = (-(-size // config.scan.columns) for size in (V, K))
    average = chunks.per_sequence // (chunks.sequences if chunks.packed else 1)
    programs, processors = chunks.sequences * HV * NV, config.processors
    # under torch.compile sizes may be symbols, which int() would fix: so it comes last
    if 2 * programs > processors or average < 8:
        return 0
    return chunks_per_segment(int(average), int(programs), (NV + NK) / NV, processors)


def _first_of_each(counts: Tensor) -> Tensor:
    """Returns the running sum from 0, [n + 1], of counts [n]."""
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0))


def _slots(offsets: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Returns each slot's sequence and its place in that sequence;
    slots past the end go to the last one.
    """
    slot = torch.arange(count, device=offsets.device)
    owner = torch.searchsorted(offsets[1:], slot, right=True).clamp_(max=offsets.shape[0] - 2)
    return owner, slot - offsets[owner]
