"""Straight lines and parabolas through measurements, with errors from the measurements' own scatter."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

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
    names = sorted(set(blocks))
    own = np.array([[b == name for name in names] for b in blocks], float)
    design = np.column_stack([Z**2, Z, own])
    if np.linalg.matrix_rank(design) < design.shape[1]:
        return None
    solution, *_ = np.linalg.lstsq(design, Y, rcond=None)
    a, b = float(solution[0]), float(solution[1])
    left = Y - design @ solution
    groups: dict[float, list[float]] = defaultdict(list)
    for place, r in zip(X.tolist(), left.tolist(), strict=True):
        groups[place].append(r)
    misfit = sum(len(g) * float(np.mean(g)) ** 2 for g in groups.values())
    pure = float(left @ left) - misfit
    # a level for each block costs the repetitions what the parabola's constant does not
    estimates = [(misfit / (len(levels) - 3), len(levels) - 3)]
    if (freedom := len(Y) - len(levels) - (len(names) - 1)) > 0:
        estimates.append((pure / freedom, freedom))
    variance, freedom = max(estimates)
    covariance = variance * np.linalg.inv(design.T @ design)
    t = student_quantile(0.975, freedom)
    low, high = _fieller(a, b, covariance, t)
    if a <= 0:
        return None
    at = -b / (2 * a)
    lowest = float(solution[2:].mean()) + a * at**2 + b * at
    return Optimum(at + center, low + center, high + center, (high - low) / 2 / t, lowest, a, len(levels))


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
