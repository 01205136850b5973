"""python -m train coord-check RECIPE [widths=64,128,...] [key=value ...]"""

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from delta_trn.train.recipes import recipe
from delta_trn.train.settings.errors import UsageError
from delta_trn.train.settings.overrides import apply, parse
from delta_trn.train.settings.schema import RunConfig

if TYPE_CHECKING:
    from delta_trn.train.studies.coordinates.check import Reading

EPILOG = """keys of its own
  widths=64,128,256,512,1024        parametrizations=sp,mup_original,mup
  optimizers=adamw,sgd              lr.adamw=2**-8  lr.sgd=0.1     at the base width
  steps=4  seeds=2                  out=runs/coord-check-RECIPE

and any key=value of `run`, such as batch.length=128. No clipping, warmup or weight decay unless given.
Exit status 1: a tensor fails under the recipe's own parametrization.
"""
DEFAULTS = {
    "widths": "64,128,256,512,1024",
    "parametrizations": "sp,mup_original,mup",
    "optimizers": "adamw,sgd",
    "lr.adamw": "2**-8",
    "lr.sgd": "0.1",
    "steps": "4",
    "seeds": "2",
}
QUIET = {"optimizer.clip": "none", "optimizer.weight_decay": "0", "precision": "float32"}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m train coord-check",
        description="Whether what a model computes, and what a few steps change of it, depends on its width.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", metavar="RECIPE", help="a named run; `python -m train` lists them")
    parser.add_argument("given", nargs="*", metavar="key=value", help="keys, those below among them")
    asked = parser.parse_intermixed_args(arguments)
    given = parse(asked.given)
    out = Path(given.pop("out", f"runs/coord-check-{asked.recipe}"))
    own = {key: given.pop(key, default) for key, default in DEFAULTS.items()}
    base = recipe(asked.recipe)
    configs = _configs(base, given, own)
    widths = _numbers("widths", own["widths"], 3)
    steps, seeds = _numbers("steps", own["steps"])[0], _numbers("seeds", own["seeds"])[0]
    began, cpu = time.monotonic(), time.process_time()

    from delta_trn.train.studies.coordinates.check import slopes, verdicts
    from delta_trn.train.studies.coordinates.report import table, write

    found = _read(configs, widths, steps, seeds)
    seconds = round(time.monotonic() - began, 1)
    about = {
        "recipe": asked.recipe,
        "keys": {**own, **given},
        "base_width": configs[0].model.base_width,
        "seconds": seconds,
        "cpu_seconds": round(time.process_time() - cpu, 1),
    }
    pictures = write(out, about, found)
    said = verdicts(slopes(found))
    print(f"power of width with which {steps} steps change each tensor; theory says 0 unless it stands there")
    print(table(said))
    mine = [v for v in said if v.parametrization == base.parametrization]
    for v in mine:
        if not v.passes:
            print(f"fails  {v.optimizer} {v.parametrization} {v.tensor}: {', '.join(v.fails_at)}")
    print(f"\n{seconds:.0f} s, {about['cpu_seconds']:.0f} of CPU")
    print("   ".join(map(str, (out / "coordinates.json", *pictures))))
    return 0 if all(v.passes for v in mine) else 1


def _configs(base: RunConfig, given: Mapping[str, str], own: Mapping[str, str]) -> list[RunConfig]:
    """One for every optimizer and parametrization, checked before anything is computed."""
    configs = []
    for optimizer in own["optimizers"].split(","):
        if optimizer not in ("adamw", "sgd"):
            raise UsageError(f"optimizers={own['optimizers']}: expected adamw, sgd, or both")
        for parametrization in own["parametrizations"].split(","):
            changes = {
                "optimizer.name": optimizer,
                "optimizer.lr": own[f"lr.{optimizer}"],
                "parametrization": parametrization,
            }
            configs.append(
                apply(base, {**QUIET, "batch.sequences": "4", "batch.length": "64", **given, **changes})
            )
    return configs


def _read(configs: list[RunConfig], widths: list[int], steps: int, seeds: int) -> "list[Reading]":
    """Every reading, with a line for every configuration on the way."""
    from delta_trn.train.data import make_loader
    from delta_trn.train.run.subject import subject
    from delta_trn.train.studies.coordinates.check import readings

    found = []
    for config in configs:
        config, dataset = subject(config)

        def batch(seed: int, config=config, dataset=dataset):
            b = config.batch
            loader = make_loader(
                dataset, "train", kind="random_crop", batch=b.sequences, sequence=b.length, seed=seed
            )
            return loader.next_batch()

        began = time.monotonic()
        found += readings(config, widths=widths, steps=steps, seeds=range(seeds), batch=batch)
        took = time.monotonic() - began
        print(f"{config.optimizer.name} {config.parametrization}  {took:.0f} s", flush=True)
    return found


def _numbers(name: str, text: str, least: int = 1) -> list[int]:
    try:
        numbers = sorted({int(part) for part in text.split(",")})
    except ValueError:
        numbers = []
    if len(numbers) < least or numbers[0] < 1:
        raise UsageError(f"{name}={text}: expected {least} or more different whole numbers above 0")
    return numbers
