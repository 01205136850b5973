"""Turns documents into tokens, in this process or in several, in the order of the documents."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from delta_trn.train.data.holdout import HoldOut
from delta_trn.train.data.readers import quiet_datasets
from delta_trn.train.data.shards import DTYPES, Split
from delta_trn.train.data.tokenizer import TextTokenizer
from delta_trn.train.settings.errors import DataError

BLOCK_CHARACTERS = 2**23  # of a process: what is read before it is tokenized
WORTH_A_WORKER = 2**22  # characters: below, starting a process would take longer than its work
BATCH_DOCUMENTS = 256  # that a tokenizer takes at once


@dataclass(frozen=True)
class Encoder:
    """Decides on the split of documents, and tokenizes them, in a process of its own perhaps.

    Of each document: its split, None where it is left out; BOS, ids and EOS as bytes of `dtype`; its size in
    UTF-8; whether it is held out and its ids do not give it back. holdout None: all are held out.
    """

    tokenizer: TextTokenizer
    dtype: str
    holdout: HoldOut | None

    def __call__(self, batch: dict[str, list[str]]) -> dict[str, list[Any]]:
        texts = batch["text"]
        splits = [self._split_of(text) for text in texts]
        wanted = [text if split else "" for text, split in zip(texts, splits, strict=True)]
        ids = self.tokenizer.encode_documents(wanted)
        return {
            "split": splits,
            "ids": [x.astype(DTYPES[self.dtype]).tobytes() for x in ids],
            "bytes": [len(text.encode()) if text.strip() else 0 for text in texts],
            "altered": [
                split == "val" and self.tokenizer.decode(x) != text
                for text, split, x in zip(texts, splits, ids, strict=True)
            ],
        }

    def _split_of(self, text: str) -> Split | None:
        if not text.strip():
            return None
        return "val" if self.holdout is None else self.holdout.split_of(text)


def encoded(documents: Iterator[str], encode: Encoder, workers: int) -> Iterator[list[dict[str, Any]]]:
    """Yields what `encode` makes of the documents, in their order, some at a time.

    A block of documents is read, and divided among at most `workers` processes by `Dataset.map`.
    """
    datasets = quiet_datasets()
    columns = {"split": "string", "ids": "binary", "bytes": "int64", "altered": "bool"}
    features = datasets.Features({name: datasets.Value(dtype) for name, dtype in columns.items()})
    for block in _blocks(documents, workers * BLOCK_CHARACTERS):
        processes = min(workers, -(-sum(map(len, block)) // WORTH_A_WORKER), len(block))
        try:
            with one_thread():
                rows = datasets.Dataset.from_dict({"text": block}).map(
                    encode,
                    batched=True,
                    batch_size=BATCH_DOCUMENTS,
                    num_proc=processes if processes > 1 else None,
                    remove_columns=["text"],
                    features=features,
                )
        except RuntimeError as error:
            if "abruptly died" not in str(error):
                raise
            raise DataError(
                "a process that tokenizes ended by itself, as when memory runs out; run the same command "
                "again, or give fewer data.workers"
            ) from error
        for start in range(0, len(rows), BATCH_DOCUMENTS):
            yield rows.select(range(start, min(start + BATCH_DOCUMENTS, len(rows)))).to_list()


def _blocks(documents: Iterator[str], characters: int) -> Iterator[list[str]]:
    block: list[str] = []
    length = 0
    for text in documents:
        block.append(text)
        length += len(text)
        if length >= characters:
            yield block
            block, length = [], 0
    if block:
        yield block


def usable_cores() -> int:
    """Returns how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def one_thread() -> Iterator[None]:
    """Within `with`, `tokenizers` computes in the calling thread alone."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before
