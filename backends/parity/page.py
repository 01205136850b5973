"""Writes what parity has found as Markdown: a table of places and operations, and a page of verdicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from delta_trn.backends.checks import dtype_name
from delta_trn.backends.parity.judge import DTYPES, FACTOR, Verdict
from delta_trn.backends.registry import BACKENDS, OPERATIONS

NOT_RUN = "not yet run"


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Formats lines of results: what ran where, and the worst error over what is allowed."""
    places = list(dict.fromkeys((row["backend"], row["device"]) for row in rows))
    columns = places + [(name, NOT_RUN) for name in BACKENDS if name not in dict(places)]
    lines = _head("operation", *(f"`{backend}`, {device}" for backend, device in columns))
    for op in [op for op in OPERATIONS if op == OPERATIONS[0] or any(row["op"] == op for row in rows)]:
        for name in map(dtype_name, DTYPES):
            cells = (
                _cell([r for r in rows if (r["op"], r["backend"], r["device"], r["dtype"]) == key])
                for key in ((op, *place, name) for place in columns)
            )
            lines.append(f"| `{op}`, {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return NOT_RUN
    failed = sum(not row["passed"] for row in rows)
    if failed:
        return f"{failed} of {len(rows)} failed"
    worst = max(row["error"] / row["allowed"] for row in rows if row["allowed"])
    return f"{len({row['case'] for row in rows})} cases pass, at most {worst:.2f} of the allowed error"


def page(
    verdicts: Sequence[Verdict],
    reasons: Mapping[str, str],
    refused: Mapping[tuple[str, torch.dtype], str],
    machine: Mapping[str, Any],
) -> str:
    """Formats the verdicts of one machine: every case with why it is hard (`reasons`), and what was refused.

    A number is the worst error over what is allowed, and the tensor that has it.
    """
    failed = sum(not verdict.passed for verdict in verdicts)
    backends = list(dict.fromkeys(v.backend for v in verdicts))
    columns = [(name, dtype) for name in backends for dtype in DTYPES]
    columns = [key for key in columns if any((v.backend, v.dtype) == key for v in verdicts)]
    answer = "Failed" if failed or not verdicts else "Passed"
    lines = [
        f"# {answer}: {', '.join(f'`{name}`' for name in backends)}",
        f"\n{failed} of {len(verdicts)} tensors failed. {'; '.join(f'{k}: {v}' for k, v in machine.items())}",
        "\nA tensor's error is the root mean square of its difference to a float64 judge, over the judge's.",
        f"It may be at most {FACTOR:g} times the largest error of several runs of a plain PyTorch",
        "implementation at the same precision; each sequence and head, and each element, has a bound of its",
        "own. 1.00 is all that is allowed.\n",
        *_head("case", "why it is hard", *(f"`{name}` {dtype_name(dtype)}" for name, dtype in columns)),
    ]
    for case in dict.fromkeys(v.case for v in verdicts):
        cells = []
        for key in columns:
            mine = [v for v in verdicts if (v.case, v.backend, v.dtype) == (case, *key)]
            worst = max(mine, key=lambda v: v.ratio, default=None)
            bold = "**" if any(not v.passed for v in mine) else ""
            cells.append("-" if worst is None else f"{bold}{worst.ratio:.2f}{bold} ({worst.tensor})")
        lines.append(f"| {case} | {reasons[case]} | " + " | ".join(cells) + " |")
    lines += ["\n## Refused\n", *(f"- {name}, {dtype_name(x)}: {why}" for (name, x), why in refused.items())]
    return "\n".join(lines) + "\n"


def _head(*names: str) -> list[str]:
    return ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
