"""The operators that instructions take as `op`, and how an instruction applies them.

`alu` is the function of the Vector and GpSimd engines, of two arguments or one. `activation` is the
Scalar engine's function of one float32 argument. An operator has one of them or both (square has
both). Activations are as exact here as float32 allows; the chip's are piecewise polynomials.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from math import pi
from typing import Any

import numpy as np

_F32 = np.float32


@dataclass(eq=False, repr=False)
class Operator:
    """One operator; `name` is its name in nki.language."""

    name: str
    alu: Callable | None = None
    arity: int = 2
    bitvec: bool = False
    reduce: bool = False
    activation: Callable | None = None
    valid: tuple[float, float] | None = (
        None  # the inputs for which the Scalar engine's result is right
    )
    identity: float | None = None  # what a reduction starts from
    composed: bool = False  # no single instruction computes it; nl.cos on a tile issues several

    @property
    def __name__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"nl.{self.name}"


def _logical(function: Callable) -> Callable:
    return lambda a, b: function(a != 0, b != 0)


def _abs_extreme(function: Callable) -> Callable:
    return lambda a, b: function(np.abs(a), np.abs(b))


_erf_object = np.frompyfunc(math.erf, 1, 1)


def _erf(x: np.ndarray) -> np.ndarray:
    return np.asarray(_erf_object(x)).astype(_F32)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + small), small / (1 + small)).astype(_F32)


def _gelu_sigmoid_dx(x: np.ndarray) -> np.ndarray:
    s = _sigmoid(_F32(1.702) * x)
    return s + _F32(1.702) * x * s * (1 - s)


def _silu_dx(x: np.ndarray) -> np.ndarray:
    s = _sigmoid(x)
    return s * (1 + x * (1 - s))


def _gelu_dx(x: np.ndarray) -> np.ndarray:
    density = np.exp(-_F32(0.5) * x * x) * _F32(1 / math.sqrt(2 * pi))
    return _F32(0.5) * (1 + _erf(x * _F32(1 / math.sqrt(2)))) + x * density


def _softplus(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def _unary(name: str, function: Callable, **more: Any) -> Operator:
    """Return a function that the Vector, the GpSimd and the Scalar engine have."""
    return Operator(name, function, arity=1, activation=function, **more)


def _scalar(name: str, function: Callable, **more: Any) -> Operator:
    """Return a function that the Scalar engine alone has."""
    return Operator(name, arity=1, activation=function, **more)


INF = float("inf")

# fmt: off
add = Operator("add", np.add, reduce=True, identity=0.0)
subtract = Operator("subtract", np.subtract, reduce=True, identity=0.0)
multiply = Operator("multiply", np.multiply, reduce=True, identity=1.0)
divide = Operator("divide")  # no engine divides: nl.divide multiplies by the reciprocal
maximum = Operator("maximum", np.maximum, reduce=True, identity=-INF)
minimum = Operator("minimum", np.minimum, reduce=True, identity=INF)
abs_max = Operator("abs_max", _abs_extreme(np.maximum), reduce=True, identity=0.0)
abs_min = Operator("abs_min", _abs_extreme(np.minimum), reduce=True, identity=INF)
power = Operator("power", np.power)
equal = Operator("equal", np.equal)
not_equal = Operator("not_equal", np.not_equal)
less = Operator("less", np.less)
less_equal = Operator("less_equal", np.less_equal)
greater = Operator("greater", np.greater)
greater_equal = Operator("greater_equal", np.greater_equal)
logical_and = Operator("logical_and", _logical(np.logical_and), reduce=True, identity=1.0)
logical_or = Operator("logical_or", _logical(np.logical_or), reduce=True, identity=0.0)
logical_xor = Operator("logical_xor", _logical(np.logical_xor), reduce=True, identity=0.0)
logical_not = Operator("logical_not", arity=1)
fmod = Operator("fmod")
mod = Operator("mod")
bypass = Operator("bypass", lambda a, b: a)
average = Operator("average")

bitwise_and = Operator("bitwise_and", np.bitwise_and, bitvec=True, reduce=True, identity=-1)
bitwise_or = Operator("bitwise_or", np.bitwise_or, bitvec=True, reduce=True, identity=0)
bitwise_xor = Operator("bitwise_xor", np.bitwise_xor, bitvec=True, reduce=True, identity=0)
left_shift = Operator("left_shift", np.left_shift, bitvec=True)
right_shift = Operator("right_shift", np.right_shift, bitvec=True)
invert = Operator("invert", np.invert, arity=1, bitvec=True)

abs = _unary("abs", np.abs)
square = _unary("square", np.square)
relu = _unary("relu", lambda x: np.maximum(x, _F32(0)))
rsqrt = _unary("rsqrt", lambda x: _F32(1) / np.sqrt(x), valid=(2.0**-87, 2.0**97))
reciprocal = _unary("reciprocal", lambda x: _F32(1) / x, valid=(2.0**-42, 2.0**42))

copy = _scalar("copy", lambda x: x)
exp = _scalar("exp", np.exp)
log = _scalar("log", np.log, valid=(2.0**-64, 2.0**64))
sqrt = _scalar("sqrt", np.sqrt, valid=(2.0**-116, 2.0**118))
sin = _scalar("sin", np.sin, valid=(-pi, pi))
cos = _scalar("cos", np.cos, composed=True)
tan = _scalar("tan", np.tan, composed=True)
arctan = _scalar("arctan", np.arctan, valid=(-pi / 2, pi / 2))
tanh = _scalar("tanh", np.tanh)
sigmoid = _scalar("sigmoid", _sigmoid)
silu = _scalar("silu", lambda x: x * _sigmoid(x))
silu_dx = _scalar("silu_dx", _silu_dx)
gelu = _scalar("gelu", lambda x: _F32(0.5) * x * (1 + _erf(x * _F32(1 / math.sqrt(2)))))
gelu_dx = _scalar("gelu_dx", _gelu_dx)
gelu_apprx_tanh = _scalar(
    "gelu_apprx_tanh",
    lambda x: _F32(0.5) * x * (1 + np.tanh(_F32(math.sqrt(2 / pi)) * (x + _F32(0.044715) * x * x * x))),
)
gelu_apprx_sigmoid = _scalar("gelu_apprx_sigmoid", lambda x: x * _sigmoid(_F32(1.702) * x))
gelu_apprx_sigmoid_dx = _scalar("gelu_apprx_sigmoid_dx", _gelu_sigmoid_dx)
softplus = _scalar("softplus", _softplus)
mish = _scalar("mish", lambda x: x * np.tanh(_softplus(x)))
erf = _scalar("erf", _erf)
erf_dx = _scalar("erf_dx", lambda x: _F32(2 / math.sqrt(pi)) * np.exp(-x * x))
sign = _scalar("sign", np.sign)
prelu = Operator("prelu", arity=1)  # activate2 alone knows its slope, relu_param
# fmt: on

OPERATORS = tuple(value for value in vars().values() if isinstance(value, Operator))


def number(values: np.ndarray) -> np.ndarray:
    """Turn NumPy's booleans into what comparisons give on the engines, 1.0 and 0.0."""
    return values.astype(np.float32) if values.dtype == np.bool_ else values


def combine(op: Operator, a: Any, b: Any, reverse: bool = False) -> np.ndarray:
    """Return a op b, or b op a if reversed; unary operators ignore b."""
    assert op.alu is not None
    if op.arity == 1:
        return number(op.alu(a))
    return number(op.alu(b, a) if reverse else op.alu(a, b))


def add_in_order(values: np.ndarray) -> np.ndarray:
    """Return the sums along the last axis, one element added after the other, as Trn1 adds them.

    A public data set has the chip's sums equal to these bit for bit (16,384 bins; nki 0.6.0).

    >>> ones = np.full(3, 1.0, np.float32)
    >>> float(add_in_order(np.concatenate([[np.float32(2**24)], ones])))
    16777216.0
    """
    return np.add.accumulate(values, axis=-1, dtype=values.dtype)[..., -1]


def fold(op: Operator, values: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """Fold `op` over trailing axes. Differences subtract every later element from the first."""
    assert op.alu is not None
    if op.name == "add":
        return add_in_order(values.reshape(*values.shape[: values.ndim - len(axes)], -1))
    if op.name in ("maximum", "minimum", "multiply", "bitwise_and", "bitwise_or", "bitwise_xor"):
        return op.alu.reduce(values, axis=axes)  # pyright: ignore[reportFunctionMemberAccess]
    flat = values.reshape(*values.shape[: values.ndim - len(axes)], -1)
    result = flat[..., 0]
    for i in range(1, flat.shape[-1]):
        result = number(op.alu(result, flat[..., i]))
    return result
