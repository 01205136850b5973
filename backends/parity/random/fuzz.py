"""Runs random cases on a backend in several processes, and resumes where it was stopped.

    python -m backends.parity fuzz --backend NAME [--cases N] [--seed S] [--minutes M] [--processes P]
        [--state FILE]
    python -m backends.parity fuzz --backend NAME --only SEED:INDEX
    python -m backends.parity fuzz --backend NAME --honest      how often chance fails an honest result

Each failure is one line that reproduces it. A state file has one JSON object a line: what was run, and then
each piece of work with its failures. A run with the same file repeats nothing that stands there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    Executor,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    wait,
)
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from delta_trn.backends.checks import BackendRefusal
from delta_trn.backends.parity.random import cases, properties, sizes

PIECE = {False: 50, True: 2}  # cases in a piece of work; of an emulated backend
FORMAT = "delta-trn fuzz 1"


@dataclass(frozen=True)
class Plan:
    """Says which cases are run where."""

    backend: str
    device: str
    seed: int
    cases: int
    honest: bool = False

    def header(self) -> dict[str, Any]:
        """Returns the first line of a state file, which a run that resumes must share."""
        source = b"".join(Path(module.__file__ or "").read_bytes() for module in (cases, sizes))
        return {
            "format": FORMAT, "backend": self.backend, "device": self.device, "seed": self.seed,
            "generator": hashlib.sha256(source).hexdigest()[:12],
        } | ({"honest": True} if self.honest else {})  # fmt: skip


@dataclass
class Piece:
    """Holds what became of some cases, by their operations: first to first + count."""

    first: int
    count: int
    passed: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    worst: float = 0.0
    seconds: float = 0.0


@dataclass
class Tally(Piece):
    """Adds up pieces."""

    def add(self, piece: Piece) -> None:
        self.count += piece.count
        self.passed.update(piece.passed)
        self.refused.update(piece.refused)
        self.failures += piece.failures
        self.worst, self.seconds = max(self.worst, piece.worst), self.seconds + piece.seconds


def run_piece(plan: Plan, first: int, count: int) -> Piece:
    """Runs cases in this process, with one thread: a second would be another process's."""
    threads, piece, start = torch.get_num_threads(), Piece(first, count), time.process_time()
    torch.set_num_threads(1)
    try:
        for index in range(first, first + count):
            _run_case(plan, index, piece)
    finally:
        torch.set_num_threads(threads)
    piece.seconds = time.process_time() - start
    return piece


def _run_case(plan: Plan, index: int, piece: Piece) -> None:
    case = cases.draw(plan.seed, index, plan.backend, plan.device)
    try:
        ratio = properties.check_sample(case) if plan.honest else properties.check(case, plan.backend)
        piece.worst = max(piece.worst, ratio)
        piece.passed[case.op] += 1
    except BackendRefusal as refusal:
        piece.refused[str(refusal)] += 1
    except Exception as complaint:
        what = " ".join(f"{type(complaint).__name__}: {complaint}".split())
        piece.failures.append(f"{reproduce(plan, case.name)}   # {what[:300]}; {case}")


def reproduce(plan: Plan, name: str) -> str:
    """Returns the command that runs one case."""
    return f"python -m backends.parity fuzz --backend {plan.backend} --only {name}"


def open_pieces(plan: Plan, done: Iterable[tuple[int, int]], size: int) -> Iterator[tuple[int, int]]:
    """Yields what is left to run, as (first, count), in pieces of at most `size` cases."""
    first = 0
    for start, count in [*sorted(done), (plan.cases, 0)]:
        while first < min(start, plan.cases):
            end = min(first + size, start, plan.cases)
            yield first, end - first
            first = end
        first = max(first, start + count)


def read_state(path: Path, plan: Plan) -> list[Piece]:
    """Returns the pieces of a state file, none if there is no file.

    Raises ValueError if it is of other cases. A line that a kill cut short does not count.
    """
    if not path.exists():
        return []
    header, *lines = path.read_text().split("\n")
    if json.loads(header or "{}") != plan.header():
        raise ValueError(f"{path} is of other cases: {header}, here {plan.header()}; name another --state")
    pieces = []
    for line in lines[:-1]:  # what follows the last newline is empty, or cut short
        row = json.loads(line)
        piece = Piece(**row)
        piece.passed, piece.refused = Counter(row["passed"]), Counter(row["refused"])
        pieces.append(piece)
    return pieces


class State:
    """Appends pieces to a state file."""

    def __init__(self, path: Path | None, plan: Plan) -> None:
        self.file = None
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text() if path.exists() else json.dumps(plan.header()) + "\n"
        whole = text[: text.rfind("\n") + 1]
        if not path.exists() or whole != text:
            path.write_text(whole)
        self.file = path.open("a")

    def add(self, piece: Piece) -> None:
        """Writes a piece through to the disk."""
        if self.file is not None:
            self.file.write(json.dumps(vars(piece)) + "\n")
            self.file.flush()
            os.fsync(self.file.fileno())


def run(
    plan: Plan, console: Console, *, emulated: bool, processes: int, minutes: float | None, state: Path | None
) -> Tally:
    """Runs the cases that are left, shows progress on stderr, and prints each failure as it comes."""
    tally = Tally(0, 0)
    before = [] if state is None else read_state(state, plan)
    for piece in before:
        tally.add(piece)
    for line in tally.failures:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    left = open_pieces(plan, [(piece.first, piece.count) for piece in before], PIECE[emulated])
    file, end = State(state, plan), None if minutes is None else time.monotonic() + 60 * minutes
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with (
        Progress(*columns, console=Console(stderr=True)) as progress,
        _executor(processes) as pool,
    ):
        bar = progress.add_task(plan.backend, total=plan.cases, completed=tally.count)
        running: dict[Future[Piece], tuple[int, int]] = {}
        while True:
            while len(running) < 2 * processes and (end is None or time.monotonic() < end):
                work = next(left, None)
                if work is None:
                    break
                running[pool.submit(run_piece, plan, *work)] = work
            if not running:
                return tally
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                try:
                    piece = future.result()
                except BrokenProcessPool as broken:
                    pieces = ", ".join(f"{plan.seed}:{a} and {n - 1} more" for a, n in running.values())
                    raise ValueError(
                        f"a process died in one of these cases: {pieces}; run them with --processes 1"
                    ) from broken
                del running[future]
                file.add(piece)
                tally.add(piece)
                for line in piece.failures:
                    progress.console.print(line, markup=False, highlight=False, soft_wrap=True)
                progress.update(
                    bar, completed=tally.count, description=f"{plan.backend}, {len(tally.failures)} failed"
                )


def _executor(processes: int) -> Executor:
    """Returns where pieces run: in processes of their own, or with one in a thread of this process."""
    if processes == 1:
        return ThreadPoolExecutor(1)
    return ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"))


def run_one(plan: Plan, index: int, console: Console) -> int:
    """Runs one case here, and prints it, with the traceback of a failure."""
    case = cases.draw(plan.seed, index, plan.backend, plan.device)
    console.print(str(case), markup=False, highlight=False, soft_wrap=True)
    for name, x in case.tensors.items():
        console.print(
            f"  {name} {list(x.shape)} {x.dtype} strides {x.stride()}", markup=False, highlight=False
        )
    console.print(
        f"  {dict(case.options)}, loss of {list(case.douts)}, gradients of {case.wanted}", markup=False
    )
    try:
        worst = properties.check(case, plan.backend)
    except BackendRefusal as refusal:
        console.print(f"refused: {refusal}", markup=False, highlight=False)
        return 0
    except Exception:
        traceback.print_exc()
        return 1
    console.print(f"passed, at most {worst:.2f} of the allowed error", highlight=False)
    return 0


def summary(plan: Plan, tally: Tally) -> str:
    """Returns one line: how many passed, were refused and failed."""
    refused = sum(tally.refused.values())
    subject = "the baseline" if plan.honest else plan.backend
    return (
        f"{subject}, seed {plan.seed}: {sum(tally.passed.values())} of {tally.count} cases passed, "
        f"{len(tally.failures)} failed, {refused} refused; at most {tally.worst:.2f} of the allowed error; "
        f"{tally.seconds:.0f} s of CPU"
    )


def main(argv: Sequence[str], plan_for: Any) -> int:
    """Runs the command. `plan_for` maps a backend's name to (device, emulated), and raises BackendRefusal."""
    parser = argparse.ArgumentParser(
        prog="delta-trn parity fuzz", description="Runs random cases on a backend"
    )
    parser.add_argument("--backend", required=True)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", metavar="SEED:INDEX", help="run this case alone, with its traceback")
    parser.add_argument(
        "--honest", action="store_true", help="judge a sample of the baseline in the place of the backend"
    )
    parser.add_argument("--minutes", type=float, help="stop after so long")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--state", type=Path, metavar="FILE", help="resume from, and append to, this file")
    options = parser.parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 130)
    device, emulated = plan_for(options.backend)
    if options.only:
        seed, colon, index = options.only.partition(":")
        if not (colon and seed.isdigit() and index.isdigit()):
            raise ValueError(
                f"--only {options.only!r} is not SEED:INDEX; pass two numbers, as a failure prints"
            )
        return run_one(Plan(options.backend, device, int(seed), int(index) + 1), int(index), console)
    plan = Plan(options.backend, device, options.seed, options.cases, options.honest)
    tally = run(
        plan, console, emulated=emulated, processes=options.processes, minutes=options.minutes,
        state=options.state,
    )  # fmt: skip
    console.print(summary(plan, tally), highlight=False, soft_wrap=True)
    for reason, count in tally.refused.most_common(5):
        console.print(f"  {count} refused: {reason}", markup=False, highlight=False, soft_wrap=True)
    return 1 if tally.failures else 0
