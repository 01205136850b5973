"""What a sweep's results say: the best rate of every width, how far it moves, and how sure that is."""

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from delta_trn.train.studies.fits import Optimum, drift, optimum
from delta_trn.train.studies.sweep.question import Series, Sweep, Trial
from delta_trn.train.studies.sweep.results import losses

OCTAVES = 1.5  # a parabola is fitted this far to either side of the best rate: farther out losses are none
NEAREST = 5  # ... and to so many rates at least
TOLERANCE = 0.25  # octaves per doubling of width: a learning rate off by half an octave after two doublings


@dataclass(frozen=True)
class Curve:
    """Loss against learning rate at one width.

    rates       log2 of the rate -> mean held-out loss over seeds; infinity if one diverged
    fit         of loss against log2 of the rate; None if there is no inner minimum yet
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
        """(log2 of the rate, mean loss) of the best rate tried."""
        finite = {x: y for x, y in self.rates.items() if math.isfinite(y)}
        return min(finite.items(), key=lambda pair: pair[1]) if finite else None

    def near(self) -> list[tuple[float, float, int]]:
        """The points of rates within OCTAVES of the best one, or of the NEAREST."""
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

    cost    width -> nats lost there by taking the narrowest width's optimum instead of its own
    """

    octaves: float
    stderr: float
    low: float
    high: float
    verdict: str
    cost: Mapping[int, float]


@dataclass(frozen=True)
class Report:
    series: Series
    curves: tuple[Curve, ...]
    transfer: Transfer | None
    done: int
    wanted: int


def reports(sweep: Sweep, results: Mapping[str, Mapping[str, Any]]) -> list[Report]:
    """One for every series, in the order of the definition. Trials without a result are left out."""
    known = losses(results)
    groups: dict[Series, dict[int, list[Trial]]] = defaultdict(lambda: defaultdict(list))
    for trial in sweep.trials(known):
        groups[trial.series][trial.width].append(trial)
    found = []
    for series, widths in groups.items():
        trials = [t for group in widths.values() for t in group]
        curves = tuple(_curve_of(width, group, results) for width, group in sorted(widths.items()))
        done = sum(t.key in known for t in trials)
        found.append(Report(series, curves, transfer(curves), done, len(trials)))
    return found


def _curve_of(width: int, trials: Sequence[Trial], results: Mapping[str, Mapping[str, Any]]) -> Curve:
    known = losses(results)
    done = [t for t in trials if t.key in known]
    found = curve(width, [(math.log2(t.lr), known[t.key], t.seed) for t in done])
    counts = (results[t.key].get("parameters") for t in done)
    return replace(found, parameters=next(counts, None))


def curve(width: int, points: Sequence[tuple[float, float, int]]) -> Curve:
    """The curve of (log2 rate, loss, seed)."""
    by_rate: dict[float, list[float]] = defaultdict(list)
    for x, y, _ in points:
        by_rate[x].append(y)
    # a rate that only some seeds have would be compared over other seeds than the rest
    most = max(map(len, by_rate.values()), default=0)
    rates = {x: sum(ys) / len(ys) for x, ys in sorted(by_rate.items()) if len(ys) == most}
    found = Curve(width, rates, tuple(sorted(points)), None, None)
    fit, why_not = _fit(found)
    return replace(found, fit=fit, why_not=why_not)


def _fit(found: Curve) -> tuple[Optimum | None, str | None]:
    finite = [x for x, y in found.rates.items() if math.isfinite(y)]
    if found.best is None or len(finite) < 4:
        return None, f"{len(finite)} rates with a finite loss; a parabola with an error needs 4"
    best, _ = found.best
    if best == min(finite):
        return None, f"the lowest rate tried, 2^{best:g}, is the best"
    if best == max(finite):
        return None, f"the highest rate without divergence, 2^{best:g}, is the best"
    x, y, seeds = zip(*found.near(), strict=True)
    fit = optimum(x, y, seeds)
    if fit is None:
        return None, "the losses near the best rate do not curve upwards"
    if not min(x) <= fit.at <= max(x):
        return None, f"the parabola's minimum, 2^{fit.at:.2f}, lies outside the rates it was fitted to"
    return fit, None


def transfer(curves: Sequence[Curve]) -> Transfer | None:
    """How optima move with log2 width, by a parabola that moves; None with fewer than three inner optima."""
    known = [(c, c.fit) for c in curves if c.fit is not None]
    if len(known) < 3:
        return None
    points = [(x, y, seed, math.log2(c.width)) for c, _ in known for x, y, seed in c.near()]
    found = drift(*(list(column) for column in zip(*points, strict=True)))
    if found is None:
        return None
    low, high = found.low, found.high
    if max(abs(low), abs(high)) <= TOLERANCE:
        verdict = f"transfers: within {TOLERANCE} octaves per doubling"
    elif low > 0 or high < 0:
        verdict = "moves" if abs(found.slope) > TOLERANCE else "moves a little"
    else:
        verdict = "undecided"
    first = known[0][1].at
    cost = {c.width: fit.curvature * (fit.at - first) ** 2 for c, fit in known}
    return Transfer(found.slope, found.stderr, low, high, verdict, cost)


def table(found: Sequence[Report]) -> str:
    """All of it as Markdown."""
    lines = [
        "| series | width | best rate tried | its loss | optimum, log2 rate | 95% within | rates |",
        "|---|---|---|---|---|---|---|",
    ]
    for report in found:
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
    for report in found:
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


def as_json(found: Sequence[Report]) -> str:
    """The same for programs."""
    rows = []
    for report in found:
        curves = [
            {
                "width": c.width,
                "losses": [[x, None if math.isinf(y) else y] for x, y in c.rates.items()],
                "optimum": None if c.fit is None else _finite(asdict(c.fit)),
                "why_not": c.why_not,
            }
            for c in report.curves
        ]
        moved = None if report.transfer is None else _finite(asdict(report.transfer))
        head = {"series": str(report.series), "done": report.done, "wanted": report.wanted}
        rows.append({**head, "curves": curves, "transfer": moved})
    return json.dumps(rows, indent=1) + "\n"


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
