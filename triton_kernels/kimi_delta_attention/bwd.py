"""Kimi Delta Attention, backward, chunkwise: after gated_delta_rule_reverse's scan, every chunk in
parallel.

In the symbols of kimi_delta_attention.fwd, q times scale; dO is given, dS' [K, V] is the gradient
of the state at a chunk's end, dY that of Y:

    dY  = T^T (P^T dO + kl dS')                                             [C, V]   and dV = diag(beta) dY
    dS  = Diag(gam_C) dS' + qg^T dO - kg^T dY                               [K, V]
    dP  = strict_lower(dO U^T),  dkk = -diag(beta) strict_lower(dY U^T)     [C, C]
    reads_q = gam . (dO S^T),  reads_k = -diag(beta) gam . (dY S^T)         [C, K]
    written = lam . (U dS'^T)                                               [C, K]

and for each level of cuts, with its factors f, dP and dkk masked to the pairs that its cuts lie
between:

    row_q = f . (dP (k . f)),  row_k = f . (dkk (k . f))                    [C, K]   right of the cuts
    column = f . (dP^T (q . f) + dkk^T (k . f))                             [C, K]   left of them

(in two products, of dP and of dkk with their transposes above the diagonal, where k stands in the
operand's rows left of the cuts, and q or beta k right of them)

    dq = reads_q + diag(own) k + sum row_q,  own_i = <dO_i, U_i>
    dk = reads_k + written + diag(own) q + sum (row_k + column)
    dbeta_i = <dY_i, U_i> / beta_i = <dY_i, V_i> + <k_i, (reads_k + sum row_k)_i> / beta_i dg_t =
    sum_{i >= t} (q . reads_q + k . reads_k)_i + sum_{j < t} (k . written)_j + gam_C . rowsum(S .
    dS')
           + for each level, over the tokens i that t decays on their way to the cut,
             sum_i (q . row_q + k . row_k + k . column)_i

A pair of tokens counts in dg_t exactly where t lies between the two, and nothing is added and taken
away again: suffix sums of q . dq - k . dk are the same on paper and keep no digit where a channel
decays strongly. dbeta is divided by a beta of LEAST_DIVISOR or more, as in gated_delta_rule_bwd.

With x = a + dt_bias, and y = exp(A_log) x for the gate with a lower bound:

    da = -exp(A_log) sigmoid(x) dg          dA_log = sum g dg           ddt_bias_c = sum_t da_tc
    da = exp(A_log) dy,  dy = lower_bound sigmoid(y) sigmoid(-y) dg     dA_log = sum y dy

Layout, beyond that of forward and of gated_delta_rule_bwd:

    products                       dP, dkk [NC, HV, C, C], with their transposes above the diagonal
                                   and dkk without beta; dO S^T, dY S^T, U dS'^T, as q; rowsum(S .
                                   dS'), <dY_i, V_i>
    dq, dk [B, tokens, HV, K]      in float32 if `sum_heads` follows, of the normalized q and k then
    carry [NC, HV, TILES, K]       what rounding took from rowsum(S . dS') at the first chunk of a
                                   sequence that has an initial state, for each of the reverse
                                   scan's tiles; else 0
    dgates [NC, HV, K + 1]         a chunk's part of ddt_bias and of dA_log
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false,
# reportIndexIssue=false (Triton's decorator adds the launch arguments and gives its own functions
# their types at compile time)
import triton
import triton.language as tl

from delta_trn.triton_kernels import gated_delta_rule_reverse as rule
from delta_trn.triton_kernels.chunks import Chunks
from delta_trn.triton_kernels.gated_delta_rule_bwd import LEAST_DIVISOR
from delta_trn.triton_kernels.kimi_delta_attention import gradients_hopper as hopper
from delta_trn.triton_kernels.kimi_delta_attention.fwd import (
    add_sums,
    find_cut_factors,
    find_factors,
    gates_of,
    layouts_of,
    lies_between,
)
from delta_trn.triton_kernels.launch import (
    Config,
    config,
    power_of_two,
    row_stride,
    take_turns,
    tile,
)
from delta_trn.triton_kernels.tiles import (
    LOG2E,
    RESET,
    ROWS,
    accumulate,
    accumulate_in_turn,
    exp,
    forget_before,
    load_decays,
    load_rate,
    locate_chunk,
    multiply,
    round_to,
    scale_by_exp,
    sigmoid,
)
from delta_trn.triton_kernels.variants import (
    Variant,
    by_heads,
    channel_rows_of,
    layouts,
    of_tile,
    rows_of,
)

TYPES = {
    "*x": "q k v do S U dY dS dP dkk OS YS US dv",
    "*fp32": "g beta A_log dt_bias rows carry SdS dYV dq dk dg dbeta dgates",
    "*i64": "chunk_start chunk_length position",
    "fp32": "scale beta_max lower_bound",
    "i32": "tokens NT",
}


@triton.jit(do_not_specialize=["tokens", "NT"])
def products_kernel(
    v,
    do,
    rows,
    S,
    U,
    dY,
    dS,
    carry,
    dP,
    dkk,
    OS,
    YS,
    US,
    SdS,
    dYV,
    dv,
    chunk_start,
    chunk_length,
    scale,
    tokens,
    NT,
    HV: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    VR: tl.constexpr,
    DVR: tl.constexpr,
    TILES: tl.constexpr,
    PIPELINED: tl.constexpr,
    DOT: tl.constexpr,
):
    """Computes what `gradients_kernel` needs of V, and dv; one program per (chunk, value head).

    PIPELINED: loads of later turns of a loop run ahead; see tiles.accumulate_in_turn.
    """
    pid = tl.program_id(0).to(tl.int64)
    i_c, i_h = pid // HV, pid % HV
    start, length = locate_chunk(i_c, tokens, NT, chunk_start, chunk_length, C)
    if length <= 0:
        return
    o_c = tl.arange(0, C)
    o_k = tl.arange(0, KP)
    m_t, m_k = o_c < length, o_k < K
    dtype = do.dtype.element_ty
    tile = i_c * HV + i_h
    b_beta = tl.load(rows + tile * (ROWS * C) + 7 * C + o_c)
    b_OU, b_YU = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    b_OS = tl.zeros([C, KP], tl.float32)
    b_YS, b_US = b_OS, b_OS
    b_SdS, b_dYV = tl.zeros([KP], tl.float32), tl.zeros([C], tl.float32)
    for i_v in range(0, (V + BV - 1) // BV):
        o_v = i_v * BV + tl.arange(0, BV)
        m_v = o_v < V
        m_vk = m_v[:, None] & m_k[None, :]
        m_cv = m_t[:, None] & m_v[None, :]
        o_tv = (start * HV + i_h) * V + o_c[:, None] * (HV * V) + o_v[None, :]
        o_cv = tile * (C * V) + o_c[:, None] * V + o_v[None, :]
        o_vk = tile * (K * V) + o_v[:, None] + o_k[None, :] * V
        b_S = tl.load(S + o_vk, mask=m_vk, other=0.0)
        b_dS = tl.load(dS + o_vk, mask=m_vk, other=0.0)
        b_do = tl.load(do + o_tv, mask=m_cv, other=0.0)
        b_U = tl.load(U + o_cv, mask=m_v[None, :], other=0.0)
        b_dY = tl.load(dY + o_cv, mask=m_v[None, :], other=0.0)
        b_OU = accumulate(b_OU, b_do, tl.trans(b_U), DOT)
        b_OS = accumulate(b_OS, b_do, b_S, DOT)
        b_YU = accumulate_in_turn(b_YU, b_dY, tl.trans(b_U), scale, PIPELINED, DOT)
        b_YS = accumulate_in_turn(b_YS, b_dY, b_S, scale, PIPELINED, DOT)
        b_US = accumulate_in_turn(b_US, b_U, b_dS, scale, PIPELINED, DOT)
        b_SdS += tl.sum(b_S.to(tl.float32) * b_dS.to(tl.float32), axis=0)
        b_dY = b_dY.to(tl.float32)
        p_v = v + start * VR + i_h * V + o_c[:, None] * VR + o_v[None, :]
        b_dYV += tl.sum(b_dY * tl.load(p_v, mask=m_cv, other=0.0).to(tl.float32), axis=1)
        p_dv = dv + start * DVR + i_h * V + o_c[:, None] * DVR + o_v[None, :]
        tl.store(p_dv, round_to(b_dY * b_beta[:, None], dtype, DOT), mask=m_cv)
    if carry is not None:
        for i_tile in range(0, TILES):
            b_SdS += tl.load(carry + (tile * TILES + i_tile) * K + o_k, mask=m_k, other=0.0)
    o_cc = tile * (C * C) + o_c[:, None] * C + o_c[None, :]
    below = o_c[:, None] > o_c[None, :]
    tl.store(dP + o_cc, round_to(tl.where(below, b_OU, tl.trans(b_OU)), dtype, DOT))
    tl.store(dkk + o_cc, round_to(tl.where(below, -b_YU, tl.trans(-b_YU)), dtype, DOT))
    p, m = (
        (start * HV + i_h) * K + o_c[:, None] * (HV * K) + o_k[None, :],
        m_t[:, None] & m_k[None, :],
    )
    tl.store(OS + p, round_to(b_OS, dtype, DOT), mask=m)
    tl.store(YS + p, round_to(b_YS, dtype, DOT), mask=m)
    tl.store(US + p, round_to(b_US, dtype, DOT), mask=m)
    tl.store(SdS + tile * K + o_k, b_SdS, mask=m_k)
    tl.store(dYV + tile * C + o_c, b_dYV)


@triton.jit
def differentiate_gates(b_dg, b_g, b_x, rate, lower_bound):
    """Returns the gradient of x [C, BK], and that of A_log, of every token and channel."""
    if lower_bound is not None:
        b_rate = exp(rate)
        b_y = b_rate * b_x
        # beyond 100 a sigmoid or its counterpart is 0, and infinity times 0 would be NaN
        b_y = tl.minimum(tl.maximum(b_y, -100.0), 100.0)
        b_e = exp(-tl.abs(b_y))
        b_dy = lower_bound * b_e / ((1.0 + b_e) * (1.0 + b_e)) * b_dg  # sigmoid(y) sigmoid(-y)
        return b_rate * b_dy, b_y * b_dy
    else:
        kept = b_g > RESET  # a reset has no gradient
        b_dx = tl.where(kept, -b_dg * scale_by_exp(rate, sigmoid(b_x), b_x), 0.0)
        return b_dx, tl.where(kept, b_g * b_dg, 0.0)


@triton.jit
def differentiate_cuts(
    b_dq,
    b_dk,
    b_rowk,
    b_dg,
    b_q,
    b_k,
    b_g,
    b_beta,
    b_dP,
    b_dkk,
    o_i,
    o_j,
    first,
    last,
    dtype: tl.constexpr,
    DOT: tl.constexpr,
):
    """Adds what comes through kk and P at the levels from `first` to before `last`;
    tiles as in add_cuts.
    """
    for level in range(first, last):
        b_f = find_cut_factors(b_g, o_i, o_j, level, dtype, DOT)
        apart = (o_i >> level) ^ (o_j >> level) == 1
        right = (o_i >> level) % 2 == 1
        b_w = tl.where(right, b_q, b_k)
        b_by = tl.where(right, b_beta, 1.0)
        b_from_q = b_f * multiply(tl.where(apart, b_dP, 0.0), round_to(b_w * b_f, dtype, DOT), DOT)
        b_row_k = b_f * multiply(
            tl.where(apart, b_dkk, 0.0), round_to(b_k * b_f * b_by, dtype, DOT), DOT
        )
        b_dq += tl.where(right, b_from_q, 0.0)
        b_rowk += tl.where(right, b_row_k, 0.0)
        b_dk += tl.where(right, 0.0, b_from_q + b_row_k)
        b_read = b_w * b_from_q + b_k * b_row_k * b_by
        b_dg = add_sums(b_dg, lies_between(o_i, o_j, level), b_read, dtype, DOT)
    return b_dq, b_dk, b_rowk, b_dg


@triton.jit(do_not_specialize=["tokens", "NT"])
def gradients_kernel(
    q,
    k,
    g,
    beta,
    A_log,
    dt_bias,
    position,
    rows,
    dP,
    dkk,
    OS,
    YS,
    US,
    SdS,
    dYV,
    dq,
    dk,
    dg,
    dbeta,
    dgates,
    chunk_start,
    chunk_length,
    scale,
    tokens,
    NT,
    beta_max,
    lower_bound,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    C: tl.constexpr,
    QR: tl.constexpr,
    KR: tl.constexpr,
    GR: tl.constexpr,
    BR: tl.constexpr,
    DQR: tl.constexpr,
    DKR: tl.constexpr,
    DGR: tl.constexpr,
    DBR: tl.constexpr,
    DOT: tl.constexpr,
):
    """Computes dq, dk, dg, dbeta and dgates of what `products_kernel` wrote,
    BK channels at a time.
    """
    pid = tl.program_id(0).to(tl.int64)
    i_c, i_h = pid // HV, pid % HV
    start, length = locate_chunk(i_c, tokens, NT, chunk_start, chunk_length, C)
    tile = i_c * HV + i_h
    if length <= 0:
        return
    o_c = tl.arange(0, C)
    m_t = o_c < length
    dtype = k.dtype.element_ty
    b_rq = tl.load(rows + tile * (ROWS * C) + 2 * C + o_c) * scale
    b_rk = tl.load(rows + tile * (ROWS * C) + 3 * C + o_c)
    b_beta = tl.load(rows + tile * (ROWS * C) + 7 * C + o_c)
    rate = None if A_log is None else load_rate(A_log, lower_bound, i_h)
    o_cc = tile * (C * C) + o_c[:, None] * C + o_c[None, :]
    o_i = tl.arange(0, 16)[None, :, None]
    o_j = tl.arange(0, 16)[None, None, :]
    o_16 = tile * (C * C) + tl.arange(0, C // 16)[:, None, None] * (16 * C + 16) + o_i * C + o_j
    b_dP_16 = tl.load(dP + o_16)
    b_dkk_16 = tl.load(dkk + o_16)
    b_own = tl.reshape(tl.sum(tl.where(o_i == o_j, b_dP_16.to(tl.float32), 0.0), axis=2), [C])
    b_written = tl.reshape(tl.sum(tl.where(o_i == o_j, -b_dkk_16.to(tl.float32), 0.0), axis=2), [C])

    dA = 0.0
    b_dbeta = tl.load(dYV + tile * C + o_c)
    for i_k in range(0, (K + BK - 1) // BK):
        o_k = i_k * BK + tl.arange(0, BK)
        m_k = o_k < K
        m = m_t[:, None] & m_k[None, :]
        p_q = start * QR + i_h // (HV // H) * K + o_c[:, None] * QR + o_k[None, :]
        p_k = start * KR + i_h // (HV // H) * K + o_c[:, None] * KR + o_k[None, :]
        p_g = start * GR + i_h * K + o_c[:, None] * GR + o_k[None, :]
        p_S = (start * HV + i_h) * K + o_c[:, None] * (HV * K) + o_k[None, :]
        p_bias = i_h * K + o_k[None, :]
        b_q = tl.load(q + p_q, mask=m, other=0.0)
        b_k = tl.load(k + p_k, mask=m, other=0.0)
        b_OS = tl.load(OS + p_S, mask=m, other=0.0)
        b_YS = tl.load(YS + p_S, mask=m, other=0.0)
        b_US = tl.load(US + p_S, mask=m, other=0.0)
        b_SdS = tl.load(SdS + tile * K + o_k, mask=m_k, other=0.0)
        # o_c, which the compiler does not know: it would keep masks
        o_r = o_c + tl.where(i_k < NT + K, 0, C)
        b_g, b_x = load_decays(g, rate, dt_bias, lower_bound, p_g, p_bias, m, m_k[None, :])
        b_g = forget_before(b_g, position, start, o_c, m_t)
        # the layout of products, which the levels have, costs nothing where a product makes it: of
        # 1
        b_one = tl.where(o_r[:, None] == o_c[None, :], 1.0, 0.0).to(dtype)
        b_q = multiply(b_one, b_q, DOT) * b_rq[:, None]
        b_k = multiply(b_one, b_k, DOT) * b_rk[:, None]
        b_gam, b_lam, b_last = find_factors(b_g, o_c, C, dtype)
        b_dq = b_gam * b_OS.to(tl.float32)
        b_rowk = -b_gam * b_YS.to(tl.float32)  # without beta
        b_dk = b_lam * b_US.to(tl.float32)
        b_dg = tl.zeros([C, BK], tl.float32) + (b_last * b_SdS)[None, :]
        b_dg = add_sums(b_dg, o_r[:, None] > o_c[None, :], b_k * b_dk, dtype, DOT)
        b_read = b_q * b_dq + b_k * b_rowk * b_beta[:, None]
        b_dg = add_sums(b_dg, o_r[:, None] <= o_c[None, :], b_read, dtype, DOT)
        b_dq += b_own[:, None] * b_k
        b_dk += b_own[:, None] * b_q
        b_dq, b_dk, b_rowk, b_dg = differentiate_cuts(
            b_dq, b_dk, b_rowk, b_dg, b_q, b_k, b_g * LOG2E, b_beta[:, None], tl.load(dP + o_cc),
            tl.load(dkk + o_cc), o_c[:, None], o_c[None, :], 4, C // 32 + 4, dtype, DOT,
        )  # fmt: skip
        blocks: tl.constexpr = [C // 16, 16, BK]
        b_dq, b_dk, b_rowk, b_dg = differentiate_cuts(
            tl.reshape(b_dq, blocks),
            tl.reshape(b_dk, blocks),
            tl.reshape(b_rowk, blocks),
            tl.reshape(b_dg, blocks),
            tl.reshape(b_q, blocks),
            tl.reshape(b_k, blocks),
            tl.reshape(b_g * LOG2E, blocks),
            tl.reshape(b_beta, [C // 16, 16, 1]),
            b_dP_16,
            b_dkk_16,
            o_i,
            o_j,
            0,
            4,
            dtype,
            DOT,
        )
        b_dq, b_dk = tl.reshape(b_dq, [C, BK]), tl.reshape(b_dk, [C, BK])
        b_rowk, b_dg = tl.reshape(b_rowk, [C, BK]), tl.reshape(b_dg, [C, BK])
        b_dbeta += tl.sum(tl.reshape(b_k, [C, BK]) * b_rowk, axis=1)
        b_dk += b_rowk * b_beta[:, None]
        p_dq = dq + start * DQR + i_h * K + o_c[:, None] * DQR + o_k[None, :]
        p_dk = dk + start * DKR + i_h * K + o_c[:, None] * DKR + o_k[None, :]
        tl.store(p_dq, round_to(scale * b_dq, dq.dtype.element_ty, DOT), mask=m)
        tl.store(p_dk, round_to(b_dk, dk.dtype.element_ty, DOT), mask=m)
        if A_log is not None:
            if lower_bound is None:  # again, since softplus leaves no registers for x
                b_g, b_x = load_decays(g, rate, dt_bias, lower_bound, p_g, p_bias, m, m_k[None, :])
                b_g = forget_before(b_g, position, start, o_c, m_t)
            b_dg, b_dA = differentiate_gates(b_dg, b_g, b_x, rate, lower_bound)
            b_dg = tl.where(m, b_dg, 0.0)
            tl.store(dgates + tile * (K + 1) + o_k, tl.sum(b_dg, axis=0), mask=m_k)
            dA += tl.sum(tl.sum(tl.where(m, b_dA, 0.0), axis=1), axis=0)
        p_dg = dg + start * DGR + i_h * K + o_c[:, None] * DGR + o_k[None, :]
        tl.store(p_dg, round_to(b_dg, dg.dtype.element_ty, DOT), mask=m)

    if A_log is not None:
        tl.store(dgates + tile * (K + 1) + K, dA)
    b_dbeta = tl.where(b_beta >= LEAST_DIVISOR, b_written / b_beta, b_dbeta)
    if beta_max is not None:
        b_z = tl.load(beta + start * BR + i_h + o_c * BR, mask=m_t, other=0.0).to(tl.float32)
        b_dbeta *= beta_max * sigmoid(b_z) * sigmoid(-b_z)
    p_dbeta = dbeta + start * DBR + i_h + o_c * DBR
    tl.store(p_dbeta, round_to(b_dbeta, dbeta.dtype.element_ty, DOT), mask=m_t)


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
    position,
    rows,
    S,
    U,
    dY,
    dS,
    carry,
    *,
    products,
    dq,
    dk,
    dv,
    dg,
    dbeta,
    dgates,
    scale,
    l2norm,
    beta_max,
    lower_bound,
    chunks: Chunks,
    config: Config,
):
    """Launches both kernels: fills products, dq and dk, dv, dg, dbeta; with A_log dgates.

    dq and dk are those of value heads, of the normalized q and k, but not where
    `hopper.adds_norms`: there, of q and k. lower_bound: as `prepare` takes it.
    """
    H, (HV, V), K = q.shape[2], do.shape[2:], q.shape[3]
    launch, grid, sizes = (
        config.products,
        (chunks.count * HV,),
        {"HV": HV, "K": K, "C": chunks.size},
    )
    places = chunks.start, chunks.length, scale, chunks.tokens, chunks.per_sequence
    products_kernel[grid](
        v,
        do,
        rows,
        S,
        U,
        dY,
        dS,
        carry,
        *products,
        dv,
        *places,
        KP=power_of_two(K),
        V=V,
        BV=launch.columns,
        VR=row_stride(v),
        DVR=row_stride(dv),
        TILES=1 if carry is None else carry.shape[2],
        PIPELINED=launch.stages > 1,
        DOT=config.dot,
        **sizes,
        **launch.options(),
    )
    strides = {"QR": q, "KR": k, "GR": g, "BR": beta}
    strides |= {"DQR": dq, "DKR": dk, "DGR": dg, "DBR": dbeta}
    sizes |= {name: row_stride(x) for name, x in strides.items()}
    arguments = (
        q,
        k,
        g,
        beta,
        A_log,
        dt_bias,
        position,
        rows,
        *products,
        dq,
        dk,
        dg,
        dbeta,
        dgates,
        *places,
        beta_max or None,
        None if A_log is None else lower_bound,
    )
    # a given g that breaks its promise counts as the same in forward and here
    bounded = l2norm or A_log is not None
    if bounded and hopper.takes(q, k, g, lower_bound, config):
        hopper.gradients_kernel[grid](
            *arguments,
            H=H,
            SLICES=hopper.slices_of_32(K),
            NORM=l2norm and H == HV,
            **sizes,
            **tile("kimi_hopper_gradients", K).options(),
        )
        return
    gradients_kernel[grid](
        *arguments,
        H=H,
        BK=config.gradients.columns,
        DOT=config.dot,
        **sizes,
        **config.gradients.options(),
    )


def variants(K: int, V: int, itemsize: int, quick: bool):
    """Yields what `compile_only` compiles of this module."""
    row = config(K, V, itemsize=itemsize, rule="kimi_")
    sizes = {
        "H": 2,
        "HV": 4,
        "K": K,
        "KP": power_of_two(K),
        "BK": row.prepare.columns,
        "V": V,
        "C": row.C,
    }
    sizes |= {"TILES": 2, "DOT": row.dot} | channel_rows_of(2, 4, K, V)
    for layout, tables in layouts(quick).items():
        states = ("dstate", "initial_state", "dinitial_state", "carry") if layout == "dense" else ()
        values = sizes | tables | dict.fromkeys(states)
        own = (
            sizes
            | tables
            | dict.fromkeys(("units", "writes"))
            | rows_of(4, 4, K, V)
            | dict.fromkeys(("QR", "KR"), 4 * K)
        )
        absent = ("dstate", "initial_state", "S", "U", "dY", "dS", "carry")
        for use, missing in {"": states, " segments": absent}.items():
            for heads, launch in by_heads("reverse", K, V, itemsize, rule="kimi_").items():
                form = own | dict.fromkeys(missing) | of_tile(launch)
                name, kernel = layout + use + heads, rule.reverse_scan_kernel
                yield Variant("kimi_reverse", name, kernel, rule.TYPES, launch, form)
        launch = row.products
        own = values | {"BV": launch.columns, "PIPELINED": launch.stages > 1}
        yield Variant("kimi_products", layout, products_kernel, TYPES, launch, own)
    for layout, tables in layouts_of(quick).items():
        for form, arguments in gates_of(quick).items():
            own = sizes | tables | arguments | {"BK": row.gradients.columns}
            yield Variant(
                "kimi_gradients", f"{layout}, {form}", gradients_kernel, TYPES, row.gradients, own
            )
            if form == "gates made" or not row.prepare.gluon:
                continue
            # of groups, dq and dk are in float32, as TYPES has them
            given = TYPES | {
                "*x": f"{TYPES['*x']} dq dk",
                "*fp32": TYPES["*fp32"].replace("dq dk ", ""),
            }
            for use, H, types in (("", 4, given), (", groups", 2, TYPES)):
                own = sizes | tables | arguments | channel_rows_of(H, 4, K, V)
                own |= {"SLICES": hopper.slices_of_32(K), "NORM": H == 4}
                if H == 4:  # dq and dk are then those of the layer, side by side
                    own |= {"DQR": own["QR"], "DKR": own["KR"]}
                kernel, launch = hopper.gradients_kernel, tile("kimi_hopper_gradients", K)
                name = "kimi_gradients_hopper"
                yield Variant(name, f"{layout}, {form}{use}", kernel, types, launch, own)
