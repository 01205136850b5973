"""Compares series, each at its own best rate: final losses over seeds.

Arms may have different optima, so a comparison at one rate would compare rates. With three widths or more,
`report.py` says how optima move. With fewer, the last column of the table does: the loss at a width with the
rate that is best for the same series at the narrowest width, beside the loss at its own best rate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from delta_trn.train.studies.sweep.question import Series
from delta_trn.train.studies.sweep.report import Curve, Report

Losses = Mapping[int, float]  # seed -> held-out loss, infinity where it diverged


@dataclass(frozen=True)
class Compared:
    """One series at one width.

    rate        log2 of its best rate, the one with the lowest mean over seeds
    at_an_end   whether that is the lowest or highest of several: a better one may lie beyond
    losses      at that rate
    carried     losses at the rate that is best at the narrowest width; None there, or if it was not tried
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
        """Returns the standard deviation over seeds; None for one seed, or where a run diverged."""
        return _deviation(list(self.losses.values()))

    def above(self, other: Compared) -> tuple[float, float | None] | None:
        """Returns the mean difference over shared seeds (same data, same initial values) and its error."""
        shared = sorted(self.losses.keys() & other.losses.keys())
        differences = [self.losses[seed] - other.losses[seed] for seed in shared]
        if not differences or not all(map(math.isfinite, differences)):
            return None
        spread = _deviation(differences)
        error = None if spread is None else spread / math.sqrt(len(shared))
        return sum(differences) / len(differences), error


def compare(reports: Sequence[Report]) -> list[Compared]:
    """Compares all series, by width and then by mean loss. Empty unless there are several."""
    if len(reports) < 2:
        return []
    names = _names([report.series for report in reports])
    rows = []
    for report in reports:
        curves = [c for c in report.curves if c.rates]
        first = _best_rate(curves[0]) if curves else None
        for c in curves:
            best, tried = _best_rate(c), sorted(c.rates)
            carried = _losses_at(c, first) if c.width > curves[0].width and first in c.rates else None
            rows.append(
                Compared(
                    arm=names[report.series],
                    width=c.width,
                    parameters=c.parameters or 0,
                    rate=best,
                    at_an_end=len(tried) > 1 and best in (tried[0], tried[-1]),
                    losses=_losses_at(c, best),
                    carried=carried,
                )
            )
    return sorted(rows, key=lambda row: (row.width, row.mean))


def _best_rate(c: Curve) -> float:
    return min(c.rates, key=lambda x: c.rates[x])


def _losses_at(c: Curve, rate: float | None) -> Losses:
    return {seed: loss for x, loss, seed in c.points if x == rate}


def _names(series: Sequence[Series]) -> dict[Series, str]:
    """Names each series by its arm, and by its parametrization and optimizer where those differ."""
    several = len({s.optimizer for s in series}) > 1
    by_name = len({(s.arm, s.optimizer) for s in series}) < len(series)
    names = {}
    for s in series:
        parts = (s.arm, s.parametrization if by_name or not s.arm else "", s.optimizer if several else "")
        names[s] = " ".join(part for part in parts if part)
    return names


def table(rows: Sequence[Compared]) -> str:
    """Formats Markdown, one row per series and width."""
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


def _mean(losses: Losses) -> float:
    return sum(losses.values()) / len(losses)


def _deviation(values: Sequence[float]) -> float | None:
    n, mean = len(values), sum(values) / max(len(values), 1)
    if n < 2 or not math.isfinite(mean):
        return None
    return math.sqrt(sum((x - mean) ** 2 for x in values) / (n - 1))
