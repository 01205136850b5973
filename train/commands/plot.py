"""python -m train plot RUN_DIR [RUN_DIR ...]"""

import argparse
from collections.abc import Sequence
from pathlib import Path

DESCRIPTION = """Draw from a run's files, also while it goes on: loss.png, and with log.probes=true
probes.png, what goes on inside the model, and geometry.png, what Deep Delta Learning's writes do.
Of several runs, as of several widths, probes.png in the
first one's folder compares them. Of a sweep's folder, or a coordinate check's, draw its picture again."""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m train plot", description=DESCRIPTION)
    parser.add_argument(
        "run_dirs", metavar="RUN_DIR", type=Path, nargs="+", help="the folder that `run` printed"
    )
    given = parser.parse_args(arguments)

    from delta_trn.train.checkpoints.run_folder import RunFolder
    from delta_trn.train.studies.probes.depth import plot_geometry
    from delta_trn.train.studies.probes.plot import plot_probes, probed
    from delta_trn.train.watch.loss_plot import plot_loss

    first = given.run_dirs[0]
    if len(given.run_dirs) == 1 and (first / "coordinates.json").is_file():
        from delta_trn.train.studies.coordinates.report import write_again

        print("\n".join(map(str, write_again(first))))
        return 0
    if len(given.run_dirs) == 1 and (first / "sweep.json").is_file():
        from delta_trn.train.studies.sweep.output import write_report
        from delta_trn.train.studies.sweep.question import load

        print(write_report(load(first, {}), first))
        return 0
    runs = []
    for path in given.run_dirs:
        folder = RunFolder(path)
        folder.read()
        print(plot_loss(folder))
        if (picture := plot_geometry(folder)) is not None:
            print(picture)
        if (found := probed(folder)) is not None and found.layers():
            runs.append(found)
    if runs or len(given.run_dirs) > 1:
        print(plot_probes(runs, first / "probes.png"))
    return 0
