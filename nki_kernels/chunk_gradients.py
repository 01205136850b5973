"""Computes the gradients of one chunk of the gated delta rule on chip.

Letters and tiles are those of `nki_kernels.chunk`. dS' is the gradient of the state that the chunk
leaves, and dX that of any other X.

    dR  = (P T)^T dO + W dS'                     dV   = diag(beta) dR                          [C, V]
    E   = scale lower(dO U^T . D)                Z    = -strict_lower(dR U^T . D)              [C, C]
    dQ  = scale diag(gamma) dO S^T + E K                                                       [C, K]
    dK  = E^T Q + diag(lambda) U dS'^T + diag(beta) (Z K - diag(gamma) dR S^T) + Z^T diag(beta) K
    dS  = gamma_C dS' + scale Q^T diag(gamma) dO - K^T diag(gamma beta) dR                     [K, V]
    dbeta_i = <dR_i, U_i> / beta_i

Keys and queries are raw here, too: beta, V, scale and dO stand for beta r_k^2, V / r_k, 1 and scale
r_q dO. The raw gradients of q and k lack what goes through the norms. A row x of either, with
reciprocal norm r, gets dx - x r^2 <x, dx>, because lengthening x changes nothing.

U_i is beta_i times what v_i is off by when it is written, and so is every rounding of it: dbeta has
no error that a small beta would magnify. Where beta is less than LEAST_STRENGTH, L, R and U are of
LEAST_STRENGTH, and `share` takes the excess out of everything but dbeta. The usual form,
<dR_i, v_i> + <k_i, (Z K - diag(gamma) dR S^T)_i>, is a difference of large sums where keys are
alike: in bfloat16 it had 1.34 times the error that parity allows (case alike).

E and Z are the gradients of Q K^T and of diag(beta) K K^T. The inverse is not differentiated: with
dU the gradient of U, T^T dU (T R)^T = dR U^T is its whole effect.

The gradient of g_t is a sum over what crosses t, and nothing that does not is added or taken away
again:

    dg_t = sum_{j < t <= i} F_ij + sum_{i >= t} r_i + sum_{i < t} w_i + gamma_C <dS', S>
    F   = dO U^T . P - dR U^T . L                                    pairs: i reads what j wrote [C, C]
    r_i = <q_i, scale gamma_i (dO S^T)_i> - beta_i <k_i, gamma_i (dR S^T)_i>      i reads the state
    w_i = lambda_i <(K dS')_i, U_i>                                               i writes to the next

The usual form, rows of F minus its columns summed from t on, is the same number as a difference of
sums that do not fade with C: in float32 it had 1.5 times the error that parity allows (case
collide, C = 128). Every sum over tokens is a product with a triangle of ones. And w is not <k_i, (U
dS'^T)_i>, a product that is made for dK anyway: where a later token erases what was written, K dS'
is 0 before anything is summed.
"""

from delta_trn.nki_kernels.chunk import (
    find_key_head,
    multiply_lanes,
    multiply_lanes_at_once,
    multiply_pairs,
    multiply_parts,
    round_tile,
    scale_lanes,
    store_keys,
    store_lanes,
    weigh_pairs,
)
from delta_trn.nki_kernels.language import nisa, nl
from delta_trn.nki_kernels.plan import BANK, split
from delta_trn.nki_kernels.tiles import (
    add,
    add_product,
    add_selected,
    add_transposed,
    choose_factors,
    copy_scaled,
    keep_triangle,
    multiply,
    psum,
    sbuf,
    scale_and_add,
    sum_rows,
    transpose,
)

# Of a token in backward; a power of two, so that dividing by it rounds nothing. Small enough that
# what such a token adds to another's U is less than its rounding; large enough that v = 1e-30 does
# not underflow.
LEAST_STRENGTH = 2.0**-26


def divide_norms(norms):
    """Divides the reciprocal norms of q and k by f, in place;
    returns (f [rows, 2 key heads],), or ().
    """
    if len(norms) == 0:
        return ()
    rows, sides, heads = norms[0].shape
    inverse_norms = norms[0].reshape((rows, sides * heads))
    factors_sb, growth_sb = choose_factors(inverse_norms)
    nisa.scalar_tensor_tensor(
        dst=inverse_norms, data=growth_sb, op0=nl.add, operand0=1.0, op1=nl.multiply,
        operand1=inverse_norms,
    )  # fmt: skip
    return (factors_sb,)


def shorten_vectors(qk_sb, shortening):
    """Multiplies q and k [rows, 2, key heads, K] by f, in place."""
    if len(shortening) == 0:
        return
    _, sides, heads, _ = qk_sb.shape
    for side in range(sides):
        for h in range(heads):
            own, i = qk_sb[:, side, h, :], side * heads + h
            copy_scaled(own, own, shortening[0][:, i : i + 1])


def transpose_state(S, parts, value_parts, table):
    """Transposes S, a tile [f, lanes, V] per part of K, into a tile [f, lanes, K] per part of V."""
    lanes, K = S[0].shape[1], parts[len(parts) - 1][1]
    tiles = []
    for span in value_parts:
        low, high = span
        out_sb = sbuf((high - low, lanes, K), S[0].dtype)
        for group in split(lanes, max(1, BANK // K)):
            first, last = group
            out_ps = psum((high - low, last - first, K))
            for lane in range(first, last):
                for part in range(len(parts)):
                    start, stop = parts[part]
                    add_transposed(
                        out_ps[:, lane - first, start:stop],
                        S[part][:, lane, low:high],
                        table["eye"][0 : stop - start, 0 : stop - start],
                    )
            copy_scaled(out_sb[:, first:last, :], out_ps)
        tiles.append(out_sb)
    return tiles


def transpose_gradients(chunk, value_parts, table):
    """Adds transposes of dO, U and dR, tiles per part of V."""
    chunk.do_t = transpose(chunk.do, value_parts, table)
    chunk.U_t = transpose(chunk.U, value_parts, table)
    chunk.dR_t = transpose(chunk.dR_rounded, value_parts, table)


def transpose_states(chunk, parts, value_parts, table):
    """Adds transposes of S and dS, tiles per part of V."""
    chunk.S_t = transpose_state(chunk.S_rounded, parts, value_parts, table)
    chunk.dS_t = transpose_state(chunk.dS_rounded, parts, value_parts, table)


def transpose_writes(T_sb, chunk, parts, dtype):
    """Computes W^T = (diag(lambda) K)^T T, a tile [f, lanes, rows] per part of K."""
    tiles = []
    for span in parts:
        start, stop = span
        tiles.append(multiply_lanes_at_once(chunk.lambda_k, T_sb, start, stop, dtype))
    return tiles


def compute_writes(chunk, constants):
    """Adds U = T R to the chunk: rounded, and for dbeta `U_exact`: T R - R of rounded factors, and
    R itself.

    T's diagonal is 1. So where a token meets no other, the error of U_exact is no rounding of R. It
    leaves PSUM divided by beta.
    """
    products, R_sb, T_t_sb = constants["products"], chunk.R, chunk.T_t_rounded
    rows, lanes, V = R_sb.shape
    R_rounded_sb = round_tile(R_sb, products)
    U_sb, U_exact_sb = sbuf((rows, lanes, V), products), sbuf((rows, lanes, V))
    for lane in range(lanes):
        rounded = R_rounded_sb[:, lane, :]
        U_ps = psum((rows, V))
        add_product(U_ps, T_t_sb[:, lane, :], rounded)
        if R_sb.dtype != products:
            add_product(U_ps, constants["minus_identity"][0:rows, 0:rows], rounded, True)
            add_selected(U_ps, constants["identity"][0:rows, 0:rows], R_sb[:, lane, :], True)
        copy_scaled(U_exact_sb[:, lane, :], U_ps, chunk.inverse_beta[:, lane : lane + 1])
        copy_scaled(U_sb[:, lane, :], U_ps, chunk.share[:, lane : lane + 1])
    chunk.U, chunk.U_exact = U_sb, U_exact_sb


def compute_residual_gradient(chunk, dS, bundle):
    """Computes dR [rows, lanes, V], in one step in bfloat16 and in two in float32; adds dbeta
    [rows, lanes] to the chunk, <dR, U / beta> of each row.

        dR = (P T)^T dO + W dS'                  dU = P^T dO + diag(lambda) K dS',  dR = T^T dU

    Where keys are equal, so are the rows of K dS', here and in w, and their roundings cancel in dg.
    Those of W's rows did not: an element of dg had 6 times the allowed error (case erased). Rows of
    P T are alike, too, and dS adds their roundings up over the chunk: the gradient of an initial
    state had 1.7 times the allowed error. In bfloat16 it was T's rounding that did it, so P T is a
    product of float32 operands; dR in two steps would round dU and T.
    """
    do_sb = chunk.do
    rows, lanes, V = do_sb.shape
    in_two = dS[0].dtype == nl.float32
    out_sb, terms_sb, chunk.dbeta = (
        sbuf((rows, lanes, V)),
        sbuf((rows, lanes, V)),
        sbuf((rows, lanes)),
    )
    dU_sb = out_sb
    if in_two:
        dU_sb = multiply_lanes(chunk.P, do_sb, ())
        for lane in range(lanes):
            KdS_ps = psum((rows, V))
            multiply_parts(KdS_ps, chunk.k_t, dS, find_key_head(bundle, lane), lane)
            scale_and_add(
                dU_sb[:, lane, :], KdS_ps, chunk.lambda_[:, lane : lane + 1], dU_sb[:, lane, :]
            )
    for lane in range(lanes):
        dR_ps = psum((rows, V))
        if in_two:
            add_product(dR_ps, chunk.T[:, lane, :], dU_sb[:, lane, :])
        else:
            add_product(dR_ps, chunk.PT[:, lane, :], do_sb[:, lane, :])
            multiply_parts(dR_ps, chunk.W_t, dS, lane, lane, True)
        copy_scaled(out_sb[:, lane, :], dR_ps)
        multiply(terms_sb[:, lane, :], dR_ps, chunk.U_exact[:, lane, :])
    nisa.tensor_reduce(dst=chunk.dbeta, op=nl.add, data=terms_sb, axis=2)
    return out_sb


def compute_pair_gradients(chunk, bundle, table):
    """Adds the gradients over pairs of tokens to the chunk: E, diag(beta) Z, and F^T's terms,
    transposed; U dO^T and U dR^T, which they are products with, are read where they lie in PSUM.
    """
    products = table["products"]
    reads = multiply_pairs(chunk.U_t, chunk.do_t, bundle)
    chunk.E_t = weigh_pairs(reads, chunk.D_t, products)
    chunk.reads_t = weigh_pairs(reads, chunk.P_t)
    erasures = multiply_pairs(chunk.U_t, chunk.dR_t, bundle)
    chunk.weighted_Z_t = weigh_pairs(erasures, chunk.weighted_D_t, products)
    keep_triangle(chunk.weighted_Z_t, 1, 1)
    chunk.erasures_t = weigh_pairs(erasures, chunk.minus_L_t)


def copy_tile(x_ps):
    """Copies a tile from PSUM to SBUF."""
    out_sb = sbuf(x_ps.shape)
    copy_scaled(out_sb, x_ps)
    return out_sb


def transpose_pair_gradients(chunk, table):
    """Adds E and diag(beta) Z to the chunk."""
    whole = [(0, table["rows"])]
    chunk.E = transpose(chunk.E_t, whole, table)[0]
    chunk.weighted_Z = transpose(chunk.weighted_Z_t, whole, table)[0]


def read_states(chunk, bundle, table):
    """Adds, rounded, what states do to the gradients of the bundle's raw q and k, and dot products
    for dg.

    read        per lane gamma dO S^T and -diag(beta) gamma dR S^T [rows, 2, K]
    written     per lane diag(lambda) U dS'^T [rows, K]
    dots        [rows, lanes, 2]: of rows of q and k with those of `read`
    """
    qk_sb, lanes, products = chunk.qk, bundle["lanes"], table["products"]
    rows, _, _, K = qk_sb.shape
    sums_sb, dots_sb = sbuf((rows, lanes, 2)), sbuf((rows, lanes, 2))
    chunk.read, chunk.written, chunk.dots = [], [], dots_sb
    factors = (chunk.gamma, chunk.minus_strength_gamma)
    for lane in range(lanes):
        h, written_ps = find_key_head(bundle, lane), psum((rows, K))
        read_sb, written_sb = sbuf((rows, 2, K), products), sbuf((rows, K), products)
        terms_sb = sbuf((rows, 2, K))
        for sides in split(2, 2 if len(chunk.S_t) == 1 else 1):  # sums have a tensor each
            first, stop = sides
            read_ps = psum((rows, stop - first, K))
            for side in range(first, stop):
                own_ps = read_ps[:, side - first, :]
                multiply_parts(own_ps, (chunk.do_t, chunk.dR_t)[side], chunk.S_t, lane, lane)
            for side in range(first, stop):
                factor_sb = factors[side][:, lane : lane + 1]
                copy_scaled(read_sb[:, side, :], read_ps[:, side - first, :], factor_sb)
            multiply(terms_sb[:, first:stop, :], read_ps, qk_sb[:, first:stop, h, :])
        nisa.tensor_reduce(dst=sums_sb[:, lane, :], op=nl.add, data=terms_sb, axis=2)
        multiply_parts(written_ps, chunk.U_t, chunk.dS_t, lane, lane)
        copy_scaled(written_sb, written_ps, chunk.lambda_[:, lane : lane + 1])
        chunk.read.append(read_sb)
        chunk.written.append(written_sb)
    for side in range(2):
        multiply(dots_sb[:, :, side], sums_sb[:, :, side], factors[side])


def compute_key_gradients(chunk, bundle, table, in_psum):
    """Adds the gradients of the bundle's raw q and k to the chunk: raw_dqk, for each key head dq
    and dk [rows, K] float32, sums over its lanes; and <k, dk> of each row, `along`.

    What goes through the norms comes after, by `finish_key_gradients`. Until then they wait in PSUM
    if `in_psum`, where the Vector engine takes them at full speed, else in SBUF.
    """
    qk_sb, lanes = chunk.qk, bundle["lanes"]
    rows, _, heads, K = qk_sb.shape
    group = lanes // heads
    chunk.raw_dqk, chunk.along = [], sbuf((rows, 2, heads))
    terms_sb = sbuf((rows, heads, K))
    for h in range(heads):
        q_sb, k_sb = qk_sb[:, 0, h, :], qk_sb[:, 1, h, :]
        dq_ps, dk_ps = psum((rows, K)), psum((rows, K))
        for lane in range(h * group, (h + 1) * group):
            adds = lane > h * group
            add_product(dq_ps, chunk.E_t[:, lane, :], k_sb, adds)
            add_tile(dq_ps, chunk.read[lane][:, 0, :], table)
        for lane in range(h * group, (h + 1) * group):
            adds = lane > h * group
            add_product(dk_ps, chunk.E[:, lane, :], q_sb, adds)
            add_product(dk_ps, chunk.weighted_Z[:, lane, :], k_sb, True)
            add_product(dk_ps, chunk.weighted_Z_t[:, lane, :], k_sb, True)
            add_tile(dk_ps, chunk.read[lane][:, 1, :], table)
            add_tile(dk_ps, chunk.written[lane], table)
        if in_psum:
            chunk.raw_dqk.append((dq_ps, dk_ps))
        else:
            chunk.raw_dqk.append((copy_tile(dq_ps), copy_tile(dk_ps)))
        multiply(terms_sb[:, h, :], dk_ps, k_sb)
    nisa.tensor_reduce(dst=chunk.along[:, 1, :], op=nl.add, data=terms_sb, axis=2)


def add_tile(dst_ps, x_sb, table):
    """Adds x to a sum in PSUM that a product began, as a product with the identity. The Vector
    engine has more to do.
    """
    add_selected(dst_ps, table["rounded_identity"], x_sb, True)


def sum_along(chunk, bundle):
    """Makes `along` what `finish_key_gradients` takes, -r^2 <x, dx> [rows, 2, key heads].

    <q, dq> is <q, gamma dO S^T> and a row of the sums of dO U^T . P, which `sum_crossing_pairs`
    leaves.
    """
    qk_sb, inverse_norms_sb = chunk.qk, chunk.inverse_norms[0]
    rows, _, heads, _ = qk_sb.shape
    lanes = bundle["lanes"]
    along_sb, reads_sb = chunk.along, sbuf((rows, lanes))
    add(reads_sb, chunk.dots[:, :, 0], chunk.read_sums)
    nisa.tensor_reduce(
        dst=along_sb[:, 0, :],
        op=nl.add,
        data=reads_sb.reshape((rows, heads, lanes // heads)),
        axis=2,
    )
    for _ in range(2):
        multiply(along_sb, along_sb, inverse_norms_sb)
    nisa.tensor_scalar(dst=along_sb, data=along_sb, op0=nl.multiply, operand0=-1.0)


def finish_key_gradients(chunk, l2norm):
    """Adds dqk [rows, 2, key heads, K], float32, what the norms' gradients make of those of q and
    k: dx - x r^2 <x, dx>, r the reciprocal norm; without norms, dx.
    """
    chunk.dqk = sbuf(chunk.qk.shape)
    for side in range(2):
        for h in range(chunk.qk.shape[2]):
            raw, out = chunk.raw_dqk[h][side], chunk.dqk[:, side, h, :]
            if l2norm:
                factor_sb = chunk.along[:, side, h : h + 1]
                scale_and_add(out, chunk.qk[:, side, h, :], factor_sb, raw)
            else:
                copy_scaled(out, raw)


def multiply_terms(chunk, bundle, parts, table):
    """Adds to the chunk r, and products of elements, whose rows `compute_sums` sums.

    reads           r [rows, lanes]
    U_KdS           U . K dS' [rows, lanes, V]
    dS_S            dS' . S, a list per part of K, [f, lanes, V]

    """
    rows, lanes, V = table["rows"], bundle["lanes"], chunk.do.shape[2]
    dots_sb, reads_sb = chunk.dots, sbuf((rows, lanes))
    add(reads_sb, dots_sb[:, :, 0], dots_sb[:, :, 1])
    chunk.reads = reads_sb
    chunk.U_KdS, chunk.dS_S = sbuf((rows, lanes, V)), []
    for piece in multiply_pairs(chunk.k_t, chunk.dS_rounded, bundle):
        first, stop, KdS_ps = piece
        multiply(chunk.U_KdS[:, first:stop, :], chunk.U[:, first:stop, :], KdS_ps)
    for part in range(len(parts)):
        product_sb = sbuf(chunk.S[part].shape)
        multiply(product_sb, chunk.dS[part], chunk.S[part])
        chunk.dS_S.append(product_sb)


def compute_sums(chunk, on_vector):
    """Adds the sums of rows of what `multiply_terms` made, if `on_vector` on the engine which made
    it, else on the Scalar engine: the less busy one of the two.

    writes      w [rows, lanes]
    carried     gamma_C <dS', S>, not summed over K yet: a tile [f, lanes] per part of K
    """
    rows, lanes, _ = chunk.dR.shape
    chunk.writes, chunk.carried = sbuf((rows, lanes)), []
    pairs = [(chunk.writes, chunk.U_KdS)]
    for product_sb in chunk.dS_S:
        carried_sb = sbuf((product_sb.shape[0], lanes))
        chunk.carried.append(carried_sb)
        pairs.append((carried_sb, product_sb))
    for pair in pairs:
        sums_sb, terms_sb = pair
        if on_vector:
            nisa.tensor_reduce(dst=sums_sb, op=nl.add, data=terms_sb, axis=2)
        else:
            for lane in range(lanes):
                sum_rows(sums_sb[:, lane : lane + 1], terms_sb[:, lane, :], nl.copy)


def scale_sums(chunk):
    """Multiplies the sums of `compute_sums` by lambda and gamma_C, on the Vector engine."""
    for carried_sb in chunk.carried:
        size = carried_sb.shape[0]
        multiply(carried_sb, carried_sb, chunk.carry[0:size, :])
    multiply(chunk.writes, chunk.writes, chunk.lambda_)


def sum_columns(tile_sb, table):
    """Sums x [rows, lanes, rows] over its partitions: [rows, lanes] in PSUM,
    a row per column of x.
    """
    rows, lanes, _ = tile_sb.shape
    out_ps = psum((rows, lanes))
    for lane in range(lanes):
        add_transposed(out_ps[:, lane : lane + 1], tile_sb[:, lane, :], table["ones"][0:rows, 0:1])
    return out_ps


def sum_crossing_pairs(chunk, table):
    """Computes the sum over j < t of F_ij at row i and column t <= i, else 0; [rows, lanes, rows].

    It adds read_sums to the chunk, [rows, lanes], row sums of dO U^T . P, the first term of F.
    """
    rows, lanes = table["rows"], chunk.reads_t.shape[1]
    crossing_sb = sbuf((rows, lanes, rows))
    for lane in range(lanes):
        sums_ps = psum((rows, rows))  # over j < t, for every i
        add_transposed(sums_ps, chunk.reads_t[:, lane, :], table["strict_upper"])
        add_transposed(sums_ps, chunk.erasures_t[:, lane, :], table["strict_upper"], True)
        multiply(crossing_sb[:, lane, :], sums_ps, table["lower"])
    chunk.read_sums = copy_tile(sum_columns(chunk.reads_t, table))
    return crossing_sb


def sum_decay_gradient(chunk, bundle, parts, table):
    """Computes dg [rows, lanes] from what the stages before left in the chunk's dict."""
    rows, lanes = table["rows"], bundle["lanes"]
    states_ps = psum((rows, lanes))  # what r, w and <dS', S> add
    add_selected(states_ps, table["lower"], chunk.reads)
    add_selected(states_ps, table["strict_upper"], chunk.writes, True)
    for part in range(len(parts)):
        size = parts[part][1] - parts[part][0]
        add_selected(states_ps, table["ones"][0:size, 0:rows], chunk.carried[part], True)
    pairs_ps = sum_columns(chunk.crossing, table)
    out_sb = sbuf((rows, lanes))
    nisa.tensor_copy(dst=out_sb, src=pairs_ps)
    add(out_sb, out_sb, states_ps)
    return out_sb


def store_key_gradients(chunk, bundle, gradients):
    """Stores dq and dk of raw q and k, and dv."""
    dq, dk, dv, _, _ = gradients
    dqk_sb = sbuf(chunk.qk.shape, dq.dtype)
    if len(chunk.shortening) > 0:
        heads = bundle["key_heads"]
        for side in range(2):
            for h in range(heads):
                i = side * heads + h
                factor_sb = chunk.shortening[0][:, i : i + 1]
                copy_scaled(dqk_sb[:, side, h, :], chunk.dqk[:, side, h, :], factor_sb)
    else:
        copy_scaled(dqk_sb, chunk.dqk)
    store_keys(dq, dk, dqk_sb, bundle["n"], chunk.start, chunk.tokens, bundle["slot"])
    dv_sb = scale_lanes(chunk.dR, chunk.dv_scale, dv.dtype)
    store_lanes(dv, dv_sb, bundle, chunk.start, chunk.tokens)
