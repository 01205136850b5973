"""Straight lines and parabolas through measurements, with errors from the measurements' own scatter."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Line:
    """y = at_zero + slope x. `stderr` is the slope's standard error, from `freedom` degrees of freedom."""

    slope: float
    stderr: float
    at_zero: float
    freedom: int

    def interval(self, confidence: float = 0.95) -> tuple[float, float]:
        """Where the slope lies with this confidence, by Student's t."""
        reach = student_quantile(0.5 + confidence / 2, self.freedom) * self.stderr
        return self.slope - reach, self.slope + reach


@dataclass(frozen=True)
class Optimum:
    """The lowest point of a parabola y = lowest + curvature (x - at)^2.

    low, high   where `at` lies with 95% confidence (Fieller's interval); infinite if the points do not say
    stderr      the half width of that interval as one standard error
    points      how many values of x were fitted
    """

    at: float
    low: float
    high: float
    stderr: float
    lowest: float
    curvature: float
    points: int


def line(x: Sequence[float], y: Sequence[float], errors: Sequence[float] | None = None) -> Line:
    """Least squares. At least three points, not all of one x.

    With `errors`, the standard error of each y, points weigh 1 / error^2, and where they scatter about the
    line by more than their errors explain, the slope's error grows by that factor (Birge's ratio); it is
    never less than the errors say, and then its freedom is taken as large.
    """
    X, Y = np.asarray(x, float), np.asarray(y, float)
    if len(X) < 3 or np.ptp(X) == 0:
        raise ValueError(f"a slope with an error needs three points of different x, got x={list(x)}")
    w = np.ones_like(X) if errors is None else 1 / np.asarray(errors, float) ** 2
    mean_x, mean_y = (w @ X) / w.sum(), (w @ Y) / w.sum()
    spread = w @ (X - mean_x) ** 2
    slope = float(w @ ((X - mean_x) * (Y - mean_y)) / spread)
    at_zero = float(mean_y - slope * mean_x)
    freedom = len(X) - 2
    scatter = float(w @ (Y - at_zero - slope * X) ** 2) / freedom
    if errors is not None and scatter <= 1:
        return Line(slope, math.sqrt(1 / spread), at_zero, LARGE)
    return Line(slope, math.sqrt(scatter / spread), at_zero, freedom)


LARGE = 1000  # degrees of freedom at which Student's t is the normal distribution to three digits


def optimum(x: Sequence[float], y: Sequence[float], blocks: Sequence[int]) -> Optimum | None:
    """The minimum of a parabola through (x, y), each block (seed) with its own level; None if it has none.

    The variance is the larger of two: how repeated measurements at one x differ beyond their block's level,
    and how the means over blocks miss the parabola. The first alone would take a curve that is no parabola
    for certain. Needs four values of x.
    """
    X, Y = np.asarray(x, float), np.asarray(y, float)
    levels = sorted(set(X.tolist()))
    if len(levels) < 4:
        return None
    center = float(X.mean())
    Z = X - center
    found = _turning_point(np.column_stack([Z**2, Z, _levels(blocks)]), Y, cells=X.tolist(), shape=3)
    if found is None:
        return None
    solution, (at, low, high, stderr) = found
    a, b = float(solution[0]), float(solution[1])
    lowest = float(solution[2:].mean()) + a * at**2 + b * at
    return Optimum(at + center, low + center, high + center, stderr, lowest, a, len(levels))


@dataclass(frozen=True)
class Drift:
    """How the lowest point of a parabola moves: at = somewhere + slope * scale.

    low, high   where `slope` lies with 95% confidence (Fieller's interval); infinite if the points do not say
    stderr      the half width of that interval as one standard error
    """

    slope: float
    low: float
    high: float
    stderr: float


def drift(
    x: Sequence[float], y: Sequence[float], blocks: Sequence[int], scales: Sequence[float]
) -> Drift | None:
    """One parabola for all scales, which moves with scale: y = level + a (x - at(scale))^2.

    Multiplied out, this is linear in everything but levels: a x^2 + b x + d x scale, and the slope of `at` is
    -d / 2a. A curvature that all scales share says where a curve's minimum is also where its own scatter
    hides how it curves. Levels are each block's (seed's) at each scale; the variance is as for `optimum`, so
    that curvatures that differ widen the interval. None without a minimum, or with one scale.
    """
    X, L, Y = (np.asarray(values, float) for values in (x, scales, y))
    Z = X - X.mean()
    levels = _levels(list(zip(scales, blocks, strict=True)))
    design = np.column_stack([Z**2, Z * (L - L.mean()), Z, levels])
    cells = list(zip(scales, x, strict=True))
    found = _turning_point(design, Y, cells=cells, shape=3 + len(set(scales)))
    return None if found is None else Drift(*found[1])


def _levels(labels: Sequence[Any]) -> np.ndarray:
    """A column for every label that occurs, 1 where it does."""
    names = sorted(set(labels))
    return np.array([[label == name for name in names] for label in labels], float)


def _turning_point(
    design: np.ndarray, Y: np.ndarray, *, cells: Sequence[object], shape: int
) -> tuple[np.ndarray, tuple[float, float, float, float]] | None:
    """Least squares, and where b + 2 a z = 0 for the first two coefficients (a, b): z, low, high, stderr.

    None where that is undetermined, or no minimum.

    cells   what each value is a measurement of: equal ones are repetitions
    shape   how many of the coefficients the means of cells decide; the others are levels of repetitions
    """
    distinct = len(set(cells))
    if distinct <= shape or np.linalg.matrix_rank(design) < design.shape[1]:
        return None
    solution, *_ = np.linalg.lstsq(design, Y, rcond=None)
    a, b = float(solution[0]), float(solution[1])
    if a <= 0:
        return None
    left = Y - design @ solution
    groups: dict[object, list[float]] = defaultdict(list)
    for cell, r in zip(cells, left.tolist(), strict=True):
        groups[cell].append(r)
    misfit = sum(len(g) * float(np.mean(g)) ** 2 for g in groups.values())
    pure = float(left @ left) - misfit
    # a level for each block costs the repetitions what the shape's own constants do not
    estimates = [(misfit / (distinct - shape), distinct - shape)]
    if (freedom := len(Y) - distinct - (design.shape[1] - shape)) > 0:
        estimates.append((pure / freedom, freedom))
    variance, freedom = max(estimates)
    t = student_quantile(0.975, freedom)
    low, high = _fieller(a, b, variance * np.linalg.inv(design.T @ design), t)
    return solution, (-b / (2 * a), low, high, (high - low) / 2 / t)


def _fieller(a: float, b: float, covariance: np.ndarray, t: float) -> tuple[float, float]:
    """The z for which b + 2 a z is zero within t standard errors. All z, if a may be zero as well."""
    vaa, vab, vbb = float(covariance[0, 0]), float(covariance[0, 1]), float(covariance[1, 1])
    # (b + 2 a z)^2 <= t^2 (vbb + 4 z vab + 4 z^2 vaa)
    A = 4 * (a * a - t * t * vaa)
    B = 4 * (a * b - t * t * vab)
    C = b * b - t * t * vbb
    if A <= 0:
        return -math.inf, math.inf
    root = math.sqrt(max(B * B - 4 * A * C, 0.0))
    return (-B - root) / (2 * A), (-B + root) / (2 * A)


def student_quantile(p: float, freedom: int) -> float:
    """The t below which Student's distribution has probability p > 0.5, to four digits.

    With t = sqrt(f) tan(u), the probability between 0 and t is proportional to the integral of cos(u)^(f-1).
    """
    u = np.linspace(0, math.pi / 2, 200_001)
    density = np.cos(u) ** (freedom - 1)
    below = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    at = float(np.interp(2 * (p - 0.5), below / below[-1], u))
    return math.sqrt(freedom) * math.tan(at)
