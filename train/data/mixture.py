"""Mixes prepared folders by tokens and shuffles their documents: of one folder alone, too."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from delta_trn.train.data.dataset import SplitMeta, TokenDataset, open_dataset
from delta_trn.train.data.preparation import is_complete, unfinished
from delta_trn.train.data.readers import quiet_datasets
from delta_trn.train.data.shards import FIRST_SHARD, ShardWriters, Split
from delta_trn.train.data.tokenizer import FILES
from delta_trn.train.files import hold_folder, write_file
from delta_trn.train.settings.errors import DataError
from delta_trn.train.watch.display import Bar, console

Exhausted = Literal["stop", "repeat"]


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
                    repeat: it starts again. That needs max_tokens

    The source of every next document is drawn. Held-out documents are mixed by the same weights, in order,
    until one source has none left. Raises DataError before any work for what does not go together,
    SettingsDiffer if `out` holds something else.
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
            with Bar(console(stderr=True), show=show) as bar, unfinished(out) as place:
                _write(datasets, place, settings, bar)
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
    if exhausted == "repeat" and max_tokens is None:
        raise DataError("exhausted=repeat has no end without max_tokens: give it, or exhausted=stop")
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


def _write(datasets: list[TokenDataset], place: Path, settings: dict[str, Any], bar: Bar) -> None:
    meta = datasets[0].meta
    name = "-".join(dict.fromkeys(dataset.meta.name for dataset in datasets))[:80]
    counts: dict[Split, SplitMeta] = {}
    with ShardWriters(place, name, meta.dtype, settings["shard_tokens"]) as writers:
        for split in FIRST_SHARD:
            bar.begin(f"mixing {split}")
            most = settings["max_tokens"] if split == "train" else None
            sizes = [dataset.split(split).tokens for dataset in datasets]
            documents, taken, size = 0, [0] * len(datasets), 0.0
            for row in _interleaved(datasets, split, settings):
                dataset = datasets[row["source"]]
                ids = dataset.shards(split)[row["shard"]][row["start"] : row["end"]]
                writers.append(split, ids)
                documents += 1
                taken[row["source"]] += len(ids)
                size += _size(dataset, split, ids)
                if most is not None and sum(taken) >= most:
                    break
                if documents % 1000 == 0:
                    done = max(x / y for x, y in zip(taken, sizes, strict=True))
                    bar.advance(min(1.0, sum(taken) / most if most else done), f"{sum(taken):,} tokens")
            counts[split] = SplitMeta(tokens=sum(taken), bytes=round(size), documents=documents, shards=())
        shards = writers.finish()
    for file in FILES:
        write_file(place / file, (datasets[0].path / file).read_bytes())
    lossless = all(dataset.meta.tokenizer.lossless for dataset in datasets)
    whole = meta.model_copy(
        update={
            "name": name,
            "settings": settings,
            "skipped": {},
            "splits": {split: x.model_copy(update={"shards": shards[split]}) for split, x in counts.items()},
            "tokenizer": meta.tokenizer.model_copy(update={"lossless": lossless}),
        }
    )
    write_file(place / "meta.json", whole.to_json())


def _interleaved(datasets: list[TokenDataset], split: Split, settings: dict[str, Any]) -> Any:
    """Returns the places of the mixture's documents, in order: source, shard, start, end."""
    library = quiet_datasets()
    seed = (settings["shuffle"] or 0) % 2**64
    parts, chances = [], []
    for number, (dataset, part) in enumerate(zip(datasets, settings["mixture"], strict=True)):
        places = library.Dataset.from_dict(_places(dataset, split, number))
        if split == "train" and settings["shuffle"] is not None:
            places = places.shuffle(generator=np.random.default_rng((seed, number)))
        places = places.to_iterable_dataset()
        if split == "train" and settings["exhausted"] == "repeat":
            places = places.repeat(None)
        parts.append(places)
        # a draw is one document, whose mean length decides how often it must be drawn
        chances.append(part["weight"] * dataset.split(split).documents / dataset.split(split).tokens)
    return library.interleave_datasets(
        parts, probabilities=[chance / sum(chances) for chance in chances], seed=seed
    )


def _places(dataset: TokenDataset, split: Split, number: int) -> dict[str, np.ndarray]:
    """Returns where the documents of a source lie, one entry each, BOS and EOS included."""
    shards, starts, ends = [], [], []
    for shard, tokens in enumerate(dataset.shards(split)):
        end = np.flatnonzero(tokens == dataset.meta.eos_id) + 1
        ends.append(end)
        starts.append(np.concatenate([[0], end[:-1]]))
        shards.append(np.full(len(end), shard))
    places = {"shard": shards, "start": starts, "end": ends}
    columns = {name: np.concatenate(parts).astype(np.int64) for name, parts in places.items()}
    return {"source": np.full(len(columns["end"]), number), **columns}


def _size(dataset: TokenDataset, split: Split, ids: np.ndarray) -> float:
    """Returns a document's UTF-8 bytes; of a training document what it has on average per token."""
    if split == "val":
        return len(dataset.tokenizer.decode(ids.tolist()).encode())
    whole = dataset.split(split)
    return len(ids) * whole.bytes / whole.tokens
