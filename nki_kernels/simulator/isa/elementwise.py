"""Vector, Scalar and GpSimd instructions that work element by element."""

import numpy as np

from delta_trn.nki_kernels.simulator.core.dtypes import to_float32
from delta_trn.nki_kernels.simulator.core.errors import ConstraintError, StrictError, require
from delta_trn.nki_kernels.simulator.core.machine import Engine, Handle, Instruction
from delta_trn.nki_kernels.simulator.core.memory import ON_CHIP, PSUM, NkiTensor
from delta_trn.nki_kernels.simulator.isa.arithmetic import VG, VSG, bits, check_range, combine, pick
from delta_trn.nki_kernels.simulator.isa.enums import engine as engines
from delta_trn.nki_kernels.simulator.isa.operators import Operator, alu_operator

INT32 = ("int32", "uint32")
ON_GPSIMD = ("power", "rsqrt")
# On Trn2 the Scalar engine's tensor_scalar knows these pairs only; Trn1's list is not published.
SCALAR_PAIRS = {("multiply", "add"), ("multiply", None), ("add", None)}


def tensor_tensor(
    dst: NkiTensor,
    data1: NkiTensor,
    data2: NkiTensor,
    op: Operator,
    engine: engines = engines.unknown,
    name: str | None = None,
) -> Handle:
    """Compute dst = data1 op data2 in float32, or in integers where all three tensors are int32.

    Nothing broadcasts, and the inputs are not both in PSUM.
    """
    alu = alu_operator("tensor_tensor", op)
    dtypes = [t.dtype for t in (dst, data1, data2) if isinstance(t, NkiTensor)]
    exact = all(d in INT32 for d in dtypes)
    psum = any(isinstance(t, NkiTensor) and t.buffer is PSUM for t in (dst, data1, data2))
    default = engines.gpsimd if alu.name in ON_GPSIMD or (exact and not psum) else engines.vector
    chosen = pick("tensor_tensor", engine, default, VG)
    run = Instruction("tensor_tensor", chosen)
    if alu.arity != 2:
        raise TypeError(f"tensor_tensor op must be a binary operator, got {alu!r}")
    a, b = run.read("data1", data1), run.read("data2", data2)
    out = run.dst("dst", dst)
    run.not_both_in_psum("data1", data1, "data2", data2)
    run.same_elements(data1, data2, "data1", "data2")
    run.same_elements(out, data1, "dst", "data1")
    if alu.bitvec:
        bits(run, alu, out, data1, data2)
    elif not (exact and chosen is engines.gpsimd):
        a, b = to_float32(a), to_float32(b)
    if b.shape != a.shape:
        b = b.reshape(a.shape)
    run.write(out, combine(alu, a, b))
    return run.done()


def tensor_scalar(
    dst: NkiTensor,
    data: NkiTensor,
    op0: Operator,
    operand0: object,
    reverse0: bool = False,
    op1: Operator | None = None,
    operand1: object = None,
    reverse1: bool = False,
    engine: engines = engines.unknown,
    name: str | None = None,
) -> Handle:
    """Compute dst = (data op0 operand0) op1 operand1; operands are numbers or float32 (P, 1) tiles."""
    first = alu_operator("tensor_scalar", op0, "op0")
    second = None if op1 is None else alu_operator("tensor_scalar", op1, "op1")
    slow = first.name in ON_GPSIMD or (second is not None and second.name in ON_GPSIMD)
    chosen = pick("tensor_scalar", engine, engines.gpsimd if slow else engines.vector, VSG)
    run = Instruction("tensor_scalar", chosen)
    if chosen is engines.gpsimd and not slow and run.strict:
        raise StrictError(
            f"tensor_scalar runs on GpSimd for rsqrt and power alone, got {first!r}: leave out the engine, "
            "or use tensor_tensor"
        )
    if second is not None and first.bitvec != second.bitvec:
        raise ConstraintError(
            f"tensor_scalar op0 {first!r} and op1 {second!r} must both be bitvec or both arithmetic"
        )
    if chosen is engines.scalar and run.strict:
        pair = (first.name, second.name if second else None)
        if pair not in SCALAR_PAIRS:
            raise StrictError(
                f"tensor_scalar on the Scalar engine knows multiply, add and multiply-add, got {pair}"
            )
    values = run.read("data", data)
    if first.bitvec:
        bits(run, first, data, dst)
    else:
        values = to_float32(values)
    P = data.shape[0]
    values = values.reshape(P, -1)
    for op, operand, reverse, role in (
        (first, operand0, reverse0, "operand0"),
        (second, operand1, reverse1, "operand1"),
    ):
        if op is None:
            continue
        scalar = None if op.arity == 1 else run.scalar_operand(role, operand, P, bitvec=op.bitvec)
        if op.valid is not None and run.strict:
            check_range(run, op, values)
        values = combine(op, values, scalar, reverse)
    run.write_like(dst, values, data, "data")
    return run.done(slow=slow)


def scalar_tensor_tensor(
    dst: NkiTensor,
    data: NkiTensor,
    op0: Operator,
    operand0: object,
    op1: Operator,
    operand1: NkiTensor,
    reverse0: bool = False,
    reverse1: bool = False,
    name: str | None = None,
) -> Handle:
    """Compute dst = (data op0 operand0) op1 operand1: a number or (P, 1) tile, then a full tile."""
    first = alu_operator("scalar_tensor_tensor", op0, "op0")
    second = alu_operator("scalar_tensor_tensor", op1, "op1")
    run = Instruction("scalar_tensor_tensor", Engine.vector)
    if first.bitvec or second.bitvec:
        raise ConstraintError(
            f"scalar_tensor_tensor takes arithmetic operators, got {first!r} and {second!r}"
        )
    values = run.rows("data", data)
    scalar = run.scalar_operand("operand0", operand0, data.shape[0])
    full = run.rows("operand1", operand1)
    run.not_both_in_psum("data", data, "operand1", operand1)
    run.same_elements(data, operand1, "data", "operand1")
    partial = combine(first, values, scalar, reverse0)
    run.write_like(dst, combine(second, partial, full, reverse1), data, "data")
    return run.done()


def tensor_copy(
    dst: NkiTensor, src: NkiTensor, engine: engines = engines.unknown, name: str | None = None
) -> Handle:
    """Copy src to dst, bit for bit where dtypes agree, through float32 otherwise."""
    chosen = pick("tensor_copy", engine, engines.vector, VSG)
    run = Instruction("tensor_copy", chosen)
    if chosen is engines.scalar:
        run.needs_generation(3, "tensor_copy on the Scalar engine (use activation with op=nl.copy)")
    values = run.read("src", src)
    if isinstance(dst, NkiTensor) and dst.dtype != src.dtype:
        values = to_float32(values)
    run.write_like(dst, values, src, "src")
    return run.done()


def memset(
    dst: NkiTensor, value: float, engine: engines = engines.unknown, name: str | None = None
) -> Handle:
    """Fill dst with a float if its dtype is a float, with an int if that is an integer."""
    chosen = pick("memset", engine, engines.vector, VG)
    run = Instruction("memset", chosen)
    out = run.dst("dst", dst)
    # 0 and 0.0 have the same bits in every dtype, and AWS's own kernels write 0 into float tiles.
    if out.dtype.integer:
        fits = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    else:
        fits = isinstance(value, (float, np.floating)) or value == 0
    if not fits:
        expected = "an int" if out.dtype.integer else "a float"
        raise ConstraintError(
            f"memset value must match the dtype: {out.dtype} needs {expected}, got {value!r}"
        )
    fill = np.asarray(value, np.int64 if out.dtype.integer else np.float32)
    run.write(out, np.broadcast_to(fill, out.shape))
    return run.done()


def reciprocal(dst: NkiTensor, data: NkiTensor, name: str | None = None) -> Handle:
    """Compute dst = 1 / data on the Vector engine."""
    run = Instruction("reciprocal", Engine.vector)
    run.write_like(dst, np.float32(1) / run.rows("data", data), data, "data")
    return run.done()


def tensor_copy_predicated(
    dst: NkiTensor, src: object, predicate: NkiTensor, reverse_pred: bool = False, name: str | None = None
) -> Handle:
    """Copy src, a number or a tile of dst's dtype, to dst where the predicate is not zero."""
    run = Instruction("tensor_copy_predicated", Engine.vector)
    mask = run.read("predicate", predicate)
    run.has_dtype("predicate", predicate, "uint8", "uint16", "uint32", "bool_")
    out = run.dst("dst", dst)
    run.same_elements(out, predicate, "dst", "predicate")
    if isinstance(src, NkiTensor):
        values = run.read("src", src).reshape(out.shape)
        run.not_both_in_psum("src", src, "predicate", predicate)
        require(
            src.dtype == out.dtype,
            f"tensor_copy_predicated src and dst must share a dtype, got {src.dtype} and {out.dtype}",
        )
    else:
        values = np.asarray(src, out.array.dtype)
    chosen = (mask == 0) if reverse_pred else (mask != 0)
    run.write(out, np.where(chosen.reshape(out.shape), values, out.array))
    return run.done()


def nc_stream_shuffle(
    dst: NkiTensor, src: NkiTensor, shuffle_mask: list[int], name: str | None = None
) -> Handle:
    """Copy dst[i] = src[mask[i]] within each quadrant of 32 partitions; 255 leaves dst[i] as it is."""
    run = Instruction("nc_stream_shuffle", Engine.vector)
    values = run.read("src", src, ON_CHIP)
    out = run.dst("dst", dst)
    require(
        len(shuffle_mask) == 32,
        f"nc_stream_shuffle shuffle_mask must have 32 entries, got {len(shuffle_mask)}",
    )
    require(out.dtype == src.dtype, f"nc_stream_shuffle dtypes must agree, got {out.dtype} and {src.dtype}")
    require(
        out.size // out.shape[0] == src.size // src.shape[0],
        f"nc_stream_shuffle needs equal elements per partition, got {out.shape} and {src.shape}",
    )
    active = -(-max(out.shape[0], src.shape[0]) // 32) * 32
    legal = (0,) if active > 64 else (0, 64) if active == 64 else (0, 32, 64, 96)
    for role, t in (("src", src), ("dst", out)):
        if run.strict and t.partition not in legal:
            raise StrictError(
                f"nc_stream_shuffle {role} starts at partition {t.partition}, legal are {legal}"
            )
    result = out.array.copy()
    rows = values.reshape(src.shape[0], *out.shape[1:])
    for lane in range(out.shape[0]):
        source = shuffle_mask[lane % 32]
        if source == 255:
            continue
        origin = lane - lane % 32 + source
        require(
            0 <= source < 32 and origin < src.shape[0],
            f"nc_stream_shuffle mask entry {source} reads partition {origin} of {src.shape[0]}",
        )
        result[lane] = rows[origin]
    run.write(out, result)
    return run.done()
