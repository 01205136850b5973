"""delta-trn parameters RECIPE [key=value ...] [--json]"""

import argparse
import json
from collections.abc import Sequence
from typing import Any

from delta_trn.train.recipes import announce
from delta_trn.train.settings.overrides import apply, parse, read_arguments


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="delta-trn parameters",
        description="One row a parameter: shape, role, initial standard deviation, forward multiplier, "
        "learning rate and weight decay. No weights are made and no data is read.",
    )
    parser.add_argument("recipe", metavar="RECIPE", help="a named run; `delta-trn` lists them")
    parser.add_argument(
        "changes", nargs="*", metavar="key=value", help="keys to change, such as model.width=512"
    )
    parser.add_argument(
        "--json", action="store_true", help="a list of objects; init_std null: not normal"
    )
    options = read_arguments(parser, arguments)
    config = apply(announce(options.recipe), parse(options.changes))

    from delta_trn.train.run.optimizer import list_scaled

    columns = ("init_std", "multiplier", "lr", "weight_decay")
    rows = [
        {"name": p.name, "shape": list(p.shape), "role": p.role.name.lower()}
        | {column: getattr(p, column) for column in columns}
        for p in list_scaled(config)
    ]
    if options.json:
        print(json.dumps(rows, indent=1))
        return 0
    lines = [list(rows[0]), *([_cell(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print(
            "  ".join(f"{cell:{width}}" for cell, width in zip(line, widths, strict=True)).rstrip()
        )
    return 0


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return "x".join(map(str, value))
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
