"""One instruction while it runs, and the checks that every operand of every instruction passes.

A function of nki.isa is written as what it does with its operands, and `instruction` makes the rest
of it:

    @instruction(Engine.vector)
    def tensor_copy(run, dst, src):              # the caller gives dst and src, and may give name
        values = run.read("src", src)            # checks the operand, returns its NumPy view
        out = run.dst("dst", dst)                # checks the destination
        run.write(out, values)                   # rounds, stores, marks who wrote

What the function returns, a dict or None, are the flags that the cost model needs. The instruction
goes into the trace behind its last line.
"""

import functools
import inspect
from collections.abc import Callable
from enum import Enum
from typing import Any, Concatenate, ParamSpec

import numpy as np

from nki_simulator.core.chip import DIMENSIONS, count_dimensions, place_of
from nki_simulator.core.dtypes import store, to_float32
from nki_simulator.core.errors import ConstraintError, StrictError
from nki_simulator.core.machine import Engine, Operand, Record, Region, current
from nki_simulator.core.memory import (
    BY_MATMUL,
    BY_OTHER,
    ON_CHIP,
    PSUM,
    UNWRITTEN,
    MemoryRegion,
    NkiTensor,
)
from nki_simulator.core.operators import Operator
from nki_simulator.core.precedents import OPTIONS
from nki_simulator.core.releases import orders_of
from nki_simulator.core.targets import PARTITIONS

# These cannot write where they read: they carry state from element to element, or move elements.
NOT_IN_PLACE = (
    "tensor_tensor_scan", "nc_transpose", "dma_transpose", "tensor_partition_reduce", "nc_n_gather",
)  # fmt: skip


class Instruction:
    """One instruction while it runs: checks operands, stores results,
    and appends itself to the trace.
    """

    __slots__ = (
        "_latched",
        "_reads",
        "_writes",
        "engine",
        "index",
        "machine",
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
        # (P, 1) operands, read before the engine streams
        self._latched: tuple[str, ...] = ("bias",)

    def read(
        self, role: str, tensor: object, regions: tuple[MemoryRegion, ...] = ON_CHIP
    ) -> np.ndarray:
        """Check an input operand and return its values."""
        t = self._operand(role, tensor, regions)
        storage = t.storage
        storage.life.last = self.index
        self._reads.append((role, t))
        if t.buffer is PSUM:
            self.machine.sums[storage.number].last_read = self.index
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

    def dst(
        self, role: str, tensor: object, regions: tuple[MemoryRegion, ...] = ON_CHIP
    ) -> NkiTensor:
        """Check an output operand and return it."""
        t = self._operand(role, tensor, regions)
        if 0 in t.array.strides and t.indirection is None:
            repeats = any(s == 0 and n > 1 for s, n in zip(t.array.strides, t.shape, strict=True))
            if repeats:
                self.machine.refuse(
                    "a destination that repeats", f"{self.op} {role} `{t.name}` {t.shape}"
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
        if dst.buffer is PSUM and code != BY_MATMUL:
            self.machine.sums[storage.number].begin_again(place_of(dst))
        storage.mark(dst.array, code)

    def write_like(
        self, tensor: object, values: np.ndarray, source: NkiTensor,
        regions: tuple[MemoryRegion, ...] = ON_CHIP, dtype: str | None = None,
    ) -> None:  # fmt: skip
        """Check that `dst` has the shape of the operand `source`,
        and `dtype` if given, and write values.
        """
        out = self.dst("dst", tensor, regions)
        if dtype is not None:
            self.has_dtype("dst", out, dtype)
        self.same_elements(out, source)
        self.write(out, values)

    def write_columns(
        self,
        role: str,
        tensor: object,
        values: np.ndarray,
        regions: tuple[MemoryRegion, ...] = ON_CHIP,
    ) -> None:
        """Check that an output operand has the shape of `values`,
        [partitions, columns], and write them.
        """
        out = self.dst(role, tensor, regions)
        self.has_columns(role, out, *values.shape)
        self.write(out, values)

    def done(self, flags: dict[str, Any]) -> "Handle":
        """Append the instruction to the trace, with what the cost model needs as `flags`."""
        trace = self.machine.trace
        wide = self._count_dimensions()
        if wide > 3:
            flags = {**flags, "dimensions": wide}
        if trace is not None:
            reads = tuple(_operand(role, t) for role, t in self._reads)
            writes = tuple(_operand(role, t) for role, t in self._writes)
            trace.append(Record(self.index, self.op, self.engine, reads, writes, flags))
        return HANDLE

    def _count_dimensions(self) -> int:
        """Return the most free dimensions of an operand; refuse too many of an instruction with
        three.
        """
        if self.engine is Engine.dma:
            return 0
        operands = (*self._reads, *self._writes)
        wide, role, tensor = 0, "", None
        for name, t in operands:
            if t.array.ndim > 4 and t.on_chip and (n := count_dimensions(t)) > wide:
                wide, role, tensor = n, name, t
        if wide > 3 and len(operands) > 2 and tensor is not None:
            self.machine.refuse_on_chip(
                DIMENSIONS,
                f"{self.op} {role} `{tensor.name}` {tensor.shape} has {wide} free dimensions, "
                f"beside two more operands,",
            )
        return wide

    def name_operands(self, newest: tuple[str, ...], operands: tuple[Any, ...]) -> dict[str, Any]:
        """Return positional operands under the names that their places have in the run's release.

        Without a release, places must mean the same in all of them.
        """
        orders = orders_of(self.machine.nki, self.op, newest)
        release, order = next(iter(orders.items()))
        if len(operands) > len(order):
            raise TypeError(f"{self.op} takes {len(order)} operands, got {len(operands)}")
        for other, names in orders.items() if self.strict else ():
            for place, (name, instead) in enumerate(
                zip(order[: len(operands)], names, strict=False)
            ):
                self.forbid(
                    name != instead,
                    f"positional operand {place + 1} is {name} in nki {release} and {instead} in "
                    f"{other}: use keywords, or name your release by nki= or DELTA_TRN_NKI",
                )
        return dict(zip(order, operands, strict=False))

    # Checks that instructions share

    def require(self, condition: object, message: str) -> None:
        """Raise ConstraintError unless the condition holds."""
        if not condition:
            raise ConstraintError(f"{self.op} {message}")

    def forbid(self, condition: object, message: str) -> None:
        """Raise StrictError if the condition holds and checks are strict."""
        if condition and self.strict:
            raise StrictError(f"{self.op} {message}")

    def _role(self, tensor: NkiTensor) -> str:
        return next(role for role, own in (*self._writes, *self._reads) if own is tensor)

    def same_elements(self, a: NkiTensor, b: NkiTensor) -> None:
        """Require the same partitions and the same number of elements per partition:
        nothing broadcasts.
        """
        if a.shape != b.shape and (a.shape[0] != b.shape[0] or a.size != b.size):
            raise ConstraintError(
                f"{self.op} requires {self._role(a)} and {self._role(b)} to have the same "
                f"partitions and elements per partition, got {a.shape} and {b.shape}; broadcast "
                "with .broadcast or a stride-0 .ap"
            )

    def has_dtype(self, role: str, tensor: NkiTensor, *dtypes: str) -> None:
        """Require one of the dtypes."""
        if tensor.dtype not in dtypes:
            *first, last = dtypes
            names = f"{', '.join(first)} or {last}" if first else last
            raise ConstraintError(f"{self.op} {role} dtype must be {names}, got {tensor.dtype}")

    def has_columns(self, role: str, tensor: NkiTensor, partitions: int, columns: int = 1) -> None:
        """Require so many partitions, with so many elements in each."""
        self.require(
            tensor.shape[0] == partitions and tensor.size == columns * partitions,
            f"{role} must have shape ({partitions}, {columns}), got {tensor.shape}",
        )

    def not_both_in_psum(self, a: NkiTensor, b: NkiTensor) -> None:
        if self.strict and a.buffer is PSUM and b.buffer is PSUM:
            raise StrictError(
                f"{self.op} {self._role(a)} and {self._role(b)} cannot both be in psum; copy one "
                f"of `{a.name}`, `{b.name}` to sbuf"
            )

    def needs_generation(self, generation: int, what: str) -> None:
        """Require a target of this generation or a later one for what the message names."""
        if self.target.generation < generation:
            raise ConstraintError(
                f"{what} needs NeuronCore-v{generation} or newer, the target is {self.target.name} "
                f"(NeuronCore-v{self.target.generation})"
            )

    def scalar_operand(
        self, role: str, value: object, partitions: int, *, bitvec: bool = False
    ) -> Any:
        """Return a number as it is, and a (P, 1) tile so that it broadcasts along the free axis."""
        if not isinstance(value, NkiTensor):
            if isinstance(value, bool) or not isinstance(
                value, (int, float, np.integer, np.floating)
            ):
                raise TypeError(
                    f"{self.op} {role} must be a number or a (P, 1) tile, got "
                    f"{type(value).__name__}"
                )
            return int(value) if bitvec else np.float32(value)
        values = self.read(role, value)
        self._latched += (role,)
        self.require(
            value.shape[0] == partitions and value.size == partitions,
            f"{role} must be a number or a tile of shape ({partitions}, 1), got {value.shape}",
        )
        self.forbid(
            not bitvec and value.dtype != "float32",
            f"{role} dtype must be float32, got {value.dtype}",
        )
        return values.reshape(partitions, 1)

    # Checks of operators, members and ranges

    def alu_operator(self, op: object, role: str = "op") -> Operator:
        """Return `op` if it is an ALU operator; raise TypeError otherwise."""
        if not isinstance(op, Operator):
            raise TypeError(f"{self.op} {role} must be an nl operator such as nl.add, got {op!r}")
        if op.alu is None:
            raise TypeError(f"{self.op} {role} must be an ALU operator, which {op!r} is not")
        return op

    def activation_function(self, op: object) -> Operator:
        """Return `op` if one Scalar instruction computes it; raise TypeError otherwise."""
        if not isinstance(op, Operator) or op.activation is None or op.composed:
            raise TypeError(
                f"{self.op} op must be an activation function such as nl.exp, got {op!r}"
            )
        return op

    def one_of(self, role: str, op: object, names: tuple[str, ...]) -> Operator:
        """Return `op` if it is an operator of one of these names; refuse others."""
        listed = " or ".join(f"nl.{name}" for name in names)
        self.require(
            isinstance(op, Operator) and op.name in names, f"{role} must be {listed}, got {op!r}"
        )
        assert isinstance(op, Operator)
        return op

    def has_integers(self, op: Operator, *tensors: NkiTensor) -> None:
        """Require integer tensors: bitwise operators cast nothing."""
        for t in tensors:
            if isinstance(t, NkiTensor):
                self.require(t.dtype.integer, f"with {op!r} needs integer tensors, got {t.dtype}")

    def check_member(self, enumeration: str, member: object, *allowed: Enum) -> None:
        """Refuse what is no member of an enumeration of nisa,
        or none that the instruction takes.
        """
        if not isinstance(member, type(allowed[0])):
            raise TypeError(
                f"{self.op} {enumeration} must be a member of nisa.{enumeration}, got {member!r}"
            )
        names = ", ".join(m.name for m in allowed)
        self.require(member in allowed, f"{enumeration} must be one of {names}, got {member.name}")

    def pick(self, engine: Engine, *allowed: Engine) -> None:
        """Let the engine that the kernel names, if it names one, run the instruction."""
        if engine is not Engine.unknown:
            self.check_member("engine", engine, *allowed)
            self.engine = engine

    def check_range(self, function: Operator, values: np.ndarray) -> None:
        """Refuse inputs outside the only range that is documented for a function,
        the Scalar engine's.
        """
        if function.valid is None or not self.strict:
            return
        low, high = function.valid
        magnitude = np.abs(values) if function.name == "reciprocal" else values
        outside = (magnitude < np.float32(low)) | (magnitude > np.float32(high))
        if outside.any():
            where = [int(i) for i in np.argwhere(outside)[0]]
            what = f"no other range is documented for the {self.engine.name} engine"
            if self.engine is Engine.scalar:
                what = "the Scalar engine returns wrong values outside it"
            raise StrictError(
                f"{self.op} {function!r} is valid for inputs in [{low:.3g}, {high:.3g}], got "
                f"{values[tuple(where)]:.6g} at {where}; {what}: scale the input into that range"
            )

    def _operand(self, role: str, tensor: object, regions: tuple[MemoryRegion, ...]) -> NkiTensor:
        if not isinstance(tensor, NkiTensor):
            raise TypeError(f"{self.op} {role} must be a tensor, got {type(tensor).__name__}")
        if tensor.buffer not in regions:
            allowed = [r.value for r in regions]
            raise ConstraintError(
                f"{self.op} {role} must be in {allowed}, got {tensor.buffer.value}"
            )
        if tensor.dtype.packed:
            self.require(
                self.op == "dma_copy",
                f"{role} has dtype {tensor.dtype}, which is copied by DMA alone",
            )
        if tensor.form:
            self.machine.refuse(tensor.form, f"{self.op} {role} `{tensor.name}` {tensor.shape}")
        if tensor.on_chip:
            n = tensor.shape[0]
            self.require(
                n <= PARTITIONS, f"{role} partition dimension {n} exceeds maximum {PARTITIONS}"
            )
            if self.engine is not Engine.dma and self.strict:
                if tensor.partition:
                    self._check_start(role, tensor)
                far = self.engine is Engine.gpsimd and tensor.buffer is PSUM
                self.forbid(far, f"{role} is in psum, which the GpSimd engine cannot access")
                if tensor.array.ndim > 5:
                    self._check_rank(role, tensor)
        return tensor

    def _check_in_place(self, dst: NkiTensor, role: str, source: NkiTensor) -> None:
        a, b = dst.array, source.array
        same = a.strides == b.strides and a.shape == b.shape and dst.offset == source.offset
        if self.op == "nc_stream_shuffle":  # all lanes read a column before any writes it
            same = a.strides == b.strides and a.shape[1:] == b.shape[1:]
            same = same and (dst.offset - source.offset) % (a.strides[0] // a.itemsize) == 0
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
        legal = list_starts(n)
        self.forbid(
            start not in legal,
            f"{role} `{tensor.name}` starts at partition {start}; {n} partitions may start at "
            f"{' or '.join(map(str, legal))} only",
        )

    def _check_rank(self, role: str, tensor: NkiTensor) -> None:
        axes = count_dimensions(tensor)
        self.forbid(axes > 4, f"{role} access pattern has {axes} free dimensions, the limit is 4")

    def _check_written(self, role: str, tensor: NkiTensor) -> None:
        if tensor.indirection is not None:
            return
        codes = tensor.storage.writers(tensor.array)
        if isinstance(codes, int):
            self.forbid(
                codes == UNWRITTEN,
                f"{role} reads `{tensor.name}` {tensor.shape}, which no instruction has written",
            )
        elif (codes == UNWRITTEN).any():
            where = tuple(int(i) for i in np.argwhere(codes == UNWRITTEN)[0])
            self.machine.partial_reads.append(
                f"instruction {self.index}, {self.op} {role}, reads `{tensor.name}` at "
                f"{list(where)}"
            )


class Handle:
    """What an instruction returns. NKI schedules by it;
    here instructions run in program order anyway.
    """

    def depends_on(self, *producers: object) -> "Handle":
        return self


def list_starts(partitions: int) -> tuple[int, ...]:
    """Return at which partitions an operand of so many may start."""
    return (0,) if partitions > 64 else (0, 64) if partitions > 32 else (0, 32, 64, 96)


HANDLE = Handle()
P = ParamSpec("P")


def instruction(
    engine: Engine,
) -> Callable[[Callable[Concatenate[Instruction, P], dict[str, Any] | None]], Callable[P, Handle]]:
    """Decorate a function of nki.isa; `engine` runs it unless the function names another one."""

    def decorate(
        body: Callable[Concatenate[Instruction, P], dict[str, Any] | None],
    ) -> Callable[P, Handle]:
        parameters = inspect.signature(body).parameters.values()
        order = (
            *(p.name for p in list(parameters)[1:] if p.kind is p.POSITIONAL_OR_KEYWORD),
            "name",
        )

        @functools.wraps(body)
        def issue(*operands: P.args, **options: P.kwargs) -> Handle:
            run = Instruction(body.__name__, engine)
            given: Any = options
            if operands and len(order) > 1:
                given = run.name_operands(order, operands)
                if twice := given.keys() & options.keys():
                    raise TypeError(f"{run.op} got {min(twice)} by its place and by its name")
                given |= options
            given.pop("name", None)
            if run.machine.trace is not None:
                run.machine.forms.add((run.op, "", ""))
                for option in OPTIONS:
                    if (value := given.get(option)) is not None:
                        run.machine.forms.add((run.op, option, getattr(value, "name", str(value))))
            return run.done(body(run, **given) or {})  # pyright: ignore[reportCallIssue]

        return issue

    return decorate


def lack(name: str, generation: int, instead: str) -> Callable[..., Handle]:
    """Return an instruction that the simulator lacks: it says what to do instead,
    where the target has it.
    """

    def refuse(run: Instruction, **options: object) -> None:
        run.needs_generation(generation, name)
        raise NotImplementedError(f"{name} is not simulated; {instead}")

    return instruction(Engine.unknown)(refuse)


def _operand(role: str, tensor: NkiTensor) -> Operand:
    """Describe an operand for the trace; what a gather or scatter touches counts
    as the whole storage.
    """
    array, shape, chip = tensor.array, tensor.shape, tensor.on_chip
    gathers = tensor.indirection is not None and not chip
    span = (0, tensor.storage.base.nbytes) if gathers else tensor.span
    partitions = (tensor.partition, tensor.partition + shape[0]) if chip else (0, 1)
    region = Region(tensor.storage.number, partitions, span)
    run = array.itemsize
    if tensor.indirection is not None:  # what it touches one behind the other
        where = tensor.indirection[1]
        whole = where.ndim > 0 and bool((np.diff(where, axis=-1) == 1).all())
        run *= where.shape[-1] if whole else 1
        return Operand(role, tensor.name, shape, tensor.dtype, tensor.buffer, region, run)
    for axis in range(array.ndim - 1, 0 if chip else -1, -1):
        if shape[axis] > 1 and array.strides[axis] != run:
            break
        run *= shape[axis]
    return Operand(role, tensor.name, shape, tensor.dtype, tensor.buffer, region, run)
