"""Kimi Delta Attention's gradients of all chunks for sm_90, in Gluon, where gates have a bound; what
it computes, of what bwd.products_kernel wrote: see bwd.

With g >= SAFE, 8 tokens decay a channel to exp(-40) at the least, which bfloat16 holds beside all
that stands with it, and so does the reciprocal. So no levels of cuts are needed. With b the sums of
g from the chunk's start, and m_I a whole power of 2 next to exp(b) behind the first 8 of the 16
tokens of block I,

    x_i = exp(b_i) / m_I,  y_j = m_J / exp(b_j),  i in I, j in J                  [C, K]
    exp(b_i - b_j) = x_i (m_I / m_J) y_j
    row_q_i = x_i sum_J (m_I / m_J) sum_{j in J} dP_ij (y k)_j,  and row_k so of dkk
    column_j = y_j sum_I (m_I / m_J) sum_{i in I} (dP_ij (x q)_i + dkk_ij (beta x k)_i)

where the inner sums are products of tiles, four for each of the three, and m_I / m_J <= 1 of blocks
I > J.

A pair i > j counts in dg_t where j < t <= i: in the sum over i >= t of what readers take, less the
sum over j >= t of what is taken from keys. Each product of such a pair is the same number in both,
of operands that were rounded once, since a power of 2 rounds nothing: so nothing is left of a pair
behind t but float32's roundings, and the pair of t - 1 and t, which is never below exp(SAFE) of its
undecayed self, stands above them.

One program has a chunk and a value head. A thread has 16 tokens of two channels, as in
prepare_hopper, and products come to it from the layout that wgmma gives them.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false,
# reportIndexIssue=false (Gluon adds the launch arguments and gives its own functions their types at
# compile time)
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from delta_trn.triton_kernels import tiles
from delta_trn.triton_kernels.gated_delta_rule_bwd import LEAST_DIVISOR
from delta_trn.triton_kernels.hopper.tiles import ACC16, ACC32, ACC64, FLAT, add, halves
from delta_trn.triton_kernels.kimi_delta_attention.prepare_hopper import (
    _divide,
    _exp2,
    by_blocks,
    takes,
    whole,
)
from delta_trn.triton_kernels.launch import Config
from delta_trn.triton_kernels.tiles import LN2, LOG2E, ROWS

__all__ = ["adds_norms", "gradients_kernel", "takes"]


def adds_norms(q, k, g, A_log, lower_bound, config: Config) -> bool:
    """Returns whether dq and dk of a call with normalized q and k are those of q and k."""
    return g.shape[2] == q.shape[2] and takes(q, k, g, A_log, lower_bound, config)


exp, load_rate, locate_chunk, sigmoid = (
    gluon.jit(f.fn) for f in (tiles.exp, tiles.load_rate, tiles.locate_chunk, tiles.sigmoid)
)
N = gl.constexpr(64)  # channels of a slice
LEFT = gl.constexpr(gl.DotOperandLayout(0, ACC64.value, 2))


@gluon.jit
def _quarters(s_a):
    """Returns the four tiles [64, 16] of a tile [64, 64] in shared memory, as left operands."""
    left, right = halves(s_a.load(ACC64), ACC32)
    a0, a1 = halves(left, ACC16)
    a2, a3 = halves(right, ACC16)
    a0 = gl.convert_layout(a0, LEFT, assert_trivial=True)
    a1 = gl.convert_layout(a1, LEFT, assert_trivial=True)
    a2 = gl.convert_layout(a2, LEFT, assert_trivial=True)
    a3 = gl.convert_layout(a3, LEFT, assert_trivial=True)
    return a0, a1, a2, a3


@gluon.jit
def _start(a, s_b, block: gl.constexpr):
    """Starts the product of a [64, 16] and 16 rows of s_b [64, N]."""
    zeros = gl.zeros([64, N], gl.float32, ACC64)
    return warpgroup_mma(a, s_b.slice(16 * block, 16, 0), zeros, use_acc=False, is_async=True)


@gluon.jit
def _add_block(acc, x, s_factor, block: gl.constexpr):
    """Returns acc + x [4, 16, N], times one factor for each block of rows and channel."""
    x = gl.reshape(x, [4, 16, N])
    return acc + x * s_factor.index(block).load(gl.SliceLayout(1, x.type.layout))[:, None, :]


@gluon.jit
def _add_blocks(x0, x1, x2, x3, s_factor, TALL: gl.constexpr):
    """Returns the sum of four tiles times their factors, where TALL has its elements."""
    zeros = gl.zeros([64, N], gl.float32, ACC64)
    acc = gl.reshape(zeros, [4, 16, N])
    acc = _add_block(acc, x0, s_factor, 0)
    acc = _add_block(acc, x1, s_factor, 1)
    acc = _add_block(acc, x2, s_factor, 2)
    acc = _add_block(acc, x3, s_factor, 3)
    acc = gl.convert_layout(gl.reshape(acc, [64, N]), ACC64, assert_trivial=True)
    return gl.convert_layout(acc, TALL)


@gluon.jit
def _find_rows(s_pairs, s_read, s_factor, TALL: gl.constexpr):
    """Returns what the rows of s_pairs take of keys, without the factor x of its row."""
    a0, a1, a2, a3 = _quarters(s_pairs)
    x0, x1 = _start(a0, s_read, 0), _start(a1, s_read, 1)
    x2, x3 = _start(a2, s_read, 2), _start(a3, s_read, 3)
    x0, x1, x2, x3 = warpgroup_mma_wait(0, deps=(x0, x1, x2, x3))
    return _add_blocks(x0, x1, x2, x3, s_factor, TALL)


@gluon.jit
def _find_columns(s_dP, s_dkk, s_q, s_k, s_factor, TALL: gl.constexpr):
    """Returns what is taken of each key, without the factor y of its row."""
    a0, a1, a2, a3 = _quarters(s_dP.permute((1, 0)))
    x0, x1, x2, x3 = _start(a0, s_q, 0), _start(a1, s_q, 1), _start(a2, s_q, 2), _start(a3, s_q, 3)
    b0, b1, b2, b3 = _quarters(s_dkk.permute((1, 0)))
    x0 = warpgroup_mma(b0, s_k.slice(0, 16, 0), x0, is_async=True)
    x1 = warpgroup_mma(b1, s_k.slice(16, 16, 0), x1, is_async=True)
    x2 = warpgroup_mma(b2, s_k.slice(32, 16, 0), x2, is_async=True)
    x3 = warpgroup_mma(b3, s_k.slice(48, 16, 0), x3, is_async=True)
    x0, x1, x2, x3 = warpgroup_mma_wait(0, deps=(x0, x1, x2, x3))
    return _add_blocks(x0, x1, x2, x3, s_factor, TALL)


@gluon.jit
def _load(p, m, LAYOUT: gl.constexpr):
    """Returns a tile in float32, as [4, 16, N]."""
    return by_blocks(gl.load(p, mask=m, other=0.0).to(gl.float32), LAYOUT)


@gluon.jit(do_not_specialize=["tokens", "NT"])
def gradients_kernel(
    q,
    k,
    g,
    beta,
    A_log,
    dt_bias,
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
    H: gl.constexpr,
    HV: gl.constexpr,
    K: gl.constexpr,
    SLICES: gl.constexpr,
    C: gl.constexpr,
    NORM: gl.constexpr,
):
    """Computes what bwd.gradients_kernel does, for 64 tokens in a chunk; 64 channels at a time.

    NORM: dq and dk are those of q and k as they came, else, in float32, of the normalized ones.
    """
    pid = gl.program_id(0).to(gl.int64)
    i_c, i_h = pid // HV, pid % HV
    start, length = locate_chunk(i_c, tokens, NT, chunk_start, chunk_length, C)
    if length <= 0:
        return
    length = length.to(gl.int32)
    dtype: gl.constexpr = k.dtype.element_ty
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    TALL: gl.constexpr = gl.BlockedLayout([16, 2], [1, 32], [4, 1], [1, 0])
    BLOCKS: gl.constexpr = gl.BlockedLayout([1, 16, 2], [1, 1, 32], [4, 1, 1], [2, 1, 0])
    SUMS: gl.constexpr = gl.SliceLayout(1, BLOCKS)
    SUM: gl.constexpr = gl.SliceLayout(0, SUMS)
    TOKENS: gl.constexpr = gl.SliceLayout(1, TALL)
    CHANNELS: gl.constexpr = gl.SliceLayout(0, TALL)
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    OPERAND: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, N], dtype)
    tile = i_c * HV + i_h

    o_i, o_j = gl.arange(0, C, gl.SliceLayout(1, LOAD)), gl.arange(0, C, gl.SliceLayout(0, LOAD))
    o_cc = tile * (C * C) + o_i[:, None] * C + o_j[None, :]
    below = o_i[:, None] > o_j[None, :]
    zero = gl.zeros([C, C], dtype, LOAD)
    s_dP = gl.allocate_shared_memory(dtype, [C, C], OPERAND)
    s_dkk = gl.allocate_shared_memory(dtype, [C, C], OPERAND)
    s_dP.store(gl.where(below, gl.load(dP + o_cc), zero))
    s_dkk.store(gl.where(below, gl.load(dkk + o_cc), zero))

    b_t, b_n = gl.arange(0, C, TOKENS), gl.arange(0, N, CHANNELS)
    m_t = b_t < length
    p_rows = rows + tile * (ROWS * C)
    b_rq, b_rk = gl.load(p_rows + 2 * C + b_t), gl.load(p_rows + 3 * C + b_t)
    b_beta = gl.load(p_rows + 7 * C + b_t)
    b_own = gl.load(dP + tile * (C * C) + b_t * (C + 1)).to(gl.float32)
    rate = exp(load_rate(A_log, lower_bound, i_h))

    s_sums = gl.allocate_shared_memory(gl.float32, [4 * N], FLAT)
    s_middle = gl.allocate_shared_memory(gl.float32, [4 * N], FLAT)
    s_taken = gl.allocate_shared_memory(gl.float32, [4 * N], FLAT)
    s_written = gl.allocate_shared_memory(gl.float32, [4 * N], FLAT)
    s_rows = gl.allocate_shared_memory(gl.float32, [4, 4, N], PLAIN)
    s_columns = gl.allocate_shared_memory(gl.float32, [4, 4, N], PLAIN)
    s_q = gl.allocate_shared_memory(dtype, [C, N], OPERAND)
    s_k = gl.allocate_shared_memory(dtype, [C, N], OPERAND)
    s_read = gl.allocate_shared_memory(dtype, [C, N], OPERAND)
    if NORM and SLICES > 1:
        s_dq = gl.allocate_shared_memory(gl.float32, [C, N], PLAIN)
        s_dk = gl.allocate_shared_memory(gl.float32, [C, N], PLAIN)
    block = gl.arange(0, 4, gl.SliceLayout(1, SUMS))[:, None]
    o_16 = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, BLOCKS)))[None, :, None]

    dA = 0.0
    b_kR = gl.load(dYV + tile * C + b_t)
    b_qdq, b_kdk = gl.zeros([C], gl.float32, TOKENS), gl.zeros([C], gl.float32, TOKENS)
    b_dq, b_dk = gl.zeros([C, N], gl.float32, TALL), gl.zeros([C, N], gl.float32, TALL)
    for i in range(SLICES):
        o_k = i * N + b_n
        m_k = o_k < K
        m = m_t[:, None] & m_k[None, :]
        o_q = (start * H + i_h // (HV // H)) * K + (b_t[:, None] * (H * K) + o_k[None, :])
        o_g = (start * HV + i_h) * K + (b_t[:, None] * (HV * K) + o_k[None, :])
        b_a = gl.load(g + o_g, mask=m, other=0.0).to(gl.float32)
        if dt_bias is not None:
            b_bias = gl.load(dt_bias + i_h * K + o_k, mask=m_k, other=0.0)
            b_a += b_bias.to(gl.float32)[None, :]
        b_a *= -LOG2E * rate  # 2^a is exp(-y) then
        b_g = gl.where(m_t[:, None], _divide(lower_bound * LOG2E, 1.0 + _exp2(b_a)), 0.0)
        b_g = by_blocks(b_g, BLOCKS)
        b_sum = gl.associative_scan(b_g, 1, add)
        b_half = gl.sum(gl.where(o_16 < 8, b_g, 0.0), axis=1)
        b_s = gl.sum(b_g, axis=1)
        gl.barrier()
        s_sums.store(gl.reshape(b_s, [4 * N]))
        gl.barrier()
        b_0, b_1 = s_sums.slice(0, N).load(SUM)[None, :], s_sums.slice(N, N).load(SUM)[None, :]
        b_2, b_3 = (
            s_sums.slice(2 * N, N).load(SUM)[None, :],
            s_sums.slice(3 * N, N).load(SUM)[None, :],
        )
        b_start = (
            gl.where(block > 0, b_0, 0.0)
            + gl.where(block > 1, b_1, 0.0)
            + gl.where(block > 2, b_2, 0.0)
        )
        b_all = b_0 + b_1 + b_2 + b_3
        b_m = gl.floor(b_start + b_half + 0.5)
        s_middle.store(gl.reshape(b_m, [4 * N]))
        b_e = b_sum + (b_start - b_m)[:, None, :]
        b_x, b_y = _exp2(b_e), _exp2(-b_e)
        b_q = _load(q + o_q, m, BLOCKS) * by_blocks(gl.expand_dims(scale * b_rq, 1) + gl.zeros([C, N], gl.float32, TALL), BLOCKS)
        b_k = _load(k + o_q, m, BLOCKS) * by_blocks(gl.expand_dims(b_rk, 1) + gl.zeros([C, N], gl.float32, TALL), BLOCKS)
        b_strength = by_blocks(gl.expand_dims(b_beta, 1) + gl.zeros([C, N], gl.float32, TALL), BLOCKS)
        s_q.store(whole((b_q * b_x).to(dtype), TALL))
        s_k.store(whole((b_k * b_x * b_strength).to(dtype), TALL))
        s_read.store(whole((b_k * b_y).to(dtype), TALL))
        fence_async_shared()
        gl.barrier()
        for j in gl.static_range(4):
            b_other = s_middle.slice(j * N, N).load(SUM)[None, :]
            s_rows.index(j).store(gl.where(block >= j, _exp2(b_m - b_other), 0.0))
            s_columns.index(j).store(gl.where(block <= j, _exp2(b_other - b_m), 0.0))
        gl.barrier()

        f_gam, f_lam = _exp2(b_m)[:, None, :], _exp2(b_all - b_m)[:, None, :]
        b_uq = by_blocks(_find_rows(s_dP, s_read, s_rows, TALL), BLOCKS)
        b_uq += f_gam * _load(OS + o_g, m, BLOCKS)
        b_uk = by_blocks(_find_rows(s_dkk, s_read, s_rows, TALL), BLOCKS)
        b_uk -= f_gam * _load(YS + o_g, m, BLOCKS)
        b_uc = by_blocks(_find_columns(s_dP, s_dkk, s_q, s_k, s_columns, TALL), BLOCKS)
        b_t_ = f_lam * _load(US + o_g, m, BLOCKS)
        h_q = by_blocks(s_q.load(TALL).to(gl.float32), BLOCKS)
        h_k = by_blocks(s_k.load(TALL).to(gl.float32), BLOCKS)
        h_read = by_blocks(s_read.load(TALL).to(gl.float32), BLOCKS)
        b_taken = h_q * b_uq + h_k * b_uk - h_read * b_uc
        b_written = h_read * b_t_
        b_o = by_blocks(gl.expand_dims(b_own, 1) + gl.zeros([C, N], gl.float32, TALL), BLOCKS)
        b_dq3 = scale * (b_o * b_k + b_x * b_uq)
        b_R = b_x * b_uk
        b_dk3 = b_o * b_q + b_strength * b_R + b_y * (b_uc + b_t_)
        b_kR += gl.sum(whole(b_k * b_R, TALL), axis=1)
        b_dq, b_dk = whole(b_dq3, TALL), whole(b_dk3, TALL)
        if NORM:
            b_qdq += gl.sum(whole(b_q * b_dq3, TALL), axis=1)
            b_kdk += gl.sum(whole(b_k * b_dk3, TALL), axis=1)
            if SLICES > 1:
                if i == 0:
                    s_dq.store(b_dq)
                    s_dk.store(b_dk)
        else:
            gl.store(dq + o_g, b_dq.to(dq.dtype.element_ty), mask=m)
            gl.store(dk + o_g, b_dk.to(dk.dtype.element_ty), mask=m)

        s_taken.store(gl.reshape(gl.sum(b_taken, axis=1), [4 * N]))
        s_written.store(gl.reshape(gl.sum(b_written, axis=1), [4 * N]))
        gl.barrier()
        b_SdS = gl.load(SdS + tile * K + o_k, mask=m_k, other=0.0)
        b_rest = gl.convert_layout(b_SdS, SUM)[None, :] * _exp2(b_all)
        for j in gl.static_range(4):
            b_rest += gl.where(block < j, s_taken.slice(j * N, N).load(SUM)[None, :], 0.0)
            b_rest += gl.where(block > j, s_written.slice(j * N, N).load(SUM)[None, :], 0.0)
        b_dg = gl.associative_scan(b_taken, 1, add, reverse=True) + b_rest[:, None, :]
        b_dg += gl.associative_scan(b_written, 1, add) - b_written
        b_dg = whole(b_dg, TALL)

        b_a = gl.load(g + o_g, mask=m, other=0.0).to(gl.float32)
        if dt_bias is not None:
            b_a += b_bias.to(gl.float32)[None, :]
        # beyond 100 a sigmoid or its counterpart is 0, and infinity times 0 would be NaN
        b_a = gl.minimum(gl.maximum(b_a * (LOG2E * rate), -144.0), 144.0)
        b_e2 = _exp2(-gl.abs(b_a))
        b_r = _divide(1.0, 1.0 + b_e2)
        b_dy = gl.where(m, lower_bound * b_e2 * b_r * b_r * b_dg, 0.0)
        b_da = rate * b_dy
        dA += gl.sum(gl.sum(b_a * b_dy, axis=1), axis=0)
        gl.store(dgates + tile * (K + 1) + o_k, gl.sum(b_da, axis=0), mask=m_k)
        gl.store(dg + o_g, b_da.to(dg.dtype.element_ty), mask=m)

    gl.store(dgates + tile * (K + 1) + K, LN2 * dA)
    o_c = gl.arange(0, C, LINE)
    b_diagonal = -gl.load(dkk + tile * (C * C) + o_c * (C + 1)).to(gl.float32)
    b_dbeta = gl.convert_layout(b_kR, LINE)
    b_strong = gl.load(p_rows + 7 * C + o_c)
    b_dbeta = gl.where(b_strong >= LEAST_DIVISOR, b_diagonal / b_strong, b_dbeta)
    p_beta = start * HV + i_h + o_c * HV
    if beta_max is not None:
        b_z = gl.load(beta + p_beta, mask=o_c < length, other=0.0).to(gl.float32)
        b_dbeta *= beta_max * sigmoid(b_z) * sigmoid(-b_z)
    gl.store(dbeta + p_beta, b_dbeta.to(dbeta.dtype.element_ty), mask=o_c < length)
    if NORM:
        b_qdq *= 1.0 / scale
        for j in gl.static_range(SLICES):
            i: gl.constexpr = SLICES - 1 - j
            o_k = i * N + b_n
            m = m_t[:, None] & (o_k < K)[None, :]
            o_q = (start * H + i_h) * K + (b_t[:, None] * (H * K) + o_k[None, :])
            if j > 0:
                b_dq, b_dk = s_dq.load(TALL), s_dk.load(TALL)
            b_q = gl.load(q + o_q, mask=m, other=0.0).to(gl.float32)
            b_dq = b_rq[:, None] * (b_dq - b_q * (b_rq * b_qdq)[:, None])
            b_k = gl.load(k + o_q, mask=m, other=0.0).to(gl.float32)
            b_dk = b_rk[:, None] * (b_dk - b_k * (b_rk * b_kdk)[:, None])
            gl.store(dq + o_q, b_dq.to(dq.dtype.element_ty), mask=m)
            gl.store(dk + o_q, b_dk.to(dk.dtype.element_ty), mask=m)
