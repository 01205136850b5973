"""The product's lines that only a GPU reaches and that the dry measurement leaves out, with reasons.

    python -m tools.gpu_lines [--lines FILE]        needs coverage.py: pip install coverage

runs `tools.measure_gpu --dry` under coverage.py: kernels in the emulator, torch's CUDA calls on a
stand-in. Then it lists what stays of the statements that only a GPU reaches, which are those behind
a condition that names CUDA, and those that call torch.cuda. What kernels compute is no line of
Python when they are compiled: parity sees that. --lines reads what such a run wrote into FILE, or
lets this run write it there.

Accepted are another architecture, several GPUs, and a failure of the driver or of what Triton
needs; beside them stand lines of other commands than the measurement, each with the test that
reaches them without a GPU. The exit status is 1 where a line has no reason, where a reason is not
needed any more, and where a test that one names is gone.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PARTS = ("backends", "models", "train", "triton_kernels")
ARCHITECTURE = "another architecture"
SEVERAL = "several GPUs"
DRIVER = "a failure of the driver, or of what Triton needs"
TEST = "reached by "
# the stand-in is no part of what runs on a GPU
LEFT_OUT = "backends/gpu_stand_in/"
# file, function -> why the dry measurement does not reach its lines
REASONS: Mapping[tuple[str, str], str] = {
    ("backends/card_adapter.py", "_driver"): DRIVER,
    ("train/commands/warmup.py", "_compile"): DRIVER,
    ("backends/machine.py", "pick"): SEVERAL,
    ("train/commands/sweep.py", "_execute"): SEVERAL,
    # the emulator's tensors say that they are a CPU's
    ("backends/gated_delta_rule/once.py", "once"): f"{TEST}tests/triton_kernels/test_copies.py",
    ("models/sequence.py", "_is_captured"): f"{TEST}tests/triton_kernels/test_copies.py",
    # checkpoints, and the choice of a precision, of delta-trn run
    ("train/checkpoints/contents.py", "random_states"): (
        f"{TEST}tests/train/parallel/test_devices.py"
    ),
    ("train/checkpoints/contents.py", "set_random_states"): (
        f"{TEST}tests/train/parallel/test_devices.py"
    ),
    ("backends/machine.py", "supports_bfloat16"): f"{TEST}tests/backends/test_machine.py",
}


class Line(NamedTuple):
    """A statement that only a GPU reaches."""

    file: str
    function: str
    number: int
    text: str


def lines_of(file: str, source: str) -> Iterator[Line]:
    """Yields the statements of a module that only a GPU reaches."""
    texts = source.splitlines()
    for number, function in _search(ast.parse(source), "", inside=False):
        yield Line(file, function, number, texts[number - 1].strip())


def _search(node: ast.AST, function: str, *, inside: bool) -> Iterator[tuple[int, str]]:
    """Yields line and function; inside: a condition around `node` names CUDA."""
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST):
                continue
            here, within = function, inside
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                here, within = f"{function}.{child.name}".lstrip("."), False
            elif isinstance(child, ast.stmt):
                opened = name == "body" and isinstance(node, ast.If) and _asks_for_cuda(node.test)
                within = inside or opened
                if within or _calls_cuda(child):
                    yield child.lineno, function
            yield from _search(child, here, inside=within)


def _asks_for_cuda(test: ast.expr) -> bool:
    """Returns whether a condition holds on a GPU alone, as far as its words say."""
    turned = any(isinstance(x, ast.Not | ast.NotEq | ast.NotIn) for x in ast.walk(test))
    return "cuda" in ast.unparse(test).lower() and not turned


def _calls_cuda(statement: ast.stmt) -> bool:
    if hasattr(statement, "body"):  # whose own statements are looked at
        return False
    calls = (x.func for x in ast.walk(statement) if isinstance(x, ast.Call))
    return any("torch.cuda." in ast.unparse(x) for x in calls)


def every_line() -> Iterator[Line]:
    """Yields those of the product."""
    for part in PARTS:
        for path in sorted((ROOT / part).rglob("*.py")):
            file = path.relative_to(ROOT).as_posix()
            if not file.startswith(LEFT_OUT):
                yield from lines_of(file, path.read_text())


def run_under_coverage() -> dict[str, list[int]]:
    """Runs the dry measurement; returns file -> the lines that any of its processes executed."""
    from coverage import CoverageData  # type: ignore[import-not-found]  # not of this project

    with tempfile.TemporaryDirectory(prefix="delta-trn-gpu-lines-") as name:
        folder = Path(name)
        (folder / "sitecustomize.py").write_text("import coverage\ncoverage.process_startup()\n")
        (folder / "rc").write_text(
            f"[run]\nparallel = true\ndata_file = {folder / 'data'}\n"
            f"include = {', '.join(f'*/{part}/*' for part in PARTS)}\n"
        )
        paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {
            **os.environ,
            "COVERAGE_PROCESS_START": str(folder / "rc"),
            "PYTHONPATH": os.pathsep.join(paths),
        }
        command = [sys.executable, "-m", "tools.measure_gpu", "--dry", "tests.support.emulated"]
        done = subprocess.run(
            [*command, "--out", str(folder / "measured")], cwd=ROOT, env=environment
        )
        if done.returncode:
            print("the dry measurement failed: lines below may be what it did not come to")
        found: dict[str, set[int]] = {}
        for part in folder.glob("data.*"):
            data = CoverageData(str(part))
            data.read()
            for file in data.measured_files():
                path = Path(file).resolve()  # delta_trn/ has links
                if path.is_relative_to(ROOT):
                    found.setdefault(str(path.relative_to(ROOT)), set()).update(
                        data.lines(file) or ()
                    )
    return {file: sorted(numbers) for file, numbers in sorted(found.items())}


def report(
    lines: Sequence[Line],
    executed: Mapping[str, Sequence[int]],
    reasons: Mapping[tuple[str, str], str] = REASONS,
) -> tuple[list[str], list[str]]:
    """Returns what is printed of lines that were not executed, and what is wrong about it."""
    left = [x for x in lines if x.number not in executed.get(x.file, ())]
    table = [f"{len(lines)} lines that only a GPU reaches, {len(left)} not executed"]
    wrong = []
    for x in left:
        reason = reasons.get((x.file, x.function))
        table.append(f"{x.file}:{x.number} {x.function}: {x.text}  [{reason or 'NO REASON'}]")
        test = (reason or "").removeprefix(TEST)
        if reason not in (None, test) and not (ROOT / test).is_file():
            wrong.append(f"{x.file}:{x.number}: REASONS names {test}, which is not here")
        if reason is None:
            wrong.append(
                f"{x.file}:{x.number} in {x.function} was not executed: let the dry measurement "
                "reach it, or give REASONS an accepted one"
            )
    for file, function in sorted(set(reasons) - {(x.file, x.function) for x in left}):
        wrong.append(f"REASONS has {file}, {function}, whose lines are executed; take it out")
    return table, wrong


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the lines; returns 1 where one has no accepted reason."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.gpu_lines",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--lines", type=Path, metavar="FILE", help="JSON: file -> executed lines")
    options = parser.parse_args(arguments)
    if options.lines is not None and options.lines.exists():
        executed = json.loads(options.lines.read_text())
    elif importlib.util.find_spec("coverage") is None:
        parser.error("coverage.py is not installed; pip install coverage")
    else:
        executed = run_under_coverage()
        if options.lines is not None:
            options.lines.write_text(json.dumps(executed) + "\n")
    table, wrong = report(list(every_line()), executed)
    print(*table, sep="\n")
    for complaint in wrong:
        print(complaint, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
