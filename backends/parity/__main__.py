"""Every backend against the float64 judge: per case, tensor and dtype.

    python -m backends.parity [--backend NAME] [--case NAME] [--slow] [--json FILE]   exit 1 on a failure
    python -m backends.parity record FILE --backend NAME       goldens: what this machine computes
    python -m backends.parity check FILE                       judge what another machine computed
    python -m backends.parity table [FILE ...]                 the README's table, from --json files

What is measured and what is allowed: `backends.judge`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from delta_trn.backends import machine
from delta_trn.backends.machine import ROOT, facts
from delta_trn.backends.parity import goldens, layer_cases
from delta_trn.backends.parity import residual_cases as depth_cases
from delta_trn.backends.parity.judge import DTYPES, FACTOR, Verdict, verdicts
from delta_trn.backends.parity.rule_cases import SMALL, Case, select
from delta_trn.backends.registry import BACKENDS, OPERATIONS, BackendRefusal

NOT_RUN = "not yet run"
SHOWN = 20


@dataclass(frozen=True)
class Subject:
    """A backend on one of this machine's device types."""

    backend: str
    device: str

    @property
    def emulated(self) -> bool:
        return self.device in BACKENDS[self.backend].emulated

    def dtypes(self) -> list[torch.dtype]:
        known = BACKENDS[self.backend].capabilities["gated_delta_rule"].dtypes
        return [dtype for dtype in DTYPES if dtype in known]

    def cases(self, names: Sequence[str] | None, *, slow: bool) -> list[Case]:
        return select(names, tags=SMALL if self.emulated and not names else frozenset(), slow=slow)


def subjects(names: Sequence[str] | None = None) -> list[Subject]:
    """The backends named, or all that run here, each on the preferred device type it runs on.

    Raises BackendRefusal for one that was named and cannot run on this machine, with the reasons.
    """
    found = []
    for name in names or BACKENDS:
        if name not in BACKENDS:
            raise BackendRefusal(f"no backend is named {name!r}; registered: {', '.join(BACKENDS)}")
        backend = BACKENDS[name]
        capability = backend.capabilities.get("gated_delta_rule")
        reasons = []
        for device in machine.platforms():
            outside = capability is None or (
                capability.devices is not None and device not in capability.devices
            )
            reason = f"does not run on {device}" if outside else backend.unavailable(device)
            if reason is None:
                found.append(Subject(name, device))
                break
            reasons.append(reason)
        else:
            if names:
                raise BackendRefusal(
                    "\n".join([f"backend {name} cannot run here:", *(f"  {r}" for r in reasons)])
                )
    return found


def measure(
    subject: Subject, cases: Iterable[Case], refused: dict[str, str] | None = None
) -> Iterator[Verdict]:
    """The verdicts of one backend; cases outside its declared limits go to `refused` with the reason."""
    for case in cases:
        for dtype in subject.dtypes():
            try:
                yield from verdicts(case, dtype, subject.backend, subject.device)
            except BackendRefusal as refusal:
                if refused is None:
                    raise
                refused[case.name] = str(refusal)


def row(verdict: Verdict, about: Mapping[str, Any]) -> dict[str, Any]:
    """One JSON object. Errors that are no numbers become null, which is not a pass."""
    finite = {
        name: value if math.isfinite(value) else None
        for name in ("error", "baseline", "allowed")
        for value in [getattr(verdict, name)]
    }
    return {
        "op": verdict.op,
        "backend": verdict.backend,
        "case": verdict.case,
        "dtype": str(verdict.dtype).removeprefix("torch."),
        "tensor": verdict.tensor,
        **finite,
        "passed": verdict.passed,
        **about,
    }


def worst_first(found: Iterable[Verdict]) -> list[Verdict]:
    """By error over allowed; failures, NaN among them, before anything that passed."""
    return sorted(found, key=lambda verdict: (verdict.passed, -verdict.ratio))


def report(console: Console, found: Sequence[Verdict], refused: Mapping[str, str]) -> None:
    """A table, worst first: every failure, and SHOWN rows at least; then one line per backend and dtype."""
    ordered = worst_first(found)
    failures = sum(not verdict.passed for verdict in found)
    table = Table(
        title=f"error against the float64 judge; allowed: {FACTOR:g} x an honest baseline, worst first"
    )
    for heading in ("backend", "case", "dtype", "tensor", "error", "baseline", "allowed", "error/allowed"):
        table.add_column(
            heading, justify="left" if heading in ("backend", "case", "dtype", "tensor") else "right"
        )
    for verdict in ordered[: max(SHOWN, failures)]:
        table.add_row(
            verdict.backend,
            verdict.case,
            str(verdict.dtype).removeprefix("torch."),
            verdict.tensor,
            f"{verdict.error:.2e}",
            f"{verdict.baseline:.2e}",
            f"{verdict.allowed:.2e}",
            f"{verdict.ratio:.2f}" + ("" if verdict.passed else "  failed"),
            style=None if verdict.passed else "bold red",
        )
    console.print(table)
    for name, reason in refused.items():
        console.print(f"case {name} refused: {reason}", highlight=False)
    for backend, dtype in dict.fromkeys((verdict.backend, verdict.dtype) for verdict in found):
        mine = [verdict for verdict in found if (verdict.backend, verdict.dtype) == (backend, dtype)]
        failed = sum(not verdict.passed for verdict in mine)
        cases = len({verdict.case for verdict in mine})
        name = str(dtype).removeprefix("torch.")
        verdict = f"{failed} of {len(mine)} failed" if failed else f"all {len(mine)} passed"
        console.print(f"{backend} {name}: {cases} cases, {verdict}", highlight=False)


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The README's table: what ran where, and the worst error over what is allowed."""
    places = list(dict.fromkeys((row["backend"], row["device"]) for row in rows))
    columns = places + [
        (name, NOT_RUN) for name in BACKENDS if name not in {backend for backend, _ in places}
    ]
    lines = [
        "| operation | " + " | ".join(f"`{backend}`, {device}" for backend, device in columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for op in [op for op in OPERATIONS if op == OPERATIONS[0] or any(row["op"] == op for row in rows)]:
        for dtype in DTYPES:
            name = str(dtype).removeprefix("torch.")
            cells = [
                _cell(
                    [
                        row
                        for row in rows
                        if (row["op"], row["backend"], row["device"], row["dtype"]) == (op, *place, name)
                    ]
                )
                for place in columns
            ]
            lines.append(f"| `{op}`, {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return NOT_RUN
    failed = sum(not row["passed"] for row in rows)
    cases = len({row["case"] for row in rows})
    if failed:
        return f"{failed} of {len(rows)} failed"
    worst = max(row["error"] / row["allowed"] for row in rows if row["allowed"])
    return f"{cases} cases pass, at most {worst:.2f} of the allowed error"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m backends.parity", description="Every backend against the judge"
    )
    parser.add_argument("action", nargs="?", choices=("run", "record", "check", "table"), default="run")
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("--backend", action="append", help="only this one; may be repeated")
    parser.add_argument("--case", action="append", help="only this one; may be repeated")
    parser.add_argument("--slow", action="store_true", help="the slow cases too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write one JSON object a line")
    given = parser.parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 130)
    try:
        return _ACTIONS[given.action](given, console)
    except (BackendRefusal, ValueError, OSError) as complaint:
        print(complaint, file=sys.stderr)
        return 2


def _run(given: argparse.Namespace, console: Console) -> int:
    found: list[Verdict] = []
    refused: dict[str, str] = {}
    lines = []
    for subject in subjects(given.backend):
        about = facts(torch.device(subject.device))
        stateless = _named(given, depth_cases.BY_NAME), _named(given, layer_cases.BY_NAME)
        taken = {name for names in stateless for name in names or ()}
        time = None if given.case is None else [name for name in given.case if name not in taken]
        cases = [] if time == [] else subject.cases(time, slow=given.slow)
        progress = track(cases, subject.backend, console=Console(stderr=True), transient=True)
        mine = list(measure(subject, progress, refused))
        for grid, names in zip((depth_cases, layer_cases), stateless, strict=True):
            mine += grid.measure(subject.backend, subject.device, DTYPES, names)
        lines += [row(verdict, about) for verdict in mine]
        found += mine
    report(console, found, refused)
    if given.json:
        given.json.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return 0 if found and all(verdict.passed for verdict in found) else 1


def _named(given: argparse.Namespace, grid: Mapping[str, Any]) -> list[str] | None:
    """The cases asked for that are in a grid; None: all of it."""
    return None if given.case is None else [name for name in given.case if name in grid]


def _record(given: argparse.Namespace, console: Console) -> int:
    subject = subjects(given.backend)[0]
    cases = select(given.case, tags=frozenset() if given.case else SMALL)
    found = goldens.record(_single(given.files), subject.backend, cases, subject.device)
    report(console, found, {})
    return 0 if all(verdict.passed for verdict in found) else 1


def _check(given: argparse.Namespace, console: Console) -> int:
    found = goldens.check(_single(given.files))
    report(console, found, {})
    return 0 if all(verdict.passed for verdict in found) else 1


def _table(given: argparse.Namespace, console: Console) -> int:
    files = given.files or sorted((ROOT / "results").glob("*/parity*.jsonl"))
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    print(markdown(rows))
    return 0


def _single(files: Sequence[Path]) -> Path:
    if len(files) != 1:
        raise ValueError(f"{len(files)} files given; name the one golden to write or to check")
    return files[0]


_ACTIONS = {"run": _run, "record": _record, "check": _check, "table": _table}


if __name__ == "__main__":
    sys.exit(main())
