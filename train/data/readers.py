"""Documents of one file, or of one row, as (text, share of the file that has been read).

pyarrow reads parquet. Lines of .txt and .jsonl are read here, because the builders of `datasets` change text:
theirs turns "\\r\\n" into "\\n", reads dates as times and numbers as text, and refuses half a surrogate pair.

A name that ends with .gz, .bz2, .xz or .zst is that of a packed file, which is unpacked while it is read.
"""

import bz2
import csv
import gzip
import io
import json
import lzma
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from delta_trn.train.settings.errors import SourceError

SEPARATOR = "<|endoftext|>"
LONG_LINE = 2**22  # characters: of a line that is longer, no more than about two such parts are in memory
_SURROGATE = re.compile("[\ud800-\udfff]")
_BEFORE_A_SPACE = re.compile(r"(?<=\S)(?=\s)")

Documents = Iterator[tuple[str, float]]


def _zstd(file: BinaryIO) -> Any:
    import pyarrow

    return pyarrow.CompressedInputStream(file, "zstd")


PACKED: dict[str, Callable[[BinaryIO], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _zstd,
}
_DAMAGE = (EOFError, OSError, zlib.error, lzma.LZMAError)


def unpacked_name(path: Path) -> Path:
    """Returns the path without .gz, .bz2, .xz or .zst at its end: rows.jsonl for rows.jsonl.gz."""
    return path.with_suffix("") if path.suffix in PACKED else path


@contextmanager
def open_unpacked(path: Path) -> Iterator[tuple[io.BufferedReader, Callable[[int], float]]]:
    """Opens a file that may be packed. The second value turns what has been read of it into a share.

    SourceError if a packed file is cut short or damaged, as soon as reading comes to that place.
    """
    size = path.stat().st_size or 1
    with open(path, "rb") as file:
        if path.suffix not in PACKED:
            yield file, lambda read: read / size
            return
        try:
            with io.BufferedReader(PACKED[path.suffix](file)) as unpacked:
                yield unpacked, lambda read: file.tell() / size
        except _DAMAGE as error:
            is_cut = isinstance(error, EOFError) or "truncated" in str(error).lower()
            what = "is cut short" if is_cut else f"cannot be unpacked as {path.suffix}"
            raise SourceError(f"{path} {what} ({error}); copy it again, or pack it again") from error


def read_divided_text(path: Path, section: int) -> Documents:
    """Reads a text file as `read_text` does, and cuts what would be its only document into pieces.

    One document cannot be divided into training and held-out text.
    """
    held: list[tuple[str, float]] = []
    documents = read_text(path, section)
    for document in documents:
        held.append(document)
        if sum(bool(text.strip()) for text, _ in held) > 1:
            yield from held
            yield from documents
            return
    for text, share in held:
        yield from ((piece, share) for piece in _cut(text, 2 * section))


def read_text(path: Path, section: int) -> Documents:
    """Reads a text file: one document between two separators, or several where that is long.

    A document ends at the first blank line after `section` characters, or at the first line's end after twice
    as many. A line longer than LONG_LINE is cut into pieces that long, between two words if it has any.
    """
    lines: list[str] = []
    length = read = 0
    separated = False

    def document() -> str:
        text = "".join(lines)
        return text.strip("\r\n") if separated else text  # a separator stands on a line of its own

    # newline="": "\r\n" stays, so that a document's bytes are the file's
    with open_unpacked(path) as (file, share), io.TextIOWrapper(file, encoding="utf-8", newline="") as text:
        for line in _lines(text, 2 * section):
            read += len(line)
            *ends, rest = line.split(SEPARATOR)
            for end in ends:
                separated = True
                lines.append(end)
                yield document(), share(read)
                lines, length = [], 0
            lines.append(rest)
            length += len(rest)
            if length >= section and (not rest.strip() or length >= 2 * section):
                yield document(), share(read)
                lines, length = [], 0
    if lines:
        yield document(), 1.0


def _lines(file: TextIO, size: int) -> Iterator[str]:
    """Yields lines, and of one that is longer than LONG_LINE pieces of about `size` characters."""
    line, is_long = "", False
    while part := file.readline(LONG_LINE):
        line += part
        is_end = len(part) < LONG_LINE or part[-1] in "\r\n"
        is_long |= not is_end
        if is_long:
            *pieces, line = _cut(line, size)
            yield from pieces
        if is_end:
            yield line
            line, is_long = "", False
    if line:
        yield line


def _cut(text: str, size: int) -> Iterator[str]:
    """Yields pieces of `size` characters, or up to a space soon after; the last is shorter than two.

    A piece begins with the space, as a word's token does. A separator is not cut.
    """
    start, margin = 0, len(SEPARATOR) - 1
    while len(text) - start > 2 * size:
        at = start + size
        if match := _BEFORE_A_SPACE.search(text, at, at + min(size, 1024)):
            at = match.start()
        elif (separator := text.find(SEPARATOR, at - margin, at + margin)) >= 0:
            at = separator + len(SEPARATOR)
        yield text[start:at]
        start = at
    yield text[start:]


def read_jsonl(path: Path, text_field: str) -> Documents:
    """Reads one field of every line that is not blank."""
    read = 0
    with open_unpacked(path) as (file, share):
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
            yield text_of(row, text_field, f"{path}:{number}"), share(read)


def read_csv(path: Path, text_field: str) -> Documents:
    """Reads one column of a table whose first line names the columns; those of .tsv stand between tabs."""
    csv.field_size_limit(sys.maxsize)  # 128 KiB otherwise, for the whole process; documents are longer
    delimiter = "\t" if unpacked_name(path).suffix == ".tsv" else ","
    read = 0
    # utf-8-sig: spreadsheets write a byte order mark
    with (
        open_unpacked(path) as (file, share),
        io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as text,
    ):
        rows = csv.DictReader(text, delimiter=delimiter, strict=True)
        try:
            columns = list(rows.fieldnames or ())
            if text_field not in columns:
                raise _no_column(path, text_field, columns)
            for row in rows:
                read += sum(len(cell) for cell in row.values() if isinstance(cell, str))
                yield text_of(row, text_field, f"{path}:{rows.line_num}"), share(read)
        except (csv.Error, UnicodeDecodeError) as error:
            raise SourceError(
                f"{path}:{rows.line_num} is not a line of a table in UTF-8 ({error}); mend it, or rename the "
                "file to .txt to have it read as text"
            ) from error


def _no_column(path: Path, text_field: str, columns: list[str]) -> SourceError:
    return SourceError(f"{path} has no column {text_field!r}; it has {columns}: choose data.text_field")


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
            raise _no_column(path, text_field, columns)
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
        raise SourceError(f"{where} has no field {text_field!r}; it has {fields}: choose data.text_field")
    text = row[text_field]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise SourceError(
            f"{where}: field {text_field!r} is {type(text).__name__}, expected text: choose "
            "another data.text_field"
        )
    # JSON can spell half of a surrogate pair, which no UTF-8 holds: U+FFFD stands for it
    return text if text.isascii() else _SURROGATE.sub("\ufffd", text)
