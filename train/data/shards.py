"""Token shards: 256 int32 of header, then the tokens as uint16 or uint32, little-endian.

    header[0]  20240520     magic
    header[1]  1            version
    header[2]  tokens       how many follow
    header[3:] 0

A document never straddles two shards: one that does not fit goes whole into the next shard. A
document longer than a shard gets a longer shard of its own.
"""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, BinaryIO, Literal

import numpy as np
from pydantic import Field

from delta_trn.train.files import disk_errors, sha256_of
from delta_trn.train.settings.errors import ShardError

MAGIC = 20240520
VERSION = 1
HEADER_INTS = 256
HEADER_BYTES = 4 * HEADER_INTS
LAYOUT = {
    "magic": MAGIC,
    "version": VERSION,
    "header_ints": HEADER_INTS,
    "header_bytes": HEADER_BYTES,
}
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


def check_shard(path: Path, dtype: str, tokens: int) -> None:
    """ShardError unless the file has the header and the size of this many tokens;
    none of them is read.
    """
    try:
        with open(path, "rb") as file:
            header = file.read(HEADER_BYTES)
    except FileNotFoundError:
        raise ShardError(f"{path} is missing; run `delta-trn data prepare` again") from None
    size, expected = path.stat().st_size, HEADER_BYTES + tokens * DTYPES[dtype].itemsize
    if size != expected:
        what = "truncated" if size < expected else "too long"
        raise ShardError(
            f"{path} is {what}: {size} bytes, but {tokens} tokens of {dtype} after the header make "
            f"{expected}; copy it again, or prepare it again"
        )
    if header != encode_header(tokens):
        magic, version, count = np.frombuffer(header, dtype="<i4", count=3).tolist()
        raise ShardError(
            f"{path} starts with {magic}, {version}, {count} where a shard has the magic number "
            f"{MAGIC}, version {VERSION} and, by meta.json, {tokens} tokens; it is another file: "
            "prepare it again"
        )


def map_tokens(path: Path, dtype: str) -> np.ndarray:
    """Maps the tokens of a checked shard, read-only. [tokens]"""
    if path.stat().st_size == HEADER_BYTES:
        return np.zeros(0, DTYPES[dtype])
    return np.memmap(path, dtype=DTYPES[dtype], mode="r", offset=HEADER_BYTES)


@dataclass(frozen=True)
class ShardRecord:
    """A finished shard as meta.json lists it, with the hash of the whole file,
    which lies beside it.
    """

    file: Annotated[str, Field(pattern=r"^[\w-]+\.bin$")]
    tokens: int
    sha256: str


class ShardWriters:
    """Writes documents into the shards of both splits, in a folder that counts for nothing until
    all is done.

    with ShardWriters(folder, "stories", "uint16", 10**8) as writers:
        writers.append("train", ids)
        records = writers.finish()
    """

    def __init__(self, folder: Path, name: str, dtype: str, shard_tokens: int):
        self._folder, self._name, self._dtype, self._limit = (
            folder,
            name,
            DTYPES[dtype],
            shard_tokens,
        )
        self._files: dict[Split, BinaryIO] = {}
        self._records: dict[Split, list[ShardRecord]] = {split: [] for split in FIRST_SHARD}
        self._in_shard = dict.fromkeys(FIRST_SHARD, 0)
        self.tokens = dict.fromkeys(FIRST_SHARD, 0)

    def __enter__(self) -> "ShardWriters":
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._files.values():
            # closing writes the buffer once more, which the disk may have refused
            with suppress(OSError):
                file.close()

    def append(self, split: Split, ids: np.ndarray) -> None:
        """Adds one whole document. ids [n]"""
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
