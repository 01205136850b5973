"""Which documents are held out: chosen by their text, so that copies of a document share a split."""

import hashlib
from itertools import islice

from delta_trn.train.data.dataset import Split
from delta_trn.train.data.sources import Source


def text_hash(text: str, seed: int) -> int:
    """Returns 64 bits of BLAKE2b of the text, keyed by the seed."""
    digest = hashlib.blake2b(text.encode(), digest_size=8, key=seed.to_bytes(8, "little", signed=True))
    return int.from_bytes(digest.digest(), "little")


class HoldOut:
    """Decides a document's split.

    With a fraction: held out if its hash is among the lowest `fraction` of all hashes. So that a small source
    has held-out text too, the lowest hash of its first 1/fraction documents is held out in any case.
    With a validation source: everything is for training, except what that source also has.
    """

    def __init__(self, seed: int, fraction: float | None, validation: Source | None):
        self._seed, self._fraction, self._validation = seed, fraction, validation
        self._below = int((fraction or 0.0) * 2**64)
        self._lowest: int | None = None
        self._validation_hashes: set[int] | None = None

    def restore(self, lowest: int | None) -> bool:
        """Restores an earlier choice. Returns False if `choose` must be called."""
        self._lowest = lowest
        return self._validation is None and lowest is not None

    def choose(self, source: Source, max_documents: int | None) -> int | None:
        """Reads the first documents, or the whole validation source. Returns what `restore` needs."""
        if self._validation is not None:
            self._validation_hashes = self._hashes(self._validation, None)
            return None
        assert self._fraction is not None
        first = round(1 / self._fraction)
        hashes = self._hashes(source, min(first, max_documents or first))
        # a single document is for training: the error that follows says that one cannot be split
        self._lowest = min(hashes) if len(hashes) > 1 else -1
        return self._lowest

    def split_of(self, text: str) -> Split | None:
        """Returns the document's split, or None if the validation source has it too."""
        value = text_hash(text, self._seed)
        if self._validation_hashes is not None:
            return None if value in self._validation_hashes else "train"
        return "val" if value < self._below or value == self._lowest else "train"

    def _hashes(self, source: Source, count: int | None) -> set[int]:
        reader = source.reader()
        hashes = {text_hash(text, self._seed) for text in islice(reader, count) if text.strip()}
        reader.close()
        return hashes
