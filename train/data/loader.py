"""Batches of next-token pairs from shards. A position is a few integers, and returning to it is
exact.

A batch is a function of the seed and of how many samples came before it: there is no generator
state to save. Batch b of rank r takes samples (b * world + r) * batch + row. Ranks never share a
sample, and a step has the same data however it is divided among ranks and micro-batches.

    random_crop   Sample n starts at place fold(1, seed, n) mod W. W counts the places, shard by
                  shard, where T+1 tokens begin.
    stream        Sample n is window n mod W of epoch n // W: the tokens in order, the shards
                  shuffled anew each epoch. Window j is tokens jT to jT+T, and its last token is the
                  next window's first. Every token is a target once per epoch, except the first one
                  and at most T at the end.

fold chains SplitMix64 (Steele, Lea and Flood, OOPSLA 2014):

    h = 0; for each word w: h = mix64(h xor w)
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import numpy as np

from delta_trn.train.data.dataset import TokenDataset, check_ids
from delta_trn.train.data.shards import Split
from delta_trn.train.settings.errors import PositionMismatch, ShardError

if TYPE_CHECKING:
    from torch import Tensor

Kind = Literal["random_crop", "stream"]


class Batch(NamedTuple):
    """What one forward pass, or a step's several, gets to see: rows of tokens, [B, T] each.

    inputs        int64
    targets       int64: targets[b, t] follows inputs[b, t]
    position_ids  int32, the place of each token in its own document. A document begins wherever it
                  is 0: in every row at t = 0, and at each BOS. Nothing of the document before
                  reaches it. It is 0, 1, 2, ... in between. None: each row is one document,
                  whatever is in it
    noise         int32, a random number per token, from which dropout draws its masks; None: it
                  drops nothing

    position_ids say what `cu_seqlens` over the rows put end to end would, and
    `models.sequence.sequence_bounds(position_ids)` is that tensor. Their shape does not depend on
    the documents, so that graphs are compiled once, and rows and segments of rows take their part
    along.

    >>> import torch
    >>> ids = torch.arange(4)[None]
    >>> Batch(ids, ids + 1, torch.tensor([[0, 1, 0, 1]])).split(1)[0].position_ids
    tensor([[0, 1, 0, 1]])
    """

    inputs: "Tensor"
    targets: "Tensor"
    position_ids: "Tensor | None" = None
    noise: "Tensor | None" = None

    def each(self, change: "Callable[[Tensor], Tensor]") -> "Batch":
        """Returns the batch with every tensor changed."""
        return Batch(*(None if x is None else change(x) for x in self))  # type: ignore[arg-type]

    def split(self, rows: int) -> "list[Batch]":
        """Returns batches of `rows` rows each, the last with what is left."""
        firsts = range(0, len(self.inputs), rows)
        return [self.each(lambda x, first=first: x[first : first + rows]) for first in firsts]


# the first word of every fold, so that no two uses of a seed give the same numbers
_CROP, _SHARD_ORDER, _EVALUATION, _NOISE = 1, 2, 3, 4


def mix64(x: np.ndarray) -> np.ndarray:
    """Takes one step of SplitMix64 from state x. uint64 -> uint64"""
    with np.errstate(over="ignore"):
        z = x + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def fold(*words: "int | np.ndarray") -> np.ndarray:
    """Returns a 64-bit hash of the words; arrays broadcast. uint64"""
    state = np.zeros(1, np.uint64)
    for word in words:
        value = (
            np.array([word & (2**64 - 1)], np.uint64)
            if isinstance(word, int)
            else word.astype(np.uint64)
        )
        state = mix64(state ^ value)
    return state


@dataclass
class Loader(ABC):
    """Yields batches of one split without end, to one of `world` ranks. `state_dict` is the same on
    each.

    batch, sequence     sequences of a batch, and tokens of a sequence
    boundaries          batches have position_ids, which say where documents begin
    with_noise          batches have noise, from which dropout draws its masks
    """

    dataset: TokenDataset
    split: Split
    batch: int
    sequence: int
    seed: int
    rank: int = 0
    world: int = 1
    boundaries: bool = False
    with_noise: bool = False
    kind: ClassVar[Kind]

    def __post_init__(self) -> None:
        self._bos = self.dataset.meta.bos_id if self.boundaries else None
        self._tokens = _Tokens(self.dataset, self.split)
        self._samples = 0  # of all ranks, before the next batch

    @abstractmethod
    def _windows(self, first: int) -> np.ndarray:
        """Returns samples first to first + batch, T+1 tokens each. int64 [batch, T+1]"""

    def next_batch(self) -> Batch:
        """Returns `batch` rows of `sequence` tokens on the CPU."""
        noise = self.noise() if self.with_noise else None
        windows = self._windows(self._samples + self.rank * self.batch)
        self._samples += self.world * self.batch
        return as_batch(windows, self._bos)._replace(noise=noise)

    def noise(self) -> "Tensor":
        """Returns a random number per token of the next batch,
        from the seed and the sample; int32 [B, T].
        """
        import torch

        first = self._samples + self.rank * self.batch
        samples = np.arange(first, first + self.batch, dtype=np.uint64)[:, None]
        words = fold(_NOISE, self.seed, samples, np.arange(self.sequence, dtype=np.uint64))
        return torch.from_numpy((words >> np.uint64(32)).astype(np.uint32).view(np.int32))

    def state_dict(self) -> dict[str, Any]:
        """Returns where the next batch comes from, as JSON."""
        return {**self._identity(), "samples": self._samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where `state` was taken, on any number of ranks.
        PositionMismatch if it does not fit.
        """
        differences = [
            f"{key} was {state.get(key)!r}, is {value!r}"
            for key, value in self._identity().items()
            if state.get(key) != value
        ]
        if differences:
            raise PositionMismatch(
                f"the saved position does not fit this loader: {'; '.join(differences)}; continue "
                "with the settings that it was saved with, or begin a new run"
            )
        step, samples = self.world * self.batch, state.get("samples")
        if not isinstance(samples, int) or samples % step:
            raise PositionMismatch(
                f"{samples} samples were drawn, which is no whole number of batches of "
                f"world={self.world} x batch={self.batch}; choose a product that divides it"
            )
        self._samples = samples

    def _identity(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("kind", "split", "sequence", "seed")}
        return {"dataset": self.dataset.fingerprint, **own}


class RandomCrops(Loader):
    """Draws independent crops, with replacement."""

    kind = "random_crop"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._crops = _Crops(self._tokens, self.sequence)

    def _windows(self, first: int) -> np.ndarray:
        samples = np.arange(first, first + self.batch, dtype=np.uint64)
        return self._crops.at(fold(_CROP, self.seed, samples) % np.uint64(self._crops.starts))


class Stream(Loader):
    """Takes every token in turn."""

    kind = "stream"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._in_epoch = (self._tokens.total - 1) // self.sequence
        if self._in_epoch < 1:
            raise ShardError(
                f"split {self.split!r} of {self.dataset.path} has {self._tokens.total} tokens, too "
                f"few for sequence={self.sequence}: that needs {self.sequence + 1}; choose a "
                "shorter sequence, or prepare more text"
            )
        self._order = -1, np.zeros(0, np.int64)

    def _windows(self, first: int) -> np.ndarray:
        windows = np.empty((self.batch, self.sequence + 1), np.int64)
        for row in range(self.batch):
            epoch, place = divmod(first + row, self._in_epoch)
            self._tokens.read_across(self._shards_of(epoch), place * self.sequence, windows[row])
        return windows

    def _shards_of(self, epoch: int) -> np.ndarray:
        if self._order[0] != epoch:
            keys = fold(
                _SHARD_ORDER, self.seed, epoch, np.arange(len(self._tokens.shards), dtype=np.uint64)
            )
            self._order = epoch, np.argsort(keys, kind="stable")
        return self._order[1]


def make_loader(
    dataset: TokenDataset, split: Split, *, kind: Kind = "random_crop", **options: Any
) -> Loader:
    """Returns the loader of that kind; `options` are fields of Loader.

    Raises ShardError if the split is shorter than a sequence.
    """
    return {"random_crop": RandomCrops, "stream": Stream}[kind](dataset, split, **options)


def evaluation_batches(
    dataset: TokenDataset,
    *,
    batch: int,
    sequence: int,
    batches: int,
    seed: int = 0,
    boundaries: bool = False,
) -> list[Batch]:
    """Returns the same crops at every call: batches x batch, one in each equal part of the held-out
    split.

    The crops depend on seed, sequence and batches x batch only: another micro-batch with the same
    product evaluates the same tokens. `boundaries` as in Loader.
    """
    crops = _Crops(_Tokens(dataset, "val"), sequence)
    count = batch * batches
    edges = np.arange(count + 1, dtype=np.uint64) * np.uint64(crops.starts) // np.uint64(count)
    # with fewer starts than parts, some starts are taken twice
    widths = np.maximum(edges[1:] - edges[:-1], np.uint64(1))
    places = edges[:-1] + fold(_EVALUATION, seed, np.arange(count, dtype=np.uint64)) % widths
    bos = dataset.meta.bos_id if boundaries else None
    return [as_batch(crops.at(places[i : i + batch]), bos) for i in range(0, count, batch)]


class _Tokens:
    """Reads the shards of a split, and checks every id."""

    def __init__(self, dataset: TokenDataset, split: Split):
        self.dataset = dataset
        self.split: Split = split
        self.shards = dataset.shards(split)
        self.lengths = np.array([len(tokens) for tokens in self.shards], np.int64)
        self.total = int(self.lengths.sum())

    def read(self, shard: int, start: int, out: np.ndarray) -> None:
        """Copies tokens [start, start + len(out)) of one shard."""
        tokens = self.shards[shard][start : start + len(out)]
        file = self.dataset.split(self.split).shards[shard].file
        check_ids(tokens, self.dataset.meta.vocab_size, self.dataset.path / file, start)
        out[:] = tokens

    def read_across(self, order: np.ndarray, start: int, out: np.ndarray) -> None:
        """Copies tokens of the shards laid end to end in an order, across their ends."""
        ends = np.cumsum(self.lengths[order])
        place = int(np.searchsorted(ends, start, side="right"))
        offset = start - (int(ends[place - 1]) if place else 0)
        filled = 0
        while filled < len(out):
            shard = int(order[place])
            take = min(len(out) - filled, int(self.lengths[shard]) - offset)
            self.read(shard, offset, out[filled : filled + take])
            filled, place, offset = filled + take, place + 1, 0


class _Crops:
    """Numbers the places of a split where sequence + 1 tokens of one shard begin:
    0 to `starts` - 1.
    """

    def __init__(self, tokens: _Tokens, sequence: int):
        self._tokens, self._sequence = tokens, sequence
        self._ends = np.cumsum(np.maximum(tokens.lengths - sequence, 0))
        self.starts = int(self._ends[-1])
        if self.starts < 1:
            raise ShardError(
                f"split {tokens.split!r} of {tokens.dataset.path} has no shard of sequence + 1 = "
                f"{sequence + 1} tokens, its longest has {int(tokens.lengths.max())}; choose a "
                "shorter sequence, or prepare more text"
            )

    def at(self, places: np.ndarray) -> np.ndarray:
        """Returns the crops that begin at these places. [n] -> int64 [n, sequence + 1]"""
        windows = np.empty((len(places), self._sequence + 1), np.int64)
        shards = np.searchsorted(self._ends, places.astype(np.int64), side="right")
        for row, (shard, place) in enumerate(zip(shards.tolist(), places.tolist(), strict=True)):
            before = int(self._ends[shard - 1]) if shard else 0
            self._tokens.read(shard, place - before, windows[row])
        return windows


def as_batch(windows: np.ndarray, bos: int | None) -> Batch:
    """Splits windows into inputs and targets, each contiguous so that it can be pinned. int64 [n,
    T+1]

    A document begins at each `bos` of the inputs; None: there are no position_ids.
    """
    import torch  # a second or more to import, and preparing data needs none of it

    inputs, targets = windows[:, :-1].copy(), windows[:, 1:].copy()
    places = None
    if bos is not None:
        here = np.arange(inputs.shape[1], dtype=np.int32)
        first = np.maximum.accumulate(np.where(inputs == bos, here, 0), axis=1)
        places = torch.from_numpy(here - first)
    return Batch(torch.from_numpy(inputs), torch.from_numpy(targets), places)
