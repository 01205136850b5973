"""Computes one chunk of the gated delta rule on chip: what forward computes and backward computes
again.

Per value head, for C tokens that meet the state S [K, V]. Q, K [C, K] and V [C, V] have one row per
token, and b [C] is the running sum of g inside the chunk:

    gamma_i = exp(b_i)    lambda_i = exp(b_C - b_i)    D_ij = exp(b_i - b_j) for i >= j, else 0

    L  = strict_lower(diag(beta) K K^T . D)      T = (I + L)^-1                  [C, C]
    P  = scale lower(Q K^T . D)                                                  [C, C]
    R  = diag(beta) (V - diag(gamma) K S)        U = T R                         [C, V]
    O  = scale diag(gamma) Q S + P U             S' = gamma_C S + K^T diag(lambda) U

Source: arXiv:2412.06464 (chunkwise form). U is large where keys repeat, while its sums over tokens
are small. So R is summed instead, by matrices that are sums already, P T and W = T^T diag(lambda) K
[C, K]:

    O  = scale diag(gamma) Q S + (P T) R         S' = gamma_C S + W^T R

Q and K are multiplied as they are loaded, and what scales them comes after. With r_q and r_k the
reciprocal norms of their rows (1 where they are not normalized), keys of any norm follow the rule
with other strengths and values, and o is a multiple:

    beta -> beta r_k^2        v -> v / r_k        o -> scale r_q o

So in all that follows K and Q are raw, scale is 1, and beta and V are these. What this buys: inputs
of bfloat16 are multiplied in bfloat16, four times as fast as in float32, and Q K^T and K K^T are
still exact to float32. To round q / |q| first is an error of 2^-9 |q| |k| in q^T k, far too much
where they are nearly orthogonal and o is nothing else. Of bfloat16 inputs these products stay
float32: sums of g, the inverse, W, and W^T R. Operands of the others are rounded, their sums are
not.

With all keys equal and beta = 1 this takes the error of S from 1.1 of what parity allows to 0.7. It
costs as many products, and leaves two of them in a row from state to state instead of three.

Sums of g are products of g with triangles of ones: sum_{j<l<=i} g_l is one product for all i, j of
the chunk. No difference of two running sums is taken, so where a decay of -20 stands beside one of
-0.01 the small one keeps its digits, and no exponent is above 0. A sum of a hundred float32 terms
is off by 3e-6 near
-30, and so is its exponential: more than parity allows where a state is all that counts. So g comes in two
parts (`plan.split_decays`). Sums of multiples of 2^-8 are exact, and sums of the rest are small. D
adds both up at the end; gamma, lambda and gamma_C, which multiply states, are products of two
exponentials.

Matrices over pairs of tokens are kept transposed, `D_t` for D^T, because a product takes its first
factor transposed. `lanes` is the number of the bundle's value heads, `parts` cuts K into [(start,
stop)], and the state is one tile [stop - start, lanes, V] per part. A `Chunk` has the tiles of a
chunk, all in SBUF.

qk, k_t, forward's P_t and all that is said to be rounded are of dtype `products`, the rest is
float32. `tiles.choose_factors` keeps R, U and their products from underflow where norms are huge.
"""

from delta_trn.nki_kernels.chunk_tiles import Chunk
from delta_trn.nki_kernels.language import nisa, nl
from delta_trn.nki_kernels.plan import BANK, PARTITIONS, split
from delta_trn.nki_kernels.tiles import (
    add_product,
    add_selected,
    add_transposed,
    copy_scaled,
    invert_sums,
    keep_triangle,
    load_padded,
    multiply,
    psum,
    sbuf,
    scale_and_add,
)
from delta_trn.nki_kernels.triangular import list_block_columns


def load_lanes(src, bundle, start, tokens, rows, dtype=nl.float32):
    """Loads a bundle's tokens of HBM [N, T, HV, ...] into a tile [rows, lanes, ...] of dtype."""
    n, first, lanes = bundle["n"], bundle["first"], bundle["lanes"]
    return load_padded(src[n, start : start + tokens, first : first + lanes], rows, dtype)


def store_lanes(dst, src_sb, bundle, start, tokens):
    """Stores [rows, lanes, ...] to HBM [N, T, HV, ...]."""
    n, first, lanes = bundle["n"], bundle["first"], bundle["lanes"]
    nisa.dma_copy(dst=dst[n, start : start + tokens, first : first + lanes], src=src_sb[0:tokens])


def sum_decays(g_sb, K, table):
    """Returns the factors of gamma and lambda [rows, 2, lanes, 2],
    and of carry [min(K, 128), lanes, 2].
    """
    rows, lanes, _ = g_sb.shape
    g_flat = g_sb.reshape((rows, lanes * 2))
    sums_ps = psum((rows, 2, lanes * 2))
    add_selected(sums_ps[:, 0, :], table["upper"], g_flat)
    add_selected(sums_ps[:, 1, :], table["strict_lower"], g_flat)
    factors_sb = sbuf((rows, 2, lanes, 2))
    nisa.activation(dst=factors_sb, op=nl.exp, data=sums_ps.reshape((rows, 2, lanes, 2)))
    partitions = min(K, PARTITIONS)
    whole_ps = psum((partitions, lanes * 2))
    add_selected(whole_ps, table["ones"][0:rows, 0:partitions], g_flat)
    carry_factors_sb = sbuf((partitions, lanes, 2))
    nisa.activation(dst=carry_factors_sb, op=nl.exp, data=whole_ps.reshape((partitions, lanes, 2)))
    return factors_sb, carry_factors_sb


def compute_gates(chunk, bundle, scale):
    """Computes decays and write strengths of a bundle from the chunk's sums, beta and norms."""
    rows, lanes = chunk.beta.shape
    chunk.gamma, chunk.lambda_ = sbuf((rows, lanes)), sbuf((rows, lanes))
    chunk.carry = sbuf((chunk.carry_factors.shape[0], lanes))
    for i in range(2):
        multiply(
            (chunk.gamma, chunk.lambda_)[i], chunk.factors[:, i, :, 0], chunk.factors[:, i, :, 1]
        )
    read_scale_sb = sbuf((rows, lanes))
    value_scale_sb, minus_strength_sb = chunk.beta, sbuf((rows, lanes))
    if len(chunk.inverse_norms) == 0:
        nisa.memset(dst=read_scale_sb, value=scale)
        nisa.tensor_scalar(dst=minus_strength_sb, data=chunk.beta, op0=nl.multiply, operand0=-1.0)
    else:
        value_scale_sb = sbuf((rows, lanes))
        inverse_norms_sb, heads = chunk.inverse_norms[0], bundle["key_heads"]
        per_head = (rows, heads, lanes // heads)
        own = []
        for side in range(2):
            own.append(
                inverse_norms_sb.ap(
                    pattern=[[2 * heads, rows], [1, heads], [0, lanes // heads]],
                    offset=side * heads,
                )
            )
        nisa.tensor_scalar(
            dst=read_scale_sb.reshape(per_head), data=own[0], op0=nl.multiply, operand0=scale
        )
        multiply(value_scale_sb.reshape(per_head), chunk.beta.reshape(per_head), own[1])
        nisa.scalar_tensor_tensor(
            dst=minus_strength_sb.reshape(per_head),
            data=value_scale_sb.reshape(per_head),
            op0=nl.multiply,
            operand0=-1.0,
            op1=nl.multiply,
            operand1=own[1],
        )
    chunk.minus_strength_gamma = sbuf((rows, lanes))
    multiply(chunk.minus_strength_gamma, chunk.gamma, minus_strength_sb)
    multiply(chunk.carry, chunk.carry_factors[:, :, 0], chunk.carry_factors[:, :, 1])
    chunk.read_scale, chunk.value_scale = read_scale_sb, value_scale_sb
    chunk.minus_strength = minus_strength_sb


def load_keys(q, k, bundle, start, tokens, table):
    """Loads q and k of a bundle: `qk`."""
    n, first, heads = bundle["n"], bundle["key_first"], bundle["key_heads"]
    rows, K = table["rows"], q.shape[3]
    qk_sb = sbuf((rows, 2, heads, K), table["products"])
    sources, flat_sb = (q, k), qk_sb.reshape((rows, 2 * heads, K))
    if tokens < rows:
        nisa.memset(dst=qk_sb, value=0.0)
    for side in range(2):
        src = sources[side][n, start : start + tokens, first : first + heads, :]
        nisa.dma_copy(dst=flat_sb[0:tokens, side * heads : (side + 1) * heads, :], src=src)
    return qk_sb


def store_keys(dq, dk, qk_sb, n, start, tokens, first):
    """Stores [rows, 2, heads, K] to heads first .. of two tensors in HBM [N, T, H, K]."""
    rows, _, heads, K = qk_sb.shape
    targets, flat_sb = (dq, dk), qk_sb.reshape((rows, 2 * heads, K))
    for side in range(2):
        nisa.dma_copy(
            dst=targets[side][n, start : start + tokens, first : first + heads, :],
            src=flat_sb[0:tokens, side * heads : (side + 1) * heads, :],
        )


def sum_key_squares(qk_sb, table):
    """Returns the squared norms of q and k, [rows, 2, key heads]."""
    rows, _, heads, K = qk_sb.shape
    squares_sb = sbuf((rows, 2, heads))
    unread_sb = sbuf((rows, K), table["products"])
    for side in range(2):
        for h in range(heads):
            nisa.activation(
                dst=unread_sb, op=nl.square, data=qk_sb[:, side, h, :], reduce_op=nl.add,
                reduce_res=squares_sb[:, side, h : h + 1], reduce_cmd=nisa.reduce_cmd.reset_reduce,
            )  # fmt: skip
    return squares_sb


def invert_key_squares(squares_sb, table):
    """Returns ([rows, 2, key heads],), the reciprocal norms of q and k."""
    inverse_norms_sb = sbuf(squares_sb.shape)
    invert_sums(inverse_norms_sb, squares_sb, table["norm"])
    copy_scaled(inverse_norms_sb, inverse_norms_sb, table["norm"]["scale"])
    return (inverse_norms_sb,)


def transpose_side(qk_sb, side, parts, table):
    """Transposes q (side 0) or k (side 1) of [rows, 2, key heads, K]:
    a tile [f, heads, rows] per part.
    """
    rows, _, heads, _ = qk_sb.shape
    tiles = []
    for span in parts:
        start, stop = span
        out_ps = psum((stop - start, heads, rows))
        for h in range(heads):
            add_transposed(
                out_ps[:, h, :], qk_sb[:, side, h, start:stop], table["rounded_identity"]
            )
        out_sb = sbuf((stop - start, heads, rows), qk_sb.dtype)
        copy_scaled(out_sb, out_ps)
        tiles.append(out_sb)
    return tiles


def find_key_head(bundle, lane):
    """Returns the key head, within the bundle, that a lane reads."""
    return lane * bundle["key_heads"] // bundle["lanes"]


def scale_heads(qk_sb, side, columns_sb, bundle, dtype):
    """Scales each lane's q (side 0) or k (side 1) by rows: [rows, lanes, K],
    row i times columns[i, lane].
    """
    lanes = bundle["lanes"]
    out_sb = sbuf((qk_sb.shape[0], lanes, qk_sb.shape[3]), dtype)
    for lane in range(lanes):
        own = qk_sb[:, side, find_key_head(bundle, lane), :]
        copy_scaled(out_sb[:, lane, :], own, columns_sb[:, lane : lane + 1])
    return out_sb


def scale_lanes(x_sb, columns_sb, dtype=nl.float32):
    """Scales [rows, lanes, V] by rows: row i of each lane times columns[i, lane]."""
    out_sb = sbuf(x_sb.shape, dtype)
    for lane in range(x_sb.shape[1]):
        copy_scaled(out_sb[:, lane, :], x_sb[:, lane, :], columns_sb[:, lane : lane + 1])
    return out_sb


def spread_decays(g_sb, table):
    """Builds what D's sums add: each part of g_l at row l and every column i >= l,
    two such tiles.
    """
    rows, lanes, _ = g_sb.shape
    tiles = []
    for part in range(2):
        out_sb = sbuf((rows, lanes, rows))
        for lane in range(lanes):
            copy_scaled(out_sb[:, lane, :], table["upper"], g_sb[:, lane, part : part + 1])
        tiles.append(out_sb)
    return tiles


def build_diagonals(columns_sb, table):
    """Builds diag(columns) of each lane, [rows, lanes, rows], from columns [rows, lanes]."""
    rows, lanes = columns_sb.shape
    out_sb = sbuf((rows, lanes, rows))
    for lane in range(lanes):
        copy_scaled(out_sb[:, lane, :], table["identity"], columns_sb[:, lane : lane + 1])
    return out_sb


def compute_decays(spread, table):
    """Computes D^T from what `spread_decays` returns: exp of sum_{j<l<=i} g_l at row j,
    column i >= j.
    """
    rows, lanes, _ = spread[0].shape
    sums_ps = psum((rows, lanes * rows))
    for part in range(2):
        terms = spread[part].reshape((rows, lanes * rows))
        add_selected(sums_ps, table["strict_lower"], terms, part > 0)
    out_sb = sbuf((rows, lanes, rows))
    nisa.activation(dst=out_sb, op=nl.exp, data=sums_ps.reshape((rows, lanes, rows)))
    keep_triangle(out_sb, 1, 0)
    return out_sb


def weight_decays(D_t_sb, diagonals_sb, table):
    """Computes D^T diag(columns) from what `build_diagonals` returns, [rows, lanes, rows].

    An instruction cannot scale along the free axis. So the columns are copied to all partitions
    first, by a product of ones with diag(columns).
    """
    rows, lanes, _ = D_t_sb.shape
    out_sb = sbuf((rows, lanes, rows))
    columns_ps = psum((rows, lanes * rows))
    add_selected(
        columns_ps, table["ones"][0:rows, 0:rows], diagonals_sb.reshape((rows, lanes * rows))
    )
    multiply(out_sb, columns_ps.reshape((rows, lanes, rows)), D_t_sb)
    return out_sb


def multiply_parts(dst_ps, stationary, moving, a, b, adds=False):
    """Sets dst in PSUM to stationary^T moving, summed over parts, or adds it if `adds`:
    lane or key head a of the one, b of the other.
    """
    for part in range(len(moving)):
        x, y = stationary[part][:, a, :], moving[part][:, b, :]
        add_product(dst_ps, x, y, adds or part > 0)


def cut_lanes(lanes, parts, columns):
    """Cuts lanes into those whose products, of so many columns each, share a PSUM tensor: as many
    as a bank holds where these are single products, else each lane, whose products of `parts` parts
    are a sum.
    """
    return split(lanes, max(1, BANK // columns) if len(parts) == 1 else 1)


def multiply_pairs(stationary, moving, bundle):
    """Computes stationary^T moving of each lane in PSUM, as products of all pairs of tokens.

    stationary and moving are lists over the parts of what is summed, tiles [f, lanes or key heads,
    rows], moving also [.., K or V]. Returns [(first lane, lane behind the last, tile [rows, those
    lanes, rows, K or V])].
    """
    rows, columns, lanes = stationary[0].shape[2], moving[0].shape[2], bundle["lanes"]
    pieces = []
    for span in cut_lanes(lanes, moving, columns):
        first, stop = span
        out_ps = psum((rows, stop - first, columns))
        for lane in range(first, stop):
            a = lane if stationary[0].shape[1] == lanes else find_key_head(bundle, lane)
            b = lane if moving[0].shape[1] == lanes else find_key_head(bundle, lane)
            multiply_parts(out_ps[:, lane - first, :], stationary, moving, a, b)
        pieces.append((first, stop, out_ps))
    return pieces


def weigh_pairs(pieces, factors_sb, dtype=nl.float32):
    """Multiplies what `multiply_pairs` returns by factors of its shape, in a new tile."""
    out_sb = sbuf(factors_sb.shape, dtype)
    for piece in pieces:
        first, stop, products_ps = piece
        multiply(out_sb[:, first:stop, :], products_ps, factors_sb[:, first:stop, :])
    return out_sb


def multiply_lanes(stationary, moving, factors, dtype=nl.float32):
    """Computes stationary^T moving of each lane, with a PSUM tile per lane; tiles [rows, lanes,
    free].

    factors is a list of what the rows of the result are multiplied by per lane, or (): of nothing.
    """
    free, lanes = stationary.shape[2], stationary.shape[1]
    out_sb = sbuf((free, lanes, moving.shape[2]), dtype)
    for lane in range(lanes):
        out_ps = psum((free, moving.shape[2]))
        add_product(out_ps, stationary[:, lane, :], moving[:, lane, :])
        copy_scaled(out_sb[:, lane, :], out_ps, factors[lane] if len(factors) > 0 else 1.0)
    return out_sb


def multiply_lanes_at_once(stationary, moving, start, stop, dtype):
    """Computes the same for columns start .. stop of stationary.

    The results of all lanes fill one bank of PSUM and leave it in one instruction.
    """
    free, lanes = stop - start, stationary.shape[1]
    out_ps = psum((free, lanes, moving.shape[2]))
    for lane in range(lanes):
        add_product(out_ps[:, lane, :], stationary[:, lane, start:stop], moving[:, lane, :])
    out_sb = sbuf((free, lanes, moving.shape[2]), dtype)
    copy_scaled(out_sb, out_ps)
    return out_sb


def round_tile(x_sb, dtype):
    """Returns x as a product takes it: x itself, or a copy of dtype on the Scalar engine."""
    if x_sb.dtype == dtype:
        return x_sb
    out_sb = sbuf(x_sb.shape, dtype)
    copy_scaled(out_sb, x_sb)
    return out_sb


def round_state(S, dtype):
    """Returns a state's tiles as products take them: S itself, or copies of dtype."""
    tiles = []
    for part in range(len(S)):
        tiles.append(round_tile(S[part], dtype))
    return tiles


def compute_residual(chunk, S, bundle):
    """Computes R = diag(beta) V - diag(beta gamma) K S, float32 [rows, lanes, V]; S is rounded."""
    beta_v_sb = chunk.beta_v
    rows, lanes, V = beta_v_sb.shape
    out_sb = sbuf((rows, lanes, V))
    for lane in range(lanes):
        KS_ps = psum((rows, V))
        own = lane if chunk.k_t[0].shape[1] == lanes else find_key_head(bundle, lane)
        multiply_parts(KS_ps, chunk.k_t, S, own, lane)
        scale_and_add(
            out_sb[:, lane, :],
            KS_ps,
            chunk.minus_strength_gamma[:, lane : lane + 1],
            beta_v_sb[:, lane, :],
        )
    return out_sb


def decay_and_add(S, carry_sb, factors, parts):
    """Computes gamma_C S + sum of X^T Y over the pairs (X [rows, lanes, K], Y [rows, lanes, V]) of
    factors.

    The result is new tiles. With (W, R) it is the next state, and backward uses it for the state's
    gradient.
    """
    lanes, V = S[0].shape[1], S[0].shape[2]
    tiles = []
    for part in range(len(parts)):
        start, stop = parts[part]
        out_sb = sbuf((stop - start, lanes, V))
        for lane in range(lanes):
            sum_ps = psum((stop - start, V))
            for i in range(len(factors)):
                x_sb, y_sb = factors[i]
                add_product(sum_ps, x_sb[:, lane, start:stop], y_sb[:, lane, :], i > 0)
            scale_and_add(
                out_sb[:, lane, :],
                S[part][:, lane, :],
                carry_sb[0 : stop - start, lane : lane + 1],
                sum_ps,
            )
        tiles.append(out_sb)
    return tiles


def load_chunk(inputs, bundle, start, tokens, table):
    """Loads q, k, v, g and beta of a chunk, inputs of `gated_delta_rule_fwd` in HBM;
    returns a `Chunk`.
    """
    q, k, v, g, beta = inputs
    rows = table["rows"]
    chunk = Chunk(start=start, tokens=tokens, table=table)
    chunk.g = load_lanes(g, bundle, start, tokens, rows)
    chunk.beta = load_lanes(beta, bundle, start, tokens, rows)
    chunk.qk = load_keys(q, k, bundle, start, tokens, table)
    chunk.v = load_lanes(v, bundle, start, tokens, rows, v.dtype)
    return chunk


def transpose_keys(chunk, parts, table):
    """Adds D and the transposes of q and k to a chunk."""
    chunk.k_t = transpose_side(chunk.qk, 1, parts, table)
    chunk.q_t = transpose_side(chunk.qk, 0, parts, table)
    chunk.D_t = compute_decays(chunk.spread, table)


def multiply_keys(chunk, bundle, blocks, table):
    """Adds to a chunk what is left that does not depend on the state:
    products of keys, and blocks of L.
    """
    chunk.weighted_D_t = weight_decays(chunk.D_t, chunk.diagonals, table)
    chunk.minus_L_t = weigh_pairs(multiply_pairs(chunk.k_t, chunk.k_t, bundle), chunk.weighted_D_t)
    chunk.P_t = weigh_pairs(multiply_pairs(chunk.k_t, chunk.q_t, bundle), chunk.D_t)
    chunk.block_columns = list_block_columns(chunk.minus_L_t, blocks)
