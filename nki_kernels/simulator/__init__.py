"""A simulator of NKI, AWS's kernel language for Trainium, for everyone who writes NKI kernels without a chip.

It stands alone: it needs NumPy and ml_dtypes only, and runs kernels of any origin. Its page is
docs/simulator.md.

    It checks      what the instruction set, the compiler or the chip would refuse: operands, dtypes, engines,
                   partitions, capacity, reads of unwritten memory, Python that the compiler does not accept.
    It computes    what the instructions compute, in float32 and rounded to the destination's dtype.
    It estimates   peak memory and time on trn1 (the default), trn2 or trn3.

Every time is an estimate. Neither results nor times were ever compared with a chip.

    from delta_trn.nki_kernels.simulator import nisa, nki, nl, record
    from delta_trn.nki_kernels.language import nisa, nki, nl   # the real nki where it is installed

    out = kernel(q, k)                             # NumPy in (ml_dtypes.bfloat16 for bf16), NumPy out
    out = nki.simulate(kernel, target="trn2")(q, k)
    run = record(kernel, q, k)                     # .outputs .trace .instructions .sbuf_peak .psum_peak
    run = record(kernel, q, k, numerics=Numerics(matmul="bfloat16"))   # how sensitive is the kernel?
    costs = cost.estimate(run.trace, run.target)   # an estimate of time
    run = record(kernel, q, k, nki="0.5.0")        # one release, not all from 0.2.0 to 0.7.0
    subset.findings(kernel)                        # what in its source some release does not take
    python -m delta_trn.nki_kernels.simulator report KERNEL SHAPE

    kernel     nki: jit, simulate, record          cost     an estimate of time, from a trace
    isa/       nisa: the instructions by engine    report   its table
    language   nl: tensors and operators           subset   the compiler's Python, checked
    core/      one run: operands, memory, dtypes   aliases  `import nki` finds the simulator
    tile_functions   nl's functions on whole tiles
"""

from delta_trn.nki_kernels.simulator import isa as nisa
from delta_trn.nki_kernels.simulator import kernel as nki
from delta_trn.nki_kernels.simulator import language as nl
from delta_trn.nki_kernels.simulator.core.errors import ConstraintError, NkiValidationError, StrictError
from delta_trn.nki_kernels.simulator.core.machine import Numerics
from delta_trn.nki_kernels.simulator.core.targets import TARGETS, Target
from delta_trn.nki_kernels.simulator.kernel import Run, record, simulate

__all__ = [
    "TARGETS", "ConstraintError", "NkiValidationError", "Numerics", "Run", "StrictError", "Target",
    "nisa", "nki", "nl", "record", "simulate",
]  # fmt: skip
