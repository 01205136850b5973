"""Lists the stages of a layer's forward in the order in which they are issued."""

from delta_trn.nki_kernels.gated_delta_rule_fwd import (
    ALL,
    COLUMNS,
    DECAYS,
    EVEN,
    GATES,
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
SQUARES, GAIN, GATE, WINDOW, TAPS, SILU = 33, 34, 35, 36, 37, 38


def list_layer_stages():
    """Lists what is issued in one turn, as `list_stages` of the rule does, found in the same way.

    A stage of the convolution stands for its share of the turn's steps, wherever its chunks are.
    """
    return (
        (OUTPUT, ODD, -1), (MULTIPLY_W, EVEN, 0), (GATES, ODD, 4), (SOLVE + 2, ALL, 1), (WINDOW, ALL, 0),
        (COLUMNS, EVEN, 2), (WINDOW, ALL, 0), (WINDOW, ALL, 0), (WINDOW, ALL, 0),
        (TRANSPOSE_GAMMA_Q, EVEN, 1), (SILU, ALL, 0), (WINDOW, ALL, 0), (MATRIX_D, ODD, 4), (GATES, EVEN, 5),
        (MATRIX_D, EVEN, 3), (MULTIPLY_W, ODD, 0), (WINDOW, ALL, 0), (TRANSPOSE_K, ODD, 4),
        (TRANSPOSE_K, EVEN, 3), (GATE, EVEN, -1), (WINDOW, ALL, 0), (LOAD, ODD, 5), (MERGE, ALL, 1),
        (WINDOW, ALL, 0), (WINDOW, ALL, 0), (OUTPUT, EVEN, 0), (LOAD, EVEN, 6), (MERGE + 1, ALL, 1),
        (GAIN, ODD, -1), (WEIGHT, EVEN, 3), (TAPS, ALL, 0), (SCALE_K, EVEN, 4), (SCALE_Q, ODD, 4),
        (TAPS, ALL, 0), (SQUARES, ODD, -1), (SILU, ALL, 0), (SCALE_Q, EVEN, 5), (MERGE + 2, ALL, 1),
        (WINDOW, ALL, 0), (STATE, ODD, -1), (WINDOW, ALL, 0), (GAIN, EVEN, 0), (SCALE_V, EVEN, 1),
        (MERGE + 3, ALL, 1), (WINDOW, ALL, 0), (DECAYS, ODD, 5), (WINDOW, ALL, 0), (DECAYS, EVEN, 6),
        (WINDOW, ALL, 0), (MATRIX_P, ODD, 1), (NORMS, EVEN, 6), (TAPS, ALL, 0), (WEIGHT, ODD, 4),
        (MERGE + 4, ALL, 1), (SILU, ALL, 0), (RESIDUAL, ODD, 0), (TAPS, ALL, 0), (SILU, ALL, 0),
        (TAPS, ALL, 0), (MATRIX_L, ODD, 4), (NORMS, ODD, 5), (SCALE_K, ODD, 3), (MERGE + 5, ALL, 1),
        (TAPS, ALL, 0), (STATE, EVEN, 0), (MATRIX_L, EVEN, 3), (COLUMNS, ODD, 3), (GATE, ODD, -1),
        (MERGE + 6, ALL, 1), (SPREAD, ALL, 2), (MATRIX_P, EVEN, 1), (SILU, ALL, 0), (SCALE_V, ODD, 1),
        (TAPS, ALL, 0), (MERGE + 7, ALL, 1), (RESIDUAL, EVEN, 1), (SILU, ALL, 0), (MERGE + 8, ALL, 1),
        (TAPS, ALL, 0), (MULTIPLY_PT, EVEN, 1), (SOLVE, ALL, 2), (SILU, ALL, 0), (TAPS, ALL, 0),
        (TRANSPOSE_Q, ODD, 2), (SILU, ALL, 0), (TAPS, ALL, 0), (TRANSPOSE_Q, EVEN, 2), (SOLVE + 1, ALL, 2),
        (TAPS, ALL, 0), (SILU, ALL, 0), (TAPS, ALL, 0), (SILU, ALL, 0), (TAPS, ALL, 0), (SILU, ALL, 0),
        (MULTIPLY_PT, ODD, 1), (SQUARES, EVEN, 0), (TRANSPOSE_GAMMA_Q, ODD, 2), (SILU, ALL, 0),
        (TAPS, ALL, 0), (SILU, ALL, 0), (SILU, ALL, 0),
    )  # fmt: skip
