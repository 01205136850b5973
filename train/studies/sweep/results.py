"""sweep.jsonl: a line a finished trial, whoever finished it."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock

from delta_trn.train.files import disk_errors

Result = Mapping[str, Any]
SAFE = "every finished trial is kept: free some space and run the same command again"


class Results:
    """The results in a sweep's folder. Several processes may read and add at once."""

    def __init__(self, folder: Path):
        self.path = folder / "sweep.jsonl"

    def read(self) -> dict[str, Result]:
        """Key -> result of every whole line; the first, if two processes finished the same trial."""
        found: dict[str, Result] = {}
        if self.path.exists():
            for raw in self.path.read_bytes().splitlines(keepends=True):
                result = _parsed(raw)
                if result is not None:
                    found.setdefault(result["key"], result)
        return found

    def add(self, result: Result) -> None:
        """Append a line, on the disk when this returns. Nothing if its trial has one."""
        lock = FileLock(self.path.with_name(f".{self.path.name}.lock"))
        with disk_errors(self.path, SAFE), lock, open(self.path, "a+b") as file:
            if result["key"] in self.read():
                return
            file.seek(0, os.SEEK_END)
            if size := file.tell():
                file.seek(size - 1)
                if file.read(1) != b"\n":
                    file.write(
                        b"\n"
                    )  # a kill in the middle of a line: it stays behind as one that is not read
            file.write(json.dumps(dict(result)).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def losses(results: Mapping[str, Result]) -> dict[str, float]:
    """Key -> held-out loss; infinity for a trial that diverged."""
    return {key: math.inf if r["loss"] is None else float(r["loss"]) for key, r in results.items()}


def _parsed(raw: bytes) -> Result | None:
    if not raw.endswith(b"\n"):
        return None
    try:
        line = json.loads(raw)
    except ValueError:
        return None
    return line if isinstance(line, dict) and "key" in line and "loss" in line else None
