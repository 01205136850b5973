"""What it costs to choose a learning rate at one width and to keep it at another, in nats: its
regret.

The rate that is kept is where a parabola through the narrowest width's losses is lowest, each seed
with a level of its own; where there is no such parabola, or it misses the losses by more than runs
scatter, it is the best rate tried. Four answers, all from the same runs:

    direct      the mean loss at the kept rate, on the straight line between the rates tried beside
                it, above the lowest mean. Its error is that of the difference seed by seed: seeds
                differ as a whole.
    split       one half of the seeds chooses the width's best rate, the other half pays for both,
                over all halves. The luck that makes a mean the lowest one is not counted then.
    parabola    what a parabola says of the same width. It is named only where it passes a test of
                lack of fit, and where the kept rate is among those that it was fitted to.
    one seed    a rate is chosen from one seed of the narrowest width and paid for by the other
                seeds of every width, above their best rate. Each seed chooses once.

Direct has two intervals of 95%. The regret is the largest of several differences, that of the kept
rate to each rate tried, so all of them are bounded at once (multiple comparisons with the best, Hsu
1984). The first takes the kept rate as given. The second also covers the choice of it: it holds for
every rate that the narrowest width's runs, drawn again, choose in 95 of 100 cases. The scatter of
runs is what seeds' levels and rates do not explain, taken together over all widths of a series, so
that two seeds do not say by chance that they agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, islice

import numpy as np

from delta_trn.train.studies.fits import fisher_tail, parabola
from delta_trn.train.studies.sweep.curves import Curve
from delta_trn.train.studies.sweep.results import DIGITS

DRAWS = 2000
# A parabola that misses by so much less often than this, if it were right, is not named.
LEVEL = 0.05
HALVES = 2000  # so many halves of the seeds at most: 15 seeds have 6435
# How a rate is chosen from one seed's curve. The last was advice once, and stays to show what it
# costs.
STRATEGIES: dict[str, Callable[[Curve], float | None]] = {
    "fitted": lambda curve: curve.optimum if curve.optimum is not None else curve.best,
    "best tried": lambda curve: curve.best,
    "half of it": lambda curve: None if curve.best is None else curve.best - 1,
}
Interval = tuple[float, float]


@dataclass(frozen=True)
class Paid:
    """The nats lost by rates that single seeds chose: the mean and the worst over choices, None if
    no choice is known.

    beyond, choices     how many of the choices lie beyond the rates tried, and of how many
    """

    mean: float | None
    worst: float | None
    beyond: int
    choices: int


@dataclass(frozen=True)
class Regret:
    """The nats lost at one width, None where the runs do not say them.

    kept            log2 of the rate that is kept
    error           standard error of direct, over seeds; None for one seed
    at_rate         95% interval of direct at the kept rate
    with_choice     95% interval that covers the choice of the kept rate
    misfit          the probability that a right parabola misses by as much; None without one
    """

    width: int
    kept: float
    direct: float | None
    error: float | None
    at_rate: Interval | None
    with_choice: Interval | None
    split: float | None
    parabola: float | None
    misfit: float | None
    paid: dict[str, Paid]


@dataclass(frozen=True)
class Scatter:
    """The standard deviation of runs beside their seed's level and their rate's mean, over all
    widths, and its degrees of freedom.
    """

    size: float
    freedom: int


def regrets(curves: Sequence[Curve]) -> list[Regret]:
    """Returns what the narrowest curve's rate costs on every curve;
    none without two seeds of it.
    """
    narrow, scatter = curves[0], scatter_of(curves)
    if narrow.best is None or scatter is None or len(narrow.complete[1]) < 2:
        return []
    kept, choices = kept_rate(narrow, scatter), _draw_choices(narrow, scatter)
    rows = []
    for curve in curves:
        rates, _, losses = curve.complete
        direct, error, split, at_rate, with_choice = None, None, None, None, None
        lost = _differences(rates, losses, kept)
        if lost is not None:
            means = lost.mean(0)
            direct, at = float(means.max()), int(means.argmax())
            if len(lost) > 1:
                error = float(lost[:, at].std(ddof=1)) / math.sqrt(len(lost))
                split = _split(lost)
            at_rate = _bound(curve, [kept], scatter)
            # beyond the rates tried nothing is known: a choice there leaves no upper bound
            with_choice = _bound(curve, choices, scatter)
        misfit = lack_of_fit(curve, curves, scatter)
        paid = {name: _pay(narrow, curve, choose) for name, choose in STRATEGIES.items()}
        fitted = _by_parabola(curve, kept) if misfit is not None and misfit >= LEVEL else None
        rows.append(
            Regret(
                curve.width, kept, direct, error, at_rate, with_choice, split, fitted, misfit, paid
            )
        )
    return rows


def scatter_of(curves: Sequence[Curve]) -> Scatter | None:
    """Returns the scatter of runs about the best rate of every curve; None without two seeds."""
    squares, freedom = 0.0, 0
    for curve in curves:
        losses = _about_best(curve)[1]
        if min(losses.shape) < 2:
            continue
        rest = losses - losses.mean(0) - losses.mean(1, keepdims=True) + losses.mean()
        squares += float((rest**2).sum())
        freedom += (losses.shape[0] - 1) * (losses.shape[1] - 1)
    return Scatter(math.sqrt(squares / freedom), freedom) if freedom else None


def kept_rate(narrow: Curve, scatter: Scatter | None) -> float:
    """Returns log2 of the rate that the narrowest width's runs choose together. Raises ValueError
    if all of them diverged.
    """
    if narrow.best is None:
        raise ValueError(
            f"every run of width {narrow.width} diverged, so that no rate can be kept: sweep lower "
            "rates"
        )
    if narrow.optimum is None:
        return narrow.best
    misfit = lack_of_fit(narrow, [narrow], scatter) if scatter else None
    return narrow.optimum if misfit is None or misfit >= LEVEL else narrow.best


def lack_of_fit(curve: Curve, curves: Sequence[Curve], scatter: Scatter) -> float | None:
    """Returns how probable it is that a right parabola misses the means by as much as here; None
    if there is no parabola, or one goes through any means.

    What parabolas miss has one shape at all wider curves with the same rates about their best, if
    it is no chance: there the shape is tested, not each curve's own. The narrowest curve, which
    chooses the rate, is tested alone.
    """
    rates = curve.near_best
    alike = [c for c in curves[1:] if c.near_best == rates] if curve is not curves[0] else [curve]
    if len(rates) < 4:
        return None
    shape, runs = np.zeros(len(rates)), 0
    for each in alike:
        xs, losses = _about_best(each)
        means = losses.mean(0)
        shape += len(losses) * (means - np.polyval(np.polyfit(xs, means, 2), xs))
        runs += len(losses)
    above = len(rates) - 3
    if scatter.size == 0:
        return 1.0 if float(np.abs(shape).max()) < 1e-9 * runs else 0.0
    ratio = float((shape**2).sum()) / runs / above / scatter.size**2
    return fisher_tail(ratio, above, scatter.freedom)


def _about_best(curve: Curve) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rates about the best one, and the losses [seeds, rates] of complete seeds."""
    rates, _, losses = curve.complete
    chosen = [i for i, x in enumerate(rates) if x in curve.about_best]
    return np.array([rates[i] for i in chosen]), losses[:, chosen]


def _weights(rates: Sequence[float], rate: float) -> np.ndarray | None:
    """Returns the weights of a straight line between the rates beside one; None beyond them."""
    if not rates or not min(rates) - 10**-DIGITS <= rate <= max(rates) + 10**-DIGITS:
        return None
    return np.array([np.interp(rate, rates, unit) for unit in np.eye(len(rates))])


def _differences(rates: Sequence[float], losses: np.ndarray, kept: float) -> np.ndarray | None:
    """Returns by how much the kept rate loses more than each rate [seeds, rates]; None beyond the
    rates tried, or where a run beside the kept rate diverged.
    """
    weights = _weights(rates, kept)
    if weights is None:
        return None
    at = losses[:, weights > 0] @ weights[weights > 0]
    return at[:, None] - losses if np.isfinite(at).all() else None


def _split(lost: np.ndarray) -> float:
    """Returns the mean over halves of the seeds: one chooses the best rate, the other pays."""
    seeds, nats = len(lost), []
    for half in islice(combinations(range(seeds), seeds // 2), HALVES):
        chooses = np.isin(np.arange(seeds), half)
        nats.append(lost[~chooses, lost[chooses].mean(0).argmax()].mean())
    return float(np.mean(nats))


def _bound(curve: Curve, kept: Sequence[float], scatter: Scatter) -> Interval | None:
    """Returns bounds of the regret that hold for every one of the kept rates; None if one is beyond
    the rates tried.
    """
    rates, _, losses = curve.complete
    found = [i for i in range(len(rates)) if np.isfinite(losses[:, i]).all()]
    rates, losses = [rates[i] for i in found], losses[:, found]
    generator, means, bounds = np.random.default_rng(0), losses.mean(0), []
    noise = generator.standard_normal((DRAWS, len(rates)))
    doubt = np.sqrt(generator.chisquare(scatter.freedom, DRAWS) / scatter.freedom)
    for rate in kept:
        weights = _weights(rates, rate)
        if weights is None:
            return None
        contrasts = weights - np.eye(len(rates))
        sizes = np.sqrt((contrasts**2).sum(1))
        contrasts, sizes = contrasts[sizes > 0], sizes[sizes > 0]
        largest = np.abs(noise @ contrasts.T / sizes).max(1) / doubt
        reach = np.quantile(largest, 0.95) * scatter.size * sizes / math.sqrt(len(losses))
        lost = contrasts @ means
        bounds.append(
            (max(0.0, float((lost - reach).max())), max(0.0, float((lost + reach).max())))
        )
    return min(low for low, _ in bounds), max(high for _, high in bounds)


def best_rate_drift(curves: Sequence[Curve]) -> tuple[float, float, float] | None:
    """Returns the slope of the best rate, in octaves per doubling of the width, and its 95%
    interval by the runs' scatter; None without two seeds, or where all runs of a width diverged.

    A best rate is the lowest point of a parabola, or else the best one tried.
    """
    scatter = scatter_of(curves)
    if scatter is None or any(c.best is None for c in curves):
        return None
    x = np.log2([c.width for c in curves])
    best = [c.best if c.optimum is None else c.optimum for c in curves]
    drawn = [_draw_rates(c, scatter, c.optimum is not None, seed=c.width) for c in curves]
    slopes = np.polyfit(x - x.mean(), np.array(drawn), 1)[0]
    low, high = np.quantile(slopes, (0.025, 0.975))
    return float(np.polyfit(x - x.mean(), np.array(best, float), 1)[0]), float(low), float(high)


def _draw_choices(narrow: Curve, scatter: Scatter) -> list[float]:
    """Returns rates from the lowest to the highest that the narrowest width's runs choose in 95 of
    100 cases if they are drawn again, each with its scatter.
    """
    fits = narrow.optimum is not None and kept_rate(narrow, scatter) == narrow.optimum
    low, high = np.quantile(_draw_rates(narrow, scatter, fits, seed=0), (0.025, 0.975))
    between = (float(x) for x in narrow.rates if low < x < high)
    return [float(low), *between, float(high)]


def _draw_rates(curve: Curve, scatter: Scatter, fits: bool, seed: int) -> np.ndarray:
    """Returns the best rates of the runs if these are drawn again, DRAWS times: those of parabolas,
    or the best ones tried.
    """
    xs, losses = _about_best(curve)
    size = scatter.size / math.sqrt(len(losses))
    means = losses.mean(0)[:, None]
    drawn = means + size * np.random.default_rng(seed).standard_normal((len(xs), DRAWS))
    chosen = xs[drawn.argmin(0)]
    if not fits:
        return chosen
    a, b, _ = np.polyfit(xs - xs.mean(), drawn, 2)
    with np.errstate(divide="ignore", invalid="ignore"):
        lowest = xs.mean() - b / (2 * a)
    # a report names no fitted rate but one among those tried
    return np.where((a > 0) & (xs.min() < lowest) & (lowest < xs.max()), lowest, chosen)


def _by_parabola(curve: Curve, kept: float) -> float | None:
    """Returns what a parabola through the rates about the best says of the kept rate."""
    xs, losses = _about_best(curve)
    if curve.optimum is None or not xs.min() <= kept <= xs.max():
        return None
    a, at = parabola(xs, losses.mean(0))
    return a * (kept - at) ** 2


def _pay(narrow: Curve, wide: Curve, choose: Callable[[Curve], float | None]) -> Paid:
    """Returns what the rates cost that single seeds choose at the narrowest width."""
    lost, beyond = [], 0
    seeds = narrow.complete[1]
    for seed in seeds:
        rate = choose(
            replace(narrow, points=[point for point in narrow.points if point[2] == seed])
        )
        others = replace(wide, points=[point for point in wide.points if point[2] != seed])
        rates, _, losses = others.complete
        if rate is None or not len(losses):
            continue
        differences = _differences(rates, losses, rate)
        if differences is None:
            beyond += 1
        else:
            lost.append(float(differences.mean(0).max()))
    known = (float(np.mean(lost)), max(lost)) if lost else (None, None)
    return Paid(*known, beyond, len(lost) + beyond)
