"""Whether shards hold what was prepared: their hashes, computed once and remembered.

A flipped byte is a wrong token, which would train without a word. Hashing takes about a second per GB. So
.verified.json, beside the shards or in the user's cache where that folder is read-only, notes size, times and
inode of each shard whose hash was right. While they stay the same, the content is not read again.
"""

import contextlib
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from delta_trn.train.data.shards import ShardRecord
from delta_trn.train.files import hold_folder, sha256_of, write_file
from delta_trn.train.settings.errors import DiskFull, ShardError

MARKS = ".verified.json"
WORTH_A_LINE = 2**30  # bytes to hash without a word
TICK_NS = 20_000_000  # file systems date writes by a clock that stands still for milliseconds

# What a file's status says of its content, and the hash that it had then.
Marks = dict[str, dict[str, Any]]


def verified_hashes(folder: Path, shards: Sequence[ShardRecord]) -> dict[str, str]:
    """Returns the SHA-256 of every shard by name. ShardError if it is not the one in meta.json.

    Where meta.json has none, the first one that is computed here is what later ones must equal. Of several
    processes one computes, and the others wait for it.
    """
    places = [folder, *_cache_folders(folder)]
    if (known := _known(folder, shards, places)).keys() == {shard.file for shard in shards}:
        return known
    with contextlib.ExitStack() as stack:
        place = _hold_first(places, stack)
        known = _known(folder, shards, places)  # another process may have computed them until now
        pending = [shard for shard in shards if shard.file not in known]
        earlier = {name: mark["sha256"] for at in reversed(places) for name, mark in _read_marks(at).items()}
        _announce(folder, pending, earlier)
        _let_a_tick_pass(folder, pending)
        before = {shard.file: _status(folder / shard.file) for shard in pending}
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
            hashes = threads.map(lambda shard: sha256_of(folder / shard.file), pending)
            for shard, actual in zip(pending, hashes, strict=True):
                expected = shard.sha256 or earlier.get(shard.file, actual)
                if actual != expected:
                    raise ShardError(
                        f"{folder / shard.file} changed since it was prepared: its sha256 is {actual}, "
                        f"expected {expected}; copy it again, or prepare the data again"
                    )
                known[shard.file] = actual
        if place is not None:
            marks = {file: {"status": status, "sha256": known[file]} for file, status in before.items()}
            with contextlib.suppress(DiskFull):
                write_file(place / MARKS, json.dumps(_read_marks(place) | marks, indent=1) + "\n")
    return known


def _known(folder: Path, shards: Sequence[ShardRecord], places: Sequence[Path]) -> dict[str, str]:
    """Returns the hashes of the shards that have not changed since they were computed."""
    status = {shard.file: _status(folder / shard.file) for shard in shards}
    expected = {shard.file: shard.sha256 for shard in shards}
    return {
        file: mark["sha256"]
        for place in places
        for file, mark in _read_marks(place).items()
        if mark["status"] == status.get(file) and expected[file] in (None, mark["sha256"])
    }


def _read_marks(place: Path) -> Marks:
    try:
        marks = json.loads((place / MARKS).read_bytes())
        return {
            file: {"status": mark["status"], "sha256": str(mark["sha256"])} for file, mark in marks.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}  # none yet, or damaged: it is only a cache


def _status(path: Path) -> list[int]:
    """Returns what changes when the content does: a copy has another inode, a write another time."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _cache_folders(folder: Path) -> Iterator[Path]:
    """Yields the place in the user's cache, if there is a user with one."""
    with contextlib.suppress(RuntimeError):  # no home
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        yield cache / "delta-trn" / "shards" / hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]


def _hold_first(places: Sequence[Path], stack: contextlib.ExitStack) -> Path | None:
    """Holds the first folder that may be written to. None where there is none: then all compute."""
    for place in places:
        with contextlib.suppress(DiskFull, OSError):
            stack.enter_context(hold_folder(place))
            return place
    return None


def _announce(folder: Path, pending: Sequence[ShardRecord], earlier: dict[str, str]) -> None:
    size = sum((folder / shard.file).stat().st_size for shard in pending)
    if size >= WORTH_A_LINE:
        print(f"checking the hashes of {size / 2**30:.1f} GiB of shards in {folder}, once", file=sys.stderr)
    if unknown := [shard.file for shard in pending if shard.sha256 is None and shard.file not in earlier]:
        print(
            f"{folder / 'meta.json'} has no sha256 of {unknown[0]}: shards without one are taken as they are "
            "now, and refused when they change",
            file=sys.stderr,
        )


def _let_a_tick_pass(folder: Path, pending: Sequence[ShardRecord]) -> None:
    """Waits until a write from now on would get another time than the shards have."""
    newest = max((max(_status(folder / shard.file)[1:3]) for shard in pending), default=0)
    time.sleep(min(max(newest + TICK_NS - time.time_ns(), 0), TICK_NS) / 1e9)
