"""Makes the table of what `backends.bench` measured, from its files.

    python -m backends.bench table [FILE ...]

A cell is a peer's time over ours, the median over the rounds of a run; with several runs, the smallest and
the largest. In brackets: the floor as a share of our time. Lines of a file whose name starts with `before`
are of an older state of the code. They are measured against the floors of the other lines, since a floor
belongs to a case and a machine. What was not run is named. Without files: every results/*/data.jsonl and
results/*/before.jsonl.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from delta_trn.backends.machine import ROOT
from delta_trn.backends.parity.page import NOT_RUN
from delta_trn.backends.parity.rule_cases import CASES, Case

# the tags of cases that are timed on a GPU, and on a CPU
TAGS = {"cuda": "bench", "cpu": "bench-cpu"}
PASSES = ("forward", "backward", "forward+backward")

Rows = Sequence[Mapping[str, Any]]


def passes(case: Case) -> tuple[str, ...]:
    """Returns the passes of a case that are timed."""
    return ("step",) if "step" in case.tags else PASSES


@dataclass(frozen=True)
class Place:
    """Names a column: one of our backends beside a peer, on a type of device, now or before."""

    backend: str
    peer: str
    device_type: str
    before: bool = False

    def takes(self, case: Case) -> bool:
        """Returns whether the case is timed here: on a CPU only the small ones are."""
        return TAGS[self.device_type] in case.tags

    def __str__(self) -> str:
        return f"`{self.backend}`{' before' if self.before else ''}"


PLACES = (
    Place("chunked", "hf", "cpu", before=True),
    Place("chunked", "hf", "cpu"),
    Place("triton", "fla", "cuda"),
)


def read(files: Sequence[Path] = ()) -> list[dict[str, Any]]:
    """Reads the lines of bench's files, in order, and marks those from before.

    Lines of other commands are left out.
    """
    results = ROOT / "results"
    files = files or [*sorted(results.glob("*/before.jsonl")), *sorted(results.glob("*/data.jsonl"))]
    rows = [
        json.loads(line) | {"before": file.name.startswith("before")}
        for file in files
        for line in file.read_text().splitlines()
    ]
    return [row for row in rows if "pass" in row and "ms" in row]


def ratios(rows: Rows, place: Place, case: Case, phase: str) -> list[float]:
    """Returns the peer's time over ours of every run, in order."""
    theirs = _lines(rows, place, place.peer, case, phase)
    return [row["ratio"]["p50"] for row in theirs if row["ratio"] is not None]


def floor_share(rows: Rows, place: Place, case: Case, phase: str) -> float | None:
    """Returns the floor over our time in the fastest run; None where either is not known."""
    ours = _lines(rows, place, place.backend, case, phase)
    devices = {row["device"] for row in ours}
    floors = [
        row["floor_ms"]
        for row in rows
        if (row["case"], row["pass"], row["before"]) == (case.name, phase, False) and row["device"] in devices
    ]
    least = min((floor for floor in floors if floor is not None), default=None)
    return least / min(row["ms"]["p50"] for row in ours) if ours and least is not None else None


def markdown(rows: Rows) -> str:
    """Formats one line per case and one column per place."""
    heads = [f"{place}, {place.peer} over ours: {_machine(rows, place)}" for place in PLACES]
    lines = ["| shape | " + " | ".join(heads) + " |", "|---" * (1 + len(PLACES)) + "|"]
    for case in CASES:
        if TAGS["cuda"] in case.tags:
            cells = [_cell(rows, place, case) for place in PLACES]
            lines.append(f"| {case} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _lines(rows: Rows, place: Place, name: str, case: Case, phase: str) -> list[Mapping[str, Any]]:
    key = (case.name, phase, name, place.device_type, place.before)
    return [
        row
        for row in rows
        if (row["case"], row["pass"], row["backend"], row["device_type"], row["before"]) == key
    ]


def _machine(rows: Rows, place: Place) -> str:
    key = (place.backend, place.device_type, place.before)
    here = [row for row in rows if (row["backend"], row["device_type"], row["before"]) == key]
    if not here:
        return f"{place.device_type}, {NOT_RUN}"
    threads = f", {here[-1]['threads']} threads" if place.device_type == "cpu" else ""
    return f"{here[-1]['device']}{threads}"


def _cell(rows: Rows, place: Place, case: Case) -> str:
    if not place.takes(case):
        return "-"
    cells = []
    for phase in passes(case):
        if values := ratios(rows, place, case, phase):
            share = floor_share(rows, place, case, phase)
            cells.append(f"{phase} {_span(values)}" + ("" if share is None else f" ({share:.0%})"))
    return ", ".join(cells) or NOT_RUN


def _span(values: Sequence[float]) -> str:
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"
