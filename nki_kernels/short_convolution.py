"""Computes the short convolution: causal, depthwise, over time, then SiLU; forward and backward.

    z_t = sum_j w_j x_{t - W + 1 + j}     y = SiLU(z)              W taps

    dz = dy SiLU'(z)     dx_t = sum_j w_j dz_{t + W - 1 - j}     dw_j = sum_t dz_t x_{t - W + 1 + j}

Layout: x, y, dy, dx [B, T, C]; weight, dweight [C, W]; position [T], of each token in its packed sequence
(B is 1 then): tap j reads from its own sequence where position >= W - 1 - j. Before a sequence there are
zeros or, where a call continues what an earlier one began, prefix [B, W - 1, C], the inputs before x. The
gradient of the prefix is dx at the times before 0.

Time is the partition axis of x in HBM, and nothing shifts along partitions. So 128 rows are transposed, which
makes a tap a slice of the free axis, and the taps transpose them back: the product of a slice [channels,
tokens] with diag(w_j) is w_j x, [tokens, channels], and they add up in PSUM, where SiLU reads them. The first
one or two taps are summed on the Scalar and Vector engines, and transposed back at half the price, so that no
engine is busy alone. Tiles of time overlap by the W - 1 rows (2 W - 2 in backward) that a convolution looks
back, so that no tile waits for another. Backward computes z again: forward leaves nothing but y.
"""

from delta_trn.nki_kernels.examples import normals
from delta_trn.nki_kernels.language import nisa, nki, nl
from delta_trn.nki_kernels.plan import BANK, PARTITIONS, split
from delta_trn.nki_kernels.tiles import build_identity, load, multiply_elements, psum, sbuf, sum_rows

MOST_W = 32
ON_VECTOR = 2  # taps of z that the Scalar and Vector engines take
ON_SCALAR = 1  # taps of dx: in backward the Vector engine has the sums of dw

# How many tiles of time a stage is behind the first one; see the pseudocode of the kernels.
WINDOWS, SLOPES, RETURNS, RESULTS = 0, 1, 2, 3


@nki.jit
def short_convolution_fwd(x, weight, position, packed, prefix, continued):
    """Computes y [B, T, C] in x's dtype.

    Args:
        x, weight       as the module says
        position        read if `packed`, else any tensor
        prefix          in x's dtype, read if `continued`, else any tensor

    Notes:
        The loop is one tile of time ahead, so that an engine, which runs its instructions in order, does not
        wait for the others.

    Pseudocode:
        for channels in banks of 512, for tile of time:
            windows = x of the tile and W - 1 tokens before, transposed
            y = SiLU(sum over taps of w_j windows_j)
    """
    B, T, C = x.shape
    W = weight.shape[1]
    check(B, W, packed, continued)
    y = nl.ndarray((B, T, C), dtype=x.dtype, buffer=nl.shared_hbm)
    eye, eye_float32 = build_identities(x.dtype)
    pieces = cut_time(B, T, PARTITIONS - (W - 1))
    for channels in split(C, BANK):
        c0, c1 = channels
        taps = load_taps(weight, c0, c1, eye_float32)
        started = []
        for i in range(len(pieces) + 1):
            if i < len(pieces):
                b, t0, t1 = pieces[i]
                windows = load_windows(x, prefix, continued, b, t0, t1, c0, c1, W, eye)
                keep = build_masks(position, packed, t0, t1, W)
                started.append(start_sums(slice_windows(windows, keep, t1 - t0, W), taps, ON_VECTOR))
            if i > 0:
                b, t0, t1 = pieces[i - 1]
                y_sb = sbuf((t1 - t0, c1 - c0), x.dtype)
                nisa.activation(dst=y_sb, op=nl.silu, data=sum_taps(started[i - 1], taps, eye_float32))
                nisa.dma_copy(dst=y[b, t0:t1, c0:c1], src=y_sb)
    return y


@nki.jit
def short_convolution_bwd(dy, x, weight, position, packed, prefix, continued):
    """Computes dx [B, T, C], dweight [C, W] and, if `continued`, dprefix [B, W - 1, C]; dtypes of inputs.

    Notes:
        A tile of time passes four stages, and four tiles are on their way, each a stage behind the one
        before: an engine that runs its instructions in order then waits for none of the others.

    Pseudocode:
        for channels in banks of 512, for tile of time:
            WINDOWS     windows = x of the tile and its neighbors, transposed
            SLOPES      z = sum over taps of w_j windows_j;  dz = dy SiLU'(z)
            RETURNS     returns = dz as each tap sees it, transposed
            RESULTS     dx = sum over taps of w_j returns_j;  dw_j += sum over time of dz windows_j
    """
    B, T, C = x.shape
    W = weight.shape[1]
    check(B, W, packed, continued)
    dx = nl.ndarray((B, T, C), dtype=x.dtype, buffer=nl.shared_hbm)
    dprefix = dx
    if continued:
        dprefix = nl.ndarray((B, W - 1, C), dtype=x.dtype, buffer=nl.shared_hbm)
    dweight = nl.ndarray((C, W), dtype=weight.dtype, buffer=nl.shared_hbm)
    eye, eye_float32 = build_identities(x.dtype)
    pieces = cut_time(B, T, PARTITIONS - 2 * (W - 1))
    n = len(pieces)
    for channels in split(C, BANK):
        c0, c1 = channels
        taps = load_taps(weight, c0, c1, eye_float32)
        sums = allocate_sums(c1 - c0, W)
        windows, keep, started_z, dz, returns, started_dx = [], [], [], [], [], []
        for i in range(n + RESULTS):
            j = i - WINDOWS
            if j < n:
                b, t0, t1 = pieces[j]
                t2 = min(t1 + W - 1, T)  # dz of tokens behind t1 reaches back to dx
                windows.append(load_windows(x, prefix, continued, b, t0, t2, c0, c1, W, eye))
                keep.append(build_masks(position, packed, t0, t2, W))
                slices = slice_windows(windows[j], keep[j], t2 - t0, W)
                started_z.append(start_sums(slices, taps, ON_VECTOR))
            j = i - SLOPES
            if j >= 0 and j < n:
                b, t0, t1 = pieces[j]
                t2 = min(t1 + W - 1, T)
                dz_sb = sbuf((t2 - t0, c1 - c0))
                nisa.activation(dst=dz_sb, op=nl.silu_dx, data=sum_taps(started_z[j], taps, eye_float32))
                dy_sb = load(dy[b, t0:t2, c0:c1], dy.dtype)
                nisa.tensor_tensor(dst=dz_sb, data1=dz_sb, data2=dy_sb, op=nl.multiply)
                dz.append(dz_sb)
            j = i - RETURNS
            if j >= 0 and j < n:
                b, t0, t1 = pieces[j]
                ahead = count_prefix_rows(t0, W, continued)
                returns.append(transpose_returns(dz[j], keep[j], ahead, t1 - t0, W, eye_float32))
                slices = slice_returns(returns[j], ahead + t1 - t0)
                started_dx.append(start_sums(slices, taps, ON_SCALAR))
            j = i - RESULTS
            if j >= 0:
                b, t0, t1 = pieces[j]
                ahead = count_prefix_rows(t0, W, continued)
                dx_sb = sbuf((ahead + t1 - t0, c1 - c0), x.dtype)
                nisa.activation(dst=dx_sb, op=nl.copy, data=sum_taps(started_dx[j], taps, eye_float32))
                nisa.dma_copy(dst=dx[b, t0:t1, c0:c1], src=dx_sb[ahead : ahead + t1 - t0, :])
                if ahead > 0:
                    nisa.dma_copy(dst=dprefix[b, :, c0:c1], src=dx_sb[0:ahead, :])
                for part in range(len(sums)):
                    add_products(sums[part], returns[j][part], windows[j][part], ahead, t1 - t0)
        parts = split(c1 - c0, PARTITIONS)
        for part in range(len(parts)):
            a0, a1 = parts[part]
            dweight_sb = sbuf((a1 - a0, W), weight.dtype)
            nisa.tensor_copy(dst=dweight_sb, src=sums[part])
            nisa.dma_copy(dst=dweight[c0 + a0 : c0 + a1, :], src=dweight_sb)
    if continued:
        return dx, dweight, dprefix
    return dx, dweight


def cut_time(B, T, size):
    """Cuts the rows of x into tiles: [(row, first token, end)]."""
    tiles = []
    for b in range(B):
        for tile in split(T, size):
            t0, t1 = tile
            tiles.append((b, t0, t1))
    return tiles


def allocate_sums(width, W):
    """Allocates zeros [channels, W] per 128 channels."""
    sums = []
    for span in split(width, PARTITIONS):
        a0, a1 = span
        sum_sb = sbuf((a1 - a0, W))
        nisa.memset(dst=sum_sb, value=0.0)
        sums.append(sum_sb)
    return sums


def count_prefix_rows(t0, W, continued):
    """Returns how many rows of a tile's dx are the prefix's: W - 1 in the first tile."""
    return W - 1 if continued and t0 == 0 else 0


def check(B, W, packed, continued):
    """Refuses what the tiles of time do not hold."""
    assert W <= MOST_W, f"W={W} exceeds {MOST_W} taps: 2 W - 2 rows of a tile of 128 are its neighbors'"
    assert W > 1 or not continued, "W=1 looks back at nothing: leave the prefix out"
    assert not (packed and continued), "packed sequences begin with zeros: leave the prefix out"
    assert B == 1 or not packed, f"B={B} rows cannot be packed: position is that of one row"


def build_identities(dtype):
    """Builds the identity [128, 128] in dtype, and in float32."""
    eye = build_identity(PARTITIONS, dtype)
    if dtype == nl.float32:
        return eye, eye
    return eye, build_identity(PARTITIONS, nl.float32)


def load_taps(weight, c0, c1, eye_sb):
    """Loads w [channels, W] and builds diag(w_j) [channels, W, channels], float32, per 128 channels."""
    W = weight.shape[1]
    taps = []
    for span in split(c1 - c0, PARTITIONS):
        a0, a1 = span
        w_sb = load(weight[c0 + a0 : c0 + a1, :], nl.float32)
        diagonals_sb = sbuf((a1 - a0, W, a1 - a0))
        for j in range(W):
            nisa.tensor_scalar(
                dst=diagonals_sb[:, j, :], data=eye_sb[0 : a1 - a0, 0 : a1 - a0], op0=nl.multiply,
                operand0=w_sb[:, j : j + 1],
            )  # fmt: skip
        taps.append((w_sb, diagonals_sb))
    return taps


def build_masks(position, packed, t0, t1, W):
    """Builds masks [128, t1 - t0] for the taps 0 to W - 2: 1 where a tap stays in the token's sequence."""
    masks = []
    if not packed:
        return masks
    position_sb = sbuf((PARTITIONS, t1 - t0))  # the same on all partitions
    nisa.dma_copy(dst=position_sb, src=position.ap(pattern=[[0, PARTITIONS], [1, t1 - t0]], offset=t0))
    for j in range(W - 1):
        keep_sb = sbuf((PARTITIONS, t1 - t0))
        nisa.tensor_scalar(dst=keep_sb, data=position_sb, op0=nl.greater_equal, operand0=float(W - 1 - j))
        masks.append(keep_sb)
    return masks


def load_windows(x, prefix, continued, b, t0, t1, c0, c1, W, eye):
    """Loads x of the tokens t0 - W + 1 to t1, per 128 channels [channels, tokens] float32."""
    rows = t1 - t0 + W - 1
    first = t0 - (W - 1)
    x_sb = sbuf((rows, c1 - c0), x.dtype)
    if first < 0:
        if continued:
            nisa.dma_copy(dst=x_sb[0:-first, :], src=prefix[b, t0 : W - 1, c0:c1])
        else:
            nisa.memset(dst=x_sb, value=0.0)
        nisa.dma_copy(dst=x_sb[-first:rows, :], src=x[b, 0:t1, c0:c1])
    else:
        nisa.dma_copy(dst=x_sb, src=x[b, first:t1, c0:c1])
    windows = []
    for span in split(c1 - c0, PARTITIONS):
        a0, a1 = span
        windows.append(transpose_padded(x_sb[:, a0:a1], eye, 0, rows))
    return windows


def transpose_padded(x_sb, eye, ahead, columns):
    """Transposes x [rows, C] to [C, columns] float32; columns `ahead` of the rows and behind them are 0."""
    rows, C = x_sb.shape
    out_ps = psum((C, rows))
    nisa.nc_matmul(dst=out_ps, stationary=x_sb, moving=eye[0:rows, 0:rows], is_moving_onezero=True)
    out_sb = sbuf((C, columns))
    if columns > rows:
        nisa.memset(dst=out_sb, value=0.0)
    nisa.activation(dst=out_sb[:, ahead : ahead + rows], op=nl.copy, data=out_ps)
    return out_sb


def mask_tap(x_sb, keep_sb, first, count, columns):
    """Masks `count` columns of x [C, ...], from `first` on: [C, columns], whose columns behind them are 0."""
    C = x_sb.shape[0]
    out_sb = sbuf((C, columns))
    if columns > count:
        nisa.memset(dst=out_sb, value=0.0)
    nisa.tensor_tensor(
        dst=out_sb[:, 0:count], data1=x_sb[:, first : first + count], data2=keep_sb[0:C, :], op=nl.multiply
    )
    return out_sb


def slice_windows(windows, keep, count, W):
    """Returns what each tap reads, [channels, count], per 128 channels and tap."""
    parts = []
    for window_sb in windows:
        slices = []
        for j in range(W):
            if j < len(keep):
                slices.append(mask_tap(window_sb, keep[j], j, count, count))
            else:
                slices.append(window_sb[:, j : j + count])
        parts.append(slices)
    return parts


def transpose_returns(dz_sb, keep, ahead, count, W, eye):
    """Transposes dz as each tap sees it, [channels, ahead + count + W - 1], per 128 channels and tap.

    Columns ahead of the first token and behind the last are 0.
    """
    parts = []
    for span in split(dz_sb.shape[1], PARTITIONS):
        a0, a1 = span
        dz_t_sb = transpose_padded(dz_sb[:, a0:a1], eye, ahead, ahead + count + W - 1)
        taps = []
        for j in range(W):
            if j < len(keep):
                taps.append(mask_tap(dz_t_sb, keep[j], 0, dz_sb.shape[0], dz_t_sb.shape[1]))
            else:
                taps.append(dz_t_sb)
        parts.append(taps)
    return parts


def slice_returns(returns, count):
    """Returns the dz that each tap gives back, per 128 channels and tap: token t's to token t - W + 1 + j."""
    parts = []
    for taps in returns:
        W = len(taps)
        slices = []
        for j in range(W):
            slices.append(taps[j][:, W - 1 - j : W - 1 - j + count])
        parts.append(slices)
    return parts


def start_sums(slices, taps, ahead):
    """Sums the first `ahead` taps; returns (sum, slices of the other taps) per 128 channels."""
    started = []
    for i in range(len(slices)):
        w_sb = taps[i][0]
        sum_sb = sbuf(slices[i][0].shape)
        nisa.activation(dst=sum_sb, op=nl.copy, data=slices[i][0], scale=w_sb[:, 0:1])
        for j in range(1, min(ahead, w_sb.shape[1])):
            nisa.scalar_tensor_tensor(
                dst=sum_sb, data=slices[i][j], op0=nl.multiply, operand0=w_sb[:, j : j + 1], op1=nl.add,
                operand1=sum_sb,
            )  # fmt: skip
        started.append((sum_sb, slices[i][ahead : len(slices[i])]))
    return started


def sum_taps(started, taps, eye):
    """Adds the other taps to the sums of `start_sums` and transposes back: [tokens, channels] in PSUM."""
    width = 0
    for begun in started:
        sum_sb, _ = begun
        width += sum_sb.shape[0]
    out_ps = psum((started[0][0].shape[1], width))
    a0 = 0
    for i in range(len(started)):
        sum_sb, others = started[i]
        C, W = taps[i][0].shape
        part_ps = out_ps[:, a0 : a0 + C]
        for j in range(len(others)):
            nisa.nc_matmul(dst=part_ps, stationary=others[j], moving=taps[i][1][:, W - len(others) + j, :])
        nisa.nc_matmul(dst=part_ps, stationary=sum_sb, moving=eye[0:C, 0:C], is_moving_onezero=True)
        a0 += C
    return out_ps


def add_products(sum_sb, returns, window_sb, ahead, count):
    """Adds the tile's sums over time, of dz times what each tap saw, to dw [channels, W]."""
    C, W = sum_sb.shape
    part_sb = sbuf((C, W))
    for j in range(W):
        product_sb = multiply_elements(returns[j][:, ahead : ahead + count], window_sb[:, j : j + count])
        sum_rows(part_sb[:, j : j + 1], product_sb, nl.copy)
    nisa.tensor_tensor(dst=sum_sb, data1=sum_sb, data2=part_sb, op=nl.add)


def example(B=1, T=1024, C=3072, W=4, dtype="float32", backward=0):
    """Returns (kernel, arguments) for the simulator's report; backward=1 for the gradients."""
    x, dy = normals(dtype, (B, T, C), (B, T, C))
    weight = normals("float32", (C, W))[0]
    if backward:
        return short_convolution_bwd, (dy, x, weight, x, False, x, False)
    return short_convolution_fwd, (x, weight, x, False, x, False)
