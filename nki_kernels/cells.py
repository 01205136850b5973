"""Cuts a sequence [B, T, C] into cells of up to 128 channels and 512 tokens, and moves them: HBM, SBUF, PSUM.

A cell's tokens come from HBM with time on the partition axis, with those of up to 512 channels; a
transposition brings the channels of a cell there. Results go the other way.
"""

from delta_trn.nki_kernels.language import nisa
from delta_trn.nki_kernels.plan import BANK, PARTITIONS, split
from delta_trn.nki_kernels.tiles import copy_scaled, psum, sbuf


def cut_cells(B, T, C, W):
    """Cuts x [B, T, C] into cells of up to 128 channels and 512 tokens, dicts of these numbers:

    b, t0, t1, final    the row, the first token, the end, and whether the row ends there
    bank, c0, c1        the bank of 512 channels
    unit                counts the banks and stretches of tokens; the bank's parts follow each other
    part, a0, a1        the cell's channels in the bank
    group               counts the groups of up to 128 channels
    parts               how many cells have these tokens: the one before them is as many back
    latest              whether no later cell has the same channels
    """
    tokens, width = BANK, BANK
    while tokens * W > 4 * BANK:
        tokens = tokens // 2  # masks and masked slices, one per tap, are as long
    if W > 8:
        width = PARTITIONS  # and a diagonal per tap and group lies in SBUF
    banks, stretches = split(C, width), split(T, tokens)
    cells = []
    for bank in range(len(banks)):
        c0, c1 = banks[bank]
        parts = split(c1 - c0, PARTITIONS)
        for row in range(B * len(stretches)):
            t0, t1 = stretches[row % len(stretches)]
            for part in range(len(parts)):
                a0, a1 = parts[part]
                cells.append(
                    {
                        "b": row // len(stretches), "t0": t0, "t1": t1, "final": t1 == T, "bank": bank,
                        "c0": c0, "c1": c1, "unit": bank * B * len(stretches) + row, "part": part, "a0": a0,
                        "a1": a1, "parts": len(parts), "latest": row == B * len(stretches) - 1,
                        "group": bank * (width // PARTITIONS) + part,
                    }
                )  # fmt: skip
    return cells


def cut_returns(cell, W, continued):
    """Cuts the tokens whose dx a cell completes: [(first token, count)], at most 512 at a time.

    They end W - 1 tokens before the cell does, or with the row; those before the row are the prefix's.
    """
    start = cell["t0"] - (W - 1)
    if cell["t0"] == 0:
        start = -count_prefix_rows(W, continued)
    stop = cell["t1"] if cell["final"] else cell["t1"] - (W - 1)
    pieces = []
    for span in split(stop - start, BANK):
        low, high = span
        pieces.append((start + low, high - low))
    return pieces


def count_prefix_rows(W, continued):
    """Returns how many rows of a row's dx are the prefix's."""
    return W - 1 if continued else 0


def allocate_tokens(cell, count, dtype):
    """Allocates [128, blocks, channels] for a bank: token 128 k + p of a stretch lies at (p, k)."""
    blocks = (count + PARTITIONS - 1) // PARTITIONS
    return sbuf((min(count, PARTITIONS), blocks, cell["c1"] - cell["c0"]), dtype)


def view_tokens(x, cell, t0, blocks):
    """Views tokens of x [B, T, C], from t0 on, as [128, blocks, channels of the bank]."""
    T, C = x.shape[1], x.shape[2]
    return x.ap(
        pattern=[[C, PARTITIONS], [PARTITIONS * C, blocks], [1, cell["c1"] - cell["c0"]]],
        offset=(cell["b"] * T + t0) * C + cell["c0"],
    )


def load_tokens(x, cell):
    """Loads x of a cell's tokens, [128, blocks, channels of the bank]."""
    b, t0, t1 = cell["b"], cell["t0"], cell["t1"]
    x_sb = allocate_tokens(cell, t1 - t0, x.dtype)
    whole = (t1 - t0) // PARTITIONS
    rest = t1 - t0 - whole * PARTITIONS
    if whole > 0:
        nisa.dma_copy(dst=x_sb[:, 0:whole, :], src=view_tokens(x, cell, t0, whole))
    if rest > 0:
        nisa.dma_copy(dst=x_sb[0:rest, whole, :], src=x[b, t1 - rest : t1, cell["c0"] : cell["c1"]])
    return x_sb


def store_tokens(dst, x_sb, cell, t0, count):
    """Stores [128, blocks, channels] as `count` tokens of dst [B, T, C], from t0 on."""
    whole = count // PARTITIONS
    rest = count - whole * PARTITIONS
    if whole > 0:
        nisa.dma_copy(dst=view_tokens(dst, cell, t0, whole), src=x_sb[:, 0:whole, :])
    if rest > 0:
        nisa.dma_copy(
            dst=dst[cell["b"], t0 + count - rest : t0 + count, cell["c0"] : cell["c1"]],
            src=x_sb[0:rest, whole, :],
        )


def store_returns(dx, dprefix, dx_sb, cell, u0, count):
    """Stores dx [128, blocks, channels] of `count` tokens from u0 on; those below 0 go to dprefix."""
    if u0 >= 0:
        store_tokens(dx, dx_sb, cell, u0, count)
        return
    b, c0, c1 = cell["b"], cell["c0"], cell["c1"]
    nisa.dma_copy(dst=dprefix[b, :, c0:c1], src=dx_sb[0:-u0, 0, :])
    for span in split(count, PARTITIONS):
        start, stop = span
        low = max(start, -u0)
        if low < stop:
            nisa.dma_copy(
                dst=dx[b, u0 + low : u0 + stop, c0:c1],
                src=dx_sb[low - start : stop - start, start // PARTITIONS, :],
            )


def transpose_tokens(x_sb, cell, eye):
    """Transposes x [128, blocks, channels] of a cell: [C, tokens] in PSUM."""
    count = cell["t1"] - cell["t0"]
    out_ps = psum((cell["a1"] - cell["a0"], count))
    for span in split(count, PARTITIONS):
        start, stop = span
        nisa.nc_matmul(
            dst=out_ps[:, start:stop],
            stationary=x_sb[0 : stop - start, start // PARTITIONS, cell["a0"] : cell["a1"]],
            moving=eye[0 : stop - start, 0 : stop - start], is_moving_onezero=True,
        )  # fmt: skip
    return out_ps


def transpose_back(dst, y_t_sb, cell, eye):
    """Transposes y [C, tokens] to the cell's channels of dst [128, blocks, channels] in SBUF."""
    C, count = y_t_sb.shape
    whole = count // PARTITIONS
    rest = count - whole * PARTITIONS
    out_ps = psum((dst.shape[0], dst.shape[1], C))
    for span in split(count, PARTITIONS):
        start, stop = span
        nisa.nc_matmul(
            dst=out_ps[0 : stop - start, start // PARTITIONS, :], stationary=y_t_sb[:, start:stop],
            moving=eye[0:C, 0:C], is_moving_onezero=True,
        )  # fmt: skip
    a0, a1 = cell["a0"], cell["a1"]
    if whole > 0:
        copy_scaled(dst[:, 0:whole, a0:a1], out_ps[:, 0:whole, :])
    if rest > 0:
        copy_scaled(dst[0:rest, whole, a0:a1], out_ps[0:rest, whole, :])
