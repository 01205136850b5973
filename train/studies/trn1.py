"""The first hour on a Trn1 chip, second half: seconds of a layer and of a step.

    python -m train.studies.trn1 [STAGE ...] [KEY=VALUE ...] [--recipe NAME] [--dry] [--json FILE]

    layer           forward, backward, update of models of 1 and 3 layers: half of the difference is a layer
    step            the whole model on 15 sequences, as on each of 32 cores

Keys of the configuration change the recipe; without any, model.width=512.

With --dry, the recipe `tiny` runs on the CPU: its times decide nothing, but every line of the command runs.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from delta_trn.train.recipes import announced
from delta_trn.train.settings.overrides import apply, parse
from delta_trn.train.studies.throughput import OURS, Workload

SEQUENCES = 15  # of each core of a trn1.32xlarge with 480 sequences a step
STAGES = ("layer", "step")


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
    seconds = _measured_layer(recipe, changes)
    return {
        "seconds": seconds,
        "decides": "beyond its kernels' times: profile what lies between them",
    }


def step(recipe: str, changes: dict[str, str]) -> dict[str, Any]:
    whole = {**changes, "batch.sequences": str(SEQUENCES), "batch.micro": "1"}
    seconds = measured(recipe, whole)
    return {"seconds": seconds, "decides": "a step beyond its layers: the host may be tracing"}


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
