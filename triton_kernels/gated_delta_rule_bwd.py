"""Gated delta rule, backward, chunkwise: a reverse scan over the chunks, then every chunk in parallel.

Math, in the symbols of gated_delta_rule_fwd; dO is given, dS' is the gradient of the state at a chunk's end:

    dU = P^T dO + diag(lam) K dS'                     [C, V]
    dY = N^T dU                                       [C, V]   gradient of diag(beta) X;  dV = diag(beta) dY
    dS = gam_C dS' + scale Q^T diag(gam) dO - K^T diag(gam beta) dY

With A = dO U^T and R = dY U^T, both [C, C]:

    dP = scale * lower(A) * D                         gradient of Q K^T
    G  = - strict_lower(R) * D                        W = diag(beta) G is the gradient of K K^T
    dQ = scale diag(gam) dO S^T + dP K
    dK = diag(lam) U dS'^T - diag(gam beta) dY S^T + dP^T Q + W K + W^T K
    dbeta_i = <dY_i, V_i> - gam_i <(dY S^T)_i, K_i> + sum_j G_ij (K K^T)_ij

No product of C x C matrices is needed for the inverse: (I + L') U = diag(beta) X, with L' the gated L, gives
dL' = -(N^T dU) U^T directly. The log-decay gradient avoids the difference of two large sums that appears when
it is taken from rows of dQ and dK (3.5% off in bf16 at g = -16 softplus, against 0.14% here):

    rd = <Q, scale diag(gam) dO S^T> - <K, diag(gam beta) dY S^T>      row sums
    wr = <K, diag(lam) U dS'^T>                                        row sums
    F  = strict_lower(dP * Q K^T);  E = W * K K^T
    dg_t = sum_{i >= t > j} (E + F)_ij + sum_{i >= t} rd_i + sum_{j < t} wr_j + gam_C <dS', S>

The pairs are summed as they stand, those that t's decay lies between. Row sums minus column sums, summed from
the end, are the same on paper; what cancels leaves 1e-7 of its size, where a decay of -100 leaves nothing,
and dA_log multiplies that by g: 19 times the error allowed in float32.

Where g and beta came as a and z, with s = a + dt_bias:

    da = -exp(A_log) sigmoid(s) dg      ddt_bias = sum_t da      dA_log = sum_t g dg
    dz = beta_max sigmoid(z) sigmoid(-z) dbeta

Source: arXiv:2412.06464 for the forward equations; the gradients are derived here. Normalized q and k enter
by their row factors, as in forward. P^T and W^T stand on the left of a product and are therefore computed by
products of their own, U dO^T and U dY^T: no result of a product is ever transposed. No atomics: equal inputs
give equal bits.

Layout: as in forward; dY [NC, HV, C, V]; dh [NC, HV, V, K] holds dS' of each chunk; dq, dk [B, T, HV, K]. Per
tile of V in the reverse scan, vdY [NC, HV, TILES, C] holds the row sums <dY_i, V_i> and carry [NC, HV, TILES]
gam_C <dS', S>: both are taken where dY and dS' are still float32; rounded first, they double the error of dg
and dbeta in bfloat16. dgates [NC, HV, 2]: a chunk's part of dA_log and of ddt_bias.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# (Triton's decorator adds the launch arguments and gives its own functions their types at compile time)
import triton
import triton.language as tl

from delta_trn.triton_kernels.chunks import Chunks
from delta_trn.triton_kernels.launch import Config, power_of_two
from delta_trn.triton_kernels.tiles import (
    ROWS,
    accumulate,
    chunk_span,
    product,
    rounded,
    sequence_span,
    softplus,
    split_product,
)


@triton.jit(do_not_specialize=["T", "NT", "NS", "L"])
def reverse_scan_kernel(
    q, k, v, do, N, P, rows, h, initial_state, dstate, dY, dh, dv, vdY, carry, dinitial_state,
    cu_seqlens, chunk_offsets, T, NT, NS, L,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, PACKED: tl.constexpr, HAS_DSTATE: tl.constexpr, HAS_INITIAL: tl.constexpr,
    WRITE: tl.constexpr, WRITE_INITIAL: tl.constexpr, WORDS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """One program per (sequence, value head, BV columns of V), over the chunks from the last to the first.

    WRITE: all that backward needs but dinitial_state, which WRITE_INITIAL gives.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0).to(tl.int64)
    i_v = (pid % NV).to(tl.int32)
    i_h = (pid // NV) % HV
    i_n = pid // (NV * HV)
    i_hk = i_h // (HV // H)
    start, length, first = sequence_span(i_n, T, NT, NS, L, cu_seqlens, chunk_offsets, C, PACKED)

    o_c = tl.arange(0, C)
    o_k = tl.arange(0, KP)
    o_v = i_v * BV + tl.arange(0, BV)
    m_k = o_k < K
    m_v = o_v < V
    m_vk = m_v[:, None] & m_k[None, :]
    o_ck = o_c[:, None] * (H * K) + o_k[None, :]
    o_vc = o_v[:, None] + o_c[None, :] * (HV * V)
    o_cc = o_c[:, None] * C + o_c[None, :]
    o_state = o_k[None, :] * V + o_v[:, None]
    o_vk = o_v[:, None] * K + o_k[None, :]
    dtype = k.dtype.element_ty

    b_dZ = tl.zeros([BV, KP], dtype=tl.float32)  # the gradient of the state, transposed
    if HAS_DSTATE:
        p_state = dstate + (i_n * HV + i_h) * (K * V)
        b_dZ = tl.load(p_state + o_state, mask=m_vk, other=0.0).to(tl.float32)

    chunks = tl.cdiv(length, C).to(tl.int32)
    b_carry = 0.0
    for r in range(0, chunks):
        i = chunks - 1 - r
        t = start + i * C
        tile = (first + i) * HV + i_h
        m_t = o_c < tl.minimum(length - i * C, C).to(tl.int32)
        m_ck = m_t[:, None] & m_k[None, :]
        p_rows = rows + tile * (ROWS * C)
        m_vc = m_v[:, None] & m_t[None, :]
        p_h = tile * (V * K)
        b_last = tl.exp(tl.load(p_rows + C - 1))
        if WRITE:
            # gam_C <dS', S> from the unrounded gradient; first, while nothing else is there
            b_S = tl.load(h + p_h + o_vk, mask=m_vk, other=0.0).to(tl.float32)
            b_carry = tl.sum(tl.sum(b_S * b_dZ, axis=1), axis=0)
            tl.store(carry + tile * NV + i_v, b_last * b_carry)
        b_dZd = rounded(b_dZ, dtype, DOT)
        if WRITE:
            tl.store(dh + p_h + o_vk, b_dZd, mask=m_vk)

        b_q = tl.load(q + (t * H + i_hk) * K + o_ck, mask=m_ck, other=0.0)
        b_k = tl.load(k + (t * H + i_hk) * K + o_ck, mask=m_ck, other=0.0)
        b_doT = tl.load(
            do + (t * HV + i_h) * V + o_vc, mask=m_v[:, None] & m_t[None, :], other=0.0
        )  # [BV, C]
        p_N = N + tile * (WORDS * C * C) + o_cc
        b_N = tl.load(p_N)
        b_low = tl.load(p_N + (WORDS - 1) * (C * C))
        b_P = tl.load(P + tile * (C * C) + o_cc)
        b_dUT = product(b_dZd, tl.trans(b_k), DOT) * tl.load(p_rows + 6 * C + o_c)[None, :]
        b_dUT += product(b_doT, b_P, DOT)  # [BV, C]
        b_dYT = split_product(b_dUT, b_N, b_low, dtype, DOT)  # [BV, C]
        if WRITE:
            p_dY = dY + tile * (C * V) + o_c[None, :] * V + o_v[:, None]
            tl.store(p_dY, rounded(b_dYT, dtype, DOT), mask=m_v[:, None])
            b_vT = tl.load(v + (t * HV + i_h) * V + o_vc, mask=m_vc, other=0.0).to(tl.float32)
            tl.store(vdY + (tile * NV + i_v) * C + o_c, tl.sum(b_dYT * b_vT, axis=0))
            b_beta = tl.load(p_rows + 7 * C + o_c)
            b_dvT = rounded(b_dYT * b_beta[None, :], dv.dtype.element_ty, DOT)
            tl.store(dv + (t * HV + i_h) * V + o_vc, b_dvT, mask=m_vc)
        b_dOT = b_doT.to(tl.float32) * tl.load(p_rows + 5 * C + o_c)[None, :]
        b_dYT *= tl.load(p_rows + 4 * C + o_c)[None, :]
        b_dZ = b_dZ * b_last + product(rounded(b_dOT, dtype, DOT), b_q, DOT)
        b_dZ -= product(rounded(b_dYT, dtype, DOT), b_k, DOT)

    if WRITE and HAS_INITIAL:  # noqa: SIM102 (the compiler decides this, the sequence the other)
        if chunks > 0:
            # the first state is known unrounded: what h lacks of it, times dS' as it was rounded
            tl.debug_barrier()
            tile = first * HV + i_h
            b_h = tl.load(h + tile * (V * K) + o_vk, mask=m_vk, other=0.0).to(tl.float32)
            b_S = tl.load(initial_state + (i_n * HV + i_h) * (K * V) + o_state, mask=m_vk, other=0.0)
            b_dh = tl.load(dh + tile * (V * K) + o_vk, mask=m_vk, other=0.0).to(tl.float32)
            b_carry += tl.sum(tl.sum((b_S.to(tl.float32) - b_h) * b_dh, axis=1), axis=0)
            tl.store(carry + tile * NV + i_v, tl.exp(tl.load(rows + tile * (ROWS * C) + C - 1)) * b_carry)
    if WRITE_INITIAL:
        tl.store(dinitial_state + (i_n * HV + i_h) * (K * V) + o_state, b_dZ, mask=m_vk)


@triton.jit(do_not_specialize=["T", "NT"])
def gradients_kernel(
    q, k, do, g, beta, A_log, dt_bias, rows, h, U, dY, dh, vdY, carry, dq, dk, dg, dbeta, dgates,
    chunk_start, chunk_length, scale, beta_max, T, NT,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, TILES: tl.constexpr, L2NORM: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr,
    SIGMOID: tl.constexpr, PACKED: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """One program per (chunk, value head): dq, dk, dg, dbeta, dgates from h, U, dY, dh, vdY, carry.

    Three passes over V: the C x C products; dq's state part; dk's two state parts. The second and third read
    what the first left in L2. They are separate so that at most two [C, K] accumulators live at once: at K =
    256 there is no room for three.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0).to(tl.int64)
    i_c, i_h = pid // HV, pid % HV
    i_hk = i_h // (HV // H)
    start, length = chunk_span(i_c, T, NT, chunk_start, chunk_length, C, PACKED)
    if length <= 0:
        if GATE:
            tl.store(dgates + (i_c * HV + i_h) * 2 + tl.arange(0, 2), tl.zeros([2], tl.float32))
        return
    o_c = tl.arange(0, C)
    o_k = tl.arange(0, KP)
    m_t = o_c < length
    m_k = o_k < K
    m_ck = m_t[:, None] & m_k[None, :]
    o_ck = o_c[:, None] * (H * K) + o_k[None, :]
    dtype = k.dtype.element_ty
    tile = i_c * HV + i_h
    p_rows = rows + tile * (ROWS * C)
    b_beta = tl.load(p_rows + 7 * C + o_c)
    b_b = tl.load(p_rows + o_c)
    b_low = tl.load(p_rows + C + o_c)
    p_v = (start * HV + i_h) * V
    p_w = tile * (C * V)
    p_h = tile * (V * K)

    b_A = tl.zeros([C, C], dtype=tl.float32)  # dO U^T
    b_R = tl.zeros([C, C], dtype=tl.float32)  # dY U^T
    b_AT = tl.zeros([C, C], dtype=tl.float32)  # U dO^T
    b_RT = tl.zeros([C, C], dtype=tl.float32)  # U dY^T
    b_dbeta = tl.zeros([C], dtype=tl.float32)
    b_carry = 0.0
    for i_tile in range(0, TILES):
        b_dbeta += tl.load(vdY + (tile * TILES + i_tile) * C + o_c)
        b_carry += tl.load(carry + tile * TILES + i_tile)
    for i_v in range(0, NV):
        o_v = i_v * BV + tl.arange(0, BV)
        m_v = o_v < V
        m_cv = m_t[:, None] & m_v[None, :]
        o_tv = o_c[:, None] * (HV * V) + o_v[None, :]
        o_cv = o_c[:, None] * V + o_v[None, :]
        b_do = tl.load(do + p_v + o_tv, mask=m_cv, other=0.0)
        b_U = tl.load(U + p_w + o_cv, mask=m_v[None, :], other=0.0)
        b_dY = tl.load(dY + p_w + o_cv, mask=m_v[None, :], other=0.0)
        b_A = accumulate(b_A, b_do, tl.trans(b_U), DOT)
        b_AT = accumulate(b_AT, b_U, tl.trans(b_do), DOT)
        b_R = accumulate(b_R, b_dY, tl.trans(b_U), DOT)
        b_RT = accumulate(b_RT, b_U, tl.trans(b_dY), DOT)

    b_q = tl.load(q + (start * H + i_hk) * K + o_ck, mask=m_ck, other=0.0)
    b_k = tl.load(k + (start * H + i_hk) * K + o_ck, mask=m_ck, other=0.0)
    b_rq = tl.load(p_rows + 2 * C + o_c)
    b_rk = tl.load(p_rows + 3 * C + o_c)
    lower = o_c[:, None] >= o_c[None, :]
    upper = o_c[:, None] <= o_c[None, :]
    strict = o_c[:, None] > o_c[None, :]
    b_D = (b_b[:, None] - b_b[None, :]) + (b_low[:, None] - b_low[None, :])
    b_DT = tl.exp(tl.where(upper, -b_D, float("-inf")))
    b_D = tl.exp(tl.where(lower, b_D, float("-inf")))
    b_QK = product(b_q, tl.trans(b_k), DOT) * (b_rq[:, None] * b_rk[None, :])
    b_KK = product(b_k, tl.trans(b_k), DOT) * (b_rk[:, None] * b_rk[None, :])
    b_dP = scale * b_A * b_D
    b_G = tl.where(strict, -b_R * b_D, 0.0)
    b_GK = b_G * b_KK
    b_EF = b_GK * b_beta[:, None] + tl.where(strict, b_dP * b_QK, 0.0)
    b_dbeta += tl.sum(b_GK, axis=1)
    b_dg = tl.sum(tl.where(strict, tl.cumsum(b_EF, axis=0, reverse=True), 0.0), axis=1)
    # the left operands of the last products, rounded now: they wait in half the registers
    b_WT = tl.where(strict, 0.0, tl.where(o_c[:, None] == o_c[None, :], 0.0, -b_RT * b_DT * b_beta[None, :]))
    b_W = rounded((b_G * b_beta[:, None] + b_WT) * b_rk[None, :], dtype, DOT)
    b_dPT = rounded(scale * b_AT * b_DT * b_rq[None, :], dtype, DOT)
    b_dP = rounded(b_dP * b_rk[None, :], dtype, DOT)

    b_gam = tl.exp(b_b)
    b_lam = tl.exp((tl.load(p_rows + C - 1) - b_b) + (tl.load(p_rows + 2 * C - 1) - b_low))
    b_dq = tl.zeros([C, KP], dtype=tl.float32)
    for i_v in range(0, NV):
        o_v = i_v * BV + tl.arange(0, BV)
        m_v = o_v < V
        o_tv = o_c[:, None] * (HV * V) + o_v[None, :]
        o_vk = o_v[:, None] * K + o_k[None, :]
        b_do = tl.load(do + p_v + o_tv, mask=m_t[:, None] & m_v[None, :], other=0.0)
        b_h = tl.load(h + p_h + o_vk, mask=m_v[:, None] & m_k[None, :], other=0.0)
        b_dq = accumulate(b_dq, b_do, b_h, DOT)
    b_q32 = b_q.to(tl.float32) * b_rq[:, None]
    b_dq *= (scale * b_gam)[:, None]
    b_rd = tl.sum(b_q32 * b_dq, axis=1)
    b_dq = accumulate(b_dq, b_dP, b_k, DOT)
    if L2NORM:
        b_dq = b_rq[:, None] * (b_dq - b_q32 * tl.sum(b_q32 * b_dq, axis=1)[:, None])
    o_out = o_c[:, None] * (HV * K) + o_k[None, :]
    p_out = (start * HV + i_h) * K
    tl.store(dq + p_out + o_out, rounded(b_dq, dq.dtype.element_ty, DOT), mask=m_ck)

    b_YS = tl.zeros([C, KP], dtype=tl.float32)  # dY S^T
    b_US = tl.zeros([C, KP], dtype=tl.float32)  # U dS'^T
    for i_v in range(0, NV):
        o_v = i_v * BV + tl.arange(0, BV)
        m_v = o_v < V
        m_vk = m_v[:, None] & m_k[None, :]
        o_cv = o_c[:, None] * V + o_v[None, :]
        o_vk = o_v[:, None] * K + o_k[None, :]
        b_U = tl.load(U + p_w + o_cv, mask=m_v[None, :], other=0.0)
        b_dY = tl.load(dY + p_w + o_cv, mask=m_v[None, :], other=0.0)
        b_h = tl.load(h + p_h + o_vk, mask=m_vk, other=0.0)
        b_dh = tl.load(dh + p_h + o_vk, mask=m_vk, other=0.0)
        b_YS = accumulate(b_YS, b_dY, b_h, DOT)
        b_US = accumulate(b_US, b_U, b_dh, DOT)
    b_k32 = b_k.to(tl.float32) * b_rk[:, None]
    b_kYS = b_gam * tl.sum(b_k32 * b_YS, axis=1)
    b_dbeta -= b_kYS
    b_rd -= b_beta * b_kYS
    b_US *= b_lam[:, None]
    b_wr = tl.sum(b_k32 * b_US, axis=1)
    b_dk = b_US - b_YS * (b_gam * b_beta)[:, None]
    b_dk = accumulate(b_dk, b_dPT, b_q, DOT)
    b_dk = accumulate(b_dk, b_W, b_k, DOT)
    if L2NORM:
        b_dk = b_rk[:, None] * (b_dk - b_k32 * tl.sum(b_k32 * b_dk, axis=1)[:, None])
    tl.store(dk + p_out + o_out, rounded(b_dk, dk.dtype.element_ty, DOT), mask=m_ck)

    # a sum of the earlier writes, not cumsum - wr: at g = -20 the difference is 1e-9 of what it is taken from
    b_dg += tl.sum(tl.where(strict, b_wr[None, :], 0.0), axis=1)
    b_dg += tl.cumsum(b_rd, axis=0, reverse=True)
    b_dg += b_carry
    p_g = start * HV + i_h + o_c * HV
    if GATE:
        b_s = tl.load(g + p_g, mask=m_t, other=0.0).to(tl.float32)
        if BIAS:
            b_s += tl.load(dt_bias + i_h).to(tl.float32)
        b_A = tl.exp(tl.load(A_log + i_h).to(tl.float32))
        b_dg = tl.where(m_t, -b_A * b_dg, 0.0)
        tl.store(dgates + tile * 2, tl.sum(b_dg * softplus(b_s), axis=0))
        b_dg *= tl.sigmoid(b_s)
        tl.store(dgates + tile * 2 + 1, tl.sum(b_dg, axis=0))
    if SIGMOID:
        b_z = tl.load(beta + p_g, mask=m_t, other=0.0).to(tl.float32)
        b_dbeta *= beta_max * tl.sigmoid(b_z) * tl.sigmoid(-b_z)
    tl.store(dg + p_g, rounded(b_dg, dg.dtype.element_ty, DOT), mask=m_t)
    tl.store(dbeta + p_g, rounded(b_dbeta, dbeta.dtype.element_ty, DOT), mask=m_t)


def reverse_scan(
    q, k, v, do, N, P, rows, h, initial_state, dstate, *, dY, dh, dv, vdY, carry, dinitial_state,
    chunks: Chunks, config: Config,
):  # fmt: skip
    """Launch `reverse_scan_kernel`: fills dY, dh, dv, vdY, carry, or none of them where dY is None; and
    dinitial_state unless that is None.
    """
    H, K = q.shape[2:]
    HV, V = do.shape[2:]
    tile = config.reverse
    reverse_scan_kernel[(chunks.sequences * HV * -(-V // tile.columns),)](
        q, k, v, do, N, P, rows, h, initial_state, dstate, dY, dh, dv, vdY, carry, dinitial_state,
        chunks.cu_seqlens, chunks.offsets, chunks.tokens, chunks.per_sequence, chunks.segments,
        chunks.span,
        H=H, HV=HV, K=K, KP=power_of_two(K), V=V, BV=tile.columns, C=chunks.size, PACKED=chunks.packed,
        HAS_DSTATE=dstate is not None, HAS_INITIAL=initial_state is not None, WRITE=dY is not None,
        WRITE_INITIAL=dinitial_state is not None, WORDS=N.shape[2], DOT=config.dot, num_warps=tile.warps,
        num_stages=tile.stages,
    )  # fmt: skip


def gradients(
    q, k, do, g, beta, A_log, dt_bias, rows, h, U, dY, dh, vdY, carry, *, dq, dk, dg, dbeta, dgates, scale,
    l2norm, beta_max, chunks: Chunks, config: Config,
):  # fmt: skip
    """Launch `gradients_kernel`: fills dq, dk (per value head, [B, T, HV, K]), dg, dbeta; and dgates."""
    H, K = q.shape[2:]
    HV, V = do.shape[2:]
    tile = config.gradients
    gradients_kernel[(chunks.count * HV,)](
        q, k, do, g, beta, A_log, dt_bias, rows, h, U, dY, dh, vdY, carry, dq, dk, dg, dbeta, dgates,
        chunks.start, chunks.length, scale, beta_max, chunks.tokens, chunks.per_sequence,
        H=H, HV=HV, K=K, KP=power_of_two(K), V=V, BV=tile.columns, C=chunks.size, TILES=vdY.shape[2],
        L2NORM=l2norm, GATE=A_log is not None, BIAS=dt_bias is not None, SIGMOID=beta_max > 0,
        PACKED=chunks.packed, DOT=config.dot, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
