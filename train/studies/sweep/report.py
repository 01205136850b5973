"""What a sweep's results say: what the narrowest width's rate costs at the others, and how far
curves move.

It is read from the lines alone, which say where they belong. The picture is as figures 1 and 2 of
arXiv:2606.04048, loss above each width's best against the rate, with the loss at the kept rate
against the width beside them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from delta_trn.train.files import write_file
from delta_trn.train.studies.sweep.curves import Curve, Losses
from delta_trn.train.studies.sweep.regret import (
    LEVEL,
    STRATEGIES,
    Paid,
    Regret,
    best_rate_drift,
    kept_rate,
    regrets,
    scatter_of,
)
from delta_trn.train.studies.sweep.results import ANY, SAFE, Result, Results, place_of
from delta_trn.train.studies.sweep.sides import Side, side
from delta_trn.train.watch.figure import BLUE, GRAY, RED, dress, new_figure, save_figure

# Octaves beside the narrowest width's best rate at which the table says what that costs.
BESIDE = (-1.0, 0.0, 1.0)
# The picture ends at so many nats above the best: rates that lose more say nothing about it.
SHOWN = 0.2
# Octaves that the picture shows on either side of the rate that is kept.
AROUND = 2.0
BEYOND = "beyond the rates tried"
TITLES = {"sp": "standard,", "mup": "muP,", "adamw": "AdamW", "sgd": "SGD", "muon": "Muon"}


@dataclass(frozen=True)
class Report:
    """The curves of several widths that belong together, what keeping a rate costs,
    and how sides move.
    """

    name: str
    curves: Sequence[Curve]
    sides: Sequence[Side]
    regrets: Sequence[Regret] = ()


def reports(lines: Iterable[Result]) -> list[Report]:
    """Reports every series: an arm, a parametrization and an optimizer.

    A result of the base width, where all parametrizations are one, belongs to every series of its
    arm. Results of one place, as two folders may have them, are joined to their mean.
    """
    groups: dict[tuple[str, str, str], list[Result]] = defaultdict(list)
    for line in lines:
        groups[line["arm"], line["parametrization"], line["optimizer"]].append(line)
    rows = []
    for (arm, table, optimizer), own in groups.items():
        shared = groups.get((arm, ANY, optimizer), [])
        if table == ANY and any(key[::2] == (arm, optimizer) and key[1] != ANY for key in groups):
            continue
        of_series = own if table == ANY else [*shared, *own]
        # a rate of two grids is one, rounded in either
        rates = {place_of(line)[4]: math.log2(line["lr"]) for line in sorted(of_series, key=_rate)}
        by_width: dict[int, dict[tuple[float, int], list[float]]] = defaultdict(
            lambda: defaultdict(list)
        )
        parameters: dict[int, int] = {}
        for line in of_series:
            place = rates[place_of(line)[4]], line["seed"]
            loss = math.inf if line["loss"] is None else line["loss"]
            by_width[line["width"]][place].append(loss)
            parameters[line["width"]] = line.get("parameters", 0)
        curves = [
            Curve(
                width,
                sorted((x, math.fsum(ys) / len(ys), seed) for (x, seed), ys in runs.items()),
                parameters[width],
            )
            for width, runs in sorted(by_width.items())
        ]
        # an arm may be a parametrization and carry its name
        name = dict.fromkeys((arm, "" if table == ANY else table, optimizer))
        several = len(curves) > 1
        moved = best_rate_drift(curves) if several else None
        sides = [Side("best rate", *moved)] if moved else []
        sides += drifts(curves) if several else ()
        lost = regrets(curves) if several else ()
        rows.append(Report(" ".join(filter(None, name)), curves, sides, lost))
    return sorted(rows, key=lambda row: row.name)


def _rate(line: Result) -> float:
    return -line["lr"]


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

    Returns the mean nats by which they lie above others, and for several seeds its standard error;
    "-" without a seed of both.
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


def regret_lines(rows: Sequence[Report]) -> list[str]:
    """Returns the lines of a table of what it costs to choose at the narrowest width;
    none without seeds.
    """
    lines = [
        "| series | width | rate kept, log2 | nats lost by it | 95%, at that rate | 95%, with its"
        " choice | half of the seeds choose, half pay | by a parabola | "
        + " | ".join(f"chosen by one seed, {name}: mean (worst)" for name in STRATEGIES)
        + " |",
        "|---" * (8 + len(STRATEGIES)) + "|",
    ]
    for report in rows:
        for x in report.regrets:
            beyond = x.direct is None
            cells = [
                f"{x.kept:.2f}",
                BEYOND if beyond else _nats(x.direct) + _error(x.error),
                _interval(x.at_rate),
                _interval(x.with_choice, "" if beyond else BEYOND),
                _nats(x.split),
                _by_parabola(x),
                *map(_choices, x.paid.values()),
            ]
            lines.append(f"| {report.name} | {x.width} | {' | '.join(cells)} |")
    return [*lines, ""] if any(report.regrets for report in rows) else []


def _nats(x: float | None) -> str:
    # no "-0.000": it rounds to nothing
    return "-" if x is None else f"{round(x, 3) + 0.0:.3f}"


def _error(x: float | None) -> str:
    return "" if x is None else f" ± {x:.3f}"


def _interval(x: tuple[float, float] | None, otherwise: str = "") -> str:
    return otherwise or "-" if x is None else f"{_nats(x[0])} to {_nats(x[1])}"


def _by_parabola(x: Regret) -> str:
    if x.misfit is None:
        return "no minimum within"
    if x.misfit < LEVEL:
        p = f"= {x.misfit:.3f}" if x.misfit >= 0.001 else "< 0.001"
        return f"misses the losses, p {p}"
    return _nats(x.parabola) if x.parabola is not None else "kept rate beyond its rates"


def _choices(x: Paid) -> str:
    if x.mean is None or x.worst is None:
        return f"{BEYOND}: {x.beyond} of {x.choices}" if x.beyond else "-"
    known = f"{_nats(x.mean)} ({_nats(x.worst)})"
    return f"{known}; {BEYOND}: {x.beyond} of {x.choices}" if x.beyond else known


def table(rows: Sequence[Report]) -> str:
    """Formats regrets, curves, costs and sides of every series as Markdown.

    Series may have different optima, so each is compared at its own best rate with the best of its
    width.
    """
    lines = regret_lines(rows)
    lines += [
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
            "| series | side | octaves per doubling of width | 95%, runs, seeds and windows | verdict |",
            "|---|---|---|---|---|",
        ]
    for report in rows:
        for s in report.sides:
            known = math.isfinite(s.low) and math.isfinite(s.high)
            octaves = "-" if math.isnan(s.octaves) else f"{s.octaves:+.3f}"
            interval = f"{s.low:+.2f} to {s.high:+.2f}" if known else "-"
            lines.append(f"| {report.name} | {s.name} | {octaves} | {interval} | {s.verdict} |")
    return "\n".join(lines)


def draw_curves(rows: Sequence[Report], path: Path) -> Path:
    """Draws the loss of every width at the kept rate and at its own best one, and, in a panel per
    series, what rates lose in octaves from the kept rate.

    Crosses mark what the kept rate loses. Widths are left out of the first panel if there is one.
    """
    from matplotlib import colormaps

    widths = sorted({c.width for row in rows for c in row.curves})
    several = len(widths) > 1
    figure = new_figure(0.6 + 3.6 * (len(rows) + several), 3.7)
    panels = list(figure.subplots(1, len(rows) + several, squeeze=False)[0])
    if several:
        _draw_widths(panels.pop(0), rows, widths)
    color = {
        w: colormaps["viridis"](0.85 * i / max(len(widths) - 1, 1)) for i, w in enumerate(widths)
    }
    named: dict[str, Any] = {f"width {width}": None for width in widths}  # the legend of all panels
    for axes, row in zip(panels, rows, strict=True):
        kept = _kept(row)
        for c in row.curves:
            finite = {x: y for x, y in c.rates.items() if math.isfinite(y)}
            if not finite or kept is None:
                continue
            octaves = [x - kept for x in finite]
            lost = [y - c.lowest for y in finite.values()]
            (named[f"width {c.width}"],) = axes.plot(
                octaves, lost, color=color[c.width], marker=".", alpha=0.8
            )
            if (y := _loss_at(finite, kept)) is not None:
                axes.plot([0], [y - c.lowest], "x", color=color[c.width], ms=8, mew=2, zorder=3)
        axes.axvline(0, color=GRAY, ls="--", lw=1, zorder=0)
        axes.set_xlim(-AROUND, AROUND)
        axes.set_ylim(-0.03 * SHOWN, SHOWN)
        dress(axes, _title(row), size=10)
        axes.set_xlabel(f"octaves from the rate that width {row.curves[0].width} chose", fontsize=8)
        axes.tick_params(labelsize=8)
    panels[0].set_ylabel("nats above the width's best mean loss", fontsize=8)
    known = {name: drawn for name, drawn in named.items() if drawn is not None}
    figure.legend(
        known.values(), known, frameon=False, fontsize=8, ncols=6, loc="outside lower center"
    )
    return save_figure(figure, path, SAFE)


def _draw_widths(axes: Any, rows: Sequence[Report], widths: Sequence[int]) -> None:
    """Draws the loss against the width: a series' solid line at the kept rate, its dashed one at
    each width's best rate.
    """
    palette = (BLUE, RED, GRAY, "#4d9a5b", "#8e6bb0")
    for i, row in enumerate(rows):
        kept, color = _kept(row), palette[i % len(palette)]
        best = {c.width: c.lowest for c in row.curves if math.isfinite(c.lowest)}
        at_kept = {}
        for c in row.curves:
            finite = {x: y for x, y in c.rates.items() if math.isfinite(y)}
            y = None if kept is None else _loss_at(finite, kept)
            if y is not None:
                at_kept[c.width] = y
        axes.plot([*at_kept], [*at_kept.values()], color=color, marker="o", ms=4, label=_title(row))
        axes.plot([*best], [*best.values()], color=color, ls="--", lw=1, marker=".")
    axes.plot([], [], color="black", marker="o", ms=4, label=f"the rate of width {widths[0]}, kept")
    axes.plot([], [], color="black", ls="--", lw=1, marker=".", label="each width's best rate")
    axes.set_xscale("log", base=2)
    axes.set_xticks(widths, [str(width) for width in widths])
    axes.minorticks_off()
    axes.set_xlabel("width", fontsize=8)
    axes.set_ylabel("loss, nats per token", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.legend(frameon=False, fontsize=7)
    dress(axes, "loss against width", size=10)


def _kept(row: Report) -> float | None:
    """Returns log2 of the rate that is kept; None if all runs of the narrowest width diverged."""
    narrow = row.curves[0]
    return None if narrow.best is None else kept_rate(narrow, scatter_of(row.curves))


def _loss_at(rates: Mapping[float, float], rate: float) -> float | None:
    """Returns the mean loss on the straight line between the rates tried beside one; None beyond
    them.
    """
    xs = sorted(rates)
    if not xs or not xs[0] <= rate <= xs[-1]:
        return None
    return float(np.interp(rate, xs, [rates[x] for x in xs]))


def _title(row: Report) -> str:
    return " ".join(TITLES.get(word, word) for word in row.name.split())


def write_report(folder: Path, *others: Path) -> str:
    """Writes report.md and sweep.png into a sweep's folder. Returns the table and where they lie.

    With others, whose results count as its own, the picture shows them all, and report.md is left
    alone.
    """
    rows = reports(line for each in (folder, *others) for line in Results(each).read().values())
    text = table(rows)
    if not others:
        write_file(folder / "report.md", text + "\n", SAFE)
    picture = draw_curves(rows, folder / "sweep.png") if rows else "-"
    return f"{text}\n\nresults  {Results(folder).path}   picture  {picture}"
