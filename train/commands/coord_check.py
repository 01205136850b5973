"""delta-trn coord-check RECIPE|--module PACKAGE:FUNCTION [widths=64,128,...] [key=value ...]"""

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from delta_trn.models.mup import OPTIMIZERS
from delta_trn.train.recipes import announce
from delta_trn.train.settings.effects import require_effect_somewhere
from delta_trn.train.settings.errors import UsageError
from delta_trn.train.settings.overrides import (
    change,
    parse,
    read_arguments,
    whole_number,
    whole_numbers,
)
from delta_trn.train.settings.schema import RunConfig

if TYPE_CHECKING:
    from delta_trn.train.studies.coordinates.modules import Start

    # the parametrizations that decide the exit status; of each and an optimizer, what starts its
    # models
    Starts = tuple[set[str], dict[tuple[str, str], Start]]

EPILOG = """keys of its own
  widths=64,128,256,512             parametrizations=sp,mup     or mup_original
  optimizers=adamw,sgd,muon         lr.adamw=2**-8  lr.sgd=2**-8  lr.muon=2**-8   at the base width
  steps=4  seeds=8                  out=runs/coord-check-RECIPE

and any key of `run` of the model or the optimizer. One batch of random tokens is trained on over and over at
a constant rate, without clipping, and without weight decay unless given. Mixers begin at full size
(model.mixer_output_init=1): from 0 they pass no gradient on at first.

keys of --module, for any torch.nn.Module: FUNCTION(width) makes the model, the smallest width is muP's base
  widths=64,128,256                 parametrizations=plain,mup     plain: one rate, its own initial values
  optimizers=adamw                  lr.adamw=2**-8  lr.sgd=0.1     at the smallest width
  steps=4  seeds=8                  out=runs/coord-check-FUNCTION
  optimizer=PACKAGE:FUNCTION        instead of muP's: (model, width) -> the optimizer of your own script
  batch=PACKAGE:FUNCTION            from a seed to the arguments of forward; else random tokens
  roles=*.scale:vector,...          where shapes do not tell a parameter's role

Rows are modules' outputs; gains, taps, biases and numbers of heads themselves; each matrix's own update,
(W - W_0) x_0; attention's logits; and what bare parameters are used for. Where a slope has a standard error
above 0.1 more seeds are run, up to 16. Exit status 1: a row fails under the recipe's own parametrization;
with --module, under any but plain. Exit status 3: none fails, and one is not decided by 16 seeds.
"""
OF_RECIPES = {
    "widths": "64,128,256,512", "parametrizations": "sp,mup", "optimizers": "adamw,sgd,muon",
    "lr.adamw": "2**-8", "lr.sgd": "2**-8", "lr.muon": "2**-8", "steps": "4", "seeds": "8",
}  # fmt: skip
OF_MODULES = {
    "widths": "64,128,256",
    "parametrizations": "plain,mup",
    "optimizers": "adamw",
    "lr.adamw": ("2**-8"),
    "lr.sgd": "0.1",
    "steps": "4",
    "seeds": "8",
    "batch": "",
    "roles": "",
    "optimizer": "",
}
QUIET = {"optimizer.weight_decay": "0", "model.mixer_output_init": "1"}
# Kimi Delta Attention's output gate begins at sigmoid(0), six times SiLU's: from full size AdamW's
# steps of 2^-8 are not small.
OF_KIMI = {"lr.adamw": "2**-9"}, {"model.mixer_output_init": "0.25"}
MOST_SEEDS = 16
UNDECIDED = 3  # the exit status where no row fails and one is not decided
# keys of the configuration that the command's own keys replace
AXES = {"model.width": "widths", "optimizer.name": "optimizers", "optimizer.lr": "lr.adamw"}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="delta-trn coord-check",
        description=(
            "Whether what a model computes, and what a few steps change of it, depends on its "
            "width."
        ),
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "recipe", metavar="RECIPE", nargs="?", help="a named run; `delta-trn` lists them"
    )
    parser.add_argument(
        "--module", metavar="PACKAGE:FUNCTION", help="instead: what makes a model of a width"
    )
    parser.add_argument(
        "options", nargs="*", metavar="key=value", help="keys, those below among them"
    )
    asked = read_arguments(parser, arguments)
    if not asked.module and not asked.recipe:
        raise UsageError(
            "name a recipe (`delta-trn` lists them), or pass --module package:function"
        )
    words = [*filter(None, [asked.module and asked.recipe]), *asked.options]
    options, subject = parse(words), asked.module or asked.recipe
    out = Path(options.pop("out", f"runs/coord-check-{subject.rpartition(':')[2]}"))
    own = OF_MODULES if asked.module else OF_RECIPES
    changes = {key: options.pop(key) for key in [*options] if key not in own}
    if changes.get("model.mixer") == "kimi_delta_attention":
        own, changes = own | OF_KIMI[0], OF_KIMI[1] | changes
    own = own | options
    sizes: dict[str, Any] = {key: whole_number(key, own[key]) for key in ("steps", "seeds")}
    sizes["widths"] = sorted(whole_numbers("widths", own["widths"], count=3))
    begun, find = time.monotonic(), _starts_of_module if asked.module else _starts_of_recipe
    counts, starts = find(subject, own, changes)

    from delta_trn.train.studies.coordinates.modules import readings
    from delta_trn.train.studies.coordinates.report import judge, table, write

    batch = _load("batch", own["batch"]) if own.get("batch") else None
    read = [
        row
        for kind, start in starts.items()
        for row in readings(start, *kind, **sizes, batch=batch)
    ]
    more = MOST_SEEDS - sizes["seeds"]
    for kind, start in starts.items():
        noisy = [v for v in judge(read) if (v.parametrization, v.optimizer) == kind and v.undecided]
        if noisy and kind[0] in counts and more > 0:
            print(f"{kind[1]} {kind[0]}: {len(noisy)} rows are not decided, {more} more seeds")
            extra = {**sizes, "first_seed": sizes["seeds"], "seeds": more}
            # rows that are decided keep their seeds: each is judged once
            wanted = {v.tensor for v in noisy}
            read += [r for r in readings(start, *kind, **extra, batch=batch) if r.tensor in wanted]
    head = {
        "subject": subject,
        "keys": {**own, **changes},
        "seconds": round(time.monotonic() - begun, 1),
    }
    picture, rows = write(out, head, read), judge(read)
    print(
        "power of width of each output's size before training, and of its change after the last "
        "step"
    )
    print(table(rows))
    failures = [v for v in rows if v.parametrization in counts and not v.passes]
    for v in failures:
        print(f"fails  {v.optimizer} {v.parametrization} {v.tensor}: {', '.join(v.fails_at)}")
    unsure = [v for v in rows if v.parametrization in counts and v.passes and v.undecided]
    for v in unsure:
        print(
            f"not decided  {v.optimizer} {v.parametrization} {v.tensor}: {', '.join(v.undecided)}"
        )
    print(f"\n{head['seconds']:.0f} s   {out / 'coordinates.json'}   {picture}")
    return 1 if failures else UNDECIDED if unsure else 0


def _starts_of_recipe(recipe: str, own: Mapping[str, str], changes: Mapping[str, str]) -> "Starts":
    """Checks a configuration for every optimizer and parametrization,
    and returns what starts its models.
    """
    for key in changes:
        if key in AXES:
            raise UsageError(
                f"{key}={changes[key]}: this is an axis of coord-check; give {AXES[key]}=..."
            )
    optimizers = own["optimizers"].split(",")
    if not set(optimizers) <= set(OPTIMIZERS):
        raise UsageError(f"optimizers={own['optimizers']}: expected some of {','.join(OPTIMIZERS)}")
    base, configs = announce(recipe), {}
    for optimizer, table in product(optimizers, own["parametrizations"].split(",")):
        axes = {
            "optimizer.name": optimizer,
            "optimizer.lr": own[f"lr.{optimizer}"],
            "parametrization": table,
        }
        configs[table, optimizer] = change(base, {**QUIET, **changes, **axes})
    require_effect_somewhere([*configs.values()], changes)
    for key in changes:
        if key != "device" and (not key.startswith(("model.", "optimizer.")) or "clip" in key):
            raise UsageError(
                f"{key}={changes[key]} has no effect: coord-check trains on random tokens and does "
                "not clip; give keys of the model and the optimizer"
            )

    from delta_trn.train.studies.coordinates.modules import of_recipe

    return {base.parametrization}, {kind: of_recipe(config) for kind, config in configs.items()}


def _starts_of_module(place: str, own: Mapping[str, str], changes: Mapping[str, str]) -> "Starts":
    """Does the same for the models of a function of the caller's."""
    if changes:
        raise UsageError(
            f"--module has no key {min(changes)!r}; its keys: out, {', '.join(OF_MODULES)}"
        )
    make = _load("--module", place)

    from delta_trn.models.mup import TABLES
    from delta_trn.train.studies.coordinates.modules import OWN, PLAIN, Maker

    lrs = {name: own[f"lr.{name}"] for name in ("adamw", "sgd")}
    rates = {
        name: change(RunConfig(), {"optimizer.lr": lr}).optimizer.lr for name, lr in lrs.items()
    }
    for key, words in (("parametrizations", (PLAIN, *TABLES)), ("optimizers", tuple(rates))):
        if not set(own[key].split(",")) <= set(words):
            raise UsageError(f"{key}={own[key]}: expected {', '.join(words)}")
    widths = whole_numbers("widths", own["widths"])
    maker = Maker(make, min(widths), _roles(own["roles"]))
    maker.require_growth(max(widths), of_mup=not own["optimizer"])
    if own["optimizer"]:
        for key in ("parametrizations", "optimizers", "lr.adamw", "lr.sgd", "roles"):
            if own[key] != OF_MODULES[key]:
                raise UsageError(
                    f"{key}={own[key]} has no effect: optimizer={own['optimizer']} decides that"
                )
        own_start = maker.start_own(_load("optimizer", own["optimizer"]))
        return {OWN}, {(OWN, own["optimizer"].rpartition(":")[2]): own_start}
    kinds = product(own["parametrizations"].split(","), own["optimizers"].split(","))
    return {*TABLES}, {kind: maker.start(*kind, rates[kind[1]]) for kind in kinds}


def _roles(text: str) -> dict[str, str]:
    pairs = [part.rpartition(":") for part in text.split(",") if part]
    if not all(pattern for pattern, *_ in pairs):
        raise UsageError(f"roles={text}: expected pattern:role, separated by commas")
    return {pattern: role for pattern, _, role in pairs}


def _load(option: str, place: str) -> Any:
    """Returns the function that `package.module:name` names. Raises UsageError if there is none."""
    sys.path.insert(0, os.getcwd())  # the console script does not search the folder one stands in
    try:
        function = resolve_name(place)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(
            f"{option}={place}: {error}; expected package.module:function, importable from this "
            "folder"
        ) from None
    finally:
        sys.path.pop(0)
    if not callable(function):
        raise UsageError(f"{option}={place} is a {type(function).__name__}, expected a function")
    return function
