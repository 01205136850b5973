"""Pieces that several kernels share: products, gates, a chunk's place, the unit lower triangular inverse.

DOT, in every kernel, is Triton's input_precision, or "interpreted" where Triton's interpreter runs the
kernel. The interpreter (3.7.1) keeps bfloat16 as 16-bit integers: it truncates where the hardware rounds,
three times the error, and multiplies the integers in tl.dot. `round_to`, `multiply` and `accumulate` give the
hardware's arithmetic in both.
"""

# pyright: reportGeneralTypeIssues=false
# (Triton gives its own functions their types at compile time)
import triton
import triton.language as tl

# `rows` keeps eight float32 rows [C] per chunk and value head, f_q and f_k the factors of q and k as products
# read them: r_q and r_k, or what `split_power` leaves of them.
#     0  b                1  what float32 cut off b     2  r_q            3  r_k
#     4  gam f_k beta     5  gam f_q                    6  lam f_k        7  beta
ROWS = tl.constexpr(8)

# A smaller g, -inf included, counts as this one: exp of either is exactly 0 in float32 (from -104 on), and
# sums of these over a chunk keep the digits of the small ones.
RESET = tl.constexpr(-128.0)


@triton.jit
def round_to(x, dtype: tl.constexpr, DOT: tl.constexpr):
    """Rounds float32 x to `dtype`: to nearest, ties to even."""
    if DOT == "interpreted" and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = bits.to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def multiply(a, b, DOT: tl.constexpr):
    """Returns a b, accumulated in float32, which holds every product of two narrower numbers exactly."""
    if DOT == "interpreted":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b, input_precision=DOT)


@triton.jit
def accumulate(acc, a, b, DOT: tl.constexpr):
    """Returns acc + a b."""
    if DOT == "interpreted":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision=DOT)


@triton.jit
def softplus(z):
    """Returns log(1 + exp(z)) = max(z, 0) + 2 atanh(y), with e = exp(-|z|) and y = e / (2 + e).

    Not as log(1 + e): in float32 that is 0 from z = -17 on, where the answer is exp(z), and a fifth off at
    -15, where heads that hardly forget have their z. y <= 1/3, so the series leaves out 2e-8 of the result.
    """
    e = tl.exp(-tl.abs(z))
    y = e / (2.0 + e)
    w = y * y
    series = 1 / 5 + w * (1 / 7 + w * (1 / 9 + w * (1 / 11 + w * (1 / 13))))
    return tl.maximum(z, 0.0) + 2.0 * y * (1.0 + w * (1 / 3 + w * series))


@triton.jit
def scale_by_exp(A_log, y, z):
    """Returns exp(A_log) y, where y is softplus(z) or sigmoid(z).

    Below z = -20 both are exp(z) to the last digit, and only exp(A_log + z) is right where exp(A_log)
    overflows and y underflows.
    """
    least = tl.where(A_log > 60.0, -20.0, float("-inf"))
    return tl.where(z < least, tl.exp(A_log + z), tl.exp(A_log) * y)


@triton.jit
def compute_gates(b_g, b_beta, A_log, dt_bias, i_h, beta_max):
    """Returns g and beta of head i_h, computed from a and z by gated_delta_rule_fwd's formulas.

    A_log None: g is given as it is. beta_max None: beta is given as it is.
    """
    if A_log is not None:
        if dt_bias is not None:
            b_g += tl.load(dt_bias + i_h).to(tl.float32)
        b_g = -scale_by_exp(tl.load(A_log + i_h).to(tl.float32), softplus(b_g), b_g)
    if beta_max is not None:
        b_beta = beta_max * tl.sigmoid(b_beta)
    return b_g, b_beta


@triton.jit
def split_power(r):
    """Splits float32 r > 0 into a power of two and a factor in [1/2, 1), which enlarges nothing."""
    bits = r.to(tl.uint32, bitcast=True)
    power = (bits & 0x7F800000).to(tl.float32, bitcast=True)
    return 2.0 * power, ((bits & 0x007FFFFF) | 0x3F000000).to(tl.float32, bitcast=True)


@triton.jit
def invert_power(power):
    """Returns 1 / power exactly, which a GPU's division may not be; power is a power of two."""
    return (0x7F000000 - power.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def locate_chunk(i_c, tokens, NT, chunk_start, chunk_length, C: tl.constexpr):
    """Returns the first token and the number of tokens of chunk i_c; <= 0 tokens mark an unused slot.

    In dense batches, chunk i_c is one of NT per sequence. Packed batches have two tables, which the adapter
    computed on the device, so that no length travels to the host.
    """
    if chunk_start is not None:
        start = tl.load(chunk_start + i_c)
        length = tl.load(chunk_length + i_c)
    else:
        start = (i_c // NT) * tokens + (i_c % NT) * C
        length = tl.minimum(tokens - (i_c % NT) * C, C)
    return start, length


@triton.jit
def locate_sequence(i_n, tokens, NT, NS, span, cu_seqlens, chunk_offsets, C: tl.constexpr):
    """Returns the first token, the number of tokens and the first chunk of sequence i_n, or of segment i_n.

    Dense: every sequence has NS segments of `span` tokens; whole sequences are one segment. Packed: the
    tables say.
    """
    if cu_seqlens is not None:
        start = tl.load(cu_seqlens + i_n).to(tl.int64)
        length = tl.load(cu_seqlens + i_n + 1).to(tl.int64) - start
        first = tl.load(chunk_offsets + i_n).to(tl.int64)
    else:
        b = i_n // NS
        t = (i_n % NS) * span
        start = b * tokens + t
        length = tl.minimum(tokens - t, span)
        first = b * NT + t // C
    return start, length, first


@triton.jit
def _invert_diagonal_blocks(L, NB: tl.constexpr):
    """Returns (I + L)^-1 of NB strictly lower 16 x 16 blocks, by masked merging; L is [NB, 16, 16] float32.

    Inverses T of the diagonal blocks of size s become those of size 2 s. With `off` the blocks that join
    them, and since off T off = 0, this is exact:

        (T^-1 + off)^-1 = T - T off T

    A Neumann series over 16 tokens would be as short and lose every digit once keys are correlated: 6e-5 in
    float32 at correlation 0.99, 1e8 over 64 tokens.

    Products are ieee, here and in `_merge_blocks`: with beta = 2 and equal keys they reach 2,000 where the
    result is 2, so tf32, good to 5e-4, would leave nothing. As three tf32 products the kernel is a quarter
    longer, not shorter.
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
def _merge_blocks(b_T, L, s: tl.constexpr, n: tl.constexpr):
    """Turns the inverses of n diagonal blocks of size s into those of n / 2 blocks of size 2 s.

    L is the whole matrix. The inverse of (top, 0; off, bottom) has -bottom^-1 off top^-1 in its corner.
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
def invert_unit_lower(L, C: tl.constexpr):
    """Returns (I + L)^-1 for strictly lower float32 L [C, C] by merging blocks; C is 16, 32 or 64."""
    NB: tl.constexpr = C // 16
    if NB == 1:
        b_T = _invert_diagonal_blocks(tl.reshape(L, [1, 16, 16]), 1)
    else:
        i_row = tl.arange(0, NB)[:, None, None, None]
        i_column = tl.arange(0, NB)[None, None, :, None]
        b_blocks = tl.sum(tl.where(i_row == i_column, tl.reshape(L, [NB, 16, NB, 16]), 0.0), axis=2)
        b_T = _invert_diagonal_blocks(b_blocks, NB)
        b_T = _merge_blocks(b_T, L, 16, NB)
    if NB == 4:
        b_T = _merge_blocks(b_T, L, 32, 2)
    return tl.reshape(b_T, [C, C])
