"""The first hour on a Trn1 chip, second half: a layer and a step beside what `train plan` says of them.

    python -m train.studies.trn1 [STAGE ...] [KEY=VALUE ...] [--recipe NAME] [--dry] [--json FILE]

    layer           forward, backward, update of models of 1 and 3 layers: half of the difference is a layer
    step            the whole model on 15 sequences, as on each of 32 cores

Keys of the configuration change the recipe; without any, model.width=512.

The plan runs in a process of its own, whose kernels are the simulator's also where AWS's nki is installed.
With --dry, the recipe `tiny` runs on the CPU: its times decide nothing, but every line of the command runs.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from delta_trn.train.recipes import announced
from delta_trn.train.settings.overrides import apply, parse
from delta_trn.train.studies.families import OURS
from delta_trn.train.studies.throughput import Workload

SEQUENCES = 15  # of each core of a trn1.32xlarge with 480 sequences a step
STAGES = ("layer", "step")


def planned(recipe: str, changes: dict[str, str]) -> tuple[float, float]:
    """Returns seconds of a step on one core by `train plan`: the faster and the slower estimate."""
    words = [f"{key}={value}" for key, value in changes.items() if key != "device"]
    run = subprocess.run(
        [sys.executable, "-m", "delta_trn.train", "plan", recipe, *words, "--cores", "1", "--json"],
        env={**os.environ, "DELTA_TRN_NKI_RUNTIME": "simulator"},
        capture_output=True,
        text=True,
        check=True,
    )
    parts = [row for row in json.loads(run.stdout) if "part" in row]
    return sum(row["low_s"] for row in parts), sum(row["high_s"] for row in parts)


def measured(recipe: str, changes: dict[str, str], rounds: int = 7) -> float:
    """Returns the median of seconds of a step; the first two, which compile, are not timed."""
    work = Workload(apply(announced(recipe), changes))
    return median([work(OURS) for _ in range(rounds + 2)][2:])


def _depths(changes: dict[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the changes that make models of one and of three layers, on one sequence."""
    one, three = (
        {**changes, "batch.sequences": "1", "batch.micro": "1", "model.layers": str(n)} for n in (1, 3)
    )
    return one, three


def _measured_layer(recipe: str, changes: dict[str, str]) -> float:
    one, three = (measured(recipe, each) for each in _depths(changes))
    return (three - one) / 2


def layer(recipe: str, changes: dict[str, str]) -> dict[str, Any]:
    plans = [planned(recipe, each) for each in _depths(changes)]
    low, high = ((plans[1][i] - plans[0][i]) / 2 for i in range(2))
    return _judged(_measured_layer(recipe, changes), low, high, "layer")


def step(recipe: str, changes: dict[str, str]) -> dict[str, Any]:
    whole = {**changes, "batch.sequences": str(SEQUENCES), "batch.micro": "1"}
    return _judged(measured(recipe, whole), *planned(recipe, whole), "step")


def _judged(seconds: float, low: float, high: float, what: str) -> dict[str, Any]:
    if seconds > 1.3 * high:
        decides = (
            f"the {what} is slower than planned: profile it with neuron-profile; the host may be tracing"
        )
    elif seconds < low / 1.3:
        decides = f"the {what} is faster than planned: mend the constants of train/neuron/step_time.py"
    else:
        decides = f"the plan of a {what} holds: spend the next hour on its largest part"
    return {"seconds": seconds, "planned": [low, high], "decides": decides}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m train.studies.trn1",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "words", nargs="*", metavar="STAGE|KEY=VALUE", help=f"stages of {', '.join(STAGES)}; none: all"
    )
    parser.add_argument("--recipe", default="gdn_mup_adamw")
    parser.add_argument("--dry", action="store_true", help="the recipe `tiny` on the CPU")
    parser.add_argument("--json", type=Path, help="appends a JSON object per stage to this file")
    options = parser.parse_args(arguments)
    stages = [word for word in options.words if "=" not in word] or list(STAGES)
    keys = parse([word for word in options.words if "=" in word])
    for name in stages:
        if name not in STAGES:
            raise SystemExit(f"stage {name!r} is not one of {', '.join(STAGES)}")
    recipe = "tiny" if options.dry else options.recipe
    changes = {"device": "cpu"} if options.dry else {"device": "xla", "model.width": "512"}
    changes |= keys
    for name in stages:
        result = {"layer": layer, "step": step}[name](recipe, changes)
        if options.dry:
            result["decides"] = "nothing: a CPU's times"
        print(
            f"{name}{' (dry)' if options.dry else ''}", *(f"  {k}: {v}" for k, v in result.items()), sep="\n"
        )
        if options.json:
            with options.json.open("a") as lines:
                lines.write(json.dumps({"stage": name, "dry": options.dry, "recipe": recipe} | result) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
