"""Computes the cross-entropy of a linear readout and its gradients; the logits never leave the
chip.

    z = x W^T     l = logsumexp(z) of each row     p = exp(z - l)     loss = l - z[goal]

    dz = p - onehot(goal), 0 in rows that do not count     dx = dz W     dW = dz^T x

Layout: x [N, d], also as x_t [d, N]; W [V, d], also as w_t [d, V]; goal [N, 1] float32, negative in
rows that do not count; l [N, 1]. The caller has z[goal], and adds the losses.

Up to 1,024 tokens are on chip at once. A block of 512 words (256 where d > 512) is loaded once for
these in each of two passes: the first finds l, from the largest logit and the sum of each block;
the second computes the logits again, which costs less than moving them. dW of a block adds up in
PSUM over 1,024 tokens, and then in HBM over all; dx adds up in SBUF. dz is rounded to the dtype of
x, which is that of the operation's products.
"""

from delta_trn.nki_kernels.language import nisa, nki, nl
from delta_trn.nki_kernels.plan import BANK, PARTITIONS, split
from delta_trn.nki_kernels.tiles import (
    add,
    add_product,
    add_transposed,
    build_identity,
    copy_blocks,
    copy_scaled,
    load,
    multiply,
    normals,
    psum,
    sbuf,
    subtract,
    uniforms,
)

MOST_TOKENS = 1024
MOST_D = 2 * BANK  # dW of a block fills four banks of PSUM
NOTHING = -1e30  # added to a logit, it makes the probability 0


@nki.jit
def cross_entropy_fwd(x_t, w_t):
    """Computes l [N, 1], float32."""
    check(x_t)
    lse = nl.ndarray((x_t.shape[1], 1), dtype=nl.float32, buffer=nl.shared_hbm)
    for span in split(x_t.shape[1], MOST_TOKENS):
        first, stop = span
        rows, x_t_sb = split(stop - first, PARTITIONS), load_tiles(x_t, (0, x_t.shape[0]), span)
        store_logsumexp(lse, compute_logsumexp(x_t_sb, w_t, rows), first, rows)
    return lse


@nki.jit
def cross_entropy_bwd(x_t, x, w_t, w, goal):
    """Computes (l, dx, dW): l [N, 1] and dW float32, dx in the dtype of x.

    Notes:
        The products of a tile's logits are issued before those that use the gradient of the tile
        before it, so that the Tensor engine does not wait for exp and the one-hot.

    Pseudocode:
        for 1,024 tokens:
            l                                               the first pass
            for block of words, for tile of tokens:
                LOGITS        z;  p = exp(z - l);  dz
                GRADIENTS     dz^T;  dW += dz^T x;  dx += dz W
    """
    check(x_t)
    d, N = x_t.shape
    V = w.shape[0]
    lse = nl.ndarray((N, 1), dtype=nl.float32, buffer=nl.shared_hbm)
    dx = nl.ndarray((N, d), dtype=x.dtype, buffer=nl.shared_hbm)
    dw = nl.ndarray((V, d), dtype=nl.float32, buffer=nl.shared_hbm)
    identity_sb = build_identity(PARTITIONS, x.dtype)
    places_sb = sbuf((PARTITIONS, BANK))
    nisa.iota(dst=places_sb, pattern=[[1, BANK]], offset=0, channel_multiplier=0)
    for span in split(N, MOST_TOKENS):
        differentiate_tokens(x_t, x, w_t, w, goal, lse, dx, dw, span, identity_sb, places_sb)
    return lse, dx, dw


def differentiate_tokens(x_t, x, w_t, w, goal, lse, dx, dw, span, identity_sb, places_sb):
    """Computes l and dx of the tokens of `span`, and adds their part of dW."""
    d, V, first = x_t.shape[0], w.shape[0], span[0]
    rows, blocks, columns = split(span[1] - first, PARTITIONS), cut_words(V, d), split(d, BANK)
    x_t_sb = load_tiles(x_t, (0, d), span)
    lows = compute_logsumexp(x_t_sb, w_t, rows)
    store_logsumexp(lse, lows, first, rows)
    x_sb, goals, dx_sb = [], [], []
    for i in range(len(rows)):
        start, stop = rows[i]
        x_sb.append(load(x[first + start : first + stop, :], x.dtype))
        goals.append(load(goal[first + start : first + stop, :], nl.float32))
        dx_sb.append(sbuf((stop - start, d)))
        silence(lows[i], goals[i])
    ahead_t, ahead = load_tiles(w_t, (0, d), blocks[0]), load_tiles(w, blocks[0], (0, d))
    w_t_sb, w_sb, dw_ps, dz_sb = ahead_t, ahead, [], identity_sb
    for step in range(len(blocks) * len(rows) + 1):
        b, i = step // len(rows), step % len(rows)
        before_sb, dz_before = w_sb, dz_sb
        if b < len(blocks):
            if i == 0:
                w_t_sb, w_sb = ahead_t, ahead
                if b + 1 < len(blocks):
                    ahead_t = load_tiles(w_t, (0, d), blocks[b + 1])
                    ahead = load_tiles(w, blocks[b + 1], (0, d))
            dz_sb = compute_dlogits(
                x_t_sb, w_t_sb, rows[i], blocks[b], lows[i], goals[i], places_sb, x.dtype
            )
        if step > 0:  # GRADIENTS of the step before
            c, j = (step - 1) // len(rows), (step - 1) % len(rows)
            words = blocks[c][1] - blocks[c][0]
            if j == 0:
                dw_ps = []
            dz_t_sb = transpose_dlogits(dz_before, identity_sb)
            add_dweight(dw_ps, dz_before, x_sb[j], columns)
            add_dx(dx_sb[j], dz_t_sb, before_sb, columns, c == 0)
            if j == len(rows) - 1:
                store_dweight(dw, dw_ps, blocks[c][0], words, columns, first == 0)
    for i in range(len(rows)):
        start, stop = rows[i]
        out_sb = sbuf((stop - start, d), x.dtype)
        copy_scaled(out_sb, dx_sb[i])
        nisa.dma_copy(dst=dx[first + start : first + stop, :], src=out_sb)


def check(x_t):
    """Refuses what does not fit PSUM."""
    d = x_t.shape[0]
    assert d <= MOST_D, f"d={d} exceeds {MOST_D}: dW of a block is summed in four banks of PSUM"


def cut_words(V, d):
    """Cuts the vocabulary into blocks whose dW fills at most four banks of PSUM:
    [(start, stop)].
    """
    return split(V, BANK if d <= BANK else BANK // 2)


def load_tiles(src, rows, columns):
    """Loads rows and columns, (start, stop) each, of src in HBM as tiles of up to 128 rows."""
    tiles = []
    for span in split(rows[1] - rows[0], PARTITIONS):
        low, high = span
        tiles.append(load(src[rows[0] + low : rows[0] + high, columns[0] : columns[1]], src.dtype))
    return tiles


def multiply_parts(x_t_sb, w_t_sb, span):
    """Computes the logits [tokens, words] of the tokens of `span` in PSUM."""
    start, stop = span
    z_ps = psum((stop - start, w_t_sb[0].shape[1]))
    for k in range(len(x_t_sb)):
        part_sb = x_t_sb[k]
        add_product(z_ps, part_sb[:, start:stop], w_t_sb[k], k > 0)
    return z_ps


def compute_logsumexp(x_t_sb, w_t, rows):
    """Computes -l for each tile of tokens: a list of [tokens, 1]."""
    blocks = cut_words(w_t.shape[1], w_t.shape[0])
    count = len(blocks)
    lows, sums = [], []  # of each block: minus the largest logit, and the sum of exp(z - largest)
    for i in range(len(rows)):
        start, stop = rows[i]
        lows.append(sbuf((stop - start, count)))
        sums.append(sbuf((stop - start, count)))
    ahead = load_tiles(w_t, (0, w_t.shape[0]), blocks[0])
    for b in range(count):
        w_t_sb = ahead
        if b + 1 < count:
            ahead = load_tiles(w_t, (0, w_t.shape[0]), blocks[b + 1])
        for i in range(len(rows)):
            low_sb, sum_sb = lows[i], sums[i]
            z_ps = multiply_parts(x_t_sb, w_t_sb, rows[i])
            nisa.tensor_reduce(
                dst=low_sb[:, b : b + 1], op=nl.maximum, data=z_ps, axis=1, negate=True
            )
            passed_sb = sbuf(z_ps.shape)
            nisa.activation(
                dst=passed_sb, op=nl.exp, data=z_ps, bias=low_sb[:, b : b + 1], reduce_op=nl.add,
                reduce_res=sum_sb[:, b : b + 1], reduce_cmd=nisa.reduce_cmd.reset_reduce,
            )  # fmt: skip
    results = []
    for i in range(len(rows)):
        results.append(join_blocks(lows[i], sums[i]))
    return results


def join_blocks(low_sb, sum_sb):
    """Computes -l [tokens, 1] from minus the largest logit and the sum of each block."""
    P, count = low_sb.shape
    least_sb, share_sb, total_sb, out_sb = (
        sbuf((P, 1)),
        sbuf((P, count)),
        sbuf((P, 1)),
        sbuf((P, 1)),
    )
    nisa.tensor_scalar(dst=share_sb, data=low_sb, op0=nl.multiply, operand0=-1.0)
    nisa.tensor_reduce(dst=least_sb, op=nl.maximum, data=share_sb, axis=1, negate=True)
    nisa.activation(dst=share_sb, op=nl.exp, data=share_sb, bias=least_sb)
    multiply(share_sb, share_sb, sum_sb)
    nisa.tensor_reduce(dst=total_sb, op=nl.add, data=share_sb, axis=1)
    nisa.activation(dst=out_sb, op=nl.log, data=total_sb)
    subtract(out_sb, least_sb, out_sb)
    return out_sb


def store_logsumexp(lse, lows, first, rows):
    """Stores l of tiles of tokens, whose rows count from `first` on, in [N, 1]."""
    for i in range(len(rows)):
        start, stop = rows[i]
        out_sb = sbuf((stop - start, 1))
        nisa.tensor_scalar(dst=out_sb, data=lows[i], op0=nl.multiply, operand0=-1.0)
        nisa.dma_copy(dst=lse[first + start : first + stop, :], src=out_sb)


def silence(low_sb, goal_sb):
    """Makes the probabilities 0 in rows that do not count."""
    mask_sb = sbuf(goal_sb.shape)
    nisa.tensor_scalar(
        dst=mask_sb, data=goal_sb, op0=nl.less, operand0=0.0, op1=nl.multiply, operand1=NOTHING
    )
    add(low_sb, low_sb, mask_sb)


def compute_dlogits(x_t_sb, w_t_sb, span, block, low_sb, goal_sb, places_sb, dtype):
    """Computes dz = exp(z - l) - onehot(goal) of a tile, [tokens, words] in `dtype`."""
    start, stop = span
    first, last = block
    P, words = stop - start, last - first
    z_ps = multiply_parts(x_t_sb, w_t_sb, span)
    p_sb, dz_sb, place_sb = sbuf((P, words)), sbuf((P, words), dtype), sbuf((P, 1))
    nisa.activation(dst=p_sb, op=nl.exp, data=z_ps, bias=low_sb)
    nisa.tensor_scalar(dst=place_sb, data=goal_sb, op0=nl.subtract, operand0=float(first))
    onehot_sb = sbuf((P, words), nl.bfloat16)
    nisa.tensor_scalar(dst=onehot_sb, data=places_sb[0:P, 0:words], op0=nl.equal, operand0=place_sb)
    subtract(dz_sb, p_sb, onehot_sb)
    return dz_sb


def transpose_dlogits(dz_sb, identity_sb):
    """Transposes dz [tokens, words]: [128, parts, tokens], a part per 128 words."""
    P, words = dz_sb.shape
    parts = split(words, PARTITIONS)
    out_ps, out_sb = (
        psum((PARTITIONS, len(parts), P)),
        sbuf((PARTITIONS, len(parts), P), dz_sb.dtype),
    )
    for j in range(len(parts)):
        low, high = parts[j]
        add_transposed(out_ps[0 : high - low, j, :], dz_sb[:, low:high], identity_sb[0:P, 0:P])
    copy_blocks(out_sb, 0, P, out_ps, words)
    return out_sb


def add_dweight(dw_ps, dz_sb, x_sb, columns):
    """Adds dz^T x to dW of a block, in PSUM: a tile for every 128 words and 512 columns of d."""
    parts = split(dz_sb.shape[1], PARTITIONS)
    fresh = len(dw_ps) == 0
    for j in range(len(parts)):
        low, high = parts[j]
        for n in range(len(columns)):
            left, right = columns[n]
            if fresh:
                dw_ps.append(psum((high - low, right - left)))
            dst = dw_ps[j * len(columns) + n]
            add_product(dst, dz_sb[:, low:high], x_sb[:, left:right], not fresh)


def add_dx(dx_sb, dz_t_sb, w_sb, columns, first):
    """Adds dz W of a block to dx [tokens, d], or sets it where the block is the first."""
    for n in range(len(columns)):
        left, right = columns[n]
        sum_ps = psum((dx_sb.shape[0], right - left))
        for j in range(len(w_sb)):
            part_sb = w_sb[j]
            dz_t = dz_t_sb[0 : part_sb.shape[0], j, :]
            add_product(sum_ps, dz_t, part_sb[:, left:right], j > 0)
        if first:
            nisa.tensor_copy(dst=dx_sb[:, left:right], src=sum_ps)
        else:
            add(dx_sb[:, left:right], sum_ps, dx_sb[:, left:right])


def store_dweight(dw, dw_ps, start, words, columns, first):
    """Stores dW of a block, or adds it
    to what earlier tokens left there unless they are the first.
    """
    parts = split(words, PARTITIONS)
    for j in range(len(parts)):
        low, high = parts[j]
        out_sb, before_sb = sbuf((high - low, dw.shape[1])), dw_ps[0]
        if not first:
            before_sb = load(dw[start + low : start + high, :], nl.float32)
        for n in range(len(columns)):
            left, right = columns[n]
            sum_ps = dw_ps[j * len(columns) + n]
            if first:
                copy_scaled(out_sb[:, left:right], sum_ps)
            else:
                add(out_sb[:, left:right], sum_ps, before_sb[:, left:right])
        nisa.dma_copy(dst=dw[start + low : start + high, :], src=out_sb)


def example(N=1024, d=512, V=2048, dtype="bfloat16", backward=1):
    """Returns (kernel, arguments) for the simulator's report;
    backward=0 for the logsumexp alone.
    """
    x, w = normals(dtype, (N, d), (V, d))
    x_t, w_t = x.T.copy(), w.T.copy()
    if not backward:
        return cross_entropy_fwd, (x_t, w_t)
    goal = (uniforms(N, 1) * V).astype("int64").astype("float32")
    return cross_entropy_bwd, (x_t, x, w_t, w, goal)
