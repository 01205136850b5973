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

# Stages besides those of the rule: of the norm, behind OUTPUT, and steps of the convolution
SQUARES, ROOT, UNIT, GAIN, GATE, WINDOW, TAPS, SILU = 34, 35, 36, 37, 38, 39, 40, 41


def list_layer_stages():
    """Lists what is issued in one turn, as `list_stages` of the rule does, found in the same way.

    A stage of the convolution stands for its share of the turn's steps, wherever its chunks are.
    """
    return (
        (SILU, ALL, 0), (GATES, EVEN, 4), (WINDOW, ALL, 0), (WINDOW, ALL, 0), (TRANSPOSE_K, EVEN, 5),
        (LOAD, ODD, 5), (SCALE_V, EVEN, 1), (WINDOW, ALL, 0), (WINDOW, ALL, 0), (SILU, ALL, 0),
        (SOLVE, ALL, 1), (SILU, ALL, 0), (WINDOW, ALL, 0), (SOLVE + 1, ALL, 1), (GATES, ODD, 4),
        (TAPS, ALL, 0), (OUTPUT, ODD, -1), (DECAYS, EVEN, 5), (TRANSPOSE_K, ODD, 4), (SILU, ALL, 0),
        (WINDOW, ALL, 0), (SOLVE + 2, ALL, 1), (SILU, ALL, 0), (DECAYS, ODD, 5), (COLUMNS, EVEN, 2),
        (MATRIX_D, EVEN, 4), (SILU, ALL, 0), (MATRIX_D, ODD, 4), (MULTIPLY_W, EVEN, 0), (MULTIPLY_W, ODD, 0),
        (MULTIPLY_PT, EVEN, 0), (MULTIPLY_PT, ODD, 0), (WINDOW, ALL, 0), (TRANSPOSE_Q, ODD, 4),
        (TRANSPOSE_GAMMA_Q, EVEN, 1), (LOAD, EVEN, 6), (OUTPUT, EVEN, 0), (TRANSPOSE_Q, EVEN, 1),
        (SILU, ALL, 0), (SILU, ALL, 0), (MERGE, ALL, 1), (TAPS, ALL, 0), (MERGE + 1, ALL, 1), (TAPS, ALL, 0),
        (WEIGHT, EVEN, 4), (SILU, ALL, 0), (TAPS, ALL, 0), (GAIN, EVEN, 0), (TAPS, ALL, 0),
        (RESIDUAL, ODD, 0), (MERGE + 2, ALL, 1), (SCALE_K, ODD, 1), (STATE, ODD, 0), (SCALE_V, ODD, 4),
        (SCALE_Q, EVEN, 2), (MERGE + 3, ALL, 1), (WINDOW, ALL, 0), (GATE, EVEN, -1), (TAPS, ALL, 0),
        (MATRIX_P, EVEN, 1), (TAPS, ALL, 0), (MATRIX_L, ODD, 3), (MERGE + 4, ALL, 1), (KEY_SQUARES, ODD, 5), (NORMS, ODD, 5),
        (WEIGHT, ODD, 4), (SQUARES, ODD, -1), (ROOT, ODD, -1), (UNIT, ODD, -1), (TAPS, ALL, 0), (WINDOW, ALL, 0), (WINDOW, ALL, 0),
        (STATE, EVEN, 0), (SQUARES, EVEN, 0), (ROOT, EVEN, 0), (UNIT, EVEN, 0), (MERGE + 5, ALL, 1), (WINDOW, ALL, 0), (COLUMNS, ODD, 2),
        (TRANSPOSE_GAMMA_Q, ODD, 2), (WINDOW, ALL, 0), (MERGE + 6, ALL, 1), (WINDOW, ALL, 0),
        (GATE, ODD, -1), (TAPS, ALL, 0), (TAPS, ALL, 0), (SILU, ALL, 0), (MERGE + 7, ALL, 1), (TAPS, ALL, 0),
        (SCALE_K, EVEN, 2), (TAPS, ALL, 0), (RESIDUAL, EVEN, 1), (MATRIX_L, EVEN, 3), (MERGE + 8, ALL, 1),
        (SILU, ALL, 0), (TAPS, ALL, 0), (SCALE_Q, ODD, 4), (MATRIX_P, ODD, 4), (GAIN, ODD, 0),
        (KEY_SQUARES, EVEN, 6), (NORMS, EVEN, 6), (SPREAD, ALL, 2), (TAPS, ALL, 0), (SILU, ALL, 0), (SILU, ALL, 0), (SILU, ALL, 0),
        (WINDOW, ALL, 0),
    )  # fmt: skip
