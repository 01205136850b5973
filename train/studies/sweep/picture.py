"""Loss above each width's best, against the learning rate: the figures 1 and 2 of arXiv:2606.04048."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from delta_trn.train.files import disk_errors
from delta_trn.train.studies.sweep.report import Report

GRAY = "#6b7280"


def draw(found: Sequence[Report], path: Path) -> Path | None:
    """One panel a series, one line a width; None if there is nothing to draw yet."""
    shown = [report for report in found if any(c.best for c in report.curves)]
    if not shown:
        return None
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = 2 if len(shown) == 4 else min(len(shown), 3)
    rows = math.ceil(len(shown) / columns)
    figure = Figure(figsize=(4.6 * columns, 3.6 * rows), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    widths = sorted({c.width for report in shown for c in report.curves})
    shades = {w: colormaps["viridis"](0.85 * i / max(len(widths) - 1, 1)) for i, w in enumerate(widths)}
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes in panels[len(shown) :]:
        axes.set_visible(False)
    for axes, report in zip(panels, shown, strict=False):
        _panel(axes, report, shades)
    beside = path.with_name(f".{path.name}")
    with disk_errors(path, "the results are whole: free some space and run the same command again"):
        figure.savefig(beside, format="png")
        beside.replace(path)
    return path


def _panel(axes: Any, report: Report, shades: dict[int, Any]) -> None:
    tops = []
    for c in report.curves:
        if c.best is None:
            continue
        lowest = c.best[1]
        xs = [x for x, y in c.rates.items() if math.isfinite(y)]
        ys = [c.rates[x] - lowest for x in xs]
        # the worst of the rates next to the best: what lies far above them says nothing about the optimum
        near = sorted(abs(x - c.best[0]) for x in xs)
        reach = near[min(4, len(near) - 1)]
        tops.append(max(y for x, y in zip(xs, ys, strict=True) if abs(x - c.best[0]) <= reach))
        color = shades[c.width]
        label = f"d = {c.width} (shifted by {lowest:.4f})"
        axes.plot(xs, ys, color=color, marker="o", markersize=3.5, linewidth=1.4, label=label)
        for x, y, _ in c.points:
            if math.isfinite(y):
                axes.plot([x], [y - lowest], color=color, marker="_", markersize=4, alpha=0.6)
        if c.fit is not None:
            low, high = max(c.fit.low, min(xs)), min(c.fit.high, max(xs))
            level = c.fit.lowest - lowest
            axes.plot(
                [low, high], [level, level], color=color, linewidth=3, alpha=0.35, solid_capstyle="butt"
            )
            axes.plot([c.fit.at], [level], color=color, marker="*", markersize=11, markeredgecolor="white")
    top = max(max(tops), 1e-3)
    axes.set_ylim(-0.12 * top, 1.15 * top)
    axes.set_title(str(report.series), loc="left", fontsize=10, fontweight="bold")
    t = report.transfer
    said = "not decided" if t is None else f"{t.octaves:+.2f} ± {t.stderr:.2f} octaves per doubling"
    rest = "" if report.done == report.wanted else f"   {report.done} of {report.wanted} runs"
    axes.set_title(said + rest, loc="right", fontsize=8, color=GRAY)
    axes.set_xlabel("log2 of the learning rate")
    axes.set_ylabel("loss above the best, nats a token")
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=7, loc="upper center")
