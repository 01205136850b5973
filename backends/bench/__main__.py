"""Times the grid's shapes, each behind a green parity, side by side with peers.

    python -m backends.bench [--backend NAME] [--peer hf|fla] [--case NAME] [--dtype NAME] [--json FILE]
    python -m backends.bench --compile-only [--json FILE]
    python -m backends.bench table [FILE ...]       python -m backends.bench chart OUT [FILE ...]

The contenders take turns (`backends.timing`); a ratio is the median over the rounds of (peer's time / ours),
with its 20th and 80th percentile. A floor is the least time that the pass can take on this machine
(`backends.roofline`). Memory is what a forward and backward takes beyond the inputs: from CUDA's allocator,
or as the resident size of a fresh process. A case whose parity fails is not timed, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from delta_trn.backends import machine
from delta_trn.backends.bench import figures as bench_figures
from delta_trn.backends.bench import step as bench_step
from delta_trn.backends.bench.figures import PASSES, passes
from delta_trn.backends.bench.peers import PEERS, Run
from delta_trn.backends.bench.roofline import Ceilings, ceilings, work
from delta_trn.backends.bench.timing import Spread, interleaved, modes, ratios
from delta_trn.backends.gated_delta_rule import gated_delta_rule
from delta_trn.backends.machine import facts
from delta_trn.backends.parity.__main__ import NOT_RUN, Subject, subjects
from delta_trn.backends.parity.judge import GRADIENTS, verdicts
from delta_trn.backends.parity.rule_cases import BY_NAME, Case, Inputs, inputs, select
from delta_trn.backends.registry import BackendRefusal

COMPILER = ("-m", "delta_trn.triton_kernels.compile_only")


@dataclass(frozen=True)
class Timing:
    """One contender on one pass of one case.

    ratio           its time over ours, round by round; None for ourselves
    floor_ms        the least time that the pass can take here; with ours alone
    memory_bytes    with the pass forward+backward
    worst_error     error over allowed, of the parity that stands before a time of ours
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


def ours(backend: str) -> Run:
    """The public operation on one backend, as a contender."""

    def run(x: Inputs) -> Tensor:
        return gated_delta_rule(x.q, x.k, x.v, x.g, x.beta, backend=backend, **x.arguments())[0]

    return run


def contender(name: str) -> Run:
    """By name: a peer's, or one of our backends."""
    return PEERS[name].run() if name in PEERS else ours(name)


def prepared(run: Run, given: Inputs, phase: str) -> Callable[[], None]:
    """A call without arguments that does one pass."""
    tensors = given.tensors()
    leaves = {name: tensors[name].detach().requires_grad_() for name in GRADIENTS.values() if name in tensors}
    given, wanted = replace(given, **leaves), list(leaves.values())

    def forward() -> None:
        run(given)

    def both() -> None:
        torch.autograd.grad(run(given), wanted, given.do)

    if phase == "forward":
        return forward
    if phase == "forward+backward":
        return both
    o = run(given)

    def backward() -> None:
        torch.autograd.grad(o, wanted, given.do, retain_graph=True)

    return backward


def peak_bytes(name: str, case: Case, dtype: torch.dtype, device: torch.device) -> int:
    """What one forward and backward takes beyond the inputs, after one that loaded whatever it loads."""
    small = replace(case, B=1, T=min(case.T, 64), lengths=None)
    prepared(contender(name), inputs(small, dtype).to(device), "forward+backward")()
    call = prepared(contender(name), inputs(case, dtype).to(device), "forward+backward")
    machine.synchronize(device)
    machine.reset_peak_memory(device)
    before = machine.peak_memory(device)
    call()
    machine.synchronize(device)
    return machine.peak_memory(device) - before


def _peak_bytes_here(name: str, case: str, dtype: str, threads: int) -> int:
    torch.set_num_threads(threads)
    return peak_bytes(name, BY_NAME[case], getattr(torch, dtype), torch.device("cpu"))


def memory(name: str, case: Case, dtype: torch.dtype, device: torch.device) -> int:
    """`peak_bytes`, for CPU in a fresh process: in a used one, memory that was freed hides what is taken."""
    if device.type == "cuda":
        return peak_bytes(name, case, dtype, device)
    arguments = (name, case.name, str(dtype).removeprefix("torch."), torch.get_num_threads())
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_peak_bytes_here, arguments)


def bench(
    subject: Subject,
    case: Case,
    dtype: torch.dtype,
    peers: Sequence[str],
    seconds: float,
    ceiling: Ceilings,
) -> list[Timing]:
    """All passes of one case. Raises ParityError, with the failures, unless its parity is green."""
    device = torch.device(subject.device)
    judge = bench_step.step_verdicts if "step" in case.tags else verdicts
    found = judge(case, dtype, subject.backend, subject.device)
    failures = [str(verdict) for verdict in found if not verdict.passed]
    if failures:
        raise ParityError("\n".join([f"{case.name} is not timed, its parity is red:", *failures]))
    worst = max(verdict.ratio for verdict in found)
    names = [subject.backend, *peers]
    given, least = inputs(case, dtype).to(device), work(case, dtype)
    rows = []
    for phase in passes(case):
        taken = dict.fromkeys(names)
        if phase == "step":
            calls = {name: bench_step.prepared(name, given) for name in names}
        else:
            calls = {name: prepared(contender(name), given, phase) for name in names}
        if phase == "forward+backward":
            taken = {name: memory(name, case, dtype, device) for name in names}
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
                        dtype=str(dtype).removeprefix("torch."),
                        phase=phase + mode,
                        contender=name,
                        ms=Spread.of(milliseconds),
                        ratio=over[name],
                        rounds=len(milliseconds),
                        floor_ms=ceiling.floor_ms(least[phase]) if ours else None,
                        memory_bytes=taken[name],
                        worst_error=worst if ours else None,
                    )
                )
    return rows


class ParityError(RuntimeError):
    """A case's parity is red, so no time of it is worth having."""


def report(console: Console, rows: Sequence[Timing], cases: Iterable[Case], peers: Mapping[str, str]) -> None:
    """One line per case and pass: our time, the floor and its share of our time, then every peer's time and
    how many times ours; then memory.
    """
    table = Table(title="milliseconds, and peer over ours: median (20th - 80th percentile)")
    columns = [x for label in peers.values() for x in (label, "over ours")]
    for heading in ("case", "pass", "ours", "floor", *columns):
        table.add_column(heading, no_wrap=heading == "pass")
    for case in cases:
        mine = [row for row in rows if row.case == case.name]
        if not mine:
            table.add_row(str(case), *[NOT_RUN] * (3 + 2 * len(peers)))
        for phase in dict.fromkeys(row.phase for row in mine):
            here = {row.contender: row for row in mine if row.phase == phase}
            own = next(row for row in here.values() if row.ratio is None)
            theirs = [here.get(peer) for peer in peers]
            cells = [x for row in theirs for x in ((str(row.ms), str(row.ratio)) if row else (NOT_RUN, ""))]
            table.add_row(str(case), f"{phase} {own.dtype}", str(own.ms), _share(own), *cells)
            if own.memory_bytes is not None and phase == PASSES[-1]:
                cells = [x for row in theirs for x in _memory_cells(row, own.memory_bytes)]
                table.add_row(str(case), f"memory {own.dtype}", _mebibytes(own.memory_bytes), "", *cells)
    console.print(table)


def _share(row: Timing) -> str:
    return "" if row.floor_ms is None else f"{row.floor_ms:.3g}, {row.floor_ms / row.ms.p50:.0%}"


def _memory_cells(row: Timing | None, own: int) -> tuple[str, str]:
    if row is None or row.memory_bytes is None:
        return NOT_RUN, ""
    return _mebibytes(row.memory_bytes), f"{row.memory_bytes / max(own, 1):.3g}"


def _mebibytes(number: int) -> str:
    return f"{number / 2**20:.0f} MiB"


def line(row: Timing, about: Mapping[str, Any]) -> dict[str, Any]:
    """One JSON object."""
    values = asdict(row)
    return {
        "op": bench_step.OPERATION if row.phase.startswith("step") else "gated_delta_rule",
        "backend": values.pop("contender"),
        "pass": values.pop("phase"),
        **values,
        **about,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m backends.bench", description="Parity first, then the clock"
    )
    parser.add_argument("action", nargs="?", choices=("run", "table", "chart"), default="run")
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="of table and chart")
    parser.add_argument("--backend", help="the default one of this machine's device, unless named")
    parser.add_argument(
        "--peer", action="append", choices=tuple(PEERS), help="only this one; may be repeated"
    )
    parser.add_argument("--case", action="append", help="only this one; may be repeated")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="float32 on CPU, else bfloat16")
    parser.add_argument("--seconds", type=float, default=3.0, help="per pass (default: 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write one JSON object a line")
    parser.add_argument(
        "--compile-only",
        action="store_true",
        help="no clock: compile every Triton kernel for sm_90 and print what it takes; needs no GPU",
    )
    given = parser.parse_args(argv)
    if given.action != "run":
        return _figure(parser, given)
    if given.compile_only:
        return compile_only(given.json)
    try:
        subject = subjects([given.backend] if given.backend else None)[0]
        tag = "bench-cpu" if subject.device == "cpu" else "bench"
        cases = select(given.case, tags=frozenset({tag}))
    except (BackendRefusal, ValueError) as complaint:
        print(complaint, file=sys.stderr)
        return 2
    return _main(given, subject, cases)


def _figure(parser: argparse.ArgumentParser, given: argparse.Namespace) -> int:
    files = given.files
    if given.action == "table":
        print(bench_figures.markdown(bench_figures.read(files)))
    elif not files or files[0].suffix not in (".png", ".svg", ".pdf"):
        parser.error(
            f"chart wants a picture's name first, .png, .svg or .pdf; given: {list(map(str, files))}"
        )
    else:
        bench_figures.draw(bench_figures.read(files[1:]), files[0])
    return 0


def compile_only(file: Path | None) -> int:
    """The table of `triton_kernels.compile_only`, also into `file`; its exit status.

    In a process of its own: under TRITON_INTERPRET=1, which tests set, a kernel is a Python function. From
    the repository's root: the Triton project has a package of the same name.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, *COMPILER, *(["--json", str(file.resolve())] if file else [])]
    return subprocess.run(command, env=environment, cwd=Path(__file__).parents[2], check=False).returncode


def _main(given: argparse.Namespace, subject: Subject, cases: Sequence[Case]) -> int:
    console = Console(width=None if sys.stdout.isatty() else 160)
    dtype = getattr(torch, given.dtype or ("float32" if subject.device == "cpu" else "bfloat16"))
    wanted = given.peer or list(PEERS)
    absent = {name: reason for name in wanted if (reason := PEERS[name].absent(subject.device))}
    peers = [name for name in wanted if name not in absent]
    device = torch.device(subject.device)
    ceiling = ceilings(device, dtype)
    about = facts(device) | ceiling.facts()
    console.print(
        f"{subject.backend} on {about['device']}, {about['threads']} threads, torch {about['torch']}"
    )
    console.print(f"this machine at its best: {ceiling}", highlight=False)
    for name, reason in absent.items():
        console.print(f"peer {name}: {NOT_RUN}, {reason}", highlight=False)
    rows: list[Timing] = []
    red = False
    for case in cases:
        able = [name for name in peers if PEERS[name].packed or not case.lengths]
        try:
            rows += bench(subject, case, dtype, able, given.seconds, ceiling)
        except ParityError as failure:
            red = True
            console.print(str(failure), style="bold red")
        except BackendRefusal as refusal:
            console.print(f"case {case.name}: {NOT_RUN}, {refusal}", highlight=False)
    report(console, rows, cases, {name: name if name in absent else PEERS[name].label() for name in wanted})
    if given.json:
        given.json.write_text("".join(json.dumps(line(row, about)) + "\n" for row in rows))
    return 1 if red or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
