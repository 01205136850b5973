"""One chunk of the gated delta rule backward, on chip. Names as in `nki_kernels.chunk`; dS' is the gradient
of the state that the chunk leaves.

    dV' = H^T dO + W dS'                       dV  = diag(beta) dV'
    A   = scale upto(dO U^T . E)               Z   = -strict(dV' U^T . E)
    dQ  = scale diag(gamma) dO S^T + A K
    dK  = A^T Q + diag(lambda) U dS'^T + diag(beta) (Z K - diag(gamma) dV' S^T) + Z^T diag(beta) K
    dS  = gamma_C dS' + scale Q^T diag(gamma) dO - K^T diag(gamma beta) dV'
    dbeta_i = <dV'_i, v_i> + <k_i, (Z K - diag(gamma) dV' S^T)_i>

The inverse is not differentiated: with dU the gradient of U, T^T dU (T V')^T = dV' U^T is its whole effect.

The gradient of g_t is a sum over what crosses t, and nothing that does not is added or taken away again:

    dg_t = sum_{j < t <= i} F_ij + sum_{i >= t} r_i + sum_{i < t} w_i + gamma_C <dS', S>
    F   = dO U^T . P + dV' U^T . G                                   pairs: i reads what j wrote
    r_i = <q_i, scale gamma_i (dO S^T)_i> - beta_i <k_i, gamma_i (dV' S^T)_i>     i reads the state
    w_i = lambda_i <(K dS')_i, U_i>                                               i writes to the next

The usual form, rows of F minus its columns summed from t on, is the same number as a difference of sums that
do not fade with C: in float32 it had 1.5 times the error that parity allows (case collide, C = 128). Every
sum over tokens is a product with a triangle of ones. And w is not <k_i, (U dS'^T)_i>, a product that is made
for dK anyway: where a later token erases what was written, K dS' is 0 before anything is summed.
"""

from delta_trn.nki_kernels.chunk import key_of, products, scaled_heads, views
from delta_trn.nki_kernels.language import nisa, nl
from delta_trn.nki_kernels.tiles import copied, over_lanes, psum, sbuf, transposed


def state_transposed(S, bundle, parts, value_parts, K, table):
    """S per part of K [f, lanes, V] -> per part of V [f, lanes, K]."""
    lanes = bundle["lanes"]
    found = []
    for value_part in value_parts:
        low, high = value_part
        tile = sbuf((high - low, lanes, K))
        for lane in range(lanes):
            ps = psum((high - low, K))
            for part in range(len(parts)):
                start, stop = parts[part]
                nisa.nc_matmul(
                    dst=ps[:, start:stop], stationary=S[part][:, lane, low:high],
                    moving=table["eye"][0 : stop - start, 0 : stop - start], is_moving_onezero=True,
                )  # fmt: skip
            copied(tile[:, lane, :], ps)
        found.append(tile)
    return found


def writing_transposed(T, x, bundle, rows, parts):
    """W^T per part of K: [f, lanes, rows]."""
    lanes = bundle["lanes"]
    found = []
    for part in parts:
        start, stop = part
        ps = psum((stop - start, lanes, rows))
        for lane in range(lanes):
            nisa.nc_matmul(
                dst=ps[:, lane, :], stationary=x["k_end"][:, lane, start:stop], moving=T[:, lane, :]
            )
        tile = sbuf((stop - start, lanes, rows))
        copied(tile, ps)
        found.append(tile)
    return found


def residual_gradient(x, dS, bundle, rows, parts):
    """dV' = H^T dO + W dS': [rows, lanes, V]."""
    lanes = bundle["lanes"]
    V = x["do"].shape[2]
    out = sbuf((rows, lanes, V))
    for lane in range(lanes):
        ps = psum((rows, V))
        nisa.nc_matmul(dst=ps, stationary=x["H"][:, lane, :], moving=x["do"][:, lane, :])
        for part in range(len(parts)):
            nisa.nc_matmul(dst=ps, stationary=x["Wt"][part][:, lane, :], moving=dS[part][:, lane, :])
        copied(out[:, lane, :], ps)
    return out


def pair_gradients(x, do_t, U_t, dres_t, bundle, rows, value_parts, scale, table):
    """A, A^T, -Z, -Z^T as tiles [rows, lanes, rows], and the two parts of F^T."""
    lanes = bundle["lanes"]
    ps = products(U_t, do_t, bundle, rows, value_parts)
    At = sbuf((rows, lanes, rows))
    nisa.scalar_tensor_tensor(
        dst=At, data=ps, op0=nl.multiply, operand0=scale, op1=nl.multiply, operand1=x["Et"]
    )
    reads = sbuf((rows, lanes, rows))
    nisa.tensor_tensor(dst=reads, data1=ps, data2=x["Pt"], op=nl.multiply)
    ps = products(U_t, dres_t, bundle, rows, value_parts)
    minus_Zt = sbuf((rows, lanes, rows))
    nisa.tensor_tensor(dst=minus_Zt, data1=ps, data2=x["Et_strict"], op=nl.multiply)
    erasures = sbuf((rows, lanes, rows))
    nisa.tensor_tensor(dst=erasures, data1=ps, data2=x["Gt"], op=nl.multiply)
    whole = [(0, rows)]
    A = transposed(views(At, lanes), rows, whole, table["identity"])[0]
    minus_Z = transposed(views(minus_Zt, lanes), rows, whole, table["identity"])[0]
    return A, At, minus_Z, minus_Zt, reads, erasures


def key_gradients(x, pairs, do_t, U_t, dres_t, S_t, dS_t, bundle, rows, value_parts):
    """Gradients of the bundle's normalized q and k, [rows, key heads, 2, K], and dots [rows, lanes, 3].

    dots: <q, scale gamma dO S^T>, <k, gamma dV' S^T>, -<k, Z K> by token.
    """
    A, At, minus_Z, minus_Zt, _, _ = pairs
    lanes, qk = bundle["lanes"], x["qk"]
    K = qk.shape[3]
    dots = sbuf((rows, lanes, 3))
    total = sbuf((rows, bundle["key_heads"], 2, K))
    before = -1
    for lane in range(lanes):
        h = key_of(bundle, lane)
        q_, k_ = qk[:, h, 0, :], qk[:, h, 1, :]
        across = psum((rows, 2, K))  # dO S^T, dV' S^T
        for part in range(len(value_parts)):
            nisa.nc_matmul(
                dst=across[:, 0, :], stationary=do_t[part][:, lane, :], moving=S_t[part][:, lane, :]
            )
        for part in range(len(value_parts)):
            nisa.nc_matmul(
                dst=across[:, 1, :], stationary=dres_t[part][:, lane, :], moving=S_t[part][:, lane, :]
            )
        read = sbuf((rows, 2, K))
        copied(read[:, 0, :], across[:, 0, :], x["gamma_scale"][:, lane : lane + 1])
        copied(read[:, 1, :], across[:, 1, :], x["gamma"][:, lane : lane + 1])
        terms = sbuf((rows, 3, K))
        nisa.tensor_tensor(dst=terms[:, 0:2, :], data1=qk[:, h, :, :], data2=read, op=nl.multiply)
        inside = psum((rows, 2, K))  # A K, -Z K
        nisa.nc_matmul(dst=inside[:, 0, :], stationary=At[:, lane, :], moving=k_)
        nisa.nc_matmul(dst=inside[:, 1, :], stationary=minus_Zt[:, lane, :], moving=k_)
        nisa.tensor_tensor(dst=terms[:, 2, :], data1=k_, data2=inside[:, 1, :], op=nl.multiply)
        nisa.tensor_tensor(dst=read, data1=read, data2=inside, op=nl.add)
        written = psum((rows, 2, K))  # A^T Q + Z^T diag(beta) K, U dS'^T
        nisa.nc_matmul(dst=written[:, 0, :], stationary=A[:, lane, :], moving=q_)
        nisa.nc_matmul(dst=written[:, 0, :], stationary=minus_Z[:, lane, :], moving=x["k_minus"][:, lane, :])
        for part in range(len(value_parts)):
            nisa.nc_matmul(
                dst=written[:, 1, :], stationary=U_t[part][:, lane, :], moving=dS_t[part][:, lane, :]
            )
        nisa.tensor_reduce(dst=dots[:, lane, :], op=nl.add, data=terms, axis=2)
        dk = sbuf((rows, K))
        nisa.scalar_tensor_tensor(
            dst=dk, data=read[:, 1, :], op0=nl.multiply, operand0=x["minus_beta"][:, lane : lane + 1],
            op1=nl.add, operand1=written[:, 0, :],
        )  # fmt: skip
        own = total[:, h, :, :]
        if h == before:
            nisa.tensor_tensor(dst=own[:, 0, :], data1=own[:, 0, :], data2=read[:, 0, :], op=nl.add)
            nisa.tensor_tensor(dst=dk, data1=dk, data2=own[:, 1, :], op=nl.add)
        else:
            copied(own[:, 0, :], read[:, 0, :])
        nisa.scalar_tensor_tensor(
            dst=own[:, 1, :], data=written[:, 1, :], op0=nl.multiply,
            operand0=x["lambda"][:, lane : lane + 1], op1=nl.add, operand1=dk,
        )  # fmt: skip
        before = h
    return total, dots


def through_norm(x, total, bundle, rows):
    """Gradients of raw q and k from those of normalized ones: r (dy - y <y, dy>), y = r x; in place."""
    qk, K = x["qk"], total.shape[3]
    for h in range(bundle["key_heads"]):
        terms = sbuf((rows, 2, K))
        nisa.tensor_tensor(dst=terms, data1=qk[:, h, :, :], data2=total[:, h, :, :], op=nl.multiply)
        along = sbuf((rows, 2))
        nisa.tensor_reduce(dst=along, op=nl.add, data=terms, axis=2, negate=True)
        for side in range(2):
            dy = total[:, h, side, :]
            nisa.scalar_tensor_tensor(
                dst=dy, data=qk[:, h, side, :], op0=nl.multiply, operand0=along[:, side : side + 1],
                op1=nl.add, operand1=dy,
            )  # fmt: skip
            copied(dy, dy, x["inverse_norms"][:, side, h : h + 1])
    return total


def inner_product(dst, a, b, rows, V):
    """dst (rows, 1) = the dot products of rows: Vector multiplies, Scalar adds."""
    terms = sbuf((rows, V))
    nisa.tensor_tensor(dst=terms, data1=a, data2=b, op=nl.multiply)
    scratch = sbuf((rows, V))
    nisa.activation(
        dst=scratch, op=nl.copy, data=terms, reduce_op=nl.add, reduce_res=dst,
        reduce_cmd=nisa.reduce_cmd.reset_reduce,
    )  # fmt: skip


def beta_gradient(x, dres, dots, bundle, rows):
    """dbeta [rows, lanes]."""
    lanes = bundle["lanes"]
    along = sbuf((rows, lanes))
    for lane in range(lanes):
        inner_product(along[:, lane : lane + 1], dres[:, lane, :], x["v"][:, lane, :], rows, dres.shape[2])
    reads = sbuf((rows, lanes))
    nisa.tensor_tensor(dst=reads, data1=dots[:, :, 1], data2=dots[:, :, 2], op=nl.add)
    out = sbuf((rows, lanes))
    nisa.tensor_tensor(dst=out, data1=along, data2=reads, op=nl.subtract)
    return out


def crossing_pairs(pairs, lanes, rows, table):
    """Row i, column t: sum over j < t of F_ij where t <= i, else 0; [rows, lanes, rows]."""
    _, _, _, _, reads, erasures = pairs
    ps = psum((rows, lanes, rows))  # row i, column t: over j < t
    for lane in range(lanes):
        for F in (reads, erasures):
            nisa.nc_matmul(
                dst=ps[:, lane, :], stationary=F[:, lane, :], moving=table["before"], is_moving_onezero=True
            )
    crossing = sbuf((rows, lanes, rows))
    nisa.tensor_tensor(dst=crossing, data1=ps, data2=over_lanes(table, "since", rows, lanes), op=nl.multiply)
    return crossing


def decay_gradient(x, crossing, S, dS, dots, bundle, rows, parts, table):
    """dg [rows, lanes]."""
    lanes = bundle["lanes"]
    V = S[0].shape[2]
    reads = sbuf((rows, lanes))
    nisa.tensor_tensor(dst=reads, data1=x["beta"], data2=dots[:, :, 1], op=nl.multiply)
    nisa.tensor_tensor(dst=reads, data1=dots[:, :, 0], data2=reads, op=nl.subtract)
    writes = sbuf((rows, lanes))
    for lane in range(lanes):
        later = psum((rows, V))  # K dS'
        for part in range(len(parts)):
            nisa.nc_matmul(
                dst=later, stationary=x["kt"][part][:, key_of(bundle, lane), :], moving=dS[part][:, lane, :]
            )
        inner_product(writes[:, lane : lane + 1], x["U"][:, lane, :], later, rows, V)
    nisa.tensor_tensor(dst=writes, data1=writes, data2=x["lambda"], op=nl.multiply)
    ps = psum((rows, lanes))
    nisa.nc_matmul(dst=ps, stationary=table["since"], moving=reads, is_stationary_onezero=True)
    nisa.nc_matmul(dst=ps, stationary=table["before"], moving=writes, is_stationary_onezero=True)
    for part in range(len(parts)):
        start, stop = parts[part]
        carried = sbuf((stop - start, lanes))
        for lane in range(lanes):
            inner_product(
                carried[:, lane : lane + 1], dS[part][:, lane, :], S[part][:, lane, :], stop - start, V
            )
        nisa.tensor_tensor(dst=carried, data1=carried, data2=x["carry"][0 : stop - start, :], op=nl.multiply)
        nisa.nc_matmul(
            dst=ps, stationary=table["every"][0 : stop - start, 0:rows], moving=carried,
            is_stationary_onezero=True,
        )  # fmt: skip
    sums = psum((rows, lanes))
    for lane in range(lanes):
        nisa.nc_matmul(
            dst=sums[:, lane : lane + 1], stationary=crossing[:, lane, :], moving=table["every"][0:rows, 0:1],
            is_moving_onezero=True,
        )  # fmt: skip
    out = sbuf((rows, lanes))
    nisa.tensor_copy(dst=out, src=sums)
    nisa.tensor_tensor(dst=out, data1=out, data2=ps, op=nl.add)
    return out


def state_gradient(x, dS, dres, bundle, rows, parts):
    """Gradient of the state that the chunk found, new tiles per part of K."""
    lanes = bundle["lanes"]
    V = dres.shape[2]
    q_gamma = scaled_heads(x["qk"], 0, x["gamma_scale"], bundle, rows)
    k_gamma = scaled_heads(x["qk"], 1, x["minus_gamma_beta"], bundle, rows)
    found = []
    for part in range(len(parts)):
        start, stop = parts[part]
        out = sbuf((stop - start, lanes, V))
        for lane in range(lanes):
            ps = psum((stop - start, V))
            nisa.nc_matmul(dst=ps, stationary=q_gamma[:, lane, start:stop], moving=x["do"][:, lane, :])
            nisa.nc_matmul(dst=ps, stationary=k_gamma[:, lane, start:stop], moving=dres[:, lane, :])
            nisa.scalar_tensor_tensor(
                dst=out[:, lane, :], data=dS[part][:, lane, :], op0=nl.multiply,
                operand0=x["carry"][0 : stop - start, lane : lane + 1], op1=nl.add, operand1=ps,
            )  # fmt: skip
        found.append(out)
    return found
