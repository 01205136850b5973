"""Conversations in rows of one length: several to a row, each whole, none longer than a row.

Token t of a conversation is an input, and token t + 1 its target, or -100 where that is not learned. So n
tokens take n - 1 places. Places that are left at the end of a row hold padding, as a document of its own.

Rows are made once, by best fit, the longest conversations first. An epoch is all rows in an order of its
own.
"""

import bisect
import hashlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from delta_trn.train.data.conversations import (
    ChatTokenizer,
    Conversation,
    Rendered,
    load_chat_tokenizer,
    read_conversations,
)
from delta_trn.train.data.dataset import Split
from delta_trn.train.data.holdout import text_hash
from delta_trn.train.data.loader import IGNORED, Batch, Kind, Loader, fold
from delta_trn.train.settings.errors import SourceError
from delta_trn.train.settings.schema import DataSection

_ORDER = 5  # the first word of `fold`, as the loaders have others


@dataclass(frozen=True)
class Rows:
    """The packed rows of one split: ids, targets, places int32 [rows, length]."""

    ids: np.ndarray
    targets: np.ndarray
    places: np.ndarray

    def batch(self, rows: np.ndarray) -> Batch:
        """Returns some of the rows."""
        import torch

        ids, targets, places = (torch.from_numpy(x[rows]) for x in (self.ids, self.targets, self.places))
        return Batch(ids.long(), targets.long(), places)


@dataclass(frozen=True)
class ConversationDataset:
    """The rendered conversations of a run; it stands where a run on text has a `TokenDataset`.

    dealt_with  how many conversations were truncated, dropped or left out, by reason
    """

    path: Path
    tokenizer: ChatTokenizer
    length: int
    documents: dict[Split, list[Rendered]]
    dealt_with: Counter[str]

    @cached_property
    def fingerprint(self) -> str:
        digest = hashlib.sha256(f"{self.tokenizer.sha256} {self.length}".encode())
        for split, documents in self.documents.items():
            digest.update(f"{split} {len(documents)}".encode())
            for document in documents:
                digest.update(len(document.ids).to_bytes(8, "little"))
                digest.update(document.ids.tobytes() + document.learned.tobytes())
        return digest.hexdigest()

    @cached_property
    def _rows(self) -> dict[Split, Rows]:
        return {
            split: _lay_out(documents, self.length, self.tokenizer.pad)
            for split, documents in self.documents.items()
        }

    def rows(self, split: Split) -> Rows:
        return self._rows[split]

    def describe(self) -> str:
        """Returns one line: what there is to learn, and to hold out."""
        parts = []
        words: dict[Split, str] = {"train": "to learn", "val": "held out"}
        for split, purpose in words.items():
            documents, rows = self.documents[split], len(self.rows(split).ids)
            learned, tokens = (sum(int(f(d)) for d in documents) for f in (_learned, _tokens))
            share = f"{learned:,} of {tokens:,} tokens"
            parts.append(f"{len(documents):,} conversations {purpose} ({share}) in {rows:,} rows")
        counts = [f"{count:,} {reason}" for reason, count in sorted(self.dealt_with.items())]
        return "; ".join(parts + counts)

    def bits_per_byte(self, nats_per_token: float) -> None:
        """Returns None: what is learned is a part of the text, and its bytes are not those of the tokens."""

    def evaluation_batches(self, *, size: int, at_most: int) -> list[Batch]:
        """Returns the first held-out rows, at most so many, `size` at once."""
        rows = self.rows("val")
        count = min(len(rows.ids), at_most)
        return [rows.batch(np.arange(i, min(i + size, count))) for i in range(0, count, size)]


def _learned(document: Rendered) -> int:
    return document.learned[1:].sum()


def _tokens(document: Rendered) -> int:
    return len(document.ids)


class ConversationLoader(Loader):
    """Yields rows of conversations without end. Sample n is row n mod R of epoch n // R, in its order."""

    kind: Kind = "conversations"

    def __init__(
        self, dataset: ConversationDataset, *, batch: int, seed: int, rank: int = 0, world: int = 1
    ) -> None:
        self.dataset, self.split = dataset, "train"  # type: ignore[assignment]
        self.batch, self.sequence, self.seed = batch, dataset.length, seed
        self.rank, self.world = rank, world
        self._samples = 0
        self._order = (-1, np.empty(0, np.int64))

    def next_batch(self) -> Batch:
        rows = self.dataset.rows("train")  # type: ignore[attr-defined]
        first = self._samples + self.rank * self.batch
        self._samples += self.world * self.batch
        return rows.batch(np.array([self._row(n, len(rows.ids)) for n in range(first, first + self.batch)]))

    def _row(self, sample: int, count: int) -> int:
        epoch, place = divmod(sample, count)
        if self._order[0] != epoch:
            keys = fold(_ORDER, self.seed, epoch, np.arange(count, dtype=np.uint64))
            self._order = epoch, np.argsort(keys, kind="stable")
        return int(self._order[1][place])

    def _windows(self, first: int) -> np.ndarray:
        raise NotImplementedError("rows of conversations have targets of their own")


def load_conversations(data: DataSection, folder: Path, length: int) -> ConversationDataset:
    """Renders the conversations of `data.source` with the tokenizer of the model in a folder.

    Raises SourceError or TokenizerError for what cannot be learned from, naming its line.
    """
    tokenizer = load_chat_tokenizer(folder, data.chat_template)
    dealt_with: Counter[str] = Counter()
    training = list(read_conversations(_file(data.source, "data.source")))
    if data.validation is not None:
        held_out = list(read_conversations(_file(data.validation, "data.validation")))
        keys = {conversation.key for conversation in held_out}
        kept = [conversation for conversation in training if conversation.key not in keys]
        if len(kept) < len(training):
            dealt_with["left out, since they are held out"] = len(training) - len(kept)
        training = kept
    else:
        training, held_out = _divide(training, data)
    for name, some in (("data.source", training), ("data.validation", held_out)):
        if not some:
            path = data.source if name == "data.source" else data.validation
            raise SourceError(f"{name}={path} has no conversation to use; give a file with one per line")
    documents: dict[Split, list[Rendered]] = {}
    for split, some in (("train", training), ("val", held_out)):
        rendered = [tokenizer.render(x, last_only=data.turns == "last") for x in some]
        documents[split] = _shortened(some, rendered, length, data.too_long, dealt_with)  # type: ignore[index]
    return ConversationDataset(Path(data.source), tokenizer, length, documents, dealt_with)


def _file(name: str, key: str) -> Path:
    path = Path(name).expanduser()
    if not path.is_file():
        raise SourceError(
            f"{key}={name}: no such file; give a file of JSON lines, such as "
            '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'
        )
    return path


def _divide(
    conversations: list[Conversation], data: DataSection
) -> tuple[list[Conversation], list[Conversation]]:
    """Holds out the share of conversations with the lowest hashes, at least one; copies go the same way."""
    keys = [text_hash(conversation.key, data.seed) for conversation in conversations]
    distinct = sorted(set(keys))
    if len(distinct) == 1:
        raise SourceError(
            f"{data.source} has one conversation, which cannot be learned and held out; give more, or "
            "data.validation=FILE"
        )
    lowest = set(distinct[: max(1, round(data.val_fraction * len(distinct)))])
    pairs = list(zip(conversations, keys, strict=True))
    return [c for c, key in pairs if key not in lowest], [c for c, key in pairs if key in lowest]


def _shortened(
    conversations: Sequence[Conversation],
    rendered: list[Rendered],
    length: int,
    too_long: str,
    dealt_with: Counter[str],
) -> list[Rendered]:
    """Returns what fits into rows; counts what was done with the rest. SourceError if it is refused."""
    long = [i for i, document in enumerate(rendered) if len(document.ids) > length + 1]
    if long and too_long == "refuse":
        first, most = long[0], max(len(rendered[i].ids) for i in long)
        raise SourceError(
            f"{len(long)} of {len(rendered)} conversations take more than batch.length={length} places, "
            f"{conversations[first].where} the first with {len(rendered[first].ids) - 1}; give "
            f"batch.length={most - 1} or more, data.too_long=truncate or data.too_long=drop"
        )
    kept = []
    for document in rendered:
        if len(document.ids) > length + 1:
            document = Rendered(document.ids[: length + 1], document.learned[: length + 1])
            if too_long == "drop" or not document.learned[1:].any():
                dealt_with["dropped, being too long"] += 1
                continue
            dealt_with["truncated"] += 1
        kept.append(document)
    if not kept:
        raise SourceError(
            f"all {len(rendered)} conversations of {conversations[0].where.rpartition(':')[0]} take more "
            f"than batch.length={length} places, and nothing is left to learn; give a larger batch.length"
        )
    return kept


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Returns which items go into each row of a capacity: best fit, the largest first.

    >>> pack([3, 5, 2, 4], 6)
    [[1], [3, 2], [0]]
    """
    rows: list[list[int]] = []
    spaces: list[int] = []  # those that some row has, ascending
    rows_with: dict[int, list[int]] = defaultdict(list)
    for item in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        at = bisect.bisect_left(spaces, lengths[item])
        if at < len(spaces):
            space = spaces[at]
            row = rows_with[space].pop()
            if not rows_with[space]:
                spaces.pop(at)
        else:
            row, space = len(rows), capacity
            rows.append([])
        rows[row].append(item)
        left = space - lengths[item]
        if left:
            if not rows_with[left]:
                bisect.insort(spaces, left)
            rows_with[left].append(row)
    return rows


def _lay_out(documents: list[Rendered], length: int, pad: int) -> Rows:
    packed = pack([len(document.ids) - 1 for document in documents], length)
    shape: Any = (len(packed), length)
    ids, targets = np.full(shape, pad, np.int32), np.full(shape, IGNORED, np.int32)
    places = np.zeros(shape, np.int32)
    for row, members in enumerate(packed):
        at = 0
        for member in members:
            document = documents[member]
            end = at + len(document.ids) - 1
            ids[row, at:end] = document.ids[:-1]
            targets[row, at:end] = np.where(document.learned[1:], document.ids[1:], IGNORED)
            places[row, at:end] = np.arange(end - at)
            at = end
        places[row, at:] = np.arange(length - at)
    return Rows(ids, targets, places)
