"""Gated delta rule, forward, chunkwise: a parallel preparation of every chunk, then a scan over the chunks.

Math, for one chunk of C tokens and one value head, S the state at the chunk's start; b = cumsum(g),
gam_i = exp(b_i), D_ij = exp(b_i - b_j) for i >= j else 0, lam_i = exp(b_C - b_i):

    L  = strict_lower( diag(beta) K K^T )             [C, C]
    N  = (I + L)^-1 * D                               [C, C]   the gate is applied after the inverse
    P  = scale * lower(Q K^T) * D                     [C, C]
    X  = V - diag(gam) K S                            [C, V]   what is missing from memory
    U  = N diag(beta) X                               [C, V]   what this chunk really writes
    O  = scale * diag(gam) Q S + P U                  [C, V]
    S' = gam_C S + K^T diag(lam) U                    [K, V]

Source: arXiv:2412.06464. The gate may follow the inverse because D = diag(gam) 1 diag(1/gam) is a similarity;
it is always formed as exp of a masked difference, never as a quotient, which overflows.

Normalized queries and keys are never written: their factors r_q, r_k scale rows, so they fold into gam, lam
and the C x C matrices, and the products read q and k as they came. Nor are g and beta where they are given as
what a layer projects, a and z, [B, T, HV] both:

    g = -exp(A_log) softplus(a + dt_bias)         beta = beta_max sigmoid(z)

The scan holds the state transposed, Z = S^T [BV, K]. Every product on the serial chain then has the running
value on its left, which Hopper's tensor cores read from registers, and a tile from memory on its right; no
result of a product is ever transposed, which Triton 3.4 to 3.7.0 miscompiles on Hopper.

Layout: q, k [B, T, H, K]; v, o [B, T, HV, V]; g, beta [B, T, HV]; states [N, HV, K, V]; NC counts the chunks
of all sequences, and per chunk there are N, P [NC, HV, C, C]; rows [NC, HV, 8, C] float32 (tiles.ROWS says
which); h [NC, HV, V, K], the states at chunk starts; U [NC, HV, C, V]. A_log, dt_bias [HV].
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# (Triton's decorator adds the launch arguments and gives its own functions their types at compile time)
import triton
import triton.language as tl

from delta_trn.triton_kernels.chunks import Chunks
from delta_trn.triton_kernels.launch import Config, power_of_two
from delta_trn.triton_kernels.tiles import (
    ROWS,
    chunk_span,
    made_gates,
    product,
    rounded,
    sequence_span,
    split_product,
    unit_lower_inverse,
)


@triton.jit(do_not_specialize=["T", "NT"])
def prepare_kernel(
    q, k, g, beta, A_log, dt_bias, N_out, P_out, rows, chunk_start, chunk_length, scale, beta_max, T, NT,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, C: tl.constexpr,
    L2NORM: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr, SIGMOID: tl.constexpr,
    PACKED: tl.constexpr, WORDS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """One program per (chunk, value head): N, P and the rows. KP is K up to a power of two.

    GATE: g holds a, with BIAS there is a dt_bias. SIGMOID: beta holds z.
    """
    pid = tl.program_id(0).to(tl.int64)
    i_c, i_h = pid // HV, pid % HV
    i_hk = i_h // (HV // H)
    start, length = chunk_span(i_c, T, NT, chunk_start, chunk_length, C, PACKED)
    if length <= 0:
        return
    o_c = tl.arange(0, C)
    o_k = tl.arange(0, KP)
    m_t = o_c < length
    m_tk = m_t[:, None] & (o_k < K)[None, :]
    row = (start * H + i_hk) * K
    o_tk = o_c[:, None] * (H * K) + o_k[None, :]
    b_q = tl.load(q + row + o_tk, mask=m_tk, other=0.0)
    b_k = tl.load(k + row + o_tk, mask=m_tk, other=0.0)
    b_g = tl.load(g + start * HV + i_h + o_c * HV, mask=m_t, other=0.0).to(tl.float32)
    b_beta = tl.load(beta + start * HV + i_h + o_c * HV, mask=m_t, other=0.0).to(tl.float32)
    b_g, b_beta = made_gates(b_g, b_beta, A_log, dt_bias, i_h, beta_max, GATE, BIAS, SIGMOID)
    # what lies past the end neither forgets nor writes, whatever 0 becomes
    if GATE:
        b_g = tl.where(m_t, b_g, 0.0)
    if SIGMOID:
        b_beta = tl.where(m_t, b_beta, 0.0)

    # the running sum in two words: its differences keep their digits where strong and weak decays meet
    b_sum = tl.cumsum(b_g.to(tl.float64), axis=0)
    b_b = b_sum.to(tl.float32)
    b_low = (b_sum - b_b).to(tl.float32)
    if L2NORM:
        b_q32 = b_q.to(tl.float32)
        b_k32 = b_k.to(tl.float32)
        b_rq = tl.rsqrt(tl.sum(b_q32 * b_q32, axis=1) + 1e-6)
        b_rk = tl.rsqrt(tl.sum(b_k32 * b_k32, axis=1) + 1e-6)
    else:
        b_rq = tl.full([C], 1.0, tl.float32)
        b_rk = tl.full([C], 1.0, tl.float32)
    tile = i_c * HV + i_h
    b_last = tl.sum(tl.where(o_c == C - 1, b_sum, 0.0), axis=0)
    b_gam = tl.exp(b_b)
    b_lam = tl.exp((b_last - b_sum).to(tl.float32))
    p_rows = rows + tile * (ROWS * C) + o_c
    tl.store(p_rows, b_b)
    tl.store(p_rows + C, b_low)
    tl.store(p_rows + 2 * C, b_rq)
    tl.store(p_rows + 3 * C, b_rk)
    tl.store(p_rows + 4 * C, b_gam * b_rk * b_beta)
    tl.store(p_rows + 5 * C, scale * b_gam * b_rq)
    tl.store(p_rows + 6 * C, b_lam * b_rk)
    tl.store(p_rows + 7 * C, b_beta)

    o_cc = o_c[:, None] * C + o_c[None, :]
    strict = o_c[:, None] > o_c[None, :]
    b_KK = product(b_k, tl.trans(b_k), DOT)
    b_L = tl.where(strict, b_KK * ((b_beta * b_rk)[:, None] * b_rk[None, :]), 0.0)
    b_N = unit_lower_inverse(b_L, C)
    # the exponent is masked before exp: above the diagonal it is positive and may overflow
    b_D = (b_b[:, None] - b_b[None, :]) + (b_low[:, None] - b_low[None, :])
    b_D = tl.exp(tl.where(o_c[:, None] >= o_c[None, :], b_D, float("-inf")))
    b_N *= b_D
    b_hi = rounded(b_N, N_out.dtype.element_ty, DOT)
    p_N = N_out + tile * (WORDS * C * C) + o_cc
    tl.store(p_N, b_hi)
    if WORDS == 2:
        tl.store(p_N + C * C, rounded(b_N - b_hi.to(tl.float32), N_out.dtype.element_ty, DOT))
    b_P = product(b_q, tl.trans(b_k), DOT) * b_D * ((scale * b_rq)[:, None] * b_rk[None, :])
    tl.store(P_out + tile * (C * C) + o_cc, rounded(b_P, P_out.dtype.element_ty, DOT))


@triton.jit(do_not_specialize=["T", "NT", "NS", "L"])
def scan_kernel(
    q, k, v, N, P, rows, initial_state, o, final_state, transition, h, U, cu_seqlens, chunk_offsets, T, NT,
    NS, L,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, PACKED: tl.constexpr, HAS_INITIAL: tl.constexpr, WRITE_O: tl.constexpr,
    WRITE_FINAL: tl.constexpr, WRITE_H: tl.constexpr, TRANSITION: tl.constexpr, WORDS: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """One program per (sequence, value head, BV columns of V), over the chunks in order.

    WRITE_O gives the outputs; WRITE_H keeps h and U, which the backward pass needs. Backward calls it once
    more with WRITE_H alone where forward did not keep them. TRANSITION: K more columns follow those of V,
    which start as the identity and are told v = 0; they end as `transition` (see `segments`).
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    NX: tl.constexpr = NV + ((K + BV - 1) // BV if TRANSITION else 0)
    pid = tl.program_id(0).to(tl.int64)
    i_v = (pid % NX).to(tl.int32)
    i_h = (pid // NX) % HV
    i_n = pid // (NX * HV)
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
    dtype = k.dtype.element_ty

    o_x = o_v - NV * BV  # of the columns that follow
    b_Z = tl.zeros([BV, KP], dtype=tl.float32)  # the state, transposed
    if TRANSITION:
        b_Z += tl.where(o_x[:, None] == o_k[None, :], 1.0, 0.0)
    if HAS_INITIAL:
        p_state = initial_state + (i_n * HV + i_h) * (K * V)
        b_Z = tl.load(p_state + o_state, mask=m_vk, other=0.0).to(tl.float32)

    for i in range(0, tl.cdiv(length, C).to(tl.int32)):
        t = start + i * C
        tile = (first + i) * HV + i_h
        m_t = o_c < tl.minimum(length - i * C, C).to(tl.int32)
        m_ck = m_t[:, None] & m_k[None, :]
        m_vc = m_v[:, None] & m_t[None, :]
        b_k = tl.load(k + (t * H + i_hk) * K + o_ck, mask=m_ck, other=0.0)
        b_vT = tl.load(v + (t * HV + i_h) * V + o_vc, mask=m_vc, other=0.0)  # [BV, C]
        p_N = N + tile * (WORDS * C * C) + o_cc
        b_N = tl.load(p_N)
        b_low = tl.load(p_N + (WORDS - 1) * (C * C))
        p_rows = rows + tile * (ROWS * C)
        b_beta = tl.load(p_rows + 7 * C + o_c)
        b_Zd = rounded(b_Z, dtype, DOT)
        if WRITE_H:
            tl.store(h + tile * (V * K) + o_v[:, None] * K + o_k[None, :], b_Zd, mask=m_vk)

        b_YT = product(b_Zd, tl.trans(b_k), DOT)  # [BV, C] = S^T K^T
        b_XT = b_vT.to(tl.float32) * b_beta[None, :] - b_YT * tl.load(p_rows + 4 * C + o_c)[None, :]
        b_UT = split_product(b_XT, tl.trans(b_N), tl.trans(b_low), dtype, DOT)  # [BV, C]
        if WRITE_H:
            p_U = U + tile * (C * V) + o_c[None, :] * V + o_v[:, None]
            tl.store(p_U, rounded(b_UT, dtype, DOT), mask=m_v[:, None])
        if WRITE_O:
            b_q = tl.load(q + (t * H + i_hk) * K + o_ck, mask=m_ck, other=0.0)
            b_P = tl.load(P + tile * (C * C) + o_cc)
            b_OT = product(b_Zd, tl.trans(b_q), DOT) * tl.load(p_rows + 5 * C + o_c)[None, :]
            b_OT += product(rounded(b_UT, dtype, DOT), tl.trans(b_P), DOT)
            tl.store(o + (t * HV + i_h) * V + o_vc, rounded(b_OT, o.dtype.element_ty, DOT), mask=m_vc)
        b_UT *= tl.load(p_rows + 6 * C + o_c)[None, :]
        b_Z = b_Z * tl.exp(tl.load(p_rows + C - 1)) + product(rounded(b_UT, dtype, DOT), b_k, DOT)

    if WRITE_FINAL:
        tl.store(final_state + (i_n * HV + i_h) * (K * V) + o_state, b_Z, mask=m_vk)
    if TRANSITION:
        m_x = (o_x >= 0) & (o_x < K)
        p_x = transition + (i_n * HV + i_h) * (K * K) + o_k[None, :] * K + o_x[:, None]
        tl.store(p_x, b_Z, mask=m_x[:, None] & m_k[None, :])


def prepare(
    q, k, g, beta, A_log, dt_bias, N, P, rows, *, scale, l2norm, beta_max, chunks: Chunks, config: Config
):  # fmt: skip
    """Launch `prepare_kernel`: fills N, P, rows. Tensors as in the module's Layout, contiguous.

    A_log None: g is g; dt_bias None: there is none. beta_max 0: beta is beta.
    """
    H, K, HV = q.shape[2], q.shape[3], g.shape[2]
    prepare_kernel[(chunks.count * HV,)](
        q, k, g, beta, A_log, dt_bias, N, P, rows, chunks.start, chunks.length, scale, beta_max,
        chunks.tokens, chunks.per_sequence,
        H=H, HV=HV, K=K, KP=power_of_two(K), C=chunks.size, L2NORM=l2norm, GATE=A_log is not None,
        BIAS=dt_bias is not None, SIGMOID=beta_max > 0, PACKED=chunks.packed, WORDS=N.shape[2],
        DOT=config.dot, num_warps=config.prepare.warps, num_stages=config.prepare.stages,
    )  # fmt: skip


def scan(
    q, k, v, N, P, rows, initial_state, *, o, final_state, h, U, transition=None, chunks: Chunks,
    config: Config,
):  # fmt: skip
    """Launch `scan_kernel`: fills whichever of o, final_state, transition and (h, U) are not None."""
    H, K = q.shape[2:]
    HV, V = v.shape[2:]
    tile = config.scan
    columns = -(-V // tile.columns) + (0 if transition is None else -(-K // tile.columns))
    scan_kernel[(chunks.sequences * HV * columns,)](
        q, k, v, N, P, rows, initial_state, o, final_state, transition, h, U, chunks.cu_seqlens,
        chunks.offsets, chunks.tokens, chunks.per_sequence, chunks.segments, chunks.span,
        H=H, HV=HV, K=K, KP=power_of_two(K), V=V, BV=tile.columns, C=chunks.size, PACKED=chunks.packed,
        HAS_INITIAL=initial_state is not None, WRITE_O=o is not None, WRITE_FINAL=final_state is not None,
        WRITE_H=h is not None, TRANSITION=transition is not None, WORDS=N.shape[2], DOT=config.dot,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
