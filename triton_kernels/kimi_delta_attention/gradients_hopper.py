"""Kimi Delta Attention's gradients of all chunks for sm_90, in Gluon, where gates have a bound; what
it computes, of what bwd.products_kernel wrote: see bwd.

With g >= SAFE, 8 tokens decay a channel to exp(-40) at the least, so that within a block of 16
tokens no cut is needed. With b the sums of g from the chunk's start and b_m that of the first 8
tokens of a block,

    x_i = exp(b_i - b_m),  y_j = exp(b_m - b_j)                                   [C, K]
    exp(b_i - b_j) = x_i y_j,  of a pair i > j in the block

and both are far from the ends of float32. Of these pairs, 120 in a block, the sums are taken one
after the other, in float32. What lies between blocks comes over two cuts by products of tiles, as
bwd has it: of the halves of the chunk, and of the halves of these. The factors of both cuts are x
and y, times what depends on the block and the channel alone.

No sum of dg is a difference: it would be right to float32 beside the largest pair of a chunk, and
dg may be a millionth of that where the tokens around t decay strongly, or a key is 0.

Tokens forget as in prepare_hopper, by masks on dP, dkk and what the state gives; a pair that remains
crosses no token that forgets, so that dg is 0 there.

One program has a chunk and a value head, and takes 32 channels at a time. A thread has 16 tokens of
a channel, so that sums over the tokens of a block need no exchange; products come to it through
shared memory. q, k and what products_kernel wrote are copied to shared memory at once. dq and dk
wait there in 16 bits until all channels are known, for the gradients through the norms.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false,
# reportIndexIssue=false (Gluon adds the launch arguments and gives its own functions their types at
# compile time)
# ruff: noqa: RUF005 (Gluon's compiler has no stars in tuples)
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from delta_trn.triton_kernels import tiles
from delta_trn.triton_kernels.gated_delta_rule_bwd import LEAST_DIVISOR
from delta_trn.triton_kernels.hopper.tiles import FLAT, add, exp2, larger, start_copy
from delta_trn.triton_kernels.kimi_delta_attention.prepare_hopper import (
    SAFE,
    takes,
)
from delta_trn.triton_kernels.launch import Config
from delta_trn.triton_kernels.tiles import LN2, LOG2E, ROWS

__all__ = ["adds_norms", "gradients_kernel", "slices_of_32", "takes"]


def adds_norms(q, k, g, lower_bound, config: Config) -> bool:
    """Returns whether dq and dk of a call with normalized q and k are those of q and k."""
    return g.shape[2] == q.shape[2] and takes(q, k, g, lower_bound, config)


def slices_of_32(K: int) -> int:
    """Returns how many slices of 32 channels the kernel takes one after the other;
    prepare_hopper's have 64.
    """
    return -(-K // N.value)


exp, load_rate, locate_chunk, sigmoid = (
    gluon.jit(f.fn) for f in (tiles.exp, tiles.load_rate, tiles.locate_chunk, tiles.sigmoid)
)
N = gl.constexpr(32)  # channels of a slice
ACC = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]))
# a thread's 16 tokens of a channel; as four blocks of 16 tokens; their sums; those of one block
TALL = gl.constexpr(gl.BlockedLayout([16, 1], [1, 32], [4, 1], [1, 0]))
BLOCKS = gl.constexpr(gl.BlockedLayout([1, 16, 1], [1, 1, 32], [4, 1, 1], [2, 1, 0]))
SUMS = gl.constexpr(gl.SliceLayout(1, BLOCKS.value))
SUM = gl.constexpr(gl.SliceLayout(0, SUMS.value))
TOKENS = gl.constexpr(gl.SliceLayout(1, TALL.value))
CHANNELS = gl.constexpr(gl.SliceLayout(0, TALL.value))
# float32 as products leave it, to be read by rows: eight columns of four rows next to each other
# lie in different banks
HELD = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 4, [1, 0]))
# and sums over channels, to be read 16 at a time
FOLDED = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))
PIECES = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))
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
def _take_place(x, place: gl.constexpr):
    """Returns place `place` of every row of x [4, 16], for the channels of a block: [4, 1]."""
    x = _half_row(_half_row(_half_row(_half_row(x, place & 8), place & 4), place & 2), place & 1)
    x = gl.convert_layout(gl.reshape(x, [4]), gl.SliceLayout(1, SUMS), assert_trivial=True)
    return x[:, None]


@gluon.jit
def _half_row(x, second: gl.constexpr):
    """Returns the first or the second half of the columns of x [4, size]."""
    x, y = gl.permute(gl.reshape(x, [4, 2, x.shape[1] // 2]), [0, 2, 1]).split()
    return y if second else x


@gluon.jit
def _weave(x):
    """Returns the tile [4, 16, N] of 16 tokens [4, N] of each block, without a move."""
    a = ()
    for j in gl.static_range(8):
        a = a + (gl.join(x[2 * j], x[2 * j + 1]),)
    b = ()
    for j in gl.static_range(4):
        b = b + (gl.join(a[2 * j], a[2 * j + 1]),)
    y = gl.join(gl.join(b[0], b[1]), gl.join(b[2], b[3]))
    y = gl.reshape(gl.permute(y, [0, 5, 4, 3, 2, 1]), [4, 16, N])
    return gl.convert_layout(y, BLOCKS, assert_trivial=True)


@gluon.jit
def _sum_across(reads, writes, right):
    """Returns of each block, at its token t, the sums of reads from t on where the block is right
    of what decays, those of writes before t where it is left; and both sums over all tokens.

    right: a mask [4, 1], or None: both, added. Nothing is taken away, so a small sum beside large
    ones keeps its digits.
    """
    zeros = gl.zeros([4, N], gl.float32, SUMS)
    b_read, behind = zeros, ()
    for n in gl.static_range(16):
        b_read += _take(reads, 15 - n)
        behind = (b_read,) + behind
    b_written, found = zeros, ()
    for t in gl.static_range(16):
        if right is None:
            found = found + (behind[t] + b_written,)
        else:
            found = found + (gl.where(right, behind[t], b_written),)
        b_written += _take(writes, t)
    return _weave(found), b_read, b_written


@gluon.jit
def _differentiate_blocks(s_dP, s_dkk, b_q, b_k, b_read):
    """Returns what the pairs within blocks of 16 tokens give, for q and k with their factors x and
    keys with y: what queries and keys take, without x; what is taken of each key, without y; dg.

    Of pairs i > j, with taken_j(t) the sum over i >= t of dP_ij q_i + dkk_ij k_i:

        dg_t = sum_{j < t} taken_j(t) read_j
    """
    zeros = gl.zeros([4, N], gl.float32, SUMS)
    ROW: gl.constexpr = gl.SliceLayout(2, BLOCKS)
    taken, by_q, by_k, b_dg = (zeros,) * 16, (), (), ()
    for n in gl.static_range(16):
        x_q, x_k = _take(b_q, 15 - n), _take(b_k, 15 - n)
        r_dP, r_dkk = s_dP.index(15 - n).load(ROW), s_dkk.index(15 - n).load(ROW)
        y_q, y_k, y_g = zeros, zeros, zeros
        for j in gl.static_range(15 - n):
            x_dP, x_dkk, read = _take_place(r_dP, j), _take_place(r_dkk, j), _take(b_read, j)
            own = taken[j] + x_dP * x_q + x_dkk * x_k
            taken = taken[:j] + (own,) + taken[j + 1 :]
            y_q += x_dP * read
            y_k += x_dkk * read
            y_g += own * read
        by_q, by_k, b_dg = (y_q,) + by_q, (y_k,) + by_k, (y_g,) + b_dg
    return _weave(by_q), _weave(by_k), _weave(taken), _weave(b_dg)


@gluon.jit
def _multiply(s_a, s_b, s_acc):
    """Returns a b of two tiles in shared memory, where TALL has its elements, as [4, 16, N]."""
    acc = gl.zeros([64, N], gl.float32, ACC)
    acc = warpgroup_mma(s_a, s_b, acc, use_acc=False, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    gl.barrier()
    s_acc.store(acc)
    gl.barrier()
    return by_blocks(s_acc.load(TALL))


@gluon.jit
def _copy(s_x, p, stride: gl.constexpr, length, columns, zero):
    """Starts the copy of a tile [64, N] to shared memory; what lies outside is 0."""
    o_t, o_n = (
        gl.arange(0, 64, gl.SliceLayout(1, PIECES)),
        gl.arange(0, N, gl.SliceLayout(0, PIECES)),
    )
    m = (o_t < length)[:, None] & (o_n < columns)[None, :]
    start_copy(s_x, p + ((o_t + zero)[:, None] * stride + o_n[None, :]), m)


@gluon.jit
def _load(s_x):
    """Returns a tile in shared memory, as [4, 16, N] in float32."""
    return by_blocks(s_x.load(TALL).to(gl.float32))


@gluon.jit
def _load_rows(s_x, factor):
    """Returns such a tile times a factor [64] of its rows."""
    return by_blocks(s_x.load(TALL).to(gl.float32) * factor[:, None])


@gluon.jit
def _spread(x):
    """Returns x [64], a value of each token, as [4, 16, N]."""
    return by_blocks(x[:, None] + gl.zeros([64, N], gl.float32, TALL))


@gluon.jit
def _sum_channels(x, s_acc, LAYOUT: gl.constexpr):
    """Returns the sums [64] over the rows of x [64, N]."""
    s_x = s_acc._reinterpret(gl.float32, [64, N], FOLDED)
    gl.barrier()
    s_x.store(x)
    gl.barrier()
    b_sum = gl.sum(s_x.load(gl.BlockedLayout([1, 16], [16, 2], [4, 1], [1, 0])), axis=1)
    return gl.convert_layout(b_sum, LAYOUT)


@gluon.jit
def _finish(
    x, dx, s_x, s_dx, s_acc, b_r, square, length,
    K: gl.constexpr, SLICES: gl.constexpr, XR: gl.constexpr, DXR: gl.constexpr,
):  # fmt: skip
    """Stores the gradient of x of that of y = r x, in s_dx, with r = 1 / sqrt(<x, x> + 1e-6):

        dx = r (dy - y <y, dy>)

    s_x: free for x. b_r: r and a factor, of which `square` is one over the square.
    """
    zero = gl.where(square < 0, 1, 0)
    for i in gl.static_range(SLICES):
        _copy(s_x.index(i), x + i * N, XR, length, K - i * N, zero)
    async_copy.commit_group()
    o_t, o_n = gl.arange(0, 64, TOKENS), gl.arange(0, N, CHANNELS)
    p_dx = dx + ((o_t // 16 * 16 + zero)[:, None] * DXR + o_n[None, :]) + (o_t % 16)[:, None] * DXR
    async_copy.wait_group(0)
    gl.barrier()
    b_along = gl.zeros([64, N], gl.float32, TALL)
    for i in gl.static_range(SLICES):
        b_x = s_x.index(i).load(TALL).to(gl.float32)
        b_along += b_x * s_dx.index(i).load(TALL).to(gl.float32)
    b_along = _sum_channels(b_along, s_acc, TOKENS) * b_r * b_r * square
    for i in gl.static_range(SLICES):
        m = (o_t < length)[:, None]
        if K % N != 0:
            m = m & (i * N + o_n < K)[None, :]
        b_x = s_x.index(i).load(TALL).to(gl.float32)
        b_dx = s_dx.index(i).load(TALL).to(gl.float32)
        b_dx = b_r[:, None] * (b_dx - b_x * b_along[:, None])
        gl.store(p_dx + i * N, b_dx.to(dx.dtype.element_ty), mask=m)
    gl.barrier()


@gluon.jit(do_not_specialize=["tokens", "NT"])
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
    H: gl.constexpr,
    HV: gl.constexpr,
    K: gl.constexpr,
    SLICES: gl.constexpr,
    C: gl.constexpr,
    QR: gl.constexpr,
    KR: gl.constexpr,
    GR: gl.constexpr,
    BR: gl.constexpr,
    DQR: gl.constexpr,
    DKR: gl.constexpr,
    DGR: gl.constexpr,
    DBR: gl.constexpr,
    NORM: gl.constexpr,
):
    """Computes what bwd.gradients_kernel does, for 64 tokens in a chunk; 32 channels at a time.

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
    OPERAND: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], dtype)
    tile = i_c * HV + i_h
    RESETS: gl.constexpr = position is not None or A_log is None

    # dP and dkk of pairs that lie at a cut between halves of the chunk, and of these halves
    a_wide = gl.allocate_shared_memory(dtype, [2, C, C], OPERAND)
    a_near = gl.allocate_shared_memory(dtype, [2, C, C], OPERAND)
    o_i, o_j = gl.arange(0, C, gl.SliceLayout(1, LOAD)), gl.arange(0, C, gl.SliceLayout(0, LOAD))
    o_cc = tile * (C * C) + (o_i[:, None] * C + o_j[None, :])
    apart = (o_i // 16)[:, None] ^ (o_j // 16)[None, :]
    if RESETS:
        s_first = gl.allocate_shared_memory(gl.int32, [4, 16], PLAIN)
        b_reset = gl.full([C], -1, gl.int32, gl.SliceLayout(0, LOAD))
        if position is not None:
            b_place = gl.load(position + start + o_j, mask=o_j < length, other=1)
            b_reset = gl.where(b_place == 0, o_j, b_reset)
        if A_log is None:
            b_given = gl.load(g + (start + o_j) * GR + i_h * K, mask=o_j < length, other=0.0)
            b_reset = gl.where(b_given.to(gl.float32) == -float("inf"), o_j, b_reset)
        b_resets = gl.where(o_j[None, :] <= o_i[:, None], b_reset[None, :], -1)
        first_i = gl.reduce(b_resets, 1, larger)
        s_line = s_first._reinterpret(gl.int32, [C], FLAT)
        s_line.store(first_i)
        gl.barrier()
        first_j = s_line.load(gl.SliceLayout(0, LOAD))
        together = first_i[:, None] == first_j[None, :]
        apart = gl.where(together, apart, 0)
    none = gl.zeros([C, C], dtype, LOAD)
    # and of those within blocks of 16, by block and columns, for each row
    a_dP = gl.allocate_shared_memory(gl.float32, [16, 4, 16], PLAIN)
    a_dkk = gl.allocate_shared_memory(gl.float32, [16, 4, 16], PLAIN)
    DEEP: gl.constexpr = gl.BlockedLayout([1, 1, 8], [4, 4, 2], [4, 1, 1], [2, 1, 0])
    o_r = gl.arange(0, 16, gl.SliceLayout(1, gl.SliceLayout(2, DEEP)))[:, None, None]
    o_b = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, DEEP)))[None, :, None]
    o_16 = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, DEEP)))[None, None, :]
    o_16 = tile * (C * C) + (o_r * C + o_b * (16 * C + 16) + o_16)
    ROWS_OF: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    for x in gl.static_range(2):
        b_pairs = gl.load((dkk if x else dP) + o_cc)
        a_wide.index(x).store(gl.where(apart >= 2, b_pairs, none))
        a_near.index(x).store(gl.where(apart == 1, b_pairs, none))
        b_blocks = gl.load((dkk if x else dP) + o_16).to(gl.float32)
        if RESETS:
            b_row = s_first.permute((1, 0)).load(gl.SliceLayout(2, DEEP))[:, :, None]
            b_column = s_first.load(gl.SliceLayout(0, DEEP))[None, :, :]
            b_blocks = gl.where(b_row == b_column, b_blocks, 0.0)
        s_x = (a_dkk if x else a_dP)._reinterpret(gl.float32, [16, 4, 16], ROWS_OF)
        s_x.store(b_blocks)

    o_t, o_n = gl.arange(0, C, TOKENS), gl.arange(0, N, CHANNELS)
    p_rows = rows + tile * (ROWS * C)
    o_c = gl.arange(0, C, LINE)
    a_tokens = gl.allocate_shared_memory(gl.float32, [4, C], FLAT)

    a_tokens.index(0).store(gl.load(p_rows + 2 * C + o_c) * scale)
    a_tokens.index(1).store(gl.load(p_rows + 3 * C + o_c))
    a_tokens.index(2).store(gl.load(p_rows + 7 * C + o_c))
    a_tokens.index(3).store(gl.load(dP + tile * (C * C) + o_c * (C + 1)).to(gl.float32))
    rate = 0.0 if A_log is None else LOG2E * exp(load_rate(A_log, lower_bound, i_h))

    # with an index of which the compiler knows nothing: of what it knew, it would keep every
    # address
    a_sums = gl.allocate_shared_memory(gl.float32, [4, 4 * N], FLAT)
    NARROW: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, N], dtype)
    a_left = gl.allocate_shared_memory(dtype, [2, C, N], NARROW)
    a_inputs = gl.allocate_shared_memory(dtype, [5, C, N], PLAIN)
    a_acc = gl.allocate_shared_memory(gl.float32, [1, C, N], HELD)
    if NORM:
        s_dq = gl.allocate_shared_memory(dtype, [SLICES, C, N], PLAIN)
        s_dk = gl.allocate_shared_memory(dtype, [SLICES, C, N], PLAIN)

    b_dA = gl.zeros([4, N], gl.float32, SUMS)
    b_kR = gl.zeros([4, 16, N], gl.float32, BLOCKS)
    for turn in range(SLICES):
        zero = gl.where(turn + NT < 0, 1, 0)
        i = turn ^ zero
        s_sums, s_acc = a_sums.index(zero), a_acc.index(zero)
        s_1, s_2 = a_left.index(zero), a_left.index(zero + 1)
        block = gl.arange(0, 4, gl.SliceLayout(1, SUMS))[:, None] + zero
        b_t = o_t + zero
        o_k = i * N + o_n
        m_k = o_k < K
        m = (b_t < length)[:, None]
        if K % N != 0:
            m = m & m_k[None, :]
        # a thread's first token, and how far the others are: as part of the instruction
        first = (o_t // 16 * 16 + zero)[:, None]
        other = (o_t % 16)[:, None]
        p_q = i_h // (HV // H) * K + i * N
        p_g = i_h * K + i * N
        p_S = (start * HV + i_h) * K + i * N
        s_q, s_k = a_inputs.index(zero), a_inputs.index(zero + 1)
        s_OS, s_YS, s_US = (
            a_inputs.index(zero + 2),
            a_inputs.index(zero + 3),
            a_inputs.index(zero + 4),
        )
        gl.barrier()
        _copy(s_q, q + start * QR + p_q, QR, length, K - i * N, zero)
        _copy(s_k, k + start * KR + p_q, KR, length, K - i * N, zero)
        async_copy.commit_group()
        _copy(s_OS, OS + p_S, HV * K, length, K - i * N, zero)
        _copy(s_YS, YS + p_S, HV * K, length, K - i * N, zero)
        _copy(s_US, US + p_S, HV * K, length, K - i * N, zero)
        async_copy.commit_group()
        p_a = g + start * GR + p_g + (first * GR + o_n[None, :]) + other * GR
        b_a = gl.load(p_a, mask=m, other=0.0).to(gl.float32)
        if dt_bias is not None:
            b_bias = gl.load(dt_bias + i_h * K + o_k, mask=m_k, other=0.0).to(gl.float32)
            b_a += b_bias[None, :]
        # times log2(e)
        if A_log is None:
            b_g = gl.where(b_a < SAFE, SAFE, b_a) * LOG2E
        else:
            b_g = (lower_bound * LOG2E) * _invert(1.0 + exp2(b_a * -rate))
        b_g = by_blocks(gl.where((b_t < length)[:, None], b_g, 0.0))
        b_e = gl.associative_scan(b_g, 1, add)
        b_s, b_m = _take(b_e, 15), _take(b_e, 7)
        s_sums.store(gl.reshape(b_s, [4 * N]))
        gl.barrier()
        b_start = gl.zeros([4, N], gl.float32, SUMS)
        b_all = b_start
        for j in gl.static_range(4):
            b_0 = s_sums.slice(j * N, N).load(SUM)[None, :]
            b_all += b_0
            b_start += gl.where(block > j, b_0, 0.0)
        b_wide = gl.where(block == 0, s_sums.slice(N, N).load(SUM)[None, :], 0.0)
        b_wide = gl.where(block == 3, s_sums.slice(2 * N, N).load(SUM)[None, :], b_wide)
        b_e -= b_m[:, None, :]
        b_x = exp2(b_e)
        async_copy.wait_group(1)
        gl.barrier()
        b_q = _load_rows(s_q, a_tokens.index(zero).load(TOKENS))
        b_k = _load_rows(s_k, a_tokens.index(1 + zero).load(TOKENS))
        b_beta = _spread(a_tokens.index(2 + zero).load(TOKENS))
        b_dq, b_R, b_taken, b_dg = _differentiate_blocks(
            a_dP, a_dkk, b_q * b_x, b_beta * b_k * b_x, b_k * exp2(-b_e)
        )
        b_beta = _spread(a_tokens.index(2 + zero).load(TOKENS))
        b_own = _spread(a_tokens.index(3 + zero).load(TOKENS))
        b_dq = b_own * b_k + b_x * b_dq
        b_R *= b_x
        b_dk = b_own * b_q + b_beta * b_R + _invert(b_x) * b_taken
        b_kR += b_k * b_R
        b_total = b_start
        # the cut between halves of the chunk, then those between halves of these
        for level in gl.static_range(2):
            right = block % 2 == 1 if level else block >= 2
            b_h = gl.where(right, b_m, b_s - b_m)
            if level == 0:
                b_h += b_wide
            b_h = exp2(b_h)[:, None, :]
            b_right = gl.where(right, 1.0, 0.0)[:, None, :]
            b_f = gl.where(right[:, None, :], b_x, _invert(b_x)) * b_h
            # queries right of the cut, keys left of it; keys right of it times beta
            b_w = gl.where(right[:, None, :], b_q, b_k)
            b_beta = _spread(a_tokens.index(2 + zero).load(TOKENS))
            b_strength = gl.where(right[:, None, :], b_beta, 1.0)
            gl.barrier()
            s_1.store(whole(b_w * b_f).to(dtype))
            s_2.store(whole(b_k * b_strength * b_f).to(dtype))
            fence_async_shared()
            gl.barrier()
            s_dP = (a_near if level else a_wide).index(zero)
            s_dkk = (a_near if level else a_wide).index(zero + 1)
            b_u = _multiply(s_dP, s_1, s_acc) * b_f
            b_between = b_w * b_u
            b_dq += b_right * b_u
            b_dk += (1.0 - b_right) * b_u
            b_u = _multiply(s_dkk, s_2, s_acc) * b_f
            b_kR += b_right * b_k * b_u
            b_beta = _spread(a_tokens.index(2 + zero).load(TOKENS))
            b_u *= gl.where(right[:, None, :], b_beta, 1.0)
            b_dk += b_u
            b_between += b_k * b_u
            b_between, b_0, _ = _sum_across(b_between, b_between, right)
            b_dg += b_between
            if level == 0:
                b_total = b_0
        # what the state gives
        async_copy.wait_group(0)
        gl.barrier()
        f_gam, f_lam = exp2(b_start + b_m)[:, None, :], exp2(b_all - b_start - b_m)[:, None, :]
        if RESETS:
            b_first = s_first._reinterpret(gl.int32, [C], FLAT).load(TOKENS)
            b_end = s_first._reinterpret(gl.int32, [C], FLAT).slice(C - 1, 1).load(TOKENS)
            m_open = gl.where(b_first < 0, 1.0, 0.0)
            m_stays = gl.where(b_first == b_end, 1.0, 0.0)
        b_u = b_x * f_gam * _load(s_OS)
        if RESETS:
            b_u *= _spread(m_open)
        b_dq += b_u
        b_between = b_q * b_u
        b_u = b_x * f_gam * _load(s_YS)
        if RESETS:
            b_u *= _spread(m_open)
        b_kR -= b_k * b_u
        b_u *= _spread(a_tokens.index(2 + zero).load(TOKENS))
        b_dk -= b_u
        b_between -= b_k * b_u
        b_u = _invert(b_x) * f_lam * _load(s_US)
        if RESETS:
            b_u *= _spread(m_stays)
        b_dk += b_u
        b_between, b_read, b_written = _sum_across(b_between, b_k * b_u, None)
        b_dg += b_between
        a_sums.index(1 + zero).store(gl.reshape(b_read, [4 * N]))
        a_sums.index(2 + zero).store(gl.reshape(b_written, [4 * N]))
        a_sums.index(3 + zero).store(gl.reshape(b_total, [4 * N]))
        b_dq, b_dk = whole(b_dq), whole(b_dk)
        if not NORM:
            p_dq = dq + start * DQR + p_g + (first * DQR + o_n[None, :]) + other * DQR
            p_dk = dk + start * DKR + p_g + (first * DKR + o_n[None, :]) + other * DKR
            gl.store(p_dq, (scale * b_dq).to(dq.dtype.element_ty), mask=m)
            gl.store(p_dk, b_dk.to(dk.dtype.element_ty), mask=m)
        else:
            s_dq.index(i).store(b_dq.to(dtype))
            s_dk.index(i).store(b_dk.to(dtype))
        gl.barrier()
        b_SdS = gl.load(SdS + tile * K + o_k, mask=m_k, other=0.0)
        b_rest = gl.convert_layout(b_SdS, SUM)[None, :] * exp2(b_all)
        if RESETS:
            b_forgot = s_first._reinterpret(gl.int32, [C], FLAT).slice(C - 1, 1).load(SUM)
            b_rest = gl.where(b_forgot[None, :] < 0, b_rest, 0.0)
        for j in gl.static_range(4):
            b_0 = a_sums.index(1 + zero).slice(j * N, N).load(SUM)[None, :]
            b_rest += gl.where(block < j, b_0, 0.0)
            b_0 = a_sums.index(2 + zero).slice(j * N, N).load(SUM)[None, :]
            b_rest += gl.where(block > j, b_0, 0.0)
        b_0 = a_sums.index(3 + zero).slice(0, N).load(SUM)[None, :]
        b_rest += gl.where(block == 1, b_0, 0.0)
        b_0 = a_sums.index(3 + zero).slice(3 * N, N).load(SUM)[None, :]
        b_rest += gl.where(block == 2, b_0, 0.0)
        b_dg = whole(b_dg + b_rest[:, None, :])

        p_dg = dg + start * DGR + p_g + (first * DGR + o_n[None, :]) + other * DGR
        if A_log is None:
            gl.store(p_dg, b_dg.to(dg.dtype.element_ty), mask=m)
        else:
            b_a = gl.load(p_a, mask=m, other=0.0).to(gl.float32)
            if dt_bias is not None:
                b_a += b_bias[None, :]
            # beyond 150 a sigmoid or its counterpart is 0, and infinity times 0 would be NaN
            b_a = gl.minimum(gl.maximum(b_a * -rate, -150.0), 150.0)
            b_e2 = exp2(-gl.abs(b_a))
            b_r = _invert(1.0 + b_e2)
            b_dy = gl.where(m, (b_e2 * b_r) * (lower_bound * b_r) * b_dg, 0.0)
            b_dA += gl.sum(by_blocks(b_a * b_dy), axis=1)
            b_dy *= LN2 * rate
            gl.store(dgates + tile * (K + 1) + o_k, gl.sum(b_dy, axis=0), mask=m_k)
            gl.store(p_dg, b_dy.to(dg.dtype.element_ty), mask=m)

    if A_log is not None:
        dA = gl.sum(gl.sum(b_dA, axis=0), axis=0)
        gl.store(dgates + tile * (K + 1) + K, -LN2 * dA)
    b_dbeta = gl.load(dYV + tile * C + o_c) + _sum_channels(whole(b_kR), a_acc.index(0), LINE)
    b_strength = a_tokens.index(2).load(LINE)
    b_diagonal = -gl.load(dkk + tile * (C * C) + o_c * (C + 1)).to(gl.float32)
    b_dbeta = gl.where(b_strength >= LEAST_DIVISOR, b_diagonal / b_strength, b_dbeta)
    if beta_max is not None:
        p_beta = beta + start * BR + i_h + o_c * BR
        b_z = gl.load(p_beta, mask=o_c < length, other=0.0).to(gl.float32)
        b_dbeta *= beta_max * sigmoid(b_z) * sigmoid(-b_z)
    p_dbeta = dbeta + start * DBR + i_h + o_c * DBR
    gl.store(p_dbeta, b_dbeta.to(dbeta.dtype.element_ty), mask=o_c < length)
    if NORM:
        s_acc, b_r = a_acc.index(0), a_tokens.index(1).load(TOKENS)
        p_x, p_dx = k + start * KR + i_h * K, dk + start * DKR + i_h * K
        _finish(p_x, p_dx, a_inputs, s_dk, s_acc, b_r, 1.0, length, K, SLICES, KR, DKR)
        b_r, square = a_tokens.index(0).load(TOKENS), 1.0 / (scale * scale)
        p_x, p_dx = q + start * QR + i_h * K, dq + start * DQR + i_h * K
        _finish(p_x, p_dx, a_inputs, s_dq, s_acc, b_r, square, length, K, SLICES, QR, DQR)
