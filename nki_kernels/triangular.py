"""The inverse of I - G for strictly lower G, all lanes of a wave at once, by merging blocks in place.

Blocks of size s are inverted; pairs of them become blocks of size 2s, because

    [ A  0 ]^-1   [ A^-1            0    ]
    [ -G D ]    = [ D^-1 G A^-1     D^-1 ]

is T + T M T for block-diagonal T and M = what G has in the lower left corners. This is forward substitution
by blocks, so nothing grows that the result does not hold: with keys correlated .999 a power series over the
chunk loses every digit, this none.

Only the even block columns of T M T are not 0, and only the odd ones of its transpose: products and updates
are C/2 wide, half of what masked C x C products cost. G needs no mask before: rows that do not belong to
the pair are dropped where products leave PSUM.
"""

from delta_trn.nki_kernels.language import nisa, nl
from delta_trn.nki_kernels.tiles import copied, over_lanes, psum, sbuf


def pair_masks(C):
    """[C, C/2] per level: 1 where a row is in the odd block of the pair of the (even) column's block."""
    ones = sbuf((C, C // 2))
    nisa.memset(dst=ones, value=1.0)
    masks = []
    s = 1
    while s < C:
        pairs = C // (2 * s)
        odd = sbuf((C, C // 2))
        nisa.affine_select(
            dst=odd, pattern=[[-2 * s, pairs], [0, s]], channel_multiplier=1, offset=-s, on_true_tile=ones,
            on_false_value=0.0, cmp_op=nl.greater_equal,
        )  # fmt: skip
        inside = sbuf((C, C // 2))
        nisa.affine_select(
            dst=inside, pattern=[[2 * s, pairs], [0, s]], channel_multiplier=-1, offset=2 * s - 1,
            on_true_tile=odd, on_false_value=0.0, cmp_op=nl.greater_equal,
        )  # fmt: skip
        masks.append(inside)
        s = 2 * s
    return masks


def workspace(C, lanes):
    """Per level a tile [C, lanes, pairs, 2, s] whose odd blocks stay 0: M T in the columns where it is."""
    tiles = []
    s = 1
    while s < C:
        tile = sbuf((C, lanes, C // (2 * s), 2, s))
        nisa.memset(dst=tile, value=0.0)
        tiles.append(tile)
        s = 2 * s
    return tiles


def level_count(C):
    """Levels of merging for C rows: log2(C)."""
    count = 0
    s = 1
    while s < C:
        s = 2 * s
        count = count + 1
    return count


def identities(Gts, table, C):
    """T and its transpose before the first level: two lists of tiles [C, lanes, C]."""
    Ts = []
    Tts = []
    for b in range(len(Gts)):
        lanes = Gts[b].shape[1]
        T = sbuf((C, lanes, C))
        Tt = sbuf((C, lanes, C))
        copied(T, over_lanes(table, "identity", C, lanes))
        copied(Tt, over_lanes(table, "identity", C, lanes))
        Ts.append(T)
        Tts.append(Tt)
    return Ts, Tts


def merge(Gts, Ts, Tts, spaces, masks, C, level, both):
    """One level, in place: blocks of 2^level become blocks of twice the size.

    Gts         G transposed, a tile [C, lanes, C] per bundle; below its diagonal, anything finite
    spaces      a `workspace` per bundle
    both        False: the last level leaves Tt as it was, only T is complete
    """
    s = 1
    for _ in range(level):
        s = 2 * s
    half, pairs = C // 2, C // (2 * s)
    products = []
    for b in range(len(Gts)):
        lanes = Gts[b].shape[1]
        even = Ts[b].reshape((C, lanes, pairs, 2, s))
        ps = psum((C, lanes, half))
        for lane in range(lanes):
            nisa.nc_matmul(dst=ps[:, lane, :], stationary=Gts[b][:, lane, :], moving=even[:, lane, :, 0, :])
        products.append(ps)
    corners = []
    for b in range(len(Gts)):
        lanes = Gts[b].shape[1]
        MT = spaces[b][level][0:C, :, 0:pairs]
        nisa.tensor_tensor(
            dst=MT[:, :, :, 0, :], data1=products[b].reshape((C, lanes, pairs, s)),
            data2=masks[level].ap(pattern=[[masks[level].shape[1], C], [0, lanes], [s, pairs], [1, s]]),
            op=nl.multiply,
        )  # fmt: skip
        corners.append(MT)
    for b in range(len(Gts)):
        lanes = Gts[b].shape[1]
        even = Ts[b].reshape((C, lanes, pairs, 2, s))[:, :, :, 0, :]
        odd = Tts[b].reshape((C, lanes, pairs, 2, s))
        if s == 1:
            nisa.tensor_tensor(dst=even, data1=even, data2=corners[b][:, :, :, 0, :], op=nl.add)
        else:
            ps = psum((C, lanes, half))
            for lane in range(lanes):
                nisa.nc_matmul(
                    dst=ps[:, lane, :], stationary=Tts[b][:, lane, :], moving=corners[b][:, lane, :, 0, :]
                )
            nisa.tensor_tensor(dst=even, data1=even, data2=ps.reshape((C, lanes, pairs, s)), op=nl.add)
        if both or 2 * s < C:
            ps = psum((C, lanes, half))
            for lane in range(lanes):
                nisa.nc_matmul(
                    dst=ps[:, lane, :], stationary=corners[b][:, lane], moving=odd[:, lane, :, 1, :]
                )
            nisa.tensor_tensor(
                dst=odd[:, :, :, 1, :], data1=odd[:, :, :, 1, :], data2=ps.reshape((C, lanes, pairs, s)),
                op=nl.add,
            )  # fmt: skip


def inverses(Gts, spaces, masks, table, C, both):
    """(I - G)^-1 of every bundle, two lists of tiles [C, lanes, C]: T and its transpose; see `merge`."""
    Ts, Tts = identities(Gts, table, C)
    for level in range(level_count(C)):
        merge(Gts, Ts, Tts, spaces, masks, C, level, both)
    return Ts, Tts
