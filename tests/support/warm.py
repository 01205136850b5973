"""Processes that fork from one that has imported PyTorch, transformers and training: a start of Python
and these imports are five seconds of a core, a fork is none.

What such a process knows is what was imported, not what a test did: the one that it forks from has
run nothing. There Triton was imported without its interpreter, so that these processes can compile
kernels, and none can interpret them. Programs that ask what is imported, or that need Python's own
switches, start Python.
"""

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import ModuleType

# of our own: a sweep's runner has the one of multiprocessing, with what it imports
SERVER = forkserver.ForkServer()
SERVER.set_forkserver_preload(
    [
        "delta_trn.models.mup",
        "delta_trn.backends.gated_delta_rule.chunked",
        "delta_trn.train.commands.run",
        "delta_trn.train.commands.resume",
        "delta_trn.train.run.loop",
        "delta_trn.train.watch.loss_plot",
    ]
)


class Process(ForkServerProcess):
    """A process that forks from the warm one, which the first of them starts."""

    def start(self) -> None:
        interpreted = os.environ.pop("TRITON_INTERPRET", None)
        connect = forkserver.connect_to_new_process
        forkserver.connect_to_new_process = SERVER.connect_to_new_process
        try:
            super().start()
        finally:
            forkserver.connect_to_new_process = connect
            if interpreted is not None:
                os.environ["TRITON_INTERPRET"] = interpreted


def run_python(
    words: Sequence[object],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 250,
) -> subprocess.CompletedProcess[str]:
    """Runs `python WORDS` as a user would type it: -c PROGRAM, -m MODULE or a file, and arguments.

    cwd, env    the process's folder and variables; None: this one's
    """
    command = [str(word) for word in words]
    with tempfile.TemporaryDirectory() as folder:
        outputs = [str(Path(folder, name)) for name in ("stdout", "stderr")]
        variables = dict(os.environ if env is None else env)
        process = Process(target=_run, args=(command, str(cwd or Path.cwd()), variables, *outputs))
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join(10)
            raise subprocess.TimeoutExpired(command, timeout)
        out, err = (Path(name).read_text() if Path(name).exists() else "" for name in outputs)
    return subprocess.CompletedProcess(command, process.exitcode, out, err)


def _run(command: list[str], folder: str, variables: dict[str, str], *outputs: str) -> None:
    """Becomes the process of a command, and ends with its exit status."""
    for number, name in enumerate(outputs, 1):
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(descriptor, number)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - for the rest of the process
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    multiprocessing.set_start_method(None, force=True)  # of its own processes: Python's own choice
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    if threads := variables.get("OMP_NUM_THREADS"):  # which PyTorch has read already
        import torch

        torch.set_num_threads(int(threads))
    ahead = [path for path in variables.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = ["", *ahead, *(path for path in sys.path if path not in ("", *ahead))]
    status = _status_of(command)
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue] - waits, as Python does
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


def _status_of(command: list[str]) -> int:
    kind, *rest = command
    try:
        if kind == "-c":
            program, *sys.argv[1:] = rest
            sys.argv[0] = kind
            main = sys.modules["__main__"] = ModuleType("__main__")
            exec(compile(program, "<string>", "exec"), main.__dict__)
        elif kind == "-m":
            sys.argv[:] = rest
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv[:] = command
            runpy.run_path(kind, run_name="__main__")
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0
