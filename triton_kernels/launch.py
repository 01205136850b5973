"""How every kernel is launched: tile extents, warps and pipeline stages, as one table.

No GPU was at hand, so nothing was timed. In 16 bits, the kernels of the gated delta rule have the
launches that `python -m tools.estimate --launches KERNEL` puts first, among those within the bounds
of `compile_only`; the other rows were chosen from registers, stack and shared memory alone. Nothing
is tuned at run time, so equal inputs take equal code paths and give equal bits.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, wraps
from math import inf
from threading import Lock
from typing import ParamSpec

from triton import knobs

from delta_trn.triton_kernels.chunks import PROCESSORS

ANY = inf
Arguments = ParamSpec("Arguments")

# most programs in backward of rms_norm, and spans of time in short_convolution; each writes its
# part of the weight's gradient
PROGRAMS = 1024


@dataclass(frozen=True)
class Card:
    """What launches depend on of a GPU: the major number of its compute capability,
    and its processors.
    """

    major: int = 9
    processors: int = PROCESSORS


# compute capabilities whose products are of warps: mma.sync, with operands in registers
WARPS = (8, 12)


@dataclass(frozen=True)
class Row:
    """One row of TABLE. A kernel is launched by the first row that names it and whose conditions
    hold.

    itemsize, height, width     the conditions: bytes of an element, height and width of `tile`, at
                                most
    majors                      the row is of GPUs of these compute capabilities; empty: of all
    columns                     least and most columns of the tile; between them,
                                power_of_two(width) / turns
    turns                       least turns that the kernel's loops over the width should take
    few                         the row holds only where scans of so many columns all run at once,
                                see `config`; 0: everywhere
    elements                    of the tile: its rows are elements / columns; 0 where it has no rows
    rows                        least rows of the tile; all that it has where elements is 1
    registers                   most per thread; None: as many as the compiler takes
    upright                     the scans' tiles stand as in the equations, not transposed
    gluon                       the kernel is the one in Gluon where it takes the call
    """

    kernels: str
    itemsize: float
    height: float
    width: float
    warps: int
    stages: int
    columns: tuple[int, float] = (0, 0)
    turns: int = 1
    elements: int = 0
    rows: int = 16
    few: int = 0
    registers: int | None = None
    upright: bool = False
    gluon: bool = False
    majors: tuple[int, ...] = ()


# In float32, products run on the ordinary cores with their operands in registers: short chunks, narrow tiles,
# or they spill. In 16 bits, a state of [64, 256] float32 fills the registers of four warps, and one of
# [128, 128] those of eight. A scan of 128 columns has half the programs of one of 64, and each takes 1.3
# times as long: that is slower where all programs run at once anyway.
# fmt: off
TABLE = (
    #    kernels           itemsize height width  warps stages  columns
    #                               (K)    (V)
    # in Gluon, four programs fit an SM
    Row("prepare",                2,  256,  ANY,     4,     1,  registers=128, gluon=True, majors=(9,)),
    # products of warps, tiles in 99 KB, and no row below
    Row("prepare",                2,  128,  ANY,     4,     1,  majors=WARPS),
    Row("prepare",                2,  ANY,  ANY,     8,     1,  majors=WARPS),
    Row("scan",                   2,  128,  ANY,     4,     2,  (16, 32), upright=True, majors=WARPS),
    Row("scan",                   2,  ANY,  ANY,     8,     1,  (16, 32), upright=True, majors=WARPS),
    Row("reverse",                2,  128,  ANY,     4,     1,  (16, 32), upright=True, majors=WARPS),
    Row("reverse",                2,  ANY,  ANY,     8,     1,  (16, 32), upright=True, majors=WARPS),
    Row("gradients",              2,  ANY,  ANY,     8,     1,  (16, 32), majors=WARPS),
    Row("refine",                 2,  ANY,  ANY,     4,     1,  (16, 64), majors=WARPS),
    # tiles of 64 columns and more fill 576 of 512 columns of tensor memory
    Row("scan",                   2,  ANY,  ANY,     4,     2,  (16, 32), upright=True, majors=(10,)),
    Row("prepare",                2,  ANY,  ANY,     4,     1),
    Row("prepare",                4,  128,  ANY,     4,     1),
    Row("prepare",                4,  ANY,  ANY,     8,     1),
    # one long sequence: the fewest columns, since most processors have a program only then
    Row("scan reverse",           2,  128,  ANY,     4,     3,  (16, 32), few=32, upright=True),
    Row("scan",                   2,  ANY,  ANY,     4,     2,  (16, 32), few=32, upright=True),
    Row("scan",                   2,   32,  ANY,     4,     3,  (16, 64)),
    Row("scan",                   2,  128,  ANY,     4,     3,  (16, 64), few=64),
    # two stages, so that two programs fit an SM
    Row("scan",                   2,   64,   64,     4,     2,  (16, 64)),
    Row("scan",                   2,  128,   64,     4,     3,  (16, 64)),
    Row("scan",                   2,  128,  ANY,     8,     3,  (16, 128)),
    Row("scan",                   2,  ANY,  ANY,     8,     2,  (16, 64), upright=True),
    Row("reverse",                2,   64,  ANY,     4,     2,  (16, 64), few=64),
    # two programs fit an SM, and at V = 128 one round of them is all
    Row("reverse",                2,   64,  ANY,     4,     2,  (16, 128)),
    Row("reverse",                2,   96,  ANY,     4,     2,  (16, 64)),
    Row("reverse",                2,  128,  ANY,     4,     2,  (16, 64), few=64),
    Row("reverse",                2,  128,   64,     4,     1,  (16, 64)),
    Row("reverse",                2,  128,  ANY,     8,     2,  (16, 128)),
    Row("reverse",                2,  ANY,  ANY,     8,     2,  (16, 64), upright=True),
    # four warps, so that two programs fit an SM
    Row("gradients",              2,  128,  ANY,     4,     1,  (16, 64)),
    Row("gradients",              2,  ANY,  ANY,     8,     3,  (16, 32)),
    Row("refine",                 2,  128,  ANY,     4,     1,  (16, 64), registers=128),
    Row("refine kimi_refine",   ANY,  ANY,  ANY,     8,     1,  (16, 64)),  # in 16 bits only
    # with four warps the gradients spill 1,960 bytes per thread
    Row("gradients",              4,   64,  ANY,     8,     1,  (16, 32)),
    Row("scan reverse gradients", 4,   64,  ANY,     4,     1,  (16, 32)),
    Row("scan reverse gradients", 4,  128,  ANY,     4,     1,  (16, 16)),
    Row("scan reverse gradients", 4,  ANY,  ANY,     8,     1,  (16, 16)),
    # 16 columns, the shortest side of a product: only the heads and V / 16 make programs
    Row("chain",                ANY,  128,  ANY,     4,     3,  (16, 16), elements=512),
    Row("chain",                ANY,  ANY,  ANY,     8,     3,  (16, 16), elements=512),
    Row("hopper_gradients",       2,  128,  128,     8,     1),
    Row("gates",                  2,  ANY,  ANY,     1,     1),
    # small models decode with a handful of heads, so only V / 32 makes programs
    Row("step",                 ANY,  ANY,  ANY,     4,     1,  (16, 32)),
    # sums over channels that lie next to each other: the fewer warps, the more of one is a thread's
    Row("step_values_first",    ANY,  128,  ANY,     2,     1,  (16, 32)),
    Row("step_values_first",    ANY,  ANY,  ANY,     4,     1,  (16, 32)),

    # decays per channel: tiles stand upright; prepare's columns are channels, which the gradients
    # take, too
    Row("kimi_prepare",           2,  128,  ANY,     4,     1,  (16, 32), gluon=True, majors=(9,)),
    Row("kimi_prepare",           2,  ANY,  ANY,     4,     1,  (16, 32)),
    Row("kimi_scan kimi_reverse", 2,  128,  ANY,     4,     1,  (16, 32), upright=True, majors=WARPS),
    # as of the gated delta rule: the fewest columns where most processors have a program only then
    Row("kimi_scan kimi_reverse", 2,  128,  ANY,     4,     2,  (16, 32), upright=True, majors=(10,)),
    Row("kimi_scan kimi_reverse", 2,  128,  ANY,     4,     2,  (16, 32), few=32, upright=True),
    Row("kimi_scan kimi_reverse", 2,   64,   64,     4,     2,  (16, 64), upright=True),
    Row("kimi_scan kimi_reverse", 2,  128,  ANY,     8,     2,  (16, 64), few=64, upright=True),
    Row("kimi_scan kimi_reverse", 2,  128,  ANY,     8,     2,  (16, 128), upright=True),
    Row("kimi_scan kimi_reverse", 2,  ANY,  ANY,     8,     1,  (16, 32), upright=True),
    Row("kimi_gradients",         2,  ANY,  ANY,     8,     1,  (16, 32), majors=WARPS),
    Row("kimi_gradients",         2,  ANY,  ANY,     4,     1,  (16, 32)),
    Row("kimi_hopper_gradients",  2,  ANY,  128,     4,     1),
    Row("kimi_prepare kimi_gradients", 4, ANY, ANY,  4,     1,  (16, 16)),
    # 16 elements of each tile in a thread, whose cumulated sums move through all warps
    Row("kimi_copies",          ANY,  ANY,  ANY,     8,     1,  (16, 64)),
    # launched by Kimi's rule only
    Row("products kimi_products", 2,  ANY,  ANY,     8,     2,  (16, 32)),
    Row("products kimi_products", 4,  ANY,  ANY,     4,     1,  (16, 16)),
    Row("kimi_scan kimi_reverse", 4,  128,  ANY,     4,     1,  (16, 16), upright=True),
    Row("kimi_scan kimi_reverse", 4,  ANY,  ANY,     8,     1,  (16, 16), upright=True),
    Row("sum_heads",            ANY,  ANY,  ANY,     4,     1,  (16, 256), elements=2048, rows=8),

    #                               (D)    (DV): 32 elements per thread
    Row("delta_residual",       ANY,  ANY,  ANY,     4,     1,  (1, ANY), elements=4096),

    #                                      (C): two or four channels per thread, and `rows` tokens
    Row("short_convolution",    ANY,  ANY,  ANY,     4,     1,  (16, 256), elements=1, rows=4),
    Row("short_convolution_forward", ANY, ANY, ANY,  4,     1,  (16, 512), elements=1, rows=8),

    #                                      (N): whole rows, 16 elements per thread
    Row("rms_norm",             ANY,  ANY, 2048,     4,     1,  (16, ANY), elements=2048, rows=1),
    Row("rms_norm",             ANY,  ANY, 4096,     8,     1,  (16, ANY), elements=2048, rows=1),
    Row("rms_norm",             ANY,  ANY,  ANY,    16,     1,  (16, ANY), elements=2048, rows=1),

    #                                      (V): 1 to 16 elements per thread: of fewer, several would hold
    #                                      each, and some of them read z after the others wrote dz over it
    Row("cross_entropy",        ANY,  ANY,  ANY,     8,     1,  (256, 4096)),
)

# itemsize and K at most, and GPUs, as in TABLE -> tokens in a chunk, and Triton's input_precision,
# which only float32 operands heed
CHUNKS = (
    (2, 128,    (), 64, "tf32"),
    (2, ANY, WARPS, 32, "tf32"),  # the gradients of 64 would take 104 KB
    (2, ANY,    (), 64, "tf32"),
    (4,  64,    (), 32, "ieee"),
    (4, ANY,    (), 16, "ieee"),
)
# fmt: on


@dataclass(frozen=True)
class Tile:
    """One launch: the extents that a program works on at once, its warps and its pipeline stages.

    columns     along the last axis: V, DV, C or N; 0 where the kernel does not cut it
    rows        along the axis before: K, D, tokens, or rows of a norm; 0 where the kernel does not
                cut it
    registers   most per thread; None: as many as the compiler takes
    upright     the scans' tiles stand as in the equations, not transposed
    gluon       the kernel is the one in Gluon where it takes the call
    """

    columns: int
    warps: int
    stages: int
    rows: int = 0
    registers: int | None = None
    upright: bool = False
    gluon: bool = False

    def options(self) -> dict[str, int | None]:
        """Returns what Triton is told of the launch.

        A product and a sum are one rounding (enable_fp_fusion) whatever Triton's release does by
        default: 3.10 turns that off, and every figure and bound here is of kernels that fuse.
        """
        return {
            "num_warps": self.warps,
            "num_stages": self.stages,
            "maxnreg": self.registers,
            "enable_fp_fusion": True,
        }


@dataclass(frozen=True)
class Config:
    """The launches of the kernels over a sequence: C tokens in a chunk, `dot` for tiles.product.

    processors of the GPU; refine is launched in 16 bits only, products by Kimi Delta Attention.
    """

    C: int
    dot: str
    prepare: Tile
    scan: Tile
    reverse: Tile
    gradients: Tile
    refine: Tile
    products: Tile
    processors: int


def power_of_two(size: int, least: int = 16) -> int:
    """Returns the tile extent that holds `size`: a power of two,
    by default at least a product's 16.
    """
    return max(least, 1 << (size - 1).bit_length())


def row_stride(x) -> int:
    """Returns the elements from a token of x [B, T, ...] to the next;
    of one token, those of its row.
    """
    return x.stride(1) if x.shape[1] > 1 else x.shape[2:].numel()


@lru_cache
def tile(
    kernel: str,
    width: int,
    height: int | None = None,
    *,
    itemsize: int = 2,
    few: int = 0,
    major: int = 9,
) -> Tile:
    """Returns the launch of `kernel` on data whose last axis has length `width` and the one before
    `height`.

    >>> tile("step", 128)
    Tile(columns=32, warps=4, stages=1, rows=0, registers=None, upright=False, gluon=False)
    """
    row = next(
        row
        for row in TABLE
        if kernel in row.kernels.split()
        and itemsize <= row.itemsize
        and width <= row.width
        and (height or 0) <= row.height
        and (not row.few or 0 < few <= row.few)
        and (not row.majors or major in row.majors)
    )
    least, most = row.columns
    columns = int(min(most, max(least, power_of_two(width, 1) // row.turns)))
    rows = 0
    if row.elements:
        rows = row.elements // columns
        rows = max(row.rows, rows if height is None else min(rows, power_of_two(height)))
    return Tile(columns, row.warps, row.stages, rows, row.registers, row.upright, row.gluon)


def arithmetic(dot: str = "ieee") -> str:
    """Returns the kernels' DOT: `dot`, or "interpreted"
    where Triton's interpreter will run them.
    """
    return "interpreted" if knobs.runtime.interpret else dot


_interpreter = Lock()


def take_turns(launch: Callable[Arguments, None]) -> Callable[Arguments, None]:
    """Decorates a function that launches a kernel: under Triton's interpreter, one thread at a
    time.

    The interpreter replaces functions of `triton.language` while a kernel runs and keeps the
    program's number in a global. Like `triton.jit` it asks once, on import, whether kernels are
    interpreted: a compiled launch is the function itself.
    """
    if not knobs.runtime.interpret:
        return launch

    @wraps(launch)
    def launch_alone(*arguments: Arguments.args, **named: Arguments.kwargs) -> None:
        with _interpreter:
            launch(*arguments, **named)

    return launch_alone


# global, not a context variable: autograd runs backward on CUDA in a thread with a context of its
# own
_change: Callable[[Config], Config] | None = None


@contextmanager
def adjust(change: Callable[[Config], Config]) -> Iterator[None]:
    """Within `with`, applies `change` to every Config: for tuning,
    and for tests of other layouts.
    """
    global _change
    outer, _change = _change, change
    try:
        yield
    finally:
        _change = outer


# the GPU of calls whose tensors are on none
_card = Card()


@contextmanager
def assume(card: Card) -> Iterator[None]:
    """Within `with`, launches are those of `card` where no GPU is:
    to compile for it, or to emulate it.
    """
    global _card
    outer, _card = _card, card
    try:
        yield
    finally:
        _card = outer


def config(
    K: int, V: int, *, itemsize: int, heads: float = ANY, card: Card | None = None, rule: str = ""
) -> Config:
    """Returns the launches for head sizes K and V and elements of `itemsize` bytes. card None: none
    is here.

    rule is what the names of the kernels begin with in TABLE.

    heads counts the value heads of all sequences. They are few where a GPU runs all programs of a
    scan of 64 columns at once, one per processor, and fewer where that holds for 32 columns. But
    those whose scans of 32 columns leave half the processors idle have sequences that may be cut,
    see `segments`, and 64 columns.
    """
    K, V = int(K), int(V)  # symbols under torch.compile, which no cache takes
    card = card or _card
    few = 64 if heads * -(-V // 64) <= card.processors else 0
    if card.processors < 2 * heads * -(-V // 32) <= 2 * card.processors:
        few = 32
    C, dot = next(
        (C, dot)
        for size, height, majors, C, dot in CHUNKS
        if itemsize <= size and height >= K and (not majors or card.major in majors)
    )
    kernels = ("prepare", "scan", "reverse", "gradients", "refine", "products")
    tiles = (
        tile(rule + kernel, V, K, itemsize=itemsize, few=few, major=card.major)
        for kernel in kernels
    )
    row = Config(C, arithmetic(dot), *tiles, processors=card.processors)
    return row if _change is None else _change(row)
