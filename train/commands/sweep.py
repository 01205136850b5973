"""delta-trn sweep RECIPE widths=... lrs=...
[parametrizations=...] [optimizers=...] [seeds=...] ...
"""

import argparse
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from delta_trn.train.files import write_file
from delta_trn.train.recipes import announce
from delta_trn.train.settings.errors import RunFolderError, UsageError
from delta_trn.train.settings.overrides import change, parse, read_arguments, whole_number
from delta_trn.train.settings.schema import RunConfig

if TYPE_CHECKING:
    from delta_trn.train.studies.sweep.grid import Sweep

EPILOG = """axes
  widths=64,128,256                     model.width
  lrs=2**-10..2**-4                     learning rates at the base width: doubling, or 1e-3,2e-3,4e-3;
  lrs.adamw=...  lrs.sgd=...  lrs.muon=...            one grid per optimizer
  parametrizations=sp,mup               optimizers=adamw,sgd               seeds=0,1
  arms=KEY=V1,V2 | FILE.json            anything else to compare; the file has {"name": {"key": "value"}}

and  jobs=N  trials at a time   threads=N  CPU threads of each   max_minutes=N   out=DIR
     any key=value of `run`, such as steps=500 data.source=PATH

The same command again continues. With --report several folders, which may have different widths, are read as
one sweep.
"""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="delta-trn sweep",
        description="The best learning rate of every width, and how far it moves.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", metavar="RECIPE", help="a named run; with --report, a folder")
    parser.add_argument("options", nargs="*", metavar="key=value", help="axes, and keys to change")
    parser.add_argument(
        "--report", action="store_true", help="print what folders have so far, and stop"
    )
    asked = read_arguments(parser, arguments)
    if asked.report:
        print(_report([Path(asked.recipe), *map(Path, asked.options)]))
        return 0
    options = parse(asked.options)
    own = {key: options.pop(key, None) for key in ("jobs", "threads", "max_minutes", "out")}

    from delta_trn.train.studies.sweep.grid import define

    announce(asked.recipe)  # every trial begins with it
    sweep = define(asked.recipe, options)
    folder = Path(own["out"] or f"runs/sweep-{asked.recipe}")
    if (folder / "config.json").exists():
        raise RunFolderError(f"{folder} is a run's folder; choose another out=DIR for the sweep")
    sweep.require_same(folder)
    return _execute(sweep, folder, own)


def _report(folders: Sequence[Path]) -> str:
    """Formats the results of folders as those of one sweep."""
    from delta_trn.train.studies.sweep.report import reports, table
    from delta_trn.train.studies.sweep.results import Results

    lines = []
    for folder in folders:
        found = Results(folder).read()
        if not found:
            raise UsageError(
                f"{folder} has no results of a sweep; give folders that have a sweep.jsonl[.gz]"
            )
        lines += found.values()
    return table(reports(lines))


def _execute(sweep: "Sweep", folder: Path, own: Mapping[str, str | None]) -> int:
    import torch

    from delta_trn.train.checkpoints.run_folder import RunFolder
    from delta_trn.train.run.model import pick_device
    from delta_trn.train.run.setup import load_dataset
    from delta_trn.train.studies.sweep.report import write_report
    from delta_trn.train.studies.sweep.results import SAFE
    from delta_trn.train.studies.sweep.runner import execute
    from delta_trn.train.watch.display import console, duration

    tell = console().print
    # how many trials run at a time, on which GPUs, and with how many CPU threads each
    asked, devices = sweep.trials[0].config.device, []
    if pick_device(asked).type == "cuda":
        every = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
        devices = every if asked in ("auto", "cuda") else [asked]
    cores = len(os.sched_getaffinity(0))
    jobs = whole_number("jobs", own["jobs"] or str(len(devices) or cores))
    threads = whole_number("threads", own["threads"] or str(max(cores // jobs, 1)))
    minutes = change(RunConfig(), {"max_minutes": own["max_minutes"] or "none"}).max_minutes
    configs = {t.config.data.model_dump_json(): t.config for t in sweep.trials}
    for config in configs.values():
        # tokenized before any trial starts: the others would wait for the first one
        load_dataset(config)
    with RunFolder(folder).hold():
        write_file(folder / "sweep.json", json.dumps(sweep.asked, indent=1) + "\n", SAFE)
        tell(f"{folder}  {jobs} at a time on {', '.join(devices) if devices else 'cpu'}")
        start = time.monotonic()
        stop, failed = execute(
            sweep,
            folder,
            jobs=jobs,
            devices=devices,
            threads=threads,
            max_minutes=minutes,
            tell=tell,
        )
        print(write_report(folder))
    tell(f"time     {duration(time.monotonic() - start)}")
    if stop.reason:
        tell(f"stopped by {stop.reason}; the same command continues")
    if failed:
        tell(f"{failed} trials failed, see above; the same command tries them again")
    return 128 + stop.signal if stop.signal is not None else 1 if failed else 0
