"""The Tensor engine: products and transpositions against NumPy, and every rule about them violated once."""

import ml_dtypes
import numpy as np
import pytest

from delta_trn.nki_kernels.simulator import ConstraintError, Numerics, StrictError, nisa, nl, record
from delta_trn.nki_kernels.simulator.isa.matmul import down_the_rows
from tests.support.simulator_harness import (
    F32,
    Refusals,
    assert_refused,
    attempt,
    execute,
    near,
    normal,
    on_chip,
    ones,
    product,
    psum,
    sbuf,
)

CASES = Refusals()


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float16", "float8_e4m3", "float8_e5m2", "tfloat32"]
)
def test_matmul_multiplies_rounded_operands_and_sums_in_float32(dtype):
    a, b = normal(96, 40), normal(96, 200)

    def body(out, x, y):
        xr, yr, ps = sbuf(96, 40, dtype=dtype), sbuf(96, 200, dtype=dtype), psum(40, 200)
        nisa.tensor_copy(dst=xr, src=x)
        nisa.tensor_copy(dst=yr, src=y)
        nisa.nc_matmul(dst=ps, stationary=xr, moving=yr)
        nisa.tensor_copy(dst=out, src=ps)

    if dtype == "tfloat32":
        rounded = [_ten_bits(x) for x in (a, b)]
    else:
        numpy = getattr(ml_dtypes, dtype) if hasattr(ml_dtypes, dtype) else np.dtype(dtype)
        rounded = [x.astype(numpy).astype(np.float64) for x in (a, b)]
    near(execute(body, a, b, shape=(40, 200)), rounded[0].T @ rounded[1], 1e-6)


def _ten_bits(x):
    mantissa, exponent = np.frexp(x.astype(np.float64))
    return np.ldexp(np.round(mantissa * 2**11) / 2**11, exponent)


def test_matmul_tiles_of_the_array_hold_two_heads():
    """Rows and columns 64 to 127 belong to the second head: one PSUM tile, all 128 lanes."""
    a, b = normal(128, 64), normal(128, 80)

    def body(out, x, y):
        ps = psum(128, 80)
        for start in (0, 64):
            nisa.nc_matmul(
                dst=ps[start : start + 64], stationary=x[start : start + 64], moving=y[start : start + 64],
                tile_position=(start, start), tile_size=(64, 64),
            )  # fmt: skip
        nisa.tensor_copy(dst=out, src=ps)

    result = execute(body, a, b, shape=(128, 80))
    for half in (slice(0, 64), slice(64, 128)):
        near(result[half], a[half].T @ b[half])


@pytest.mark.parametrize("buffer", [nl.ndarray, nl.zeros], ids=["fresh", "zeroed"])
@pytest.mark.parametrize(
    ("accumulate", "products"), [([None, None, None], 3), ([False, True, True], 3), ([False] * 3, 1)]
)
def test_matmul_accumulates_or_overwrites_as_told(buffer, accumulate, products):
    a, b = normal(128, 32), normal(128, 48)

    def body(out, x, y):
        ps = buffer((32, 48), F32, buffer=nl.psum)
        for adds in accumulate:
            nisa.nc_matmul(dst=ps, stationary=x, moving=y, accumulate=adds)
        nisa.tensor_copy(dst=out, src=ps)

    near(execute(body, a, b, shape=(32, 48)), products * (a.T @ b))


def test_matmul_contracts_pairs_of_fp8_rows():
    a, b = normal(64, 2, 8, dtype=ml_dtypes.float8_e4m3), normal(64, 2, 16, dtype=ml_dtypes.float8_e4m3)

    def body(out, x, y):
        ps = nl.ndarray((8, 16), F32, nl.psum)
        nisa.nc_matmul(dst=ps, stationary=x, moving=y, perf_mode=nisa.matmul_perf_mode.double_row)
        nisa.tensor_copy(dst=out, src=ps)

    expected = np.einsum("kim,kin->mn", a.astype(np.float64), b.astype(np.float64))
    near(execute(body, a, b, shape=(8, 16), target="trn2"), expected)


@pytest.mark.parametrize(("P", "F"), [(128, 128), (128, 1), (1, 128), (40, 96)])
def test_the_tensor_engine_transposes_bit_for_bit(P, F):
    x = normal(P, F)

    def body(out, tile):
        ps = nl.ndarray((F, P), F32, nl.psum)
        nisa.nc_transpose(dst=ps, data=tile)
        nisa.tensor_copy(dst=out, src=ps)

    assert (execute(body, x, shape=(F, P)) == x.T).all()


def test_the_vector_engine_transposes_bit_for_bit():
    x = normal(32, 20, dtype=ml_dtypes.bfloat16)

    def body(out, tile):
        nisa.nc_transpose(dst=out, data=tile, engine=nisa.engine.vector)

    assert (execute(body, x, shape=(20, 32), dtype=nl.bfloat16) == x.T).all()


@CASES.refuses(r"must be in \['sbuf'\], got psum")
def matmul_operand_in_psum():
    nisa.nc_matmul(dst=psum(4, 4), stationary=product(4, 4), moving=ones(4, 4))


@CASES.refuses(r"dst must be in \['psum'\], got sbuf")
def matmul_into_sbuf():
    nisa.nc_matmul(dst=sbuf(4, 4), stationary=ones(4, 4), moving=ones(4, 4))


@CASES.refuses("Matmul contraction dimension 64 exceeds the tile's rows=32", target="trn2")
def contraction_larger_than_the_row_tile():
    nisa.nc_matmul(
        dst=psum(4, 4), stationary=ones(64, 4), moving=ones(64, 4), tile_position=(0, 0), tile_size=(32, 128)
    )


@CASES.refuses("Matmul contraction dimension 129 exceeds pmax=128")
def contraction_larger_than_the_partitions():
    nisa.nc_matmul(dst=psum(4, 4), stationary=sbuf(129, 4), moving=sbuf(129, 4))


@CASES.refuses("Matmul stationary free dimension 129 exceeds gemm_stationary_fmax=128")
def stationary_too_wide():
    nisa.nc_matmul(dst=psum(128, 4), stationary=ones(4, 129), moving=ones(4, 4))


@CASES.refuses("Matmul moving free dimension 513 exceeds gemm_moving_fmax=512")
def moving_too_wide():
    nisa.nc_matmul(dst=psum(4, 513), stationary=ones(4, 4), moving=ones(4, 513))


@CASES.refuses(r"Matmul contraction dimension mismatch: stationary\[0\]=4 != moving\[0\]=5")
def contraction_mismatch():
    nisa.nc_matmul(dst=psum(4, 4), stationary=ones(4, 4), moving=ones(5, 4))


@CASES.refuses("nc_matmul dst dtype must be float32 on gen2, got bfloat16")
def bfloat16_psum():
    nisa.nc_matmul(dst=psum(4, 4, dtype=nl.bfloat16), stationary=ones(4, 4), moving=ones(4, 4))


@CASES.refuses(r"cannot reshape the result of shape \(4, 4\) into \(4, 5\)", ValueError)
def destination_of_another_shape():
    nisa.nc_matmul(dst=psum(4, 5), stationary=ones(4, 4), moving=ones(4, 4))


@CASES.refuses("must both be float32/tfloat32 or neither")
def float32_with_bfloat16():
    nisa.nc_matmul(dst=psum(4, 4), stationary=ones(4, 4), moving=ones(4, 4, dtype=nl.bfloat16))


@CASES.refuses("stationary dtype must be float8_e4m3, .* or float32, got int8")
def integer_matmul():
    nisa.nc_matmul(dst=psum(4, 4), stationary=ones(4, 4, dtype=nl.int8), moving=ones(4, 4, dtype=nl.int8))


@CASES.refuses("float8_e4m3fn needs NeuronCore-v4", target="trn2")
def ocp_float8_before_gen4():
    eight = nl.float8_e4m3fn
    nisa.nc_matmul(dst=psum(4, 4), stationary=ones(4, 4, dtype=eight), moving=ones(4, 4, dtype=eight))


@CASES.refuses("tile_position and tile_size must both be given")
def half_a_tiling():
    nisa.nc_matmul(dst=psum(4, 4), stationary=ones(4, 4), moving=ones(4, 4), tile_size=(64, 128))


@CASES.refuses("tile_size .32, 128. must be of 64, 128 on trn1")
def row_tile_of_32_on_trn1():
    nisa.nc_matmul(
        dst=psum(4, 4), stationary=ones(4, 4), moving=ones(4, 4), tile_position=(0, 0), tile_size=(32, 128)
    )


@CASES.refuses("tile_position .32, 0. must be multiples of tile_size")
def row_tile_at_no_multiple():
    nisa.nc_matmul(
        dst=psum(4, 4), stationary=ones(4, 4), moving=ones(4, 4), tile_position=(32, 0), tile_size=(64, 128)
    )


@CASES.refuses("starts at partition 64, but column 0 of the array writes partition 0", StrictError)
def product_under_other_columns():
    nisa.nc_matmul(dst=psum(128, 4)[64:68], stationary=ones(4, 4), moving=ones(4, 4))


@CASES.refuses("perf_mode needs NeuronCore-v3")
def double_row_on_trn1():
    mode = nisa.matmul_perf_mode.double_row
    nisa.nc_matmul(dst=psum(4, 4), stationary=ones(4, 4), moving=ones(4, 4), perf_mode=mode)


@CASES.refuses("accumulates onto uninitialized PSUM", StrictError)
def accumulation_on_fresh_psum():
    nisa.nc_matmul(dst=psum(4, 4), stationary=ones(4, 4), moving=ones(4, 4), accumulate=True)


@CASES.refuses("only partly written", StrictError)
def accumulation_on_partly_written_psum():
    tile = psum(4, 8)
    nisa.nc_matmul(dst=tile[:, 0:4], stationary=ones(4, 4), moving=ones(4, 4))
    nisa.nc_matmul(dst=tile, stationary=ones(4, 4), moving=ones(4, 8))


@CASES.refuses("a non-matmul instruction wrote last", StrictError)
def accumulation_on_a_copy():
    tile = psum(4, 4)
    nisa.tensor_copy(dst=tile, src=ones(4, 4))
    nisa.nc_matmul(dst=tile, stationary=ones(4, 4), moving=ones(4, 4))


@CASES.refuses("a non-matmul instruction wrote last", StrictError, "trn2")
def explicit_accumulation_on_zeros():
    tile = psum(4, 4)
    nisa.memset(dst=tile, value=0.0)
    nisa.nc_matmul(dst=tile, stationary=ones(4, 4), moving=ones(4, 4), accumulate=True)


@CASES.refuses("is_stationary_onezero is declared, but stationary holds 2", StrictError)
def false_promise_of_ones_and_zeros():
    two = sbuf(4, 4)
    nisa.memset(dst=two, value=2.0)
    nisa.nc_matmul(dst=psum(4, 4), stationary=two, moving=ones(4, 4), is_stationary_onezero=True)


@CASES.refuses("spans psum banks 0 to 1", StrictError)
def matmul_across_banks():
    nisa.nc_matmul(dst=psum(4, 1024)[:, 256:768], stationary=ones(4, 4), moving=ones(4, 512))


@CASES.refuses("nc_transpose of bfloat16 on the Tensor engine", StrictError)
def transposition_of_bfloat16():
    half = nl.bfloat16
    nisa.nc_transpose(dst=psum(64, 64, dtype=half), data=ones(64, 64, dtype=half))


@CASES.refuses(r"holds inf at \[0, 0\]; on gen2 the Tensor engine multiplies by an identity", StrictError)
def transposition_of_infinity():
    tile = sbuf(64, 64)
    nisa.memset(dst=tile, value=float("inf"))
    nisa.nc_transpose(dst=psum(64, 64), data=tile)


@CASES.refuses("takes up to 32 x 32, got 64 x 64")
def large_transposition_on_the_vector_engine():
    nisa.nc_transpose(dst=sbuf(64, 64), data=ones(64, 64), engine=nisa.engine.vector)


@CASES.refuses("nc_transpose dst dtype must be bfloat16, got float32")
def transposition_with_a_cast():
    nisa.nc_transpose(dst=psum(64, 64), data=ones(64, 64, dtype=nl.bfloat16))


@pytest.mark.parametrize(("body", "match", "error", "target"), CASES)
def test_tensor_engine_refuses(body, match, error, target):
    assert_refused(body, match, error, target)


@pytest.mark.parametrize(("body", "match", "error", "target"), CASES.strict())
def test_strict_checks_of_the_tensor_engine_can_be_switched_off(body, match, error, target):
    attempt(body, target=target, strict=False)


ALLOWED_LATER = {
    "transposition_of_bfloat16": "trn2",
    "bfloat16_psum": "trn3",
    "moving_too_wide": "trn3",
    "matmul_across_banks": "trn3",
    "accumulation_on_a_copy": "trn3",
    "ocp_float8_before_gen4": "trn3",
}


def test_contraction_is_limited_by_the_partitions():
    """The contraction is the partition axis, so more than 128 is refused as such."""

    def body():
        nisa.nc_matmul(dst=psum(4, 4), stationary=sbuf(129, 4), moving=sbuf(129, 4))

    with pytest.raises(ConstraintError, match="Matmul contraction dimension 129 exceeds pmax=128"):
        attempt(body)


def test_the_precision_probe_tells_float32_products_from_rounded_ones():
    """Entries 1 + 2^-12: exact in float32 and lost in bfloat16, the first thing to run on a chip."""
    x = np.full((64, 16), 1 + 2.0**-12, np.float32)

    def kernel(a):
        out = nl.ndarray((16, 16), F32, nl.shared_hbm)
        ps, tile = psum(16, 16), on_chip(a)
        nisa.nc_matmul(dst=ps, stationary=tile, moving=tile)
        sb = sbuf(16, 16)
        nisa.tensor_copy(dst=sb, src=ps)
        nisa.dma_copy(dst=out, src=sb)
        return out

    exact = 64 * (1 + 2.0**-12) ** 2
    corner = {
        mode: record(kernel, x, check_source=False, numerics=Numerics(matmul=mode)).outputs[0, 0]
        for mode in ("float32", "tfloat32", "bfloat16")
    }
    assert abs(corner["float32"] - exact) < 1e-5
    assert corner["bfloat16"] == corner["tfloat32"] == 64


def test_activations_are_perturbed_by_at_most_the_ulps_asked_for():
    def kernel(a):
        out, tile = nl.ndarray((64, 64), F32, nl.shared_hbm), on_chip(a)
        nisa.activation(dst=tile, op=nl.exp, data=tile)
        nisa.dma_copy(dst=out, src=tile)
        return out

    x = normal(64, 64)
    exact, off = (
        record(kernel, x, check_source=False, numerics=Numerics(activation_ulps=ulps)).outputs
        for ulps in (0, 8)
    )
    relative = np.abs(off / exact - 1) / 2.0**-23
    assert 4 < relative.max() <= 9.0  # 8, and the rounding of the product


@pytest.mark.parametrize(
    ("K", "M", "N"), [(64, 64, 128), (128, 128, 128), (128, 128, 1), (128, 1, 128), (128, 1, 1)]
)
def test_a_float32_product_is_no_more_exact_than_adding_its_rows_in_order(K, M, N):
    def plain(a, b):
        total = np.zeros((M, N), np.float32)
        for left, right in zip(a, b, strict=True):
            total += np.outer(left, right)
        return total

    def error(value, a, b):
        return np.linalg.norm(value - a.astype(np.float64).T @ b.astype(np.float64))

    ours = theirs = 0.0
    for seed in range(200 if M == N == 1 else 3):
        rng = np.random.default_rng(seed)
        a, b = (rng.standard_normal((K, n), np.float32) for n in (M, N))
        ours += error(down_the_rows(a, b), a, b)
        theirs += error(plain(a, b), a, b)
    assert 0.9 * theirs < ours < 1.1 * theirs
