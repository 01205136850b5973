"""Times the cases that pass parity, side by side with peers.

    python -m backends.bench [--backend NAME] [--peer hf|fla] [--case NAME] [--dtype NAME] [--json FILE]
    python -m backends.bench table [FILE ...]

The contenders take turns (`timing.py`). A ratio is the median over the rounds of (peer's time / ours), with
its 20th and 80th percentile. A floor is the least time that the pass can take here (`roofline.py`). Memory is
what a forward and backward takes beyond the inputs: from CUDA's allocator, or as the resident size of a fresh
process.

The exit status is 1 where a case fails parity, which is then not timed, and where a pass takes less time than
its floor: then the machine was busy while its best was measured, and that line has no floor.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from delta_trn.backends import machine
from delta_trn.backends.bench import figures, step
from delta_trn.backends.bench.figures import PASSES, passes
from delta_trn.backends.bench.peers import PEERS, Run
from delta_trn.backends.bench.roofline import Ceilings, Work, ceilings, work
from delta_trn.backends.bench.timing import Spread, interleaved, modes, ratios
from delta_trn.backends.checks import dtype_name
from delta_trn.backends.gated_delta_rule import gated_delta_rule
from delta_trn.backends.machine import facts
from delta_trn.backends.parity.__main__ import Subject, subjects
from delta_trn.backends.parity.page import NOT_RUN
from delta_trn.backends.parity.rule import GRADIENTS, verdicts
from delta_trn.backends.parity.rule_cases import BY_NAME, Case, Inputs, inputs, select
from delta_trn.backends.registry import BackendRefusal


@dataclass(frozen=True)
class Timing:
    """Holds the times of one contender on one pass of one case.

    ratio           its time over ours, round by round; None for ourselves
    floor_ms        the least time that the pass can take here; only with ours, and if nothing beats it
    memory_bytes    only with the pass forward+backward
    worst_error     error over allowed in the parity before the timing; only with ours
    """

    case: str
    dtype: str
    phase: str
    contender: str
    ms: Spread
    ratio: Spread | None
    rounds: int
    floor_ms: float | None
    memory_bytes: int | None
    worst_error: float | None


class ParityError(RuntimeError):
    """Says that a case fails parity, so that its time would mean nothing."""


def contender(name: str) -> Run:
    """Returns a peer's operation, or the public operation on one of our backends."""
    if name in PEERS:
        return PEERS[name].run()

    def run(x: Inputs) -> Tensor:
        return gated_delta_rule(x.q, x.k, x.v, x.g, x.beta, backend=name, **x.arguments())[0]

    return run


def pass_call(run: Run, x: Inputs, phase: str) -> Callable[[], None]:
    """Returns a call without arguments that does one pass."""
    tensors = x.tensors()
    leaves = {name: tensors[name].detach().requires_grad_() for name in GRADIENTS.values() if name in tensors}
    x, sources = replace(x, **leaves), list(leaves.values())

    def forward() -> None:
        run(x)

    def both() -> None:
        torch.autograd.grad(run(x), sources, x.do)

    if phase == "forward":
        return forward
    if phase == "forward+backward":
        return both
    o = run(x)

    def backward() -> None:
        torch.autograd.grad(o, sources, x.do, retain_graph=True)

    return backward


def peak_bytes(name: str, case: Case, dtype: torch.dtype, device: torch.device) -> int:
    """Measures the memory that one forward and backward takes beyond the inputs, after a small warm-up."""
    small = replace(case, B=1, T=min(case.T, 64), lengths=None)
    pass_call(contender(name), inputs(small, dtype).to(device), "forward+backward")()
    call = pass_call(contender(name), inputs(case, dtype).to(device), "forward+backward")
    machine.synchronize(device)
    machine.return_freed_memory()
    machine.reset_peak_memory(device)
    before = machine.peak_memory(device)
    call()
    machine.synchronize(device)
    return machine.peak_memory(device) - before


def _peak_bytes_here(name: str, case: str, dtype: str, threads: int) -> int:
    torch.set_num_threads(threads)
    return peak_bytes(name, BY_NAME[case], getattr(torch, dtype), torch.device("cpu"))


def memory(name: str, case: Case, dtype: torch.dtype, device: torch.device) -> int:
    """Measures `peak_bytes`; on a CPU in a fresh process, since in a used one freed memory hides new use."""
    if device.type == "cuda":
        return peak_bytes(name, case, dtype, device)
    arguments = (name, case.name, dtype_name(dtype), torch.get_num_threads())
    # by its module's name: in `python -m backends.bench` this file is __main__, which the child cannot import
    measure = import_module("delta_trn.backends.bench.__main__")._peak_bytes_here
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, arguments)


def bench(
    subject: Subject,
    case: Case,
    dtype: torch.dtype,
    peers: Sequence[str],
    seconds: float,
    limits: Ceilings,
) -> list[Timing]:
    """Times all passes of one case. Raises ParityError, with the failures, unless its parity is green."""
    device = torch.device(subject.device)
    judge = step.step_verdicts if "step" in case.tags else verdicts
    judged = judge(case, dtype, subject.backend, subject.device)
    failures = [str(verdict) for verdict in judged if not verdict.passed]
    if failures:
        raise ParityError("\n".join([f"{case.name} is not timed, its parity is red:", *failures]))
    worst = max(verdict.ratio for verdict in judged)
    names = [subject.backend, *peers]
    x, least = inputs(case, dtype).to(device), work(case, dtype)
    rows = []
    for phase in passes(case):
        memories: dict[str, int | None] = dict.fromkeys(names)
        if phase == "step":
            calls = {name: step.step_call(name, x) for name in names}
        else:
            calls = {name: pass_call(contender(name), x, phase) for name in names}
        if phase == "forward+backward":
            memories = {name: memory(name, case, dtype, device) for name in names}
        for mode, running in modes(calls, device).items():
            if subject.backend not in running:
                continue
            times = interleaved(running, device, seconds)
            over = ratios(times, subject.backend)
            for name, milliseconds in times.items():
                ours = name == subject.backend
                rows.append(
                    Timing(
                        case=case.name,
                        dtype=dtype_name(dtype),
                        phase=phase + mode,
                        contender=name,
                        ms=Spread.of(milliseconds),
                        ratio=over[name],
                        rounds=len(milliseconds),
                        floor_ms=limits.floor_ms(least[phase]) if ours else None,
                        memory_bytes=memories[name],
                        worst_error=worst if ours else None,
                    )
                )
    return rows


def work_of(row: Timing) -> Work:
    """Returns the work of a timing's pass."""
    return work(BY_NAME[row.case], getattr(torch, row.dtype))[row.phase.split()[0]]


def without_beaten_floors(rows: Sequence[Timing]) -> tuple[list[Timing], list[str]]:
    """Returns the timings, without a floor where a pass took less time than it, and what there is to say."""
    beaten = [row for row in rows if row.floor_ms is not None and row.floor_ms > row.ms.p50]
    messages = [
        f"no floor: {row.case}, {row.phase} took {row.ms.p50:.4g} ms, less than the {row.floor_ms:.4g} that "
        "this machine needs at its best; something else kept it busy: run this again when it is idle"
        for row in beaten
    ]
    return [replace(row, floor_ms=None) if row in beaten else row for row in rows], messages


def report(console: Console, rows: Sequence[Timing], cases: Iterable[Case], peers: Mapping[str, str]) -> None:
    """Prints one line per case and pass: our time, its floor, every peer's time and ratio; then memory."""
    table = Table(title="milliseconds, and peer over ours: median (20th - 80th percentile)")
    for heading in ("case", "pass", "ours", "floor"):
        table.add_column(heading, no_wrap=heading == "pass")
    for label in peers.values():
        table.add_column(label)
        table.add_column("over ours")
    for case in cases:
        timed = [row for row in rows if row.case == case.name]
        if not timed:
            table.add_row(str(case), *[NOT_RUN] * (3 + 2 * len(peers)))
        for phase in dict.fromkeys(row.phase for row in timed):
            here = {row.contender: row for row in timed if row.phase == phase}
            own = next(row for row in here.values() if row.ratio is None)
            theirs = [here.get(peer) for peer in peers]
            floor = "" if own.floor_ms is None else f"{own.floor_ms:.3g}, {own.floor_ms / own.ms.p50:.0%}"
            cells = [x for row in theirs for x in ((str(row.ms), str(row.ratio)) if row else (NOT_RUN, ""))]
            table.add_row(str(case), f"{phase} {own.dtype}", str(own.ms), floor, *cells)
            if own.memory_bytes is not None and phase == PASSES[-1]:
                cells = [x for row in theirs for x in _memory_cells(row, own.memory_bytes)]
                table.add_row(str(case), f"memory {own.dtype}", _mebibytes(own.memory_bytes), "", *cells)
    console.print(table)


def _memory_cells(row: Timing | None, own: int) -> tuple[str, str]:
    if row is None or row.memory_bytes is None:
        return NOT_RUN, ""
    return _mebibytes(row.memory_bytes), f"{row.memory_bytes / max(own, 1):.3g}"


def _mebibytes(number: int) -> str:
    return f"{number / 2**20:.0f} MiB"


def line(row: Timing, machine_facts: Mapping[str, Any], limits: Ceilings) -> dict[str, Any]:
    """Returns a line of results."""
    values = asdict(row)
    return {
        "op": step.OPERATION if row.phase.startswith("step") else "gated_delta_rule",
        "backend": values.pop("contender"),
        "pass": values.pop("phase"),
        **values,
        **machine_facts,
        **limits.facts(work_of(row)),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="delta-trn bench", description="Checks parity, then times the cases"
    )
    parser.add_argument("action", nargs="?", choices=("run", "table"), default="run")
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="of table")
    parser.add_argument("--backend", help="instead of the default one of this machine's device")
    parser.add_argument("--peer", action="append", choices=tuple(PEERS), help="only this; may be repeated")
    parser.add_argument("--case", action="append", help="only this one; may be repeated")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="float32 on CPU, else bfloat16")
    parser.add_argument("--seconds", type=float, default=3.0, help="per pass (default: 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write one JSON object per line")
    options = parser.parse_args(argv)
    if options.action == "table":
        print(figures.markdown(figures.read(options.files)))
        return 0
    try:
        subject = subjects([options.backend] if options.backend else None)[0]
        tag = "bench-cpu" if subject.device == "cpu" else "bench"
        cases = select(options.case, tags=frozenset({tag}))
    except (BackendRefusal, ValueError) as complaint:
        print(complaint, file=sys.stderr)
        return 2
    return _run(options, subject, cases)


def _run(options: argparse.Namespace, subject: Subject, cases: Sequence[Case]) -> int:
    console = Console(width=None if sys.stdout.isatty() else 160)
    device = torch.device(subject.device)
    dtype = getattr(torch, options.dtype or ("float32" if subject.device == "cpu" else "bfloat16"))
    wanted = options.peer or list(PEERS)
    absent = {name: reason for name in wanted if (reason := PEERS[name].absent(subject.device))}
    limits = ceilings(device, dtype)
    machine_facts = facts(device)
    console.print(
        f"{subject.backend} on {machine_facts['device']}, {machine_facts['threads']} threads, "
        f"torch {machine_facts['torch']}"
    )
    console.print(f"this machine at its best: {limits}", highlight=False)
    for name, reason in absent.items():
        console.print(f"peer {name}: {NOT_RUN}, {reason}", highlight=False)
    rows: list[Timing] = []
    red = False
    for case in cases:
        able = [name for name in wanted if name not in absent and (PEERS[name].packed or not case.lengths)]
        try:
            rows += bench(subject, case, dtype, able, options.seconds, limits)
        except ParityError as failure:
            red = True
            console.print(str(failure), style="bold red")
        except BackendRefusal as refusal:
            console.print(f"case {case.name}: {NOT_RUN}, {refusal}", highlight=False)
    rows, messages = without_beaten_floors(rows)
    report(console, rows, cases, {name: name if name in absent else PEERS[name].label() for name in wanted})
    for message in messages:
        console.print(message, highlight=False)
    if options.json:
        options.json.write_text("".join(json.dumps(line(row, machine_facts, limits)) + "\n" for row in rows))
    unbounded = any(row.ratio is None and row.floor_ms is None for row in rows)
    return 1 if red or unbounded or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
