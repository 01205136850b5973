"""Runs of a few processes on this machine: what torchrun does, without its seconds of imports."""

import os
import socket
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import tiny_run


def start(world: int, arguments: Sequence[object], logs: Path) -> list[BaseProcess]:
    """`torchrun --nproc_per_node=world -m train ...`: one process a rank, output in logs/rank-N."""
    logs.mkdir(parents=True, exist_ok=True)
    port = free_port()
    processes = []
    for rank in range(world):
        variables = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": world,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        process = tiny_run.WARM.Process(
            target=_rank, args=(variables, [str(a) for a in arguments], str(logs / f"rank-{rank}"))
        )
        process.start()
        processes.append(process)
    return processes


def train(world: int, arguments: Sequence[object], logs: Path) -> None:
    """The same, which must succeed on every rank."""
    processes = start(world, arguments, logs)
    for process in processes:
        process.join()
    said = "\n".join(path.read_text() for path in sorted(logs.iterdir()))
    assert [process.exitcode for process in processes] == [0] * world, said


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _rank(variables: dict[str, object], arguments: list[str], log: str) -> None:
    os.environ.update({name: str(value) for name, value in variables.items()})
    tiny_run.child(arguments, log)
