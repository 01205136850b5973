"""What a sweep's results say: the best rate of every width, how far it moves, and how sure that is."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from delta_trn.train.studies.fits import Optimum, drift, optimum
from delta_trn.train.studies.sweep.question import Series, Sweep, Trial
from delta_trn.train.studies.sweep.results import Result, losses

# A parabola is fitted to the rates within OCTAVES of the best one, or to the NEAREST if those are fewer:
# losses farther out do not follow a parabola.
OCTAVES = 1.5
NEAREST = 5
# Octaves per doubling of width within which a rate transfers: half an octave off after two doublings.
TOLERANCE = 0.25


@dataclass(frozen=True)
class Curve:
    """Loss against learning rate at one width.

    rates       log2 of the rate -> mean held-out loss over seeds; infinity if one diverged
    points      (log2 of the rate, loss, seed) of every trial
    fit         of loss against log2 of the rate; None if there is no inner minimum yet
    why_not     why there is no fit
    parameters  of the model; None while no trial is done
    """

    width: int
    rates: Mapping[float, float]
    points: tuple[tuple[float, float, int], ...]
    fit: Optimum | None
    why_not: str | None
    parameters: int | None = None

    @property
    def best(self) -> tuple[float, float] | None:
        """Returns (log2 of the rate, mean loss) of the best rate tried; None if all diverged."""
        finite = {x: y for x, y in self.rates.items() if math.isfinite(y)}
        return min(finite.items(), key=lambda pair: pair[1]) if finite else None

    def near(self) -> list[tuple[float, float, int]]:
        """Returns the points of rates within OCTAVES of the best one, or of the NEAREST."""
        if self.best is None:
            return []
        best, _ = self.best
        finite = [x for x in self.rates if math.isfinite(self.rates[x])]
        order = sorted(finite, key=lambda x: abs(x - best))
        chosen = {x for i, x in enumerate(order) if i < NEAREST or abs(x - best) <= OCTAVES}
        return [point for point in self.points if point[0] in chosen]


@dataclass(frozen=True)
class Transfer:
    """How the optimum moves: `octaves` of learning rate per doubling of width, 95% within [low, high].

    cost    width -> nats lost there with the narrowest width's optimum instead of its own
    """

    octaves: float
    stderr: float
    low: float
    high: float
    verdict: str
    cost: Mapping[int, float]


@dataclass(frozen=True)
class Report:
    """All curves of a series; `done` of the `wanted` trials have a result."""

    series: Series
    curves: tuple[Curve, ...]
    transfer: Transfer | None
    done: int
    wanted: int


def reports(sweep: Sweep, results: Mapping[str, Result]) -> list[Report]:
    """Reports every series in the order of the definition. Trials without a result are left out."""
    known = losses(results)
    groups: dict[Series, list[list[Trial]]] = defaultdict(list)
    for series, trials in sweep.curves(known):
        groups[series].append(trials)
    rows = []
    for series, widths in groups.items():
        curves = tuple(_curve_of(trials, results, known) for trials in widths)
        trials = [trial for group in widths for trial in group]
        done = sum(trial.key in known for trial in trials)
        rows.append(Report(series, curves, transfer(curves), done, len(trials)))
    return rows


def _curve_of(trials: Sequence[Trial], results: Mapping[str, Result], known: Mapping[str, float]) -> Curve:
    done = [t for t in trials if t.key in known]
    fitted = curve(trials[0].width, [(math.log2(t.lr), known[t.key], t.seed) for t in done])
    return replace(fitted, parameters=results[done[0].key].get("parameters") if done else None)


def curve(width: int, points: Sequence[tuple[float, float, int]]) -> Curve:
    """Fits the curve of (log2 rate, loss, seed)."""
    by_rate: dict[float, list[float]] = defaultdict(list)
    for x, y, _ in points:
        by_rate[x].append(y)
    # a rate that only some seeds have would be compared over fewer seeds than the rest
    most = max(map(len, by_rate.values()), default=0)
    rates = {x: sum(ys) / len(ys) for x, ys in sorted(by_rate.items()) if len(ys) == most}
    raw = Curve(width, rates, tuple(sorted(points)), None, None)
    fit, why_not = _fit(raw)
    return replace(raw, fit=fit, why_not=why_not)


def _fit(raw: Curve) -> tuple[Optimum | None, str | None]:
    finite = [x for x, y in raw.rates.items() if math.isfinite(y)]
    if raw.best is None or len(finite) < 4:
        return None, f"{len(finite)} rates with a finite loss; a parabola with an error needs 4"
    best, _ = raw.best
    if best == min(finite):
        return None, f"the lowest rate tried, 2^{best:g}, is the best"
    if best == max(finite):
        return None, f"the highest rate without divergence, 2^{best:g}, is the best"
    x, y, seeds = zip(*raw.near(), strict=True)
    fit = optimum(x, y, seeds)
    if fit is None:
        return None, "the losses near the best rate do not curve upwards"
    if not min(x) <= fit.at <= max(x):
        return None, f"the parabola's minimum, 2^{fit.at:.2f}, lies outside the rates it was fitted to"
    return fit, None


def transfer(curves: Sequence[Curve]) -> Transfer | None:
    """Fits how optima move with log2 of the width; None with fewer than three inner optima."""
    known = [(c, c.fit) for c in curves if c.fit is not None]
    if len(known) < 3:
        return None
    points = [(x, y, seed, math.log2(c.width)) for c, _ in known for x, y, seed in c.near()]
    move = drift(*(list(column) for column in zip(*points, strict=True)))
    if move is None:
        return None
    if max(abs(move.low), abs(move.high)) <= TOLERANCE:
        verdict = f"transfers: within {TOLERANCE} octaves per doubling"
    elif move.low > 0 or move.high < 0:
        verdict = "moves" if abs(move.slope) > TOLERANCE else "moves a little"
    else:
        verdict = "undecided"
    first = known[0][1].at
    cost = {c.width: fit.curvature * (fit.at - first) ** 2 for c, fit in known}
    return Transfer(move.slope, move.stderr, move.low, move.high, verdict, cost)


def table(rows: Sequence[Report]) -> str:
    """Formats the curves and the transfer of every series as Markdown."""
    lines = [
        "| series | width | best rate tried | its loss | optimum, log2 rate | 95% within | rates |",
        "|---|---|---|---|---|---|---|",
    ]
    for report in rows:
        for c in report.curves:
            best = c.best
            tried = ("-", "-") if best is None else (f"2^{best[0]:g}", f"{best[1]:.4f}")
            if c.fit is None:
                fitted = ("-", c.why_not or "-")
            elif not math.isfinite(c.fit.stderr):
                fitted = (f"{c.fit.at:.2f}", "not known: scatter hides how the losses curve")
            else:
                fitted = (f"{c.fit.at:.2f}", f"{c.fit.low:.2f} to {c.fit.high:.2f}")
            lines.append(
                f"| {report.series} | {c.width} | {' | '.join((*tried, *fitted))} | {len(c.rates)} |"
            )
    lines += [
        "",
        "| series | octaves per doubling of width | 95% within | verdict | cost of the narrowest's rate |",
    ]
    lines += ["|---|---|---|---|---|"]
    for report in rows:
        lines.append(f"| {report.series} | {_transfer_cells(report)} |")
    return "\n".join(lines)


def _transfer_cells(report: Report) -> str:
    t = report.transfer
    if t is None:
        known = sum(c.fit is not None for c in report.curves)
        why = f"{known} of {len(report.curves)} widths have an optimum between their rates; 3 are needed"
        return f"- | - | not decided: {why} | -"
    cost = ", ".join(f"{width}: {nats:.4f}" for width, nats in t.cost.items())
    return f"{t.octaves:+.3f} ± {t.stderr:.3f} | {t.low:+.2f} to {t.high:+.2f} | {t.verdict} | {cost}"
