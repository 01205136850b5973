"""delta-trn coord-check RECIPE [widths=64,128,...] [key=value ...]"""

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from delta_trn.models.mup import OPTIMIZERS
from delta_trn.train.recipes import announced
from delta_trn.train.settings.effects import require_effect_somewhere
from delta_trn.train.settings.errors import UsageError
from delta_trn.train.settings.overrides import change, parse, read_arguments, whole_number, whole_numbers
from delta_trn.train.settings.schema import RunConfig

if TYPE_CHECKING:
    from delta_trn.train.studies.coordinates.check import Reading

EPILOG = """keys of its own
  widths=64,128,256,512,1024        parametrizations=sp,mup_original,mup
  optimizers=adamw,sgd, or muon     lr.adamw=2**-8  lr.sgd=0.1  lr.muon=2**-8     at the base width
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
    "lr.muon": "2**-8",
    "steps": "4",
    "seeds": "2",
}
QUIET = {
    "optimizer.clip": "none",
    "optimizer.weight_decay": "0",
    "precision": "float32",
    "batch.sequences": "4",
    "batch.length": "64",
}

# Settings that the axes replace.
AXES = {
    "model.width": "widths",
    "seed": "seeds",
    "parametrization": "parametrizations",
    "optimizer.name": "optimizers",
    "optimizer.lr": "lr.adamw, lr.sgd, lr.muon",
}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="delta-trn coord-check",
        description="Whether what a model computes, and what a few steps change of it, depends on its width.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", metavar="RECIPE", help="a named run; `delta-trn` lists them")
    parser.add_argument("options", nargs="*", metavar="key=value", help="keys, those below among them")
    asked = read_arguments(parser, arguments)
    options = parse(asked.options)
    out = Path(options.pop("out", f"runs/coord-check-{asked.recipe}"))
    rates = [key for key in options if key.startswith("lr.")]
    own = {key: options.pop(key, default) for key, default in DEFAULTS.items()}
    for key in rates:
        if key.removeprefix("lr.") not in own["optimizers"].split(","):
            names = own["optimizers"]
            raise UsageError(f"{key} is for an optimizer that is not checked; optimizers={names}")
    base = announced(asked.recipe)
    configs = _configs(base, options, own)
    widths = sorted(whole_numbers("widths", own["widths"], count=3))
    steps, seeds = whole_number("steps", own["steps"]), whole_number("seeds", own["seeds"])
    start, cpu = time.monotonic(), time.process_time()

    from delta_trn.train.studies.coordinates.check import slopes, verdicts
    from delta_trn.train.studies.coordinates.report import table, write

    readings = _read(configs, widths, steps, seeds)
    seconds, cpu_seconds = time.monotonic() - start, time.process_time() - cpu
    head = {
        "recipe": asked.recipe,
        "keys": {**own, **options},
        "base_width": configs[0].model.base_width,
        "seconds": round(seconds, 1),
        "cpu_seconds": round(cpu_seconds, 1),
    }
    pictures = write(out, head, readings)
    rows = verdicts(slopes(readings))
    print(f"power of width with which {steps} steps change each tensor, beside what theory says")
    print(table(rows))
    failures = [v for v in rows if v.parametrization == base.parametrization and not v.passes]
    for v in failures:
        print(f"fails  {v.optimizer} {v.parametrization} {v.tensor}: {', '.join(v.fails_at)}")
    print(f"\n{seconds:.0f} s, {cpu_seconds:.1f} of CPU")
    print("   ".join(map(str, (out / "coordinates.json", *pictures))))
    return 1 if failures else 0


def _configs(base: RunConfig, options: Mapping[str, str], own: Mapping[str, str]) -> list[RunConfig]:
    """Makes and checks a configuration for every optimizer and parametrization."""
    for key, axis in AXES.items():
        if key in options:
            raise UsageError(f"{key}={options[key]}: this is an axis of coord-check; give {axis}=...")
    configs = []
    for optimizer in own["optimizers"].split(","):
        if optimizer not in OPTIMIZERS:
            raise UsageError(f"optimizers={own['optimizers']}: expected some of {','.join(OPTIMIZERS)}")
        for parametrization in own["parametrizations"].split(","):
            changes = {
                "optimizer.name": optimizer,
                "optimizer.lr": own[f"lr.{optimizer}"],
                "parametrization": parametrization,
            }
            configs.append(change(base, {**QUIET, **options, **changes}))
    require_effect_somewhere(configs, options)
    return configs


def _read(configs: list[RunConfig], widths: list[int], steps: int, seeds: int) -> "list[Reading]":
    """Takes every reading, and prints a line for each configuration on the way."""
    from delta_trn.train.data import make_loader
    from delta_trn.train.run.setup import load_dataset, set_up_process, with_data
    from delta_trn.train.studies.coordinates.check import readings

    rows = []
    for config in configs:
        config, _ = set_up_process(config)
        dataset = load_dataset(config)
        config = with_data(config, dataset)

        def batch(seed: int, config=config, dataset=dataset):
            b = config.batch
            loader = make_loader(
                dataset, "train", kind="random_crop", batch=b.sequences, sequence=b.length, seed=seed
            )
            return loader.next_batch()

        start = time.monotonic()
        rows += readings(config, widths=widths, steps=steps, seeds=range(seeds), batch=batch)
        seconds = time.monotonic() - start
        print(f"{config.optimizer.name} {config.parametrization}  {seconds:.0f} s", flush=True)
    return rows
