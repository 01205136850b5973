"""delta-trn simulator ...: hands over to nki-simulator, a package of its own.

A kernel without a dot is one of `delta_trn.nki_kernels`.
"""

import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from delta_trn.backends.checks import BackendRefusal
from delta_trn.backends.dispatch import NO_SIMULATOR

KERNELS = "delta_trn.nki_kernels"


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit status.

    Raises BackendRefusal, which says how to install it, where it is absent.
    """
    if find_spec("nki_simulator") is None:
        raise BackendRefusal(f"delta-trn simulator {NO_SIMULATOR}")
    command = [sys.executable, "-m", "nki_simulator", "--package", KERNELS, *arguments]
    return subprocess.run(command).returncode
