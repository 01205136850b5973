"""Lists the stages of `gated_delta_layer_bwd` in the order in which they are issued."""

from delta_trn.nki_kernels.gated_delta_rule_bwd import (
    ALONG,
    APPLY,
    CROSS,
    DECAY,
    FACTORS,
    KEYS,
    LOAD,
    MULTIPLY,
    MULTIPLY_PAIRS,
    NORM,
    PAIRS,
    READ,
    RESIDUAL,
    SCALE,
    SHORTEN,
    SOLVE,
    SPREAD,
    STATE,
    STATES,
    STRENGTH,
    SUBSTITUTE,
    SUM,
    TERMS,
    TRANSPOSE,
    TRANSPOSE_KEYS,
    TRANSPOSE_PAIRS,
)
from delta_trn.nki_kernels.gated_delta_rule_fwd import EVEN, ODD

# Stages besides those of the rule
KEPT = 30  # the state that a chunk meets
ROWS = 31  # r and h of the norm
GATE = 32  # SiLU(z), SiLU'(z)
PRODUCTS = 33  # dw of the norm, and what is left for dO
REST = 34  # dO / r
SLOPE = 35  # SiLU'(u)
DU = 36  # the gradient of u
TAPS = 37  # the convolution's products of elements for some taps of a cell
SUM_TAPS = 38  # sums of these
DZ = 39  # the gradient of z
MERGE = 40  # EVEN, CORNERS and UPDATE of all levels, nine stages
TRANSPOSE_STATES = 49  # of S and dS; TRANSPOSE is of the rest
HIDDEN_T = 50  # transposes dx and dz for the gradient of hidden states
HIDDEN = 51  # products of these with weights, of all bundles at once; its parity means nothing
SHARED = (TAPS, SUM_TAPS, HIDDEN_T, HIDDEN)  # an entry stands for a share of a chunk's


def list_gradient_stages():
    """Lists what is issued in one turn: (stage, bundles of which parity, by how many chunks it is behind).

    Each engine runs its instructions in order, so the order decides how long engines wait. Simulated
    annealing found this one, by the cost model; results/2026-11-24_simulated_layer says how.
    """
    return (
        (READ, EVEN, 1), (TRANSPOSE, EVEN, 1), (MULTIPLY_PAIRS, EVEN, 1), (PAIRS, EVEN, 1),
        (TRANSPOSE_STATES, EVEN, 1), (STATES, EVEN, 1), (MERGE, ODD, 1), (TRANSPOSE_PAIRS, EVEN, 1),
        (MERGE + 1, ODD, 1), (ROWS, EVEN, 0), (CROSS, EVEN, 1), (MERGE + 2, ODD, 1), (MERGE + 3, ODD, 1),
        (TERMS, EVEN, 1), (GATE, EVEN, 0), (MERGE + 4, ODD, 1), (LOAD, EVEN, 0), (SUM_TAPS, ODD, 2),
        (PRODUCTS, EVEN, 0), (FACTORS, EVEN, 0), (LOAD, ODD, 0), (SUM, EVEN, 1), (KEYS, EVEN, 1),
        (KEPT, ODD, 1), (TAPS, ODD, 2), (DZ, EVEN, 0), (MERGE + 5, ODD, 1), (ALONG, EVEN, 1),
        (TAPS, ODD, 2), (SUM_TAPS, ODD, 2), (MERGE + 6, ODD, 1), (STATE, EVEN, 1), (MERGE + 7, ODD, 1),
        (RESIDUAL, ODD, 1), (TAPS, ODD, 2), (NORM, EVEN, 1), (REST, EVEN, 0), (SUM_TAPS, ODD, 2),
        (SHORTEN, EVEN, 0), (SCALE, EVEN, 0), (MERGE + 8, ODD, 1), (FACTORS, ODD, 0), (TAPS, ODD, 2),
        (STRENGTH, EVEN, 1), (KEPT, EVEN, 0), (SUM_TAPS, ODD, 2), (DU, EVEN, 1), (TRANSPOSE_KEYS, EVEN, 0),
        (APPLY, ODD, 1), (DECAY, EVEN, 1), (MULTIPLY, EVEN, 0), (SUM_TAPS, ODD, 2), (SOLVE, ODD, 1),
        (SPREAD, EVEN, 0), (TAPS, ODD, 2), (DECAY, ODD, 2), (READ, ODD, 1), (TRANSPOSE, ODD, 1),
        (TRANSPOSE_STATES, ODD, 1), (MULTIPLY_PAIRS, ODD, 1), (SUM_TAPS, ODD, 2), (SUBSTITUTE, EVEN, 0),
        (MERGE, EVEN, 0), (TAPS, EVEN, 1), (PAIRS, ODD, 1), (STATES, ODD, 1), (TRANSPOSE_PAIRS, ODD, 1),
        (ROWS, ODD, 0), (TAPS, EVEN, 1), (SUM_TAPS, EVEN, 1), (MERGE + 1, EVEN, 0), (CROSS, ODD, 1),
        (TERMS, ODD, 1), (KEYS, ODD, 1), (MERGE + 2, EVEN, 0), (GATE, ODD, 0), (SUM_TAPS, EVEN, 1),
        (MERGE + 3, EVEN, 0), (TAPS, EVEN, 1), (STATE, ODD, 1), (MERGE + 4, EVEN, 0), (RESIDUAL, EVEN, 0),
        (SUM, ODD, 1), (ALONG, ODD, 1), (MERGE + 5, EVEN, 0), (SUM_TAPS, EVEN, 1), (MERGE + 6, EVEN, 0),
        (PRODUCTS, ODD, 0), (SHORTEN, ODD, 0), (MERGE + 7, EVEN, 0), (REST, ODD, 0), (SLOPE, EVEN, 0),
        (SLOPE, ODD, 1), (TAPS, EVEN, 1), (SCALE, ODD, 0), (MERGE + 8, EVEN, 0), (DZ, ODD, 0),
        (TAPS, EVEN, 1), (SUM_TAPS, EVEN, 1), (TRANSPOSE_KEYS, ODD, 0), (APPLY, EVEN, 0),
        (STRENGTH, ODD, 1), (MULTIPLY, ODD, 0), (SUM_TAPS, EVEN, 1), (NORM, ODD, 1), (TAPS, EVEN, 1),
        (SOLVE, EVEN, 0), (DU, ODD, 1), (SPREAD, ODD, 0), (SUBSTITUTE, ODD, 0), (TAPS, ODD, 1),
        (SUM_TAPS, EVEN, 1),
    )  # fmt: skip


def list_projected_stages():
    """Lists what `list_gradient_stages` does, where the gradient of hidden states is made, too.

    A search by the cost model placed HIDDEN_T and HIDDEN, and left the others as they were. Wherever they
    stand, they wait for what they take, and the rest comes at the end of the turn in which a chunk's last
    stages are issued: so every entry of HIDDEN is as many chunks behind as these.
    """
    return (
        (HIDDEN, EVEN, 2), (HIDDEN, EVEN, 2), (READ, EVEN, 1), (HIDDEN, EVEN, 2), (TRANSPOSE, EVEN, 1),
        (MULTIPLY_PAIRS, EVEN, 1), (PAIRS, EVEN, 1), (TRANSPOSE_STATES, EVEN, 1), (STATES, EVEN, 1),
        (MERGE, ODD, 1), (TRANSPOSE_PAIRS, EVEN, 1), (MERGE + 1, ODD, 1), (HIDDEN, EVEN, 2),
        (ROWS, EVEN, 0), (CROSS, EVEN, 1), (MERGE + 2, ODD, 1), (MERGE + 3, ODD, 1), (TERMS, EVEN, 1),
        (GATE, EVEN, 0), (MERGE + 4, ODD, 1), (LOAD, EVEN, 0), (HIDDEN_T, EVEN, 1), (SUM_TAPS, ODD, 2),
        (PRODUCTS, EVEN, 0), (FACTORS, EVEN, 0), (LOAD, ODD, 0), (SUM, EVEN, 1), (HIDDEN, EVEN, 2),
        (KEYS, EVEN, 1), (KEPT, ODD, 1), (TAPS, ODD, 2), (DZ, EVEN, 0), (MERGE + 5, ODD, 1),
        (HIDDEN, EVEN, 2), (ALONG, EVEN, 1), (HIDDEN_T, ODD, 2), (HIDDEN_T, ODD, 2), (HIDDEN_T, ODD, 2),
        (HIDDEN_T, EVEN, 2), (TAPS, ODD, 2), (SUM_TAPS, ODD, 2), (MERGE + 6, ODD, 1), (STATE, EVEN, 1),
        (MERGE + 7, ODD, 1), (RESIDUAL, ODD, 1), (TAPS, ODD, 2), (NORM, EVEN, 1), (REST, EVEN, 0),
        (SUM_TAPS, ODD, 2), (SHORTEN, EVEN, 0), (SCALE, EVEN, 0), (MERGE + 8, ODD, 1), (HIDDEN, EVEN, 2),
        (FACTORS, ODD, 0), (HIDDEN, EVEN, 2), (TAPS, ODD, 2), (STRENGTH, EVEN, 1), (KEPT, EVEN, 0),
        (HIDDEN, EVEN, 2), (SUM_TAPS, ODD, 2), (HIDDEN_T, EVEN, 1), (HIDDEN_T, EVEN, 2), (DU, EVEN, 1),
        (HIDDEN_T, ODD, 2), (HIDDEN_T, ODD, 2), (TRANSPOSE_KEYS, EVEN, 0), (APPLY, ODD, 1),
        (DECAY, EVEN, 1), (MULTIPLY, EVEN, 0), (SUM_TAPS, ODD, 2), (SOLVE, ODD, 1), (SPREAD, EVEN, 0),
        (HIDDEN, EVEN, 2), (TAPS, ODD, 2), (DECAY, ODD, 2), (READ, ODD, 1), (TRANSPOSE, ODD, 1),
        (HIDDEN, EVEN, 2), (TRANSPOSE_STATES, ODD, 1), (HIDDEN, EVEN, 2), (MULTIPLY_PAIRS, ODD, 1),
        (HIDDEN, EVEN, 2), (SUM_TAPS, ODD, 2), (HIDDEN, EVEN, 2), (SUBSTITUTE, EVEN, 0), (MERGE, EVEN, 0),
        (HIDDEN, EVEN, 2), (TAPS, EVEN, 1), (PAIRS, ODD, 1), (STATES, ODD, 1), (HIDDEN, EVEN, 2),
        (TRANSPOSE_PAIRS, ODD, 1), (HIDDEN_T, ODD, 2), (ROWS, ODD, 0), (TAPS, EVEN, 1), (SUM_TAPS, EVEN, 1),
        (MERGE + 1, EVEN, 0), (CROSS, ODD, 1), (TERMS, ODD, 1), (KEYS, ODD, 1), (MERGE + 2, EVEN, 0),
        (GATE, ODD, 0), (SUM_TAPS, EVEN, 1), (MERGE + 3, EVEN, 0), (HIDDEN, EVEN, 2), (TAPS, EVEN, 1),
        (HIDDEN, EVEN, 2), (STATE, ODD, 1), (HIDDEN, EVEN, 2), (MERGE + 4, EVEN, 0), (RESIDUAL, EVEN, 0),
        (HIDDEN, EVEN, 2), (HIDDEN, EVEN, 2), (SUM, ODD, 1), (ALONG, ODD, 1), (HIDDEN, EVEN, 2),
        (MERGE + 5, EVEN, 0), (HIDDEN, EVEN, 2), (SUM_TAPS, EVEN, 1), (HIDDEN, EVEN, 2),
        (MERGE + 6, EVEN, 0), (PRODUCTS, ODD, 0), (SHORTEN, ODD, 0), (MERGE + 7, EVEN, 0), (REST, ODD, 0),
        (SLOPE, EVEN, 0), (SLOPE, ODD, 1), (HIDDEN, EVEN, 2), (TAPS, EVEN, 1), (SCALE, ODD, 0),
        (HIDDEN, EVEN, 2), (MERGE + 8, EVEN, 0), (DZ, ODD, 0), (TAPS, EVEN, 1), (SUM_TAPS, EVEN, 1),
        (TRANSPOSE_KEYS, ODD, 0), (APPLY, EVEN, 0), (STRENGTH, ODD, 1), (HIDDEN, EVEN, 2),
        (MULTIPLY, ODD, 0), (SUM_TAPS, EVEN, 1), (NORM, ODD, 1), (TAPS, EVEN, 1), (SOLVE, EVEN, 0),
        (DU, ODD, 1), (SPREAD, ODD, 0), (SUBSTITUTE, ODD, 0), (TAPS, ODD, 1), (SUM_TAPS, EVEN, 1),
        (HIDDEN_T, EVEN, 1), (HIDDEN, EVEN, 2),
    )  # fmt: skip


def rank_shares(stages):
    """Finds which share of a chunk's work each entry of a list of stages stands for.

    Returns a number for each entry, from 1 on for those of SHARED and 0 for the others; how many shares its
    stage has for its parity; and by how many turns the last stage is behind.
    """
    ranks, shares, behind = [], [], 0
    for i in range(len(stages)):
        stage, parity, late = stages[i]
        behind = max(behind, late)
        rank, count = 0, 0
        for j in range(len(stages)):
            other = stages[j]
            if stage in SHARED and other[0] == stage and other[1] == parity:
                count = count + 1
                if other[2] < late or (other[2] == late and j <= i):
                    rank = rank + 1
        ranks.append(rank)
        shares.append(count)
    return ranks, shares, behind
