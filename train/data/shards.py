"""Token shards: 256 int32 of header, then the tokens as uint16 or uint32, little-endian.

    header[0]  20240520     magic
    header[1]  1            version
    header[2]  tokens       how many follow
    header[3:] 0

A document never straddles two shards: one that does not fit goes whole into the next shard. A document longer
than a shard gets a longer shard of its own.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np

from delta_trn.train.files import disk_errors, sha256_of, sync
from delta_trn.train.settings.errors import ShardError

MAGIC = 20240520
VERSION = 1
HEADER_INTS = 256
HEADER_BYTES = 4 * HEADER_INTS
MAX_TOKENS = 2**31 - 1  # the count is an int32
FIRST_SHARD: dict[Literal["train", "val"], int] = {
    "val": 0,
    "train": 1,
}  # the number of a split's first shard
DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


def token_dtype(vocab_size: int) -> Literal["uint16", "uint32"]:
    """Returns the smallest dtype that holds every id below vocab_size."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


def encode_header(tokens: int) -> bytes:
    header = np.zeros(HEADER_INTS, dtype="<i4")
    header[:3] = MAGIC, VERSION, tokens
    return header.tobytes()


def read_header(path: Path) -> int:
    """Reads the token count from a shard's header. ShardError if it is no such header."""
    try:
        with open(path, "rb") as file:
            raw = file.read(HEADER_BYTES)
    except FileNotFoundError:
        raise ShardError(f"{path} is missing; run `delta-trn data prepare` again") from None
    if len(raw) < HEADER_BYTES:
        raise ShardError(
            f"{path} holds {len(raw)} bytes, less than its header of {HEADER_BYTES}; it was cut short: "
            "prepare it again"
        )
    magic, version, tokens = (int(x) for x in np.frombuffer(raw, dtype="<i4", count=3))
    if magic != MAGIC:
        raise ShardError(
            f"{path} starts with {magic}, not with the magic number {MAGIC}; it is not a token shard"
        )
    if version != VERSION:
        raise ShardError(f"{path} has version {version}, this code reads version {VERSION}; prepare it again")
    if tokens < 0:
        raise ShardError(f"{path} gives a count of {tokens} tokens, expected 0 or more; prepare it again")
    return tokens


def check_shard(path: Path, dtype: str, tokens: int | None = None) -> int:
    """Checks header and size, reads no token, and returns the count. `dtype` and `tokens` are meta.json's."""
    count = read_header(path)
    if tokens is not None and count != tokens:
        raise ShardError(f"{path} gives {count} tokens, meta.json gives {tokens}; prepare the data again")
    item = DTYPES[dtype].itemsize
    size, expected = path.stat().st_size, HEADER_BYTES + count * item
    if size == expected:
        return count
    for other, other_dtype in DTYPES.items():
        if count and size == HEADER_BYTES + count * other_dtype.itemsize:
            raise ShardError(
                f"{path} holds {other_dtype.itemsize} bytes per token ({other}), meta.json says {dtype}; "
                "this shard and this meta.json are of different preparations: prepare the data again"
            )
    what = "truncated" if size < expected else "too long"
    raise ShardError(
        f"{path} is {what}: {size} bytes, but {count} tokens of {dtype} after the header make {expected}; "
        "copy it again, or prepare it again"
    )


def map_tokens(path: Path, dtype: str) -> np.ndarray:
    """Maps the tokens of a checked shard, read-only. [tokens]"""
    if path.stat().st_size == HEADER_BYTES:
        return np.zeros(0, DTYPES[dtype])
    return np.memmap(path, dtype=DTYPES[dtype], mode="r", offset=HEADER_BYTES)


@dataclass(frozen=True)
class ShardRecord:
    """A finished shard as meta.json lists it, with the hash of the whole file."""

    file: str
    tokens: int
    sha256: str


class ShardWriter:
    """Writes one split's documents into shards. A killed process loses only what came after its last commit.

    Tokens are appended to `NAME.bin.partial`. The caller commits in three steps: `sync()` puts the bytes on
    the disk, `state()` goes into the caller's progress file, `publish()` gives finished shards their final
    names. A writer made from a saved state cuts its partial file back to what that state covers.
    """

    def __init__(
        self, directory: Path, stem: str, dtype: str, shard_tokens: int, first: int, state: dict | None = None
    ):
        self._directory, self._stem = directory, stem
        self._dtype, self._limit = DTYPES[dtype], shard_tokens
        state = state or {"closed": [], "index": first, "tokens": 0}
        self.closed = [ShardRecord(**record) for record in state["closed"]]
        self._index: int = state["index"]
        self._tokens: int = state["tokens"]
        self._file: BinaryIO | None = None
        self.publish()
        if self._tokens:
            self._reopen()

    def append(self, ids: np.ndarray) -> None:
        """Adds one whole document. ids [n]"""
        if len(ids) > MAX_TOKENS:
            raise ShardError(
                f"a document of {len(ids)} tokens exceeds the {MAX_TOKENS} a shard can count; cut it"
            )
        if self._tokens and self._tokens + len(ids) > self._limit:
            self.close()
        with disk_errors(self._partial()):
            if self._file is None:
                self._file = open(self._partial(), "wb")  # noqa: SIM115 - stays open across documents
                self._file.write(bytes(HEADER_BYTES))
            self._file.write(ids.astype(self._dtype, copy=False).tobytes())
        self._tokens += len(ids)

    def close(self) -> None:
        """Finishes the current shard, if it has tokens; `publish` names it after the next commit."""
        if not self._tokens:
            return
        assert self._file is not None
        with disk_errors(self._partial()):
            self._file.seek(0)
            self._file.write(encode_header(self._tokens))
            self.sync()
            self._file.close()
        self._file = None
        record = ShardRecord(self._name(), self._tokens, sha256_of(self._partial()))
        self.closed.append(record)
        self._index, self._tokens = self._index + 1, 0

    def sync(self) -> None:
        """Flushes everything appended so far to the disk."""
        if self._file is not None:
            with disk_errors(self._partial()):
                self._file.flush()
                os.fsync(self._file.fileno())

    def state(self) -> dict:
        return {
            "closed": [asdict(record) for record in self.closed],
            "index": self._index,
            "tokens": self._tokens,
        }

    def publish(self) -> None:
        """Gives closed shards their names, once the state that lists them is on the disk."""
        for record in self.closed:
            final = self._directory / record.file
            partial = final.with_name(final.name + ".partial")
            if not final.exists() and partial.exists():
                os.replace(partial, final)
            if not final.exists():
                raise ShardError(
                    f"{final} was finished and is gone; remove {self._directory} and prepare again"
                )
        sync(self._directory)

    def abandon(self) -> None:
        """Closes the file without finishing it: after an error, the last commit counts."""
        if self._file is not None:
            # closing writes the buffer once more, which the disk may have refused before
            file, self._file = self._file, None
            with suppress(OSError):
                file.close()

    def _name(self) -> str:
        return f"{self._stem}_{self._index:06d}.bin"

    def _partial(self) -> Path:
        return self._directory / f"{self._name()}.partial"

    def _reopen(self) -> None:
        partial, expected = self._partial(), HEADER_BYTES + self._tokens * self._dtype.itemsize
        size = partial.stat().st_size if partial.exists() else 0
        if size < expected:
            raise ShardError(
                f"{partial} holds {size} bytes, its progress file says {expected}; remove {self._directory} "
                "and prepare again"
            )
        os.truncate(partial, expected)
        self._file = open(partial, "r+b")  # noqa: SIM115 - stays open across documents
        self._file.seek(0, os.SEEK_END)


class SplitWriters:
    """Holds the writers of both splits, which commit together: a progress file says what is on the disk.

        with SplitWriters(folder, "stories", "uint16", 10**8, saved) as writers:
            writers["train"].append(ids)
            writers.commit(save)

    `saved` is what the last commit handed to `save`, {} at first. Left by an error, the last commit counts.
    """

    def __init__(self, folder: Path, name: str, dtype: str, shard_tokens: int, saved: dict[str, dict]):
        self._writers: dict[str, ShardWriter] = {}
        try:
            for split, first in FIRST_SHARD.items():
                stem, state = f"{name}_{split}", saved.get(split)
                self._writers[split] = ShardWriter(folder, stem, dtype, shard_tokens, first, state)
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> "SplitWriters":
        return self

    def __exit__(self, *error: object) -> None:
        for writer in self._writers.values():
            writer.abandon()

    def __getitem__(self, split: str) -> ShardWriter:
        return self._writers[split]

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()

    def commit(self, save: Callable[[dict[str, dict]], None]) -> None:
        """Makes what was appended so far survive a kill. `save` puts the state it is given on the disk."""
        for writer in self._writers.values():
            writer.sync()
        save({split: writer.state() for split, writer in self._writers.items()})
        for writer in self._writers.values():
            writer.publish()
