"""What a call of the gated delta rule launches at each shape: kernels, their sizes, the bytes they
must move.

    paper_256 ... paper_2048    the widths of arXiv:2412.06464's models: 30 sequences of 1,024
                                tokens, 6 heads
    qwen3_next_*                Qwen3-Next's layer: 16 heads of queries and keys, 32 of values
    qwen3_5_*                   Qwen3.5's larger layers, 16 and 48 or 64, and the last on 8 GPUs: 2
                                and 8
    kimi_*                      Kimi Delta Attention, 32 heads, with the lower bound of g that its
                                models have

All are in bfloat16, with gates made in the kernels, normalized queries and keys, and no initial or
final state, as in training.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from delta_trn.backends.gated_delta_rule.triton_time_adapter import segment_length
from delta_trn.triton_kernels import (
    gated_delta_rule_bwd,
    gated_delta_rule_fwd,
    gated_delta_rule_refine,
    gated_delta_rule_reverse,
    kimi_delta_attention,
    segments,
)
from delta_trn.triton_kernels.chunks import Chunks
from delta_trn.triton_kernels.hopper import gradients as hopper_gradients
from delta_trn.triton_kernels.hopper.prepare import heads_together
from delta_trn.triton_kernels.kimi_delta_attention import gradients_hopper
from delta_trn.triton_kernels.launch import config, power_of_two, tile
from delta_trn.triton_kernels.variants import Variant, by_heads, channel_rows_of, rows_of
from tools.estimate import machine
from tools.estimate.simulate import Work

ITEM = 2


@dataclass(frozen=True)
class Shape:
    """The sizes of a call; `tokens` per sequence, and `rule` as launch.config takes it."""

    sequences: int
    tokens: int
    H: int
    HV: int
    K: int
    V: int
    rule: str = ""


SHAPES = {
    "paper_256": Shape(30, 1024, 6, 6, 32, 64),
    "paper_512": Shape(30, 1024, 6, 6, 64, 128),
    "paper_768": Shape(30, 1024, 6, 6, 96, 192),
    "paper_1024": Shape(30, 1024, 6, 6, 128, 256),
    "paper_2048": Shape(30, 1024, 6, 6, 256, 512),
    "qwen3_next_1x8192": Shape(1, 8192, 16, 32, 128, 128),
    "qwen3_next_4x8192": Shape(4, 8192, 16, 32, 128, 128),
    "qwen3_next_1x32768": Shape(1, 32768, 16, 32, 128, 128),
    "qwen3_5_48_1x8192": Shape(1, 8192, 16, 48, 128, 128),
    "qwen3_5_64_1x8192": Shape(1, 8192, 16, 64, 128, 128),
    "qwen3_5_64_4x8192": Shape(4, 8192, 16, 64, 128, 128),
    "qwen3_5_8_1x32768": Shape(1, 32768, 2, 8, 128, 128),
    "kimi_1x8192": Shape(1, 8192, 32, 32, 128, 128, "kimi_"),
    "kimi_4x8192": Shape(4, 8192, 32, 32, 128, 128, "kimi_"),
}


@dataclass(frozen=True)
class Launch:
    """A kernel of a call.

    variant     None: `count` kernels of PyTorch's or of another project's, of which only the bytes
                count
    written     bytes that it writes, where it is asked what its bytes alone take
    """

    name: str
    backward: bool
    variant: Variant | None
    work: Work
    count: int = 1
    written: float = 0.0


def keeps_states(shape: Shape) -> bool:
    """Returns whether forward keeps S and U for backward,
    as one call of the Triton adapter does.
    """
    chunks, most = shape.sequences * -(-shape.tokens // 64), machine.MEBIBYTES * 2**20 // 8
    return chunks * shape.HV * shape.V * (shape.K + 64) * ITEM <= most


def of_documents(shape: Shape) -> Iterator[Launch]:
    """Yields those of Kimi Delta Attention where rows hold documents, which places tell apart."""
    yield from _Calls(shape).of_channels("documents")


def launches(shape: Shape) -> Iterator[Launch]:
    """Yields the launches of forward and backward in their order, as triton_adapter makes them."""
    calls = _Calls(shape)
    if shape.rule:
        yield from calls.of_channels()
        return
    keeps = keeps_states(shape)
    yield calls.prepare()
    if calls.segments > 1:
        yield calls.scan("scan of segments", "dense segments", writes=0)
        yield calls.chain("chain", backward=False)
    yield calls.scan("scan", "dense train" if keeps else "dense infer", writes=1)
    if calls.segments > 1:
        yield calls.reverse("reverse scan of segments", "dense segments")
        yield calls.chain("reverse chain", backward=True)
    if not keeps:
        yield calls.scan("scan again", "dense recompute", writes=0, backward=True)
    yield calls.reverse("reverse scan", "dense")
    yield calls.refine()
    yield from calls.gradients()
    yield from calls.sums()


def bytes_alone(shape: Shape) -> Iterator[Launch]:
    """Yields the same of Kimi Delta Attention, of which only the bytes count: no kernel that reads
    and writes them once takes less.
    """
    for x in launches(shape):
        if x.variant is not None:
            x = replace(x, variant=None, work=Work(0, x.work.load_bytes + x.written))
        yield x


class _Calls:
    """Makes the launches of one shape."""

    def __init__(self, shape: Shape):
        self.shape = shape
        heads = shape.sequences * shape.HV
        self.row = config(shape.K, shape.V, itemsize=ITEM, heads=heads, rule=shape.rule)
        # kernel -> what the options of its variants for this many heads end with
        kernels = ("kimi_scan", "kimi_reverse") if shape.rule else ("scan", "reverse_scan")
        self.heads = {
            kernel: next(
                x
                for x, tile in by_heads(name, shape.K, shape.V, ITEM, shape.rule).items()
                if tile == getattr(self.row, name)
            )
            for kernel, name in zip(kernels, ("scan", "reverse"), strict=True)
        }
        # whether Hopper's kernel makes the gradients, which adds those of a key's value heads
        self.adds_heads = self.row.prepare.gluon and shape.K == shape.V == hopper_gradients.SIZE
        self.C = self.row.C
        self.per_sequence = -(-shape.tokens // self.C)
        self.chunks = shape.sequences * self.per_sequence
        cut = Chunks(
            self.C, self.chunks, shape.sequences, shape.tokens, self.per_sequence, packed=False
        )
        self.span = segment_length(cut, shape.HV, shape.K, shape.V, self.row) or self.per_sequence
        self.segments = -(-self.per_sequence // self.span)
        # bytes of one tensor
        rows = shape.sequences * shape.tokens * ITEM
        self.keys, self.values = rows * shape.H * shape.K, rows * shape.HV * shape.V
        self.states = self.chunks * shape.HV * shape.K * shape.V * ITEM
        self.T = self.P = self.chunks * shape.HV * self.C * self.C * ITEM
        self.factor = self.chunks * shape.HV * self.C * 4  # one of the rows
        self.mask = shape.K / power_of_two(shape.K)

    def _variant(self, module, options: str, kernel: str, **values) -> Variant:
        """Returns one of the variants that compile_only compiles, with this shape's heads."""
        options += self.heads.get(kernel, "")
        variant = next(
            x
            for x in module.variants(self.shape.K, self.shape.V, ITEM, False)
            if (x.kernel, x.options) == (kernel, options)
        )
        lie = channel_rows_of if self.shape.rule else rows_of
        heads = lie(self.shape.H, self.shape.HV, self.shape.K, self.shape.V)
        if kernel in ("kimi_scan", "kimi_reverse"):  # which read qg, kg and kl
            heads |= dict.fromkeys(("QR", "KR"), self.shape.HV * self.shape.K)
        if kernel == "kimi_gradients_hopper" and self.shape.H == self.shape.HV:
            heads |= {"DQR": heads["QR"], "DKR": heads["KR"]}
        return replace(variant, values=variant.values | heads | values)

    def _give(self, variant: Variant, *names: str) -> Variant:
        """Returns the variant with tensors that it had as absent."""
        return replace(variant, values={n: v for n, v in variant.values.items() if n not in names})

    def _tiles(self, columns: int) -> int:
        return -(-self.shape.V // columns)

    def _serial(self, columns: int, tiles: int, load_bytes: float) -> Work:
        full = self.shape.V / (self._tiles(columns) * columns)
        programs = self.shape.sequences * self.segments * self.shape.HV * tiles
        return Work(programs, load_bytes, (self.span,), mask=self.mask * full, serial=True)

    def prepare(self) -> Launch:
        together = heads_together(self.shape.H, self.shape.HV) if self.row.prepare.gluon else 1
        variant = self._variant(
            gated_delta_rule_fwd, "dense, gates made", "prepare", TOGETHER=together
        )
        work = Work(
            self.chunks * self.shape.HV // together, 2 * self.keys + 2 * self.factor, mask=self.mask
        )
        return Launch("prepare", False, variant, work)

    def scan(self, name: str, options: str, *, writes: int, backward: bool = False) -> Launch:
        """writes: how many of o it writes; reading q and P goes with it."""
        columns = self.row.scan.columns
        variant = self._variant(gated_delta_rule_fwd, options, "scan")
        tiles = self._tiles(columns)
        load_bytes = self.keys + self.values + self.T + 5 * self.factor
        if name == "scan of segments":
            variant = self._give(variant, "transition", "final_state")
            tiles += -(-self.shape.K // columns)
        elif self.segments > 1:
            variant = self._give(variant, "initial_state")
        if writes:
            load_bytes += self.keys + self.P + self.factor
        return Launch(name, backward, variant, self._serial(columns, tiles, load_bytes))

    def reverse(self, name: str, options: str) -> Launch:
        columns = self.row.reverse.columns
        variant = self._variant(gated_delta_rule_reverse, options, "reverse_scan")
        load_bytes = 2 * self.keys + self.values + self.T + self.P + 4 * self.factor
        if options == "dense" and self.segments > 1:
            variant = self._give(variant, "initial_state", "dstate", "carry")
        return Launch(name, True, variant, self._serial(columns, self._tiles(columns), load_bytes))

    def chain(self, name: str, *, backward: bool) -> Launch:
        variant = self._variant(segments, "backward" if backward else "forward", "chain")
        variant = replace(
            variant, values=variant.values | {"initial": None, "final": None, "offsets": None}
        )
        shape, tile = self.shape, variant.tile
        programs = shape.sequences * shape.HV * self._tiles(tile.columns)
        count = shape.sequences * self.segments * shape.HV
        load_bytes = 4 * count * shape.K * (shape.K + shape.V)
        work = Work(
            programs, load_bytes, others=(self.segments, -(-shape.K // tile.rows)), serial=True
        )
        return Launch(name, backward, variant, work)

    def refine(self) -> Launch:
        """As launched for keys that are not alike, where every program reads its sums and ends."""
        variant = self._variant(gated_delta_rule_refine, "dense", "refine")
        heads = min(self.shape.HV, gated_delta_rule_refine.HEADS)
        variant = replace(variant, values=variant.values | {"HEADS": power_of_two(heads, 1)})
        programs = self.chunks * -(-self.shape.HV // heads)
        return Launch("refine", True, variant, Work(programs, self.factor, idle=True))

    def gradients(self) -> Iterator[Launch]:
        shape, programs = self.shape, self.chunks * self.shape.HV
        load_bytes = 4 * self.values + 2 * self.states + 2 * self.keys + 6 * self.factor
        if self.adds_heads:
            variant = self._variant(hopper_gradients, "dense", "hopper_gradients")
            turns = -(-self.chunks * shape.H // machine.PROCESSORS)
            load_bytes += 2 * self.factor
            work = Work(machine.PROCESSORS, load_bytes, (turns, shape.HV // shape.H), serial=True)
            yield Launch("gradients", True, variant, work)
            variant = self._variant(hopper_gradients, "dense, gates made", "gates")
            yield Launch("gates", True, variant, Work(programs, 12 * self.factor))
            return
        variant = self._variant(gated_delta_rule_bwd, "dense, gates made", "gradients")
        if self.segments > 1:
            variant = self._give(variant, "carry")
        loops = (3 if shape.K > 64 else 2) * (self._tiles(self.row.gradients.columns),)
        if shape.HV > shape.H:  # dq and dk of value heads that share a key are summed in float32
            types = {
                name: " ".join(x for x in of.split() if x not in ("dq", "dk"))
                for name, of in variant.types.items()
            }
            variant = replace(variant, types=types | {"*fp32": types["*fp32"] + " dq dk"})
        yield Launch("gradients", True, variant, Work(programs, load_bytes, loops, mask=self.mask))

    def sums(self) -> Iterator[Launch]:
        """What is summed: by PyTorch the gradients of A_log and dt_bias;
        with grouped heads, dk and dq.
        """
        shape = self.shape
        yield Launch("sums of gates", True, None, Work(0, 16 * self.chunks * shape.HV), count=2)
        if shape.HV > shape.H and not self.adds_heads:
            variant = self._variant(gated_delta_rule_bwd, "", "sum_heads")
            programs = shape.sequences * shape.tokens // variant.tile.rows * shape.H
            work = Work(
                programs, 2 * self.keys * shape.HV // shape.H, others=(shape.HV // shape.H,)
            )
            for name in ("dk", "dq"):
                yield Launch(f"sums of {name}", True, variant, work)

    def of_channels(self, layout: str = "dense") -> Iterator[Launch]:
        """Yields the launches of Kimi Delta Attention, as its triton_adapter makes them;
        g is float32. layout "documents": a row's tokens have places.
        """
        shape, modules = self.shape, (kimi_delta_attention.fwd, kimi_delta_attention.bwd)
        programs, scaled = self.chunks * shape.HV, self.keys * shape.HV // shape.H
        tiles, given = self._tiles(self.row.products.columns), 2 * (self.keys + scaled)
        prepare = Work(programs, given + self.factor, (-(-shape.K // 64),), (), self.mask)
        multiply = Work(programs, 4 * self.values + 2 * self.states, (tiles,), (), self.mask)
        slices = gradients_hopper.slices_of_32(shape.K)
        gradients = Work(programs, given + 3 * scaled + 2 * self.P, (slices,), (), self.mask)
        scan, reverse = (
            self._serial(columns, self._tiles(columns), 3 * scaled + self.values + self.T + self.P)
            for columns in (self.row.scan.columns, self.row.reverse.columns)
        )
        copies = tile("kimi_copies", shape.K)
        across = -(-shape.K // copies.columns)
        copy = Work(programs * across, given + 3 * self.factor, (), (), self.mask)
        bounded = f"{layout}, gates with a bound"
        # what each writes: of channels, one number for each chunk, in float32
        channels = 4 * programs * shape.K
        prepared = 3 * scaled + self.T + self.P + 9 * self.factor + channels
        combined = 2 * (self.keys if shape.H == shape.HV else 2 * scaled)  # dq and dk
        found = 3 * scaled + self.values + 2 * self.P + channels + self.factor
        for name, backward, kernel, options, work, written in (
            ("prepare", False, "prepare_hopper", bounded, prepare, prepared),
            ("scan", False, "scan", "dense", scan, 2 * self.values + self.states),
            ("scaled copies again", True, "copies", bounded, copy, 3 * scaled),
            ("reverse scan", True, "reverse", "dense", reverse, self.values + self.states),
            ("products", True, "products", "dense", multiply, found),
            ("gradients", True, "gradients_hopper", bounded, gradients, combined + 2 * scaled),
        ):
            module = modules[backward and kernel != "copies"]
            variant = self._variant(module, options, f"kimi_{kernel}")
            yield Launch(name, backward, variant, work, written=written)
        yield Launch("sums of gates", True, None, Work(0, 4 * programs * (shape.K + 1)), count=4)
