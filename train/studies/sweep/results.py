"""sweep.jsonl: one line per finished run of a sweep, appended and never changed.

A line says where it belongs: arm, parametrization, optimizer, width, rate and seed. So lines can be
read whatever recipes and settings have become since.
"""

import gzip
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from delta_trn.train.files import disk_errors, open_plain
from delta_trn.train.watch.metrics import parse_line

Result = Mapping[str, Any]
# arm, parametrization, optimizer, width, log2 rate, seed
Place = tuple[str, str, str, int, float, int]
ANY = "any"  # the parametrization at the base width, where all tables agree
DIGITS = 6  # of the logarithm of a rate: rates of a grid carry the rounding of its factor
SAFE = "every finished trial is kept: free some space and run the same command again"


def place_of(line: Mapping[str, Any]) -> Place:
    """Returns where a line belongs."""
    rate = round(math.log2(line["lr"]), DIGITS)
    return (
        line["arm"],
        line["parametrization"],
        line["optimizer"],
        line["width"],
        rate,
        line["seed"],
    )


class Results:
    """The results in a sweep's folder. One process appends; others may read at the same time."""

    def __init__(self, folder: Path):
        self.path = folder / "sweep.jsonl"

    def read(self) -> dict[Place, Result]:
        """Maps the place of each run to its result, the first of several;
        reads sweep.jsonl.gz, too.
        """
        stored = self.path.with_name("sweep.jsonl.gz")
        text = gzip.decompress(stored.read_bytes()) if stored.exists() else b""
        text += self.path.read_bytes() if self.path.exists() else b""
        results: dict[Place, Result] = {}
        for line in text.splitlines(keepends=True):
            if (result := parse_line(line, "seed", "loss")) is not None:
                results.setdefault(place_of(result), result)
        return results

    def add(self, result: Result) -> None:
        """Appends a line, which is on the disk when this returns."""
        line = json.dumps(dict(result)).encode() + b"\n"
        with disk_errors(self.path, SAFE), open_plain(self.path, "a+b") as file:
            if size := file.tell():
                file.seek(size - 1)
                # a kill has cut the last line short; it stays, and is not read
                if file.read(1) != b"\n":
                    line = b"\n" + line
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
