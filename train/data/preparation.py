"""Text to shards, so that a killed preparation continues and ends with the bytes an undisturbed one writes.

progress.json   settings, the reader's position, both writers' state; replaced every few seconds
*.bin.partial   a shard being written; cut back to what progress.json covers when a preparation continues
*.bin           a whole shard
meta.json       written last: a folder that has it is complete, and preparing it again does nothing
"""

import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from delta_trn.train.data.dataset import FORMAT, Meta, Split, SplitMeta, TokenizerMeta, read_meta
from delta_trn.train.data.holdout import HoldOut
from delta_trn.train.data.shards import FIRST_SHARD, SplitWriters, token_dtype
from delta_trn.train.data.sources import Source, find_source, find_validation
from delta_trn.train.data.tokenizer import (
    FILES,
    TextTokenizer,
    fetch_gpt2,
    load_tokenizer,
    make_tokenizer,
    tokenizer_settings,
)
from delta_trn.train.data.workers import Document, Encoder, encoded, usable_cores
from delta_trn.train.files import hold_folder, write_file
from delta_trn.train.settings.errors import SettingsDiffer, SourceError
from delta_trn.train.settings.schema import DataSection
from delta_trn.train.watch.display import Bar, console

BATCH_DOCUMENTS, BATCH_CHARACTERS = 1024, 2**20  # what a worker tokenizes at once
WORTH_A_WORKER = 2**22  # bytes of text: below, starting a process would take longer than its work
COMMIT_SECONDS = 5.0  # the most work that a kill loses


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
    if data.tokenizer == "gpt2" and not (folder / "tokenizer.json").exists():
        fetch_gpt2()  # out of reach, it leaves no folder behind
    with hold_folder(folder):
        if not is_complete(folder, settings):  # another process may have held the folder until now
            with Bar(console(stderr=True), show=show) as bar:
                _Preparation(folder, data, settings, source, held_out, bar).run()
    return folder


@dataclass
class _Progress:
    """The content of progress.json. `stage` is tokenizer, val, train or split (both at once), done."""

    settings: dict[str, Any]
    stage: str = "tokenizer"
    position: dict[str, Any] | None = None
    lowest: int | None = None
    documents: int = 0
    tokens: int = 0
    counts: dict[str, Counter[str]] = field(default_factory=dict)
    skipped: Counter[str] = field(default_factory=Counter)
    writers: dict[str, dict] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.counts = {split: Counter((self.counts or {}).get(split)) for split in FIRST_SHARD}
        self.skipped, self.writers = Counter(self.skipped), self.writers or {}


class _Preparation:
    """One preparation in one folder, from whatever stage it was left in."""

    def __init__(
        self,
        folder: Path,
        data: DataSection,
        settings: dict[str, Any],
        source: Source,
        held_out: Source | None,
        bar: Bar,
    ):
        self.folder, self.data, self.source, self.held_out, self.bar = folder, data, source, held_out, bar
        self.path = folder / "progress.json"
        self.progress = _Progress(settings)
        if saved := saved_progress(folder, settings):
            self.progress = _Progress(**saved)
        self.holdout = HoldOut(data.seed, settings["val_fraction"], held_out)
        self.writers: SplitWriters
        self.committed = time.monotonic()

    def run(self) -> None:
        progress = self.progress
        if not self.holdout.restore(progress.lowest):
            self.bar.begin("choosing held-out documents")
            progress.lowest = self.holdout.choose(self.source, self.data.max_documents)
        if progress.stage == "tokenizer":
            self._save()
            self.bar.begin(f"tokenizer {self.data.tokenizer}")
            make_tokenizer(self.data.tokenizer, self.data.vocab_size, self._training_text()).save(self.folder)
            progress.stage = "val" if self.held_out else "split"
            self._save()
        tokenizer = load_tokenizer(self.folder)
        dtype = token_dtype(tokenizer.vocab_size)
        with SplitWriters(
            self.folder, self.source.name, dtype, self.data.shard_tokens, progress.writers
        ) as self.writers:
            self._tokenize_all(tokenizer)
            self.writers.close()
            self._commit()
        self._finish(tokenizer)

    def _tokenize_all(self, tokenizer: TextTokenizer) -> None:
        progress = self.progress
        dtype = token_dtype(tokenizer.vocab_size)
        if progress.stage == "val":
            assert self.held_out is not None
            self.bar.begin("held-out text")
            self._tokenize(self.held_out, Encoder(tokenizer, dtype, None), None, None)
            progress.stage, progress.position, progress.documents = "train", None, 0
            self._commit()
        if progress.stage != "done":
            self.bar.begin("tokenizing")
            limits = self.data.max_documents, self.data.max_tokens
            self._tokenize(self.source, Encoder(tokenizer, dtype, self.holdout), *limits)
            progress.stage = "done"

    def _tokenize(
        self, source: Source, encode: Encoder, max_documents: int | None, max_tokens: int | None
    ) -> None:
        """Reads from the position where the last commit was. Batches are read ahead of those that count."""
        progress = self.progress
        began, tokens_before = time.monotonic(), progress.tokens
        reader = source.reader(progress.position)
        remaining = None if max_documents is None else max_documents - progress.documents
        batches = (
            (texts, (len(texts), reader.position(), reader.fraction()))
            for texts in _batches(islice(reader, remaining))
        )
        done = encoded(encode, batches, _workers(self.data, source))
        try:
            for documents, (read, position, share) in done:
                progress.skipped["empty documents"] += read - len(documents)
                progress.documents += read
                is_full = self._append(documents, max_tokens)
                progress.position = position
                shares = [
                    share,
                    progress.documents / max_documents if max_documents else None,
                    progress.tokens / max_tokens if max_tokens else None,
                ]
                rate = (progress.tokens - tokens_before) / max(time.monotonic() - began, 1e-9)
                self.bar.advance(
                    max((share for share in shares if share is not None), default=None),
                    f"{progress.tokens:,} tokens, {rate:,.0f}/s",
                )
                if is_full:
                    break
                if time.monotonic() - self.committed >= COMMIT_SECONDS:
                    self._commit()
            progress.skipped.update(reader.skipped)
        finally:
            done.close()
            reader.close()

    def _append(self, documents: list[Document], max_tokens: int | None) -> bool:
        """Writes documents. Returns True once there are max_tokens; the rest of the batch is left out."""
        for split, ids, size, altered in documents:
            if split is None:
                self.progress.skipped["documents also held out"] += 1
                continue
            if max_tokens is not None and self.progress.tokens >= max_tokens:
                return True
            self.writers[split].append(ids)
            self.progress.counts[split].update(tokens=len(ids), bytes=size, documents=1, altered=altered)
            self.progress.tokens += len(ids)
        return max_tokens is not None and self.progress.tokens >= max_tokens

    def _training_text(self) -> Iterator[str]:
        """Yields the training documents: a tokenizer made from held-out text would flatter the loss."""
        reader = self.source.reader()
        try:
            for text in islice(reader, self.data.max_documents):
                if text.strip() and self.holdout.split_of(text) == "train":
                    yield text
        finally:
            reader.close()

    def _commit(self) -> None:
        self.writers.commit(self._save)
        self.committed = time.monotonic()

    def _save(self, writers: dict[str, dict] | None = None) -> None:
        if writers is not None:
            self.progress.writers = writers
        write_file(self.path, json.dumps(vars(self.progress), indent=1) + "\n")

    def _finish(self, tokenizer: TextTokenizer) -> None:
        progress = self.progress
        empty: list[Split] = [split for split in FIRST_SHARD if not progress.counts[split]["tokens"]]
        if empty:
            self._clear()
            raise self._nothing_in(empty)
        splits: dict[Split, SplitMeta] = {
            split: SplitMeta(
                tokens=progress.counts[split]["tokens"],
                bytes=progress.counts[split]["bytes"],
                documents=progress.counts[split]["documents"],
                shards=tuple(self.writers[split].closed),
            )
            for split in FIRST_SHARD
        }
        meta = Meta(
            name=self.source.name,
            vocab_size=tokenizer.vocab_size,
            dtype=token_dtype(tokenizer.vocab_size),
            bos_id=tokenizer.bos,
            eos_id=tokenizer.eos,
            pad_id=tokenizer.pad,
            tokenizer=TokenizerMeta(
                kind=progress.settings["tokenizer"]["kind"],
                size=tokenizer.size,
                lossless=not progress.counts["val"]["altered"],
                sha256=tokenizer.sha256,
            ),
            splits=splits,
            skipped={reason: count for reason, count in sorted(progress.skipped.items()) if count},
            settings=progress.settings,
        )
        write_file(self.folder / "meta.json", meta.to_json())
        self.path.unlink()

    def _clear(self) -> None:
        """Removes what this preparation wrote, so that other settings may be tried in the same folder."""
        for pattern in (f"{self.source.name}_*.bin*", *FILES):
            for path in self.folder.glob(pattern):
                path.unlink()
        self.path.unlink()

    def _nothing_in(self, empty: list[Split]) -> SourceError:
        documents = sum(self.progress.counts[split]["documents"] for split in FIRST_SHARD)
        skipped = ", ".join(f"{count} {reason}" for reason, count in self.progress.skipped.items() if count)
        return SourceError(
            f"no document for {' and '.join(empty)}: {documents} documents with text in "
            f"{self.source.name!r} (skipped: {skipped or 'nothing'}); holding out needs at least two "
            f"that differ, or held-out text of its own: data.validation=PATH"
        )


def _batches(documents: Iterator[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    characters = 0
    for text in documents:
        batch.append(text)
        characters += len(text)
        if len(batch) >= BATCH_DOCUMENTS or characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _workers(data: DataSection, source: Source) -> int:
    """Returns how many processes tokenize: those asked for, else one a core where there is work for them."""
    size = source.size()
    most = usable_cores() if size is None else max(1, size // WORTH_A_WORKER)
    return data.workers or min(usable_cores(), most)


def _default_folder(source: Source, data: DataSection, settings: dict[str, Any]) -> Path:
    kind = data.tokenizer if data.tokenizer in ("gpt2", "bytebpe", "bytes") else Path(data.tokenizer).stem
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
    return Path("data") / f"{source.name}-{kind}-{digest}"


def is_complete(folder: Path, settings: dict[str, Any]) -> bool:
    """Returns whether a folder holds all that these settings make. SettingsDiffer if it is of others."""
    if not (folder / "meta.json").exists():
        return False
    require_same(folder, read_meta(folder).settings, settings)
    with suppress(OSError):  # a kill between writing meta.json and this leaves it; so may a read-only folder
        (folder / "progress.json").unlink()
    return True


def saved_progress(folder: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """Returns what progress.json holds, if it is there. SettingsDiffer for another preparation's files."""
    path = folder / "progress.json"
    if path.exists():
        saved = json.loads(path.read_bytes())
        require_same(folder, saved["settings"], settings)
        return saved
    if foreign := sorted(shard.name for shard in folder.glob("*.bin")):
        raise SettingsDiffer(
            f"{folder} holds {foreign[0]} and no progress.json or meta.json; choose another folder"
        )
    return None


def require_same(folder: Path, saved: dict[str, Any], settings: dict[str, Any]) -> None:
    """SettingsDiffer, with every difference, unless a folder was begun with these settings."""
    before, now = _flatten(saved), _flatten(json.loads(json.dumps(settings)))
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


def _flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Maps dotted keys to the values that are no dictionaries."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat
