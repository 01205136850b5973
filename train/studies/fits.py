"""Straight lines and parabolas through measurements, with errors from the measurements' own scatter."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Line:
    """The slope of a straight line and its standard error."""

    slope: float
    stderr: float


def line(x: Sequence[float], y: Sequence[float]) -> Line:
    """Fits a line by least squares to at least three points, not all at one x."""
    X, Y = np.asarray(x, float), np.asarray(y, float)
    if len(X) < 3 or np.ptp(X) == 0:
        raise ValueError(f"a slope with an error needs three points of different x, got x={list(x)}")
    spread = float(np.sum((X - X.mean()) ** 2))
    slope = float(np.sum((X - X.mean()) * (Y - Y.mean())) / spread)
    residuals = Y - Y.mean() - slope * (X - X.mean())
    scatter = float(np.sum(residuals**2)) / (len(X) - 2)
    return Line(slope, math.sqrt(scatter / spread))


@dataclass(frozen=True)
class Optimum:
    """The lowest point of a parabola y = lowest + curvature (x - at)^2.

    low, high   95% interval of `at` (Fieller's); infinite if the points do not determine it
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


def optimum(x: Sequence[float], y: Sequence[float], blocks: Sequence[int]) -> Optimum | None:
    """Fits a parabola through (x, y), each block (seed) with its own level; None if it has no minimum.

    Needs four values of x. `fit_parabola` says where the error comes from.
    """
    X, Y = np.asarray(x, float), np.asarray(y, float)
    values = len(set(X.tolist()))
    if values < 4:
        return None
    center = float(X.mean())
    Z = X - center
    fit = fit_parabola(np.column_stack([Z**2, Z, _indicators(blocks)]), Y, cells=X.tolist(), shape=3)
    if fit is None:
        return None
    a, b = float(fit.coefficients[0]), float(fit.coefficients[1])
    lowest = float(fit.coefficients[2:].mean()) + a * fit.at**2 + b * fit.at
    return Optimum(fit.at + center, fit.low + center, fit.high + center, fit.stderr, lowest, a, values)


def _indicators(labels: Sequence[Any]) -> np.ndarray:
    """Returns a column for every label that occurs, 1 in the rows that carry it."""
    names = sorted(set(labels))
    return np.array([[label == name for name in names] for label in labels], float)


@dataclass(frozen=True)
class Parabola:
    """A fit whose first two coefficients are (a, b), and `at`, where b + 2 a z = 0, with its 95% interval."""

    coefficients: np.ndarray
    at: float
    low: float
    high: float
    stderr: float


def fit_parabola(
    design: np.ndarray, Y: np.ndarray, *, cells: Sequence[object], shape: int
) -> Parabola | None:
    """Fits Y = design @ coefficients by least squares; None if that is undetermined or has no minimum.

    cells   what each value is a measurement of; equal cells are repetitions
    shape   how many coefficients the means of cells determine; the others are levels of repetitions

    The residual sum of squares splits as in the lack-of-fit test (Draper and Smith, Applied Regression
    Analysis, section 2.1):

        misfit   sum over cells of n * (mean residual)^2,           cells - shape degrees of freedom
        pure     the rest, scatter of repetitions about their mean, N - cells - (levels beyond the shape)

    The variance is the larger of the two estimates: repetitions that agree do not make a curve a parabola.
    """
    distinct = len(set(cells))
    if distinct <= shape or np.linalg.matrix_rank(design) < design.shape[1]:
        return None
    coefficients, *_ = np.linalg.lstsq(design, Y, rcond=None)
    a, b = float(coefficients[0]), float(coefficients[1])
    if a <= 0:
        return None
    residuals = Y - design @ coefficients
    groups: dict[object, list[float]] = defaultdict(list)
    for cell, residual in zip(cells, residuals.tolist(), strict=True):
        groups[cell].append(residual)
    misfit = sum(len(group) * float(np.mean(group)) ** 2 for group in groups.values())
    pure = float(residuals @ residuals) - misfit
    estimates = [(misfit / (distinct - shape), distinct - shape)]
    if (freedom := len(Y) - distinct - (design.shape[1] - shape)) > 0:
        estimates.append((pure / freedom, freedom))
    variance, freedom = max(estimates)
    t = student_quantile(0.975, freedom)
    low, high = _fieller(a, b, variance * np.linalg.inv(design.T @ design), t)
    return Parabola(coefficients, -b / (2 * a), low, high, (high - low) / 2 / t)


def _fieller(a: float, b: float, covariance: np.ndarray, t: float) -> tuple[float, float]:
    """Returns the z for which b + 2 a z is zero within t standard errors; all z if a may be zero as well.

    (b + 2 a z)^2 <= t^2 (vbb + 4 z vab + 4 z^2 vaa),   a quadratic inequality A z^2 + B z + C <= 0
    """
    vaa, vab, vbb = float(covariance[0, 0]), float(covariance[0, 1]), float(covariance[1, 1])
    A = 4 * (a * a - t * t * vaa)
    B = 4 * (a * b - t * t * vab)
    C = b * b - t * t * vbb
    if A <= 0:
        return -math.inf, math.inf
    root = math.sqrt(max(B * B - 4 * A * C, 0.0))
    return (-B - root) / (2 * A), (-B + root) / (2 * A)


@lru_cache
def student_quantile(p: float, freedom: int) -> float:
    """Returns the t below which Student's distribution has probability p > 0.5, to four digits.

    With t = sqrt(f) tan(u), the probability between 0 and t is proportional to the integral of cos(u)^(f-1).
    """
    u = np.linspace(0, math.pi / 2, 200_001)
    density = np.cos(u) ** (freedom - 1)
    below = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return math.sqrt(freedom) * math.tan(float(np.interp(2 * (p - 0.5), below / below[-1], u)))
