"""Gated delta rule, backward in 16 bits: dY of chunks whose keys are alike is refined before the
gradients.

In the symbols of gated_delta_rule_bwd. The reverse scan has dY = M^T dU, where M is T rounded to 16
bits, and the gradients take it for the solution of (I + L)^T dY = dU. Where keys are alike and beta
is near 2, T changes its sign from token to token and hardly decays. The sum of beta_i K_i dY_i over
the tokens from t on, which dg_t multiplies with the state, then cancels, and the roundings of M do
not: dg was up to 4.6 times as far off as parity allows. With the residual X of M

    X  = (I + L) M - I                                      [C, C]   strictly lower, 0 if M were exact
    dY = M^T dU = (I + X)^T T^T dU                          [C, V]

the solution T^T dU is that of a system that has 1 on the diagonal and little beside it, by
fixed-point iteration, which is exact after C turns and needs few:

    dY' <- dY - X^T dY'                                     [C, V]

Only chunks take part where a row of L has absolute sums above ALIKE: random keys have 5, equal ones
64 beta. A program of other chunks reads those sums and ends. Where an X is large, the recurrence
itself diverges (beta |k|^2 > 2), no digit is left, and dY stays as it is. The state's
gradient keeps the unrefined dY, because a second word of T would cost the scan a tenth of its time.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false,
# reportIndexIssue=false (Triton's decorator adds the launch arguments and gives its own functions
# their types at compile time)
import triton
import triton.language as tl

from delta_trn.triton_kernels.chunks import Chunks
from delta_trn.triton_kernels.launch import Config, config, power_of_two, row_stride, take_turns
from delta_trn.triton_kernels.tiles import (
    ROWS,
    accumulate,
    locate_chunk,
    multiply,
    round_to,
    split_power,
)
from delta_trn.triton_kernels.variants import Variant, layouts, rows_of

ALIKE = tl.constexpr(16.0)
# the sum of a column of |X| up to which dY is refined; at most 4 where beta |k|^2 <= 2
SOUND = tl.constexpr(8.0)
TURNS = tl.constexpr(4)
HEADS = (
    16  # of a program, at most: one that has nothing to do waits for one load, however many it has
)

TYPES = {"*x": "k T dY", "*fp32": "rows", "*i64": "chunk_start chunk_length", "i32": "tokens NT"}


@triton.jit(do_not_specialize=["tokens", "NT"])
def refine_kernel(
    k,
    T,
    rows,
    dY,
    chunk_start,
    chunk_length,
    tokens,
    NT,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    KR: tl.constexpr,
    HEADS: tl.constexpr,
    SCALED: tl.constexpr,
    DOT: tl.constexpr,
):
    """Refines dY in place; one program per (chunk, HEADS value heads)."""
    GROUPS: tl.constexpr = (HV + HEADS - 1) // HEADS
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0).to(tl.int64)
    i_c, first = pid // GROUPS, (pid % GROUPS) * HEADS
    start, length = locate_chunk(i_c, tokens, NT, chunk_start, chunk_length, C)
    o_c = tl.arange(0, C)
    o_h = tl.arange(0, HEADS)
    m_h = (first + o_h < HV) & (length > 0)
    p_sums = rows + ((i_c * HV + first + o_h) * (ROWS * C))[:, None] + (8 * C + o_c)[None, :]
    b_sums = tl.load(p_sums, mask=m_h[:, None], other=0.0)
    b_most = tl.max(b_sums, axis=1)
    if tl.max(b_most, axis=0) <= ALIKE:
        return
    dtype = dY.dtype.element_ty
    o_k = tl.arange(0, KP)
    m_ck = (o_c < length)[:, None] & (o_k < K)[None, :]
    upper = o_c[:, None] < o_c[None, :]
    for i in range(0, HEADS):
        # the other heads of a program must not change a head's bits
        if tl.max(tl.where(o_h == i, b_most, 0.0), axis=0) > ALIKE:
            i_h = first + i
            i_hk = i_h // (HV // H)
            tile = i_c * HV + i_h
            p_rows = rows + tile * (ROWS * C) + o_c
            p_k = k + start * KR + i_hk * K + o_c[:, None] * KR + o_k[None, :]
            b_k = tl.load(p_k, mask=m_ck, other=0.0)
            b_M = tl.load(T + tile * (C * C) + o_c[:, None] * C + o_c[None, :])
            b_b = tl.load(p_rows)
            b_b_low = tl.load(p_rows + C)
            b_rk = tl.load(p_rows + 3 * C)
            if SCALED:
                b_rk = split_power(b_rk)[1]
            b_beta = tl.load(p_rows + 7 * C)
            b_D = (b_b[None, :] - b_b[:, None]) + (b_b_low[None, :] - b_b_low[:, None])
            b_D = tl.exp2(tl.where(upper, b_D, float("-inf")))
            # L^T, since K K^T is symmetric; in two words, because 1 is subtracted from what it
            # leaves of M
            b_L = multiply(b_k, tl.trans(b_k), DOT) * b_rk[:, None] * (b_beta * b_rk)[None, :] * b_D
            b_high = round_to(b_L, dtype, DOT)
            b_low = round_to(b_L - b_high.to(tl.float32), dtype, DOT)
            b_X = multiply(tl.trans(b_M), b_high, DOT)  # X^T from here on
            b_X = accumulate(b_X, tl.trans(b_M), b_low, DOT)
            b_M = tl.load(T + tile * (C * C) + o_c[:, None] + o_c[None, :] * C)
            b_X = tl.where(upper, b_X + b_M.to(tl.float32), 0.0)
            sound = tl.max(tl.sum(tl.abs(b_X), axis=1), axis=0) <= SOUND
            b_X = round_to(tl.where(sound, b_X, 0.0), dtype, DOT)
            for i_v in range(0, NV):
                o_v = i_v * BV + tl.arange(0, BV)
                m_v = (o_v < V)[None, :]
                p_dY = dY + tile * (C * V) + o_c[:, None] * V + o_v[None, :]
                b_rounded = tl.load(p_dY, mask=m_v, other=0.0)
                b_dY = b_rounded.to(tl.float32)
                for _ in tl.static_range(TURNS):
                    b_refined = b_dY - multiply(b_X, b_rounded, DOT)
                    b_rounded = round_to(b_refined, dtype, DOT)
                tl.store(p_dY, b_rounded, mask=m_v)


@take_turns
def refine(k, T, rows, *, dY, scaled: bool, chunks: Chunks, config: Config):
    """Launches `refine_kernel` on dY [NC, HV, C, V] of 16 bits; scaled: k is k_scaled."""
    H, K = k.shape[2:]
    HV, V = dY.shape[1], dY.shape[3]
    launch = config.refine
    heads = min(HEADS, power_of_two(HV, 1))
    refine_kernel[(chunks.count * -(-HV // heads),)](
        k,
        T,
        rows,
        dY,
        chunks.start,
        chunks.length,
        chunks.tokens,
        chunks.per_sequence,
        H=H,
        HV=HV,
        K=K,
        KP=power_of_two(K),
        V=V,
        BV=launch.columns,
        C=chunks.size,
        KR=row_stride(k),
        HEADS=heads,
        SCALED=scaled,
        DOT=config.dot,
        **launch.options(),
    )


def variants(K: int, V: int, itemsize: int, quick: bool):
    """Yields what `compile_only` compiles of this module: nothing in float32."""
    if itemsize > 2:
        return
    row = config(K, V, itemsize=itemsize)
    launch = row.refine
    sizes = {"K": K, "KP": power_of_two(K), "V": V, "BV": launch.columns} | rows_of(2, 4, K, V)
    for layout, tables in layouts(quick).items():
        values = sizes | tables | {"C": row.C, "HEADS": 4, "SCALED": False, "DOT": row.dot}
        yield Variant("refine", layout, refine_kernel, TYPES, launch, values)
