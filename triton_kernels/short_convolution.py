"""The short convolution: causal, depthwise, over time, then SiLU or nothing; forward and backward.

For one channel with W taps w; x, y, z and their gradients [T]:

    z_t  = sum_j w_j x_{t - W + 1 + j}
    y    = SiLU(z), or z

    dz   = dy SiLU'(z), or dy
    dx_t = sum_j w_j dz_{t + W - 1 - j}
    dw_j = sum_t dz_t x_{t - W + 1 + j}

Each thread has channels of its own and all tokens of a span of time, which it walks tile by tile. A
token is a tile [BC] by itself, and a tuple holds the tokens at hand: a tap is another entry of it,
no load and no exchange between threads. Forward keeps the last W - 1 of x for the next tile.
Backward walks from the end of the span, keeps dz of the W - 1 tokens behind, and computes z again:
only the inputs are saved. A program keeps its part of dw in registers; the caller adds up the P
parts, in one order: no atomics, so the same bits every time.

Layout, all contiguous:

    x, y, dy, dx [B, T, C]      weight [W, C]      dweight [P, W, C]
    prefix [B, W - 1, C]        what came before the first token
    position [T]                of each token in its packed sequence; B is 1. Tap j reads from its
                                own sequence where position >= W - 1 - j
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false
# (Triton's decorator adds the launch arguments and gives its own functions their types at compile time)
# ruff: noqa: RUF005 - Triton compiles no starred tuples
import triton
import triton.language as tl

from delta_trn.triton_kernels.launch import PROGRAMS, arithmetic, take_turns, tile
from delta_trn.triton_kernels.tiles import round_to
from delta_trn.triton_kernels.variants import Variant

SPAN, SHORT = 128, 16  # tokens of a row that one program takes: where there are many, and few

TYPES = {
    "*x": "x y prefix dy dx dprefix",
    "*fp32": "weight dweight",
    "*i64": "position",
    "i32": "T C NT tiles",
}


@triton.jit
def _load_token(x, prefix, i, t0, o_c, T, C, m_c, W: tl.constexpr):
    """Loads x [BC] of token t0 + i. Before the first token: the prefix, or zeros.

    x points to token t0 of its row, prefix to what would be token 0. Offsets span a tile: 32 bits
    suffice.
    """
    b_x = tl.load(x + i * C + o_c, mask=m_c & (i + t0 >= 0) & (i + t0 < T), other=0.0)
    if prefix is not None:
        b_p = tl.load(prefix + i * C + o_c, mask=m_c & (i + t0 < 0) & (i + t0 >= 1 - W), other=0.0)
        b_x = tl.where(i + t0 < 0, b_p, b_x)
    return b_x


@triton.jit
def _load_tokens(
    x, prefix, first: tl.constexpr, t0, o_c, T, C, m_c, N: tl.constexpr, W: tl.constexpr
):
    """Loads x of N tokens from t0 + first on, a tuple of [BC]."""
    tokens = ()
    for n in tl.static_range(N):
        tokens = tokens + (_load_token(x, prefix, first + n, t0, o_c, T, C, m_c, W),)
    return tokens


@triton.jit
def _load_places(position, t0, T, N: tl.constexpr):
    """Loads the positions of N tokens from t0 on. Where sequences are not packed,
    nobody reads them.
    """
    places = ()
    for n in tl.static_range(N):
        place = n
        if position is not None:
            place = tl.load(position + n + t0, mask=(n + t0 >= 0) & (n + t0 < T), other=0).to(
                tl.int32
            )
        places = places + (place,)
    return places


@triton.jit
def _load_taps(weight, o_c, C, m_c, W: tl.constexpr):
    """Loads the taps w_0 to w_(W - 1), each [BC], in float32."""
    taps = ()
    for j in tl.static_range(W):
        taps = taps + (tl.load(weight + j * C + o_c, mask=m_c, other=0.0).to(tl.float32),)
    return taps


@triton.jit
def _read(b_x, place, back: tl.constexpr, PACKED: tl.constexpr):
    """Returns b_x in float32, or 0 if it is not of the sequence
    of the token `back` behind it, at `place`.
    """
    b_x = b_x.to(tl.float32)
    return tl.where(place >= back, b_x, 0.0) if PACKED else b_x


@triton.jit
def _convolve(b_x, n: tl.constexpr, place, taps, W: tl.constexpr, PACKED: tl.constexpr):
    """Returns z [BC] of token n; b_x begins W - 1 tokens before token 0."""
    b_z = tl.zeros_like(taps[0])
    for j in tl.static_range(W):
        b_z += _read(b_x[n + j], place, W - 1 - j, PACKED) * taps[j]
    return b_z


@triton.jit(do_not_specialize=["T", "NT", "tiles"])
def forward_kernel(
    x, weight, prefix, position, y, T, C, NT, tiles,
    W: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, SILU: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Computes y; one program per (row, `tiles` tiles of BT tokens, BC channels)."""
    PACKED: tl.constexpr = position is not None
    NC = tl.cdiv(C, BC)
    pid = tl.program_id(0).to(tl.int64)
    i_b = pid // NC // NT
    o_c = (pid % NC).to(tl.int32) * BC + tl.arange(0, BC)
    m_c = o_c < C
    taps = _load_taps(weight, o_c, C, m_c, W)
    t0 = (pid // NC % NT).to(tl.int32) * (BT * tiles)
    start = (i_b * T + t0) * C
    x += start
    y += start
    if prefix is not None:
        prefix += (i_b * (W - 1) + (W - 1) + t0) * C
    before = _load_tokens(x, prefix, 1 - W, t0, o_c, T, C, m_c, W - 1, W)
    for _ in range(0, tl.minimum(tl.cdiv(T - t0, BT), tiles)):
        b_x = before + _load_tokens(x, None, 0, t0, o_c, T, C, m_c, BT, W)
        places = _load_places(position, t0, T, BT)
        for n in tl.static_range(BT):
            b_y = _convolve(b_x, n, places[n], taps, W, PACKED)
            if SILU:
                b_y *= tl.sigmoid(b_y)
            tl.store(
                y + n * C + o_c, round_to(b_y, y.dtype.element_ty, DOT), mask=m_c & (n + t0 < T)
            )
        before = ()
        for n in tl.static_range(W - 1):
            before = before + (b_x[BT + n],)
        t0 += BT
        x += BT * C
        y += BT * C


@triton.jit
def _differentiate(
    b_dy,
    b_x,
    places,
    taps,
    N: tl.constexpr,
    W: tl.constexpr,
    PACKED: tl.constexpr,
    SILU: tl.constexpr,
):
    """Returns dz of N tokens, a tuple of [BC] float32; b_x begins W - 1 tokens before the first."""
    dz = ()
    for n in tl.static_range(N):
        b_dz = b_dy[n].to(tl.float32)
        if SILU:
            b_z = _convolve(b_x, n, places[n], taps, W, PACKED)
            b_s = tl.sigmoid(b_z)
            b_dz *= b_s * (1.0 + b_z * (1.0 - b_s))
        dz = dz + (b_dz,)
    return dz


@triton.jit(do_not_specialize=["T", "NT", "tiles"])
def backward_kernel(
    dy, x, weight, prefix, position, dx, dprefix, dweight, T, C, NT, tiles,
    W: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, SILU: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Computes dx, dprefix and dweight; one program per (row, `tiles` tiles of BT tokens, BC
    channels).

    With a prefix, a row's first span begins W - 1 tokens before the first, for the prefix's
    gradient. dz of the W - 1 tokens behind a span is computed by its program, too.
    """
    PACKED: tl.constexpr = position is not None
    NC = tl.cdiv(C, BC)
    pid = tl.program_id(0).to(tl.int64)
    i_p = pid // NC
    i_b = i_p // NT
    o_c = (pid % NC).to(tl.int32) * BC + tl.arange(0, BC)
    m_c = o_c < C
    taps, dw = _load_taps(weight, o_c, C, m_c, W), ()
    for _ in tl.static_range(W):
        dw = dw + (tl.zeros([BC], dtype=tl.float32),)
    t0 = (i_p % NT).to(tl.int32) * (BT * tiles)
    if prefix is not None:
        t0 -= W - 1
    count = tl.minimum(tl.cdiv(T - t0, BT), tiles)
    t0 += count * BT
    start = (i_b * T + t0) * C
    x += start
    dy += start
    dx += start
    if prefix is not None:
        start = (i_b * (W - 1) + (W - 1) + t0) * C
        prefix += start
        dprefix += start
    x_behind = _load_tokens(x, prefix, 1 - W, t0, o_c, T, C, m_c, 2 * (W - 1), W)
    dy_behind = _load_tokens(dy, None, 0, t0, o_c, T, C, m_c, W - 1, W)
    places_behind = _load_places(position, t0, T, W - 1)
    behind = _differentiate(dy_behind, x_behind, places_behind, taps, W - 1, W, PACKED, SILU)
    for _ in range(0, count):
        t0 -= BT
        x -= BT * C
        dy -= BT * C
        dx -= BT * C
        if prefix is not None:
            prefix -= BT * C
            dprefix -= BT * C
        # all loads come first: none may pass a store
        b_x = _load_tokens(x, prefix, 1 - W, t0, o_c, T, C, m_c, BT + W - 1, W)
        b_dy = _load_tokens(dy, None, 0, t0, o_c, T, C, m_c, BT, W)
        places = _load_places(position, t0, T, BT)
        dz = _differentiate(b_dy, b_x, places, taps, BT, W, PACKED, SILU) + behind
        places = places + places_behind
        for n in tl.static_range(BT):
            b_dx = tl.zeros([BC], dtype=tl.float32)
            # token n + s reads token n by tap W - 1 - s
            for s in tl.static_range(W):
                b_dx += _read(dz[n + s], places[n + s], s, PACKED) * taps[W - 1 - s]
            b_dx = round_to(b_dx, dx.dtype.element_ty, DOT)
            tl.store(dx + n * C + o_c, b_dx, mask=m_c & (n + t0 >= 0) & (n + t0 < T))
            if prefix is not None:
                tl.store(dprefix + n * C + o_c, b_dx, mask=m_c & (n + t0 < 0))
        sums = dw
        dw, behind, places_behind = (), (), ()
        for j in tl.static_range(W):
            b_dw = sums[j]
            for n in tl.static_range(BT):
                b_dw += dz[n] * _read(b_x[n + j], places[n], W - 1 - j, PACKED)
            dw = dw + (b_dw,)
        for n in tl.static_range(W - 1):
            behind = behind + (dz[n],)
            places_behind = places_behind + (places[n],)
    for j in tl.static_range(W):
        tl.store(dweight + (i_p * W + j) * C + o_c, dw[j], mask=m_c)


def parts(B, T, C, W, *, prefix, kernel="short_convolution"):
    """Returns P, the spans of all rows' time, and the tiles of each.

    A span is SPAN tokens, longer where there would be more than PROGRAMS spans, and shorter, down
    to SHORT, where there would be less than PROGRAMS programs: a short sequence must fill the GPU,
    too.
    """
    row = tile(kernel, C)
    tokens = T + (W - 1 if prefix else 0)
    fill = B * tokens * -(-C // row.columns) // PROGRAMS
    span = max(min(max(fill, SHORT), SPAN), B * tokens // PROGRAMS)
    tiles = -(-span // row.rows)
    return B * -(-tokens // (row.rows * tiles)), tiles


@take_turns
def forward(x, weight, prefix, position, y, *, silu):
    """Launches `forward_kernel`: fills y. prefix, position: a tensor or None."""
    B, T, C = x.shape
    W, row = weight.shape[0], tile("short_convolution_forward", C)
    P, tiles = parts(B, T, C, W, prefix=False, kernel="short_convolution_forward")
    forward_kernel[(P * -(-C // row.columns),)](
        x, weight, prefix, position, y, T, C, P // max(B, 1), tiles,
        W=W, BT=row.rows, BC=row.columns, SILU=silu, DOT=arithmetic(),
        **row.options(),
    )  # fmt: skip


@take_turns
def backward(dy, x, weight, prefix, position, *, dx, dprefix, dweight, silu):
    """Launches `backward_kernel`: fills dx, dprefix (or None)
    and dweight [P, W, C], P from `parts`.
    """
    B, T, C = x.shape
    W, row = weight.shape[0], tile("short_convolution", C)
    P, tiles = parts(B, T, C, W, prefix=prefix is not None)
    backward_kernel[(P * -(-C // row.columns),)](
        dy, x, weight, prefix, position, dx, dprefix, dweight, T, C, P // max(B, 1), tiles,
        W=W, BT=row.rows, BC=row.columns, SILU=silu, DOT=arithmetic(),
        **row.options(),
    )  # fmt: skip


def variants(C: int, W: int, itemsize: int, quick: bool):
    """Yields what `compile_only` compiles of this module."""
    kernels = {
        "forward": (forward_kernel, tile("short_convolution_forward", C)),
        "backward": (backward_kernel, tile("short_convolution", C)),
    }
    values = {"W": W, "SILU": True, "DOT": "ieee"}
    prefix, position = dict.fromkeys(("prefix", "dprefix")), {"position": None}
    forms = {"packed": prefix}
    if not quick:
        forms |= {"dense": prefix | position, "prefix": position}
    for form, absent in forms.items():
        for direction, (kernel, row) in kernels.items():
            more = values | absent | {"BT": row.rows, "BC": row.columns}
            yield Variant("short_convolution", f"{direction} {form}", kernel, TYPES, row, more)
