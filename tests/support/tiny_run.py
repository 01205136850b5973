"""Runs training for about a second, in this process or in one that a test can kill."""

import contextlib
import io
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from delta_trn.train.__main__ import main
from delta_trn.train.run import setup
from delta_trn.train.watch.metrics import MEASURED, read
from tests.support import warm
from tests.support.corpus import prepare_text
from tests.support.tiny_models import ORDINARY

# A run that sums in another order may end this many times as far off as the controls do, since
# three are few: on three instruction sets (ATEN_CPU_CAPABILITY default, avx2, avx512), nine other
# orders came out at up to 2.9 times the largest of three.
SPREAD = 8
# the relative error of one sum in another order; tests/support/tiny_models.py derives it
ONE_SUM = ORDINARY * 2**-24

# matrices of 16 rows gain nothing from threads, and pytest-xdist already uses the cores
if "OMP_NUM_THREADS" not in os.environ:
    torch.set_num_threads(1)


def make_text() -> str:
    """Returns documents of sums and differences,
    of which a small model learns a little in a few steps.
    """
    documents = []
    for a in range(40):
        lines = [f"{a} + {b} = {a + b}; {a} - {b} = {a - b}" for b in range(20)]
        documents.append("\n".join(lines))
    return "<|endoftext|>".join(documents)


def prepare_data(folder: Path) -> Path:
    """Prepares shards of `make_text`, with one token per byte, and returns their folder."""
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "sums.txt"
    source.write_text(make_text())
    return prepare_text(source, folder / "data", val_fraction=0.1)


def keys(data: Path, out: Path, **changes: object) -> list[str]:
    """Returns key=value of a run of 12 steps with checkpoints at 4,
    8 and 12. __ in a name means a dot.
    """
    values: dict[str, object] = {
        "data.source": data,
        "out": out,
        "device": "cpu",
        "steps": 12,
        "model.width": 16,
        "batch.length": 16,
        "optimizer.lr": 0.01,
        "checkpoint.every": 4,
        "evaluation.every": 6,
        "sample.tokens": 4,
        **{name.replace("__", "."): value for name, value in changes.items()},
    }
    return [f"{key}={value}" for key, value in values.items()]


def run_command(*arguments: object) -> tuple[int, str, str]:
    """Runs `delta-trn ...` in this process. Returns its exit status, stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main([str(argument) for argument in arguments])
    return status, out.getvalue(), err.getvalue()


def train(*arguments: object) -> str:
    """Runs `delta-trn ...` in this process, asserts that it succeeds, and returns its output."""
    status, out, err = run_command(*arguments)
    assert status == 0, err
    return out


def start(arguments: Sequence[object], log: Path) -> BaseProcess:
    """Starts `delta-trn ...` in a child process, with its output in `log`."""
    process = warm.Process(target=run_and_exit, args=([str(a) for a in arguments], str(log)))
    process.start()
    return process


def join(process: BaseProcess, seconds: float = 200) -> int:
    """Returns the exit code. Kills a process that has not ended after `seconds`,
    and fails the test.
    """
    process.join(seconds)
    is_late = process.exitcode is None
    if is_late:
        process.kill()
        process.join(10)
    assert not is_late and process.exitcode is not None, (
        f"a process did not end within {seconds:g} s"
    )
    return process.exitcode


def run_and_exit(arguments: list[str], log: str) -> None:
    """Runs the command and ends this process with its exit status."""
    redirect_output(log)
    status = main(arguments)
    sys.stdout.flush()
    os._exit(status)


def redirect_output(log: str) -> None:
    """Appends all further output of this process to a file."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - for the rest of the process
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115


def die_before(n: int, also: Sequence[str] = ()) -> None:
    """Makes this process die by SIGKILL before its n-th fsync, rename, replace or truncate from now
    on.

    also    further functions of `os` that count
    """
    count = 0
    for name in ("fsync", "rename", "replace", "truncate", *also):
        original = getattr(os, name)

        def counted(*arguments: Any, original: Any = original, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count == n:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **options)

        setattr(os, name, counted)


def in_child(body: Callable[[], object]) -> int:
    """Runs `body` in a forked process, and returns its wait status."""
    child = os.fork()
    if child == 0:
        try:
            body()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitpid(child, 0)[1]


def killed_before(n: int, body: Callable[[], object]) -> bool:
    """Runs `body` in a process that kills itself before its n-th change of the disk.
    True if it did.
    """

    def dying() -> None:
        die_before(n, also=["unlink"])
        body()

    status = in_child(dying)
    assert status in (0, signal.SIGKILL), f"the child failed with {status}"
    return status == signal.SIGKILL


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Returns the lines of metrics.jsonl without the fields that a clock measured."""
    return [
        {k: v for k, v in line.items() if k not in MEASURED} for line in read(run / "metrics.jsonl")
    ]


def metric_distance(run: Path, expected: Path, metric: str) -> float:
    """Returns the largest relative difference of a number in metrics.jsonl."""
    mine, theirs = read_metrics(run), read_metrics(expected)
    steps = [(line["step"], line["split"]) for line in theirs]
    assert [(line["step"], line["split"]) for line in mine] == steps
    pairs = [(a[metric], b[metric]) for a, b in zip(mine, theirs, strict=True) if metric in b]
    return max(abs(a - b) / abs(b) for a, b in pairs)


def tolerance(controls: Sequence[float]) -> float:
    """Returns SPREAD times the largest distance among control runs, and at least the error of one
    sum.

    Controls can agree by chance where training does not amplify rounding.
    """
    return max(ONE_SUM, SPREAD * max(controls))


def nudge(model: torch.nn.Module, seed: int, by: float = 2**-23) -> None:
    """Moves every weight by one rounding, up or down; `by` is the dtype's eps."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 + by * (torch.randint(0, 2, p.shape, generator=generator) * 2 - 1))


@contextlib.contextmanager
def nudge_weights(seed: int, by: float = 2**-23) -> Iterator[None]:
    """Begins runs with weights that are one rounding away from their own.

    Such a run is a control for tests that compare orders of summation.
    """
    make = setup.make_model

    def make_and_nudge(*arguments: Any, **options: Any) -> Any:
        model = make(*arguments, **options)
        nudge(model, seed, by)
        return model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup, "make_model", make_and_nudge)
        yield


def final_state(run: Path, name: str = "step-*") -> dict[str, Any]:
    """Returns everything of a run that interruptions must leave the same, bit for bit.

    `name` selects the checkpoint, by default the last one.
    """
    last = sorted((run / "checkpoints").glob(name))[-1]
    state = json.loads((last / "state.json").read_bytes())
    for key in ("seconds", "config"):
        del state[key]  # the clock's reading, and the run's own folder
    # bytes of the tensors and not of the file: safetensors orders a header's metadata arbitrarily
    tensors = {
        path.name: {name: x.numpy().tobytes() for name, x in load_file(path).items()}
        for path in last.glob("*.safetensors")
    }
    assert len(tensors) >= 3  # each process writes its own
    raw = (run / "metrics.jsonl").read_bytes()
    assert raw.endswith(b"\n") and raw.count(b"\n") == len(read_metrics(run)), "a line is not whole"
    return {
        "metrics": read_metrics(run),
        # none of a divided model
        "samples": [path.read_text() for path in run.glob("samples.txt")],
        "checkpoint": last.name,
        "best": os.readlink(run / "checkpoints" / "best"),
        "state": state,
        **tensors,
    }
