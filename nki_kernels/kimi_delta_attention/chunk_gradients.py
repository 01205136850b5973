"""Computes the gradients of one chunk of Kimi Delta Attention on chip.

Letters and tiles are those of the module `chunk` beside this one and of `nki_kernels.chunk_gradients`. dS' is
the gradient of the state that the chunk leaves; dO is scaled, and -dV is what the tile `dR_rounded` has here.

    dU = P^T dO + (lambda . K) dS'    dR = T^T dU    dV = diag(beta) dR
    dS = Diag(gamma_C) dS' + (gamma . Q)^T dO - (gamma . K)^T dV
    dP = strict_lower(dO U^T)    dkk = -strict_lower(dV U^T)    own_i = <dO_i, U_i>                    [C, C]
    reads_q = gamma . (dO S^T)    reads_k = -gamma . (dV S^T)    written = lambda . (U dS'^T)          [C, K]
    per level, dP and dkk masked:
    x = f . (dP (f . K))    y = f . ((dkk + dkk^T) (f . K) + dP^T (f . Q))
    dQ = reads_q + own K + sum of x        dK = reads_k + written + own Q + sum of y
    dg_t = sum_{i >= t} (Q . reads_q + K . reads_k)_i + sum_{j < t} (K . written)_j
           + gamma_C . rowsum(S . dS') + per level W_level (Q . x + K . y)      [C, K]

Q . x + K . y is the gradient of the exponents of f, which are W_level^T g. So each pair of tokens counts at
the tokens that its decay crosses, and nothing is added and taken away again.
"""

from delta_trn.nki_kernels.chunk import (
    multiply_lanes,
    multiply_parts,
    round_state,
    scale_lanes,
    store_keys,
    store_lanes,
)
from delta_trn.nki_kernels.chunk_gradients import (
    compute_residual_gradient,
    multiply_pair_gradients,
    transpose_gradients,
    transpose_states,
)
from delta_trn.nki_kernels.kimi_delta_attention.chunk import MASKED, scale_by_channel, view_halves
from delta_trn.nki_kernels.language import nisa, nl
from delta_trn.nki_kernels.plan import PARTITIONS
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
    scale_and_add,
    select_triangle,
    sum_rows,
    transpose,
)


def build_level_gradients(levels, table):
    """Adds to what `build_levels` returns, once per call:

    sums_t          W_level^T of all levels [C, count, C]
    upper, lower    per level the mask of pairs (j, i), and of pairs (i, j) [C, count, C]
    both            their sum
    eye             the identity [128, 128], float32
    """
    C, count, half = table["rows"], levels["count"], table["rows"] // 2
    sums_t_sb, upper_sb = sbuf((C, count, C)), sbuf((C, count, C))
    lower_sb, both_sb = sbuf((C, count, C)), sbuf((C, count, C))
    nisa.memset(dst=upper_sb, value=0.0)
    for level in range(count):
        s = 2**level
        nisa.tensor_copy(
            dst=view_halves(upper_sb, level * C, C, s, 1),
            src=levels["masks"].reshape((C, count, half // s, s))[:, level, :, :],
        )
        for pair in ((sums_t_sb, levels["sums"]), (lower_sb, upper_sb)):
            dst, src = pair
            out_ps = psum((C, C))
            add_transposed(out_ps, src[:, level, :], table["identity"])
            copy_scaled(dst[:, level, :], out_ps)
    nisa.tensor_tensor(dst=both_sb, data1=upper_sb, data2=lower_sb, op=nl.add)
    levels["sums_t"] = sums_t_sb
    levels["upper"] = upper_sb
    levels["lower"] = lower_sb
    levels["both"] = both_sb
    levels["eye"] = select_triangle(table["ones"], 1, nl.equal)


def scale_reads(chunk, table):
    """Adds what dS takes: gamma . Q, gamma . K, rounded [rows, lanes, K], and in float32 (lambda . K)^T."""
    products, parts = table["products"], [(0, chunk.lambda_k.shape[2])]
    chunk.gamma_q = scale_by_channel(chunk.keys, 0, chunk.gamma, products)
    chunk.erased_k = scale_by_channel(chunk.keys, 1, chunk.gamma, products)
    if products == nl.float32:
        chunk.lambda_k_t = transpose(chunk.lambda_k, parts, table)


def differentiate_writes(chunk, dS, bundle):
    """Computes dR from the gradient dS of the state that a chunk leaves, and -dV, rounded."""
    products = chunk.table["products"]
    chunk.dS, chunk.dS_rounded = dS, round_state(dS, products)
    if products == nl.float32:
        rows, lanes, V = chunk.do.shape
        dU_sb = sbuf((rows, lanes, V))
        for lane in range(lanes):
            dU_ps = psum((rows, V))
            add_product(dU_ps, chunk.P[:, lane, :], chunk.do[:, lane, :])
            multiply_parts(dU_ps, chunk.lambda_k_t, dS, lane, lane)
            copy_scaled(dU_sb[:, lane, :], dU_ps)
        chunk.dR = multiply_lanes(chunk.T, dU_sb, ())
    else:
        chunk.dR = compute_residual_gradient(chunk, chunk.dS_rounded, bundle)
    weights_sb = multiply_elements(chunk.minus_strength, chunk.share)
    chunk.dR_rounded = scale_lanes(chunk.dR, weights_sb, products)


def mask_pair_gradients(chunk, table):
    """Adds dP^T, dP, both unmasked, dkk + dkk^T, rounded, and diag(own), all [rows, lanes, rows]."""
    products, whole = table["products"], [(0, table["rows"])]
    rows, lanes, _ = chunk.UdO.shape
    chunk.own = sbuf((rows, lanes, rows), chunk.keys.dtype)
    multiply_on_gpsimd(chunk.own, chunk.UdO, repeat_over_lanes(table, "identity", lanes))
    chunk.E_t, dkk_t_sb = sbuf((rows, lanes, rows), products), sbuf((rows, lanes, rows), products)
    copy_scaled(chunk.E_t, chunk.UdO)
    copy_scaled(dkk_t_sb, chunk.UdR)
    keep_upper(dkk_t_sb, nl.greater)
    chunk.E = transpose(chunk.E_t, whole, table)[0]
    dkk_sb = transpose(dkk_t_sb, whole, table)[0]
    nisa.tensor_tensor(dst=dkk_sb, data1=dkk_sb, data2=dkk_t_sb, op=nl.add, engine=nisa.engine.gpsimd)
    chunk.dkk = dkk_sb


def add_on_gpsimd(dst, x, y):
    """Sets dst = x + y, all in SBUF."""
    nisa.tensor_tensor(dst=dst, data1=x, data2=y, op=nl.add, engine=nisa.engine.gpsimd)


def scale_both(chunk, factors_sb, copies, dtype):
    """Multiplies q and k of each lane by factors [rows, copies, lanes, K], 1 or 2: [rows, 2, lanes, K]."""
    rows, _, heads, K = chunk.keys.shape
    lanes = chunk.g.shape[1]
    group = lanes // heads
    out_sb = sbuf((rows, 2, lanes, K), dtype)
    multiply_on_gpsimd(
        out_sb.reshape((rows, 2, heads, group, K)),
        chunk.keys.ap(
            pattern=[[2 * heads * K, rows], [heads * K, 2], [K, heads], [0, group], [1, K]], offset=0
        ),
        factors_sb.ap(
            pattern=[
                [copies * lanes * K, rows], [(copies - 1) * lanes * K, 2], [group * K, heads], [K, group],
                [1, K],
            ],
            offset=0,
        ),
    )  # fmt: skip
    return out_sb


def read_channel_states(chunk, bundle):
    """Adds dq and dk, `dqk` [rows, 2, lanes, K], as far as states make them, and two tiles for dg:

    reads       Q . reads_q and K . reads_k [rows, 2, lanes, K]
    writes      K . written [rows, lanes, K]
    """
    rows, lanes, K = chunk.g.shape
    chunk.dqk, written_sb = sbuf((rows, 2, lanes, K)), sbuf((rows, lanes, K))
    targets = (chunk.dqk[:, 0, :, :], chunk.dqk[:, 1, :, :], written_sb)
    operands = ((chunk.do_t, chunk.S_t), (chunk.dR_t, chunk.S_t), (chunk.U_t, chunk.dS_t))
    for i in range(3):
        x_t, y_t = operands[i]
        out_ps = psum((rows, lanes, K))
        for lane in range(lanes):
            multiply_parts(out_ps[:, lane, :], x_t, y_t, lane, lane)
        copy_scaled(targets[i], out_ps)
        multiply_on_gpsimd(targets[i], targets[i], chunk.lambda_ if i == 2 else chunk.gamma)
    chunk.reads = scale_both(chunk, chunk.dqk, 2, nl.float32)
    chunk.writes = scale_by_channel(chunk.keys, 1, written_sb, nl.float32)
    add_on_gpsimd(targets[1], targets[1], written_sb)


def begin_decay_gradient(chunk, levels, table):
    """Starts dg, dq and dk in PSUM, each [rows, lanes K], with what states and `own` add."""
    rows, lanes, K = chunk.g.shape
    chunk.dg, chunk.dqk_ps = psum((rows, lanes * K)), []
    for side in range(2):
        chunk.dqk_ps.append(psum((rows, lanes, K)))
        for lane in range(lanes):
            dst, h = chunk.dqk_ps[side][:, lane, :], lane * chunk.keys.shape[2] // lanes
            add_selected(dst, table["identity"], chunk.dqk[:, side, lane, :])
            add_product(dst, chunk.own[:, lane, :], chunk.keys[:, 1 - side, h, :])
    for side in range(2):
        add_selected(chunk.dg, table["lower"], chunk.reads.reshape((rows, 2, lanes * K))[:, side, :])
    add_selected(chunk.dg, table["strict_upper"], chunk.writes.reshape((rows, lanes * K)))
    product_sb, carried_sb = sbuf(chunk.S[0].shape), sbuf((K, lanes))
    multiply_on_gpsimd(product_sb, chunk.dS[0], chunk.S[0])
    for lane in range(lanes):
        sum_rows(carried_sb[:, lane : lane + 1], product_sb[:, lane, :], nl.copy)
    multiply(carried_sb, carried_sb, chunk.carry)
    diagonals_sb = sbuf((K, lanes, K))
    multiply_on_gpsimd(
        diagonals_sb,
        levels["eye"].ap(pattern=[[PARTITIONS, K], [0, lanes], [1, K]], offset=0),
        carried_sb.ap(pattern=[[lanes, K], [1, lanes], [0, K]], offset=0),
    )
    add_selected(chunk.dg, table["ones"][0:K, 0:rows], diagonals_sb.reshape((K, lanes * K)))


def allocate_rectangles(levels, lanes, dtype):
    """Allocates for levels of large blocks tiles [C, lanes, C], which are 0 outside of the blocks' pairs.

    Each level has three, for dP^T, dP and dkk + dkk^T. Right halves have to start where instructions
    may, too: so there is a level less than `copy_rectangles` has.
    """
    tiles = []
    C = levels["sums"].shape[0]
    for _ in range(max(0, levels["count"] - MASKED - 1)):
        own = []
        for _ in range(3):
            tile_sb = sbuf((C, lanes, C), dtype)
            nisa.memset(dst=tile_sb, value=0.0)
            own.append(tile_sb)
        tiles.append(own)
    return tiles


def mask_small_blocks(chunk, levels):
    """Adds dP^T, dP and dkk + dkk^T of the levels of small blocks, 0 but for their pairs: `masked`, a list of
    tiles [rows, levels, lanes, rows]."""
    rows, lanes, _ = chunk.E.shape
    count = min(levels["count"], MASKED + 1)
    sources, names, chunk.masked = (chunk.E_t, chunk.E, chunk.dkk), ("upper", "lower", "both"), []
    for i in range(3):
        mask_sb, out_sb = levels[names[i]], sbuf((rows, count, lanes, rows), chunk.E.dtype)
        multiply_on_gpsimd(
            out_sb,
            sources[i].ap(pattern=[[lanes * rows, rows], [0, count], [rows, lanes], [1, rows]], offset=0),
            mask_sb.ap(
                pattern=[[mask_sb.shape[1] * rows, rows], [rows, count], [0, lanes], [1, rows]], offset=0
            ),
        )
        chunk.masked.append(out_sb)


def copy_large_blocks(chunk, level, tiles):
    """Copies the same of a level of large blocks into its `rectangles`, block by block."""
    sources, s = (chunk.E_t, chunk.E, chunk.dkk), 2**level
    for start in range(0, chunk.E.shape[0], 2 * s):
        m, end = start + s, start + 2 * s
        for i in (0, 2):
            copy_scaled(tiles[i][start:m, :, m:end], sources[i][start:m, :, m:end])
        for i in (1, 2):
            copy_scaled(tiles[i][m:end, :, start:m], sources[i][m:end, :, start:m])


def differentiate_level(chunk, levels, level, rectangles, table):
    """Adds x and y of a level to dq and dk, and to dg what they make of it."""
    rows, lanes, K = chunk.g.shape
    sums_ps = psum((rows, lanes * K))
    add_selected(sums_ps, levels["sums"][:, level, :], chunk.g.reshape((rows, lanes * K)))
    f_sb, xy_sb = sbuf((rows, lanes, K)), sbuf((rows, 2, lanes, K))
    nisa.activation(dst=f_sb, op=nl.exp, data=sums_ps.reshape((rows, lanes, K)))
    qk_sb = scale_both(chunk, f_sb, 1, table["products"])
    if level > MASKED:
        copy_large_blocks(chunk, level, rectangles[level - MASKED - 1])
    x_ps, y_ps = psum((rows, lanes, K)), psum((rows, lanes, K))
    for lane in range(lanes):
        own = []
        for i in range(3):
            if level > MASKED:
                own.append(rectangles[level - MASKED - 1][i][:, lane, :])
            else:
                own.append(chunk.masked[i][:, level, lane, :])
        add_product(x_ps[:, lane, :], own[0], qk_sb[:, 1, lane, :])
        add_product(y_ps[:, lane, :], own[2], qk_sb[:, 1, lane, :])
        add_product(y_ps[:, lane, :], own[1], qk_sb[:, 0, lane, :])
    copy_scaled(xy_sb[:, 0, :, :], x_ps)
    copy_scaled(xy_sb[:, 1, :, :], y_ps)
    multiply_on_gpsimd(
        xy_sb, xy_sb, f_sb.ap(pattern=[[lanes * K, rows], [0, 2], [K, lanes], [1, K]], offset=0)
    )
    for side in range(2):
        for lane in range(lanes):
            add_selected(chunk.dqk_ps[side][:, lane, :], table["identity"], xy_sb[:, side, lane, :])
    terms_sb = scale_both(chunk, xy_sb, 2, nl.float32).reshape((rows, 2, lanes * K))
    for side in range(2):
        add_selected(chunk.dg, levels["sums_t"][:, level, :], terms_sb[:, side, :])


def differentiate_keys(chunk, bundle, gradients):
    """Sums dq and dk over the lanes of a key head, adds the norms' gradients, and stores them."""
    rows, lanes, K = chunk.g.shape
    heads = chunk.keys.shape[2]
    group = lanes // heads
    out_sb = sbuf((rows, 2, heads, K), gradients[0].dtype)
    for side in range(2):
        copy_scaled(chunk.dqk[:, side, :, :], chunk.dqk_ps[side])
        grouped_sb = chunk.dqk.reshape((rows, 2, heads, group, K))
        total = grouped_sb[:, side, :, 0, :]
        for i in range(1, group):
            add_on_gpsimd(total, total, grouped_sb[:, side, :, i, :])
        if len(chunk.inverse_norms) == 0:
            copy_scaled(out_sb[:, side, :, :], total)
        else:
            terms_sb, along_sb = sbuf((rows, heads, K)), sbuf((rows, heads))
            multiply_on_gpsimd(terms_sb, total, chunk.keys[:, side, :, :])
            nisa.tensor_reduce(dst=along_sb, op=nl.add, data=terms_sb, axis=2, negate=True)
            for h in range(heads):
                first = grouped_sb[:, side, h, 0, :]
                scale_and_add(first, chunk.keys[:, side, h, :], along_sb[:, h : h + 1], first)
                copy_scaled(out_sb[:, side, h, :], first, chunk.inverse_norms[0][:, side, h : h + 1])
    store_keys(gradients[0], gradients[1], out_sb, bundle["n"], chunk.start, chunk.tokens, bundle["slot"])


def differentiate_channels(stage, chunk, stream, call):
    """Runs a stage of a chunk's gradients."""
    bundle, value_parts = stream.bundle, call["value_parts"]
    table, levels, gradients = chunk.table, call["levels"], call["gradients"]
    if stage == "strengths":
        chunk.dv_scale = multiply_elements(chunk.value_scale, chunk.share)
        chunk.do = scale_lanes(chunk.do, chunk.read_scale, table["products"])
    elif stage == "dR":
        differentiate_writes(chunk, stream.dS, bundle)
    elif stage == "transpose gradients":
        transpose_gradients(chunk, value_parts, table)
    elif stage == "transpose states":
        transpose_states(chunk, call["parts"], value_parts, table)
    elif stage == "multiply pairs":
        multiply_pair_gradients(chunk, bundle)
    elif stage == "dP, dL":
        mask_pair_gradients(chunk, table)
    elif stage == "read states":
        read_channel_states(chunk, bundle)
    elif stage == "levels":
        begin_decay_gradient(chunk, levels, table)
        mask_small_blocks(chunk, levels)
        for level in range(levels["count"]):
            differentiate_level(chunk, levels, level, stream.rectangles, table)
        chunk.masked = None
    elif stage == "store":
        dg_sb = sbuf(chunk.g.shape)
        copy_scaled(dg_sb, chunk.dg.reshape(chunk.g.shape))
        store_lanes(gradients[3], dg_sb, bundle, chunk.start, chunk.tokens)
        differentiate_keys(chunk, bundle, gradients)
        dv_sb = scale_lanes(chunk.dR, chunk.dv_scale, gradients[2].dtype)
        store_lanes(gradients[2], dv_sb, bundle, chunk.start, chunk.tokens)
    elif stage == "dbeta":
        terms_sb, dbeta_sb = sbuf(chunk.dR.shape), sbuf(chunk.beta.shape)
        multiply_on_gpsimd(terms_sb, chunk.U_exact, chunk.dR)
        for lane in range(bundle["lanes"]):
            sum_rows(dbeta_sb[:, lane : lane + 1], terms_sb[:, lane, :], nl.copy)
        store_lanes(gradients[4], dbeta_sb, bundle, chunk.start, chunk.tokens)
