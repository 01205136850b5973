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
            dst=below_sb, pattern=[[-2 * s, pairs], [0, s]], offset=-s, channel_multiplier=1,
            on_true_tile=ones_sb, on_false_value=0.0, cmp_op=nl.greater_equal,
        )  # fmt: skip
        inside_sb = sbuf((C, C // 2))  # and row < 2 s (pair + 1)
        nisa.affine_select(
            dst=inside_sb, pattern=[[2 * s, pairs], [0, s]], offset=2 * s - 1, channel_multiplier=-1,
            on_true_tile=below_sb, on_false_value=0.0, cmp_op=nl.greater_equal,
        )  # fmt: skip
        masks.append(inside_sb)
        s = 2 * s
    return masks


def allocate_workspace(C, lanes):
    """Allocates a tile [C, lanes, C] per level for M T; its odd blocks of columns are 0 and stay 0."""
    tiles = []
    s = 1
    while s < C:
        tile_sb = sbuf((C, lanes, C))
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
    """Returns per bundle what `merge` works on before the first level, a dict.

    minus_L_t       -L transposed, a tile [C, lanes, C]; below its diagonal, anything finite
    T, T_t          T and its transpose, identities yet, tiles [C, lanes, C]
    even, odd       what `list_columns` returns for the coming level: even blocks of T, odd ones of T_t
    """
    inverses = []
    for minus_L_t in minus_L_ts:
        T_sb, T_t_sb = sbuf(minus_L_t.shape), sbuf(minus_L_t.shape)
        identities = repeat_over_lanes(table, "identity", minus_L_t.shape[1])
        copy_scaled(T_sb, identities)
        copy_scaled(T_t_sb, identities)
        inverses.append(
            {
                "minus_L_t": minus_L_t, "T": T_sb, "T_t": T_t_sb,
                "even": list_columns(T_sb, 1, 0), "odd": list_columns(T_t_sb, 1, 1),
            }
        )  # fmt: skip
    return inverses


def list_columns(x_sb, s, side):
    """Lists per lane the even (side 0) or odd blocks of s columns of x [C, lanes, C], [C, C / 2].

    A product takes operands of two dimensions only, so blocks that no step reaches are copied side by side.
    """
    C, lanes = x_sb.shape[0], x_sb.shape[1]
    views = []
    if s == 1 or 2 * s == C:
        for lane in range(lanes):
            views.append(x_sb[:, lane, side:C:2] if s == 1 else x_sb[:, lane, side * s : side * s + s])
        return views
    pairs = C // (2 * s)
    compact_sb = sbuf((C, lanes, C // 2))
    copy_scaled(
        compact_sb.reshape((C, lanes, pairs, s)), x_sb.reshape((C, lanes, pairs, 2, s))[:, :, :, side, :]
    )
    for lane in range(lanes):
        views.append(compact_sb[:, lane, :])
    return views


def merge(inverses, spaces, masks, level, both):
    """Merges one level in place: blocks of 2^level become blocks of twice the size.

    Args:
        inverses        what `start_inverses` returns, per bundle
        spaces          what `allocate_workspace` returns, per bundle
        masks           what `build_pair_masks` returns
        both            False: the last level leaves T_t as it was, only T is complete

    Notes:
        Each loop over bundles issues one stage for all of them, so that one bundle's products run while
        another's leave PSUM. A reshape [C, lanes, C] -> [C, lanes, pairs, 2, s] shows the columns as pairs of
        an even and an odd block.
    """
    C = inverses[0]["T"].shape[0]
    s = 1
    for _ in range(level):
        s = 2 * s
    half, pairs, last = C // 2, C // (2 * s), 2 * s == C
    products = []  # all of -L T in the even columns
    for inverse in inverses:
        lanes = inverse["T"].shape[1]
        LT_ps = psum((C, lanes, half))
        for lane in range(lanes):
            nisa.nc_matmul(
                dst=LT_ps[:, lane, :],
                stationary=inverse["minus_L_t"][:, lane, :],
                moving=inverse["even"][lane],
            )
        products.append(LT_ps)
    corners = []  # -M T: the same, masked
    for b in range(len(inverses)):
        lanes = inverses[b]["T"].shape[1]
        MT_sb = sbuf((C, lanes, half))
        MT = MT_sb.reshape((C, lanes, pairs, s))
        nisa.tensor_tensor(
            dst=MT, data1=products[b].reshape((C, lanes, pairs, s)),
            # the mask [C, C/2] of the full size, its corner for C rows repeated over the lanes
            data2=masks[level].ap(
                pattern=[[masks[level].shape[1], C], [0, lanes], [s, pairs], [1, s]], offset=0
            ),
            op=nl.multiply,
        )  # fmt: skip
        corners.append(MT_sb)
        if both or not last:
            space_sb = spaces[b][level]
            size = space_sb.shape[0]
            blocks = space_sb.reshape((size, lanes, size // (2 * s), 2, s))
            copy_scaled(blocks[0:C, :, 0:pairs, 0, :], MT)
    for b in range(len(inverses)):
        T_sb = inverses[b]["T"]
        lanes = T_sb.shape[1]
        even = T_sb.reshape((C, lanes, pairs, 2, s))[:, :, :, 0, :]
        update = corners[b]  # T M T; at the first level T is the identity
        if s > 1:
            update = psum((C, lanes, half))
            for lane in range(lanes):
                nisa.nc_matmul(
                    dst=update[:, lane, :], stationary=inverses[b]["T_t"][:, lane, :],
                    moving=corners[b][:, lane, :],
                )  # fmt: skip
        nisa.tensor_tensor(dst=even, data1=even, data2=update.reshape((C, lanes, pairs, s)), op=nl.add)
        if not last:
            inverses[b]["even"] = list_columns(T_sb, 2 * s, 0)
        if both or not last:
            update_transpose(inverses[b], spaces[b][level], s, last)


def update_transpose(inverse, space_sb, s, last):
    """Adds (T M T)^T to the odd blocks of T_t; -M T lies in space [C, lanes, C]."""
    T_t_sb = inverse["T_t"]
    C, lanes = T_t_sb.shape[0], T_t_sb.shape[1]
    half, pairs = C // 2, C // (2 * s)
    odd = T_t_sb.reshape((C, lanes, pairs, 2, s))[:, :, :, 1, :]
    update_ps = psum((C, lanes, half))
    for lane in range(lanes):
        nisa.nc_matmul(
            dst=update_ps[:, lane, :], stationary=space_sb[0:C, lane, 0:C], moving=inverse["odd"][lane]
        )
    nisa.tensor_tensor(dst=odd, data1=odd, data2=update_ps.reshape((C, lanes, pairs, s)), op=nl.add)
    if not last:
        inverse["odd"] = list_columns(T_t_sb, 2 * s, 1)


def invert(minus_L_ts, spaces, masks, table, both):
    """Inverts I + L of every bundle; returns what `start_inverses` does, T and, if `both`, T_t complete."""
    inverses = start_inverses(minus_L_ts, table)
    for level in range(count_levels(table["rows"])):
        merge(inverses, spaces, masks, level, both)
    return inverses
