"""Writes what parity has found as a page of Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from delta_trn.backends.checks import dtype_name
from delta_trn.backends.parity.judge import DTYPES, FACTOR, Verdict

NOT_RUN = "not yet run"


def page(
    verdicts: Sequence[Verdict],
    reasons: Mapping[str, str],
    refused: Mapping[tuple[str, torch.dtype], str],
    machine: Mapping[str, Any],
) -> str:
    """Formats the verdicts of one machine: every case with why it is hard (`reasons`), and what was
    refused.

    A number is the worst error over what is allowed, and the tensor that has it.
    """
    failed = sum(not verdict.passed for verdict in verdicts)
    backends = list(dict.fromkeys(v.backend for v in verdicts))
    columns = [(name, dtype) for name in backends for dtype in DTYPES]
    columns = [key for key in columns if any((v.backend, v.dtype) == key for v in verdicts)]
    answer = "Failed" if failed or not verdicts else "Passed"
    lines = [
        f"# {answer}: {', '.join(f'`{name}`' for name in backends)}",
        f"\n{failed} of {len(verdicts)} tensors failed. "
        f"{'; '.join(f'{k}: {v}' for k, v in machine.items())}",
        "\nA tensor's error is the root mean square of its difference to a float64 judge, over the "
        "judge's.",
        f"It may be at most {FACTOR:g} times the largest error of several runs of a plain PyTorch",
        "implementation at the same precision; each sequence and head, and each element, has a "
        "bound of its",
        "own. 1.00 is all that is allowed.\n",
        "| case | why it is hard | "
        + " | ".join(f"`{x}` {dtype_name(y)}" for x, y in columns)
        + " |",
        "|---" * (2 + len(columns)) + "|",
    ]
    for case in dict.fromkeys(v.case for v in verdicts):
        cells = []
        for key in columns:
            mine = [v for v in verdicts if (v.case, v.backend, v.dtype) == (case, *key)]
            worst = max(mine, key=lambda v: v.ratio, default=None)
            bold = "**" if any(not v.passed for v in mine) else ""
            cells.append(
                "-" if worst is None else f"{bold}{worst.ratio:.2f}{bold} ({worst.tensor})"
            )
        reason = reasons[case].replace("|", "\\|")  # which would end the cell
        lines.append(f"| {case} | {reason} | " + " | ".join(cells) + " |")
    if refused:
        lines.append("\n## Refused\n")
        lines += [f"- {name}, {dtype_name(x)}: {why}" for (name, x), why in refused.items()]
    return "\n".join(lines) + "\n"
