"""The Tensor engine: products and transpositions against NumPy."""

import ml_dtypes
import numpy as np
import pytest
from simulator_harness import (
    F32,
    execute,
    near,
    normal,
    psum,
    sbuf,
)

from nki_simulator import nisa, nl
from nki_simulator.isa.matmul import down_the_rows


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
                dst=ps[start : start + 64],
                stationary=x[start : start + 64],
                moving=y[start : start + 64],
                tile_position=(start, start),
                tile_size=(64, 64),
            )
        nisa.tensor_copy(dst=out, src=ps)

    result = execute(body, a, b, shape=(128, 80))
    for half in (slice(0, 64), slice(64, 128)):
        near(result[half], a[half].T @ b[half])


@pytest.mark.parametrize("buffer", [nl.ndarray, nl.zeros], ids=["fresh", "zeroed"])
@pytest.mark.parametrize(
    ("accumulate", "products"),
    [([None, None, None], 3), ([False, True, True], 3), ([False] * 3, 1)],
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
    a, b = (
        normal(64, 2, 8, dtype=ml_dtypes.float8_e4m3),
        normal(64, 2, 16, dtype=ml_dtypes.float8_e4m3),
    )

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
