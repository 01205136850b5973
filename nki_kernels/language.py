"""Gives kernels the NKI language, nki, nisa and nl, from whichever runtime is installed.

    RUNTIME   "neuron"      the nki package: compiles for the chip, or runs under nki.simulate
              "simulator"   nki_kernels.simulator: NumPy, for hosts without Neuron packages, and
                            where the environment says DELTA_TRN_NKI_RUNTIME=simulator: estimates
                            beside a chip

It asks find_spec and does not import in a try: a package that is installed but broken must fail
loudly.
"""

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING

if (
    TYPE_CHECKING
    or find_spec("nki") is None
    or os.environ.get("DELTA_TRN_NKI_RUNTIME") == "simulator"
):
    from delta_trn.nki_kernels.simulator import nisa, nki, nl

    RUNTIME = "simulator"
else:
    import nki
    import nki.isa as nisa
    import nki.language as nl

    RUNTIME = "neuron"

__all__ = ["RUNTIME", "nisa", "nki", "nl"]
