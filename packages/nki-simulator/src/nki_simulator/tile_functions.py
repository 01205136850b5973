"""The functions of nki.language on whole tiles.

Each allocates its result in SBUF and issues the instructions for it. They are conveniences, as in
NKI: elementwise functions broadcast along free axes, reductions keep the partition axis. A kernel
that must decide which engine runs what calls nisa.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from nki_simulator.core import operators as ops
from nki_simulator.core.dtypes import DType, dtype_of, float32
from nki_simulator.core.errors import ConstraintError, require
from nki_simulator.core.machine import current
from nki_simulator.core.memory import PSUM, SBUF, NkiTensor
from nki_simulator.core.operators import Operator
from nki_simulator.isa.activation import activation
from nki_simulator.isa.elementwise import (
    memset,
    tensor_copy,
    tensor_copy_predicated,
    tensor_scalar,
    tensor_tensor,
)
from nki_simulator.isa.matmul import nc_matmul, nc_transpose
from nki_simulator.isa.reduction import tensor_reduce

__all__ = [
    "broadcast_to",
    "ceil",
    "floor",
    "matmul",
    "mean",
    "rms_norm",
    "softmax",
    "transpose",
    "trunc",
    "var",
    "where",
]


def tile(shape: Any, dtype: Any) -> NkiTensor:
    """Return a new tile in SBUF."""
    return current().allocate(shape, dtype, SBUF)


def issue(instruction: Callable[..., Any], shape: Any, dtype: Any, **operands: Any) -> NkiTensor:
    """Return a new tile in SBUF, which the instruction has filled."""
    out = tile(shape, dtype)
    instruction(dst=out, **operands)
    return out


def _result_dtype(operands: tuple[Any, ...], dtype: object) -> DType:
    """Return `dtype`, or without one the widest dtype of the tiles, floats before integers."""
    if dtype is not None:
        return dtype_of(dtype)
    dtypes = [x.dtype for x in operands if isinstance(x, NkiTensor)]
    return max(dtypes, key=lambda dtype: (not dtype.integer, dtype.itemsize))


def apply(op: Operator, operands: tuple[Any, ...], dtype: object) -> Any:
    """Apply an operator to tiles and numbers."""
    if not any(isinstance(x, NkiTensor) for x in operands):
        raise TypeError(f"{op!r} needs a tile, got {', '.join(type(x).__name__ for x in operands)}")
    result = _result_dtype(operands, dtype)
    if len(operands) == 1:
        return _unary(op, operands[0], result)
    return _binary(op, operands[0], operands[1], result)


def _unary(op: Operator, x: NkiTensor, dtype: DType) -> NkiTensor:
    if op.composed:
        return _cos_or_tan(op, x, dtype)
    if op.activation is not None:
        return issue(activation, x.shape, dtype, op=op, data=x)
    alu = ops.equal if op.name == "logical_not" else op
    return issue(tensor_scalar, x.shape, dtype, data=x, op0=alu, operand0=0)


def _cos_or_tan(op: Operator, x: NkiTensor, dtype: DType) -> NkiTensor:
    """Compute cos or tan from sin, as on the chip: cos x = sin(pi/2 - |x|) for x in [-pi, pi]."""
    wide = issue(activation, x.shape, float32, op=ops.abs, data=x)
    tensor_scalar(dst=wide, data=wide, op0=ops.subtract, operand0=np.pi / 2, reverse0=True)
    activation(dst=wide, op=ops.sin, data=wide)
    if op.name == "cos":
        return issue(tensor_copy, x.shape, dtype, src=wide)
    sine = issue(activation, x.shape, float32, op=ops.sin, data=x)
    activation(dst=wide, op=ops.reciprocal, data=wide)
    return issue(tensor_tensor, x.shape, dtype, data1=sine, data2=wide, op=ops.multiply)


def _binary(op: Operator, x: Any, y: Any, dtype: DType) -> NkiTensor:
    if op.name == "divide":
        inverse = _unary(ops.reciprocal, y, float32) if isinstance(y, NkiTensor) else 1.0 / y
        return _binary(ops.multiply, x, inverse, dtype)
    if op.name in ("mod", "fmod"):
        whole = (floor if op.name == "mod" else trunc)(_binary(ops.divide, x, y, float32))
        return _binary(ops.subtract, x, _binary(ops.multiply, whole, y, float32), dtype)
    if not isinstance(x, NkiTensor) or not isinstance(y, NkiTensor):
        data, scalar, reverse = (x, y, False) if isinstance(x, NkiTensor) else (y, x, True)
        return issue(
            tensor_scalar, data.shape, dtype, data=data, op0=op, operand0=scalar, reverse0=reverse
        )
    shape = np.broadcast_shapes(x.shape, y.shape)
    return issue(
        tensor_tensor, shape, dtype, data1=stretch(x, shape), data2=stretch(y, shape), op=op
    )


def stretch(x: NkiTensor, shape: Any) -> NkiTensor:
    """Broadcast a tile along its free axes; its partitions must agree already."""
    if x.shape == tuple(shape):
        return x
    require(
        x.shape[0] == shape[0],
        f"nl functions do not broadcast the partition axis: {x.shape} against {tuple(shape)}; use "
        "nl.broadcast_to",
    )
    for axis in range(1, len(shape)):
        if x.shape[axis] != shape[axis]:
            x = x.repeat(axis, shape[axis])
    return x


def floor(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """Round down: to nearest through int32, minus 1 where that rounded up."""
    nearest = issue(tensor_copy, x.shape, "int32", src=x)
    wide = issue(tensor_copy, x.shape, float32, src=nearest)
    return _binary(
        ops.subtract, wide, _binary(ops.greater, wide, x, float32), dtype_of(dtype or x.dtype)
    )


def trunc(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    magnitude = floor(_unary(ops.abs, x, float32))
    return _binary(
        ops.multiply, magnitude, _unary(ops.sign, x, float32), dtype_of(dtype or x.dtype)
    )


def ceil(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    down = floor(_binary(ops.multiply, x, -1.0, float32))
    return _binary(ops.multiply, down, -1.0, dtype_of(dtype or x.dtype))


def reduce(
    op: Operator, x: NkiTensor, axis: Any, dtype: Any = None, keepdims: bool = False
) -> NkiTensor:
    axes = [a + x.ndim if a < 0 else a for a in ([axis] if isinstance(axis, int) else axis)]
    shape = [n for a, n in enumerate(x.shape) if a not in axes]
    if keepdims or len(shape) < 2:
        shape = [1 if a in axes else n for a, n in enumerate(x.shape)]
    return issue(tensor_reduce, shape, dtype or x.dtype, op=op, data=x, axis=axes)


def mean(x: NkiTensor, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    total = reduce(ops.add, x, axis, float32, keepdims)
    return _binary(ops.multiply, total, total.size / x.size, dtype_of(dtype or x.dtype))


def var(x: NkiTensor, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    center = mean(x, axis, float32, keepdims=True)
    apart = _binary(ops.subtract, x, center, float32)
    return mean(_binary(ops.multiply, apart, apart, float32), axis, dtype or x.dtype, keepdims)


def softmax(x: NkiTensor, axis: int = -1, dtype: Any = None) -> NkiTensor:
    shifted = _binary(
        ops.subtract, x, reduce(ops.maximum, x, axis, float32, keepdims=True), float32
    )
    weights = _unary(ops.exp, shifted, float32)
    total = reduce(ops.add, weights, axis, float32, keepdims=True)
    return _binary(
        ops.multiply, weights, _unary(ops.reciprocal, total, float32), dtype_of(dtype or x.dtype)
    )


def rms_norm(
    x: NkiTensor, w: NkiTensor | None, axis: int, n: int, epsilon: float = 1e-6, dtype: Any = None,
    compute_dtype: Any = None,
) -> NkiTensor:  # fmt: skip
    """Return x / sqrt(sum(x^2) / n + epsilon) * w along a free axis."""
    squares = _unary(ops.square, x, float32)
    total = reduce(ops.add, squares, axis, float32, keepdims=True)
    mean_square = issue(
        tensor_scalar,
        total.shape,
        float32,
        data=total,
        op0=ops.multiply,
        operand0=1.0 / n,
        op1=ops.add,
        operand1=float(epsilon),
    )
    result = dtype_of(dtype or x.dtype)
    out = _binary(ops.multiply, x, _unary(ops.rsqrt, mean_square, float32), result)
    return out if w is None else _binary(ops.multiply, out, stretch(w, x.shape), result)


def where(condition: NkiTensor, x: Any, y: Any, dtype: Any = None) -> NkiTensor:
    """Select x where the condition is not zero and y elsewhere; y + (x - y)
    * c would spoil infinities.
    """
    sides = (x, y) if isinstance(x, NkiTensor) or isinstance(y, NkiTensor) else (condition,)
    result = _result_dtype(sides, dtype)
    shape = condition.shape
    mask = issue(tensor_scalar, shape, "uint8", data=condition, op0=ops.not_equal, operand0=0.0)
    if isinstance(y, NkiTensor):
        out = issue(tensor_copy, shape, result, src=stretch(y, shape))
    else:
        out = issue(memset, shape, result, value=int(y) if result.integer else float(y))
    if isinstance(x, NkiTensor):
        x = issue(tensor_copy, shape, result, src=stretch(x, shape))
    tensor_copy_predicated(dst=out, src=x, predicate=mask)
    return out


def broadcast_to(x: NkiTensor, shape: Any, dtype: Any = None) -> NkiTensor:
    """Broadcast free axes by a view, and one partition to many by a matmul with ones.

    The chip has no other way to broadcast a partition.
    """
    shape = tuple(shape)
    if x.shape[0] == shape[0]:
        return issue(tensor_copy, shape, dtype or x.dtype, src=stretch(x, shape))
    if x.shape[0] != 1:
        raise ConstraintError(f"broadcast_to cannot turn {x.shape[0]} partitions into {shape[0]}")
    row = stretch(x, (1, *shape[1:]))
    out, wide = tile(shape, dtype or x.dtype), issue(tensor_copy, row.shape, float32, src=row)
    ones = issue(memset, (1, shape[0]), float32, value=1.0)
    flat_in, flat_out = wide.reshape((1, wide.size)), out.reshape((shape[0], wide.size))
    for start in range(0, wide.size, 512):
        stop = min(start + 512, wide.size)
        ps = current().allocate((shape[0], stop - start), float32, PSUM)
        nc_matmul(
            dst=ps, stationary=ones, moving=flat_in[:, start:stop], is_stationary_onezero=True
        )
        tensor_copy(dst=flat_out[:, start:stop], src=ps)
    return out


def transpose(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    rows, columns = x.shape[0], x.size // x.shape[0]
    wide = x
    if x.dtype != "float32" or x.buffer is not SBUF:
        wide = issue(tensor_copy, (rows, columns), float32, src=x.reshape((rows, columns)))
    ps = current().allocate((columns, rows), float32, PSUM)
    nc_transpose(dst=ps, data=wide)
    return issue(tensor_copy, (columns, rows), dtype or x.dtype, src=ps)


def matmul(x: NkiTensor, y: NkiTensor, transpose_x: bool = False) -> NkiTensor:
    """Return x @ y in PSUM; transpose_x says that x is its own transpose already."""
    left = x if transpose_x else transpose(x)
    ps = current().allocate((left.size // left.shape[0], y.size // y.shape[0]), float32, PSUM)
    nc_matmul(dst=ps, stationary=left, moving=y)
    return ps
