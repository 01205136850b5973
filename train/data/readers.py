"""Documents of one file, and rows of datasets, as text.

Tables and datasets are read by the library `datasets`, streamed: nothing is copied to its cache.
Text is read here, because its builder for text turns "\\r\\n" into "\\n", and so are lines of
.jsonl, because its parser takes dates for times.
"""

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
PACKED = {".gz", ".bz2", ".xz", ".zst"}
# of each kind of table, the builder in `datasets`. utf-8-sig: spreadsheets write a byte order mark
TABLES = {".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}
_CSV = {"na_filter": False, "encoding": "utf-8-sig"}  # an empty cell is empty text, and NA is text
_SURROGATE = re.compile("[\ud800-\udfff]")


def kind_of(path: Path) -> str:
    """Returns the suffix that says what is in a file: .jsonl for rows.jsonl.gz."""
    return path.with_suffix("").suffix if path.suffix in PACKED else path.suffix


def has_rows(path: Path) -> bool:
    """Returns whether a file's documents are a field of its rows."""
    return kind_of(path) in (".jsonl", *TABLES)


def open_text(path: Path) -> io.TextIOWrapper:
    """Opens a text file that may be packed. Line ends stay,
    so that a document's bytes are the file's.
    """
    import fsspec

    _teach_zstd()
    return fsspec.open(str(path), "rt", encoding="utf-8", newline="", compression="infer").open()  # type: ignore


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
            if "\0" in block:
                raise ValueError("it has NUL characters")
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
    """Reads one field of every row of a .jsonl, .csv, .tsv or .parquet file."""
    if kind_of(path) == ".jsonl":
        with open_text(path) as lines:
            yield from read_dataset(_parse(lines, path), text_field, str(path))
        return
    import datasets

    builder, options = TABLES[kind_of(path)], {}
    if builder == "csv":
        text = datasets.Features({text_field: datasets.Value("string")})
        separator = "\t" if kind_of(path) == ".tsv" else ","
        options = {**_CSV, "sep": separator, "usecols": [text_field], "features": text}
    # the library looks for patterns in names of files
    literal = re.sub(r"([*?[])", r"[\1]", str(path.resolve()))
    rows = stream(text_field, builder, data_files=literal, split="train", **options)
    yield from read_dataset(rows, text_field, str(path))


def _parse(lines: Iterable[str], path: Path) -> Iterator[Any]:
    """Yields the objects in the lines that are not blank."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield json.loads(line)
        except ValueError as error:
            raise SourceError(
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
