"""Deep Delta Learning's residual update, forward and backward: one rank-1 correction per token.

For one token with X [D, DV], k [D], v [DV] and a number beta:

    r  = (k . k + k_eps^2)^-1/2, or 1 where the operation does not normalize
    y  = r k                                 [D]
    p  = X^T y                               [DV]      what the stream holds along y
    e  = v - p                               [DV]
    X' = X + beta y e^T                      [D, DV]

With dX' [D, DV] given:

    s  = dX'^T y                             [DV]
    dX = dX' - beta y s^T                    [D, DV]
    dv = beta s                              [DV]
    dbeta  = s . e
    dy = beta (dX' e - X s)                  [D]
    y . dy = beta (s . e - p . s)
    dk = r (dy - y (y . dy))                 [D]

Source: "Deep Delta Learning", the delta operator with a value row; the gradients are derived here.
Sums are float32. A program passes over D twice: first to sum, then, with X in cache, to write.

Layout: x, dx [M, D, DV]; k, dk [M, D]; v, dv [M, DV]; beta, dbeta [M]; M tokens, contiguous.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# (Triton's decorator adds the launch arguments and gives its own functions their types at compile
# time)
import triton
import triton.language as tl

from delta_trn.triton_kernels.launch import arithmetic, take_turns, tile
from delta_trn.triton_kernels.tiles import round_to
from delta_trn.triton_kernels.variants import Variant

TYPES = {"*x": "x k v out dout dx dk dv", "*fp32": "beta dbeta", "fp32": "eps2"}


@triton.jit
def forward_kernel(
    x, k, v, beta, out, eps2,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, DVP: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Computes X'; one program per token. eps2 is k_eps^2; None: k is taken as it is."""
    i_m = tl.program_id(0).to(tl.int64)
    o_v = tl.arange(0, DVP)
    m_v = o_v < DV
    b_p = tl.zeros([DVP], dtype=tl.float32)
    b_kk = tl.zeros([BD], dtype=tl.float32)
    for i_d in range(0, D, BD):
        o_d = i_d + tl.arange(0, BD)
        m_d = o_d < D
        o_x = o_d[:, None] * DV + o_v[None, :]
        b_k = tl.load(k + i_m * D + o_d, mask=m_d, other=0.0).to(tl.float32)
        b_x = tl.load(x + i_m * (D * DV) + o_x, mask=m_d[:, None] & m_v[None, :], other=0.0).to(
            tl.float32
        )
        b_p += tl.sum(b_k[:, None] * b_x, axis=0)
        b_kk += b_k * b_k
    r = 1.0
    if eps2 is not None:
        r = tl.rsqrt(tl.sum(b_kk, axis=0) + eps2)
    b_v = tl.load(v + i_m * DV + o_v, mask=m_v, other=0.0).to(tl.float32)
    b_w = tl.load(beta + i_m).to(tl.float32) * r * (b_v - r * b_p)
    for i_d in range(0, D, BD):
        o_d = i_d + tl.arange(0, BD)
        m_d = o_d < D
        o_x = o_d[:, None] * DV + o_v[None, :]
        m_x = m_d[:, None] & m_v[None, :]
        b_k = tl.load(k + i_m * D + o_d, mask=m_d, other=0.0).to(tl.float32)
        b_x = tl.load(x + i_m * (D * DV) + o_x, mask=m_x, other=0.0).to(tl.float32)
        b_out = round_to(b_x + b_k[:, None] * b_w[None, :], out.dtype.element_ty, DOT)
        tl.store(out + i_m * (D * DV) + o_x, b_out, mask=m_x)


@triton.jit
def backward_kernel(
    dout, x, k, v, beta, dx, dk, dv, dbeta, eps2,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, DVP: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Computes dX, dk, dv and dbeta; one program per token."""
    i_m = tl.program_id(0).to(tl.int64)
    o_v = tl.arange(0, DVP)
    m_v = o_v < DV
    b_p = tl.zeros([DVP], dtype=tl.float32)
    b_s = tl.zeros([DVP], dtype=tl.float32)
    b_kk = tl.zeros([BD], dtype=tl.float32)
    for i_d in range(0, D, BD):
        o_d = i_d + tl.arange(0, BD)
        m_d = o_d < D
        o_x = i_m * (D * DV) + o_d[:, None] * DV + o_v[None, :]
        m_x = m_d[:, None] & m_v[None, :]
        b_k = tl.load(k + i_m * D + o_d, mask=m_d, other=0.0).to(tl.float32)
        b_p += tl.sum(b_k[:, None] * tl.load(x + o_x, mask=m_x, other=0.0).to(tl.float32), axis=0)
        b_s += tl.sum(
            b_k[:, None] * tl.load(dout + o_x, mask=m_x, other=0.0).to(tl.float32), axis=0
        )
        b_kk += b_k * b_k
    r = 1.0
    if eps2 is not None:
        r = tl.rsqrt(tl.sum(b_kk, axis=0) + eps2)
    b_beta = tl.load(beta + i_m).to(tl.float32)
    b_p *= r
    b_s *= r
    b_e = tl.load(v + i_m * DV + o_v, mask=m_v, other=0.0).to(tl.float32) - b_p
    b_dbeta = tl.sum(b_s * b_e, axis=0)
    tl.store(dbeta + i_m, round_to(b_dbeta, dbeta.dtype.element_ty, DOT))
    tl.store(dv + i_m * DV + o_v, round_to(b_beta * b_s, dv.dtype.element_ty, DOT), mask=m_v)
    ydy = 0.0
    if eps2 is not None:
        ydy = b_beta * (b_dbeta - tl.sum(b_p * b_s, axis=0))
    for i_d in range(0, D, BD):
        o_d = i_d + tl.arange(0, BD)
        m_d = o_d < D
        o_x = i_m * (D * DV) + o_d[:, None] * DV + o_v[None, :]
        m_x = m_d[:, None] & m_v[None, :]
        b_y = r * tl.load(k + i_m * D + o_d, mask=m_d, other=0.0).to(tl.float32)
        b_x = tl.load(x + o_x, mask=m_x, other=0.0).to(tl.float32)
        b_dout = tl.load(dout + o_x, mask=m_x, other=0.0).to(tl.float32)
        b_dx = b_dout - b_y[:, None] * (b_beta * b_s)[None, :]
        b_dy = b_beta * tl.sum(b_dout * b_e[None, :] - b_x * b_s[None, :], axis=1)
        tl.store(dx + o_x, round_to(b_dx, dx.dtype.element_ty, DOT), mask=m_x)
        tl.store(
            dk + i_m * D + o_d, round_to(r * (b_dy - b_y * ydy), dk.dtype.element_ty, DOT), mask=m_d
        )


@take_turns
def forward(x, k, v, beta, out, *, k_eps):
    """Launches `forward_kernel`: fills out. k_eps None: k is taken as it is."""
    M, D, DV = x.shape
    row = tile("delta_residual", DV, D)
    forward_kernel[(M,)](
        x, k, v, beta, out, None if k_eps is None else k_eps * k_eps,
        D=D, DV=DV, BD=row.rows, DVP=row.columns, DOT=arithmetic(),
        **row.options(),
    )  # fmt: skip


@take_turns
def backward(dout, x, k, v, beta, *, dx, dk, dv, dbeta, k_eps):
    """Launches `backward_kernel`: fills dx, dk, dv and dbeta."""
    M, D, DV = x.shape
    row = tile("delta_residual", DV, D)
    backward_kernel[(M,)](
        dout, x, k, v, beta, dx, dk, dv, dbeta, None if k_eps is None else k_eps * k_eps,
        D=D, DV=DV, BD=row.rows, DVP=row.columns, DOT=arithmetic(),
        **row.options(),
    )  # fmt: skip


def variants(D: int, DV: int, itemsize: int, quick: bool):
    """Yields what `compile_only` compiles of this module."""
    row = tile("delta_residual", DV, D)
    values = {"D": D, "DV": DV, "BD": row.rows, "DVP": row.columns, "DOT": "ieee"}
    for direction, kernel in {"forward": forward_kernel, "backward": backward_kernel}.items():
        yield Variant("delta_residual", direction, kernel, TYPES, row, values)
