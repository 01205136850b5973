"""What a sweep's results say: the best rate of every width, how flank and wall move, and how sure that is.

It is read from the lines alone, which say where they belong. The picture is as figures 1 and 2 of
arXiv:2606.04048: loss above each width's best against the rate.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from delta_trn.train.files import write_file
from delta_trn.train.studies.fits import optimum
from delta_trn.train.studies.sweep.results import ANY, DIGITS, SAFE, Result, Results
from delta_trn.train.studies.sweep.sides import Side, side
from delta_trn.train.watch.figure import dress, new_figure, save_figure

# A parabola is fitted to the rates within OCTAVES of the best one, or to the NEAREST if those are fewer:
# losses farther out do not follow a parabola.
OCTAVES = 1.5
NEAREST = 5
# Octaves beside the narrowest width's best rate at which the table says what that costs.
BESIDE = (-1.0, 0.0, 1.0)
# The picture ends at so many nats above the best: rates that lose more say nothing about it.
SHOWN = 0.5
Losses = Mapping[int, float]  # seed -> held-out loss, infinity where it diverged


@dataclass(frozen=True)
class Curve:
    """Loss against learning rate at one width: (log2 of the rate, loss, seed) of every run."""

    width: int
    points: Sequence[tuple[float, float, int]]
    parameters: int = 0

    @cached_property
    def rates(self) -> Mapping[float, float]:
        """Maps log2 of a rate to the mean loss over seeds; infinity if one diverged.

        A rate that only some seeds have is left out: it would be compared over fewer seeds than the rest.
        """
        by_rate: dict[float, list[float]] = defaultdict(list)
        for x, y, _ in self.points:
            by_rate[x].append(y)
        most = max(map(len, by_rate.values()), default=0)
        return {x: sum(ys) / len(ys) for x, ys in sorted(by_rate.items()) if len(ys) == most}

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

    @cached_property
    def optimum(self) -> float | None:
        """Returns log2 of the rate where a parabola is lowest; None if there is no inner minimum yet."""
        finite, best = [x for x in self.rates if math.isfinite(self.rates[x])], self.best
        if best is None or best in (min(finite), max(finite)):
            return None
        order = sorted(finite, key=lambda x: abs(x - best))
        chosen = {x for i, x in enumerate(order) if i < NEAREST or abs(x - best) <= OCTAVES}
        at = optimum(*zip(*(point for point in self.points if point[0] in chosen), strict=True))
        return at if at is not None and min(chosen) <= at <= max(chosen) else None

    def losses(self, rate: float) -> Losses:
        """Returns the losses at log2 of a rate."""
        return {seed: y for x, y, seed in self.points if round(x, DIGITS) == round(rate, DIGITS)}


@dataclass(frozen=True)
class Report:
    """The curves of several widths that belong together, and how their sides move."""

    name: str
    curves: Sequence[Curve]
    sides: Sequence[Side]


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
        for width, found in sorted(by_width.items()):
            losses = [math.inf if line["loss"] is None else line["loss"] for line in found]
            points = [(math.log2(x["lr"]), y, x["seed"]) for x, y in zip(found, losses, strict=True)]
            curves.append(Curve(width, sorted(points), found[0].get("parameters", 0)))
        # an arm may be a parametrization and carry its name
        name = dict.fromkeys((arm, "" if table == ANY else table, optimizer))
        rows.append(Report(" ".join(filter(None, name)), curves, drifts(curves) if len(curves) > 1 else ()))
    return sorted(rows, key=lambda row: row.name)


def drifts(curves: Sequence[Curve]) -> tuple[Side, Side]:
    """Returns how flank and wall of the curves move with log2 of the width."""
    points: dict[tuple[float, int], dict[float, float]] = defaultdict(dict)
    best = {}
    for c in curves:
        if c.best is None:
            continue
        scale = math.log2(c.width)
        best[scale] = c.best if c.optimum is None else c.optimum
        for x, y, seed in c.points:
            points[scale, seed][x] = y
    return side("flank", points, best), side("wall", points, best)


def difference(losses: Losses, others: Losses) -> str:
    """Compares losses seed by seed (same data, same initial values).

    Returns the mean nats by which they lie above others, and for several seeds its standard error; "-"
    without a seed of both.
    """
    above = [losses[seed] - others[seed] for seed in losses if seed in others]
    if not above:
        return "-"
    mean, n = sum(above) / len(above), len(above)
    if not math.isfinite(mean):
        return "diverges"
    if n < 2:
        return f"{mean:.4f}"
    return f"{mean:.4f} ± {math.sqrt(sum((d - mean) ** 2 for d in above) / (n - 1) / n):.4f}"


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
        narrowest = next((c.best for c in report.curves if c.best is not None), 0.0)
        for c in report.curves:
            cells = ["-", "diverged", "-", "-", "-", "-", "-"]
            if c.best is not None:
                at_best, others = c.losses(c.best), best[c.width]
                cells = [
                    f"2^{c.best:g}" + (", an end" if c.is_at_an_end else ""),
                    f"{c.lowest:.4f}",
                    "-" if c is others else difference(at_best, others.losses(others.best or 0.0)),
                    "-" if c.optimum is None else f"{c.optimum:.2f}",
                    *(difference(c.losses(narrowest + octaves), at_best) for octaves in BESIDE),
                ]
            lines.append(f"| {report.name} | {c.width} | {c.parameters:,} | {' | '.join(cells)} |")
    if any(report.sides for report in rows):
        lines += [
            "",
            "| series | side | octaves per doubling of width | 95%, seeds and windows | verdict |",
            "|---|---|---|---|---|",
        ]
    for report in rows:
        for s in report.sides:
            interval = f"{s.octaves:+.3f} | {s.low:+.2f} to {s.high:+.2f}"
            lines.append(f"| {report.name} | {s.name} | {interval} | {s.verdict} |")
    return "\n".join(lines)


def draw_curves(rows: Sequence[Report], path: Path) -> Path:
    """Draws one panel per series."""
    from matplotlib import colormaps

    figure = new_figure(4.6 * len(rows), 3.6)
    for axes, row in zip(figure.subplots(1, len(rows), squeeze=False)[0], rows, strict=True):
        for i, c in enumerate(row.curves):
            color = colormaps["viridis"](0.85 * i / max(len(row.curves) - 1, 1))
            xs = [x for x, y in c.rates.items() if math.isfinite(y)]
            label = f"d = {c.width} (shifted by {c.lowest:.4f})"
            axes.plot(xs, [c.rates[x] - c.lowest for x in xs], color=color, marker="o", label=label)
        axes.set_ylim(-0.1 * SHOWN, SHOWN)
        dress(axes, row.name, size=10)
        axes.set_xlabel("log2 of the learning rate")
        axes.set_ylabel("loss above the best, nats per token")
        axes.legend(frameon=False, fontsize=7, loc="upper center")
    return save_figure(figure, path, SAFE)


def write_report(folder: Path) -> str:
    """Writes report.md and sweep.png into a sweep's folder. Returns the table and where they lie."""
    results = Results(folder)
    rows = reports(results.read().values())
    text = table(rows)
    write_file(folder / "report.md", text + "\n", SAFE)
    picture = draw_curves(rows, folder / "sweep.png") if rows else "-"
    return f"{text}\n\nresults  {results.path}   picture  {picture}"
