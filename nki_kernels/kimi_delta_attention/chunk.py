"""Computes one chunk of Kimi Delta Attention on chip: a decay per channel in place of one per
token.

Letters and tiles are those of `nki_kernels.chunk`, but Q and K are normalized before (float32), b,
gamma and lambda are [C, K], and what scales rows there is multiplied into copies of Q and K here:

    gamma = exp(b)    lambda_i = exp(b_C - b_i)    gamma_C [K]
    kk_ij = sum_c k_ic k_jc exp(b_ic - b_jc), i > j        P_ij = sum_c q_ic k_jc exp(b_ic - b_jc),
                                                           i >= j
    L = diag(beta) kk    R = diag(beta) (V - (gamma . K) S)    O = scale ((gamma . Q) S + (P T) R)
    S' = Diag(gamma_C) S + W^T R,  W = T^T (lambda . K)

Source: arXiv:2510.26692. Neither b_i - b_j nor exp(-b_j) is taken. Blocks of 1, 2, 4, .. tokens are
joined in pairs, a level each, and a pair i > j of tokens belongs to the level that joins its
blocks, at token m:

    exp(b_i - b_j) = f_i f_j    f_i = exp(sum of g over m <= t <= i)    f_j = exp(sum of g over j < t < m)

In the left half of a block f is of the second kind, in the right half of the first. All exponents
of a level are products of g with a matrix of zeros and ones, W_level [C, C], sums of g <= 0. A
level is a product of f . K with f . Q and f . K, of which the pairs that belong to it are kept. The
last chunk of a sequence has as many rows as the others; those behind its tokens have q = k = v = g
= beta = 0.

gamma and lambda multiply states: their sums are of two parts of g, as `plan.split_decays` makes
them.
"""

from delta_trn.nki_kernels.chunk import (
    build_diagonals,
    find_key_head,
    invert_key_squares,
    scale_lanes,
    sum_key_squares,
    weight_decays,
)
from delta_trn.nki_kernels.language import nisa, nl
from delta_trn.nki_kernels.plan import BANK, double, list_due, split
from delta_trn.nki_kernels.tiles import (
    add_product,
    add_selected,
    add_transposed,
    copy_scaled,
    multiply,
    psum,
    sbuf,
    subtract,
    sum_rows,
    transpose,
)
from delta_trn.nki_kernels.triangular import list_block_columns, select_range

MASKED = 4  # levels whose blocks are too small for the partitions at which instructions may start
ROUNDING = 1.5 * 2.0**15  # g plus this is a multiple of 2^-8 for -2^14 < g <= 0


def build_levels(table, both):
    """Builds what levels take, once per call, in a dict:

    count       levels: log2 C
    sums        W_level of all levels side by side, [C, count, C], of 0 and 1
    masks       per level the pairs (i, j) and (j, i) that belong to it, [C, count, C]
    sums_t      if `both`: W_level^T, [C, count, C] of dtype products
    right       if `both`: 1 for the tokens of right halves, [C, count]
    """
    C, count = table["rows"], 0
    while double(count) < C:
        count = count + 1
    sums_sb, masks_sb = sbuf((C, count, C)), sbuf((C, count, C), nl.uint8)
    sums_t_sb, right_sb = sbuf((C, count, C), table["products"]), sbuf((C, count))
    ones_sb = table["ones"][0:C, 0:C]
    for level in range(count):
        s = double(level)
        halves = (C, C // (2 * s), 2, s)
        own_sb = select_range(ones_sb, 0, s, [[s, C // s], [0, s]])
        pair_sb = select_range(ones_sb, 0, 2 * s, [[2 * s, C // (2 * s)], [0, 2 * s]])
        subtract(masks_sb[:, level, :], pair_sb, own_sb)
        for side in range(2):
            triangle_sb = (table["strict_lower"], table["upper"])[side]
            multiply(
                sums_sb.reshape((C, count, C // (2 * s), 2, s))[:, level, :, side, :],
                own_sb.reshape(halves)[:, :, side, :],
                triangle_sb.reshape(halves)[:, :, side, :],
            )
        if both:
            out_ps = psum((C, C))
            add_transposed(out_ps, sums_sb[:, level, :], table["identity"])
            copy_scaled(sums_t_sb[:, level, :], out_ps)
            diagonal_sb = scale_channels(sums_sb[:, level, :], table["identity"])
            sum_rows(right_sb[:, level : level + 1], diagonal_sb, nl.copy)
    return {
        "count": count,
        "sums": sums_sb,
        "masks": masks_sb,
        "sums_t": sums_t_sb,
        "right": right_sb,
    }


def scale_channels(x_sb, factors_sb, dtype=nl.float32):
    """Computes x . factors in a new tile of factors' shape."""
    out_sb = sbuf(factors_sb.shape, dtype)
    multiply(out_sb, x_sb, factors_sb)
    return out_sb


def spread_keys(chunk, bundle, l2norm):
    """Adds `keys` to the chunk: q and k of each lane, normalized if asked,
    float32 [rows, 2, lanes, K].
    """
    rows, _, _, K = chunk.qk.shape
    if l2norm:
        chunk.inverse_norms = invert_key_squares(chunk.squares, chunk.table)
    chunk.keys = sbuf((rows, 2, bundle["lanes"], K))
    for side in range(2):
        for lane in range(bundle["lanes"]):
            h = find_key_head(bundle, lane)
            factor = chunk.inverse_norms[0][:, side, h : h + 1] if l2norm else 1.0
            copy_scaled(chunk.keys[:, side, lane, :], chunk.qk[:, side, h, :], factor)


def transpose_keys(chunk):
    """Adds the transposes of q and k, [K, 2, lanes, rows],
    and their products `own` [rows, lanes].
    """
    rows, _, lanes, K = chunk.keys.shape
    tiles = transpose(chunk.keys.reshape((rows, 2 * lanes, K)), [(0, K)], chunk.table)
    chunk.qk_t = tiles[0].reshape((K, 2, lanes, rows))
    terms_sb = scale_channels(chunk.keys[:, 0, :, :], chunk.keys[:, 1, :, :])
    chunk.own = sbuf((rows, lanes))
    for lane in range(lanes):
        sum_rows(chunk.own[:, lane : lane + 1], terms_sb[:, lane, :], nl.copy)


def sum_channel_decays(chunk, table):
    """Adds `exponentials`: exp(ones^T g) for gamma and for lambda, each in two factors [rows,
    lanes, K], which are of the parts of g, the multiple of 2^-8 next to it and a rest.
    """
    rows, lanes, K = chunk.g.shape
    near_sb, rest_sb = sbuf(chunk.g.shape), sbuf(chunk.g.shape)
    nisa.tensor_scalar(
        dst=near_sb, data=chunk.g, op0=nl.add, operand0=ROUNDING, op1=nl.add, operand1=-ROUNDING
    )
    subtract(rest_sb, chunk.g, near_sb)
    chunk.exponentials = []
    for ones in (table["upper"], table["strict_lower"]):
        tiles = []
        for i in range(2):
            sum_ps = psum((rows, lanes, K))
            part = (near_sb, rest_sb)[i].reshape((rows, lanes * K))
            add_selected(sum_ps.reshape((rows, lanes * K)), ones, part)
            # one of the factors stays in PSUM, from where the Vector engine takes it at full speed
            tiles.append(sbuf((rows, lanes, K)) if i == 0 else sum_ps)
            nisa.activation(dst=tiles[i], op=nl.exp, data=sum_ps)
        chunk.exponentials.append(tiles)


def multiply_channel_decays(chunk, table):
    """Adds gamma and lambda [rows, lanes, K], the products of their exponentials, and carry,
    gamma_C [K, lanes], to the chunk.
    """
    rows, lanes, K = chunk.g.shape
    for tiles in chunk.exponentials:
        multiply(tiles[0], tiles[1], tiles[0])
    chunk.gamma, chunk.channel_lambda = chunk.exponentials[0][0], chunk.exponentials[1][0]
    chunk.exponentials = None
    chunk.carry, carry_ps = sbuf((K, lanes)), psum((K, lanes))
    for lane in range(lanes):
        last = table["whole"]["identity"][:, rows - 1 : rows]
        add_transposed(carry_ps[:, lane : lane + 1], chunk.gamma[:, lane, :], last)
    copy_scaled(chunk.carry, carry_ps)


def scale_keys(chunk, table, both):
    """Adds gamma . Q and gamma . K, rounded, lambda . K, and transposes:
    of gamma . Q unless `both`.
    """
    products, whole = table["products"], [(0, chunk.keys.shape[3])]
    chunk.gamma_q = scale_channels(chunk.keys[:, 0, :, :], chunk.gamma, products)
    chunk.erased_k = scale_channels(chunk.keys[:, 1, :, :], chunk.gamma, products)
    chunk.lambda_k = scale_channels(chunk.keys[:, 1, :, :], chunk.channel_lambda)
    chunk.k_t = transpose(chunk.erased_k, whole, table)
    if not both:
        chunk.gamma_q_t = transpose(chunk.gamma_q, whole, table)


def sum_factors(chunk, levels, piece):
    """Returns the exponents of f of a lane's levels start .. stop, [K, levels, rows], in PSUM, from
    where the Vector engine takes f at full speed; a piece is (lane, start, stop).
    """
    lane, start, stop = piece
    rows, _, K = chunk.g.shape
    flat_sums = levels["sums"].reshape((rows, levels["count"] * rows))
    f_ps = psum((K, stop - start, rows))
    add_transposed(
        f_ps.reshape((K, (stop - start) * rows)), chunk.g[:, lane, :],
        flat_sums[:, start * rows : stop * rows],
    )  # fmt: skip
    return f_ps


def multiply_factors(chunk, levels, table):
    """Adds what levels multiply: f . Q and f . K,
    `scaled` [K, levels, lanes, 2, rows] of dtype products.

    While the Vector engine multiplies, the Scalar engine makes the next factors, and the Tensor
    engine the exponents of those behind.
    """
    rows, lanes, K = chunk.g.shape
    count = levels["count"]
    chunk.scaled = sbuf((K, count, lanes, 2, rows), table["products"])
    pieces, ready = [], []
    for lane in range(lanes):
        for span in split(count, BANK // rows):
            pieces.append((lane, span[0], span[1]))
    for turn in range(len(pieces) + 2):
        for i in list_due(turn, len(pieces)):
            ready.append(sum_factors(chunk, levels, pieces[i]))
        for i in list_due(turn - 1, len(pieces)):
            nisa.activation(dst=ready[i], op=nl.exp, data=ready[i])
        for i in list_due(turn - 2, len(pieces)):
            lane, start, stop = pieces[i]
            f_ps = ready[i]
            multiply(
                chunk.scaled[:, start:stop, lane, :, :],
                f_ps.ap(
                    pattern=[[(stop - start) * rows, K], [rows, stop - start], [0, 2], [1, rows]],
                    offset=0,
                ),
                chunk.qk_t.ap(
                    pattern=[
                        [2 * lanes * rows, K], [0, stop - start], [lanes * rows, 2], [1, rows]
                    ],
                    offset=lane * rows,
                ),
            )  # fmt: skip


def multiply_levels(chunk, levels, table):
    """Adds P^T and kk^T to the chunk: `pairs` [rows, lanes, 2, rows], float32."""
    rows, lanes, _ = chunk.g.shape
    count = levels["count"]
    chunk.pairs = sbuf((rows, lanes, 2, rows))
    for lane in range(lanes):
        copy_scaled(chunk.pairs[:, lane, 0, :], table["identity"], chunk.own[:, lane : lane + 1])
        copy_scaled(chunk.pairs[:, lane, 1, :], table["identity"], 0.0)
    flat = chunk.scaled.reshape((chunk.scaled.shape[0], count, lanes, 2 * rows))
    # large blocks first: the Scalar engine does not wait for the Vector engine then
    for turn in range(count):
        level = count - 1 - turn
        s, pairs_ps = double(level), psum((rows, lanes, 2 * rows))
        for lane in range(lanes):
            add_product(
                pairs_ps[:, lane, :], chunk.scaled[:, level, lane, 1, :], flat[:, level, lane, :]
            )
        if level < MASKED:  # the right halves of all blocks, by the mask
            columns = [
                [2 * lanes * rows, rows],
                [rows, 2 * lanes],
                [2 * s, rows // (2 * s)],
                [1, s],
            ]
            mask = [[count * rows, rows], [0, 2 * lanes], [2 * s, rows // (2 * s)], [1, s]]
            nisa.tensor_copy_predicated(
                dst=chunk.pairs.ap(pattern=columns, offset=s),
                src=pairs_ps.ap(pattern=columns, offset=s),
                predicate=levels["masks"].ap(pattern=mask, offset=level * rows + s),
            )
        else:
            views_ps = pairs_ps.reshape((rows, lanes, 2, rows))
            for m in range(s, rows, 2 * s):
                copy_scaled(
                    chunk.pairs[m - s : m, :, :, m : m + s], views_ps[m - s : m, :, :, m : m + s]
                )


def prepare_channels(stage, chunk, bundle, call):
    """Runs a stage that needs neither T nor the state."""
    table, levels, both = chunk.table, call["levels"], call["both"]
    if stage == "square keys":
        if call["l2norm"]:
            chunk.squares = sum_key_squares(chunk.qk, table)
    elif stage == "normalize":
        spread_keys(chunk, bundle, call["l2norm"])
    elif stage == "transpose q, k":
        transpose_keys(chunk)
    elif stage == "sum channels":
        sum_channel_decays(chunk, table)
    elif stage == "multiply decays":
        multiply_channel_decays(chunk, table)
    elif stage == "scale keys":
        scale_keys(chunk, table, both)
    elif stage == "strengths":
        chunk.read_scale, chunk.minus_strength = sbuf(chunk.beta.shape), sbuf(chunk.beta.shape)
        nisa.memset(dst=chunk.read_scale, value=call["scale"])
        copy_scaled(chunk.minus_strength, chunk.beta, -1.0)
        chunk.value_scale, chunk.minus_strength_gamma = chunk.beta, chunk.minus_strength
        chunk.beta_v = scale_lanes(chunk.v, chunk.beta)
        chunk.diagonals = build_diagonals(chunk.minus_strength, table)
    elif stage == "factors":
        multiply_factors(chunk, levels, table)
    elif stage == "pairs":
        multiply_levels(chunk, levels, table)
        chunk.scaled = None
    elif stage == "weigh pairs":
        chunk.minus_L_t = weight_decays(chunk.pairs[:, :, 1, :], chunk.diagonals, table)
        chunk.P_t = sbuf(chunk.minus_L_t.shape, nl.float32 if both else table["products"])
        copy_scaled(chunk.P_t, chunk.pairs[:, :, 0, :])
    elif stage == "list columns":
        chunk.block_columns = list_block_columns(chunk.minus_L_t, call["blocks"])
