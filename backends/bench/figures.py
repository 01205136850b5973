"""Makes the table of what `backends.bench` measured, from its files; it names what was not run.

    python -m backends.bench table [FILE ...]       Markdown

A cell is a peer's time over ours, the median over the rounds of a run; with several runs, the smallest and
the largest. Without files: every results/*/data.jsonl.
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

# the tags of cases that are timed on a GPU, and on a CPU
TAGS = {"cuda": "bench", "cpu": "bench-cpu"}
PASSES = ("forward", "backward", "forward+backward")


def passes(case: Case) -> tuple[str, ...]:
    """Returns the passes of a case that are timed."""
    return ("step",) if "step" in case.tags else PASSES


@dataclass(frozen=True)
class Place:
    """Names a column: one of our backends beside a peer, on a type of device."""

    backend: str
    peer: str
    device_type: str

    def takes(self, case: Case) -> bool:
        """Returns whether the case is timed here: on a CPU only the small ones are."""
        return TAGS[self.device_type] in case.tags


PLACES = (Place("chunked", "hf", "cpu"), Place("triton", "fla", "cuda"))


def read(files: Sequence[Path] = ()) -> list[dict[str, Any]]:
    """Reads the lines of bench's files, in order; lines of other commands are left out."""
    files = files or sorted((ROOT / "results").glob("*/data.jsonl"))
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return [row for row in rows if "pass" in row and "ms" in row]


def ratios(rows: Sequence[Mapping[str, Any]], place: Place, case: Case, phase: str) -> list[float]:
    """Returns the peer's time over ours of every run, in order."""
    return [
        row["ratio"]["p50"]
        for row in rows
        if (row["case"], row["pass"], row["backend"], row["device_type"])
        == (case.name, phase, place.peer, place.device_type)
        and row["ratio"] is not None
    ]


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Formats one line per case and one column per place."""
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
    runs = [(phase, ratios(rows, place, case, phase)) for phase in passes(case)]
    return ", ".join(f"{phase} {_span(values)}" for phase, values in runs if values) or NOT_RUN


def _span(values: Sequence[float]) -> str:
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"
