"""What it costs to choose a learning rate at one width and to keep it at another, in nats: its
regret.

Two answers, both from runs that were made anyway:

    cross-validated   a rate is chosen from one seed of the narrowest width and paid for by the
                      other seeds of every width: their mean loss there, between rates tried by a
                      straight line, above that of their best rate. Each seed chooses once.
    fitted            parabolas through all seeds of both widths: a (x - x_w)^2, with a and x_w of
                      the wide one and x the lowest point of the narrow one's. The interval draws
                      all losses again, each with the scatter of the runs at its rate. A draw whose
                      parabola has no lowest point among the rates tried chooses the best of these,
                      as a report would.

Runs of one seed share no noise over rates (seeds' residuals are uncorrelated), so each run counts
as one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from delta_trn.train.studies.fits import parabola
from delta_trn.train.studies.sweep.curves import Curve

DRAWS = 2000
# How a rate is chosen from one seed's curve. The last was advice once, and stays to show what it
# costs.
STRATEGIES: dict[str, Callable[[Curve], float | None]] = {
    "fitted": lambda curve: curve.optimum if curve.optimum is not None else curve.best,
    "best tried": lambda curve: curve.best,
    "half of it": lambda curve: None if curve.best is None else curve.best - 1,
}


@dataclass(frozen=True)
class Regret:
    """The nats lost at one width.

    paid            by strategy, the mean and the worst over choices
    fit, low, high  by parabolas through all seeds, with a 95% interval
    rate            log2 of the rate that is kept, where the narrow one's is lowest
    """

    width: int
    paid: dict[str, tuple[float, float]]
    fit: float
    low: float
    high: float
    rate: float


def regrets(curves: Sequence[Curve]) -> list[Regret]:
    """Returns what the narrowest curve's rate costs on every curve;
    none without two seeds of it.
    """
    narrow = curves[0]
    seeds = sorted({seed for _, _, seed in narrow.points})
    if len(seeds) < 2:
        return []
    return [
        Regret(curve.width, _pay(narrow, curve, seeds), *_fit(narrow, curve)) for curve in curves
    ]


def _pay(narrow: Curve, wide: Curve, seeds: Sequence[int]) -> dict[str, tuple[float, float]]:
    """Returns the mean and the largest regret of every strategy."""
    paid = {}
    for name, choose in STRATEGIES.items():
        lost = []
        for seed in seeds:
            rate = choose(
                replace(narrow, points=[point for point in narrow.points if point[2] == seed])
            )
            others = replace(
                wide, points=[point for point in wide.points if point[2] != seed]
            ).rates
            if rate is not None and others:
                xs, ys = zip(*sorted(others.items()), strict=True)
                # beyond the rates tried nothing is known
                lost.append(float(np.interp(rate, xs, ys, math.nan, math.nan)) - min(ys))
        paid[name] = (float(np.mean(lost)), max(lost)) if lost else (math.nan, math.nan)
    return paid


def _fit(narrow: Curve, wide: Curve) -> tuple[float, float, float, float]:
    """Returns the regret by parabolas, its 95% interval and the rate kept;
    NaN where one has no minimum.
    """
    fits = _near_best(narrow), _near_best(wide)
    if fits[0] is None or fits[1] is None:
        return math.nan, math.nan, math.nan, math.nan
    (x, y, scatter), (_, kept), generator = (
        fits[0],
        parabola(*fits[0][:2]),
        np.random.default_rng(0),
    )
    drawn, _, lowest, inside = _draw(x, y, scatter, generator)
    best = x[np.array([drawn[x == rate].mean(0) for rate in x]).argmin(0)]
    # a report names no fitted rate but one among those tried
    rates = np.where(inside, lowest, best)
    x, y, scatter = fits[1]
    # the width that the rate was chosen at is what it is: only the choice is uncertain
    _, losses, lowest, inside = _draw(x, y, scatter * (narrow is not wide), generator)
    least = np.where(inside, losses(lowest), np.minimum(losses(x.min()), losses(x.max())))
    low, high = np.quantile(losses(rates) - least, (0.025, 0.975))
    a, at = parabola(x, y)
    return a * (kept - at) ** 2, max(float(low), 0.0), max(float(high), 0.0), kept


def _draw(x, y, scatter, generator) -> tuple[np.ndarray, Callable, np.ndarray, np.ndarray]:
    """Draws the losses of all runs DRAWS times, each with its scatter, and fits a parabola to each
    draw.

    Returns the draws [runs, DRAWS], and of the parabolas: losses at a rate, turns, whether lowest
    and inside.
    """
    drawn = y[:, None] + scatter[:, None] * generator.standard_normal((len(y), DRAWS))
    a, b, c = np.polyfit(x - x.mean(), drawn, 2)
    at = x.mean() - b / (2 * a)
    inside = (a > 0) & (x.min() < at) & (at < x.max())
    return drawn, lambda rate: (a * (rate - x.mean()) + b) * (rate - x.mean()) + c, at, inside


def _near_best(curve: Curve) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Returns rate, loss and scatter of the runs about the best rate; None without a minimum."""
    chosen = curve.near_best
    points = [(x, y) for x, y, _ in curve.points if x in chosen and math.isfinite(y)]
    if curve.optimum is None or len(points) < 5:
        return None
    x, y = np.array(points).T
    # runs scatter more at high rates than at low ones
    return (
        x,
        y,
        np.array([np.std(y[x == rate], ddof=1) if sum(x == rate) > 1 else 0.0 for rate in x]),
    )
