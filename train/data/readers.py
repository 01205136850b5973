"""Documents of one file, or of one row, as (text, share of the file that has been read).

pyarrow reads parquet. Lines of .txt and .jsonl are read here, because the builders of `datasets` change text:
theirs turns "\\r\\n" into "\\n", reads dates as times and numbers as text, and refuses half a surrogate pair.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from delta_trn.train.settings.errors import SourceError

SEPARATOR = "<|endoftext|>"
_SURROGATE = re.compile("[\ud800-\udfff]")

Documents = Iterator[tuple[str, float]]


def read_text(path: Path, section: int) -> Documents:
    """Reads a text file: one document between two separators, or several where that is long.

    A document ends at the first blank line after `section` characters, or at the first line's end after twice
    as many.
    """
    size = path.stat().st_size or 1
    lines: list[str] = []
    length = read = 0
    separated = False

    def document() -> str:
        text = "".join(lines)
        return text.strip("\r\n") if separated else text  # a separator stands on a line of its own

    # newline="": "\r\n" stays, so that a document's bytes are the file's
    with open(path, encoding="utf-8", newline="") as file:
        for line in file:
            read += len(line)
            *ends, rest = line.split(SEPARATOR)
            for end in ends:
                separated = True
                lines.append(end)
                yield document(), read / size
                lines, length = [], 0
            lines.append(rest)
            length += len(rest)
            if length >= section and (not rest.strip() or length >= 2 * section):
                yield document(), read / size
                lines, length = [], 0
    if lines:
        yield document(), 1.0


def read_jsonl(path: Path, text_field: str) -> Documents:
    """Reads one field of every line that is not blank."""
    size = path.stat().st_size or 1
    read = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            read += len(line)
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise SourceError(
                    f"{path}:{number} is not JSON ({error}); expected one object per line"
                ) from error
            yield text_of(row, text_field, f"{path}:{number}"), read / size


def read_parquet(path: Path, text_field: str) -> Documents:
    """Reads one column, and decodes no other."""
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise SourceError(f"{path} is not a readable parquet file ({error}); copy it again") from error
    with file:
        columns = file.schema_arrow.names
        if text_field not in columns:
            raise SourceError(
                f"{path} has no column {text_field!r}; it has {columns}: choose one with text_field"
            )
        rows = (
            row
            for batch in file.iter_batches(batch_size=1024, columns=[text_field])
            for row in batch.to_pylist()
        )
        for number, row in enumerate(rows, start=1):
            yield text_of(row, text_field, f"{path} row {number}"), number / file.metadata.num_rows


def text_of(row: Any, text_field: str, where: str) -> str:
    """Returns the text of a row. None counts as empty: web corpora have such rows."""
    if not isinstance(row, dict) or text_field not in row:
        fields = sorted(row) if isinstance(row, dict) else type(row).__name__
        raise SourceError(f"{where} has no field {text_field!r}; it has {fields}: choose one with text_field")
    text = row[text_field]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise SourceError(
            f"{where}: field {text_field!r} is {type(text).__name__}, expected text: choose "
            "another text_field"
        )
    # JSON can spell half of a surrogate pair, which no UTF-8 holds: U+FFFD stands for it
    return text if text.isascii() else _SURROGATE.sub("\ufffd", text)
