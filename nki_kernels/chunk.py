"""One chunk of the gated delta rule on chip: what forward computes and backward computes again.

Per value head, for C tokens that find the state S [K, V] (rows are tokens, b the sums of g inside the chunk):

    gamma_i = exp(b_i)    lambda_i = exp(b_C - b_i)    E_ij = exp(b_i - b_j) for i >= j
    G  = -strict(diag(beta) K K^T . E)        T = (I - G)^-1
    V' = diag(beta) (V - diag(gamma) K S)     U = T V'
    P  = scale upto(Q K^T . E)                O = scale diag(gamma) Q S + P U
    S' = gamma_C S + K^T diag(lambda) U

Source: arXiv:2412.06464 (chunkwise form). U is large where keys repeat and its sums over tokens are small, so
what is summed is V', by matrices that have summed before, H = P T and W = T^T diag(lambda) K:

    O  = scale diag(gamma) Q S + H V'         S' = gamma_C S + W^T V'

With all keys equal and beta = 1 this takes the error of S from 1.1 of what parity allows to 0.7, costs as
many products, and leaves two of them in a row from state to state instead of three.

Sums of g are products of g with triangles of ones: sum_{j<l<=i} g_l is one product for all i, j of the
chunk. No difference of two running sums is taken, so where a decay of -20 stands beside one of -0.01 the
small one keeps its digits, and no exponent is above 0.
"""

from typing import Any

from delta_trn.nki_kernels.language import nisa, nl
from delta_trn.nki_kernels.tiles import copied, loaded, psum, sbuf, transposed


def gates(g, beta, bundle, start, tokens, rows, K, scale, table):
    """Decays and write strengths of one bundle: columns [rows, lanes], one per lane."""
    n, first, lanes = bundle["n"], bundle["first"], bundle["lanes"]
    stop = start + tokens
    g_ = loaded(g[n, start:stop, first : first + lanes], tokens, rows, (lanes,))
    beta_ = loaded(beta[n, start:stop, first : first + lanes], tokens, rows, (lanes,))
    sums = psum((rows, 2, lanes))
    nisa.nc_matmul(dst=sums[:, 0, :], stationary=table["upto"], moving=g_, is_stationary_onezero=True)
    nisa.nc_matmul(dst=sums[:, 1, :], stationary=table["after"], moving=g_, is_stationary_onezero=True)
    decays = sbuf((rows, 2, lanes))
    nisa.activation(dst=decays, op=nl.exp, data=sums)
    everywhere = min(K, 128)
    whole = psum((everywhere, lanes))
    nisa.nc_matmul(
        dst=whole, stationary=table["every"][0:rows, 0:everywhere], moving=g_, is_stationary_onezero=True
    )
    carry = sbuf((everywhere, lanes))
    nisa.activation(dst=carry, op=nl.exp, data=whole)
    minus_beta = sbuf((rows, lanes))
    nisa.tensor_scalar(dst=minus_beta, data=beta_, op0=nl.multiply, operand0=-1.0)
    minus_gamma_beta = sbuf((rows, lanes))
    nisa.tensor_tensor(dst=minus_gamma_beta, data1=decays[:, 0, :], data2=minus_beta, op=nl.multiply)
    gamma_scale = sbuf((rows, lanes))
    nisa.tensor_scalar(dst=gamma_scale, data=decays[:, 0, :], op0=nl.multiply, operand0=scale)
    return {
        "g": g_, "beta": beta_, "minus_beta": minus_beta, "gamma": decays[:, 0, :], "lambda": decays[:, 1, :],
        "carry": carry, "minus_gamma_beta": minus_gamma_beta, "gamma_scale": gamma_scale,
    }  # fmt: skip


def keys(q, k, bundle, start, tokens, rows, l2norm, table):
    """q and k of the bundle's key heads, a tile [rows, key heads, 2, K]; and 1 / norms [rows, 2, key heads].

    Without l2norm the second is the first again, and nobody reads it.
    """
    n, key_first, key_heads = bundle["n"], bundle["key_first"], bundle["key_heads"]
    K = q.shape[3]
    qk = sbuf((rows, key_heads, 2, K))
    sources = (q, k)
    if not l2norm:
        if tokens < rows:
            nisa.memset(dst=qk, value=0.0)
        for side in range(2):
            src = sources[side][n, start : start + tokens, key_first : key_first + key_heads, :]
            nisa.dma_copy(dst=qk[0:tokens, :, side, :], src=src)
        return qk, qk
    squares = sbuf((rows, 2, key_heads))
    scratch = sbuf((rows, K))
    raw = []
    for side in range(2):
        src = sources[side][n, start : start + tokens, key_first : key_first + key_heads, :]
        raw.append(loaded(src, tokens, rows, (key_heads, K)))
        for h in range(key_heads):
            nisa.activation(
                dst=scratch, op=nl.square, data=raw[side][:, h, :], reduce_op=nl.add,
                reduce_res=squares[:, side, h : h + 1], reduce_cmd=nisa.reduce_cmd.reset_reduce,
            )  # fmt: skip
    inverse_norms = sbuf((rows, 2, key_heads))
    nisa.activation(dst=inverse_norms, op=nl.rsqrt, data=squares, bias=table["epsilon"])
    for side in range(2):
        for h in range(key_heads):
            copied(qk[:, h, side, :], raw[side][:, h, :], inverse_norms[:, side, h : h + 1])
    return qk, inverse_norms


def key_of(bundle, lane):
    """The key head, within the bundle, that a lane reads."""
    return lane * bundle["key_heads"] // bundle["lanes"]


def scaled_heads(qk, side, columns, bundle, rows):
    """[rows, lanes, K]: of each lane's key head q (side 0) or k (side 1), row i times columns[i, lane]."""
    lanes = bundle["lanes"]
    out = sbuf((rows, lanes, qk.shape[3]))
    for lane in range(lanes):
        copied(out[:, lane, :], qk[:, key_of(bundle, lane), side, :], columns[:, lane : lane + 1])
    return out


def weighted_triangle(g, lanes, rows, table):
    """[rows, lanes, rows]: g_l at row l, columns before l; the factor that all decay sums share."""
    tile = sbuf((rows, lanes, rows))
    for lane in range(lanes):
        copied(tile[:, lane, :], table["after"], g[:, lane : lane + 1])
    return tile


def decay_transposed(weights, lanes, rows, table, dropped):
    """exp of sum_{j<l<=i} g_l at row j, column i, per lane; 0 where the table's `dropped` says."""
    ps = psum((rows, lanes, rows))
    for lane in range(lanes):
        nisa.nc_matmul(
            dst=ps[:, lane, :], stationary=weights[:, lane, :], moving=table["upto"], is_moving_onezero=True
        )
        nisa.nc_matmul(
            dst=ps[:, lane, :],
            stationary=table["identity"],
            moving=table[dropped],
            is_stationary_onezero=True,
        )
    tile = sbuf((rows, lanes, rows))
    nisa.activation(dst=tile, op=nl.exp, data=ps)
    return tile


def views(tile, lanes):
    """The lanes of [rows, lanes, F] as a list of [rows, F]."""
    found = []
    for lane in range(lanes):
        found.append(tile[:, lane, :])
    return found


def side_views(qk, side):
    """The key heads' q or k."""
    found = []
    for h in range(qk.shape[1]):
        found.append(qk[:, h, side, :])
    return found


def products(stationary, moving, bundle, rows, parts):
    """PSUM [rows, lanes, rows], per lane the sum over parts of stationary^T moving.

    stationary, moving: per part a tile [f, lanes or key heads, rows].
    """
    lanes = bundle["lanes"]
    ps = psum((rows, lanes, rows))
    for lane in range(lanes):
        for part in range(len(parts)):
            left = stationary[part]
            right = moving[part]
            a = lane if left.shape[1] == lanes else key_of(bundle, lane)
            b = lane if right.shape[1] == lanes else key_of(bundle, lane)
            nisa.nc_matmul(dst=ps[:, lane, :], stationary=left[:, a, :], moving=right[:, b, :])
    return ps


def weighted_values(v, x, bundle, rows):
    """diag(beta) V, ahead of the state: [rows, lanes, V]."""
    lanes = bundle["lanes"]
    out = sbuf((rows, lanes, v.shape[2]))
    for lane in range(lanes):
        copied(out[:, lane, :], v[:, lane, :], x["beta"][:, lane : lane + 1])
    return out


def residual(x, S, bundle, rows, parts):
    """V' = diag(beta) (V - diag(gamma) K S): [rows, lanes, V]; S per part [f, lanes, V]."""
    lanes = bundle["lanes"]
    V = S[0].shape[2]
    out = sbuf((rows, lanes, V))
    for lane in range(lanes):
        ps = psum((rows, V))
        for part in range(len(parts)):
            nisa.nc_matmul(
                dst=ps, stationary=x["kt"][part][:, key_of(bundle, lane), :], moving=S[part][:, lane, :]
            )
        nisa.scalar_tensor_tensor(
            dst=out[:, lane, :], data=ps, op0=nl.multiply, operand0=x["minus_gamma_beta"][:, lane : lane + 1],
            op1=nl.add, operand1=x["beta_v"][:, lane, :],
        )  # fmt: skip
    return out


def solved(Tt, residuals, bundle, rows):
    """U = T V'."""
    lanes = bundle["lanes"]
    V = residuals.shape[2]
    out = sbuf((rows, lanes, V))
    for lane in range(lanes):
        ps = psum((rows, V))
        nisa.nc_matmul(dst=ps, stationary=Tt[:, lane, :], moving=residuals[:, lane, :])
        copied(out[:, lane, :], ps)
    return out


def writing(T, x, bundle, rows):
    """W = T^T diag(lambda) K: [rows, lanes, K]."""
    lanes = bundle["lanes"]
    K = x["k_end"].shape[2]
    out = sbuf((rows, lanes, K))
    for lane in range(lanes):
        ps = psum((rows, K))
        nisa.nc_matmul(dst=ps, stationary=T[:, lane, :], moving=x["k_end"][:, lane, :])
        copied(out[:, lane, :], ps)
    return out


def combined(stationary, moving, bundle, rows):
    """stationary^T moving per lane: tiles [rows, lanes, rows]."""
    lanes = bundle["lanes"]
    ps = psum((rows, lanes, rows))
    for lane in range(lanes):
        nisa.nc_matmul(dst=ps[:, lane, :], stationary=stationary[:, lane, :], moving=moving[:, lane, :])
    out = sbuf((rows, lanes, rows))
    copied(out, ps)
    return out


def next_state(x, S, W, residuals, bundle, parts):
    """S' = gamma_C S + W^T V', new tiles."""
    lanes = bundle["lanes"]
    V = S[0].shape[2]
    found = []
    for part in range(len(parts)):
        start, stop = parts[part]
        out = sbuf((stop - start, lanes, V))
        for lane in range(lanes):
            ps = psum((stop - start, V))
            nisa.nc_matmul(dst=ps, stationary=W[:, lane, start:stop], moving=residuals[:, lane, :])
            nisa.scalar_tensor_tensor(
                dst=out[:, lane, :], data=S[part][:, lane, :], op0=nl.multiply,
                operand0=x["carry"][0 : stop - start, lane : lane + 1], op1=nl.add, operand1=ps,
            )  # fmt: skip
        found.append(out)
    return found


def begin(
    q, k, v, g, beta, bundle, start, tokens, rows, parts, scale, l2norm, table
) -> dict[str, Any]:  # fmt: skip
    """What a chunk needs that does not depend on the state, up to G and P: everything in one dict.

    kt, qt are k and scale q, transposed, per part of K; k_minus is -diag(beta) K, k_end diag(lambda) K.
    """
    n, first, lanes = bundle["n"], bundle["first"], bundle["lanes"]
    x: dict[str, Any] = gates(g, beta, bundle, start, tokens, rows, q.shape[3], scale, table)
    qk, inverse_norms = keys(q, k, bundle, start, tokens, rows, l2norm, table)
    x["qk"] = qk
    x["inverse_norms"] = inverse_norms
    x["v"] = loaded(v[n, start : start + tokens, first : first + lanes, :], tokens, rows, (lanes, v.shape[3]))
    # each engine runs its instructions in order: scalings first, so that no eviction stands before one
    x["k_minus"] = scaled_heads(qk, 1, x["minus_beta"], bundle, rows)
    x["weights"] = weighted_triangle(x["g"], lanes, rows, table)
    identity = table["identity"]
    x["kt"] = transposed(side_views(qk, 1), rows, parts, identity)
    x["qt"] = transposed(side_views(qk, 0), rows, parts, identity, scale)
    x["k_minus_t"] = transposed(views(x["k_minus"], lanes), rows, parts, identity)
    x["Et"] = decay_transposed(x["weights"], lanes, rows, table, "drop_after")
    x["k_end"] = scaled_heads(qk, 1, x["lambda"], bundle, rows)
    x["beta_v"] = weighted_values(x["v"], x, bundle, rows)
    ps = products(x["kt"], x["k_minus_t"], bundle, rows, parts)
    Gt = sbuf((rows, lanes, rows))
    nisa.tensor_tensor(dst=Gt, data1=ps, data2=x["Et"], op=nl.multiply)
    x["Gt"] = Gt
    ps = products(x["kt"], x["qt"], bundle, rows, parts)
    Pt = sbuf((rows, lanes, rows))
    nisa.tensor_tensor(dst=Pt, data1=ps, data2=x["Et"], op=nl.multiply)
    x["Pt"] = Pt
    return x
