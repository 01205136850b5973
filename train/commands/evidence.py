"""delta-trn evidence [STAGE ...] [--plan] [out=DIR] [jobs=N] [key=value ...]"""

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from delta_trn.train.commands import sweep as sweep_command
from delta_trn.train.settings.errors import UsageError
from delta_trn.train.settings.overrides import parse, read_arguments, whole_number
from delta_trn.train.studies.sweep.programme import (
    AFTER_PREDICTION,
    BEFORE_PREDICTION,
    CONTROL,
    STAGES,
    Stage,
    check,
    expected_hours,
    finished,
    predict,
    require_prediction,
    together,
)
from delta_trn.train.studies.sweep.results import Results

EPILOG = f"""stages, in this order if none is named
{chr(10).join(f"  {name:10}  {stage.hours:g} h at most  {stage.says}" for name, stage in STAGES.items())}

Each is a sweep in DIR/STAGE. It stops when its budget is spent, and the same command continues it. `widths`
writes DIR/prediction.json when it ends; without that file width 512 is not run. DIR/report.md and
DIR/widths.png have all widths, and the standard parametrization beside them.

keys: out=runs/evidence   jobs=N   and any key=value of `run` for all of them, such as data.source=PATH
"""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="delta-trn evidence",
        description="The evidence for muP in stages, with budgets.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("stages", nargs="*", metavar="STAGE|key=value", help="stages, keys to change")
    parser.add_argument("--plan", action="store_true", help="say what each stage would take, and stop")
    asked = read_arguments(parser, arguments)
    names = [word for word in asked.stages if "=" not in word] or list(STAGES)
    options = parse([word for word in asked.stages if "=" in word])
    if unknown := [name for name in names if name not in STAGES]:
        raise UsageError(f"no stage is named {unknown[0]}; there are: {', '.join(STAGES)}")
    folder = Path(options.pop("out", "runs/evidence"))
    jobs = whole_number("jobs", options.pop("jobs", str(len(os.sched_getaffinity(0)))))
    for name in names:
        print(_announce(name, STAGES[name], folder, options, jobs), flush=True)
        if not asked.plan and (status := _run(name, folder, options, jobs)):
            return status
    return 0


def _announce(name: str, stage: Stage, folder: Path, options: Mapping[str, str], jobs: int) -> str:
    sweep, known = stage.sweep(options), Results(folder / name).read()
    trials = sweep.trials({})
    done = sum(trial.key in known for trial in trials)
    hours = expected_hours(sweep, known, jobs)
    return (
        f"{stage.says}\n  {name}: {len(trials)} runs, {done} done; about {hours:.1f} h left on {jobs} cores; "
        f"stops after {stage.hours:g} h"
    )


def _run(name: str, folder: Path, options: Mapping[str, str], jobs: int) -> int:
    """Makes a stage, up to its budget. Returns an exit status other than 0 if the next cannot begin."""
    stage, prediction = STAGES[name], folder / "prediction.json"
    before = folder / BEFORE_PREDICTION
    if name == AFTER_PREDICTION:
        require_prediction(before, prediction)
    words = {**stage.question.axes, **options}
    places = {"out": folder / name, "jobs": jobs, "threads": 1, "max_minutes": stage.hours * 60}
    keys = [f"{key}={value}" for key, value in {**words, **places}.items()]
    if status := sweep_command.main([stage.question.recipe, *keys]):
        return status
    sweep = stage.sweep(options)
    if not finished(sweep, folder / name):
        print(f"{name} is not finished: its budget is spent; the same command continues it")
    elif name == BEFORE_PREDICTION and not prediction.exists():
        print(f"\n{predict(sweep, folder / name, prediction)}")
        print(f"\n{prediction}: commit it before width 512 is run")
    elif name == AFTER_PREDICTION:
        narrow = STAGES[BEFORE_PREDICTION].sweep(options)
        print(f"\n{check(narrow, before, sweep, folder / name, prediction)}")
    if name in (AFTER_PREDICTION, CONTROL):
        print(f"\n{together(options, folder)}")
    return 0
