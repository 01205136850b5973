"""Inverts I + L for strictly lower L, for all lanes of a wave at once, by merging blocks in place.

Blocks of size s are inverted; pairs of them become blocks of size 2s, because

    [ A  0 ]^-1   [ A^-1             0    ]
    [ M  B ]    = [ -B^-1 M A^-1     B^-1 ]

is T - T M T, where T holds the inverted blocks on its diagonal and M the lower left corners, cut out of L.
This is forward substitution by blocks, so nothing grows that the result does not hold. With keys correlated
.999 a power series over the chunk loses every digit, this method none.

Only the even block columns of T M T are not 0, and only the odd ones of its transpose. So products and
updates are C/2 wide, half of what masked C x C products cost. L needs no mask before: rows that do not belong
to the pair are dropped where products leave PSUM. The kernels hold -L transposed, so that corners are added.
"""

from delta_trn.nki_kernels.language import nisa, nl
from delta_trn.nki_kernels.tiles import copy_scaled, psum, repeat_over_lanes, sbuf


def build_pair_masks(C):
    """Builds a mask [C, C/2] per level: 1 where a row is in the odd block of the (even) column's pair."""
    ones_sb = sbuf((C, C // 2))
    nisa.memset(dst=ones_sb, value=1.0)
    masks = []
    s = 1
    while s < C:
        pairs = C // (2 * s)
        below_sb = sbuf((C, C // 2))  # row >= 2 s pair + s
        nisa.affine_select(
            dst=below_sb, pattern=[[-2 * s, pairs], [0, s]], channel_multiplier=1, offset=-s,
            on_true_tile=ones_sb, on_false_value=0.0, cmp_op=nl.greater_equal,
        )  # fmt: skip
        inside_sb = sbuf((C, C // 2))  # and row < 2 s (pair + 1)
        nisa.affine_select(
            dst=inside_sb, pattern=[[2 * s, pairs], [0, s]], channel_multiplier=-1, offset=2 * s - 1,
            on_true_tile=below_sb, on_false_value=0.0, cmp_op=nl.greater_equal,
        )  # fmt: skip
        masks.append(inside_sb)
        s = 2 * s
    return masks


def allocate_workspace(C, lanes):
    """Allocates a tile [C, lanes, pairs, 2, s] per level for M T; its odd blocks are 0 and stay 0."""
    tiles = []
    s = 1
    while s < C:
        tile_sb = sbuf((C, lanes, C // (2 * s), 2, s))
        nisa.memset(dst=tile_sb, value=0.0)
        tiles.append(tile_sb)
        s = 2 * s
    return tiles


def count_levels(C):
    """Returns the levels of merging for C rows: log2(C)."""
    count = 0
    s = 1
    while s < C:
        s = 2 * s
        count = count + 1
    return count


def start_inverses(minus_L_ts, table):
    """Returns T and its transpose before the first level, identities: two lists of tiles [C, lanes, C]."""
    Ts = []
    T_ts = []
    for minus_L_t in minus_L_ts:
        T_sb, T_t_sb = sbuf(minus_L_t.shape), sbuf(minus_L_t.shape)
        identities = repeat_over_lanes(table, "identity", minus_L_t.shape[1])
        copy_scaled(T_sb, identities)
        copy_scaled(T_t_sb, identities)
        Ts.append(T_sb)
        T_ts.append(T_t_sb)
    return Ts, T_ts


def merge(minus_L_ts, Ts, T_ts, spaces, masks, level, both):
    """Merges one level in place: blocks of 2^level become blocks of twice the size.

    Args:
        minus_L_ts      -L transposed, a tile [C, lanes, C] per bundle; below its diagonal, anything finite
        Ts, T_ts        T and its transpose, likewise
        spaces          what `allocate_workspace` returns, per bundle
        masks           what `build_pair_masks` returns
        both            False: the last level leaves T_ts as they were, only T is complete

    Notes:
        Each loop over bundles issues one stage for all of them, so that one bundle's products run while
        another's leave PSUM. A reshape [C, lanes, C] -> [C, lanes, pairs, 2, s] shows the columns as pairs of
        an even and an odd block.
    """
    C = Ts[0].shape[0]
    s = 1
    for _ in range(level):
        s = 2 * s
    half, pairs = C // 2, C // (2 * s)
    products = []  # all of -L T in the even columns
    for b in range(len(Ts)):
        lanes = Ts[b].shape[1]
        even = Ts[b].reshape((C, lanes, pairs, 2, s))
        LT_ps = psum((C, lanes, half))
        for lane in range(lanes):
            nisa.nc_matmul(
                dst=LT_ps[:, lane, :], stationary=minus_L_ts[b][:, lane, :], moving=even[:, lane, :, 0, :]
            )
        products.append(LT_ps)
    corners = []  # -M T: the same, masked
    for b in range(len(Ts)):
        lanes = Ts[b].shape[1]
        MT_sb = spaces[b][level][0:C, :, 0:pairs]
        nisa.tensor_tensor(
            dst=MT_sb[:, :, :, 0, :], data1=products[b].reshape((C, lanes, pairs, s)),
            # the mask [C, C/2] of the full size, its corner for C rows repeated over the lanes
            data2=masks[level].ap(pattern=[[masks[level].shape[1], C], [0, lanes], [s, pairs], [1, s]]),
            op=nl.multiply,
        )  # fmt: skip
        corners.append(MT_sb)
    for b in range(len(Ts)):
        lanes = Ts[b].shape[1]
        even = Ts[b].reshape((C, lanes, pairs, 2, s))[:, :, :, 0, :]
        odd = T_ts[b].reshape((C, lanes, pairs, 2, s))
        if s == 1:
            # T is the identity, so T M T is M T
            nisa.tensor_tensor(dst=even, data1=even, data2=corners[b][:, :, :, 0, :], op=nl.add)
        else:
            TMT_ps = psum((C, lanes, half))
            for lane in range(lanes):
                nisa.nc_matmul(
                    dst=TMT_ps[:, lane, :], stationary=T_ts[b][:, lane, :],
                    moving=corners[b][:, lane, :, 0, :],
                )  # fmt: skip
            nisa.tensor_tensor(dst=even, data1=even, data2=TMT_ps.reshape((C, lanes, pairs, s)), op=nl.add)
        if both or 2 * s < C:
            TMT_t_ps = psum((C, lanes, half))
            for lane in range(lanes):
                nisa.nc_matmul(
                    dst=TMT_t_ps[:, lane, :], stationary=corners[b][:, lane], moving=odd[:, lane, :, 1, :]
                )
            nisa.tensor_tensor(
                dst=odd[:, :, :, 1, :], data1=odd[:, :, :, 1, :],
                data2=TMT_t_ps.reshape((C, lanes, pairs, s)), op=nl.add,
            )  # fmt: skip


def invert(minus_L_ts, spaces, masks, table, both):
    """Inverts I + L of every bundle; returns T and its transpose, lists of tiles [C, lanes, C]."""
    Ts, T_ts = start_inverses(minus_L_ts, table)
    for level in range(count_levels(table["rows"])):
        merge(minus_L_ts, Ts, T_ts, spaces, masks, level, both)
    return Ts, T_ts
