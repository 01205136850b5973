"""Where text comes from: files of this machine, those of Python and its packages, or a Hugging Face dataset.

    source          one document is
    .txt and other  the file, cut where it says <|endoftext|>; alone or over 1 MiB, it is cut into pieces
    .jsonl          one field of a line
    .csv, .tsv      one column of a row
    .parquet        one column of a row
    dataset         one column of a row
    python-stdlib   the source of a module
    site-packages   the source of a module

Any but .parquet may be packed: .txt.gz, .jsonl.zst, .csv.xz, .py.bz2 are read like the file in them.
Documents come in the same order every time, and a reader's position can be saved and returned to.
"""

import hashlib
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from delta_trn.train.data.hub import HubSource
from delta_trn.train.data.readers import (
    START,
    Documents,
    Mark,
    open_unpacked,
    read_csv,
    read_divided_text,
    read_jsonl,
    read_parquet,
    read_text,
    unpacked_name,
)
from delta_trn.train.settings.errors import SourceError
from delta_trn.train.settings.schema import NAMED_SOURCES, DataSection

SECTION = 2**14  # characters: a file that is the whole source still makes documents to hold out
SECTION_IN_FOLDER = 2**20
# hashing 256 MiB takes a quarter of a second; above it 64 blocks of 1 MiB and the size stand for the file
WHOLE_HASH_LIMIT, HASH_BLOCK, HASH_BLOCKS = 2**28, 2**20, 64

FIELDS = {".jsonl", ".parquet", ".csv", ".tsv"}  # files of rows, of which one field is the text
ARCHIVES = {".tar", ".tgz", ".zip", ".7z", ".rar"}

# Left out of python-stdlib. Tests are twice as large as all the rest, and not installed everywhere. The
# codecs are generated tables, near-copies of each other: some would be in training and their twins held out.
# pydoc_data is one generated file with 7 % of the bytes.
_STDLIB_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "pydoc_data"}
# What a build generates about its host: the text must depend on the interpreter's version alone.
_STDLIB_GENERATED = re.compile(r"__pycache__|_sysconfigdata.*|config-.*|\..*")
# Left out of site-packages: hidden folders, and this project.
_PACKAGES_LEFT_OUT = re.compile(r"__pycache__|\..*|delta_trn.*|__editable__.*")
LONG_LINE, FEW_LINES = 24, 8  # bytes of a line that tells whose it is; fewer lines do not tell


class Reader(Protocol):
    """Reads a source's documents once, from a position on."""

    skipped: Counter[str]

    def __iter__(self) -> Iterator[str]: ...
    def position(self) -> dict[str, Any]:
        """Returns JSON from which `Source.reader` continues after the document that was yielded last."""
        ...

    def fraction(self) -> float | None:
        """Returns how much of the source has been read, or None where nobody knows."""
        ...

    def close(self) -> None: ...


class Source(Protocol):
    """Gives text in a fixed order. `name` becomes part of file names; `settings()` identifies the text."""

    @property
    def name(self) -> str: ...
    def settings(self) -> dict[str, Any]: ...
    def size(self) -> int | None:
        """Returns the bytes of its files as they are, or None where nobody knows."""
        ...

    def reader(self, position: dict[str, Any] | None = None) -> Reader: ...


def find_source(data: DataSection) -> Source:
    """Returns what `data.source` names: an existing path, else python-stdlib, else a Hugging Face dataset."""
    path = Path(data.source).expanduser()
    if path.exists():
        if data.subset is not None:
            raise SourceError(
                f"subset={data.subset!r} belongs to Hugging Face datasets, but {path} is a path here"
            )
        # with held-out text of its own, a text need not be more than one document
        return path_source(path, data.text_field, must_divide=data.validation is None)
    if data.source in NAMED:
        return NAMED[data.source]()
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", data.source):
        return HubSource(data.source, data.subset, data.split, data.text_field, data.revision)
    raise SourceError(
        f"no source {data.source!r}: expected an existing folder, .txt, .jsonl, .csv or .parquet file, "
        f"{', '.join(map(repr, NAMED))}, or a Hugging Face dataset such as roneneldan/TinyStories"
    )


def find_validation(data: DataSection, source: Source) -> Source | None:
    """Returns what `data.validation` names: a path, or a split of the same Hugging Face dataset."""
    if data.validation is None:
        return None
    path = Path(data.validation).expanduser()
    if path.exists():
        return path_source(path, data.text_field)
    if isinstance(source, HubSource):
        return HubSource(data.source, data.subset, data.validation, data.text_field, data.revision)
    raise SourceError(f"no validation text at {path}; expected a folder, .txt, .jsonl, .csv or .parquet file")


def path_source(path: Path, text_field: str, *, must_divide: bool = False) -> "FileSource":
    """Returns a file, or every text file of a folder that is not hidden, in the order of their names."""
    if path.is_file():
        file = unpacked_name(path)
        if file.suffix in ARCHIVES or (file.suffix == ".parquet" and file != path):
            raise SourceError(f"{path} cannot be read as it is; unpack it, and pass what is in it")
        names = (path.name,)
        return FileSource(
            _slug(file.stem), path.parent, names, text_field, section=SECTION, must_divide=must_divide
        )
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
            f"{path} has no text file (.txt, .jsonl, .csv, .parquet, ...); {skipped.total()} other files"
        )
    return FileSource(_slug(path.resolve().name), path, tuple(names), text_field, skipped=skipped)


def python_stdlib() -> "FileSource":
    """Returns the .py and .txt files of the running interpreter's standard library: 10 MB, 600 documents."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = _walk(root, lambda part: part in _STDLIB_LEFT_OUT or bool(_STDLIB_GENERATED.fullmatch(part)))
    names = [name for name in files if name.endswith((".py", ".txt"))]
    if len(names) < 100:
        raise SourceError(
            f"{root} holds {len(names)} source files of the standard library, expected hundreds; this Python "
            "ships it compiled or zipped: pass a folder of text instead"
        )
    return FileSource("python-stdlib", root, tuple(names), "text", section=2**30, kind="python-stdlib")


def site_packages() -> "FileSource":
    """Returns the .py files of the packages that are installed beside this one, each text once.

    Copies of the standard library's files are left out, so that what `python-stdlib` holds out is not learned
    from this source. A file is a copy, changed or not, if more than half of its longer lines stand there.
    """
    folders = [Path(sysconfig.get_paths()[name]).resolve() for name in ("purelib", "platlib")]
    root = Path(os.path.commonpath(folders))
    files = {
        (folder / name).relative_to(root).as_posix()
        for folder in folders
        for name in _walk(folder, lambda part: bool(_PACKAGES_LEFT_OUT.fullmatch(part)))
        if name.endswith(".py")
    }
    library = python_stdlib()
    known = {line for name in library.names for line in _long_lines((library.root / name).read_bytes())}
    skipped: Counter[str] = Counter()
    names, seen = [], {hashlib.sha256(b"").digest()}
    for name in sorted(files):
        content = (root / name).read_bytes()
        digest, lines = hashlib.sha256(content).digest(), _long_lines(content)
        if digest in seen:
            skipped["copies of other files, or empty"] += 1
        elif len(lines) >= FEW_LINES and 2 * sum(line in known for line in lines) > len(lines):
            skipped["copies of the standard library's files"] += 1
        else:
            names.append(name)
        seen.add(digest)
    if not names:
        raise SourceError(f"{root} holds no source file of a package; pass a folder of text instead")
    return FileSource("site-packages", root, tuple(names), "text", kind="site-packages", skipped=skipped)


NAMED = dict(zip(NAMED_SOURCES, (python_stdlib, site_packages), strict=True))


@dataclass(frozen=True)
class FileSource:
    """Text in files below `root`, read in the order of `names`.

    must_divide   the only file is cut even where it would be one document, so that some can be held out
    """

    name: str
    root: Path
    names: tuple[str, ...]
    text_field: str = "text"
    section: int = SECTION_IN_FOLDER
    kind: str = "files"
    skipped: Counter[str] = field(default_factory=Counter)
    must_divide: bool = False

    def settings(self) -> dict[str, Any]:
        """Returns names, contents, and what decides how they are cut. Where the root lies does not matter."""
        digest = hashlib.sha256()
        for name in self.names:
            digest.update(f"{name}\0{_content_hash(self.root / name)}\n".encode())
        has_fields = any(unpacked_name(Path(name)).suffix in FIELDS for name in self.names)
        return {
            "kind": self.kind,
            "name": self.name,
            "files": len(self.names),
            "text_field": self.text_field if has_fields else None,
            "section": self.section,
            "sha256": digest.hexdigest(),
        }

    def size(self) -> int:
        return sum((self.root / name).stat().st_size for name in self.names)

    def reader(self, position: dict[str, Any] | None = None) -> "FileReader":
        return FileReader(self, position or {"file": 0, "document": 0})


class FileReader:
    """Reads files. Its position: the file's index, how many of its documents were read, what was skipped,
    and the mark from which that file is read on: nothing before it is read again.
    """

    def __init__(self, source: FileSource, position: dict[str, Any]):
        self.skipped: Counter[str] = Counter(position.get("skipped", source.skipped))
        self._source = source
        self._file: int = position["file"]
        self._document: int = position["document"]
        self._mark = Mark(*position.get("mark", START))
        self._sizes = [(source.root / name).stat().st_size for name in source.names]
        self._within = 0.0

    def __iter__(self) -> Iterator[str]:
        for name in self._source.names[self._file :]:
            already_read, documents = self._document, self._read(self._source.root / name, self._mark)
            for number, (text, share, mark) in enumerate(documents, start=self._mark.documents + 1):
                if number > already_read:
                    self._document, self._within = number, share * self._sizes[self._file]
                    self._mark = mark
                    yield text
            self._file, self._document, self._within, self._mark = self._file + 1, 0, 0.0, START

    def position(self) -> dict[str, Any]:
        place = {"file": self._file, "document": self._document, "mark": list(self._mark)}
        return {**place, "skipped": dict(self.skipped)}

    def fraction(self) -> float:
        return min(1.0, (sum(self._sizes[: self._file]) + self._within) / (sum(self._sizes) or 1))

    def close(self) -> None:
        """Does nothing: each file is closed once it is read."""

    def _read(self, path: Path, mark: Mark) -> Documents:
        readers = {".jsonl": read_jsonl, ".csv": read_csv, ".tsv": read_csv, ".parquet": read_parquet}
        if reader := readers.get(unpacked_name(path).suffix):
            return reader(path, self._source.text_field, mark)
        return self._read_text(path, mark)

    def _read_text(self, path: Path, mark: Mark) -> Documents:
        try:
            read = read_divided_text if self._source.must_divide else read_text
            yield from read(path, self._source.section, mark)
        except UnicodeDecodeError as error:
            if len(self._source.names) == 1:
                raise SourceError(
                    f"{path} is not UTF-8: {error.reason} near byte {error.start}; convert it with iconv"
                ) from error
            self.skipped["files that are not UTF-8"] += 1


def _long_lines(content: bytes) -> list[bytes]:
    """Returns the lines of LONG_LINE bytes or more, without the space around them."""
    return [line for line in map(bytes.strip, content.splitlines()) if len(line) >= LONG_LINE]


def _walk(root: Path, is_left_out: Callable[[str], bool]) -> list[str]:
    """Returns the files below root in the order of their names, as POSIX paths relative to it."""
    names = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not is_left_out(name)]
        relative = Path(folder).relative_to(root)
        names += [(relative / name).as_posix() for name in files if not is_left_out(name)]
    return sorted(names)


def _is_text(path: Path) -> bool:
    """Returns whether this is a file of rows, or starts with 8 KiB of UTF-8 without NUL."""
    if path.suffix in FIELDS or unpacked_name(path).suffix in FIELDS - {".parquet"}:
        return True
    if not path.is_file():
        return False
    with open_unpacked(path) as (file, _):
        start = file.read(8192)
    try:
        start.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.start < len(start) - 3:  # the block's end may cut a character of up to 4 bytes
            return False
    return b"\0" not in start


def _content_hash(path: Path) -> str:
    """Returns the SHA-256 of a file's size and content; of a huge file, of evenly spaced blocks."""
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
