"""Arms at one learning rate beside one another: final losses over seeds, as a table and a picture."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..disk import refusals


@dataclass(frozen=True)
class Compared:
    """One arm. `losses` on held-out text, one a seed; a diverged one is infinity."""

    arm: str
    parameters: int
    losses: tuple[float, ...]

    @property
    def mean(self) -> float:
        return sum(self.losses) / len(self.losses)

    @property
    def deviation(self) -> float | None:
        """Standard deviation over seeds, None of one seed or where a run diverged."""
        n = len(self.losses)
        if n < 2 or not math.isfinite(self.mean):
            return None
        return math.sqrt(sum((x - self.mean) ** 2 for x in self.losses) / (n - 1))


def compared(results: Mapping[str, Mapping[str, Any]]) -> list[Compared]:
    """The arms, in order of mean loss. Empty unless there are several, at one width and one learning rate."""
    if len({(r["width"], r["lr"], r["optimizer"]) for r in results.values()}) != 1:
        return []
    found: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for result in results.values():
        found[result["arm"]].append(result)
    if len(found) < 2:
        return []
    arms = [
        Compared(
            arm,
            rows[0]["parameters"],
            tuple(
                math.inf if r["loss"] is None else r["loss"] for r in sorted(rows, key=lambda r: r["seed"])
            ),
        )
        for arm, rows in found.items()
    ]
    return sorted(arms, key=lambda arm: arm.mean)


def table(arms: Sequence[Compared]) -> str:
    """Markdown: one row an arm."""
    lines = ["| arm | parameters | seeds | loss | standard deviation |", "|---|---|---|---|---|"]
    for arm in arms:
        spread = "-" if arm.deviation is None else f"{arm.deviation:.4f}"
        lines.append(f"| {arm.arm} | {arm.parameters:,} | {len(arm.losses)} | {arm.mean:.4f} | {spread} |")
    return "\n".join(lines)


def draw(arms: Sequence[Compared], path: Path) -> Path | None:
    """A point a seed and a bar at the mean; None if there is nothing finite to compare."""
    shown = [arm for arm in arms if math.isfinite(arm.mean)]
    if len(shown) < 2:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 0.5 * len(shown) + 1.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for i, arm in enumerate(reversed(shown)):
        axes.plot(arm.losses, [i] * len(arm.losses), "o", color="#3b6fb6", alpha=0.6, markersize=5)
        axes.plot([arm.mean], [i], "|", color="#c8553d", markersize=18, markeredgewidth=2)
    axes.set_yticks(range(len(shown)), [arm.arm for arm in reversed(shown)])
    axes.set_ylim(-0.6, len(shown) - 0.4)
    axes.set_xlabel("held-out loss, nats a token: a point a seed, a bar at the mean")
    axes.grid(axis="x", color="#e5e7eb", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    beside = path.with_name(f".{path.name}")
    with refusals(path, "the results are whole: free some space and run the same command again"):
        figure.savefig(beside, format="png")
        beside.replace(path)
    return path
