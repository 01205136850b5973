"""Computes the gradients of one chunk of Kimi Delta Attention on chip.

Letters and tiles are those of the module `chunk` beside this one and of `nki_kernels.chunk_gradients`. dS' is
the gradient of the state that the chunk leaves; dO is scaled, and -dV is what the tile `dR_rounded` has here.

    dU = P^T dO + (lambda . K) dS'    dR = T^T dU    dV = diag(beta) dR
    dS = Diag(gamma_C) dS' + (gamma . Q)^T dO - (gamma . K)^T dV
    dP = strict_lower(dO U^T)    dkk = -strict_lower(dV U^T)    own_i = <dO_i, U_i>                    [C, C]
    reads_q = gamma . (dO S^T)    reads_k = -gamma . (dV S^T)    written = lambda . (U dS'^T)          [C, K]
    per level, G = dP + dP^T and H = dkk + dkk^T masked, and e = f in right halves of blocks, 0 in left ones:
    x = e . (G (f . K))    y = f . (G (e . Q) + H (f . K))
    dQ = reads_q + own K + sum of x        dK = reads_k + written + own Q + sum of y
    dg_t = sum_{i >= t} (Q . reads_q + K . reads_k)_i + sum_{j < t} (K . written)_j
           + gamma_C . rowsum(S . dS') + per level W_level (Q . x + K . y)      [C, K]

Q . x + K . y is the gradient of the exponents of f, which are W_level^T g. So each pair of tokens counts at
the tokens that its decay crosses, and nothing is added and taken away again.
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
from delta_trn.nki_kernels.plan import PARTITIONS, list_due
from delta_trn.nki_kernels.tiles import (
    add_product,
    add_selected,
    add_transposed,
    copy_scaled,
    keep_upper,
    multiply,
    multiply_elements,
    multiply_on_gpsimd,
    psum,
    repeat_over_lanes,
    sbuf,
    sum_rows,
    transpose,
)


def build_level_gradients(levels, table):
    """Adds to what `build_levels` returns, once per call:

    sums_t      W_level^T of all levels [C, count, C], of dtype products
    right       1 for the tokens of right halves, [C, count]
    """
    C, count = table["rows"], levels["count"]
    sums_t_sb, right_sb = sbuf((C, count, C), table["products"]), sbuf((C, count))
    for level in range(count):
        out_ps = psum((C, C))
        add_transposed(out_ps, levels["sums"][:, level, :], table["identity"])
        copy_scaled(sums_t_sb[:, level, :], out_ps)
        diagonal_sb = multiply_elements(levels["sums"][:, level, :], table["identity"])
        sum_rows(right_sb[:, level : level + 1], diagonal_sb, nl.copy)
    levels["sums_t"] = sums_t_sb
    levels["right"] = right_sb


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
    chunk.dR_rounded = scale_lanes(chunk.dR, multiply_elements(chunk.minus_strength, chunk.share), products)


def mask_pair_gradients(chunk, levels, table):
    """Adds G and H of all levels, `masked`, two tiles [rows, levels, lanes, rows], and own [rows, lanes]."""
    products = table["products"]
    rows, lanes, _ = chunk.UdO.shape
    diagonals_sb = scale_channels(chunk.UdO, repeat_over_lanes(table, "identity", lanes))
    chunk.own, chunk.masked = sbuf((rows, lanes)), []
    for lane in range(lanes):
        sum_rows(chunk.own[:, lane : lane + 1], diagonals_sb[:, lane, :], nl.copy)
    identity, count = table["rounded_identity"], levels["count"]
    mask = levels["masks"].ap(pattern=[[count * rows, rows], [rows, count], [0, lanes], [1, rows]], offset=0)
    for x_sb in (chunk.UdO, chunk.UdR):
        keep_upper(x_sb, nl.greater)
        half_sb, both_ps = round_tile(x_sb, products), psum((rows, lanes, rows))
        for lane in range(lanes):
            add_transposed(both_ps[:, lane, :], half_sb[:, lane, :], identity)
            add_selected(both_ps[:, lane, :], identity, half_sb[:, lane, :])
        both_sb, out_sb = sbuf((rows, lanes, rows), products), sbuf((rows, count, lanes, rows), products)
        copy_scaled(both_sb, both_ps)
        every = both_sb.ap(pattern=[[lanes * rows, rows], [0, count], [rows, lanes], [1, rows]], offset=0)
        multiply_on_gpsimd(out_sb, every, mask)
        chunk.masked.append(out_sb)


def add_to_keys(chunk, x_sb, first):
    """Adds x [rows, sides, lanes, K] to dq and dk; the first side is q's (0) or k's (1)."""
    rows, sides, lanes, K = x_sb.shape
    identity = chunk.table["rounded_identity"]
    for side in range(sides):
        flat = x_sb.reshape((rows, sides, lanes * K))[:, side, :]
        add_selected(chunk.dqk_ps[:, first + side, :], identity, flat)


def add_gradients(chunk, sums_ps, factors, weights, first):
    """Adds factors . sums to dq and dk, and to dg what weights^T makes of the exponents' gradients."""
    rows, sides, lanes, K = sums_ps.shape
    raw_sb, x_sb = sbuf(sums_ps.shape), sbuf(sums_ps.shape, chunk.table["products"])
    terms_sb = sbuf(sums_ps.shape, weights.dtype)
    copy_scaled(raw_sb, sums_ps)
    multiply_on_gpsimd(x_sb, raw_sb, factors)
    multiply_on_gpsimd(terms_sb, x_sb, chunk.keys[:, first:2, :, :])
    add_to_keys(chunk, x_sb, first)
    for side in range(sides):
        add_selected(chunk.dg_ps, weights, terms_sb.reshape((rows, sides, lanes * K))[:, side, :])


def read_channel_states(chunk, table):
    """Starts dq, dk and dg in PSUM, each [rows, lanes K], with what states and `own` add."""
    rows, lanes, K = chunk.g.shape
    chunk.dg_ps, chunk.dqk_ps = psum((rows, lanes * K)), psum((rows, 2, lanes * K))
    reads_ps, written_ps = psum((rows, 2, lanes, K)), psum((rows, 1, lanes, K))
    own_sb = sbuf((rows, 2, lanes, K), table["products"])
    for lane in range(lanes):
        multiply_parts(reads_ps[:, 0, lane, :], chunk.do_t, chunk.S_t, lane, lane)
        multiply_parts(reads_ps[:, 1, lane, :], chunk.dR_t, chunk.S_t, lane, lane)
        multiply_parts(written_ps[:, 0, lane, :], chunk.U_t, chunk.dS_t, lane, lane)
        for side in range(2):
            copy_scaled(
                own_sb[:, side, lane, :], chunk.keys[:, 1 - side, lane, :], chunk.own[:, lane : lane + 1]
            )
    add_to_keys(chunk, own_sb, 0)
    gamma = chunk.gamma.ap(pattern=[[lanes * K, rows], [0, 2], [K, lanes], [1, K]], offset=0)
    add_gradients(chunk, reads_ps, gamma, table["lower"], 0)
    add_gradients(
        chunk, written_ps, chunk.channel_lambda.reshape((rows, 1, lanes, K)), table["strict_upper"], 1
    )
    product_sb, carried_sb = scale_channels(chunk.dS[0], chunk.S[0]), sbuf((K, lanes))
    for lane in range(lanes):
        sum_rows(carried_sb[:, lane : lane + 1], product_sb[:, lane, :], nl.copy)
    multiply(carried_sb, carried_sb, chunk.carry)
    diagonals_sb = sbuf((K, lanes, K))
    multiply_on_gpsimd(
        diagonals_sb,
        table["eye"].ap(pattern=[[PARTITIONS, K], [0, lanes], [1, K]], offset=0),
        carried_sb.ap(pattern=[[lanes, K], [1, lanes], [0, K]], offset=0),
    )
    add_selected(chunk.dg_ps, table["ones"][0:K, 0:rows], diagonals_sb.reshape((K, lanes * K)))


def scale_level(chunk, levels, level, table):
    """Returns e and f of a level, [rows, 2, lanes, K], and e . Q and f . K, rounded."""
    rows, lanes, K = chunk.g.shape
    sums_ps, factors_sb = psum((rows, lanes * K)), sbuf((rows, 2, lanes, K))
    add_selected(sums_ps, levels["sums"][:, level, :], chunk.g.reshape((rows, lanes * K)))
    nisa.activation(dst=factors_sb[:, 1, :, :], op=nl.exp, data=sums_ps.reshape((rows, lanes, K)))
    copy_scaled(factors_sb[:, 0, :, :], factors_sb[:, 1, :, :], levels["right"][:, level : level + 1])
    return factors_sb, scale_channels(chunk.keys, factors_sb, table["products"])


def multiply_level(chunk, level, scaled_sb):
    """Returns G (f . K), and G (e . Q) + H (f . K), in PSUM [rows, 2, lanes, K]."""
    out_ps = psum(scaled_sb.shape)
    G_sb, H_sb = chunk.masked
    for lane in range(scaled_sb.shape[2]):
        add_product(out_ps[:, 0, lane, :], G_sb[:, level, lane, :], scaled_sb[:, 1, lane, :])
        add_product(out_ps[:, 1, lane, :], G_sb[:, level, lane, :], scaled_sb[:, 0, lane, :])
        add_product(out_ps[:, 1, lane, :], H_sb[:, level, lane, :], scaled_sb[:, 1, lane, :])
    return out_ps


def differentiate_levels(chunk, levels, table):
    """Adds what levels add to dq, dk and dg. Engines work on three levels at a time."""
    factors, sums = [], []
    for turn in range(levels["count"] + 2):
        for level in list_due(turn, levels["count"]):
            factors.append(scale_level(chunk, levels, level, table))
        for level in list_due(turn - 1, levels["count"]):
            sums.append(multiply_level(chunk, level, factors[level][1]))
        for level in list_due(turn - 2, levels["count"]):
            add_gradients(chunk, sums[level], factors[level][0], levels["sums_t"][:, level, :], 0)
    chunk.masked = None


def store_key_gradients(chunk, bundle, gradients):
    """Adds the norms' gradients to dq and dk, sums both over the lanes of a key head, and stores them."""
    rows, _, lanes, K = chunk.keys.shape
    heads = bundle["key_heads"]
    group, dtype = lanes // heads, gradients[0].dtype
    norms = chunk.inverse_norms
    if len(norms) > 0:
        raw_sb, along_sb = sbuf(chunk.keys.shape), sbuf((rows, 2, lanes))
        copy_scaled(raw_sb, chunk.dqk_ps.reshape(chunk.keys.shape))
        multiply_on_gpsimd(raw_sb, raw_sb, chunk.keys)
        nisa.tensor_reduce(dst=along_sb, op=nl.add, data=raw_sb, axis=3, negate=True)
        x_sb = sbuf(chunk.keys.shape, chunk.table["products"])
        for side in range(2):
            for lane in range(lanes):
                factor = along_sb[:, side, lane : lane + 1]
                copy_scaled(x_sb[:, side, lane, :], chunk.keys[:, side, lane, :], factor)
        add_to_keys(chunk, x_sb, 0)
    lanes_sb = sbuf(chunk.keys.shape, dtype if group == 1 else nl.float32)
    for side in range(2):
        for lane in range(lanes):
            h = find_key_head(bundle, lane)
            factor = norms[0][:, side, h : h + 1] if len(norms) > 0 else 1.0
            copy_scaled(
                lanes_sb[:, side, lane, :], chunk.dqk_ps.reshape(chunk.keys.shape)[:, side, lane, :], factor
            )
    out_sb = lanes_sb
    if group > 1:
        out_sb = sbuf((rows, 2, heads, K), dtype)
        groups = [[2 * lanes * K, rows], [group * K, 2 * heads], [1, K], [K, group]]
        nisa.tensor_reduce(
            dst=out_sb.reshape((rows, 2 * heads, K)),
            op=nl.add,
            data=lanes_sb.ap(pattern=groups, offset=0),
            axis=3,
        )
    store_keys(gradients[0], gradients[1], out_sb, bundle["n"], chunk.start, chunk.tokens, bundle["slot"])


def differentiate_channels(stage, chunk, stream, call):
    """Runs a stage of a chunk's gradients that the gated delta rule has not."""
    bundle, table, levels, gradients = stream.bundle, chunk.table, call["levels"], call["gradients"]
    if stage == "strengths":
        chunk.dv_scale = multiply_elements(chunk.value_scale, chunk.share)
        chunk.do = scale_lanes(chunk.do, chunk.read_scale, table["products"])
    elif stage == "dR by channel":
        differentiate_writes(chunk, stream.dS, bundle, table)
    elif stage == "mask pairs":
        mask_pair_gradients(chunk, levels, table)
    elif stage == "read channels":
        read_channel_states(chunk, table)
    elif stage == "levels":
        differentiate_levels(chunk, levels, table)
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
