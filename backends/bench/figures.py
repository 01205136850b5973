"""Table and chart of what `backends.bench` measured, from its files; what was not run says so.

    python -m backends.bench table [FILE ...]       Markdown, for the README
    python -m backends.bench chart OUT [FILE ...]   the same as a picture

A cell is a peer's time over ours, the median over the rounds of a run; of several runs, the smallest and the
largest. Without files: every results/*/data.jsonl.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from delta_trn.backends.machine import ROOT
from delta_trn.backends.parity.__main__ import NOT_RUN
from delta_trn.backends.parity.rule_cases import CASES, Case

# the tag of what is timed on a GPU, and of what also is on a CPU
TAGS = {"cuda": "bench", "cpu": "bench-cpu"}
PASSES = ("forward", "backward", "forward+backward")


def passes(case: Case) -> tuple[str, ...]:
    """What is timed of a case."""
    return ("step",) if "step" in case.tags else PASSES


@dataclass(frozen=True)
class Place:
    """A column: a backend of ours beside a peer, on a kind of device."""

    backend: str
    peer: str
    device_type: str

    def takes(self, case: Case) -> bool:
        """Whether the case is there to be timed here: on a CPU only the small ones are."""
        return TAGS[self.device_type] in case.tags


PLACES = (Place("chunked", "hf", "cpu"), Place("triton", "fla", "cuda"))


def read(files: Sequence[Path] = ()) -> list[dict[str, Any]]:
    """The lines of bench's files, in order; lines of other commands are left out."""
    files = files or sorted((ROOT / "results").glob("*/data.jsonl"))
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return [row for row in rows if "pass" in row and "ms" in row]


def ratios(rows: Sequence[Mapping[str, Any]], place: Place, case: Case, phase: str) -> list[float]:
    """Of every run, in order."""
    return [
        row["ratio"]["p50"]
        for row in rows
        if (row["case"], row["pass"], row["backend"], row["device_type"])
        == (case.name, phase, place.peer, place.device_type)
        and row["ratio"] is not None
    ]


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line a case, one column a place."""
    heads = [f"`{place.backend}`, {place.peer} over ours: {_machine(rows, place)}" for place in PLACES]
    lines = ["| shape | " + " | ".join(heads) + " |", "|---" * (1 + len(PLACES)) + "|"]
    for case in CASES:
        if TAGS["cuda"] in case.tags:
            cells = [_cell(rows, place, case) for place in PLACES]
            lines.append(f"| {case} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _machine(rows: Sequence[Mapping[str, Any]], place: Place) -> str:
    here = [row for row in rows if (row["backend"], row["device_type"]) == (place.backend, place.device_type)]
    if not here:
        return f"{place.device_type}, {NOT_RUN}"
    threads = f", {here[-1]['threads']} threads" if place.device_type == "cpu" else ""
    return f"{here[-1]['device']}{threads}"


def _cell(rows: Sequence[Mapping[str, Any]], place: Place, case: Case) -> str:
    if not place.takes(case):
        return "-"
    found = [(phase, ratios(rows, place, case, phase)) for phase in passes(case)]
    words = [f"{phase} {_span(values)}" for phase, values in found if values]
    return ", ".join(words) or NOT_RUN


def _span(values: Sequence[float]) -> str:
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Forward plus backward, or a step: a bar a case, a mark a run; a word where there is none."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [(place, case) for place in PLACES for case in CASES if place.takes(case)]
    figure, axes = pyplot.subplots(figsize=(9, 0.34 * len(shown) + 1.2))
    for y, (place, case) in enumerate(shown):
        values = ratios(rows, place, case, passes(case)[-1])
        color = f"C{PLACES.index(place)}"
        if values:
            axes.barh(y, sum(values) / len(values), color=color, alpha=0.7)
            axes.plot(values, [y] * len(values), "|", color="black", markersize=9)
        else:
            axes.text(0.05, y, NOT_RUN, va="center", color="gray", fontsize=8)
    axes.set_yticks(range(len(shown)), [f"{case} ({place.backend})" for place, case in shown], fontsize=8)
    axes.axvline(1.0, color="gray", linewidth=0.8)
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.set_xlabel("forward plus backward, or a step: peer's time over ours (hf on CPU, fla on GPU)")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
