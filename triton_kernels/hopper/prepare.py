"""Gated delta rule, T, P and the rows of gated_delta_rule_fwd, for Hopper and in Gluon: in half the
time.

What it computes, and where it stores it, is as there, in 16 bits and chunks of 64. It differs in
how:

    registers   every tile lies as hopper.tiles says; Triton moved each through shared memory,
                several times
    heads       a program makes TOGETHER value heads of a key head, one or two, with one Q K^T and
                one K K^T: M of the first waits in shared memory, where q and k were; a warp makes
                the gates of a head
    norms       that of k is the diagonal of K K^T, that of q is summed from the operand of Q K^T
    decays      only a warp's block of 16 x 16 on the diagonal has a power for every element, of a
                masked difference. Left of it, with e the last token of the column's block of 16, so
                j <= e < i, D_ij = exp(b_i - b_e) exp(b_e - b_j): both at most 1, and neither below
                D_ij
    inverse     of blocks of 16 by shuffles in float32, then by halves, see hopper.tiles.invert

It is right without a GPU in the emulator alone, since no interpreter runs Gluon.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false,
# reportIndexIssue=false (Gluon's decorator adds the launch arguments and gives its own functions
# their types at compile time)
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from delta_trn.triton_kernels import tiles
from delta_trn.triton_kernels.hopper.tiles import (
    ACC16,
    ACC32,
    ACC64,
    COLUMN,
    FLAT,
    HELD,
    ROW,
    add,
    beside,
    choose,
    cut,
    halves,
    invert,
    load_of_own_columns,
    number_of_warp,
    start_copy,
    sum_diagonal,
)
from delta_trn.triton_kernels.launch import Config, row_stride
from delta_trn.triton_kernels.tiles import LOG2E, RESET, ROWS

exp2_of_words, locate_chunk, scale_by_exp, sigmoid, softplus = (
    gluon.jit(f.fn)
    for f in (
        tiles.exp2_of_words,
        tiles.locate_chunk,
        tiles.scale_by_exp,
        tiles.sigmoid,
        tiles.softplus,
    )
)


@gluon.jit
def _multiply_transposed(s_a, s_b):
    """Starts a b^T of two tiles [64, K] in shared memory."""
    zeros = gl.zeros([64, 64], gl.float32, ACC64)
    return warpgroup_mma(s_a, s_b.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _load_value(s_x, place: gl.constexpr):
    """Returns one value in shared memory as a row's value."""
    return s_x.slice(place, 1).load(ROW)


@gluon.jit
def _decay_left(
    M,
    P,
    own_q,
    b_fk,
    b_fq,
    b_b,
    b_low,
    s_rows,
    s_within,
    i_w,
    head: gl.constexpr,
    LINE: gl.constexpr,
    part: gl.constexpr,
):
    """Returns 16 columns of M and P: 0 in rows not below their block, which P has from own_q."""
    END: gl.constexpr = head + 16 * part + 15
    b_b = (b_b - _load_value(s_rows, END)) + (b_low - _load_value(s_rows, LINE + END))
    b_column = s_within.slice(head + 16 * part, 16).load(COLUMN)
    b_row, b_column = gl.where(i_w > part, gl.exp2(b_b)[:, None], 0.0), b_column[None, :]
    P = (P * (b_row * b_fq) * b_column).to(own_q.dtype)
    return M * (b_row * b_fk) * b_column, choose(gl.where(i_w == part, -1, 0), own_q, P)


@gluon.jit(do_not_specialize=["tokens", "NT"])
def prepare_kernel(
    q,
    k,
    g,
    beta,
    A_log,
    dt_bias,
    T,
    P,
    rows,
    chunk_start,
    chunk_length,
    scale,
    beta_max,
    tokens,
    NT,
    H: gl.constexpr,
    HV: gl.constexpr,
    K: gl.constexpr,
    KP: gl.constexpr,
    C: gl.constexpr,
    QR: gl.constexpr,
    KR: gl.constexpr,
    GR: gl.constexpr,
    BR: gl.constexpr,
    L2NORM: gl.constexpr,
    TOGETHER: gl.constexpr,
):
    """Computes T, P and the rows of TOGETHER value heads of a chunk; C is 64. KP is K up to a power
    of two.

    With A_log, g holds a. With beta_max, beta holds z.
    """
    pid = gl.program_id(0).to(gl.int64)
    i_c, i_h = pid // (HV // TOGETHER), pid % (HV // TOGETHER) * TOGETHER
    i_hk = i_h // (HV // H)
    start, length = locate_chunk(i_c, tokens, NT, chunk_start, chunk_length, C)
    if length <= 0:
        return
    dtype: gl.constexpr = k.dtype.element_ty
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // KP, KP // 8], [4, 1], [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, KP], dtype)
    s_k = gl.allocate_shared_memory(dtype, [C, KP], SHARED)
    s_q = gl.allocate_shared_memory(dtype, [C, KP], SHARED)
    o_t = gl.arange(0, C, gl.SliceLayout(1, COPY))[:, None]
    o_k = gl.arange(0, KP, gl.SliceLayout(0, COPY))[None, :]
    m = (o_t < length) & (o_k < K)
    start_copy(s_k, k + start * KR + i_hk * K + (o_t * KR + o_k), m)
    start_copy(s_q, q + start * QR + i_hk * K + (o_t * QR + o_k), m)
    async_copy.commit_group()

    # gates, as in gated_delta_rule_fwd, of all heads at once: a head per warp, two tokens per lane
    LINE: gl.constexpr = TOGETHER * C
    GATES: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0])
    o_h = gl.arange(0, TOGETHER, gl.SliceLayout(1, GATES))[:, None]
    o_c = gl.arange(0, C, gl.SliceLayout(0, GATES))[None, :]
    m = (o_h < TOGETHER) & (o_c < length)
    b_g = gl.load(g + start * GR + i_h + (o_c * GR + o_h), mask=m, other=0.0).to(gl.float32)
    b_beta = gl.load(beta + start * BR + i_h + (o_c * BR + o_h), mask=m, other=0.0).to(gl.float32)
    if A_log is not None:
        if dt_bias is not None:
            b_g += gl.load(dt_bias + i_h + o_h).to(gl.float32)
        b_rate = gl.load(A_log + i_h + o_h).to(gl.float32)
        b_g = gl.where(m, -scale_by_exp(b_rate, softplus(b_g), b_g), 0.0)
    if beta_max is not None:
        b_beta = gl.where(m, beta_max * sigmoid(b_beta), 0.0)
    b_g = gl.where(b_g < RESET, RESET, b_g)
    b_sum = gl.associative_scan(b_g.to(gl.float64), 1, add) * LOG2E
    b_b = b_sum.to(gl.float32)
    b_low = (b_sum - b_b).to(gl.float32)
    at_end = o_c % 16 == 15
    b_end = gl.sum(
        gl.reshape(gl.where(at_end, b_b, 0.0), [TOGETHER, 4, 16]), axis=2, keep_dims=True
    )
    b_end_low = gl.sum(
        gl.reshape(gl.where(at_end, b_low, 0.0), [TOGETHER, 4, 16]), axis=2, keep_dims=True
    )
    b_within = (
        b_end
        - gl.reshape(b_b, [TOGETHER, 4, 16])
        + (b_end_low - gl.reshape(b_low, [TOGETHER, 4, 16]))
    )
    s_rows = gl.allocate_shared_memory(gl.float32, [8 * LINE], FLAT)  # a row of ROWS after another
    s_sums = gl.allocate_shared_memory(gl.float32, [LINE], FLAT)
    s_within = gl.allocate_shared_memory(
        gl.float32, [LINE], FLAT, gl.reshape(gl.exp2(b_within), [LINE])
    )
    s_rows.slice(0, LINE).store(gl.reshape(b_b, [LINE]))
    s_rows.slice(LINE, LINE).store(gl.reshape(b_low, [LINE]))
    s_rows.slice(7 * LINE, LINE).store(gl.reshape(b_beta, [LINE]))
    s_blocks = s_rows.reshape([LINE // 2, 16])

    o_i = gl.arange(0, C, ROW)
    i_w = number_of_warp(o_i)[:, None]
    b_below = o_i[:, None] % 16 - gl.arange(0, 16, COLUMN)[None, :]
    async_copy.wait_group(0)
    fence_async_shared()
    gl.barrier()
    b_KK = _multiply_transposed(s_k, s_k)
    b_q = s_q.load(gl.DotOperandLayout(0, ACC64, 2))
    b_QK = _multiply_transposed(b_q, s_k)
    b_rq = gl.full([C], 1.0, gl.float32, ROW)
    b_rk = b_rq
    if L2NORM:
        b_square = b_q.to(gl.float32)
        b_square = gl.sum(b_square * b_square, axis=1)
        b_rq = gl.convert_layout(gl.rsqrt(b_square + 1e-6), ROW, assert_trivial=True)
    b_KK, b_QK = warpgroup_mma_wait(0, deps=(b_KK, b_QK))
    own_K, K0, K1, K2 = cut(b_KK, i_w)
    own_Q, Q0, Q1, Q2 = cut(b_QK, i_w)
    if L2NORM:
        b_rk = gl.rsqrt(sum_diagonal(own_K, b_below) + 1e-6)
    SQUARE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], dtype)
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    o_cc = gl.arange(0, C, gl.SliceLayout(1, OUT))[:, None] * C
    o_cc += gl.arange(0, C, gl.SliceLayout(0, OUT))[None, :]
    s_out = gl.allocate_shared_memory(dtype, [C, C], SQUARE)
    if TOGETHER == 2:
        s_left = gl.allocate_shared_memory(gl.float32, [C, 32], HELD)
        s_right = gl.allocate_shared_memory(gl.float32, [C, 32], HELD)
    for i in gl.static_range(TOGETHER):
        b_b = s_rows.slice(i * C, C).load(ROW)
        b_low = s_rows.slice(LINE + i * C, C).load(ROW)
        b_beta = s_rows.slice(7 * LINE + i * C, C).load(ROW)
        b_last = _load_value(s_rows, i * C + C - 1)
        b_gam = exp2_of_words(b_b, b_low)
        b_rest = b_last - b_b
        b_rest_low = (b_last - b_rest - b_b) + (_load_value(s_rows, LINE + i * C + C - 1) - b_low)
        b_lam = exp2_of_words(b_rest, b_rest_low)
        s_here = s_within.slice(i * C, C)
        s_here.store(s_here.load(ROW) * b_rk)
        s_rows.slice(2 * LINE + i * C, C).store(b_rq)
        s_rows.slice(3 * LINE + i * C, C).store(b_rk)
        s_rows.slice(4 * LINE + i * C, C).store(b_gam * b_rk * b_beta)
        s_rows.slice(5 * LINE + i * C, C).store(b_gam * b_rq)
        s_rows.slice(6 * LINE + i * C, C).store(b_lam * b_rk)

        # M = -L and P; not scale r_q r_k, which may underflow before it meets huge q and k
        b_fk, b_fq = (-b_beta * b_rk)[:, None], (scale * b_rq)[:, None]
        b_D = b_b[:, None] - load_of_own_columns(s_blocks.slice(4 * i, 4, 0))
        b_D += b_low[:, None] - load_of_own_columns(s_blocks.slice(4 * (TOGETHER + i), 4, 0))
        b_D = gl.exp2(gl.where(b_below >= 0, b_D, float("-inf")))
        b_D *= load_of_own_columns(s_blocks.slice(4 * (3 * TOGETHER + i), 4, 0))
        own_k = gl.where(b_below > 0, own_K * b_fk * b_D, 0.0)
        own_q = (own_Q * b_fq * b_D).to(dtype)
        M0, P0 = _decay_left(
            K0, Q0, own_q, b_fk, b_fq, b_b, b_low, s_rows, s_within, i_w, i * C, LINE, 0
        )
        M1, P1 = _decay_left(
            K1, Q1, own_q, b_fk, b_fq, b_b, b_low, s_rows, s_within, i_w, i * C, LINE, 1
        )
        M2, P2 = _decay_left(
            K2, Q2, own_q, b_fk, b_fq, b_b, b_low, s_rows, s_within, i_w, i * C, LINE, 2
        )
        P3 = choose(gl.where(i_w == 3, -1, 0), own_q, gl.zeros_like(own_q))
        s_out.store(beside(beside(P0, P1, ACC32), beside(P2, P3, ACC32), ACC64))
        b_sums = gl.sum(gl.abs(own_k) + gl.abs(M0) + gl.abs(M1) + gl.abs(M2), axis=1)
        s_sums.slice(i * C, C).store(b_sums)
        gl.store(P + (i_c * HV + i_h + i) * (C * C) + o_cc, s_out.load(OUT))
        if TOGETHER == 2 and i == 0:
            s_left.store(beside(own_k, M0, ACC32))
            s_right.store(beside(M1, M2, ACC32))
    s_out.store(invert(own_k, M0, M1, M2, i_w, dtype))
    gl.store(T + (i_c * HV + i_h + TOGETHER - 1) * (C * C) + o_cc, s_out.load(OUT))
    if TOGETHER == 2:
        own_k, M0 = halves(s_left.load(ACC32), ACC16)
        M1, M2 = halves(s_right.load(ACC32), ACC16)
        s_out.store(invert(own_k, M0, M1, M2, i_w, dtype))
        gl.store(T + (i_c * HV + i_h) * (C * C) + o_cc, s_out.load(OUT))

    p_rows = rows + (i_c * HV + i_h) * (ROWS * C)
    o_r = gl.arange(0, 8 * LINE, gl.BlockedLayout([4], [32], [4], [0]))
    o_rows = (o_r // C % TOGETHER * ROWS + o_r // LINE) * C + o_r % C
    gl.store(p_rows + o_rows, s_rows.load(o_r.type.layout))
    o_r = gl.arange(0, LINE, gl.BlockedLayout([1], [32], [4], [0]))
    gl.store(p_rows + (o_r // C * ROWS + 8) * C + o_r % C, s_sums.load(o_r.type.layout))


def heads_together(H: int, HV: int) -> int:
    """Returns how many of the value heads of a key head a program makes:
    two, or one of an odd number.
    """
    return 1 if HV // H % 2 else 2


def compiles(config: Config) -> bool:
    """Returns whether kernels in Gluon are launched: on Hopper,
    in 16 bits and with the table's own tiles.
    """
    tile = config.prepare
    return tile.gluon and tile.warps == 4 and config.C == 64 and config.dot != "interpreted"


def in_pieces(*tensors) -> bool:
    """Returns whether tensors [B, T, heads, K] lie in pieces of 16 bytes,
    which asynchronous copies move.
    """
    return all(x.shape[3] % 8 == x.data_ptr() % 16 == row_stride(x) % 8 == 0 for x in tensors)


def takes(q, k, q_scaled, config: Config) -> bool:
    """Returns whether the kernel takes a call: of q and k in pieces of 16 bytes, unscaled."""
    return compiles(config) and q_scaled is None and in_pieces(q, k)
