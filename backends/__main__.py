"""Prints which backend runs which operation on this machine, and on request why others do not.

Where there is a GPU it asks what a first launch needs, and then makes one small call of each
operation and holds it to the judge. The exit status is 1 where one is wrong, and 2 where something is
missing, so that nothing can be launched.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.table import Table

from delta_trn.backends import describe, machine
from delta_trn.backends.dispatch import BACKENDS, OPERATIONS, Availability

_MISSED = "here: PyTorch, since"  # what an adapter says where PyTorch computes and C++ could


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a row per operation; with --all also one per operation and backend, with reasons."""
    parser = argparse.ArgumentParser(
        prog="delta-trn backends",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--gpu", action="store_true", help="ask what a GPU needs, also where none is seen"
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="every backend of every operation, and why one does not run",
    )
    options = parser.parse_args(arguments)
    devices = machine.platforms()
    models = ", ".join(f"{name} ({machine.describe(machine.pick(name))})" for name in devices)
    console = Console(width=None if sys.stdout.isatty() else 130)
    console.print(f"devices here: {models}", highlight=False)
    rows = describe()
    chosen = Table("operation", *devices, "others, by name")
    for op in dict.fromkeys(row.op for row in rows):
        mine = [row for row in rows if row.op == op]
        default = [
            next((row.backend for row in mine if d in row.automatic), "none") for d in devices
        ]
        others = [row.backend for row in mine if row.named and row.backend not in default]
        chosen.add_row(op, *default, ", ".join(others) or "-")
    console.print(chosen)
    missed = [row for row in rows if row.automatic and row.reasons and _MISSED in row.reasons[-1]]
    for reason in dict.fromkeys(row.reasons[-1] for row in missed):
        names = ", ".join(row.op for row in missed if row.reasons[-1] == reason)
        console.print(f"{names}: {reason}", highlight=False, markup=False, soft_wrap=True)
    if not options.all:
        console.print(
            "`delta-trn backends --all` says why the others do not run here", highlight=False
        )
    else:
        _print_all(console, rows)
    if options.gpu or "cuda" in devices:
        return _check_gpu()
    return 0


def _print_all(console: Console, rows: list[Availability]) -> None:
    table = Table("operation", "backend", "default for", "by name on", "why not, or not elsewhere")
    for row in rows:
        by_name = [device for device in row.named if device not in row.automatic]
        table.add_row(
            row.op,
            row.backend,
            ", ".join(row.automatic) or "-",
            ", ".join(by_name) or "-",
            "\n".join(row.reasons),
            style=None if row.named else "dim",
        )
    console.print(table)


def _check_gpu() -> int:
    """Prints what a launch needs, and one line for each operation; returns the exit status."""
    from delta_trn.backends.card_adapter import needs

    met = True
    for need in needs():
        print(need, flush=True)
        met &= need.met
    if not met:
        return 2
    right = True
    for op in OPERATIONS:
        if op in BACKENDS["triton"].rows:
            line, passed = _check(op)
            print(line, flush=True)
            right &= passed
    return 0 if right else 1


def _check(op: str) -> tuple[str, bool]:
    """Makes one small call of an operation, in bfloat16; returns a line on it, and if it is right."""
    from delta_trn.backends.parity.__main__ import GRIDS, QUARTER

    cases = [(grid, x) for grid in GRIDS.values() for x in grid.cases.values() if x.op == op]
    grid, case = next((pair for pair in cases if pair[1].name in QUARTER), cases[0])
    try:
        judged = grid.verdicts(case, torch.bfloat16, "triton", "cuda")
    except Exception as error:  # a launch fails in many ways, and the next one may not
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return f"{op:28} FAILED ({case.name}): {reason}", False
    wrong = [verdict for verdict in judged if not verdict.passed]
    if wrong:
        return f"{op:28} WRONG ({case.name}): {wrong[0]}", False
    worst = max(verdict.ratio for verdict in judged)
    return f"{op:28} right, error {worst:.2f} of what is allowed ({case.name})", True


if __name__ == "__main__":
    sys.exit(main())
