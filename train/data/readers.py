"""Documents of one file, and rows of datasets, as text.

Tables and datasets are read by the library `datasets`, streamed: nothing is copied to its cache.
Text is read here, because its builder for text turns "\\r\\n" into "\\n", and so are lines of
.jsonl, because its parser takes dates for times.
"""

import csv
import io
import json
import logging
import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from delta_trn.train.settings.errors import SourceError

SEPARATOR = "<|endoftext|>"
# how fsspec calls what packs a file; it knows more, such as .zip, of which it reads one member
PACKED = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd"}
LINES = (".jsonl", ".ndjson")  # an object of JSON in every line
# of each kind of table, the builder in `datasets`. utf-8-sig: spreadsheets write a byte order mark
TABLES = {".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}
_CSV = {"na_filter": False, "encoding": "utf-8-sig"}  # an empty cell is empty text, and NA is text
_SURROGATE = re.compile("[\ud800-\udfff]")


def kind_of(path: Path) -> str:
    """Returns the suffix that says what is in a file, in small letters: .jsonl for ROWS.jsonl.GZ."""
    return (path.with_suffix("").suffix if is_packed(path) else path.suffix).lower()


def is_packed(path: Path) -> bool:
    """Returns whether a file's last suffix says that another file is packed in it."""
    return path.suffix.lower() in PACKED


def has_rows(path: Path) -> bool:
    """Returns whether a file's documents are a field of its rows."""
    return kind_of(path) in (*LINES, ".json", *TABLES)


def open_text(path: Path, encoding: str = "utf-8") -> io.TextIOWrapper:
    """Opens a text file that may be packed. Line ends stay,
    so that a document's bytes are the file's.
    """
    import fsspec

    _teach_zstd()
    packed = PACKED.get(path.suffix.lower())
    return fsspec.open(str(path), "rt", encoding=encoding, newline="", compression=packed).open()  # type: ignore


def check_text(path: Path) -> None:
    """Reads a text file to its end. Raises ValueError where it is not UTF-8, or has NUL characters."""
    with open_text(path) as file:
        while block := file.read(2**20):
            _refuse_nul(block)


def _refuse_nul(block: str) -> None:
    if "\0" in block:
        raise ValueError("it has NUL characters")


def rows_missing(path: Path, text_field: str) -> str | None:
    """Returns what a file of rows lacks, so that it is none with this field; None: nothing.

    Lines of JSON are read to their end, so that a file is left out whole or not at all.
    """
    kind = kind_of(path)
    try:
        if kind == ".parquet":
            import pyarrow.parquet

            columns = pyarrow.parquet.read_schema(path).names
        elif kind in TABLES:
            with open_text(path, "utf-8-sig") as file:
                columns = next(csv.reader(file, delimiter=_separator(kind)), [])
        else:
            first = next(iter(rows := _objects(path)), {text_field: ""})
            columns = list(first) if isinstance(first, dict) else []
            if text_field in columns:
                for _ in rows:
                    pass
    except RecursionError:
        return "files of JSON that is nested too deeply"
    except _NotJSON:
        if kind == ".json":
            return "files that are not JSON, or have comments"
        raise
    return None if text_field in columns else f"tables without {text_field!r}"


def _separator(kind: str) -> str:
    return "\t" if kind == ".tsv" else ","


def _teach_zstd() -> None:
    """Lets fsspec, and so `datasets`, unpack .zst by pyarrow:
    its own way needs one more package.
    """
    import pyarrow
    from fsspec.compression import register_compression

    def unpack(file: Any, mode: str = "rb", **options: Any) -> Any:
        return io.BufferedReader(pyarrow.CompressedInputStream(file, "zstd"))

    register_compression("zstd", unpack, "zst", force=True)


def read_text(path: Path, section: int) -> Iterator[str]:
    """Reads a text file: one document between two separators, or several where that is long.

    A long one is cut between `section` and twice as many characters: at the last blank line there,
    else at the last line's end, else before the last space, else where it becomes too long.
    """
    rest = edges = ""
    with open_text(path) as file:
        while block := file.read(section):
            _refuse_nul(block)
            *ended, rest = (rest + block).split(SEPARATOR)
            edges = "\r\n" if ended else edges  # a separator stands on a line of its own
            yield from (text.strip(edges) for text in ended)
            while len(rest) >= 2 * section + len(SEPARATOR):  # its end may be half a separator
                cut = _place_to_cut(rest, section)
                yield rest[:cut].strip(edges)
                rest = rest[cut:]
    if rest:
        yield rest.strip(edges)


def _place_to_cut(text: str, section: int) -> int:
    for end in ("\n\n", "\n\r\n", "\n"):
        if (place := text.rfind(end, section, 2 * section)) >= 0:
            return place + len(end)
    space = text.rfind(" ", section, 2 * section)
    return space if space >= 0 else 2 * section


def read_rows(path: Path, text_field: str) -> Iterator[str]:
    """Reads one field of every row of a .jsonl, .ndjson, .json, .csv, .tsv or .parquet file."""
    kind = kind_of(path)
    if kind not in TABLES:
        yield from read_dataset(_objects(path), text_field, str(path))
        return
    _refuse_empty(path, kind, text_field)
    import datasets

    builder, options = TABLES[kind], {}
    if builder == "csv":
        text = datasets.Features({text_field: datasets.Value("string")})
        options = {**_CSV, "sep": _separator(kind), "usecols": [text_field], "features": text}
    # the library looks for patterns in names of files
    literal = re.sub(r"([*?[])", r"[\1]", str(path.resolve()))
    rows = stream(text_field, builder, data_files=literal, split="train", **options)
    yield from read_dataset(rows, text_field, str(path))


def _refuse_empty(path: Path, kind: str, text_field: str) -> None:
    """Raises SourceError for a table without a row or a header, whose reader would not say that."""
    if kind == ".parquet":
        import pyarrow.parquet

        empty = pyarrow.parquet.read_metadata(path).num_rows == 0
    else:
        with open_text(path) as file:
            empty = not file.read(1)
    if empty:
        raise SourceError(f"{path} is empty; expected rows with {text_field!r}: take it away")


class _NotJSON(SourceError):
    """A line, or a file, is not JSON."""


def _objects(path: Path) -> Iterator[Any]:
    """Yields what the lines of a file say that are not blank, or the rows of a .json file.

    A .json file holds a list of rows, one row, or a row in every line.
    """
    with open_text(path, "utf-8-sig") as file:
        if kind_of(path) == ".json":
            whole = file.read()
            try:
                rows = json.loads(whole) if whole.strip() else []
            except ValueError:
                lines = whole.splitlines()
            else:
                yield from rows if isinstance(rows, list) else [rows]
                return
        else:
            lines = file
        yield from _parse(lines, path)


def _parse(lines: Iterable[str], path: Path) -> Iterator[Any]:
    """Yields the objects in the lines that are not blank."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield json.loads(line)
        except ValueError as error:
            raise _NotJSON(
                f"{path}:{number} is not JSON ({error}); expected one object per line"
            ) from error


def stream(text_field: str, *names: Any, **options: Any) -> Any:
    """Returns a `datasets.IterableDataset`. The library prints nothing, and keeps nothing on this
    machine.

    Of parquet, which most datasets are, no column but the text is fetched and decoded.
    """
    import datasets.config

    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # it would ask the network
    datasets.logging.set_verbosity(logging.CRITICAL)
    datasets.disable_progress_bars()
    _teach_zstd()
    with tempfile.TemporaryDirectory() as cache:  # it locks what it opens there
        options = {**options, "streaming": True, "cache_dir": cache}
        rows = datasets.load_dataset(*names, **options)
        if rows.info.builder_name == "parquet" and text_field in (rows.column_names or ()):
            return datasets.load_dataset(*names, columns=[text_field], **options)
        return rows


def read_dataset(rows: Iterable[Any], text_field: str, where: str) -> Iterator[str]:
    """Yields the text of every row. None counts as empty: web corpora have such rows."""
    for number, row in enumerate(rows, start=1):
        text = row.get(text_field, number) if isinstance(row, dict) else number
        if text is not None and not isinstance(text, str):
            raise SourceError(
                f"{where} row {number} has no text in field {text_field!r}: {str(row)[:200]}; "
                "expected text: choose data.text_field"
            )
        # JSON can spell half of a surrogate pair, which no UTF-8 holds: U+FFFD stands for it
        yield _SURROGATE.sub("\ufffd", text or "")
