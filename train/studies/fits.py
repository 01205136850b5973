"""A straight line and a parabola through measurements, quantiles of Student's distribution and the
tail of Fisher's.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np


def line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Fits a line by least squares to three or more points, not all at one x:
    its slope, and that's error.
    """
    X = np.asarray(x, float)
    if len(X) < 3 or np.ptp(X) == 0:
        raise ValueError(
            f"a slope with an error needs three points of different x, got x={list(x)}"
        )
    (slope, _), covariance = np.polyfit(X - X.mean(), y, 1, cov=True)
    return float(slope), math.sqrt(covariance[0, 0])


def optimum(x: Sequence[float], y: Sequence[float], blocks: Sequence[int]) -> float | None:
    """Returns where a parabola through (x, y) is lowest; each block (seed) has a level of its own.

    None if there are fewer than four values of x, or if the parabola has no minimum.
    """
    X, Y = np.asarray(x, float), np.asarray(y, float)
    names = sorted(set(blocks))
    levels = np.array([[block == name for name in names] for block in blocks], float)
    Z = X - X.mean()
    design = np.column_stack([Z**2, Z, levels])
    if len(set(x)) < 4 or np.linalg.matrix_rank(design) < design.shape[1]:
        return None
    (a, b, *_), *_ = np.linalg.lstsq(design, Y, rcond=None)
    return float(X.mean() - b / (2 * a)) if a > 0 else None


def parabola(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Fits a (x - lowest)^2 + c by least squares. Returns a and lowest;
    NaN if it has no minimum.
    """
    z = x - x.mean()
    a, b, _ = np.polyfit(z, y, 2)
    return (float(a), float(x.mean() - b / (2 * a))) if a > 0 else (math.nan, math.nan)


@lru_cache
def student_quantile(p: float, freedom: int) -> float:
    """Returns the t below which Student's distribution has probability p > 0.5, to four digits.

    With t = sqrt(f) tan(u), the probability between 0 and t is proportional to the integral of
    cos(u)^(f-1).
    """
    u = np.linspace(0, math.pi / 2, 200_001)
    density = np.cos(u) ** (freedom - 1)
    below = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return math.sqrt(freedom) * math.tan(float(np.interp(2 * (p - 0.5), below / below[-1], u)))


def fisher_tail(ratio: float, above: int, below: int) -> float:
    """Returns the probability that a ratio of variances with these degrees of freedom is larger.

    It is the integral of the beta density x^(below/2 - 1) (1 - x)^(above/2 - 1) from 0 to
    below / (below + above ratio); with x = sin(u)^2 the integrand has no pole for one degree of
    freedom.
    """
    u = np.linspace(0, math.pi / 2, 200_001)
    # twice the density times the derivative of sin(u)^2
    density = np.sin(u) ** (below - 1) * np.cos(u) ** (above - 1)
    whole = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    end = math.asin(math.sqrt(below / (below + above * ratio)))
    return float(np.interp(end, u, whole) / whole[-1])
