"""Text to shards, so that a killed preparation continues and ends with the bytes an undisturbed one writes.

progress.json   settings, the reader's position, both writers' state; replaced every few seconds
*.bin.partial   a shard being written; cut back to what progress.json covers when a run continues
*.bin           a whole shard
meta.json       written last: a folder that has it is complete, and preparing it again does nothing
"""

import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from delta_trn.train.data.dataset import FORMAT, Meta, ShardMeta, Split, SplitMeta, TokenizerMeta, read_meta
from delta_trn.train.data.holdout import HoldOut
from delta_trn.train.data.reporting import Report
from delta_trn.train.data.shards import MAX_TOKENS, ShardWriter, token_dtype
from delta_trn.train.data.sources import Source, find_source
from delta_trn.train.data.tokenizer import TextTokenizer, load_tokenizer, make_tokenizer, tokenizer_settings
from delta_trn.train.files import hold_folder, write_file
from delta_trn.train.settings.errors import DataError, SettingsDiffer, SourceError

BATCH_DOCUMENTS, BATCH_CHARACTERS = 1024, 2**22  # what the tokenizer spreads over the cores at once
COMMIT_SECONDS = 5.0  # of work lost by a kill
FIRST_SHARD: dict[Split, int] = {"val": 0, "train": 1}


def prepare(
    source: str | Path | Source,
    out: str | Path | None = None,
    *,
    tokenizer: str = "bytebpe",
    vocab_size: int | None = None,
    subset: str | None = None,
    split: str = "train",
    revision: str | None = None,
    text_field: str = "text",
    validation: str | Path | None = None,
    val_fraction: float = 0.05,
    shard_tokens: int = 100_000_000,
    max_documents: int | None = None,
    max_tokens: int | None = None,
    seed: int = 0,
    show: bool = True,
) -> Path:
    """Tokenize a source into shards below `out`, and return that folder.

    source         a folder, .txt, .jsonl or .parquet file, "python-stdlib", or a Hugging Face dataset's name
    out            None: data/NAME-TOKENIZER-HASH, the hash being of these settings and the text
    tokenizer      "bytebpe" (trained on the training documents), "gpt2", "bytes", or a tokenizer.json's path
    vocab_size     rows of the embedding; None: 4096 for bytebpe, else the tokenizer's size rounded up to 64
    subset, split, revision     of a Hugging Face dataset
    text_field     the field or column with the text
    validation     a path with held-out text, or a split of the same dataset, instead of a fraction
    val_fraction   share of documents held out, by a hash of their text and the seed: copies stay together
    shard_tokens   a shard takes whole documents up to this
    max_documents  read so many documents of the source
    max_tokens     take no further document once there are so many tokens, both splits together
    show           progress on stderr

    Documents are BOS tokens EOS; those without text are left out, and so are training documents that are also
    in `validation`. A folder already complete with the same settings is returned as it is, without any
    network.

    Raises SourceError, TokenizerError, DiskFull; SettingsDiffer if `out` holds another preparation.
    """
    _check_numbers(val_fraction, shard_tokens, max_documents, max_tokens)
    text = find_source(source, subset=subset, split=split, revision=revision, text_field=text_field)
    held_out = None
    if validation is not None:
        held_out = _validation_source(validation, source, subset, revision, text_field)
    settings = {
        "format": FORMAT,
        "source": text.settings(),
        "validation": held_out.settings() if held_out else None,
        "val_fraction": None if held_out else val_fraction,
        "seed": seed,
        "tokenizer": tokenizer_settings(tokenizer, vocab_size),
        "shard_tokens": shard_tokens,
        "max_documents": max_documents,
        "max_tokens": max_tokens,
    }
    directory = Path(out).expanduser() if out is not None else _default_folder(text.name, tokenizer, settings)
    if _is_complete(directory, settings):
        return directory
    with hold_folder(directory):
        if _is_complete(directory, settings):  # by whoever held the folder until now
            return directory
        job = _Job(directory, settings, text, held_out)
        with Report(show=show) as report:
            job.run(tokenizer, vocab_size, report)
    return directory


@dataclass
class _Progress:
    """progress.json."""

    settings: dict[str, Any]
    stage: str = "tokenizer"
    position: dict[str, Any] | None = None
    lowest: int | None = None
    documents: int = 0
    tokens: int = 0
    counts: dict[str, dict[str, int]] | None = None
    skipped: dict[str, int] | None = None
    writers: dict[str, dict] | None = None


class _Job:
    """One preparation in one folder, from whatever stage it was left in."""

    def __init__(self, directory: Path, settings: dict[str, Any], text: Source, held_out: Source | None):
        self.directory, self.text, self.held_out = directory, text, held_out
        self.path = directory / "progress.json"
        self.progress = _Progress(settings)
        if self.path.exists():
            saved = json.loads(self.path.read_bytes())
            _require_same(directory, saved["settings"], settings)
            self.progress = _Progress(**saved)
        elif foreign := sorted(path.name for path in directory.glob("*.bin")):
            raise SettingsDiffer(
                f"{directory} holds {foreign[0]} and no progress.json or meta.json; choose another --out"
            )
        self.writers: dict[str, ShardWriter] = {}
        self.counts = {split: Counter(self._saved("counts", split)) for split in FIRST_SHARD}
        self.skipped: Counter[str] = Counter(self.progress.skipped or {})
        self.committed = time.monotonic()

    def run(self, tokenizer_name: str, vocab_size: int | None, report: Report) -> None:
        settings = self.progress.settings
        holdout = HoldOut(settings["seed"], settings["val_fraction"], self.held_out)
        if not holdout.ready(self.progress.lowest):
            report.phase("choosing held-out documents")
            self.progress.lowest = holdout.choose(self.text, settings["max_documents"])
        if self.progress.stage == "tokenizer":
            self._save()
            report.phase(f"tokenizer {tokenizer_name}")
            made = make_tokenizer(tokenizer_name, vocab_size, self._training_text(holdout))
            made.save(self.directory)
            self.progress.stage = "val" if self.held_out else "split"
            self._save()
        tokenizer = load_tokenizer(self.directory)
        try:
            for split, first in FIRST_SHARD.items():
                stem, state = f"{self.text.name}_{split}", self._saved("writers", split)
                self.writers[split] = ShardWriter(
                    self.directory,
                    stem,
                    token_dtype(tokenizer.vocab_size),
                    settings["shard_tokens"],
                    first,
                    state or None,
                )
            self._stages(tokenizer, holdout, report)
            for writer in self.writers.values():
                writer.close()
            self._commit()
        finally:
            for writer in self.writers.values():
                writer.abandon()
        self._finish(tokenizer)

    def _stages(self, tokenizer: TextTokenizer, holdout: HoldOut, report: Report) -> None:
        """`val` reads the validation source; `split` (or `train` after `val`) reads the source."""
        if self.progress.stage == "val":
            assert self.held_out is not None
            report.phase("held-out text", self.progress.tokens)
            self._tokenize(self.held_out, tokenizer, lambda text: "val", None, None, report)
            self.progress.stage, self.progress.position, self.progress.documents = "train", None, 0
            self._commit()
        limits = self.progress.settings["max_documents"], self.progress.settings["max_tokens"]
        if self.progress.stage != "done":
            report.phase("tokenizing", self.progress.tokens)
            self._tokenize(self.text, tokenizer, holdout.split_of, *limits, report)
            self.progress.stage = "done"

    def _tokenize(
        self,
        source: Source,
        tokenizer: TextTokenizer,
        split_of: Any,
        max_documents: int | None,
        max_tokens: int | None,
        report: Report,
    ) -> None:
        reader = source.reader(self.progress.position)
        try:
            left = None if max_documents is None else max_documents - self.progress.documents
            for batch in _batches(islice(reader, left)):
                routed = [(split_of(text), text) for text in batch if text.strip()]
                self.skipped["empty documents"] += len(batch) - len(routed)
                kept = [(split, text) for split, text in routed if split is not None]
                self.skipped["documents also held out"] += len(routed) - len(kept)
                self.progress.documents += len(batch)
                full = self._append(kept, tokenizer, max_tokens)
                self.progress.position = reader.position()
                done = [reader.fraction()]
                done += [self.progress.documents / max_documents] if max_documents else []
                done += [self.progress.tokens / max_tokens] if max_tokens else []
                report.update(max((x for x in done if x is not None), default=None), self.progress.tokens)
                if full:
                    break
                if time.monotonic() - self.committed >= COMMIT_SECONDS:
                    self._commit()
            self.skipped.update(reader.skipped)
        finally:
            reader.close()

    def _append(
        self, documents: list[tuple[Split, str]], tokenizer: TextTokenizer, max_tokens: int | None
    ) -> bool:
        """Tokenize and write; True once max_tokens are there, whatever of the batch is left."""
        encoded = tokenizer.encode_documents([text for _, text in documents])
        for (split, text), ids in zip(documents, encoded, strict=True):
            if max_tokens is not None and self.progress.tokens >= max_tokens:
                return True
            self.writers[split].append(ids)
            self.counts[split].update(tokens=len(ids), bytes=len(text.encode()), documents=1)
            if split == "val" and tokenizer.decode(ids) != text:
                self.counts[split].update(altered=1)
            self.progress.tokens += len(ids)
        return max_tokens is not None and self.progress.tokens >= max_tokens

    def _training_text(self, holdout: HoldOut) -> Iterator[str]:
        """The documents training will see: a tokenizer made from held-out text would flatter the loss."""
        reader = self.text.reader()
        try:
            for text in islice(reader, self.progress.settings["max_documents"]):
                if text.strip() and holdout.split_of(text) == "train":
                    yield text
        finally:
            reader.close()

    def _commit(self) -> None:
        """Everything appended so far survives a kill afterwards."""
        for writer in self.writers.values():
            writer.sync()
        self.progress.writers = {split: writer.state() for split, writer in self.writers.items()}
        self.progress.counts = {split: dict(count) for split, count in self.counts.items()}
        self.progress.skipped = dict(self.skipped)
        self._save()
        for writer in self.writers.values():
            writer.publish()
        self.committed = time.monotonic()

    def _save(self) -> None:
        write_file(self.path, json.dumps(vars(self.progress), indent=1) + "\n")

    def _saved(self, what: str, split: str) -> dict:
        return (getattr(self.progress, what) or {}).get(split, {})

    def _finish(self, tokenizer: TextTokenizer) -> None:
        empty: list[Split] = [split for split in FIRST_SHARD if not self.counts[split]["tokens"]]
        if empty:
            self._clear()
            raise self._nothing_in(empty)
        splits: dict[Split, SplitMeta] = {
            split: SplitMeta(
                tokens=self.counts[split]["tokens"],
                bytes=self.counts[split]["bytes"],
                documents=self.counts[split]["documents"],
                shards=tuple(ShardMeta(**vars(record)) for record in self.writers[split].closed),
            )
            for split in FIRST_SHARD
        }
        meta = Meta(
            name=self.text.name,
            vocab_size=tokenizer.vocab_size,
            dtype=token_dtype(tokenizer.vocab_size),
            bos_id=tokenizer.bos,
            eos_id=tokenizer.eos,
            pad_id=tokenizer.pad,
            tokenizer=TokenizerMeta(
                kind=self.progress.settings["tokenizer"]["kind"],
                size=tokenizer.size,
                lossless=not self.counts["val"]["altered"],
                sha256=tokenizer.sha256,
            ),
            splits=splits,
            skipped={reason: count for reason, count in sorted(self.skipped.items()) if count},
            settings=self.progress.settings,
        )
        write_file(self.directory / "meta.json", meta.to_json())
        self.path.unlink()

    def _clear(self) -> None:
        """Remove what this preparation made, so that other settings may be tried in the same folder."""
        for pattern in (
            f"{self.text.name}_*.bin*",
            "tokenizer.json",
            "tokenizer_config.json",
            "special_tokens_map.json",
        ):
            for path in self.directory.glob(pattern):
                path.unlink()
        self.path.unlink()

    def _nothing_in(self, empty: list[Split]) -> DataError:
        documents = sum(self.counts[split]["documents"] for split in FIRST_SHARD)
        skipped = (
            ", ".join(f"{count} {reason}" for reason, count in self.skipped.items() if count) or "nothing"
        )
        return SourceError(
            f"no document for {' and '.join(empty)}: {documents} documents with text in {self.text.name!r} "
            f"(skipped: {skipped}); holding out needs at least two that differ, or held-out text of its own: "
            "--validation PATH"
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


def _validation_source(
    validation: str | Path,
    source: str | Path | Source,
    subset: str | None,
    revision: str | None,
    text_field: str,
) -> Source:
    path = Path(validation).expanduser()
    is_dataset = (
        isinstance(source, str) and not Path(source).expanduser().exists() and source != "python-stdlib"
    )
    if not path.exists() and is_dataset:
        return find_source(
            source, subset=subset, split=str(validation), revision=revision, text_field=text_field
        )
    if not path.exists():
        raise SourceError(f"no validation text at {path}; expected a folder, .txt, .jsonl or .parquet file")
    return find_source(path, subset=None, split="", revision=None, text_field=text_field)


def _default_folder(name: str, tokenizer: str, settings: dict[str, Any]) -> Path:
    kind = tokenizer if tokenizer in ("gpt2", "bytebpe", "bytes") else Path(tokenizer).stem
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
    return Path("data") / f"{name}-{kind}-{digest}"


def _is_complete(directory: Path, settings: dict[str, Any]) -> bool:
    if not (directory / "meta.json").exists():
        return False
    _require_same(directory, read_meta(directory).settings, settings)
    with suppress(OSError):  # a kill between writing meta.json and this leaves it; so may a read-only folder
        (directory / "progress.json").unlink()
    return True


def _require_same(directory: Path, there: dict[str, Any], asked: dict[str, Any]) -> None:
    before, now = _flat(there), _flat(json.loads(json.dumps(asked)))
    differing = [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]
    if differing:
        listed = "; ".join(
            f"{key}: {before.get(key)!r} there, {now.get(key)!r} asked for" for key in differing
        )
        raise SettingsDiffer(
            f"{directory} holds a preparation with other settings ({listed}); choose another --out, or "
            "remove the folder"
        )


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat


def _check_numbers(
    val_fraction: float, shard_tokens: int, max_documents: int | None, max_tokens: int | None
) -> None:
    if not 0 < val_fraction < 1:
        raise DataError(f"val_fraction={val_fraction}, expected a share between 0 and 1, such as 0.05")
    if not 1 <= shard_tokens <= MAX_TOKENS:
        raise DataError(
            f"shard_tokens={shard_tokens}, expected 1 to {MAX_TOKENS}: a shard's header counts in int32"
        )
    for name, value in (("max_documents", max_documents), ("max_tokens", max_tokens)):
        if value is not None and value < 1:
            raise DataError(f"{name}={value}, expected at least 1; leave it out for no limit")
