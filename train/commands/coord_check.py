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
    from delta_trn.train.studies.coordinates.modules import Reading

    Counts = Callable[[str], bool]

EPILOG = """keys of its own
  widths=64,128,256,512,1024        parametrizations=sp,mup_original,mup
  optimizers=adamw,sgd, or muon     lr.adamw=2**-8  lr.sgd=0.1  lr.muon=2**-8     at the base width
  steps=4  seeds=2                  out=runs/coord-check-RECIPE
  training=recipe                   50 steps with the recipe's batches, schedule, clipping and weight decay

and any key=value of `run`, such as batch.length=128. Without training=recipe one small batch is trained on
over and over at a constant rate, with no clipping or weight decay unless given, and mixers begin at full size
(model.mixer_output_init=1): from 0 they pass no gradient on at first.

keys of --module, for any torch.nn.Module: FUNCTION(width) makes the model, the smallest width is muP's base
  widths=64,128,256                 parametrizations=plain,mup     plain: one rate, its own initial values
  optimizers=adamw                  lr.adamw=2**-8  lr.sgd=0.1     at the smallest width
  steps=4  seeds=8  device=cpu      out=runs/coord-check-FUNCTION
  batch=PACKAGE:FUNCTION            from a seed to the arguments of forward; else random tokens
  roles=*.scale:vector,...          where shapes do not tell a parameter's role
  readout_init=0                    times the readout's initial values, except under plain

Exit status 1: a module fails under the recipe's own parametrization; with --module, under any but plain.
"""
DEFAULTS = {
    "widths": "64,128,256,512,1024", "parametrizations": "sp,mup_original,mup", "optimizers": "adamw,sgd",
    "lr.adamw": "2**-8", "lr.sgd": "0.1", "lr.muon": "2**-8", "steps": "4", "seeds": "2", "training": "plain",
}  # fmt: skip
OF_MODULES = {
    "widths": "64,128,256", "parametrizations": "plain,mup", "optimizers": "adamw", "lr.adamw": "2**-8",
    "lr.sgd": "0.1", "steps": "4", "seeds": "8", "device": "cpu", "batch": "", "roles": "",
    "readout_init": "0",
}  # fmt: skip
QUIET = {
    "optimizer.clip": "none", "optimizer.weight_decay": "0", "precision": "float32", "batch.sequences": "4",
    "batch.length": "64", "model.mixer_output_init": "1",
}  # fmt: skip
# keys of the configuration that the command's own keys replace
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
    if not asked.module and not asked.recipe:
        raise UsageError("name a recipe (`delta-trn` lists them), or pass --module package:function")
    words = [*filter(None, [asked.module and asked.recipe]), *asked.options]
    options, subject = parse(words), asked.module or asked.recipe
    out = Path(options.pop("out", f"runs/coord-check-{subject.rpartition(':')[2]}"))
    start = time.monotonic()
    find = _module_readings if asked.module else _recipe_readings
    counts, readings = find(subject, options)

    from delta_trn.train.studies.coordinates.report import judge, table, write

    print("power of width of each output's size before training, and of its change after the last step")
    head = {"subject": subject, "keys": options, "seconds": round(time.monotonic() - start, 1)}
    picture, rows = write(out, head, readings), judge(readings)
    print(table(rows))
    failures = [v for v in rows if counts(v.parametrization) and not v.passes]
    for v in failures:
        print(f"fails  {v.optimizer} {v.parametrization} {v.tensor}: {', '.join(v.fails_at)}")
    print(f"\n{head['seconds']:.0f} s   {out / 'coordinates.json'}   {picture}")
    return 1 if failures else 0


def _recipe_readings(recipe: str, options: dict[str, str]) -> "tuple[Counts, list[Reading]]":
    """Trains our own models. Returns which parametrizations decide the exit status, and what was read."""
    own = DEFAULTS | ({"steps": "50"} if options.get("training") == "recipe" else {})
    own |= {key: options[key] for key in options.keys() & own.keys()}
    changes = {key: value for key, value in options.items() if key not in own}
    if own["training"] not in ("plain", "recipe"):
        raise UsageError(f"training={own['training']}: expected plain or recipe")
    base = announced(recipe)
    configs = _configs(base, changes, own)
    axes = {**_sizes(own), "scheduled": own["training"] == "recipe"}
    rows = [row for config in configs for row in _train(config, axes)]
    return lambda name: name == base.parametrization, rows


def _configs(base: RunConfig, changes: Mapping[str, str], own: Mapping[str, str]) -> list[RunConfig]:
    """Makes and checks a configuration for every optimizer and parametrization."""
    for key in AXES.keys() & changes.keys():
        raise UsageError(f"{key}={changes[key]}: this is an axis of coord-check; give {AXES[key]}=...")
    optimizers = own["optimizers"].split(",")
    if not set(optimizers) <= set(OPTIMIZERS):
        raise UsageError(f"optimizers={own['optimizers']}: expected some of {','.join(OPTIMIZERS)}")
    quiet = {"precision": "float32"} if own["training"] == "recipe" else QUIET
    configs = []
    for optimizer, table in product(optimizers, own["parametrizations"].split(",")):
        axes = {"optimizer.name": optimizer, "optimizer.lr": own[f"lr.{optimizer}"], "parametrization": table}
        configs.append(change(base, {**quiet, **changes, **axes}))
    require_effect_somewhere(configs, changes)
    return configs


def _train(config: RunConfig, axes: Mapping[str, Any]) -> "list[Reading]":
    """Takes the readings of a configuration, and prints how long that took."""
    from delta_trn.train.data import make_loader
    from delta_trn.train.run.setup import load_dataset, set_up_process, with_data
    from delta_trn.train.studies.coordinates.modules import recipe_readings

    start = time.monotonic()
    config, _ = set_up_process(config)
    dataset = load_dataset(config)
    config = with_data(config, dataset)

    def batches(seed: int) -> "Iterator[Batch]":
        loader = make_loader(
            dataset, "train", kind="random_crop", batch=config.batch.sequences,
            sequence=config.batch.length, seed=seed,
        )  # fmt: skip
        first = loader.next_batch()
        yield first
        while True:
            yield loader.next_batch() if axes["scheduled"] else first

    rows = list(recipe_readings(config, **axes, batches=batches))
    name = f"{config.optimizer.name} {config.parametrization}"
    print(f"{name}  {time.monotonic() - start:.0f} s", flush=True)
    return rows


def _module_readings(place: str, options: dict[str, str]) -> "tuple[Counts, list[Reading]]":
    """Trains the models of a function of the caller's. Returns the same as `_recipe_readings`."""
    if unknown := options.keys() - OF_MODULES.keys():
        raise UsageError(f"--module has no key {min(unknown)!r}; its keys: out, {', '.join(OF_MODULES)}")
    own = OF_MODULES | options
    make = _load("--module", place)

    from delta_trn.models.mup import TABLES
    from delta_trn.train.studies.coordinates.modules import PLAIN, Plan, module_readings, require_widths

    rates = {key.removeprefix("lr."): _positive(key, own[key]) for key in own if key.startswith("lr.")}
    for key, words in (("parametrizations", (PLAIN, *TABLES)), ("optimizers", tuple(rates))):
        if not set(own[key].split(",")) <= set(words):
            raise UsageError(f"{key}={own[key]}: expected {', '.join(words)}")
    plan = Plan(
        **_sizes(own),
        make=make,
        rates=rates,
        batch=_load("batch", own["batch"]) if own["batch"] else None,
        roles=_pairs("roles", own["roles"]),
        readout_init=_positive("readout_init", own["readout_init"]),
        device=own["device"],
    )
    tables = own["parametrizations"].split(",")
    require_widths(plan, tables)
    kinds = product(own["optimizers"].split(","), tables)
    rows = [row for optimizer, table in kinds for row in module_readings(plan, table, optimizer)]
    return lambda name: name != PLAIN, rows


def _sizes(own: Mapping[str, str]) -> dict[str, Any]:
    widths = sorted(whole_numbers("widths", own["widths"], count=3))
    return {"widths": widths, **{key: whole_number(key, own[key]) for key in ("steps", "seeds")}}


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
