"""A run of a second for the tests of train: its text, its keys, and processes that can be killed."""

import contextlib
import io
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from delta_trn.train.__main__ import main
from delta_trn.train.watch.metrics import MEASURED, read
from tests.support.corpus import prepare_text

# matrices of 16 rows gain nothing from threads, and pytest-xdist has taken the cores already
torch.set_num_threads(1)

# forked from one process that has imported everything: a kill then hits training, not four seconds of imports
WARM = multiprocessing.get_context("forkserver")
WARM.set_forkserver_preload(
    [
        "delta_trn.models.mup",
        "delta_trn.backends.gated_delta_rule.chunked",
        "delta_trn.train.commands.run",
        "delta_trn.train.commands.resume",
        "delta_trn.train.run.loop",
        "delta_trn.train.watch.loss_plot",
    ]
)


def make_text() -> str:
    """Documents of sums and differences: small, the same everywhere, and quickly learned a little of."""
    documents = []
    for a in range(40):
        lines = [f"{a} + {b} = {a + b}; {a} - {b} = {a - b}" for b in range(20)]
        documents.append("\n".join(lines))
    return "<|endoftext|>".join(documents)


def prepare_data(folder: Path) -> Path:
    """Token shards of `text`, one token a byte."""
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "sums.txt"
    source.write_text(make_text())
    return prepare_text(source, folder / "data", val_fraction=0.1)


def keys(data: Path, out: Path, **changes: object) -> list[str]:
    """key=value of a run of 12 steps with checkpoints at 4, 8 and 12; __ in a name stands for a dot."""
    given: dict[str, object] = {
        "data.source": data,
        "out": out,
        "device": "cpu",
        "steps": 12,
        "model.width": 16,
        "batch.length": 16,
        "checkpoint.every": 4,
        "evaluation.every": 6,
        "sample.tokens": 4,
        **{name.replace("__", "."): value for name, value in changes.items()},
    }
    return [f"{key}={value}" for key, value in given.items()]


def run_command(*arguments: object) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of `python -m train ...`, in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main([str(argument) for argument in arguments])
    return status, out.getvalue(), err.getvalue()


def train(*arguments: object) -> str:
    """The same, which must succeed. Returns what it printed."""
    status, out, err = run_command(*arguments)
    assert status == 0, err
    return out


def start(arguments: Sequence[object], log: Path) -> BaseProcess:
    """The same in a process of its own, its output in `log`."""
    process = WARM.Process(target=run_and_exit, args=([str(a) for a in arguments], str(log)))
    process.start()
    return process


def run_and_exit(arguments: list[str], log: str) -> None:
    redirect_output(log)
    status = main(arguments)
    sys.stdout.flush()
    os._exit(status)


def redirect_output(log: str) -> None:
    """From here on this process's output goes to the end of a file."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - for the rest of the process
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115


def die_before(n: int) -> None:
    """From here on this process dies by SIGKILL before its n-th operation that makes something durable."""
    count = 0
    for name in ("fsync", "rename", "replace", "truncate"):
        original = getattr(os, name)

        def counted(*given: Any, original: Any = original) -> Any:
            nonlocal count
            count += 1
            if count == n:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*given)

        setattr(os, name, counted)


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what a clock measured."""
    return [{k: v for k, v in line.items() if k not in MEASURED} for line in read(run / "metrics.jsonl")]


def final_state(run: Path, name: str = "step-*") -> dict[str, Any]:
    """Everything of a run that must come out the same, bit for bit, whatever happened on the way.

    name    of the checkpoint; else the last one
    """
    last = sorted((run / "checkpoints").glob(name))[-1]
    state = json.loads((last / "state.json").read_bytes())
    for key in ("seconds", "config"):
        del state[key]  # a clock's, and one with the run's own folder in it
    # their bytes, not the file's: safetensors puts a header's metadata in any order
    tensors = {
        path.name: {name: x.numpy().tobytes() for name, x in load_file(path).items()}
        for path in last.glob("*.safetensors")
    }
    assert len(tensors) >= 3  # of several processes each has its own
    raw = (run / "metrics.jsonl").read_bytes()
    assert raw.endswith(b"\n") and raw.count(b"\n") == len(read_metrics(run)), "a line is not whole"
    return {
        "metrics": read_metrics(run),
        "samples": (run / "samples.txt").read_text(),
        "checkpoint": last.name,
        "best": os.readlink(run / "checkpoints" / "best"),
        "state": state,
        **tensors,
    }
