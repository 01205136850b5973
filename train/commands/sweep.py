"""python -m train sweep RECIPE widths=... lrs=... [parametrizations=...] [optimizers=...] [seeds=...] ..."""

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from delta_trn.train.settings.errors import RunFolderError, UsageError
from delta_trn.train.settings.overrides import parse
from delta_trn.train.studies.sweep.arms import QUESTIONS, Question
from delta_trn.train.studies.sweep.question import Sweep, define
from delta_trn.train.studies.sweep.results import Results, losses

EPILOG = """axes
  widths=64,128,256                     model.width
  lrs=2**-10..2**-4                     learning rates at the base width: doubling, or 1e-3,2e-3,4e-3;
  lrs.adamw=...  lrs.sgd=...            each optimizer its own
  parametrizations=sp,mup               optimizers=adamw,sgd               seeds=0,1
  arms=NAME | KEY=V1,V2 | FILE.json     anything else to compare; named sets: {arms}
  refine=2                              rounds of rates added around the best of each curve

questions, in place of RECIPE, with axes of their own, ten to twenty minutes on two idle cores: {questions}

and  jobs=N  trials at a time   threads=N  CPU threads of each   max_minutes=N   out=DIR
     any key=value of `run`, such as steps=500 data.source=PATH

The same command again, or the folder in place of RECIPE, continues; so do several at once, and torchrun.
"""


def main(arguments: Sequence[str]) -> int:
    from delta_trn.train.studies.sweep.arms import ARMS

    parser = argparse.ArgumentParser(
        prog="python -m train sweep",
        description="The best learning rate of every width, and how far it moves.",
        epilog=EPILOG.format(arms=", ".join(ARMS), questions=", ".join(QUESTIONS)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", metavar="RECIPE", help="a named run, a question, or the folder of a sweep")
    parser.add_argument("given", nargs="*", metavar="key=value", help="axes, and keys to change")
    parser.add_argument("--plan", action="store_true", help="list the trials that are to be made, and stop")
    parser.add_argument("--report", action="store_true", help="say what is known so far, and stop")
    asked = parser.parse_intermixed_args(arguments)
    given = parse(asked.given)
    own = {key: given.pop(key, None) for key in ("jobs", "threads", "max_minutes", "out")}
    sweep, folder = _sweep(asked.recipe, given, own["out"])
    if asked.plan:
        print(_plan(sweep, Results(folder)))
        return 0
    if not asked.report:
        return _execute(sweep, folder, own)
    _write(sweep, folder)
    return 0


def _sweep(name: str, given: Mapping[str, str], out: str | None) -> tuple[Sweep, Path]:
    """The sweep of a recipe, or the one of a folder with changes, and its folder."""
    folder = Path(name)
    if (folder / "sweep.json").is_file():
        if out is not None:
            raise UsageError(f"{folder} is the sweep's folder already; leave out={out} out")
        asked = json.loads((folder / "sweep.json").read_text())
        return define(asked["recipe"], {**asked["axes"], **asked["changes"], **given}), folder
    question = QUESTIONS.get(name, Question(name, {}))
    sweep = define(question.recipe, {**question.axes, **given})
    folder = Path(out) if out else Path("runs") / f"sweep-{name}"
    if (folder / "config.json").exists():
        raise RunFolderError(f"{folder} is a run's folder; choose another out=DIR for the sweep")
    return sweep, folder


def _plan(sweep: Sweep, results: Results) -> str:
    from delta_trn.train.studies.sweep.runner import describe, seconds_left, unique

    known = results.read()
    wanted = unique(sweep.trials(losses(known)))
    lines = [f"{'done' if t.key in known else 'open'}  {t.key}  {describe(t)}" for t in wanted]
    left = seconds_left(wanted, known, 1)
    lines.append(f"{len(wanted)} trials, {sum(t.key in known for t in wanted)} done")
    if left is not None:
        lines.append(f"about {left / 60:.0f} minutes of one process left, before rates that results may add")
    return "\n".join(lines)


def _execute(sweep: Sweep, folder: Path, own: Mapping[str, str | None]) -> int:
    from delta_trn.train.files import disk_errors
    from delta_trn.train.studies.sweep.results import SAFE
    from delta_trn.train.studies.sweep.runner import execute
    from delta_trn.train.watch.display import console, duration

    out = console()

    def tell(text: str) -> None:
        out.print(text, markup=False)
        out.file.flush()

    jobs, devices, threads = _places(sweep, own)
    _prepare(sweep)
    with disk_errors(folder, SAFE):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "sweep.json").write_text(json.dumps(sweep.as_dict(), indent=1) + "\n")
    minutes = None if own["max_minutes"] is None else _positive("max_minutes", own["max_minutes"])
    tell(f"{folder}  {jobs} at a time on {', '.join(devices) if devices else 'cpu'}")
    begun, before = time.monotonic(), len(Results(folder).read())
    ended = execute(
        sweep, folder, jobs=jobs, devices=devices, threads=threads, max_minutes=minutes, tell=tell
    )
    _write(sweep, folder)
    tell(f"time     {duration(time.monotonic() - begun)} for {len(Results(folder).read()) - before} trials")
    if ended.stopped:
        tell(f"stopped by {ended.stopped}; the same command continues")
    if ended.failed:
        tell(f"{len(ended.failed)} trials failed, as said above; the same command tries them again")
    return 128 + ended.signal if ended.signal is not None else 1 if ended.failed else 0


def _write(sweep: Sweep, folder: Path) -> None:
    """Print the report, and leave it with the picture in the folder."""
    from delta_trn.train.studies.sweep import comparison
    from delta_trn.train.studies.sweep.picture import draw
    from delta_trn.train.studies.sweep.report import as_json, reports, table

    results = Results(folder).read()
    found = reports(sweep, results)
    text = table(found)
    if arms := comparison.compared(found):
        text += "\n\n" + comparison.table(arms)
        comparison.draw(arms, folder / "comparison.png")
    (folder / "report.md").write_text(text + "\n")
    (folder / "report.json").write_text(as_json(found))
    picture = draw(found, folder / "sweep.png")
    print(text)
    print(f"\nresults  {folder / 'sweep.jsonl'}   picture  {picture or '-'}")


def _places(sweep: Sweep, own: Mapping[str, str | None]) -> tuple[int, list[str], int]:
    """How many trials at a time, on which devices, with how many threads each."""
    import os

    import torch

    from delta_trn.train.run.model import pick_device

    device = sweep.trials({})[0].config.device
    on_gpu = pick_device(device).type == "cuda"
    devices = []
    if on_gpu:
        devices = (
            [f"cuda:{i}" for i in range(torch.cuda.device_count())]
            if device in ("auto", "cuda")
            else [device]
        )
        if (local := os.environ.get("LOCAL_RANK")) is not None:
            devices = [devices[int(local) % len(devices)]]  # torchrun's other ranks have the others
    cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")) or 1
    jobs = len(devices) if on_gpu else cores
    if own["jobs"] is not None:
        jobs = int(_positive("jobs", own["jobs"], whole=True))
    threads = max(cores // jobs, 1)
    if own["threads"] is not None:
        threads = int(_positive("threads", own["threads"], whole=True))
    return jobs, devices, threads


def _positive(name: str, text: str, *, whole: bool = False) -> float:
    try:
        value = int(text) if whole else float(text)
    except ValueError:
        value = 0
    if value <= 0:
        raise UsageError(f"{name}={text}: expected a {'whole ' if whole else ''}number above 0")
    return value


def _prepare(sweep: Sweep) -> None:
    """Tokenize what the trials read before any of them starts: they would wait for the first one's."""
    from delta_trn.train.run.subject import data_of

    for config in {trial.config.data.model_dump_json(): trial.config for trial in sweep.trials({})}.values():
        data_of(config)
