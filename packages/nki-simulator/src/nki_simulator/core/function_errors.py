"""The errors of the Scalar engine's functions as measured on Trn1, as an option.

exp was measured there: a relative error of at most 1.5e-5, 1.5e-6 in the median, and 0 below -87
(tools of foxl-ai/kiln, nki 0.6.0). rsqrt and sigmoid together, in a gated norm, round 99.92% of
bfloat16 results rightly, which errors of that size do as well. Of the other functions nothing is
published: they are taken to be like exp. What is in every set of tables, copies and squares, is
exact.

An error depends on the input alone, as that of a table of polynomials does: its sign is random, and
its size LARGEST u^POWER with u uniform in [0, 1), both from a hash of the input, the function and
the seed.
"""

from math import log
from zlib import crc32

import numpy as np

from nki_simulator.core.tables import EVERYWHERE

LARGEST, MEDIAN = 1.5e-5, 1.5e-6
POWER = log(MEDIAN / LARGEST) / log(0.5)
LEAST_EXP = -87.0


def err(function: str, inputs: np.ndarray, results: np.ndarray, seed: int) -> np.ndarray:
    """Returns the results of a function with the errors that the chip would make.

    >>> x = np.linspace(-5, 0, 1001, dtype=np.float32)
    >>> e = np.abs(err("exp", x, np.exp(x), 1).astype(np.float64) / np.exp(x.astype(np.float64)) - 1)
    >>> 1e-6 < np.median(e) < 2e-6, 1e-5 < e.max() < 1.6e-5
    (True, True)
    """
    if function in EVERYWHERE:
        return results
    bits = np.ascontiguousarray(inputs, dtype=np.float32).view(np.uint32).astype(np.uint64)
    mixed = bits + np.uint64(crc32(f"{function} {seed}".encode()))
    for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):  # of splitmix64
        mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(factor)
    mixed ^= mixed >> np.uint64(32)
    size = (mixed >> np.uint64(11)).astype(np.float64) / 2.0**53
    sign = np.where(mixed & np.uint64(1), 1.0, -1.0)
    wrong = results * (1 + sign * LARGEST * size**POWER)
    if function == "exp":
        wrong = np.where(inputs < LEAST_EXP, 0.0, wrong)
    return wrong.astype(results.dtype)
