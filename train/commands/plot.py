"""python -m train plot RUN_DIR"""

import argparse
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m train plot", description="Draw loss.png from a run's files."
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="the folder that `run` printed")
    given = parser.parse_args(arguments)

    from ..plots import plot_loss
    from ..run_folder import RunFolder

    folder = RunFolder(given.run_dir)
    folder.read()
    print(plot_loss(folder))
    return 0
