"""Token shards: 256 int32 of header, then the tokens as uint16 or uint32, little-endian.

    header[0]  20240520     magic
    header[1]  1            version
    header[2]  tokens       how many follow
    header[3:] 0

A document never straddles two shards: one that does not fit goes whole into the next shard. A document longer
than a shard gets a longer shard of its own.
"""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np

from delta_trn.train.files import disk_errors, sha256_of
from delta_trn.train.settings.errors import ShardError

MAGIC = 20240520
VERSION = 1
HEADER_INTS = 256
HEADER_BYTES = 4 * HEADER_INTS
MAX_TOKENS = 2**31 - 1  # the count is an int32
Split = Literal["train", "val"]
FIRST_SHARD: dict[Split, int] = {"val": 0, "train": 1}  # the number of a split's first shard
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


class ShardWriters:
    """Writes documents into the shards of both splits, in a folder that counts for nothing until all is done.

    with ShardWriters(folder, "stories", "uint16", 10**8) as writers:
        writers.append("train", ids)
        records = writers.finish()
    """

    def __init__(self, folder: Path, name: str, dtype: str, shard_tokens: int):
        self._folder, self._name, self._dtype, self._limit = folder, name, DTYPES[dtype], shard_tokens
        self._files: dict[Split, BinaryIO] = {}
        self._records: dict[Split, list[ShardRecord]] = {split: [] for split in FIRST_SHARD}
        self._in_shard = dict.fromkeys(FIRST_SHARD, 0)
        self.tokens = dict.fromkeys(FIRST_SHARD, 0)

    def __enter__(self) -> "ShardWriters":
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._files.values():
            with suppress(OSError):  # closing writes the buffer once more, which the disk may have refused
                file.close()

    def append(self, split: Split, ids: np.ndarray) -> None:
        """Adds one whole document. ids [n]"""
        if len(ids) > MAX_TOKENS:
            raise ShardError(
                f"a document of {len(ids)} tokens exceeds the {MAX_TOKENS} a shard can count; cut it"
            )
        if self._in_shard[split] + len(ids) > self._limit:
            self._close(split)
        path = self._path(split)
        with disk_errors(path):
            if split not in self._files:
                self._files[split] = open(path, "wb")  # noqa: SIM115 - stays open across documents
                self._files[split].write(bytes(HEADER_BYTES))
            self._files[split].write(ids.astype(self._dtype, copy=False).tobytes())
        self._in_shard[split] += len(ids)
        self.tokens[split] += len(ids)

    def finish(self) -> dict[Split, tuple[ShardRecord, ...]]:
        """Completes the last shards, and returns the records of all."""
        for split in FIRST_SHARD:
            self._close(split)
        return {split: tuple(records) for split, records in self._records.items()}

    def _close(self, split: Split) -> None:
        """Gives the split's current shard its header, if there is one, and puts it on the disk."""
        if split not in self._files:
            return
        path, file = self._path(split), self._files[split]
        with disk_errors(path):
            file.seek(0)
            file.write(encode_header(self._in_shard[split]))
            file.flush()
            os.fsync(file.fileno())
            self._files.pop(split).close()
        self._records[split].append(ShardRecord(path.name, self._in_shard[split], sha256_of(path)))
        self._in_shard[split] = 0

    def _path(self, split: Split) -> Path:
        number = FIRST_SHARD[split] + len(self._records[split])
        return self._folder / f"{self._name}_{split}_{number:06d}.bin"
