"""Computes the gradients of one chunk of the gated delta rule on chip.

Letters and tiles are those of `nki_kernels.chunk`. dS' is the gradient of the state that the chunk leaves,
and dX that of any other X.

    dR  = (P T)^T dO + W dS'                     dV   = diag(beta) dR                          [C, V]
    E   = scale lower(dO U^T . D)                Z    = -strict_lower(dR U^T . D)              [C, C]
    dQ  = scale diag(gamma) dO S^T + E K                                                       [C, K]
    dK  = E^T Q + diag(lambda) U dS'^T + diag(beta) (Z K - diag(gamma) dR S^T) + Z^T diag(beta) K
    dS  = gamma_C dS' + scale Q^T diag(gamma) dO - K^T diag(gamma beta) dR                     [K, V]
    dbeta_i = <dR_i, v_i> + <k_i, (Z K - diag(gamma) dR S^T)_i>

E and Z are the gradients of Q K^T and of diag(beta) K K^T. The inverse is not differentiated: with dU the
gradient of U, T^T dU (T R)^T = dR U^T is its whole effect.

The gradient of g_t is a sum over what crosses t, and nothing that does not is added or taken away again:

    dg_t = sum_{j < t <= i} F_ij + sum_{i >= t} r_i + sum_{i < t} w_i + gamma_C <dS', S>
    F   = dO U^T . P - dR U^T . L                                    pairs: i reads what j wrote [C, C]
    r_i = <q_i, scale gamma_i (dO S^T)_i> - beta_i <k_i, gamma_i (dR S^T)_i>      i reads the state
    w_i = lambda_i <(K dS')_i, U_i>                                               i writes to the next

The usual form, rows of F minus its columns summed from t on, is the same number as a difference of sums that
do not fade with C: in float32 it had 1.5 times the error that parity allows (case collide, C = 128). Every
sum over tokens is a product with a triangle of ones. And w is not <k_i, (U dS'^T)_i>, a product that is made
for dK anyway: where a later token erases what was written, K dS' is 0 before anything is summed.

Backward adds these tiles to a chunk's dict:

    do, U                            [rows, lanes, V]
    S                                the state that the chunk meets, a tile per part of K [f, lanes, V]
    D_strict_t                       D^T, 0 on the diagonal too [rows, lanes, rows]
    PT                               P T [rows, lanes, rows]
    W_t                              W^T, a tile per part of K [f, lanes, rows]
    E, E_t, minus_Z, minus_Z_t       [rows, lanes, rows]
    reads_t, erasures_t              the two terms of F^T [rows, lanes, rows]
"""

from delta_trn.nki_kernels.chunk import (
    decay_and_add,
    find_key_head,
    multiply_lanes_at_once,
    multiply_pairs,
    multiply_parts,
    scale_heads,
)
from delta_trn.nki_kernels.language import nisa, nl
from delta_trn.nki_kernels.tiles import (
    copy_scaled,
    multiply_elements,
    psum,
    repeat_over_lanes,
    sbuf,
    sum_rows,
    transpose,
)


def transpose_state(S, parts, value_parts, table):
    """Transposes S, a tile [f, lanes, V] per part of K, into a tile [f, lanes, K] per part of V."""
    lanes, K = S[0].shape[1], parts[len(parts) - 1][1]
    tiles = []
    for span in value_parts:
        low, high = span
        out_sb = sbuf((high - low, lanes, K))
        for lane in range(lanes):
            out_ps = psum((high - low, K))
            for part in range(len(parts)):
                start, stop = parts[part]
                nisa.nc_matmul(
                    dst=out_ps[:, start:stop], stationary=S[part][:, lane, low:high],
                    moving=table["eye"][0 : stop - start, 0 : stop - start], is_moving_onezero=True,
                )  # fmt: skip
            copy_scaled(out_sb[:, lane, :], out_ps)
        tiles.append(out_sb)
    return tiles


def transpose_writes(T_sb, chunk, parts):
    """Computes W^T = (diag(lambda) K)^T T, a tile [f, lanes, rows] per part of K."""
    tiles = []
    for span in parts:
        start, stop = span
        tiles.append(multiply_lanes_at_once(chunk["lambda_k"], T_sb, start, stop))
    return tiles


def compute_residual_gradient(chunk, dS):
    """Computes dR = (P T)^T dO + W dS', [rows, lanes, V]."""
    rows, lanes, V = chunk["do"].shape
    out_sb = sbuf((rows, lanes, V))
    for lane in range(lanes):
        dR_ps = psum((rows, V))
        nisa.nc_matmul(dst=dR_ps, stationary=chunk["PT"][:, lane, :], moving=chunk["do"][:, lane, :])
        multiply_parts(dR_ps, chunk["W_t"], dS, lane, lane)
        copy_scaled(out_sb[:, lane, :], dR_ps)
    return out_sb


def compute_pair_gradients(chunk, do_t, U_t, dR_t, bundle, scale, table):
    """Adds the gradients over pairs of tokens to the chunk: E, Z, their transposes, and the terms of F^T.

    do_t, U_t, dR_t are tiles [f, lanes, rows] per part of V.
    """
    rows, lanes = table["rows"], bundle["lanes"]
    UdO_ps = multiply_pairs(U_t, do_t, bundle)
    E_t_sb = sbuf((rows, lanes, rows))
    nisa.scalar_tensor_tensor(
        dst=E_t_sb, data=UdO_ps, op0=nl.multiply, operand0=scale, op1=nl.multiply, operand1=chunk["D_t"]
    )
    chunk["reads_t"] = multiply_elements(UdO_ps, chunk["P_t"])
    UdR_ps = multiply_pairs(U_t, dR_t, bundle)
    minus_Z_t_sb = multiply_elements(UdR_ps, chunk["D_strict_t"])
    chunk["erasures_t"] = multiply_elements(UdR_ps, chunk["minus_L_t"])
    whole = [(0, rows)]
    chunk["E_t"] = E_t_sb
    chunk["E"] = transpose(E_t_sb, whole, table["identity"])[0]
    chunk["minus_Z_t"] = minus_Z_t_sb
    chunk["minus_Z"] = transpose(minus_Z_t_sb, whole, table["identity"])[0]


def compute_key_gradients(chunk, do_t, U_t, dR_t, S_t, dS_t, bundle):
    """Computes the gradients of the bundle's normalized q and k, and dot products that beta's and g's need.

    Args:
        do_t, U_t, dR_t     tiles [f, lanes, rows] per part of V
        S_t, dS_t           tiles [f, lanes, K] per part of V

    Returns:
        dqk_sb      [rows, key heads, 2, K], sums over the lanes of a key head
        dots_sb     [rows, lanes, 3]: <q, scale gamma dO S^T>, <k, gamma dR S^T>, -<k, Z K> per token
    """
    qk_sb, lanes = chunk["qk"], bundle["lanes"]
    rows, heads, _, K = qk_sb.shape
    dots_sb = sbuf((rows, lanes, 3))
    dqk_sb = sbuf((rows, heads, 2, K))
    previous = -1
    for lane in range(lanes):
        h = find_key_head(bundle, lane)
        q_sb, k_sb = qk_sb[:, h, 0, :], qk_sb[:, h, 1, :]
        state_ps = psum((rows, 2, K))  # dO S^T, dR S^T
        multiply_parts(state_ps[:, 0, :], do_t, S_t, lane, lane)
        multiply_parts(state_ps[:, 1, :], dR_t, S_t, lane, lane)
        read_sb = sbuf((rows, 2, K))
        copy_scaled(read_sb[:, 0, :], state_ps[:, 0, :], chunk["scale_gamma"][:, lane : lane + 1])
        copy_scaled(read_sb[:, 1, :], state_ps[:, 1, :], chunk["gamma"][:, lane : lane + 1])
        terms_sb = sbuf((rows, 3, K))
        nisa.tensor_tensor(dst=terms_sb[:, 0:2, :], data1=qk_sb[:, h, :, :], data2=read_sb, op=nl.multiply)
        pairs_ps = psum((rows, 2, K))  # E K, -Z K
        nisa.nc_matmul(dst=pairs_ps[:, 0, :], stationary=chunk["E_t"][:, lane, :], moving=k_sb)
        nisa.nc_matmul(dst=pairs_ps[:, 1, :], stationary=chunk["minus_Z_t"][:, lane, :], moving=k_sb)
        nisa.tensor_tensor(dst=terms_sb[:, 2, :], data1=k_sb, data2=pairs_ps[:, 1, :], op=nl.multiply)
        nisa.tensor_tensor(dst=read_sb, data1=read_sb, data2=pairs_ps, op=nl.add)
        written_ps = psum((rows, 2, K))  # E^T Q + Z^T diag(beta) K, U dS'^T
        nisa.nc_matmul(dst=written_ps[:, 0, :], stationary=chunk["E"][:, lane, :], moving=q_sb)
        nisa.nc_matmul(
            dst=written_ps[:, 0, :], stationary=chunk["minus_Z"][:, lane, :],
            moving=chunk["minus_beta_k"][:, lane, :],
        )  # fmt: skip
        multiply_parts(written_ps[:, 1, :], U_t, dS_t, lane, lane)
        nisa.tensor_reduce(dst=dots_sb[:, lane, :], op=nl.add, data=terms_sb, axis=2)
        dk_sb = sbuf((rows, K))
        nisa.scalar_tensor_tensor(
            dst=dk_sb, data=read_sb[:, 1, :], op0=nl.multiply,
            operand0=chunk["minus_beta"][:, lane : lane + 1], op1=nl.add, operand1=written_ps[:, 0, :],
        )  # fmt: skip
        own_dq, own_dk = dqk_sb[:, h, 0, :], dqk_sb[:, h, 1, :]
        if h == previous:
            nisa.tensor_tensor(dst=own_dq, data1=own_dq, data2=read_sb[:, 0, :], op=nl.add)
            nisa.tensor_tensor(dst=dk_sb, data1=dk_sb, data2=own_dk, op=nl.add)
        else:
            copy_scaled(own_dq, read_sb[:, 0, :])
        nisa.scalar_tensor_tensor(
            dst=own_dk, data=written_ps[:, 1, :], op0=nl.multiply,
            operand0=chunk["lambda"][:, lane : lane + 1], op1=nl.add, operand1=dk_sb,
        )  # fmt: skip
        previous = h
    return dqk_sb, dots_sb


def differentiate_norm(chunk, dqk_sb):
    """Turns gradients of normalized q and k into those of raw ones: r (dy - y <y, dy>), y = r x; in place."""
    qk_sb = chunk["qk"]
    rows, heads, _, K = qk_sb.shape
    for h in range(heads):
        terms_sb = sbuf((rows, 2, K))
        nisa.tensor_tensor(dst=terms_sb, data1=qk_sb[:, h, :, :], data2=dqk_sb[:, h, :, :], op=nl.multiply)
        minus_along_sb = sbuf((rows, 2))
        nisa.tensor_reduce(dst=minus_along_sb, op=nl.add, data=terms_sb, axis=2, negate=True)
        for side in range(2):
            dy = dqk_sb[:, h, side, :]
            nisa.scalar_tensor_tensor(
                dst=dy, data=qk_sb[:, h, side, :], op0=nl.multiply,
                operand0=minus_along_sb[:, side : side + 1], op1=nl.add, operand1=dy,
            )  # fmt: skip
            copy_scaled(dy, dy, chunk["inverse_norms"][:, side, h : h + 1])
    return dqk_sb


def multiply_rows_into(dst, x, y):
    """Sets dst [rows, 1] = the dot products of rows: the Vector engine multiplies, the Scalar engine adds."""
    sum_rows(dst, multiply_elements(x, y), nl.copy)


def compute_beta_gradient(chunk, dR_sb, dots_sb):
    """Computes dbeta [rows, lanes]."""
    rows, lanes, _ = dR_sb.shape
    along_sb, reads_sb, out_sb = sbuf((rows, lanes)), sbuf((rows, lanes)), sbuf((rows, lanes))
    for lane in range(lanes):
        multiply_rows_into(along_sb[:, lane : lane + 1], dR_sb[:, lane, :], chunk["v"][:, lane, :])
    nisa.tensor_tensor(dst=reads_sb, data1=dots_sb[:, :, 1], data2=dots_sb[:, :, 2], op=nl.add)
    nisa.tensor_tensor(dst=out_sb, data1=along_sb, data2=reads_sb, op=nl.subtract)
    return out_sb


def sum_crossing_pairs(chunk, table):
    """Computes the sum over j < t of F_ij at row i and column t <= i, else 0; [rows, lanes, rows]."""
    rows, lanes = table["rows"], chunk["reads_t"].shape[1]
    sums_ps = psum((rows, lanes, rows))  # over j < t, for every i
    for lane in range(lanes):
        for F_t in (chunk["reads_t"], chunk["erasures_t"]):
            nisa.nc_matmul(
                dst=sums_ps[:, lane, :], stationary=F_t[:, lane, :], moving=table["strict_upper"],
                is_moving_onezero=True,
            )  # fmt: skip
    return multiply_elements(sums_ps, repeat_over_lanes(table, "lower", lanes))


def add_carried_states(dst_ps, chunk, dS, parts, table):
    """Adds gamma_C <dS', S> of each lane to every row of dst [rows, lanes]."""
    S = chunk["S"]
    rows, lanes = dst_ps.shape
    for part in range(len(parts)):
        size = parts[part][1] - parts[part][0]
        carried_sb = sbuf((size, lanes))
        for lane in range(lanes):
            multiply_rows_into(carried_sb[:, lane : lane + 1], dS[part][:, lane, :], S[part][:, lane, :])
        nisa.tensor_tensor(dst=carried_sb, data1=carried_sb, data2=chunk["carry"][0:size, :], op=nl.multiply)
        nisa.nc_matmul(
            dst=dst_ps, stationary=table["ones"][0:size, 0:rows], moving=carried_sb,
            is_stationary_onezero=True,
        )  # fmt: skip


def compute_decay_gradient(chunk, crossing_sb, dS, dots_sb, bundle, parts, table):
    """Computes dg [rows, lanes]; crossing_sb is what `sum_crossing_pairs` returns."""
    rows, lanes, V = table["rows"], bundle["lanes"], chunk["do"].shape[2]
    reads_sb = sbuf((rows, lanes))  # r
    nisa.tensor_tensor(dst=reads_sb, data1=chunk["beta"], data2=dots_sb[:, :, 1], op=nl.multiply)
    nisa.tensor_tensor(dst=reads_sb, data1=dots_sb[:, :, 0], data2=reads_sb, op=nl.subtract)
    writes_sb = sbuf((rows, lanes))  # w
    for lane in range(lanes):
        KdS_ps = psum((rows, V))
        multiply_parts(KdS_ps, chunk["k_t"], dS, find_key_head(bundle, lane), lane)
        multiply_rows_into(writes_sb[:, lane : lane + 1], chunk["U"][:, lane, :], KdS_ps)
    nisa.tensor_tensor(dst=writes_sb, data1=writes_sb, data2=chunk["lambda"], op=nl.multiply)
    states_ps = psum((rows, lanes))  # what r, w and <dS', S> add
    nisa.nc_matmul(dst=states_ps, stationary=table["lower"], moving=reads_sb, is_stationary_onezero=True)
    nisa.nc_matmul(
        dst=states_ps, stationary=table["strict_upper"], moving=writes_sb, is_stationary_onezero=True
    )
    add_carried_states(states_ps, chunk, dS, parts, table)
    pairs_ps = psum((rows, lanes))
    for lane in range(lanes):
        nisa.nc_matmul(
            dst=pairs_ps[:, lane : lane + 1], stationary=crossing_sb[:, lane, :],
            moving=table["ones"][0:rows, 0:1], is_moving_onezero=True,
        )  # fmt: skip
    out_sb = sbuf((rows, lanes))
    nisa.tensor_copy(dst=out_sb, src=pairs_ps)
    nisa.tensor_tensor(dst=out_sb, data1=out_sb, data2=states_ps, op=nl.add)
    return out_sb


def compute_state_gradient(chunk, dS, dR_sb, bundle, parts):
    """Computes the gradient of the state that the chunk meets, new tiles per part of K."""
    scale_gamma_q_sb = scale_heads(chunk["qk"], 0, chunk["scale_gamma"], bundle)
    minus_beta_gamma_k_sb = scale_heads(chunk["qk"], 1, chunk["minus_beta_gamma"], bundle)
    factors = [(scale_gamma_q_sb, chunk["do"]), (minus_beta_gamma_k_sb, dR_sb)]
    return decay_and_add(dS, chunk["carry"], factors, parts)
