"""Lists the stages of a layer's forward in the order in which they are issued."""

from delta_trn.nki_kernels.gated_delta_rule_fwd import (
    ALL,
    COLUMNS,
    DECAYS,
    EVEN,
    GATES,
    KEY_SQUARES,
    LOAD,
    MATRIX_D,
    MATRIX_L,
    MATRIX_P,
    MERGE,
    MULTIPLY_PT,
    MULTIPLY_W,
    NORMS,
    ODD,
    OUTPUT,
    RESIDUAL,
    SCALE_K,
    SCALE_Q,
    SCALE_V,
    SOLVE,
    SPREAD,
    STATE,
    TRANSPOSE_GAMMA_Q,
    TRANSPOSE_K,
    TRANSPOSE_Q,
    WEIGHT,
)

# Stages besides those of the rule
ROWS, ROOT, UNIT = 34, 35, 36  # of the norm, behind OUTPUT: squares, r and h, in backward too
GAIN, GATE = 37, 38  # of the norm
WINDOW, TAPS, SILU = 39, 40, 41  # steps of the convolution


def list_layer_stages():
    """Lists what is issued in one turn, as `list_stages` of the rule does, found in the same way.

    A stage of the convolution stands for its share of the turn's steps, wherever its chunks are.
    """
    return (
        (TAPS, ALL, 0), (WINDOW, ALL, 0), (MULTIPLY_PT, EVEN, 0), (TRANSPOSE_K, EVEN, 3), (WINDOW, ALL, 0),
        (TRANSPOSE_Q, EVEN, 1), (WINDOW, ALL, 0), (WINDOW, ALL, 0), (UNIT, EVEN, -1), (WINDOW, ALL, 0),
        (WINDOW, ALL, 0), (TRANSPOSE_K, ODD, 3), (SILU, ALL, 0), (NORMS, EVEN, 4), (NORMS, ODD, 4),
        (TRANSPOSE_GAMMA_Q, ODD, 1), (SOLVE + 1, ALL, 1), (TAPS, ALL, 0), (SILU, ALL, 0), (TAPS, ALL, 0),
        (TAPS, ALL, 0), (DECAYS, EVEN, 4), (WINDOW, ALL, 0), (WINDOW, ALL, 0), (MULTIPLY_W, EVEN, 0),
        (TAPS, ALL, 0), (LOAD, ODD, 5), (TRANSPOSE_Q, ODD, 2), (MULTIPLY_W, ODD, 0), (SOLVE + 2, ALL, 1),
        (OUTPUT, EVEN, 0), (ROOT, ODD, -1), (COLUMNS, ODD, 2), (LOAD, EVEN, 5), (DECAYS, ODD, 5),
        (MERGE, ALL, 1), (STATE, EVEN, 0), (TAPS, ALL, 0), (SCALE_Q, EVEN, 2), (ROWS, EVEN, 0),
        (MERGE + 1, ALL, 1), (MATRIX_L, EVEN, 3), (RESIDUAL, EVEN, 1), (MERGE + 2, ALL, 1),
        (COLUMNS, EVEN, 2), (MATRIX_D, EVEN, 4), (MATRIX_D, ODD, 5), (TRANSPOSE_GAMMA_Q, EVEN, 1),
        (WINDOW, ALL, 0), (TAPS, ALL, 0), (SILU, ALL, 0), (ROOT, EVEN, 0), (WINDOW, ALL, 0),
        (MERGE + 3, ALL, 1), (TAPS, ALL, 0), (SILU, ALL, 0), (SILU, ALL, 0), (SCALE_K, ODD, 1),
        (MERGE + 4, ALL, 1), (RESIDUAL, ODD, 0), (MATRIX_L, ODD, 3), (MERGE + 5, ALL, 1), (MATRIX_P, ODD, 0),
        (WINDOW, ALL, 0), (STATE, ODD, 0), (UNIT, ODD, -1), (GAIN, EVEN, 1), (GATE, EVEN, -1),
        (GATES, EVEN, 4), (GATES, ODD, 4), (SILU, ALL, 0), (MULTIPLY_PT, ODD, 0), (SPREAD, ALL, 2),
        (WINDOW, ALL, 0), (SOLVE, ALL, 2), (GAIN, ODD, 1), (WINDOW, ALL, 0), (MERGE + 6, ALL, 1),
        (TAPS, ALL, 0), (SCALE_V, EVEN, 3), (SILU, ALL, 0), (TAPS, ALL, 0), (KEY_SQUARES, EVEN, 5),
        (GATE, ODD, -1), (OUTPUT, ODD, 0), (SILU, ALL, 0), (WINDOW, ALL, 0), (TAPS, ALL, 0), (TAPS, ALL, 0),
        (SILU, ALL, 0), (SCALE_Q, ODD, 2), (TAPS, ALL, 0), (MERGE + 7, ALL, 1), (KEY_SQUARES, ODD, 5),
        (WEIGHT, EVEN, 4), (SCALE_K, EVEN, 1), (ROWS, ODD, 0), (SILU, ALL, 0), (MATRIX_P, EVEN, 1),
        (SILU, ALL, 0), (MERGE + 8, ALL, 1), (WEIGHT, ODD, 4), (SCALE_V, ODD, 1), (SILU, ALL, 0),
        (TAPS, ALL, 0), (SILU, ALL, 0), (SILU, ALL, 0),
    )  # fmt: skip
