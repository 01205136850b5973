"""Prints which backend runs which operation on this machine, and why others do not."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from delta_trn.backends import describe, machine


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints one row per operation and backend; takes no arguments but --help."""
    argparse.ArgumentParser(prog="delta-trn backends", description=__doc__).parse_args(arguments)
    devices = machine.platforms()
    models = ", ".join(f"{name} ({machine.describe(machine.pick(name))})" for name in devices)
    console = Console(width=None if sys.stdout.isatty() else 130)
    console.print(f"devices here: {models}", highlight=False)
    table = Table()
    for heading in ("operation", "backend", "default for", "by name on", "why not, or not elsewhere"):
        table.add_column(heading)
    for row in describe():
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
