"""Writes what a sweep has shown so far: report.md, report.json and the pictures beside its results."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from delta_trn.train.studies.sweep import comparison, report
from delta_trn.train.studies.sweep.comparison import Compared
from delta_trn.train.studies.sweep.question import Sweep
from delta_trn.train.studies.sweep.report import Along, Report
from delta_trn.train.studies.sweep.results import Results
from delta_trn.train.studies.sweep.sides import Line, Side
from delta_trn.train.watch.figure import BLUE, GRAY, RED, dress, new_figure, save_figure

ADVICE = "the results are whole: free some space and run the same command again"


def write_report(sweep: Sweep, folder: Path) -> str:
    """Writes report and pictures into the sweep's folder. Returns the tables and where they lie."""
    results = Results(folder)
    rows = report.reports(sweep, results.read())
    text, axes = report.table(rows), report.along(sweep, rows)
    if axes:
        text += "\n\n" + report.along_table(axes)
    if arms := comparison.compare(rows):
        text += "\n\n" + comparison.table(arms)
        draw_comparison(arms, folder / "comparison.png")
    (folder / "report.md").write_text(text + "\n")
    (folder / "report.json").write_text(as_json(rows, axes))
    picture = draw_curves(rows, folder / "sweep.png")
    return f"{text}\n\nresults  {results.path}   picture  {picture or '-'}"


def as_json(rows: Sequence[Report], axes: Sequence[Along] = ()) -> str:
    """Formats the reports for programs; a number that is not finite becomes null."""

    def finite(values: dict[str, Any]) -> dict[str, Any]:
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}

    def sides(of: Sequence[Side]) -> list[dict[str, Any]]:
        return [finite({**asdict(s), "windows": [_window(line) for line in s.windows]}) for s in of]

    tree: list[dict[str, Any]] = []
    for row in rows:
        curves = [
            {
                "width": c.width,
                "losses": [[x, None if math.isinf(y) else y] for x, y in c.rates.items()],
                "optimum": None if c.fit is None else finite(asdict(c.fit)),
                "why_not": c.why_not,
            }
            for c in row.curves
        ]
        costs = [finite(asdict(cost)) for cost in row.costs]
        head = {"series": str(row.series), "done": row.done, "wanted": row.wanted, "remark": row.remark}
        tree.append({**head, "curves": curves, "sides": sides(row.sides), "costs": costs})
    for one in axes:
        tree.append({"axis": one.axis, "series": one.series, "width": one.width, "sides": sides(one.sides)})
    return json.dumps(tree, indent=1) + "\n"


def _window(line: Line) -> dict[str, Any]:
    half = line.half_width()
    return {
        "rates": line.rates,
        "octaves": line.slope,
        "half_width": half if math.isfinite(half) else None,
        "freedom": line.freedom,
        "positions": [[2**scale, seed, at] for (scale, seed), at in line.positions.items()],
    }


def draw_curves(rows: Sequence[Report], path: Path) -> Path | None:
    """Draws loss above each width's best against the rate, one panel per series; None without a result.

    These are the figures 1 and 2 of arXiv:2606.04048. Titles have the drifts of flank and wall.
    """
    shown = [row for row in rows if any(c.best for c in row.curves)]
    if not shown:
        return None
    from matplotlib import colormaps

    columns = 2 if len(shown) == 4 else min(len(shown), 3)
    lines = math.ceil(len(shown) / columns)
    figure = new_figure(4.6 * columns, 3.6 * lines)
    widths = sorted({c.width for row in shown for c in row.curves})
    shades = {w: colormaps["viridis"](0.85 * i / max(len(widths) - 1, 1)) for i, w in enumerate(widths)}
    rates_compare = len({row.series.optimizer for row in shown}) == 1
    panels = figure.subplots(lines, columns, squeeze=False, sharex=rates_compare).flatten()
    for axes in panels[len(shown) :]:
        axes.set_visible(False)
    for axes, row in zip(panels, shown, strict=False):
        _draw_series(axes, row, shades)
    return save_figure(figure, path, ADVICE)


def _draw_series(axes: Any, row: Report, shades: dict[int, Any]) -> None:
    tops = []
    for c in row.curves:
        if c.best is None:
            continue
        best, lowest = c.best
        xs = [x for x, y in c.rates.items() if math.isfinite(y)]
        ys = [c.rates[x] - lowest for x in xs]
        # the panel ends at the worst of the rates next to the best: losses far above say nothing about it
        near = sorted(abs(x - best) for x in xs)
        reach = near[min(4, len(near) - 1)]
        tops.append(max(y for x, y in zip(xs, ys, strict=True) if abs(x - best) <= reach))
        color, label = shades[c.width], f"d = {c.width} (shifted by {lowest:.4f})"
        axes.plot(xs, ys, color=color, marker="o", markersize=3.5, linewidth=1.4, label=label)
        for x, y, _ in c.points:
            if math.isfinite(y):
                axes.plot([x], [y - lowest], color=color, marker="_", markersize=4, alpha=0.6)
        if c.fit is not None:
            ends, level = (max(c.fit.low, min(xs)), min(c.fit.high, max(xs))), c.fit.lowest - lowest
            axes.plot(ends, [level] * 2, color=color, linewidth=3, alpha=0.35, solid_capstyle="butt")
            axes.plot([c.fit.at], [level], color=color, marker="*", markersize=11, markeredgecolor="white")
    top = max(max(tops), 1e-3)
    axes.set_ylim(-0.12 * top, 1.15 * top)
    dress(axes, row.name, size=10)
    drifts = [f"{s.name} {s.octaves:+.2f}" for s in row.sides if s.windows]
    verdict = ", ".join(drifts) or "not decided"
    rest = "" if row.done == row.wanted else f", {row.done} of {row.wanted} runs"
    axes.set_title(verdict + rest, loc="right", fontsize=8, color=GRAY)
    axes.set_xlabel("log2 of the learning rate; titles: octaves per doubling of width", fontsize=9)
    axes.set_ylabel("loss above the best, nats per token")
    axes.legend(frameon=False, fontsize=7, loc="upper center")


def draw_comparison(rows: Sequence[Compared], path: Path) -> Path | None:
    """Draws a panel per width and a row per arm: a point per seed, a bar at the mean; None for one row."""
    shown = [row for row in rows if math.isfinite(row.mean)]
    if len(shown) < 2:
        return None
    widths = sorted({row.width for row in shown})
    by_width = [[row for row in reversed(shown) if row.width == width] for width in widths]
    figure = new_figure(6.4 * len(widths), 0.5 * max(map(len, by_width)) + 1.4)
    panels = figure.subplots(1, len(widths), squeeze=False)[0]
    for axes, width, arms in zip(panels, widths, by_width, strict=True):
        for i, row in enumerate(arms):
            axes.plot(list(row.losses.values()), [i] * len(row.losses), "o", color=BLUE, alpha=0.6, ms=5)
            axes.plot([row.mean], [i], "|", color=RED, markersize=18, markeredgewidth=2)
        axes.set_yticks(range(len(arms)), [f"{row.arm}, rate 2^{row.rate:g}" for row in arms])
        axes.set_ylim(-0.6, len(arms) - 0.4)
        axes.set_xlabel("held-out loss, nats per token: a point per seed, a bar at the mean", fontsize=8)
        axes.tick_params(labelsize=8)
        dress(axes, f"width {width}", size=9, grid="x")
    return save_figure(figure, path, ADVICE)
