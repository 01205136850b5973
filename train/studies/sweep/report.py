"""What a sweep's results say: what the narrowest width's rate costs at the others, and how far
curves move.

It is read from the lines alone, which say where they belong. The picture is as figures 1 and 2 of
arXiv:2606.04048: loss above each width's best against the rate.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from delta_trn.train.files import write_file
from delta_trn.train.studies.sweep.curves import Curve, Losses
from delta_trn.train.studies.sweep.regret import STRATEGIES, Regret, regrets
from delta_trn.train.studies.sweep.results import ANY, SAFE, Result, Results, place_of
from delta_trn.train.studies.sweep.sides import Side, side
from delta_trn.train.watch.figure import GRAY, dress, new_figure, save_figure

# Octaves beside the narrowest width's best rate at which the table says what that costs.
BESIDE = (-1.0, 0.0, 1.0)
# The picture ends at so many nats above the best: rates that lose more say nothing about it.
SHOWN = 0.4
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
    arm.
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
        # a rate of two grids is one, as the first of them rounded it
        rates = {place_of(line)[4]: math.log2(line["lr"]) for line in reversed(of_series)}
        by_width: dict[int, list[Result]] = defaultdict(list)
        for line in of_series:
            by_width[line["width"]].append(line)
        curves = []
        for width, found in sorted(by_width.items()):
            losses = [math.inf if line["loss"] is None else line["loss"] for line in found]
            points = [
                (rates[place_of(x)[4]], y, x["seed"]) for x, y in zip(found, losses, strict=True)
            ]
            curves.append(Curve(width, sorted(points), found[0].get("parameters", 0)))
        # an arm may be a parametrization and carry its name
        name = dict.fromkeys((arm, "" if table == ANY else table, optimizer))
        several = len(curves) > 1
        sides, lost = (drifts(curves), regrets(curves)) if several else ((), ())
        rows.append(Report(" ".join(filter(None, name)), curves, sides, lost))
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
        "| series | width | nats lost by the narrowest's fitted rate | 95% | "
        + " | ".join(f"chosen by one seed, {name}: mean (worst)" for name in STRATEGIES)
        + " |",
        "|---|---|---|---|" + "---|" * len(STRATEGIES),
    ]
    for report in rows:
        for x in report.regrets:
            cells = [f"{mean:.3f} ({worst:.3f})" for mean, worst in x.paid.values()]
            fit = f"{x.fit:.3f} | {x.low:.3f} to {x.high:.3f}"
            lines.append(f"| {report.name} | {x.width} | {fit} | {' | '.join(cells)} |")
    return [*lines, ""] if any(report.regrets for report in rows) else []


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
            "| series | side | octaves per doubling of width | 95%, seeds and windows | verdict |",
            "|---|---|---|---|---|",
        ]
    for report in rows:
        for s in report.sides:
            interval = f"{s.octaves:+.3f} | {s.low:+.2f} to {s.high:+.2f}"
            lines.append(f"| {report.name} | {s.name} | {interval} | {s.verdict} |")
    return "\n".join(lines)


def draw_curves(rows: Sequence[Report], path: Path) -> Path:
    """Draws one panel per series on common axes: mean losses,
    and what the narrowest's best rate loses.
    """
    from matplotlib import colormaps

    figure = new_figure(0.6 + 4.4 * len(rows), 3.9)
    widths = sorted({c.width for row in rows for c in row.curves})
    color = {
        w: colormaps["viridis"](0.85 * i / max(len(widths) - 1, 1)) for i, w in enumerate(widths)
    }
    named: dict[str, Any] = {f"width {width}": None for width in widths}  # the legend of all panels
    panels = figure.subplots(1, len(rows), squeeze=False, sharex=True, sharey=True)[0]
    for axes, row in zip(panels, rows, strict=True):
        narrow = row.curves[0].width
        for c in row.curves:
            xs = [x for x, y in c.rates.items() if math.isfinite(y)]
            ys = [c.rates[x] - c.floor for x in xs]
            (named[f"width {c.width}"],) = axes.plot(
                xs, ys, color=color[c.width], marker=".", alpha=0.7
            )
        known = [x for x in row.regrets if math.isfinite(x.fit)]
        for i, lost in enumerate(known):
            if lost.width == narrow:
                named[f"best rate of width {narrow}"] = axes.axvline(
                    lost.rate, color=GRAY, ls="--", lw=1
                )
                continue
            ends = [[max(lost.fit - lost.low, 0)], [max(lost.high - lost.fit, 0)]]
            at = lost.rate + 0.15 * (i - len(known) / 2)  # of several widths, one beside another
            style = {
                "fmt": "D",
                "color": color[lost.width],
                "markeredgecolor": "black",
                "ecolor": "black",
            }
            bar = axes.errorbar(
                at, lost.fit, ends, markersize=8, elinewidth=1, capsize=3, zorder=3, **style
            )
            named["what that rate loses at other widths, 95%"] = bar
        # of many widths the widest, which have room beside the panel's name
        said = ", ".join(f"{x.fit:.3f} at {x.width}" for x in known[-3:] if x.width != narrow)
        axes.set_title(f"nats lost: {said}" if said else "", loc="right", fontsize=8, color=GRAY)
        axes.set_ylim(-0.1 * SHOWN, SHOWN)
        dress(axes, " ".join(TITLES.get(word, word) for word in row.name.split()), size=10)
        axes.set_xlabel("log2 of the learning rate")
    figure.axes[0].set_ylabel("loss above the best, nats per token")
    figure.legend(
        named.values(), named, frameon=False, fontsize=8, ncols=4, loc="outside lower center"
    )
    return save_figure(figure, path, SAFE)


def write_report(folder: Path, *others: Path) -> str:
    """Writes report.md and sweep.png into a sweep's folder. Returns the table and where they lie.

    With others, whose results count as its own, the picture shows them all, and report.md is left
    alone.
    """
    lines = {
        key: line for each in (folder, *others)[::-1] for key, line in Results(each).read().items()
    }
    rows = reports(lines.values())
    text = table(rows)
    if not others:
        write_file(folder / "report.md", text + "\n", SAFE)
    picture = draw_curves(rows, folder / "sweep.png") if rows else "-"
    return f"{text}\n\nresults  {Results(folder).path}   picture  {picture}"
