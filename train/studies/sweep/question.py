"""Defines what a sweep asks: a learning-rate curve for every arm, parametrization, optimizer and width.

QUESTIONS holds the sweeps that need no axes on the command line.
"""

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path

from delta_trn.models.mup import OPTIMIZERS
from delta_trn.train.recipes import recipe
from delta_trn.train.settings.effects import require_effect, require_effect_somewhere
from delta_trn.train.settings.errors import UsageError
from delta_trn.train.settings.overrides import change, number, whole_number, whole_numbers
from delta_trn.train.settings.schema import NOT_MATHEMATICS, RunConfig, flatten, is_one_of
from delta_trn.train.studies.sweep.arms import Arm, parse_arms

_RATES = tuple(f"lrs.{name}" for name in OPTIMIZERS)
AXES = ("widths", "lrs", *_RATES, "parametrizations", "optimizers", "seeds", "arms", "refine")

# Trials draw no samples, keep no best checkpoint and evaluate only at their end.
QUIET = {"sample.tokens": "0", "checkpoint.keep_best": "false", "checkpoint.keep_last": "1", "name": "trial"}

_DEFAULTS = dict(flatten(RunConfig()))


@dataclass(frozen=True, order=True)
class Series:
    """Curves of several widths that belong together: a sweep asks how their optimum moves with width."""

    arm: str
    parametrization: str
    optimizer: str

    def __str__(self) -> str:
        # an arm may be a parametrization and carry its name
        parts = dict.fromkeys((self.arm, self.parametrization, self.optimizer))
        return " ".join(part for part in parts if part)


@dataclass(frozen=True)
class Trial:
    """One training run. Trials with equal `key` are the same run, which is made once."""

    series: Series
    width: int
    lr: float
    seed: int
    config: RunConfig

    def __str__(self) -> str:
        return f"{self.series} width {self.width} lr 2^{math.log2(self.lr):.4g} seed {self.seed}"

    @cached_property
    def key(self) -> str:
        """Hashes every setting that its loss depends on and that differs from the default, to 12 hex digits.

        The configuration's fingerprint will not do: every new setting changes it, and results would be lost.
        """
        settings = {
            key: value
            for key, value in flatten(self.config)
            if value != _DEFAULTS[key] and _affects_the_loss(key)
        }
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]


def _affects_the_loss(key: str) -> bool:
    return key in ("evaluation.sequences", "evaluation.seed") or not is_one_of(key, NOT_MATHEMATICS)


@dataclass(frozen=True)
class Sweep:
    """All trials of a sweep, as far as they are known.

    recipe, axes, changes   what was asked, in the words of the command line
    rates                   optimizer -> learning rates at the base width
    refine                  rounds of rates that are added near the best of each curve

    Methods take `losses`: the key of each finished trial -> its held-out loss, infinity where it diverged.
    """

    recipe: str
    axes: Mapping[str, str]
    changes: Mapping[str, str]
    widths: tuple[int, ...]
    rates: Mapping[str, tuple[float, ...]]
    parametrizations: tuple[str, ...]
    seeds: tuple[int, ...]
    arms: tuple[Arm, ...]
    refine: int
    # the runner asks for the trials twice a second, and checking a configuration takes a millisecond
    _trials: dict[tuple[Series, int, float, int], Trial] = field(
        default_factory=dict, compare=False, repr=False
    )

    def trials(self, losses: Mapping[str, float]) -> list[Trial]:
        """Lists every trial that is wanted so far, each key once.

        The seed varies slowest, then the optimizer, then the width: a sweep that is cut short has measured
        something completely.
        """
        order = list(self.rates).index
        trials = [trial for _, group in self.curves(losses) for trial in group]
        trials.sort(key=lambda t: (self.seeds.index(t.seed), order(t.series.optimizer), t.width))
        unique: dict[str, Trial] = {}
        for trial in trials:
            unique.setdefault(trial.key, trial)
        return list(unique.values())

    def curves(self, losses: Mapping[str, float]) -> list[tuple[Series, list[Trial]]]:
        """Lists the trials of every series and width: the grid, and the rates that refinement adds.

        A trial at the base width belongs to the curves of all parametrizations.
        """
        arms: dict[tuple[Series, int], Arm] = {}
        for width, optimizer, name, arm in product(self.widths, self.rates, self.parametrizations, self.arms):
            # an arm may set the parametrization itself
            series = Series(arm.name, arm.changes.get("parametrization", name), optimizer)
            arms.setdefault((series, width), arm)
        curves = []
        for (series, width), arm in arms.items():
            rates = list(self.rates[series.optimizer])
            for _ in range(self.refine):
                more = self._rates_to_add(series, arm, width, rates, losses)
                if not more:
                    break
                rates += more
            pairs = product(sorted(rates), self.seeds)
            curves.append((series, [self._trial(series, arm, width, lr, seed) for lr, seed in pairs]))
        return curves

    def _rates_to_add(
        self, series: Series, arm: Arm, width: int, rates: Sequence[float], losses: Mapping[str, float]
    ) -> list[float]:
        """Chooses rates beside the best one, or beyond it at an end, once all of `rates` are done."""
        by_rate: dict[float, list[float]] = defaultdict(list)
        for lr, seed in product(rates, self.seeds):
            key = self._trial(series, arm, width, lr, seed).key
            if key not in losses:
                return []
            by_rate[lr].append(losses[key])
        means = {lr: sum(values) / len(values) for lr, values in by_rate.items()}
        order = sorted(means)
        best = min(order, key=lambda lr: means[lr])
        place = order.index(best)
        if not math.isfinite(means[best]):
            return [order[0] / 4, order[0] / 2]
        if place == 0:
            return [order[0] * (order[0] / order[1])]
        if place == len(order) - 1:
            return [order[-1] * (order[-1] / order[-2])]
        return [math.sqrt(best * order[place - 1]), math.sqrt(best * order[place + 1])]

    def _trial(self, series: Series, arm: Arm, width: int, lr: float, seed: int) -> Trial:
        coordinates = series, width, lr, seed
        if coordinates not in self._trials:
            config = self._configuration(series, arm, width, lr, seed)
            self._trials[coordinates] = Trial(series, width, lr, seed, config)
        return self._trials[coordinates]

    def _configuration(self, series: Series, arm: Arm, width: int, lr: float, seed: int) -> RunConfig:
        start = recipe(self.recipe)
        common = {**QUIET, **self.changes, "optimizer.name": series.optimizer}
        switches_to_sgd = series.optimizer == "sgd" and start.optimizer.name != "sgd"
        if switches_to_sgd and "optimizer.weight_decay" not in common:
            # SGD adds decay to the gradient, where it means something else; the paper's SGD has none
            common["optimizer.weight_decay"] = "0"
        own = {
            "parametrization": series.parametrization,
            "optimizer.name": series.optimizer,
            "optimizer.lr": repr(lr),
            "model.width": str(width),
            "seed": str(seed),
            **arm.changes,
        }
        config = change(start, {**common, **own})
        require_effect(config, arm.changes)
        # at a rate below the recipe's floor the schedule is constant: it must not rise
        low = repr(min(config.schedule.min_lr, config.optimizer.lr))
        config = change(config, {"evaluation.every": str(config.steps), "schedule.min_lr": low})
        if config.model.width == config.model.base_width:
            # every table says the same at m = 1: one run serves all of them
            config = config.model_copy(update={"parametrization": "sp"})
        return config

    def as_dict(self) -> dict[str, object]:
        """Returns what was asked, in the words it was asked in."""
        return {"recipe": self.recipe, "axes": dict(self.axes), "changes": dict(self.changes)}


def define(name: str, options: Mapping[str, str]) -> Sweep:
    """Builds the sweep of a recipe from `options`, which mix axes with keys of the configuration.

    Raises UsageError or ConfigError, before anything runs, if some trial could not be made.
    """
    axes = {key: value for key, value in options.items() if key in AXES}
    changes = {key: value for key, value in options.items() if key not in AXES}
    swept = {"model.width": "widths", "optimizer.lr": "lrs", "optimizer.name": "optimizers"}
    swept |= {"parametrization": "parametrizations", "seed": "seeds"}
    for key, axis in swept.items():
        if key in changes:
            raise UsageError(f"{key} is an axis of a sweep; give {axis}={changes[key]}")
    if "epochs" in changes:
        raise UsageError(f"epochs={changes['epochs']}: all trials of a sweep are equally long; give steps=N")
    start = recipe(name)
    optimizers = _words("optimizers", axes.get("optimizers", start.optimizer.name))
    rates = {}
    for optimizer in optimizers:
        text = axes.get(f"lrs.{optimizer}", axes.get("lrs"))
        if text is None:
            raise UsageError(f"give lrs.{optimizer}=2**-10..2**-4, or lrs=... for every optimizer")
        rates[optimizer] = tuple(grid(f"lrs.{optimizer}", text))
    for optimizer in OPTIMIZERS:
        if f"lrs.{optimizer}" in axes and optimizer not in optimizers:
            names = ",".join(optimizers)
            raise UsageError(f"lrs.{optimizer} is for an optimizer that is not swept; optimizers={names}")
    sweep = Sweep(
        recipe=name,
        axes=axes,
        changes=changes,
        widths=tuple(sorted(whole_numbers("widths", axes.get("widths", str(start.model.width))))),
        rates=rates,
        parametrizations=tuple(
            _words("parametrizations", axes.get("parametrizations", start.parametrization))
        ),
        seeds=tuple(whole_numbers("seeds", axes.get("seeds", "0"), least=0)),
        arms=parse_arms(axes["arms"]) if "arms" in axes else (Arm(""),),
        refine=whole_number("refine", axes.get("refine", "2"), least=0),
    )
    trials = sweep.trials({})  # makes and checks every configuration
    require_effect_somewhere([trial.config for trial in trials], changes)
    least = min(map(min, rates.values()))
    if "schedule.min_lr" in changes and number(changes["schedule.min_lr"]) > least:
        raise UsageError(
            f"schedule.min_lr={changes['schedule.min_lr']} is above the lowest rate, {least:g}; give "
            "that or less"
        )
    return sweep


def load(folder: Path, options: Mapping[str, str]) -> Sweep:
    """Reads the sweep of a folder from its sweep.json, with some options changed."""
    asked = json.loads((folder / "sweep.json").read_text())
    return define(asked["recipe"], {**asked["axes"], **asked["changes"], **options})


def grid(name: str, text: str) -> list[float]:
    """Reads learning rates: `1e-3,2e-3`, or `2**-10..2**-4`, which doubles, or `1e-3..1e-1:10`."""
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


@dataclass(frozen=True)
class Question:
    """A sweep in one command: the axes of `delta-trn sweep NAME`, unless others are given."""

    recipe: str
    axes: Mapping[str, str]


def _by_width(arms: str, rates: Mapping[str, str], widths: str = "64,256") -> Question:
    """Asks for each arm's best of three rates an octave apart, at the base width and at a wider one."""
    lrs = {f"lrs.{optimizer}": text for optimizer, text in rates.items()}
    swept = {"widths": widths, "optimizers": ",".join(rates), "seeds": "0,1", "refine": "0"}
    return Question("transfer", {"arms": arms, **swept, **lrs})


# a question that is not about a power of width is asked at twice the base width, in half the time
_ADAMW, _SGD = {"adamw": "2**-8..2**-6"}, {"sgd": "2**-4..2**-2"}
QUESTIONS: Mapping[str, Question] = {
    "ddl_residuals": Question(
        "ddl_residuals", {"arms": "ddl_residuals", "lrs": "2**-7..2**-6", "seeds": "0,1,2", "refine": "0"}
    ),
    "sgd_gates": _by_width("sgd_gates", _SGD),
    "vectors": _by_width("vectors", _SGD),
    "readout": _by_width("readout", _ADAMW, "64,128"),
    "slow_forgetting": _by_width("slow_forgetting", _SGD, "64,128"),
    "initialization": _by_width("initialization", _ADAMW, "64,128"),
    "weight_decay": _by_width("weight_decay", _ADAMW, "64,128"),
    "epsilon": _by_width("epsilon", _ADAMW, "64,128"),
}
