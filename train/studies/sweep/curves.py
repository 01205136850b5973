"""A curve of losses over learning rates at one width, and what is read from it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from delta_trn.train.studies.fits import optimum
from delta_trn.train.studies.sweep.results import DIGITS

# A parabola is fitted to the rates within OCTAVES of the best one, or to the NEAREST if those are
# fewer: losses farther out do not follow a parabola.
OCTAVES = 1.5
NEAREST = 5
Losses = Mapping[int, float]  # seed -> held-out loss, infinity where it diverged


@dataclass(frozen=True)
class Curve:
    """Loss against learning rate at one width: (log2 of the rate, loss, seed) of every run."""

    width: int
    points: Sequence[tuple[float, float, int]]
    parameters: int = 0

    @cached_property
    def complete(self) -> tuple[Sequence[float], Sequence[int], np.ndarray]:
        """Returns rates, seeds and losses [seeds, rates] of the largest part of the runs that has
        every seed at every rate; of two equally large ones, that with more rates.

        A rate that only some seeds have would be compared over fewer seeds than the rest. A seed
        that has only some rates, as the last one of a sweep that was cut short, would take the
        others' rates out of the comparison.
        """
        by_seed: dict[int, dict[float, float]] = defaultdict(dict)
        for x, y, seed in self.points:
            by_seed[seed][x] = y
        found: tuple[list[float], list[int]] = [], []
        for rates in {frozenset(losses) for losses in by_seed.values()}:
            seeds = [seed for seed, losses in by_seed.items() if rates <= losses.keys()]
            size = len(rates) * len(seeds), len(rates), sorted(rates)
            if size > (len(found[0]) * len(found[1]), len(found[0]), found[0]):
                found = sorted(rates), sorted(seeds)
        losses = [[by_seed[seed][x] for x in found[0]] for seed in found[1]]
        return found[0], found[1], np.array(losses).reshape(len(found[1]), len(found[0]))

    @cached_property
    def rates(self) -> Mapping[float, float]:
        """Maps log2 of a rate to the mean loss over the seeds that have all of these rates;
        infinity if one diverged.
        """
        rates, _, losses = self.complete
        means = losses.sum(0) / max(len(losses), 1)
        return {x: float(mean) for x, mean in zip(rates, means, strict=True)}

    @property
    def best(self) -> float | None:
        """Returns log2 of the best rate tried; None if all diverged."""
        finite = [x for x in self.rates if math.isfinite(self.rates[x])]
        return min(finite, key=lambda x: self.rates[x], default=None)

    @property
    def lowest(self) -> float:
        """Returns the mean loss at the best rate tried."""
        return min(self.rates.values(), default=math.inf)

    @property
    def is_at_an_end(self) -> bool:
        """Whether the best rate is the lowest or highest tried,
        so that a better one may lie beyond.
        """
        return len(self.rates) > 1 and self.best in (min(self.rates), max(self.rates))

    @property
    def about_best(self) -> set[float]:
        """Returns the rates within OCTAVES of the best one, or the NEAREST if those are fewer."""
        finite, best = [x for x in self.rates if math.isfinite(self.rates[x])], self.best
        if best is None:
            return set()
        order = sorted(finite, key=lambda x: abs(x - best))
        return {
            x for i, x in enumerate(order) if i < NEAREST or round(abs(x - best), DIGITS) <= OCTAVES
        }

    @property
    def near_best(self) -> set[float]:
        """Returns the rates about the best one that a parabola is fitted to;
        none if that is at an end.
        """
        finite, best = [x for x in self.rates if math.isfinite(self.rates[x])], self.best
        if best is None or best in (min(finite), max(finite)):
            return set()
        return self.about_best

    @cached_property
    def optimum(self) -> float | None:
        """Returns log2 of the rate where a parabola is lowest;
        None if there is no inner minimum yet.
        """
        chosen = self.near_best
        if not chosen:
            return None
        at = optimum(*zip(*(point for point in self.points if point[0] in chosen), strict=True))
        return at if at is not None and min(chosen) <= at <= max(chosen) else None

    def losses(self, rate: float) -> Losses:
        """Returns the losses at log2 of a rate."""
        return {seed: y for x, y, seed in self.points if round(x, DIGITS) == round(rate, DIGITS)}
