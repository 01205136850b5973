"""Computes the gated delta rule for one token: the decode step.

    r = S^T k    p = S^T q    u = beta (v - exp(g) r)                   [V]
    S' = exp(g) S + k u^T     o = scale (exp(g) p + (k . q) u)          S'^T q, without reading S' again

Source: arXiv:2412.06464. The state [K, V] travels once each way, 8 K V bytes per head, and DMA
bounds the time. With a decay per channel (Kimi Delta Attention) S is decayed first, line by line,
and exp(g) above is 1.

On chip (b, head) is one index, "row". A group of n rows is in flight, in two arrangements:

    vectors   k, q [n, K]; v, u, r, p, o [n, V], a row per partition: one instruction serves all
              heads
    states    S: partition (row, k // m), free (k % m, v). A partition holds m lines of S, so that a
              descriptor of DMA moves at least 512 bytes; heads with K / m <= 64 share a tile

The block diagonal of k [n, n, K], k_h at [h, h], is the passage between them. Its transpose, tile
by tile, holds each k on the partitions of its own state and zeros elsewhere; S^T k and S^T q then
come from one product that streams 2 columns per head through S, not V columns of S. k u^T is the
product of the block diagonal, transposed, with u, and adds k_h u_h^T alone to S_h.
"""

from delta_trn.nki_kernels.language import nisa, nki, nl
from delta_trn.nki_kernels.plan import BANK, PARTITIONS, split
from delta_trn.nki_kernels.tiles import (
    L2NORM_EPS,
    add_product,
    add_transposed,
    build_identity,
    build_norm,
    copy_scaled,
    invert_scaled_norms,
    load,
    multiply_elements,
    multiply_rows,
    normals,
    psum,
    sbuf,
    scale_and_add,
    uniforms,
)

# rows: by the cost model, in order, 16 are 1% faster at K = 128 and 18% slower at 32, 8 up to 67%
GROUP = 32
STATE_BYTES = 48 * 1024  # of a partition's 176 KiB, for a group's states; two groups are in flight
DESCRIPTOR = 512  # bytes: what moving fewer in one piece costs anyway


@nki.jit
def gated_delta_rule_step(q, k, v, g, beta, state, scale, l2norm):
    """Computes one token of the gated delta rule.

    Args:
        q, k        [B, H, K]; value head j reads key head j // (HV // H)
        v           [B, HV, V], V <= 512
        g, beta     [B, HV]; g may be [B, HV, K]
        state       [B, HV, K, V] float32
        scale       a number, of q
        l2norm      bool: normalize q and k

    Returns:
        o           [B, HV, V] in v's dtype
        new_state   [B, HV, K, V] float32

    Notes:
        The loop over groups is one group ahead: a group's loads and its arrangement of k and q fill
        the gaps of the group before.

    Pseudocode:
        for group in groups:
            states, vectors = load;  columns = k and q by partition
            r, p = S^T k, S^T q
            u = beta (v - exp(g) r);  S = exp(g) S + k u^T;  o = scale (exp(g) p + (k . q) u)
    """
    B, H, K = q.shape
    HV, V = v.shape[1], v.shape[2]
    assert HV % H == 0, f"HV={HV} is not a multiple of H={H}"
    assert V <= BANK, f"V={V} exceeds {BANK}, the float32 of a PSUM bank"
    rows = B * HV
    m = choose_lines(K, V)
    assert has_lines(K, V), f"K={K} has no divisor that spreads V={V} over 128 partitions"
    parts = K // m  # partitions of one head
    n = choose_group(rows, HV // H, m * V * 4, parts)
    heads = min(PARTITIONS // parts, n, BANK // (2 * m))  # that share a tile
    tiles = (n + heads - 1) // heads

    o = nl.ndarray((B, HV, V), dtype=v.dtype, buffer=nl.shared_hbm)
    new_state = nl.ndarray((B, HV, K, V), dtype=nl.float32, buffer=nl.shared_hbm)
    v, o_rows = v.reshape((rows, V)), o.reshape((rows, V))
    g, beta = g.reshape((rows, K if len(g.shape) == 3 else 1)), beta.reshape((rows, 1))
    # a line is what a partition holds: m lines of a head's S [K, V]
    old_lines = state.reshape((rows * parts, m * V))
    new_lines = new_state.reshape((rows * parts, m * V))
    eye_sb = build_identity(PARTITIONS, nl.float32)
    owners_sb = build_owners(tiles, heads, parts)
    norm = build_norm(L2NORM_EPS)

    groups = split(rows, n)
    loads, columns, products = [], [], []
    for turn in range(len(groups) + 1):
        if turn < len(groups):
            first, last = groups[turn]
            states = []
            vectors = load_vectors(q, k, v, g, beta, first, last, HV // H, scale, l2norm, norm)
            decays_sb = spread_decays(g, first, last, owners_sb)
            for row in range(first, last, heads):
                lines = old_lines[row * parts : min(row + heads, last) * parts, :]
                states.append(load(lines, nl.float32).reshape((lines.shape[0], m, V)))
            if g.shape[1] > 1:
                decay_lines(states, g.reshape((rows * parts, m)), first * parts)
            k_blocks_sb, q_blocks_sb = (
                build_block_diagonal(vectors["k"]),
                build_block_diagonal(vectors["q"]),
            )
            loads.append((states, vectors, decays_sb, k_blocks_sb, q_blocks_sb))
        if turn > 0:
            states = loads[turn - 1][0]
            products.append(multiply_states(states, columns[turn - 1], heads, eye_sb))
        if turn < len(groups):
            states, vectors, decays_sb, k_blocks_sb, q_blocks_sb = loads[turn]
            columns.append(arrange_by_partition(states, k_blocks_sb, q_blocks_sb, heads, eye_sb))
        if turn > 0:
            first, last = groups[turn - 1]
            states, vectors, decays_sb, k_blocks_sb, q_blocks_sb = loads[turn - 1]
            r_ps, p_ps = products[turn - 1]
            u_sb = compute_writes(r_ps, vectors)
            update_states(states, k_blocks_sb, u_sb, decays_sb, new_lines, first * parts, heads)
            o_sb = sbuf((last - first, V), v.dtype)
            compute_output(o_sb, p_ps, u_sb, vectors)
            nisa.dma_copy(dst=o_rows[first:last, :], src=o_sb)
    return o, new_state


def load_vectors(q, k, v, g, beta, first, last, shared, scale, l2norm, norm):
    """Loads the vectors of c rows as float32, a dict.

    k, q [c, K], normalized if asked, q scaled too; v [c, V]; decay = exp(g), beta and kq = k . q
    [c, 1].
    """
    k_sb = load_key_rows(k, first, last - first, shared)
    q_sb = load_key_rows(q, first, last - first, shared)
    v_sb = load(v[first:last, :], nl.float32)
    decay_sb = sbuf((last - first, 1))
    if g.shape[1] == 1:
        nisa.dma_copy(dst=decay_sb, src=g[first:last, :])
    else:  # channels decay line by line; exp(0) may not be exactly 1
        nisa.memset(dst=decay_sb, value=1.0)
    beta_sb = load(beta[first:last, :], nl.float32)
    if l2norm:
        normalize(k_sb, 1.0, norm)
        normalize(q_sb, scale, norm)
    else:
        nisa.tensor_scalar(dst=q_sb, data=q_sb, op0=nl.multiply, operand0=scale)
    if g.shape[1] == 1:  # after the norms: exp and rsqrt are of two tables
        nisa.activation(dst=decay_sb, op=nl.exp, data=decay_sb)
    kq_sb = multiply_rows(k_sb, q_sb)
    return {"k": k_sb, "q": q_sb, "v": v_sb, "decay": decay_sb, "beta": beta_sb, "kq": kq_sb}


def decay_lines(states, g_lines, first):
    """Decays the lines of states [P, m, V] in place, each by its own channel;
    g_lines is [partitions, m].
    """
    for S_sb in states:
        decay_sb = load(g_lines[first : first + S_sb.shape[0], :], nl.float32)
        nisa.activation(dst=decay_sb, op=nl.exp, data=decay_sb)
        for j in range(S_sb.shape[1]):
            copy_scaled(S_sb[:, j, :], S_sb[:, j, :], decay_sb[:, j : j + 1])
        first += S_sb.shape[0]


def compute_writes(r_ps, vectors):
    """Computes u = beta (v - exp(g) r), [c, V]."""
    u_sb = sbuf(r_ps.shape)
    nisa.scalar_tensor_tensor(
        dst=u_sb, data=r_ps, op0=nl.multiply, operand0=vectors["decay"], op1=nl.subtract,
        operand1=vectors["v"], reverse1=True,
    )  # fmt: skip
    nisa.tensor_scalar(dst=u_sb, data=u_sb, op0=nl.multiply, operand0=vectors["beta"])
    return u_sb


def compute_output(o_sb, p_ps, u_sb, vectors):
    """Sets o [c, V] = scale S'^T q = exp(g) p + (k . q) u; q holds the scale."""
    decayed_sb = sbuf(p_ps.shape)
    nisa.tensor_scalar(dst=decayed_sb, data=p_ps, op0=nl.multiply, operand0=vectors["decay"])
    scale_and_add(o_sb, u_sb, vectors["kq"], decayed_sb)


def multiply_states(states, columns, heads, eye_sb):
    """Computes S^T k and S^T q [c, V] in PSUM: the states are stationary,
    and stream c columns, not V.
    """
    m, V = states[0].shape[1], states[0].shape[2]
    # the last tile may have fewer heads
    tiles, rest = (len(states), columns[len(states) - 1].shape[3])
    c = (tiles - 1) * heads + rest
    r_ps, p_ps = psum((c, V)), psum((c, V))
    for span in split(V, PARTITIONS):
        v0, v1 = span
        by_side_sb = sbuf((v1 - v0, 2, c))
        for piece in split(tiles, tiles if m == 1 else 1):  # several lines of a partition are a sum
            first, stop = piece
            # of each tile, r of its heads and then p
            by_tile_ps = psum((v1 - v0, stop - first, 2 * heads))
            for i in range(first, stop):
                active, count = columns[i].shape[0], columns[i].shape[3]
                moving = columns[i].reshape((active, m, 2 * count))
                for j in range(m):
                    dst = by_tile_ps[:, i - first, 0 : 2 * count]
                    add_product(dst, states[i][:, j, v0:v1], moving[:, j, :], j > 0)
            whole = stop if rest == heads else min(stop, tiles - 1)
            if whole > first:
                copy_sides(by_side_sb, by_tile_ps, first, 0, whole - first, heads)
            if whole < stop:
                copy_sides(by_side_sb, by_tile_ps, whole, whole - first, 1, rest)
        eye = eye_sb[0 : v1 - v0, 0 : v1 - v0]
        add_transposed(r_ps[:, v0:v1], by_side_sb[:, 0, :], eye)
        add_transposed(p_ps[:, v0:v1], by_side_sb[:, 1, :], eye)
    return r_ps, p_ps


def copy_sides(by_side_sb, by_tile_ps, first, own, tiles, count):
    """Copies r and p of `count` heads per tile from [v, tile, (side, head)] to [v, side, (tile,
    head)]: of tiles from number `first` on, which is number `own` in PSUM.
    """
    size, _, c = by_side_sb.shape
    all_tiles, width = by_tile_ps.shape[1], by_tile_ps.shape[2]
    heads = width // 2
    nisa.activation(
        dst=by_side_sb.ap(
            pattern=[[2 * c, size], [heads, tiles], [c, 2], [1, count]], offset=first * heads
        ),
        op=nl.copy,
        data=by_tile_ps.ap(
            pattern=[[all_tiles * width, size], [width, tiles], [count, 2], [1, count]],
            offset=own * width,
        ),
    )  # fmt: skip


def update_states(states, k_blocks_sb, u_sb, decays_sb, new_lines, first, heads):
    """Sets S to decay S + k u^T in place, and stores it to HBM,
    from line `first` of new_lines on.
    """
    c, K = k_blocks_sb.shape[0], k_blocks_sb.shape[2]
    flat = k_blocks_sb.reshape((c, c * K))  # the columns of head h begin at h K
    for i in range(len(states)):
        S_sb = states[i]
        active, m, V = S_sb.shape
        for j in range(m):
            # every m-th column from j on: those of the j-th line of each partition
            begin = i * heads * K + j
            write_ps = psum((active, V))
            add_product(write_ps, flat[:, begin : begin - j + active * m : m], u_sb)
            scale_and_add(S_sb[:, j, :], S_sb[:, j, :], decays_sb[0:active, i : i + 1], write_ps)
        # [active, m, V] -> [active, m V], a line per partition
        nisa.dma_copy(dst=new_lines[first : first + active, :], src=S_sb.reshape((active, m * V)))
        first += active


def choose_lines(K, V):
    """Chooses m, a divisor of K: K / m is at most 128, and m V numbers fill a descriptor,
    if m <= 8 can.
    """
    fewest = (K + PARTITIONS - 1) // PARTITIONS
    while K % fewest != 0:
        fewest += 1
    m = fewest
    while m < 8 and (K % m != 0 or m * V * 4 < DESCRIPTOR):
        m += 1
    return m if K % m == 0 else fewest


def has_lines(K, V):
    """Returns whether the kernel takes K and V: a K above 128 needs a divisor that spreads it."""
    m = choose_lines(K, V)
    return m <= PARTITIONS and m * V * 4 <= STATE_BYTES


def choose_group(rows, shared, bytes_per_row, parts):
    """Chooses n: as many rows as GROUP and memory allow; whole key rows, or equal parts of one."""
    n = min(GROUP, rows, max(1, STATE_BYTES // bytes_per_row) * (PARTITIONS // parts))
    if n >= shared:
        return n // shared * shared
    while shared % n != 0:
        n -= 1
    return n


def load_key_rows(x, start, count, shared):
    """Loads x [B, H, K] for value rows start .. start + count,
    `shared` of which read one row; [count, K].
    """
    K = x.shape[2]
    if shared == 1:
        return load(x.reshape((x.shape[0] * x.shape[1], K))[start : start + count, :], nl.float32)
    out_sb = sbuf((count, K))
    copies = min(shared, count)
    for i in range(0, count, copies):
        row = (start + i) // shared
        nisa.dma_copy(
            dst=out_sb[i : i + copies, :], src=x.ap(pattern=[[0, copies], [1, K]], offset=row * K)
        )
    return out_sb


def normalize(x_sb, factor, norm):
    """Sets x to factor x / sqrt(sum(x^2) + 1e-6), in place."""
    r_sb = invert_scaled_norms(x_sb, norm)
    nisa.tensor_scalar(
        dst=x_sb,
        data=x_sb,
        op0=nl.multiply,
        operand0=r_sb,
        op1=nl.multiply,
        operand1=factor * norm["scale"],
    )


def build_block_diagonal(x_sb):
    """Builds [c, c, K]: row h of x at [h, h], zeros elsewhere."""
    c, K = x_sb.shape
    out_sb = sbuf((c, c, K))
    nisa.affine_select(
        dst=out_sb, pattern=[[-1, c], [0, K]], offset=0, channel_multiplier=1,
        on_true_tile=x_sb.ap(pattern=[[K, c], [0, c], [1, K]]),  # x, repeated over the middle axis
        on_false_value=0.0, cmp_op=nl.equal,
    )  # fmt: skip
    return out_sb


def arrange_by_partition(states, k_blocks_sb, q_blocks_sb, heads, eye_sb):
    """Brings k and q of each head to its state's partitions,
    [active, m, 2, its heads] per tile of states.
    """
    c, K = k_blocks_sb.shape[0], k_blocks_sb.shape[2]
    # head h begins at h K
    flat = (k_blocks_sb.reshape((c, c * K)), q_blocks_sb.reshape((c, c * K)))
    tiles = []
    for i in range(len(states)):
        active, m = states[i].shape[0], states[i].shape[1]
        first, last = i * heads, min((i + 1) * heads, c)
        columns_ps = psum((active, m, 2, last - first))
        for j in range(m):
            begin, end = first * K + j, first * K + active * m
            for side in range(2):
                add_transposed(
                    columns_ps[:, j, side, :], flat[side][:, begin:end:m], eye_sb[0:c, first:last]
                )
        columns_sb = sbuf((active, m, 2, last - first))
        nisa.activation(dst=columns_sb, op=nl.copy, data=columns_ps)
        tiles.append(columns_sb)
    return tiles


def build_owners(tiles, heads, parts):
    """Builds [heads * parts, tiles, heads], 1 where a partition holds the state
    of a tile's i-th head.
    """
    out_sb = sbuf((heads * parts, tiles, heads))
    nisa.memset(dst=out_sb, value=1.0)
    nisa.affine_select(  # i parts <= p
        dst=out_sb, pattern=[[0, tiles], [-parts, heads]], channel_multiplier=1, offset=0,
        on_true_tile=out_sb, on_false_value=0.0, cmp_op=nl.greater_equal,
    )  # fmt: skip
    nisa.affine_select(  # p < (i + 1) parts
        dst=out_sb, pattern=[[0, tiles], [parts, heads]], channel_multiplier=-1, offset=parts - 1,
        on_true_tile=out_sb, on_false_value=0.0, cmp_op=nl.greater_equal,
    )  # fmt: skip
    return out_sb


def spread_decays(g, first, last, owners_sb):
    """Computes exp(g) of the row whose state a partition holds in each tile, [heads * parts,
    tiles].

    It is no product: should the Tensor engine round its operands, S would still decay exactly.
    """
    P, heads, c = owners_sb.shape[0], owners_sb.shape[2], last - first
    tiles = (c + heads - 1) // heads
    decay_sb = sbuf((P, tiles * heads))
    if g.shape[1] > 1:  # channels decay line by line; exp(0) may not be exactly 1
        nisa.memset(dst=decay_sb, value=1.0)
    else:
        if tiles * heads > c:
            nisa.memset(dst=decay_sb, value=0.0)
        # g [rows, 1], its c rows to each of P partitions
        nisa.dma_copy(dst=decay_sb[:, 0:c], src=g.ap(pattern=[[0, P], [1, c]], offset=first))
        nisa.activation(dst=decay_sb, op=nl.exp, data=decay_sb)
    # head i of tile t is row t heads + i
    own_sb = multiply_elements(decay_sb.reshape((P, tiles, heads)), owners_sb[:, 0:tiles, :])
    out_sb = sbuf((P, tiles))
    nisa.tensor_reduce(dst=out_sb, op=nl.add, data=own_sb, axis=2)
    return out_sb


def example(B=1, H=6, HV=0, K=128, V=256, l2norm=1, channels=0):
    """Returns (kernel, arguments) for the simulator's report; HV=0 means H,
    channels=1 a decay for each.
    """
    HV = HV or H
    q, k, v, state = normals("float32", (B, H, K), (B, H, K), (B, HV, V), (B, HV, K, V))
    g, beta = -uniforms(*(B, HV, K)[: 2 + channels]), uniforms(B, HV)
    return gated_delta_rule_step, (q, k, v, g, beta, state, K**-0.5, bool(l2norm))
