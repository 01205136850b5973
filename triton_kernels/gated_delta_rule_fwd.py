"""Gated delta rule, forward, chunkwise: a parallel preparation of every chunk, then a scan over the
chunks.

For one chunk of C tokens and one value head, S the state [K, V] at the chunk's start:

    b_i   = g_1 + ... + g_i                             [C]
    gam_i = exp(b_i),  lam_i = exp(b_C - b_i)           [C]
    D_ij  = exp(b_i - b_j) for i >= j, else 0           [C, C]
    L  = strict_lower(diag(beta) K K^T) . D             [C, C]
    T  = (I + L)^-1                                     [C, C]
    P  = scale * lower(Q K^T) . D                       [C, C]
    R  = V - diag(gam) K S                              [C, V]   what the state lacks of V
    U  = T Y,  Y = diag(beta) R                         [C, V]   what the chunk writes
    O  = scale * diag(gam) Q S + P U                    [C, V]
    S' = gam_C S + K^T diag(lam) U                      [K, V]

Source: arXiv:2412.06464. D is always formed as exp of a masked difference, never as a quotient,
which overflows. See tiles.invert_unit_lower for the inverse.

Normalized queries and keys are never written: their factors r_q, r_k scale rows, so they fold into
gam, lam and the C x C matrices, and the products read q and k as they came. In float16 r_k, 1000 at
a zero key and 1e-6 at a huge one, would take U out of the range: there `prepare` writes q and k
times the powers of two in r_q and r_k, which is exact, and only the factors f_q, f_k in [1/2, 1)
that are left of them fold. There, too, P and o are computed in `unit`, a power of two below 1 where
scale is below 1 / sqrt(K): float16 has few digits for a P of 1e-4. States and their gradients are
float32 and may be out of its range: where a call has any, `units` has two powers of two for each
chunk and head. S and U are in the first, dY and dS in the second.

Every g <= 0 is right, -inf included: see tiles.RESET. g and beta are never written where the call
gives a and z instead, which a layer projects, both [B, tokens, HV]:

    g = -exp(A_log) softplus(a + dt_bias)         beta = beta_max sigmoid(z)

Up to K = 128 the scan holds its tiles transposed, the state as S^T [BV, K]. Every product on the
serial chain then has the running value on its left, which Hopper's tensor cores read from
registers, and a tile from memory on its right. V^T comes from a product, too, with the identity,
which is exact: as an operand, V goes from memory to shared memory like the others, ahead of its
use, and the tensor cores transpose it. Three stages of 128 columns fill shared memory to 206 of 227
KB, because S is stored as [K, V]: transposed back, its tile passes through 4 KB and not 32. Wider
states fill the registers of eight warps with 64 columns, and S^T of 64 rows is divided among them
along K, so that each would first fetch all of it from the others. There the tiles stand upright, as
in the equations, and the running value is the right operand, which is read from shared memory.

Layout, with NC the number of chunks of all sequences, and B = 1 where N sequences are packed:

    q, k [B, tokens, H, K]         v, o [B, tokens, HV, V]       g, beta [B, tokens, HV]
    q_scaled, k_scaled             as q and k, for float16 that is normalized
    T, P [NC, HV, C, C]            rows [NC, HV, 9, C] float32, see tiles.ROWS
    S [NC, HV, K, V]               U [NC, HV, C, V]              initial_state, final_state [N, HV, K, V]
    A_log, dt_bias [HV]            transition [N, HV, K, K]      units [NC, HV, 2], the same in a sequence

q, k, v, g, beta may be parts of a wider tensor: QR, KR, VR, GR, BR are the elements from a token of
theirs to the next. A token's own elements lie together. They are known at compile time, like the
heads, on which they depend and not on a length: so addresses cost what they do where nothing lies
between.

S holds the states at chunk starts. T is rounded like every operand of a product, though its rows
reach absolute sums of 2 C where keys are alike and beta is 2. A second word, what rounding cut off,
would make these five times as exact as the plain implementation that parity compares with, and the
scans a tenth longer.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false,
# reportIndexIssue=false (Triton's decorator adds the launch arguments and gives its own functions
# their types at compile time)
from dataclasses import replace
from math import frexp

import triton
import triton.language as tl

from delta_trn.triton_kernels.chunks import Chunks
from delta_trn.triton_kernels.hopper import prepare as hopper
from delta_trn.triton_kernels.launch import (
    Config,
    Tile,
    config,
    power_of_two,
    row_stride,
    take_turns,
)
from delta_trn.triton_kernels.tiles import (
    LOG2E,
    RESET,
    ROWS,
    add_from_left,
    by_column,
    by_row,
    compute_gates,
    exp2_of_words,
    invert_power,
    invert_unit_lower,
    locate_chunk,
    locate_sequence,
    multiply,
    multiply_from_left,
    round_to,
    split_power,
)
from delta_trn.triton_kernels.variants import (
    FEW,
    Variant,
    by_heads,
    gates,
    layouts,
    of_tile,
    rows_of,
)

TYPES = {
    "*x": "q k v o q_scaled k_scaled T P S U kl",
    "*fp32": "g beta A_log dt_bias rows units last initial_state final_state transition",
    "*i64": "chunk_start chunk_length cu_seqlens chunk_offsets",
    "fp32": "scale unit beta_max",
    "i32": "tokens NT NS span",
}


@triton.jit(do_not_specialize=["tokens", "NT"])
def prepare_kernel(
    q,
    k,
    g,
    beta,
    A_log,
    dt_bias,
    q_scaled,
    k_scaled,
    T,
    P,
    rows,
    chunk_start,
    chunk_length,
    scale,
    beta_max,
    tokens,
    NT,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    C: tl.constexpr,
    QR: tl.constexpr,
    KR: tl.constexpr,
    GR: tl.constexpr,
    BR: tl.constexpr,
    L2NORM: tl.constexpr,
    DOT: tl.constexpr,
):
    """Computes T, P and the rows; one program per (chunk, value head). KP is K up to a power of
    two.

    With A_log, g holds a. With beta_max, beta holds z.
    """
    pid = tl.program_id(0).to(tl.int64)
    i_c, i_h = pid // HV, pid % HV
    i_hk = i_h // (HV // H)
    start, length = locate_chunk(i_c, tokens, NT, chunk_start, chunk_length, C)
    if length <= 0:
        return
    o_c = tl.arange(0, C)
    o_k = tl.arange(0, KP)
    m_t = o_c < length
    m_tk = m_t[:, None] & (o_k < K)[None, :]
    p_q = q + start * QR + i_hk * K
    p_k = k + start * KR + i_hk * K
    b_q = tl.load(p_q + o_c[:, None] * QR + o_k[None, :], mask=m_tk, other=0.0)
    b_k = tl.load(p_k + o_c[:, None] * KR + o_k[None, :], mask=m_tk, other=0.0)
    b_g = tl.load(g + start * GR + i_h + o_c * GR, mask=m_t, other=0.0).to(tl.float32)
    b_beta = tl.load(beta + start * BR + i_h + o_c * BR, mask=m_t, other=0.0).to(tl.float32)
    b_g, b_beta = compute_gates(b_g, b_beta, A_log, dt_bias, i_h, beta_max)
    # tokens past the end must neither forget nor write, whatever the formulas make of 0
    if A_log is not None:
        b_g = tl.where(m_t, b_g, 0.0)
    if beta_max is not None:
        b_beta = tl.where(m_t, b_beta, 0.0)

    b_g = tl.where(b_g < RESET, RESET, b_g)

    # the running sum in two words: its differences keep their digits where strong and weak decays
    # meet
    b_sum = tl.cumsum(b_g.to(tl.float64), axis=0) * LOG2E
    b_b = b_sum.to(tl.float32)
    b_b_low = (b_sum - b_b).to(tl.float32)
    if L2NORM:
        b_q32 = b_q.to(tl.float32)
        b_k32 = b_k.to(tl.float32)
        b_rq = tl.rsqrt(tl.sum(b_q32 * b_q32, axis=1) + 1e-6)
        b_rk = tl.rsqrt(tl.sum(b_k32 * b_k32, axis=1) + 1e-6)
    else:
        b_rq = tl.full([C], 1.0, tl.float32)
        b_rk = tl.full([C], 1.0, tl.float32)
    tile = i_c * HV + i_h
    p_rows = rows + tile * (ROWS * C) + o_c
    tl.store(p_rows + 2 * C, b_rq)
    tl.store(p_rows + 3 * C, b_rk)
    if q_scaled is not None:
        b_power, b_rq = split_power(b_rq)
        b_q = round_to(b_q.to(tl.float32) * b_power[:, None], q.dtype.element_ty, DOT)
        b_power, b_rk = split_power(b_rk)
        b_k = round_to(b_k.to(tl.float32) * b_power[:, None], k.dtype.element_ty, DOT)
        m_tk &= i_h % (HV // H) == 0
        o_scaled = (start * H + i_hk) * K + o_c[:, None] * (H * K) + o_k[None, :]
        tl.store(q_scaled + o_scaled, b_q, mask=m_tk)
        tl.store(k_scaled + o_scaled, b_k, mask=m_tk)
    b_last = tl.sum(tl.where(o_c == C - 1, b_sum, 0.0), axis=0)
    b_gam = exp2_of_words(b_b, b_b_low)
    b_to_end = b_last - b_sum
    b_rest = b_to_end.to(tl.float32)
    b_lam = exp2_of_words(b_rest, (b_to_end - b_rest).to(tl.float32))
    tl.store(p_rows, b_b)
    tl.store(p_rows + C, b_b_low)
    tl.store(p_rows + 4 * C, b_gam * b_rk * b_beta)
    tl.store(p_rows + 5 * C, b_gam * b_rq)
    tl.store(p_rows + 6 * C, b_lam * b_rk)
    tl.store(p_rows + 7 * C, b_beta)

    o_cc = o_c[:, None] * C + o_c[None, :]
    strict = o_c[:, None] > o_c[None, :]
    # read back, b lies as products do: D itself would have to be moved there through shared memory
    tl.debug_barrier()
    b_b = tl.load(p_rows)
    b_b_low = tl.load(p_rows + C)
    # the exponent is masked before exp: above the diagonal it is positive and may overflow
    b_D = (b_b[:, None] - b_b[None, :]) + (b_b_low[:, None] - b_b_low[None, :])
    b_D = tl.exp2(tl.where(o_c[:, None] >= o_c[None, :], b_D, float("-inf")))
    # not scale r_q r_k, which may underflow before it meets huge q and k
    b_P = multiply(b_q, tl.trans(b_k), DOT) * (scale * b_rq)[:, None] * b_rk[None, :] * b_D
    tl.store(P + tile * (C * C) + o_cc, round_to(b_P, P.dtype.element_ty, DOT))
    b_L = multiply(b_k, tl.trans(b_k), DOT) * (b_beta * b_rk)[:, None] * b_rk[None, :] * b_D
    b_L = tl.where(strict, b_L, 0.0)
    tl.store(p_rows + 8 * C, tl.sum(tl.abs(b_L), axis=1))
    b_T = invert_unit_lower(b_L, C, k.dtype.element_ty, DOT)
    tl.store(T + tile * (C * C) + o_cc, round_to(b_T, T.dtype.element_ty, DOT))


@triton.jit(do_not_specialize=["tokens", "NT", "NS", "span"])
def scan_kernel(
    q,
    k,
    v,
    T,
    P,
    rows,
    units,
    kl,
    last,
    initial_state,
    o,
    final_state,
    transition,
    S,
    U,
    cu_seqlens,
    chunk_offsets,
    scale,
    unit,
    tokens,
    NT,
    NS,
    span,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    QR: tl.constexpr,
    KR: tl.constexpr,
    VR: tl.constexpr,
    STAGES: tl.constexpr,
    UPRIGHT: tl.constexpr,
    ALONE: tl.constexpr,
    DOT: tl.constexpr,
):
    """Walks over the chunks in order; one program per (sequence, value head, BV columns of V).

    Writes what is not None. Backward reads S and U; where forward did not keep them, backward
    launches this kernel for them alone. With `transition`, K more columns follow those of V: they
    start as the identity, see v = 0 and end as `transition` (see `segments`). kl and last: None, or
    kimi_delta_attention's. scale is in `unit`. Tiles are as in the equations if UPRIGHT, else
    transposed; ALONE: see tiles.accumulate_alone.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    NX: tl.constexpr = NV + ((K + BV - 1) // BV if transition is not None else 0)
    pid = tl.program_id(0).to(tl.int64)
    i_v = (pid % NX).to(tl.int32)
    i_h = (pid // NX) % HV
    i_n = pid // (NX * HV)
    i_hk = i_h // (HV // H)
    start, length, first = locate_sequence(i_n, tokens, NT, NS, span, cu_seqlens, chunk_offsets, C)

    o_c = tl.arange(0, C)
    o_k = tl.arange(0, KP)
    o_v = i_v * BV + tl.arange(0, BV)
    m_k = o_k < K
    m_v = o_v < V
    m_state = by_row(m_k, UPRIGHT) & by_column(m_v, UPRIGHT)
    o_tv = by_row(o_c, UPRIGHT) * (HV * V) + by_column(o_v, UPRIGHT)
    o_cc = o_c[:, None] * C + o_c[None, :]
    o_state = by_row(o_k, UPRIGHT) * V + by_column(o_v, UPRIGHT)
    dtype = k.dtype.element_ty

    b_identity = tl.where(o_c[:, None] == o_c[None, :], 1.0, 0.0).to(dtype)
    o_x = o_v - NV * BV  # counts the columns of `transition`
    b_S = tl.zeros(o_state.shape, dtype=tl.float32)
    if transition is not None:
        b_S += tl.where(by_row(o_k, UPRIGHT) == by_column(o_x, UPRIGHT), 1.0, 0.0)
    if initial_state is not None:
        p_state = initial_state + (i_n * HV + i_h) * (K * V)
        b_S = tl.load(p_state + o_state, mask=m_state, other=0.0).to(tl.float32)
    if units is not None:
        state_unit = tl.load(units + (first * HV + i_h) * 2, mask=length > 0, other=1.0)
        b_S *= invert_power(state_unit)
        unit *= state_unit

    # with num_stages here, and not only at launch, Triton loads the rows ahead as well
    for i in tl.range(0, tl.cdiv(length, C).to(tl.int32), num_stages=STAGES):
        t = start + i * C
        tile = (first + i) * HV + i_h
        m_t = o_c < tl.minimum(length - i * C, C).to(tl.int32)
        m_ck = m_t[:, None] & m_k[None, :]
        p_k = k + t * KR + i_hk * K + o_c[:, None] * KR + o_k[None, :]
        p_v = v + t * VR + i_h * V + o_c[:, None] * VR + o_v[None, :]
        b_k = tl.load(p_k, mask=m_ck, other=0.0)
        b_v = tl.load(p_v, mask=m_t[:, None] & m_v[None, :], other=0.0)
        if UPRIGHT:
            b_v = b_v.to(tl.float32)
        else:
            b_v = tl.trans(b_v) if dtype == tl.float32 else multiply(tl.trans(b_v), b_identity, DOT)
        b_T = tl.load(T + tile * (C * C) + o_cc)
        p_rows = rows + tile * (ROWS * C)
        b_beta = tl.load(p_rows + 7 * C + o_c)
        if units is not None:
            b_beta *= invert_power(state_unit)
        b_Sd = round_to(b_S, dtype, DOT)
        if S is not None:
            # not o_state, which would be kept over the loop: at K = 256 that spills
            p_S = S + tile * (K * V) + by_column(o_v, UPRIGHT) + by_row(o_k, UPRIGHT) * V
            tl.store(p_S, b_Sd, mask=m_state)

        b_KS = multiply_from_left(b_k, b_Sd, length > 0, UPRIGHT, ALONE, DOT)
        b_Y = b_v * by_row(b_beta, UPRIGHT) - b_KS * by_row(tl.load(p_rows + 4 * C + o_c), UPRIGHT)
        b_U = multiply_from_left(b_T, round_to(b_Y, dtype, DOT), length > 0, UPRIGHT, ALONE, DOT)
        if U is not None:
            p_U = U + tile * (C * V) + by_row(o_c, UPRIGHT) * V + by_column(o_v, UPRIGHT)
            tl.store(p_U, round_to(b_U, dtype, DOT), mask=by_column(m_v, UPRIGHT))
        if o is not None:
            p_q = q + t * QR + i_hk * K + o_c[:, None] * QR + o_k[None, :]
            b_q = tl.load(p_q, mask=m_ck, other=0.0)
            b_P = tl.load(P + tile * (C * C) + o_cc)
            b_O = multiply_from_left(b_q, b_Sd, length > 0, UPRIGHT, ALONE, DOT)
            b_O *= by_row(scale * tl.load(p_rows + 5 * C + o_c), UPRIGHT)
            b_O = add_from_left(b_O, b_P, round_to(b_U, dtype, DOT), UPRIGHT, DOT)
            if dtype == tl.float16:
                b_O *= unit
            m_tv = by_row(m_t, UPRIGHT) & by_column(m_v, UPRIGHT)
            tl.store(
                o + (t * HV + i_h) * V + o_tv, round_to(b_O, o.dtype.element_ty, DOT), mask=m_tv
            )
        b_to_end = tl.load(p_rows + 6 * C + o_c)
        b_last = tl.exp2(tl.load(p_rows + C - 1))
        if last is not None:
            b_last = by_row(tl.load(last + tile * K + o_k, mask=m_k, other=0.0), UPRIGHT)
            b_k = tl.load(
                kl + t * KR + i_hk * K + o_c[:, None] * KR + o_k[None, :], mask=m_ck, other=0.0
            )
        if dtype != tl.float16:
            # tiny values times r_k of huge keys would underflow: a power of two that all r_k share
            # comes last
            power, _ = split_power(tl.min(tl.load(p_rows + 3 * C + o_c), axis=0))
            inverse = invert_power(power)
            b_to_end *= inverse
            b_last *= inverse
        b_U *= by_row(b_to_end, UPRIGHT)
        b_S = add_from_left(b_S * b_last, tl.trans(b_k), round_to(b_U, dtype, DOT), UPRIGHT, DOT)
        if dtype != tl.float16:
            b_S *= power

    if units is not None:
        b_S *= state_unit
    if final_state is not None:
        tl.store(final_state + (i_n * HV + i_h) * (K * V) + o_state, b_S, mask=m_state)
    if transition is not None:
        m_x = by_row(m_k, UPRIGHT) & by_column((o_x >= 0) & (o_x < K), UPRIGHT)
        p_x = (
            transition
            + (i_n * HV + i_h) * (K * K)
            + by_row(o_k, UPRIGHT) * K
            + by_column(o_x, UPRIGHT)
        )
        tl.store(p_x, b_S, mask=m_x)


def unit_of(scale: float, K: int) -> float:
    """Returns the power of two in which float16 stores P: at most 1, and then P <= 1 / sqrt(K) |q|
    |k|.

    So P of keys of norm 1 stays in range whatever q is.

    >>> unit_of(0.125, 64), unit_of(1.0, 64), unit_of(2.0**-13, 64)
    (1.0, 1.0, 0.001953125)
    """
    exponent = frexp(scale * K**0.5)[1]
    return 2.0 ** max(-60, min(0, exponent))


def _plain(tile: Tile) -> Tile:
    """Returns the launch of `prepare_kernel`, here, where `hopper` does not take the call."""
    return replace(tile, registers=None, gluon=False)


@take_turns
def prepare(
    q,
    k,
    g,
    beta,
    A_log,
    dt_bias,
    *,
    q_scaled,
    k_scaled,
    T,
    P,
    rows,
    scale,
    l2norm,
    beta_max,
    chunks: Chunks,
    config: Config,
):
    """Launches a `prepare_kernel`, this or `hopper`'s: fills T, P and rows. Tensors as in the
    layout above.

    scale is that of P, in its `unit`.

    A_log None: g is given as it is. dt_bias None: no bias. beta_max 0: beta is given as it is.
    q_scaled and k_scaled, if not None, are filled and take the place of q and k from here on.
    """
    H, K, HV = q.shape[2], q.shape[3], g.shape[2]
    tile, grid = config.prepare, chunks.count * HV
    sizes = {"H": H, "HV": HV, "K": K, "KP": power_of_two(K), "C": chunks.size, "L2NORM": l2norm}
    sizes |= {"QR": row_stride(q), "KR": row_stride(k), "GR": row_stride(g), "BR": row_stride(beta)}
    places = T, P, rows, chunks.start, chunks.length, scale, beta_max or None, chunks.tokens
    if hopper.takes(q, k, q_scaled, config):
        together = hopper.heads_together(H, HV)
        hopper.prepare_kernel[(grid // together,)](
            q, k, g, beta, A_log, dt_bias, *places, chunks.per_sequence, TOGETHER=together, **sizes,
            **tile.options(),
        )  # fmt: skip
        return
    prepare_kernel[(grid,)](
        q,
        k,
        g,
        beta,
        A_log,
        dt_bias,
        q_scaled,
        k_scaled,
        *places,
        chunks.per_sequence,
        DOT=config.dot,
        **sizes,
        **_plain(tile).options(),
    )


@take_turns
def scan(
    q,
    k,
    v,
    T,
    P,
    rows,
    initial_state,
    *,
    o,
    final_state,
    S,
    U,
    transition=None,
    scale,
    unit,
    units=None,
    kl=None,
    last=None,
    chunks: Chunks,
    config: Config,
):
    """Launches `scan_kernel`: fills whichever of o, final_state,
    transition, S and U are not None.
    """
    H, K = q.shape[2:]
    HV, V = v.shape[2:]
    tile = config.scan
    columns = -(-V // tile.columns) + (0 if transition is None else -(-K // tile.columns))
    scan_kernel[(chunks.sequences * HV * columns,)](
        q, k, v, T, P, rows, units, kl, last, initial_state, o, final_state, transition, S, U,
        chunks.cu_seqlens, chunks.offsets, scale / unit, unit, chunks.tokens, chunks.per_sequence,
        chunks.segments, chunks.span, H=H, HV=HV, K=K, KP=power_of_two(K), V=V, BV=tile.columns,
        C=chunks.size, QR=row_stride(q), KR=row_stride(k), VR=row_stride(v), STAGES=tile.stages,
        UPRIGHT=tile.upright, ALONE=tile.warps > 4, DOT=config.dot, **tile.options(),
    )  # fmt: skip


def variants(K: int, V: int, itemsize: int, quick: bool):
    """Yields what `compile_only` compiles of this module."""
    row, tiles = config(K, V, itemsize=itemsize), by_heads("scan", K, V, itemsize)
    sizes = {"K": K, "KP": power_of_two(K), "V": V, "C": row.C} | rows_of(2, 4, K, V)
    sizes |= {"L2NORM": True, "DOT": row.dot, "TOGETHER": 2} | dict.fromkeys(
        ("units", "kl", "last")
    )
    kernel = hopper.prepare_kernel if row.prepare.gluon else prepare_kernel
    # what each use of the scan does not write; dense sequences have no initial and no final state
    # here
    uses = {"train": ("transition",)}
    if not quick:
        uses |= {"infer": ("transition", "S", "U"), "recompute": ("transition", "o")}
    for layout, tables in layouts(quick).items():
        for form, arguments in gates(quick).items():
            values = sizes | tables | arguments
            unscaled = values | dict.fromkeys(("q_scaled", "k_scaled"))
            yield Variant("prepare", f"{layout}, {form}", kernel, TYPES, row.prepare, unscaled)
            if itemsize == 2 and not quick:
                options, tile = f"{layout}, {form}, scaled", _plain(row.prepare)
                yield Variant("prepare", options, prepare_kernel, TYPES, tile, values)
        states = ("initial_state", "final_state") if layout == "dense" else ()
        for use, absent in uses.items():
            values = sizes | tables | dict.fromkeys((*absent, *states))
            for heads, tile in tiles.items():
                own = values | of_tile(tile) | {"STAGES": tile.stages}
                yield Variant("scan", f"{layout} {use}{heads}", scan_kernel, TYPES, tile, own)
        heads = FEW if FEW in tiles else ""
        tile = tiles[heads]
        own = sizes | tables | of_tile(tile) | {"STAGES": tile.stages}
        own |= dict.fromkeys(("initial_state", "o", "S", "U"))
        yield Variant("scan", f"{layout} segments{heads}", scan_kernel, TYPES, tile, own)
