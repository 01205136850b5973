"""The short convolution: causal, depthwise, over time, then SiLU; forward and backward.

    z_t = sum_j w_j x_{t - W + 1 + j}     y = SiLU(z)              W taps

    dz = dy SiLU'(z)     dx_t = sum_j w_j dz_{t + W - 1 - j}     dw_j = sum_t dz_t x_{t - W + 1 + j}

Layout: x, y, dy, dx [B, T, C]; weight, dweight [C, W]; position [T], of each token in its packed sequence
(B is 1 then): tap j reads from its own sequence where position >= W - 1 - j. Before a sequence there are
zeros, or, where a call goes on with what an earlier one began, prefix [B, W - 1, C], the inputs before x.
Its gradient is dx at the times before 0.

Time is the partition axis of x in HBM, and nothing shifts along partitions. So 128 rows are transposed, which
makes a tap a slice of the free axis, and the taps transpose them back: the product of a slice [channels,
tokens] with diag(w_j) is w_j x, [tokens, channels], and they add up in PSUM, where SiLU reads them. The first
one or two taps are summed on the Scalar and Vector engines, and transposed back at half the price, so that no
engine is busy alone. Tiles of time overlap by the W - 1 rows (2 W - 2 in backward) that a convolution looks
back, so that no tile waits for another. Backward computes z again: forward leaves nothing but y.
"""

from delta_trn.nki_kernels.language import nisa, nki, nl
from delta_trn.nki_kernels.partitions import BANK, PARTITIONS, identity, loaded, row_sum, tile

MOST_W = 32
ON_VECTOR = 2  # taps of z that the Scalar and Vector engines take
ON_SCALAR = 1  # taps of dx: in backward the Vector engine has the sums of dw


@nki.jit
def short_convolution_fwd(x, weight, position, packed, prefix=None, continued=False):
    """y [B, T, C] in x's dtype. packed, continued: bool; position is read if packed, prefix (in x's dtype) if
    continued; each may be None else.
    """
    B, T, C = x.shape
    W = weight.shape[1]
    check(B, W, packed, continued)
    y = nl.ndarray((B, T, C), dtype=x.dtype, buffer=nl.shared_hbm)
    eye, wide_eye = identities(x.dtype)
    pieces = tiles_of_time(B, T, PARTITIONS - (W - 1))
    for c0 in range(0, C, BANK):
        c1 = min(c0 + BANK, C)
        taps = all_taps(weight, c0, c1, wide_eye)
        ready = []
        for i in range(len(pieces) + 1):  # one stage ahead: see backward
            if i < len(pieces):
                b, t0, t1 = pieces[i]
                seen = windows(x, prefix, continued, b, t0, t1, c0, c1, W, eye)
                keep = masks(position, packed, t0, t1, W)
                ready.append(prepared(seen_by_taps(seen, keep, t1 - t0, W), taps, ON_VECTOR))
            if i > 0:
                b, t0, t1 = pieces[i - 1]
                out = tile((t1 - t0, c1 - c0), x.dtype)
                nisa.activation(dst=out, op=nl.silu, data=summed(ready[i - 1], taps, wide_eye))
                nisa.dma_copy(dst=y[b, t0:t1, c0:c1], src=out)
    return y


@nki.jit
def short_convolution_bwd(dy, x, weight, position, packed, prefix=None, continued=False):
    """(dx [B, T, C] in x's dtype, dweight [C, W] in weight's), and if continued dprefix [B, W - 1, C].

    A tile of time passes four stages, and four tiles are on their way, each a stage behind the one before: an
    engine that runs its instructions in order then waits for none of the others.
    """
    B, T, C = x.shape
    W = weight.shape[1]
    check(B, W, packed, continued)
    dx = nl.ndarray((B, T, C), dtype=x.dtype, buffer=nl.shared_hbm)
    dprefix = dx
    if continued:
        dprefix = nl.ndarray((B, W - 1, C), dtype=x.dtype, buffer=nl.shared_hbm)
    dweight = nl.ndarray((C, W), dtype=weight.dtype, buffer=nl.shared_hbm)
    eye, wide_eye = identities(x.dtype)
    pieces = tiles_of_time(B, T, PARTITIONS - 2 * (W - 1))
    n = len(pieces)
    for c0 in range(0, C, BANK):
        c1 = min(c0 + BANK, C)
        taps = all_taps(weight, c0, c1, wide_eye)
        sums = zero_sums(c1 - c0, W)
        seen, keep, ready_z, dz, by_tap, ready_dx = [], [], [], [], [], []
        for i in range(n + 3):
            if i < n:
                b, t0, t1 = pieces[i]
                t2 = min(t1 + W - 1, T)  # dz of tokens behind t1 reaches back to dx
                seen.append(windows(x, prefix, continued, b, t0, t2, c0, c1, W, eye))
                keep.append(masks(position, packed, t0, t2, W))
                ready_z.append(prepared(seen_by_taps(seen[i], keep[i], t2 - t0, W), taps, ON_VECTOR))
            if i >= 1 and i <= n:
                b, t0, t1 = pieces[i - 1]
                t2 = min(t1 + W - 1, T)
                slope = tile((t2 - t0, c1 - c0), nl.float32)
                nisa.activation(dst=slope, op=nl.silu_dx, data=summed(ready_z[i - 1], taps, wide_eye))
                given = loaded(dy[b, t0:t2, c0:c1], dy.dtype)
                nisa.tensor_tensor(dst=slope, data1=slope, data2=given, op=nl.multiply)
                dz.append(slope)
            if i >= 2 and i <= n + 1:
                b, t0, t1 = pieces[i - 2]
                ahead = before(t0, W, continued)
                by_tap.append(turned(dz[i - 2], keep[i - 2], ahead, t1 - t0, W, wide_eye))
                ready_dx.append(prepared(given_by_taps(by_tap[i - 2], ahead + t1 - t0), taps, ON_SCALAR))
            if i >= 3:
                b, t0, t1 = pieces[i - 3]
                ahead = before(t0, W, continued)
                out = tile((ahead + t1 - t0, c1 - c0), x.dtype)
                nisa.activation(dst=out, op=nl.copy, data=summed(ready_dx[i - 3], taps, wide_eye))
                nisa.dma_copy(dst=dx[b, t0:t1, c0:c1], src=out[ahead : ahead + t1 - t0, :])
                if ahead > 0:
                    nisa.dma_copy(dst=dprefix[b, :, c0:c1], src=out[0:ahead, :])
                for part in range(len(sums)):
                    add_products(sums[part], by_tap[i - 3][part], seen[i - 3][part], ahead, t1 - t0)
        spans = channels(c1 - c0)
        for part in range(len(spans)):
            a0, a1 = spans[part]
            rounded = tile((a1 - a0, W), weight.dtype)
            nisa.tensor_copy(dst=rounded, src=sums[part])
            nisa.dma_copy(dst=dweight[c0 + a0 : c0 + a1, :], src=rounded)
    if continued:
        return dx, dweight, dprefix
    return dx, dweight


def tiles_of_time(B, T, size):
    """[(row, first token, end)]."""
    found = []
    for b in range(B):
        for t0 in range(0, T, size):
            found.append((b, t0, min(t0 + size, T)))
    return found


def zero_sums(width, W):
    """For every 128 channels: [channels, W] of zeros."""
    found = []
    for a0, a1 in channels(width):
        total = tile((a1 - a0, W), nl.float32)
        nisa.memset(dst=total, value=0.0)
        found.append(total)
    return found


def before(t0, W, continued):
    """How many rows of a tile's dx are the prefix's: the first tile's W - 1."""
    return W - 1 if continued and t0 == 0 else 0


def check(B, W, packed, continued):
    """Refuse what the tiles of time do not hold."""
    assert W <= MOST_W, f"W={W} exceeds {MOST_W} taps: 2 W - 2 rows of a tile of 128 are its neighbors'"
    assert W > 1 or not continued, "W=1 looks back at nothing: leave the prefix out"
    assert not (packed and continued), "packed sequences begin with zeros: leave the prefix out"
    assert B == 1 or not packed, f"B={B} rows cannot be packed: position is that of one row"


def identities(dtype):
    """[128, 128] in dtype, and in float32."""
    eye = identity(PARTITIONS, dtype)
    if dtype == nl.float32:
        return eye, eye
    return eye, identity(PARTITIONS, nl.float32)


def channels(width):
    """[(start, end)] of at most 128 channels each."""
    found = []
    for start in range(0, width, PARTITIONS):
        found.append((start, min(start + PARTITIONS, width)))
    return found


def all_taps(weight, c0, c1, eye):
    """For every 128 channels: w [channels, W] float32, and diag(w_j) [channels, W, channels]."""
    W = weight.shape[1]
    found = []
    for a0, a1 in channels(c1 - c0):
        w = loaded(weight[c0 + a0 : c0 + a1, :], nl.float32)
        diagonal = tile((a1 - a0, W, a1 - a0), nl.float32)
        for j in range(W):
            nisa.tensor_scalar(
                dst=diagonal[:, j, :], data=eye[0 : a1 - a0, 0 : a1 - a0], op0=nl.multiply,
                operand0=w[:, j : j + 1],
            )  # fmt: skip
        found.append((w, diagonal))
    return found


def masks(position, packed, t0, t1, W):
    """[128, t1 - t0] of ones and zeros for the taps 0 to W - 2: whether they stay in the token's sequence."""
    found = []
    if not packed:
        return found
    count = t1 - t0
    where = tile((PARTITIONS, count), nl.float32)
    nisa.dma_copy(dst=where, src=position.ap(pattern=[[0, PARTITIONS], [1, count]], offset=t0))
    for j in range(W - 1):
        keep = tile((PARTITIONS, count), nl.float32)
        nisa.tensor_scalar(dst=keep, data=where, op0=nl.greater_equal, operand0=float(W - 1 - j))
        found.append(keep)
    return found


def windows(x, prefix, continued, b, t0, t1, c0, c1, W, eye):
    """For every 128 channels: x of the tokens t0 - W + 1 to t1, [channels, tokens] float32."""
    rows = t1 - t0 + W - 1
    first = t0 - (W - 1)
    xt = tile((rows, c1 - c0), x.dtype)
    if first < 0:
        if continued:
            nisa.dma_copy(dst=xt[0:-first, :], src=prefix[b, t0 : W - 1, c0:c1])
        else:
            nisa.memset(dst=xt, value=0.0)
        nisa.dma_copy(dst=xt[-first:rows, :], src=x[b, 0:t1, c0:c1])
    else:
        nisa.dma_copy(dst=xt, src=x[b, first:t1, c0:c1])
    found = []
    for a0, a1 in channels(c1 - c0):
        found.append(transposed(xt[:, a0:a1], eye, 0, rows))
    return found


def transposed(x, eye, ahead, columns):
    """x [rows, C], any dtype, as [C, columns] float32; columns `ahead` of the rows and behind them are 0."""
    rows, C = x.shape
    ps = nl.ndarray((C, rows), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=ps, stationary=x, moving=eye[0:rows, 0:rows], is_moving_onezero=True)
    out = tile((C, columns), nl.float32)
    if columns > rows:
        nisa.memset(dst=out, value=0.0)
    nisa.activation(dst=out[:, ahead : ahead + rows], op=nl.copy, data=ps)
    return out


def seen_by_taps(seen, keep, count, W):
    """For every 128 channels and tap: what it reads, [channels, count]."""
    found = []
    for part in seen:
        C = part.shape[0]
        slices = []
        for j in range(W):
            window = part[:, j : j + count]
            if j < len(keep):
                window = tile((C, count), nl.float32)
                nisa.tensor_tensor(
                    dst=window, data1=part[:, j : j + count], data2=keep[j][0:C, :], op=nl.multiply
                )
            slices.append(window)
        found.append(slices)
    return found


def given_by_taps(by_tap, count):
    """For every 128 channels and tap: the dz that it gives back, token t's to token t - W + 1 + j."""
    found = []
    for part in by_tap:
        W = len(part)
        slices = []
        for j in range(W):
            slices.append(part[j][:, W - 1 - j : W - 1 - j + count])
        found.append(slices)
    return found


def prepared(slices, taps, ahead):
    """(sum of the first `ahead` taps, slices of the others) for every 128 channels."""
    found = []
    for i in range(len(slices)):
        w = taps[i][0]
        first = tile(slices[i][0].shape, nl.float32)
        nisa.activation(dst=first, op=nl.copy, data=slices[i][0], scale=w[:, 0:1])
        for j in range(1, min(ahead, w.shape[1])):
            nisa.scalar_tensor_tensor(
                dst=first, data=slices[i][j], op0=nl.multiply, operand0=w[:, j : j + 1], op1=nl.add,
                operand1=first,
            )  # fmt: skip
        others = []
        for j in range(ahead, w.shape[1]):
            others.append(slices[i][j])
        found.append((first, others))
    return found


def summed(ready, taps, eye):
    """All taps, transposed back: [tokens, all channels] in PSUM."""
    width = 0
    for part in ready:
        width += part[0].shape[0]
    out = nl.ndarray((ready[0][0].shape[1], width), dtype=nl.float32, buffer=nl.psum)
    a0 = 0
    for i in range(len(ready)):
        first, others = ready[i]
        C, W = taps[i][0].shape
        into = out[:, a0 : a0 + C]
        for j in range(len(others)):
            nisa.nc_matmul(dst=into, stationary=others[j], moving=taps[i][1][:, W - len(others) + j, :])
        nisa.nc_matmul(dst=into, stationary=first, moving=eye[0:C, 0:C], is_moving_onezero=True)
        a0 += C
    return out


def turned(dz, keep, ahead, count, W, eye):
    """For every 128 channels: dz as each tap sees it, [channels, ahead + count + W - 1]; 0 ahead of the first
    token and behind the last.
    """
    found = []
    for a0, a1 in channels(dz.shape[1]):
        behind = transposed(dz[:, a0:a1], eye, ahead, ahead + count + W - 1)
        found.append(masked(behind, keep, dz.shape[0], W))
    return found


def masked(behind, keep, count, W):
    """dz [channels, columns] as each tap sees it, of which `count` columns are tokens and the others 0."""
    C, columns = behind.shape
    found = []
    for j in range(W):
        out = behind
        if j < len(keep):
            out = tile((C, columns), nl.float32)
            if columns > count:
                nisa.memset(dst=out, value=0.0)
            nisa.tensor_tensor(
                dst=out[:, 0:count], data1=behind[:, 0:count], data2=keep[j][0:C, :], op=nl.multiply
            )
        found.append(out)
    return found


def add_products(sums, by_tap, seen, ahead, count):
    """dw [channels, W] += the tile's sum over time of dz and what tap j saw."""
    C, W = sums.shape
    part = tile((C, W), nl.float32)
    for j in range(W):
        product = tile((C, count), nl.float32)
        nisa.tensor_tensor(
            dst=product, data1=by_tap[j][:, ahead : ahead + count], data2=seen[:, j : j + count],
            op=nl.multiply,
        )  # fmt: skip
        row_sum(part[:, j : j + 1], product, nl.copy)
    nisa.tensor_tensor(dst=sums, data1=sums, data2=part, op=nl.add)


def example(B=1, T=1024, C=3072, W=4, dtype="float32", backward=0):
    """(kernel, arguments) for the simulator's report; backward=1 for the gradients."""
    import ml_dtypes
    import numpy as np

    rng = np.random.default_rng(0)
    kind = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}[dtype]
    x, dy = (rng.standard_normal((B, T, C), dtype=np.float32).astype(kind) for _ in range(2))
    weight = rng.standard_normal((C, W), dtype=np.float32)
    if backward:
        return short_convolution_bwd, (dy, x, weight, None, False)
    return short_convolution_fwd, (x, weight, None, False)
