"""Computes the gradients of one chunk of Kimi Delta Attention on chip.

Letters and tiles are those of the module `chunk` beside this one and of
`nki_kernels.chunk_gradients`. dS' is the gradient of the state that the chunk leaves; dO is scaled,
and -dV is what the tile `dR_rounded` has here.

    dU = P^T dO + (lambda . K) dS'    dR = T^T dU    dV = diag(beta) dR
    dS = Diag(gamma_C) dS' + (gamma . Q)^T dO - (gamma . K)^T dV
    dP = strict_lower(dO U^T)    dkk = -strict_lower(dV U^T)    own_i = <dO_i, U_i>                    [C, C]
    reads_q = gamma . (dO S^T)    reads_k = -gamma . (dV S^T)    written = lambda . (U dS'^T)          [C, K]
    per level, G = dP + dP^T and H = dkk + dkk^T masked, and e = f in right halves of blocks, 0 in
    left ones:
    x = e . (G (f . K))    y = f . (G (e . Q) + H (f . K))
    dQ = reads_q + own K + sum of x        dK = reads_k + written + own Q + sum of y
    dg_t = sum_{i >= t} (Q . reads_q + K . reads_k)_i + sum_{j < t} (K . written)_j
           + gamma_C . rowsum(S . dS') + per level W_level (Q . x + K . y)      [C, K]

Q . x + K . y is the gradient of the exponents of f, which are W_level^T g. So each pair of tokens
counts at the tokens that its decay crosses, and nothing is added and taken away again.
"""

from delta_trn.nki_kernels.chunk import (
    find_key_head,
    multiply_pairs,
    round_state,
    scale_lanes,
    store_keys,
    store_lanes,
)
from delta_trn.nki_kernels.chunk_gradients import compute_residual_gradient
from delta_trn.nki_kernels.kimi_delta_attention.chunk import scale_channels
from delta_trn.nki_kernels.language import nisa, nl
from delta_trn.nki_kernels.plan import list_due
from delta_trn.nki_kernels.schedule import list_steps
from delta_trn.nki_kernels.tiles import (
    add_product,
    add_selected,
    add_transposed,
    copy_scaled,
    keep_triangle,
    multiply,
    multiply_elements,
    psum,
    repeat_over_lanes,
    sbuf,
    scale_and_add,
    sum_rows,
    transpose,
)

# stages, a turn of `differentiate_levels` each at 128 tokens, so that bundles take turns
LEVELS = (
    "levels 1", "levels 2", "levels 3", "levels 4", "levels 5", "levels 6", "levels 7", "levels 8",
)  # fmt: skip


def differentiate_writes(chunk, dS, bundle, table):
    """Computes dR from the gradient dS of the state that a chunk leaves, and -dV, rounded."""
    products = table["products"]
    chunk.dS, chunk.dS_rounded = dS, round_state(dS, products)
    if products == nl.float32:
        chunk.k_t = transpose(chunk.lambda_k, [(0, chunk.lambda_k.shape[2])], table)
        chunk.lambda_ = sbuf(chunk.beta.shape)
        nisa.memset(dst=chunk.lambda_, value=1.0)
    by_lane = {"lanes": bundle["lanes"], "key_heads": bundle["lanes"]}
    chunk.dR = compute_residual_gradient(chunk, chunk.dS_rounded, by_lane)
    chunk.dR_rounded = scale_lanes(
        chunk.dR, multiply_elements(chunk.minus_strength, chunk.share), products
    )


def round_pair_gradients(chunk, bundle, table):
    """Adds own [rows, lanes], and dP^T and dkk^T, `halves`, rounded [rows, lanes, rows]."""
    rows, lanes = table["rows"], bundle["lanes"]
    chunk.own, chunk.halves = sbuf((rows, lanes)), []
    reads = multiply_pairs(chunk.U_t, chunk.do_t, bundle)
    diagonals_sb = sbuf((rows, lanes, rows))
    for piece in reads:
        first, stop, UdO_ps = piece
        eye = repeat_over_lanes(table, "identity", stop - first)
        multiply(diagonals_sb[:, first:stop, :], UdO_ps, eye)
    for lane in range(lanes):
        sum_rows(chunk.own[:, lane : lane + 1], diagonals_sb[:, lane, :], nl.copy)
    for pieces in (reads, multiply_pairs(chunk.U_t, chunk.dR_t, bundle)):
        half_sb = sbuf((rows, lanes, rows), table["products"])
        for piece in pieces:
            first, stop, products_ps = piece
            copy_scaled(half_sb[:, first:stop, :], products_ps)
        keep_triangle(half_sb, 1, 1)
        chunk.halves.append(half_sb)


def mask_pair_gradients(chunk, levels, table):
    """Adds G and H of all levels: `masked`, two tiles [rows, levels, lanes, rows], rounded."""
    rows, lanes, _ = chunk.halves[0].shape
    identity, products, count = table["rounded_identity"], table["products"], levels["count"]
    chunk.masked = []
    for half_sb in chunk.halves:
        out_sb = sbuf((rows, count, lanes, rows), products)
        for lane in range(lanes):
            both_ps = psum((rows, rows))
            add_transposed(both_ps, half_sb[:, lane, :], identity)
            add_selected(both_ps, identity, half_sb[:, lane, :], True)
            every = both_ps.ap(pattern=[[rows, rows], [0, count], [1, rows]], offset=0)
            multiply(out_sb[:, :, lane, :], every, levels["masks"])
        chunk.masked.append(out_sb)


def add_to_keys(chunk, side, x_sb, adds=True):
    """Adds x [rows, lanes K], rounded, to dq (side 0) or dk (side 1): a sum in PSUM each, which x
    begins unless `adds`.
    """
    add_selected(chunk.dqk_ps[side], chunk.table["rounded_identity"], x_sb, adds)


def add_to_decays(chunk, terms_sb, weights, adds=True):
    """Adds sums over tokens, weights^T terms, of terms [rows, sides, lanes, K] to dg, one sum in
    PSUM, which they begin unless `adds`.
    """
    rows, sides, lanes, K = terms_sb.shape
    flat = terms_sb.reshape((rows, sides, lanes * K))
    for side in range(sides):
        add_selected(chunk.dg_ps, weights, flat[:, side, :], adds or side > 0)


def read_channel_states(chunk, bundle):
    """Adds what states and `own` make of dq and dk, and of dg: `reads`.

    These are tiles, rounded: own K and own Q, what states are read by, [rows, 2, lanes, K], and
    what is written, which q has no part in, [rows, lanes, K]; of the last two also the exponents'
    gradients, products with gamma . Q, gamma . K and lambda . K.
    """
    rows, lanes, K = chunk.g.shape
    products = chunk.table["products"]
    own_sb, read_sb = sbuf((rows, 2, lanes, K), products), sbuf((rows, 2, lanes, K), products)
    written_sb = sbuf((rows, lanes, K), products)
    read_terms_sb, written_terms_sb = sbuf(chunk.keys.shape), sbuf((rows, 1, lanes, K))
    gradients, decayed = (chunk.do_t, chunk.dR_t), (chunk.gamma_q, chunk.erased_k)
    for side in range(2):
        for lane in range(lanes):
            own = chunk.own[:, lane : lane + 1]
            copy_scaled(own_sb[:, side, lane, :], chunk.keys[:, 1 - side, lane, :], own)
        for piece in multiply_pairs(gradients[side], chunk.S_t, bundle):
            first, stop, reads_ps = piece
            multiply(read_sb[:, side, first:stop, :], reads_ps, chunk.gamma[:, first:stop, :])
            decayed_sb = decayed[side][:, first:stop, :]
            multiply(read_terms_sb[:, side, first:stop, :], reads_ps, decayed_sb)
    for piece in multiply_pairs(chunk.U_t, chunk.dS_t, bundle):
        first, stop, writes_ps = piece
        lambda_sb = chunk.channel_lambda[:, first:stop, :]
        multiply(written_sb[:, first:stop, :], writes_ps, lambda_sb)
        terms_sb = written_terms_sb[:, 0, first:stop, :]
        multiply(terms_sb, writes_ps, chunk.lambda_k[:, first:stop, :])
    chunk.reads = (own_sb, read_sb, written_sb, read_terms_sb, written_terms_sb)


def begin_gradients(chunk, table):
    """Starts dq, dk and dg in PSUM, [rows, lanes K] each, with what states add."""
    rows, lanes, K = chunk.g.shape
    product_sb, carried_sb = scale_channels(chunk.dS[0], chunk.S[0]), sbuf((K, lanes))
    nisa.tensor_reduce(dst=carried_sb, op=nl.add, data=product_sb, axis=2)
    multiply(carried_sb, carried_sb, chunk.carry)
    diagonals_sb = sbuf((K, lanes, K))
    for lane in range(lanes):
        copy_scaled(
            diagonals_sb[:, lane, :], table["eye"][0:K, 0:K], carried_sb[:, lane : lane + 1]
        )
    own_sb, read_sb, written_sb, read_terms_sb, written_terms_sb = chunk.reads
    chunk.dg_ps, chunk.dqk_ps = psum((rows, lanes * K)), []
    by_side = (rows, 2, lanes * K)
    for side in range(2):
        chunk.dqk_ps.append(psum((rows, lanes * K)))
        add_to_keys(chunk, side, own_sb.reshape(by_side)[:, side, :], False)
        add_to_keys(chunk, side, read_sb.reshape(by_side)[:, side, :])
    add_to_keys(chunk, 1, written_sb.reshape((rows, lanes * K)))
    add_to_decays(chunk, read_terms_sb, table["lower"], False)
    add_to_decays(chunk, written_terms_sb, table["strict_upper"])
    ones = table["ones"][0:K, 0:rows]
    add_selected(chunk.dg_ps, ones, diagonals_sb.reshape((K, lanes * K)), True)


def sum_level(chunk, levels, level):
    """Returns the exponents of a level's f in PSUM, [rows, lanes, K]."""
    rows, lanes, K = chunk.g.shape
    f_ps = psum((rows, lanes, K))
    flat_g = chunk.g.reshape((rows, lanes * K))
    add_selected(f_ps.reshape((rows, lanes * K)), levels["sums"][:, level, :], flat_g)
    return f_ps


def compute_factors(f_ps, right):
    """Makes f of its exponents in PSUM, and returns e and f, [rows, 2, lanes, K]; right [rows, 1] is
    1 for the tokens of right halves.
    """
    rows, lanes, K = f_ps.shape
    out_sb = sbuf((rows, 2, lanes, K))
    nisa.activation(dst=f_ps, op=nl.exp, data=f_ps)
    copy_scaled(out_sb[:, 1, :, :], f_ps)
    copy_scaled(out_sb[:, 0, :, :], out_sb[:, 1, :, :], right)
    return out_sb


def scale_level(chunk, f_ps, right):
    """Returns e . Q and f . K of a level, rounded [rows, 2, lanes, K]; right [rows, 1] is 1 for the
    tokens of right halves.
    """
    out_sb = sbuf(chunk.keys.shape, chunk.table["products"])
    multiply(out_sb[:, 1, :, :], f_ps, chunk.keys[:, 1, :, :])
    nisa.scalar_tensor_tensor(
        dst=out_sb[:, 0, :, :], data=f_ps, op0=nl.multiply, operand0=right, op1=nl.multiply,
        operand1=chunk.keys[:, 0, :, :],
    )  # fmt: skip
    return out_sb


def multiply_level(chunk, level, scaled_sb):
    """Returns in PSUM G (f . K) of all lanes [rows, lanes, K], and a list of G (e . Q) + H (f . K)
    per lane [rows, K], each of which is a sum.
    """
    rows, _, lanes, K = scaled_sb.shape
    G_sb, H_sb = chunk.masked
    x_ps, tiles = psum((rows, lanes, K)), []
    for lane in range(lanes):
        add_product(x_ps[:, lane, :], G_sb[:, level, lane, :], scaled_sb[:, 1, lane, :])
    for lane in range(lanes):
        y_ps = psum((rows, K))
        add_product(y_ps, G_sb[:, level, lane, :], scaled_sb[:, 0, lane, :])
        add_product(y_ps, H_sb[:, level, lane, :], scaled_sb[:, 1, lane, :], True)
        tiles.append(y_ps)
    return x_ps, tiles


def weigh_keys(made, raw):
    """Makes y and K . y of a level, x and terms of side 1, of what `multiply_level` left in PSUM.

    The last product is taken first: then the Vector engine waits for the Tensor engine once.
    """
    _, tiles = raw
    for turn in range(len(tiles)):
        lane = len(tiles) - 1 - turn
        multiply(made["x"][:, 1, lane, :], tiles[lane], made["factors"][:, 1, lane, :])
        multiply(made["terms"][:, 1, lane, :], tiles[lane], made["scaled"][:, 1, lane, :])


def weigh_queries(made, raw):
    """Makes x and Q . x of a level, x and terms of side 0, as `weigh_keys` does."""
    x_ps, _ = raw
    multiply(made["x"][:, 0, :, :], x_ps, made["factors"][:, 0, :, :])
    multiply(made["terms"][:, 0, :, :], x_ps, made["scaled"][:, 0, :, :])


def differentiate_levels(chunk, levels, table, part):
    """Adds a part of what levels add to dq, dk and dg; engines work on two levels at a time.

    What the Tensor engine multiplies in a turn is weighed in the next one. Vector and Scalar engine
    take turns at PSUM, so the Scalar engine makes the next level's factors between two parts of
    that.
    """
    count, products = levels["count"], table["products"]
    rows, lanes, K = chunk.g.shape
    if part == 0:
        chunk.level_tiles = []
    first, stop = list_steps(count + 1, part + 1, len(LEVELS))
    for turn in range(first, stop):
        before, sums = chunk.level_tiles, []
        for level in list_due(turn, count):
            sums.append(sum_level(chunk, levels, level))
        for made in before:
            weigh_keys(made, made["raw"])
        for level in list_due(turn, count):
            right = levels["right"][:, level : level + 1]
            chunk.level_tiles = [
                {
                    "level": level, "right": right, "f": sums[0],
                    "factors": compute_factors(sums[0], right), "x": sbuf(chunk.keys.shape, products),
                    "terms": sbuf(chunk.keys.shape, products),
                }
            ]  # fmt: skip
        for made in before:
            weigh_queries(made, made["raw"])
            for side in range(2):
                add_to_keys(chunk, side, made["x"].reshape((rows, 2, lanes * K))[:, side, :])
            add_to_decays(chunk, made["terms"], levels["sums_t"][:, made["level"], :])
        for level in list_due(turn, count):
            made = chunk.level_tiles[0]
            made["scaled"] = scale_level(chunk, made["f"], made["right"])
            made["raw"] = multiply_level(chunk, level, made["scaled"])


def sum_along_keys(chunk):
    """Adds what the norms' gradients take, `along` [rows, 2, lanes], -<x, dx>."""
    rows, _, lanes, K = chunk.keys.shape
    terms_sb, along_sb = sbuf(chunk.keys.shape), sbuf((rows, 2, lanes))
    for side in range(2):
        dx_ps = chunk.dqk_ps[side].reshape((rows, lanes, K))
        multiply(terms_sb[:, side, :, :], dx_ps, chunk.keys[:, side, :, :])
    for side in range(2):
        for lane in range(lanes):
            sum_rows(along_sb[:, side, lane : lane + 1], terms_sb[:, side, lane, :], nl.copy)
    chunk.along = sbuf((rows, 2, lanes))
    copy_scaled(chunk.along, along_sb, -1.0)


def differentiate_norms(chunk):
    """Adds the norms' gradients to dq and dk, where these leave PSUM: `dqk`."""
    _, _, lanes, K = chunk.keys.shape
    chunk.dqk = sbuf(chunk.keys.shape)
    for side in range(2):
        for lane in range(lanes):
            keys, factor_sb = chunk.keys[:, side, lane, :], chunk.along[:, side, lane : lane + 1]
            dx_ps = chunk.dqk_ps[side][:, lane * K : (lane + 1) * K]
            scale_and_add(chunk.dqk[:, side, lane, :], keys, factor_sb, dx_ps)


def copy_gradients(chunk):
    """Copies dq and dk, which no norms change, from PSUM: `dqk`."""
    rows, _, lanes, K = chunk.keys.shape
    chunk.dqk = sbuf(chunk.keys.shape)
    for side in range(2):
        dx_ps = chunk.dqk_ps[side].reshape((rows, lanes, K))
        copy_scaled(chunk.dqk[:, side, :, :], dx_ps)


def store_key_gradients(chunk, bundle, gradients):
    """Sums dq and dk over the lanes of a key head, and stores them."""
    rows, _, lanes, K = chunk.keys.shape
    heads, norms, dtype = bundle["key_heads"], chunk.inverse_norms, gradients[0].dtype
    group = lanes // heads
    lanes_sb = sbuf(chunk.keys.shape, dtype if group == 1 else nl.float32)
    for side in range(2):
        for lane in range(lanes):
            h = find_key_head(bundle, lane)
            factor = norms[0][:, side, h : h + 1] if len(norms) > 0 else 1.0
            copy_scaled(lanes_sb[:, side, lane, :], chunk.dqk[:, side, lane, :], factor)
    out_sb = lanes_sb
    if group > 1:
        out_sb = sbuf((rows, 2, heads, K), dtype)
        groups = [[2 * lanes * K, rows], [group * K, 2 * heads], [1, K], [K, group]]
        lanes_view = lanes_sb.ap(pattern=groups, offset=0)
        nisa.tensor_reduce(
            dst=out_sb.reshape((rows, 2 * heads, K)), op=nl.add, data=lanes_view, axis=3
        )
    store_keys(
        gradients[0], gradients[1], out_sb, bundle["n"], chunk.start, chunk.tokens, bundle["slot"]
    )


def differentiate_channels(stage, chunk, stream, call):
    """Runs a stage of a chunk's gradients that the gated delta rule has not."""
    bundle, table, levels, gradients = stream.bundle, chunk.table, call["levels"], call["gradients"]
    for part in range(len(LEVELS)):
        if stage == LEVELS[part]:
            differentiate_levels(chunk, levels, table, part)
    if stage == "strengths":
        chunk.dv_scale = multiply_elements(chunk.value_scale, chunk.share)
        chunk.do = scale_lanes(chunk.do, chunk.read_scale, table["products"])
    elif stage == "dR by channel":
        differentiate_writes(chunk, stream.dS, bundle, table)
    elif stage == "round pairs":
        round_pair_gradients(chunk, bundle, table)
    elif stage == "mask pairs":
        mask_pair_gradients(chunk, levels, table)
    elif stage == "read channels":
        read_channel_states(chunk, bundle)
    elif stage == "begin dg":
        begin_gradients(chunk, table)
    elif stage == "sum along" and call["l2norm"]:
        sum_along_keys(chunk)
    elif stage == "norms":
        if call["l2norm"]:
            differentiate_norms(chunk)
        else:
            copy_gradients(chunk)
    elif stage == "store keys":
        store_key_gradients(chunk, bundle, gradients)
        dv_sb = scale_lanes(chunk.dR, chunk.dv_scale, gradients[2].dtype)
        store_lanes(gradients[2], dv_sb, bundle, chunk.start, chunk.tokens)
    elif stage == "sum rows":
        dg_sb = sbuf(chunk.g.shape)
        copy_scaled(dg_sb, chunk.dg_ps.reshape(chunk.g.shape))
        store_lanes(gradients[3], dg_sb, bundle, chunk.start, chunk.tokens)
        store_lanes(gradients[4], chunk.dbeta, bundle, chunk.start, chunk.tokens)
