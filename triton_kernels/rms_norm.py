"""RMS norm of rows, times a gain; of a gated row, or of a residual sum; forward and backward.

For one row x [N] with gain w [N] and gate z [N]; f(z) is SiLU(z) or sigmoid(z), and 1 without a
gate:

    r = (mean(x^2) + eps)^-1/2
    h = r x                                                       [N]
    y = h w f(z)                                                  [N]

With a residual, x is the sum of two, rounded to its dtype as it is stored: total = residual + a.
With dy [N] given:

    m  = dy f(z)                                                  [N]
    n  = m w                                                      [N]
    dw = sum over rows of m h                                     [N]
    dz = dy h w f'(z)                                             [N]
    dx = r (n - h mean(n h)), plus dtotal with a residual         [N]   the gradient of both terms of the sum

Source: RMSNorm (arXiv:1910.07467), SiLU of a gate as in arXiv:2412.06464, its sigmoid as in
arXiv:2510.26692; gradients are derived here. A program holds whole rows in registers, so backward
computes r again: nothing is kept. In backward a program walks over several tiles of rows and keeps
its part of dw; the caller adds up the P parts, in one order: no atomics.

Layout: x, z, a, residual, y, total and gradients [M, N], contiguous; weight [N]; dweight [P, N].
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# (Triton's decorator adds the launch arguments and gives its own functions their types at compile
# time)
import triton
import triton.language as tl

from delta_trn.triton_kernels.launch import PROGRAMS, arithmetic, take_turns, tile
from delta_trn.triton_kernels.tiles import round_to
from delta_trn.triton_kernels.variants import Variant

TYPES = {
    "*x": "x gate residual y total dy dtotal dx dgate",
    "*fp32": "weight dweight",
    "i32": "M tiles",
    "fp32": "eps",
}


@triton.jit(do_not_specialize=["M"])
def forward_kernel(
    x, gate, residual, weight, y, total, M, eps,
    N: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, SILU: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Computes y, and total where there is a residual; one program per BM rows."""
    o_m = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    o_n = tl.arange(0, BN)
    o_x = o_m[:, None] * N + o_n[None, :]
    m_x = (o_m < M)[:, None] & (o_n < N)[None, :]
    b_x = tl.load(x + o_x, mask=m_x, other=0.0).to(tl.float32)
    if residual is not None:
        b_x += tl.load(residual + o_x, mask=m_x, other=0.0).to(tl.float32)
        b_total = round_to(b_x, total.dtype.element_ty, DOT)
        tl.store(total + o_x, b_total, mask=m_x)
        b_x = b_total.to(tl.float32)
    b_w = tl.load(weight + o_n, mask=o_n < N, other=0.0).to(tl.float32)
    b_r = tl.rsqrt(tl.sum(b_x * b_x, axis=1) / N + eps)
    b_y = b_x * b_r[:, None] * b_w[None, :]
    if gate is not None:
        b_z = tl.load(gate + o_x, mask=m_x, other=0.0).to(tl.float32)
        b_y *= b_z * tl.sigmoid(b_z) if SILU else tl.sigmoid(b_z)
    tl.store(y + o_x, round_to(b_y, y.dtype.element_ty, DOT), mask=m_x)


@triton.jit(do_not_specialize=["M", "tiles"])
def backward_kernel(
    dy, dtotal, x, gate, weight, dx, dgate, dweight, M, eps, tiles,
    N: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, SILU: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Computes dx, dgate and dweight; program p of P takes tiles p, p + P, ... of BM rows.

    With a residual, x is the total and dtotal its gradient.
    """
    i_p = tl.program_id(0).to(tl.int64)
    P = tl.num_programs(0)
    o_n = tl.arange(0, BN)
    b_w = tl.load(weight + o_n, mask=o_n < N, other=0.0).to(tl.float32)
    b_dw = tl.zeros([BN], dtype=tl.float32)
    for r in range(0, tl.cdiv(tiles - i_p, P).to(tl.int32)):
        i = i_p + r * P  # 64 bits: a loop from i_p on would have them only where it is compiled
        o_m = i * BM + tl.arange(0, BM)
        o_x = o_m[:, None] * N + o_n[None, :]
        m_x = (o_m < M)[:, None] & (o_n < N)[None, :]
        b_x = tl.load(x + o_x, mask=m_x, other=0.0).to(tl.float32)
        b_m = tl.load(dy + o_x, mask=m_x, other=0.0).to(tl.float32)
        b_r = tl.rsqrt(tl.sum(b_x * b_x, axis=1) / N + eps)
        b_h = b_x * b_r[:, None]
        if gate is not None:
            b_z = tl.load(gate + o_x, mask=m_x, other=0.0).to(tl.float32)
            b_s = tl.sigmoid(b_z)
            # of a sigmoid, 1 - s would lose digits
            b_slope = b_s * (1.0 + b_z * (1.0 - b_s)) if SILU else b_s * tl.sigmoid(-b_z)
            b_dz = b_m * b_h * b_w[None, :] * b_slope
            tl.store(dgate + o_x, round_to(b_dz, dgate.dtype.element_ty, DOT), mask=m_x)
            b_m *= b_z * b_s if SILU else b_s
        b_dw += tl.sum(b_m * b_h, axis=0)
        b_n = b_m * b_w[None, :]
        b_dx = b_r[:, None] * (b_n - b_h * (tl.sum(b_n * b_h, axis=1) / N)[:, None])
        if dtotal is not None:
            b_dx += tl.load(dtotal + o_x, mask=m_x, other=0.0).to(tl.float32)
        tl.store(dx + o_x, round_to(b_dx, dx.dtype.element_ty, DOT), mask=m_x)
    tl.store(dweight + i_p * N + o_n, b_dw, mask=o_n < N)


def parts(M, N):
    """Returns P and the number of tiles of rows. PROGRAMS fill a large GPU several times."""
    tiles = -(-M // tile("rms_norm", N).rows)
    return min(tiles, PROGRAMS), tiles


@take_turns
def forward(x, gate, residual, weight, y, total, *, eps, silu=True):
    """Launches `forward_kernel`: fills y, and with a residual total.

    gate, residual: a tensor or None. silu: whether a gate's f is SiLU, or the sigmoid.
    """
    M, N = x.shape
    row = tile("rms_norm", N)
    forward_kernel[(-(-M // row.rows),)](
        x,
        gate,
        residual,
        weight,
        y,
        total,
        M,
        eps,
        N=N,
        BN=row.columns,
        BM=row.rows,
        SILU=silu,
        DOT=arithmetic(),
        **row.options(),
    )


@take_turns
def backward(dy, dtotal, x, gate, weight, *, dx, dgate, dweight, eps, silu=True):
    """Launches `backward_kernel`: fills dx, dgate and dweight [P, N],
    P from `parts`. dtotal None: no sum. silu: as in `forward`.
    """
    M, N = x.shape
    row = tile("rms_norm", N)
    P, tiles = parts(M, N)
    backward_kernel[(P,)](
        dy,
        dtotal,
        x,
        gate,
        weight,
        dx,
        dgate,
        dweight,
        M,
        eps,
        tiles,
        N=N,
        BN=row.columns,
        BM=row.rows,
        SILU=silu,
        DOT=arithmetic(),
        **row.options(),
    )


def variants(N: int, _: int, itemsize: int, quick: bool):
    """Yields what `compile_only` compiles of this module."""
    row = tile("rms_norm", N)
    values = {"N": N, "BN": row.columns, "BM": row.rows, "SILU": True, "DOT": "ieee"}
    gate, total = dict.fromkeys(("gate", "dgate")), dict.fromkeys(("residual", "total", "dtotal"))
    sigmoid = total | {"SILU": False}
    forms = {"gated": total, "gated by a sigmoid": sigmoid, "sum": gate}
    if not quick:
        forms = {"plain": gate | total} | forms
    for form, absent in forms.items():
        yield Variant("rms_norm", f"forward {form}", forward_kernel, TYPES, row, values | absent)
        yield Variant("rms_norm", f"backward {form}", backward_kernel, TYPES, row, values | absent)
