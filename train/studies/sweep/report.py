"""What a sweep's results say: the best rate of every width, how flank and wall move, and how sure that is.

It is read from the lines alone, which say where they belong. The picture is as figures 1 and 2 of
arXiv:2606.04048: loss above each width's best against the rate.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from delta_trn.train.files import write_file
from delta_trn.train.studies.fits import optimum
from delta_trn.train.studies.sweep.results import ANY, DIGITS, SAFE, Result, Results
from delta_trn.train.studies.sweep.sides import Name, Side, side
from delta_trn.train.watch.figure import GRAY, dress, new_figure, save_figure

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

    def losses(self, rate: float) -> Losses:
        """Returns the losses at log2 of a rate."""
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
        curves = []
        for width, of_width in sorted(by_width.items()):
            losses = [math.inf if x["loss"] is None else x["loss"] for x in of_width]
            points = [(math.log2(x["lr"]), y, x["seed"]) for x, y in zip(of_width, losses, strict=True)]
            curves.append(curve(width, points, of_width[0].get("parameters", 0)))
        sides = (drift("flank", curves), drift("wall", curves)) if len(curves) > 1 else ()
        # an arm may be a parametrization and carry its name
        name = dict.fromkeys((arm, "" if table == ANY else table, optimizer))
        rows.append(Report(" ".join(filter(None, name)), tuple(curves), sides, costs(curves)))
    return sorted(rows, key=lambda row: row.name)


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
    measured = [(c, c.best) for c in curves if c.best is not None]
    found = {}
    for c, best in measured if len(measured) > 1 else ():
        for octaves in BESIDE:
            lost = difference(c.losses(measured[0][1] + octaves), c.losses(best))
            if lost is not None:
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
    best: dict[int, Curve] = {}
    for c in (c for report in rows for c in report.curves):
        best[c.width] = min(best.get(c.width, c), c, key=lambda c: c.lowest)
    for report in rows:
        for c in report.curves:
            tried, loss, above = "-", "diverged", None
            if c.best is not None:
                tried = f"2^{c.best:g}" + (", an end" if c.is_at_an_end else "")
                loss = f"{c.lowest:.4f}"
                others = best[c.width]
                if c is not others and others.best is not None:
                    above = difference(c.losses(c.best), others.losses(others.best))
            at = "-" if c.optimum is None else f"{c.optimum:.2f}"
            lost = [str(report.costs.get((c.width, octaves), "-")) for octaves in BESIDE]
            start = (
                f"| {report.name} | {c.width} | {c.parameters:,} | {tried} | {loss} | {above or '-'} | {at}"
            )
            lines.append(" | ".join([start, *lost]) + " |")
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


def draw_curves(rows: Sequence[Report], path: Path) -> Path | None:
    """Draws one panel per series, with the drifts of flank and wall as title; None without a result."""
    shown = [row for row in rows if any(c.best is not None for c in row.curves)]
    if not shown:
        return None
    from matplotlib import colormaps

    columns = 2 if len(shown) == 4 else min(len(shown), 3)
    lines = math.ceil(len(shown) / columns)
    figure = new_figure(4.6 * columns, 3.6 * lines)
    widths = sorted({c.width for row in shown for c in row.curves})
    shades = {w: colormaps["viridis"](0.85 * i / max(len(widths) - 1, 1)) for i, w in enumerate(widths)}
    for i, row in enumerate(shown):
        _draw_series(figure.add_subplot(lines, columns, i + 1), row, shades)
    return save_figure(figure, path, SAFE)


def _draw_series(axes: Any, row: Report, shades: Mapping[int, Any]) -> None:
    top = 1e-3
    for c in row.curves:
        if c.best is None:
            continue
        xs = [x for x, y in c.rates.items() if math.isfinite(y)]
        ys = [c.rates[x] - c.lowest for x in xs]
        # the panel ends at the worst of the rates next to the best: losses far above say nothing about it
        nearest = sorted(zip(xs, ys, strict=True), key=lambda point: abs(point[0] - (c.best or 0)))[:5]
        top = max(top, *(y for _, y in nearest))
        label = f"d = {c.width} (shifted by {c.lowest:.4f})"
        axes.plot(xs, ys, color=shades[c.width], marker="o", markersize=3.5, linewidth=1.4, label=label)
        if c.optimum is not None:
            axes.axvline(c.optimum, color=shades[c.width], linewidth=1, linestyle=":")
    axes.set_ylim(-0.12 * top, 1.15 * top)
    dress(axes, row.name, size=10)
    drifts = ", ".join(f"{s.name} {s.octaves:+.2f}" for s in row.sides if s.windows)
    axes.set_title(drifts or "not decided", loc="right", fontsize=8, color=GRAY)
    axes.set_xlabel("log2 of the learning rate; titles: octaves per doubling of width", fontsize=9)
    axes.set_ylabel("loss above the best, nats per token")
    axes.legend(frameon=False, fontsize=7, loc="upper center")


def write_report(folder: Path) -> str:
    """Writes report.md and sweep.png into a sweep's folder. Returns the table and where they lie."""
    results = Results(folder)
    rows = reports(results.read().values())
    text = table(rows)
    write_file(folder / "report.md", text + "\n", SAFE)
    picture = draw_curves(rows, folder / "sweep.png")
    return f"{text}\n\nresults  {results.path}   picture  {picture or '-'}"
