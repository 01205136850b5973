"""Inverts I + L for strictly lower L, for all lanes of a wave at once: blocks of 8, then pairs of
blocks.

A block of 8 rows is solved by substitution, column by column of L, in all blocks and lanes at
once. Each partition p holds a column of its block's inverse, x, as a row of 8 numbers, and
computes

    x = e_p;   for a = 0 .. 6:    x_c -= L_ca x_a   for c > a

For that it needs its whole block of L, 7 columns of 8 numbers. One product spreads them: ones
where two partitions share a block, times the columns, each on the partition of its own number.

Then blocks of size s are merged to blocks of size 2 s, because

    [ A  0 ]^-1   [ A^-1             0    ]
    [ M  B ]    = [ -B^-1 M A^-1     B^-1 ]

is T - T M T, where T holds the inverted blocks on its diagonal and M the lower left corners, cut
out of L. All of this is forward substitution, so nothing grows that the result does not hold. With
keys correlated .999 a power series over the chunk loses every digit, this method none.

Yet what a merge rounds is relative to T's largest numbers. Substitution rounds each number of T by
itself, and where keys are equal and beta is 1.6, T falls off as 0.6^(i - j). There T is off by
eighty times as much as by substitution of all rows. Where products are float32, `refine` takes that
away: it adds T (I - (I + L) T).

Why both: a merge has three products of lanes that share nothing, and costs the Tensor engine the
same at s = 1 as at s = 64. Substitution costs it a third of one merge, and the Vector engine 14
short instructions. Blocks of 16 would save a merge, but take 30 of these, one after the other.

The transpose T_t is kept. A merge needs the even block columns of T, which are a product of T_t
with columns of the identity, cheaper than to keep T up to date. Only the odd block columns of (T M
T)^T are not 0. So products and updates are C/2 wide, half of what masked C x C products cost. L
needs no mask before: rows that do not belong to the pair are dropped where products leave PSUM. The
kernels hold -L transposed, so that corners are added.

The kernels run this in three stages, of chunks side by side (`invert_chunks`).
"""

from delta_trn.nki_kernels.language import nisa, nl
from delta_trn.nki_kernels.plan import BANK, split
from delta_trn.nki_kernels.schedule import Stage, list_steps
from delta_trn.nki_kernels.tiles import (
    add,
    add_product,
    add_selected,
    add_transposed,
    combine,
    copy_scaled,
    keep_triangle,
    multiply,
    psum,
    sbuf,
    select_affine,
)

BLOCK = 8  # rows of a block that is solved by substitution
GROUP = 32  # rows of the partitions at which an instruction may start
INVERTING = (
    Stage("spread columns", needs=("block_columns",), makes=("columns",)),
    Stage("substitute", needs=("columns",), makes=("blocks",)),
    Stage("merge", needs=("blocks",), makes=("T",), in_place=True),
)
INVERSE = ("spread columns", "substitute", "merge")
SUBSTITUTIONS, COLUMNS = 2, 4  # steps, and columns of a step
LEVELS = 4  # merges of blocks of 8 to 128 rows


def select_range(ones_sb, low, high, pattern):
    """Builds a matrix like ones_sb: 1 where low <= row - n < high, else 0;
    n is what the pattern counts.
    """
    out_sb = sbuf(ones_sb.shape)
    above, below = [], []
    for span in pattern:
        above.append([-span[0], span[1]])
        below.append([span[0], span[1]])
    select_affine(out_sb, ones_sb, 1, above, nl.greater_equal, -low)
    select_affine(out_sb, out_sb, -1, below, nl.greater_equal, high - 1)
    return out_sb


def build_block_constants(C):
    """Builds what inverting takes, once per call, all of 0 and 1, in a dict:

    shared          [C, C], 1 where two tokens share a block of 8
    place           [C, 8], 1 at each token's place in its block
    own             [C, 4], 1 at the place of a token's block among the blocks of its 32 tokens
    corners         per level [C, C/2]: 1 where a row is in the odd block of the (even) column's
                    pair
    even_columns    per level [C, C/2]: the even block columns of the identity
    """
    n = min(BLOCK, C)
    blocks = C // n
    ones_sb, half_ones_sb = sbuf((C, C)), sbuf((C, C // 2))
    nisa.memset(dst=ones_sb, value=1.0)
    nisa.memset(dst=half_ones_sb, value=1.0)
    shared_sb = select_range(ones_sb, 0, n, [[n, blocks], [0, n]])
    equal_sb = select_range(ones_sb, 0, 1, [[1, C]])
    per = min(GROUP, C) // n
    place_sb, own_sb = sbuf((C, n)), sbuf((C, per))
    nisa.tensor_reduce(
        dst=place_sb,
        op=nl.add,
        data=equal_sb.ap(pattern=[[C, C], [1, n], [n, blocks]], offset=0),
        axis=2,
    )
    nisa.tensor_reduce(
        dst=own_sb,
        op=nl.add,
        data=shared_sb.ap(pattern=[[C, C], [n, per], [per * n, blocks // per]], offset=0),
        axis=2,
    )
    corners, even_columns = [], []
    for s in list_sizes(C):
        pairs = C // (2 * s)
        corners.append(select_range(half_ones_sb, s, 2 * s, [[2 * s, pairs], [0, s]]))
        even_columns.append(select_range(half_ones_sb, 0, 1, [[2 * s, pairs], [1, s]]))
    return {
        "shared": shared_sb, "place": place_sb, "own": own_sb, "corners": corners,
        "even_columns": even_columns,
    }  # fmt: skip


def list_sizes(C):
    """Lists the sizes of the blocks that merge to C rows, one per level:
    8, 16 .. C / 2; none up to 8.
    """
    sizes = []
    s = BLOCK
    while s < C:
        sizes.append(s)
        s = 2 * s
    return sizes


def allocate_workspace(C, lanes):
    """Allocates a tile [C, lanes, C] per level for M T;
    its odd blocks of columns are 0 and stay 0.
    """
    tiles = []
    for _ in list_sizes(C):
        tile_sb = sbuf((C, lanes, C))
        nisa.memset(dst=tile_sb, value=0.0)
        tiles.append(tile_sb)
    return tiles


def gather_blocks(minus_L_t, blocks):
    """Returns the diagonal blocks of -L transposed [C, lanes, C] side by side, [C, lanes, 8].

    Instructions start at every 32nd partition only. So four blocks are copied, then one of each is
    kept.
    """
    C, lanes = minus_L_t.shape[0], minus_L_t.shape[1]
    if C <= BLOCK:
        return minus_L_t
    width = min(GROUP, C)
    per, own_sb = width // BLOCK, blocks["own"]
    groups_sb, kept_sb = sbuf((C, lanes, width)), sbuf((C, lanes, width))
    for start in range(0, C, width):
        stop = start + width
        copy_scaled(groups_sb[start:stop, :, :], minus_L_t[start:stop, :, start:stop])
    multiply(
        kept_sb.reshape((C, lanes, per, BLOCK)),
        groups_sb.reshape((C, lanes, per, BLOCK)),
        own_sb.ap(pattern=[[own_sb.shape[1], C], [0, lanes], [1, per], [0, BLOCK]], offset=0),
    )
    out_sb = sbuf((C, lanes, BLOCK))
    by_place = [[lanes * width, C], [width, lanes], [1, BLOCK], [BLOCK, per]]
    data = kept_sb.ap(pattern=by_place, offset=0)
    nisa.tensor_reduce(dst=out_sb, op=nl.add, data=data, axis=3)
    return out_sb


def list_block_columns(minus_L_t, blocks):
    """Returns the columns of each block of -L, each number on its own partition, [C, n - 1, lanes,
    n].

    n is 8, or C where that is less. At [p, a, lane, c] stands number c of row p if p is column a,
    else 0.
    """
    blocks_sb = gather_blocks(minus_L_t, blocks)
    C, lanes, n = blocks_sb.shape
    width, place_sb = lanes * n, blocks["place"]
    columns_sb = sbuf((C, n - 1, lanes, n))
    multiply(
        columns_sb.reshape((C, n - 1, width)),
        blocks_sb.ap(pattern=[[width, C], [0, n - 1], [1, width]], offset=0),
        place_sb.ap(pattern=[[place_sb.shape[1], C], [1, n - 1], [0, width]], offset=0),
    )
    return columns_sb


def spread_blocks(chunks, blocks):
    """Puts each partition's whole block on it, column a of -L at [C, a, lanes, n]: the lanes of
    all chunks side by side, so that one instruction of the substitution serves them all.

    The columns leave PSUM at once: Vector and Scalar engine take turns there, and substitution is
    long. `columns` are tiles [C, columns, lanes, n], all but the last with as many columns.
    """
    C, columns, _, n = chunks[0].block_columns.shape
    total = 0
    for chunk in chunks:
        chunk.first_lane = total
        total = total + chunk.block_columns.shape[2]
    tiles = []
    for span in split(columns, BANK // (total * n)):
        start, stop = span
        out_ps, out_sb = psum((C, stop - start, total, n)), sbuf((C, stop - start, total, n))
        for chunk in chunks:
            first, lanes = chunk.first_lane, chunk.block_columns.shape[2]
            moving = chunk.block_columns.reshape((C, columns * lanes * n))
            add_selected(
                out_ps[:, :, first : first + lanes, :], blocks["shared"][0:C, 0:C],
                moving[:, start * lanes * n : stop * lanes * n],
            )  # fmt: skip
        copy_scaled(out_sb, out_ps)
        tiles.append(out_sb)
    for chunk in chunks:
        chunk.columns = tiles


def substitute(chunk, start, stop):
    """Subtracts columns start .. stop of each block of L, of all chunks that share this one's
    solution.
    """
    x_sb, count = chunk.solution, chunk.columns[0].shape[1]
    C, total, n = x_sb.shape
    for a in range(start, stop):
        terms_sb = sbuf((C, total, n - 1 - a))
        multiply(
            terms_sb,
            chunk.columns[a // count][:, a % count, :, a + 1 : n],
            x_sb.ap(pattern=[[total * n, C], [n, total], [0, n - 1 - a]], offset=a),
        )
        later = x_sb[:, :, a + 1 : n]
        add(later, later, terms_sb)


def place_blocks(chunk, blocks):
    """Puts the inverted blocks on the diagonal of T_t; makes T where C <= 16,
    else the last merge does.
    """
    shared_sb, x_sb, first = blocks["shared"], chunk.solution, chunk.first_lane
    C, total, n = x_sb.shape
    lanes = chunk.minus_L_t.shape[1]
    chunk.T_t = sbuf((C, lanes, C))
    if C <= BLOCK:
        copy_scaled(chunk.T_t, x_sb[:, first : first + lanes, :])
        chunk.T = transpose_columns(chunk.T_t, chunk.table["identity"])
    else:
        multiply(
            chunk.T_t.reshape((C, lanes, C // n, n)),
            x_sb.ap(pattern=[[total * n, C], [n, lanes], [0, C // n], [1, n]], offset=first * n),
            shared_sb.ap(
                pattern=[[shared_sb.shape[1], C], [0, lanes], [n, C // n], [0, n]], offset=0
            ),
        )


def transpose_columns(x_sb, columns):
    """Computes x^T columns of each lane, with columns of the identity [C, free];
    x is [C, lanes, C].
    """
    C, lanes, free = x_sb.shape[0], x_sb.shape[1], columns.shape[1]
    out_ps = psum((C, lanes, free))
    for lane in range(lanes):
        add_transposed(out_ps[:, lane, :], x_sb[:, lane, :], columns)
    out_sb = sbuf((C, lanes, free))
    copy_scaled(out_sb, out_ps)
    return out_sb


def list_odd_columns(x_sb, s):
    """Lists per lane the odd blocks of s columns of x [C, lanes, C], [C, C / 2].

    A product takes operands of two dimensions only, so blocks that no step reaches are copied side
    by side.
    """
    C, lanes = x_sb.shape[0], x_sb.shape[1]
    views = []
    if 2 * s == C:
        for lane in range(lanes):
            views.append(x_sb[:, lane, s:C])
        return views
    pairs = C // (2 * s)
    compact_sb = sbuf((C, lanes, C // 2))
    copy_scaled(
        compact_sb.reshape((C, lanes, pairs, s)),
        x_sb.reshape((C, lanes, pairs, 2, s))[:, :, :, 1, :],
    )
    for lane in range(lanes):
        views.append(compact_sb[:, lane, :])
    return views


def is_refined(table):
    """Returns whether `refine` follows the last merge: where products are float32."""
    return table["products"] == nl.float32


def keeps_transpose(last, table, both):
    """Returns whether a merge brings T_t up to date: at the last level,
    only for `refine` or if `both`.
    """
    return both or not last or is_refined(table)


def transpose_blocks(chunks, blocks, level, both):
    """Makes the even columns of T, and all of them at the last level:
    the first third of a merge.
    """
    table = chunks[0].table
    C = table["rows"]
    s = list_sizes(C)[level]
    last = 2 * s == C
    corners = table["identity"] if last else blocks["even_columns"][level][0:C, 0 : C // 2]
    for chunk in chunks:
        chunk.T = transpose_columns(chunk.T_t, corners)
    for chunk in chunks:
        chunk.odd = list_odd_columns(chunk.T_t, s) if keeps_transpose(last, table, both) else []


def multiply_corners(chunk, space_sb, blocks, level):
    """Makes M T in the even columns of a level's space: the second third of a merge."""
    C, lanes, _ = chunk.minus_L_t.shape
    size, s = space_sb.shape[0], list_sizes(C)[level]
    half, pairs = C // 2, C // (2 * s)
    corners_sb = blocks["corners"][level]
    LT_ps = psum((C, lanes, half))  # all of -L T in the even columns
    for lane in range(lanes):
        add_product(LT_ps[:, lane, :], chunk.minus_L_t[:, lane, :], chunk.T[:, lane, 0:half])
    # -M T: the same, masked by the mask [C, C/2] of the full size, its corner for C rows for every lane
    multiply(
        space_sb.reshape((size, lanes, size // (2 * s), 2, s))[0:C, :, 0:pairs, 0, :],
        LT_ps.reshape((C, lanes, pairs, s)),
        corners_sb.ap(pattern=[[corners_sb.shape[1], C], [0, lanes], [s, pairs], [1, s]], offset=0),
    )


def update_blocks(chunk, space_sb, level, both):
    """Adds T M T to T at the last level, and its transpose to T_t: the last third of a merge."""
    C, lanes, _ = chunk.T_t.shape
    s = list_sizes(C)[level]
    half, pairs, last = C // 2, C // (2 * s), 2 * s == C
    if last:
        update_ps = psum((C, lanes, half))  # T M T
        for lane in range(lanes):
            add_product(update_ps[:, lane, :], chunk.T_t[:, lane, :], space_sb[0:C, lane, 0:half])
        even = chunk.T[:, :, 0:half]
        add(even, update_ps, even)
    if keeps_transpose(last, chunk.table, both):
        update_t_ps = psum((C, lanes, half))
        for lane in range(lanes):
            add_product(update_t_ps[:, lane, :], space_sb[0:C, lane, 0:C], chunk.odd[lane])
        columns = chunk.T_t.reshape((C, lanes, pairs, 2, s))[:, :, :, 1, :]
        add(columns, update_t_ps.reshape((C, lanes, pairs, s)), columns)


def refine(chunks, both):
    """Adds T E to the complete T, and its transpose to T_t if `both`; E = I - (I + L) T is what T
    lacks.

    E is made of -L T - T, whose diagonal and what is above it are cut off: T has ones there and
    zeros. The diagonal of `minus_L_t`, and what is below it, become 0 before.
    """
    residuals = []
    for chunk in chunks:
        keep_triangle(chunk.minus_L_t, 1, 1)
        E_sb = sbuf(chunk.T.shape)
        multiply_and_add(E_sb, chunk.minus_L_t, chunk.T, chunk.T, nl.subtract)
        keep_triangle(E_sb, -1, 1)
        residuals.append(E_sb)
    for b in range(len(chunks)):
        chunk, E_sb = chunks[b], residuals[b]
        multiply_and_add(chunk.T, chunk.T_t, E_sb, chunk.T, nl.add)
        if both:
            multiply_and_add(chunk.T_t, E_sb, chunk.T_t, chunk.T_t, nl.add)


def multiply_and_add(dst, x, y, z, op):
    """Sets dst to x^T y op z for each lane, in halves of the columns; all are [C, lanes, C]."""
    C, lanes = y.shape[0], y.shape[1]
    half = C // 2
    for low in range(0, C, half):
        out_ps = psum((C, lanes, half))
        for lane in range(lanes):
            add_product(out_ps[:, lane, :], x[:, lane, :], y[:, lane, low : low + half])
        combine(dst[:, :, low : low + half], out_ps, z[:, :, low : low + half], op)


def invert_chunks(stage, share, shares, chunks, spaces, both, blocks):
    """Runs a share of one of these stages for chunks of equally many rows, each with its own space.

    Unless `both`, nobody needs the transpose of T afterwards.
    """
    if stage == "spread columns":
        spread_blocks(chunks, blocks)
    elif stage == "substitute":
        first, stop = list_steps(SUBSTITUTIONS, share, shares)
        for step in range(first, stop):
            substitute_columns(step, chunks, blocks)
    else:
        first, stop = list_steps(3 * LEVELS, share, shares)
        for step in range(first, stop):
            merge_blocks(step // 3, step % 3, chunks, spaces, blocks, both)


def substitute_columns(step, chunks, blocks):
    """Solves half of the columns of all blocks; the last half puts the inverted blocks on a
    diagonal.
    """
    C, place_sb = chunks[0].table["rows"], blocks["place"]
    n = min(BLOCK, C)
    if step == 0:  # x = e_p on every partition, a tile [C, lanes of all chunks, n]
        total = chunks[0].columns[0].shape[2]
        x_sb = sbuf((C, total, n))
        copy_scaled(
            x_sb,
            place_sb.ap(pattern=[[place_sb.shape[1], C], [0, total], [1, n]], offset=0),
        )
        for chunk in chunks:
            chunk.solution = x_sb
    last = n - 1
    substitute(chunks[0], min(step * COLUMNS, last), min((step + 1) * COLUMNS, last))
    if step == SUBSTITUTIONS - 1:
        for chunk in chunks:
            place_blocks(chunk, blocks)


def merge_blocks(level, third, chunks, spaces, blocks, both):
    """Runs a third of a merge; a chunk of few rows has fewer levels."""
    levels = len(list_sizes(chunks[0].table["rows"]))
    if level >= levels:
        return
    if third == 0:
        transpose_blocks(chunks, blocks, level, both)
        return
    for b in range(len(chunks)):
        if third == 1:
            multiply_corners(chunks[b], spaces[b][level], blocks, level)
        else:
            update_blocks(chunks[b], spaces[b][level], level, both)
    if third == 2 and level == levels - 1 and is_refined(chunks[0].table):
        refine(chunks, both)
