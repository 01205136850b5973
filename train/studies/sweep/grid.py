"""Defines what a sweep asks: a learning-rate curve for every arm,
parametrization, optimizer and width.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from delta_trn.train.recipes import recipe
from delta_trn.train.settings.effects import require_effect, require_effect_somewhere
from delta_trn.train.settings.errors import RunFolderError, UsageError
from delta_trn.train.settings.overrides import change, number, whole_numbers
from delta_trn.train.settings.schema import RunConfig
from delta_trn.train.studies.sweep.results import ANY, Place, place_of

AXES = {"widths", "lrs", "parametrizations", "optimizers", "seeds", "arms"}
# keys of the configuration that an axis replaces
SWEPT = {
    "model.width": "widths", "optimizer.lr": "lrs", "optimizer.name": "optimizers",
    "parametrization": "parametrizations", "seed": "seeds",
}  # fmt: skip
# Trials draw no samples, keep no best checkpoint and evaluate only at their end.
QUIET = {
    "sample.tokens": "0",
    "checkpoint.keep_best": "false",
    "checkpoint.keep_last": "1",
    "name": "trial",
}

Arms = Mapping[str, Mapping[str, str]]  # name of an alternative -> the keys that it changes


@dataclass(frozen=True)
class Trial:
    """One training run of a sweep, and where its result belongs."""

    arm: str
    parametrization: str
    optimizer: str
    width: int
    lr: float
    seed: int
    config: RunConfig

    def __str__(self) -> str:
        # an arm may be a parametrization and carry its name
        names = " ".join(
            dict.fromkeys(filter(None, (self.arm, self.parametrization, self.optimizer)))
        )
        return f"{names} width {self.width} lr 2^{math.log2(self.lr):.4g} seed {self.seed}"

    def coordinates(self) -> dict[str, str | int | float]:
        """Returns the part of a result that is known before the run is made."""
        return {name: value for name, value in vars(self).items() if name != "config"}

    @property
    def place(self) -> Place:
        return place_of(self.coordinates())

    @property
    def key(self) -> str:
        """Names its folder: a hash of its place, 12 hex digits."""
        return hashlib.sha256(json.dumps(self.place).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Sweep:
    """All trials of a sweep.

    asked   the recipe, axes and changes in the words of the command line, and arms as they were
            read: what is compared beside the axes, or one without a name
    """

    asked: dict[str, Any]
    trials: tuple[Trial, ...]

    def require_same(self, folder: Path) -> None:
        """Raises RunFolderError if the folder has results of something else than longer
        or shorter axes.
        """
        if not (folder / "sweep.json").exists():
            return
        before = json.loads((folder / "sweep.json").read_text())
        same = all(before[key] == self.asked[key] for key in ("recipe", "changes"))
        arms = before.get("arms", {"": {}})
        if not same or any(self.asked["arms"].get(name, arms[name]) != arms[name] for name in arms):
            raise RunFolderError(
                f"{folder} has results of another recipe, keys or arms: {json.dumps(before)}; "
                "choose another out=DIR"
            )


def define(name: str, options: Mapping[str, str]) -> Sweep:
    """Builds the sweep of a recipe from `options`, which mix axes with keys of the configuration.

    Raises UsageError or ConfigError, before anything runs, if some trial could not be made.
    """
    start = recipe(name)
    optimizers = _words("optimizers", options.get("optimizers", start.optimizer.name))
    known = AXES | {f"lrs.{optimizer}" for optimizer in optimizers}
    axes = {key: value for key, value in options.items() if key in known}
    changes = {key: value for key, value in options.items() if key not in known}
    for key, axis in SWEPT.items():
        if key in changes:
            raise UsageError(f"{key} is an axis of a sweep; give {axis}={changes[key]}")
    if "epochs" in changes:
        raise UsageError(
            f"epochs={changes['epochs']}: all trials of a sweep are equally long; give steps=N"
        )
    rates = {optimizer: _rates(optimizer, axes) for optimizer in optimizers}
    widths = sorted(whole_numbers("widths", axes.get("widths", str(start.model.width))))
    tables = _words("parametrizations", axes.get("parametrizations", start.parametrization))
    seeds = whole_numbers("seeds", axes.get("seeds", "0"), least=0)
    arms = parse_arms(axes["arms"]) if "arms" in axes else {"": {}}
    unique: dict[Place, Trial] = {}
    # the seed varies slowest: a sweep that is cut short has measured something completely
    for seed, optimizer, width, arm, table in product(seeds, optimizers, widths, arms, tables):
        for lr in rates[optimizer]:
            own = {
                "parametrization": table, "optimizer.name": optimizer, "optimizer.lr": repr(lr),
                "model.width": str(width), "seed": str(seed),
            }  # fmt: skip
            config = _config(start, changes, own, arms[arm])
            kind = config.parametrization  # an arm may set it
            if config.model.width == config.model.base_width:
                # every table says the same at m = 1: one run serves all of them
                kind, config = ANY, config.model_copy(update={"parametrization": "sp"})
            trial = Trial(arm, kind, optimizer, width, lr, seed, config)
            unique.setdefault(trial.place, trial)
    trials = tuple(unique.values())
    require_effect_somewhere([trial.config for trial in trials], changes)
    least = min(map(min, rates.values()))
    if "schedule.min_lr" in changes and number(changes["schedule.min_lr"]) > least:
        floor = changes["schedule.min_lr"]
        raise UsageError(
            f"schedule.min_lr={floor} is above the lowest rate, {least:g}; give that or less"
        )
    axes.pop("arms", None)
    return Sweep({"recipe": name, "axes": axes, "changes": changes, "arms": arms}, trials)


def _config(
    start: RunConfig, changes: Mapping[str, str], own: Mapping[str, str], arm: Mapping[str, str]
) -> RunConfig:
    """Returns the configuration of a trial: what all have, its place on the axes,
    and its arm's keys.
    """
    common = {**QUIET, **changes}
    if own["optimizer.name"] == "sgd" != start.optimizer.name:
        # SGD adds decay to the gradient, where it means something else; the paper's SGD has none
        common.setdefault("optimizer.weight_decay", "0")
    config = change(start, {**common, **own, **arm})
    require_effect(config, arm)
    # at a rate below the recipe's floor the schedule is constant: it must not rise
    low = repr(min(config.schedule.min_lr, config.optimizer.lr))
    return change(config, {"evaluation.every": str(config.steps), "schedule.min_lr": low})


def parse_arms(text: str) -> Arms:
    """Reads arms: one for every value of a key, named after it,
    or those of a file; else UsageError.
    """
    key, equals, values = text.partition("=")
    try:
        if equals:
            return {name: {key: name} for name in _words(f"arms={key}", values)}
        tree = json.loads(Path(text).read_text(encoding="utf-8"))
        return {
            name: {
                key: value if isinstance(value, str) else json.dumps(value)
                for key, value in keys.items()
            }
            for name, keys in tree.items()
        } or {"": {}}
    except (OSError, ValueError, AttributeError) as error:
        raise UsageError(
            f"arms={text} cannot be read ({error}); expected KEY=V1,V2, such as "
            "model.layers=2,4,8, or "
            'FILE.json with {"name": {"key": "value"}, ...}'
        ) from None


def _rates(optimizer: str, axes: Mapping[str, str]) -> list[float]:
    """Reads an optimizer's rates: `1e-3,2e-3`, or `2**-10..2**-4`,
    which doubles, or `1e-3..1e-1:10`.
    """
    name, text = f"lrs.{optimizer}", axes.get(f"lrs.{optimizer}", axes.get("lrs"))
    if text is None:
        raise UsageError(f"give {name}=2**-10..2**-4, or lrs=... for every optimizer")
    try:
        if ".." in text:
            ends, _, factor = text.partition(":")
            low, high = (number(end) for end in ends.split(".."))
            step = number(factor) if factor else 2.0
            if not (0 < low < high < math.inf and 1 < step < math.inf):
                raise ValueError
            count = math.floor(math.log(high / low) / math.log(step) + 1e-9) + 1
            rates = [low * step**i for i in range(count)]
        else:
            rates = [number(part) for part in text.split(",")]
        if len(set(rates)) < len(rates) or not all(0 < rate < math.inf for rate in rates):
            raise ValueError
    except (ValueError, OverflowError):
        raise UsageError(
            f"{name}={text}: expected different positive rates such as 1e-3,2e-3 or 2**-10..2**-4"
        ) from None
    return sorted(rates)


def _words(axis: str, text: str) -> list[str]:
    words = [part.strip() for part in text.split(",")]
    if not all(words) or len(set(words)) < len(words):
        raise UsageError(f"{axis}={text}: expected different names separated by commas")
    return words
