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
from delta_trn.triton_kernels.hopper.tiles import FLAT, add
from delta_trn.triton_kernels.kimi_delta_attention.prepare_hopper import _exp2, takes
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
ACC = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, ACC.value, 2))
# a thread's 8 tokens of two channels; as 8 blocks of 8 tokens; their sums; what a block has of them
TALL = gl.constexpr(gl.BlockedLayout([16, 2], [1, 32], [4, 1], [1, 0]))
BLOCKS = gl.constexpr(gl.BlockedLayout([1, 16, 2], [1, 1, 32], [4, 1, 1], [2, 1, 0]))
SUMS = gl.constexpr(gl.SliceLayout(1, BLOCKS.value))
SUM = gl.constexpr(gl.SliceLayout(0, SUMS.value))
TOKENS = gl.constexpr(gl.SliceLayout(1, TALL.value))
CHANNELS = gl.constexpr(gl.SliceLayout(0, TALL.value))
# float32 as products leave it, to be read by rows: eight columns of four rows next to each other
# lie in different banks
HELD = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def _invert(x):
    """Returns 1 / x to a rounding; 0 where that is below 2^-126."""
    form: gl.constexpr = "rcp.approx.ftz.f32 $0, $1;"
    return gl.inline_asm_elementwise(form, "=f,f", [x], gl.float32, is_pure=True, pack=1)


@gluon.jit
def by_blocks(x):
    """Returns a tile [64, N] as [4, 16, N], without a move."""
    return gl.convert_layout(gl.reshape(x, [4, 16, N]), BLOCKS, assert_trivial=True)


@gluon.jit
def whole(x):
    """Returns a tile [4, 16, N] as [64, N], without a move."""
    return gl.convert_layout(gl.reshape(x, [64, N]), TALL, assert_trivial=True)


@gluon.jit
def _half(x, second: gl.constexpr):
    """Returns the first or the second half of the tokens of x [4, size, N]."""
    x = gl.permute(gl.reshape(x, [4, 2, x.shape[1] // 2, N]), [0, 2, 3, 1])
    x, y = x.split()
    return y if second else x


@gluon.jit
def _take(x, place: gl.constexpr):
    """Returns token `place` of every block of x [4, 16, N], without a move."""
    x = _half(_half(_half(_half(x, place & 8), place & 4), place & 2), place & 1)
    return gl.convert_layout(gl.reshape(x, [4, N]), SUMS, assert_trivial=True)


@gluon.jit
def _start(a, s_b, block: gl.constexpr):
    """Starts the product of a [64, 16] and 16 rows of s_b [64, N]."""
    zeros = gl.zeros([64, N], gl.float32, ACC)
    return warpgroup_mma(a, s_b.slice(16 * block, 16, 0), zeros, use_acc=False, is_async=True)


@gluon.jit
def _scale(x, s_factor):
    """Returns x [64, N] as [4, 16, N], times one factor for each 16 rows and channel."""
    x = gl.reshape(x, [4, 16, N])
    return x * s_factor.load(gl.SliceLayout(1, x.type.layout))[:, None, :]


@gluon.jit
def _move(acc, s_acc):
    """Returns acc [4, 16, N] where TALL has its elements."""
    gl.barrier()
    s_acc.store(gl.convert_layout(gl.reshape(acc, [64, N]), ACC, assert_trivial=True))
    gl.barrier()
    return s_acc.load(TALL)


@gluon.jit
def _find_rows(s_pairs, s_read, s_factor, s_acc, zero):
    """Returns what the rows of s_pairs take of keys, without the factor x of its row."""
    gl.barrier()
    x = _start(s_pairs.slice(0, 16, 1).load(LEFT), s_read, 0)
    acc = _scale(warpgroup_mma_wait(0, deps=(x,)), s_factor.index(zero))
    x = _start(s_pairs.slice(16, 16, 1).load(LEFT), s_read, 1)
    acc += _scale(warpgroup_mma_wait(0, deps=(x,)), s_factor.index(1 + zero))
    x = _start(s_pairs.slice(32, 16, 1).load(LEFT), s_read, 2)
    acc += _scale(warpgroup_mma_wait(0, deps=(x,)), s_factor.index(2 + zero))
    x = _start(s_pairs.slice(48, 16, 1).load(LEFT), s_read, 3)
    acc += _scale(warpgroup_mma_wait(0, deps=(x,)), s_factor.index(3 + zero))
    return _move(acc, s_acc)


@gluon.jit
def _start_both(s_dP, s_dkk, s_q, s_k, block: gl.constexpr):
    """Starts what the 16 readers of a block take of keys, by queries and by keys."""
    x = _start(s_dP.slice(16 * block, 16, 0).permute((1, 0)).load(LEFT), s_q, block)
    a = s_dkk.slice(16 * block, 16, 0).permute((1, 0)).load(LEFT)
    return warpgroup_mma(a, s_k.slice(16 * block, 16, 0), x, is_async=True)


@gluon.jit
def _find_columns(s_dP, s_dkk, s_q, s_k, s_factor, s_acc, zero):
    """Returns what is taken of each key, without the factor y of its row."""
    gl.barrier()
    x = _start_both(s_dP, s_dkk, s_q, s_k, 0)
    acc = _scale(warpgroup_mma_wait(0, deps=(x,)), s_factor.index(zero))
    x = _start_both(s_dP, s_dkk, s_q, s_k, 1)
    acc += _scale(warpgroup_mma_wait(0, deps=(x,)), s_factor.index(1 + zero))
    x = _start_both(s_dP, s_dkk, s_q, s_k, 2)
    acc += _scale(warpgroup_mma_wait(0, deps=(x,)), s_factor.index(2 + zero))
    x = _start_both(s_dP, s_dkk, s_q, s_k, 3)
    acc += _scale(warpgroup_mma_wait(0, deps=(x,)), s_factor.index(3 + zero))
    return _move(acc, s_acc)


@gluon.jit
def _add_pairs(x):
    """Returns the sums over pairs of channels of x [64, N], which a thread has."""
    return gl.sum(gl.reshape(x, [64, N // 2, 2]), axis=2)


@gluon.jit
def _sum_channels(s_x, LAYOUT: gl.constexpr):
    """Returns the sums [64] over the rows of s_x [64, N / 2], which was just stored."""
    gl.barrier()
    b_sum = gl.sum(s_x.load(gl.BlockedLayout([1, 16], [16, 2], [4, 1], [1, 0])), axis=1)
    return gl.convert_layout(b_sum, LAYOUT)


@gluon.jit
def _finish(
    x, dx, b_dx, s_first, b_r, square, length, s_pairs,
    K: gl.constexpr, SLICES: gl.constexpr, STRIDE: gl.constexpr,
):  # fmt: skip
    """Stores the gradient of x of that of r x, whose last slice is b_dx, and the first in s_first.

    r = 1 / sqrt(<x, x> + 1e-6); b_r times a factor of which `square` is the square of 1 / r's.
    """
    o_t, o_n = gl.arange(0, 64, TOKENS), gl.arange(0, N, CHANNELS)
    o = (o_t // 16 * 16)[:, None] * STRIDE + o_n[None, :]
    j = (o_t % 16)[:, None] * STRIDE
    LAST: gl.constexpr = (SLICES - 1) * N
    m_t = (o_t < length)[:, None]
    m = m_t & (LAST + o_n < K)[None, :] if K % N != 0 else m_t
    b_x = gl.load(x + LAST + o + j, mask=m, other=0.0).to(gl.float32)
    b_along = _add_pairs(b_x * b_dx)
    if SLICES > 1:
        b_first = gl.load(x + o + j, mask=m_t, other=0.0).to(gl.float32)
        b_dfirst = s_first.load(TALL)
        b_along += _add_pairs(b_first * b_dfirst)
    gl.barrier()
    s_pairs.store(b_along)
    b_along = _sum_channels(s_pairs, TOKENS) * (b_r * b_r * square)
    b_dx = b_r[:, None] * (b_dx - b_x * b_along[:, None])
    gl.store(dx + LAST + o + j, b_dx.to(dx.dtype.element_ty), mask=m)
    if SLICES > 1:
        b_dx = b_r[:, None] * (b_dfirst - b_first * b_along[:, None])
        gl.store(dx + o + j, b_dx.to(dx.dtype.element_ty), mask=m_t)


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
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    FACTOR: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0])
    OPERAND: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, N], dtype)
    tile = i_c * HV + i_h

    o_i, o_j = gl.arange(0, C, gl.SliceLayout(1, LOAD)), gl.arange(0, C, gl.SliceLayout(0, LOAD))
    o_cc = tile * (C * C) + (o_i[:, None] * C + o_j[None, :])
    below = o_i[:, None] > o_j[None, :]
    none = gl.zeros([C, C], dtype, LOAD)
    a_dP = gl.allocate_shared_memory(dtype, [1, C, C], OPERAND)
    a_dkk = gl.allocate_shared_memory(dtype, [1, C, C], OPERAND)
    a_dP.index(0).store(gl.where(below, gl.load(dP + o_cc), none))
    a_dkk.index(0).store(gl.where(below, gl.load(dkk + o_cc), none))

    o_t, o_n = gl.arange(0, C, TOKENS), gl.arange(0, N, CHANNELS)
    p_rows = rows + tile * (ROWS * C)
    o_c = gl.arange(0, C, LINE)
    a_tokens = gl.allocate_shared_memory(gl.float32, [4, C], FLAT)

    a_tokens.index(0).store(gl.load(p_rows + 2 * C + o_c) * scale)
    a_tokens.index(1).store(gl.load(p_rows + 3 * C + o_c))
    a_tokens.index(2).store(gl.load(p_rows + 7 * C + o_c))
    a_tokens.index(3).store(gl.load(dP + tile * (C * C) + o_c * (C + 1)).to(gl.float32))
    rate = LOG2E * exp(load_rate(A_log, lower_bound, i_h))

    # with an index of which the compiler knows nothing: of what it knew, it would keep every
    # address
    a_sums = gl.allocate_shared_memory(gl.float32, [1, 4 * N], FLAT)
    a_taken = gl.allocate_shared_memory(gl.float32, [1, 4 * N], FLAT)
    a_written = gl.allocate_shared_memory(gl.float32, [1, 4 * N], FLAT)
    a_rows = gl.allocate_shared_memory(gl.float32, [4, 4, N], PLAIN)
    a_columns = gl.allocate_shared_memory(gl.float32, [4, 4, N], PLAIN)
    a_q = gl.allocate_shared_memory(dtype, [1, C, N], OPERAND)
    a_k = gl.allocate_shared_memory(dtype, [1, C, N], OPERAND)
    a_read = gl.allocate_shared_memory(dtype, [1, C, N], OPERAND)
    a_acc = gl.allocate_shared_memory(gl.float32, [1, C, N], HELD)
    if NORM:
        s_dq = gl.allocate_shared_memory(gl.float32, [1, C, N], PLAIN)
        s_dk = gl.allocate_shared_memory(gl.float32, [1, C, N], PLAIN)

    PAIRS: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    s_pairs = gl.allocate_shared_memory(gl.float32, [C, N // 2], PAIRS)
    b_dA = gl.zeros([4, N], gl.float32, SUMS)
    for i in range(SLICES):
        zero = gl.where(i + NT < 0, 1, 0)
        s_sums, s_taken, s_written = a_sums.index(zero), a_taken.index(zero), a_written.index(zero)
        s_q, s_k, s_read = a_q.index(zero), a_k.index(zero), a_read.index(zero)
        s_acc = a_acc.index(zero)
        s_dP, s_dkk = a_dP.index(zero), a_dkk.index(zero)
        block = gl.arange(0, 4, gl.SliceLayout(1, SUMS))[:, None] + zero
        o_b = gl.arange(0, 4, gl.SliceLayout(1, FACTOR))[:, None] + zero
        b_t = o_t + zero
        o_k = i * N + o_n
        m_k = o_k < K
        m = (b_t < length)[:, None]
        if K % N != 0:
            m = m & m_k[None, :]
        # a thread's first token, and how far the others are: as part of the instruction
        first = (o_t // 16 * 16 + zero)[:, None]
        p_q = (start * H + i_h // (HV // H)) * K + i * N
        p_g = (start * HV + i_h) * K + i * N
        o_q = first * (H * K) + o_n[None, :]
        o_g = first * (HV * K) + o_n[None, :]
        j_q, j_g = (o_t % 16)[:, None] * (H * K), (o_t % 16)[:, None] * (HV * K)
        b_a = gl.load(g + p_g + o_g + j_g, mask=m, other=0.0).to(gl.float32)
        if dt_bias is not None:
            b_bias = gl.load(dt_bias + i_h * K + o_k, mask=m_k, other=0.0).to(gl.float32)
            b_a += b_bias[None, :]
        # times log2(e)
        b_g = (lower_bound * LOG2E) * _invert(1.0 + _exp2(b_a * -rate))
        b_g = by_blocks(gl.where((b_t < length)[:, None], b_g, 0.0))
        b_e = gl.associative_scan(b_g, 1, add)
        s_sums.store(gl.reshape(_take(b_e, 15), [4 * N]))
        gl.barrier()
        b_all = gl.zeros([4, N], gl.float32, SUMS)
        # the sums up to the middle of a block
        b_m = _take(b_e, 7)
        b_start = b_all
        for j in gl.static_range(4):
            b_s = s_sums.slice(j * N, N).load(SUM)[None, :]
            b_all += b_s
            b_start += gl.where(block > j, b_s, 0.0)
        b_m += b_start
        b_m = gl.floor(b_m + 0.5)
        gl.barrier()
        s_sums.store(gl.reshape(b_m, [4 * N]))
        b_e += (b_start - b_m)[:, None, :]
        b_x, b_y = _exp2(b_e), whole(_exp2(-b_e))
        b_q = gl.load(q + p_q + o_q + j_q, mask=m, other=0.0).to(gl.float32)
        s_q.store((b_q * a_tokens.index(0 + zero).load(TOKENS)[:, None] * whole(b_x)).to(dtype))
        b_k = gl.load(k + p_q + o_q + j_q, mask=m, other=0.0).to(gl.float32)
        b_k *= a_tokens.index(1 + zero).load(TOKENS)[:, None]
        s_k.store((b_k * whole(b_x) * a_tokens.index(2 + zero).load(TOKENS)[:, None]).to(dtype))
        s_read.store((b_k * b_y).to(dtype))
        fence_async_shared()
        gl.barrier()
        b_own_m = s_sums.reshape([4, N]).load(FACTOR)
        for j in gl.static_range(4):
            b_other = s_sums.slice(j * N, N).load(gl.SliceLayout(0, FACTOR))[None, :]
            b_rows = gl.where(o_b >= j, _exp2(b_own_m - b_other), 0.0)
            a_rows.index(j + zero).store(b_rows)
            b_columns = gl.where(o_b <= j, _exp2(b_other - b_own_m), 0.0)
            a_columns.index(j + zero).store(b_columns)
        gl.barrier()

        b_u = by_blocks(_find_columns(s_dP, s_dkk, s_q, s_k, a_columns, s_acc, zero))
        b_US = gl.load(US + p_g + o_g + j_g, mask=m, other=0.0).to(gl.float32)
        b_w = _exp2(b_all - b_m)[:, None, :] * by_blocks(b_US)
        b_read = by_blocks(s_read.load(TALL).to(gl.float32))
        b_dk = whole(_invert(b_x) * (b_u + b_w))
        b_w *= b_read
        b_written = gl.sum(b_w, axis=1)
        # what a token writes, less what its pairs take, for the sums before the next
        b_w += b_read * b_u
        b_q = gl.load(q + p_q + o_q + j_q, mask=m, other=0.0).to(gl.float32)
        b_own = a_tokens.index(3 + zero).load(TOKENS) * a_tokens.index(zero).load(TOKENS)
        b_dk += b_own[:, None] * b_q
        b_u = by_blocks(_find_rows(s_dkk, s_read, a_rows, s_acc, zero))
        b_YS = gl.load(YS + p_g + o_g + j_g, mask=m, other=0.0).to(gl.float32)
        b_u -= _exp2(b_m)[:, None, :] * by_blocks(b_YS)
        b_w -= by_blocks(s_k.load(TALL).to(gl.float32)) * b_u
        b_R = whole(b_x * b_u)
        b_k = gl.load(k + p_q + o_q + j_q, mask=m, other=0.0).to(gl.float32)
        b_kR = _add_pairs(b_k * b_R)
        if i > 0:
            b_kR += s_pairs.load(b_kR.type.layout)
        b_dk += a_tokens.index(2 + zero).load(TOKENS)[:, None] * b_R
        if not NORM:
            gl.store(dk + p_g + o_g + j_g, b_dk.to(dk.dtype.element_ty), mask=m)
        s_pairs.store(b_kR)
        if i < SLICES - 1:
            if NORM:
                s_dk.index(0).store(b_dk)
        else:
            b_dbeta = _sum_channels(s_pairs, LINE) * a_tokens.index(1 + zero).load(LINE)
            b_dbeta += gl.load(dYV + tile * C + o_c)
            b_strength = a_tokens.index(2 + zero).load(LINE)
            b_diagonal = -gl.load(dkk + tile * (C * C) + o_c * (C + 1)).to(gl.float32)
            b_dbeta = gl.where(b_strength >= LEAST_DIVISOR, b_diagonal / b_strength, b_dbeta)
            p_beta = start * HV + i_h + o_c * HV
            if beta_max is not None:
                b_z = gl.load(beta + p_beta, mask=o_c < length, other=0.0).to(gl.float32)
                b_dbeta *= beta_max * sigmoid(b_z) * sigmoid(-b_z)
            gl.store(dbeta + p_beta, b_dbeta.to(dbeta.dtype.element_ty), mask=o_c < length)
            if NORM:
                b_r = a_tokens.index(1 + zero).load(TOKENS)
                p_k = (start * H + i_h) * K
                _finish(k + p_k, dk + p_k, b_dk, s_dk.index(zero), b_r, 1.0, length, s_pairs, K, SLICES, H * K)
        b_u = by_blocks(_find_rows(s_dP, s_read, a_rows, s_acc, zero))
        b_OS = gl.load(OS + p_g + o_g + j_g, mask=m, other=0.0).to(gl.float32)
        b_u += _exp2(b_m)[:, None, :] * by_blocks(b_OS)
        b_w -= by_blocks(s_q.load(TALL).to(gl.float32)) * b_u
        b_k = gl.load(k + p_q + o_q + j_q, mask=m, other=0.0).to(gl.float32)
        b_own = a_tokens.index(3 + zero).load(TOKENS) * a_tokens.index(1 + zero).load(TOKENS)
        b_dq = b_own[:, None] * b_k + whole(b_x * b_u)
        if not NORM:
            gl.store(dq + p_g + o_g + j_g, (scale * b_dq).to(dq.dtype.element_ty), mask=m)
        elif i < SLICES - 1:
            s_dq.index(0).store(b_dq)
        else:
            b_r = a_tokens.index(zero).load(TOKENS)
            p_q1 = (start * H + i_h) * K
            square = 1.0 / (scale * scale)
            _finish(q + p_q1, dq + p_q1, b_dq, s_dq.index(zero), b_r, square, length, s_pairs, K, SLICES, H * K)

        s_written.store(gl.reshape(b_written, [4 * N]))
        s_taken.store(gl.reshape(b_written - gl.sum(b_w, axis=1), [4 * N]))
        gl.barrier()
        b_SdS = gl.load(SdS + tile * K + o_k, mask=m_k, other=0.0)
        b_rest = gl.convert_layout(b_SdS, SUM)[None, :] * _exp2(b_all)
        for j in gl.static_range(4):
            b_rest += gl.where(block <= j, s_taken.slice(j * N, N).load(SUM)[None, :], 0.0)
            b_rest += gl.where(block > j, s_written.slice(j * N, N).load(SUM)[None, :], 0.0)
        b_dg = whole(gl.associative_scan(b_w, 1, add) - b_w + b_rest[:, None, :])

        b_a = gl.load(g + p_g + o_g + j_g, mask=m, other=0.0).to(gl.float32)
        if dt_bias is not None:
            b_a += b_bias[None, :]
        # beyond 150 a sigmoid or its counterpart is 0, and infinity times 0 would be NaN
        b_a = gl.minimum(gl.maximum(b_a * -rate, -150.0), 150.0)
        b_e2 = _exp2(-gl.abs(b_a))
        b_r = _invert(1.0 + b_e2)
        b_dy = gl.where(m, (b_e2 * b_r) * (lower_bound * b_r) * b_dg, 0.0)
        b_dA += gl.sum(by_blocks(b_a * b_dy), axis=1)
        b_dy *= LN2 * rate
        gl.store(dgates + tile * (K + 1) + o_k, gl.sum(b_dy, axis=0), mask=m_k)
        gl.store(dg + p_g + o_g + j_g, b_dy.to(dg.dtype.element_ty), mask=m)

    dA = gl.sum(gl.sum(b_dA, axis=0), axis=0)
    gl.store(dgates + tile * (K + 1) + K, -LN2 * dA)
