"""delta-trn parameters RECIPE [key=value ...] [--json]"""

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from delta_trn.train.recipes import announced
from delta_trn.train.settings.overrides import apply, parse, read_arguments

if TYPE_CHECKING:
    from delta_trn.models.parameters import ScaledParameter

COLUMNS = ("name", "shape", "role", "init_std", "multiplier", "lr", "weight_decay")


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
    parser.add_argument("--json", action="store_true", help="a list of objects; init_std null: not normal")
    options = read_arguments(parser, arguments)
    config = apply(announced(options.recipe), parse(options.changes))

    from delta_trn.train.run.optimizer import scaled

    rows = [_row(row) for row in scaled(config)]
    print(json.dumps(rows, indent=1) if options.json else _table(rows))
    return 0


def _row(parameter: "ScaledParameter") -> dict[str, Any]:
    values = (
        parameter.name,
        list(parameter.shape),
        getattr(parameter.role, "name", str(parameter.role)).lower(),
        parameter.init_std,
        parameter.multiplier,
        parameter.lr,
        parameter.weight_decay,
    )
    return dict(zip(COLUMNS, values, strict=True))


def _table(rows: list[dict[str, Any]]) -> str:
    cells = [[_cell(row[column]) for column in COLUMNS] for row in rows]
    widths = [max(len(row[i]) for row in [list(COLUMNS), *cells]) for i in range(len(COLUMNS))]
    lines = [[*COLUMNS], *cells]
    return "\n".join(
        "  ".join(f"{cell:{width}}" for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return "x".join(map(str, value))
    return str(value)
