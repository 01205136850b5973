"""Documents of one file, and rows of datasets, as text.

Files of rows and datasets are read by the library `datasets`, streamed: nothing is copied to its cache.
Text files are read here, because its builder for them turns "\\r\\n" into "\\n". Lines of .jsonl are parsed
here: its own parser refuses files whose other fields differ from row to row, and takes dates for times.
"""

import io
import json
import logging
import lzma
import re
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from delta_trn.train.settings.errors import SourceError

SEPARATOR = "<|endoftext|>"
PACKED = {".gz", ".bz2", ".xz", ".zst"}
# of each kind of file of rows, the builder in `datasets` and its options
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    ".jsonl": ("text", {}),
    # utf-8-sig: spreadsheets write a byte order mark. An empty cell is empty text, and NA is text
    ".csv": ("csv", {"na_filter": False, "encoding": "utf-8-sig"}),
    ".tsv": ("csv", {"na_filter": False, "encoding": "utf-8-sig", "sep": "\t"}),
    ".parquet": ("parquet", {}),
}
_SURROGATE = re.compile("[\ud800-\udfff]")
_DAMAGE = (EOFError, OSError, zlib.error, lzma.LZMAError)


def unpacked_name(path: Path) -> Path:
    """Returns the path without .gz, .bz2, .xz or .zst at its end: rows.jsonl for rows.jsonl.gz."""
    return path.with_suffix("") if path.suffix in PACKED else path


def open_text(path: Path) -> io.TextIOWrapper:
    """Opens a text file that may be packed. Line ends stay, so that a document's bytes are the file's."""
    import fsspec

    _teach_zstd()
    return fsspec.open(str(path), "rt", encoding="utf-8", newline="", compression="infer").open()  # type: ignore


def _teach_zstd() -> None:
    """Lets fsspec, and so `datasets`, unpack .zst by pyarrow: its own way needs one more package."""
    import pyarrow
    from fsspec.compression import register_compression

    def unpack(file: Any, mode: str = "rb", **options: Any) -> Any:
        return io.BufferedReader(pyarrow.CompressedInputStream(file, "zstd"))

    register_compression("zstd", unpack, "zst", force=True)


@contextmanager
def damage_named(path: Path) -> Iterator[None]:
    """Raises SourceError where a packed file turns out to be cut short or damaged."""
    try:
        yield
    except _DAMAGE as error:
        if path.suffix not in PACKED:
            raise
        is_cut = isinstance(error, EOFError) or "truncated" in str(error).lower()
        what = "is cut short" if is_cut else f"cannot be unpacked as {path.suffix}"
        raise SourceError(f"{path} {what} ({error}); copy it again, or pack it again") from error


def read_text(path: Path, section: int) -> Iterator[str]:
    """Reads a text file: one document between two separators, or several where that is long.

    A document ends at the first blank line after `section` characters, or at the first line's end after twice
    as many. A line longer than that is cut before a space, if it has any.
    """
    lines: list[str] = []
    length, separated = 0, False

    def document() -> str:
        text = "".join(lines)
        return text.strip("\r\n") if separated else text  # a separator stands on a line of its own

    with damage_named(path), open_text(path) as file:
        for line, is_whole in _lines(file, 2 * section):
            *ends, rest = line.split(SEPARATOR)
            for end in ends:
                separated = True
                lines.append(end)
                yield document()
                lines, length = [], 0
            lines.append(rest)
            length += len(rest)
            if length >= section and (not is_whole or not rest.strip() or length >= 2 * section):
                yield document()
                lines, length = [], 0
    if lines:
        yield document()


def _lines(file: io.TextIOWrapper, limit: int) -> Iterator[tuple[str, bool]]:
    """Yields lines and True, and of one that is longer than `limit` parts and False."""
    kept = ""
    while part := file.readline(limit):
        line = kept + part
        is_whole = len(part) < limit or part[-1] in "\r\n"
        cut = len(line) if is_whole else line.rfind(" ", 1)
        cut = cut if cut > 0 else len(line)
        yield line[:cut], is_whole
        kept = line[cut:]
    if kept:
        yield kept, False


def read_rows(path: Path, text_field: str) -> Iterator[str]:
    """Reads one field of every row of a .jsonl, .csv, .tsv or .parquet file."""
    builder, options = ROWS[unpacked_name(path).suffix]
    if builder == "csv":
        options = {**options, "usecols": [text_field], "features": _text_alone(text_field)}
    with damage_named(path):
        try:
            rows = stream(text_field, builder, data_files=_literal(path), split="train", **options)
            yield from read_dataset(_parsed(rows, path) if builder == "text" else rows, text_field, str(path))
        except (ValueError, UnicodeDecodeError) as error:
            raise SourceError(
                f"{path} cannot be read ({error}); expected rows in UTF-8 with a column {text_field!r}: mend "
                "it, choose data.text_field, or rename it to .txt to have it read as text"
            ) from error


def _literal(path: Path) -> str:
    """Returns the path as `datasets` takes it, which looks for patterns in names of files."""
    return re.sub(r"([*?[])", r"[\1]", str(path.resolve()))


def _text_alone(text_field: str) -> Any:
    import datasets

    return datasets.Features({text_field: datasets.Value("string")})


def _parsed(lines: Iterable[Any], path: Path) -> Iterator[Any]:
    """Yields the objects in the lines that are not blank."""
    for number, line in enumerate(lines, start=1):
        if not line["text"].strip():
            continue
        try:
            yield json.loads(line["text"])
        except ValueError as error:
            raise SourceError(
                f"{path}:{number} is not JSON ({error}); expected one object per line"
            ) from error


def stream(text_field: str, *names: Any, **options: Any) -> Any:
    """Returns a `datasets.IterableDataset`. The library prints nothing, and keeps nothing on this machine.

    Of parquet, which most datasets are, no column but the text is fetched and decoded.
    """
    datasets = quiet_datasets()
    _teach_zstd()
    with tempfile.TemporaryDirectory() as cache:  # it locks what it opens there
        options = {**options, "streaming": True, "cache_dir": cache}
        rows = datasets.load_dataset(*names, **options)
        if rows.info.builder_name == "parquet" and text_field in (rows.column_names or ()):
            return datasets.load_dataset(*names, columns=[text_field], **options)
        return rows


def quiet_datasets() -> Any:
    """Imports the library `datasets`. Its bars and warnings are off, and it counts no use of local files."""
    import datasets

    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # it would ask the network
    datasets.logging.set_verbosity(logging.CRITICAL)
    datasets.disable_progress_bars()
    return datasets


def read_dataset(rows: Iterable[Any], text_field: str, where: str) -> Iterator[str]:
    """Yields the text of every row. None counts as empty: web corpora have such rows."""
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict) or text_field not in row:
            fields = sorted(row) if isinstance(row, dict) else type(row).__name__
            raise SourceError(
                f"{where} row {number} has no field {text_field!r}; it has {fields}: choose data.text_field"
            )
        text = row[text_field]
        if text is not None and not isinstance(text, str):
            raise SourceError(
                f"{where} row {number}: field {text_field!r} is {type(text).__name__}, expected text: choose "
                "another data.text_field"
            )
        # JSON can spell half of a surrogate pair, which no UTF-8 holds: U+FFFD stands for it
        yield _SURROGATE.sub("\ufffd", text or "")
