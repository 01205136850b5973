"""The evidence for muP in stages: each a sweep with a budget, and a prediction before width 512 is looked at.

Stages come in the order of what they say. Seconds are those of one process on one core, the least of
results/2026-11-23_cpu_evidence, scaled by steps, batch and layers; other machines differ, and the budget of a
stage is what stops it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from delta_trn.train.files import write_file
from delta_trn.train.settings.errors import UsageError
from delta_trn.train.studies.sweep.output import draw_curves
from delta_trn.train.studies.sweep.question import Question, Sweep, define
from delta_trn.train.studies.sweep.report import Curve, drift, reports, table
from delta_trn.train.studies.sweep.results import SAFE, Results, losses
from delta_trn.train.studies.sweep.sides import Name, Side

SECONDS = {64: 7.5, 128: 17.4, 256: 55.2}
PREDICTED = (512, 1024, 2048)
SIDES: tuple[Name, ...] = ("whole", "flank", "wall")

_ZERO = {"model.mixer_output_init": "0", "refine": "0"}
_ADAMW = {"optimizers": "adamw", "parametrizations": "mup", **_ZERO}
_SGD = {
    **{"optimizers": "sgd", "steps": "150", "schedule.warmup": "30", "optimizer.momentum": "0.9", **_ZERO},
    **{"widths": "64,256", "lrs": "2**-4..1"},
}
HALF = ":1.4142135623730951"


@dataclass(frozen=True)
class Stage:
    """A sweep of the programme.

    says    what it is for
    hours   after which it stops; the same command continues
    """

    says: str
    hours: float
    question: Question

    def sweep(self, options: Mapping[str, str]) -> Sweep:
        """Returns the sweep, with some options changed."""
        return define(self.question.recipe, {**self.question.axes, **options})


def _stage(says: str, hours: float, axes: Mapping[str, str]) -> Stage:
    return Stage(says, hours, Question("transfer", axes))


STAGES: Mapping[str, Stage] = {
    "widths": _stage(
        "1. AdamW, muP, widths 64 to 256, 4 paired seeds, rates half an octave apart", 2.0,
        {**_ADAMW, "widths": "64,128,256", "lrs": f"2**-9..2**-5{HALF}", "seeds": "0,1,2,3"},
    ),
    "width_512": _stage(
        "2. width 512 at the flank and the wall, after a prediction", 1.6,
        # half octaves as above: the prediction's interval is for such curves
        {**_ADAMW, "widths": "512", "lrs": f"2**-9..2**-5{HALF}", "seeds": "0,1"},
    ),
    "standard": _stage(
        "3. the standard parametrization beside it, 2 seeds", 1.0,
        {**_ADAMW, "parametrizations": "sp", "widths": "64,128,256", "seeds": "0,1",
         "lrs": f"2**-10..2**-5{HALF}"},
    ),
    "muon": _stage(
        "4a. Muon for hidden matrices", 0.8,
        {**_ADAMW, "optimizers": "muon", "optimizer.momentum": "0.95", "widths": "64,256", "seeds": "0,1",
         "lrs": f"2**-8.5..2**-4{HALF}"},
    ),
    "sgd": _stage(
        "4b. SGD with momentum 0.9, and its other tables", 0.8,
        {**_SGD, "parametrizations": "mup,mup_authors,mup_aligned,mup_scalars", "seeds": "0,1"},
    ),
    "depth": _stage(
        "5a. depth 2, 4, 8, without a rule and with CompleteP", 1.0,
        {**_ADAMW, "arms": "depth", "widths": "64", "lrs": "2**-9..2**-5", "seeds": "0,1"},
    ),
    "horizon": _stage(
        "5b. steps 300 and 1200", 1.0,
        {**_ADAMW, "arms": "horizon", "widths": "64,128", "lrs": "2**-9..2**-5", "seeds": "0,1"},
    ),
    "batch": _stage(
        "5c. batches of 4, 8, 16 sequences at one number of tokens", 1.0,
        {**_ADAMW, "arms": "batch", "widths": "64,128", "lrs": "2**-9..2**-5", "seeds": "0,1"},
    ),
    "wall": _stage(
        "6a. what stops the wall under AdamW", 1.5,
        {**_ADAMW, "arms": "wall", "widths": "64,256", "lrs": "2**-8..2**-5", "seeds": "0,1"},
    ),
    "wall_sgd": _stage(
        "6b. what stops the wall under SGD", 1.5,
        {**_SGD, "arms": "wall_sgd", "parametrizations": "mup", "lrs": "2**-3..1", "seeds": "0,1"},
    ),
    "decay": _stage(
        "6c. weight decay independent of the width, where it can be seen: lr decay steps is about 2", 2.0,
        {**_ADAMW, "arms": "optimizer.independent_weight_decay=false,true", "optimizer.weight_decay": "1",
         "steps": "1200", "schedule.warmup": "120", "widths": "64,256", "seeds": "0,1",
         "lrs": "2**-8..2**-6"},
    ),
    "start": _stage(
        "6d. do mixers from 0 lose in the end? 4 million tokens, 3 paired seeds", 2.5,
        {"arms": "model.mixer_output_init=1,0", "optimizers": "adamw", "parametrizations": "mup",
         "refine": "0", "steps": "4000", "schedule.warmup": "400", "widths": "128", "seeds": "0,1,2",
         # the standard library has 3.4 million tokens, which would be read more than once
         "lrs": "2**-8..2**-7", "data.source": "site-packages", "data.max_tokens": "20000000"},
    ),
    "ddl": _stage(
        "7. Deep Delta Learning's own table: muP where layers write by the delta rule over depth", 1.5,
        # its branches give directions, which have no length to begin from 0 with
        {"optimizers": "adamw", "parametrizations": "mup,sp", "refine": "0", "model.residual": "ddl",
         "model.ddl_value_channels": "4", "model.ddl_compressor": "token", "widths": "64,256", "seeds": "0,1",
         "lrs": "2**-9..2**-5"},
    ),
}  # fmt: skip
AFTER_PREDICTION, BEFORE_PREDICTION, CONTROL = "width_512", "widths", "standard"


def expected_hours(sweep: Sweep, results: Mapping[str, Any], jobs: int) -> float:
    """Estimates the hours that the open trials of a sweep take, `jobs` at a time with one thread each."""
    total = 0.0
    for trial in sweep.trials(losses(results)):
        if trial.key in results:
            continue
        c = trial.config
        near = min(SECONDS, key=lambda width: abs(width - trial.width))
        share = c.steps / 300 * c.batch.sequences * c.batch.length / 1024 * c.model.layers / 2
        total += SECONDS[near] * (trial.width / near) ** 2 * share
    return total / jobs / 3600


def finished(sweep: Sweep, folder: Path) -> bool:
    """Whether every trial of a sweep has a result."""
    known = Results(folder).read()
    return all(trial.key in known for trial in sweep.trials(losses(known)))


def predict(sweep: Sweep, folder: Path, path: Path) -> str:
    """Writes where flank, wall and best rate of wider models will be, and returns it as text.

    The file has what it was made of, so that another prediction cannot take its place after the fact.
    Raises UsageError if a side is not determined by the results in `folder`.
    """
    sides = _sides(_curves(sweep, folder))
    for side in sides:
        if not side.windows or math.isinf(side.low):
            raise UsageError(
                f"{folder} predicts nothing: {side.name} {side.verdict}; let its sweep end first"
            )
    widths = {
        str(width): {side.name: _predicted(side, width, seeds=2) for side in sides} for width in PREDICTED
    }
    tree = {"made_of": _fingerprint(folder), "log2_rates": widths}
    write_file(path, json.dumps(tree, indent=1) + "\n", SAFE)
    return _table(widths)


def require_prediction(folder: Path, path: Path) -> None:
    """UsageError unless `path` is a prediction made of the results that are in `folder` now."""
    command = f"`delta-trn evidence {BEFORE_PREDICTION}` writes one when it ends"
    if not path.exists():
        raise UsageError(
            f"width 512 is not run before its best rate is predicted: {path} is not there; {command}"
        )
    if json.loads(path.read_text())["made_of"] != _fingerprint(folder):
        raise UsageError(
            f"{path} was not made of the results in {folder}; put back those that it was made of, or remove "
            "it if width 512 was never run"
        )


def check(narrow: Sweep, folder: Path, wide: Sweep, wide_folder: Path, path: Path) -> str:
    """Formats what was predicted for width 512 beside what was measured there."""
    predicted = json.loads(path.read_text())["log2_rates"]["512"]
    lines = [
        "| width 512, log2 of the rate | predicted | 95% | measured | inside |",
        "|---|---|---|---|---|",
    ]
    for side in _sides([*_curves(narrow, folder), *_curves(wide, wide_folder)]):
        at = [
            position
            for line in side.windows
            for (scale, _), position in line.positions.items()
            if scale == math.log2(512)
        ]
        p = predicted[side.name]
        cells = f"| {side.name} | {p['at']:.2f} | {p['low']:.2f} to {p['high']:.2f} |"
        if not at:
            lines.append(f"{cells} - | {side.verdict} |")
            continue
        measured = sum(at) / len(at)
        inside = "yes" if p["low"] <= measured <= p["high"] else "no"
        lines.append(f"{cells} {measured:.2f} | {inside} |")
    return "\n".join(lines)


def together(options: Mapping[str, str], folder: Path) -> str:
    """Formats muP over the widths of both its stages and, once it is made, the standard parametrization.

    A width is paired over the seeds that it has. Writes the tables to report.md and the curves to widths.png.
    """
    stages = BEFORE_PREDICTION, AFTER_PREDICTION
    widths = ",".join(STAGES[name].question.axes["widths"] for name in stages)
    rows = []
    for sweep, names in (
        (STAGES[BEFORE_PREDICTION].sweep({"widths": widths, **options}), stages),
        (STAGES[CONTROL].sweep(options), (CONTROL,)),
    ):
        results = {key: line for name in names for key, line in Results(folder / name).read().items()}
        # not every seed is wanted at every width
        rows += [replace(row, wanted=row.done) for row in reports(sweep, results) if row.done]
    text = table(rows)
    write_file(folder / "report.md", text + "\n", SAFE)
    draw_curves(rows, folder / "widths.png")
    return text


def _curves(sweep: Sweep, folder: Path) -> list[Curve]:
    (report,) = reports(sweep, Results(folder).read())
    return list(report.curves)


def _sides(curves: Sequence[Curve]) -> list[Side]:
    return [drift(name, curves) for name in SIDES]


def _predicted(side: Side, width: int, seeds: int) -> dict[str, float]:
    """Returns the mean over windows and an interval that covers those of all."""
    found = [line.at(math.log2(width), seeds) for line in side.windows]
    low, high = min(at - half for at, half in found), max(at + half for at, half in found)
    return {"at": sum(at for at, _ in found) / len(found), "low": low, "high": high}


def _table(widths: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    lines = ["| width | side | log2 of the rate | 95% |", "|---|---|---|---|"]
    for width, sides in widths.items():
        for name, p in sides.items():
            lines.append(f"| {width} | {name} | {p['at']:.2f} | {p['low']:.2f} to {p['high']:.2f} |")
    return "\n".join(lines)


def _fingerprint(folder: Path) -> str:
    return hashlib.sha256(Results(folder).path.read_bytes()).hexdigest() if folder.exists() else ""
