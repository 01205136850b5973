"""Makes the Markdown table of what `backends.bench` measured, from its files.

    python -m backends.bench table [FILE ...]

A cell is a peer's time over ours, the median over the rounds of a run; with several runs, the
smallest and the largest. In brackets: the floor as a share of our time. Cases that were not run have
no line, and a backend that was not run is named below.
Without files: every results/*/data.jsonl.gz.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from delta_trn.backends.machine import ROOT
from delta_trn.backends.parity.page import NOT_RUN
from delta_trn.backends.parity.rule_cases import CASES, Case

# the tags of cases that are timed on a GPU, and on a CPU: there only the small ones are
TAGS = {"cuda": "bench", "cpu": "bench-cpu"}
PASSES = ("forward", "backward", "forward+backward")
# our backend of each column -> the peer beside it, and the type of device
COLUMNS = {"chunked": ("hf", "cpu"), "triton": ("fla", "cuda")}

Rows = Sequence[Mapping[str, Any]]


def passes(case: Case) -> tuple[str, ...]:
    """Returns the passes of a case that are timed."""
    return ("step",) if "step" in case.tags else PASSES


def read(files: Sequence[Path] = ()) -> list[dict[str, Any]]:
    """Reads what bench's files say of times, in order; default: those stored under results/."""
    files = files or sorted((ROOT / "results").glob("*/data.jsonl.gz"))
    texts = [
        gzip.decompress(x.read_bytes()) if x.suffix == ".gz" else x.read_bytes() for x in files
    ]
    lines = [json.loads(line) for text in texts for line in text.splitlines()]
    return [line for line in lines if not (line.get("failed") or line.get("small"))]


def ratios(rows: Rows, backend: str, case: Case, phase: str) -> list[float]:
    """Returns the time of the peer in a backend's column over ours, of every run, in order."""
    peer, device = COLUMNS[backend]
    return [row["ratio"]["p50"] for row in _find(rows, case, phase, peer, device)]


def markdown(rows: Rows) -> str:
    """Formats one line for each case and one column for each backend, where anything was measured;
    a last line names the backends of which nothing was.
    """
    measured = [name for name in COLUMNS if _was_run(rows, name)]
    heads = [f"`{name}`, {COLUMNS[name][0]} over ours: {_machine(rows, name)}" for name in measured]
    lines = ["| shape | " + " | ".join(heads) + " |", "|---" * (1 + len(measured)) + "|"]
    for case in CASES:
        cells = [_cell(rows, name, case) for name in measured]
        if set(cells) - {"-", NOT_RUN}:
            lines.append(f"| {case} | " + " | ".join(cells) + " |")
    absent = [
        f"`{name}` beside {peer} on {device}"
        for name, (peer, device) in COLUMNS.items()
        if name not in measured
    ]
    return "\n".join([*lines, f"\nNot yet run: {', '.join(absent)}."] if absent else lines)


def _find(
    rows: Rows, case: Case, phase: str, contender: str, device: str
) -> list[Mapping[str, Any]]:
    key = (case.name, phase, contender, device)
    return [
        row for row in rows if (row["case"], row["pass"], row["backend"], row["device_type"]) == key
    ]


def _here(rows: Rows, backend: str) -> list[Mapping[str, Any]]:
    device = COLUMNS[backend][1]
    return [row for row in rows if (row["backend"], row["device_type"]) == (backend, device)]


def _was_run(rows: Rows, backend: str) -> bool:
    return any(ratios(rows, backend, case, phase) for case in CASES for phase in passes(case))


def _machine(rows: Rows, backend: str) -> str:
    last = _here(rows, backend)[-1]
    return last["device"] + (f", {last['threads']} threads" if "cpu" in COLUMNS[backend] else "")


def _cell(rows: Rows, backend: str, case: Case) -> str:
    device = COLUMNS[backend][1]
    if TAGS[device] not in case.tags:
        return "-"
    cells = []
    for phase in passes(case):
        if values := ratios(rows, backend, case, phase):
            ours = _find(rows, case, phase, backend, device)
            floors = [row["floor_ms"] for row in ours if row["floor_ms"] is not None]
            share = (
                f" ({min(floors) / min(row['ms']['p50'] for row in ours):.0%})" if floors else ""
            )
            low, high = f"{min(values):.2f}", f"{max(values):.2f}"
            cells.append(f"{phase} {low}" + ("" if low == high else f" to {high}") + share)
    return ", ".join(cells) or NOT_RUN
