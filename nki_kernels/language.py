"""Gives kernels the NKI language, nki, nisa and nl, from whichever runtime is installed.

    RUNTIME   "neuron"      the nki package: compiles for the chip, or runs under nki.simulate
              "simulator"   nki_simulator: NumPy, for hosts without Neuron packages, and where the
                            environment says DELTA_TRN_NKI_RUNTIME=simulator: estimates beside a
                            chip
    SAYS_SUMS  whether nc_matmul takes accumulate=, which is new in nki 0.3.0: products say then
               whether they begin a sum. The simulator takes it where DELTA_TRN_NKI names such a
               release; else the rules of all releases hold, and 0.2.0 has none

Raises ModuleNotFoundError, which names the command that installs the simulator, where neither is
installed. It asks find_spec and does not import in a try: a package that is installed but broken
must fail loudly.
"""

import inspect
import os
from importlib.util import find_spec
from typing import TYPE_CHECKING

if (
    TYPE_CHECKING
    or find_spec("nki") is None
    or os.environ.get("DELTA_TRN_NKI_RUNTIME") == "simulator"
):
    if find_spec("nki_simulator") is None:
        raise ModuleNotFoundError(
            "NKI kernels need AWS's package nki or our package nki-simulator, and this environment "
            "has neither; in a checkout of delta-trn: pip install ./packages/nki-simulator",
            name="nki_simulator",
        )
    from nki_simulator import nisa, nki, nl

    RUNTIME = "simulator"
    SAYS_SUMS = os.environ.get("DELTA_TRN_NKI", "") not in ("", "0.2.0")
else:
    import nki
    import nki.isa as nisa
    import nki.language as nl

    RUNTIME = "neuron"
    SAYS_SUMS = "accumulate" in inspect.signature(nisa.nc_matmul).parameters

__all__ = ["RUNTIME", "SAYS_SUMS", "nisa", "nki", "nl"]
