"""Computes one chunk of the gated delta rule on chip: what forward computes and backward computes again.

Per value head, for C tokens that meet the state S [K, V]. Q, K [C, K] and V [C, V] have one row per
token, and b [C] is the running sum of g inside the chunk:

    gamma_i = exp(b_i)    lambda_i = exp(b_C - b_i)    D_ij = exp(b_i - b_j) for i >= j, else 0

    L  = strict_lower(diag(beta) K K^T . D)      T = (I + L)^-1                  [C, C]
    P  = scale lower(Q K^T . D)                                                  [C, C]
    R  = diag(beta) (V - diag(gamma) K S)        U = T R                         [C, V]
    O  = scale diag(gamma) Q S + P U             S' = gamma_C S + K^T diag(lambda) U

Source: arXiv:2412.06464 (chunkwise form). U is large where keys repeat, while its sums over tokens are small.
So R is summed instead, by matrices that are sums already, P T and W = T^T diag(lambda) K [C, K]:

    O  = scale diag(gamma) Q S + (P T) R         S' = gamma_C S + W^T R

With all keys equal and beta = 1 this takes the error of S from 1.1 of what parity allows to 0.7. It costs as
many products, and leaves two of them in a row from state to state instead of three.

Sums of g are products of g with triangles of ones: sum_{j<l<=i} g_l is one product for all i, j of the
chunk. No difference of two running sums is taken, so where a decay of -20 stands beside one of -0.01 the
small one keeps its digits, and no exponent is above 0. A sum of a hundred float32 terms is off by 3e-6 near
-30, and so is its exponential: more than parity allows where a state is all that counts. So g comes in two
parts (`plan.split_decays`). Sums of multiples of 2^-8 are exact, and sums of the rest are small. D adds both
up at the end; gamma, lambda and gamma_C, which multiply states, are products of two exponentials.

Matrices over pairs of tokens are kept transposed, `D_t` for D^T, because a product takes its first factor
transposed. `lanes` is the number of the bundle's value heads, `parts` cuts K into [(start, stop)], and the
state is one tile [stop - start, lanes, V] per part. `prepare_chunk` makes a dict of these tiles, all in SBUF;
dicts with literal keys are what every release of the compiler knows:

    beta, minus_beta                    [rows, lanes]
    gamma, lambda                       [rows, lanes]
    scale_gamma, minus_beta_gamma       [rows, lanes]
    carry                               gamma_C on as many partitions as a state has [min(K, 128), lanes]
    qk                                  q and k, normalized if asked [rows, key heads, 2, K]
    inverse_norms                       of raw q and k [rows, 2, key heads]; qk again without l2norm, unread
    v, beta_v                           V, diag(beta) V [rows, lanes, V]
    minus_beta_k, lambda_k              -diag(beta) K, diag(lambda) K [rows, lanes, K]
    k_t, scale_q_t                      K^T, scale Q^T, a tile [f, key heads, rows] per part
    g_triangles                         each part of g_l where l > column, else 0 [rows, lanes, 2, rows]
    D_t, minus_L_t, P_t                 [rows, lanes, rows]
    start, tokens                       numbers: the first token, and how many the chunk has

Forward adds R [rows, lanes, V], PT_t = (P T)^T [rows, lanes, rows], W [rows, lanes, K], scale_gamma_q_t, the
transpose of scale diag(gamma) Q, a tile [f, lanes, rows] per part, and index, the chunk's number.
"""

from typing import Any

from delta_trn.nki_kernels.language import nisa, nl
from delta_trn.nki_kernels.plan import PARTITIONS
from delta_trn.nki_kernels.tiles import (
    copy_scaled,
    invert_sums,
    load_padded,
    multiply_elements,
    psum,
    sbuf,
    transpose,
    transpose_side,
)


def load_lanes(src, bundle, start, tokens, rows):
    """Loads a bundle's tokens of HBM [N, T, HV, ...] into a float32 tile [rows, lanes, ...]."""
    n, first, lanes = bundle["n"], bundle["first"], bundle["lanes"]
    return load_padded(src[n, start : start + tokens, first : first + lanes], rows)


def store_lanes(dst, src_sb, bundle, start, tokens):
    """Stores [rows, lanes, ...] to HBM [N, T, HV, ...]."""
    n, first, lanes = bundle["n"], bundle["first"], bundle["lanes"]
    nisa.dma_copy(dst=dst[n, start : start + tokens, first : first + lanes], src=src_sb[0:tokens])


def compute_gates(g_sb, beta_sb, K, scale, table) -> dict[str, Any]:
    """Computes decays and write strengths of a bundle from g [rows, lanes, 2] and beta [rows, lanes]."""
    rows, lanes, _ = g_sb.shape
    g_flat = g_sb.reshape((rows, lanes * 2))
    sums_ps = psum((rows, 2, lanes * 2))
    nisa.nc_matmul(dst=sums_ps[:, 0, :], stationary=table["upper"], moving=g_flat, is_stationary_onezero=True)
    nisa.nc_matmul(
        dst=sums_ps[:, 1, :], stationary=table["strict_lower"], moving=g_flat, is_stationary_onezero=True
    )
    factors_sb = sbuf((rows, 2, lanes, 2))
    gamma_sb, lambda_sb = sbuf((rows, lanes)), sbuf((rows, lanes))
    nisa.activation(dst=factors_sb, op=nl.exp, data=sums_ps.reshape((rows, 2, lanes, 2)))
    partitions = min(K, PARTITIONS)
    whole_ps = psum((partitions, lanes * 2))
    nisa.nc_matmul(
        dst=whole_ps, stationary=table["ones"][0:rows, 0:partitions], moving=g_flat,
        is_stationary_onezero=True,
    )  # fmt: skip
    carry_factors_sb, carry_sb = sbuf((partitions, lanes, 2)), sbuf((partitions, lanes))
    nisa.activation(dst=carry_factors_sb, op=nl.exp, data=whole_ps.reshape((partitions, lanes, 2)))
    nisa.tensor_tensor(
        dst=gamma_sb, data1=factors_sb[:, 0, :, 0], data2=factors_sb[:, 0, :, 1], op=nl.multiply
    )
    nisa.tensor_tensor(
        dst=lambda_sb, data1=factors_sb[:, 1, :, 0], data2=factors_sb[:, 1, :, 1], op=nl.multiply
    )
    minus_beta_sb, minus_beta_gamma_sb, scale_gamma_sb = (
        sbuf((rows, lanes)), sbuf((rows, lanes)), sbuf((rows, lanes)),
    )  # fmt: skip
    nisa.tensor_scalar(dst=minus_beta_sb, data=beta_sb, op0=nl.multiply, operand0=-1.0)
    nisa.tensor_tensor(dst=minus_beta_gamma_sb, data1=gamma_sb, data2=minus_beta_sb, op=nl.multiply)
    nisa.tensor_scalar(dst=scale_gamma_sb, data=gamma_sb, op0=nl.multiply, operand0=scale)
    nisa.tensor_tensor(
        dst=carry_sb, data1=carry_factors_sb[:, :, 0], data2=carry_factors_sb[:, :, 1], op=nl.multiply
    )
    return {
        "beta": beta_sb, "minus_beta": minus_beta_sb, "gamma": gamma_sb, "lambda": lambda_sb,
        "carry": carry_sb, "minus_beta_gamma": minus_beta_gamma_sb, "scale_gamma": scale_gamma_sb,
    }  # fmt: skip


def load_keys(q, k, bundle, start, tokens, l2norm, table):
    """Loads q and k of a bundle; returns `qk` and `inverse_norms`."""
    n, first, heads = bundle["n"], bundle["key_first"], bundle["key_heads"]
    rows, K = table["rows"], q.shape[3]
    qk_sb = sbuf((rows, heads, 2, K))
    sources = (q, k)
    if not l2norm:
        if tokens < rows:
            nisa.memset(dst=qk_sb, value=0.0)
        for side in range(2):
            src = sources[side][n, start : start + tokens, first : first + heads, :]
            nisa.dma_copy(dst=qk_sb[0:tokens, :, side, :], src=src)
        return qk_sb, qk_sb
    squares_sb = sbuf((rows, 2, heads))
    unread_sb = sbuf((rows, K))
    raw = []
    for side in range(2):
        src = sources[side][n, start : start + tokens, first : first + heads, :]
        raw.append(load_padded(src, rows))
        for h in range(heads):
            nisa.activation(
                dst=unread_sb, op=nl.square, data=raw[side][:, h, :], reduce_op=nl.add,
                reduce_res=squares_sb[:, side, h : h + 1], reduce_cmd=nisa.reduce_cmd.reset_reduce,
            )  # fmt: skip
    inverse_norms_sb = sbuf((rows, 2, heads))
    invert_sums(inverse_norms_sb, squares_sb, table["norm"])
    copy_scaled(inverse_norms_sb, inverse_norms_sb, table["norm"]["scale"])
    for side in range(2):
        for h in range(heads):
            copy_scaled(qk_sb[:, h, side, :], raw[side][:, h, :], inverse_norms_sb[:, side, h : h + 1])
    return qk_sb, inverse_norms_sb


def find_key_head(bundle, lane):
    """Returns the key head, within the bundle, that a lane reads."""
    return lane * bundle["key_heads"] // bundle["lanes"]


def scale_heads(qk_sb, side, columns_sb, bundle):
    """Scales each lane's q (side 0) or k (side 1) by rows: [rows, lanes, K], row i times columns[i, lane]."""
    lanes = bundle["lanes"]
    out_sb = sbuf((qk_sb.shape[0], lanes, qk_sb.shape[3]))
    for lane in range(lanes):
        own = qk_sb[:, find_key_head(bundle, lane), side, :]
        copy_scaled(out_sb[:, lane, :], own, columns_sb[:, lane : lane + 1])
    return out_sb


def scale_lanes(x_sb, columns_sb, dtype=nl.float32):
    """Scales [rows, lanes, V] by rows: row i of each lane times columns[i, lane]."""
    out_sb = sbuf(x_sb.shape, dtype)
    for lane in range(x_sb.shape[1]):
        copy_scaled(out_sb[:, lane, :], x_sb[:, lane, :], columns_sb[:, lane : lane + 1])
    return out_sb


def spread_decays(g_sb, table):
    """Builds `g_triangles`, the factors that D's sums share, from both parts of g [rows, lanes, 2]."""
    rows, lanes, _ = g_sb.shape
    out_sb = sbuf((rows, lanes, 2, rows))
    for lane in range(lanes):
        for part in range(2):
            copy_scaled(out_sb[:, lane, part, :], table["strict_lower"], g_sb[:, lane, part : part + 1])
    return out_sb


def compute_decays(g_triangles_sb, table, dropped):
    """Computes D^T, exp of sum_{j<l<=i} g_l at row j, column i; 0 in the triangle that `dropped` names."""
    rows, lanes = table["rows"], g_triangles_sb.shape[1]
    sums_ps = psum((rows, lanes, rows))
    for lane in range(lanes):
        for part in range(2):
            nisa.nc_matmul(
                dst=sums_ps[:, lane, :], stationary=g_triangles_sb[:, lane, part, :], moving=table["upper"],
                is_moving_onezero=True,
            )  # fmt: skip
        nisa.nc_matmul(dst=sums_ps[:, lane, :], stationary=table["identity_bfloat16"], moving=table[dropped])
    out_sb = sbuf((rows, lanes, rows))
    nisa.activation(dst=out_sb, op=nl.exp, data=sums_ps)
    return out_sb


def multiply_parts(dst_ps, stationary, moving, a, b):
    """Adds stationary^T moving, summed over parts, to dst: lane or key head a of the one, b of the other."""
    for part in range(len(moving)):
        nisa.nc_matmul(dst=dst_ps, stationary=stationary[part][:, a, :], moving=moving[part][:, b, :])


def multiply_pairs(stationary, moving, bundle):
    """Computes products of all pairs of tokens, PSUM [rows, lanes, rows]: stationary^T moving of each lane.

    stationary and moving are lists over the parts of what is summed, tiles [f, lanes or key heads, rows].
    """
    rows, lanes = moving[0].shape[2], bundle["lanes"]
    out_ps = psum((rows, lanes, rows))
    for lane in range(lanes):
        a = lane if stationary[0].shape[1] == lanes else find_key_head(bundle, lane)
        b = lane if moving[0].shape[1] == lanes else find_key_head(bundle, lane)
        multiply_parts(out_ps[:, lane, :], stationary, moving, a, b)
    return out_ps


def multiply_lanes(stationary, moving):
    """Computes stationary^T moving of each lane, with a PSUM tile per lane; tiles [rows, lanes, free]."""
    free, lanes = stationary.shape[2], stationary.shape[1]
    out_sb = sbuf((free, lanes, moving.shape[2]))
    for lane in range(lanes):
        out_ps = psum((free, moving.shape[2]))
        nisa.nc_matmul(dst=out_ps, stationary=stationary[:, lane, :], moving=moving[:, lane, :])
        copy_scaled(out_sb[:, lane, :], out_ps)
    return out_sb


def multiply_lanes_at_once(stationary, moving, start, stop):
    """Computes the same for columns start .. stop of stationary.

    The results of all lanes fill one bank of PSUM and leave it in one instruction.
    """
    free, lanes = stop - start, stationary.shape[1]
    out_ps = psum((free, lanes, moving.shape[2]))
    for lane in range(lanes):
        nisa.nc_matmul(
            dst=out_ps[:, lane, :], stationary=stationary[:, lane, start:stop], moving=moving[:, lane, :]
        )
    out_sb = sbuf((free, lanes, moving.shape[2]))
    copy_scaled(out_sb, out_ps)
    return out_sb


def compute_residual(chunk, S, bundle):
    """Computes R = diag(beta) V - diag(beta gamma) K S, [rows, lanes, V]."""
    beta_v_sb = chunk["beta_v"]
    rows, lanes, V = beta_v_sb.shape
    out_sb = sbuf((rows, lanes, V))
    for lane in range(lanes):
        KS_ps = psum((rows, V))
        multiply_parts(KS_ps, chunk["k_t"], S, find_key_head(bundle, lane), lane)
        nisa.scalar_tensor_tensor(
            dst=out_sb[:, lane, :], data=KS_ps, op0=nl.multiply,
            operand0=chunk["minus_beta_gamma"][:, lane : lane + 1], op1=nl.add,
            operand1=beta_v_sb[:, lane, :],
        )  # fmt: skip
    return out_sb


def decay_and_add(S, carry_sb, factors, parts):
    """Computes gamma_C S + sum of X^T Y over the pairs (X [rows, lanes, K], Y [rows, lanes, V]) of factors.

    The result is new tiles. With (W, R) it is the next state, and backward uses it for the state's gradient.
    """
    lanes, V = S[0].shape[1], S[0].shape[2]
    tiles = []
    for part in range(len(parts)):
        start, stop = parts[part]
        out_sb = sbuf((stop - start, lanes, V))
        for lane in range(lanes):
            sum_ps = psum((stop - start, V))
            for factor in factors:
                x_sb, y_sb = factor
                nisa.nc_matmul(dst=sum_ps, stationary=x_sb[:, lane, start:stop], moving=y_sb[:, lane, :])
            nisa.scalar_tensor_tensor(
                dst=out_sb[:, lane, :], data=S[part][:, lane, :], op0=nl.multiply,
                operand0=carry_sb[0 : stop - start, lane : lane + 1], op1=nl.add, operand1=sum_ps,
            )  # fmt: skip
        tiles.append(out_sb)
    return tiles


def prepare_chunk(inputs, bundle, start, tokens, parts, scale, l2norm, table) -> dict[str, Any]:
    """Computes what a chunk needs that does not depend on the state: the tiles that the module's table names.

    Args:
        inputs      q, k, v, g, beta as `gated_delta_rule_fwd` takes them, in HBM
        start       the chunk's first token, of `tokens`
        table       the constants for the chunk's rows

    Notes:
        Each engine runs its instructions in order, so scalings are issued first: no copy out of PSUM, which
        waits for the Tensor engine, then stands before one.
    """
    q, k, v, g, beta = inputs
    rows = table["rows"]
    g_sb = load_lanes(g, bundle, start, tokens, rows)
    beta_sb = load_lanes(beta, bundle, start, tokens, rows)
    chunk = compute_gates(g_sb, beta_sb, q.shape[3], scale, table)
    chunk["start"] = start
    chunk["tokens"] = tokens
    qk_sb, inverse_norms_sb = load_keys(q, k, bundle, start, tokens, l2norm, table)
    chunk["qk"] = qk_sb
    chunk["inverse_norms"] = inverse_norms_sb
    chunk["v"] = load_lanes(v, bundle, start, tokens, rows)
    minus_beta_k_sb = scale_heads(qk_sb, 1, chunk["minus_beta"], bundle)
    chunk["minus_beta_k"] = minus_beta_k_sb
    chunk["g_triangles"] = spread_decays(g_sb, table)
    identity_sb = table["identity"]
    chunk["k_t"] = transpose_side(qk_sb, 1, parts, identity_sb, 1.0)
    chunk["scale_q_t"] = transpose_side(qk_sb, 0, parts, identity_sb, scale)
    minus_beta_k_t = transpose(minus_beta_k_sb, parts, identity_sb)
    chunk["D_t"] = compute_decays(chunk["g_triangles"], table, "drop_strict_lower")
    chunk["lambda_k"] = scale_heads(qk_sb, 1, chunk["lambda"], bundle)
    chunk["beta_v"] = scale_lanes(chunk["v"], beta_sb)
    chunk["minus_L_t"] = multiply_elements(multiply_pairs(chunk["k_t"], minus_beta_k_t, bundle), chunk["D_t"])
    chunk["P_t"] = multiply_elements(multiply_pairs(chunk["k_t"], chunk["scale_q_t"], bundle), chunk["D_t"])
    return chunk
