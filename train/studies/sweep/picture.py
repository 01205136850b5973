"""Writes a sweep's table and its picture: loss above each width's best against the rate.

The picture is as figures 1 and 2 of arXiv:2606.04048.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from delta_trn.train.files import write_file
from delta_trn.train.studies.sweep.report import Report, reports, table
from delta_trn.train.studies.sweep.results import Results
from delta_trn.train.watch.figure import GRAY, dress, new_figure, save_figure

ADVICE = "the results are whole: free some space and run the same command again"


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
    panels = figure.subplots(lines, columns, squeeze=False).flatten()
    for axes in panels[len(shown) :]:
        axes.set_visible(False)
    for axes, row in zip(panels, shown, strict=False):
        _draw_series(axes, row, shades)
    return save_figure(figure, path, ADVICE)


def _draw_series(axes: Any, row: Report, shades: Mapping[int, Any]) -> None:
    top = 1e-3
    for c in row.curves:
        if c.best is None:
            continue
        lowest = c.lowest
        xs = [x for x, y in c.rates.items() if math.isfinite(y)]
        ys = [c.rates[x] - lowest for x in xs]
        # the panel ends at the worst of the rates next to the best: losses far above say nothing about it
        nearest = sorted(zip(xs, ys, strict=True), key=lambda point: abs(point[0] - (c.best or 0)))[:5]
        top = max(top, *(y for _, y in nearest))
        label = f"d = {c.width} (shifted by {lowest:.4f})"
        axes.plot(xs, ys, color=shades[c.width], marker="o", markersize=3.5, linewidth=1.4, label=label)
        for x, y, _ in c.points:
            if math.isfinite(y):
                axes.plot([x], [y - lowest], color=shades[c.width], marker="_", markersize=4, alpha=0.6)
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
    write_file(folder / "report.md", text + "\n", ADVICE)
    picture = draw_curves(rows, folder / "sweep.png")
    return f"{text}\n\nresults  {results.path}   picture  {picture or '-'}"
