"""The state of one run of a kernel, and the checks that every operand of every instruction passes.

Each function of nki.isa drives one `Instruction`:

    run = Instruction("tensor_copy", engine)     # counts it on the machine of this thread
    values = run.read("src", src)                # checks the operand, returns its NumPy view
    out = run.dst("dst", dst)                    # checks the destination
    run.write(out, values)                       # rounds, stores, marks who wrote
    return run.done()                            # appends the instruction to the trace
"""

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from math import prod
from typing import Any

import numpy as np

from delta_trn.nki_kernels.simulator.core.cores import Pair
from delta_trn.nki_kernels.simulator.core.dtypes import DType, dtype_of, store, to_float32
from delta_trn.nki_kernels.simulator.core.errors import ConstraintError, StrictError, require
from delta_trn.nki_kernels.simulator.core.memory import (
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
from delta_trn.nki_kernels.simulator.core.releases import rules_of
from delta_trn.nki_kernels.simulator.core.tables import MOST_SETS, Tables
from delta_trn.nki_kernels.simulator.core.targets import PARTITIONS, PSUM_BANK, PSUM_BANKS, Target


class Engine(Enum):
    """The engines of a NeuronCore, under NKI's names and numbers."""

    unknown = 0
    tensor = 1
    scalar = 2
    gpsimd = 3
    dma = 4
    vector = 5
    sync = 6


@dataclass(frozen=True)
class Region:
    """The part of a storage that an operand touches: half-open ranges of partitions and of bytes in each."""

    storage: int
    partitions: tuple[int, int]
    span: tuple[int, int]


@dataclass(frozen=True)
class Operand:
    """One operand of an executed instruction."""

    role: str
    name: str
    shape: tuple[int, ...]
    dtype: DType
    buffer: MemoryRegion
    region: Region
    run: int  # length in bytes of its contiguous pieces; one DMA descriptor moves one piece

    @property
    def free(self) -> int:
        """Elements per partition."""
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
    """How exact the engines are. Settings other than the default show how sensitive a kernel is.

    matmul            "bfloat16" or "tfloat32" rounds float32 operands before they are multiplied. Public
                      measurements disagree on whether the Tensor engine's float32 products are exact.
    activation_ulps   largest relative error of activation functions in units of 2^-23, drawn at random.
                      On the chip they are piecewise polynomials.
    """

    matmul: str = "float32"
    activation_ulps: float = 0.0


EXACT = Numerics()


class Machine:
    """The state of one simulated core during one kernel call."""

    def __init__(
        self, target: Target, *, strict: bool, trace: bool, numerics: Numerics, nki: str | None = None
    ) -> None:
        self.target = target
        self.strict = strict
        self.rules = rules_of(nki) if strict else {}
        self.numerics = numerics
        self.count = 0
        self.lives: list[Life] = []
        self.trace: list[Record] | None = [] if trace else None
        self.tables = Tables()
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
        address: tuple[int, int] | None = None,
    ) -> NkiTensor:
        """Return a new tensor whose elements are unwritten; refuse one that is larger than its memory."""
        shape = tuple(int(n) for n in shape)
        element = dtype_of(dtype)
        require(all(n > 0 for n in shape), f"tensor shape {shape} must have positive sizes only")
        if buffer in ON_CHIP:
            require(
                len(shape) >= 2,
                "SBUF and PSUM tensors must have at least 2 dimensions (partition-dim and free-dim), "
                f"got shape {shape}",
            )
            limit = self.target.sbuf if buffer is SBUF else self.target.psum
            size = prod(shape[1:]) * element.itemsize
            if self.strict and size > limit:
                raise StrictError(
                    f"{buffer.value} capacity exceeded: tensor `{name}` of shape {shape} {element} takes "
                    f"{size} bytes per partition, {self.target.name} has {limit}"
                )

        def make(number: int) -> Storage:
            unwritten = np.full(shape, element.poison, element.numpy)
            return Storage(unwritten, element, buffer, name or f"t{number}", number)

        if self.pair is not None and buffer is MemoryRegion.shared_hbm:
            # Shared tensors have negative numbers, so that no private tensor of either core has the same one.
            storage = self.pair.storage(self._shared, lambda: make(-1 - self._shared))
            self._shared += 1
        else:
            storage = make(len(self.lives))
        tensor = NkiTensor(storage.base, storage)
        if address is not None:
            storage.address = address
            tensor.partition = int(address[0])
        self.lives.append(storage.life)
        return tensor

    def refuse(self, rule: str, where: str) -> None:
        """Raise StrictError if the rule holds in the run's releases; `where` says what breaks it."""
        if rule in self.rules:
            raise StrictError(f"{where}: {rule} {self.rules[rule]}")

    def argument(self, array: np.ndarray, name: str) -> NkiTensor:
        """Return `array`, not copied, as a written tensor in shared HBM."""
        number = len(self.lives)
        storage = Storage(array, dtype_of(array.dtype), MemoryRegion.shared_hbm, name, number, True)
        self.lives.append(storage.life)
        return NkiTensor(array, storage)

    def peaks(self) -> tuple[int, int]:
        """Return the largest number of live bytes per partition of SBUF, and of live banks of PSUM.

        A tile lives from the first instruction that writes it to the last that touches it, in program order.
        Tiles that use different partitions still count one beside the other.
        """
        return self._peak(SBUF)[0], self._peak(PSUM)[0]

    def check_capacity(self) -> None:
        """Refuse a run whose live tiles do not fit into SBUF or PSUM, or that uses too many tables."""
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
        if len(sets := self.tables.names()) > MOST_SETS:
            raise StrictError(
                f"activation functions of {len(sets)} tables ({', '.join(sets)}), and a program may use "
                f"{MOST_SETS} (NCC_INLA001); compute some functions from others, or on another engine"
            )

    def _peak(self, buffer: MemoryRegion) -> tuple[int, int, list[Life]]:
        """Return the peak, the instruction where it is reached, and the tiles that are live there."""
        tiles = [s for s in self.lives if s.buffer is buffer and s.first is not None]
        unit = PSUM_BANK if buffer is PSUM else 1
        sizes = [-(-s.free_bytes // unit) for s in tiles]
        begins = [(s.first or 0, 0, size) for s, size in zip(tiles, sizes, strict=True)]
        ends = [(s.last, 1, -size) for s, size in zip(tiles, sizes, strict=True)]
        live = peak = busiest = 0
        for index, _, change in sorted(begins + ends):
            live += change
            if live > peak:
                peak, busiest = live, index
        return peak, busiest, [s for s in tiles if (s.first or 0) <= busiest <= s.last]


class _Running(threading.local):
    """Holds the machine of each thread that runs a kernel."""

    machine: Machine | None = None


running = _Running()


def current() -> Machine:
    """Return the machine of the kernel that runs in this thread."""
    machine = running.machine
    if machine is None:
        raise RuntimeError("NKI instructions run inside a kernel: call it, or nki.simulate(kernel)(...)")
    return machine


# These cannot write where they read: they carry state from element to element, or move elements.
NOT_IN_PLACE = (
    "tensor_tensor_scan", "nc_transpose", "dma_transpose", "tensor_partition_reduce", "nc_n_gather",
)  # fmt: skip


class Instruction:
    """One instruction while it runs: checks operands, stores results, and appends itself to the trace."""

    __slots__ = ("_latched", "_reads", "_writes", "engine", "index", "machine", "op", "strict", "target")

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

    def rows(self, role: str, tensor: NkiTensor) -> np.ndarray:
        """Check an input operand and return its values in float32, one row per partition."""
        values = self.read(role, tensor)
        return to_float32(values).reshape(tensor.shape[0], -1)

    def dst(self, role: str, tensor: object, regions: tuple[MemoryRegion, ...] = ON_CHIP) -> NkiTensor:
        """Check an output operand and return it."""
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
        """Round values to the dtype of `dst`, store them, and mark who wrote them."""
        if values.shape != dst.array.shape:
            values = values.reshape(dst.array.shape)
        store(dst.array, dst.dtype, values)
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

    def write_like(self, tensor: NkiTensor, values: np.ndarray, source: NkiTensor, role: str) -> NkiTensor:
        """Check that `dst` has the shape of the operand `source`, and write values there."""
        out = self.dst("dst", tensor)
        self.same_elements(out, source, "dst", role)
        self.write(out, values)
        return out

    def done(self, **flags: Any) -> "Handle":
        """Append the instruction to the trace, with what the cost model needs as `flags`."""
        trace = self.machine.trace
        if trace is not None:
            reads = tuple(_operand(role, t) for role, t in self._reads)
            writes = tuple(_operand(role, t) for role, t in self._writes)
            trace.append(Record(self.index, self.op, self.engine, reads, writes, flags))
        return HANDLE

    # Checks that instructions share

    def same_elements(self, a: NkiTensor, b: NkiTensor, role_a: str, role_b: str) -> None:
        """Require the same partitions and the same number of elements per partition: nothing broadcasts."""
        if a.shape == b.shape:
            return
        if a.shape[0] != b.shape[0] or a.size != b.size:
            raise ConstraintError(
                f"{self.op} requires {role_a} and {role_b} to have the same partitions and elements per "
                f"partition, got {a.shape} and {b.shape}; broadcast with .broadcast or a stride-0 .ap"
            )

    def has_dtype(self, role: str, tensor: NkiTensor, *dtypes: str) -> None:
        """Require one of the dtypes."""
        if tensor.dtype not in dtypes:
            *first, last = dtypes
            names = f"{', '.join(first)} or {last}" if first else last
            raise ConstraintError(f"{self.op} {role} dtype must be {names}, got {tensor.dtype}")

    def has_columns(self, role: str, tensor: NkiTensor, partitions: int, columns: int = 1) -> None:
        """Require so many partitions, with so many elements in each."""
        if tensor.shape[0] != partitions or tensor.size != columns * partitions:
            raise ConstraintError(
                f"{self.op} {role} must have shape ({partitions}, {columns}), got {tensor.shape}"
            )

    def not_both_in_psum(self, role_a: str, a: NkiTensor, role_b: str, b: NkiTensor) -> None:
        if self.strict and a.buffer is PSUM and b.buffer is PSUM:
            raise StrictError(
                f"{self.op} {role_a} and {role_b} cannot both be in psum; copy one of `{a.name}`, "
                f"`{b.name}` to sbuf"
            )

    def needs_generation(self, generation: int, what: str) -> None:
        """Require a target of this generation or a later one for what the message names."""
        if self.target.generation < generation:
            raise ConstraintError(
                f"{what} needs NeuronCore-v{generation} or newer, the target is {self.target.name} "
                f"(NeuronCore-v{self.target.generation})"
            )

    def scalar_operand(self, role: str, value: object, partitions: int, *, bitvec: bool = False) -> Any:
        """Return a number as it is, and a (P, 1) tile so that it broadcasts along the free axis."""
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
        if tensor.form:
            self.machine.refuse(tensor.form, f"{self.op} {role} `{tensor.name}` {tensor.shape}")
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
    """What an instruction returns. NKI schedules by it; here instructions run in program order anyway."""

    def depends_on(self, *producers: object) -> "Handle":
        return self


HANDLE = Handle()


def _operand(role: str, tensor: NkiTensor) -> Operand:
    """Describe an operand for the trace; what a gather or scatter touches counts as the whole storage."""
    array, unit = tensor.array, tensor.array.itemsize
    shape, number = array.shape, tensor.storage.number
    start = tensor.offset * unit if tensor.indirection is None else 0
    first = 1 if tensor.on_chip else 0
    reach = sum(s * (n - 1) for s, n in zip(array.strides[first:], shape[first:], strict=True)) + unit
    if tensor.on_chip:
        low = start % tensor.storage.free_bytes
        region = Region(number, (tensor.partition, tensor.partition + shape[0]), (low, low + reach))
    elif tensor.indirection is not None:
        region = Region(number, (0, 1), (0, tensor.storage.base.nbytes))
    else:
        region = Region(number, (0, 1), (start, start + reach))
    run = unit
    for axis in range(array.ndim - 1, first - 1, -1):
        if shape[axis] > 1 and array.strides[axis] != run:
            break
        run *= shape[axis]
    return Operand(role, tensor.name, shape, tensor.dtype, tensor.buffer, region, run)
