"""A whole kernel on the simulator against NumPy; those of test_calibration.py are more."""

import ml_dtypes
import numpy as np
import pytest
from simulator_harness import normal

from nki_simulator import nisa, nki, nl, record
from nki_simulator.core.releases import RELEASES
from nki_simulator.subset import findings


def evict(ps, dtype):
    tile = nl.ndarray(ps.shape, dtype, nl.sbuf)
    nisa.tensor_copy(dst=tile, src=ps)
    return tile


@nki.jit
def matmul_tiled(at, b):
    """at [K, M], b [K, N] -> at.T @ b, K accumulated in PSUM."""
    K, M = at.shape
    N = b.shape[1]
    out = nl.ndarray((M, N), at.dtype, nl.shared_hbm)
    for m in range(0, M, 128):
        m_end = min(m + 128, M)
        for n in range(0, N, 512):
            n_end = min(n + 512, N)
            ps = nl.ndarray((m_end - m, n_end - n), nl.float32, nl.psum)
            for k in range(0, K, 128):
                k_end = min(k + 128, K)
                left = nl.load(at[k:k_end, m:m_end])
                right = nl.load(b[k:k_end, n:n_end])
                nisa.nc_matmul(dst=ps, stationary=left, moving=right)
            nisa.dma_copy(dst=out[m:m_end, n:n_end], src=evict(ps, at.dtype))
    return out


# Half a unit in the last place of the output's dtype, and in float32 the rounding of up to 700
# summed terms.
ALLOWED = {np.dtype(np.float32): 1e-5, np.dtype(ml_dtypes.bfloat16): 2.0**-8}


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)], ids=str)
@pytest.mark.parametrize("target", ["trn1", "trn2", "trn3"])
def test_kernel_agrees_with_numpy(dtype, target):
    a, b = normal(200, 140, dtype=dtype), normal(200, 600, dtype=dtype)
    out = nki.simulate(matmul_tiled, target=target)(a, b)
    exact = a.astype(np.float64).T @ b.astype(np.float64)
    assert out.dtype == dtype
    error = np.abs(out.astype(np.float64) - exact).max() / np.abs(exact).max()
    assert error <= ALLOWED[dtype], error


@pytest.mark.parametrize("release", RELEASES[1:])
def test_kernel_source_is_in_the_subset_of_every_release_that_has_load(release):
    assert findings(matmul_tiled, release) == ()
    assert {f.split(": ")[1].partition(" is")[0] for f in findings(matmul_tiled)} <= {"load"}


def test_calling_a_kernel_runs_it_and_updates_hbm_arguments_in_place():
    @nki.jit
    def double(x):
        tile = nl.ndarray(x.shape, x.dtype, nl.sbuf)
        nisa.dma_copy(dst=tile, src=x)
        nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=2.0)
        nisa.dma_copy(dst=x, src=tile)
        return x

    for x in (normal(4, 4), normal(4, 8)[:, ::2]):
        before = x.copy()
        assert (double(x) == 2 * before).all()
        assert (x == 2 * before).all()


def test_a_record_holds_the_trace_and_the_peaks():
    run = record(matmul_tiled, normal(256, 64), normal(256, 128))
    once = ["dma_copy", "dma_copy", "nc_matmul"]
    assert [r.op for r in run.trace] == [*once, *once, "tensor_copy", "dma_copy"]
    assert run.instructions == 8
    assert run.psum_peak == 1
    # one pair of operands at a time, then 128 columns of the result
    assert run.sbuf_peak == 4 * (64 + 128)
    product = run.trace[2]
    assert (product.flags["K"], product.flags["M"], product.flags["N"]) == (128, 64, 128)
    assert [o.role for o in product.reads] == ["stationary", "moving"]
