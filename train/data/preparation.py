"""Text to shards, in a folder that has a meta.json once it is complete.

A preparation writes below .unfinished, and moves everything to its place at the end, meta.json
last. One that is killed leaves no more than that folder, which the next one takes away.
"""

import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from delta_trn.train.data.dataset import (
    FORMAT,
    Meta,
    SplitMeta,
    TokenizerMeta,
    read_meta,
    some_of,
)
from delta_trn.train.data.shards import FIRST_SHARD, ShardWriters, Split, token_dtype
from delta_trn.train.data.sources import Source, find_source, find_validation
from delta_trn.train.data.tokenizer import TextTokenizer, make_tokenizer, tokenizer_settings
from delta_trn.train.files import (
    disk_errors,
    hold_folder,
    make_fresh_folder,
    remove,
    sync,
    write_file,
)
from delta_trn.train.settings.errors import DiskFull, SettingsDiffer, SourceError
from delta_trn.train.settings.schema import DataSection
from delta_trn.train.watch.display import Bar, console

UNFINISHED = ".unfinished"  # the part of a folder in which a preparation writes
NAMED = 5  # files left out for one reason that meta.json names
BATCH_DOCUMENTS, BATCH_CHARACTERS = 1024, 2**23  # that are tokenized at once, on every core


def prepare(data: DataSection, *, show: bool = True) -> Path:
    """Tokenizes `data.source` into shards, and returns their folder.

    The folder is `data.folder`, or else data/NAME-TOKENIZER-HASH with a hash of the settings and
    the text. Documents are BOS tokens EOS. Those without text are left out, and so are training
    documents that are also in `data.validation`. A folder already complete with the same settings
    is returned as it is, without any network. With `show`, progress is printed on stderr.

    Raises SourceError, TokenizerError, DiskFull; SettingsDiffer if the folder holds another
    preparation.
    """
    source = find_source(data)
    held_out = find_validation(data, source)
    hashes = Hashes(Path(data.folder).expanduser() if data.folder else Path("data"))
    settings = {
        "format": FORMAT,
        "source": source.settings(hashes.known),
        "validation": held_out.settings(hashes.known) if held_out else None,
        "val_fraction": None if held_out else data.val_fraction,
        "tokenizer": tokenizer_settings(data.tokenizer, data.vocab_size),
        **data.model_dump(include={"seed", "shard_tokens", "max_documents", "max_tokens"}),
    }
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
    usual = f"data/{source.name}-{Path(data.tokenizer).stem}-{digest}"
    folder = Path(data.folder or usual).expanduser()
    if is_complete(folder, settings):
        hashes.keep()
        return folder
    with hold_folder(folder):
        if not is_complete(folder, settings):  # another process may have held the folder until now
            with Bar(console(stderr=True, quiet=not show)) as bar, open_unfinished(folder) as place:
                _Preparation(place, data, settings, source, held_out, bar).run()
    hashes.keep()
    return folder


class Hashes:
    """Hashes of large source files, so that no run reads them once more to know that they are the
    same. They are in sources.json, in the folder of the shards or in that around it.
    """

    def __init__(self, folder: Path):
        self.path, self.known = folder / "sources.json", dict[str, list[Any]]()
        with suppress(OSError, ValueError):  # none yet, or damaged: everything is read
            found = json.loads(self.path.read_bytes())
            if isinstance(found, dict):
                self.known = {k: v for k, v in found.items() if isinstance(v, list) and len(v) == 5}
        self._before = dict(self.known)

    def keep(self) -> None:
        """Writes them if there are new ones, and the folder is there and may be written."""
        if self.known != self._before and self.path.parent.is_dir():
            with suppress(DiskFull):
                write_file(self.path, json.dumps(self.known, indent=1) + "\n")


@contextmanager
def open_unfinished(folder: Path) -> Iterator[Path]:
    """Yields a place within the folder to write to, and moves what is in it to the folder at the
    end.

    After an error nothing of it is left. SettingsDiffer if the folder holds somebody else's shards.
    """
    place = folder / UNFINISHED
    if not place.exists() and (foreign := sorted(shard.name for shard in folder.glob("*.bin"))):
        raise SettingsDiffer(f"{folder} holds {foreign[0]} and no meta.json; choose another folder")
    with disk_errors(folder):
        make_fresh_folder(place)
    try:
        yield place
    except BaseException:
        remove(place)
        raise
    for path in sorted(place.iterdir(), key=lambda path: path.name == "meta.json"):
        sync(folder)  # so that what a power cut leaves has no meta.json without all before it
        os.replace(path, folder / path.name)
    sync(folder)
    remove(place)


@dataclass
class _Preparation:
    """One preparation, all of whose files go to `place`."""

    place: Path
    data: DataSection
    settings: dict[str, Any]
    source: Source
    held_out: Source | None
    bar: Bar
    counts: dict[Split, Counter[str]] = field(
        default_factory=lambda: {s: Counter() for s in FIRST_SHARD}
    )
    skipped: Counter[str] = field(default_factory=Counter)

    def run(self) -> None:
        data = self.data
        self.bar.begin("choosing held-out documents")
        split_of = hold_out(data, self.source, self.held_out)
        self.bar.begin(f"tokenizer {data.tokenizer}")
        training = (x for x in self._documents(Counter()) if x.strip() and split_of(x) == "train")
        tokenizer = make_tokenizer(data.tokenizer, data.vocab_size, training)
        tokenizer.save(self.place)
        dtype = token_dtype(tokenizer.vocab_size)
        with ShardWriters(self.place, self.source.name, dtype, data.shard_tokens) as writers:
            if self.held_out is not None:
                self.bar.begin("held-out text")
                self._write(
                    self.held_out.documents(self.skipped), tokenizer, lambda text: "val", writers
                )
            self.bar.begin("tokenizing", 0.0)
            self._write(
                self._documents(self.skipped), tokenizer, split_of, writers, data.max_tokens
            )
            self._require_both()
            meta = self._meta(tokenizer, writers)
            write_file(self.place / "meta.json", meta.model_dump_json(indent=2) + "\n")

    def _documents(self, skipped: Counter[str]) -> Iterator[str]:
        return islice(self.source.documents(skipped), self.data.max_documents)

    def _write(
        self,
        documents: Iterator[str],
        tokenizer: TextTokenizer,
        split_of: Callable[[str], Split | None],
        writers: ShardWriters,
        most: int | None = None,
    ) -> None:
        """Writes the documents until there are `most` tokens."""
        began, read, size = time.monotonic(), 0, self.source.size
        for texts in _batches(documents):
            splits: list[Split | None] = [
                split_of(text) if text.strip() else None for text in texts
            ]
            wanted = [text if split else "" for text, split in zip(texts, splits, strict=True)]
            all_ids = tokenizer.encode_documents(wanted)
            for text, split, ids in zip(texts, splits, all_ids, strict=True):
                length = len(text.encode())
                read += length
                if split is None:
                    self.skipped[
                        "documents also held out" if text.strip() else "empty documents"
                    ] += 1
                    continue
                writers.append(split, ids)
                altered = split == "val" and tokenizer.decode(ids) != text
                self.counts[split].update(documents=1, bytes=length, altered=altered)
                if most is not None and sum(writers.tokens.values()) >= most:
                    return
            tokens = sum(writers.tokens.values())
            rate = tokens / max(time.monotonic() - began, 1e-9)
            shares = ([tokens / most] if most else []) + ([min(1.0, read / size)] if size else [])
            self.bar.advance(max(shares, default=None), f"{tokens:,} tokens, {rate:,.0f}/s")

    def _require_both(self) -> None:
        """SourceError where a split has no document."""
        documents = {split: counts["documents"] for split, counts in self.counts.items()}
        if not all(documents.values()):
            empty = " and ".join(split for split, count in documents.items() if not count)
            named = self._named()
            skipped = ", ".join(
                f"{count} {reason}{some_of(named.get(reason, []), count)}"
                for reason, count in self.skipped.items()
                if count
            )
            raise SourceError(
                f"no document for {empty}: {sum(documents.values())} documents with text in "
                f"{self.source.name!r} (skipped: {skipped or 'nothing'}); holding out needs at "
                "least two that differ, or held-out text of its own: data.validation=PATH"
            )

    def _meta(self, tokenizer: TextTokenizer, writers: ShardWriters) -> Meta:
        shards = writers.finish()
        return Meta(
            name=self.source.name,
            vocab_size=tokenizer.vocab_size,
            dtype=token_dtype(tokenizer.vocab_size),
            bos_id=tokenizer.bos,
            eos_id=tokenizer.eos,
            pad_id=tokenizer.pad,
            tokenizer=TokenizerMeta(
                kind=self.settings["tokenizer"]["kind"],
                size=tokenizer.size,
                lossless=not self.counts["val"]["altered"],
                altered=self.counts["val"]["altered"],
                sha256=tokenizer.sha256,
            ),
            splits={
                split: SplitMeta(
                    tokens=writers.tokens[split],
                    bytes=counts["bytes"],
                    documents=counts["documents"],
                    shards=shards[split],
                )
                for split, counts in self.counts.items()
            },
            skipped={reason: count for reason, count in sorted(self.skipped.items()) if count},
            left_out={reason: names[:NAMED] for reason, names in sorted(self._named().items())},
            settings=self.settings,
        )

    def _named(self) -> dict[str, list[str]]:
        sources = [self.source, *([self.held_out] if self.held_out else [])]
        named: dict[str, list[str]] = {}
        for reason, names in (item for x in sources for item in x.names_left_out().items()):
            if self.skipped[reason]:
                named.setdefault(reason, []).extend(names)
        return named


def hold_out(
    data: DataSection, source: Source, validation: Source | None
) -> Callable[[str], Split | None]:
    """Returns the function that decides a document's split; None if the validation source has it
    too.

    With data.val_fraction a document is held out if its hash is among the lowest of all hashes. So
    that a small source has held-out text too, the lowest hash of its first 1/val_fraction documents
    is held out in any case. With a validation source everything is for training, except what that
    source also has.
    """

    def value(text: str) -> int:
        key = data.seed.to_bytes(8, "little", signed=True)
        return int.from_bytes(
            hashlib.blake2b(text.encode(), digest_size=8, key=key).digest(), "little"
        )

    def values(of: Source, count: int | None) -> set[int]:
        return {value(text) for text in islice(of.documents(Counter()), count) if text.strip()}

    if validation is not None:
        elsewhere = values(validation, None)
        return lambda text: None if value(text) in elsewhere else "train"
    first = round(1 / data.val_fraction)
    found = values(source, min(first, data.max_documents or first))
    # a single document is for training: an error then says that it cannot be split
    lowest = min(found) if len(found) > 1 else -1
    below = int(data.val_fraction * 2**64)
    return lambda text: "val" if (x := value(text)) < below or x == lowest else "train"


def _batches(documents: Iterator[str]) -> Iterator[list[str]]:
    """Yields documents in lists of BATCH_DOCUMENTS, or fewer where they are long."""
    batch, length = [], 0
    for text in documents:
        batch.append(text)
        length += len(text)
        if len(batch) >= BATCH_DOCUMENTS or length >= BATCH_CHARACTERS:
            yield batch
            batch, length = [], 0
    if batch:
        yield batch


def is_complete(folder: Path, settings: dict[str, Any]) -> bool:
    """Returns whether a folder holds all that these settings make.
    SettingsDiffer if it is of others.
    """
    if not (folder / "meta.json").exists():
        return False
    before, now = read_meta(folder).settings, json.loads(json.dumps(settings))
    if before != now:
        differences = [
            f"{key}: {before.get(key)!r} there, {now.get(key)!r} asked for"
            for key in sorted(before.keys() | now.keys())
            if before.get(key) != now.get(key)
        ]
        raise SettingsDiffer(
            f"{folder} holds a preparation with other settings ({'; '.join(differences)}); choose "
            "another data.folder=DIR, or remove the folder"
        )
    return True
