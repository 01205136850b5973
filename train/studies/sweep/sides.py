"""How a learning-rate curve moves: its flank, where the rate is too low, and its wall, where it is
too high.

A curve need not move as a whole. Its flank says how fast a model learns, and may stay while the
wall, where training becomes unstable, comes closer. So each side has a drift of its own, in octaves
of the rate per doubling of the width (or of another scale). In a window of rates on that side,

    loss = level(c) + a (x - position(c))^2,    x = log2 of the rate

for every curve c, that is, every width and seed: one curvature a for all, and a level and a
position for each. A drift is the mean over seeds of the slope of the position against log2 of the
scale. Seeds are a random effect: the error comes from the scatter of seeds' slopes, and of
positions about them. Where a window ends is a choice that changes the result, so there are several,
and the interval covers those of all.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from delta_trn.train.studies.fits import student_quantile

# A window reaches OUTER octaves from the best rate to its own side, and INNER octaves to the other:
# without rates on both sides of the best, level and position cannot be told apart.
OUTER = 2.5
INNER = (0.0, 0.5, 1.0)
# A curve counts if its rates in a window reach so far to the side.
REACH = 1.0
# Octaves by which a rate may lie beyond a window's end: a fitted center is rounded, on each CPU
# otherwise.
EDGE = 1e-6
# Octaves per doubling within which a side transfers: half an octave off after two doublings.
TOLERANCE = 0.25
# A window counts if its curvature is at least so many standard errors above 0: positions are
# divided by it.
CERTAIN = 3.0
# If seeds' slopes scatter at most so much more than positions explain (as variances), both are
# pooled.
POOLED = 2.0

Name = Literal["flank", "wall", "best rate"]
# (log2 scale, seed) -> log2 rate -> loss
Curves = Mapping[tuple[float, int], Mapping[float, float]]


@dataclass(frozen=True)
class Side:
    """The drift of one side, in octaves per doubling: the mean over windows, and an interval over
    all. A report says the best rate's in the same words.

    octaves     NaN if no window determines it
    """

    name: Name
    octaves: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        if math.isnan(self.octaves):
            return (
                "not decided: needs three rates on this side at two scales, and losses that curve "
                "upwards"
            )
        if max(abs(self.low), abs(self.high)) <= TOLERANCE:
            return "transfers"
        if self.low > 0 or self.high < 0:
            return "moves" if abs(self.octaves) > TOLERANCE else "moves a little"
        return "undecided"


def side(name: Name, curves: Curves, best: Mapping[float, float]) -> Side:
    """Returns the drift of one side; `best` maps log2 of each scale to log2 of its best rate."""
    outward = -1 if name == "flank" else 1
    centers = _centers(best)
    windows: list[Curves] = []
    for inner in INNER:
        window = {}
        for key, points in curves.items():
            octaves = {
                x: outward * (x - centers[key[0]]) for x, y in points.items() if math.isfinite(y)
            }
            kept = [x for x in octaves if -inner - EDGE <= octaves[x] <= OUTER + EDGE]
            if len(kept) >= 3 and max(octaves[x] for x in kept) >= REACH - EDGE:
                window[key] = {x: points[x] for x in kept}
        if window not in windows:  # another may hold the same rates
            windows.append(window)
    fits = [fit for window in windows if (fit := fit_drift(window)) is not None]
    if not fits:
        return Side(name, math.nan, -math.inf, math.inf)
    octaves = sum(slope for slope, _ in fits) / len(fits)
    return Side(name, octaves, min(slope - half for slope, half in fits), max(map(sum, fits)))


def _centers(best: Mapping[float, float]) -> dict[float, float]:
    """Returns about which rate the windows of each scale lie.

    That is the mean best rate, so that windows are the same rates everywhere, unless the best rates
    move by more than TOLERANCE: then their line.
    """
    x, y = np.array(list(best)), np.array(list(best.values()))
    slope = float(np.polyfit(x, y, 1)[0]) if len(x) > 1 else 0.0
    if abs(slope) <= TOLERANCE:
        slope = 0.0
    return {scale: float(y.mean() + slope * (scale - x.mean())) for scale in best}


def fit_drift(curves: Curves) -> tuple[float, float] | None:
    """Returns the drift within one window and half its 95% interval;
    None if nothing determines it.
    """
    fitted = _positions(curves)
    if fitted is None:
        return None
    positions, doubt = fitted
    by_seed: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for (scale, seed), position in positions.items():
        by_seed[seed].append((scale, position))
    # a slope per seed, weighted by how far apart its scales are, and squares of positions about it
    spreads, slopes, within, freedom = [], [], 0.0, 0
    for points in by_seed.values():
        x, y = np.array(points).T
        x, y = x - x.mean(), y - y.mean()
        if (spread := float(x @ x)) == 0:
            continue
        slopes.append(float(x @ y) / spread)
        spreads.append(spread)
        within += float(np.sum((y - slopes[-1] * x) ** 2))
        freedom += len(x) - 2
    if not slopes:
        return None
    slope = float(np.average(slopes, weights=spreads))
    # squares of seeds' slopes about their mean: also what differs between seeds as a whole
    between, seeds = float(np.array(spreads) @ (np.array(slopes) - slope) ** 2), len(slopes) - 1
    if seeds and freedom and between / seeds > POOLED * within / freedom:
        within, freedom = 0.0, 0
    if seeds + freedom == 0:
        return slope, math.inf
    variance = (between + within) / (seeds + freedom)
    error = math.sqrt(variance / sum(spreads) + (slope * doubt) ** 2)
    return slope, student_quantile(0.975, seeds + freedom) * error


def _positions(curves: Curves) -> tuple[dict[tuple[float, int], float], float] | None:
    """Returns each curve's position, and the relative standard error of the curvature they share.

    None if the losses do not curve upwards.
    """
    keys = sorted(curves)
    triples = [(i, x, y) for i, key in enumerate(keys) for x, y in curves[key].items()]
    if len(triples) <= 1 + 2 * len(keys):
        return None
    index, x, losses = (np.array(column) for column in zip(*triples, strict=True))
    z, own = x - x.mean(), np.eye(len(keys))[index]
    design = np.column_stack([z**2, own, own * z[:, None]])
    (a, *others), *_ = np.linalg.lstsq(design, losses, rcond=None)
    residuals = losses - design @ [a, *others]
    variance = float(residuals @ residuals) / (len(losses) - design.shape[1])
    error = math.sqrt(variance * float(np.linalg.inv(design.T @ design)[0, 0]))
    if a <= CERTAIN * error:
        return None
    middle, slopes = float(x.mean()), others[len(keys) :]
    return {
        key: middle - float(b) / (2 * a) for key, b in zip(keys, slopes, strict=True)
    }, error / a
