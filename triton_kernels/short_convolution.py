"""The short convolution: causal, depthwise, over time, then SiLU or nothing; forward and backward.

For one channel with W taps w; x, y, z and their gradients [T]:

    z_t  = sum_j w_j x_{t - W + 1 + j}
    y    = SiLU(z), or z

    dz   = dy SiLU'(z), or dy
    dx_t = sum_j w_j dz_{t + W - 1 - j}
    dw_j = sum_t dz_t x_{t - W + 1 + j}

Backward computes z again, for its own tokens and for the W - 1 behind them, which dx reads: only the inputs
are kept, and what a tile reads 2 W - 1 times comes from cache. A program walks over several tiles of time and
keeps its part of dw in registers; the caller adds up the P parts, in one order: no atomics, so the same bits
every time.

Layout, all contiguous:

    x, y, dy, dx [B, T, C]      weight [W, C]      dweight [P, W, C]
    prefix [B, W - 1, C]        what came before the first token
    position [T]                of each token in its packed sequence; B is 1. Tap j reads from its own
                                sequence where position >= W - 1 - j
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
# (Triton's decorator adds the launch arguments and gives its own functions their types at compile time)
import triton
import triton.language as tl

from delta_trn.triton_kernels.launch import PROGRAMS, arithmetic, take_turns, tile
from delta_trn.triton_kernels.tiles import round_to
from delta_trn.triton_kernels.variants import Variant

TYPES = {
    "*x": "x y prefix dy dx dprefix",
    "*fp32": "weight dweight",
    "*i64": "position",
    "i32": "T C NT tiles",
}


@triton.jit
def _load_inputs(x, prefix, o_t, o_i, o_c, t0, T, C, m_c, W: tl.constexpr):
    """Loads x of tokens t0 + o_i + o_t as float32. Before the first token: the prefix, or zeros.

    x points to token t0 of its row, prefix to what would be token 0. Offsets span a tile: 32 bits suffice.
    """
    i_t = o_t + o_i
    o_x = i_t[:, None] * C + o_c[None, :]
    m_t = (i_t + t0 >= 0) & (i_t + t0 < T)
    b_x = tl.load(x + o_x, mask=m_t[:, None] & m_c[None, :], other=0.0).to(tl.float32)
    if prefix is not None:
        m_p = (i_t + t0 < 0) & (i_t + t0 >= 1 - W)
        b_x += tl.load(prefix + o_x, mask=m_p[:, None] & m_c[None, :], other=0.0).to(tl.float32)
    return b_x


@triton.jit
def _convolve(x, prefix, weight, position, o_t, o_i, o_c, t0, b_pos, T, C, m_c, W: tl.constexpr):
    """Returns z of tokens t0 + o_i + o_t, whose places in their own sequences are b_pos."""
    b_z = tl.zeros([o_t.shape[0], o_c.shape[0]], dtype=tl.float32)
    for j in tl.static_range(W):
        b_x = _load_inputs(x, prefix, o_t, o_i + (j - (W - 1)), o_c, t0, T, C, m_c, W)
        if position is not None:
            b_x = tl.where(b_pos[:, None] >= W - 1 - j, b_x, 0.0)
        b_w = tl.load(weight + j * C + o_c, mask=m_c, other=0.0).to(tl.float32)
        b_z += b_x * b_w[None, :]
    return b_z


@triton.jit
def _load_positions(position, o_t, o_i, t0, T):
    """Loads the positions of tokens t0 + o_i + o_t. Where sequences are not packed, nobody reads them."""
    b_pos = o_t
    if position is not None:
        i_t = o_t + o_i + t0
        b_pos = tl.load(position + i_t, mask=(i_t >= 0) & (i_t < T), other=0).to(tl.int32)
    return b_pos


@triton.jit
def forward_kernel(
    x, weight, prefix, position, y, T, C, NT,
    W: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, SILU: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Computes y; one program per (row, BT tokens, BC channels)."""
    NC = tl.cdiv(C, BC)
    pid = tl.program_id(0).to(tl.int64)
    o_t = tl.arange(0, BT)
    o_c = (pid % NC).to(tl.int32) * BC + tl.arange(0, BC)
    m_c = o_c < C
    i_b = pid // NC // NT
    t0 = (pid // NC % NT).to(tl.int32) * BT
    start = (i_b * T + t0) * C
    if prefix is not None:
        prefix += (i_b * (W - 1) + (W - 1) + t0) * C
    b_pos = _load_positions(position, o_t, 0, t0, T)
    b_y = _convolve(x + start, prefix, weight, position, o_t, 0, o_c, t0, b_pos, T, C, m_c, W)
    if SILU:
        b_y *= tl.sigmoid(b_y)
    m_y = (t0 + o_t < T)[:, None] & m_c[None, :]
    o_y = o_t[:, None] * C + o_c[None, :]
    tl.store(y + start + o_y, round_to(b_y, y.dtype.element_ty, DOT), mask=m_y)


@triton.jit
def backward_kernel(
    dy, x, weight, prefix, position, dx, dprefix, dweight, T, C, NT, tiles,
    W: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, P: tl.constexpr, SILU: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """Computes dx, dprefix and dweight; one program per (p < P, BC channels).

    Program p takes tiles p, p + P, ... of all rows' time. With a prefix, tiles begin W - 1 tokens before the
    first, for the prefix's gradient.
    """
    NC = tl.cdiv(C, BC)
    pid = tl.program_id(0).to(tl.int64)
    i_p = pid // NC
    o_t = tl.arange(0, BT)
    o_c = (pid % NC).to(tl.int32) * BC + tl.arange(0, BC)
    m_c = o_c < C
    o_w = tl.arange(0, 8)
    b_dw = tl.zeros([8, BC], dtype=tl.float32)
    for r in range(0, tl.cdiv(tiles - i_p, P).to(tl.int32)):
        i = i_p + r * P  # 64 bits: a loop from i_p on would have them only where it is compiled
        i_b = i // NT
        t0 = (i % NT).to(tl.int32) * BT
        if prefix is not None:
            t0 -= W - 1
        start = (i_b * T + t0) * C
        before = prefix
        if prefix is not None:
            before += (i_b * (W - 1) + (W - 1) + t0) * C
        b_dx = tl.zeros([BT, BC], dtype=tl.float32)
        # token t + s reads token t by tap W - 1 - s
        for s in tl.static_range(W):
            i_t = o_t + s
            m_dy = ((i_t + t0 >= 0) & (i_t + t0 < T))[:, None] & m_c[None, :]
            b_pos = _load_positions(position, o_t, s, t0, T)
            p_dy = dy + start + (i_t[:, None] * C + o_c[None, :])
            b_dz = tl.load(p_dy, mask=m_dy, other=0.0).to(tl.float32)
            if SILU:
                b_z = _convolve(x + start, before, weight, position, o_t, s, o_c, t0, b_pos, T, C, m_c, W)
                b_s = tl.sigmoid(b_z)
                b_dz *= b_s * (1.0 + b_z * (1.0 - b_s))
            if s == 0:
                for j in tl.static_range(W):
                    b_x = _load_inputs(x + start, before, o_t, j - (W - 1), o_c, t0, T, C, m_c, W)
                    if position is not None:
                        b_x = tl.where(b_pos[:, None] >= W - 1 - j, b_x, 0.0)
                    b_dw += tl.where(o_w[:, None] == j, tl.sum(b_dz * b_x, axis=0)[None, :], 0.0)
            if position is not None:
                b_dz = tl.where(b_pos[:, None] >= s, b_dz, 0.0)
            b_w = tl.load(weight + (W - 1 - s) * C + o_c, mask=m_c, other=0.0).to(tl.float32)
            b_dx += b_dz * b_w[None, :]
        b_dx = round_to(b_dx, dx.dtype.element_ty, DOT)
        o_dx = o_t[:, None] * C + o_c[None, :]
        m_t = (o_t + t0 >= 0) & (o_t + t0 < T)
        tl.store(dx + start + o_dx, b_dx, mask=m_t[:, None] & m_c[None, :])
        if prefix is not None:
            p_dp = dprefix + (i_b * (W - 1) + (W - 1) + t0) * C + o_dx
            tl.store(p_dp, b_dx, mask=(o_t + t0 < 0)[:, None] & m_c[None, :])
    p_dw = dweight + (i_p * W + o_w)[:, None] * C + o_c[None, :]
    tl.store(p_dw, b_dw, mask=(o_w < W)[:, None] & m_c[None, :])


def parts(B, T, C, W, *, prefix):
    """Returns P and the number of tiles of time: PROGRAMS in all where there are so many tiles."""
    row = tile("short_convolution", C)
    tiles = B * -(-(T + (W - 1 if prefix else 0)) // row.rows)
    return min(tiles, max(1, PROGRAMS // -(-C // row.columns))), tiles


@take_turns
def forward(x, weight, prefix, position, y, *, silu):
    """Launches `forward_kernel`: fills y. prefix, position: a tensor or None."""
    B, T, C = x.shape
    row = tile("short_convolution_forward", C)
    NT = -(-T // row.rows)
    forward_kernel[(B * NT * -(-C // row.columns),)](
        x, weight, prefix, position, y, T, C, NT,
        W=weight.shape[0], BT=row.rows, BC=row.columns, SILU=silu, DOT=arithmetic(),
        num_warps=row.warps, num_stages=row.stages,
    )  # fmt: skip


@take_turns
def backward(dy, x, weight, prefix, position, *, dx, dprefix, dweight, silu):
    """Launches `backward_kernel`: fills dx, dprefix (or None) and dweight [P, W, C], P from `parts`."""
    B, T, C = x.shape
    W = weight.shape[0]
    row = tile("short_convolution", C)
    P, tiles = parts(B, T, C, W, prefix=prefix is not None)
    backward_kernel[(P * -(-C // row.columns),)](
        dy, x, weight, prefix, position, dx, dprefix, dweight, T, C, tiles // B, tiles,
        W=W, BT=row.rows, BC=row.columns, P=P, SILU=silu, DOT=arithmetic(),
        num_warps=row.warps, num_stages=row.stages,
    )  # fmt: skip


def variants(C: int, W: int, itemsize: int, quick: bool):
    """Yields what `compile_only` compiles of this module."""
    kernels = {
        "forward": (forward_kernel, tile("short_convolution_forward", C)),
        "backward": (backward_kernel, tile("short_convolution", C)),
    }
    values = {"W": W, "P": 21, "SILU": True, "DOT": "ieee"}
    prefix, position = dict.fromkeys(("prefix", "dprefix")), {"position": None}
    forms = {"packed": prefix}
    if not quick:
        forms |= {"dense": prefix | position, "prefix": position}
    for form, absent in forms.items():
        for direction, (kernel, row) in kernels.items():
            more = values | absent | {"BT": row.rows, "BC": row.columns}
            yield Variant("short_convolution", f"{direction} {form}", kernel, TYPES, row, more)
