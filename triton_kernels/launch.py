"""How every kernel is launched: chunk size, tile widths, warps and pipeline stages, as one table.

The rows were chosen from what the compiler reports for sm_90 (registers, stack, shared memory; `python -m
triton_kernels.compile_only` prints it), not from timings: no GPU was at hand. Nothing is tuned at run time,
so equal inputs take equal code paths and give equal bits.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from triton import knobs

# of an H100 or H200
PROCESSORS = 132


@dataclass(frozen=True)
class Tile:
    """BV: columns of V a program works on at once; 0 where the kernel has no such loop."""

    BV: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Config:
    """One launch of all four kernels. `dot` goes to tiles.product; only float32 operands heed it."""

    C: int
    dot: str
    prepare: Tile
    scan: Tile
    reverse: Tile
    gradients: Tile


@dataclass(frozen=True)
class Chunks:
    """How the time axis is cut. Dense: B sequences of T tokens. Packed: tables on the device, None otherwise.

    Where sequences are cut into segments (see `segments`), sequences, cu_seqlens and offsets are theirs; the
    chunks stay.

    count       chunks of all sequences; packed: an upper bound, T // C + N, since lengths stay on the device
    start       [count] int64, first token;  length [count], tokens in it, <= 0 for an unused slot
    offsets     [N + 1] int64, first chunk of every sequence
    segments    of every sequence, span tokens each; dense
    """

    size: int
    count: int
    sequences: int
    T: int
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
    """Sequences cut into segments.

    chunks      with segments in place of sequences
    sequences   that are cut
    offsets     [sequences + 1] int64, every sequence's first segment; dense: None
    """

    chunks: Chunks
    sequences: int
    offsets: Any = None


@lru_cache
def chunks_per_segment(chunks: int, programs: int, columns: float, processors: int) -> int:
    """Into how many chunks a segment sequences are to be cut so that the scans end soonest; 0: not at all.

    chunks      of a sequence; packed ones: on average
    programs    of a scan over whole sequences
    columns     columns of the pass that gives A and B, over those of V: (K + V) / V

    Counts steps, one chunk in every program that runs at a time. The first pass has no outputs, so its step
    costs 0.7; a link of the chain costs 1; a segment has four chunks at least. The split must promise 0.6 of
    the steps, for it costs floating-point operations and bytes too. These numbers are estimates from the
    counts of operations: no GPU was at hand.
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


def power_of_two(size: int) -> int:
    """The tile extent that holds `size`: a power of two, and 16 at least, the shortest side of a product."""
    return max(16, 1 << (size - 1).bit_length())


def arithmetic(dot: str = "ieee") -> str:
    """The kernels' DOT: `dot`, unless Triton says that its interpreter will run them."""
    return "interpreted" if knobs.runtime.interpret else dot


_change: Callable[[Config], Config] | None = None


@contextmanager
def adjusted(change: Callable[[Config], Config]) -> Iterator[None]:
    """Within `with`, every row is what `change` makes of it: for tuning, and for tests of other layouts."""
    global _change
    outer, _change = _change, change
    try:
        yield
    finally:
        _change = outer


def config(K: int, V: int, *, itemsize: int) -> Config:
    """The row for head sizes K, V and elements of `itemsize` bytes."""
    row = _row(K, V, itemsize)
    row = replace(row, dot=arithmetic(row.dot))
    return row if _change is None else _change(row)


def _row(K: int, V: int, itemsize: int) -> Config:
    KP = power_of_two(K)
    wide = min(64, power_of_two(V))
    if itemsize == 4:
        # float32 products run on the ordinary cores, operands in registers: small chunks, or they spill
        C = 32 if KP <= 64 else 16
        tile = Tile(min(C, power_of_two(V)), 4 if KP <= 128 else 8, 1)
        return Config(C, "ieee", Tile(0, tile.warps, 1), tile, tile, tile)
    prepare = Tile(0, 4, 1)
    if KP > 128:
        # a state of [64, 256] float32 fills the registers of four warps, and in both kernels of backward two
        # stages of the tiles pass the 227 KiB of shared memory that there are
        scan = Tile(wide, 8, 2)
        return Config(64, "tf32", prepare, scan, replace(scan, stages=1), replace(scan, stages=1))
    # two turns at least around the loops over V: unrolled into one, they spill (424 bytes a thread at 64:64)
    gradients = Tile(64 if V > 64 else max(16, wide // 2), 8, 2)
    scan = Tile(wide, 4, 2)
    return Config(64, "tf32", prepare, scan, scan, gradients)
