"""Gated delta rule, backward, chunkwise: after the reverse scan over the chunks, every chunk in
parallel.

In the symbols of gated_delta_rule_fwd; dO is given, dS' [K, V] is the gradient of the state at a
chunk's end:

    dU  = P^T dO + diag(lam) K dS'                            [C, V]
    dY  = T^T dU                                              [C, V]   and dV = diag(beta) dY
    dS  = gam_C dS' + scale Q^T diag(gam) dO - K^T diag(gam beta) dY            [K, V]

    dL  = -strict_lower(dY U^T)                               [C, C]
    dKK = diag(beta) (dL . D)                                 [C, C]   gradient of K K^T
    dQK = scale * lower(dO U^T) . D                           [C, C]   gradient of Q K^T
    dQ  = scale diag(gam) dO S^T + dQK K                      [C, K]
    dK  = diag(lam) U dS'^T - diag(gam beta) dY S^T + dQK^T Q + dKK K + dKK^T K
    dbeta_i = <dY_i, U_i> / beta_i = <dY_i, V_i> - gam_i <(dY S^T)_i, K_i> + sum_j (dL . D . K
    K^T)_ij

The inverse needs no product of C x C matrices: (I + L) U = Y gives dL = -(T^T dU) U^T. The
log-decay gradient avoids the difference of two large sums that appears when it is taken from rows
of dQ and dK (3.5% off in bf16 at g = -16 softplus, against 0.14% here). reads, writes [C] are sums
over rows, E is [C, C]:

    reads  = <Q, scale diag(gam) dO S^T> - <K, diag(gam beta) dY S^T>
    writes = <K, diag(lam) U dS'^T>
    E      = dKK . K K^T + strict_lower(dQK . Q K^T)
    dg_t   = sum_{i >= t > j} E_ij + sum_{i >= t} reads_i + sum_{j < t} writes_j + gam_C <dS', S>

dbeta is divided by a beta of LEAST_DIVISOR or more. Its other form, a difference of large sums
where keys are alike, was 3.7 times as far off in bfloat16 as parity allows. dg's first sum adds
only the pairs that the decay of t lies between. Row sums minus column sums, summed from the end,
are the same on paper; what cancels leaves 1e-7 of its size, where a decay of -100 leaves nothing,
and dA_log multiplies that by g: 19 times the error allowed.

Where g and beta came as a and z, with s = a + dt_bias:

    da = -exp(A_log) sigmoid(s) dg      ddt_bias = sum_t da      dA_log = sum_t g dg
    dz = beta_max sigmoid(z) sigmoid(-z) dbeta

Source: arXiv:2412.06464 for the forward equations; the gradients are derived here. Normalized q and
k enter by their row factors, as in forward; q and k are q_scaled and k_scaled where `prepare` wrote
those. No atomics: equal inputs, equal bits.

Layout, beyond that of forward:

    dY [NC, HV, C, V]         dS [NC, HV, K, V]: dS' of each chunk
    writes [NC, HV, TILES, C] in float32, <diag(lam) K dS', U> of one of the reverse scan's tiles of
    V
    carry [NC, HV, TILES]     what rounding took from <dS', S> at the first chunk of a sequence that
                              has an initial state, one for each of the reverse scan's tiles of V;
                              else 0
    dq, dk [B, tokens, HV, K] per value head
    dv, dg, dbeta             as v, g, beta. QR, ..., and DQR, DKR, DVR, DGR, DBR of the gradients,
                              are the elements from a token to the next, as in gated_delta_rule_fwd
    dgates [NC, HV, 2]        a chunk's part of dA_log and of ddt_bias
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false (Triton's
# decorator adds the launch arguments and gives its own functions their types at compile time)
import triton
import triton.language as tl

from delta_trn.triton_kernels.chunks import Chunks
from delta_trn.triton_kernels.launch import (
    Config,
    config,
    power_of_two,
    row_stride,
    take_turns,
    tile,
)
from delta_trn.triton_kernels.tiles import (
    RESET,
    ROWS,
    accumulate,
    accumulate_alone,
    accumulate_in_turn,
    exp,
    invert_power,
    locate_chunk,
    multiply,
    round_to,
    scale_by_exp,
    sigmoid,
    softplus,
    split_power,
)
from delta_trn.triton_kernels.variants import Variant, gates, layouts, rows_of

LEAST_DIVISOR = tl.constexpr(2.0**-4)
TYPES = {
    "*x": "q k v do S U dY dS dq dk dv",
    "*fp32": "g beta A_log dt_bias rows units writes carry dg dbeta dgates",
    "*i64": "chunk_start chunk_length",
    "fp32": "scale beta_max",
    "i32": "tokens NT",
}


@triton.jit
def load_gates(p_g, p_beta, A_log, dt_bias, beta_max, i_h, m_t):
    """Returns s, A_log and z, None where the call gives g or beta."""
    b_s, rate, b_z = None, None, None
    if A_log is not None:
        b_s = tl.load(p_g, mask=m_t, other=0.0).to(tl.float32)
        if dt_bias is not None:
            b_s += tl.load(dt_bias + i_h).to(tl.float32)
        rate = tl.load(A_log + i_h).to(tl.float32)
    if beta_max is not None:
        b_z = tl.load(p_beta, mask=m_t, other=0.0).to(tl.float32)
    return b_s, rate, b_z


@triton.jit
def store_gates(
    b_dg, b_dbeta, b_s, rate, b_z, beta_max, m_t, p_dg, p_dbeta, p_dgates, DOT: tl.constexpr
):
    """Stores dg and dbeta, of a and z where the call gives those, and a chunk's part of dgates."""
    if beta_max is not None:
        b_e = exp(-tl.abs(b_z))  # sigmoid(z) sigmoid(-z) is e / (1 + e)^2
        b_dbeta *= beta_max * b_e / ((1.0 + b_e) * (1.0 + b_e))
    tl.store(p_dbeta, round_to(b_dbeta, p_dbeta.dtype.element_ty, DOT), mask=m_t)
    if rate is not None:
        b_minus_g = scale_by_exp(rate, softplus(b_s), b_s)
        # a reset has no gradient; its g may be infinite
        m_g = m_t & ~(b_minus_g >= -RESET)
        tl.store(p_dgates, tl.sum(tl.where(m_g, -b_dg * b_minus_g, 0.0), axis=0))
        b_dg = tl.where(m_g, -b_dg * scale_by_exp(rate, sigmoid(b_s), b_s), 0.0)
        tl.store(p_dgates + 1, tl.sum(b_dg, axis=0))
    tl.store(p_dg, round_to(b_dg, p_dg.dtype.element_ty, DOT), mask=m_t)


@triton.jit(do_not_specialize=["tokens", "NT"])
def gradients_kernel(
    q,
    k,
    v,
    do,
    g,
    beta,
    A_log,
    dt_bias,
    rows,
    units,
    S,
    U,
    dY,
    dS,
    writes,
    carry,
    dq,
    dk,
    dv,
    dg,
    dbeta,
    dgates,
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
    V: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    QR: tl.constexpr,
    KR: tl.constexpr,
    VR: tl.constexpr,
    GR: tl.constexpr,
    BR: tl.constexpr,
    DQR: tl.constexpr,
    DKR: tl.constexpr,
    DVR: tl.constexpr,
    DGR: tl.constexpr,
    DBR: tl.constexpr,
    TILES: tl.constexpr,
    L2NORM: tl.constexpr,
    SCALED: tl.constexpr,
    PIPELINED: tl.constexpr,
    DOT: tl.constexpr,
):
    """Computes dq, dk, dv, dg, dbeta and dgates; one program per (chunk, value head). SCALED: q and
    k are.

    PIPELINED: loads of later turns of a loop run ahead; see tiles.accumulate_in_turn.

    Passes over V: the C x C products, dbeta and dv; dq's state part, in the same pass where K is
    small; dk's two state parts. So at most two [C, K] accumulators live at once.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    APART: tl.constexpr = KP > 64  # dq's registers, beside those of the C x C matrices, would spill
    pid = tl.program_id(0).to(tl.int64)
    i_c, i_h = pid // HV, pid % HV
    i_hk = i_h // (HV // H)
    start, length = locate_chunk(i_c, tokens, NT, chunk_start, chunk_length, C)
    if length <= 0:
        if dgates is not None:
            tl.store(dgates + (i_c * HV + i_h) * 2 + tl.arange(0, 2), tl.zeros([2], tl.float32))
        return
    o_c = tl.arange(0, C)
    o_k = tl.arange(0, KP)
    m_t = o_c < length
    m_k = o_k < K
    m_ck = m_t[:, None] & m_k[None, :]
    dtype = k.dtype.element_ty
    # with eight warps, see accumulate_alone; products of float32 run elsewhere
    ALONE: tl.constexpr = KP > 128 and dtype != tl.float32
    tile = i_c * HV + i_h
    p_rows = rows + tile * (ROWS * C)
    b_beta = tl.load(p_rows + 7 * C + o_c)
    p_v = (start * HV + i_h) * V
    p_U = tile * (C * V)
    p_S = tile * (V * K)
    # what is needed once per token is loaded here, together: later, each load would wait for memory
    p_g = g + start * GR + i_h + o_c * GR
    b_last = tl.load(p_rows + C - 1)
    b_last_low = tl.load(p_rows + 2 * C - 1)
    p_beta = beta + start * BR + i_h + o_c * BR
    b_s, rate, b_z = load_gates(p_g, p_beta, A_log, dt_bias, beta_max, i_h, m_t)
    b_b = tl.load(p_rows + o_c)
    b_b_low = tl.load(p_rows + C + o_c)
    b_rq = tl.load(p_rows + 2 * C + o_c)
    b_rk = tl.load(p_rows + 3 * C + o_c)
    b_fq, b_fk = b_rq, b_rk
    if SCALED:
        b_fq, b_fk = split_power(b_rq)[1], split_power(b_rk)[1]
    b_strength, b_read = b_beta, b_fq
    if units is not None:
        # dq is computed in the first, what dY and dS are a part of in both; they are multiplied in
        # last
        state_unit = tl.load(units + tile * 2)
        gradient_unit = tl.load(units + tile * 2 + 1)
        both_units = state_unit * gradient_unit
        b_strength = b_beta * gradient_unit
        b_read = b_fq * invert_power(gradient_unit)

    b_OU = tl.zeros([C, C], dtype=tl.float32)  # dO U^T
    b_YU = tl.zeros([C, C], dtype=tl.float32)  # dY U^T
    b_dq = tl.zeros([C, KP], dtype=tl.float32)  # dO S^T
    b_dbeta = tl.zeros([C], dtype=tl.float32)
    for i_v in range(0, NV):
        o_v = i_v * BV + tl.arange(0, BV)
        m_v = o_v < V
        m_cv = m_t[:, None] & m_v[None, :]
        o_tv = o_c[:, None] * (HV * V) + o_v[None, :]
        o_cv = o_c[:, None] * V + o_v[None, :]
        b_do = tl.load(do + p_v + o_tv, mask=m_cv, other=0.0)
        b_U = tl.load(U + p_U + o_cv, mask=m_v[None, :], other=0.0)
        b_dY = tl.load(dY + p_U + o_cv, mask=m_v[None, :], other=0.0)
        b_v = tl.load(
            v + start * VR + i_h * V + o_c[:, None] * VR + o_v[None, :], mask=m_cv, other=0.0
        )
        b_OU = accumulate(b_OU, b_do, tl.trans(b_U), DOT)
        b_YU = accumulate_in_turn(b_YU, b_dY, tl.trans(b_U), scale, PIPELINED, DOT)
        if not APART:
            m_vk = m_v[:, None] & m_k[None, :]
            b_S = tl.load(S + p_S + o_v[:, None] + o_k[None, :] * V, mask=m_vk, other=0.0)
            b_dq = accumulate(b_dq, b_do, b_S, DOT)
        b_dY32 = b_dY.to(tl.float32)
        b_dbeta += tl.sum(b_dY32 * b_v.to(tl.float32), axis=1)
        p_dv = dv + start * DVR + i_h * V + o_c[:, None] * DVR + o_v[None, :]
        tl.store(p_dv, round_to(b_dY32 * b_strength[:, None], dv.dtype.element_ty, DOT), mask=m_cv)

    if units is not None:
        b_dbeta *= invert_power(state_unit)
    lower = o_c[:, None] >= o_c[None, :]
    strict = o_c[:, None] > o_c[None, :]
    p_q = q + start * QR + i_hk * K
    p_k = k + start * KR + i_hk * K
    b_q = tl.load(p_q + o_c[:, None] * QR + o_k[None, :], mask=m_ck, other=0.0)
    b_k = tl.load(p_k + o_c[:, None] * KR + o_k[None, :], mask=m_ck, other=0.0)
    b_D = (b_b[:, None] - b_b[None, :]) + (b_b_low[:, None] - b_b_low[None, :])
    b_D = tl.exp2(tl.where(lower, b_D, float("-inf")))
    # factors that are the same along a row wait for its sum, and those of a column are multiplied
    # in once
    b_dQK = b_OU * b_D
    # the left operands of the last products are rounded at once: so they wait in half the registers
    b_dQKT = tl.trans(round_to(b_dQK * (scale * b_read)[:, None], dtype, DOT))
    b_dQK *= (scale * b_fk)[None, :]
    b_zeros = tl.zeros([C, C], dtype=tl.float32)
    b_QK = accumulate_alone(b_zeros, b_q, tl.trans(b_k), length > 0, ALONE, DOT)
    b_E = tl.where(strict, b_dQK * b_QK, 0.0) * b_read[:, None]
    b_dQK = round_to(b_dQK, dtype, DOT)
    b_written = tl.sum(tl.where(o_c[:, None] == o_c[None, :], b_YU, 0.0), axis=1)
    b_dLD = tl.where(strict, -b_YU * b_D, 0.0)  # dL . D
    b_dKKT = tl.trans(round_to(b_dLD * (b_beta * b_fk)[:, None], dtype, DOT))
    b_dLD *= b_fk[None, :]
    b_dLDKK = b_dLD * accumulate_alone(b_zeros, b_k, tl.trans(b_k), length > 0, ALONE, DOT)
    b_dbeta += b_fk * tl.sum(b_dLDKK, axis=1)
    b_E += b_dLDKK * (b_beta * b_fk)[:, None]
    b_dKK = b_dLD * b_beta[:, None]
    b_dKK = round_to(b_dKK, dtype, DOT)
    # E summed from row t on: a product with ones. E enters as two words of bfloat16, good to 2^-16,
    # since float16 would overflow
    if dtype == tl.float32:
        b_from = tl.where(o_c[:, None] <= o_c[None, :], 1.0, 0.0)
        b_cum = multiply(b_from, b_E, DOT)
    else:
        b_from = tl.where(o_c[:, None] <= o_c[None, :], 1.0, 0.0).to(tl.bfloat16)
        b_E_high = round_to(b_E, tl.bfloat16, DOT)
        b_E_low = round_to(b_E - b_E_high.to(tl.float32), tl.bfloat16, DOT)
        b_cum = accumulate_alone(b_zeros, b_from, b_E_high, length > 0, ALONE, DOT)
        b_cum = accumulate(b_cum, b_from, b_E_low, DOT)
    b_dg = tl.sum(tl.where(strict, b_cum, 0.0), axis=1)

    b_gam = tl.exp2(b_b)
    if APART:
        for i_v in range(0, NV):
            o_v = i_v * BV + tl.arange(0, BV)
            m_v = o_v < V
            m_vk = m_v[:, None] & m_k[None, :]
            o_tv = o_c[:, None] * (HV * V) + o_v[None, :]
            b_S = tl.load(S + p_S + o_v[:, None] + o_k[None, :] * V, mask=m_vk, other=0.0)
            b_do = tl.load(do + p_v + o_tv, mask=m_t[:, None] & m_v[None, :], other=0.0)
            b_dq = accumulate(b_dq, b_do, b_S, DOT)
    b_q32 = b_q.to(tl.float32) * b_fq[:, None]
    b_dq *= (scale * b_gam)[:, None]
    b_reads = tl.sum(b_q32 * b_dq, axis=1)
    if units is not None:
        b_reads *= invert_power(gradient_unit)
    b_dq = accumulate(b_dq, b_dQK, b_k, DOT)
    if L2NORM:
        b_dq = b_rq[:, None] * (b_dq - b_q32 * tl.sum(b_q32 * b_dq, axis=1)[:, None])
    if units is not None:
        b_dq *= state_unit
    o_dq = o_c[:, None] * DQR + o_k[None, :]
    tl.store(
        dq + (start * DQR + i_h * K) + o_dq, round_to(b_dq, dq.dtype.element_ty, DOT), mask=m_ck
    )

    b_YS = tl.zeros([C, KP], dtype=tl.float32)  # dY S^T
    b_US = tl.zeros([C, KP], dtype=tl.float32)  # U dS'^T
    b_SdS = tl.zeros([BV], dtype=tl.float32)
    for i_v in range(0, NV):
        o_v = i_v * BV + tl.arange(0, BV)
        m_v = o_v < V
        m_vk = m_v[:, None] & m_k[None, :]
        o_cv = o_c[:, None] * V + o_v[None, :]
        o_vk = o_v[:, None] + o_k[None, :] * V
        b_U = tl.load(U + p_U + o_cv, mask=m_v[None, :], other=0.0)
        b_dY = tl.load(dY + p_U + o_cv, mask=m_v[None, :], other=0.0)
        b_S = tl.load(S + p_S + o_vk, mask=m_vk, other=0.0)
        b_dS = tl.load(dS + p_S + o_vk, mask=m_vk, other=0.0)
        b_US = accumulate_in_turn(b_US, b_U, b_dS, scale, PIPELINED, DOT)
        b_YS = accumulate_in_turn(b_YS, b_dY, b_S, scale, PIPELINED, DOT)
        b_SdS += tl.sum(b_S.to(tl.float32) * b_dS.to(tl.float32), axis=1)
    b_carry = tl.sum(b_SdS, axis=0)
    if carry is not None:
        for i_tile in range(0, TILES):
            b_carry += tl.load(carry + tile * TILES + i_tile)
    b_lam = tl.exp2((b_last - b_b) + (b_last_low - b_b_low))
    b_k32 = b_k.to(tl.float32) * b_fk[:, None]
    b_kYS = b_gam * tl.sum(b_k32 * b_YS, axis=1)
    b_dbeta -= b_kYS
    b_dbeta = tl.where(b_beta >= LEAST_DIVISOR, b_written / b_beta, b_dbeta)
    b_reads -= b_beta * b_kYS
    b_US *= b_lam[:, None]
    if writes is None:
        b_writes = tl.sum(b_k32 * b_US, axis=1)
    else:
        b_writes = tl.zeros([C], dtype=tl.float32)
        for i_tile in range(0, TILES):
            b_writes += tl.load(writes + (tile * TILES + i_tile) * C + o_c)
    b_dk = b_US - b_YS * (b_gam * b_beta)[:, None]
    # two branches of one condition in a row would become one
    b_dk = accumulate_alone(b_dk, b_dQKT, b_q, length > 0, ALONE, DOT)
    b_dk = accumulate_alone(b_dk, b_dKK, b_k, tokens > 0, ALONE, DOT)
    b_dk = accumulate(b_dk, b_dKKT, b_k, DOT)
    if L2NORM:
        b_dk = b_rk[:, None] * (b_dk - b_k32 * tl.sum(b_k32 * b_dk, axis=1)[:, None])
    if units is not None:
        b_dk *= both_units
    o_dk = o_c[:, None] * DKR + o_k[None, :]
    tl.store(
        dk + (start * DKR + i_h * K) + o_dk, round_to(b_dk, dk.dtype.element_ty, DOT), mask=m_ck
    )

    # a sum of the earlier writes, not cumsum - writes: at g = -20 that difference is 1e-9 of its
    # terms
    b_dg += tl.sum(tl.where(strict, b_writes[None, :], 0.0), axis=1)
    b_dg += tl.cumsum(b_reads, axis=0, reverse=True)
    b_dg += tl.exp2(b_last) * b_carry
    if units is not None:
        b_dbeta *= both_units
        b_dg *= both_units
    p_dbeta = dbeta + start * DBR + i_h + o_c * DBR
    p_dgates = None if dgates is None else dgates + tile * 2
    p_dg = dg + start * DGR + i_h + o_c * DGR
    store_gates(b_dg, b_dbeta, b_s, rate, b_z, beta_max, m_t, p_dg, p_dbeta, p_dgates, DOT)


@triton.jit(do_not_specialize=["tokens"])
def sum_heads_kernel(
    x,
    dy,
    dx,
    tokens,
    XR: tl.constexpr,
    QR: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    BT: tl.constexpr,
    DOT: tl.constexpr,
):
    """Sums float32 dy [tokens, HV, K] over a key head's value heads into dx [tokens, H, K].

    With x [tokens, H, K], dy are gradients of y = r x with r = 1 / sqrt(<x, x> + 1e-6), and dx that
    of x:

        dx = r (sum dy - y <y, sum dy>)
    """
    pid = tl.program_id(0).to(tl.int64)
    i_t, i_h = pid // H, pid % H
    o_t = i_t * BT + tl.arange(0, BT)
    o_k = tl.arange(0, KP)
    m = (o_t < tokens)[:, None] & (o_k < K)[None, :]
    b_dx = tl.zeros([BT, KP], tl.float32)
    for i in range(0, HV // H):
        p_dy = dy + (o_t[:, None] * HV + i_h * (HV // H) + i) * K + o_k[None, :]
        b_dx += tl.load(p_dy, mask=m, other=0.0)
    if x is not None:
        p_x = x + o_t[:, None] * XR + i_h * K + o_k[None, :]
        b_x = tl.load(p_x, mask=m, other=0.0).to(tl.float32)
        b_r = tl.rsqrt(tl.sum(b_x * b_x, axis=1) + 1e-6)[:, None]
        b_x *= b_r
        b_dx = b_r * (b_dx - b_x * tl.sum(b_x * b_dx, axis=1)[:, None])
    p_dx = dx + o_t[:, None] * QR + i_h * K + o_k[None, :]
    tl.store(p_dx, round_to(b_dx, dx.dtype.element_ty, DOT), mask=m)


@take_turns
def sum_heads(x, dy, *, dx, config: Config):
    """Launches `sum_heads_kernel`: fills dx [B, tokens, H, K] with sums
    of dy [B, tokens, HV, K].
    """
    B, tokens, H, K = dx.shape
    launch = tile("sum_heads", K)
    sum_heads_kernel[(-(-B * tokens // launch.rows) * H,)](
        x, dy, dx, B * tokens, XR=row_stride(dx if x is None else x), QR=row_stride(dx), H=H,
        HV=dy.shape[2], K=K, KP=power_of_two(K), BT=launch.rows, DOT=config.dot,
        **launch.options(),
    )  # fmt: skip


@take_turns
def gradients(
    q,
    k,
    v,
    do,
    g,
    beta,
    A_log,
    dt_bias,
    rows,
    S,
    U,
    dY,
    dS,
    writes,
    carry,
    *,
    dq,
    dk,
    dv,
    dg,
    dbeta,
    dgates,
    units=None,
    scale,
    l2norm,
    scaled,
    beta_max,
    chunks: Chunks,
    config: Config,
):
    """Launches `gradients_kernel`: fills dq, dk, dv, dg, dbeta, and with A_log dgates."""
    H, K = q.shape[2:]
    HV, V = do.shape[2:]
    launch = config.gradients
    tiles = next((x.shape[2] for x in (writes, carry) if x is not None), 1)
    strides = {
        "QR": q,
        "KR": k,
        "VR": v,
        "GR": g,
        "BR": beta,
        "DQR": dq,
        "DKR": dk,
        "DVR": dv,
        "DGR": dg,
        "DBR": dbeta,
    }
    gradients_kernel[(chunks.count * HV,)](
        q,
        k,
        v,
        do,
        g,
        beta,
        A_log,
        dt_bias,
        rows,
        units,
        S,
        U,
        dY,
        dS,
        writes,
        carry,
        dq,
        dk,
        dv,
        dg,
        dbeta,
        dgates,
        chunks.start,
        chunks.length,
        scale,
        beta_max or None,
        chunks.tokens,
        chunks.per_sequence,
        H=H,
        HV=HV,
        K=K,
        KP=power_of_two(K),
        V=V,
        BV=launch.columns,
        C=chunks.size,
        **{name: row_stride(x) for name, x in strides.items()},
        TILES=tiles,
        L2NORM=l2norm,
        SCALED=scaled,
        PIPELINED=launch.stages > 1,
        DOT=config.dot,
        **launch.options(),
    )


def variants(K: int, V: int, itemsize: int, quick: bool):
    """Yields what `compile_only` compiles of this module."""
    row = config(K, V, itemsize=itemsize)
    sizes = {"K": K, "KP": power_of_two(K), "V": V, "C": row.C, "TILES": 2, "L2NORM": True}
    sizes |= rows_of(2, 4, K, V) | {"DOT": row.dot, "units": None}
    sizes["PIPELINED"] = row.gradients.stages > 1
    sizes |= {"BV": row.gradients.columns} | ({} if itemsize == 4 else {"writes": None})
    for layout, tables in layouts(quick).items():
        values = sizes | tables | ({"carry": None} if layout == "dense" else {})
        for form, arguments in gates(quick).items():
            for scaled in (False,) if itemsize == 4 or quick else (False, True):
                constants = values | arguments | {"SCALED": scaled}
                options = f"{layout}, {form}" + ", scaled" * scaled
                yield Variant(
                    "gradients", options, gradients_kernel, TYPES, row.gradients, constants
                )
    launch, types = tile("sum_heads", K), TYPES | {"*fp32": "dy", "*x": "x dx"}
    for options, absent in {"": {"x": None}, "of normalized": {}}.items():
        values = sizes | absent | {"BT": launch.rows}
        yield Variant("sum_heads", options, sum_heads_kernel, types, launch, values)
