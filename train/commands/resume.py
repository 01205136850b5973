"""delta-trn resume RUN_DIR [key=value ...]"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from delta_trn.train.settings.overrides import parse, read_arguments


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="delta-trn resume",
        description=(
            "Continue a run from its newest whole checkpoint, or from its start if it has none."
        ),
    )
    parser.add_argument(
        "run_dir", metavar="RUN_DIR", type=Path, help="the folder that `run` printed"
    )
    parser.add_argument(
        "changes",
        nargs="*",
        metavar="key=value",
        help="what may change: steps, max_minutes, device, ...",
    )
    parser.add_argument(
        "--step", type=int, help="continue from this checkpoint instead; 0: from the start"
    )
    options = read_arguments(parser, arguments)
    changes = parse(options.changes)

    from delta_trn.train.commands.run import drive
    from delta_trn.train.run.setup import resume
    from delta_trn.train.watch.display import console, leads

    tell = console(quiet=not leads()).print
    with resume(options.run_dir, changes, options.step, tell) as run:
        return drive(run, changes.get("backend"))
