"""Writes small corpora for the tests of data, and prepares them without a progress display."""

import json
from collections.abc import Iterable
from pathlib import Path

from delta_trn.train.data import prepare
from delta_trn.train.settings.schema import DataSection


def write_jsonl(path: Path, texts: Iterable[object], field: str = "text") -> Path:
    """Writes one line per text, and returns the path."""
    path.write_text("".join(json.dumps({field: text}) + "\n" for text in texts), encoding="utf-8")
    return path


def prepare_text(source: Path | str, folder: Path | None, **settings) -> Path:
    """Prepares shards with one token per byte, unless the settings name a tokenizer."""
    settings = {"tokenizer": "bytes", "folder": folder and str(folder), **settings}
    return prepare(DataSection(source=str(source), **settings), show=False)
