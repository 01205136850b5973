"""Writes small corpora for the tests of data, and prepares them without a progress display."""

import bz2
import gzip
import json
import lzma
from collections.abc import Callable, Iterable
from pathlib import Path

import pyarrow

from delta_trn.train.data.preparation import prepare
from delta_trn.train.settings.schema import DataSection


def write_jsonl(path: Path, texts: Iterable[object], field: str = "text") -> Path:
    """Writes one line per text, and returns the path."""
    path.write_text("".join(json.dumps({field: text}) + "\n" for text in texts), encoding="utf-8")
    return path


def _zstd(content: bytes) -> bytes:
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as file:
        file.write(content)
    return sink.getvalue().to_pybytes()


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": _zstd,
}


def pack(path: Path, kind: str) -> Path:
    """Packs a file into another beside it, and returns that one's path.
    `kind`: a key of PACKERS.
    """
    packed = path.with_name(f"{path.name}.{kind}")
    content = path.read_bytes()
    # in two members, as parallel packers write
    packed.write_bytes(PACKERS[kind](content[:1000]) + PACKERS[kind](content[1000:]))
    return packed


def prepare_text(source: Path | str, folder: Path | None, **settings) -> Path:
    """Prepares shards with one token per byte unless the settings say otherwise."""
    settings = {"tokenizer": "bytes", "folder": folder and str(folder), **settings}
    return prepare(DataSection(source=str(source), **settings), show=False)
