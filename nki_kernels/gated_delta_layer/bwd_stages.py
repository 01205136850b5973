"""Lists the stages of `gated_delta_layer_bwd` in the order in which they are issued."""

from delta_trn.nki_kernels.gated_delta_layer.fwd_stages import ROOT, ROWS, UNIT
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

# Stages besides those of the rule, whose LOAD does no more here than its name says, and besides the norm's
# ROWS, ROOT and UNIT, which forward has too
KEPT = 30  # the state that a chunk meets
REST = 31  # dO / r
SLOPE = 32  # SiLU'(u)
DU = 33  # the gradient of u
TAPS = 37  # the convolution's products of elements for some taps of a cell
SUM_TAPS = 38  # sums of these
DZ = 39  # the gradient of z
MERGE = 40  # EVEN, CORNERS and UPDATE of all levels, nine stages
TRANSPOSE_STATES = 49  # of S and dS; TRANSPOSE is of the rest
GATE_SLOPE = 52  # SiLU'(z)
LOAD_ROWS = 53  # o, z and dy
LOAD_U = 54
SQUARES = 55  # of q and k
NORMS = 56  # of q and k, and 1 / beta
DECAYS = 57  # sums of g
GATE = 58  # SiLU(z)
PRODUCTS = 59  # dw of the norm, and what is left for dO
LOAD_TAPS = 60  # what taps read of x
STORE_DX = 61
# an entry stands for a share of a chunk's
SHARED = (LOAD_TAPS, TAPS, SUM_TAPS, STORE_DX)


def list_gradient_stages():
    """Lists what is issued in one turn: (stage, bundles of which parity, by how many chunks it is behind).

    Each engine runs its instructions in order, so the order decides how long engines wait. Simulated
    annealing found this one, by the cost model; results/2026-11-24_simulated_layer says how.
    """
    return (
        (LOAD_TAPS, ODD, 3), (LOAD_ROWS, EVEN, 1), (LOAD_TAPS, EVEN, 2), (DU, ODD, 3), (ROWS, EVEN, 1),
        (MULTIPLY_PAIRS, EVEN, 2), (STRENGTH, ODD, 3), (ROOT, EVEN, 1), (TAPS, ODD, 3), (PAIRS, EVEN, 2),
        (LOAD_TAPS, ODD, 3), (TRANSPOSE_STATES, EVEN, 2), (STATES, EVEN, 2), (LOAD_TAPS, ODD, 3),
        (MERGE, ODD, 2), (LOAD_TAPS, ODD, 3), (DECAY, ODD, 3), (MERGE + 1, ODD, 2), (TERMS, EVEN, 2),
        (SUM_TAPS, EVEN, 3), (MERGE + 2, ODD, 2), (GATE_SLOPE, EVEN, 1), (LOAD, EVEN, 1), (SQUARES, EVEN, 1),
        (LOAD_TAPS, ODD, 3), (STATE, EVEN, 2), (SUM_TAPS, ODD, 3), (SUM, EVEN, 2), (TAPS, ODD, 3),
        (MERGE + 3, ODD, 2), (TRANSPOSE_PAIRS, EVEN, 2), (STRENGTH, EVEN, 2), (GATE, EVEN, 1),
        (NORMS, EVEN, 1), (MERGE + 4, ODD, 2), (CROSS, EVEN, 2), (STORE_DX, EVEN, 3), (SUM_TAPS, ODD, 3),
        (LOAD, ODD, 1), (TAPS, ODD, 3), (UNIT, EVEN, 1), (TAPS, ODD, 3), (MERGE + 5, ODD, 2),
        (SQUARES, ODD, 1), (STORE_DX, EVEN, 3), (KEYS, EVEN, 2), (KEPT, ODD, 2), (MERGE + 6, ODD, 2),
        (PRODUCTS, EVEN, 1), (ALONG, EVEN, 2), (DECAYS, EVEN, 1), (DECAY, EVEN, 2), (FACTORS, EVEN, 1),
        (MERGE + 7, ODD, 2), (RESIDUAL, ODD, 2), (SUM_TAPS, ODD, 3), (NORM, EVEN, 2), (REST, EVEN, 1),
        (SHORTEN, EVEN, 1), (SCALE, EVEN, 1), (MERGE + 8, ODD, 2), (LOAD_TAPS, ODD, 2), (TAPS, ODD, 3),
        (DU, EVEN, 2), (TRANSPOSE_KEYS, EVEN, 1), (APPLY, ODD, 2), (MULTIPLY, EVEN, 1), (SUM_TAPS, ODD, 3),
        (LOAD_ROWS, ODD, 1), (ROWS, ODD, 1), (SUM_TAPS, ODD, 3), (READ, ODD, 2), (SPREAD, EVEN, 1),
        (TAPS, ODD, 3), (DECAYS, ODD, 1), (LOAD_TAPS, EVEN, 2), (SUM_TAPS, ODD, 3), (STORE_DX, ODD, 3),
        (SOLVE, ODD, 2), (LOAD_TAPS, EVEN, 2), (ROOT, ODD, 1), (LOAD_TAPS, EVEN, 2), (LOAD_TAPS, EVEN, 2),
        (TAPS, EVEN, 2), (SUBSTITUTE, EVEN, 1), (TRANSPOSE, ODD, 2), (MULTIPLY_PAIRS, ODD, 2),
        (PAIRS, ODD, 2), (TRANSPOSE_STATES, ODD, 2), (MERGE, EVEN, 1), (STATES, ODD, 2), (STORE_DX, ODD, 3),
        (TRANSPOSE_PAIRS, ODD, 2), (MERGE + 1, EVEN, 1), (UNIT, ODD, 1), (TERMS, ODD, 2), (GATE, ODD, 1),
        (SUM, ODD, 2), (LOAD_U, ODD, 2), (LOAD_TAPS, EVEN, 2), (MERGE + 2, EVEN, 1), (STATE, ODD, 2),
        (SUM_TAPS, EVEN, 2), (CROSS, ODD, 2), (MERGE + 3, EVEN, 1), (KEPT, EVEN, 1), (NORMS, ODD, 1),
        (TAPS, EVEN, 2), (STORE_DX, ODD, 3), (KEYS, ODD, 2), (FACTORS, ODD, 1), (MERGE + 4, EVEN, 1),
        (TAPS, EVEN, 2), (SUM_TAPS, EVEN, 2), (RESIDUAL, EVEN, 1), (ALONG, ODD, 2), (MERGE + 5, EVEN, 1),
        (GATE_SLOPE, ODD, 1), (SHORTEN, ODD, 1), (SUM_TAPS, EVEN, 2), (SLOPE, ODD, 2), (MERGE + 6, EVEN, 1),
        (STORE_DX, EVEN, 2), (PRODUCTS, ODD, 1), (MERGE + 7, EVEN, 1), (LOAD_U, EVEN, 1), (NORM, ODD, 2),
        (TAPS, EVEN, 2), (REST, ODD, 1), (SLOPE, EVEN, 1), (SUM_TAPS, EVEN, 2), (SCALE, ODD, 1),
        (MERGE + 8, EVEN, 1), (TAPS, EVEN, 2), (DZ, EVEN, 1), (TRANSPOSE_KEYS, ODD, 1), (APPLY, EVEN, 1),
        (MULTIPLY, ODD, 1), (SUM_TAPS, EVEN, 2), (DZ, ODD, 1), (TAPS, EVEN, 2), (SOLVE, EVEN, 1),
        (READ, EVEN, 1), (SPREAD, ODD, 1), (SUBSTITUTE, ODD, 1), (TRANSPOSE, EVEN, 1),
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
