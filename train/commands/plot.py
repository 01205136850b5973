"""delta-trn plot RUN_DIR [RUN_DIR ...]"""

import argparse
from collections.abc import Sequence
from pathlib import Path

DESCRIPTION = """Draw the pictures of a run, even while it trains: loss.png and, with log.probes=true,
probes.png (what goes on inside the model) and geometry.png (what Deep Delta Learning's writes do).
Several runs, such as several widths, are compared in the first one's probes.png.
A sweep or a coordinate check is reported again; several sweeps are one picture, the first one's sweep.png."""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="delta-trn plot", description=DESCRIPTION)
    parser.add_argument(
        "run_dirs", metavar="RUN_DIR", type=Path, nargs="+", help="the folder that `run` printed"
    )
    folders = parser.parse_args(arguments).run_dirs

    from delta_trn.train.checkpoints.run_folder import RunFolder
    from delta_trn.train.studies.coordinates.report import draw, judge, read, table
    from delta_trn.train.studies.probe_plots import load_probes, plot_geometry, plot_probes
    from delta_trn.train.watch.loss_plot import plot_loss

    first = folders[0]
    if len(folders) == 1 and (found := read(first)) is not None:
        readings, theory = found
        rows = judge(readings, theory)
        print(table(rows, theory))
        print(draw(readings, rows, first / "coordinates.png"))
        return 0
    if all((folder / "sweep.json").is_file() for folder in folders):
        from delta_trn.train.studies.sweep.report import write_report

        print(write_report(*folders))
        return 0
    runs = []
    for path in folders:
        folder = RunFolder(path)
        folder.read()
        print(plot_loss(folder))
        if (run := load_probes(folder)) is not None:
            runs.append(run)
            if (picture := plot_geometry(run, path / "geometry.png")) is not None:
                print(picture)
    if len(folders) > 1 or any(run.names("layers/") for run in runs):
        print(plot_probes(runs, first / "probes.png"))
    return 0
