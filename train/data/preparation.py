"""Text to shards, in a folder that has a meta.json once it is complete.

A preparation writes below .unfinished, and moves everything to its place at the end, meta.json last. One that
is killed leaves no more than that folder, which the next one takes away.
"""

import hashlib
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from delta_trn.train.data.dataset import (
    FORMAT,
    UNFINISHED,
    Meta,
    SplitMeta,
    TokenizerMeta,
    read_meta,
)
from delta_trn.train.data.encoding import Encoder, encoded, usable_cores
from delta_trn.train.data.holdout import HoldOut
from delta_trn.train.data.shards import DTYPES, FIRST_SHARD, ShardWriters, Split, token_dtype
from delta_trn.train.data.sources import Source, find_source, find_validation
from delta_trn.train.data.tokenizer import TextTokenizer, fetch_gpt2, make_tokenizer, tokenizer_settings
from delta_trn.train.files import disk_errors, hold_folder, sync, write_file
from delta_trn.train.settings.errors import SettingsDiffer, SourceError
from delta_trn.train.settings.schema import DataSection
from delta_trn.train.watch.display import Bar, console


def prepare(data: DataSection, *, show: bool = True) -> Path:
    """Tokenizes `data.source` into shards, and returns their folder.

    The folder is `data.folder`, or else data/NAME-TOKENIZER-HASH with a hash of the settings and the text.
    Documents are BOS tokens EOS. Those without text are left out, and so are training documents that are also
    in `data.validation`. A folder already complete with the same settings is returned as it is, without any
    network. With `show`, progress is printed on stderr.

    Raises SourceError, TokenizerError, DiskFull; SettingsDiffer if the folder holds another preparation.
    """
    source = find_source(data)
    held_out = find_validation(data, source)
    settings = {
        "format": FORMAT,
        "source": source.settings(),
        "validation": held_out.settings() if held_out else None,
        "val_fraction": None if held_out else data.val_fraction,
        "seed": data.seed,
        "tokenizer": tokenizer_settings(data.tokenizer, data.vocab_size),
        "shard_tokens": data.shard_tokens,
        "max_documents": data.max_documents,
        "max_tokens": data.max_tokens,
    }
    folder = Path(data.folder).expanduser() if data.folder else _default_folder(source, data, settings)
    if is_complete(folder, settings):
        return folder
    if data.tokenizer == "gpt2":
        fetch_gpt2()  # out of reach, it leaves no folder behind
    with hold_folder(folder):
        if not is_complete(folder, settings):  # another process may have held the folder until now
            with Bar(console(stderr=True), show=show) as bar, unfinished(folder) as place:
                _Preparation(place, data, settings, source, held_out, bar).run()
    return folder


@contextmanager
def unfinished(folder: Path) -> Iterator[Path]:
    """Yields a place within the folder to write to, and moves what is in it to the folder at the end.

    After an error nothing of it is left. SettingsDiffer if the folder holds somebody else's shards.
    """
    place = folder / UNFINISHED
    if not place.exists() and (foreign := sorted(shard.name for shard in folder.glob("*.bin"))):
        raise SettingsDiffer(f"{folder} holds {foreign[0]} and no meta.json; choose another folder")
    shutil.rmtree(place, ignore_errors=True)
    with disk_errors(folder):
        place.mkdir()
    try:
        yield place
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)
        raise
    for path in sorted(place.iterdir(), key=lambda path: path.name == "meta.json"):
        sync(folder)  # so that what a power cut leaves has no meta.json without all before it
        os.replace(path, folder / path.name)
    sync(folder)
    shutil.rmtree(place, ignore_errors=True)


class _Preparation:
    """One preparation, all of whose files go to `place`."""

    def __init__(
        self,
        place: Path,
        data: DataSection,
        settings: dict[str, Any],
        source: Source,
        held_out: Source | None,
        bar: Bar,
    ):
        self.place, self.data, self.settings, self.bar = place, data, settings, bar
        self.source, self.held_out = source, held_out
        self.counts: dict[Split, Counter[str]] = {split: Counter() for split in FIRST_SHARD}
        self.skipped: Counter[str] = Counter()

    def run(self) -> None:
        data = self.data
        self.bar.begin("choosing held-out documents")
        holdout = HoldOut(data.seed, data.val_fraction, self.source, self.held_out, data.max_documents)
        self.bar.begin(f"tokenizer {data.tokenizer}")
        training = (x for x in self._documents(Counter()) if x.strip() and holdout.split_of(x) == "train")
        tokenizer = make_tokenizer(data.tokenizer, data.vocab_size, training)
        tokenizer.save(self.place)
        dtype = token_dtype(tokenizer.vocab_size)
        with ShardWriters(self.place, self.source.name, dtype, data.shard_tokens) as writers:
            if self.held_out is not None:
                self.bar.begin("held-out text")
                everything = self.held_out.documents(self.skipped)
                self._tokenize(self.held_out, everything, Encoder(tokenizer, dtype, None), writers, None)
            self.bar.begin("tokenizing", 0.0)
            documents = self._documents(self.skipped)
            self._tokenize(
                self.source, documents, Encoder(tokenizer, dtype, holdout), writers, data.max_tokens
            )
            self._require_both()
            write_file(self.place / "meta.json", self._meta(tokenizer, writers).to_json())

    def _documents(self, skipped: Counter[str]) -> Iterator[str]:
        return islice(self.source.documents(skipped), self.data.max_documents)

    def _tokenize(
        self,
        source: Source,
        documents: Iterator[str],
        encode: Encoder,
        writers: ShardWriters,
        most: int | None,
    ) -> None:
        """Writes the documents until there are `most` tokens. More may have been read."""
        read = size = 0
        began, before = time.monotonic(), sum(writers.tokens.values())
        for rows in encoded(documents, encode, self.data.workers or usable_cores()):
            for row in rows:
                if row["split"]:
                    ids = np.frombuffer(row["ids"], DTYPES[encode.dtype])
                    writers.append(row["split"], ids)
                    self.counts[row["split"]].update(documents=1, bytes=row["bytes"], altered=row["altered"])
                else:
                    self.skipped["documents also held out" if row["bytes"] else "empty documents"] += 1
                read, size = read + 1, size + row["bytes"]
                tokens = sum(writers.tokens.values())
                if most is not None and tokens >= most:
                    return
            shares = [
                source.share(read, size),
                read / self.data.max_documents if self.data.max_documents else None,
                tokens / most if most else None,
            ]
            rate = (tokens - before) / max(time.monotonic() - began, 1e-9)
            known = [share for share in shares if share is not None]
            self.bar.advance(max(known, default=None), f"{tokens:,} tokens, {rate:,.0f}/s")

    def _require_both(self) -> None:
        """SourceError where a split has no document."""
        empty = [split for split in FIRST_SHARD if not self.counts[split]["documents"]]
        if not empty:
            return
        documents = sum(counts["documents"] for counts in self.counts.values())
        skipped = ", ".join(f"{count} {reason}" for reason, count in self.skipped.items() if count)
        raise SourceError(
            f"no document for {' and '.join(empty)}: {documents} documents with text in "
            f"{self.source.name!r} (skipped: {skipped or 'nothing'}); holding out needs at least two "
            f"that differ, or held-out text of its own: data.validation=PATH"
        )

    def _meta(self, tokenizer: TextTokenizer, writers: ShardWriters) -> Meta:
        shards = writers.finish()
        splits = {
            split: SplitMeta(
                tokens=writers.tokens[split],
                bytes=self.counts[split]["bytes"],
                documents=self.counts[split]["documents"],
                shards=shards[split],
            )
            for split in FIRST_SHARD
        }
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
                sha256=tokenizer.sha256,
            ),
            splits=splits,
            skipped={reason: count for reason, count in sorted(self.skipped.items()) if count},
            settings=self.settings,
        )


def _default_folder(source: Source, data: DataSection, settings: dict[str, Any]) -> Path:
    kind = data.tokenizer if data.tokenizer in ("gpt2", "bytebpe", "bytes") else Path(data.tokenizer).stem
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
    return Path("data") / f"{source.name}-{kind}-{digest}"


def is_complete(folder: Path, settings: dict[str, Any]) -> bool:
    """Returns whether a folder holds all that these settings make. SettingsDiffer if it is of others."""
    if not (folder / "meta.json").exists():
        return False
    before, now = _flatten(read_meta(folder).settings), _flatten(json.loads(json.dumps(settings)))
    differences = [
        f"{key}: {before.get(key)!r} there, {now.get(key)!r} asked for"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    ]
    if differences:
        raise SettingsDiffer(
            f"{folder} holds a preparation with other settings ({'; '.join(differences)}); choose another "
            f"data.folder=DIR, or remove the folder"
        )
    return True


def _flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Maps dotted keys to the values that are no dictionaries."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat
