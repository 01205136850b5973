"""What a sweep asks: a learning-rate curve for every arm, parametrization, optimizer and width."""

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product

from delta_trn.train.recipes import recipe
from delta_trn.train.settings.errors import UsageError
from delta_trn.train.settings.overrides import apply
from delta_trn.train.settings.schema import NOT_MATHEMATICS, RunConfig, flatten, is_one_of
from delta_trn.train.studies.sweep.arms import PLAIN, Arm, arms_of

AXES = ("widths", "lrs", "lrs.adamw", "lrs.sgd", "parametrizations", "optimizers", "seeds", "arms", "refine")

# What a trial is not asked for: samples, a best checkpoint, evaluations on the way.
QUIET = {"sample.tokens": "0", "checkpoint.keep_best": "false", "checkpoint.keep_last": "1", "name": "trial"}


_DEFAULTS = dict(flatten(RunConfig()))


def _matters(key: str) -> bool:
    """Whether a key has a part in a trial's held-out loss."""
    return key in ("evaluation.sequences", "evaluation.seed") or not is_one_of(key, NOT_MATHEMATICS)


@dataclass(frozen=True, order=True)
class Series:
    """Curves of all widths that belong together: the question is how their optimum moves with width."""

    arm: str
    parametrization: str
    optimizer: str

    def __str__(self) -> str:
        # an arm may be a parametrization, and have its name
        return " ".join(
            part for part in dict.fromkeys((self.arm, self.parametrization, self.optimizer)) if part
        )


@dataclass(frozen=True)
class Trial:
    """One run. Trials of equal `key` are the same run, and it is made once."""

    series: Series
    width: int
    lr: float
    seed: int
    config: RunConfig

    @cached_property
    def key(self) -> str:
        """12 hex digits of all that its loss depends on and that is not as it is by default.

        Not the fingerprint, which every new key of the configuration changes: results of days would be lost.
        """
        facts = {
            key: value for key, value in flatten(self.config) if value != _DEFAULTS[key] and _matters(key)
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Sweep:
    """`losses` in its methods: key of a finished trial -> held-out loss, infinity where it diverged."""

    recipe: str
    axes: Mapping[str, str]
    changes: Mapping[str, str]
    widths: tuple[int, ...]
    rates: Mapping[str, tuple[float, ...]]
    parametrizations: tuple[str, ...]
    seeds: tuple[int, ...]
    arms: tuple[Arm, ...]
    refine: int
    # a scheduler asks for its trials twice a second, and a configuration takes a millisecond to check
    _made: dict[tuple[Series, int, float, int], Trial] = field(
        default_factory=dict, compare=False, repr=False
    )

    @property
    def optimizers(self) -> tuple[str, ...]:
        return tuple(self.rates)

    def trials(self, losses: Mapping[str, float]) -> list[Trial]:
        """Every trial that is wanted given what is known: the grid, and rates near the best of each curve.

        One seed comes before the next, within it one optimizer before the next, narrow before wide: a sweep
        that is cut short shows a whole picture of something.
        """
        found = []
        for series, arm, width in self._curves():
            rates = list(self.rates[series.optimizer])
            for _ in range(self.refine):
                more = self._nearer(series, arm, width, rates, losses)
                if not more:
                    break
                rates += more
            found += [
                self._trial(series, arm, width, lr, seed) for lr, seed in product(sorted(rates), self.seeds)
            ]
        order = self.optimizers.index
        return sorted(found, key=lambda t: (self.seeds.index(t.seed), order(t.series.optimizer), t.width))

    def _curves(self) -> list[tuple[Series, Arm, int]]:
        found: dict[tuple[Series, int], Arm] = {}
        for width, optimizer, name, arm in product(
            self.widths, self.optimizers, self.parametrizations, self.arms
        ):
            # an arm may set the parametrization itself
            series = Series(arm.name, arm.changes.get("parametrization", name), optimizer)
            found.setdefault((series, width), arm)
        return [(series, arm, width) for (series, width), arm in found.items()]

    def _nearer(
        self, series: Series, arm: Arm, width: int, rates: Sequence[float], losses: Mapping[str, float]
    ) -> list[float]:
        """Rates to add once all of `rates` are known: beside the best, or beyond the end that it is at."""
        by_rate: dict[float, list[float]] = defaultdict(list)
        for lr, seed in product(rates, self.seeds):
            key = self._trial(series, arm, width, lr, seed).key
            if key not in losses:
                return []
            by_rate[lr].append(losses[key])
        means = {lr: sum(values) / len(values) for lr, values in by_rate.items()}
        order = sorted(means)
        best = min(order, key=lambda lr: means[lr])
        at = order.index(best)
        if not math.isfinite(means[best]):
            return [order[0] / 4, order[0] / 2]
        if at == 0:
            return [order[0] * (order[0] / order[1])]
        if at == len(order) - 1:
            return [order[-1] * (order[-1] / order[-2])]
        return [math.sqrt(best * order[at - 1]), math.sqrt(best * order[at + 1])]

    def _trial(self, series: Series, arm: Arm, width: int, lr: float, seed: int) -> Trial:
        known = series, width, lr, seed
        if known not in self._made:
            self._made[known] = self._make(series, arm, width, lr, seed)
        return self._made[known]

    def _make(self, series: Series, arm: Arm, width: int, lr: float, seed: int) -> Trial:
        changes = {
            "parametrization": series.parametrization,
            "optimizer.name": series.optimizer,
            "optimizer.lr": repr(lr),
            "model.width": str(width),
            "seed": str(seed),
            **arm.changes,
        }
        config = apply(self._common(series.optimizer), changes)
        config = apply(config, {"evaluation.every": str(config.steps)})
        if config.model.width == config.model.base_width:
            # every table says the same at m = 1: one run serves all of them
            config = config.model_copy(update={"parametrization": "sp"})
        return Trial(series, width, lr, seed, config)

    def _common(self, optimizer: str) -> RunConfig:
        begun = recipe(self.recipe)
        changes = {**QUIET, **self.changes, "optimizer.name": optimizer}
        if optimizer == "sgd" != begun.optimizer.name and "optimizer.weight_decay" not in changes:
            # SGD adds it to the gradient, where it means something else; the paper's SGD has none
            changes["optimizer.weight_decay"] = "0"
        return apply(begun, changes)

    def as_dict(self) -> dict[str, object]:
        """What was asked, in the words it was asked in."""
        return {"recipe": self.recipe, "axes": dict(self.axes), "changes": dict(self.changes)}


def define(name: str, given: Mapping[str, str]) -> Sweep:
    """The sweep of a recipe. `given` mixes axes with keys of the configuration.

    Raises UsageError or ConfigError for what no trial could be made of, before any is.
    """
    axes = {key: value for key, value in given.items() if key in AXES}
    changes = {key: value for key, value in given.items() if key not in AXES}
    fixed = {"model.width": "widths", "optimizer.lr": "lrs", "optimizer.name": "optimizers"}
    fixed |= {"parametrization": "parametrizations", "seed": "seeds"}
    for key, axis in fixed.items():
        if key in changes:
            raise UsageError(f"{key} is an axis of a sweep; give {axis}={changes[key]}")
    if "epochs" in changes:
        raise UsageError(
            f"epochs={changes['epochs']}: trials of a sweep are as long as one another; give steps=N"
        )
    begun = recipe(name)
    optimizers = _words("optimizers", axes.get("optimizers", begun.optimizer.name))
    rates = {}
    for optimizer in optimizers:
        asked = axes.get(f"lrs.{optimizer}", axes.get("lrs"))
        if asked is None:
            raise UsageError(f"give lrs.{optimizer}=2**-10..2**-4, or lrs=... for every optimizer")
        rates[optimizer] = tuple(grid(f"lrs.{optimizer}", asked))
    for axis in ("lrs.adamw", "lrs.sgd"):
        if axis in axes and axis.partition(".")[2] not in optimizers:
            raise UsageError(
                f"{axis} is for an optimizer that is not swept; optimizers={','.join(optimizers)}"
            )
    arms = arms_of(axes["arms"]) if "arms" in axes else (PLAIN,)
    sweep = Sweep(
        recipe=name,
        axes=axes,
        changes=changes,
        widths=tuple(sorted(_counts("widths", axes.get("widths", str(begun.model.width))))),
        rates=rates,
        parametrizations=tuple(
            _words("parametrizations", axes.get("parametrizations", begun.parametrization))
        ),
        seeds=tuple(_counts("seeds", axes.get("seeds", "0"), least=0)),
        arms=arms,
        refine=_counts("refine", axes.get("refine", "2"), least=0)[0],
    )
    sweep.trials({})  # every configuration of it is made and checked
    return sweep


def grid(name: str, text: str) -> list[float]:
    """Learning rates of `1e-3,2e-3`, or of `2**-10..2**-4`, which doubles; `..` and a factor after `:`."""
    try:
        if ".." in text:
            ends, _, factor = text.partition(":")
            low, high = (_number(end) for end in ends.split(".."))
            step = _number(factor) if factor else 2.0
            if not (0 < low < high < math.inf and 1 < step < math.inf):
                raise ValueError
            count = math.floor(math.log(high / low) / math.log(step) + 1e-9) + 1
            rates = [low * step**i for i in range(count)]
        else:
            rates = [_number(part) for part in text.split(",")]
        if len(set(rates)) < len(rates) or not all(0 < rate < math.inf for rate in rates):
            raise ValueError
    except (ValueError, OverflowError):
        raise UsageError(
            f"{name}={text}: expected different positive rates such as 1e-3,2e-3 or 2**-10..2**-4"
        ) from None
    return sorted(rates)


def _number(text: str) -> float:
    base, power, exponent = text.partition("**")
    return float(base) ** float(exponent) if power else float(base)


def _counts(axis: str, text: str, least: int = 1) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < least or len(set(numbers)) < len(numbers):
        raise UsageError(f"{axis}={text}: expected different whole numbers of at least {least}, such as 1,2")
    return numbers


def _words(axis: str, text: str) -> list[str]:
    words = [part.strip() for part in text.split(",")]
    if not all(words) or len(set(words)) < len(words):
        raise UsageError(f"{axis}={text}: expected different names with commas between")
    return words
