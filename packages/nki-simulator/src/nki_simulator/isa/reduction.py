"""Vector and GpSimd instructions that reduce or scan along an axis."""

from typing import Any

import numpy as np

from nki_simulator.core.dtypes import to_float32
from nki_simulator.core.instruction import Instruction, instruction
from nki_simulator.core.memory import SBUF, NkiTensor
from nki_simulator.core.operators import Operator, combine, fold, maximum
from nki_simulator.isa.enums import engine as engines
from nki_simulator.isa.enums import reduce_cmd as commands

__all__ = [
    "bn_aggr",
    "bn_stats",
    "range_select",
    "select_reduce",
    "tensor_partition_reduce",
    "tensor_reduce",
    "tensor_scalar_cumulative",
    "tensor_scalar_reduce",
    "tensor_tensor_scan",
]

ACCUMULATING = ("add", "multiply", "maximum", "minimum")
BN_STATS_FMAX = 512
FP32_MIN = float(np.finfo(np.float32).min)
RANGE_COMPARISONS = ("equal", "less", "less_equal", "greater", "greater_equal")


def open_registers(
    registers: np.ndarray, command: commands, identity: Any, initial: Any = None
) -> None:
    """Reset or load an engine's reduction registers, if the command says so."""
    if command is commands.load_reduce:
        registers[:] = initial
    elif command in (commands.reset, commands.reset_reduce):
        registers[:] = identity


def read_registers(
    run: Instruction, reduce_res: NkiTensor | None, registers: np.ndarray
) -> dict[str, Any]:
    """Write an engine's (P, 1) reduction registers to `reduce_res`, if the kernel wants them."""
    if reduce_res is not None:
        run.write_columns("reduce_res", reduce_res, registers)
    return {"reduces": reduce_res is not None}


def accumulate(
    run: Instruction, registers, op: Operator, result, command, reduce_res, initial=None
) -> dict[str, Any]:
    """Fold result along the free axis into the engine's registers, and read them out."""
    open_registers(registers, command, op.identity, initial)
    if command not in (commands.idle, commands.reset):
        folded = result[:, :1]
        for i in range(1, result.shape[1]):
            folded = combine(op, folded, result[:, i : i + 1])
        registers[:] = combine(op, registers, folded)
    return read_registers(run, reduce_res, registers)


@instruction(engines.vector)
def tensor_reduce(
    run: Instruction, dst: NkiTensor, op: Operator, data: NkiTensor, axis, negate: bool = False,
    keepdims: bool = False,
):  # fmt: skip
    """Reduce data over its trailing free axes by arithmetic, logical or bitwise operators."""
    alu = run.alu_operator(op)
    run.require(alu.reduce, f"op {alu!r} is not a legal reduction operator")
    values = run.read("data", data)
    axes = sorted(
        a + data.ndim if a < 0 else a for a in ([axis] if isinstance(axis, int) else axis)
    )
    run.require(0 not in axes, "cannot reduce axis 0, the partition axis; use a matmul with ones")
    run.require(
        axes == list(range(data.ndim - len(axes), data.ndim)),
        f"axis must be the last contiguous free axes of {data.shape}, got {axis}",
    )
    if alu.bitvec:
        run.has_integers(alu, dst, data)
        run.require(not negate, "negate needs an arithmetic operator")
    else:
        values = to_float32(values)
    result = fold(alu, values, tuple(axes))
    out = run.dst("dst", dst)
    run.require(
        out.shape[0] == data.shape[0] and out.size == result.size,
        f"dst must hold {result.size // data.shape[0]} elements in {data.shape[0]} partitions, got "
        f"{out.shape}",
    )
    run.write(out, -result if negate else result)


@instruction(engines.gpsimd)
def tensor_partition_reduce(run: Instruction, dst: NkiTensor, op: Operator, data: NkiTensor):
    """Reduce data over its partitions to dst[1, F], on the slow GpSimd engine."""
    run.one_of("op", op, ("add", "average", "maximum", "max", "bitwise_or", "bitwise_and"))
    values = run.read("data", data, (SBUF,))
    if op.bitvec:
        run.has_integers(op, data, dst)
        result = fold(op, values.T, (values.ndim - 1,)).T
    else:
        wide = to_float32(values)
        result = (
            wide.max(axis=0) if op.name.startswith("max") else wide.sum(axis=0, dtype=np.float32)
        )
        result = result / np.float32(values.shape[0]) if op.name == "average" else result
    run.write_columns("dst", dst, result.reshape(1, -1), (SBUF,))


@instruction(engines.vector)
def tensor_tensor_scan(
    run: Instruction,
    dst: NkiTensor,
    data0: NkiTensor,
    data1: NkiTensor,
    initial: object,
    op0: Operator,
    op1: Operator,
    reverse0: bool = False,
    reverse1: bool = False,
):
    """Scan the free axis in float32: r[i] = (data0[i] op0 r[i-1])
    op1 data1[i], with r[-1] = initial.
    """
    first, second = run.alu_operator(op0, "op0"), run.alu_operator(op1, "op1")
    run.require(
        not (first.bitvec or second.bitvec) and first.arity == second.arity == 2,
        f"takes binary arithmetic operators, got {first!r} and {second!r}",
    )
    P = data0.shape[0]
    a, b = run.rows("data0", data0), run.rows("data1", data1)
    run.not_both_in_psum(data0, data1)
    run.same_elements(data0, data1)
    state = np.broadcast_to(run.scalar_operand("initial", initial, P), (P, 1)).reshape(P)
    columns = np.empty((a.shape[1], P), np.float32)
    aT, bT = np.ascontiguousarray(a.T), np.ascontiguousarray(b.T)
    for i in range(columns.shape[0]):
        columns[i] = combine(second, combine(first, aT[i], state, reverse0), bT[i], reverse1)
        state = columns[i]
    run.write_like(dst, columns.T, data0)


@instruction(engines.vector)
def tensor_scalar_cumulative(
    run: Instruction, dst: NkiTensor, src: NkiTensor, op0: Operator, op1: Operator, imm0: object,
    imm1: object = None, reduce_cmd: commands = commands.reset_reduce,
):  # fmt: skip
    """Scan the free axis: reg = op1(op0(src[i], imm0), reg), written for every element."""
    first = run.alu_operator(op0, "op0")
    second = run.one_of("op1", op1, (*ACCUMULATING, "subtract"))
    for role, t in (("src", src), ("dst", dst)):
        if isinstance(t, NkiTensor):
            run.require(t.dtype not in ("int32", "uint32"), f"{role} dtype cannot be {t.dtype}")
    P = src.shape[0]
    values = run.rows("src", src)
    terms = combine(first, values, run.scalar_operand("imm0", imm0, P))
    reg = _registers(run, second, P, imm1, reduce_cmd, "imm1").reshape(P)
    result = np.empty_like(terms)
    assert second.alu is not None
    for i in range(terms.shape[1]):
        reg = second.alu(terms[:, i], reg)
        result[:, i] = reg
    run.machine.vector_registers[:P, 0] = reg
    run.write_like(dst, result, src)


def _registers(
    run: Instruction, op: Operator, P: int, init: object, command: object, role: str
) -> np.ndarray:
    """Reset or load the Vector engine's registers as the command says,
    and return those of P partitions.
    """
    run.check_member(
        "reduce_cmd", command, commands.reset_reduce, commands.reduce, commands.load_reduce
    )
    assert isinstance(command, commands)
    initial = None
    if command is commands.load_reduce:
        run.require(init is not None, f"{role} must be given with reduce_cmd.load_reduce")
        initial = run.scalar_operand(role, init, P)
    registers = run.machine.vector_registers[:P]
    open_registers(registers, command, op.identity, initial)
    return registers


@instruction(engines.vector)
def tensor_scalar_reduce(
    run: Instruction,
    dst: NkiTensor,
    data: NkiTensor,
    op0: Operator,
    operand0: object,
    reduce_op: Operator,
    reduce_res: NkiTensor | None = None,
    reverse0: bool = False,
    reduce_cmd: commands = commands.reset_reduce,
    reduce_init: object = None,
    reduce_res_negate: bool = False,
):
    """Compute dst = data op0 operand0, and reduce_res[P, 1] = reduce_op
    of dst along the free axes.
    """
    first = run.alu_operator(op0, "op0")
    second = run.one_of("reduce_op", reduce_op, ACCUMULATING)
    run.require(not first.bitvec, f"takes an arithmetic op0, got {first!r}")
    run.forbid(reverse0, "reverse0 is not supported by the compiler")
    P = data.shape[0]
    values = run.rows("data", data)
    scalar = None if first.arity == 1 else run.scalar_operand("operand0", operand0, P)
    result = combine(first, values, scalar, reverse0)
    registers = _registers(run, second, P, reduce_init, reduce_cmd, "reduce_init")
    registers[:] = combine(second, registers, fold(second, result, (1,)).reshape(P, 1))
    run.write_like(dst, result, data)
    return read_registers(run, reduce_res, -registers if reduce_res_negate else registers)


@instruction(engines.vector)
def select_reduce(
    run: Instruction, dst: NkiTensor, predicate: NkiTensor, on_true: NkiTensor, on_false: object,
    reduce_res: NkiTensor | None = None, reduce_cmd: commands = commands.idle,
    reduce_op: Operator | None = None, reverse_pred: bool = False,
):  # fmt: skip
    """Compute dst = where(predicate, on_true, on_false), optionally with the maximum along the free
    axis.

    reduce_cmd resets the engine's registers, goes on with them, or both; reduce_res (P, 1) receives
    them.
    """
    run.has_dtype("predicate", predicate, "int8", "uint8", "int16", "uint16", "bool_")
    P = on_true.shape[0]
    mask = run.read("predicate", predicate).reshape(predicate.shape[0], -1) != 0
    values = run.rows("on_true", on_true)
    run.not_both_in_psum(on_true, predicate)
    run.same_elements(on_true, predicate)
    other = run.scalar_operand("on_false", on_false, P)
    result = np.where(~mask if reverse_pred else mask, values, other)
    run.write_like(dst, result, on_true)
    if reduce_cmd is not commands.idle:
        run.check_member(
            "reduce_cmd", reduce_cmd, commands.reset, commands.reduce, commands.reset_reduce
        )
        if reduce_op is not None:
            run.one_of("reduce_op", reduce_op, ("maximum",))
        registers = run.machine.vector_registers
        open_registers(registers, reduce_cmd, -np.inf)
        if reduce_cmd is not commands.reset:
            registers[:P] = np.maximum(registers[:P], result.max(axis=1, keepdims=True))
        read_registers(run, reduce_res, registers[:P])
    return {"reduces": reduce_res is not None}


@instruction(engines.vector)
def range_select(
    run: Instruction,
    dst: NkiTensor,
    on_true_tile: NkiTensor,
    comp_op0: Operator,
    comp_op1: Operator,
    bound0: NkiTensor,
    bound1: NkiTensor,
    reduce_cmd: commands = commands.reset_reduce,
    reduce_res: NkiTensor | None = None,
    reduce_op: Operator = maximum,
    range_start: int = 0,
    on_false_value: float = FP32_MIN,
):
    """Keep on_true_tile where index comp_op0 bound0 and index comp_op1 bound1; reduce to the row
    maximum.

    Elsewhere dst = on_false_value, the least float32 unless the kernel says otherwise.
    """
    run.needs_generation(3, "range_select")
    first = run.one_of("comp_op0", comp_op0, RANGE_COMPARISONS)
    second = run.one_of("comp_op1", comp_op1, RANGE_COMPARISONS)
    run.one_of("reduce_op", reduce_op, ("maximum",))
    P = on_true_tile.shape[0]
    values = run.rows("on_true_tile", on_true_tile)
    index = range_start + np.arange(values.shape[1], dtype=np.float32)[None, :]
    low, high = run.scalar_operand("bound0", bound0, P), run.scalar_operand("bound1", bound1, P)
    keep = combine(first, index, low) * combine(second, index, high)
    result = np.where(keep != 0, values, np.float32(on_false_value))
    run.write_like(dst, result, on_true_tile)
    return accumulate(
        run, run.machine.vector_registers[:P], reduce_op, result, reduce_cmd, reduce_res
    )


@instruction(engines.vector)
def bn_stats(run: Instruction, dst: NkiTensor, data: NkiTensor):
    """Write (count, mean, count * variance) of each partition's even,
    then odd elements to dst[P, 6].
    """
    P = data.shape[0]
    values = run.rows("data", data)
    count = values.shape[1]
    run.require(
        count <= BN_STATS_FMAX, f"takes up to {BN_STATS_FMAX} elements per partition, got {count}"
    )
    columns = []
    for part in (values[:, 0::2], values[:, 1::2]):
        n = part.shape[1]
        mean = part.mean(axis=1) if n else np.zeros(P, np.float32)
        variance = part.var(axis=1) if n else np.zeros(P, np.float32)
        columns += [np.full(P, n, np.float32), mean, variance * n]
    run.write_columns("dst", dst, np.stack(columns, axis=1).astype(np.float32))


@instruction(engines.vector)
def bn_aggr(run: Instruction, dst: NkiTensor, data: NkiTensor):
    """Write mean and variance to dst[P, 2], from any number
    of (count, mean, count * variance) triples.
    """
    P = data.shape[0]
    triples = run.rows("data", data).reshape(P, -1, 3)
    count, mean, spread = triples[..., 0], triples[..., 1], triples[..., 2]
    total = count.sum(axis=1)
    center = (count * mean).sum(axis=1) / total
    variance = (spread + count * (mean - center[:, None]) ** 2).sum(axis=1) / total
    run.write_columns("dst", dst, np.stack([center, variance], axis=1))
