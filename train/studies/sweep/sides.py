"""How a learning-rate curve moves: its flank, where the rate is too low, and its wall, where it is too high.

A curve need not move as a whole. Its flank says how fast a model learns, and may stay while the wall, where
training becomes unstable, comes closer. So each side has a drift of its own, in octaves of the rate per
doubling of the width (or of another scale). In a window of rates on that side,

    loss = level(c) + a (x - position(c))^2,    x = log2 of the rate

for every curve c, that is, every width and seed: one curvature a for all, and a level and a position for
each. A drift is the mean over seeds of the slope of the position against log2 of the scale. Seeds are a
random effect: the error comes from the scatter of seeds' slopes, and of positions about them. Where a window
ends is a choice that changes the result, so there are several, and the interval covers those of all.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from delta_trn.train.studies.fits import student_quantile

# A window reaches OUTER octaves from the best rate to its own side, and INNER octaves to the other: without
# rates on both sides of the best, level and position cannot be told apart.
OUTER = 2.5
INNER = (0.0, 0.5, 1.0)
# A curve counts if its rates in a window reach so far to the side.
REACH = 1.0
# Octaves by which a rate may lie beyond a window's end: a fitted center is rounded, on each CPU otherwise.
EDGE = 1e-6
# Octaves per doubling within which a side transfers: half an octave off after two doublings.
TOLERANCE = 0.25
# A window counts if its curvature is at least so many standard errors above 0: positions are divided by it.
CERTAIN = 3.0
# If seeds' slopes scatter at most so much more than positions explain (as variances), both are pooled.
POOLED = 2.0

Name = Literal["flank", "wall"]
Points = Mapping[float, float]  # log2 of the rate -> loss


@dataclass(frozen=True)
class Line:
    """Positions against log2 of the scale, within one window of rates.

    rates           lowest and highest log2 of a rate in the window, over all scales
    slope           octaves per doubling, the mean over seeds
    stderr, freedom     of the slope, seeds being a random effect; infinite, 0 if nothing determines it
    """

    rates: tuple[float, float]
    slope: float
    stderr: float
    freedom: int

    def half_width(self) -> float:
        """Returns half the length of the slope's 95% interval."""
        return student_quantile(0.975, self.freedom) * self.stderr if self.freedom else math.inf


@dataclass(frozen=True)
class Side:
    """The drift of one side: the mean over windows, and an interval that covers the intervals of all.

    octaves     per doubling; NaN if no window determines it, and then `verdict` says why
    """

    name: Name
    octaves: float
    low: float
    high: float
    verdict: str
    windows: tuple[Line, ...]


Curves = Mapping[tuple[float, int], Points]  # (log2 scale, seed) -> losses


def side(name: Name, curves: Curves, best: Mapping[float, float]) -> Side:
    """Returns the drift of one side.

    curves  (log2 scale, seed) -> log2 rate -> loss; infinite losses are left out
    best    log2 scale -> log2 of the best rate
    """
    lines: dict[str, Line] = {}
    reasons: list[str] = []
    centers = _centers(best)
    for inner in INNER:
        below, above = (OUTER, inner) if name == "flank" else (inner, OUTER)
        window = {}
        for key, points in curves.items():
            center = centers.get(key[0], math.nan)
            low, high = center - below - EDGE, center + above + EDGE
            kept = {x: y for x, y in points.items() if math.isfinite(y) and low <= x <= high}
            if len(kept) < 3:
                continue
            if (center - min(kept) if name == "flank" else max(kept) - center) >= REACH - EDGE:
                window[key] = kept
        fitted = fit_line(window)
        if isinstance(fitted, str):
            reasons.append(fitted)
        else:
            lines[str(window)] = fitted  # another window may hold the same rates
    windows = tuple(lines.values())
    if not windows:
        return Side(name, math.nan, -math.inf, math.inf, f"not decided: {reasons[0]}", ())
    low = min(line.slope - line.half_width() for line in windows)
    high = max(line.slope + line.half_width() for line in windows)
    octaves = sum(line.slope for line in windows) / len(windows)
    return Side(name, octaves, low, high, _verdict(octaves, low, high), windows)


def _verdict(octaves: float, low: float, high: float) -> str:
    if max(abs(low), abs(high)) <= TOLERANCE:
        return "transfers"
    if low > 0 or high < 0:
        return "moves" if abs(octaves) > TOLERANCE else "moves a little"
    return "undecided"


def _centers(best: Mapping[float, float]) -> dict[float, float]:
    """Returns about which rate the windows of each scale lie.

    That is the mean best rate, so that windows are the same rates everywhere, unless the best rates move by
    more than TOLERANCE: then their line.
    """
    x, y = np.array(list(best)), np.array(list(best.values()))
    slope = float(np.polyfit(x, y, 1)[0]) if len(x) > 1 else 0.0
    if abs(slope) <= TOLERANCE:
        slope = 0.0
    return {scale: float(y.mean() + slope * (scale - x.mean())) for scale in best}


def fit_line(curves: Curves) -> Line | str:
    """Fits positions and their line within a window; a string says why that cannot be done."""
    scales = {scale for scale, _ in curves}
    if len(scales) < 2:
        return f"{len(scales)} of the scales have three rates on this side with a finite loss; 2 are needed"
    fitted = _positions(curves)
    if fitted is None:
        return "the losses on this side do not curve upwards"
    positions, doubt = fitted
    rates = [x for points in curves.values() for x in points]
    return _line(positions, doubt, (min(rates), max(rates)))


def _positions(curves: Curves) -> tuple[dict[tuple[float, int], float], float] | None:
    """Returns each curve's position, and the relative standard error of the curvature they share."""
    keys = sorted(curves)
    triples = [(i, x, y) for i, key in enumerate(keys) for x, y in curves[key].items()]
    middle = sum(x for _, x, _ in triples) / len(triples)
    design, losses = np.zeros((len(triples), 1 + 2 * len(keys))), np.array([y for _, _, y in triples])
    for row, (i, x, _) in zip(design, triples, strict=True):
        row[0], row[1 + 2 * i], row[2 + 2 * i] = (x - middle) ** 2, 1.0, x - middle
    coefficients, *_ = np.linalg.lstsq(design, losses, rcond=None)
    residuals = losses - design @ coefficients
    freedom = len(triples) - design.shape[1]
    if freedom < 1 or np.linalg.matrix_rank(design) < design.shape[1]:
        return None
    inverse = np.linalg.inv(design.T @ design)
    a = float(coefficients[0])
    error = math.sqrt(float(residuals @ residuals) / freedom * float(inverse[0, 0]))
    if a <= CERTAIN * error:
        return None
    return {key: middle - float(coefficients[2 + 2 * i]) / (2 * a) for i, key in enumerate(keys)}, error / a


def _line(
    positions: Mapping[tuple[float, int], float], doubt: float, rates: tuple[float, float]
) -> Line | str:
    """Returns the line through positions: a slope per seed, weighted by how far apart its scales are."""
    by_seed: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for (scale, seed), position in positions.items():
        by_seed[seed].append((scale, position))
    spreads, slopes, squares, freedom = [], [], 0.0, 0
    for points in by_seed.values():
        x, y = np.array(points).T
        x, y = x - x.mean(), y - y.mean()
        if (spread := float(x @ x)) == 0:
            continue
        slopes.append(float(x @ y) / spread)
        spreads.append(spread)
        squares += float(np.sum((y - slopes[-1] * x) ** 2))
        freedom += len(x) - 2
    if not slopes:
        return "no seed was run at two scales"
    slope = float(np.average(slopes, weights=spreads))
    between = float(np.array(spreads) @ (np.array(slopes) - slope) ** 2)
    variance, freedom = _pooled(between, len(slopes) - 1, squares, freedom)
    error = math.sqrt(variance / sum(spreads) + (slope * doubt) ** 2) if freedom else math.inf
    return Line(rates, slope, error, freedom)


def _pooled(between: float, seeds: int, within: float, freedom: int) -> tuple[float, int]:
    """Returns the variance of a position and its degrees of freedom, from two sums of squares.

    between, seeds      of seeds' slopes about their mean: also what differs between seeds as a whole
    within, freedom     of positions about their own seed's line
    """
    if seeds and freedom and between / seeds > POOLED * within / freedom:
        return between / seeds, seeds
    count = seeds + freedom
    return (between + within) / count if count else math.inf, count
