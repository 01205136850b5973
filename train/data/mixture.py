"""Mixes prepared folders by tokens, and shuffles their documents: of one folder too, which is then shuffled.

The next document always comes from the source with the least tokens so far over its weight. So at every place
of the mixture each source has its share of all tokens, to within the longest documents. A mixture of sources
that all shuffle is the same whatever the machine: document n of source s has the place of
fold(5, seed, s, epoch, n) among the others. Where those numbers begin alike, documents lie in one file, which
is small enough to be sorted in memory; so memory does not depend on how much text there is.
"""

import json
import math
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np

from delta_trn.train.data.dataset import Meta, Split, SplitMeta, TokenDataset, open_dataset
from delta_trn.train.data.loader import fold
from delta_trn.train.data.preparation import COMMIT_SECONDS, is_complete, saved_progress
from delta_trn.train.data.shards import FIRST_SHARD, SplitWriters
from delta_trn.train.data.tokenizer import FILES
from delta_trn.train.files import hold_folder, write_file
from delta_trn.train.settings.errors import DataError
from delta_trn.train.watch.display import Bar, console

SHUFFLE = 5  # the first word of fold; train.data.loader has the others
BUCKET_BYTES = 2**26  # of tokens that are sorted in memory at once, for each source

Exhausted = Literal["stop", "repeat"]


@dataclass
class _Place:
    """Where a split's mixture stands, as JSON: of each source the epoch, its documents taken, all tokens."""

    epochs: list[int]
    counts: list[int]
    taken: list[int]
    documents: int = 0
    bytes: float = 0.0


@dataclass
class _Mixture:
    settings: dict[str, Any]
    places: dict[str, dict[str, Any]] = field(default_factory=dict)
    writers: dict[str, dict[str, Any]] = field(default_factory=dict)


def mix(
    parts: Sequence[tuple[str | Path, float]],
    out: str | Path,
    *,
    shuffle: bool = True,
    seed: int = 0,
    max_tokens: int | None = None,
    exhausted: Exhausted = "stop",
    shard_tokens: int = 100_000_000,
    show: bool = True,
) -> Path:
    """Writes a prepared folder from others that have the same tokenizer, and returns it.

        parts       (prepared folder, weight): weights are shares of the training tokens, of any sum
        shuffle     training documents in an order that depends on `seed` alone; False: each source's own
        max_tokens  training tokens that are enough
        exhausted   stop: a source that has no more documents ends the mixture, so that the shares hold;
                    repeat: it starts again, in another order. That needs max_tokens

    Held-out documents are mixed by the same weights, in order, until one source has none left. Killed, the
    same call goes on, and ends with the bytes of an undisturbed one. Raises DataError before any work for
    what does not go together, SettingsDiffer if `out` holds something else.
    """
    out = Path(out)
    datasets = [open_dataset(folder) for folder, _ in parts]
    weights = [float(weight) for _, weight in parts]
    _require_mixable(datasets, weights, out, max_tokens, exhausted)
    total = sum(weights)
    settings = {
        "mixture": [
            {"name": d.meta.name, "fingerprint": d.fingerprint, "weight": w / total}
            for d, w in zip(datasets, weights, strict=True)
        ],
        "shuffle": seed if shuffle else None,
        "max_tokens": max_tokens,
        "exhausted": exhausted,
        "shard_tokens": shard_tokens,
    }
    with hold_folder(out):
        if not is_complete(out, settings):
            with Bar(console(stderr=True), show=show) as bar:
                _Mixing(datasets, out, settings, bar).run()
        shutil.rmtree(out / ".shuffled", ignore_errors=True)
    return out


def _require_mixable(
    datasets: list[TokenDataset],
    weights: list[float],
    out: Path,
    max_tokens: int | None,
    exhausted: Exhausted,
) -> None:
    if not datasets:
        raise DataError("there is nothing to mix: expected prepared folders, such as data/a=0.7 data/b=0.3")
    if bad := [w for w in weights if not (math.isfinite(w) and w > 0)]:
        raise DataError(f"weight {bad[0]}: expected a number above 0; leave a source out for none of it")
    if exhausted not in ("stop", "repeat"):
        raise DataError(f"exhausted={exhausted!r}: expected stop or repeat")
    if exhausted == "repeat" and max_tokens is None:
        raise DataError("exhausted=repeat has no end without max_tokens: give it, or exhausted=stop")
    if max_tokens is not None and max_tokens < 1:
        raise DataError(f"max_tokens={max_tokens}: expected at least 1")
    first = datasets[0]
    for dataset in datasets:
        if dataset.path.resolve() == out.resolve():
            raise DataError(f"{out} is one of the sources; choose another folder to write")
        mine, theirs = dataset.meta, first.meta
        if (mine.tokenizer.sha256, mine.vocab_size) != (theirs.tokenizer.sha256, theirs.vocab_size):
            raise DataError(
                f"{dataset.path} has another tokenizer than {first.path}; prepare it with "
                f"data.tokenizer={first.path}"
            )


class _Mixing:
    """One mixture in one folder, from wherever it was left."""

    def __init__(self, datasets: list[TokenDataset], out: Path, settings: dict[str, Any], bar: Bar):
        self.datasets, self.out, self.bar = datasets, out, bar
        self.path = out / "progress.json"
        self.state = _Mixture(settings)
        if saved := saved_progress(out, settings):
            self.state = _Mixture(**saved)
        self.weights = [part["weight"] for part in settings["mixture"]]
        self.name = "-".join(dict.fromkeys(dataset.meta.name for dataset in datasets))[:80]
        self.writers: SplitWriters

    def run(self) -> None:
        meta, settings = self.datasets[0].meta, self.state.settings
        with SplitWriters(
            self.out, self.name, meta.dtype, settings["shard_tokens"], self.state.writers
        ) as self.writers:
            for split in FIRST_SHARD:
                self._mix(split)
            self.writers.close()
            self.writers.commit(self._write)
        for name in FILES:
            write_file(self.out / name, (self.datasets[0].path / name).read_bytes())
        whole = {"name": self.name, "settings": settings, "splits": self._splits(), "skipped": {}}
        lossless = all(dataset.meta.tokenizer.lossless for dataset in self.datasets)
        tokenizer = meta.tokenizer.model_copy(update={"lossless": lossless})
        write_file(self.out / "meta.json", Meta(**{**dict(meta), **whole, "tokenizer": tokenizer}).to_json())
        self.path.unlink()

    def _splits(self) -> dict[Split, SplitMeta]:
        places: dict[Split, _Place] = {split: _Place(**self.state.places[split]) for split in FIRST_SHARD}
        return {
            split: SplitMeta(
                tokens=sum(place.taken),
                bytes=round(place.bytes),
                documents=place.documents,
                shards=tuple(self.writers[split].closed),
            )
            for split, place in places.items()
        }

    def _mix(self, split: Split) -> None:
        n, settings = len(self.datasets), self.state.settings
        place = _Place(**self.state.places.get(split, {x: [0] * n for x in ("epochs", "counts", "taken")}))
        most = settings["max_tokens"] if split == "train" else None
        sizes = [dataset.split(split).tokens for dataset in self.datasets]
        self.bar.begin(f"mixing {split}")
        left = [self._left(split, place, s) for s in range(n)]
        committed = time.monotonic()
        while most is None or sum(place.taken) < most:
            s = min(range(n), key=lambda s: place.taken[s] / self.weights[s])
            ids = next(left[s], None)
            if ids is None and (split == "val" or settings["exhausted"] == "stop"):
                break
            if ids is None:
                place.epochs[s], place.counts[s] = place.epochs[s] + 1, 0
                left[s] = self._left(split, place, s)
                ids = next(left[s])
            self.writers[split].append(ids)
            place.counts[s], place.taken[s] = place.counts[s] + 1, place.taken[s] + len(ids)
            place.documents, place.bytes = place.documents + 1, place.bytes + self._bytes(split, s, ids)
            if time.monotonic() - committed >= COMMIT_SECONDS:
                committed = self._save(split, place)
                done = sum(place.taken)
                share = done / most if most else max(x / y for x, y in zip(place.taken, sizes, strict=True))
                self.bar.advance(min(share, 1.0), f"{done:,} tokens")
        self._save(split, place)

    def _bytes(self, split: Split, s: int, ids: np.ndarray) -> float:
        """Returns a document's UTF-8 bytes; of a training document what it has on average per token."""
        dataset = self.datasets[s]
        if split == "val":
            return len(dataset.tokenizer.decode(ids.tolist()).encode())
        whole = dataset.split(split)
        return len(ids) * whole.bytes / whole.tokens

    def _left(self, split: Split, place: _Place, s: int) -> Iterator[np.ndarray]:
        """Returns the documents of a source that its epoch has left."""
        dataset, seed = self.datasets[s], self.state.settings["shuffle"]
        if split == "val" or seed is None:
            documents = _in_order(dataset, split)
        else:
            documents = _shuffled(dataset, (seed, s, place.epochs[s]), self.out / ".shuffled" / str(s))
        return islice(documents, place.counts[s], None)

    def _save(self, split: Split, place: _Place) -> float:
        self.state.places[split] = vars(place)
        self.writers.commit(self._write)
        return time.monotonic()

    def _write(self, writers: dict[str, dict]) -> None:
        self.state.writers = writers
        write_file(self.path, json.dumps(vars(self.state), indent=1) + "\n")


def _in_order(dataset: TokenDataset, split: Split) -> Iterator[np.ndarray]:
    """Yields whole documents, BOS and EOS included, in the shards' order."""
    for tokens in dataset.shards(split):
        start = 0
        for block in range(0, len(tokens), 1 << 22):
            for at in np.flatnonzero(tokens[block : block + (1 << 22)] == dataset.meta.eos_id):
                end = block + int(at) + 1
                yield tokens[start:end]
                start = end


def _shuffled(dataset: TokenDataset, words: tuple[int, int, int], scratch: Path) -> Iterator[np.ndarray]:
    """Yields the training documents in the order of their keys, from files that each hold a range of keys."""
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    dtype = dataset.shards("train")[0].dtype
    size = sum(tokens.nbytes for tokens in dataset.shards("train"))
    buckets = -(-size // BUCKET_BYTES)
    held: list[list[tuple[int, np.ndarray]]] = [[] for _ in range(buckets)]
    waiting = 0

    def put_away() -> None:
        for number, documents in enumerate(held):
            if documents:
                index = np.array([(key, len(ids)) for key, ids in documents], np.uint64)
                with open(scratch / f"{number}.index", "ab") as file:
                    file.write(index.tobytes())
                with open(scratch / f"{number}.tokens", "ab") as file:
                    file.write(np.concatenate([ids for _, ids in documents]).tobytes())
                documents.clear()

    numbered = enumerate(_in_order(dataset, "train"))
    while batch := list(islice(numbered, 1 << 14)):
        keys = fold(SHUFFLE, *words, np.array([n for n, _ in batch], np.uint64)).tolist()
        for key, (_, ids) in zip(keys, batch, strict=True):
            held[key * buckets >> 64].append((key, ids))
            waiting += ids.nbytes
        if waiting >= BUCKET_BYTES:
            put_away()
            waiting = 0
    put_away()
    for number in range(buckets):
        if (scratch / f"{number}.index").exists():
            index = np.fromfile(scratch / f"{number}.index", np.uint64).reshape(-1, 2)
            tokens, ends = np.fromfile(scratch / f"{number}.tokens", dtype), index[:, 1].cumsum().tolist()
            for n in np.argsort(index[:, 0], kind="stable").tolist():
                yield tokens[ends[n] - int(index[n, 1]) : ends[n]]
