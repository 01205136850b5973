"""Gated delta rule, the gradients of gated_delta_rule_bwd for Hopper, in Gluon: bfloat16 and K = V
= 128.

The first of two kernels computes dq, dk and dv, by the equations of gated_delta_rule_bwd, of a
chunk and all value heads of a key head, whose dq and dk it adds in registers. Of what is one value
per token it leaves

    sums [NC, HV, 8, C] float32     0  <Q, dO S^T>      1  <K, dY S^T>      2  <K, U dS'^T>
                                    3  <dY, U>          4  dL . D . K K^T, over j, without beta and
                                                           r_k of i
                                    5  E, over i >= t > j                   6  <dY, V>
                                    7  <S, dS'>, whose sum over the chunk counts

for the second, in Triton, which makes dg, dbeta and dgates of them.

A processor runs one program, which takes every processors-th chunk and key head. It copies a tile
of the next head to shared memory as soon as this head's has been used, so that memory seldom rests.
Copies are in three groups, in the order of their use: dO, dY and V; U, S, dS' and the rows; q and
k, of the next key head. Each of eight warps has half the columns of 16 rows: sums over a row are of
two warps, and left operands of products lie in shared memory.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false,
# reportIndexIssue=false (the decorators add the launch arguments and give their functions their
# types at compile time)
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from delta_trn.triton_kernels.chunks import Chunks
from delta_trn.triton_kernels.gated_delta_rule_bwd import LEAST_DIVISOR, load_gates, store_gates
from delta_trn.triton_kernels.hopper.prepare import compiles, in_pieces
from delta_trn.triton_kernels.hopper.tiles import FLAT, split_words, start_copy
from delta_trn.triton_kernels.launch import Config, config, row_stride, tile
from delta_trn.triton_kernels.tiles import ROWS, locate_chunk
from delta_trn.triton_kernels.variants import Variant, gates, layouts, rows_of

SIZE = 128  # of K and V
SUMS = tl.constexpr(8)
TYPES = {
    "*x": "q k v do S U dY dS dq dk dv",
    "*fp32": "g beta A_log dt_bias rows sums carry dg dbeta dgates",
    "*i64": "chunk_start chunk_length",
    "fp32": "scale beta_max",
    "i32": "tokens NT count",
}
PAIRS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16]))  # tiles [C, C]
KEYS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 64, 16]))  # tiles [C, K]
ROW, COLUMN = (gl.constexpr(gl.SliceLayout(axis, PAIRS.value)) for axis in (1, 0))
KEY_ROW = gl.constexpr(gl.SliceLayout(1, KEYS.value))
# of 16 bytes, in tiles [C, 128]
PIECES = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0]))
FOURS = gl.constexpr(gl.BlockedLayout([4], [32], [8], [0]))
locate = gluon.jit(locate_chunk.fn)  # of a chunk's number in 32 bits, whose division is short


@gluon.jit
def _copy(s, p, stride: gl.constexpr, length, zero):
    """Starts the copy of a tile [rows, 128] to shared memory; rows from `length` on are 0."""
    o_r = gl.arange(0, 16, gl.SliceLayout(1, PIECES))[:, None]
    o_n = gl.arange(0, 128, gl.SliceLayout(0, PIECES))[None, :]
    p = p + ((o_r + zero) * stride + o_n)
    for j in gl.static_range(s.shape[0] // 16):
        m = (o_r < length - 16 * j) & (o_n < 128)
        start_copy(s.slice(16 * j, 16, 0), p + 16 * j * stride, m)


@gluon.jit
def _copy_values(
    a_do, a_dY, a_v, do, dY, v, start, length, tile, i_h, zero, HV: gl.constexpr, VR: gl.constexpr
):
    _copy(a_do.index(zero), do + (start * HV + i_h) * 128, HV * 128, length, zero)
    _copy(a_dY.index(zero), dY + tile * (64 * 128), 128, 64, zero)
    _copy(a_v.index(zero), v + start * VR + i_h * 128, VR, length, zero)
    async_copy.commit_group()


@gluon.jit
def _copy_states(a_U, a_S, a_dS, s_rows, U, S, dS, rows, tile, zero):
    _copy(a_U.index(zero), U + tile * (64 * 128), 128, 64, zero)
    _copy(a_S.index(zero), S + tile * (128 * 128), 128, 128, zero)
    _copy(a_dS.index(zero), dS + tile * (128 * 128), 128, 128, zero)
    o = gl.arange(0, 8 * 64, FOURS)
    start_copy(s_rows, rows + tile * (ROWS * 64) + (o + zero), o >= 0)
    async_copy.commit_group()


@gluon.jit
def _copy_keys(a_q, a_k, q, k, start, length, i_hk, zero, QR: gl.constexpr, KR: gl.constexpr):
    _copy(a_q.index(zero), q + start * QR + i_hk * 128, QR, length, zero)
    _copy(a_k.index(zero), k + start * KR + i_hk * 128, KR, length, zero)
    async_copy.commit_group()


@gluon.jit
def _start(s_a, s_b, ACC: gl.constexpr):
    """Starts a b of two tiles in shared memory."""
    N: gl.constexpr = s_b.shape[1]
    return warpgroup_mma(s_a, s_b, gl.zeros([64, N], gl.float32, ACC), use_acc=False, is_async=True)


@gluon.jit
def _put_sums(s_parts, x, place: gl.constexpr):
    """Stores the sums over the rows of x [64, N], of each half of the columns."""
    N: gl.constexpr = x.shape[1] // 2
    x = gl.sum(gl.reshape(x, [64, 2, N]), axis=2)
    s_parts.slice(128 * place, 128).store(gl.reshape(x, [128]))


@gluon.jit
def _get_sums(s_parts, place: gl.constexpr, FORM: gl.constexpr):
    """Returns the sums over whole rows [64]."""
    x = gl.reshape(s_parts.slice(128 * place, 128).load(FOURS), [64, 2])
    left, right = x.split()
    return gl.convert_layout(left + right, FORM)


@gluon.jit
def _through_norm(b_dx, s_x, p_r, s_parts, place: gl.constexpr):
    """Returns the gradient of x of that of r x, with r = 1 / sqrt(<x, x> + 1e-6) at p_r."""
    b_x = s_x.load(KEYS).to(gl.float32)
    _put_sums(s_parts, b_x * b_dx, place)
    b_r = gl.load(p_r + gl.arange(0, 64, KEY_ROW))
    b_along = b_r * b_r * _get_sums(s_parts, place, KEY_ROW)
    return b_r[:, None] * (b_dx - b_x * b_along[:, None])


@gluon.jit(do_not_specialize=["tokens", "NT", "count"])
def gradients_kernel(
    q,
    k,
    v,
    do,
    rows,
    S,
    U,
    dY,
    dS,
    dq,
    dk,
    dv,
    sums,
    chunk_start,
    chunk_length,
    scale,
    tokens,
    NT,
    count,
    H: gl.constexpr,
    HV: gl.constexpr,
    C: gl.constexpr,
    QR: gl.constexpr,
    KR: gl.constexpr,
    VR: gl.constexpr,
    DQR: gl.constexpr,
    DKR: gl.constexpr,
    DVR: gl.constexpr,
    L2NORM: gl.constexpr,
):
    """Computes dq, dk, dv and sums of `count` pairs of a chunk of 64 and a key head."""
    dtype: gl.constexpr = k.dtype.element_ty
    G: gl.constexpr = HV // H
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, 128], dtype)
    SQUARE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], dtype)
    # with an index of which the compiler knows nothing: of what it knew, it would keep every
    # address
    a_q = gl.allocate_shared_memory(dtype, [1, C, 128], TILE)
    a_k = gl.allocate_shared_memory(dtype, [1, C, 128], TILE)
    a_U = gl.allocate_shared_memory(dtype, [1, C, 128], TILE)
    a_dY = gl.allocate_shared_memory(dtype, [1, C, 128], TILE)
    a_do = gl.allocate_shared_memory(dtype, [1, C, 128], TILE)
    a_v = gl.allocate_shared_memory(dtype, [1, C, 128], TILE)
    a_S = gl.allocate_shared_memory(dtype, [1, 128, 128], TILE)
    a_dS = gl.allocate_shared_memory(dtype, [1, 128, 128], TILE)
    a_pairs = gl.allocate_shared_memory(dtype, [4, C, C], SQUARE)
    s_rows = gl.allocate_shared_memory(gl.float32, [8 * C], FLAT)
    s_parts = gl.allocate_shared_memory(gl.float32, [SUMS * 128], FLAT)
    o_i, o_j = gl.arange(0, C, ROW)[:, None], gl.arange(0, C, COLUMN)[None, :]
    s_from = gl.allocate_shared_memory(
        dtype, [C, C], SQUARE, gl.where(o_i <= o_j, 1.0, 0.0).to(dtype)
    )
    o_t = gl.arange(0, C, gl.SliceLayout(1, PIECES))[:, None]
    o_n = gl.arange(0, 128, gl.SliceLayout(0, PIECES))[None, :]

    first, step = gl.program_id(0), gl.num_programs(0)
    i_c, i_hk = first // H, first % H
    start, length = locate(i_c, tokens, NT, chunk_start, chunk_length, C)
    tile = i_c.to(gl.int64) * HV + i_hk * G
    _copy_values(a_do, a_dY, a_v, do, dY, v, start, length, tile, i_hk * G, 0, HV, VR)
    _copy_states(a_U, a_S, a_dS, s_rows, U, S, dS, rows, tile, 0)
    _copy_keys(a_q, a_k, q, k, start, length, i_hk, 0, QR, KR)
    for n in range(first, count, step):
        b_dq, b_dk = gl.zeros([C, 128], gl.float32, KEYS), gl.zeros([C, 128], gl.float32, KEYS)
        i_c, i_hk = n // H, n % H
        start, length = locate(i_c, tokens, NT, chunk_start, chunk_length, C)
        n_next = gl.minimum(n + step, count - 1)
        m = (o_t < length) & (o_n < 128)
        for i in range(0, G):
            i_h = i_hk * G + i
            tile = i_c.to(gl.int64) * HV + i_h
            last = i == G - 1
            n_head = gl.where(last, n_next, n)
            c_next, h_next = n_head // H, n_head % H * G + gl.where(last, 0, i + 1)
            start_next, length_next = locate(c_next, tokens, NT, chunk_start, chunk_length, C)
            tile_next = c_next.to(gl.int64) * HV + h_next
            zero = gl.where(tile_next < 0, 1, 0)
            s_q, s_k, s_U, s_dY = (
                a_q.index(zero),
                a_k.index(zero),
                a_U.index(zero),
                a_dY.index(zero),
            )
            s_do, s_v, s_S, s_dS = (
                a_do.index(zero),
                a_v.index(zero),
                a_S.index(zero),
                a_dS.index(zero),
            )
            s_1, s_2 = a_pairs.index(zero), a_pairs.index(zero + 1)
            s_3, s_4 = a_pairs.index(zero + 2), a_pairs.index(zero + 3)

            async_copy.wait_group(1)
            fence_async_shared()
            gl.barrier()
            b_OS = _start(s_do, s_S.permute((1, 0)), KEYS)
            b_YS = _start(s_dY, s_S.permute((1, 0)), KEYS)
            b_strength = s_rows.slice(7 * C, C).load(gl.SliceLayout(1, PIECES))
            b_dv = s_dY.load(PIECES).to(gl.float32) * b_strength[:, None]
            gl.store(
                dv + start * DVR + i_h * 128 + ((o_t + zero) * DVR + o_n), b_dv.to(dtype), mask=m
            )
            b_b, b_low = s_rows.slice(0, C).load(ROW), s_rows.slice(C, C).load(ROW)
            b_rq, b_rk = s_rows.slice(2 * C, C).load(ROW), s_rows.slice(3 * C, C).load(ROW)
            b_beta = s_rows.slice(7 * C, C).load(ROW)
            b_gam = gl.exp2(b_b)
            b_rest = s_rows.slice(C - 1, 1).load(ROW) - b_b
            b_lam = gl.exp2(b_rest + (s_rows.slice(2 * C - 1, 1).load(ROW) - b_low))
            async_copy.wait_group(0)
            fence_async_shared()
            gl.barrier()
            b_OS, b_YS = warpgroup_mma_wait(0, deps=(b_OS, b_YS))
            _put_sums(s_parts, s_q.load(KEYS).to(gl.float32) * b_OS, 0)
            b_dq += b_OS * gl.convert_layout(scale * b_gam, KEY_ROW)[:, None]
            _put_sums(s_parts, s_k.load(KEYS).to(gl.float32) * b_YS, 1)
            b_dk -= b_YS * gl.convert_layout(b_gam * b_beta, KEY_ROW)[:, None]
            b_OU = _start(s_do, s_U.permute((1, 0)), PAIRS)
            b_YU = _start(s_dY, s_U.permute((1, 0)), PAIRS)
            b_YV = _start(s_dY, s_v.permute((1, 0)), PAIRS)
            b_US = _start(s_U, s_dS.permute((1, 0)), KEYS)
            b_OU, b_YU, b_YV, b_US = warpgroup_mma_wait(0, deps=(b_OU, b_YU, b_YV, b_US))
            gl.barrier()
            _copy_values(
                a_do, a_dY, a_v, do, dY, v, start_next, length_next, tile_next, h_next, zero, HV, VR
            )
            # <S, dS'> is the sum of the diagonals of two products
            b_SS = _start(s_S.slice(0, C, 0), s_dS.slice(0, C, 0).permute((1, 0)), PAIRS)
            b_SS = warpgroup_mma(
                s_S.slice(C, C, 0), s_dS.slice(C, C, 0).permute((1, 0)), b_SS, is_async=True
            )
            _put_sums(s_parts, gl.where(o_i == o_j, b_YU, 0.0), 3)
            _put_sums(s_parts, gl.where(o_i == o_j, b_YV, 0.0), 6)
            _put_sums(s_parts, s_k.load(KEYS).to(gl.float32) * b_US, 2)
            b_dk += b_US * gl.convert_layout(b_lam, KEY_ROW)[:, None]
            b_QK = _start(s_q, s_k.permute((1, 0)), PAIRS)
            b_KK = _start(s_k, s_k.permute((1, 0)), PAIRS)
            b_D = b_b[:, None] - s_rows.slice(0, C).load(COLUMN)[None, :]
            b_D += b_low[:, None] - s_rows.slice(C, C).load(COLUMN)[None, :]
            b_D = gl.exp2(gl.where(o_i >= o_j, b_D, float("-inf")))
            b_column = s_rows.slice(3 * C, C).load(COLUMN)[None, :]
            b_SS, b_QK, b_KK = warpgroup_mma_wait(0, deps=(b_SS, b_QK, b_KK))
            _put_sums(s_parts, gl.where(o_i == o_j, b_SS, 0.0), 7)
            gl.barrier()
            _copy_states(a_U, a_S, a_dS, s_rows, U, S, dS, rows, tile_next, zero)

            b_dQK = b_OU * b_D
            s_2.store((b_dQK * (scale * b_rq)[:, None]).to(dtype))
            b_dQK *= scale * b_column
            s_1.store(b_dQK.to(dtype))
            b_E = gl.where(o_i > o_j, b_dQK * b_QK, 0.0) * b_rq[:, None]
            b_dLD = gl.where(o_i > o_j, -b_YU * b_D, 0.0)
            s_4.store((b_dLD * (b_beta * b_rk)[:, None]).to(dtype))
            b_dLD *= b_column
            s_3.store((b_dLD * b_beta[:, None]).to(dtype))
            b_dLD *= b_KK
            _put_sums(s_parts, b_dLD, 4)
            b_E += b_dLD * (b_beta * b_rk)[:, None]
            fence_async_shared()
            gl.barrier()
            b_dq = warpgroup_mma(s_1, s_k, b_dq, is_async=True)
            b_dk = warpgroup_mma(s_2.permute((1, 0)), s_q, b_dk, is_async=True)
            b_dk = warpgroup_mma(s_3, s_k, b_dk, is_async=True)
            b_dk = warpgroup_mma(s_4.permute((1, 0)), s_k, b_dk, is_async=True)
            b_high, b_low = split_words(b_E, dtype)
            b_dq, b_dk = warpgroup_mma_wait(0, deps=(b_dq, b_dk))
            gl.barrier()
            s_1.store(b_high)
            s_2.store(b_low)
            fence_async_shared()
            gl.barrier()
            b_from = _start(s_from, s_1, PAIRS)
            b_from = warpgroup_mma_wait(
                0, deps=(warpgroup_mma(s_from, s_2, b_from, is_async=True),)
            )
            _put_sums(s_parts, gl.where(o_i > o_j, b_from, 0.0), 5)
            left, right = gl.reshape(s_parts.load(FOURS), [SUMS * C, 2]).split()
            o_s = gl.arange(0, SUMS * C, left.type.layout) + zero
            gl.store(sums + tile * (SUMS * C) + o_s, left + right)
            if not last:
                async_copy.commit_group()
        zero = gl.where(i_c < 0, 1, 0)
        if L2NORM:
            p_r = rows + (i_c.to(gl.int64) * HV + i_hk * G) * (ROWS * C)
            b_dq = _through_norm(b_dq, a_q.index(zero), p_r + 2 * C, s_parts, 0)
            b_dk = _through_norm(b_dk, a_k.index(zero), p_r + 3 * C, s_parts, 1)
        b_dq, b_dk = (
            gl.convert_layout(b_dq.to(dtype), PIECES),
            gl.convert_layout(b_dk.to(dtype), PIECES),
        )
        gl.store(dq + start * DQR + i_hk * 128 + ((o_t + zero) * DQR + o_n), b_dq, mask=m)
        gl.store(dk + start * DKR + i_hk * 128 + ((o_t + zero) * DKR + o_n), b_dk, mask=m)
        gl.barrier()
        start_next, length_next = locate(n_next // H, tokens, NT, chunk_start, chunk_length, C)
        _copy_keys(a_q, a_k, q, k, start_next, length_next, n_next % H, zero, QR, KR)
    async_copy.wait_group(0)


@triton.jit(do_not_specialize=["tokens", "NT"])
def gates_kernel(
    sums,
    g,
    beta,
    A_log,
    dt_bias,
    rows,
    carry,
    dg,
    dbeta,
    dgates,
    chunk_start,
    chunk_length,
    scale,
    beta_max,
    tokens,
    NT,
    HV: tl.constexpr,
    C: tl.constexpr,
    GR: tl.constexpr,
    BR: tl.constexpr,
    DGR: tl.constexpr,
    DBR: tl.constexpr,
    TILES: tl.constexpr,
    DOT: tl.constexpr,
):
    """Computes dg, dbeta and dgates of `sums`; one program per (chunk, value head)."""
    pid = tl.program_id(0).to(tl.int64)
    i_c, i_h = pid // HV, pid % HV
    start, length = locate_chunk(i_c, tokens, NT, chunk_start, chunk_length, C)
    tile = i_c * HV + i_h
    o_c = tl.arange(0, C)
    m_t = o_c < length
    if length <= 0:
        if dgates is not None:
            tl.store(dgates + tile * 2 + tl.arange(0, 2), tl.zeros([2], tl.float32))
        return
    p_g, p_beta = g + start * GR + i_h + o_c * GR, beta + start * BR + i_h + o_c * BR
    b_s, rate, b_z = load_gates(p_g, p_beta, A_log, dt_bias, beta_max, i_h, m_t)
    p_rows, p_sums = rows + tile * (ROWS * C), sums + tile * (SUMS * C) + o_c
    b_last, b_last_low = tl.load(p_rows + C - 1), tl.load(p_rows + 2 * C - 1)
    p_rows += o_c
    b_b, b_rk = tl.load(p_rows), tl.load(p_rows + 3 * C)
    b_beta = tl.load(p_rows + 7 * C)
    b_gam = tl.exp2(b_b)
    b_kYS = b_gam * b_rk * tl.load(p_sums + C)
    b_reads = scale * b_gam * tl.load(p_rows + 2 * C) * tl.load(p_sums) - b_beta * b_kYS
    # what the token before wrote, so that its sum so far leaves out what this one writes
    before = o_c > 0
    b_lam = (b_last - tl.load(p_rows - 1, mask=before)) + (
        b_last_low - tl.load(p_rows + C - 1, mask=before)
    )
    b_writes = tl.load(p_sums + 2 * C - 1, mask=before) * tl.load(p_rows + 3 * C - 1, mask=before)
    b_writes = tl.where(before, tl.exp2(b_lam) * b_writes, 0.0)
    b_dbeta = tl.load(p_sums + 6 * C) + b_rk * tl.load(p_sums + 4 * C) - b_kYS
    b_dbeta = tl.where(b_beta >= LEAST_DIVISOR, tl.load(p_sums + 3 * C) / b_beta, b_dbeta)
    b_carry = tl.sum(tl.load(p_sums + 7 * C), axis=0)
    if carry is not None:
        for i_tile in range(0, TILES):
            b_carry += tl.load(carry + tile * TILES + i_tile)
    b_dg = (
        tl.load(p_sums + 5 * C)
        + tl.cumsum(b_writes, axis=0)
        + tl.cumsum(b_reads, axis=0, reverse=True)
    )
    b_dg += tl.exp2(b_last) * b_carry
    p_dg, p_dbeta = dg + start * DGR + i_h + o_c * DGR, dbeta + start * DBR + i_h + o_c * DBR
    p_dgates = None if dgates is None else dgates + tile * 2
    store_gates(b_dg, b_dbeta, b_s, rate, b_z, beta_max, m_t, p_dg, p_dbeta, p_dgates, DOT)


def takes(q, k, v, do, units, config: Config) -> bool:
    """Returns whether the kernels take a call in bfloat16: 128:128,
    in pieces of 16 bytes, without units.
    """
    sized = q.shape[3] == v.shape[3] == SIZE
    return compiles(config) and sized and in_pieces(q, k, v, do) and units is None


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
    carry,
    *,
    dq,
    dk,
    dv,
    dg,
    dbeta,
    dgates,
    scale,
    l2norm,
    beta_max,
    chunks: Chunks,
    config: Config,
):
    """Launches both kernels: fills dq and dk, of key heads, dv, dg,
    dbeta, and with A_log dgates.
    """
    H, HV, count = q.shape[2], v.shape[2], chunks.count * q.shape[2]
    sums = rows.new_empty((chunks.count, HV, SUMS.value, chunks.size))
    sizes = {"HV": HV, "C": chunks.size}
    places = chunks.start, chunks.length, scale
    strides = {"QR": q, "KR": k, "VR": v, "DQR": dq, "DKR": dk, "DVR": dv}
    gradients_kernel[(min(count, config.processors),)](
        q,
        k,
        v,
        do,
        rows,
        S,
        U,
        dY,
        dS,
        dq,
        dk,
        dv,
        sums,
        *places,
        chunks.tokens,
        chunks.per_sequence,
        count,
        H=H,
        **{name: row_stride(x) for name, x in strides.items()},
        L2NORM=l2norm,
        **sizes,
        **tile("hopper_gradients", SIZE).options(),
    )
    strides = {"GR": g, "BR": beta, "DGR": dg, "DBR": dbeta}
    gates_kernel[(chunks.count * HV,)](
        sums,
        g,
        beta,
        A_log,
        dt_bias,
        rows,
        carry,
        dg,
        dbeta,
        dgates,
        *places,
        beta_max or None,
        chunks.tokens,
        chunks.per_sequence,
        TILES=1 if carry is None else carry.shape[2],
        DOT=config.dot,
        **{name: row_stride(x) for name, x in strides.items()},
        **sizes,
        **tile("gates", 1).options(),
    )


def variants(K: int, V: int, itemsize: int, quick: bool):
    """Yields what `compile_only` compiles of this module."""
    row = config(K, V, itemsize=itemsize)
    if not row.prepare.gluon or K != SIZE or V != SIZE:
        return
    sizes = rows_of(2, 4, K, V) | {"C": row.C, "TILES": 2, "L2NORM": True, "DOT": row.dot}
    for layout, tables in layouts(quick).items():
        values = sizes | tables | ({"carry": None} if layout == "dense" else {})
        launch = tile("hopper_gradients", SIZE)
        yield Variant("hopper_gradients", layout, gradients_kernel, TYPES, launch, values)
        for form, arguments in gates(quick).items():
            own = values | arguments
            yield Variant("gates", f"{layout}, {form}", gates_kernel, TYPES, tile("gates", 1), own)
