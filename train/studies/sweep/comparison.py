"""Series beside one another, each at its own best rate: final losses over seeds, as a table and a picture.

Arms may have different optima, and then a comparison at one rate is one of rates. With three widths or more
`report.py` says how optima move; with fewer, what counts is in the last column here: the loss at a width with
the rate that is the best of the same series at the narrowest, beside that of its own best rate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from delta_trn.train.files import disk_errors
from delta_trn.train.studies.sweep.question import Series
from delta_trn.train.studies.sweep.report import Curve, Report

Losses = Mapping[int, float]  # seed -> held-out loss, infinity where it diverged


@dataclass(frozen=True)
class Compared:
    """One series at one width.

    rate        log2 of its best rate: of the lowest mean over seeds
    at_an_end   whether that is the lowest or highest of several tried: a better one may lie beyond
    losses      there
    carried     losses at the rate that is best at the narrowest width; None there, and where it was not tried
    """

    arm: str
    width: int
    parameters: int
    rate: float
    at_an_end: bool
    losses: Losses
    carried: Losses | None

    @property
    def mean(self) -> float:
        return _mean(self.losses)

    @property
    def deviation(self) -> float | None:
        """Standard deviation over seeds, None of one seed or where a run diverged."""
        return _deviation(list(self.losses.values()))

    def above(self, other: Compared) -> tuple[float, float | None] | None:
        """Mean difference of losses with equal seeds, which share data and initial values, and its error."""
        shared = sorted(self.losses.keys() & other.losses.keys())
        differences = [self.losses[seed] - other.losses[seed] for seed in shared]
        if not differences or not all(map(math.isfinite, differences)):
            return None
        spread = _deviation(differences)
        error = None if spread is None else spread / math.sqrt(len(shared))
        return sum(differences) / len(differences), error


def compared(found: Sequence[Report]) -> list[Compared]:
    """All of them by width, then by mean loss. Empty unless there are several series."""
    if len(found) < 2:
        return []
    names = _names([report.series for report in found])
    rows = []
    for report in found:
        curves = [c for c in report.curves if c.rates]
        first = _best_rate(curves[0]) if curves else None
        for c in curves:
            best, tried = _best_rate(c), sorted(c.rates)
            carried = _at(c, first) if c.width > curves[0].width and first in c.rates else None
            rows.append(
                Compared(
                    arm=names[report.series],
                    width=c.width,
                    parameters=c.parameters or 0,
                    rate=best,
                    at_an_end=len(tried) > 1 and best in (tried[0], tried[-1]),
                    losses=_at(c, best),
                    carried=carried,
                )
            )
    return sorted(rows, key=lambda row: (row.width, row.mean))


def _best_rate(c: Curve) -> float:
    return min(c.rates, key=lambda x: c.rates[x])


def _at(c: Curve, rate: float | None) -> Losses:
    return {seed: loss for x, loss, seed in c.points if x == rate}


def _names(series: Sequence[Series]) -> dict[Series, str]:
    """Their arm, and of the rest what tells them apart."""
    several = len({s.optimizer for s in series}) > 1
    by_name = len({(s.arm, s.optimizer) for s in series}) < len(series)
    found = {}
    for s in series:
        parts = (s.arm, s.parametrization if by_name or not s.arm else "", s.optimizer if several else "")
        found[s] = " ".join(part for part in parts if part)
    return found


def table(rows: Sequence[Compared]) -> str:
    """Markdown: one row a series and width."""
    lines = [
        "| width | arm | parameters | best rate | seeds | loss | standard deviation | above the best arm |"
        " at the narrowest's best rate |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        best = next(other for other in rows if other.width == row.width)
        rate = f"2^{row.rate:g}" + (", an end" if row.at_an_end else "")
        spread = "-" if row.deviation is None else f"{row.deviation:.4f}"
        above = "-" if row is best or (d := row.above(best)) is None else _with_error(*d)
        carried = "-" if row.carried is None else f"{_mean(row.carried):.4f}"
        lines.append(
            f"| {row.width} | {row.arm} | {row.parameters:,} | {rate} | {len(row.losses)} | {row.mean:.4f} |"
            f" {spread} | {above} | {carried} |"
        )
    return "\n".join(lines)


def _with_error(x: float, error: float | None) -> str:
    return f"{x:+.4f}" if error is None else f"{x:+.4f} ± {error:.4f}"


def draw(rows: Sequence[Compared], path: Path) -> Path | None:
    """A panel a width, a row an arm: a point a seed, a bar at the mean; None with nothing to compare."""
    shown = [row for row in rows if math.isfinite(row.mean)]
    if len(shown) < 2:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    widths = sorted({row.width for row in shown})
    most = max(sum(row.width == width for row in shown) for width in widths)
    figure = Figure(figsize=(6.4 * len(widths), 0.5 * most + 1.4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, width in zip(figure.subplots(1, len(widths), squeeze=False)[0], widths, strict=True):
        _panel(axes, [row for row in shown if row.width == width], width)
    beside = path.with_name(f".{path.name}")
    with disk_errors(path, "the results are whole: free some space and run the same command again"):
        figure.savefig(beside, format="png")
        beside.replace(path)
    return path


def _panel(axes: Any, rows: Sequence[Compared], width: int) -> None:
    for i, row in enumerate(reversed(rows)):
        axes.plot(list(row.losses.values()), [i] * len(row.losses), "o", color="#3b6fb6", alpha=0.6, ms=5)
        axes.plot([row.mean], [i], "|", color="#c8553d", markersize=18, markeredgewidth=2)
    axes.set_yticks(range(len(rows)), [f"{row.arm}, rate 2^{row.rate:g}" for row in reversed(rows)])
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.set_title(f"width {width}", loc="left", fontsize=9, fontweight="bold")
    axes.set_xlabel("held-out loss, nats a token: a point a seed, a bar at the mean", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(axis="x", color="#e5e7eb", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _mean(losses: Losses) -> float:
    return sum(losses.values()) / len(losses)


def _deviation(values: Sequence[float]) -> float | None:
    n, mean = len(values), sum(values) / max(len(values), 1)
    if n < 2 or not math.isfinite(mean):
        return None
    return math.sqrt(sum((x - mean) ** 2 for x in values) / (n - 1))
