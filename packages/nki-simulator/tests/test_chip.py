"""What Trn1 refuses or gets wrong by the measurements of others: each rule is broken once, beside
what stays allowed.
"""

import warnings

import numpy as np
import pytest
from simulator_harness import F32, normal, ones, psum, sbuf, write_output

from nki_simulator import Numerics, StrictError, nisa, nki, nl, record, scan
from nki_simulator.__main__ import main
from nki_simulator.aliases import as_nki
from nki_simulator.core import chip
from nki_simulator.core.function_errors import LARGEST, MEDIAN, err
from nki_simulator.core.operators import OPERATORS
from nki_simulator.kernel import FUNCTIONS, WITHOUT

HALF = "bfloat16"
GPSIMD = nisa.engine.gpsimd


def multiply(dst, accumulate, rows=128):
    """Issues a product that fills dst, or adds to it."""
    M, N = dst.shape[0], int(np.prod(dst.shape[1:]))
    moving = ones(rows, N, dtype=HALF)
    nisa.nc_matmul(
        dst=dst, stationary=ones(rows, M, dtype=HALF), moving=moving, accumulate=accumulate
    )


def sum_up(dst, products=3):
    for n in range(products):
        multiply(dst, n > 0)


def one_after_the_other():
    tile = psum(128, 4, 8)
    for slot in range(4):
        sum_up(tile[:, slot, :])


def interleaved():
    tile = psum(128, 2, 8)
    for n in range(3):
        for slot in range(2):
            multiply(tile[:, slot, :], n > 0)


def the_place_again():
    tile = psum(128, 8)
    sum_up(tile)
    nisa.tensor_copy(dst=sbuf(128, 8), src=tile)
    sum_up(tile)


def accumulate_left_out():
    tile = psum(128, 2, 8)
    for slot in range(2):
        for _ in range(2):
            multiply(tile[:, slot, :], None)


def read_and_added_to():
    tile = psum(128, 8)
    multiply(tile, False)
    nisa.tensor_copy(dst=sbuf(128, 8), src=tile)
    multiply(tile, True)


def another_part_read():
    tile = psum(128, 2, 8)
    multiply(tile[:, 0, :], False)
    multiply(tile[:, 1, :], False)
    nisa.tensor_copy(dst=sbuf(128, 8), src=tile[:, 0, :])
    multiply(tile[:, 1, :], True)


def on_gpsimd(dtype):
    def body():
        a, b = ones(128, 8, dtype=dtype), ones(128, 8, dtype=dtype)
        nisa.tensor_tensor(dst=a, data1=a, data2=b, op=nl.multiply, engine=GPSIMD)

    return body


def four_dimensions():
    wide = ones(128, 2 * 3 * 4 * 5 * 2).reshape((128, 2, 3, 4, 10))
    part = wide.ap(pattern=[[240, 128], [120, 2], [0, 3], [10, 4], [1, 5]], offset=0)
    other = ones(128, 2, 3, 4, 5)
    nisa.tensor_tensor(dst=sbuf(128, 2, 3, 4, 5), data1=part, data2=other, op=nl.add)


def four_dimensions_of_a_copy():
    wide = ones(128, 2 * 3 * 4 * 5 * 2).reshape((128, 2, 3, 4, 10))
    part = wide.ap(pattern=[[240, 128], [120, 2], [0, 3], [10, 4], [1, 5]], offset=0)
    nisa.tensor_copy(dst=sbuf(128, 2, 3, 4, 5), src=part)


def a_copy_with_a_bias():
    nisa.activation(dst=sbuf(128, 8), op=nl.copy, data=ones(128, 8), bias=ones(128, 1))


def a_transposition():
    nisa.dma_transpose(dst=sbuf(8, 4, dtype=HALF), src=ones(4, 8, dtype=HALF))


def a_small_tile_of_the_array():
    stationary, moving = ones(64, 32, dtype=HALF), ones(64, 8, dtype=HALF)
    nisa.nc_matmul(dst=psum(32, 8), stationary=stationary, moving=moving)


# the rule, what its message says, and how often `scan` counts it: gpsimd, sums, reads, dimensions
BROKEN = {
    one_after_the_other: (chip.SUMS, "another sum of several products", (0, 3, 0, 0)),
    interleaved: (chip.SUMS, "another sum of several products", (0, 1, 0, 0)),
    the_place_again: (chip.SUMS, "another sum of several products", (0, 1, 0, 0)),
    accumulate_left_out: (chip.SUMS, "another sum of several products", (0, 1, 0, 0)),
    read_and_added_to: (chip.OPEN, "that instruction 3 has read", (0, 0, 1, 0)),
    another_part_read: (chip.OPEN, "that instruction 6 has read", (0, 0, 1, 0)),
    on_gpsimd("float32"): (chip.GPSIMD, "tensor_tensor of float32 on GpSimd", (1, 0, 0, 0)),
    on_gpsimd(HALF): (chip.GPSIMD, "tensor_tensor of bfloat16 on GpSimd", (1, 0, 0, 0)),
    on_gpsimd("int32"): (chip.GPSIMD, "tensor_tensor of int32 on GpSimd", (1, 0, 0, 0)),
    four_dimensions: (chip.DIMENSIONS, "has 4 free dimensions", (0, 0, 0, 1)),
    a_copy_with_a_bias: (chip.BIAS, "with the tile", (0, 0, 0, 0)),
    a_transposition: (chip.TRANSPOSE, "from SBUF to SBUF", (0, 0, 0, 0)),
    a_small_tile_of_the_array: (chip.TILES, "of 64 rows and 32 columns", (0, 0, 0, 0)),
}


def run(body, **options):
    def kernel():
        body()
        return write_output()

    return record(kernel, check_source=False, **{"target": "trn1", **options})


@pytest.mark.parametrize("body", BROKEN, ids=lambda body: body.__name__)
def test_trn1_refuses_it_unless_the_rule_is_switched_off(body, monkeypatch):
    rule, message, counts = BROKEN[body]
    with pytest.raises(StrictError, match=rf"{message}.* on trn1: .*rule '{rule}'\)"):
        run(body)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tuple(vars(scan(run(body, without=chip.CHIP).trace)).values()) == counts
    assert run(body, without=[rule]).instructions and run(body, strict=False).instructions
    others = [name for name in chip.CHIP if name != rule]
    with pytest.raises(StrictError, match=f"rule '{rule}'"):
        run(body, without=others)
    monkeypatch.setenv(WITHOUT, f"{rule};{others[0]}")
    assert run(body).instructions
    monkeypatch.delenv(WITHOUT)
    if body is not four_dimensions:  # which is no rule of one generation alone
        assert run(body, target="trn2").instructions


def test_every_rule_of_the_chip_is_broken_here():
    assert {rule for rule, _, _ in BROKEN.values()} == set(chip.CHIP)
    with pytest.raises(ValueError, match="'gpsimd' is not a rule of a chip: gpsimd products, "):
        run(lambda: None, without=["gpsimd"])


def single_products_in_slices():
    tile = psum(128, 4, 8)
    for slot in range(4):
        multiply(tile[:, slot, :], False)
    nisa.tensor_copy(dst=sbuf(128, 4, 8), src=tile)


def a_sum_between_single_products():
    """What a public kernel does on Trn1, exactly."""
    tile = psum(128, 3, 8)
    multiply(tile[:, 0, :], False)
    sum_up(tile[:, 1, :], 2)
    multiply(tile[:, 2, :], False)
    nisa.tensor_copy(dst=sbuf(128, 3, 8), src=tile)


def a_tensor_for_each_sum():
    for _ in range(3):
        tile = psum(128, 8)
        sum_up(tile)
        nisa.tensor_copy(dst=sbuf(128, 8), src=tile)


def the_place_again_behind_a_memset():
    """What zml's attention does on inf2: the second sum begins on zeros of another engine."""
    tile = psum(128, 8)
    for _ in range(2):
        nisa.memset(dst=tile, value=0.0)
        for _ in range(2):
            multiply(tile, None)
        nisa.tensor_copy(dst=sbuf(128, 8), src=tile)


def few_columns_of_all_rows():
    stationary, moving = ones(128, 8, dtype=HALF), ones(128, 8, dtype=HALF)
    nisa.nc_matmul(dst=psum(8, 8), stationary=stationary, moving=moving)


def a_root_on_gpsimd():
    """Nobody has tried it on Trn1."""
    column = ones(128, 1)
    nisa.tensor_scalar(dst=column, data=column, op0=nl.rsqrt, operand0=0.0, engine=GPSIMD)


def integers_without_an_engine():
    a = ones(128, 8, dtype="int32")
    nisa.tensor_tensor(dst=a, data1=a, data2=a, op=nl.add)


ALLOWED = (
    single_products_in_slices, a_sum_between_single_products, a_tensor_for_each_sum,
    the_place_again_behind_a_memset, few_columns_of_all_rows, a_root_on_gpsimd, integers_without_an_engine,
)  # fmt: skip


@pytest.mark.parametrize("body", ALLOWED, ids=lambda body: body.__name__)
def test_what_works_on_trn1_is_allowed(body):
    assert not scan(run(body).trace).sums_at_risk


def test_four_dimensions_are_allowed_to_two_operands_and_counted():
    assert scan(run(four_dimensions_of_a_copy).trace).wide_accesses == 1


def test_a_bfloat16_transposition_writes_float32_on_trn1():
    data = normal(16, 8).astype(nl.bfloat16.numpy)

    def kernel(x):
        tile, turned = nl.load(x), psum(8, 16)
        nisa.nc_transpose(dst=turned, data=tile, engine=nisa.engine.tensor)
        out = nl.ndarray((8, 16), F32, nl.shared_hbm)
        nl.store(out, nl.copy(turned))
        return out

    with pytest.warns(match="a transposition into a wider dtype"):
        found = record(kernel, data, check_source=False, target="trn1").outputs
    assert (found == data.T.astype(np.float32)).all()


QUICKSTART = """
import nki
import nki.isa as nisa
import nki.language as nl

@nki.jit
def add(a, b, sizes):
    one, two = sbuf.view(dtype=a.dtype, shape=a.shape), sbuf.view(dtype=b.dtype, size=b.shape)
    nisa.dma_copy(dst=one, src=a)
    nisa.dma_copy(dst=two, src=b)
    nisa.tensor_tensor(dst=one, data1=one, data2=two, op=nl.add)
    out = nl.ndarray((nl.par_dim(a.shape[0]), sizes[1]), dtype=a.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=one)
    return out
"""


def test_memories_make_tensors_and_lists_of_integers_are_constants(tmp_path):
    (tmp_path / "quickstart.py").write_text(QUICKSTART)
    space: dict = {}
    with as_nki():
        exec(compile(QUICKSTART, str(tmp_path / "quickstart.py"), "exec"), space)
    a, b = normal(4, 8), normal(4, 8)
    found = nki.simulate(space["add"], check_source=False)(a, b, [4, 8])
    assert (found == a + b).all() and "sbuf" not in space

    def twice(a):
        tile = nl.sbuf.view(F32, shape=a.shape, size=a.shape)
        return tile

    with pytest.raises(TypeError, match=r"sbuf.view needs either shape= or size="):
        nki.simulate(twice, check_source=False)(a)


def reduce_rows(values, form):
    def kernel(x):
        tile, total = nl.load(x), sbuf(x.shape[0], 1)
        if form == "tensor_reduce":
            nisa.tensor_reduce(dst=total, op=nl.add, data=tile, axis=1)
        else:
            nisa.activation_reduce(
                dst=sbuf(*x.shape), op=nl.copy, data=tile, reduce_op=nl.add, reduce_res=total
            )
        out = nl.ndarray((x.shape[0], 1), F32, nl.shared_hbm)
        nl.store(out, total)
        return out

    return record(kernel, values, check_source=False).outputs[:, 0]


@pytest.mark.parametrize("form", ["tensor_reduce", "activation_reduce"])
def test_sums_add_one_element_after_the_other_in_float32(form):
    values = normal(64, 300)
    expected = np.zeros(64, np.float32)
    for column in values.T:
        expected = expected + column
    found = reduce_rows(values, form)
    assert (found == expected).all()
    assert (found != values.sum(axis=1, dtype=np.float32)).any()


def exponentials(x, **options):
    def kernel(x):
        tile, out = nl.load(x), nl.ndarray(x.shape, F32, nl.shared_hbm)
        nisa.activation(dst=tile, op=nl.exp, data=tile)
        nl.store(out, tile)
        return out

    return record(kernel, x, check_source=False, **options).outputs.astype(np.float64)


def test_functions_have_the_measured_errors_where_that_is_asked_for(monkeypatch):
    x = np.linspace(-80, 5, 128 * 512, dtype=np.float32).reshape(128, 512)
    true = np.exp(x.astype(np.float64))
    exact = np.abs(exponentials(x) / true - 1)
    assert exact.max() < 1e-6
    one, two = (exponentials(x, numerics=Numerics(functions=f"measured:{n}")) for n in (1, 2))
    for found in (one, two):
        wrong = np.abs(found / true - 1)
        assert 0.9 * MEDIAN < np.median(wrong) < 1.1 * MEDIAN
        assert 0.95 * LARGEST < wrong.max() < 1.05 * LARGEST
        assert abs(np.median(found / true - 1)) < 2e-7  # either sign
    assert (one != two).any()
    monkeypatch.setenv(FUNCTIONS, "measured:1")
    assert (exponentials(x) == one).all() and (exponentials(x) == one).all()
    low = np.full((1, 4), -87.5, np.float32)
    assert (exponentials(low) == 0).all()
    monkeypatch.setenv(FUNCTIONS, "exact")
    assert (exponentials(low) > 0).all()
    monkeypatch.setenv(FUNCTIONS, "measured")
    with pytest.raises(ValueError, match="neither exact nor measured:SEED"):
        exponentials(x)


def test_copies_and_squares_stay_exact_and_every_other_function_errs():
    x = np.linspace(0.5, 1.5, 4096, dtype=np.float32)
    for op in OPERATORS:
        if op.activation is None or op.composed:
            continue
        y = op.activation(x)
        same = (err(op.name, x, y, 1) == y).all()
        assert same == (op.name in ("copy", "square", "abs", "relu", "sign")), op.name


def test_check_prints_what_it_counts_and_ends_with_it(capsys, monkeypatch, tmp_path):
    (tmp_path / "of_a_user.py").write_text(
        "import numpy as np\nfrom nki_simulator import nl, nisa\n"
        "def good(x):\n    out = nl.ndarray(x.shape, x.dtype, nl.shared_hbm)\n"
        "    nl.store(out, nl.load(x))\n    return out\n"
        "def bad(x):\n    t = nl.load(x)\n"
        "    nisa.tensor_tensor(dst=t, data1=t, data2=t, op=nl.add, engine=nisa.engine.gpsimd)\n"
        "    out = nl.ndarray(x.shape, x.dtype, nl.shared_hbm)\n    nl.store(out, t)\n    return out\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    argv = ["check", "of_a_user:good", "4x8", "--nki", "0.7.0"]
    assert main(argv) == 0 and main([*argv[:1], "of_a_user:bad", *argv[2:]]) == 1
    good, bad = capsys.readouterr().out.splitlines()
    counts = "sums at risk 0, open reads 0, wide accesses 0"
    assert good == f"of_a_user:good 4x8: gpsimd products 0, {counts}"
    assert bad == f"of_a_user:bad 4x8: gpsimd products 1, {counts}"
