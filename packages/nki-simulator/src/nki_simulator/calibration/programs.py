"""Published kernels, written again from their descriptions so that their instruction streams can be
costed.

Each function computes the published operation on `parts` repetitions of the original's outermost
loop, with its tile sizes, its order of loops and its number of instructions. What the source leaves
to the compiler, the published busy times, bytes and idle times decide; each such choice is said
where it is made.
"""

import ml_dtypes
import numpy as np

from nki_simulator import nisa, nl

P = 128  # partitions
N = 512  # columns of a product
WIDE = 1024  # columns of a load


def tile(rows, columns, dtype=nl.float32, buffer=nl.sbuf):
    return nl.ndarray((rows, columns), dtype=dtype, buffer=buffer)


def output(rows, columns, dtype=nl.float32):
    return nl.ndarray((rows, columns), dtype=dtype, buffer=nl.shared_hbm)


def load(source):
    """Loads a slice of HBM into a new tile."""
    loaded = tile(*source.shape, dtype=source.dtype)
    nisa.dma_copy(dst=loaded, src=source)
    return loaded


def to_sbuf(source, target):
    """Copies a product from PSUM to SBUF on the Scalar engine."""
    nisa.activation(dst=target, op=nl.copy, data=source)


def transpose(source, identity, target):
    """Transposes source [128, n] by a product with the identity, which holds only 0 and 1."""
    turned = tile(source.shape[1], P, buffer=nl.psum)
    nisa.nc_matmul(dst=turned, stationary=source, moving=identity, is_moving_onezero=True)
    to_sbuf(turned, target)


def load_rows(source, columns):
    """Loads these columns of source [n, ...] as tiles of 128 rows or, of the last, fewer."""
    rows = source.shape[0]
    return [load(source[k : min(k + P, rows), columns]) for k in range(0, rows, P)]


def multiply(target, stationary, right):
    """Stores stationary.T @ right to `target` by blocks [128, 1024];
    the tiles of stationary are in SBUF.
    """
    for column in range(0, right.shape[1], WIDE):
        moving = load_rows(right, slice(column, column + WIDE))
        for row in range(0, target.shape[0], P):
            done = tile(P, WIDE)
            for n in range(0, WIDE, N):
                total = tile(P, N, buffer=nl.psum)
                for step, (s, v) in enumerate(zip(stationary, moving, strict=True)):
                    nisa.nc_matmul(
                        dst=total,
                        stationary=s[:, row : row + P],
                        moving=v[:, n : n + N],
                        accumulate=step > 0,
                    )
                to_sbuf(total, done[:, n : n + N])
            nisa.dma_copy(dst=target[row : row + P, column : column + WIDE], src=done)


def gemm(left, right):
    """left [K, 512], right [K, 1024 parts], bfloat16: left.T @ right by 4 x 2 blocks of PSUM."""
    depth, width = right.shape
    out = output(4 * P, width, nl.bfloat16)
    for column in range(0, width, WIDE):
        blocks = [tile(P, N, buffer=nl.psum) for _ in range(8)]
        for k in range(0, depth, P):
            moving, stationary = (
                load(right[k : k + P, column : column + WIDE]),
                load(left[k : k + P, :]),
            )
            for m in range(4):
                for n in range(2):
                    nisa.nc_matmul(
                        dst=blocks[2 * m + n],
                        stationary=stationary[:, m * P : m * P + P],
                        moving=moving[:, n * N : n * N + N],
                        accumulate=k > 0,
                    )
        for m in range(4):
            for n in range(2):
                done = tile(P, N, nl.bfloat16)
                nisa.tensor_copy(dst=done, src=blocks[2 * m + n], engine=nisa.engine.vector)
                start = column + n * N
                nisa.dma_copy(dst=out[m * P : m * P + P, start : start + N], src=done)
    return out


def transpose_matmul(left, right):
    """left [K, 1024], right [K, 1024 parts], float32: left.T @ right."""
    out = output(WIDE, right.shape[1])
    multiply(out, load_rows(left, slice(0, WIDE)), right)
    return out


def matmul(left, right, identity):
    """left [128 parts, K], right [K, 1024], float32: left @ right, with left transposed on the
    Tensor engine.

    The source loads right once, but its published traffic, 23.6 MB per row of blocks, has right in
    every row.
    """
    rows, depth = left.shape
    out = output(rows, WIDE)
    eye = load(identity)
    for row in range(0, rows, P):
        stationary = []
        for k in range(0, depth, WIDE):
            loaded = load(left[row : row + P, k : k + WIDE])
            for n in range(0, WIDE, P):
                turned = tile(P, P)
                transpose(loaded[:, n : n + P], eye, turned)
                stationary.append(turned)
        multiply(out[row : row + P, :], stationary, right)
    return out


def bmm(left, right, identity):
    """left [1024, 64], right [64, 1024 parts], float32: left @ right, with left transposed once."""
    out = output(WIDE, right.shape[1])
    eye = load(identity)
    stationary = tile(left.shape[1], WIDE)
    for row in range(0, WIDE, P):
        transpose(load(left[row : row + P, :]), eye, stationary[:, row : row + P])
    multiply(out, [stationary], right)
    return out


def rmsnorm_matmul(x, weight, identity):
    """x [1024 parts, 1024], weight [1024, 2048], float32: x over its rows' root mean square, times
    weight.

    The mean's factor and the scaling are on the Scalar engine, the sum is on the Vector engine.
    """
    rows, depth = x.shape
    out = output(rows, weight.shape[1])
    eye = load(identity)
    for block in range(0, rows, WIDE):
        turned = [tile(P, WIDE) for _ in range(0, depth, P)]
        for row in range(0, WIDE, P):
            source = x[block + row : block + row + P, :]
            loaded, again = load(source), load(source)
            sums, total, scale = tile(P, 2), tile(P, 1), tile(P, 1)
            for half in range(2):
                part, square, share = loaded[:, half * N : half * N + N], tile(P, N), tile(P, N)
                nisa.activation(dst=square, op=nl.square, data=part)
                nisa.activation(dst=share, op=nl.copy, data=square, scale=1 / depth)
                nisa.tensor_reduce(dst=sums[:, half : half + 1], op=nl.add, data=share, axis=1)
            nisa.tensor_reduce(dst=total, op=nl.add, data=sums, axis=1)
            nisa.activation(dst=scale, op=nl.rsqrt, data=total)
            for half in range(2):
                normal = tile(P, N)
                part = again[:, half * N : half * N + N]
                nisa.activation(dst=normal, op=nl.copy, data=part, scale=scale)
                for k in range(4):
                    target = turned[4 * half + k][:, row : row + P]
                    transpose(normal[:, k * P : k * P + P], eye, target)
        multiply(out[block : block + WIDE, :], turned, weight)
    return out


def silu(x):
    """x [128, 1024 parts], float32: x / (1 + exp(-x)); exp and the sum on the Scalar engine."""
    out = output(*x.shape)
    for column in range(0, x.shape[1], WIDE):
        loaded, done = load(x[:, column : column + WIDE]), tile(P, WIDE)
        for n in range(0, WIDE, N):
            part, power, below, inverse = loaded[:, n : n + N], tile(P, N), tile(P, N), tile(P, N)
            nisa.activation(dst=power, op=nl.exp, data=part, scale=-1.0)
            nisa.tensor_scalar(
                dst=below, data=power, op0=nl.add, operand0=1.0, engine=nisa.engine.scalar
            )
            nisa.reciprocal(dst=inverse, data=below)
            nisa.tensor_tensor(dst=done[:, n : n + N], data1=part, data2=inverse, op=nl.multiply)
        nisa.dma_copy(dst=out[:, column : column + WIDE], src=done)
    return out


def adamw(weight, gradient, first, second):
    """Arrays [128, 1024 parts], float32: the new weights after one step, without momenta written
    back.

    Products with a number, the root, epsilon and the reciprocal are on the Scalar engine: its
    published busy time is that of nine instructions, and the Vector engine's that of six. Both
    halves of a tile advance together.
    """
    out = output(*weight.shape)
    for column in range(0, weight.shape[1], WIDE):
        w, m, v, g = (load(a[:, column : column + WIDE]) for a in (weight, first, second, gradient))
        variance = _join(_scale(v, 0.999), _join(_scale(g, 0.001), g, nl.multiply), nl.add)
        momentum = _join(_scale(m, 0.9), _scale(g, 0.1), nl.add)
        decayed = _join(w, _scale(w, 1e-5), nl.subtract)
        root = _in_halves(nisa.activation, {"data": variance}, op=nl.sqrt, scale=1000.0)
        update = _scale(momentum, 0.01)
        below = _in_halves(
            nisa.tensor_scalar, {"data": root}, op0=nl.add, operand0=1e-8, engine=nisa.engine.scalar
        )
        inverse = _in_halves(nisa.activation, {"data": below}, op=nl.reciprocal)
        done = _join(decayed, _join(update, inverse, nl.multiply), nl.subtract)
        nisa.dma_copy(dst=out[:, column : column + WIDE], src=done)
    return out


def _in_halves(instruction, operands, **options):
    """Issues an instruction for each half of its operands, into a new tile, which it returns."""
    result = tile(P, WIDE)
    for n in range(0, WIDE, N):
        halves = {name: data[:, n : n + N] for name, data in operands.items()}
        instruction(dst=result[:, n : n + N], **halves, **options)
    return result


def _scale(data, factor):
    return _in_halves(nisa.activation, {"data": data}, op=nl.copy, scale=factor)


def _join(one, two, op):
    return _in_halves(nisa.tensor_tensor, {"data1": one, "data2": two}, op=op)


def rope(x, cos, sin):
    """x [128, 512 parts], cos and sin [64, 512 parts], float32: halves rotated, in one set of input
    tiles.

    The source packs cos over sin, and each product with cos over one with sin. The inputs of an
    instruction begin at the same partition, so three tiles are copied: as many as the Scalar
    engine's busy time needs.
    """
    half, width = cos.shape
    out = output(*x.shape)
    loaded, packed, odd, low_sin = tile(P, N), tile(P, N), tile(half, N), tile(half, N)
    upper, lower = slice(0, half), slice(half, P)
    for column in range(0, width, N):
        span = slice(column, column + N)
        nisa.dma_copy(dst=loaded, src=x[:, span])
        nisa.dma_copy(dst=packed[upper], src=cos[:, span])
        nisa.dma_copy(dst=packed[lower], src=sin[:, span])
        nisa.tensor_copy(dst=odd, src=loaded[lower], engine=nisa.engine.vector)
        to_sbuf(packed[lower], low_sin)
        of_even, of_odd, done = (tile(P, N) for _ in range(3))
        low_even, low_odd = tile(half, N), tile(half, N)
        for result, one, two in (
            (of_even[upper], loaded[upper], packed[upper]),
            (of_odd[upper], odd, packed[upper]),
            (of_even[lower], loaded[upper], low_sin),
            (of_odd[lower], odd, low_sin),
        ):
            nisa.tensor_tensor(dst=result, data1=one, data2=two, op=nl.multiply)
        to_sbuf(of_even[lower], low_even)
        to_sbuf(of_odd[lower], low_odd)
        nisa.tensor_tensor(dst=done[upper], data1=of_even[upper], data2=low_odd, op=nl.subtract)
        nisa.tensor_tensor(dst=done[lower], data1=of_odd[upper], data2=low_even, op=nl.add)
        nisa.dma_copy(dst=out[:, span], src=done)
    return out


def rope_wide(x, cos, sin):
    """The same in tiles of 2048 columns, with each half loaded and stored by itself."""
    half, width = cos.shape
    out = output(*x.shape)
    c, s, odd, even = (tile(half, 4 * N) for _ in range(4))
    for column in range(0, width, 4 * N):
        span = slice(column, column + 4 * N)
        nisa.dma_copy(dst=even, src=x[0:half, span])
        nisa.dma_copy(dst=c, src=cos[:, span])
        nisa.dma_copy(dst=odd, src=x[half:P, span])
        nisa.dma_copy(dst=s, src=sin[:, span])
        even_cos, odd_sin, even_sin, odd_cos, top, bottom = (tile(half, 4 * N) for _ in range(6))
        products = ((even_cos, even, c), (odd_sin, odd, s), (even_sin, even, s), (odd_cos, odd, c))
        for result, one, two in products:
            nisa.tensor_tensor(dst=result, data1=one, data2=two, op=nl.multiply)
        nisa.tensor_tensor(dst=top, data1=even_cos, data2=odd_sin, op=nl.subtract)
        nisa.tensor_tensor(dst=bottom, data1=odd_cos, data2=even_sin, op=nl.add)
        nisa.dma_copy(dst=out[0:half, span], src=top)
        nisa.dma_copy(dst=out[half:P, span], src=bottom)
    return out


def mamba(delta, u, a, b, c, keep=False):
    """delta, u [128 parts, T], a [128 parts, S], b, c [S, T], float32: the selective scan, states
    outside.

    delta and u are loaded and multiplied again for each state. With `keep`, delta stays on chip.
    """
    length = delta.shape[1]
    out, ones, sums = _begin(delta)
    kept = load_rows(delta, slice(0, length)) if keep else []
    for state in range(a.shape[1]):
        for i, total in enumerate(sums):
            row = slice(i * P, i * P + P)
            deltas = kept[i] if keep else load(delta[row, :])
            products = _multiply(deltas, load(u[row, :]))
            _add_state(total, deltas, products, a[row, :], b, c, state, ones, length)
    for i, total in enumerate(sums):
        nisa.dma_copy(dst=out[i * P : i * P + P, :], src=total)
    return out


def mamba_keeping(delta, u, a, b, c):
    """The same with delta kept on chip: what the published traffic
    of AccelOpt's best version has.
    """
    return mamba(delta, u, a, b, c, keep=True)


def mamba_tiled(delta, u, a, b, c):
    """The same with channels outside, in tiles of 512: delta u,
    which no state changes, is computed once.
    """
    out, ones, sums = _begin(delta)
    for i, total in enumerate(sums):
        row = slice(i * P, i * P + P)
        deltas = load(delta[row, :])
        products = _multiply(deltas, load(u[row, :]))
        for state in range(a.shape[1]):
            _add_state(total, deltas, products, a[row, :], b, c, state, ones, N)
        nisa.dma_copy(dst=out[row, :], src=total)
    return out


def _begin(delta):
    """Returns the output, ones [1, 128], and a sum of zeros for each tile of channels."""
    channels, length = delta.shape
    ones, sums = tile(1, P), [tile(P, length) for _ in range(0, channels, P)]
    nisa.memset(dst=ones, value=1.0)
    for total in sums:
        nisa.memset(dst=total, value=0.0)
    return output(channels, length), ones, sums


def _multiply(one, two):
    products = tile(*one.shape)
    nisa.tensor_tensor(dst=products, data1=one, data2=two, op=nl.multiply)
    return products


def _add_state(total, deltas, products, a, b, c, state, ones, size):
    """Adds one state's part of the output to total, in tiles of `size` steps,
    which hand on the state.
    """
    length, carry = total.shape[1], 0.0
    decay = load(a[:, state : state + 1])
    for n in range(0, length, size):
        span = slice(n, n + size)
        powers, scan = tile(P, size), tile(P, size)
        nisa.activation(dst=powers, op=nl.exp, data=deltas[:, span], scale=decay)
        inputs = _multiply(products[:, span], _to_all(b[state : state + 1, span], ones))
        nisa.tensor_tensor_scan(
            dst=scan, data0=powers, data1=inputs, initial=carry, op0=nl.multiply, op1=nl.add
        )
        result = _multiply(scan, _to_all(c[state : state + 1, span], ones))
        nisa.tensor_tensor(dst=total[:, span], data1=total[:, span], data2=result, op=nl.add)
        if n + size < length:
            carry = tile(P, 1)
            nisa.tensor_copy(dst=carry, src=scan[:, size - 1 : size], engine=nisa.engine.vector)


def _to_all(row, ones):
    """Loads a row [1, n] and returns it on all partitions, in SBUF.

    A product with ones spreads it. The Scalar engine copies that, as its published busy time needs.
    """
    loaded, spread = load(row), tile(P, row.shape[1])
    for n in range(0, row.shape[1], N):
        moving = loaded[:, n : min(n + N, row.shape[1])]
        product = tile(P, moving.shape[1], buffer=nl.psum)
        nisa.nc_matmul(dst=product, stationary=ones, moving=moving, is_stationary_onezero=True)
        to_sbuf(product, spread[:, n : n + moving.shape[1]])
    return spread


def arguments(program, parts, size):
    """Returns seeded arguments for `parts` repetitions of the outermost loop;
    size is K, or T of a scan.
    """
    rng = np.random.default_rng(0)

    def array(*shape):
        return rng.random(shape, np.float32) + np.float32(0.5)

    eye, wide, rows = np.eye(P, dtype=np.float32), WIDE * parts, P * parts
    if program is gemm:
        return [array(size, n).astype(ml_dtypes.bfloat16) for n in (4 * P, wide)]
    if program is transpose_matmul:
        return array(size, WIDE), array(size, wide)
    if program is matmul:
        return array(rows, size), array(size, WIDE), eye
    if program is bmm:
        return array(WIDE, size), array(size, wide), eye
    if program is rmsnorm_matmul:
        return array(wide, WIDE), array(WIDE, 2 * WIDE), eye
    if program in (silu, adamw):
        return [array(P, wide) for _ in range(1 if program is silu else 4)]
    if program in (rope, rope_wide):
        width = (N if program is rope else 4 * N) * parts
        return [array(n, width) for n in (P, P // 2, P // 2)]
    return array(rows, size), array(rows, size), -array(rows, 16), array(16, size), array(16, size)
