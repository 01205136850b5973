"""delta-trn sweep RECIPE widths=... lrs=... [parametrizations=...] [optimizers=...] [seeds=...] ..."""

import argparse
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from delta_trn.train.files import write_file
from delta_trn.train.recipes import announced
from delta_trn.train.settings.errors import RunFolderError, UsageError
from delta_trn.train.settings.overrides import parse, read_arguments, whole_number
from delta_trn.train.studies.sweep.arms import ARMS
from delta_trn.train.studies.sweep.question import QUESTIONS, Question, Sweep, define, load
from delta_trn.train.studies.sweep.results import SAFE, Results, losses

EPILOG = f"""axes
  widths=64,128,256                     model.width
  lrs=2**-10..2**-4                     learning rates at the base width: doubling, or 1e-3,2e-3,4e-3;
  lrs.adamw=...  lrs.sgd=...  lrs.muon=...            one grid per optimizer
  parametrizations=sp,mup               optimizers=adamw,sgd               seeds=0,1
  arms=NAME | KEY=V1,V2 | FILE.json     anything else to compare; named sets: {", ".join(ARMS)}
  refine=2                              rounds of rates added around the best of each curve

questions, in place of RECIPE, with axes of their own, take ten to twenty minutes on two idle cores:
  {", ".join(QUESTIONS)}

and  jobs=N  trials at a time   threads=N  CPU threads of each   max_minutes=N   out=DIR
     any key=value of `run`, such as steps=500 data.source=PATH

The same command again, or the folder in place of RECIPE, continues.
"""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="delta-trn sweep",
        description="The best learning rate of every width, and how far it moves.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", metavar="RECIPE", help="a named run, a question, or the folder of a sweep")
    parser.add_argument("options", nargs="*", metavar="key=value", help="axes, and keys to change")
    parser.add_argument(
        "--plan", action="store_true", help="list the trials that are still to be made, and stop"
    )
    parser.add_argument("--report", action="store_true", help="print what is known so far, and stop")
    asked = read_arguments(parser, arguments)
    options = parse(asked.options)
    own = {key: options.pop(key, None) for key in ("jobs", "threads", "max_minutes", "out")}
    sweep, folder = _sweep(asked.recipe, options, own["out"])
    if asked.plan:
        print(_plan(sweep, Results(folder)))
        return 0
    if not asked.report:
        return _execute(sweep, folder, own)
    from delta_trn.train.studies.sweep.output import write_report

    print(write_report(sweep, folder))
    return 0


def _sweep(name: str, options: Mapping[str, str], out: str | None) -> tuple[Sweep, Path]:
    """Returns the sweep of a recipe, or that of a folder with changes, and its folder."""
    folder = Path(name)
    if (folder / "sweep.json").is_file():
        if out is not None:
            raise UsageError(f"out={out}: {folder} is the sweep's folder already; leave out=... out")
        return load(folder, options), folder
    question = QUESTIONS.get(name, Question(name, {}))
    announced(question.recipe)  # every trial begins with it
    sweep = define(question.recipe, {**question.axes, **options})
    folder = Path(out) if out else Path("runs") / f"sweep-{name}"
    if (folder / "config.json").exists():
        raise RunFolderError(f"{folder} is a run's folder; choose another out=DIR for the sweep")
    return sweep, folder


def _plan(sweep: Sweep, results: Results) -> str:
    from delta_trn.train.studies.sweep.runner import seconds_left

    known = results.read()
    wanted = sweep.trials(losses(known))
    lines = [f"{'done' if t.key in known else 'open'}  {t.key}  {t}" for t in wanted]
    left = seconds_left(wanted, known, 1)
    lines.append(f"{len(wanted)} trials, {sum(t.key in known for t in wanted)} done")
    if left is not None:
        lines.append(f"about {left / 60:.0f} minutes of one process left, before rates that results may add")
    return "\n".join(lines)


def _execute(sweep: Sweep, folder: Path, own: Mapping[str, str | None]) -> int:
    from delta_trn.train.checkpoints.run_folder import RunFolder
    from delta_trn.train.run.setup import load_dataset
    from delta_trn.train.studies.sweep.output import write_report
    from delta_trn.train.studies.sweep.runner import execute
    from delta_trn.train.watch.display import console, duration

    out = console()

    def tell(text: str) -> None:
        out.print(text, markup=False)
        out.file.flush()

    jobs, devices, threads = _places(sweep, own)
    minutes = None if own["max_minutes"] is None else _minutes(own["max_minutes"])
    configs = {t.config.data.model_dump_json(): t.config for t in sweep.trials({})}
    for config in configs.values():
        load_dataset(config)  # tokenized before any trial starts: the others would wait for the first one
    with RunFolder(folder).hold():
        write_file(folder / "sweep.json", json.dumps(sweep.as_dict(), indent=1) + "\n", SAFE)
        tell(f"{folder}  {jobs} at a time on {', '.join(devices) if devices else 'cpu'}")
        start, before = time.monotonic(), len(Results(folder).read())
        ended = execute(
            sweep, folder, jobs=jobs, devices=devices, threads=threads, max_minutes=minutes, tell=tell
        )
        print(write_report(sweep, folder))
    tell(f"time     {duration(time.monotonic() - start)} for {len(Results(folder).read()) - before} trials")
    if ended.stopped:
        tell(f"stopped by {ended.stopped}; the same command continues")
    if ended.failed:
        tell(f"{len(ended.failed)} trials failed, see above; the same command tries them again")
    return 128 + ended.signal if ended.signal is not None else 1 if ended.failed else 0


def _places(sweep: Sweep, own: Mapping[str, str | None]) -> tuple[int, list[str], int]:
    """Returns how many trials run at a time, on which GPUs, and with how many CPU threads each."""
    import torch

    from delta_trn.train.run.model import pick_device

    device = sweep.trials({})[0].config.device
    devices = []
    if pick_device(device).type == "cuda":
        everywhere = device in ("auto", "cuda")
        devices = [f"cuda:{i}" for i in range(torch.cuda.device_count())] if everywhere else [device]
    cores = len(os.sched_getaffinity(0))
    jobs = len(devices) or cores
    if own["jobs"] is not None:
        jobs = whole_number("jobs", own["jobs"])
    threads = max(cores // jobs, 1)
    if own["threads"] is not None:
        threads = whole_number("threads", own["threads"])
    return jobs, devices, threads


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = 0
    if minutes <= 0:
        raise UsageError(f"max_minutes={text}: expected a number above 0")
    return minutes
