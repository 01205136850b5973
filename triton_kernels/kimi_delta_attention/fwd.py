"""Kimi Delta Attention, forward, chunkwise: chunks are prepared in parallel, for
gated_delta_rule_fwd's scan.

The gated delta rule with a decay for each channel of a key (arXiv:2510.26692). For one chunk of C
tokens and one value head, S the state [K, V] at the chunk's start, q times scale:

    b     = sums of g from the chunk's first token on                       [C, K]
    gam   = exp(b),  lam_i = exp(b_C - b_i)                                 [C, K]
    kk_ij = sum_c k_ic k_jc exp(b_ic - b_jc) for i > j, else 0              [C, C]
    P_ij  = sum_c q_ic k_jc exp(b_ic - b_jc) for i >= j, else 0             [C, C]
    T  = (I + L)^-1,  L = diag(beta) kk                                     [C, C]
    U  = T Y,  Y = diag(beta) V - kg S,  kg = diag(beta) (gam . k)          [C, V]
    O  = qg S + P U,  qg = gam . q                                          [C, V]
    S' = Diag(gam_C) S + kl^T U,  kl = lam . k                              [K, V]

No difference of sums is ever taken for kk and P, and nothing is divided by a decay, which would
overflow. Blocks of 2 s tokens, s = 1, 2, ..., C / 2, each have a cut in their middle, and every
pair i > j lies on the two sides of exactly one cut. With f_i the decay between the cut and the
token i,

    f_i = exp(sum of g from the cut to i, with it)          right of the cut
    f_j = exp(sum of g behind j up to the cut)              left of it
    kk_ij = <k_i . f_i, k_j . f_j>

where both exponents are sums of g <= 0, so that neither factor underflows unless their product
does. The sums are products with matrices of 0 and 1, of g in two words in 16 bits. Gates of g, with
x = a + dt_bias:

    g = -exp(A_log) softplus(x)         or, with a lower bound,         g = lower_bound sigmoid(exp(A_log) x)

Layout, beyond that of gated_delta_rule_fwd:

    g [B, tokens, HV, K]           dt_bias [HV, K]              last [NC, HV, K] float32, gam_C
    position [B, tokens] int64     each token's place in its own sequence, or None; one whose place
                                   is 0 forgets what was before it, whatever its g is
    qg, kg, kl [B, tokens, HV, K]  which the scans take for q and k; rows has factors of 1 and, as
                                   there, beta

qg, kg and kl are contiguous. Tokens of q, k, g and beta lie QR, KR, GR and BR elements apart.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false,
# reportIndexIssue=false (Triton's decorator adds the launch arguments and gives its own functions
# their types at compile time)
import triton
import triton.language as tl

from delta_trn.triton_kernels import gated_delta_rule_fwd as rule
from delta_trn.triton_kernels.chunks import Chunks
from delta_trn.triton_kernels.kimi_delta_attention import prepare_hopper as hopper
from delta_trn.triton_kernels.launch import (
    Config,
    config,
    power_of_two,
    row_stride,
    take_turns,
    tile,
)
from delta_trn.triton_kernels.tiles import (
    LOG2E,
    RESET,
    ROWS,
    accumulate,
    exp2_of_words,
    forget_before,
    invert_unit_lower,
    load_decays,
    load_rate,
    locate_chunk,
    multiply,
    round_to,
    sigmoid,
)
from delta_trn.triton_kernels.variants import (
    GATE_ARGUMENTS,
    PACKED_ARGUMENTS,
    Variant,
    by_heads,
    channel_rows_of,
    layouts,
    of_tile,
    rows_of,
)

TYPES = {
    "*x": "q k T P qg kg kl",
    "*fp32": "g beta A_log dt_bias last rows",
    "*i64": "chunk_start chunk_length position",
    "fp32": "scale beta_max lower_bound",
    "i32": "tokens NT",
}


@triton.jit
def exp2_of(x):
    """Returns 2^x in float32; of a float64 with all digits."""
    b_high = x.to(tl.float32)
    return exp2_of_words(b_high, (x - b_high).to(tl.float32))


@triton.jit
def find_factors(b_g, o_c, C: tl.constexpr, dtype: tl.constexpr):
    """Returns gam and lam [C, BK], and gam_C [BK]: in float32 of float64 sums,
    since they multiply states.
    """
    b_sum = tl.cumsum(b_g.to(tl.float64 if dtype == tl.float32 else tl.float32), axis=0) * LOG2E
    b_last = tl.sum(tl.where((o_c == C - 1)[:, None], b_sum, 0.0), axis=0)
    return exp2_of(b_sum), exp2_of(b_last[None, :] - b_sum), exp2_of(b_last)


@triton.jit
def lies_between(t, i, level):
    """Returns whether token t decays token i on its way to the cut of i's block,
    of two halves of 2^level.
    """
    start = (i >> level) << level
    right = (i >> level) % 2 == 1
    first = tl.where(right, start, i + 1)
    end = tl.where(right, i + 1, start + (1 << level))
    return (t >= first) & (t < end)


@triton.jit
def add_sums(acc, chosen, x, dtype: tl.constexpr, DOT: tl.constexpr):
    """Returns acc + chosen x, for booleans [.., C, C] and float32 x;
    in 16 bits of two words, 2^-16 of x.
    """
    if len(x.shape) == 3:
        chosen = tl.broadcast_to(chosen, [x.shape[0], x.shape[1], x.shape[1]])
    if dtype == tl.float32:
        return accumulate(acc, chosen.to(tl.float32), x, DOT)
    else:
        b_high = (x.to(tl.uint32, bitcast=True) & 0xFFFF0000).to(tl.float32, bitcast=True)
        b_low = round_to(x - b_high, tl.bfloat16, DOT)
        b_high = b_high.to(tl.bfloat16)
        b_ones = tl.where(chosen, 1.0, 0.0).to(tl.bfloat16)
        return accumulate(accumulate(acc, b_ones, b_high, DOT), b_ones, b_low, DOT)


@triton.jit
def find_cut_factors(b_g, o_i, o_j, level, dtype: tl.constexpr, DOT: tl.constexpr):
    """Returns f [.., C, BK] for the cuts of a level. g times log2(e)."""
    if len(b_g.shape) == 2:
        # so g is stored as an operand in every turn, not before the loop: the compiler does not
        # know that 0 is added, and puts a fence between each store and the products behind it
        b_g += level * 0.0
    b_sum = tl.zeros(b_g.shape, tl.float32)
    return tl.exp2(add_sums(b_sum, lies_between(o_j, o_i, level), b_g, dtype, DOT))


@triton.jit
def find_norms(
    q, k, m_t, o_c, K: tl.constexpr, BK: tl.constexpr, QR: tl.constexpr, KR: tl.constexpr
):
    """Returns r_q and r_k [C], the reciprocal norms of a chunk's rows; q and k point at its first."""
    b_qq = tl.zeros(o_c.shape, tl.float32)
    b_kk = tl.zeros(o_c.shape, tl.float32)
    for i_k in range(0, (K + BK - 1) // BK):
        o_k = i_k * BK + tl.arange(0, BK)
        m = m_t[:, None] & (o_k < K)[None, :]
        b_q = tl.load(q + o_c[:, None] * QR + o_k[None, :], mask=m, other=0.0).to(tl.float32)
        b_k = tl.load(k + o_c[:, None] * KR + o_k[None, :], mask=m, other=0.0).to(tl.float32)
        b_qq += tl.sum(b_q * b_q, axis=1)
        b_kk += tl.sum(b_k * b_k, axis=1)
    return tl.rsqrt(b_qq + 1e-6), tl.rsqrt(b_kk + 1e-6)


@triton.jit
def add_cuts(
    b_kk, b_P, b_q, b_k, b_g, o_i, o_j, first, last, dtype: tl.constexpr, DOT: tl.constexpr
):
    """Adds kk and P of the levels from `first` to before `last`, and what pairs i < j would have.

    Tiles are those of a chunk or of its blocks of 16; o_i and o_j number rows and columns. g times
    log2(e).
    """
    for level in range(first, last):
        b_f = find_cut_factors(b_g, o_i, o_j, level, dtype, DOT)
        b_kf = round_to(b_k * b_f, dtype, DOT)
        b_fk = tl.trans(b_kf) if len(b_k.shape) == 2 else tl.permute(b_kf, (0, 2, 1))
        apart = (o_i >> level) ^ (o_j >> level) == 1
        b_kk += tl.where(apart, multiply(b_kf, b_fk, DOT), 0.0)
        b_P += tl.where(apart, multiply(round_to(b_q * b_f, dtype, DOT), b_fk, DOT), 0.0)
    return b_kk, b_P


@triton.jit
def spread_blocks(x, C: tl.constexpr):
    """Returns [C, C] with the blocks x [C / 16, 16, 16] on its diagonal, 0 elsewhere."""
    i_row = tl.arange(0, C // 16)[:, None, None, None]
    i_column = tl.arange(0, C // 16)[None, None, :, None]
    return tl.reshape(tl.where(i_row == i_column, x[:, :, None, :], 0.0), [C, C])


@triton.jit
def store_copies(
    b_q,
    b_k,
    b_g,
    b_beta,
    qg,
    kg,
    kl,
    p,
    m,
    o_c,
    C: tl.constexpr,
    dtype: tl.constexpr,
    DOT: tl.constexpr,
):
    """Stores the scaled copies of q and k at p where the mask m is; returns gam_C."""
    b_gam, b_lam, b_last = find_factors(b_g, o_c, C, dtype)
    tl.store(qg + p, round_to(b_q * b_gam, dtype, DOT), mask=m)
    tl.store(kg + p, round_to(b_k * b_gam * b_beta[:, None], dtype, DOT), mask=m)
    tl.store(kl + p, round_to(b_k * b_lam, dtype, DOT), mask=m)
    return b_last


@triton.jit(do_not_specialize=["tokens", "NT"])
def copies_kernel(
    q,
    k,
    g,
    A_log,
    dt_bias,
    position,
    rows,
    qg,
    kg,
    kl,
    chunk_start,
    chunk_length,
    scale,
    lower_bound,
    tokens,
    NT,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    C: tl.constexpr,
    QR: tl.constexpr,
    KR: tl.constexpr,
    GR: tl.constexpr,
    DOT: tl.constexpr,
):
    """Computes qg, kg and kl once more, of `rows`: three tensors that need not be kept for backward.

    One program per (chunk, value head, BK channels). lower_bound, with A_log None: a given g counts
    as `hopper` has it, which is at least that, or a reset where the head's first channel is -inf.
    """
    SLICES: tl.constexpr = (K + BK - 1) // BK
    pid = tl.program_id(0).to(tl.int64)
    i_k, i_h, i_c = pid % SLICES, pid // SLICES % HV, pid // (SLICES * HV)
    start, length = locate_chunk(i_c, tokens, NT, chunk_start, chunk_length, C)
    if length <= 0:
        return
    o_c = tl.arange(0, C)
    o_k = i_k * BK + tl.arange(0, BK)
    m_t, m_k = o_c < length, o_k < K
    m = m_t[:, None] & m_k[None, :]
    p_rows = rows + (i_c * HV + i_h) * (ROWS * C) + o_c
    i_q = i_h // (HV // H) * K
    b_q = tl.load(q + start * QR + i_q + o_c[:, None] * QR + o_k[None, :], mask=m, other=0.0)
    b_k = tl.load(k + start * KR + i_q + o_c[:, None] * KR + o_k[None, :], mask=m, other=0.0)
    p_g = start * GR + i_h * K + o_c[:, None] * GR + o_k[None, :]
    rate = None if A_log is None else load_rate(A_log, lower_bound, i_h)
    b_g, b_x = load_decays(
        g, rate, dt_bias, lower_bound, p_g, i_h * K + o_k[None, :], m, m_k[None, :]
    )
    if A_log is None and lower_bound is not None:
        b_first = tl.load(g + start * GR + i_h * K + o_c * GR, mask=m_t, other=0.0).to(tl.float32)
        b_g = tl.where((b_first == -float("inf"))[:, None], RESET, tl.maximum(b_x, lower_bound))
    b_g = forget_before(b_g, position, start, o_c, m_t)
    b_q = b_q.to(tl.float32) * (scale * tl.load(p_rows + 2 * C))[:, None]
    b_k = b_k.to(tl.float32) * tl.load(p_rows + 3 * C)[:, None]
    p = (start * HV + i_h) * K + o_c[:, None] * (HV * K) + o_k[None, :]
    dtype = k.dtype.element_ty
    store_copies(b_q, b_k, b_g, tl.load(p_rows + 7 * C), qg, kg, kl, p, m, o_c, C, dtype, DOT)


@triton.jit(do_not_specialize=["tokens", "NT"])
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
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    C: tl.constexpr,
    QR: tl.constexpr,
    KR: tl.constexpr,
    GR: tl.constexpr,
    BR: tl.constexpr,
    L2NORM: tl.constexpr,
    DOT: tl.constexpr,
):
    """Computes T, P, the scaled copies of q and k, last and the rows;
    one program per (chunk, value head).
    """
    pid = tl.program_id(0).to(tl.int64)
    i_c, i_h = pid // HV, pid % HV
    start, length = locate_chunk(i_c, tokens, NT, chunk_start, chunk_length, C)
    if length <= 0:
        return
    o_c = tl.arange(0, C)
    m_t = o_c < length
    dtype = k.dtype.element_ty
    tile = i_c * HV + i_h
    p_q = q + start * QR + i_h // (HV // H) * K
    p_k = k + start * KR + i_h // (HV // H) * K
    b_beta = tl.load(beta + start * BR + i_h + o_c * BR, mask=m_t, other=0.0).to(tl.float32)
    if beta_max is not None:
        b_beta = tl.where(m_t, beta_max * sigmoid(b_beta), 0.0)
    b_rq = tl.full([C], 1.0, tl.float32)
    b_rk = tl.full([C], 1.0, tl.float32)
    if L2NORM:
        b_rq, b_rk = find_norms(p_q, p_k, m_t, o_c, K, BK, QR, KR)

    b_kk, b_P = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    b_kk_16 = tl.zeros([C // 16, 16, 16], tl.float32)
    b_P_16 = b_kk_16
    rate = None if A_log is None else load_rate(A_log, lower_bound, i_h)
    o_i = tl.arange(0, 16)[None, :, None]
    o_j = tl.arange(0, 16)[None, None, :]
    for i_k in range(0, (K + BK - 1) // BK):
        o_k = i_k * BK + tl.arange(0, BK)
        m_k = o_k < K
        m = m_t[:, None] & m_k[None, :]
        b_q = tl.load(p_q + o_c[:, None] * QR + o_k[None, :], mask=m, other=0.0)
        b_k = tl.load(p_k + o_c[:, None] * KR + o_k[None, :], mask=m, other=0.0)
        p_g = start * GR + i_h * K + o_c[:, None] * GR + o_k[None, :]
        b_g, _ = load_decays(
            g, rate, dt_bias, lower_bound, p_g, i_h * K + o_k[None, :], m, m_k[None, :]
        )
        b_g = forget_before(b_g, position, start, o_c, m_t)
        p_g = (start * HV + i_h) * K + o_c[:, None] * (HV * K) + o_k[None, :]
        b_q = b_q.to(tl.float32) * (scale * b_rq)[:, None]
        b_k = b_k.to(tl.float32) * b_rk[:, None]
        b_last = store_copies(b_q, b_k, b_g, b_beta, qg, kg, kl, p_g, m, o_c, C, dtype, DOT)
        tl.store(last + tile * K + o_k, b_last, mask=m_k)
        b_g *= LOG2E
        b_qs = tl.reshape(b_q, [C // 16, 16, BK])
        b_ks = tl.reshape(b_k, [C // 16, 16, BK])
        b_gs = tl.reshape(b_g, [C // 16, 16, BK])
        b_P_16 += tl.where(o_i == o_j, tl.sum(b_qs * b_ks, axis=2)[:, :, None], 0.0)
        b_kk_16, b_P_16 = add_cuts(b_kk_16, b_P_16, b_qs, b_ks, b_gs, o_i, o_j, 0, 4, dtype, DOT)
        b_kk, b_P = add_cuts(
            b_kk, b_P, b_q, b_k, b_g, o_c[:, None], o_c[None, :], 4, C // 32 + 4, dtype, DOT
        )  # fmt: skip

    b_kk = tl.where(o_c[:, None] > o_c[None, :], b_kk + spread_blocks(b_kk_16, C), 0.0)
    b_P = tl.where(o_c[:, None] >= o_c[None, :], b_P + spread_blocks(b_P_16, C), 0.0)
    o_cc = o_c[:, None] * C + o_c[None, :]
    tl.store(P + tile * (C * C) + o_cc, round_to(b_P, dtype, DOT))
    b_L = b_kk * b_beta[:, None]
    p_rows = rows + tile * (ROWS * C) + o_c
    for row in tl.static_range(ROWS - 2):
        tl.store(
            p_rows + row * C,
            b_rq if row == 2 else b_rk if row == 3 else tl.full([C], 1.0, tl.float32),
        )
    tl.store(p_rows + 7 * C, b_beta)
    tl.store(p_rows + 8 * C, tl.sum(tl.abs(b_L), axis=1))
    tl.store(T + tile * (C * C) + o_cc, round_to(invert_unit_lower(b_L, C, dtype, DOT), dtype, DOT))


@take_turns
def prepare(
    q,
    k,
    g,
    beta,
    A_log,
    dt_bias,
    position,
    *,
    T,
    P,
    qg,
    kg,
    kl,
    last,
    rows,
    scale,
    l2norm,
    beta_max,
    lower_bound,
    chunks: Chunks,
    config: Config,
):
    """Launches a `prepare_kernel`, this or `hopper`'s: fills what stands behind the star, up to
    rows.

    A_log None: g is given as it is, and lower_bound, if not None, is what it is promised to keep.
    beta_max 0: beta is given as it is. lower_bound None: softplus. position None: no token forgets.
    """
    H, K, HV = q.shape[2], q.shape[3], g.shape[2]
    takes = l2norm and hopper.takes(q, k, g, lower_bound, config)
    arguments = (
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
        chunks.start,
        chunks.length,
        scale,
        beta_max or None,
        None if A_log is None else lower_bound,
        chunks.tokens,
        chunks.per_sequence,
    )
    sizes = {"H": H, "HV": HV, "K": K, "C": chunks.size} | config.prepare.options()
    sizes |= {"QR": row_stride(q), "KR": row_stride(k), "GR": row_stride(g), "BR": row_stride(beta)}
    if takes:
        hopper.prepare_kernel[(chunks.count * HV,)](
            *arguments, SLICES=hopper.slices_of_64(K), **sizes
        )
        return
    prepare_kernel[(chunks.count * HV,)](
        *arguments, BK=config.prepare.columns, L2NORM=l2norm, DOT=config.dot, **sizes
    )


@take_turns
def copy(
    q,
    k,
    g,
    A_log,
    dt_bias,
    position,
    rows,
    *,
    qg,
    kg,
    kl,
    scale,
    l2norm,
    lower_bound,
    chunks: Chunks,
    config: Config,
):
    """Launches `copies_kernel`: fills qg, kg and kl of what `prepare` left in rows.

    l2norm, lower_bound: as `prepare` took them, so that both make the same of g.
    """
    H, K, HV = q.shape[2], q.shape[3], g.shape[2]
    if A_log is None:  # only `hopper` holds a given g to its promise
        takes = l2norm and hopper.takes(q, k, g, lower_bound, config)
        lower_bound = hopper.SAFE.value if takes else None
    launch = tile("kimi_copies", K)
    copies_kernel[(chunks.count * HV * -(-K // launch.columns),)](
        q,
        k,
        g,
        A_log,
        dt_bias,
        position,
        rows,
        qg,
        kg,
        kl,
        chunks.start,
        chunks.length,
        scale,
        lower_bound,
        chunks.tokens,
        chunks.per_sequence,
        H=H,
        HV=HV,
        K=K,
        BK=launch.columns,
        C=chunks.size,
        QR=row_stride(q),
        KR=row_stride(k),
        GR=row_stride(g),
        DOT=config.dot,
        **launch.options(),
    )


def gates_of(quick: bool):
    """Returns the ways to pass g and beta: as they are, and by either gate."""
    bounded = {"gates made": {"lower_bound": None}, "gates with a bound": {}}
    given = {"gates given": dict.fromkeys((*GATE_ARGUMENTS, "lower_bound"))}
    return bounded if quick else given | bounded


def layouts_of(quick: bool):
    """Returns the layouts of sequences: those of the gated delta rule, and rows of documents, which
    `position` tells apart.
    """
    tables = {name: absent | {"position": None} for name, absent in layouts(quick).items()}
    return tables if quick else tables | {"documents": dict.fromkeys(PACKED_ARGUMENTS)}


def variants(K: int, V: int, itemsize: int, quick: bool):
    """Yields what `compile_only` compiles of this module: nothing in float16."""
    row = config(K, V, itemsize=itemsize, rule="kimi_")
    sizes = {
        "H": 2,
        "HV": 4,
        "K": K,
        "KP": power_of_two(K),
        "BK": row.prepare.columns,
        "V": V,
        "C": row.C,
    }
    sizes |= {"L2NORM": True, "DOT": row.dot} | channel_rows_of(2, 4, K, V)
    scans = by_heads("scan", K, V, itemsize, rule="kimi_")
    own = sizes | rows_of(4, 4, K, V) | dict.fromkeys(("QR", "KR"), 4 * K) | {"units": None}
    for layout, tables in layouts_of(quick).items():
        for form, arguments in gates_of(quick).items():
            values = sizes | tables | arguments
            yield Variant(
                "kimi_prepare", f"{layout}, {form}", prepare_kernel, TYPES, row.prepare, values
            )
            copies = tile("kimi_copies", K)
            own_copies = values | {"BK": copies.columns}
            yield Variant(
                "kimi_copies", f"{layout}, {form}", copies_kernel, TYPES, copies, own_copies
            )
            if form == "gates given" and row.prepare.gluon:
                own_copies = {n: x for n, x in own_copies.items() if n != "lower_bound"}
                name = f"{layout}, gates promised"
                yield Variant("kimi_copies", name, copies_kernel, TYPES, copies, own_copies)
            if form != "gates made" and row.prepare.gluon:
                values |= {"SLICES": hopper.slices_of_64(K)}
                yield Variant(
                    "kimi_prepare_hopper", f"{layout}, {form}", hopper.prepare_kernel, TYPES,
                    row.prepare, values,
                )  # fmt: skip
    for layout, tables in layouts(quick).items():
        states = ("initial_state", "final_state") if layout == "dense" else ()
        uses = {"": ("transition", *states), " segments": ("initial_state", "o", "S", "U")}
        for use, absent in uses.items():
            for heads, launch in scans.items():
                values = own | tables | dict.fromkeys(absent) | of_tile(launch)
                values |= {"STAGES": launch.stages}
                name = layout + use + heads
                yield Variant("kimi_scan", name, rule.scan_kernel, rule.TYPES, launch, values)
