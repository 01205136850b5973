"""Reads which forms of instructions public NKI kernels have, and adds them to the simulator's
table.

    python -m tools.precedents FOLDER ...

A folder holds other people's Python files, which are read and not run. What the table had stays:
its sources are named in `nki_simulator.core.precedents`, where a new one has to be added.

A form counts where it is written: `nisa.tensor_copy(..., engine=nisa.gpsimd_engine)`. Of a value
that a kernel is handed, only functions of activations are found, and of these those that no other
instruction has as an operator: `nl.silu_dx` in a file means that activations compute it.
"""

import argparse
import ast
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import nki_simulator.isa as isa
from nki_simulator.core import precedents
from nki_simulator.core.tables import SETS

Form = tuple[str, str, str]
ISA = "nki.isa"


def find_names(tree: ast.AST) -> set[str]:
    """Returns the names under which a file has the module of instructions."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {own.asname for own in node.names if own.name.endswith(ISA) and own.asname}
        elif isinstance(node, ast.ImportFrom):
            names |= {own.asname or own.name for own in node.names if own.name in ("isa", "nisa")}
    return names


def find_forms(source: str) -> Iterator[Form]:
    """Yields the forms (instruction, option, value) of a file; without an option "" and ""."""
    tree = ast.parse(source)
    modules = find_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ACTIVATIONS and "nki" in source:
            yield "activation", "op", node.attr
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner, name = node.func.value, node.func.attr
        if not isinstance(owner, ast.Name) or owner.id not in modules or not hasattr(isa, name):
            continue
        yield name, "", ""
        for keyword in node.keywords:
            value = keyword.value
            if keyword.arg in precedents.OPTIONS and isinstance(value, ast.Attribute):
                yield name, keyword.arg, value.attr.removesuffix("_engine")


# functions of activations alone
ACTIVATIONS = frozenset(
    name for own in SETS.values() for name in own if name.endswith("_dx") or "apprx" in name
)


def read_folder(folder: Path) -> set[Form]:
    """Returns the forms of all Python files below a folder.

    Raises ValueError if there is none.
    """
    files = sorted(folder.rglob("*.py"))
    if not files:
        raise ValueError(f"{folder} has no Python files; name a checkout of kernels")
    found: set[Form] = set()
    for file in files:
        try:
            found |= set(find_forms(file.read_text(errors="replace")))
        except SyntaxError as error:  # of Python 2, or a template
            print(f"{file} is not read: {error}", file=sys.stderr)
    return found


def add_forms(
    table: dict[str, dict[str, list[str]]], found: set[Form]
) -> dict[str, dict[str, list[str]]]:
    """Returns the table with these forms, sorted."""
    every: dict[str, dict[str, set[str]]] = {
        op: {option: set(values) for option, values in own.items()} for op, own in table.items()
    }
    for op, option, value in found:
        own = every.setdefault(op, {})
        if option:
            own.setdefault(option, set()).add(value)
    return {
        op: {option: sorted(values) for option, values in sorted(own.items())}
        for op, own in sorted(every.items())
    }


def write(table: dict[str, dict[str, list[str]]]) -> str:
    """Returns the table's text, a line an instruction."""
    lines = [f' "{op}": {json.dumps(own)}' for op, own in table.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Adds the forms of the folders, and prints those that are new."""
    parser = argparse.ArgumentParser(prog="python -m tools.precedents")
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    options = parser.parse_args(arguments)
    table = precedents.PUBLIC
    try:
        for folder in options.folders:
            found = read_folder(folder)
            new = precedents.without_precedent(found)
            print(f"{folder}: {len(found)} forms, new: {', '.join(new) or 'none'}")
            table = add_forms(table, found)
    except ValueError as error:
        parser.error(str(error))
    precedents.FILE.write_text(write(table))
    return 0


if __name__ == "__main__":
    sys.exit(main())
