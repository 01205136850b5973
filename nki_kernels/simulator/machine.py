"""One run of a kernel: its memory, its instruction counter, and the checks that operands pass.

`Instruction` is what each function of nki.isa drives:

    run = Instruction("tensor_copy", engine)     # opens it on the current machine
    values = run.read("src", src)                # checks the operand, returns its NumPy view
    out = run.dst("dst", dst)                    # checks the destination
    run.write(out, values)                       # rounds, stores, marks who wrote
"""

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from math import prod
from typing import Any

import numpy as np

from delta_trn.nki_kernels.simulator.cores import Pair
from delta_trn.nki_kernels.simulator.dtypes import DType, dtype_of, store
from delta_trn.nki_kernels.simulator.errors import ConstraintError, StrictError, require
from delta_trn.nki_kernels.simulator.memory import (
    BY_OTHER,
    ON_CHIP,
    PSUM,
    SBUF,
    UNWRITTEN,
    Life,
    MemoryRegion,
    NkiTensor,
    Storage,
)
from delta_trn.nki_kernels.simulator.targets import PARTITIONS, PSUM_BANK, PSUM_BANKS, Target


class Engine(Enum):
    unknown = 0
    tensor = 1
    scalar = 2
    gpsimd = 3
    dma = 4
    vector = 5
    sync = 6


@dataclass(frozen=True)
class Region:
    """Which part of which storage an operand touches: partitions and bytes within a partition, half open."""

    storage: int
    partitions: tuple[int, int]
    span: tuple[int, int]


@dataclass(frozen=True)
class Operand:
    role: str
    name: str
    shape: tuple[int, ...]
    dtype: DType
    buffer: MemoryRegion
    region: Region
    run: int  # contiguous bytes at a time, what one DMA descriptor can move

    @property
    def free(self) -> int:
        return prod(self.shape[1:])

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Record:
    """One executed instruction, as the trace keeps it."""

    index: int
    op: str
    engine: Engine
    reads: tuple[Operand, ...]
    writes: tuple[Operand, ...]
    flags: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Numerics:
    """How exact the engines are; settings other than the default show what a kernel is sensitive to.

    matmul            "bfloat16" or "tfloat32" rounds float32 operands before they are multiplied: public
                      measurements disagree on whether the Tensor engine's float32 products are exact
    activation_ulps   activation functions are off by up to so many units of 2^-23 relative, at random: on
                      the chip they are piecewise polynomials
    """

    matmul: str = "float32"
    activation_ulps: float = 0.0


EXACT = Numerics()


class Machine:
    """The state of one simulated core during one kernel call."""

    def __init__(self, target: Target, *, strict: bool, trace: bool, numerics: Numerics) -> None:
        self.target = target
        self.strict = strict
        self.numerics = numerics
        self.count = 0
        self.lives: list[Life] = []
        self.trace: list[Record] | None = [] if trace else None
        self.scalar_registers = np.zeros((PARTITIONS, 1), np.float32)
        self.vector_registers = np.zeros((PARTITIONS, 1), np.float32)
        self.rng = np.random.default_rng(0)
        self.core = 0
        self.cores = 1
        self.pair: Pair | None = None
        self._shared = 0  # shared allocations so far
        self.partial_reads: list[str] = []
        self.copied: list[tuple[np.ndarray, NkiTensor]] = []  # arguments that were not contiguous

    def allocate(
        self,
        shape: Iterable[int],
        dtype: object,
        buffer: MemoryRegion,
        name: str = "",
        address: object = None,
    ) -> NkiTensor:
        shape = tuple(int(n) for n in shape)
        kind = dtype_of(dtype)
        require(all(n > 0 for n in shape), f"tensor shape {shape} has an axis that is not positive")
        if buffer in ON_CHIP:
            require(
                len(shape) >= 2,
                "SBUF and PSUM tensors must have at least 2 dimensions (partition-dim and free-dim), "
                f"got shape {shape}",
            )
            limit = self.target.sbuf if buffer is SBUF else self.target.psum
            size = prod(shape[1:]) * kind.itemsize
            if self.strict and size > limit:
                raise StrictError(
                    f"{buffer.value} capacity exceeded: tensor `{name}` of shape {shape} {kind} takes "
                    f"{size} bytes "
                    f"per partition, {self.target.name} has {limit}"
                )
        number = len(self.lives)

        def make(number: int) -> Storage:
            fresh = np.full(shape, kind.poison, kind.numpy)
            return Storage(fresh, kind, buffer, name or f"t{number}", number)

        if self.pair is not None and buffer is MemoryRegion.shared_hbm:
            # below zero, so that no private tensor of either core has the same number
            storage = self.pair.storage(self._shared, lambda: make(-1 - self._shared))
            self._shared += 1
        else:
            storage = make(number)
        tensor = NkiTensor(storage.base, storage)
        if address is not None:
            tensor.storage.address = address  # pyright: ignore[reportAttributeAccessIssue]
            tensor.partition = int(address[0])  # pyright: ignore[reportIndexIssue]
        self.lives.append(storage.life)
        return tensor

    def argument(self, array: np.ndarray, name: str) -> NkiTensor:
        number = len(self.lives)
        storage = Storage(array, dtype_of(array.dtype), MemoryRegion.shared_hbm, name, number, True)
        self.lives.append(storage.life)
        return NkiTensor(array, storage)

    def peaks(self) -> tuple[int, int]:
        """Peak live bytes per partition of SBUF and peak live banks of PSUM, over the program order.

        A tile lives from the first instruction that writes it to the last that touches it. Tiles that share
        partitions are not packed side by side.
        """
        return self._peak(SBUF)[0], self._peak(PSUM)[0]

    def check_capacity(self) -> None:
        for buffer, limit, unit in (
            (SBUF, self.target.sbuf, "bytes per partition"),
            (PSUM, PSUM_BANKS, "banks of 2 KiB per partition"),
        ):
            peak, index, live = self._peak(buffer)
            if peak > limit:
                largest = sorted(live, key=lambda s: -s.free_bytes)[:6]
                names = ", ".join(f"`{s.name}` {s.shape} {s.dtype}" for s in largest)
                raise StrictError(
                    f"{buffer.value} capacity exceeded: {peak} {unit} live at instruction {index}, "
                    f"{self.target.name} has {limit}; {len(live)} tiles are live, the largest: {names}"
                )

    def _peak(self, buffer: MemoryRegion) -> tuple[int, int, list[Life]]:
        tiles = [s for s in self.lives if s.buffer is buffer and s.first is not None]
        weigh = (lambda s: -(-s.free_bytes // PSUM_BANK)) if buffer is PSUM else (lambda s: s.free_bytes)
        events = sorted(
            [(s.first or 0, 0, weigh(s)) for s in tiles] + [(s.last, 1, -weigh(s)) for s in tiles]
        )
        live = peak = at = 0
        for index, _, change in events:
            live += change
            if live > peak:
                peak, at = live, index
        return peak, at, [s for s in tiles if (s.first or 0) <= at <= s.last]


class _Running(threading.local):
    """The machine of this thread, if a kernel is running."""

    machine: Machine | None = None


running = _Running()


def current() -> Machine:
    machine = running.machine
    if machine is None:
        raise RuntimeError("nki instructions run inside a kernel: call it, or nki.simulate(kernel)(...)")
    return machine


# Instructions that cannot write where they read: they carry state, or move elements.
NOT_IN_PLACE = (
    "tensor_tensor_scan",
    "nc_transpose",
    "dma_transpose",
    "tensor_partition_reduce",
    "nc_n_gather",
)


class Instruction:
    """One instruction being executed: checks operands, stores results, and writes itself into the trace."""

    __slots__ = (
        "_latched",
        "_reads",
        "_writes",
        "engine",
        "index",
        "machine",
        "name",
        "op",
        "strict",
        "target",
    )

    def __init__(self, op: str, engine: Engine) -> None:
        machine = current()
        self.op = op
        self.engine = engine
        self.machine = machine
        self.target = machine.target
        self.strict = machine.strict
        self.index = machine.count
        machine.count += 1
        self._reads: list[tuple[str, NkiTensor]] = []
        self._writes: list[tuple[str, NkiTensor]] = []
        self._latched: tuple[str, ...] = ("bias",)  # (P, 1) operands, read before the engine streams

    # Operands

    def read(self, role: str, tensor: object, regions: tuple[MemoryRegion, ...] = ON_CHIP) -> np.ndarray:
        """Check an input operand and return its values."""
        t = self._operand(role, tensor, regions)
        storage = t.storage
        storage.life.last = self.index
        self._reads.append((role, t))
        if storage.writer is UNWRITTEN or not isinstance(storage.writer, int):
            self._check_written(role, t)
        if t.indirection is not None:
            flat, where = t.indirection
            return flat[where]
        return t.array

    def dst(self, role: str, tensor: object, regions: tuple[MemoryRegion, ...] = ON_CHIP) -> NkiTensor:
        """Check an output operand."""
        t = self._operand(role, tensor, regions)
        if 0 in t.array.strides and t.indirection is None:
            for stride, count in zip(t.array.strides, t.shape, strict=True):
                require(
                    stride != 0 or count == 1,
                    f"{self.op} {role} writes through a broadcast view of `{t.name}`",
                )
        self._writes.append((role, t))
        return t

    def write(self, dst: NkiTensor, values: np.ndarray, code: int = BY_OTHER) -> None:
        """Round values to dst's dtype, store them, and remember who wrote."""
        if values.shape != dst.array.shape:
            values = values.reshape(dst.array.shape)
        store(dst.array, dst.dtype, values)
        self.wrote(dst, code)

    def wrote(self, dst: NkiTensor, code: int = BY_OTHER) -> None:
        storage = dst.storage
        if self.strict:
            for role, source in self._reads:
                if source.storage is storage and role not in self._latched:
                    self._check_in_place(dst, role, source)
        life = storage.life
        if life.first is None:
            life.first = self.index
        life.last = self.index
        storage.mark(dst.array, code)

    def done(self, **flags: Any) -> "Handle":
        trace = self.machine.trace
        if trace is not None:
            reads = tuple(_operand(role, t) for role, t in self._reads)
            writes = tuple(_operand(role, t) for role, t in self._writes)
            trace.append(Record(self.index, self.op, self.engine, reads, writes, flags))
        return HANDLE

    # Checks shared by instructions

    def same_elements(self, a: NkiTensor, b: NkiTensor, role_a: str, role_b: str) -> None:
        """Same partitions and same number of elements per partition: nothing broadcasts by itself."""
        if a.shape == b.shape:
            return
        if a.shape[0] != b.shape[0] or a.size != b.size:
            raise ConstraintError(
                f"{self.op} requires {role_a} and {role_b} to have the same partitions and elements per "
                "partition, "
                f"got {a.shape} and {b.shape}; broadcast explicitly with .broadcast or a stride-0 .ap"
            )

    def not_both_in_psum(self, role_a: str, a: NkiTensor, role_b: str, b: NkiTensor) -> None:
        if self.strict and a.buffer is PSUM and b.buffer is PSUM:
            raise StrictError(
                f"{self.op} {role_a} and {role_b} cannot both be in psum; copy one of `{a.name}`, "
                f"`{b.name}` to sbuf"
            )

    def needs_generation(self, generation: int, what: str) -> None:
        if self.target.generation < generation:
            raise ConstraintError(
                f"{what} needs NeuronCore-v{generation} or newer, the target is {self.target.name} "
                f"(NeuronCore-v{self.target.generation})"
            )

    def scalar_operand(self, role: str, value: object, partitions: int, *, bitvec: bool = False) -> Any:
        """A number, or the (P, 1) tile that broadcasts along the free axis."""
        if not isinstance(value, NkiTensor):
            if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
                raise TypeError(
                    f"{self.op} {role} must be a number or a (P, 1) tile, got {type(value).__name__}"
                )
            return int(value) if bitvec else np.float32(value)
        values = self.read(role, value)
        self._latched += (role,)
        require(
            value.shape[0] == partitions and value.size == partitions,
            f"{self.op} {role} must be a number or a tile of shape ({partitions}, 1), got {value.shape}",
        )
        if self.strict and not bitvec and value.dtype != "float32":
            raise StrictError(f"{self.op} {role} dtype must be float32, got {value.dtype}")
        return values.reshape(partitions, 1)

    def _operand(self, role: str, tensor: object, regions: tuple[MemoryRegion, ...]) -> NkiTensor:
        if not isinstance(tensor, NkiTensor):
            raise TypeError(f"{self.op} {role} must be a tensor, got {type(tensor).__name__}")
        if tensor.buffer not in regions:
            allowed = [r.value for r in regions]
            raise ConstraintError(f"{self.op} {role} must be in {allowed}, got {tensor.buffer.value}")
        if tensor.on_chip:
            partitions = tensor.shape[0]
            if partitions > PARTITIONS:
                raise ConstraintError(
                    f"{self.op} {role} partition dimension {partitions} exceeds maximum {PARTITIONS}"
                )
            if self.engine is not Engine.dma and self.strict:
                if tensor.partition:
                    self._check_start(role, tensor)
                if self.engine is Engine.gpsimd and tensor.buffer is PSUM:
                    raise StrictError(f"{self.op} {role} is in psum, which the GpSimd engine cannot access")
                if tensor.array.ndim > 5:
                    self._check_rank(role, tensor)
        return tensor

    def _check_in_place(self, dst: NkiTensor, role: str, source: NkiTensor) -> None:
        a, b = dst.array, source.array
        same = a.strides == b.strides and a.shape == b.shape and dst.offset == source.offset
        if same and self.op not in NOT_IN_PLACE:
            return
        if dst.indirection is None and source.indirection is None and np.shares_memory(a, b):
            how = "in place" if same else "at another position"
            raise StrictError(
                f"{self.op} dst overlaps {role} of `{source.name}` {how}; the engine streams "
                "and would read what it has overwritten, use a separate tile"
            )

    def _check_start(self, role: str, tensor: NkiTensor) -> None:
        n, start = tensor.shape[0], tensor.partition
        legal = (0,) if n > 64 else (0, 64) if n > 32 else (0, 32, 64, 96)
        if start not in legal:
            raise StrictError(
                f"{self.op} {role} `{tensor.name}` starts at partition {start}; {n} partitions may start at "
                f"{' or '.join(map(str, legal))} only"
            )

    def _check_rank(self, role: str, tensor: NkiTensor) -> None:
        free, axes = tensor.array, 0
        previous = None
        for count, stride in zip(free.shape[1:], free.strides[1:], strict=True):
            if count == 1:
                continue
            axes += previous is None or previous != stride * count
            previous = stride
        if axes > 4:
            raise StrictError(f"{self.op} {role} access pattern has {axes} free dimensions, the limit is 4")

    def _check_written(self, role: str, tensor: NkiTensor) -> None:
        if tensor.indirection is not None:
            return
        codes = tensor.storage.writers(tensor.array)
        if isinstance(codes, int):
            if codes == UNWRITTEN and self.strict:
                raise StrictError(
                    f"{self.op} {role} reads `{tensor.name}` {tensor.shape}, which no instruction has written"
                )
        elif (codes == UNWRITTEN).any():
            where = tuple(int(i) for i in np.argwhere(codes == UNWRITTEN)[0])
            self.machine.partial_reads.append(
                f"instruction {self.index}, {self.op} {role}, reads `{tensor.name}` at {list(where)}"
            )


class Handle:
    """What an instruction returns: a name for scheduling hints, which change nothing here."""

    def depends_on(self, *producers: object) -> "Handle":
        return self


HANDLE = Handle()


def _operand(role: str, tensor: NkiTensor) -> Operand:
    array, unit = tensor.array, tensor.array.itemsize
    shape = array.shape
    start = (
        (array.__array_interface__["data"][0] - tensor.storage.pointer) if tensor.indirection is None else 0
    )
    first = 1 if tensor.on_chip else 0
    reach = sum(s * (n - 1) for s, n in zip(array.strides[first:], shape[first:], strict=True)) + unit
    if tensor.on_chip:
        low = start % tensor.storage.free_bytes
        region = Region(
            tensor.storage.number, (tensor.partition, tensor.partition + shape[0]), (low, low + reach)
        )
    elif tensor.indirection is not None:
        region = Region(tensor.storage.number, (0, 1), (0, tensor.storage.base.nbytes))
    else:
        region = Region(tensor.storage.number, (0, 1), (start, start + reach))
    run = unit
    for axis in range(array.ndim - 1, first - 1, -1):
        if shape[axis] > 1 and array.strides[axis] != run:
            break
        run *= shape[axis]
    return Operand(role, tensor.name, shape, tensor.dtype, tensor.buffer, region, run)
