"""How the kernels of the gated delta rule cut the time axis: chunks, and segments of chunks."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

# of an H100 or H200; of another GPU, its driver says
PROCESSORS = 132


@dataclass(frozen=True)
class Chunks:
    """The chunks of a batch. Dense: B sequences of `tokens` each. Packed: tables on the device,
    else None.

    Where sequences are cut into segments (see `segments`), sequences, cu_seqlens and offsets are
    those of the segments; the chunks stay the same.

    count       chunks of all sequences; packed: an upper bound, tokens // C + N, since lengths stay
                on the device
    start       [count] int64, first token of a chunk
    length      [count] int64, tokens in a chunk; <= 0 for an unused slot
    offsets     [N + 1] int64, first chunk of every sequence
    segments    per sequence, of `span` tokens each; dense only
    """

    size: int
    count: int
    sequences: int
    tokens: int
    per_sequence: int
    packed: bool
    segments: int = 1
    span: int = 0
    cu_seqlens: Any = None
    offsets: Any = None
    start: Any = None
    length: Any = None


@dataclass(frozen=True)
class Segments:
    """Sequences that are cut into segments.

    chunks      the chunks, with segments in place of sequences
    sequences   number of sequences
    offsets     [sequences + 1] int64, first segment of every sequence; dense: None
    """

    chunks: Chunks
    sequences: int
    offsets: Any = None


@lru_cache
def chunks_per_segment(chunks: int, programs: int, columns: float, processors: int) -> int:
    """Returns the segment length in chunks that ends the scans soonest; 0 where sequences should
    stay whole.

    chunks      per sequence; packed: on average
    programs    of a scan over whole sequences
    columns     (K + V) / V: columns of the pass that gives A and B, over those of V

    The cost model counts steps: one chunk in every program that runs at a time. A step of the first
    pass, which writes no outputs, costs 0.7; a link of the chain costs 1. A segment has at least
    four chunks. Cutting costs floating-point operations and bytes, so it must promise at most 0.6
    of the steps. The numbers are estimates from counts of operations: no GPU was at hand.
    """

    def steps(segments: int) -> float:
        length = -(-chunks // segments)
        first = -(-int(segments * programs * columns) // processors)
        second = -(-segments * programs // processors)
        return (0.7 * first + second) * length + segments

    counts = range(2, chunks // 4 + 1)
    best = min(counts, key=steps, default=0)
    whole = -(-programs // processors) * chunks
    return -(-chunks // best) if best and steps(best) <= 0.6 * whole else 0
