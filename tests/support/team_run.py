"""Runs training on a few local processes as torchrun does, without its seconds of imports."""

import os
import runpy
import socket
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.support import tiny_run, warm


def start(
    world: int,
    arguments: Sequence[object],
    logs: Path,
    work: Callable[[list[str], str], None] = tiny_run.run_and_exit,
) -> list[BaseProcess]:
    """Starts `torchrun --nproc_per_node=world -m train ...`: one process per rank, logging to
    logs/rank-N.

    `work(arguments, log)` replaces the training command.
    """
    logs.mkdir(parents=True, exist_ok=True)
    port = find_free_port()
    processes = []
    for rank in range(world):
        variables = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": world,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        process = warm.Process(
            target=_run_rank,
            args=(variables, [str(a) for a in arguments], str(logs / f"rank-{rank}"), work),
        )
        process.start()
        processes.append(process)
    return processes


def join(processes: Sequence[BaseProcess], logs: Path, seconds: float = 250) -> list[int]:
    """Returns the exit codes. Kills processes that have not ended after `seconds`,
    and fails the test.
    """
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(timeout=max(0.0, deadline - time.monotonic()))
    late = [rank for rank, process in enumerate(processes) if process.exitcode is None]
    for rank in late:
        processes[rank].kill()
        processes[rank].join(10)
    assert not late, f"ranks {late} did not end within {seconds:g} s\n{read_logs(logs)}"
    return [code for process in processes if (code := process.exitcode) is not None]


def read_logs(logs: Path) -> str:
    """Returns what every rank printed."""
    return "\n".join(f"{path.name}:\n{path.read_text()}" for path in sorted(logs.iterdir()))


def train(
    world: int,
    arguments: Sequence[object],
    logs: Path,
    work: Callable[[list[str], str], None] = tiny_run.run_and_exit,
) -> None:
    """Runs training (or `work`) and asserts that it succeeds on every rank."""
    assert join(start(world, arguments, logs, work), logs) == [0] * world, read_logs(logs)


def run_file(arguments: list[str], log: str) -> None:
    """Calls `main` of a file with the arguments after its name, for `start`: what it returns is the
    exit status.
    """
    tiny_run.redirect_output(log)
    path, *words = arguments
    status = runpy.run_path(path)["main"](words)
    sys.stdout.flush()
    os._exit(status)


def find_free_port() -> int:
    """Returns a port that nobody listens on now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def wait_for_server(port: int, seconds: float = 100) -> None:
    """Waits until a process of this machine listens on a port."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            assert time.monotonic() < deadline, f"nobody listens on port {port} after {seconds:g} s"
            time.sleep(0.05)


def _run_rank(
    variables: dict[str, object],
    arguments: list[str],
    log: str,
    work: Callable[[list[str], str], None],
) -> None:
    os.environ.update({name: str(value) for name, value in variables.items()})
    work(arguments, log)
