"""A strict functional simulator of NKI on NumPy, for hosts without Neuron packages.

    from nki_kernels.simulator import nki, nisa, nl     # as `import nki, nki.isa as nisa, nki.language as nl`
    from nki_kernels.simulator import record            # a run with its trace and memory peaks

nki   jit simulate                       (kernel.py)
nisa  the instructions                   (isa/, an index in its docstring)
nl    dtypes, tensors, tile functions    (language.py)

It computes what the instructions compute, in float32 with the destination's rounding, and refuses what the
compiler or the chip would refuse; it says nothing about time. The default target is trn1.
"""

from . import isa as nisa
from . import kernel as nki
from . import language as nl
from .errors import ConstraintError, NkiValidationError, StrictError
from .kernel import Run, record
from .targets import TARGETS, Target

__all__ = [
    "TARGETS",
    "ConstraintError",
    "NkiValidationError",
    "Run",
    "StrictError",
    "Target",
    "nisa",
    "nki",
    "nl",
    "record",
]
