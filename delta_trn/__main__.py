"""delta-trn COMMAND ...: every command of the project under one name.
Without a command, what there is.
"""

import sys
from collections.abc import Sequence

from delta_trn.train.__main__ import COMMANDS
from delta_trn.train.__main__ import main as run_command

# Commands of the packages below training, each with its module.
TOOLS = {
    "backends": (
        "",
        "which backend runs which operation here, and why not",
        "delta_trn.backends.__main__",
    ),
    "parity": (
        "[--backend NAME]",
        "the error of every backend against a float64 judge",
        "delta_trn.backends.parity.__main__",
    ),
    "bench": (
        "[--backend NAME]",
        "speed, memory and floors, behind a green parity",
        "delta_trn.backends.bench.__main__",
    ),
    "simulator": (
        "report KERNEL SHAPE ...",
        "estimates of NKI kernels, without a chip",
        "delta_trn.train.commands.simulator",
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status.

    0: done; 1: a check failed; 2: refused, and stderr says why; 128 + n: stopped by signal n.
    """
    return run_command(arguments, COMMANDS | TOOLS)


if __name__ == "__main__":
    sys.exit(main())
