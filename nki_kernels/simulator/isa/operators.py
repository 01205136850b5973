"""The operators that instructions take as `op`, and how an instruction applies them.

`alu` is the function of the Vector and GpSimd engines, of two arguments or one. `activation` is the Scalar
engine's function of one float32 argument. An operator has one of them or both (square has both).
Activations are as exact here as float32 allows; the chip's are piecewise polynomials.
"""

import math
from collections.abc import Callable
from math import pi

import numpy as np

_F32 = np.float32


class Operator:
    """One operator; `name` is its name in nki.language."""

    def __init__(
        self,
        name: str,
        alu: Callable | None = None,
        *,
        arity: int = 2,
        bitvec: bool = False,
        reduce: bool = False,
        activation: Callable | None = None,
        valid: tuple[float, float] | None = None,
        identity: float | None = None,
        composed: bool = False,
    ) -> None:
        self.name = name
        self.__name__ = name
        self.alu = alu
        self.arity = arity
        self.bitvec = bitvec
        self.reduce = reduce
        self.activation = activation
        self.valid = valid  # the inputs for which the Scalar engine's result is right
        self.identity = identity  # what a reduction starts from
        self.composed = composed  # no single instruction computes it; nl.cos on a tile issues several

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


def _normal_density(x: np.ndarray) -> np.ndarray:
    return np.exp(-_F32(0.5) * x * x) * _F32(1 / math.sqrt(2 * pi))


def _gelu(x: np.ndarray) -> np.ndarray:
    return _F32(0.5) * x * (1 + _erf(x * _F32(1 / math.sqrt(2))))


def _gelu_dx(x: np.ndarray) -> np.ndarray:
    return _F32(0.5) * (1 + _erf(x * _F32(1 / math.sqrt(2)))) + x * _normal_density(x)


def _gelu_tanh(x: np.ndarray) -> np.ndarray:
    return _F32(0.5) * x * (1 + np.tanh(_F32(math.sqrt(2 / pi)) * (x + _F32(0.044715) * x * x * x)))


def _gelu_sigmoid(x: np.ndarray) -> np.ndarray:
    return x * _sigmoid(_F32(1.702) * x)


def _gelu_sigmoid_dx(x: np.ndarray) -> np.ndarray:
    s = _sigmoid(_F32(1.702) * x)
    return s + _F32(1.702) * x * s * (1 - s)


def _silu(x: np.ndarray) -> np.ndarray:
    return x * _sigmoid(x)


def _silu_dx(x: np.ndarray) -> np.ndarray:
    s = _sigmoid(x)
    return s * (1 + x * (1 - s))


def _softplus(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def _mish(x: np.ndarray) -> np.ndarray:
    return x * np.tanh(_softplus(x))


def _relu(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, _F32(0))


def _rsqrt(x: np.ndarray) -> np.ndarray:
    return _F32(1) / np.sqrt(x)


def _reciprocal(x: np.ndarray) -> np.ndarray:
    return _F32(1) / x


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

abs = Operator("abs", np.abs, arity=1, activation=np.abs)
square = Operator("square", np.square, arity=1, activation=np.square)
relu = Operator("relu", _relu, arity=1, activation=_relu)
rsqrt = Operator("rsqrt", _rsqrt, arity=1, activation=_rsqrt, valid=(2.0**-87, 2.0**97))
reciprocal = Operator("reciprocal", _reciprocal, arity=1, activation=_reciprocal, valid=(2.0**-42, 2.0**42))

copy = Operator("copy", arity=1, activation=lambda x: x)
exp = Operator("exp", arity=1, activation=np.exp)
log = Operator("log", arity=1, activation=np.log, valid=(2.0**-64, 2.0**64))
sqrt = Operator("sqrt", arity=1, activation=np.sqrt, valid=(2.0**-116, 2.0**118))
sin = Operator("sin", arity=1, activation=np.sin, valid=(-pi, pi))
cos = Operator("cos", arity=1, activation=np.cos, composed=True)
tan = Operator("tan", arity=1, activation=np.tan, composed=True)
arctan = Operator("arctan", arity=1, activation=np.arctan, valid=(-pi / 2, pi / 2))
tanh = Operator("tanh", arity=1, activation=np.tanh)
sigmoid = Operator("sigmoid", arity=1, activation=_sigmoid)
silu = Operator("silu", arity=1, activation=_silu)
silu_dx = Operator("silu_dx", arity=1, activation=_silu_dx)
gelu = Operator("gelu", arity=1, activation=_gelu)
gelu_dx = Operator("gelu_dx", arity=1, activation=_gelu_dx)
gelu_apprx_tanh = Operator("gelu_apprx_tanh", arity=1, activation=_gelu_tanh)
gelu_apprx_sigmoid = Operator("gelu_apprx_sigmoid", arity=1, activation=_gelu_sigmoid)
gelu_apprx_sigmoid_dx = Operator("gelu_apprx_sigmoid_dx", arity=1, activation=_gelu_sigmoid_dx)
softplus = Operator("softplus", arity=1, activation=_softplus)
mish = Operator("mish", arity=1, activation=_mish)
erf = Operator("erf", arity=1, activation=_erf)
erf_dx = Operator("erf_dx", arity=1, activation=lambda x: _F32(2 / math.sqrt(pi)) * np.exp(-x * x))
sign = Operator("sign", arity=1, activation=np.sign)
# fmt: on

OPERATORS = tuple(value for value in vars().values() if isinstance(value, Operator))
