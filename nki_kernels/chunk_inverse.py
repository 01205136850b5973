"""Inverts I + L of chunks side by side, in the stages that the kernels of the gated delta rule share.

spread columns      L's blocks of 16 rows on the partitions that solve them
substitute          the inverses of these blocks, in three steps of five columns
merge               T, in three steps for each of three levels
"""

from delta_trn.nki_kernels.schedule import Stage, list_steps
from delta_trn.nki_kernels.triangular import (
    BLOCK,
    begin_solutions,
    count_levels,
    multiply_corners,
    place_blocks,
    spread_blocks,
    substitute,
    transpose_blocks,
    update_blocks,
)

STAGES = (
    Stage("spread columns", needs=("block_columns",), makes=("columns",)),
    Stage("substitute", needs=("columns",), makes=("blocks",)),
    Stage("merge", needs=("blocks",), makes=("T",), in_place=True),
)
NAMES = ("spread columns", "substitute", "merge")
SUBSTITUTIONS, COLUMNS = 3, 5  # steps, and columns of a step
LEVELS = 3  # merges of blocks of 16 to 128 rows


def invert_chunks(stage, share, shares, chunks, spaces, both, blocks):
    """Runs a share of one of these stages for chunks of equally many rows, each with its own space.

    Unless `both`, nobody needs the transpose of T afterwards.
    """
    if stage == "spread columns":
        block_columns = []
        for chunk in chunks:
            block_columns.append(chunk.block_columns)
        columns = spread_blocks(block_columns, blocks)
        for i in range(len(chunks)):
            chunks[i].columns = columns[i]
    elif stage == "substitute":
        first, stop = list_steps(SUBSTITUTIONS, share, shares)
        for step in range(first, stop):
            substitute_columns(step, chunks, blocks)
    else:
        inverses = []
        for chunk in chunks:
            inverses.append(chunk.inverse)
        first, stop = list_steps(3 * LEVELS, share, shares)
        for step in range(first, stop):
            merge_blocks(step // 3, step % 3, inverses, spaces, blocks, chunks[0].table, both)


def substitute_columns(step, chunks, blocks):
    """Solves a third of the columns of all blocks; the last third puts the inverted blocks on a diagonal."""
    table = chunks[0].table
    minus_L_ts, columns, solutions = [], [], []
    for chunk in chunks:
        minus_L_ts.append(chunk.minus_L_t)
        columns.append(chunk.columns)
    if step == 0:
        solutions = begin_solutions(minus_L_ts, blocks)
        for i in range(len(chunks)):
            chunks[i].solution = solutions[i]
    else:
        for chunk in chunks:
            solutions.append(chunk.solution)
    last = min(BLOCK, table["rows"]) - 1
    substitute(solutions, columns, min(step * COLUMNS, last), min((step + 1) * COLUMNS, last))
    if step == SUBSTITUTIONS - 1:
        inverses = place_blocks(minus_L_ts, solutions, blocks, table)
        for i in range(len(chunks)):
            chunks[i].inverse = inverses[i]


def merge_blocks(level, third, inverses, spaces, blocks, table, both):
    """Runs a third of a merge; a chunk of few rows has fewer levels."""
    if level >= count_levels(table["rows"]):
        return
    if third == 0:
        transpose_blocks(inverses, blocks, level, table, both)
    elif third == 1:
        multiply_corners(inverses, spaces, blocks, level, table)
    else:
        update_blocks(inverses, spaces, level, table, both)
