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
    multiply_parts,
    round_state,
    round_tile,
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
    multiply_on_gpsimd,
    psum,
    repeat_over_lanes,
    sbuf,
    sum_rows,
    transpose,
)

LEVELS = ("levels 1", "levels 2", "levels 3", "levels 4")  # stages


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


def round_pair_gradients(chunk, table):
    """Adds own [rows, lanes], and dP^T and dkk^T, `halves`, rounded [rows, lanes, rows]."""
    rows, lanes, _ = chunk.UdO.shape
    diagonals_sb = scale_channels(chunk.UdO, repeat_over_lanes(table, "identity", lanes))
    chunk.own, chunk.halves = sbuf((rows, lanes)), []
    for lane in range(lanes):
        sum_rows(chunk.own[:, lane : lane + 1], diagonals_sb[:, lane, :], nl.copy)
    for x_sb in (chunk.UdO, chunk.UdR):
        keep_triangle(x_sb, 1, 1)
        chunk.halves.append(round_tile(x_sb, table["products"]))


def mask_pair_gradients(chunk, levels, table):
    """Adds G and H of all levels: `masked`, two tiles [rows, levels, lanes, rows], rounded."""
    rows, lanes, _ = chunk.UdO.shape
    identity, products, count = table["rounded_identity"], table["products"], levels["count"]
    mask = levels["masks"].ap(
        pattern=[[count * rows, rows], [rows, count], [0, lanes], [1, rows]], offset=0
    )
    chunk.masked = []
    for half_sb in chunk.halves:
        both_ps, both_sb = psum((rows, lanes, rows)), sbuf((rows, lanes, rows), products)
        for lane in range(lanes):
            add_transposed(both_ps[:, lane, :], half_sb[:, lane, :], identity)
            add_selected(both_ps[:, lane, :], identity, half_sb[:, lane, :])
        copy_scaled(both_sb, both_ps)
        every = both_sb.ap(
            pattern=[[lanes * rows, rows], [0, count], [rows, lanes], [1, rows]], offset=0
        )
        out_sb = sbuf((rows, count, lanes, rows), products)
        multiply_on_gpsimd(out_sb, every, mask)
        chunk.masked.append(out_sb)


def add_to_keys(chunk, x_sb, first):
    """Adds x [rows, sides, lanes, K] to dq and dk; the first side is q's (0) or k's (1)."""
    rows, sides, lanes, K = x_sb.shape
    identity = chunk.table["rounded_identity"]
    for side in range(sides):
        flat = x_sb.reshape((rows, sides, lanes * K))[:, side, :]
        add_selected(chunk.dqk_ps[:, first + side, :], identity, flat)


def weigh_sums(chunk, raw_sb, factors, first, dtype=nl.float32):
    """Returns factors . raw sums, rounded, and the exponents' gradients,
    [rows, sides, lanes, K] of dtype.
    """
    x_sb, terms_sb = sbuf(raw_sb.shape, chunk.table["products"]), sbuf(raw_sb.shape, dtype)
    multiply_on_gpsimd(x_sb, raw_sb, factors)
    multiply_on_gpsimd(terms_sb, x_sb, chunk.keys[:, first:2, :, :])
    return x_sb, terms_sb


def add_sums(chunk, weighed, weights, first):
    """Adds what `weigh_sums` returns to dq and dk, and to dg,
    there as sums over tokens by weights^T.
    """
    x_sb, terms_sb = weighed
    rows, sides, lanes, K = x_sb.shape
    add_to_keys(chunk, x_sb, first)
    for side in range(sides):
        add_selected(chunk.dg_ps, weights, terms_sb.reshape((rows, sides, lanes * K))[:, side, :])


def read_channel_states(chunk):
    """Adds what states and `own` make of dq and dk, a tile each: `reads`,
    two for q and k, and one for k.
    """
    rows, lanes, K = chunk.g.shape
    reads_ps, written_ps = psum((rows, 2, lanes, K)), psum((rows, 1, lanes, K))
    reads_sb, written_sb = sbuf(reads_ps.shape), sbuf(written_ps.shape)
    own_sb = sbuf(reads_ps.shape, chunk.table["products"])
    for lane in range(lanes):
        multiply_parts(reads_ps[:, 0, lane, :], chunk.do_t, chunk.S_t, lane, lane)
        multiply_parts(reads_ps[:, 1, lane, :], chunk.dR_t, chunk.S_t, lane, lane)
        multiply_parts(written_ps[:, 0, lane, :], chunk.U_t, chunk.dS_t, lane, lane)
        for side in range(2):
            own = chunk.own[:, lane : lane + 1]
            copy_scaled(own_sb[:, side, lane, :], chunk.keys[:, 1 - side, lane, :], own)
    copy_scaled(reads_sb, reads_ps)
    copy_scaled(written_sb, written_ps)
    gamma = chunk.gamma.ap(pattern=[[lanes * K, rows], [0, 2], [K, lanes], [1, K]], offset=0)
    written = weigh_sums(chunk, written_sb, chunk.channel_lambda.reshape((rows, 1, lanes, K)), 1)
    chunk.reads = (own_sb, weigh_sums(chunk, reads_sb, gamma, 0), written)


def begin_gradients(chunk, table):
    """Starts dq, dk and dg in PSUM, [rows, lanes K] each, with what states add."""
    rows, lanes, K = chunk.g.shape
    product_sb, carried_sb = scale_channels(chunk.dS[0], chunk.S[0]), sbuf((K, lanes))
    for lane in range(lanes):
        sum_rows(carried_sb[:, lane : lane + 1], product_sb[:, lane, :], nl.copy)
    multiply(carried_sb, carried_sb, chunk.carry)
    diagonals_sb = sbuf((K, lanes, K))
    for lane in range(lanes):
        copy_scaled(
            diagonals_sb[:, lane, :], table["eye"][0:K, 0:K], carried_sb[:, lane : lane + 1]
        )
    chunk.dg_ps, chunk.dqk_ps = psum((rows, lanes * K)), psum((rows, 2, lanes * K))
    own_sb, reads, written = chunk.reads
    add_to_keys(chunk, own_sb, 0)
    add_sums(chunk, reads, table["lower"], 0)
    add_sums(chunk, written, table["strict_upper"], 1)
    add_selected(chunk.dg_ps, table["ones"][0:K, 0:rows], diagonals_sb.reshape((K, lanes * K)))


def compute_factors(chunk, levels, level):
    """Returns e and f of a level, [rows, 2, lanes, K]."""
    rows, lanes, K = chunk.g.shape
    sums_ps, out_sb = psum((rows, lanes * K)), sbuf((rows, 2, lanes, K))
    add_selected(sums_ps, levels["sums"][:, level, :], chunk.g.reshape((rows, lanes * K)))
    nisa.activation(dst=out_sb[:, 1, :, :], op=nl.exp, data=sums_ps.reshape((rows, lanes, K)))
    copy_scaled(out_sb[:, 0, :, :], out_sb[:, 1, :, :], levels["right"][:, level : level + 1])
    return out_sb


def multiply_level(chunk, level, scaled_sb):
    """Returns G (f . K), and G (e . Q) + H (f . K), [rows, 2, lanes, K];
    scaled are e . Q and f . K.
    """
    out_ps, out_sb = psum(scaled_sb.shape), sbuf(scaled_sb.shape)
    G_sb, H_sb = chunk.masked
    for lane in range(scaled_sb.shape[2]):
        add_product(out_ps[:, 0, lane, :], G_sb[:, level, lane, :], scaled_sb[:, 1, lane, :])
        add_product(out_ps[:, 1, lane, :], G_sb[:, level, lane, :], scaled_sb[:, 0, lane, :])
        add_product(out_ps[:, 1, lane, :], H_sb[:, level, lane, :], scaled_sb[:, 1, lane, :])
    copy_scaled(out_sb, out_ps)
    return out_sb


def differentiate_levels(chunk, levels, table, part):
    """Adds a part of what levels add to dq, dk and dg; engines work on five levels at a time."""
    count, products = levels["count"], table["products"]
    if part == 0:
        chunk.level_tiles = ([], [], [], [])
    factors, scaled, raw, weighed = chunk.level_tiles
    first, stop = list_steps(count + 4, part + 1, len(LEVELS))
    for turn in range(first, stop):
        for level in list_due(turn, count):
            factors.append(compute_factors(chunk, levels, level))
        for level in list_due(turn - 1, count):
            scaled.append(scale_channels(chunk.keys, factors[level], products))
        for level in list_due(turn - 2, count):
            raw.append(multiply_level(chunk, level, scaled[level]))
        for level in list_due(turn - 3, count):
            weighed.append(weigh_sums(chunk, raw[level], factors[level], 0, products))
        for level in list_due(turn - 4, count):
            add_sums(chunk, weighed[level], levels["sums_t"][:, level, :], 0)


def sum_along_keys(chunk):
    """Adds what the norms' gradients take, `along` [rows, 2, lanes], -<x, dx>."""
    raw_sb, chunk.along = sbuf(chunk.keys.shape), sbuf(chunk.keys.shape[0:3])
    copy_scaled(raw_sb, chunk.dqk_ps.reshape(chunk.keys.shape), -1.0)
    multiply_on_gpsimd(raw_sb, raw_sb, chunk.keys)
    for side in range(2):
        for lane in range(chunk.keys.shape[2]):
            sum_rows(chunk.along[:, side, lane : lane + 1], raw_sb[:, side, lane, :], nl.copy)


def differentiate_norms(chunk):
    """Adds the norms' gradients to dq and dk in PSUM."""
    x_sb = sbuf(chunk.keys.shape, chunk.table["products"])
    for side in range(2):
        for lane in range(chunk.keys.shape[2]):
            factor = chunk.along[:, side, lane : lane + 1]
            copy_scaled(x_sb[:, side, lane, :], chunk.keys[:, side, lane, :], factor)
    add_to_keys(chunk, x_sb, 0)


def store_key_gradients(chunk, bundle, gradients):
    """Sums dq and dk over the lanes of a key head, and stores them."""
    rows, _, lanes, K = chunk.keys.shape
    heads, norms, dtype = bundle["key_heads"], chunk.inverse_norms, gradients[0].dtype
    group, dqk = lanes // heads, chunk.dqk_ps.reshape(chunk.keys.shape)
    lanes_sb = sbuf(chunk.keys.shape, dtype if group == 1 else nl.float32)
    for side in range(2):
        for lane in range(lanes):
            h = find_key_head(bundle, lane)
            factor = norms[0][:, side, h : h + 1] if len(norms) > 0 else 1.0
            copy_scaled(lanes_sb[:, side, lane, :], dqk[:, side, lane, :], factor)
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
        round_pair_gradients(chunk, table)
    elif stage == "mask pairs":
        mask_pair_gradients(chunk, levels, table)
    elif stage == "read channels":
        read_channel_states(chunk)
    elif stage == "begin dg":
        begin_gradients(chunk, table)
    elif stage == "sum along" and call["l2norm"]:
        sum_along_keys(chunk)
    elif stage == "norms" and call["l2norm"]:
        differentiate_norms(chunk)
    elif stage == "store keys":
        store_key_gradients(chunk, bundle, gradients)
        dv_sb = scale_lanes(chunk.dR, chunk.dv_scale, gradients[2].dtype)
        store_lanes(gradients[2], dv_sb, bundle, chunk.start, chunk.tokens)
    elif stage == "sum rows":
        dg_sb, terms_sb = sbuf(chunk.g.shape), scale_channels(chunk.U_exact, chunk.dR)
        dbeta_sb = sbuf(chunk.beta.shape)
        copy_scaled(dg_sb, chunk.dg_ps.reshape(chunk.g.shape))
        for lane in range(bundle["lanes"]):
            sum_rows(dbeta_sb[:, lane : lane + 1], terms_sb[:, lane, :], nl.copy)
        store_lanes(gradients[3], dg_sb, bundle, chunk.start, chunk.tokens)
        store_lanes(gradients[4], dbeta_sb, bundle, chunk.start, chunk.tokens)
