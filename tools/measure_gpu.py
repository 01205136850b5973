"""A first quarter of an hour on a GPU: numbers come early, and nothing that fails stops the rest.

    python -m tools.measure_gpu [STEP ...] [--out DIR] [--dry MODULE]

    machine     what a launch needs, each with its remedy; one small call of each operation
    compile     the kernels of the headline cases, by all cores
    headline    eight cases, judged and timed beside flash-linear-attention
    parity      every case, those that most models use first
    tests       Hopper's kernels, other layouts, CUDA graphs
    steps       whole training steps beside flash-linear-attention

Each case of `headline`, and each part of the other steps, is a process of its own: a CUDA error
spoils its process, and no other. What fails is named and passed over. Lines are written at once:
DIR/measure.jsonl has one for each process, DIR/data.jsonl the times, DIR/parity.jsonl the verdicts,
DIR/throughput.jsonl the steps. The exit status is 0 where nothing failed, 1 where something did, and
2 where `machine` says that no kernel can be launched: then nothing else is tried.

With --dry every process runs through a module that emulates a GPU, `python -m MODULE ...`, on cases
cut to a few tokens and a part of the grid: to see that all of it runs, and not to measure.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from delta_trn.backends.parity import channel_cases, layer_cases, rule_cases
from delta_trn.backends.parity.__main__ import QUARTER

CASES = {**rule_cases.BY_NAME, **channel_cases.BY_NAME}
# what a user of these kernels asks first comes first
HEADLINE = (
    "qwen3_four",
    "kimi_8192",
    "qwen3_next",
    "paper_1024",
    "qwen3_wide",
    "kimi_four",
    "paper_512",
    "qwen3_eighth",
)
LIMIT_S, DRY_LIMIT_S = 900, 300
WIDTHS = (512, 1024)
TESTS = (
    "tests/triton_kernels/test_gated_delta_rule.py",
    "tests/triton_kernels/test_segments.py",
    "tests/triton_kernels/test_parity.py",
)


class Job(NamedTuple):
    """A process: of which step, what it is about, and its words after `python -m`.

    lines       the file that it writes, which is added to `into`
    """

    step: str
    name: str
    words: tuple[str, ...]
    lines: Path | None = None
    into: str = ""


class Measurement:
    """Runs jobs and writes what became of them."""

    def __init__(self, out: Path, through: str | None) -> None:
        self.out, self.through = out, through
        self.failed: list[str] = []
        self.parts = out / "parts"
        self.parts.mkdir(parents=True, exist_ok=True)
        for name in ("measure", "data", "parity", "throughput"):
            (out / f"{name}.jsonl").write_text("")

    def file(self, name: str) -> Path:
        """Returns the file of a job's lines."""
        path = self.parts / f"{name}.jsonl"
        path.unlink(missing_ok=True)
        return path

    def run(self, jobs: Sequence[Job], at_once: int = 1) -> list[int]:
        """Runs jobs in order; returns their exit statuses. Emulated ones may run beside each other."""
        with ThreadPoolExecutor(at_once if self.through else 1) as pool:
            return list(pool.map(self._run, jobs))

    def _run(self, job: Job) -> int:
        # neither needs a GPU: pytest emulates one itself, and warmup compiles for one
        alone = job.words[0] == "pytest" or "warmup" in job.words
        through = [self.through] if self.through and not alone else []
        command = [sys.executable, "-m", *through, *job.words]
        begun = time.monotonic()
        try:
            limit = DRY_LIMIT_S if self.through else LIMIT_S
            done = subprocess.run(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=limit,
                env=_environment(dry=bool(self.through)),
            )
            status, told = done.returncode, done.stdout
        except subprocess.TimeoutExpired as late:
            told = (late.stdout or b"").decode(errors="replace")
            status, told = 124, f"{told}\nstopped after {late.timeout:.0f} s\n"
        seconds = round(time.monotonic() - begun, 1)
        lines = job.lines.read_text() if job.lines is not None and job.lines.exists() else ""
        if job.into:
            with (self.out / f"{job.into}.jsonl").open("a") as file:
                file.write(lines)
        row = {"step": job.step, "name": job.name, "status": status, "seconds": seconds}
        if self.through:
            row["dry"] = True
        if status:
            row["told"] = told.splitlines()[-8:]
            self.failed.append(f"{job.step} {job.name}")
        with (self.out / "measure.jsonl").open("a") as file:
            print(json.dumps(row), file=file)
        print(f"== {job.step} {job.name}: {'FAILED' if status else 'done'}, {seconds} s")
        print(told, flush=True)
        return status


def _environment(dry: bool) -> dict[str, str]:
    """Returns the environment of the processes that are started, in which kernels are compiled."""
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONUNBUFFERED"] = "1"
    if dry:
        environment.setdefault("OMP_NUM_THREADS", "1")  # two processes run beside each other
    return environment


def machine(m: Measurement) -> int:
    """Asks what a launch needs, and makes one small call of each operation."""
    return m.run([Job("machine", "needs", ("delta_trn.backends", "--gpu"))])[0]


def compile_(m: Measurement) -> None:
    """Compiles what the headline cases launch, and what parity does."""
    words: list[str] = ["delta_trn.train", "warmup", "--bench"]
    if m.through:
        words += ["--case", "hopper_96", "--capability", "9.0"]
    else:
        words += [word for name in HEADLINE for word in ("--case", name)]
    m.run([Job("compile", "headline", tuple(words))])


def headline(m: Measurement) -> None:
    """Judges and times the headline cases."""
    jobs = []
    for name in HEADLINE:
        words = ["delta_trn.backends.bench", "--backend", "triton", "--peer", "fla"]
        words += ["--seconds", "0" if m.through else "1", "--case", name]
        file = m.file(name)
        words += ["--json", str(file), *(["--small"] if m.through else [])]
        jobs.append(Job("headline", name, tuple(words), file, "data"))
    m.run(jobs, at_once=2)


def groups() -> Iterator[tuple[str, list[str]]]:
    """Yields names of parity's cases by worth: Hopper's kernels, one of each kernel, then the rest."""
    left = dict.fromkeys(
        [*CASES, *rule_cases.STEPS, *channel_cases.STEPS, *layer_cases.BY_NAME], True
    )
    left = {name: True for name in left if "slow" not in getattr(CASES.get(name), "tags", ())}
    usual = ("gates", "norm", "packed", "gva_2", "seam_129", "k96", "kimi_bound", "kimi_gates")
    for title, some in (
        ("hopper", [name for name in left if "hopper" in name]),
        ("usual", [*usual, *(name for name in QUARTER if not name.startswith("mixer"))]),
        ("rule", [*rule_cases.BY_NAME]),
        ("channels", [*channel_cases.BY_NAME]),
        ("layers", [*layer_cases.BY_NAME]),
        ("decoding", [*rule_cases.STEPS, *channel_cases.STEPS]),
    ):
        mine = [name for name in some if left.pop(name, False)]
        yield title, mine


def parity(m: Measurement) -> None:
    """Judges every case; those of a process that failed once more, each alone."""
    if not m.through:
        m.run([Job("compile", "parity", ("delta_trn.train", "warmup", "--bench", "--parity"))])
    jobs = []
    for title, names in groups():
        dry = names[:1] if title != "layers" else ["norm_head", "loss_ignored"]
        jobs.append(_judge(m, title, dry if m.through else names))
    for job, status in zip(jobs, m.run(jobs, at_once=2), strict=True):
        if not status or m.through:
            continue
        assert job.lines is not None
        rows = [json.loads(line) for line in job.lines.read_text().splitlines()]
        names = [job.words[i + 1] for i, word in enumerate(job.words) if word == "--case"]
        right = {row["case"] for row in rows if row["passed"]}
        wrong = {row["case"] for row in rows if "tensor" in row and not row["passed"]}
        spoiled = [name for name in names if name not in right - wrong and name not in wrong]
        m.run([_judge(m, name, [name]) for name in spoiled])


def _judge(m: Measurement, title: str, names: Sequence[str]) -> Job:
    file = m.file(f"parity-{title}")
    words = ["delta_trn.backends.parity", "--backend", "triton", "--json", str(file)]
    words += ["--dtype", "bfloat16"] if m.through else []
    words += [word for name in names for word in ("--case", name)]
    return Job("parity", title, tuple(words), file, "parity")


def tests(m: Measurement) -> None:
    """Runs the tests that need a GPU, or the emulator."""
    words = ("pytest", "-m", "not slow")
    if m.through:
        inverse = ("-k", "triangular_inverse_of_random and bfloat16", TESTS[0])
        m.run([Job("tests", "inverse", (*words, "--emulate", *inverse))])
        return
    jobs = [Job("tests", Path(file).stem, (*words, "--backend", "triton", file)) for file in TESTS]
    m.run(jobs)


def steps(m: Measurement) -> None:
    """Times whole training steps."""
    jobs = []
    for width in WIDTHS[:1] if m.through else WIDTHS:
        file = m.file(f"width-{width}")
        words = ["delta_trn.train", "throughput"]
        if m.through:
            words += ["tiny", "precision=bf16", "model.layers=1", "--rounds", "2"]
        else:
            words += ["gdn_mup_adamw", f"model.width={width}"]
            words += ["batch.sequences=30", "batch.micro=30"]
        words += ["--peer", "fla", "--json", str(file)]
        jobs.append(Job("steps", f"width {width}", tuple(words), file, "throughput"))
    m.run(jobs)


STEPS = {
    "machine": machine,
    "compile": compile_,
    "headline": headline,
    "parity": parity,
    "tests": tests,
    "steps": steps,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the steps; returns 2 where no kernel can be launched, else whether anything failed."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.measure_gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("steps", nargs="*", metavar="STEP", help="only these; default: all")
    parser.add_argument("--out", type=Path, default=Path("runs/measured"), help="(%(default)s)")
    parser.add_argument("--dry", metavar="MODULE", help="run every process through this module")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.steps if name not in STEPS]:
        parser.error(f"step {unknown[0]!r} is not one of {', '.join(STEPS)}")
    m = Measurement(options.out, options.dry)
    for name in options.steps or STEPS:
        if STEPS[name](m) == 2:
            print("no kernel can be launched; what is missing stands above, with its remedy")
            return 2
    if m.failed:
        print(f"{len(m.failed)} failed, the others are written: {', '.join(m.failed)}")
    else:
        print(f"nothing failed; the lines are in {options.out}")
    return 1 if m.failed else 0


if __name__ == "__main__":
    sys.exit(main())
