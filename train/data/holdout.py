"""Which documents are held out: chosen by their text, so that copies of a document share a split."""

import hashlib
from collections import Counter
from itertools import islice

from delta_trn.train.data.shards import Split
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

    def __init__(
        self, seed: int, fraction: float, source: Source, validation: Source | None, most: int | None
    ):
        """Reads the first documents of `source`, of which `most` are used, or the whole validation source."""
        self._seed, self._below, self._lowest = seed, int(fraction * 2**64), -1
        self._elsewhere: set[int] | None = None
        if validation is not None:
            self._elsewhere = self._hashes(validation, None)
            return
        first = round(1 / fraction)
        hashes = self._hashes(source, min(first, most or first))
        if len(hashes) > 1:  # a single document is for training: an error then says that it cannot be split
            self._lowest = min(hashes)

    def split_of(self, text: str) -> Split | None:
        """Returns the document's split, or None if the validation source has it too."""
        value = text_hash(text, self._seed)
        if self._elsewhere is not None:
            return None if value in self._elsewhere else "train"
        return "val" if value < self._below or value == self._lowest else "train"

    def _hashes(self, source: Source, count: int | None) -> set[int]:
        documents = islice(source.documents(Counter()), count)
        return {text_hash(text, self._seed) for text in documents if text.strip()}
