"""metrics.jsonl: one JSON object per line, one line per step and per evaluation.

    every line     step, split ("train" or "val"), loss in nats per token, tokens trained on so far,
                   seconds
    train          lr before per-parameter factors, grad_norm before clipping, tokens_per_s
    val            perplexity, bits_per_byte (null where the tokenizer loses text); with log.probes
                   also probes (studies/probes.py)

All but MEASURED repeats bit for bit when a run is repeated, or killed and resumed, on a CPU.
"""

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from delta_trn.train.files import disk_errors, open_plain, require_plain

# fields that a clock or the operating system gave: different every time
MEASURED = frozenset(("seconds", "tokens_per_s", "memory"))
Line = dict[str, Any]  # the fields of one measurement, as the first lines of this file name them


class MetricsFile:
    """Appends lines. `truncate_after` cuts off what a kill has left half-written."""

    def __init__(self, path: Path):
        self.path = path
        self._file = None

    def append(self, lines: Iterable[Line]) -> None:
        """Writes lines at once: they are in the file even if this process is killed afterwards."""
        safe = "the checkpoints are whole: free some space and resume the run"
        with disk_errors(self.path, safe):
            if self._file is None:
                self._file = open_plain(self.path, "ab")
            self._file.write("".join(f"{json.dumps(line)}\n" for line in lines).encode())
            self._file.flush()

    def sync(self) -> None:
        """Flushes every line to the disk."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def truncate_after(self, step: int) -> None:
        """Cuts the file before the first line that is not whole, or is of a later step."""
        self.close()
        if not require_plain(self.path):
            return
        with open_plain(self.path, "r+b") as file:
            content = file.read()
            end = 0
            for raw in content.splitlines(keepends=True):
                line = parse_line(raw, "step", "split")
                if line is None or line["step"] > step:
                    break
                end += len(raw)
            if end < len(content):
                # needs no space, and leaves what is kept untouched
                os.truncate(file.fileno(), end)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the whole lines of a metrics.jsonl, without a last one that a kill has cut short."""
    if not path.exists():
        return
    with open(path, "rb") as file:
        yield from filter(None, (parse_line(raw, "step", "split") for raw in file))


def parse_line(raw: bytes, *fields: str) -> dict[str, Any] | None:
    """Returns the object in a line of JSON; None if it is cut short, or has not these fields."""
    try:
        line = json.loads(raw) if raw.endswith(b"\n") else None
    except ValueError:
        return None
    return line if isinstance(line, dict) and line.keys() >= set(fields) else None
