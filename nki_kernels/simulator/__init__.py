"""A strict functional simulator of NKI on NumPy, for hosts without Neuron packages.

    from delta_trn.nki_kernels.language import nki, nisa, nl  # what kernels import; the real nki if installed
    out = kernel(q, k)                                  # NumPy in (ml_dtypes.bfloat16 for bf16), NumPy out
    out = nki.simulate(kernel, target="trn2")(q, k)
    run = record(kernel, q, k)                          # .outputs .trace .instructions .sbuf_peak .psum_peak
    run = record(kernel, q, k, numerics=Numerics(matmul="bfloat16", activation_ulps=4))  # how sensitive is it
    costs = cost.estimate(run.trace, run.target)        # an estimate of time
    subset.findings(kernel, portable=True)              # what not every NKI release from 0.2 to 0.7 accepts
    python -m nki_kernels.simulator report KERNEL SHAPE

It computes what the instructions compute, in float32 with the destination's rounding, and refuses what the
compiler or the chip would refuse. The default target is trn1. It was never compared with a chip.

    kernel     nki: jit, simulate, record           machine    one run: operand checks, counters, capacity
    isa        nisa: the instructions by engine     memory     storages, tensors, views
    language   nl: tensors, tile functions          dtypes     data types and rounding
    operators  the ops that instructions take       targets    trn1, trn2, trn3
    subset     the compiler's Python, checked       cores      two cores as one (LNC 2)
    cost       time estimate from a trace           report     its table and its picture
    aliases    `import nki` finds the simulator     errors     ConstraintError, StrictError
"""

from delta_trn.nki_kernels.simulator import isa as nisa
from delta_trn.nki_kernels.simulator import kernel as nki
from delta_trn.nki_kernels.simulator import language as nl
from delta_trn.nki_kernels.simulator.core.errors import ConstraintError, NkiValidationError, StrictError
from delta_trn.nki_kernels.simulator.core.machine import Numerics
from delta_trn.nki_kernels.simulator.core.targets import TARGETS, Target
from delta_trn.nki_kernels.simulator.kernel import Run, record

__all__ = [
    "TARGETS",
    "ConstraintError",
    "NkiValidationError",
    "Numerics",
    "Run",
    "StrictError",
    "Target",
    "nisa",
    "nki",
    "nl",
    "record",
]
