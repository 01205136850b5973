"""Pieces that several kernels share: products, gates, a chunk's place, the unit lower triangular
inverse.

DOT, in every kernel, is Triton's input_precision, or "interpreted" where Triton's interpreter runs
the kernel. The interpreter (3.7.1) keeps bfloat16 as 16-bit integers: it truncates where the
hardware rounds, three times the error, and multiplies the integers in tl.dot. `round_to`,
`multiply` and `accumulate` give the hardware's arithmetic in both.
"""

# pyright: reportGeneralTypeIssues=false
# (Triton gives its own functions their types at compile time)
import triton
import triton.language as tl

# `rows` keeps nine float32 rows [C] per chunk and value head, f_q and f_k the factors of q and k as
# products read them: r_q and r_k, or what `split_power` leaves of them.
#     0  b log2(e)        1  what float32 cut off it    2  r_q            3  r_k
#     4  gam f_k beta     5  gam f_q                    6  lam f_k        7  beta
#     8  sums of |L| over rows of it
ROWS = tl.constexpr(9)

# b is kept as a logarithm to the base 2: the hardware has exp2 only, and exp would multiply each
# element
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# 15 bits: its product with a whole number below 512 is exact
LN2_HIGH = tl.constexpr(0.693145751953125)

# A smaller g, -inf included, counts as this one: exp of either is exactly 0 in float32 (from -104
# on), and sums of these over a chunk keep the digits of the small ones.
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
    """Returns the matrix product of a and b. It adds in float32,
    which holds products of 16 bits exactly.
    """
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
def accumulate_in_turn(acc, a, b, scale, PIPELINED: tl.constexpr, DOT: tl.constexpr):
    """Returns acc + a b, for a loop that also reads a or b elementwise; scale is any finite
    argument.

    Where loads of later turns run ahead (PIPELINED), Triton 3.4 to 3.9 gives such a tile one buffer
    too few: the copy for a later turn may overwrite what the product still reads. A use of the sum
    within the turn makes Triton wait for the product before it starts that copy. The compiler does
    not know that 0 is added.
    """
    acc = accumulate(acc, a, b, DOT)
    if PIPELINED:
        acc += scale * 0.0
    return acc


@triton.jit
def by_row(x, UPRIGHT: tl.constexpr):
    """Returns x, a value for each row of a tile, as the tile with one column;
    not UPRIGHT: transposed.
    """
    if UPRIGHT:
        return x[:, None]
    else:
        return x[None, :]


@triton.jit
def by_column(x, UPRIGHT: tl.constexpr):
    """Returns x, a value for each column of a tile, as the tile with one row;
    not UPRIGHT: transposed.
    """
    if UPRIGHT:
        return x[None, :]
    else:
        return x[:, None]


@triton.jit
def accumulate_alone(acc, a, b, taken, ALONE: tl.constexpr, DOT: tl.constexpr):
    """Returns acc + a b; ALONE: in a branch, for which `taken` must hold, unknown to the compiler.

    Triton gives the rows of a product that another one follows to all warps. Eight warps have 128
    rows then, and compute each of 64 twice. It does not look past a branch, and so divides the
    columns, too.
    """
    if ALONE:
        if taken:
            acc = accumulate(acc, a, b, DOT)
    else:
        acc = accumulate(acc, a, b, DOT)
    return acc


@triton.jit
def multiply_from_left(a, x, taken, UPRIGHT: tl.constexpr, ALONE: tl.constexpr, DOT: tl.constexpr):
    """Returns a x for a matrix a and a tile x; not UPRIGHT: x and the result are transposed.

    taken, ALONE: as `accumulate_alone` has them, for upright tiles.
    """
    if UPRIGHT:
        b_zeros = tl.zeros([a.shape[0], x.shape[1]], dtype=tl.float32)
        return accumulate_alone(b_zeros, a, x, taken, ALONE, DOT)
    else:
        return multiply(x, tl.trans(a), DOT)


@triton.jit
def add_from_left(acc, a, x, UPRIGHT: tl.constexpr, DOT: tl.constexpr):
    """Returns acc + a x for a matrix a and tiles acc and x; not UPRIGHT:
    all but a are transposed.
    """
    if UPRIGHT:
        return accumulate(acc, a, x, DOT)
    else:
        return accumulate(acc, x, tl.trans(a), DOT)


@triton.jit
def exp(x):
    """Returns e^x for x below 88, right to the last digits where x is large, too.

    tl.exp is 2^(x log2 e), and the rounding of that exponent makes e^-58 wrong by up to 3e-6.
    """
    x = tl.where(x < -150.0, -150.0, x)  # 0 in float32 as well, and -inf would make NaN below
    n = tl.floor(x * LOG2E + 0.5)
    return tl.exp2(n) * tl.exp(x - n * LN2_HIGH - n * (LN2 - LN2_HIGH))


@triton.jit
def sigmoid(z):
    """Returns 1 / (1 + e^-z) with all its digits, also where it is small."""
    e = exp(-tl.abs(z))
    return tl.where(z < 0.0, e, 1.0) / (1.0 + e)


@triton.jit
def softplus(z):
    """Returns log(1 + exp(z)) = max(z, 0) + 2 atanh(y), with e = exp(-|z|) and y = e / (2 + e).

    Not as log(1 + e): in float32 that is 0 from z = -17 on, where the answer is exp(z), and a fifth
    off at
    -15, where heads that hardly forget have their z. y <= 1/3, so the series leaves out 2e-8 of the result.
    """
    e = exp(-tl.abs(z))
    y = e / (2.0 + e)
    w = y * y
    series = 1 / 5 + w * (1 / 7 + w * (1 / 9 + w * (1 / 11 + w * (1 / 13))))
    return tl.maximum(z, 0.0) + 2.0 * y * (1.0 + w * (1 / 3 + w * series))


@triton.jit
def scale_by_exp(A_log, y, z):
    """Returns exp(A_log) y, where y is softplus(z) or sigmoid(z).

    Below z = -20 both are exp(z) to the last digit, and only exp(A_log + z) is right where
    exp(A_log) overflows or y underflows.
    """
    least = tl.where(A_log > 60.0, -20.0, -87.0)
    return tl.where(z < least, exp(A_log + z), exp(A_log) * y)


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
        b_beta = beta_max * sigmoid(b_beta)
    return b_g, b_beta


@triton.jit
def load_rate(A_log, lower_bound, i_h):
    """Returns A_log of head i_h, at most 80 with a bound: there,
    a gate is at its end unless x is tiny.
    """
    rate = tl.load(A_log + i_h).to(tl.float32)
    return rate if lower_bound is None else tl.minimum(rate, 80.0)


@triton.jit
def load_decays(g, rate, dt_bias, lower_bound, p_g, o_bias, m, m_bias):
    """Returns g at p_g, 0 where the mask m is not, and what the gate makes it of, x, or g itself.

    rate: of `load_rate`, or None. A reset counts as RESET. The formulas: see
    kimi_delta_attention.fwd.
    """
    b_x = tl.load(g + p_g, mask=m, other=0.0).to(tl.float32)
    b_g = b_x
    if rate is not None:
        if dt_bias is not None:
            b_x += tl.load(dt_bias + o_bias, mask=m_bias, other=0.0).to(tl.float32)
        if lower_bound is not None:
            b_g = lower_bound * sigmoid(exp(rate) * b_x)
        else:
            b_g = -scale_by_exp(rate, softplus(b_x), b_x)
        b_g = tl.where(m, b_g, 0.0)
    return tl.where(b_g < RESET, RESET, b_g), b_x


@triton.jit
def forget_before(b_g, position, start, o_c, m_t):
    """Returns g [C, BK] with RESET at tokens whose place is 0; position None: g as it is.

    start: the first of the chunk's tokens, o_c, in `position`, which counts those of all rows.
    """
    if position is not None:
        b_place = tl.load(position + start + o_c, mask=m_t, other=1)
        b_g = tl.where((b_place == 0)[:, None], RESET, b_g)
    return b_g


@triton.jit
def exp2_of_words(high, low):
    """Returns 2^(high + low), where low is what float32 cut off high."""
    return tl.exp2(high) * (1.0 + LN2 * low)


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
    """Returns the first token and the number of tokens of chunk i_c; <= 0 tokens mark an unused
    slot.

    In dense batches, chunk i_c is one of NT per sequence. Packed batches have two tables, which the
    adapter computed on the device, so that no length travels to the host.
    """
    if chunk_start is not None:
        start = tl.load(chunk_start + i_c)
        length = tl.load(chunk_length + i_c)
    else:
        start = (i_c // NT).to(tl.int64) * tokens + (i_c % NT) * C
        length = tl.minimum(tokens - (i_c % NT) * C, C)
    return start, length


@triton.jit
def locate_sequence(i_n, tokens, NT, NS, span, cu_seqlens, chunk_offsets, C: tl.constexpr):
    """Returns the first token, the number of tokens and the first chunk of sequence i_n, or of
    segment i_n.

    Dense: every sequence has NS segments of `span` tokens; whole sequences are one segment. Packed:
    the tables say.
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
def _invert_diagonal_blocks(L, SIZE: tl.constexpr):
    """Returns (I + L)^-1 of strictly lower blocks; L is [blocks, SIZE, SIZE] float32.

    Column by column, in float32 throughout: once T_j: is solved, it is subtracted from the rows
    after it.

        T <- T - L_:j T_j:
    """
    o = tl.arange(0, SIZE)
    b_T = tl.zeros_like(L) + tl.where(o[None, :, None] == o[None, None, :], 1.0, 0.0)
    for j in tl.static_range(0, SIZE - 1):
        b_column = tl.sum(tl.where((o == j)[None, None, :], L, 0.0), axis=2)
        b_row = tl.sum(tl.where((o == j)[None, :, None], b_T, 0.0), axis=1)
        b_T -= b_column[:, :, None] * b_row[:, None, :]
    return b_T


@triton.jit
def _split(x, dtype: tl.constexpr, DOT: tl.constexpr):
    """Splits float32 x into two numbers of 16 bits, whose sum lacks at most 2^-16 of x.

    bfloat16's first is cut off, not rounded: so it is the upper half of x, whichever way it is
    read.
    """
    if dtype == tl.bfloat16:
        high = (x.to(tl.uint32, bitcast=True) & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        high = x.to(dtype).to(tl.float32)
    return high.to(dtype), round_to(x - high, dtype, DOT)


@triton.jit
def _multiply_precisely(a, b, dtype: tl.constexpr, DOT: tl.constexpr):
    """Returns a b for float32 a and b: in float32, or as three products of 16 bits on the tensor
    cores.

    The fourth would be below 2^-16.
    """
    if dtype == tl.float32:
        return tl.dot(a, b, input_precision="ieee")
    else:
        a_high, a_low = _split(a, dtype, DOT)
        b_high, b_low = _split(b, dtype, DOT)
        b_product = multiply(a_high, b_high, DOT)
        b_product = accumulate(b_product, a_low, b_high, DOT)
        return accumulate(b_product, a_high, b_low, DOT)


@triton.jit
def invert_unit_lower(L, C: tl.constexpr, dtype: tl.constexpr, DOT: tl.constexpr):
    """Returns (I + L)^-1 for strictly lower float32 L [C, C]; C is 16, 32 or 64, dtype that of the
    operands.

    With B the inverse of the diagonal blocks of 16, zero elsewhere, and M = B (L outside of them),
    four blocks give M^4 = 0, and two M^2 = 0, so that this is exact:

        (I + L)^-1 = (I + M)^-1 B = (I - M) (I + M^2) B

    For float32 operands blocks have 32 tokens, as many as chunks: where keys are equal and beta is
    2, T is
    +-2, and products with it are sums that cancel, with errors that depend on the order of their terms.

    A power series over tokens would be as exact on paper and lose every digit once keys are
    correlated: over 16 tokens 6e-5 in float32 at correlation 0.99, over 64 tokens 1e8. The powers
    of M are no larger than the result: M says how much of one block of tokens another predicts.
    """
    SIZE: tl.constexpr = 32 if dtype == tl.float32 and C > 16 else 16  # pyright: ignore[reportAssignmentType]
    NB: tl.constexpr = C // SIZE
    i_row = tl.arange(0, NB)[:, None, None, None]
    i_column = tl.arange(0, NB)[None, None, :, None]
    b_blocks = tl.sum(tl.where(i_row == i_column, tl.reshape(L, [NB, SIZE, NB, SIZE]), 0.0), axis=2)
    b_blocks = tl.reshape(_invert_diagonal_blocks(b_blocks, SIZE), [NB, SIZE, 1, SIZE])
    b_T = tl.reshape(tl.where(i_row == i_column, b_blocks, 0.0), [C, C])
    if NB > 1:
        block = tl.arange(0, C) // SIZE
        b_M = _multiply_precisely(
            b_T, tl.where(block[:, None] > block[None, :], L, 0.0), dtype, DOT
        )
        if NB == 4:
            b_T += _multiply_precisely(_multiply_precisely(b_M, b_M, dtype, DOT), b_T, dtype, DOT)
        b_T -= _multiply_precisely(b_M, b_T, dtype, DOT)
    return b_T
