"""A simulator of NKI, AWS's kernel language for Trainium, for everyone who writes NKI kernels
without a chip.

It stands alone: it needs NumPy and ml_dtypes only, and runs kernels of any origin. README.md is its
page.

    It checks      what the instruction set, the compiler or the chip would refuse: operands,
                   dtypes, engines, partitions, capacity, reads of unwritten memory, Python that the
                   compiler does not accept.
    It computes    what the instructions compute, in float32 and rounded to the destination's dtype.
    It estimates   peak memory and time on trn1 (the default), trn2 or trn3.

Every time is an estimate. Neither results nor times were ever compared with a chip.

    kernel     nki: jit, simulate, record          cost     an estimate of time, from a trace
    isa/       nisa: the instructions by kind      subset   the compiler's Python, checked
    scan       what Trn1 refuses, counted
    language   nl: tensors and operators           aliases  `import nki` finds the simulator
    core/      one run: operands, memory, dtypes   calibration/     beside published measurements
    tile_functions   nl's functions on whole tiles
"""

from nki_simulator import isa as nisa
from nki_simulator import kernel as nki
from nki_simulator import language as nl
from nki_simulator.core.errors import (
    ConstraintError,
    NkiValidationError,
    StrictError,
)
from nki_simulator.core.machine import Numerics
from nki_simulator.core.targets import TARGETS, Target
from nki_simulator.kernel import Run, record, simulate
from nki_simulator.scan import Findings, scan

__all__ = [
    "TARGETS", "ConstraintError", "Findings", "NkiValidationError", "Numerics", "Run", "StrictError",
    "Target", "nisa", "nki", "nl", "record", "scan", "simulate",
]  # fmt: skip
