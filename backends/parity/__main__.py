"""Judges every backend by the float64 judge: per case, tensor and dtype.

    python -m backends.parity [--backend NAME] [--op NAME] [--case NAME] [--dtype NAME] [--whole]
    [--slow]
        [--json FILE] [--markdown FILE]
    python -m backends.parity record FILE --backend NAME       goldens: what this machine computes
    python -m backends.parity check FILE                       judges what another machine computed

DELTA_TRN_NKI=0.2.0 in the environment holds `nki-simulator` to the rules of that release of NKI;
without it those of all releases hold. DELTA_TRN_NKI_FUNCTIONS=measured:1 gives its functions the
errors that trn1's tables have; a backend with such errors is judged by samples with such errors, of
other seeds (`tables.py`). The exit status is 1 on a failure. `judge.py` says what is
measured and what is allowed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from delta_trn.backends import machine
from delta_trn.backends.checks import BackendRefusal, dtype_name
from delta_trn.backends.dispatch import BACKENDS, OPERATIONS, load_entry_points
from delta_trn.backends.machine import facts
from delta_trn.backends.parity import (
    channel_cases,
    goldens,
    layer_cases,
    mixer_cases,
    page,
    rule,
    rule_cases,
)
from delta_trn.backends.parity.judge import DTYPES, FACTOR, Verdict
from delta_trn.backends.parity.rule_cases import SMALL, find, select
from delta_trn.backends.parity.tables import SIMULATED

SHOWN = 20
RELEASE = "DELTA_TRN_NKI"  # the environment variable that the simulator reads
# What `--case quarter` stands for: a case of each kernel. A Trn1 compiles them in about a quarter
# of an hour.
QUARTER = (
    *(
        "ragged",
        "packed",
        "decode_gva_2",
        "residual_odd",
        "conv_packed",
        "norm_head",
        "loss_ignored",
    ),
    *("mixer_groups", "kimi_gva", "decode_kimi_gva"),
)


class Grid(NamedTuple):
    """Holds the cases of some operations, and (case, dtype, backend, device) -> verdicts."""

    cases: Mapping[str, Any]
    verdicts: Callable[..., list[Verdict]]


GRIDS: Mapping[str, Grid] = {
    "rule": Grid(rule_cases.BY_NAME, rule.verdicts),
    "step": Grid(rule_cases.STEPS, rule.step_verdicts),
    "channels": Grid(channel_cases.BY_NAME, rule.verdicts),
    "channel step": Grid(channel_cases.STEPS, rule.step_verdicts),
    "layers": Grid(layer_cases.BY_NAME, layer_cases.verdicts),
    "mixer": Grid(mixer_cases.BY_NAME, mixer_cases.verdicts),
}


class CaseError(Exception):
    """Says which cases ended by an exception; the others are judged."""


@dataclass(frozen=True)
class Subject:
    """Names a backend and the device type of this machine on which it runs."""

    backend: str
    device: str

    @property
    def emulated(self) -> bool:
        return self.device in BACKENDS[self.backend].emulated

    def dtypes(self, op: str = "gated_delta_rule") -> list[torch.dtype]:
        """Returns the dtypes of the grid in which the backend has the operation;
        none if it lacks it.
        """
        row = BACKENDS[self.backend].rows.get(op)
        return [dtype for dtype in DTYPES if row is not None and dtype in row.dtypes]

    @property
    def nki(self) -> str | None:
        """The release of NKI whose rules hold, or "all";
        None on another backend than the simulator.
        """
        return os.environ.get(RELEASE, "all") if self.backend == "nki-simulator" else None

    @property
    def functions(self) -> str | None:
        """What errors the simulator's functions have; None: none, or another backend."""
        return (os.environ.get(SIMULATED) or None) if self.backend == "nki-simulator" else None

    def cases(
        self, names: Sequence[str] | None, *, slow: bool, whole: bool = False
    ) -> dict[str, list[Any]]:
        """Returns the cases of each grid: those named, or all; of the rule, emulators get the small
        ones, unless they are to run the whole grid.
        """
        if names is not None:
            return {
                key: [x for n, x in grid.cases.items() if n in names] for key, grid in GRIDS.items()
            }
        every = {key: list(grid.cases.values()) for key, grid in GRIDS.items()}
        tags = SMALL if self.emulated and not whole else frozenset()
        return every | {"rule": select(tags=tags, slow=slow)}


def subjects(names: Sequence[str] | None = None) -> list[Subject]:
    """Returns the backends named, or all that run here, each on the first device type that it runs
    on.

    Raises BackendRefusal, with the reasons, for one that was named and cannot run on this machine.
    """
    chosen = []
    for name in names or BACKENDS:
        if name not in BACKENDS:
            raise BackendRefusal(f"no backend is named {name!r}; registered: {', '.join(BACKENDS)}")
        backend = BACKENDS[name]
        row = backend.rows.get("gated_delta_rule")
        reasons = []
        for device in machine.platforms():
            outside = row is None or (row.devices is not None and device not in row.devices)
            reason = f"does not run on {device}" if outside else backend.unavailable(device)
            if reason is None:
                chosen.append(Subject(name, device))
                break
            reasons.append(reason)
        else:
            if names:
                lines = [f"backend {name} cannot run here:", *(f"  {reason}" for reason in reasons)]
                raise BackendRefusal("\n".join(lines))
    return chosen


def measure(
    subject: Subject,
    grid: Grid,
    cases: Iterable[Any],
    refused: dict[tuple[str, torch.dtype], str],
    dtypes: Sequence[torch.dtype] = DTYPES,
    failed: dict[tuple[str, torch.dtype], str] | None = None,
) -> Iterator[Verdict]:
    """Judges one backend; `refused` gets what is outside its declared limits, with the reason.

    failed gets what ends in another exception, with its first line; None: the exception is raised.
    """
    for case in cases:
        for dtype in subject.dtypes(case.op):
            if dtype not in dtypes:
                continue
            try:
                yield from grid.verdicts(case, dtype, subject.backend, subject.device)
            except BackendRefusal as refusal:
                refused[case.name, dtype] = str(refusal)
            except Exception as error:  # Triton has a class for each way in which a launch can fail
                if failed is None or isinstance(error, (ValueError, OSError)):  # of what was asked
                    raise
                lines = f"{type(error).__name__}: {error}".splitlines()
                failed[case.name, dtype] = lines[0]


def row(verdict: Verdict, machine_facts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a line of results. Infinite errors and NaN become null; `passed` is then false."""
    numbers = {
        name: getattr(verdict, name) for name in ("error", "baseline", "allowed", "part", "element")
    }
    return {
        "op": verdict.op,
        "backend": verdict.backend,
        "case": verdict.case,
        "dtype": dtype_name(verdict.dtype),
        "tensor": verdict.tensor,
        **{name: x if math.isfinite(x) else None for name, x in numbers.items()},
        "passed": verdict.passed,
        **machine_facts,
    }


def worst_first(verdicts: Iterable[Verdict]) -> list[Verdict]:
    """Sorts by error over allowed; failures, NaN among them, come before anything that passed."""
    return sorted(verdicts, key=lambda verdict: (verdict.passed, -verdict.ratio))


def report(
    console: Console,
    verdicts: Sequence[Verdict],
    refused: Mapping[tuple[str, torch.dtype], str],
    ended: Mapping[tuple[str, torch.dtype], str] = types.MappingProxyType({}),
) -> None:
    """Prints the worst SHOWN rows and every failure, then one line per backend and dtype."""
    failures = sum(not verdict.passed for verdict in verdicts)
    table = Table(
        title=f"error against the float64 judge, worst first; allowed: {FACTOR:g} x the baseline's"
    )
    for heading in ("backend", "case", "dtype", "tensor"):
        table.add_column(heading)
    for heading in ("error", "baseline", "allowed", "worst/allowed"):
        table.add_column(heading, justify="right")
    for v in worst_first(verdicts)[: max(SHOWN, failures)]:
        numbers = (f"{x:.2e}" for x in (v.error, v.baseline, v.allowed))
        ratio = f"{v.ratio:.2f}" + ("" if v.passed else "  failed")
        style = None if v.passed else "bold red"
        table.add_row(
            v.backend, v.case, dtype_name(v.dtype), v.tensor, *numbers, ratio, style=style
        )
    console.print(table)
    for (name, dtype), reason in refused.items():
        console.print(f"case {name} refused in {dtype_name(dtype)}: {reason}", highlight=False)
    for (name, dtype), reason in ended.items():
        console.print(f"case {name} failed in {dtype_name(dtype)}: {reason}", style="bold red")
    for backend, dtype in dict.fromkeys((v.backend, v.dtype) for v in verdicts):
        group = [v for v in verdicts if (v.backend, v.dtype) == (backend, dtype)]
        failed, cases = sum(not v.passed for v in group), len({v.case for v in group})
        summary = f"{failed} of {len(group)} failed" if failed else f"all {len(group)} passed"
        worst = max(group, key=lambda v: v.ratio if math.isfinite(v.ratio) else math.inf)
        summary += f", at most {worst.ratio:.2f} of what is allowed ({worst.case}, {worst.tensor})"
        subject = Subject(backend, "cpu")
        rules = f" by the rules of NKI {subject.nki}" * bool(subject.nki)
        rules += f" with functions off as {subject.functions}" * bool(subject.functions)
        console.print(
            f"{backend} {dtype_name(dtype)}{rules}: {cases} cases, {summary}", highlight=False
        )


def main(argv: Sequence[str] | None = None) -> int:
    load_entry_points()
    parser = argparse.ArgumentParser(
        prog="delta-trn parity", description="Judges every backend by the float64 judge"
    )
    parser.add_argument("action", nargs="?", choices=tuple(_ACTIONS), default="run")
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("--backend", action="append", help="only this one; may be repeated")
    parser.add_argument(
        "--case",
        action="append",
        help="only this one; may be repeated; quarter: one of each kernel",
    )
    parser.add_argument(
        "--op",
        action="append",
        choices=OPERATIONS,
        help="only cases of this operation; may be repeated",
    )
    parser.add_argument("--dtype", choices=tuple(map(dtype_name, DTYPES)), help="only this one")
    parser.add_argument(
        "--whole",
        action="store_true",
        help="emulated backends, too, run every case that is not slow",
    )
    parser.add_argument("--slow", action="store_true", help="the slow cases too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write one JSON object per line")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write every case as a page")
    options = parser.parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 130)
    try:
        verdicts = _ACTIONS[options.action](options, console)
    except CaseError as failure:
        print(failure, file=sys.stderr)
        return 1
    except (BackendRefusal, ValueError, OSError) as complaint:
        print(complaint, file=sys.stderr)
        return 2
    return 0 if verdicts and all(verdict.passed for verdict in verdicts) else 1


def _run(options: argparse.Namespace, console: Console) -> list[Verdict]:
    known = {name: case for grid in GRIDS.values() for name, case in grid.cases.items()}
    named = options.case and [
        x for name in options.case for x in (QUARTER if name == "quarter" else (name,))
    ]
    for name in named or ():
        find(name, known)
    dtypes = [getattr(torch, options.dtype)] if options.dtype else DTYPES
    verdicts: list[Verdict] = []
    refused: dict[tuple[str, torch.dtype], str] = {}
    failed: dict[tuple[str, torch.dtype], str] = {}
    chosen = subjects(options.backend)
    # Line by line as cases are judged: whoever is stopped keeps what was judged before.
    with open(options.json or os.devnull, "w") as lines:
        for subject in chosen:
            machine_facts = facts(torch.device(subject.device))
            if subject.nki is not None:
                machine_facts["nki"] = subject.nki
            if subject.functions is not None:
                machine_facts["functions"] = subject.functions
            for key, cases in subject.cases(named, slow=options.slow, whole=options.whole).items():
                cases = [case for case in cases if not options.op or case.op in options.op]
                progress = track(
                    cases, subject.backend, console=Console(stderr=True), transient=True
                )
                ended: dict[tuple[str, torch.dtype], str] = {}
                for verdict in measure(subject, GRIDS[key], progress, refused, dtypes, ended):
                    verdicts.append(verdict)
                    print(json.dumps(row(verdict, machine_facts)), file=lines, flush=True)
                for (name, dtype), reason in ended.items():
                    about = {"backend": subject.backend, "case": name, "dtype": dtype_name(dtype)}
                    print(json.dumps({**about, "failed": reason, "passed": False}), file=lines)
                failed |= ended
    report(console, verdicts, refused, failed)
    if failed:
        names = ", ".join(dict.fromkeys(name for name, _ in failed))
        raise CaseError(f"ended by an exception: {names}")
    if options.markdown:
        reasons = {name: case.reason for name, case in known.items()}
        options.markdown.write_text(
            page.page(verdicts, reasons, refused, facts(torch.device(chosen[0].device)))
        )
    return verdicts


def _record(options: argparse.Namespace, console: Console) -> list[Verdict]:
    subject = subjects(options.backend)[0]
    cases = select(options.case, tags=frozenset() if options.case else SMALL)
    refused: dict[tuple[str, torch.dtype], str] = {}
    path = _single(options.files)
    verdicts = goldens.record(path, subject.backend, cases, subject.device, refused)
    report(console, verdicts, refused)
    return verdicts


def _check(options: argparse.Namespace, console: Console) -> list[Verdict]:
    verdicts = goldens.check(_single(options.files))
    report(console, verdicts, {})
    return verdicts


def _single(files: Sequence[Path]) -> Path:
    if len(files) != 1:
        raise ValueError(f"{len(files)} files named; name the one golden to write or to check")
    return files[0]


_ACTIONS = {"run": _run, "record": _record, "check": _check}


if __name__ == "__main__":
    sys.exit(main())
