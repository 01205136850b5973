"""Vector and GpSimd instructions that reduce or scan along an axis."""

import numpy as np

from delta_trn.nki_kernels.simulator.core.dtypes import to_float32
from delta_trn.nki_kernels.simulator.core.errors import ConstraintError, StrictError, require
from delta_trn.nki_kernels.simulator.core.machine import Engine, Handle, Instruction
from delta_trn.nki_kernels.simulator.core.memory import SBUF, NkiTensor
from delta_trn.nki_kernels.simulator.isa.arithmetic import bits, combine, fold, open_registers, read_registers
from delta_trn.nki_kernels.simulator.isa.enums import reduce_cmd as commands
from delta_trn.nki_kernels.simulator.isa.operators import Operator, alu_operator

ACCUMULATING = ("add", "multiply", "maximum", "minimum")


def tensor_reduce(
    dst: NkiTensor,
    op: Operator,
    data: NkiTensor,
    axis,
    negate: bool = False,
    keepdims: bool = False,
    name: str | None = None,
) -> Handle:
    """Reduce data over its trailing free axes by arithmetic, logical or bitwise operators."""
    alu = alu_operator("tensor_reduce", op)
    run = Instruction("tensor_reduce", Engine.vector)
    if not alu.reduce:
        raise ConstraintError(f"tensor_reduce op {alu!r} is not a legal reduction operator")
    values = run.read("data", data)
    axes = sorted(a + data.ndim if a < 0 else a for a in ([axis] if isinstance(axis, int) else axis))
    require(0 not in axes, "tensor_reduce cannot reduce axis 0, the partition axis; use a matmul with ones")
    require(
        axes == list(range(data.ndim - len(axes), data.ndim)),
        f"tensor_reduce axis must be the last contiguous free axes of {data.shape}, got {axis}",
    )
    if alu.bitvec:
        bits(run, alu, dst, data)
        require(not negate, "tensor_reduce negate needs an arithmetic operator")
    else:
        values = to_float32(values)
    result = fold(alu, values, tuple(axes))
    out = run.dst("dst", dst)
    require(
        out.shape[0] == data.shape[0] and out.size == result.size,
        f"tensor_reduce dst must hold {result.size // data.shape[0]} elements in {data.shape[0]} partitions, "
        f"got {out.shape}",
    )
    run.write(out, -result if negate else result)
    return run.done()


def tensor_partition_reduce(dst: NkiTensor, op: Operator, data: NkiTensor, name: str | None = None) -> Handle:
    """Reduce data over its partitions to dst[1, F], on the slow GpSimd engine."""
    run = Instruction("tensor_partition_reduce", Engine.gpsimd)
    names = ("add", "average", "maximum", "max", "bitwise_or", "bitwise_and")
    if not isinstance(op, Operator) or op.name not in names:
        raise ConstraintError(f"tensor_partition_reduce op must be one of {', '.join(names)}, got {op!r}")
    values = run.read("data", data, (SBUF,))
    if op.bitvec:
        bits(run, op, data, dst)
        result = fold(op, values.T, (values.ndim - 1,)).T
    else:
        wide = to_float32(values)
        result = wide.max(axis=0) if op.name.startswith("max") else wide.sum(axis=0, dtype=np.float32)
        result = result / np.float32(values.shape[0]) if op.name == "average" else result
    out = run.dst("dst", dst, (SBUF,))
    require(
        out.shape[0] == 1 and out.size == result.size,
        f"tensor_partition_reduce dst must have 1 partition of {result.size}, got {out.shape}",
    )
    run.write(out, result)
    return run.done()


def tensor_tensor_scan(
    dst: NkiTensor,
    data0: NkiTensor,
    data1: NkiTensor,
    initial: object,
    op0: Operator,
    op1: Operator,
    reverse0: bool = False,
    reverse1: bool = False,
    name: str | None = None,
) -> Handle:
    """Scan the free axis in float32: r[i] = (data0[i] op0 r[i-1]) op1 data1[i], with r[-1] = initial."""
    first = alu_operator("tensor_tensor_scan", op0, "op0")
    second = alu_operator("tensor_tensor_scan", op1, "op1")
    run = Instruction("tensor_tensor_scan", Engine.vector)
    if first.bitvec or second.bitvec or first.arity != 2 or second.arity != 2:
        raise ConstraintError(
            f"tensor_tensor_scan takes binary arithmetic operators, got {first!r} and {second!r}"
        )
    P = data0.shape[0]
    a, b = run.rows("data0", data0), run.rows("data1", data1)
    run.not_both_in_psum("data0", data0, "data1", data1)
    run.same_elements(data0, data1, "data0", "data1")
    out = run.dst("dst", dst)
    run.same_elements(out, data0, "dst", "data0")
    state = run.scalar_operand("initial", initial, P)
    state = np.full(P, state, np.float32) if not isinstance(initial, NkiTensor) else state.reshape(P)
    columns = np.empty((a.shape[1], P), np.float32)
    aT, bT = np.ascontiguousarray(a.T), np.ascontiguousarray(b.T)
    for i in range(columns.shape[0]):
        columns[i] = combine(second, combine(first, aT[i], state, reverse0), bT[i], reverse1)
        state = columns[i]
    run.write(out, columns.T)
    return run.done()


def tensor_scalar_cumulative(
    dst: NkiTensor,
    src: NkiTensor,
    op0: Operator,
    op1: Operator,
    imm0: object,
    imm1: object = None,
    reduce_cmd: commands = commands.reset_reduce,
    name: str | None = None,
) -> Handle:
    """Scan the free axis: reg = op1(op0(src[i], imm0), reg), written for every element."""
    first = alu_operator("tensor_scalar_cumulative", op0, "op0")
    second = alu_operator("tensor_scalar_cumulative", op1, "op1")
    run = Instruction("tensor_scalar_cumulative", Engine.vector)
    if second.name not in ("add", "subtract", "multiply", "maximum", "minimum"):
        raise ConstraintError(
            f"tensor_scalar_cumulative op1 must be add, subtract, multiply, max or min, got {second!r}"
        )
    for role, t in (("src", src), ("dst", dst)):
        if isinstance(t, NkiTensor) and t.dtype in ("int32", "uint32"):
            raise ConstraintError(f"tensor_scalar_cumulative {role} dtype cannot be {t.dtype}")
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
    run.write_like(dst, result, src, "src")
    return run.done()


def _registers(
    run: Instruction, op: Operator, P: int, init: object, command: object, role: str
) -> np.ndarray:
    """Reset or load the Vector engine's registers as the command says, and return those of P partitions."""
    if not isinstance(command, commands):
        raise TypeError(f"{run.op} reduce_cmd must be a member of nisa.reduce_cmd, got {command!r}")
    if command in (commands.idle, commands.reset):
        raise ConstraintError(
            f"{run.op} reduce_cmd must be reset_reduce, reduce or load_reduce, got {command.name}"
        )
    initial = None
    if command is commands.load_reduce:
        require(init is not None, f"{run.op} {role} must be given with reduce_cmd.load_reduce")
        initial = run.scalar_operand(role, init, P)
    registers = run.machine.vector_registers[:P]
    open_registers(registers, command, op.identity, initial)
    return registers


def tensor_scalar_reduce(
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
    name: str | None = None,
) -> Handle:
    """Compute dst = data op0 operand0, and reduce_res[P, 1] = reduce_op of dst along the free axes."""
    first = alu_operator("tensor_scalar_reduce", op0, "op0")
    second = alu_operator("tensor_scalar_reduce", reduce_op, "reduce_op")
    run = Instruction("tensor_scalar_reduce", Engine.vector)
    if first.bitvec or second.name not in ACCUMULATING:
        raise ConstraintError(
            f"tensor_scalar_reduce takes an arithmetic op0 and add, multiply, max or min, got {first!r} and "
            f"{second!r}"
        )
    if reverse0 and run.strict:
        raise StrictError("tensor_scalar_reduce reverse0 is not supported by the compiler")
    P = data.shape[0]
    values = run.rows("data", data)
    scalar = None if first.arity == 1 else run.scalar_operand("operand0", operand0, P)
    result = combine(first, values, scalar, reverse0)
    registers = _registers(run, second, P, reduce_init, reduce_cmd, "reduce_init")
    registers[:] = combine(second, registers, fold(second, result, (1,)).reshape(P, 1))
    run.write_like(dst, result, data, "data")
    read_registers(run, reduce_res, -registers if reduce_res_negate else registers)
    return run.done(reduces=reduce_res is not None)


def select_reduce(
    dst: NkiTensor,
    predicate: NkiTensor,
    on_true: NkiTensor,
    on_false: object,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: commands = commands.idle,
    reduce_op: Operator | None = None,
    reverse_pred: bool = False,
    name: str | None = None,
) -> Handle:
    """Compute dst = where(predicate, on_true, on_false), optionally with the maximum along the free axis.

    reduce_cmd resets the engine's registers, goes on with them, or both; reduce_res (P, 1) receives them.
    """
    run = Instruction("select_reduce", Engine.vector)
    run.has_dtype("predicate", predicate, "int8", "uint8", "int16", "uint16", "bool_")
    P = on_true.shape[0]
    mask = run.read("predicate", predicate).reshape(predicate.shape[0], -1) != 0
    values = run.rows("on_true", on_true)
    run.not_both_in_psum("on_true", on_true, "predicate", predicate)
    run.same_elements(on_true, predicate, "on_true", "predicate")
    other = run.scalar_operand("on_false", on_false, P)
    result = np.where(~mask if reverse_pred else mask, values, other)
    run.write_like(dst, result, on_true, "on_true")
    if reduce_cmd is not commands.idle:
        if not isinstance(reduce_cmd, commands) or reduce_cmd is commands.load_reduce:
            raise ConstraintError(
                f"select_reduce reduce_cmd must be idle, reset, reduce or reset_reduce, got {reduce_cmd!r}"
            )
        if reduce_op is not None and reduce_op.name != "maximum":
            raise ConstraintError(f"select_reduce reduce_op must be nl.maximum, got {reduce_op!r}")
        registers = run.machine.vector_registers
        open_registers(registers, reduce_cmd, -np.inf)
        if reduce_cmd is not commands.reset:
            registers[:P] = np.maximum(registers[:P], result.max(axis=1, keepdims=True))
        read_registers(run, reduce_res, registers[:P])
    return run.done(reduces=reduce_res is not None)


BN_STATS_FMAX = 512


def bn_stats(dst: NkiTensor, data: NkiTensor, name: str | None = None) -> Handle:
    """Write (count, mean, count * variance) of each partition's even, then odd elements to dst[P, 6]."""
    run = Instruction("bn_stats", Engine.vector)
    P = data.shape[0]
    values = run.rows("data", data)
    require(
        values.shape[1] <= BN_STATS_FMAX,
        f"bn_stats takes up to {BN_STATS_FMAX} elements per partition, got {values.shape[1]}",
    )
    out = run.dst("dst", dst)
    run.has_columns("dst", out, P, 6)
    columns = []
    for part in (values[:, 0::2], values[:, 1::2]):
        n = part.shape[1]
        mean = part.mean(axis=1) if n else np.zeros(P, np.float32)
        variance = part.var(axis=1) if n else np.zeros(P, np.float32)
        columns += [np.full(P, n, np.float32), mean, variance * n]
    run.write(out, np.stack(columns, axis=1).astype(np.float32))
    return run.done()


def bn_aggr(dst: NkiTensor, data: NkiTensor, name: str | None = None) -> Handle:
    """Write mean and variance to dst[P, 2], from any number of (count, mean, count * variance) triples."""
    run = Instruction("bn_aggr", Engine.vector)
    P = data.shape[0]
    triples = run.rows("data", data).reshape(P, -1, 3)
    count, mean, spread = triples[..., 0], triples[..., 1], triples[..., 2]
    out = run.dst("dst", dst)
    run.has_columns("dst", out, P, 2)
    total = count.sum(axis=1)
    center = (count * mean).sum(axis=1) / total
    variance = (spread + count * (mean - center[:, None]) ** 2).sum(axis=1) / total
    run.write(out, np.stack([center, variance], axis=1))
    return run.done()
