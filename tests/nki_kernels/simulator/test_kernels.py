"""Whole kernels on the simulator against NumPy: the kinds of kernel that NKI's tutorials and library have."""

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
def add_tiled(a, b):
    rows, columns = a.shape
    out = nl.ndarray((rows, columns), a.dtype, nl.shared_hbm)
    for start in range(0, rows, 128):
        stop = min(start + 128, rows)
        total = nl.ndarray((stop - start, columns), a.dtype, nl.sbuf)
        nisa.tensor_tensor(dst=total, data1=nl.load(a[start:stop]), data2=nl.load(b[start:stop]), op=nl.add)
        nisa.dma_copy(dst=out[start:stop], src=total)
    return out


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
def selective_scan(delta, u, A, B, C):
    """h = exp(delta A) h + delta u B, y = sum_n h C; delta, u [D, T], A [D, N], B, C [N, T]."""
    D, T = delta.shape
    N = A.shape[1]
    out = nl.ndarray((D, T), delta.dtype, nl.shared_hbm)
    d, x, a = nl.load(delta), nl.load(u), nl.load(A)
    dx = nl.ndarray((D, T), nl.float32, nl.sbuf)
    nisa.tensor_tensor(dst=dx, data1=d, data2=x, op=nl.multiply)
    y = nl.ndarray((D, T), nl.float32, nl.sbuf)
    nisa.memset(dst=y, value=0.0)
    for n in range(N):
        decay = nl.ndarray((D, T), nl.float32, nl.sbuf)
        nisa.activation(dst=decay, op=nl.exp, data=d, scale=a[:, n : n + 1])
        b = nl.load(B.ap(pattern=[[0, D], [1, T]], offset=n * T))
        c = nl.load(C.ap(pattern=[[0, D], [1, T]], offset=n * T))
        write = nl.ndarray((D, T), nl.float32, nl.sbuf)
        nisa.tensor_tensor(dst=write, data1=dx, data2=b, op=nl.multiply)
        h = nl.ndarray((D, T), nl.float32, nl.sbuf)
        nisa.tensor_tensor_scan(dst=h, data0=decay, data1=write, initial=0.0, op0=nl.multiply, op1=nl.add)
        nisa.tensor_tensor(dst=h, data1=h, data2=c, op=nl.multiply)
        nisa.tensor_tensor(dst=y, data1=y, data2=h, op=nl.add)
    nisa.dma_copy(dst=out, src=y)
    return out


@nki.jit
def rms_norm(x, weight, epsilon):
    """x [T, d], weight [1, d]; the weight reaches all lanes through a matmul with ones."""
    T, d = x.shape
    out = nl.ndarray((T, d), x.dtype, nl.shared_hbm)
    tile, w = nl.load(x), nl.load(weight, nl.float32)
    ones = nl.ndarray((1, T), nl.float32, nl.sbuf)
    nisa.memset(dst=ones, value=1.0)
    gain = nl.ndarray((T, d), nl.float32, nl.psum)
    nisa.nc_matmul(dst=gain, stationary=ones, moving=w, is_stationary_onezero=True)
    squares = nl.ndarray((T, d), nl.float32, nl.sbuf)
    total = nl.ndarray((T, 1), nl.float32, nl.sbuf)
    nisa.activation(
        dst=squares, op=nl.square, data=tile, reduce_op=nl.add, reduce_res=total,
        reduce_cmd=nisa.reduce_cmd.reset_reduce,
    )  # fmt: skip
    scale = nl.ndarray((T, 1), nl.float32, nl.sbuf)
    nisa.tensor_scalar(dst=scale, data=total, op0=nl.multiply, operand0=1.0 / d, op1=nl.add, operand1=epsilon)
    nisa.activation(dst=scale, op=nl.rsqrt, data=scale)
    normed = nl.ndarray((T, d), x.dtype, nl.sbuf)
    nisa.scalar_tensor_tensor(
        dst=normed, data=tile, op0=nl.multiply, operand0=scale, op1=nl.multiply, operand1=gain
    )
    nisa.dma_copy(dst=out, src=normed)
    return out


@nki.jit
def depthwise_conv(x, taps):
    """Causal: y[c, t] = sum_j taps[c, j] x[c, t - W + 1 + j]; x [C, T], taps [C, W]."""
    C, T = x.shape
    W = taps.shape[1]
    out = nl.ndarray((C, T), x.dtype, nl.shared_hbm)
    padded = nl.ndarray((C, T + W - 1), nl.float32, nl.sbuf)
    nisa.memset(dst=padded[:, 0 : W - 1], value=0.0)
    nisa.dma_copy(dst=padded[:, W - 1 : T + W - 1], src=x)
    w = nl.load(taps, nl.float32)
    y = nl.ndarray((C, T), nl.float32, nl.sbuf)
    nisa.tensor_scalar(dst=y, data=padded[:, 0:T], op0=nl.multiply, operand0=w[:, 0:1])
    for j in range(1, W):
        window, tap = padded[:, j : j + T], w[:, j : j + 1]
        nisa.scalar_tensor_tensor(dst=y, data=window, op0=nl.multiply, operand0=tap, op1=nl.add, operand1=y)
    nisa.dma_copy(dst=out, src=y)
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


def _scan_reference(delta, u, A, B, C):
    h, y = np.zeros(A.shape), np.zeros(delta.shape)
    for t in range(delta.shape[1]):
        h = np.exp(delta[:, t : t + 1] * A) * h + (delta * u)[:, t : t + 1] * B[:, t]
        y[:, t] = h @ C[:, t]
    return y


def _attention_reference(q, k, v, scale):
    scores = np.where(np.tri(len(q)) > 0, q @ k.T * scale, -np.inf)
    weights = np.exp(scores - scores.max(1, keepdims=True))
    return weights / weights.sum(1, keepdims=True) @ v


def _conv_reference(x, taps):
    W = taps.shape[1]
    padded = np.pad(x, ((0, 0), (W - 1, 0)))
    return sum(taps[:, j : j + 1] * padded[:, j : j + x.shape[1]] for j in range(W))


CASES = [
    pytest.param(add_tiled, lambda t: (normal(300, 40, dtype=t), normal(300, 40, dtype=t)), np.add, id="add"),
    pytest.param(
        matmul_tiled,
        lambda t: (normal(200, 140, dtype=t), normal(200, 600, dtype=t)),
        lambda a, b: a.T @ b,
        id="matmul",
    ),
    pytest.param(
        selective_scan,
        lambda t: (
            np.abs(normal(64, 50)).astype(t),
            normal(64, 50, dtype=t),
            -np.abs(normal(64, 4)),
            normal(4, 50, dtype=t),
            normal(4, 50, dtype=t),
        ),
        _scan_reference,
        id="selective-scan",
    ),
    pytest.param(
        rms_norm,
        lambda t: (normal(128, 256, dtype=t), normal(1, 256, dtype=t), 1e-6),
        lambda x, w, e: x / np.sqrt((x**2).mean(1, keepdims=True) + e) * w,
        id="rms-norm",
    ),
    pytest.param(
        depthwise_conv,
        lambda t: (normal(128, 65, dtype=t), normal(128, 4, dtype=t)),
        _conv_reference,
        id="conv",
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
    assert {f.what.partition(" is")[0] for f in findings(kernel)} <= {"load"}


def test_a_wrong_kernel_disagrees_with_numpy():
    """The comparison with NumPy can fail: here a decay is wrong by a thousandth."""
    args = (np.abs(normal(64, 50)), normal(64, 50), -np.abs(normal(64, 4)), normal(4, 50), normal(4, 50))
    exact = _scan_reference(*[a.astype(np.float64) for a in args])
    wrong = selective_scan(args[0] * np.float32(1.001), *args[1:])
    assert np.abs(wrong - exact).max() / np.abs(exact).max() > ALLOWED[np.dtype(np.float32)]


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
