"""Where text comes from: files of this machine, those of Python and its packages, or a Hugging Face
dataset.

    source                          one document is
    .txt and other                  what stands between two <|endoftext|>; where that is long, a
                                    piece of it
    .jsonl, .ndjson                 one field of a line
    .json                           one field of a row of the list in it
    .csv, .tsv, .parquet, dataset   one column of a row
    python-stdlib, site-packages    the source of a module

Any but .parquet may be packed: .txt.gz, .jsonl.zst, .csv.xz, .py.bz2 are read like the file in
them. Documents come in the same order every time. Capital letters in a suffix mean the same.

Of a folder, what is not such a file is left out whole, counted and named. A file that is named
itself is refused instead.
"""

import hashlib
import lzma
import os
import re
import sysconfig
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from delta_trn.train.data.readers import (
    TABLES,
    check_text,
    has_rows,
    is_packed,
    kind_of,
    read_dataset,
    read_rows,
    read_text,
    rows_missing,
    stream,
)
from delta_trn.train.data.tokenizer import HUB_SECONDS
from delta_trn.train.settings.errors import SourceError
from delta_trn.train.settings.schema import DataSection

SECTION = 2**14  # characters: a file that is the whole source still makes documents to hold out
SECTION_IN_FOLDER = 2**20
WHOLE_FILE = 2**30  # a module is one document
# what reading a file raises that is damaged, of another kind, or packed in another way
UNREADABLE = (ValueError, OSError, EOFError, zlib.error, lzma.LZMAError)
REMEMBERED = 2**20  # bytes: of a larger file, the hash of its content is kept
SETTLED = 10**10  # nanoseconds since a file's last change, before which it may change unseen
NOT_TEXT = "files that are not text in UTF-8"

# Left out of python-stdlib. Tests are twice as large as all the rest, and not installed everywhere.
# The codecs are generated tables, near-copies of each other: some would be in training and their
# twins held out. pydoc_data is one generated file with 7 % of the bytes. The rest is what a build
# generates about its host: the text must depend on the interpreter's version alone.
_STDLIB_LEFT_OUT = re.compile(
    r"tests?|idle_test|(site|dist)-packages|encodings|pydoc_data|__pycache__|_sysconfigdata.*|config-.*|\..*"
)
# Left out of site-packages: hidden folders, and this project.
_PACKAGES_LEFT_OUT = re.compile(r"__pycache__|\..*|delta_trn.*|__editable__.*")
_HIDDEN = re.compile(r"__pycache__|\..*")


def find_source(data: DataSection) -> "Source":
    """Returns what `data.source` names: an existing path, else python-stdlib,
    else a Hugging Face dataset.
    """
    path = Path(data.source).expanduser()
    if path.exists():
        return path_source(path, data.text_field)
    if data.source in NAMED:
        return named_source(data.source)
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", data.source):
        return HubSource(data.source, data.subset, data.split, data.text_field, data.revision)
    raise SourceError(
        f"no source {data.source!r}: expected an existing folder, .txt, .jsonl, .csv or .parquet "
        f"file, {', '.join(map(repr, NAMED))}, or a Hugging Face dataset such as "
        "roneneldan/TinyStories"
    )


def find_validation(data: DataSection, source: "Source") -> "Source | None":
    """Returns what `data.validation` names: a path, or a split of the same Hugging Face dataset."""
    if data.validation is None:
        return None
    path = Path(data.validation).expanduser()
    if path.exists():
        return path_source(path, data.text_field)
    if isinstance(source, HubSource):
        return replace(source, split=data.validation)
    raise SourceError(
        f"no validation text at {path}; expected a folder, .txt, .jsonl, .csv or .parquet file"
    )


def path_source(path: Path, text_field: str) -> "FileSource":
    """Returns a file, or every file of a folder that is not hidden, in the order of their names."""
    if not path.is_file() and not path.is_dir():
        raise SourceError(
            f"{path} is no file and no folder, but a pipe or a device; write its text to a file"
        )
    if path.suffix.lower() == ".zip" and path.is_file():
        raise SourceError(f"{path} is an archive of files; unpack it, and give its folder")
    if path.is_file():
        name = path.stem if not is_packed(path) else Path(path.stem).stem
        return FileSource(_slug(name), path.parent, (path.name,), text_field, section=SECTION)
    if (path / "meta.json").exists() and any(path.glob("*.bin")):
        raise SourceError(
            f"{path} holds prepared shards, not text; open it as it is, or pass the text it was "
            "made of"
        )
    names, left_out = _walk(path, _HIDDEN)
    return FileSource(_slug(path.resolve().name), path, names, text_field, left_out=left_out)


# name -> where its files lie, as sysconfig calls it; names left out; suffixes read; where a
# document is cut
NAMED = {
    # of the running interpreter: 10 MB, 600 documents
    "python-stdlib": ("stdlib", _STDLIB_LEFT_OUT, (".py", ".txt"), WHOLE_FILE),
    # of the packages that are installed beside this one
    "site-packages": ("purelib", _PACKAGES_LEFT_OUT, (".py",), SECTION_IN_FOLDER),
}


def named_source(name: str) -> "FileSource":
    """Returns the source files that Python itself brings under a name of NAMED."""
    folder, left_out, suffixes, section = NAMED[name]
    root = Path(sysconfig.get_paths()[folder]).resolve()
    names = tuple(file for file in _walk(root, left_out)[0] if file.endswith(suffixes))
    if len(names) < 100:
        raise SourceError(
            f"{root} holds {len(names)} source files for {name}, expected hundreds; this Python "
            "ships them compiled, zipped or elsewhere: pass a folder of text instead"
        )
    return FileSource(name, root, names, section=section, kind=name)


@dataclass(frozen=True)
class FileSource:
    """Text in files below `root`, read in the order of `names`.

    `name` becomes part of file names, and `settings()` identifies the text.
    """

    name: str
    root: Path
    names: tuple[str, ...]
    text_field: str = "text"
    section: int = SECTION_IN_FOLDER
    kind: str = "files"
    left_out: tuple[tuple[str, str], ...] = ()  # (why, name) of what no look into it could read
    # name -> why it is left out; None: it is not. Filled as files are read
    verdicts: dict[str, str | None] = field(default_factory=dict, compare=False, repr=False)

    @property
    def size(self) -> int | None:
        """How many bytes of text there are; None where nobody knows."""
        paths = [self.root / name for name in self.names]
        if any(is_packed(path) or kind_of(path) == ".parquet" for path in paths):
            return None
        return sum(path.stat().st_size for path in paths)

    def settings(self, known: dict[str, list[Any]] | None = None) -> dict[str, Any]:
        """Returns names, contents, and what decides how they are cut.
        Where the root lies does not matter.

        known   hashes of large files, by path, each after what `_stamp` says of the file; new ones
                are added
        """
        digest = hashlib.sha256()
        for name in self.names:
            content = _content_hash(self.root / name, {} if known is None else known)
            digest.update(f"{name}\0{content}\n".encode())
        # they were text once: what was prepared then is another preparation
        later = [name for name in self.names if has_rows(x := Path(name)) and not _was_table(x)]
        return {
            "kind": self.kind,
            "name": self.name,
            "files": len(self.names),
            "text_field": self.text_field
            if any(has_rows(Path(name)) for name in self.names)
            else None,
            "section": self.section,
            "sha256": digest.hexdigest(),
            **({"tables": len(later)} if later else {}),
        }

    def names_left_out(self) -> dict[str, list[str]]:
        """Returns the names of what was left out so far, by the reason."""
        named: dict[str, list[str]] = {}
        for reason, name in [*self.left_out, *((why, x) for x, why in self.verdicts.items())]:
            if reason is not None:
                named.setdefault(reason, []).append(name)
        return named

    @property
    def _is_folder(self) -> bool:
        """Whether files are left out: one that is the whole source is refused instead."""
        return len(self.names) + len(self.left_out) > 1

    def _why_left_out(self, name: str) -> str | None:
        """Returns why a file of a folder is left out; None if it is read.

        It is read to its end before its first document goes anywhere.
        """
        if name not in self.verdicts:
            path = self.root / name
            if path.suffix.lower() == ".zip":
                self.verdicts[name] = "archives (.zip)"
            elif has_rows(path):
                self.verdicts[name] = rows_missing(path, self.text_field)
            else:
                try:
                    check_text(path)
                    self.verdicts[name] = None
                except ValueError:
                    self.verdicts[name] = NOT_TEXT
        return self.verdicts[name]

    def documents(self, skipped: Counter[str]) -> Iterator[str]:
        """Yields the documents from the first one on, and counts in `skipped` what is left out."""
        skipped.update(reason for reason, _ in self.left_out)
        for name in self.names:
            path = self.root / name
            rows = has_rows(path)
            try:
                reason = self._why_left_out(name) if self._is_folder else None
                if reason is not None:
                    skipped[reason] += 1
                    continue
                yield from (
                    read_rows(path, self.text_field) if rows else read_text(path, self.section)
                )
            except RecursionError as error:
                raise SourceError(
                    f"{path} is nested too deeply to be read; expected rows with "
                    f"{self.text_field!r}"
                ) from error
            except UNREADABLE as error:
                expected = "text in UTF-8"
                if rows:
                    expected = (
                        f"rows in UTF-8 with {self.text_field!r}, which data.text_field names"
                    )
                raise SourceError(
                    f"{path} cannot be read ({error}); expected {expected}: mend it, unpack an "
                    "archive, or copy it again where it is cut short"
                ) from error


@dataclass(frozen=True)
class HubSource:
    """A dataset such as HuggingFaceFW/fineweb-edu, subset sample-10BT,
    streamed. `revision` pins a commit.
    """

    dataset: str
    subset: str | None = None
    split: str = "train"
    text_field: str = "text"
    revision: str | None = None
    size = None

    @property
    def name(self) -> str:
        return _slug("-".join([self.dataset.rsplit("/", 1)[-1], self.subset or ""]))

    def settings(self, known: dict[str, list[Any]] | None = None) -> dict[str, Any]:
        others = ("subset", "split", "text_field", "revision")
        return {
            "kind": "dataset",
            "name": self.dataset,
            **{name: getattr(self, name) for name in others},
        }

    def documents(self, skipped: Counter[str]) -> Iterator[str]:
        try:
            yield from read_dataset(self._rows, self.text_field, self.dataset)
        except SourceError:
            raise
        except (
            Exception
        ) as error:  # requests, httpx, OfflineModeIsEnabled: it varies by the client's version
            raise SourceError(
                f"dataset {self.dataset!r} of the Hugging Face Hub, subset {self.subset!r}, split "
                f"{self.split!r}, cannot be read ({type(error).__name__}: {error}), and there is "
                "no such path here; check the names, log in with `hf auth login` where it is "
                "gated, or download it where there is a network and pass its folder"
            ) from error

    def names_left_out(self) -> dict[str, list[str]]:
        return {}

    @cached_property
    def _rows(self) -> Any:
        from huggingface_hub import HfApi

        # `datasets` itself would try to reach the Hub for most of a minute
        HfApi().dataset_info(self.dataset, revision=self.revision, timeout=HUB_SECONDS)
        where = {"split": self.split, "revision": self.revision}
        return stream(self.text_field, self.dataset, self.subset, **where)


Source: TypeAlias = FileSource | HubSource


def _walk(
    root: Path, left_out: re.Pattern[str]
) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Returns the files below root in the order of their names, as POSIX paths relative to it.

    Behind them (why, name) of what is no file that can be opened and named. A link to a file counts
    as the file: a download from the Hub consists of them.
    """
    names, others = [], []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not left_out.fullmatch(name)]
        relative = Path(folder).relative_to(root)
        for name in [*files, *(name for name in folders if Path(folder, name).is_symlink())]:
            if left_out.fullmatch(name):
                continue
            path = (relative / name).as_posix()
            reason = _why_no_file(root / path)
            if reason is None:
                names.append(path)
            else:
                others.append(
                    (reason, path.encode(errors="surrogateescape").decode(errors="replace"))
                )
    return tuple(sorted(names)), tuple(sorted(others))


def _why_no_file(path: Path) -> str | None:
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return "files whose names are not UTF-8"
    if path.is_file():
        return None
    if path.is_symlink():
        return "links to folders" if path.is_dir() else "links that lead nowhere"
    return "pipes, sockets and devices"


def _was_table(path: Path) -> bool:
    """Returns whether a file's rows were read when only small letters and .jsonl counted."""
    inner = path.with_suffix("").suffix if path.suffix in (".gz", ".bz2", ".xz", ".zst") else ""
    return (inner or path.suffix) in (".jsonl", *TABLES)


def _content_hash(path: Path, known: dict[str, list[Any]]) -> str:
    """Returns the SHA-256 of a file's size and of its whole content.

    Of a large file it is computed again only if its size, times or place on the disk differ, or if
    it was changed just now: a second change might leave all of those as they are.
    """
    stamp, key = _stamp(path), str(path.resolve())
    if (kept := known.get(key)) and kept[:-1] == stamp:
        return kept[-1]
    digest = hashlib.sha256(str(stamp[0]).encode())
    with open(path, "rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    if (
        stamp[0] > REMEMBERED
        and time.time_ns() - max(stamp[1:3]) > SETTLED
        and stamp == _stamp(path)
    ):
        known[key] = [*stamp, digest.hexdigest()]
    return digest.hexdigest()


def _stamp(path: Path) -> list[int]:
    """Returns a file's size, times of its content's and its entry's last change, and inode."""
    found = path.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-").lower() or "text"
