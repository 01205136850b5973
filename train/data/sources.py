"""Where text comes from: files of this machine, those of Python and its packages, or a Hugging Face dataset.

    source          one document is
    .txt and other  what stands between two <|endoftext|>; where that is long, a piece of it
    .jsonl          one field of a line
    .csv, .tsv      one column of a row
    .parquet        one column of a row
    dataset         one column of a row
    python-stdlib   the source of a module
    site-packages   the source of a module

Any but .parquet may be packed: .txt.gz, .jsonl.zst, .csv.xz, .py.bz2 are read like the file in them.
Documents come in the same order every time.
"""

import hashlib
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from delta_trn.train.data.readers import (
    PACKED,
    ROWS,
    damage_named,
    open_text,
    read_dataset,
    read_rows,
    read_text,
    stream,
    unpacked_name,
)
from delta_trn.train.settings.errors import SourceError
from delta_trn.train.settings.schema import NAMED_SOURCES, DataSection

SECTION = 2**14  # characters: a file that is the whole source still makes documents to hold out
SECTION_IN_FOLDER = 2**20
WHOLE_FILE = 2**30  # a module is one document
HUB_SECONDS = 10.0  # in which the Hub answers, if it does
UNPACKING = 3  # bytes of text in a byte of a packed file, about; it decides how much time seems to be left
# hashing 256 MiB takes a quarter of a second; above it 64 blocks of 1 MiB and the size stand for the file
WHOLE_HASH_LIMIT, HASH_BLOCK, HASH_BLOCKS = 2**28, 2**20, 64

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


class Source(Protocol):
    """Gives text in a fixed order. `name` becomes part of file names; `settings()` identifies the text."""

    @property
    def name(self) -> str: ...
    def settings(self) -> dict[str, Any]: ...
    def documents(self, skipped: Counter[str]) -> Iterator[str]:
        """Yields the documents from the first one on, and counts in `skipped` what is left out."""
        ...

    def share(self, documents: int, size: int) -> float | None:
        """Returns about what share of the source this is; size in bytes. None where nobody knows."""
        ...


def find_source(data: DataSection) -> Source:
    """Returns what `data.source` names: an existing path, else python-stdlib, else a Hugging Face dataset."""
    path = Path(data.source).expanduser()
    if path.exists():
        if data.subset is not None:
            raise SourceError(
                f"subset={data.subset!r} belongs to Hugging Face datasets, but {path} is a path here"
            )
        return path_source(path, data.text_field)
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


def path_source(path: Path, text_field: str) -> "FileSource":
    """Returns a file, or every text file of a folder that is not hidden, in the order of their names."""
    if path.is_file():
        file = unpacked_name(path)
        if file.suffix in ARCHIVES or (file.suffix == ".parquet" and file != path):
            raise SourceError(f"{path} cannot be read as it is; unpack it, and pass what is in it")
        return FileSource(_slug(file.stem), path.parent, (path.name,), text_field, section=SECTION)
    if (path / "meta.json").exists() and any(path.glob("*.bin")):
        raise SourceError(
            f"{path} holds prepared shards, not text; open it as it is, or pass the text it was made of"
        )
    files = _walk(path, lambda part: part.startswith(".") or part == "__pycache__")
    names = [name for name in files if _is_text(path / name)]
    if not names:
        raise SourceError(
            f"{path} has no text file (.txt, .jsonl, .csv, .parquet, ...); {len(files)} other files"
        )
    skipped = Counter({"files that are not text": len(files) - len(names)})
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
    return FileSource("python-stdlib", root, tuple(names), section=WHOLE_FILE, kind="python-stdlib")


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
    return FileSource("site-packages", root, tuple(names), kind="site-packages", skipped=skipped)


NAMED = dict(zip(NAMED_SOURCES, (python_stdlib, site_packages), strict=True))


@dataclass(frozen=True)
class FileSource:
    """Text in files below `root`, read in the order of `names`. `skipped` counts those that are left out."""

    name: str
    root: Path
    names: tuple[str, ...]
    text_field: str = "text"
    section: int = SECTION_IN_FOLDER
    kind: str = "files"
    skipped: Counter[str] = field(default_factory=Counter)

    def settings(self) -> dict[str, Any]:
        """Returns names, contents, and what decides how they are cut. Where the root lies does not matter."""
        digest = hashlib.sha256()
        for name in self.names:
            digest.update(f"{name}\0{_content_hash(self.root / name)}\n".encode())
        has_fields = any(unpacked_name(Path(name)).suffix in ROWS for name in self.names)
        return {
            "kind": self.kind,
            "name": self.name,
            "files": len(self.names),
            "text_field": self.text_field if has_fields else None,
            "section": self.section,
            "sha256": digest.hexdigest(),
        }

    def documents(self, skipped: Counter[str]) -> Iterator[str]:
        skipped.update(self.skipped)
        for path in (self.root / name for name in self.names):
            if unpacked_name(path).suffix in ROWS:
                yield from read_rows(path, self.text_field)
                continue
            try:
                yield from read_text(path, self.section)
            except UnicodeDecodeError as error:
                if len(self.names) == 1:
                    raise SourceError(
                        f"{path} is not UTF-8: {error.reason} near byte {error.start}; convert it with iconv"
                    ) from error
                skipped["files that are not UTF-8"] += 1

    def share(self, documents: int, size: int) -> float:
        return min(1.0, size / (self._text_bytes or 1))

    @cached_property
    def _text_bytes(self) -> int:
        """About how much text there is."""
        paths = [self.root / name for name in self.names]
        packed = {*PACKED, ".parquet"}
        return sum(path.stat().st_size * (UNPACKING if path.suffix in packed else 1) for path in paths)


@dataclass(frozen=True)
class HubSource:
    """A dataset such as HuggingFaceFW/fineweb-edu, subset sample-10BT, streamed. `revision` pins a commit."""

    dataset: str
    subset: str | None = None
    split: str = "train"
    text_field: str = "text"
    revision: str | None = None

    @property
    def name(self) -> str:
        return _slug("-".join([self.dataset.rsplit("/", 1)[-1], self.subset or ""]))

    def settings(self) -> dict[str, Any]:
        return {
            "kind": "dataset",
            "name": self.dataset,
            "subset": self.subset,
            "split": self.split,
            "text_field": self.text_field,
            "revision": self.revision,
        }

    def documents(self, skipped: Counter[str]) -> Iterator[str]:
        try:
            yield from read_dataset(self._rows, self.text_field, self.dataset)
        except OSError as error:  # after the library's own retries
            raise SourceError(
                f"reading dataset {self.dataset!r} stopped ({type(error).__name__}: {error}); run the same "
                "command again, or download the dataset and pass its folder"
            ) from error

    def share(self, documents: int, size: int) -> float | None:
        splits = self._rows.info.splits or {}
        rows = splits[self.split].num_examples if self.split in splits else None
        return min(1.0, documents / rows) if rows else None

    @cached_property
    def _rows(self) -> Any:
        """The stream of rows, opened once."""
        from huggingface_hub import HfApi
        from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

        try:  # `datasets` itself would try for most of a minute
            HfApi().dataset_info(self.dataset, revision=self.revision, timeout=HUB_SECONDS)
        except (RepositoryNotFoundError, RevisionNotFoundError) as error:
            raise SourceError(
                f"the Hub has no dataset {self.dataset!r} at revision {self.revision or 'main'}, and there "
                "is no such path here; check the name, or log in with `hf auth login` where it is gated"
            ) from error
        except Exception as error:  # requests, httpx, OfflineModeIsEnabled: it varies by the client's version
            raise self._unreachable(error) from error
        where = {"split": self.split, "revision": self.revision}
        try:
            return stream(self.text_field, self.dataset, self.subset, **where)
        except ValueError as error:  # an unknown subset or split: its message lists the known ones
            raise SourceError(
                f"dataset {self.dataset!r} has no subset {self.subset!r} with split {self.split!r}: {error}"
            ) from error
        except OSError as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: BaseException) -> SourceError:
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") else ""
        return SourceError(
            f"cannot reach dataset {self.dataset!r} on the Hugging Face Hub{offline} "
            f"({type(error).__name__}), and there is no such path here; download it where there is a "
            "network, and pass the local folder, .parquet, .jsonl or .txt file instead of the name"
        )


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
    """Returns whether this is a file of rows, or starts with UTF-8 without NUL."""
    if unpacked_name(path).suffix in ROWS:
        return True
    if not path.is_file():
        return False
    try:
        with damage_named(path), open_text(path) as file:
            return "\0" not in file.read(4096)
    except UnicodeDecodeError:
        return False


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
