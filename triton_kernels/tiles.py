"""Tile pieces that more than one kernel uses: products, a chunk's place, the unit-lower-triangular inverse.

DOT, in every kernel, is Triton's input_precision, or "interpreted" where Triton's interpreter runs the
kernel. The interpreter (3.7.1) keeps bfloat16 as 16-bit integers: it truncates where the hardware rounds,
three times the error, and multiplies the integers in tl.dot. `rounded`, `product` and `accumulate` give the
hardware's arithmetic in both.
"""

# pyright: reportGeneralTypeIssues=false
# (Triton gives its own functions their types at compile time)
import triton
import triton.language as tl

# per chunk and value head, `rows`: b and what float32 cut off it, r_q, r_k, gam r_k beta, scale gam r_q,
# lam r_k, beta
ROWS = tl.constexpr(8)


@triton.jit
def rounded(x, dtype: tl.constexpr, DOT: tl.constexpr):
    """float32 x in `dtype`, to nearest, ties to even."""
    if DOT == "interpreted" and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = bits.to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def product(a, b, DOT: tl.constexpr):
    """a b, accumulated in float32, which holds every product of two narrower numbers exactly."""
    if DOT == "interpreted":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b, input_precision=DOT)


@triton.jit
def accumulate(acc, a, b, DOT: tl.constexpr):
    """acc + a b."""
    if DOT == "interpreted":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision=DOT)


@triton.jit
def split_product(x, hi, lo, dtype: tl.constexpr, DOT: tl.constexpr):
    """x (hi + lo) for float32 x: three products of `dtype`, of which the fourth would be below 2^-16; or one.

    hi + lo is N, whose rows reach absolute sums of 2 C where keys are alike and beta is 2: rounded to
    bfloat16, N and x would lose five times what the rest of the computation loses.
    """
    if dtype == tl.float32:
        return product(x, hi, DOT)
    else:
        b_hi = rounded(x, dtype, DOT)
        b_lo = rounded(x - b_hi.to(tl.float32), dtype, DOT)
        b_y = product(b_hi, hi, DOT)
        b_y = accumulate(b_y, b_lo, hi, DOT)
        return accumulate(b_y, b_hi, lo, DOT)


@triton.jit
def softplus(z):
    """log(1 + exp(z)) = max(z, 0) + 2 atanh(y), with e = exp(-|z|) and y = e / (2 + e).

    Not log(1 + e): in float32 that is 0 from z = -17 on, where the answer is exp(z), and a fifth off at -15;
    heads that hardly forget live there. y <= 1/3, so what the series leaves out is 2e-8 of the result.
    """
    e = tl.exp(-tl.abs(z))
    y = e / (2.0 + e)
    w = y * y
    series = 1 / 5 + w * (1 / 7 + w * (1 / 9 + w * (1 / 11 + w * (1 / 13))))
    return tl.maximum(z, 0.0) + 2.0 * y * (1.0 + w * (1 / 3 + w * series))


@triton.jit
def made_gates(
    b_g, b_beta, A_log, dt_bias, i_h, beta_max, GATE: tl.constexpr, BIAS: tl.constexpr, SIGMOID: tl.constexpr
):  # fmt: skip
    """g and beta of head i_h: as they are, or made of a and z by gated_delta_rule_fwd's formulas."""
    if GATE:
        if BIAS:
            b_g += tl.load(dt_bias + i_h).to(tl.float32)
        b_g = -tl.exp(tl.load(A_log + i_h).to(tl.float32)) * softplus(b_g)
    if SIGMOID:
        b_beta = beta_max * tl.sigmoid(b_beta)
    return b_g, b_beta


@triton.jit
def chunk_span(i_c, T, NT, chunk_start, chunk_length, C: tl.constexpr, PACKED: tl.constexpr):
    """First token and number of tokens of chunk i_c; a length <= 0 marks a slot that no sequence uses.

    Dense batches need no table: chunk i_c of NT per sequence. Packed ones read the two tables the adapter
    computed on the device, so that no length ever travels to the host.
    """
    if PACKED:
        start = tl.load(chunk_start + i_c)
        length = tl.load(chunk_length + i_c)
    else:
        start = (i_c // NT) * T + (i_c % NT) * C
        length = tl.minimum(T - (i_c % NT) * C, C)
    return start, length


@triton.jit
def sequence_span(i_n, T, NT, NS, L, cu_seqlens, chunk_offsets, C: tl.constexpr, PACKED: tl.constexpr):
    """First token, number of tokens and first chunk of sequence i_n; of a segment where sequences are cut.

    Dense: NS segments of L tokens a sequence, 1 of T where sequences are whole. Packed: as the tables say.
    """
    if PACKED:
        start = tl.load(cu_seqlens + i_n).to(tl.int64)
        length = tl.load(cu_seqlens + i_n + 1).to(tl.int64) - start
        first = tl.load(chunk_offsets + i_n).to(tl.int64)
    else:
        b = i_n // NS
        t = (i_n % NS) * L
        start = b * T + t
        length = tl.minimum(T - t, L)
        first = b * NT + t // C
    return start, length, first


@triton.jit
def _diagonal_inverse(L, NB: tl.constexpr):
    """(I + L)^-1 of NB strictly lower 16 x 16 blocks, by masked merging; L is [NB, 16, 16] float32.

    Inverses of the diagonal blocks of size s become those of size 2 s: with `off` the blocks that join them,
    (T^-1 + off)^-1 = T - T off T exactly, since off T off = 0. A Neumann series over 16 tokens would be as
    short and lose every digit once keys are correlated: 6e-5 in float32 at correlation 0.99, 1e8 over 64
    tokens.

    ieee, here and in `_merge`: with beta = 2 and equal keys the products reach 2,000 where the result is 2,
    so tf32, good to 5e-4, would leave nothing. As three tf32 products the kernel is a quarter longer, not
    shorter.
    """
    o = tl.arange(0, 16)
    row = o[None, :, None]
    col = o[None, None, :]
    b_T = tl.where(row == col, 1.0, tl.where(row >> 1 == col >> 1, -L, 0.0))
    for level in tl.static_range(1, 4):
        joined = (row >> (level + 1) == col >> (level + 1)) & (row >> level != col >> level)
        b_off = tl.dot(b_T, tl.where(joined, L, 0.0), input_precision="ieee")
        b_T -= tl.dot(b_off, b_T, input_precision="ieee")
    return b_T


@triton.jit
def _merge(b_T, L, s: tl.constexpr, n: tl.constexpr):
    """Inverses of n diagonal blocks of size s -> of n / 2 blocks of size 2 s; L is the whole matrix.

    (top, 0; off, bottom)^-1 has -bottom^-1 off top^-1 in its corner.
    """
    i_row = tl.arange(0, n)[:, None, None, None]
    i_column = tl.arange(0, n)[None, None, :, None]
    corner = (i_row % 2 == 1) & (i_column == i_row - 1)
    b_off = tl.sum(tl.where(corner, tl.reshape(L, [n, s, n, s]), 0.0), axis=2)  # [n, s, s], zero for even n
    b_off = tl.sum(tl.reshape(b_off, [n // 2, 2, s, s]), axis=1)
    half = tl.arange(0, 2)[None, :, None, None]
    b_pair = tl.reshape(b_T, [n // 2, 2, s, s])
    b_top = tl.sum(tl.where(half == 0, b_pair, 0.0), axis=1)
    b_bottom = tl.sum(tl.where(half == 1, b_pair, 0.0), axis=1)
    b_corner = tl.dot(b_off, b_top, input_precision="ieee")
    b_corner = -tl.dot(b_bottom, b_corner, input_precision="ieee")
    i_half = tl.arange(0, 2)[None, :, None, None, None]
    j_half = tl.arange(0, 2)[None, None, None, :, None]
    b_out = tl.where(i_half == j_half, tl.reshape(b_T, [n // 2, 2, s, 1, s]), 0.0)
    b_corner = tl.reshape(b_corner, [n // 2, 1, s, 1, s])
    b_out += tl.where((i_half == 1) & (j_half == 0), b_corner, 0.0)
    return tl.reshape(b_out, [n // 2, 2 * s, 2 * s])


@triton.jit
def unit_lower_inverse(L, C: tl.constexpr):
    """(I + L)^-1 of a strictly lower [C, C] float32 L, C in 16, 32, 64, merging blocks of 1, 2, 4 ... C."""
    NB: tl.constexpr = C // 16
    if NB == 1:
        b_T = _diagonal_inverse(tl.reshape(L, [1, 16, 16]), 1)
    else:
        i_row = tl.arange(0, NB)[:, None, None, None]
        i_column = tl.arange(0, NB)[None, None, :, None]
        b_blocks = tl.sum(tl.where(i_row == i_column, tl.reshape(L, [NB, 16, NB, 16]), 0.0), axis=2)
        b_T = _diagonal_inverse(b_blocks, NB)
        b_T = _merge(b_T, L, 16, NB)
    if NB == 4:
        b_T = _merge(b_T, L, 32, 2)
    return tl.reshape(b_T, [C, C])
