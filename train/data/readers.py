"""Documents of one file, or of one row, as (text, share of the file that has been read, mark to go on from).

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
from typing import Any, BinaryIO, NamedTuple, TextIO

from delta_trn.train.settings.errors import SourceError

SEPARATOR = "<|endoftext|>"
LONG_LINE = 2**22  # characters: of a line that is longer, no more than about two such parts are in memory
_SURROGATE = re.compile("[\ud800-\udfff]")
_BEFORE_A_SPACE = re.compile(r"(?<=\S)(?=\s)")


class Mark(NamedTuple):
    """A place of a file from which reading goes on without what stands before it.

    offset      bytes before it, unpacked; in a .parquet file row groups
    documents   documents before it
    lines       lines before it, which messages count
    separated   whether a text had a separator before it
    """

    offset: int = 0
    documents: int = 0
    lines: int = 0
    separated: bool = False


START = Mark()
Documents = Iterator[tuple[str, float, Mark]]


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


def _pass_over(file: io.BufferedReader, size: int) -> None:
    """Moves a file that was just opened `size` bytes on. Not every unpacking stream can seek."""
    if isinstance(file, io.BufferedReader) and isinstance(file.raw, io.FileIO):
        file.seek(size)
        return
    while size > 0 and (block := file.read(min(size, 2**20))):
        size -= len(block)


def read_divided_text(path: Path, section: int, mark: Mark = START) -> Documents:
    """Reads a text file as `read_text` does, and cuts what would be its only document into pieces.

    One document cannot be divided into training and held-out text.
    """
    documents = read_text(path, section, mark)
    if mark != START:  # only several documents have one
        yield from documents
        return
    held: list[tuple[str, float, Mark]] = []
    for document in documents:
        held.append(document)
        if sum(bool(text.strip()) for text, _, _ in held) > 1:
            yield from held
            yield from documents
            return
    for text, share, _ in held:
        yield from ((piece, share, START) for piece in _cut(text, 2 * section))


def read_text(path: Path, section: int, mark: Mark = START) -> Documents:
    """Reads a text file: one document between two separators, or several where that is long.

    A document ends at the first blank line after `section` characters, or at the first line's end after twice
    as many. A line longer than LONG_LINE is cut into pieces that long, between two words if it has any.
    """
    lines: list[str] = []
    read, number, separated = mark.offset, mark.documents, mark.separated
    length = 0

    def document() -> str:
        text = "".join(lines)
        return text.strip("\r\n") if separated else text  # a separator stands on a line of its own

    # newline="": "\r\n" stays, so that a document's bytes are the file's
    with open_unpacked(path) as (file, share):
        _pass_over(file, read)
        with io.TextIOWrapper(file, encoding="utf-8", newline="") as text:
            for line, is_whole in _lines(text, 2 * section):
                read += _size(line)
                *ends, rest = line.split(SEPARATOR)
                for left, end in enumerate(ends, start=1 - len(ends)):
                    separated = True
                    lines.append(end)
                    number += 1
                    if is_whole and left == 0 and rest:
                        mark = Mark(read - _size(rest), number, separated=True)
                    yield document(), share(read), mark
                    lines, length = [], 0
                lines.append(rest)
                length += len(rest)
                if length >= section and (not rest.strip() or length >= 2 * section):
                    number += 1
                    if is_whole:
                        mark = Mark(read, number, separated=separated)
                    yield document(), share(read), mark
                    lines, length = [], 0
    if lines:
        yield document(), 1.0, mark


def _size(text: str) -> int:
    """Returns how many bytes of UTF-8 a text has."""
    return len(text) if text.isascii() else len(text.encode())


def _lines(file: TextIO, size: int) -> Iterator[tuple[str, bool]]:
    """Yields lines and True, and of one that is longer than LONG_LINE pieces of about `size` and False."""
    line, is_long = "", False
    while part := file.readline(LONG_LINE):
        line += part
        is_end = len(part) < LONG_LINE or part[-1] in "\r\n"
        is_long |= not is_end
        if is_long:
            *pieces, line = _cut(line, size)
            yield from ((piece, False) for piece in pieces)
        if is_end:
            yield line, not is_long
            line, is_long = "", False
    if line:
        yield line, False


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


def read_jsonl(path: Path, text_field: str, mark: Mark = START) -> Documents:
    """Reads one field of every line that is not blank."""
    read, documents = mark.offset, mark.documents
    with open_unpacked(path) as (file, share):
        _pass_over(file, read)
        for number, line in enumerate(file, start=mark.lines + 1):
            read += len(line)
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise SourceError(
                    f"{path}:{number} is not JSON ({error}); expected one object per line"
                ) from error
            documents += 1
            yield (
                text_of(row, text_field, f"{path}:{number}"),
                share(read),
                Mark(read, documents, number),
            )


def read_csv(path: Path, text_field: str, mark: Mark = START) -> Documents:
    """Reads one column of a table whose first line names the columns; those of .tsv stand between tabs.

    It has no mark but the start: what stands before a line decides whether it is within quotes.
    """
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
                yield text_of(row, text_field, f"{path}:{rows.line_num}"), share(read), START
        except (csv.Error, UnicodeDecodeError) as error:
            raise SourceError(
                f"{path}:{rows.line_num} is not a line of a table in UTF-8 ({error}); mend it, or rename the "
                "file to .txt to have it read as text"
            ) from error


def _no_column(path: Path, text_field: str, columns: list[str]) -> SourceError:
    return SourceError(f"{path} has no column {text_field!r}; it has {columns}: choose data.text_field")


def read_parquet(path: Path, text_field: str, mark: Mark = START) -> Documents:
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
        number = mark.documents
        for group in range(mark.offset, file.num_row_groups):
            first = Mark(group, number)
            for batch in file.iter_batches(batch_size=1024, row_groups=[group], columns=[text_field]):
                for row in batch.to_pylist():
                    number += 1
                    text = text_of(row, text_field, f"{path} row {number}")
                    yield text, number / file.metadata.num_rows, first


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
