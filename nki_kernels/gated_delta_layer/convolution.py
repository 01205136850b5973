"""Computes the gradients of a layer's convolution from those of its results u, chunk by chunk.

    dx_t = sum_j w_j du_{t + W - 1 - j}        dw_j = sum_t du_t x_{t - W + 1 + j}        W taps

Nothing is transposed: tiles are [tokens, channels]. A tap's x comes from HBM as far shifted as it
was read, and a product with a shifted identity brings w_j du to the token that it belongs to. What
goes to tokens of the chunk before waits for that chunk. Sums over tokens are products with a column
of ones.

Of packed sequences, a tap counts where it stays in the token's sequence, position >= W - 1 - j.

A bundle's channels, those of its q, k and v, lie side by side on the free axis, cut into cells of
equal width, at most one bank of PSUM; the last one may have columns that are no channel. `outline`
makes a dict of

    segments    [(first column, column behind the last, channel)] of q, k and v
    cells       [(first column, column behind the last)]
    columns     of all cells
    channels    of q, k and v
    gain        [(first column of a view, first column, column behind the last)] of z, where heads
                lie side by side: views as wide as a cell, in whose columns the gradient of the
                norm's gain is summed
    rows        of the sums in PSUM: a row for each tap of each cell, then one for each entry of
                `gain`
"""

from delta_trn.nki_kernels.language import nisa, nl
from delta_trn.nki_kernels.plan import BANK, PARTITIONS, list_sides, split
from delta_trn.nki_kernels.tiles import (
    add_selected,
    copy_scaled,
    multiply,
    psum,
    sbuf,
    select_affine,
)

AT_ONCE = 2  # taps in one instruction


def outline(bundle, H, K, V, W):
    """Lists a bundle's segments and cells, and what else the dict above has."""
    segments, channels = [], 0
    for side in list_sides(bundle, H, K, V):
        first, width = side
        segments.append((channels, channels + width, first))
        channels = channels + width
    count = (channels + BANK - 1) // BANK
    width = (channels + count - 1) // count
    cells = []
    for i in range(count):
        cells.append((i * width, (i + 1) * width))
    gain, values = [], bundle["lanes"] * V
    for span in split(values, width):
        low, high = span
        gain.append((max(0, min(low, values - width)), low, high))
    return {
        "segments": segments,
        "cells": cells,
        "columns": count * width,
        "channels": channels,
        "gain": gain,
        "rows": count * W + len(gain),
    }


def find_channels(plan, low, high):
    """Lists where columns low .. high are channels:
    [(first column, column behind the last, channel)].
    """
    spans = []
    for segment in plan["segments"]:
        start, stop, channel = segment
        first, last = max(start, low), min(stop, high)
        if first < last:
            spans.append((first, last, channel + first - start))
    return spans


def build_shifts(C, W):
    """Builds what products with shifted tokens take, once per call.

    identity    [C, 2 C + W - 1]: 1 where column = C + row; its views are identities, shifted
    crossing    [W (W - 1) / 2, C]: for each tap j but the last, and each of the first W - 1 - j
                tokens of a chunk, 1 at the token of the chunk before to which the tap leads
    """
    identity_sb = sbuf((C, 2 * C + W - 1))
    nisa.memset(dst=identity_sb, value=1.0)
    select_affine(identity_sb, identity_sb, 1, [[-1, 2 * C + W - 1]], nl.equal, C)
    crossing_sb = sbuf((max(1, W * (W - 1) // 2), C))
    for j in range(W - 1):
        low, back = find_row(j, W), W - 1 - j
        nisa.dma_copy(
            dst=crossing_sb[low : low + back, :], src=identity_sb[0:back, back : back + C]
        )
    return {"identity": identity_sb, "crossing": crossing_sb}


def find_row(j, W):
    """Returns the first row of tap j in `crossing`, and in what waits for the chunk before."""
    return j * (W - 1) - j * (j - 1) // 2


def load_weights(weight_t, plan, rows):
    """Loads w of a bundle's channels to all partitions: [rows, W, columns],
    from HBM [W, channels].
    """
    W, channels = weight_t.shape
    out_sb = sbuf((rows, W, plan["columns"]))
    if plan["columns"] > plan["channels"]:
        nisa.memset(dst=out_sb, value=0.0)
    for segment in plan["segments"]:
        start, stop, channel = segment
        nisa.dma_copy(
            dst=out_sb[:, :, start:stop],
            src=weight_t.ap(pattern=[[0, rows], [channels, W], [1, stop - start]], offset=channel),
        )
    return out_sb


def build_counts(plan, C):
    """Builds [C, 2 n]: 1 in column n, for n = rows of the sums.

    n of its columns, from the one on that is n - i, sum tokens into row i of n.
    """
    n = plan["rows"]
    out_sb = sbuf((C, 2 * n))
    nisa.memset(dst=out_sb, value=0.0)
    nisa.memset(dst=out_sb[:, n : n + 1], value=1.0)
    return out_sb


def load_masks(own, stream, call):
    """Loads where taps stay in a token's sequence.

    keep is [tokens, W], 1 or 0; counts is for each tap what `build_counts` returns, 0 where it does
    not stay.
    """
    tokens, W = own.tokens, call["W"]
    position_sb, own.keep, own.counts = sbuf((tokens, 1)), sbuf((tokens, W)), []
    nisa.dma_copy(
        dst=position_sb, src=call["position"].ap(pattern=[[1, tokens], [1, 1]], offset=own.start)
    )
    for j in range(W):
        keep = own.keep[:, j : j + 1]
        nisa.tensor_scalar(
            dst=keep, data=position_sb, op0=nl.greater_equal, operand0=float(W - 1 - j)
        )
        masked_sb = sbuf((tokens, stream.counts.shape[1]))
        copy_scaled(masked_sb, stream.counts[0:tokens, :], keep)
        own.counts.append(masked_sb)


def load_taps(own, stream, cell, taps, call):
    """Loads what taps read of a cell, x of W - 1 - j tokens before each token:
    [tokens, taps, width].
    """
    x, continued, plan, n = call["x"], call["continued"], stream.plan, stream.bundle["n"]
    start, tokens, W = own.start, own.tokens, call["W"]
    low, high = cell
    first_tap, stop_tap = taps
    out_sb = sbuf((tokens, stop_tap - first_tap, high - low), x.dtype)
    if high > plan["channels"] or (start == 0 and not continued):
        nisa.memset(dst=out_sb, value=0.0)
    flat_sb = out_sb.reshape((tokens, (stop_tap - first_tap) * (high - low)))
    for j in range(first_tap, stop_tap):
        column, back = (j - first_tap) * (high - low) - low, W - 1 - j
        before = min(back, tokens) if start == 0 else 0
        for span in find_channels(plan, low, high):
            first, last, channel = span
            stop = channel + last - first
            if before > 0 and continued:
                nisa.dma_copy(
                    dst=flat_sb[0:before, column + first : column + last],
                    src=call["prefix"][n, j : j + before, channel:stop],
                )
            if before < tokens:
                nisa.dma_copy(
                    dst=flat_sb[before:tokens, column + first : column + last],
                    src=x[n, start - back + before : start - back + tokens, channel:stop],
                )
    return out_sb


def multiply_taps(own, stream, c, taps, x_sb, call):
    """Makes du times what taps read of cell c, and w_j du, of which it keeps what leaves the chunk.

    Returns both, and behind the last tap what arrives from the chunk behind.
    """
    W, plan, tokens = call["W"], stream.plan, own.tokens
    low, high = plan["cells"][c]
    first, stop = taps
    read_sb, given_sb = sbuf(x_sb.shape), sbuf(x_sb.shape)
    du_ps = psum((tokens, high - low))  # where the Vector engine takes it at full speed
    copy_scaled(du_ps, own.du[0:tokens, low:high])
    du = du_ps.ap(pattern=[[high - low, tokens], [0, stop - first], [1, high - low]], offset=0)
    multiply(read_sb, du, x_sb)
    if call["packed"]:
        for j in range(first, stop):
            nisa.scalar_tensor_tensor(
                dst=given_sb[:, j - first, :], data=du_ps, op0=nl.multiply,
                operand0=own.keep[:, j : j + 1], op1=nl.multiply,
                operand1=stream.weights[0:tokens, j, low:high],
            )  # fmt: skip
    else:
        multiply(given_sb, du, stream.weights[0:tokens, first:stop, low:high])
    if own.index > 0 or call["continued"]:
        for j in range(first, stop):
            leaving, row = min(W - 1 - j, tokens), find_row(j, W)
            if leaving > 0:
                nisa.dma_copy(
                    dst=view_leaving(own, c, row, row + leaving, W),
                    src=given_sb[0:leaving, j - first : j - first + 1, :],
                )
    arriving = []
    if stop == W and own.index + 1 < len(stream.own):
        arriving.append(load_leaving(stream.own[own.index + 1], c, W))
    return read_sb, given_sb, arriving


def allocate_leaving(own, stream, call):
    """Allocates what a chunk leaves for the one before: rows of w_j du, as `find_row` counts them,
    and a cell's columns; those of several cells lie in one tile, on other partitions.

    It is 0 where a chunk has fewer tokens than can leave one.
    """
    W, cells = call["W"], stream.plan["cells"]
    rows, width = W * (W - 1) // 2, cells[0][1]
    own.leaving = []
    if W == 1 or (own.index == 0 and not call["continued"]):
        return
    for span in split(len(cells), PARTITIONS // rows):
        first, stop = span
        tile_sb = sbuf(((stop - first) * rows, 1, width))
        if own.tokens < W - 1:
            nisa.memset(dst=tile_sb, value=0.0)
        own.leaving.append(tile_sb)


def view_leaving(own, c, first, stop, W):
    """Views rows first .. stop of what a chunk leaves of cell c, [rows, 1, width]."""
    rows = W * (W - 1) // 2
    per_tile = PARTITIONS // rows
    tile_sb, base = own.leaving[c // per_tile], c % per_tile * rows
    return tile_sb[base + first : base + stop, :, :]


def load_leaving(own, c, W):
    """Brings what a chunk leaves of cell c to where a product takes it, [W (W - 1) / 2, width]."""
    rows = W * (W - 1) // 2
    width = own.leaving[0].shape[2]
    out_sb = sbuf((rows, 1, width))
    nisa.dma_copy(dst=out_sb, src=view_leaving(own, c, 0, rows, W))
    return out_sb.reshape((rows, width))


def sum_taps(own, stream, c, taps, products, call):
    """Adds taps of cell c to dw and to dx."""
    read_sb, given_sb, arriving = products
    W, plan, tokens = call["W"], stream.plan, own.tokens
    low, high = plan["cells"][c]
    first, stop = taps
    n, C = plan["rows"], call["shifts"]["identity"].shape[0]
    if first == 0:
        own.dx_sums.append(psum((tokens, high - low)))
    for j in range(first, stop):
        i, shift = n - c * W - j, C + W - 1 - j
        counts_sb = own.counts[j] if call["packed"] else stream.counts
        add_to_sums(stream, counts_sb[0:tokens, i : i + n], read_sb[:, j - first, :])
        add_selected(
            own.dx_sums[c],
            call["shifts"]["identity"][0:tokens, shift : shift + tokens],
            given_sb[:, j - first, :],
            j > 0,
        )
    if stop == W and len(arriving) > 0:
        add_selected(own.dx_sums[c], call["shifts"]["crossing"], arriving[0], True)


def store_channels(dst, x_ps, stream, c, start):
    """Stores a cell [tokens, width], rounded, as tokens of dst [N, T, channels], from start on."""
    plan, n, tokens = stream.plan, stream.bundle["n"], x_ps.shape[0]
    low, high = plan["cells"][c]
    x_sb = sbuf(x_ps.shape, dst.dtype)
    copy_scaled(x_sb, x_ps)
    for span in find_channels(plan, low, high):
        first, last, channel = span
        nisa.dma_copy(
            dst=dst[n, start : start + tokens, channel : channel + last - first],
            src=x_sb[:, first - low : last - low],
        )


def store_prefix(dprefix, stream, call):
    """Stores the gradient of the prefix: what leaves the first chunk."""
    crossing_sb, rows = call["shifts"]["crossing"], dprefix.shape[1]
    C = crossing_sb.shape[1]
    cells = stream.plan["cells"]
    for c in range(len(cells)):
        out_ps = psum((rows, cells[c][1] - cells[c][0]))
        leaving_sb = load_leaving(stream.own[0], c, rows + 1)
        add_selected(out_ps, crossing_sb[:, C - rows : C], leaving_sb)
        store_channels(dprefix, out_ps, stream, c, 0)


def add_to_sums(stream, counts, x_sb):
    """Adds counts^T x to the sums of a bundle, one sum in PSUM over all chunks."""
    add_selected(stream.sums, counts, x_sb, stream.begun)
    stream.begun = True


def sum_gain(mh_sb, stream):
    """Adds m h [tokens, heads, V], columns of z, to the sums: dw of the norm, for each head."""
    tokens, plan, n = mh_sb.shape[0], stream.plan, stream.plan["rows"]
    columns_sb = mh_sb.reshape((tokens, mh_sb.shape[1] * mh_sb.shape[2]))
    for p in range(len(plan["gain"])):
        start, i = plan["gain"][p][0], len(plan["gain"]) - p
        counts, columns = stream.counts[0:tokens, i : i + n], stream.sums.shape[1]
        add_to_sums(stream, counts, columns_sb[:, start : start + columns])


def store_sums(dweight, dgain, stream, W, V):
    """Stores the sums of a bundle: in dweight [N, W, channels], and in dgain [N, HV V]."""
    plan, n = stream.plan, stream.bundle["n"]
    out_sb = sbuf(stream.sums.shape)
    nisa.tensor_copy(dst=out_sb, src=stream.sums)
    gain_first = stream.bundle["first"] * V
    for p in range(len(plan["gain"])):
        start, low, high = plan["gain"][p]
        row = len(plan["cells"]) * W + p
        nisa.dma_copy(
            dst=dgain[n : n + 1, gain_first + low : gain_first + high],
            src=out_sb[row : row + 1, low - start : high - start],
        )
    for c in range(len(plan["cells"])):
        low, high = plan["cells"][c]
        for span in find_channels(plan, low, high):
            first, last, channel = span
            nisa.dma_copy(
                dst=dweight[n, :, channel : channel + last - first],
                src=out_sb[c * W : (c + 1) * W, first - low : last - low],
            )
