"""Turns batches of documents into tokens, in this process or in several, in the order of the batches.

One process reads: nine tenths of the work and more are the tokenizer's. So one file keeps all workers busy,
whatever it is packed with, and a reader's position is the same however many workers there are. A worker is a
Python process that reads batches from a pipe and ends when the pipe does, as when its parent was killed.
"""

import os
import pickle
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np

from delta_trn.train.data.dataset import Split
from delta_trn.train.data.holdout import HoldOut
from delta_trn.train.data.tokenizer import TextTokenizer
from delta_trn.train.settings.errors import DataError

T = TypeVar("T")

_SERVE = (
    "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); "
    "from delta_trn.train.data.workers import serve; serve()"
)


class Document(NamedTuple):
    """A document with text: its split, or None if it is left out; BOS, ids, EOS; and its size in UTF-8.

    altered   whether it is held out and its ids do not give it back
    """

    split: Split | None
    ids: np.ndarray
    bytes: int
    altered: bool


@dataclass(frozen=True)
class Encoder:
    """Decides on the split of every document with text, and tokenizes it. holdout None: all are held out."""

    tokenizer: TextTokenizer
    dtype: str
    holdout: HoldOut | None

    def __call__(self, texts: list[str]) -> list[Document]:
        texts = [text for text in texts if text.strip()]
        splits: list[Split | None] = [
            "val" if self.holdout is None else self.holdout.split_of(x) for x in texts
        ]
        encoded = iter(self.tokenizer.encode_documents([x for x, s in zip(texts, splits, strict=True) if s]))
        documents = []
        for text, split in zip(texts, splits, strict=True):
            ids = next(encoded) if split else np.zeros(0, np.uint32)
            altered = split == "val" and self.tokenizer.decode(ids) != text
            documents.append(Document(split, ids.astype(self.dtype), len(text.encode()), altered))
        return documents


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


def encoded(
    encode: Encoder, batches: Iterable[tuple[list[str], T]], workers: int
) -> Generator[tuple[list[Document], T], None, None]:
    """Yields what `encode` makes of every batch, with what came with it, in the order of the batches.

    With one worker this process computes it. With more, at most three batches a worker are read ahead. An
    error in reading is raised after everything that was read before it.
    """
    if workers == 1:
        with one_thread():
            yield from ((encode(texts), tag) for texts, tag in batches)
        return
    pool, threads = _Workers(encode), ThreadPoolExecutor(workers)
    pending: deque[tuple[Future[list[Document]], T]] = deque()
    left, end = iter(batches), None
    try:
        while pending or end is None:
            while end is None and len(pending) < 3 * workers:
                try:
                    texts, tag = next(left)
                    pending.append((threads.submit(pool, texts), tag))
                except Exception as error:  # StopIteration, or what the reader raises
                    end = error
            if pending:
                future, tag = pending.popleft()
                yield future.result(), tag
        if not isinstance(end, StopIteration):
            raise end
    finally:
        pool.end()
        threads.shutdown(cancel_futures=True)


class _Workers:
    """Calls the worker process that belongs to the calling thread, and starts it at the first call."""

    def __init__(self, encode: Encoder):
        self._encoder = pickle.dumps(encode)
        self._mine = threading.local()
        self._processes: list[subprocess.Popen[bytes]] = []

    def __call__(self, texts: list[str]) -> list[Document]:
        process = getattr(self._mine, "process", None) or self._start()
        assert process.stdin is not None and process.stdout is not None
        try:
            pickle.dump(texts, process.stdin)
            process.stdin.flush()
            answer = pickle.load(process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError, ValueError) as error:
            raise DataError(
                f"a worker process ended by itself (status {process.poll()}), as when memory runs out; "
                "run the same command again, it continues, or give fewer workers"
            ) from error
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def end(self) -> None:
        """Ends all worker processes, whatever they are doing."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with suppress(OSError):
                    pipe.close()  # type: ignore[union-attr]

    def _start(self) -> "subprocess.Popen[bytes]":
        process = subprocess.Popen(
            [sys.executable, "-c", _SERVE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
        )
        self._processes.append(process)
        self._mine.process = process
        assert process.stdin is not None
        pickle.dump(sys.path, process.stdin)
        process.stdin.write(self._encoder)
        return process


def serve() -> None:
    """Answers batches on standard input until it ends. The first thing there is the encoder."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not stand between two answers
    encode = pickle.load(sys.stdin.buffer)
    while True:
        try:
            texts = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer = encode(texts)
        except Exception as error:
            answer = error
        pickle.dump(answer, answers)
        answers.flush()
