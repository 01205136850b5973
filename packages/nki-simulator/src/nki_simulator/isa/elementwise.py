"""Vector, Scalar and GpSimd instructions that work element by element."""

import numpy as np

from nki_simulator.core.chip import GPSIMD
from nki_simulator.core.dtypes import to_float32
from nki_simulator.core.instruction import Instruction, instruction, list_starts
from nki_simulator.core.memory import ON_CHIP, PSUM, NkiTensor
from nki_simulator.core.operators import Operator, combine
from nki_simulator.isa.enums import engine as engines

__all__ = [
    "memset", "nc_stream_shuffle", "reciprocal", "scalar_tensor_tensor", "tensor_copy",
    "tensor_copy_predicated", "tensor_scalar", "tensor_tensor",
]  # fmt: skip

INT32 = ("int32", "uint32")
ON_GPSIMD = ("power", "rsqrt")
# On Trn2 the Scalar engine's tensor_scalar knows these pairs only; Trn1's list is not published.
SCALAR_PAIRS = {("multiply", "add"), ("multiply", None), ("add", None)}


@instruction(engines.vector)
def tensor_tensor(
    run: Instruction, dst: NkiTensor, data1: NkiTensor, data2: NkiTensor, op: Operator,
    engine: engines = engines.unknown,
):  # fmt: skip
    """Compute dst = data1 op data2 in float32, or in integers where all three tensors are int32.

    Nothing broadcasts, and the inputs are not both in PSUM.
    """
    alu = run.alu_operator(op)
    tensors = [t for t in (dst, data1, data2) if isinstance(t, NkiTensor)]
    exact = all(t.dtype in INT32 for t in tensors)
    if alu.name in ON_GPSIMD or (exact and not any(t.buffer is PSUM for t in tensors)):
        run.engine = engines.gpsimd
    run.pick(engine, engines.vector, engines.gpsimd)
    if run.engine is engines.gpsimd and (engine is engines.gpsimd or not exact):
        # where nobody names an engine, integers go to GpSimd, and kernels that do so ran on Trn1
        run.machine.refuse_on_chip(GPSIMD, f"tensor_tensor of {tensors[0].dtype} on GpSimd")
    if alu.arity != 2:
        raise TypeError(f"tensor_tensor op must be a binary operator, got {alu!r}")
    a, b = run.read("data1", data1), run.read("data2", data2)
    out = run.dst("dst", dst)
    run.not_both_in_psum(data1, data2)
    run.same_elements(data1, data2)
    run.same_elements(out, data1)
    if alu.bitvec:
        run.has_integers(alu, out, data1, data2)
    elif not (exact and run.engine is engines.gpsimd):
        a, b = to_float32(a), to_float32(b)
    run.write(out, combine(alu, a, b.reshape(a.shape)))


@instruction(engines.vector)
def tensor_scalar(
    run: Instruction,
    dst: NkiTensor,
    data: NkiTensor,
    op0: Operator,
    operand0: object,
    reverse0: bool = False,
    op1: Operator | None = None,
    operand1: object = None,
    reverse1: bool = False,
    engine: engines = engines.unknown,
):
    """Compute dst = (data op0 operand0) op1 operand1;
    operands are numbers or float32 (P, 1) tiles.
    """
    first = run.alu_operator(op0, "op0")
    second = None if op1 is None else run.alu_operator(op1, "op1")
    slow = first.name in ON_GPSIMD or (second is not None and second.name in ON_GPSIMD)
    run.engine = engines.gpsimd if slow else engines.vector
    run.pick(engine, engines.vector, engines.scalar, engines.gpsimd)
    run.forbid(
        run.engine is engines.gpsimd and not slow,
        f"runs on GpSimd for rsqrt and power alone, got {first!r}: leave out the engine, or use "
        "tensor_tensor",
    )
    run.require(
        second is None or first.bitvec == second.bitvec,
        f"op0 {first!r} and op1 {second!r} must both be bitvec or both arithmetic",
    )
    pair = (first.name, second.name if second else None)
    run.forbid(
        run.engine is engines.scalar and pair not in SCALAR_PAIRS,
        f"on the Scalar engine knows multiply, add and multiply-add, got {pair}",
    )
    values = run.read("data", data)
    if first.bitvec:
        run.has_integers(first, data, dst)
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
        run.check_range(op, values)
        values = combine(op, values, scalar, reverse)
    run.write_like(dst, values, data)
    return {"slow": slow}


@instruction(engines.vector)
def scalar_tensor_tensor(
    run: Instruction,
    dst: NkiTensor,
    data: NkiTensor,
    op0: Operator,
    operand0: object,
    op1: Operator,
    operand1: NkiTensor,
    reverse0: bool = False,
    reverse1: bool = False,
):
    """Compute dst = (data op0 operand0) op1 operand1: a number or (P, 1) tile, then a full tile."""
    first, second = run.alu_operator(op0, "op0"), run.alu_operator(op1, "op1")
    bitwise = first.bitvec or second.bitvec
    run.require(not bitwise, f"takes arithmetic operators, got {first!r} and {second!r}")
    values = run.rows("data", data)
    scalar = run.scalar_operand("operand0", operand0, data.shape[0])
    full = run.rows("operand1", operand1)
    run.not_both_in_psum(data, operand1)
    run.same_elements(data, operand1)
    partial = combine(first, values, scalar, reverse0)
    run.write_like(dst, combine(second, partial, full, reverse1), data)


@instruction(engines.vector)
def tensor_copy(
    run: Instruction, dst: NkiTensor, src: NkiTensor, engine: engines = engines.unknown
):
    """Copy src to dst, bit for bit where dtypes agree, through float32 otherwise."""
    run.pick(engine, engines.vector, engines.scalar, engines.gpsimd)
    if run.engine is engines.scalar:
        run.needs_generation(3, "tensor_copy on the Scalar engine (use activation with op=nl.copy)")
    values = run.read("src", src)
    if isinstance(dst, NkiTensor) and dst.dtype != src.dtype:
        values = to_float32(values)
    run.write_like(dst, values, src)


@instruction(engines.vector)
def memset(run: Instruction, dst: NkiTensor, value: float, engine: engines = engines.unknown):
    """Fill dst with a float if its dtype is a float, with an int if that is an integer."""
    run.pick(engine, engines.vector, engines.gpsimd)
    out = run.dst("dst", dst)
    integer = out.dtype.integer
    # 0 and 0.0 have the same bits in every dtype, and AWS's own kernels write 0 into float tiles.
    if integer:
        fits = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    else:
        fits = isinstance(value, (float, np.floating)) or value == 0
    expected = "an int" if integer else "a float"
    run.require(fits, f"value must match the dtype: {out.dtype} needs {expected}, got {value!r}")
    run.write(out, np.full(out.shape, value, np.int64 if integer else np.float32))


@instruction(engines.vector)
def reciprocal(run: Instruction, dst: NkiTensor, data: NkiTensor):
    """Compute dst = 1 / data on the Vector engine."""
    run.write_like(dst, np.float32(1) / run.rows("data", data), data)


@instruction(engines.vector)
def tensor_copy_predicated(
    run: Instruction, dst: NkiTensor, src: object, predicate: NkiTensor, reverse_pred: bool = False
):
    """Copy src, a number or a tile of dst's dtype, to dst where the predicate is not zero."""
    mask = run.read("predicate", predicate)
    run.has_dtype("predicate", predicate, "uint8", "uint16", "uint32", "bool_")
    out = run.dst("dst", dst)
    run.same_elements(out, predicate)
    if isinstance(src, NkiTensor):
        values = run.read("src", src).reshape(out.shape)
        run.not_both_in_psum(src, predicate)
        run.has_dtype("src", src, out.dtype)
    else:
        values = np.asarray(src, out.array.dtype)
    chosen = (mask == 0) if reverse_pred else (mask != 0)
    run.write(out, np.where(chosen.reshape(out.shape), values, out.array))


@instruction(engines.vector)
def nc_stream_shuffle(run: Instruction, dst: NkiTensor, src: NkiTensor, shuffle_mask: list[int]):
    """Copy dst[i] = src[mask[i]] within each quadrant of 32 partitions;
    255 leaves dst[i] as it is.
    """
    values = run.read("src", src, ON_CHIP)
    out = run.dst("dst", dst)
    run.require(
        len(shuffle_mask) == 32, f"shuffle_mask must have 32 entries, got {len(shuffle_mask)}"
    )
    run.has_dtype("dst", out, src.dtype)
    run.require(
        out.size // out.shape[0] == src.size // src.shape[0],
        f"needs equal elements per partition, got {out.shape} and {src.shape}",
    )
    legal = list_starts(max(out.shape[0], src.shape[0]))
    for role, t in (("src", src), ("dst", out)):
        run.forbid(
            t.partition not in legal, f"{role} starts at partition {t.partition}, legal are {legal}"
        )
    result = out.array.copy()
    rows = values.reshape(src.shape[0], *out.shape[1:])
    for lane in range(out.shape[0]):
        source = shuffle_mask[lane % 32]
        if source == 255:
            continue
        origin = lane - lane % 32 + source
        run.require(
            0 <= source < 32 and origin < src.shape[0],
            f"mask entry {source} reads partition {origin} of {src.shape[0]}",
        )
        result[lane] = rows[origin]
    run.write(out, result)
