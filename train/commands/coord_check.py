"""delta-trn coord-check RECIPE|--module PACKAGE:FUNCTION [widths=64,128,...] [key=value ...]"""

import argparse
import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from delta_trn.models.mup import OPTIMIZERS
from delta_trn.train.recipes import announced
from delta_trn.train.settings.effects import require_effect_somewhere
from delta_trn.train.settings.errors import UsageError
from delta_trn.train.settings.overrides import (
    change,
    number,
    parse,
    read_arguments,
    whole_number,
    whole_numbers,
)
from delta_trn.train.settings.schema import RunConfig

if TYPE_CHECKING:
    from delta_trn.train.data import Batch
    from delta_trn.train.studies.coordinates.check import Reading

EPILOG = """keys of its own
  widths=64,128,256,512,1024        parametrizations=sp,mup_original,mup
  optimizers=adamw,sgd, or muon     lr.adamw=2**-8  lr.sgd=0.1  lr.muon=2**-8     at the base width
  steps=4  seeds=2                  out=runs/coord-check-RECIPE
  training=recipe                   50 steps with the recipe's batches, schedule, clipping and weight decay

and any key=value of `run`, such as batch.length=128. Without training=recipe one small batch is trained on
over and over at a constant rate, with no clipping or weight decay unless given, and mixers begin at full size
(model.mixer_output_init=1): from 0 they pass no gradient on at first.
Exit status 1: a tensor fails under the recipe's own parametrization.

keys of --module, for any torch.nn.Module: FUNCTION(width) makes the model, the smallest width is muP's base
  widths=64,128,256                 parametrizations=plain,mup     plain: one rate, its own initial values
  optimizers=adamw                  lr.adamw=2**-8  lr.sgd=0.1     at the smallest width
  steps=4  seeds=8  device=cpu      out=runs/coord-check-FUNCTION
  batch=PACKAGE:FUNCTION            from a seed to the arguments of forward; else random tokens
  roles=*.scale:vector,...          where shapes do not tell a parameter's role
  readout_init=0                    times the readout's initial values, except under plain
  heads=grow                        allows heads that grow, which shared softmax attention does not

Exit status 1: a module fails under another parametrization than plain.
"""
DEFAULTS = {
    "widths": "64,128,256,512,1024", "parametrizations": "sp,mup_original,mup", "optimizers": "adamw,sgd",
    "lr.adamw": "2**-8", "lr.sgd": "0.1", "lr.muon": "2**-8", "steps": "4", "seeds": "2", "training": "plain",
}  # fmt: skip
OF_MODULES = {
    "widths": "64,128,256", "parametrizations": "plain,mup", "optimizers": "adamw", "lr.adamw": "2**-8",
    "lr.sgd": "0.1", "steps": "4", "seeds": "8", "device": "cpu", "batch": "", "roles": "",
    "readout_init": "0", "heads": "stay",
}  # fmt: skip
QUIET = {
    "optimizer.clip": "none", "optimizer.weight_decay": "0", "precision": "float32", "batch.sequences": "4",
    "batch.length": "64", "model.mixer_output_init": "1",
}  # fmt: skip
# Settings that the axes replace.
AXES = {
    "model.width": "widths", "seed": "seeds", "parametrization": "parametrizations",
    "optimizer.name": "optimizers", "optimizer.lr": "lr.adamw, lr.sgd, lr.muon",
}  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="delta-trn coord-check",
        description="Whether what a model computes, and what a few steps change of it, depends on its width.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", metavar="RECIPE", nargs="?", help="a named run; `delta-trn` lists them")
    parser.add_argument("--module", metavar="PACKAGE:FUNCTION", help="instead: what makes a model of a width")
    parser.add_argument("options", nargs="*", metavar="key=value", help="keys, those below among them")
    asked = read_arguments(parser, arguments)
    if asked.module:
        return _check_module(asked.module, parse([*filter(None, [asked.recipe]), *asked.options]))
    if not asked.recipe:
        raise UsageError("name a recipe (`delta-trn` lists them), or pass --module package:function")
    return _check_recipe(asked.recipe, parse(asked.options))


def _check_recipe(recipe: str, options: dict[str, str]) -> int:
    """Checks our own models."""
    out = Path(options.pop("out", f"runs/coord-check-{recipe}"))
    rates = [key.removeprefix("lr.") for key in options if key.startswith("lr.")]
    scheduled = options.get("training") == "recipe"
    defaults = {**DEFAULTS, "steps": "50"} if scheduled else DEFAULTS
    own = {key: options.pop(key, default) for key, default in defaults.items()}
    if own["training"] not in ("plain", "recipe"):
        raise UsageError(f"training={own['training']}: expected plain or recipe")
    for name in rates:
        if name not in own["optimizers"].split(","):
            names = own["optimizers"]
            raise UsageError(f"lr.{name} is for an optimizer that is not checked; optimizers={names}")
    base = announced(recipe)
    configs = _configs(base, options, own)
    axes: dict[str, Any] = {
        "widths": sorted(whole_numbers("widths", own["widths"], count=3)),
        "steps": whole_number("steps", own["steps"]),
        "seeds": range(whole_number("seeds", own["seeds"])),
    }
    start = time.monotonic(), time.process_time()
    rows = [row for config in configs for row in _read(config, axes, scheduled)]
    head = {"recipe": recipe, "keys": {**own, **options}, "base_width": configs[0].model.base_width}
    print(f"power of width with which {own['steps']} steps change each tensor, beside what theory says")
    return _conclude(out, head, rows, start, lambda name: name == base.parametrization)


def _configs(base: RunConfig, options: Mapping[str, str], own: Mapping[str, str]) -> list[RunConfig]:
    """Makes and checks a configuration for every optimizer and parametrization."""
    for key, axis in AXES.items():
        if key in options:
            raise UsageError(f"{key}={options[key]}: this is an axis of coord-check; give {axis}=...")
    optimizers, tables = own["optimizers"].split(","), own["parametrizations"].split(",")
    if not set(optimizers) <= set(OPTIMIZERS):
        raise UsageError(f"optimizers={own['optimizers']}: expected some of {','.join(OPTIMIZERS)}")
    quiet = {"precision": "float32"} if own["training"] == "recipe" else QUIET
    configs = []
    for optimizer, table in product(optimizers, tables):
        rate = own[f"lr.{optimizer}"]
        changes = {"optimizer.name": optimizer, "optimizer.lr": rate, "parametrization": table}
        configs.append(change(base, {**quiet, **options, **changes}))
    require_effect_somewhere(configs, options)
    return configs


def _read(config: RunConfig, axes: Mapping[str, Any], scheduled: bool) -> "list[Reading]":
    """Takes the readings of a configuration, and prints how long that took."""
    from delta_trn.train.data import make_loader
    from delta_trn.train.run.setup import load_dataset, set_up_process, with_data
    from delta_trn.train.studies.coordinates.ours import readings

    start = time.monotonic()
    config, _ = set_up_process(config)
    dataset = load_dataset(config)
    config = with_data(config, dataset)

    def batches(seed: int) -> "Iterator[Batch]":
        sizes = {"batch": config.batch.sequences, "sequence": config.batch.length}
        loader = make_loader(dataset, "train", kind="random_crop", **sizes, seed=seed)
        first = loader.next_batch()
        yield first
        while True:
            yield loader.next_batch() if scheduled else first

    rows = list(readings(config, **axes, batches=batches, scheduled=scheduled))
    seconds = time.monotonic() - start
    print(f"{config.optimizer.name} {config.parametrization}  {seconds:.0f} s", flush=True)
    return rows


def _check_module(place: str, options: dict[str, str]) -> int:
    """Checks the models of a function of the caller's."""
    unknown = options.keys() - {*OF_MODULES, "out"}
    if unknown:
        raise UsageError(f"--module has no key {min(unknown)!r}; its keys: out, {', '.join(OF_MODULES)}")
    out = Path(options.pop("out", f"runs/coord-check-{place.rpartition(':')[2]}"))
    own = OF_MODULES | options
    make = _load("--module", place)

    from delta_trn.models.mup import TABLES
    from delta_trn.train.studies.coordinates.modules import PLAIN, Plan, readings, require_widths

    optimizers = ("adamw", "sgd")
    axes = {"parametrizations": (PLAIN, *TABLES), "optimizers": optimizers, "heads": ("stay", "grow")}
    for key, words in axes.items():
        if not set(own[key].split(",")) <= set(words):
            raise UsageError(f"{key}={own[key]}: expected {', '.join(words)}")
    plan = Plan(
        make=make,
        widths=sorted(whole_numbers("widths", own["widths"], count=3)),
        steps=whole_number("steps", own["steps"]),
        seeds=whole_number("seeds", own["seeds"]),
        rates={name: _positive(f"lr.{name}", own[f"lr.{name}"]) for name in optimizers},
        batch=_load("batch", own["batch"]) if own["batch"] else None,
        roles=_pairs("roles", own["roles"]),
        readout_init=_positive("readout_init", own["readout_init"]),
        heads_grow=own["heads"] == "grow",
        device=own["device"],
    )
    start, tables = (time.monotonic(), time.process_time()), own["parametrizations"].split(",")
    require_widths(plan, tables)
    kinds = product(own["optimizers"].split(","), tables)
    rows = [row for optimizer, table in kinds for row in readings(plan, table, optimizer)]
    print(f"power of width of each output's size before training, and of its change after {plan.steps} steps")
    return _conclude(out, {"module": place, "keys": own}, rows, start, lambda name: name != PLAIN)


def _positive(key: str, text: str) -> float:
    with contextlib.suppress(ValueError, OverflowError):
        if 0 <= (value := number(text)) < math.inf:
            return value
    raise UsageError(f"{key}={text}: expected a number of at least 0, such as 0.01 or 2**-8")


def _pairs(key: str, text: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for part in filter(None, text.split(",")):
        pattern, _, role = part.rpartition(":")
        pairs[pattern] = role
    if not all(pairs):
        raise UsageError(f"{key}={text}: expected pattern:role, separated by commas")
    return pairs


def _load(option: str, place: str) -> Any:
    """Returns the function that `package.module:name` names. Raises UsageError if there is none."""
    module, _, name = place.partition(":")
    sys.path.insert(0, os.getcwd())  # the console script does not search the folder one stands in
    try:
        function = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(
            f"{option}={place}: {error}; expected package.module:function, importable from this folder"
        ) from None
    finally:
        sys.path.pop(0)
    if not callable(function):
        raise UsageError(f"{option}={place} is a {type(function).__name__}, expected a function")
    return function


def _conclude(
    out: Path,
    head: dict[str, Any],
    rows: "list[Reading]",
    start: tuple[float, float],
    counts: Callable[[str], bool],
) -> int:
    """Writes and prints what the readings show. Returns 1 if a parametrization that counts fails."""
    from delta_trn.train.studies.coordinates.check import slopes, verdicts
    from delta_trn.train.studies.coordinates.report import table, write

    seconds, cpu = time.monotonic() - start[0], time.process_time() - start[1]
    pictures = write(out, head | {"seconds": round(seconds, 1), "cpu_seconds": round(cpu, 1)}, rows)
    judged = verdicts(slopes(rows))
    print(table(judged, sizes="module" in head))
    failures = [v for v in judged if counts(v.parametrization) and not v.passes]
    for v in failures:
        print(f"fails  {v.optimizer} {v.parametrization} {v.tensor}: {', '.join(v.fails_at)}")
    print(f"\n{seconds:.0f} s, {cpu:.1f} of CPU")
    print("   ".join(map(str, (out / "coordinates.json", *pictures))))
    return 1 if failures else 0
