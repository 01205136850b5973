"""Whole kernels on the simulator against NumPy; those of test_calibration.py are more."""

import ml_dtypes
import numpy as np
import pytest

from delta_trn.nki_kernels.simulator import nisa, nki, nl, record
from delta_trn.nki_kernels.simulator.core.releases import RELEASES
from delta_trn.nki_kernels.simulator.subset import findings
from tests.support.simulator_harness import normal


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


@nki.jit
def attention(q, k, v, scale):
    """Causal softmax attention of one head; q, k, v [T, d], T a multiple of 128, rows in blocks of 128."""
    T, d = q.shape
    out = nl.ndarray((T, d), q.dtype, nl.shared_hbm)
    identity = nl.ndarray((128, 128), nl.float32, nl.sbuf)
    nisa.memset(dst=identity, value=1.0)
    nisa.affine_select(
        dst=identity, pattern=[[-1, 128]], offset=0, channel_multiplier=1, on_true_tile=identity,
        on_false_value=0.0, cmp_op=nl.equal,
    )  # fmt: skip
    for i in range(0, T, 128):
        qt = nl.ndarray((d, 128), nl.float32, nl.psum)
        nisa.nc_matmul(dst=qt, stationary=nl.load(q[i : i + 128], nl.float32), moving=identity)
        qt_sb = evict(qt, nl.float32)
        keys = i + 128
        scores = nl.ndarray((128, keys), nl.float32, nl.sbuf)
        for j in range(0, keys, 128):
            kt = nl.ndarray((d, 128), nl.float32, nl.psum)
            nisa.nc_matmul(dst=kt, stationary=nl.load(k[j : j + 128], nl.float32), moving=identity)
            ps = nl.ndarray((128, 128), nl.float32, nl.psum)
            nisa.nc_matmul(dst=ps, stationary=qt_sb, moving=evict(kt, nl.float32))
            nisa.tensor_scalar(dst=scores[:, j : j + 128], data=ps, op0=nl.multiply, operand0=scale)
        nisa.affine_select(
            dst=scores, pattern=[[-1, keys]], channel_multiplier=1, offset=i, on_true_tile=scores,
            on_false_value=-1e30, cmp_op=nl.greater_equal,
        )  # fmt: skip
        top = nl.ndarray((128, 1), nl.float32, nl.sbuf)
        nisa.tensor_reduce(dst=top, op=nl.maximum, data=scores, axis=1, negate=True)
        total = nl.ndarray((128, 1), nl.float32, nl.sbuf)
        nisa.activation(
            dst=scores, op=nl.exp, data=scores, bias=top, reduce_op=nl.add, reduce_res=total,
            reduce_cmd=nisa.reduce_cmd.reset_reduce,
        )  # fmt: skip
        nisa.reciprocal(dst=total, data=total)
        o_ps = nl.ndarray((128, d), nl.float32, nl.psum)
        for j in range(0, keys, 128):
            pt = nl.ndarray((128, 128), nl.float32, nl.psum)
            nisa.nc_transpose(dst=pt, data=scores[:, j : j + 128])
            nisa.nc_matmul(
                dst=o_ps, stationary=evict(pt, nl.float32), moving=nl.load(v[j : j + 128], nl.float32)
            )
        o = nl.ndarray((128, d), q.dtype, nl.sbuf)
        nisa.tensor_scalar(dst=o, data=o_ps, op0=nl.multiply, operand0=total)
        nisa.dma_copy(dst=out[i : i + 128], src=o)
    return out


def _attention_reference(q, k, v, scale):
    scores = np.where(np.tri(len(q)) > 0, q @ k.T * scale, -np.inf)
    weights = np.exp(scores - scores.max(1, keepdims=True))
    return weights / weights.sum(1, keepdims=True) @ v


CASES = [
    pytest.param(
        matmul_tiled,
        lambda t: (normal(200, 140, dtype=t), normal(200, 600, dtype=t)),
        lambda a, b: a.T @ b,
        id="matmul",
    ),
    pytest.param(
        attention,
        lambda t: (normal(256, 64, dtype=t), normal(256, 64, dtype=t), normal(256, 64, dtype=t), 0.125),
        _attention_reference,
        id="attention",
    ),
]

# Half a unit in the last place of the output's dtype, and in float32 the rounding of up to 700 summed terms.
ALLOWED = {np.dtype(np.float32): 1e-5, np.dtype(ml_dtypes.bfloat16): 2.0**-8}


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)], ids=str)
@pytest.mark.parametrize("target", ["trn1", "trn2", "trn3"])
@pytest.mark.parametrize(("kernel", "arguments", "reference"), CASES)
def test_kernel_agrees_with_numpy(kernel, arguments, reference, dtype, target):
    args = arguments(dtype)
    out = nki.simulate(kernel, target=target)(*args)
    exact = reference(*[a.astype(np.float64) if isinstance(a, np.ndarray) else a for a in args])
    assert out.dtype == dtype
    error = np.abs(out.astype(np.float64) - exact).max() / np.abs(exact).max()
    assert error <= ALLOWED[dtype], error


@pytest.mark.parametrize("release", RELEASES[1:])
@pytest.mark.parametrize("kernel", [p.values[0] for p in CASES], ids=[p.id for p in CASES])
def test_kernel_source_is_in_the_subset_of_every_release_that_has_load(kernel, release):
    assert findings(kernel, release) == ()
    assert {f.split(": ")[1].partition(" is")[0] for f in findings(kernel)} <= {"load"}


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
    assert run.sbuf_peak == 4 * (64 + 128)  # one pair of operands at a time, then 128 columns of the result
    product = run.trace[2]
    assert (product.flags["K"], product.flags["M"], product.flags["N"]) == (128, 64, 128)
    assert [o.role for o in product.reads] == ["stationary", "moving"]
