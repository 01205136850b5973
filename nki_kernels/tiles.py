"""What the kernels share on chip: tiles, constant masks, transpositions, and how work is cut.

A *lane* is one value head of one sequence. A *bundle* is up to four lanes of one sequence whose small
matrices lie side by side on the free axis, so that one instruction serves them all; a *wave* is the bundles
whose instructions are issued in turn, so that one waits while another computes.

Products that add up in PSUM always name the same view of it: whether a matmul adds or overwrites, NKI
decides by the view.
"""

from typing import Any

from delta_trn.nki_kernels.language import nisa, nl

PARTITIONS = 128
FAR_BELOW = -30000.0  # its exponential is 0, and bfloat16 can hold it


def sbuf(shape, dtype=nl.float32):
    return nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)


def psum(shape):
    return nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum)


def copied(dst, src, factor: Any = 1.0):
    """dst = factor src on the Scalar engine, which is the least busy; factor a number or a (P, 1) tile."""
    nisa.activation(dst=dst, op=nl.copy, data=src, scale=factor)


def spans(n):
    """0 .. n in equal parts of at most 128, the last one shorter: [(start, stop)]."""
    parts = (n + PARTITIONS - 1) // PARTITIONS
    size = (n + parts - 1) // parts
    found = []
    for start in range(0, n, size):
        found.append((start, min(start + size, n)))
    return found


def chunk_rows(tokens):
    """Rows of the tile that holds `tokens` tokens: the next power of two, and 2 at least."""
    rows = 2
    while rows < tokens:
        rows = rows * 2
    return rows


def bundles(N, H, HV, width):
    """Dicts: sequence n, value heads first .. first + lanes, key heads key_first .. + key_heads, and slot.

    A bundle holds whole groups of value heads that share a key, or, where a group is larger than `width`,
    an equal part of one. Gradients of q and k are sums over a bundle's lanes and go to head `slot`, which is
    key_first unless groups are split.
    """
    group = HV // H
    if group <= width:
        count = (H + width // group - 1) // (width // group)
        heads = (H + count - 1) // count
        size = heads * group
    else:
        size = width
        while group % size != 0:
            size = size - 1
    found = []
    for n in range(N):
        for first in range(0, HV, size):
            lanes = min(size, HV - first)
            found.append(
                {
                    "n": n, "first": first, "lanes": lanes, "key_first": first // group,
                    "key_heads": max(1, lanes // group), "slot": first // min(group, size),
                }
            )  # fmt: skip
    return found


def slots(H, HV, width):
    """How many heads the gradients of q and k have: H, or a multiple where groups are split."""
    every = bundles(1, H, HV, width)
    last = every[len(every) - 1]
    return last["slot"] + last["key_heads"]


def waves(N, H, HV, width, lanes):
    """Bundles in lists of about `lanes` lanes."""
    every = bundles(N, H, HV, width)
    per_wave = max(1, lanes // every[0]["lanes"])
    found = []
    for start in range(0, len(every), per_wave):
        found.append(every[start : start + per_wave])
    return found


def constants(C):
    """0/1 triangles and their like, [C, C] by row p and column f, built on chip once a call.

    identity p = f; upto p <= f; after p > f; since p >= f; before p < f; and what is
    added to exponents: drop_after, drop_since are FAR_BELOW there and 0 elsewhere. every and eye are all
    ones and the identity, [128, 128].
    """
    every = sbuf((PARTITIONS, PARTITIONS))
    nisa.memset(dst=every, value=1.0)
    eye = sbuf((PARTITIONS, PARTITIONS))
    nisa.affine_select(
        dst=eye, pattern=[[-1, PARTITIONS]], channel_multiplier=1, on_true_tile=every, on_false_value=0.0,
        cmp_op=nl.equal,
    )  # fmt: skip
    ones = every[0:C, 0:C]
    identity = sbuf((C, C))
    nisa.tensor_copy(dst=identity, src=eye[0:C, 0:C])
    upto = sbuf((C, C))
    after = sbuf((C, C))
    since = sbuf((C, C))
    before = sbuf((C, C))
    down = [[-1, C]]
    up = [[1, C]]
    nisa.affine_select(
        dst=upto, pattern=up, channel_multiplier=-1, on_true_tile=ones, on_false_value=0.0,
        cmp_op=nl.greater_equal,
    )  # fmt: skip
    nisa.affine_select(
        dst=after, pattern=down, channel_multiplier=1, on_true_tile=ones, on_false_value=0.0,
        cmp_op=nl.greater,
    )  # fmt: skip
    nisa.affine_select(
        dst=since, pattern=down, channel_multiplier=1, on_true_tile=ones, on_false_value=0.0,
        cmp_op=nl.greater_equal,
    )  # fmt: skip
    nisa.affine_select(
        dst=before, pattern=up, channel_multiplier=-1, on_true_tile=ones, on_false_value=0.0,
        cmp_op=nl.greater,
    )  # fmt: skip
    drop_after = sbuf((C, C))
    drop_since = sbuf((C, C))
    nisa.tensor_scalar(dst=drop_after, data=after, op0=nl.multiply, operand0=FAR_BELOW)
    nisa.tensor_scalar(dst=drop_since, data=since, op0=nl.multiply, operand0=FAR_BELOW)
    epsilon = sbuf((C, 1))
    nisa.memset(dst=epsilon, value=1e-6)
    return {
        "every": every, "eye": eye, "size": C, "epsilon": epsilon,
        "identity": identity, "upto": upto, "after": after, "since": since, "before": before,
        "drop_after": drop_after, "drop_since": drop_since,
    }  # fmt: skip


def cut(table, C):
    """The constants for a chunk of C rows: the corners of the full ones."""
    corners = {}
    for name in ("identity", "upto", "after", "since", "before", "drop_after", "drop_since"):
        corners[name] = table[name][0:C, 0:C]
    corners["every"] = table["every"]
    corners["eye"] = table["eye"]
    corners["epsilon"] = table["epsilon"][0:C, :]
    corners["size"] = table["size"]
    return corners


def over_lanes(table, name, rows, lanes):
    """A constant's corner [rows, rows], seen once per lane: a stride of 0."""
    return table[name].ap(pattern=[[table["size"], rows], [0, lanes], [1, rows]])


def transposed(sources, rows, parts, identity, factor=1.0):
    """[rows, F] views -> one tile [f, number of views, rows] per part (start, stop) of F, times factor.

    A product with the identity: half the price of nc_transpose in float32, as one operand is 0 and 1.
    """
    found = []
    for part in parts:
        start, stop = part
        ps = psum((stop - start, len(sources), rows))
        for i in range(len(sources)):
            nisa.nc_matmul(
                dst=ps[:, i, :], stationary=sources[i][:, start:stop], moving=identity, is_moving_onezero=True
            )
        tile = sbuf((stop - start, len(sources), rows))
        copied(tile, ps, factor)
        found.append(tile)
    return found


def loaded(src, tokens, rows, shape):
    """HBM [tokens, ...] in a float32 tile (rows, *shape); rows past the tokens are 0."""
    tile = sbuf((rows, *shape))
    if tokens < rows:
        nisa.memset(dst=tile, value=0.0)
    nisa.dma_copy(dst=tile[0:tokens], src=src)
    return tile
