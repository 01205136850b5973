"""RMS norm of rows, times a gain; of a gated row, or of a residual sum; forward and backward.

    r = (mean(x^2) + eps)^-1/2     h = r x     y = h w SiLU(z)       (y = h w without a gate)
    with a residual, x is the sum of two, total = residual + a, rounded to its dtype as it is stored

    m = dy SiLU(z)     n = m w     dw = sum over rows of m h     dz = dy h w SiLU'(z)
    dx = r (n - h mean(n h)); with a residual, plus dtotal, and so is the gradient of both terms

Source: RMSNorm (arXiv:1910.07467), the gate as in arXiv:2412.06464; gradients are derived here. Rows are in
registers whole, so backward makes r again: nothing is kept. In backward a program walks over several tiles of
rows and keeps the sum of dw; partial sums go to a row each, and rows are added by the caller: no atomics.

Layout: x, z, a, residual, y, total and gradients [M, N], contiguous; weight [N]; dweight [P, N].
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
# (Triton's decorator adds the launch arguments and gives its own functions their types at compile time)
import triton
import triton.language as tl

from delta_trn.triton_kernels.launch import PROGRAMS, arithmetic, tile
from delta_trn.triton_kernels.tiles import rounded


@triton.jit
def forward_kernel(
    x, gate, residual, weight, y, total, M, eps,
    N: tl.constexpr, NP: tl.constexpr, R: tl.constexpr,
    GATED: tl.constexpr, SUM: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """One program per R rows."""
    o_m = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    o_n = tl.arange(0, NP)
    o_x = o_m[:, None] * N + o_n[None, :]
    m_x = (o_m < M)[:, None] & (o_n < N)[None, :]
    b_x = tl.load(x + o_x, mask=m_x, other=0.0).to(tl.float32)
    if SUM:
        b_x += tl.load(residual + o_x, mask=m_x, other=0.0).to(tl.float32)
        b_total = rounded(b_x, total.dtype.element_ty, DOT)
        tl.store(total + o_x, b_total, mask=m_x)
        b_x = b_total.to(tl.float32)
    b_w = tl.load(weight + o_n, mask=o_n < N, other=0.0).to(tl.float32)
    b_r = tl.rsqrt(tl.sum(b_x * b_x, axis=1) / N + eps)
    b_y = b_x * b_r[:, None] * b_w[None, :]
    if GATED:
        b_z = tl.load(gate + o_x, mask=m_x, other=0.0).to(tl.float32)
        b_y *= b_z * tl.sigmoid(b_z)
    tl.store(y + o_x, rounded(b_y, y.dtype.element_ty, DOT), mask=m_x)


@triton.jit
def backward_kernel(
    dy, dtotal, x, gate, weight, dx, dgate, dweight, M, eps, tiles,
    N: tl.constexpr, NP: tl.constexpr, R: tl.constexpr, P: tl.constexpr,
    GATED: tl.constexpr, SUM: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """One program per P-th part of the tiles of R rows. SUM: x is the total, dtotal its gradient."""
    i_p = tl.program_id(0).to(tl.int64)
    o_n = tl.arange(0, NP)
    b_w = tl.load(weight + o_n, mask=o_n < N, other=0.0).to(tl.float32)
    b_dw = tl.zeros([NP], dtype=tl.float32)
    for r in range(0, tl.cdiv(tiles - i_p, P).to(tl.int32)):
        i = i_p + r * P  # 64 bits, which a loop from i_p on would have only when compiled
        o_m = i * R + tl.arange(0, R)
        o_x = o_m[:, None] * N + o_n[None, :]
        m_x = (o_m < M)[:, None] & (o_n < N)[None, :]
        b_x = tl.load(x + o_x, mask=m_x, other=0.0).to(tl.float32)
        b_m = tl.load(dy + o_x, mask=m_x, other=0.0).to(tl.float32)
        b_r = tl.rsqrt(tl.sum(b_x * b_x, axis=1) / N + eps)
        b_h = b_x * b_r[:, None]
        if GATED:
            b_z = tl.load(gate + o_x, mask=m_x, other=0.0).to(tl.float32)
            b_s = tl.sigmoid(b_z)
            b_dz = b_m * b_h * b_w[None, :] * (b_s * (1.0 + b_z * (1.0 - b_s)))
            tl.store(dgate + o_x, rounded(b_dz, dgate.dtype.element_ty, DOT), mask=m_x)
            b_m *= b_z * b_s
        b_dw += tl.sum(b_m * b_h, axis=0)
        b_n = b_m * b_w[None, :]
        b_dx = b_r[:, None] * (b_n - b_h * (tl.sum(b_n * b_h, axis=1) / N)[:, None])
        if SUM:
            b_dx += tl.load(dtotal + o_x, mask=m_x, other=0.0).to(tl.float32)
        tl.store(dx + o_x, rounded(b_dx, dx.dtype.element_ty, DOT), mask=m_x)
    tl.store(dweight + i_p * N + o_n, b_dw, mask=o_n < N)


def parts(M, N):
    """Returns P and the number of tiles of rows: PROGRAMS fill a large GPU several times."""
    tiles = -(-M // tile("rms_norm", N).rows)
    return min(tiles, PROGRAMS), tiles


def forward(x, gate, residual, weight, y, total, *, eps):
    """Launch `forward_kernel`: fills y, and with a residual total. gate, residual: a tensor or None."""
    M, N = x.shape
    row = tile("rms_norm", N)
    forward_kernel[(-(-M // row.rows),)](
        x, gate, residual, weight, y, total, M, eps,
        N=N, NP=row.columns, R=row.rows, GATED=gate is not None, SUM=residual is not None, DOT=arithmetic(),
        num_warps=row.warps, num_stages=row.stages,
    )  # fmt: skip


def backward(dy, dtotal, x, gate, weight, *, dx, dgate, dweight, eps):
    """Launch `backward_kernel`: fills dx, dgate and dweight [P, N], P from `parts`. dtotal: None, no sum."""
    M, N = x.shape
    row = tile("rms_norm", N)
    P, tiles = parts(M, N)
    backward_kernel[(P,)](
        dy, dtotal, x, gate, weight, dx, dgate, dweight, M, eps, tiles,
        N=N, NP=row.columns, R=row.rows, P=P, GATED=gate is not None, SUM=dtotal is not None,
        DOT=arithmetic(), num_warps=row.warps, num_stages=row.stages,
    )  # fmt: skip
