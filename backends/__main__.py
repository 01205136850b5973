"""Prints which backend runs which operation on this machine, and on request why others do not."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from delta_trn.backends import describe, machine

_MISSED = "here: PyTorch, since"  # what an adapter says where PyTorch computes and C++ could


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a row per operation; with --all also one per operation and backend, with reasons."""
    parser = argparse.ArgumentParser(prog="delta-trn backends", description=__doc__)
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
        return 0
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
    return 0


if __name__ == "__main__":
    sys.exit(main())
