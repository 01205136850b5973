"""RMS norm of rows, times a gain, times SiLU of a gate; forward and backward.

    r = (mean(x^2) + eps)^-1/2     h = r x     y = h w SiLU(z)       (y = h w without a gate)

    m = dy SiLU(z)     n = m w     dw = sum over rows of m h     dz = dy h w SiLU'(z)
    dx = r (n - h mean(n h)) = r n - x r^2 mean(x r n)

Layout: x, z, y and their gradients [M, V]; w [V]. M rows: tokens times heads.

A partition takes several rows, side by side on its free axis, so that a descriptor of DMA moves kilobytes at
V = 64 too. h and the gate never go to HBM: 3 M V numbers travel forward, 5 backward.
"""

from delta_trn.nki_kernels.language import nisa, nki, nl
from delta_trn.nki_kernels.partitions import BANK, PARTITIONS, loaded, row_sum, tile

WIDTH = 2048  # numbers of x a partition
MOST_V = 8 * BANK
LEAST_EPS = 2.0**-87  # from where on the Scalar engine's rsqrt is right


@nki.jit
def gated_rms_norm_fwd(x, z, weight, eps, gated):
    """y [M, V] in x's dtype. gated: bool; z is read only then, and may else be None."""
    assert eps >= LEAST_EPS, f"eps={eps} is below {LEAST_EPS}, where the Scalar engine's rsqrt is wrong"
    M, V = x.shape
    y = nl.ndarray((M, V), dtype=x.dtype, buffer=nl.shared_hbm)
    w = everywhere(weight)
    for start, P, slots in pieces(M, V):
        stop = start + P * slots
        xt = rows_of(x, start, P, slots)
        r = norms(xt, eps)
        out = tile((P, slots, V), x.dtype)
        h = out
        if gated:
            h = tile((P, slots, V), nl.float32)
        times_rows(h, xt, r, w)
        if gated:
            gate = tile((P, slots, V), nl.float32)
            nisa.activation(dst=gate, op=nl.silu, data=rows_of(z, start, P, slots))
            nisa.tensor_tensor(dst=out, data1=h, data2=gate, op=nl.multiply)
        nisa.dma_copy(dst=y[start:stop, :].reshape((P, slots, V)), src=out)
    return y


@nki.jit
def gated_rms_norm_bwd(dy, x, z, weight, eps, gated):
    """(dx, dz, dweight), each shaped and typed like its input; (dx, dweight) where not gated."""
    assert eps >= LEAST_EPS, f"eps={eps} is below {LEAST_EPS}, where the Scalar engine's rsqrt is wrong"
    M, V = x.shape
    assert V <= MOST_V, f"V={V} exceeds {MOST_V}: dweight is summed in PSUM, one bank per {BANK}"
    dx = nl.ndarray((M, V), dtype=x.dtype, buffer=nl.shared_hbm)
    dweight = nl.ndarray((V,), dtype=weight.dtype, buffer=nl.shared_hbm)
    dz = dx
    if gated:
        dz = nl.ndarray((M, V), dtype=z.dtype, buffer=nl.shared_hbm)
    w = everywhere(weight)
    ones = tile((PARTITIONS, 1), nl.float32)
    nisa.memset(dst=ones, value=1.0)
    sums = []
    for v0 in range(0, V, BANK):
        sums.append(nl.ndarray((1, min(BANK, V - v0)), dtype=nl.float32, buffer=nl.psum))
    for start, P, slots in pieces(M, V):
        stop = start + P * slots
        xt = rows_of(x, start, P, slots)
        m = rows_of(dy, start, P, slots)
        r = norms(xt, eps)
        if gated:
            zt = rows_of(z, start, P, slots)
            gate, slope = tile((P, slots, V), nl.float32), tile((P, slots, V), nl.float32)
            hw, passed = tile((P, slots, V), nl.float32), tile((P, slots, V), nl.float32)
            nisa.activation(dst=gate, op=nl.silu, data=zt)
            nisa.activation(dst=slope, op=nl.silu_dx, data=zt)
            nisa.tensor_tensor(dst=slope, data1=slope, data2=m, op=nl.multiply)
            times_rows(hw, xt, r, w)
            dz_tile = tile((P, slots, V), z.dtype)
            nisa.tensor_tensor(dst=dz_tile, data1=slope, data2=hw, op=nl.multiply)
            nisa.dma_copy(dst=dz[start:stop, :].reshape((P, slots, V)), src=dz_tile)
            nisa.tensor_tensor(dst=passed, data1=m, data2=gate, op=nl.multiply)
            m = passed
        rn = tile((P, slots, V), nl.float32)
        times_rows(rn, m, r, w)
        along = projections(xt, rn, r)
        dx_tile = tile((P, slots, V), x.dtype)
        mh = tile((P, slots, V), nl.float32)
        for i in range(slots):
            nisa.scalar_tensor_tensor(
                dst=dx_tile[:, i, :], data=xt[:, i, :], op0=nl.multiply, operand0=along[:, i : i + 1],
                op1=nl.add, operand1=rn[:, i, :],
            )  # fmt: skip
            nisa.scalar_tensor_tensor(
                dst=mh[:, i, :], data=xt[:, i, :], op0=nl.multiply, operand0=r[:, i : i + 1],
                op1=nl.multiply, operand1=m[:, i, :],
            )  # fmt: skip
            for part in range(len(sums)):
                v0 = part * BANK
                nisa.nc_matmul(
                    dst=sums[part], stationary=ones[0:P, :],
                    moving=mh[:, i, v0 : v0 + sums[part].shape[1]], is_stationary_onezero=True,
                )  # fmt: skip
        nisa.dma_copy(dst=dx[start:stop, :].reshape((P, slots, V)), src=dx_tile)
    total = tile((1, V), weight.dtype)
    for part in range(len(sums)):
        v0 = part * BANK
        nisa.tensor_copy(dst=total[:, v0 : v0 + sums[part].shape[1]], src=sums[part])
    nisa.dma_copy(dst=dweight.reshape((1, V)), src=total)
    if not gated:
        return dx, dweight
    return dx, dz, dweight


def pieces(M, V):
    """[(first row, partitions, rows a partition)]: whole tiles, the rest, and its last rows one by one."""
    slots = max(1, WIDTH // V)
    found = []
    start = 0
    while start < M:
        here = slots if M - start >= slots else 1
        P = min(PARTITIONS, (M - start) // here)
        found.append((start, P, here))
        start += P * here
    return found


def rows_of(x, start, P, slots):
    """P * slots rows of x [M, V] as [P, slots, V], in x's dtype."""
    V = x.shape[1]
    return loaded(x[start : start + P * slots, :].reshape((P, slots, V)), x.dtype)


def everywhere(weight):
    """w [V] on all partitions, [128, V] float32."""
    V = weight.shape[0]
    out = tile((PARTITIONS, V), nl.float32)
    nisa.dma_copy(dst=out, src=weight.ap(pattern=[[0, PARTITIONS], [1, V]]))
    return out


def norms(xt, eps):
    """r [P, slots]: (mean(x^2) + eps)^-1/2 of every row."""
    P, slots, V = xt.shape
    total = tile((P, slots), nl.float32)
    for i in range(slots):
        row_sum(total[:, i : i + 1], xt[:, i, :], nl.square)
    nisa.tensor_scalar(dst=total, data=total, op0=nl.multiply, operand0=1.0 / V, op1=nl.add, operand1=eps)
    r = tile((P, slots), nl.float32)
    nisa.activation(dst=r, op=nl.rsqrt, data=total)
    return r


def times_rows(out, x, r, w):
    """out = x r w: r [P, slots] a number per row, w [128, V] the same for all."""
    P, slots = r.shape
    for i in range(slots):
        nisa.scalar_tensor_tensor(
            dst=out[:, i, :], data=x[:, i, :], op0=nl.multiply, operand0=r[:, i : i + 1], op1=nl.multiply,
            operand1=w[0:P, :],
        )  # fmt: skip


def projections(xt, rn, r):
    """[P, slots]: -r^2 mean(x r n) of every row, what dx has along x."""
    P, slots, V = xt.shape
    product = tile(xt.shape, nl.float32)
    nisa.tensor_tensor(dst=product, data1=xt, data2=rn, op=nl.multiply)
    total = tile((P, slots), nl.float32)
    for i in range(slots):
        row_sum(total[:, i : i + 1], product[:, i, :], nl.copy)
    out = tile((P, slots), nl.float32)
    nisa.scalar_tensor_tensor(
        dst=out, data=total, op0=nl.multiply, operand0=-1.0 / V, op1=nl.multiply, operand1=r
    )
    nisa.tensor_tensor(dst=out, data1=out, data2=r, op=nl.multiply)
    return out


def example(M=6144, V=256, dtype="float32", backward=0):
    """(kernel, arguments) for the simulator's report; backward=1 for the gradients."""
    import ml_dtypes
    import numpy as np

    rng = np.random.default_rng(0)
    kind = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}[dtype]
    x, z, dy = (rng.standard_normal((M, V), dtype=np.float32).astype(kind) for _ in range(3))
    weight = rng.standard_normal(V, dtype=np.float32)
    if backward:
        return gated_rms_norm_bwd, (dy, x, z, weight, 1e-5, True)
    return gated_rms_norm_fwd, (x, z, weight, 1e-5, True)
