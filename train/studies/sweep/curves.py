"""A curve of losses over learning rates at one width, and what is read from it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from delta_trn.train.studies.fits import optimum, parabola
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
    def rates(self) -> Mapping[float, float]:
        """Maps log2 of a rate to the mean loss over seeds; infinity if one diverged.

        A rate that only some seeds have is left out: it would be compared over fewer seeds than the
        rest.
        """
        by_rate: dict[float, list[float]] = defaultdict(list)
        for x, y, _ in self.points:
            by_rate[x].append(y)
        most = max(map(len, by_rate.values()), default=0)
        return {x: sum(ys) / len(ys) for x, ys in sorted(by_rate.items()) if len(ys) == most}

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
    def near_best(self) -> set[float]:
        """Returns the rates about the best one that a parabola is fitted to;
        none if that is at an end.
        """
        finite, best = [x for x in self.rates if math.isfinite(self.rates[x])], self.best
        if best is None or best in (min(finite), max(finite)):
            return set()
        order = sorted(finite, key=lambda x: abs(x - best))
        return {
            x for i, x in enumerate(order) if i < NEAREST or round(abs(x - best), DIGITS) <= OCTAVES
        }

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

    @cached_property
    def floor(self) -> float:
        """Returns the lowest loss of a parabola about the best rate;
        of a mean, where there is none.
        """
        points = [(x, y) for x, y, _ in self.points if x in self.near_best and math.isfinite(y)]
        if self.optimum is None:
            return self.lowest
        x, y = np.array(points).T
        a, at = parabola(x, y)
        return float(np.mean(y - a * (x - at) ** 2))

    def losses(self, rate: float) -> Losses:
        """Returns the losses at log2 of a rate."""
        return {seed: y for x, y, seed in self.points if round(x, DIGITS) == round(rate, DIGITS)}
