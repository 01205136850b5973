"""Where text comes from: files of this machine, Python's standard library, or a Hugging Face dataset.

    kind            one document is
    .txt and other  the file, cut where it says <|endoftext|>; alone or over 1 MiB, it is cut into sections
    .jsonl          a line's field
    .parquet        a row's column
    dataset         a row's column
    python-stdlib   a module's source

Documents come in the same order every time, and a reader's position can be saved and returned to.
"""

import hashlib
import json
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from delta_trn.train.settings.errors import SourceError

SEPARATOR = "<|endoftext|>"
SECTION = 2**14  # characters: a file that is the whole source still makes documents to hold out
SECTION_IN_FOLDER = 2**20
# hashing 256 MiB takes a quarter of a second; above it 64 blocks of 1 MiB and the size stand for the file
WHOLE_HASH_LIMIT, HASH_BLOCK, HASH_BLOCKS = 2**28, 2**20, 64

# Left out of python-stdlib. Tests are twice as large as all the rest, and not installed everywhere. The
# codecs are generated tables, near-copies of each other: some would be in training and their twins held out.
# pydoc_data is one generated file with 7 % of the bytes.
_STDLIB_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "pydoc_data"}
_SURROGATE = re.compile("[\ud800-\udfff]")


class Reader(Protocol):
    """One pass over a source's documents, from a position on."""

    skipped: Counter[str]

    def __iter__(self) -> Iterator[str]: ...
    def position(self) -> dict[str, Any]:
        """JSON from which `Source.reader` continues after the document that was yielded last."""
        ...

    def fraction(self) -> float | None:
        """How much of the source has been read, where that is known."""
        ...

    def close(self) -> None: ...


class Source(Protocol):
    """Text in a fixed order. `name` becomes part of file names; `settings()` identifies the text."""

    @property
    def name(self) -> str: ...
    def settings(self) -> dict[str, Any]: ...
    def reader(self, position: dict[str, Any] | None = None) -> Reader: ...


def find_source(
    source: "str | Path | Source", *, subset: str | None, split: str, revision: str | None, text_field: str
) -> Source:
    """The source a name means: an existing path first, then python-stdlib, then a Hugging Face dataset."""
    if not isinstance(source, str | Path):
        return source
    path = Path(source).expanduser()
    if path.exists():
        if subset is not None:
            raise SourceError(
                f"subset={subset!r} belongs to Hugging Face datasets, but {path} is a path here"
            )
        return path_source(path, text_field)
    if str(source) == "python-stdlib":
        return python_stdlib()
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", str(source)):
        from delta_trn.train.data.hub import HubSource

        return HubSource(str(source), subset, split, text_field, revision)
    raise SourceError(
        f"no source {str(source)!r}: expected an existing folder, .txt, .jsonl or .parquet file, "
        "'python-stdlib', or a Hugging Face dataset such as roneneldan/TinyStories"
    )


def path_source(path: Path, text_field: str) -> "FileSource":
    """A file, or every text file in a folder, hidden ones aside, in the order of their names."""
    if path.is_file():
        return FileSource(_slug(path.stem), path.parent, (path.name,), text_field, section=SECTION)
    if (path / "meta.json").exists() and any(path.glob("*.bin")):
        raise SourceError(
            f"{path} holds prepared shards, not text; open it as it is, or pass the text it was made of"
        )
    skipped: Counter[str] = Counter()
    names = []
    for name in _walk(path, lambda part: part.startswith(".") or part == "__pycache__"):
        if _is_text(path / name):
            names.append(name)
        else:
            skipped["files that are not text"] += 1
    if not names:
        raise SourceError(
            f"{path} has no text file (.txt, .jsonl, .parquet, ...); {skipped.total()} other files"
        )
    return FileSource(_slug(path.resolve().name), path, tuple(names), text_field, skipped=skipped)


def python_stdlib() -> "FileSource":
    """The .py and .txt files of the running interpreter's standard library: 10 MB, 600 documents.

    Without _STDLIB_LEFT_OUT. The text depends on the interpreter's version and on nothing else of the
    machine: files that a build generates about its host (_sysconfigdata*, config-*) are left out.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = re.compile(r"__pycache__|_sysconfigdata.*|config-.*|\..*")
    names = [
        name
        for name in _walk(root, lambda part: part in _STDLIB_LEFT_OUT or bool(left_out.fullmatch(part)))
        if name.endswith((".py", ".txt"))
    ]
    if len(names) < 100:
        raise SourceError(
            f"{root} holds {len(names)} source files of the standard library, expected hundreds; this Python "
            "ships it compiled or zipped: pass a folder of text instead"
        )
    return FileSource("python-stdlib", root, tuple(names), "text", section=2**30, kind="python-stdlib")


@dataclass(frozen=True)
class FileSource:
    """Text in files below `root`, read in the order of `names`."""

    name: str
    root: Path
    names: tuple[str, ...]
    text_field: str = "text"
    section: int = SECTION_IN_FOLDER
    kind: str = "files"
    skipped: Counter[str] = field(default_factory=Counter)

    def settings(self) -> dict[str, Any]:
        """Names, contents, and what decides how they are cut. Where the root lies does not matter."""
        digest = hashlib.sha256()
        for name in self.names:
            digest.update(f"{name}\0{_content_hash(self.root / name)}\n".encode())
        fields = {Path(name).suffix for name in self.names} & {".jsonl", ".parquet"}
        return {
            "kind": self.kind,
            "name": self.name,
            "files": len(self.names),
            "text_field": self.text_field if fields else None,
            "section": self.section,
            "sha256": digest.hexdigest(),
        }

    def reader(self, position: dict[str, Any] | None = None) -> "FileReader":
        return FileReader(self, position or {"file": 0, "document": 0})


class FileReader:
    """Position: index of the file, documents of it already read, and what was skipped until there."""

    def __init__(self, source: FileSource, position: dict[str, Any]):
        self.skipped: Counter[str] = Counter(position.get("skipped", source.skipped))
        self._source = source
        self._file: int = position["file"]
        self._document: int = position["document"]
        self._sizes = [(source.root / name).stat().st_size for name in source.names]
        self._total = sum(self._sizes) or 1
        self._finished = sum(self._sizes[: self._file])
        self._within = 0.0

    def __iter__(self) -> Iterator[str]:
        for name in self._source.names[self._file :]:
            skip = self._document
            for number, (text, share) in enumerate(self._read(self._source.root / name)):
                if number < skip:
                    continue
                self._document, self._within = number + 1, share * self._sizes[self._file]
                yield text
            self._finished += self._sizes[self._file]
            self._file, self._document, self._within = self._file + 1, 0, 0.0

    def position(self) -> dict[str, Any]:
        return {"file": self._file, "document": self._document, "skipped": dict(self.skipped)}

    def fraction(self) -> float:
        return min(1.0, (self._finished + self._within) / self._total)

    def close(self) -> None:
        """Files are closed as each is read through."""

    def _read(self, path: Path) -> Iterator[tuple[str, float]]:
        """(document, share of the file read so far)"""
        if path.suffix == ".jsonl":
            return read_jsonl(path, self._source.text_field)
        if path.suffix == ".parquet":
            return read_parquet(path, self._source.text_field)
        return self._read_text(path)

    def _read_text(self, path: Path) -> Iterator[tuple[str, float]]:
        try:
            yield from read_text(path, self._source.section)
        except UnicodeDecodeError as error:
            if len(self._source.names) == 1:
                raise SourceError(
                    f"{path} is not UTF-8: {error.reason} near byte {error.start}; convert it with iconv"
                ) from error
            self.skipped["files that are not UTF-8"] += 1


def read_text(path: Path, section: int) -> Iterator[tuple[str, float]]:
    """Documents of a text file: between separators, and none much longer than `section` characters.

    A cut falls at the first blank line after `section` characters; at a line's end where none comes by twice
    that.
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


def read_jsonl(path: Path, text_field: str) -> Iterator[tuple[str, float]]:
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
                    f"{path}:{number} is not JSON ({error}); expected one object a line"
                ) from error
            yield text_of(row, text_field, f"{path}:{number}"), read / size


def read_parquet(path: Path, text_field: str) -> Iterator[tuple[str, float]]:
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
                f"{path} has no column {text_field!r}; it has {columns}: choose with --text-field"
            )
        rows = 0
        for batch in file.iter_batches(batch_size=1024, columns=[text_field]):
            for text in batch.column(0).to_pylist():
                rows += 1
                yield (
                    text_of({text_field: text}, text_field, f"{path} row {rows}"),
                    rows / file.metadata.num_rows,
                )


def text_of(row: Any, text_field: str, where: str) -> str:
    """The text of a row. None counts as empty: web corpora have such rows."""
    if not isinstance(row, dict) or text_field not in row:
        has = sorted(row) if isinstance(row, dict) else type(row).__name__
        raise SourceError(f"{where} has no field {text_field!r}; it has {has}: choose with --text-field")
    text = row[text_field]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise SourceError(
            f"{where}: field {text_field!r} is {type(text).__name__}, expected text; see --text-field"
        )
    # JSON can spell half of a surrogate pair, which no UTF-8 holds: U+FFFD stands for it
    return text if text.isascii() else _SURROGATE.sub("\ufffd", text)


def _walk(root: Path, left_out: Any) -> list[str]:
    """Files below root in the order of their names, as POSIX paths relative to it."""
    names = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not left_out(name)]
        relative = Path(folder).relative_to(root)
        names += [(relative / name).as_posix() for name in files if not left_out(name)]
    return sorted(names)


def _is_text(path: Path) -> bool:
    """Text by its name for the formats we parse, else UTF-8 without NUL in the first 8 KiB."""
    if path.suffix in {".jsonl", ".parquet"}:
        return True
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        start = file.read(8192)
    # a multi-byte character may be cut at the end: 3 bytes at most
    try:
        start.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.start < len(start) - 3:
            return False
    return b"\0" not in start


def _content_hash(path: Path) -> str:
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with open(path, "rb") as file:
        if size <= WHOLE_HASH_LIMIT:
            while block := file.read(HASH_BLOCK):
                digest.update(block)
        else:
            for i in range(HASH_BLOCKS):
                file.seek(i * (size - HASH_BLOCK) // (HASH_BLOCKS - 1))
                digest.update(file.read(HASH_BLOCK))
    return digest.hexdigest()


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-").lower() or "text"
