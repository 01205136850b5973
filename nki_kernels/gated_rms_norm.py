"""Computes the RMS norm of rows, times a gain, times SiLU of a gate; forward and backward.

    r = (mean(x^2) + eps)^-1/2     h = r x     y = h w SiLU(z)       (y = h w without a gate)

    m = dy SiLU(z)     n = m w     dw = sum over rows of m h     dz = dy h w SiLU'(z)
    dx = r (n - h mean(n h)) = r n - x r^2 mean(x r n)

Layout: x, z, y and their gradients [M, V]; w [V]. M rows: tokens times heads.

A partition takes several rows, side by side on its free axis, so that a descriptor of DMA moves kilobytes at
V = 64 too. h and the gate never go to HBM: 3 M V numbers travel forward, 5 backward.
"""

from delta_trn.nki_kernels.examples import normals
from delta_trn.nki_kernels.language import nisa, nki, nl
from delta_trn.nki_kernels.plan import BANK, LEAST_RSQRT, PARTITIONS, split
from delta_trn.nki_kernels.tiles import build_norm, invert_sums, load, multiply_elements, psum, sbuf, sum_rows

WIDTH = 2048  # numbers of x per partition
MOST_V = 8 * BANK


@nki.jit
def gated_rms_norm_fwd(x, z, weight, eps, gated):
    """Computes y [M, V] in x's dtype; z is read only if `gated`, and may else be any tensor."""
    check(eps)
    M, V = x.shape
    y = nl.ndarray((M, V), dtype=x.dtype, buffer=nl.shared_hbm)
    w_sb = load_everywhere(weight)
    norm = build_norm(eps)
    for cut in cut_rows(M, V):
        start, P, slots = cut
        x_sb = load_rows(x, start, P, slots)
        r_sb = invert_rms(x_sb, norm)
        y_sb = sbuf((P, slots, V), x.dtype)
        h_sb = y_sb
        if gated:
            h_sb = sbuf((P, slots, V))
        scale_rows(h_sb, x_sb, r_sb, w_sb)
        if gated:
            gate_sb = sbuf((P, slots, V))
            nisa.activation(dst=gate_sb, op=nl.silu, data=load_rows(z, start, P, slots))
            nisa.tensor_tensor(dst=y_sb, data1=h_sb, data2=gate_sb, op=nl.multiply)
        store_rows(y, y_sb, start)
    return y


@nki.jit
def gated_rms_norm_bwd(dy, x, z, weight, eps, gated):
    """Computes (dx, dz, dweight), each shaped and typed like its input; (dx, dweight) where not `gated`."""
    check(eps)
    M, V = x.shape
    assert V <= MOST_V, f"V={V} exceeds {MOST_V}: dweight is summed in PSUM, one bank per {BANK}"
    dx = nl.ndarray((M, V), dtype=x.dtype, buffer=nl.shared_hbm)
    dweight = nl.ndarray((V,), dtype=weight.dtype, buffer=nl.shared_hbm)
    dz = dx
    if gated:
        dz = nl.ndarray((M, V), dtype=z.dtype, buffer=nl.shared_hbm)
    w_sb = load_everywhere(weight)
    norm = build_norm(eps)
    ones_sb = sbuf((PARTITIONS, 1))
    nisa.memset(dst=ones_sb, value=1.0)
    sums = []  # of dweight, one per bank of PSUM
    for span in split(V, BANK):
        low, high = span
        sums.append((low, high, psum((1, high - low))))
    for cut in cut_rows(M, V):
        start, P, slots = cut
        x_sb = load_rows(x, start, P, slots)
        m_sb = load_rows(dy, start, P, slots)
        r_sb = invert_rms(x_sb, norm)
        if gated:
            z_sb = load_rows(z, start, P, slots)
            gate_sb, slope_sb = sbuf((P, slots, V)), sbuf((P, slots, V))
            hw_sb, dz_sb = sbuf((P, slots, V)), sbuf((P, slots, V), z.dtype)
            nisa.activation(dst=gate_sb, op=nl.silu, data=z_sb)
            nisa.activation(dst=slope_sb, op=nl.silu_dx, data=z_sb)
            nisa.tensor_tensor(dst=slope_sb, data1=slope_sb, data2=m_sb, op=nl.multiply)
            scale_rows(hw_sb, x_sb, r_sb, w_sb)
            nisa.tensor_tensor(dst=dz_sb, data1=slope_sb, data2=hw_sb, op=nl.multiply)
            store_rows(dz, dz_sb, start)
            m_sb = multiply_elements(m_sb, gate_sb)
        rn_sb = sbuf((P, slots, V))
        scale_rows(rn_sb, m_sb, r_sb, w_sb)
        along_sb = project(x_sb, rn_sb, r_sb)
        dx_sb, mh_sb = sbuf((P, slots, V), x.dtype), sbuf((P, slots, V))
        for i in range(slots):
            nisa.scalar_tensor_tensor(
                dst=dx_sb[:, i, :], data=x_sb[:, i, :], op0=nl.multiply, operand0=along_sb[:, i : i + 1],
                op1=nl.add, operand1=rn_sb[:, i, :],
            )  # fmt: skip
            nisa.scalar_tensor_tensor(
                dst=mh_sb[:, i, :], data=x_sb[:, i, :], op0=nl.multiply, operand0=r_sb[:, i : i + 1],
                op1=nl.multiply, operand1=m_sb[:, i, :],
            )  # fmt: skip
            for entry in sums:
                low, high, sum_ps = entry
                nisa.nc_matmul(
                    dst=sum_ps, stationary=ones_sb[0:P, :], moving=mh_sb[:, i, low:high],
                    is_stationary_onezero=True,
                )  # fmt: skip
        store_rows(dx, dx_sb, start)
    dweight_sb = sbuf((1, V), weight.dtype)
    for entry in sums:
        low, high, sum_ps = entry
        nisa.tensor_copy(dst=dweight_sb[:, low:high], src=sum_ps)
    nisa.dma_copy(dst=dweight.reshape((1, V)), src=dweight_sb)
    if not gated:
        return dx, dweight
    return dx, dz, dweight


def check(eps):
    """Refuses an epsilon that the Scalar engine's rsqrt would get wrong."""
    assert eps >= LEAST_RSQRT, f"eps={eps} is below {LEAST_RSQRT}, where the Scalar engine's rsqrt is wrong"


def cut_rows(M, V):
    """Cuts the rows into whole tiles, the rest, and its last rows one by one.

    Returns [(first row, partitions, rows per partition)].
    """
    slots = max(1, WIDTH // V)
    cuts = []
    start = 0
    while start < M:
        here = slots if M - start >= slots else 1
        P = min(PARTITIONS, (M - start) // here)
        cuts.append((start, P, here))
        start += P * here
    return cuts


def load_rows(x, start, P, slots):
    """Loads rows of x [M, V], from `start` on, as [P, slots, V]: `slots` consecutive rows per partition."""
    return load(view_rows(x, start, P, slots), x.dtype)


def store_rows(dst, x_sb, start):
    """Stores [P, slots, V] as rows of dst [M, V], from `start` on."""
    P, slots, _ = x_sb.shape
    nisa.dma_copy(dst=view_rows(dst, start, P, slots), src=x_sb)


def view_rows(x, start, P, slots):
    """Views rows of x [M, V], from `start` on, as [P, slots, V]."""
    V = x.shape[1]
    return x.ap(pattern=[[slots * V, P], [V, slots], [1, V]], offset=start * V)


def load_everywhere(weight):
    """Loads w [V] to all partitions, [128, V] float32."""
    V = weight.shape[0]
    out_sb = sbuf((PARTITIONS, V))
    nisa.dma_copy(dst=out_sb, src=weight.ap(pattern=[[0, PARTITIONS], [1, V]], offset=0))
    return out_sb


def sum_slots(x_sb, op):
    """Sums op(x) of every row, [P, slots]."""
    out_sb = sbuf((x_sb.shape[0], x_sb.shape[1]))
    for i in range(x_sb.shape[1]):
        sum_rows(out_sb[:, i : i + 1], x_sb[:, i, :], op)
    return out_sb


def invert_rms(x_sb, norm):
    """Computes r = (mean(x^2) + eps)^-1/2 of every row, [P, slots]."""
    P, slots, V = x_sb.shape
    r_sb = sbuf((P, slots))
    invert_sums(r_sb, sum_slots(x_sb, nl.square), norm, 1.0 / V)
    nisa.tensor_scalar(dst=r_sb, data=r_sb, op0=nl.multiply, operand0=norm["scale"])
    return r_sb


def scale_rows(out_sb, x_sb, r_sb, w_sb):
    """Sets out = x r w: r [P, slots] is a number per row, w [128, V] the same for all."""
    P, slots = r_sb.shape
    for i in range(slots):
        nisa.scalar_tensor_tensor(
            dst=out_sb[:, i, :], data=x_sb[:, i, :], op0=nl.multiply, operand0=r_sb[:, i : i + 1],
            op1=nl.multiply, operand1=w_sb[0:P, :],
        )  # fmt: skip


def project(x_sb, rn_sb, r_sb):
    """Computes -r^2 mean(x r n) of every row, [P, slots]: what dx has along x."""
    total_sb, out_sb = sum_slots(multiply_elements(x_sb, rn_sb), nl.copy), sbuf(r_sb.shape)
    nisa.scalar_tensor_tensor(
        dst=out_sb, data=total_sb, op0=nl.multiply, operand0=-1.0 / x_sb.shape[2], op1=nl.multiply,
        operand1=r_sb,
    )  # fmt: skip
    nisa.tensor_tensor(dst=out_sb, data1=out_sb, data2=r_sb, op=nl.multiply)
    return out_sb


def example(M=6144, V=256, dtype="float32", backward=0):
    """Returns (kernel, arguments) for the simulator's report; backward=1 for the gradients."""
    x, z, dy = normals(dtype, (M, V), (M, V), (M, V))
    weight = normals("float32", (V,))[0]
    if backward:
        return gated_rms_norm_bwd, (dy, x, z, weight, 1e-5, True)
    return gated_rms_norm_fwd, (x, z, weight, 1e-5, True)
