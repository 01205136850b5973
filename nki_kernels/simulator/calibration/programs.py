"""Published kernels, written again from their descriptions so that their instruction streams can be costed.

Each function computes the published operation on `parts` repetitions of the original's outermost loop, with
its tile sizes, its order of loops and its number of instructions. What the source leaves to the compiler, the
published busy times, bytes and idle times decide; each such choice is said where it is made.
"""

from typing import Any

import ml_dtypes
import numpy as np

from delta_trn.nki_kernels.simulator import nisa, nl

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


def to_sbuf(source, target, scalar=True):
    """Copies a product from PSUM to SBUF, on the Scalar or the Vector engine."""
    if scalar:
        nisa.activation(dst=target, op=nl.copy, data=source)
    else:
        nisa.tensor_copy(dst=target, src=source, engine=nisa.engine.vector)


def transpose(source, identity, target):
    """Transposes source [128, n] by a product with the identity, which holds only 0 and 1."""
    turned = tile(source.shape[1], P, buffer=nl.psum)
    nisa.nc_matmul(dst=turned, stationary=source, moving=identity, is_moving_onezero=True)
    to_sbuf(turned, target)


def sum_of_products(pairs):
    """Returns the sum over [(stationary, moving)] of stationary.T @ moving, in PSUM."""
    total = tile(pairs[0][0].shape[1], pairs[0][1].shape[1], buffer=nl.psum)
    for step, (stationary, moving) in enumerate(pairs):
        nisa.nc_matmul(dst=total, stationary=stationary, moving=moving, accumulate=step > 0)
    return total


def multiply_block(target, stationary, moving, rows):
    """Stores a block [128, 1024] of a product to `target`: the sum of stationary[:, rows].T @ moving."""
    done = tile(P, WIDE)
    for n in range(0, WIDE, N):
        pairs = [(s[:, rows], v[:, n : n + N]) for s, v in zip(stationary, moving, strict=True)]
        to_sbuf(sum_of_products(pairs), done[:, n : n + N])
    nisa.dma_copy(dst=target, src=done)


def load_rows(source, columns):
    """Loads these columns of source [n, ...] as tiles of 128 rows."""
    return [load(source[k : k + P, columns]) for k in range(0, source.shape[0], P)]


def gemm(left, right):
    """left [K, 512], right [K, 1024 parts], bfloat16: left.T @ right by 4 x 2 blocks of PSUM."""
    depth, width = right.shape
    out = output(4 * P, width, nl.bfloat16)
    for column in range(0, width, WIDE):
        blocks = [tile(P, N, buffer=nl.psum) for _ in range(8)]
        for k in range(0, depth, P):
            moving, stationary = load(right[k : k + P, column : column + WIDE]), load(left[k : k + P, :])
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
                to_sbuf(blocks[2 * m + n], done, scalar=False)
                start = column + n * N
                nisa.dma_copy(dst=out[m * P : m * P + P, start : start + N], src=done)
    return out


def transpose_matmul(left, right):
    """left [K, 1024], right [K, 1024 parts], float32: left.T @ right."""
    width = right.shape[1]
    out = output(WIDE, width)
    stationary = load_rows(left, slice(0, WIDE))
    for column in range(0, width, WIDE):
        span = slice(column, column + WIDE)
        moving = load_rows(right, span)
        for m in range(0, WIDE, P):
            multiply_block(out[m : m + P, span], stationary, moving, slice(m, m + P))
    return out


def matmul(left, right, identity):
    """left [128 parts, K], right [K, 1024], float32: left @ right, with left transposed on the Tensor engine.

    The source loads right once, but its published traffic, 23.6 MB per row of blocks, has right in every row.
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
        moving = load_rows(right, slice(0, WIDE))
        multiply_block(out[row : row + P, :], stationary, moving, slice(0, P))
    return out


def bmm(left, right, identity):
    """left [1024, 64], right [64, 1024 parts], float32: left @ right, with left transposed once."""
    width = right.shape[1]
    out = output(WIDE, width)
    eye = load(identity)
    stationary = tile(left.shape[1], WIDE)
    for row in range(0, WIDE, P):
        transpose(load(left[row : row + P, :]), eye, stationary[:, row : row + P])
    for column in range(0, width, WIDE):
        span = slice(column, column + WIDE)
        moving = load(right[:, span])
        for m in range(0, WIDE, P):
            multiply_block(out[m : m + P, span], [stationary], [moving], slice(m, m + P))
    return out


def rmsnorm_matmul(x, weight, identity):
    """x [1024 parts, 1024], weight [1024, 2048], float32: x over its rows' root mean square, times weight.

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
        for column in range(0, weight.shape[1], WIDE):
            span = slice(column, column + WIDE)
            moving = load_rows(weight, span)
            for row in range(0, WIDE, P):
                start = block + row
                multiply_block(out[start : start + P, span], turned, moving, slice(row, row + P))
    return out


def silu(x):
    """x [128, 1024 parts], float32: x / (1 + exp(-x)); exp and the sum on the Scalar engine."""
    out = output(*x.shape)
    for column in range(0, x.shape[1], WIDE):
        loaded, done = load(x[:, column : column + WIDE]), tile(P, WIDE)
        for n in range(0, WIDE, N):
            part, power, below, inverse = loaded[:, n : n + N], tile(P, N), tile(P, N), tile(P, N)
            nisa.activation(dst=power, op=nl.exp, data=part, scale=-1.0)
            nisa.tensor_scalar(dst=below, data=power, op0=nl.add, operand0=1.0, engine=nisa.engine.scalar)
            nisa.reciprocal(dst=inverse, data=below)
            nisa.tensor_tensor(dst=done[:, n : n + N], data1=part, data2=inverse, op=nl.multiply)
        nisa.dma_copy(dst=out[:, column : column + WIDE], src=done)
    return out


def adamw(weight, gradient, first, second):
    """Arrays [128, 1024 parts], float32: the new weights after one step, without momenta written back.

    Products with a number, the root, epsilon and the reciprocal are on the Scalar engine: its published busy
    time is that of nine instructions, and the Vector engine's that of six. Both halves of a tile advance
    together.
    """
    out = output(*weight.shape)
    for column in range(0, weight.shape[1], WIDE):
        w, m, v, g = (load(a[:, column : column + WIDE]) for a in (weight, first, second, gradient))
        done = tile(P, WIDE)
        halves = [slice(n, n + N) for n in range(0, WIDE, N)]
        of_v = _scaled(v, 0.999, halves)
        of_g = _scaled(g, 0.001, halves)
        square = _joined(of_g, g, nl.multiply, halves)
        variance = _joined(of_v, square, nl.add, halves)
        momentum = _joined(_scaled(m, 0.9, halves), _scaled(g, 0.1, halves), nl.add, halves)
        decayed = _joined(w, _scaled(w, 1e-5, halves), nl.subtract, halves)
        root = tile(P, WIDE)
        for span in halves:
            nisa.activation(dst=root[:, span], op=nl.sqrt, data=variance[:, span], scale=1000.0)
        update = _scaled(momentum, 0.01, halves)
        for span in halves:
            part = root[:, span]
            nisa.tensor_scalar(dst=part, data=part, op0=nl.add, operand0=1e-8, engine=nisa.engine.scalar)
        for span in halves:
            nisa.activation(dst=root[:, span], op=nl.reciprocal, data=root[:, span])
        step = _joined(update, root, nl.multiply, halves)
        for span in halves:
            nisa.tensor_tensor(dst=done[:, span], data1=decayed[:, span], data2=step[:, span], op=nl.subtract)
        nisa.dma_copy(dst=out[:, column : column + WIDE], src=done)
    return out


def _scaled(data, factor, halves):
    result = tile(P, WIDE)
    for span in halves:
        nisa.activation(dst=result[:, span], op=nl.copy, data=data[:, span], scale=factor)
    return result


def _joined(one, two, op, halves):
    result = tile(P, WIDE)
    for span in halves:
        nisa.tensor_tensor(dst=result[:, span], data1=one[:, span], data2=two[:, span], op=op)
    return result


def rope(x, cos, sin):
    """x [128, 512 parts], cos and sin [64, 512 parts], float32: halves rotated, in one set of input tiles.

    The source packs cos over sin, and each product with cos over one with sin. The inputs of an instruction
    begin at the same partition, so three tiles are copied: as many as the Scalar engine's busy time needs.
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


def mamba(delta, u, a, b, c):
    """delta, u [128 parts, T], a [128 parts, S], b, c [S, T], float32: the selective scan, states outside.

    delta and u are loaded and multiplied again for each state. A row of b or c goes to all partitions by a
    product with ones, and from PSUM to SBUF on the Scalar engine, whose published busy time needs that.
    """
    return _mamba(delta, u, a, b, c, keep=False)


def mamba_keeping(delta, u, a, b, c):
    """The same with delta kept on chip: what the published traffic of AccelOpt's best version has."""
    return _mamba(delta, u, a, b, c, keep=True)


def _mamba(delta, u, a, b, c, keep):
    channels, length = delta.shape
    rows = range(0, channels, P)
    out = output(channels, length)
    ones, sums = _begin(rows, length)
    kept = [load(delta[row : row + P, :]) for row in rows] if keep else []
    for state in range(a.shape[1]):
        for i, row in enumerate(rows):
            deltas = kept[i] if keep else load(delta[row : row + P, :])
            products = _times(deltas, load(u[row : row + P, :]))
            decay = load(a[row : row + P, state : state + 1])
            b_row, c_row = b[state : state + 1, :], c[state : state + 1, :]
            _scan(deltas, products, decay, b_row, c_row, ones, 0.0, sums[i])
    for i, row in enumerate(rows):
        nisa.dma_copy(dst=out[row : row + P, :], src=sums[i])
    return out


def mamba_tiled(delta, u, a, b, c):
    """The same with channels outside, in tiles of 512: delta u, which no state changes, is computed once."""
    channels, length = delta.shape
    rows = range(0, channels, P)
    out = output(channels, length)
    ones, sums = _begin(rows, length)
    for i, row in enumerate(rows):
        deltas = load(delta[row : row + P, :])
        products = _times(deltas, load(u[row : row + P, :]))
        for state in range(a.shape[1]):
            decay = load(a[row : row + P, state : state + 1])
            carry = 0.0
            for n in range(0, length, N):
                span = slice(n, n + N)
                b_row, c_row = b[state : state + 1, span], c[state : state + 1, span]
                total = sums[i][:, span]
                scan = _scan(deltas[:, span], products[:, span], decay, b_row, c_row, ones, carry, total)
                if n + N < length:
                    carry = tile(P, 1)
                    nisa.tensor_copy(dst=carry, src=scan[:, N - 1 : N], engine=nisa.engine.vector)
        nisa.dma_copy(dst=out[row : row + P, :], src=sums[i])
    return out


def _begin(rows, length):
    """Returns ones [1, 128], and a sum of zeros for each tile of channels."""
    ones, sums = tile(1, P), [tile(P, length) for _ in rows]
    nisa.memset(dst=ones, value=1.0)
    for total in sums:
        nisa.memset(dst=total, value=0.0)
    return ones, sums


def _times(one, two):
    products = tile(*one.shape)
    nisa.tensor_tensor(dst=products, data1=one, data2=two, op=nl.multiply)
    return products


def _scan(deltas, products, decay, b, c, ones, carry, total):
    """Adds one state's part of the output to total, and returns the state's values over time."""
    shape = deltas.shape
    powers, inputs, scan, result = (tile(*shape) for _ in range(4))
    nisa.activation(dst=powers, op=nl.exp, data=deltas, scale=decay)
    nisa.tensor_tensor(dst=inputs, data1=products, data2=_to_all(b, ones), op=nl.multiply)
    nisa.tensor_tensor_scan(dst=scan, data0=powers, data1=inputs, initial=carry, op0=nl.multiply, op1=nl.add)
    nisa.tensor_tensor(dst=result, data1=scan, data2=_to_all(c, ones), op=nl.multiply)
    nisa.tensor_tensor(dst=total, data1=total, data2=result, op=nl.add)
    return scan


def _to_all(row, ones):
    """Loads a row [1, n] and returns it on all partitions, in SBUF."""
    loaded, spread = load(row), tile(P, row.shape[1])
    for n in range(0, row.shape[1], N):
        size = min(N, row.shape[1] - n)
        product = tile(P, size, buffer=nl.psum)
        nisa.nc_matmul(
            dst=product, stationary=ones, moving=loaded[:, n : n + size], is_stationary_onezero=True
        )
        to_sbuf(product, spread[:, n : n + size])
    return spread


def arguments(program, parts, **sizes):
    """Returns seeded arguments of a program for `parts` repetitions of its outermost loop."""
    rng = np.random.default_rng(0)

    def array(*shape):
        return rng.random(shape, np.float32) + np.float32(0.5)

    eye, wide = np.eye(P, dtype=np.float32), WIDE * parts
    K, T, states = sizes.get("K", 0), sizes.get("T", 0), 16
    narrow, turns = parts * N, 4 * parts * N
    shapes = {
        gemm: ((K, 4 * P), (K, wide)), transpose_matmul: ((K, WIDE), (K, wide)),
        matmul: ((P * parts, K), (K, WIDE)), bmm: ((WIDE, K), (K, wide)),
        rmsnorm_matmul: ((wide, WIDE), (WIDE, 2 * WIDE)), silu: ((P, wide),), adamw: ((P, wide),) * 4,
        rope: ((P, narrow), (P // 2, narrow), (P // 2, narrow)),
        rope_wide: ((P, turns), (P // 2, turns), (P // 2, turns)),
    }  # fmt: skip
    of_scan = ((P * parts, T), (P * parts, T), (P * parts, states), (states, T), (states, T))
    given: list[Any] = [array(*shape) for shape in shapes.get(program, of_scan)]
    if program is gemm:
        given = [x.astype(ml_dtypes.bfloat16) for x in given]
    if program not in shapes:
        given[2] *= -1
    return (*given, eye) if program in (matmul, bmm, rmsnorm_matmul) else tuple(given)
