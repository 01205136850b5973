"""Computes one chunk of Kimi Delta Attention on chip: a decay per channel in place of one per token.

Letters and tiles are those of `nki_kernels.chunk`, but Q and K are normalized before (float32), b, gamma and
lambda are [C, K], and what scales rows there is multiplied into copies of Q and K here:

    gamma = exp(b)    lambda_i = exp(b_C - b_i)    gamma_C [K]
    kk_ij = sum_c k_ic k_jc exp(b_ic - b_jc), i > j        P_ij = sum_c q_ic k_jc exp(b_ic - b_jc), i >= j
    L = diag(beta) kk    R = diag(beta) (V - (gamma . K) S)    O = scale ((gamma . Q) S + (P T) R)
    S' = Diag(gamma_C) S + W^T R,  W = T^T (lambda . K)

Source: arXiv:2510.26692. Neither b_i - b_j nor exp(-b_j) is taken. Blocks of 1, 2, 4, .. tokens are joined in
pairs, a level each, and a pair i > j of tokens belongs to the level that joins its blocks, at token m:

    exp(b_i - b_j) = f_i f_j    f_i = exp(sum of g over m <= t <= i)    f_j = exp(sum of g over j < t < m)

In the left half of a block f is of the second kind, in the right half of the first. All exponents of a level
are products of g with a matrix of zeros and ones, W_level [C, C], sums of g <= 0. A level is a product of
f . K with f . Q and f . K, of which a mask keeps the pairs that belong to it. The last chunk of a sequence
has as many rows as the others; those behind its tokens have q = k = v = g = beta = 0.

gamma and lambda multiply states: their sums are of two parts of g, as `plan.split_decays` makes them.
"""

from delta_trn.nki_kernels.chunk import (
    build_diagonals,
    invert_key_squares,
    round_tile,
    scale_lanes,
    sum_key_squares,
)
from delta_trn.nki_kernels.language import nisa, nl
from delta_trn.nki_kernels.plan import BANK, split
from delta_trn.nki_kernels.tiles import (
    add_product,
    add_selected,
    add_transposed,
    copy_scaled,
    multiply,
    multiply_elements,
    multiply_on_gpsimd,
    psum,
    sbuf,
)
from delta_trn.nki_kernels.triangular import list_block_columns, select_range

MASKED = 4  # levels whose blocks are too small for the partitions at which instructions may start
ROUNDING = 1.5 * 2.0**15  # g plus this is a multiple of 2^-8 for -2^14 < g <= 0


def view_halves(tile_sb, start, width, s, side):
    """Views the left (side 0) or right halves of blocks of 2 s columns as [P, pairs, s].

    They are columns start .. start + width of the flat free axis of the tile.
    """
    free = 1
    for size in tile_sb.shape[1 : len(tile_sb.shape)]:
        free = free * size
    return tile_sb.ap(
        pattern=[[free, tile_sb.shape[0]], [2 * s, width // (2 * s)], [1, s]], offset=start + side * s
    )


def build_levels(table):
    """Builds what levels take, once per call, in a dict:

    count       levels: log2 C
    sums        W_level of all levels side by side, [C, count, C], of 0 and 1
    masks       per level the pairs (j, i) that belong to it, of the right halves i alone, [C, count, C / 2]
    """
    C = table["rows"]
    count = 0
    while 2**count < C:
        count = count + 1
    sums_sb, masks_sb = sbuf((C, count, C)), sbuf((C, count, C // 2), nl.uint8)
    half_ones_sb = sbuf((C, C // 2))
    nisa.memset(dst=half_ones_sb, value=1.0)
    for level in range(count):
        s = 2**level
        shared_sb = select_range(table["ones"][0:C, 0:C], 0, s, [[s, C // s], [0, s]])
        for side in range(2):
            triangle_sb = (table["strict_lower"], table["upper"])[side]
            multiply(
                view_halves(sums_sb, level * C, C, s, side),
                view_halves(shared_sb, 0, C, s, side),
                view_halves(triangle_sb, 0, C, s, side),
            )
        mask_sb = select_range(half_ones_sb, 0, s, [[2 * s, C // (2 * s)], [0, s]])
        nisa.tensor_copy(dst=masks_sb[:, level, :], src=mask_sb)
    return {"count": count, "sums": sums_sb, "masks": masks_sb}


def normalize_keys(chunk, table, l2norm):
    """Adds qk to the chunk as float32 and normalized: `keys` [rows, 2, key heads, K]; else qk itself."""
    chunk.keys = chunk.qk
    if l2norm:
        rows, _, heads, K = chunk.qk.shape
        chunk.inverse_norms = invert_key_squares(sum_key_squares(chunk.qk, table), table)
        chunk.keys = sbuf((rows, 2, heads, K))
        for side in range(2):
            for h in range(heads):
                factor = chunk.inverse_norms[0][:, side, h : h + 1]
                copy_scaled(chunk.keys[:, side, h, :], chunk.qk[:, side, h, :], factor)


def transpose_keys(chunk, table):
    """Adds the transposes of q and k, [K, 2, key heads, rows], and their products `own` [rows, key heads]."""
    rows, _, heads, K = chunk.keys.shape
    identity_sb = table["identity"] if chunk.keys.dtype == nl.float32 else table["rounded_identity"]
    chunk.qk_t = sbuf((K, 2, heads, rows), chunk.keys.dtype)
    for side in range(2):
        out_ps = psum((K, heads, rows))
        for h in range(heads):
            add_transposed(out_ps[:, h, :], chunk.keys[:, side, h, :], identity_sb)
        copy_scaled(chunk.qk_t[:, side, :, :], out_ps)
    chunk.own = sbuf((rows, heads))
    terms_sb = sbuf((rows, heads, K))
    multiply_on_gpsimd(terms_sb, chunk.keys[:, 0, :, :], chunk.keys[:, 1, :, :])
    nisa.tensor_reduce(dst=chunk.own, op=nl.add, data=terms_sb, axis=2)


def split_on_chip(g_sb):
    """Splits g [rows, lanes, K] as `plan.split_decays` does: the multiple of 2^-8 next to it, and a rest."""
    near_sb, rest_sb = sbuf(g_sb.shape), sbuf(g_sb.shape)
    nisa.tensor_scalar(dst=near_sb, data=g_sb, op0=nl.add, operand0=ROUNDING, op1=nl.add, operand1=-ROUNDING)
    nisa.tensor_tensor(dst=rest_sb, data1=g_sb, data2=near_sb, op=nl.subtract)
    return near_sb, rest_sb


def multiply_exponentials(sums):
    """Returns the product of exp of two tiles of PSUM of equal shape."""
    tiles = []
    for sum_ps in sums:
        out_sb = sbuf(sum_ps.shape)
        nisa.activation(dst=out_sb, op=nl.exp, data=sum_ps)
        tiles.append(out_sb)
    multiply_on_gpsimd(tiles[0], tiles[0], tiles[1])
    return tiles[0]


def decay_rows(parts, ones):
    """Returns exp(ones^T g) of g in two parts, [rows, lanes, K]."""
    rows, lanes, K = parts[0].shape
    sums = []
    for part_sb in parts:
        sum_ps = psum((rows, lanes * K))
        add_selected(sum_ps, ones, part_sb.reshape((rows, lanes * K)))
        sums.append(sum_ps)
    return multiply_exponentials(sums).reshape((rows, lanes, K))


def sum_channel_decays(chunk, table, both):
    """Adds gamma^T [K, lanes, rows], lambda [rows, lanes, K], and carry, gamma_C [K, lanes], to the chunk.

    If `both`, gamma [rows, lanes, K], too.
    """
    rows, lanes, K = chunk.g.shape
    parts = split_on_chip(chunk.g)
    gammas = []
    for part_sb in parts:
        gamma_ps = psum((K, lanes, rows))
        for lane in range(lanes):
            add_transposed(gamma_ps[:, lane, :], part_sb[:, lane, :], table["upper"])
        gammas.append(gamma_ps)
    chunk.gamma_t = multiply_exponentials(gammas)
    chunk.lambda_ = decay_rows(parts, table["strict_lower"])
    if both:
        chunk.gamma = decay_rows(parts, table["upper"])
    chunk.carry = sbuf((K, lanes))
    copy_scaled(chunk.carry, chunk.gamma_t[:, :, rows - 1])


def scale_by_channel(x_sb, side, factors_sb, dtype):
    """Multiplies q (side 0) or k (1) of each lane by factors [P, lanes, free]; x is [P, 2, heads, free]."""
    P, lanes, free = factors_sb.shape
    heads = x_sb.shape[2]
    out_sb = sbuf((P, lanes, free), dtype)
    multiply_on_gpsimd(
        out_sb.reshape((P, heads, lanes // heads, free)),
        x_sb.ap(
            pattern=[[2 * heads * free, P], [free, heads], [0, lanes // heads], [1, free]],
            offset=side * heads * free,
        ),
        factors_sb.reshape((P, heads, lanes // heads, free)),
    )
    return out_sb


def compute_factors(chunk, levels):
    """Computes f^T of all levels, [K, levels, lanes, rows]."""
    rows, lanes, K = chunk.g.shape
    count = levels["count"]
    flat_sums = levels["sums"].reshape((rows, count * rows))
    f_sb = sbuf((K, count, lanes, rows))
    for lane in range(lanes):
        for span in split(count, BANK // rows):
            start, stop = span
            sums_ps = psum((K, (stop - start) * rows))
            add_transposed(sums_ps, chunk.g[:, lane, :], flat_sums[:, start * rows : stop * rows])
            nisa.activation(
                dst=f_sb[:, start:stop, lane, :], op=nl.exp, data=sums_ps.reshape((K, stop - start, rows))
            )
    return f_sb


def multiply_factors(chunk, levels, table):
    """Adds what levels multiply, transposed and of dtype products.

    left        f . K of all tokens [K, levels, lanes, rows]
    right       f . Q of the right halves of blocks [K, levels, lanes, rows / 2]
    """
    f_sb = compute_factors(chunk, levels)
    K, count, lanes, rows = f_sb.shape
    heads, half = chunk.qk_t.shape[2], rows // 2
    group = lanes // heads
    chunk.left = sbuf((K, count, lanes, rows), table["products"])
    chunk.right = sbuf((K, count, lanes, half), table["products"])
    multiply_on_gpsimd(
        chunk.left.reshape((K, count, heads, group, rows)),
        f_sb.reshape((K, count, heads, group, rows)),
        chunk.qk_t.ap(
            pattern=[[2 * heads * rows, K], [0, count], [rows, heads], [0, group], [1, rows]],
            offset=heads * rows,
        ),
    )
    for level in range(count):
        s, pairs, start = 2**level, half // 2**level, level * lanes * rows
        multiply_on_gpsimd(
            chunk.right.reshape((K, count, heads, group, pairs, s))[:, level, :, :, :, :],
            f_sb.ap(
                pattern=[
                    [count * lanes * rows, K], [group * rows, heads], [rows, group], [2 * s, pairs], [1, s],
                ],
                offset=start + s,
            ),
            chunk.qk_t.ap(
                pattern=[[2 * heads * rows, K], [rows, heads], [0, group], [2 * s, pairs], [1, s]], offset=s
            ),
        )  # fmt: skip


def multiply_levels(chunk, levels, table):
    """Adds P^T and kk^T to the chunk: `P_t` and `kk_t` [rows, lanes, rows], float32."""
    rows, lanes, _ = chunk.g.shape
    half, count = rows // 2, levels["count"]
    chunk.P_t, chunk.kk_t = sbuf((rows, lanes, rows)), sbuf((rows, lanes, rows))
    nisa.memset(dst=chunk.kk_t, value=0.0)
    for lane in range(lanes):
        h = lane * chunk.own.shape[1] // lanes
        copy_scaled(chunk.P_t[:, lane, :], table["identity"], chunk.own[:, h : h + 1])
    for level in range(count):
        P_ps, kk_ps = psum((rows, lanes, half)), psum((rows, lanes, rows))
        for lane in range(lanes):
            left = chunk.left[:, level, lane, :]
            add_product(P_ps[:, lane, :], left, chunk.right[:, level, lane, :])
            add_product(kk_ps[:, lane, :], left, left)
        if level < MASKED:
            copy_masked(chunk, P_ps, kk_ps, levels, level)
        else:
            copy_rectangles(chunk, P_ps, kk_ps, 2**level)


def copy_masked(chunk, P_ps, kk_ps, levels, level):
    """Copies the pairs of a level of small blocks, by its mask."""
    rows, lanes, half = P_ps.shape
    s, pairs = 2**level, half // 2**level
    mask = levels["masks"].ap(
        pattern=[[levels["masks"].shape[1] * half, rows], [0, lanes], [s, pairs], [1, s]], offset=level * half
    )
    columns = [[lanes * rows, rows], [rows, lanes], [2 * s, pairs], [1, s]]
    nisa.tensor_copy_predicated(
        dst=chunk.P_t.ap(pattern=columns, offset=s), src=P_ps.reshape((rows, lanes, pairs, s)), predicate=mask
    )
    nisa.tensor_copy_predicated(
        dst=chunk.kk_t.ap(pattern=columns, offset=s), src=kk_ps.ap(pattern=columns, offset=s), predicate=mask
    )


def copy_rectangles(chunk, P_ps, kk_ps, s):
    """Copies the pairs of a level whose left halves start where instructions may, block by block."""
    for start in range(0, P_ps.shape[0], 2 * s):
        m, end, half = start + s, start + 2 * s, start // 2
        copy_scaled(chunk.P_t[start:m, :, m:end], P_ps[start:m, :, half : half + s])
        copy_scaled(chunk.kk_t[start:m, :, m:end], kk_ps[start:m, :, m:end])


def weigh_pairs(chunk, table, dtype):
    """Adds -L^T to the chunk, [rows, lanes, rows], and rounds P^T to dtype."""
    rows, lanes, _ = chunk.kk_t.shape
    columns_ps = psum((rows, lanes * rows))
    diagonals_sb = build_diagonals(chunk.minus_strength, table)
    add_selected(columns_ps, table["ones"][0:rows, 0:rows], diagonals_sb.reshape((rows, lanes * rows)))
    chunk.minus_L_t = multiply_elements(columns_ps.reshape((rows, lanes, rows)), chunk.kk_t)
    chunk.P_t = round_tile(chunk.P_t, dtype)


def scale_strengths(chunk, scale):
    """Adds the numbers per token that `compute_gates` adds for the scalar rule, [rows, lanes]."""
    chunk.read_scale, chunk.minus_strength = sbuf(chunk.beta.shape), sbuf(chunk.beta.shape)
    nisa.memset(dst=chunk.read_scale, value=scale)
    nisa.tensor_scalar(dst=chunk.minus_strength, data=chunk.beta, op0=nl.multiply, operand0=-1.0)
    chunk.value_scale, chunk.minus_strength_gamma = chunk.beta, chunk.minus_strength


def prepare_channels(stage, chunk, call):
    """Runs a stage that needs neither T nor the state."""
    table, levels = chunk.table, call["levels"]
    if stage == "normalize":
        normalize_keys(chunk, table, call["l2norm"])
    elif stage == "transpose keys":
        transpose_keys(chunk, table)
    elif stage == "sum decays":
        sum_channel_decays(chunk, table, call["both"])
    elif stage == "scale keys":
        products = table["products"]
        chunk.gamma_q_t = [scale_by_channel(chunk.qk_t, 0, chunk.gamma_t, products)]
        chunk.k_t = [scale_by_channel(chunk.qk_t, 1, chunk.gamma_t, products)]
        chunk.lambda_k = scale_by_channel(chunk.keys, 1, chunk.lambda_, nl.float32)
    elif stage == "strengths":
        scale_strengths(chunk, call["scale"])
        chunk.beta_v = scale_lanes(chunk.v, chunk.value_scale)
    elif stage == "factors":
        multiply_factors(chunk, levels, table)
    elif stage == "pairs":
        multiply_levels(chunk, levels, table)
        chunk.left, chunk.right = None, None
    elif stage == "L, P":
        weigh_pairs(chunk, table, call["pair_dtype"])
        chunk.block_columns = list_block_columns(chunk.minus_L_t, call["blocks"])
