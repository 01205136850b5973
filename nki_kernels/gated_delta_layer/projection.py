"""Makes x and the gate z of a layer's hidden states h: x as [channels, tokens], z as [tokens, channels].

    x = W h        z = W_z h

A product sums over its operands' partitions, so h and weights are needed as [d, ...]. h is transposed here,
a stretch of tokens at a time. Weights lie so in HBM and come a cell at a time, behind the cell before.
z waits in HBM until the norm loads it. Backward takes x and z from HBM, too. `start` makes a dict of

    hidden      [N, T, d], d a multiple of 128
    weight      [cells, 128, d / 128, 128]: [c, p, i, m] is W at channel m of cell c and input 128 i + p
    cells       what `plan.list_weight_cells` returns
    gate        W_z transposed, [d, channels of z]
    x           [N, T, channels] in HBM, or z where nothing is kept
    z           [N, T, channels of z] in HBM
    stretch     (sequence, first token) of the hidden states at hand
    h           these, [128, d / 128, tokens]
"""

from delta_trn.nki_kernels.language import nisa
from delta_trn.nki_kernels.plan import BANK, PARTITIONS, split
from delta_trn.nki_kernels.tiles import (
    allocate_tokens,
    copy_blocks,
    copy_scaled,
    load,
    psum,
    sbuf,
    store_tokens,
)

GATE_SIDE = 3  # of the cells of z, where 0, 1 and 2 are those of q, k and v
GATE_WIDTH = 256  # channels of z in a cell


def start(hidden, weight, cells, gate, x, z):
    """Makes the dict that this module's functions take as `own`, once per call."""
    return {
        "hidden": hidden, "weight": weight, "cells": cells, "gate": gate, "x": x, "z": z, "stretch": (-1, -1)
    }  # fmt: skip


def list_gate_cells(bundle, V, t0, t1, stream, turn):
    """Lists the cells of a bundle's z for a stretch, like those of `cells.list_cells`."""
    cells, first = [], bundle["first"] * V
    for span in split(bundle["lanes"] * V, GATE_WIDTH):
        low, high = span
        cells.append(
            {
                "b": bundle["n"], "t0": t0, "t1": t1, "c0": first + low, "c1": first + high, "part": 0,
                "a0": 0, "a1": high - low, "stream": stream, "side": GATE_SIDE, "turn": turn,
            }
        )  # fmt: skip
    return cells


def prepare(cell, own, eye):
    """Loads a cell's weights, and the hidden states of its stretch where they are not at hand."""
    parts, low = own["weight"].shape[2], cell["c0"] + cell["a0"]
    if cell["side"] == GATE_SIDE:
        count, width = own["gate"].shape[1], cell["a1"] - cell["a0"]
        w_sb = sbuf((PARTITIONS, parts, width), own["gate"].dtype)
        pattern = [[count, PARTITIONS], [PARTITIONS * count, parts], [1, width]]
        nisa.dma_copy(dst=w_sb, src=own["gate"].ap(pattern=pattern, offset=low))
    else:
        index = 0
        while own["cells"][index][0] != low:
            index = index + 1
        w_sb = load(own["weight"][index], own["weight"].dtype)
    if own["stretch"] != (cell["b"], cell["t0"]):
        own["stretch"] = (cell["b"], cell["t0"])
        own["h"] = transpose_hidden(cell, own["hidden"], parts, eye)
    cell["w"], cell["h"] = w_sb, own["h"]


def transpose_hidden(cell, hidden, parts, eye):
    """Loads hidden states of a cell's tokens as [128, d / 128, tokens]."""
    n, t0, count = cell["b"], cell["t0"], cell["t1"] - cell["t0"]
    out_sb = sbuf((PARTITIONS, parts, count), hidden.dtype)
    for span in split(count, PARTITIONS):
        first, stop = span
        rows = stop - first
        h_sb = load(hidden[n, t0 + first : t0 + stop, :], hidden.dtype)
        for group in split(parts, BANK // PARTITIONS):
            low, high = group
            out_ps = psum((PARTITIONS, high - low, rows))
            for part in range(low, high):
                nisa.nc_matmul(
                    dst=out_ps[:, part - low, :],
                    stationary=h_sb[:, part * PARTITIONS : (part + 1) * PARTITIONS],
                    moving=eye[0:rows, 0:rows], is_moving_onezero=True,
                )  # fmt: skip
            copy_scaled(out_sb[:, low:high, first:stop], out_ps)
    return out_sb


def project(dst, cell):
    """Sets dst [channels, tokens] in SBUF to x of a cell."""
    w_sb, h_sb = cell["w"], cell["h"]
    out_ps = psum(dst.shape)
    for part in range(h_sb.shape[1]):
        nisa.nc_matmul(dst=out_ps, stationary=w_sb[:, part, 0 : dst.shape[0]], moving=h_sb[:, part, :])
    copy_scaled(dst, out_ps)


def project_gate(cell, own):
    """Stores z of a cell in HBM."""
    w_sb, h_sb = cell["w"], cell["h"]
    count, width = h_sb.shape[2], w_sb.shape[2]
    z_sb = allocate_tokens(cell, count, own["z"].dtype)
    for span in split(count, PARTITIONS):
        first, stop = span
        out_ps = psum((stop - first, width))
        for part in range(h_sb.shape[1]):
            nisa.nc_matmul(dst=out_ps, stationary=h_sb[:, part, first:stop], moving=w_sb[:, part, :])
        copy_scaled(z_sb[0 : stop - first, first // PARTITIONS, :], out_ps)
    store_tokens(own["z"], z_sb, cell, cell["t0"], count)


def keep(window_sb, before, cell, stream, x, eye):
    """Stores x of a bank of cells in HBM, of which a window [channels, before + tokens] is one."""
    C, count = window_sb.shape[0], window_sb.shape[1] - before
    if cell["part"] == 0:
        stream["kept"] = allocate_tokens(cell, count, x.dtype)
    out_ps = psum((stream["kept"].shape[0], stream["kept"].shape[1], C))
    a0, a1 = cell["a0"], cell["a1"]
    for span in split(count, PARTITIONS):
        first, stop = span
        nisa.nc_matmul(
            dst=out_ps[0 : stop - first, first // PARTITIONS, :],
            stationary=window_sb[:, before + first : before + stop], moving=eye[0:C, 0:C],
            is_moving_onezero=True,
        )  # fmt: skip
    copy_blocks(stream["kept"], a0, a1, out_ps, count)
    if cell["a1"] == cell["c1"] - cell["c0"]:
        store_tokens(x, stream["kept"], cell, cell["t0"], count)
