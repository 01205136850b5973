"""sweep.jsonl: one line per finished trial, appended and never changed."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from delta_trn.train.files import disk_errors

Result = Mapping[str, Any]
SAFE = "every finished trial is kept: free some space and run the same command again"


class Results:
    """The results in a sweep's folder. One process appends; others may read at the same time."""

    def __init__(self, folder: Path):
        self.path = folder / "sweep.jsonl"

    def read(self) -> dict[str, Result]:
        """Maps the key of each trial to its result, the first if there are several."""
        results: dict[str, Result] = {}
        if self.path.exists():
            for line in self.path.read_bytes().splitlines(keepends=True):
                result = _parse(line)
                if result is not None:
                    results.setdefault(result["key"], result)
        return results

    def add(self, result: Result) -> None:
        """Appends a line, which is on the disk when this returns."""
        line = json.dumps(dict(result)).encode() + b"\n"
        with disk_errors(self.path, SAFE), open(self.path, "a+b") as file:
            if size := file.tell():
                file.seek(size - 1)
                if file.read(1) != b"\n":  # a kill has cut the last line short; it stays, and is not read
                    line = b"\n" + line
            file.write(line)
            file.flush()
            os.fsync(file.fileno())


def losses(results: Mapping[str, Result]) -> dict[str, float]:
    """Maps each key to the held-out loss; infinity for a trial that diverged."""
    return {key: math.inf if r["loss"] is None else float(r["loss"]) for key, r in results.items()}


def _parse(line: bytes) -> Result | None:
    if not line.endswith(b"\n"):
        return None
    try:
        result = json.loads(line)
    except ValueError:
        return None
    return result if isinstance(result, dict) and "key" in result and "loss" in result else None
