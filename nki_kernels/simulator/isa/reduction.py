"""Vector and GpSimd instructions that reduce or scan along an axis."""

import numpy as np

from delta_trn.nki_kernels.simulator.dtypes import to_float32
from delta_trn.nki_kernels.simulator.errors import ConstraintError, StrictError, require
from delta_trn.nki_kernels.simulator.isa.elementwise import bits, combine, number
from delta_trn.nki_kernels.simulator.isa.enums import reduce_cmd as commands
from delta_trn.nki_kernels.simulator.machine import Engine, Handle, Instruction
from delta_trn.nki_kernels.simulator.memory import SBUF, NkiTensor
from delta_trn.nki_kernels.simulator.operators import Operator, alu_operator

ACCUMULATING = ("add", "multiply", "maximum", "minimum")


def _reduce(op: Operator, values: np.ndarray, axis) -> np.ndarray:
    """Fold `op` over trailing axes; differences subtract every later element from the first."""
    assert op.alu is not None
    axes = tuple(axis)
    if op.name == "add":
        return values.sum(axis=axes, dtype=values.dtype)
    if op.name in ("maximum", "minimum", "multiply", "bitwise_and", "bitwise_or", "bitwise_xor"):
        return op.alu.reduce(values, axis=axes)  # pyright: ignore[reportFunctionMemberAccess]
    lead = values.shape[: len(values.shape) - len(axes)]
    flat = values.reshape(*lead, -1)
    result = flat[..., 0]
    for i in range(1, flat.shape[-1]):
        result = number(op.alu(result, flat[..., i]))
    return result


def tensor_reduce(
    dst: NkiTensor,
    op: Operator,
    data: NkiTensor,
    axis,
    negate: bool = False,
    keepdims: bool = False,
    name: str | None = None,
) -> Handle:
    """dst = op over the trailing free axes of data; add, subtract, multiply, maximum, minimum, logical, "
    "bitwise."""
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
    result = _reduce(alu, values, axes)
    out = run.dst("dst", dst)
    require(
        out.shape[0] == data.shape[0] and out.size == result.size,
        f"tensor_reduce dst must hold {result.size // data.shape[0]} elements in {data.shape[0]} partitions, "
        f"got {out.shape}",
    )
    run.write(out, -result if negate else result)
    return run.done()


def tensor_partition_reduce(dst: NkiTensor, op: Operator, data: NkiTensor, name: str | None = None) -> Handle:
    """dst[1, F] = op over the partitions of data; slow, on GpSimd."""
    run = Instruction("tensor_partition_reduce", Engine.gpsimd)
    names = ("add", "average", "maximum", "max", "bitwise_or", "bitwise_and")
    if not isinstance(op, Operator) or op.name not in names:
        raise ConstraintError(f"tensor_partition_reduce op must be one of {', '.join(names)}, got {op!r}")
    values = run.read("data", data, (SBUF,))
    if op.bitvec:
        bits(run, op, data, dst)
        assert op.alu is not None
        result = op.alu.reduce(values, axis=0)  # pyright: ignore[reportFunctionMemberAccess]
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
    """r[i] = (data0[i] op0 r[i-1]) op1 data1[i] along the free axis, r[-1] = initial; float32 state."""
    first, second = (
        alu_operator("tensor_tensor_scan", op0, "op0"),
        alu_operator("tensor_tensor_scan", op1, "op1"),
    )
    run = Instruction("tensor_tensor_scan", Engine.vector)
    if first.bitvec or second.bitvec or first.arity != 2 or second.arity != 2:
        raise ConstraintError(
            f"tensor_tensor_scan takes binary arithmetic operators, got {first!r} and {second!r}"
        )
    P = data0.shape[0]
    a = to_float32(run.read("data0", data0)).reshape(P, -1)
    b = to_float32(run.read("data1", data1)).reshape(data1.shape[0], -1)
    run.not_both_in_psum("data0", data0, "data1", data1)
    run.same_elements(data0, data1, "data0", "data1")
    out = run.dst("dst", dst)
    run.same_elements(out, data0, "dst", "data0")
    state = run.scalar_operand("initial", initial, P)
    state = np.full(P, state, np.float32) if not isinstance(initial, NkiTensor) else state.reshape(P)
    columns = np.empty((a.shape[1], P), np.float32)
    aT, bT = np.ascontiguousarray(a.T), np.ascontiguousarray(b.T)
    for i in range(columns.shape[0]):
        state = combine(second, number(combine(first, aT[i], state, reverse0)), bT[i], reverse1)
        columns[i] = state
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
    """reg = op1(op0(src[i], imm0), reg), written for every element along the free axis."""
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
    values = to_float32(run.read("src", src)).reshape(P, -1)
    terms = number(combine(first, values, run.scalar_operand("imm0", imm0, P)))
    reg = _open(run, second, P, imm1, reduce_cmd, "imm1").reshape(P)
    out = run.dst("dst", dst)
    run.same_elements(out, src, "dst", "src")
    result = np.empty_like(terms)
    assert second.alu is not None
    for i in range(terms.shape[1]):
        reg = second.alu(terms[:, i], reg)
        result[:, i] = reg
    run.machine.vector_registers[:P, 0] = reg
    run.write(out, result)
    return run.done()


def _open(run: Instruction, op: Operator, P: int, init: object, command: object, role: str) -> np.ndarray:
    """The Vector engine's registers, reset, loaded or as they are."""
    if not isinstance(command, commands):
        raise TypeError(f"{run.op} reduce_cmd must be a member of nisa.reduce_cmd, got {command!r}")
    registers = run.machine.vector_registers
    if command is commands.load_reduce:
        require(init is not None, f"{run.op} {role} must be given with reduce_cmd.load_reduce")
        registers[:P] = run.scalar_operand(role, init, P)
    elif command is commands.reset_reduce:
        registers[:P] = op.identity
    elif command is not commands.reduce:
        raise ConstraintError(
            f"{run.op} reduce_cmd must be reset_reduce, reduce or load_reduce, got {command.name}"
        )
    return registers[:P]


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
    """dst = data op0 operand0 and reduce_res[P, 1] = reduce_op of dst along the free axes."""
    first = alu_operator("tensor_scalar_reduce", op0, "op0")
    fold = alu_operator("tensor_scalar_reduce", reduce_op, "reduce_op")
    run = Instruction("tensor_scalar_reduce", Engine.vector)
    if first.bitvec or fold.name not in ACCUMULATING:
        raise ConstraintError(
            f"tensor_scalar_reduce takes an arithmetic op0 and add, multiply, max or min, got {first!r} and "
            f"{fold!r}"
        )
    if reverse0 and run.strict:
        raise StrictError("tensor_scalar_reduce reverse0 is not supported by the compiler")
    P = data.shape[0]
    values = to_float32(run.read("data", data)).reshape(P, -1)
    scalar = None if first.arity == 1 else run.scalar_operand("operand0", operand0, P)
    result = number(combine(first, values, scalar, reverse0))
    out = run.dst("dst", dst)
    run.same_elements(out, data, "dst", "data")
    registers = _open(run, fold, P, reduce_init, reduce_cmd, "reduce_init")
    assert fold.alu is not None
    registers[:] = fold.alu(registers, _reduce(fold, result, (1,)).reshape(P, 1))
    run.write(out, result)
    _read_registers(run, reduce_res, -registers if reduce_res_negate else registers)
    return run.done(reduces=reduce_res is not None)


def _read_registers(run: Instruction, reduce_res: NkiTensor | None, registers: np.ndarray) -> None:
    if reduce_res is None:
        return
    out = run.dst("reduce_res", reduce_res)
    require(
        out.shape[0] == registers.shape[0] and out.size == registers.shape[0],
        f"{run.op} reduce_res must have shape ({registers.shape[0]}, 1), got {out.shape}",
    )
    run.write(out, registers)


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
    """dst = where(predicate, on_true, on_false), optionally with the maximum along the free axis."""
    run = Instruction("select_reduce", Engine.vector)
    require(
        predicate.dtype in ("int8", "uint8", "int16", "uint16", "bool_"),
        f"select_reduce predicate dtype must be an integer of 8 or 16 bits, got {predicate.dtype}",
    )
    P = on_true.shape[0]
    mask = run.read("predicate", predicate).reshape(predicate.shape[0], -1) != 0
    values = to_float32(run.read("on_true", on_true)).reshape(P, -1)
    run.not_both_in_psum("on_true", on_true, "predicate", predicate)
    run.same_elements(on_true, predicate, "on_true", "predicate")
    other = run.scalar_operand("on_false", on_false, P)
    result = np.where(~mask if reverse_pred else mask, values, other)
    out = run.dst("dst", dst)
    run.same_elements(out, on_true, "dst", "on_true")
    run.write(out, result)
    if reduce_cmd is not commands.idle:
        if reduce_op is not None and reduce_op.name != "maximum":
            raise ConstraintError(f"select_reduce reduce_op must be nl.maximum, got {reduce_op!r}")
        registers = run.machine.vector_registers[:P]
        if reduce_cmd is commands.reset_reduce:
            registers[:] = -np.inf
        registers[:] = np.maximum(registers, result.max(axis=1, keepdims=True))
        _read_registers(run, reduce_res, registers)
    return run.done(reduces=reduce_res is not None)


BN_STATS_FMAX = 512


def bn_stats(dst: NkiTensor, data: NkiTensor, name: str | None = None) -> Handle:
    """dst[P, 6] = (count, mean, count * variance) of the even and of the odd elements of each partition."""
    run = Instruction("bn_stats", Engine.vector)
    P = data.shape[0]
    values = to_float32(run.read("data", data)).reshape(P, -1)
    require(
        values.shape[1] <= BN_STATS_FMAX,
        f"bn_stats takes up to {BN_STATS_FMAX} elements per partition, got {values.shape[1]}",
    )
    out = run.dst("dst", dst)
    require(
        out.shape[0] == P and out.size == 6 * P, f"bn_stats dst must have shape ({P}, 6), got {out.shape}"
    )
    columns = []
    for part in (values[:, 0::2], values[:, 1::2]):
        n = part.shape[1]
        mean = part.mean(axis=1) if n else np.zeros(P, np.float32)
        variance = part.var(axis=1) if n else np.zeros(P, np.float32)
        columns += [np.full(P, n, np.float32), mean, variance * n]
    run.write(out, np.stack(columns, axis=1).astype(np.float32))
    return run.done()


def bn_aggr(dst: NkiTensor, data: NkiTensor, name: str | None = None) -> Handle:
    """dst[P, 2] = mean and variance from any number of (count, mean, count * variance) triples."""
    run = Instruction("bn_aggr", Engine.vector)
    P = data.shape[0]
    triples = to_float32(run.read("data", data)).reshape(P, -1, 3)
    count, mean, spread = triples[..., 0], triples[..., 1], triples[..., 2]
    out = run.dst("dst", dst)
    require(out.shape[0] == P and out.size == 2 * P, f"bn_aggr dst must have shape ({P}, 2), got {out.shape}")
    total = count.sum(axis=1)
    center = (count * mean).sum(axis=1) / total
    variance = (spread + count * (mean - center[:, None]) ** 2).sum(axis=1) / total
    run.write(out, np.stack([center, variance], axis=1))
    return run.done()
