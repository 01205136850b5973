"""Gated delta rule, one token: the decode step.

    r = S^T k    p = S^T q    u = beta (v - exp(g) r)
    S' = exp(g) S + k u^T     o = scale (exp(g) p + (k . q) u)          S'^T q, without reading S' again

Source: arXiv:2412.06464. The state travels once each way, 8 K V bytes a head, and DMA bounds the time.

Layout: q, k [B, H, K]; v, o [B, HV, V]; g, beta [B, HV]; state [B, HV, K, V] float32; value head j reads
key head j // (HV // H). V <= 512, a PSUM bank.

On chip (b, head) is one index, "row". A group of n rows is in flight, in two arrangements:

    vectors   k, q [n, K]; v, u, r, p, o [n, V], a row a partition: one instruction serves all heads
    states    S: partition (row, k // m), free (k % m, v). m lines of S a partition, so that a descriptor of
              DMA moves at least 512 bytes; heads with K / m <= 64 share a tile

The block diagonal D [n, n, K], D[h, h] = k_h, is the passage between them. Its transpose, tile by tile, holds
each k on the partitions of its own state and zeros elsewhere; S^T k and S^T q then come from one product that
streams 2 columns a head through S, not V columns of S. k u^T is D^T u, and adds k_h u_h^T alone to S_h.
"""

from delta_trn.nki_kernels.language import nisa, nki, nl
from delta_trn.nki_kernels.partitions import BANK, PARTITIONS, dot, identity, loaded, reciprocal_norm, tile

L2NORM_EPS = 1e-6
GROUP = 32  # rows: by the cost model, in order, 16 are 1% faster at K = 128 and 18% slower at 32, 8 up to 67%
STATE_BYTES = 48 * 1024  # of a partition's 192 KiB, for a group's states; two groups are in flight
DESCRIPTOR = 512  # bytes: what moving fewer in one piece costs anyway


@nki.jit
def gated_delta_rule_step(q, k, v, g, beta, state, scale, l2norm):
    """(o [B, HV, V] in v's dtype, S' [B, HV, K, V] float32). scale: number; l2norm: normalize q and k."""
    B, H, K = q.shape
    HV = v.shape[1]
    V = v.shape[2]
    assert HV % H == 0, f"HV={HV} is not a multiple of H={H}"
    assert V <= BANK, f"V={V} exceeds {BANK}, the float32 of a PSUM bank"
    rows = B * HV
    m = rows_per_partition(K, V)
    assert m * V * 4 <= STATE_BYTES, f"K={K} has no divisor that spreads V={V} over 128 partitions"
    parts = K // m  # partitions of one head
    n = group_size(rows, HV // H, m * V * 4, parts)
    heads = min(PARTITIONS // parts, n, BANK // (2 * m))  # that share a tile
    tiles = (n + heads - 1) // heads

    o = nl.ndarray((B, HV, V), dtype=v.dtype, buffer=nl.shared_hbm)
    new_state = nl.ndarray((B, HV, K, V), dtype=nl.float32, buffer=nl.shared_hbm)
    v, o_rows = v.reshape((rows, V)), o.reshape((rows, V))
    g, beta = g.reshape((rows, 1)), beta.reshape((rows, 1))
    old_parts = state.reshape((rows * parts, m * V))
    new_parts = new_state.reshape((rows * parts, m * V))
    eye = identity(PARTITIONS, nl.float32)
    holds = owners(tiles, heads, parts)

    starts = []
    for start in range(0, rows, n):
        starts.append(start)
    loads, columns, products = [], [], []
    for turn in range(len(starts) + 1):
        # a group's loads and its arrangement of k and q come a turn ahead, in the gaps of the group before
        if turn < len(starts):
            first, last = starts[turn], min(starts[turn] + n, rows)
            states = []
            vectors = load_vectors(q, k, v, g, beta, first, last, HV // H, scale, l2norm)
            decays = decay_of_tiles(g, first, last, holds)
            for row in range(first, last, heads):
                part = old_parts[row * parts : min(row + heads, last) * parts, :]
                states.append(loaded(part, nl.float32).reshape((part.shape[0], m, V)))
            loads.append((states, vectors, decays, block_diagonal(vectors[0]), block_diagonal(vectors[1])))
        if turn > 0:
            states = loads[turn - 1][0]
            products.append(state_products(states, columns[turn - 1], heads, eye))
        if turn < len(starts):
            states, vectors, decays, dk, dq = loads[turn]
            columns.append(by_partition(states, dk, dq, heads, eye))
        if turn > 0:
            first, last = starts[turn - 1], min(starts[turn - 1] + n, rows)
            states, vectors, decays, dk, dq = loads[turn - 1]
            r, p = products[turn - 1]
            u = new_values(r, vectors)
            write_states(states, dk, u, decays, new_parts, first * parts, heads)
            rounded = tile((last - first, V), v.dtype)
            outputs(rounded, p, u, vectors)
            nisa.dma_copy(dst=o_rows[first:last, :], src=rounded)
    return o, new_state


def load_vectors(q, k, v, g, beta, first, last, shared, scale, l2norm):
    """k, q [c, K], normalized, q scaled too, v [c, V], exp(g), beta, k . q [c, 1], all float32, of c rows."""
    kn = key_rows(k, first, last - first, shared)
    qn = key_rows(q, first, last - first, shared)
    value = loaded(v[first:last, :], nl.float32)
    decay = loaded(g[first:last, :], nl.float32)
    gate = loaded(beta[first:last, :], nl.float32)
    if l2norm:
        normalize(kn, 1.0)
        normalize(qn, scale)
    else:
        nisa.tensor_scalar(dst=qn, data=qn, op0=nl.multiply, operand0=scale)
    nisa.activation(dst=decay, op=nl.exp, data=decay)
    return kn, qn, value, decay, gate, dot(kn, qn)


def new_values(r, vectors):
    """u = beta (v - exp(g) r)."""
    value, decay, gate = vectors[2], vectors[3], vectors[4]
    u = tile(r.shape, nl.float32)
    nisa.scalar_tensor_tensor(
        dst=u, data=r, op0=nl.multiply, operand0=decay, op1=nl.subtract, operand1=value, reverse1=True
    )
    nisa.tensor_scalar(dst=u, data=u, op0=nl.multiply, operand0=gate)
    return u


def outputs(out, p, u, vectors):
    """out = scale S'^T q = exp(g) p + (k . q) u; q holds the scale."""
    decayed = tile(p.shape, nl.float32)
    nisa.tensor_scalar(dst=decayed, data=p, op0=nl.multiply, operand0=vectors[3])
    nisa.scalar_tensor_tensor(
        dst=out, data=u, op0=nl.multiply, operand0=vectors[5], op1=nl.add, operand1=decayed
    )


def state_products(states, columns, heads, eye):
    """S^T k and S^T q [c, V] in PSUM: the states are stationary and stream c columns of k and q, not V."""
    m, V = states[0].shape[1], states[0].shape[2]
    c = (len(states) - 1) * heads + columns[-1].shape[3]
    r = nl.ndarray((c, V), dtype=nl.float32, buffer=nl.psum)
    p = nl.ndarray((c, V), dtype=nl.float32, buffer=nl.psum)
    for v0 in range(0, V, PARTITIONS):
        v1 = min(v0 + PARTITIONS, V)
        turned = nl.ndarray((v1 - v0, 2, c), dtype=nl.float32, buffer=nl.psum)
        for i in range(len(states)):
            for j in range(m):
                nisa.nc_matmul(
                    dst=turned[:, :, i * heads : i * heads + columns[i].shape[3]],
                    stationary=states[i][:, j, v0:v1], moving=columns[i][:, j, :, :],
                )  # fmt: skip
        copied = tile((v1 - v0, 2, c), nl.float32)
        nisa.activation(dst=copied, op=nl.copy, data=turned)
        back = eye[0 : v1 - v0, 0 : v1 - v0]
        nisa.nc_matmul(dst=r[:, v0:v1], stationary=copied[:, 0, :], moving=back, is_moving_onezero=True)
        nisa.nc_matmul(dst=p[:, v0:v1], stationary=copied[:, 1, :], moving=back, is_moving_onezero=True)
    return r, p


def write_states(states, dk, u, decays, new_parts, first, heads):
    """S <- decay S + k u^T in place, and out to HBM."""
    c, K = dk.shape[0], dk.shape[2]
    flat = dk.reshape((c, c * K))
    for i in range(len(states)):
        S = states[i]
        active, m, V = S.shape
        for j in range(m):
            at = i * heads * K + j
            written = nl.ndarray((active, V), dtype=nl.float32, buffer=nl.psum)
            nisa.nc_matmul(dst=written, stationary=flat[:, at : at - j + active * m : m], moving=u)
            nisa.scalar_tensor_tensor(
                dst=S[:, j, :], data=S[:, j, :], op0=nl.multiply, operand0=decays[0:active, i : i + 1],
                op1=nl.add, operand1=written,
            )  # fmt: skip
        nisa.dma_copy(dst=new_parts[first : first + active, :], src=S.reshape((active, m * V)))
        first += active


def rows_per_partition(K, V):
    """m, a divisor of K: K / m is at most 128, and m V numbers fill a descriptor, if m <= 8 reaches it."""
    fewest = (K + PARTITIONS - 1) // PARTITIONS
    while K % fewest != 0:
        fewest += 1
    m = fewest
    while m < 8 and (K % m != 0 or m * V * 4 < DESCRIPTOR):
        m += 1
    return m if K % m == 0 else fewest


def group_size(rows, shared, bytes_per_row, parts):
    """n: as many (b, head) rows as GROUP and memory allow; whole key rows, or equal parts of one."""
    n = min(GROUP, rows, max(1, STATE_BYTES // bytes_per_row) * (PARTITIONS // parts))
    if n >= shared:
        return n // shared * shared
    while shared % n != 0:
        n -= 1
    return n


def key_rows(x, start, c, shared):
    """[c, K] float32: x [B, H, K] of value rows start to start + c, `shared` of which read one row of x."""
    K = x.shape[2]
    if shared == 1:
        return loaded(x.reshape((x.shape[0] * x.shape[1], K))[start : start + c, :], nl.float32)
    out = tile((c, K), nl.float32)
    copies = min(shared, c)
    for i in range(0, c, copies):
        row = (start + i) // shared
        nisa.dma_copy(dst=out[i : i + copies, :], src=x.ap(pattern=[[0, copies], [1, K]], offset=row * K))
    return out


def normalize(x, factor):
    """x <- factor x / sqrt(sum(x^2) + 1e-6), in place."""
    r = reciprocal_norm(x, L2NORM_EPS)
    nisa.tensor_scalar(dst=x, data=x, op0=nl.multiply, operand0=r, op1=nl.multiply, operand1=factor)


def block_diagonal(x):
    """[c, c, K]: x's row h at [h, h], zeros elsewhere."""
    c, K = x.shape
    out = tile((c, c, K), nl.float32)
    nisa.affine_select(
        dst=out, pattern=[[-1, c], [0, K]], channel_multiplier=1,
        on_true_tile=x.ap(pattern=[[K, c], [0, c], [1, K]]), on_false_value=0.0, cmp_op=nl.equal,
    )  # fmt: skip
    return out


def by_partition(states, dk, dq, heads, eye):
    """Per tile of states [active, m, 2, its heads]: k and q of every head on its own state's partitions."""
    c, K = dk.shape[0], dk.shape[2]
    k, q = dk.reshape((c, c * K)), dq.reshape((c, c * K))
    found = []
    for i in range(len(states)):
        active, m = states[i].shape[0], states[i].shape[1]
        first, last = i * heads, min((i + 1) * heads, c)
        chosen = eye[0:c, first:last]
        turned = nl.ndarray((active, m, 2, last - first), dtype=nl.float32, buffer=nl.psum)
        for j in range(m):
            at, end = first * K + j, first * K + active * m
            nisa.nc_matmul(
                dst=turned[:, j, 0, :], stationary=k[:, at:end:m], moving=chosen, is_moving_onezero=True
            )
            nisa.nc_matmul(
                dst=turned[:, j, 1, :], stationary=q[:, at:end:m], moving=chosen, is_moving_onezero=True
            )
        out = tile((active, m, 2, last - first), nl.float32)
        nisa.activation(dst=out, op=nl.copy, data=turned)
        found.append(out)
    return found


def owners(tiles, heads, parts):
    """[heads * parts, tiles, heads]: 1 where a partition holds the state of the i-th head of a tile."""
    P = heads * parts
    out = tile((P, tiles, heads), nl.float32)
    nisa.memset(dst=out, value=1.0)
    band = [[0, tiles], [-parts, heads]]
    nisa.affine_select(  # i parts <= p
        dst=out, pattern=band, channel_multiplier=1, on_true_tile=out, on_false_value=0.0,
        cmp_op=nl.greater_equal,
    )  # fmt: skip
    nisa.affine_select(  # p < (i + 1) parts
        dst=out, pattern=band, channel_multiplier=1, offset=1 - parts, on_true_tile=out,
        on_false_value=0.0, cmp_op=nl.less_equal,
    )  # fmt: skip
    return out


def decay_of_tiles(g, first, last, holds):
    """[heads * parts, tiles]: exp(g) of the row whose state a partition holds in each tile.

    Not by a product: should the Tensor engine round its operands, S would still decay exactly.
    """
    P, heads, c = holds.shape[0], holds.shape[2], last - first
    tiles = (c + heads - 1) // heads
    decay = tile((P, tiles * heads), nl.float32)
    if tiles * heads > c:
        nisa.memset(dst=decay, value=0.0)
    nisa.dma_copy(dst=decay[:, 0:c], src=g.ap(pattern=[[0, P], [1, c]], offset=first))
    nisa.activation(dst=decay, op=nl.exp, data=decay)
    own = tile((P, tiles, heads), nl.float32)
    nisa.tensor_tensor(
        dst=own, data1=decay.reshape((P, tiles, heads)), data2=holds[:, 0:tiles, :], op=nl.multiply
    )
    out = tile((P, tiles), nl.float32)
    nisa.tensor_reduce(dst=out, op=nl.add, data=own, axis=2)
    return out


def example(B=1, H=6, HV=0, K=128, V=256, l2norm=1):
    """(kernel, arguments) for the simulator's report; HV=0 means H."""
    import numpy as np

    HV = HV or H
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.standard_normal(shape, dtype=np.float32)

    q, k, v, state = normal(B, H, K), normal(B, H, K), normal(B, HV, V), normal(B, HV, K, V)
    g, beta = -rng.random((B, HV), dtype=np.float32), rng.random((B, HV), dtype=np.float32)
    return gated_delta_rule_step, (q, k, v, g, beta, state, K**-0.5, bool(l2norm))
