"""What a sweep's results say: the best rate of every width, how flank and wall move, and how sure that is.

It is read from the lines alone, which say where they belong.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from delta_trn.train.studies.fits import optimum
from delta_trn.train.studies.sweep.results import ANY, DIGITS, Result
from delta_trn.train.studies.sweep.sides import Name, Side, side

# A parabola is fitted to the rates within OCTAVES of the best one, or to the NEAREST if those are fewer:
# losses farther out do not follow a parabola.
OCTAVES = 1.5
NEAREST = 5
# Octaves beside the narrowest width's best rate at which the table of costs looks.
BESIDE = (-1.0, 0.0, 1.0)
Losses = Mapping[int, float]  # seed -> held-out loss, infinity where it diverged


@dataclass(frozen=True)
class Curve:
    """Loss against learning rate at one width.

    points      (log2 of the rate, loss, seed) of every run
    rates       log2 of the rate -> mean loss over seeds; infinity if one diverged. A rate that only some
                seeds have is left out: it would be compared over fewer seeds than the rest
    optimum     log2 of the rate where a parabola is lowest; None if there is no inner minimum yet
    parameters  of the model
    """

    width: int
    points: tuple[tuple[float, float, int], ...]
    rates: Mapping[float, float]
    optimum: float | None
    parameters: int

    @property
    def best(self) -> float | None:
        """Returns log2 of the best rate tried; None if all diverged."""
        finite = [x for x in self.rates if math.isfinite(self.rates[x])]
        return min(finite, key=lambda x: self.rates[x], default=None)

    @property
    def lowest(self) -> float:
        """Returns the mean loss at the best rate tried."""
        return min(self.rates.values(), default=math.inf)

    @property
    def is_at_an_end(self) -> bool:
        """Whether the best rate is the lowest or highest tried, so that a better one may lie beyond."""
        return len(self.rates) > 1 and self.best in (min(self.rates), max(self.rates))

    def losses(self, rate: float | None) -> Losses:
        """Returns the losses at log2 of a rate."""
        if rate is None:
            return {}
        return {seed: y for x, y, seed in self.points if round(x, DIGITS) == round(rate, DIGITS)}


@dataclass(frozen=True)
class Difference:
    """Mean nats by which losses lie above others of the same seeds, and its error; None for one seed."""

    nats: float
    error: float | None

    def __str__(self) -> str:
        if not math.isfinite(self.nats):
            return "diverges"
        return f"{self.nats:.4f}" if self.error is None else f"{self.nats:.4f} ± {self.error:.4f}"


@dataclass(frozen=True)
class Report:
    """The curves of several widths that belong together, and how their sides move.

    costs   (width, octaves) -> nats lost at a rate so many octaves beside the best one of the narrowest
            width, against the width's own best rate; only where that rate was tried
    """

    name: str
    curves: tuple[Curve, ...]
    sides: tuple[Side, ...]
    costs: Mapping[tuple[int, float], Difference]


def reports(lines: Iterable[Result]) -> list[Report]:
    """Reports every series: an arm, a parametrization and an optimizer.

    A result of the base width, where all parametrizations are one, belongs to every series of its arm.
    """
    groups: dict[tuple[str, str, str], list[Result]] = defaultdict(list)
    for line in lines:
        groups[line["arm"], line["parametrization"], line["optimizer"]].append(line)
    rows = []
    for (arm, table, optimizer), own in groups.items():
        shared = groups.get((arm, ANY, optimizer), [])
        if table == ANY and any(key[::2] == (arm, optimizer) and key[1] != ANY for key in groups):
            continue
        by_width: dict[int, list[Result]] = defaultdict(list)
        for line in own if table == ANY else [*shared, *own]:
            by_width[line["width"]].append(line)
        curves = [_curve_of(width, by_width[width]) for width in sorted(by_width)]
        sides = (drift("flank", curves), drift("wall", curves)) if len(curves) > 1 else ()
        # an arm may be a parametrization and carry its name
        name = dict.fromkeys((arm, "" if table == ANY else table, optimizer))
        rows.append(Report(" ".join(filter(None, name)), tuple(curves), sides, costs(curves)))
    return sorted(rows, key=lambda row: row.name)


def _curve_of(width: int, lines: Sequence[Result]) -> Curve:
    points = [
        (math.log2(line["lr"]), math.inf if line["loss"] is None else float(line["loss"]), line["seed"])
        for line in lines
    ]
    return curve(width, points, lines[0].get("parameters", 0))


def curve(width: int, points: Sequence[tuple[float, float, int]], parameters: int = 0) -> Curve:
    """Makes the curve of (log2 rate, loss, seed)."""
    by_rate: dict[float, list[float]] = defaultdict(list)
    for x, y, _ in points:
        by_rate[x].append(y)
    most = max(map(len, by_rate.values()), default=0)
    rates = {x: sum(ys) / len(ys) for x, ys in sorted(by_rate.items()) if len(ys) == most}
    return Curve(width, tuple(sorted(points)), rates, _optimum(rates, sorted(points)), parameters)


def _optimum(rates: Mapping[float, float], points: Sequence[tuple[float, float, int]]) -> float | None:
    finite = {x: y for x, y in rates.items() if math.isfinite(y)}
    if len(finite) < 4:
        return None
    best = min(finite, key=lambda x: finite[x])
    if best in (min(finite), max(finite)):
        return None
    order = sorted(finite, key=lambda x: abs(x - best))
    chosen = {x for i, x in enumerate(order) if i < NEAREST or abs(x - best) <= OCTAVES}
    at = optimum(*zip(*(point for point in points if point[0] in chosen), strict=True))
    return at if at is not None and min(chosen) <= at <= max(chosen) else None


def drift(name: Name, curves: Sequence[Curve]) -> Side:
    """Returns how one side of the curves moves with log2 of the width."""
    points: dict[tuple[float, int], dict[float, float]] = defaultdict(dict)
    best = {}
    for c in curves:
        if c.best is None:
            continue
        scale = math.log2(c.width)
        best[scale] = c.best if c.optimum is None else c.optimum
        for x, y, seed in c.points:
            points[scale, seed][x] = y
    return side(name, points, best)


def costs(curves: Sequence[Curve]) -> dict[tuple[int, float], Difference]:
    """Returns what widths lose at, below and above the narrowest width's best rate, where that was tried."""
    measured = [c for c in curves if c.best is not None]
    if len(measured) < 2:
        return {}
    first = measured[0].best or 0.0
    found = {}
    for c in measured:
        for octaves in BESIDE:
            if (lost := difference(c.losses(first + octaves), c.losses(c.best))) is not None:
                found[c.width, octaves] = lost
    return found


def difference(losses: Losses, others: Losses) -> Difference | None:
    """Compares losses seed by seed (same data, same initial values); None without a seed of both."""
    above = [losses[seed] - others[seed] for seed in losses if seed in others]
    if not above:
        return None
    mean, n = sum(above) / len(above), len(above)
    if n < 2 or not math.isfinite(mean):
        return Difference(mean, None)
    return Difference(mean, math.sqrt(sum((d - mean) ** 2 for d in above) / (n - 1) / n))


def table(rows: Sequence[Report]) -> str:
    """Formats curves, costs and sides of every series as Markdown.

    Series may have different optima, so each is compared at its own best rate with the best of its width.
    """
    lines = [
        "| series | width | parameters | best rate tried | its loss | above the best series |"
        " optimum, log2 rate | nats lost at half the narrowest's best rate | at it | at twice it |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    every = [c for report in rows for c in report.curves]
    best = {
        w: min((c for c in every if c.width == w), key=lambda c: c.lowest) for w in {c.width for c in every}
    }
    for report in rows:
        for c in report.curves:
            tried, loss, above = "-", "diverged", None
            if c.best is not None:
                tried = f"2^{c.best:g}" + (", an end" if c.is_at_an_end else "")
                loss = f"{c.lowest:.4f}"
                others = best[c.width]
                above = None if c is others else difference(c.losses(c.best), others.losses(others.best))
            at = "-" if c.optimum is None else f"{c.optimum:.2f}"
            lost = [str(report.costs.get((c.width, octaves), "-")) for octaves in BESIDE]
            cells = [
                report.name,
                str(c.width),
                f"{c.parameters:,}",
                tried,
                loss,
                str(above or "-"),
                at,
                *lost,
            ]
            lines.append(f"| {' | '.join(cells)} |")
    if any(report.sides for report in rows):
        lines += [
            "",
            "| series | side | octaves per doubling of width | 95%, seeds and windows | verdict |"
            " windows of rates |",
            "|---|---|---|---|---|---|",
            *(f"| {report.name} | {_side_cells(s)} |" for report in rows for s in report.sides),
        ]
    return "\n".join(lines)


def _side_cells(s: Side) -> str:
    """Formats a drift; the last column has each window of rates and its own drift."""
    if not s.windows:
        return f"{s.name} | - | - | {s.verdict} | -"
    windows = ", ".join(
        f"2^{line.rates[0]:g} to 2^{line.rates[1]:g}: {line.slope:+.3f}" for line in s.windows
    )
    interval = "-" if math.isinf(s.low) else f"{s.low:+.2f} to {s.high:+.2f}"
    return f"{s.name} | {s.octaves:+.3f} | {interval} | {s.verdict} | {windows}"
