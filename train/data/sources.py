"""Where text comes from: files of this machine, those of Python and its packages, or a Hugging Face
dataset.

    source                          one document is
    .txt and other                  what stands between two <|endoftext|>; where that is long, a
                                    piece of it
    .jsonl                          one field of a line
    .csv, .tsv, .parquet, dataset   one column of a row
    python-stdlib, site-packages    the source of a module

Any but .parquet may be packed: .txt.gz, .jsonl.zst, .csv.xz, .py.bz2 are read like the file in
them. Documents come in the same order every time.
"""

import hashlib
import lzma
import os
import re
import sysconfig
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from delta_trn.train.data.readers import (
    PACKED,
    has_rows,
    read_dataset,
    read_rows,
    read_text,
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
HASHED_BYTES = 2**28  # of each file, in a quarter of a second; its size says more of a larger one

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
    if path.is_file():
        name = path.stem if path.suffix not in PACKED else Path(path.stem).stem
        return FileSource(_slug(name), path.parent, (path.name,), text_field, section=SECTION)
    if (path / "meta.json").exists() and any(path.glob("*.bin")):
        raise SourceError(
            f"{path} holds prepared shards, not text; open it as it is, or pass the text it was "
            "made of"
        )
    return FileSource(_slug(path.resolve().name), path, _walk(path, _HIDDEN), text_field)


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
    names = tuple(file for file in _walk(root, left_out) if file.endswith(suffixes))
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

    @property
    def size(self) -> int | None:
        """How many bytes of text there are; None where nobody knows."""
        paths = [self.root / name for name in self.names]
        if any(path.suffix in (*PACKED, ".parquet") for path in paths):
            return None
        return sum(path.stat().st_size for path in paths)

    def settings(self) -> dict[str, Any]:
        """Returns names, contents, and what decides how they are cut.
        Where the root lies does not matter.
        """
        digest = hashlib.sha256()
        for name in self.names:
            digest.update(f"{name}\0{_content_hash(self.root / name)}\n".encode())
        return {
            "kind": self.kind,
            "name": self.name,
            "files": len(self.names),
            "text_field": self.text_field
            if any(has_rows(Path(name)) for name in self.names)
            else None,
            "section": self.section,
            "sha256": digest.hexdigest(),
        }

    def documents(self, skipped: Counter[str]) -> Iterator[str]:
        """Yields the documents from the first one on, and counts in `skipped` what is left out."""
        for path in (self.root / name for name in self.names):
            rows = has_rows(path)
            try:
                yield from (
                    read_rows(path, self.text_field) if rows else read_text(path, self.section)
                )
            except UNREADABLE as error:
                if isinstance(error, ValueError) and not rows and len(self.names) > 1:
                    skipped["files that are not text in UTF-8"] += 1
                    continue
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

    def settings(self) -> dict[str, Any]:
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

    @cached_property
    def _rows(self) -> Any:
        from huggingface_hub import HfApi

        # `datasets` itself would try to reach the Hub for most of a minute
        HfApi().dataset_info(self.dataset, revision=self.revision, timeout=HUB_SECONDS)
        where = {"split": self.split, "revision": self.revision}
        return stream(self.text_field, self.dataset, self.subset, **where)


Source: TypeAlias = FileSource | HubSource


def _walk(root: Path, left_out: re.Pattern[str]) -> tuple[str, ...]:
    """Returns the files below root in the order of their names, as POSIX paths relative to it."""
    names = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not left_out.fullmatch(name)]
        relative = Path(folder).relative_to(root)
        names += [(relative / name).as_posix() for name in files if not left_out.fullmatch(name)]
    return tuple(sorted(names))


def _content_hash(path: Path) -> str:
    """Returns the SHA-256 of a file's size and of its first bytes,
    which are all unless it is huge.
    """
    digest = hashlib.sha256(str(path.stat().st_size).encode())
    left = HASHED_BYTES
    with open(path, "rb") as file:
        while block := file.read(min(2**20, left)):
            digest.update(block)
            left -= len(block)
    return digest.hexdigest()


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-").lower() or "text"
