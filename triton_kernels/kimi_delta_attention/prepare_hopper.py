"""Kimi Delta Attention's `prepare` for sm_90, in Gluon, where decays have a bound; what it computes:
see fwd.

With g >= SAFE, 16 tokens decay a channel to exp(-80) at the least, which bfloat16 holds, and so
does its reciprocal. So half a chunk needs no cuts: with r the end of its first 16 tokens, for each
half

    kk_ij = <k_i . exp(b_i - b_r), k_j . exp(b_r - b_j)>,  j in the half, i > j;  and so P

Within 16 tokens, b = the sum to their start + p: every factor is 2^p or 2^-p, one exponential each,
times what depends on the 16 tokens and the channel alone. Above the diagonal such products
overflow, and are not read. Nothing decays below what is left of it: kl = k . 2^(s - p) . ..., s the
sum of p's 16 tokens.

A token that forgets what was before it decays no more than another one here, since 0 would be no
factor, and masks do the rest. With first_i the last such token of the chunk up to i, or -1 where
there is none,

    kk_ij = P_ij = 0 unless first_i = first_j,  qg_i = kg_i = 0 unless first_i = -1
    kl_i = 0 unless first_i = first_C,  gam_C = 0 unless first_C = -1

Such are tokens whose place is 0, and where g is given, those whose g is -inf: in all channels of a
value head, so that the first one says it. Another g that breaks the promise counts as SAFE.

A thread holds 16 tokens of two channels, so that p, s and these factors need no exchange; a slice
is 64 channels. q, k and g are copied to shared memory at once, before anything waits for them.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false,
# reportIndexIssue=false (Gluon adds the launch arguments and gives its own functions their types at
# compile time)
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from delta_trn.triton_kernels import tiles
from delta_trn.triton_kernels.hopper.prepare import compiles, in_pieces
from delta_trn.triton_kernels.hopper.tiles import (
    ACC16,
    ACC32,
    ACC64,
    FLAT,
    add,
    beside,
    cut,
    exp2,
    invert,
    larger,
    number_of_warp,
    start_copy,
)
from delta_trn.triton_kernels.launch import Config
from delta_trn.triton_kernels.tiles import LOG2E, ROWS

SAFE = gl.constexpr(-5.0)

exp, load_rate, locate_chunk, sigmoid = (
    gluon.jit(f.fn) for f in (tiles.exp, tiles.load_rate, tiles.locate_chunk, tiles.sigmoid)
)


def takes(q, k, g, lower_bound, config: Config) -> bool:
    """Returns whether this kernel prepares a call in 16 bits, which are bfloat16's, with normalized
    q and k.

    Others may overflow as factors. lower_bound: what g keeps, made or given; None: nothing.
    """
    bounded = lower_bound is not None and lower_bound >= SAFE.value
    copied = in_pieces(q, k, g) and g.element_size() in (2, 4)
    return bounded and copied and compiles(config)


def slices_of_64(K: int) -> int:
    """Returns how many slices of 64 channels the kernel takes one after the other."""
    return -(-K // 64)


@gluon.jit
def _divide(x, y):
    """Returns x / y, to two roundings; 0 where y is above 2^126."""
    form: gl.constexpr = "div.approx.ftz.f32 $0, $1, $2;"
    return gl.inline_asm_elementwise(form, "=f,f,f", [x, y], gl.float32, is_pure=True, pack=1)


@gluon.jit
def by_blocks(x, LAYOUT: gl.constexpr):
    """Returns a tile [64, N] as [4, 16, N], without a move."""
    return gl.convert_layout(gl.reshape(x, [4, 16, x.shape[1]]), LAYOUT, assert_trivial=True)


@gluon.jit
def whole(x, LAYOUT: gl.constexpr):
    """Returns a tile [4, 16, N] as [64, N], without a move."""
    return gl.convert_layout(gl.reshape(x, [64, x.shape[2]]), LAYOUT, assert_trivial=True)


@gluon.jit(do_not_specialize=["tokens", "NT"])
def prepare_kernel(
    q,
    k,
    g,
    beta,
    A_log,
    dt_bias,
    position,
    T,
    P,
    qg,
    kg,
    kl,
    last,
    rows,
    chunk_start,
    chunk_length,
    scale,
    beta_max,
    lower_bound,
    tokens,
    NT,
    H: gl.constexpr,
    HV: gl.constexpr,
    K: gl.constexpr,
    SLICES: gl.constexpr,
    C: gl.constexpr,
    QR: gl.constexpr,
    KR: gl.constexpr,
    GR: gl.constexpr,
    BR: gl.constexpr,
):
    """Computes what fwd.prepare_kernel does, for 64 tokens in a chunk; 64 channels at a time."""
    pid = gl.program_id(0).to(gl.int64)
    i_c, i_h = pid // HV, pid % HV
    start, length = locate_chunk(i_c, tokens, NT, chunk_start, chunk_length, C)
    if length <= 0:
        return
    length = length.to(gl.int32)
    dtype: gl.constexpr = k.dtype.element_ty
    gtype: gl.constexpr = g.dtype.element_ty
    N: gl.constexpr = 64
    ROW: gl.constexpr = gl.SliceLayout(1, ACC64)
    COLUMN: gl.constexpr = gl.SliceLayout(0, ACC64)
    RESETS: gl.constexpr = position is not None or A_log is None
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    WIDE: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    LOAD_G: gl.constexpr = WIDE if gtype.primitive_bitwidth == 32 else LOAD
    TALL: gl.constexpr = gl.BlockedLayout([16, 2], [1, 32], [4, 1], [1, 0])
    BLOCKS: gl.constexpr = gl.BlockedLayout([1, 16, 2], [1, 1, 32], [4, 1, 1], [2, 1, 0])
    SUMS: gl.constexpr = gl.SliceLayout(1, BLOCKS)
    SUM: gl.constexpr = gl.SliceLayout(0, SUMS)
    TOKENS: gl.constexpr = gl.SliceLayout(1, TALL)
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    OPERAND: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, N], dtype)

    s_q = gl.allocate_shared_memory(dtype, [SLICES, C, N], PLAIN)
    s_k = gl.allocate_shared_memory(dtype, [SLICES, C, N], PLAIN)
    s_g = gl.allocate_shared_memory(gtype, [SLICES, C, N], PLAIN)
    o_t, o_n = gl.arange(0, C, gl.SliceLayout(1, LOAD)), gl.arange(0, N, gl.SliceLayout(0, LOAD))
    p_q = q + start * QR + i_h // (HV // H) * K
    p_k = k + start * KR + i_h // (HV // H) * K
    for i in gl.static_range(SLICES):
        m = (o_t < length)[:, None] & (i * N + o_n < K)[None, :]
        start_copy(s_q.index(i), p_q + (o_t[:, None] * QR + (i * N + o_n)[None, :]), m)
        start_copy(s_k.index(i), p_k + (o_t[:, None] * KR + (i * N + o_n)[None, :]), m)
    async_copy.commit_group()
    o_t, o_n = (
        gl.arange(0, C, gl.SliceLayout(1, LOAD_G)),
        gl.arange(0, N, gl.SliceLayout(0, LOAD_G)),
    )
    p_g = g + start * GR + i_h * K
    for i in gl.static_range(SLICES):
        m = (o_t < length)[:, None] & (i * N + o_n < K)[None, :]
        start_copy(s_g.index(i), p_g + (o_t[:, None] * GR + (i * N + o_n)[None, :]), m)
    async_copy.commit_group()

    o_c = gl.arange(0, C, LINE)
    b_beta = gl.load(beta + start * BR + i_h + o_c * BR, mask=o_c < length, other=0.0).to(
        gl.float32
    )
    if beta_max is not None:
        b_beta = gl.where(o_c < length, beta_max * sigmoid(b_beta), 0.0)
    rate = 0.0 if A_log is None else -LOG2E * exp(load_rate(A_log, lower_bound, i_h))
    s_beta = gl.allocate_shared_memory(gl.float32, [C], FLAT)
    s_rq = gl.allocate_shared_memory(gl.float32, [C], FLAT)
    s_rk = gl.allocate_shared_memory(gl.float32, [C], FLAT)
    s_own = gl.allocate_shared_memory(gl.float32, [C], FLAT)
    s_sums = gl.allocate_shared_memory(gl.float32, [4 * N], FLAT)
    s_beta.store(b_beta)
    if RESETS:
        s_first = gl.allocate_shared_memory(gl.int32, [C], FLAT)
        s_reset = gl.allocate_shared_memory(gl.int32, [C], FLAT)
        b_reset = gl.full([C], -1, gl.int32, LINE)
        if position is not None:
            b_place = gl.load(position + start + o_c, mask=o_c < length, other=1)
            b_reset = gl.where(b_place == 0, o_c, b_reset)
        if A_log is None:
            b_given = gl.load(p_g + o_c * GR, mask=o_c < length, other=0.0).to(gl.float32)
            b_reset = gl.where(b_given == -float("inf"), o_c, b_reset)
        s_reset.store(b_reset)
        gl.barrier()
        o_i, o_j = gl.arange(0, C, ROW)[:, None], gl.arange(0, C, COLUMN)[None, :]
        b_resets = gl.where(o_j <= o_i, s_reset.load(COLUMN)[None, :], -1)
        s_first.store(gl.reduce(b_resets, 1, larger))
    async_copy.wait_group(1)
    gl.barrier()
    b_qq = gl.zeros([C, N], gl.float32, LOAD)
    b_kk, b_qk = b_qq, b_qq
    for i in gl.static_range(SLICES):
        b_q = s_q.index(i).load(LOAD).to(gl.float32)
        b_k = s_k.index(i).load(LOAD).to(gl.float32)
        b_qq += b_q * b_q
        b_kk += b_k * b_k
        b_qk += b_q * b_k
    b_rq = gl.rsqrt(gl.sum(b_qq, axis=1) + 1e-6)
    b_rk = gl.rsqrt(gl.sum(b_kk, axis=1) + 1e-6)
    s_rq.store(b_rq)
    s_rk.store(b_rk)
    s_own.store(gl.sum(b_qk, axis=1) * b_rq * b_rk)

    # factors of queries and keys as readers, in both halves of the chunk, and of keys as what is
    # read
    s_q0 = gl.allocate_shared_memory(dtype, [C, N], OPERAND)
    s_k0 = gl.allocate_shared_memory(dtype, [C, N], OPERAND)
    s_q1 = gl.allocate_shared_memory(dtype, [C, N], OPERAND)
    s_k1 = gl.allocate_shared_memory(dtype, [C, N], OPERAND)
    s_read = gl.allocate_shared_memory(dtype, [C, N], OPERAND)
    b_P0 = gl.zeros([C, 32], gl.float32, ACC32)
    b_P1, b_kk0, b_kk1 = b_P0, b_P0, b_P0
    tile = i_c * HV + i_h
    b_t, b_n = gl.arange(0, C, TOKENS), gl.arange(0, N, gl.SliceLayout(0, TALL))
    m_t = (b_t < length)[:, None]
    block = gl.arange(0, 4, gl.SliceLayout(1, SUMS))[:, None]
    if RESETS:
        b_first = s_first.load(TOKENS)
        b_end = s_first.slice(C - 1, 1).load(TOKENS)
        b_open = gl.where(b_first < 0, 1.0, 0.0)[:, None]
        b_stays = gl.where(b_first == b_end, 1.0, 0.0)[:, None]
    else:
        b_open, b_stays = 1.0, 1.0
    async_copy.wait_group(0)
    for i in range(SLICES):
        m_k = i * N + b_n < K
        gl.barrier()
        b_x = s_g.index(i).load(TALL).to(gl.float32)
        if dt_bias is not None:
            b_bias = gl.load(dt_bias + i_h * K + i * N + b_n, mask=m_k, other=0.0)
            b_x += b_bias.to(gl.float32)[None, :]
        # times log2(e)
        if A_log is None:
            b_g = gl.where(b_x < SAFE, SAFE, b_x) * LOG2E
        else:
            b_g = _divide(lower_bound * LOG2E, 1.0 + exp2(b_x * rate))
        b_g = gl.where(m_t, b_g, 0.0)
        b_g = by_blocks(b_g, BLOCKS)
        b_p = gl.associative_scan(b_g, 1, add)
        b_s = gl.sum(b_g, axis=1)
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
        f_0 = exp2(b_start - b_0)[:, None, :]
        f_1 = gl.where(block < 2, 0.0, exp2(b_start - (b_0 + b_1 + b_2)))[:, None, :]
        f_read = gl.where(block % 2 == 0, exp2(b_s), 1.0)[:, None, :]
        f_gam = exp2(b_start)[:, None, :]
        f_lam = exp2(b_all - b_start - b_s)[:, None, :]
        b_last = gl.convert_layout(gl.reshape(exp2(b_all), [N]), gl.SliceLayout(0, TALL))
        if RESETS:
            b_end_n = s_first.slice(C - 1, 1).load(gl.SliceLayout(0, TALL))
            b_last = gl.where(b_end_n < 0, b_last, 0.0)
        gl.store(last + tile * K + i * N + b_n, b_last, mask=m_k)
        o_g = (start * HV + i_h) * K + (b_t[:, None] * (HV * K) + (i * N + b_n)[None, :])
        m_o = m_t & m_k[None, :]
        b_f = exp2(b_p)
        x_q = (
            by_blocks(s_q.index(i).load(TALL).to(gl.float32) * s_rq.load(TOKENS)[:, None], BLOCKS)
            * b_f
        )
        s_q0.store(whole((x_q * f_0).to(dtype), TALL))
        s_q1.store(whole((x_q * f_1).to(dtype), TALL))
        gl.store(qg + o_g, (whole(x_q * (f_gam * scale), TALL) * b_open).to(dtype), mask=m_o)
        x_k = by_blocks(s_k.index(i).load(TALL).to(gl.float32) * s_rk.load(TOKENS)[:, None], BLOCKS)
        b_read = x_k * exp2(-b_p)
        x_k *= b_f
        s_k0.store(whole((x_k * f_0).to(dtype), TALL))
        s_k1.store(whole((x_k * f_1).to(dtype), TALL))
        b_kg = whole(x_k * f_gam, TALL) * s_beta.load(TOKENS)[:, None] * b_open
        gl.store(kg + o_g, b_kg.to(dtype), mask=m_o)
        s_read.store(whole((b_read * f_read).to(dtype), TALL))
        fence_async_shared()
        gl.barrier()
        b_P0 = warpgroup_mma(s_q0, s_read.slice(0, 32, 0).permute((1, 0)), b_P0, is_async=True)
        b_kk0 = warpgroup_mma(s_k0, s_read.slice(0, 32, 0).permute((1, 0)), b_kk0, is_async=True)
        b_P1 = warpgroup_mma(s_q1, s_read.slice(32, 32, 0).permute((1, 0)), b_P1, is_async=True)
        b_kk1 = warpgroup_mma(s_k1, s_read.slice(32, 32, 0).permute((1, 0)), b_kk1, is_async=True)
        b_kl = whole(b_read * exp2(b_s)[:, None, :] * f_lam, TALL) * b_stays
        gl.store(kl + o_g, b_kl.to(dtype), mask=m_o)
        b_P0, b_P1, b_kk0, b_kk1 = warpgroup_mma_wait(0, deps=(b_P0, b_P1, b_kk0, b_kk1))

    o_i, o_j = gl.arange(0, C, ROW)[:, None], gl.arange(0, C, COLUMN)[None, :]
    b_P = gl.where(o_i == o_j, s_own.load(ROW)[:, None], beside(b_P0, b_P1, ACC64))
    m_P, m_L = o_i >= o_j, o_i > o_j
    if RESETS:
        together = s_first.load(ROW)[:, None] == s_first.load(COLUMN)[None, :]
        m_P, m_L = m_P & together, m_L & together
    b_P = gl.where(m_P, b_P * scale, 0.0)
    b_L = gl.where(m_L, beside(b_kk0, b_kk1, ACC64) * s_beta.load(ROW)[:, None], 0.0)
    s_out = gl.allocate_shared_memory(dtype, [C, C], OPERAND)
    s_out.store(b_P.to(dtype))
    p_rows = rows + tile * (ROWS * C)
    gl.store(p_rows + 8 * C + gl.arange(0, C, ROW), gl.sum(gl.abs(b_L), axis=1))
    b_one = gl.full([C], 1.0, gl.float32, LINE)
    for row in gl.static_range(7):
        gl.store(
            p_rows + row * C + o_c,
            s_rq.load(LINE) if row == 2 else s_rk.load(LINE) if row == 3 else b_one,
        )
    gl.store(p_rows + 7 * C + o_c, s_beta.load(LINE))
    gl.barrier()
    o_cc = (
        gl.arange(0, C, gl.SliceLayout(1, LOAD))[:, None] * C
        + gl.arange(0, C, gl.SliceLayout(0, LOAD))[None, :]
    )
    gl.store(P + tile * (C * C) + o_cc, s_out.load(LOAD))
    i_w = number_of_warp(gl.arange(0, C, gl.SliceLayout(1, ACC16)))[:, None]
    own, M0, M1, M2 = cut(-b_L, i_w)
    b_T = invert(own, M0, M1, M2, i_w, dtype)
    gl.barrier()
    s_out.store(b_T)
    gl.barrier()
    gl.store(T + tile * (C * C) + o_cc, s_out.load(LOAD))
