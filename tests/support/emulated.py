"""Runs a module as on an H100: its kernels in the emulator, torch's CUDA calls by the stand-in.

    python -m tests.support.emulated MODULE [ARGUMENT ...]

The architecture is the emulator's: DELTA_TRN_EMULATED=89 makes it an RTX 4090.
"""

import os
import runpy
import sys

from delta_trn.backends.gpu_stand_in.cuda import card, pretend
from tests.support.emulator import driver


def main() -> None:
    """Runs the module that the command line names, with the rest of the line as its own."""
    if driver.library().functions is None:
        raise SystemExit(f"{driver.library().note}: no emulator")
    driver.install()
    # kernels that a test lets fail: its words are those of Triton
    for name in filter(None, os.environ.get("DELTA_TRN_FAILING_KERNEL", "").split(",")):
        _fail(name)
    sys.argv[:] = sys.argv[1:]
    with pretend(card(divmod(driver.ARCHITECTURE, 10))):
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def _fail(name: str) -> None:
    from triton.runtime.errors import OutOfResources
    from triton.runtime.jit import JITFunction

    run = JITFunction.run

    def fail(self, *arguments, **options):
        if f"{self.module}.{self.__name__}".endswith(name):
            raise OutOfResources(300_000, 232_448, "shared memory")
        return run(self, *arguments, **options)

    JITFunction.run = fail


if __name__ == "__main__":
    main()
