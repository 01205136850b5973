"""Elementwise, activation and reducing instructions against NumPy."""

import numpy as np
import pytest
from simulator_harness import F32, R, execute, near, normal, sbuf

from nki_simulator import StrictError, nisa, nl

X, BLOCK, TALL = normal(4, 33), normal(3, 4, 5, 6), normal(70, 6)
Y, Z, COLUMN, SCALE = normal(6, 20), normal(6, 20), normal(6, 1), normal(6, 1)
MASK = R.integers(0, 2, (6, 20)).astype(np.uint8)
RESET, GO_ON = nisa.reduce_cmd.reset_reduce, nisa.reduce_cmd.reduce


def batch_statistics(out, tile):
    stats = sbuf(4, 6)
    nisa.bn_stats(dst=stats, data=tile)
    nisa.bn_aggr(dst=out, data=stats)


def sum_of_squares(out, tile):
    nisa.activation_reduce(
        dst=sbuf(*tile.shape), op=nl.square, data=tile, reduce_op=nl.add, reduce_res=out
    )


def scaled_and_summed_activations(out, tile, bias, scale):
    nisa.activation(
        dst=out[:, 0:20],
        op=nl.exp,
        data=tile,
        bias=bias,
        scale=scale,
        reduce_op=nl.add,
        reduce_cmd=RESET,
    )
    nisa.activation(
        dst=out[:, 20:40],
        op=nl.copy,
        data=tile,
        scale=2.0,
        reduce_op=nl.add,
        reduce_res=out[:, 40:41],
        reduce_cmd=GO_ON,
    )


def with_sums(*parts):
    return np.concatenate([*parts, sum(part.sum(1, keepdims=True) for part in parts)], 1)


def both_scans(out, tile):
    nisa.tensor_scalar_cumulative(dst=out[:, 0:20], src=tile, op0=nl.multiply, op1=nl.add, imm0=2.0)
    nisa.tensor_scalar_reduce(
        dst=out[:, 20:40],
        data=tile,
        op0=nl.add,
        operand0=1.0,
        reduce_op=nl.maximum,
        reduce_res=out[:, 40:41],
    )


def selections(out, tile, mask):
    nisa.select_reduce(
        dst=out[:, 0:20], predicate=mask, on_true=tile, on_false=-1.0, reduce_res=out[:, 40:41],
        reduce_cmd=RESET,
    )  # fmt: skip
    nisa.memset(dst=out[:, 20:40], value=7.0)
    nisa.tensor_copy_predicated(dst=out[:, 20:40], src=tile, predicate=mask, reverse_pred=True)


def scan(initial=None, op0=nl.multiply, op1=nl.add, **reverse):
    """Returns a body that scans; without an initial number the state starts
    from its last operand.
    """
    return lambda out, x, y, *state: nisa.tensor_tensor_scan(
        dst=out,
        data0=x,
        data1=y,
        initial=state[0] if initial is None else initial,
        op0=op0,
        op1=op1,
        **reverse,
    )


def scanned(step, state):
    states = []
    for i in range(20):
        state = step(Y[:, i].astype(np.float64), Z[:, i], state)
        states.append(state)
    return np.stack(states, 1)


def subtract_twice(reverse0, reverse1):
    return lambda out, tile, column: nisa.tensor_scalar(
        dst=out, data=tile, op0=nl.subtract, operand0=column, reverse0=reverse0, op1=nl.subtract,
        operand1=0.5, reverse1=reverse1,
    )  # fmt: skip


def fused(memory):
    """Returns a body whose data is in `memory`."""

    def body(out, x, y, column):
        data = x
        if memory == "psum":
            data = nl.ndarray(x.shape, F32, nl.psum)
            nisa.tensor_copy(dst=data, src=x)
        nisa.scalar_tensor_tensor(
            dst=out,
            data=data,
            op0=nl.multiply,
            operand0=column,
            op1=nl.subtract,
            operand1=y,
            reverse1=True,
        )

    return body


def pattern(out):
    index = sbuf(4, 2, 3, dtype=nl.int32)
    nisa.iota(dst=index, pattern=[[10, 2], [1, 3]], offset=5, channel_multiplier=100)
    nisa.tensor_copy(dst=out, src=index)


def triangle(out, tile):
    nisa.affine_select(
        dst=out, pattern=[[-1, 6]], channel_multiplier=1, on_true_tile=tile, on_false_value=-9.0,
        cmp_op=nl.greater,
    )  # fmt: skip


def reduced(name):
    return lambda out, x: nisa.tensor_reduce(
        dst=out, op=getattr(nl, name), data=x, axis=1, negate=True
    )


def row(values):
    return values[:, None]


PLACES, FIRST = np.mgrid[0:4, 0:2, 0:3], TALL[:6]
# name: what runs, its operands, and what it leaves
INSTRUCTIONS = {
    "memset": (lambda out: nisa.memset(dst=out, value=1.5), (), np.full((4, 2), 1.5)),
    "reciprocal": (lambda out, x: nisa.reciprocal(dst=out, data=x), (X,), 1 / X),
    "activation_reduce": (sum_of_squares, (X,), row((X**2).sum(1))),
    "activation": (
        scaled_and_summed_activations,
        (Y, COLUMN, SCALE),
        with_sums(np.exp(Y * SCALE + COLUMN), 2 * Y),
    ),
    "bn_stats and bn_aggr": (batch_statistics, (X,), np.stack([X.mean(1), X.var(1)], 1)),
    "tensor_reduce over two axes": (
        lambda out, x: nisa.tensor_reduce(dst=out, op=nl.add, data=x, axis=(2, 3)),
        (BLOCK,),
        BLOCK.sum((2, 3)),
    ),
    "tensor_reduce add": (reduced("add"), (X,), row(-X.sum(1))),
    "tensor_reduce maximum": (reduced("maximum"), (X,), row(-X.max(1))),
    "tensor_reduce minimum": (reduced("minimum"), (X,), row(-X.min(1))),
    "tensor_reduce multiply": (reduced("multiply"), (Y,), row(-Y.prod(1))),
    "tensor_reduce subtract": (reduced("subtract"), (X,), row(X.sum(1) - 2 * X[:, 0])),
    "tensor_partition_reduce": (
        lambda out, x: nisa.tensor_partition_reduce(dst=out, op=nl.add, data=x),
        (TALL,),
        TALL.sum(0)[None],
    ),
    "tensor_scalar": (subtract_twice(False, False), (Y, COLUMN), Y - COLUMN - 0.5),
    "tensor_scalar, first reversed": (subtract_twice(True, False), (Y, COLUMN), COLUMN - Y - 0.5),
    "tensor_scalar, second reversed": (
        subtract_twice(False, True),
        (Y, COLUMN),
        0.5 - (Y - COLUMN),
    ),
    "tensor_scalar, both reversed": (subtract_twice(True, True), (Y, COLUMN), 0.5 - (COLUMN - Y)),
    "scalar_tensor_tensor": (fused("sbuf"), (Y, Z, COLUMN), Z - Y * COLUMN),
    "scalar_tensor_tensor from PSUM": (fused("psum"), (Y, Z, COLUMN), Z - Y * COLUMN),
    "scan from a number": (scan(0.5), (Y, Z), scanned(lambda a, b, s: a * s + b, np.full(6, 0.5))),
    "scan from a tile": (scan(), (Y, Z, COLUMN), scanned(lambda a, b, s: a * s + b, COLUMN[:, 0])),
    "scan, reversed": (
        scan(0.0, nl.subtract, nl.subtract, reverse0=True, reverse1=True),
        (Y, Z),
        scanned(lambda a, b, s: b - (s - a), np.zeros(6)),
    ),
    "cumulative and reducing": (
        both_scans,
        (Y,),
        np.concatenate([np.cumsum(2 * Y, 1), Y + 1, row((Y + 1).max(1))], 1),
    ),
    "selections": (
        selections,
        (Y, MASK),
        np.concatenate(
            [np.where(MASK, Y, -1), np.where(MASK, 7, Y), row(np.where(MASK, Y, -1).max(1))], 1
        ),
    ),
    "iota": (pattern, (), 5 + 100 * PLACES[0] + 10 * PLACES[1] + PLACES[2]),
    "affine_select": (triangle, (FIRST,), np.where(np.tri(6, k=-1) > 0, FIRST, -9)),
}


@pytest.mark.parametrize(("body", "operands", "expected"), INSTRUCTIONS.values(), ids=INSTRUCTIONS)
def test_instruction_agrees_with_numpy(body, operands, expected):
    near(execute(body, *operands, shape=expected.shape), expected)


BINARY = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "equal": np.equal,
    "not_equal": np.not_equal,
    "greater": np.greater,
    "greater_equal": np.greater_equal,
    "less": np.less,
    "less_equal": np.less_equal,
    "logical_and": np.logical_and,
    "logical_or": np.logical_or,
    "logical_xor": np.logical_xor,
    "abs_max": lambda a, b: np.maximum(abs(a), abs(b)),
    "abs_min": lambda a, b: np.minimum(abs(a), abs(b)),
}


@pytest.mark.parametrize("name", BINARY)
def test_tensor_tensor_agrees_with_numpy(name):
    a, b = normal(5, 7), normal(5, 7)
    b[:, 0], a[:, 1] = a[:, 0], 0.0

    def body(out, x, y):
        nisa.tensor_tensor(dst=out, data1=x, data2=y, op=getattr(nl, name))

    near(execute(body, a, b, shape=(5, 7)), BINARY[name](a, b).astype(np.float64))


def test_tensor_tensor_is_exact_for_32_bit_integers():
    a = np.array([[2**24 + 1, -7]], np.int32)
    b = np.array([[1, 2**30]], np.int32)

    def body(out, x, y):
        nisa.tensor_tensor(dst=out, data1=x, data2=y, op=nl.add)

    assert execute(body, a, b, shape=(1, 2), dtype=nl.int32).tolist() == (a + b).tolist()

    def through_float32(out, x, y):
        nisa.tensor_tensor(dst=out, data1=x, data2=y, op=nl.add, engine=nisa.engine.vector)

    assert execute(through_float32, a, b, shape=(1, 2), dtype=nl.int32).tolist() != (a + b).tolist()


def test_bitwise_operators_agree_with_numpy():
    a, b = np.array([[12, 255, 1]], np.uint8), np.array([[10, 15, 3]], np.uint8)
    for op, expected in (
        (nl.bitwise_and, a & b), (nl.bitwise_or, a | b), (nl.bitwise_xor, a ^ b), (nl.left_shift, a << b),
        (nl.right_shift, a >> b),
    ):  # fmt: skip

        def body(out, x, y, op=op):
            nisa.tensor_tensor(dst=out, data1=x, data2=y, op=op)

        assert execute(body, a, b, shape=(1, 3), dtype=nl.uint8).tolist() == expected.tolist()


ACTIVATIONS = {
    "exp": np.exp,
    "tanh": np.tanh,
    "square": np.square,
    "abs": np.abs,
    "copy": np.asarray,
    "sign": np.sign,
    "sin": np.sin,
    "relu": lambda x: np.maximum(x, 0),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "softplus": lambda x: np.log1p(np.exp(x)),
    "mish": lambda x: x * np.tanh(np.log1p(np.exp(x))),
    "gelu_apprx_tanh": lambda x: (
        0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    ),
    "gelu_apprx_sigmoid": lambda x: x / (1 + np.exp(-1.702 * x)),
}
OF_POSITIVE_NUMBERS = {
    "log": np.log, "sqrt": np.sqrt, "rsqrt": lambda x: x**-0.5, "reciprocal": lambda x: 1 / x,
    "arctan": np.arctan,
}  # fmt: skip


@pytest.mark.parametrize("name", [*ACTIVATIONS, *OF_POSITIVE_NUMBERS])
def test_activation_agrees_with_numpy(name):
    start, stop = (0.01, 1.5) if name in OF_POSITIVE_NUMBERS else (-3, 3)
    x = np.linspace(start, stop, 60, dtype=np.float32).reshape(4, 15)

    def body(out, tile):
        nisa.activation(dst=out, op=getattr(nl, name), data=tile)

    near(
        execute(body, x, shape=(4, 15)),
        (ACTIVATIONS | OF_POSITIVE_NUMBERS)[name](x.astype(np.float64)),
    )


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_apprx_sigmoid", "erf"])
def test_activation_derivative_is_the_slope_of_its_function(name):
    """f_dx against the central difference of f, both in float32 steps of 2^-6."""
    x = np.linspace(-3, 3, 61, dtype=np.float32).reshape(1, 61)
    step = np.float32(2.0**-6)

    def body(out, tile):
        nisa.activation(dst=out[:, 0:61], op=getattr(nl, name + "_dx"), data=tile)
        for i, sign in ((1, 1.0), (2, -1.0)):
            moved = nl.ndarray((1, 61), F32, nl.sbuf)
            nisa.tensor_scalar(dst=moved, data=tile, op0=nl.add, operand0=float(sign * step))
            nisa.activation(dst=out[:, 61 * i : 61 * (i + 1)], op=getattr(nl, name), data=moved)

    result = execute(body, x, shape=(1, 183)).reshape(3, 61)
    near(result[0], (result[1] - result[2]) / (2 * step), 3e-4)


def test_select_reduce_resets_its_registers_and_goes_on_with_them():
    """A reset forgets a larger maximum and takes none of its own instruction's."""
    x, y, mask = normal(4, 6), normal(4, 6), np.ones((4, 6), np.uint8)

    def body(out, larger, x, y, m):
        other = nl.ndarray((4, 6), F32, nl.sbuf)
        for i, (tile, command) in enumerate(
            [(larger, "reset_reduce"), (larger, "reset"), (x, "reduce"), (y, "reduce")]
        ):
            nisa.select_reduce(
                dst=other, predicate=m, on_true=tile, on_false=0.0, reduce_res=out[:, i : i + 1],
                reduce_cmd=getattr(nisa.reduce_cmd, command),
            )  # fmt: skip

    result = execute(body, x + 9, x, y, mask, shape=(4, 4))
    near(result[:, 0], (x + 9).max(1))
    assert (result[:, 1] == -np.inf).all()
    near(result[:, 2], x.max(1))
    near(result[:, 3], np.maximum(x, y).max(1))


def test_range_select_needs_trn2_and_exponential_trn3():
    x = normal(3, 10)

    def select(out, tile):
        low, high = nl.full((3, 1), 2, F32), nl.full((3, 1), 5, F32)
        nisa.range_select(
            dst=out[:, 0:10],
            on_true_tile=tile,
            comp_op0=nl.greater_equal,
            comp_op1=nl.less,
            bound0=low,
            bound1=high,
            reduce_res=out[:, 10:11],
        )

    result = execute(select, x, shape=(3, 11), target="trn2")
    assert (result[:, 2:5] == x[:, 2:5]).all() and (result[:, 5:10] < -3e38).all()
    assert (result[:, 10] == x[:, 2:5].max(1)).all()

    def exponential(out, tile):
        nisa.exponential(
            dst=out[:, 0:10], src=tile, max_value=1.0, reduce_res=out[:, 10:11],
            reduce_cmd=nisa.reduce_cmd.reset_reduce,
        )  # fmt: skip
        nisa.activate2(
            dst=out[:, 11:21],
            op=nl.relu,
            data=tile,
            imm0=2.0,
            imm1=0.5,
            op0=nl.multiply,
            op1=nl.add,
        )

    result = execute(exponential, x, shape=(3, 21), target="trn3")
    near(result[:, 10], np.exp(x - 1).sum(1))
    near(result[:, 11:], np.maximum(2 * x + 0.5, 0))


@pytest.mark.parametrize(
    ("value", "expected"), [(2.5, 2), (3.5, 4), (-0.5, 0), (300.0, 127), (-300.0, -128)]
)
def test_float_to_integer_rounds_to_even_and_saturates(value, expected):
    def body(out):
        tile = nl.full((1, 1), value, F32)
        nisa.tensor_copy(dst=out, src=tile)

    assert execute(body, shape=(1, 1), dtype=nl.int8)[0, 0] == expected


def test_a_root_out_of_range_on_gpsimd_names_gpsimd():
    def body(out, tile):
        nisa.tensor_scalar(
            dst=out, data=tile, op0=nl.rsqrt, operand0=0.0, engine=nisa.engine.gpsimd
        )

    with pytest.raises(StrictError, match="no other range is documented for the gpsimd engine"):
        execute(body, np.zeros((4, 4), np.float32), shape=(4, 4))
