"""How fast `data prepare` is and how much memory it takes: of generated text, in processes of its own."""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from delta_trn.train.data.preparation import prepare
from delta_trn.train.settings.errors import DataError
from delta_trn.train.settings.schema import DataSection

SAMPLES_PER_SECOND = 10  # of memory


@dataclass(frozen=True)
class Preparation:
    """One measured preparation. Seconds and memory are those of all its processes, peak_bytes their sum."""

    workers: int
    seconds: float
    cpu_seconds: float
    peak_bytes: int
    sha256: str


def measure(megabytes: int, workers: Sequence[int]) -> list[Preparation]:
    """Prepares the same text with every number of workers. One worker is one process with one thread."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        source = write_text(root / "text.jsonl", megabytes * 10**6)
        sample = write_text(root / "sample.jsonl", 4 * 10**6)
        # the tokenizer's training is no part of what is measured
        tokenizer = prepare(DataSection(source=str(sample), folder=str(root / "tokenizer")), show=False)
        return [_measured(source, tokenizer, root / f"{number}-workers", number) for number in workers]


def write_text(path: Path, size: int) -> Path:
    """Writes `size` bytes or slightly more: documents of 300 words, frequencies as Zipf has them, seeded.

    There are 300,000 words and a number now and then, so that the tokenizer is about as busy as with prose.
    """
    random = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlucmfwypvbgkjqxz"))
    drawn = letters[random.integers(0, 26, (300_000, 10)) * random.integers(0, 26, (300_000, 10)) // 26]
    lengths = random.integers(2, 11, len(drawn))
    words = ["".join(row[:n]) for row, n in zip(drawn.tolist(), lengths.tolist(), strict=True)]
    left = size
    with open(path, "w") as file:
        while left > 0:
            places = ((random.zipf(1.1, 300) - 1) % len(words)).tolist()
            text = " ".join(f"{words[i]}, {i}" if i % 16 == 7 else words[i] for i in places)
            left -= file.write(json.dumps({"text": text + ".\n"}) + "\n")
    return path


def _measured(source: Path, tokenizer: Path, out: Path, workers: int) -> Preparation:
    command = [sys.executable, "-m", "delta_trn.train", "data", "prepare", str(source), "--quiet"]
    command += [f"data.folder={out}", f"data.tokenizer={tokenizer}", f"data.workers={workers}"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    before, began, peak = os.times(), time.monotonic(), 0
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    while process.poll() is None:
        peak = max(peak, sum(_resident_bytes(process.pid)))
        time.sleep(1 / SAMPLES_PER_SECOND)
    seconds, after = time.monotonic() - began, os.times()
    if process.returncode:
        assert process.stdout is not None
        said = process.stdout.read().decode()[-500:]
        raise DataError(f"data prepare ended with {process.returncode}: {said}")
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    digest = hashlib.sha256()
    for path in sorted(out.glob("*.bin")):
        digest.update(path.name.encode() + path.read_bytes())
    return Preparation(workers, seconds, cpu, peak, digest.hexdigest())


def _resident_bytes(pid: int) -> list[int]:
    """Returns the resident memory of a process and of all below it; 0 where the system does not say."""
    with suppress(OSError):
        threads = Path(f"/proc/{pid}/task").iterdir()  # a child belongs to the thread that started it
        children = " ".join((thread / "children").read_text() for thread in threads).split()
        resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return [resident, *(size for child in children for size in _resident_bytes(int(child)))]
    return [0]
