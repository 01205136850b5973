"""What to compare a language model's loss with: predictors without context, and compressors.

All are measured on the same held-out text, in nats per token, BOS and EOS included, and in bits per byte of
UTF-8. With n tokens and m bytes:

    bits/byte = nats/token * n / (m ln 2)
"""

import json
import lzma
import math
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import islice

import numpy as np

from delta_trn.train.data.dataset import TokenDataset, check_ids
from delta_trn.train.data.shards import Split
from delta_trn.train.files import write_file
from delta_trn.train.settings.errors import DiskFull

UNIGRAM_TOKENS = 2**28  # of each split; more tokens do not change the frequencies
COMPRESSED_BYTES = 2**24  # of held-out text; LZMA's best preset takes half a minute for them
PRIMING_BYTES = 2**24  # of training text
# a dictionary of 64 MiB reaches back over all of the priming text
_LZMA = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME}]


@dataclass(frozen=True)
class Baseline:
    """What one predictor pays for the held-out text.

    saw     what it was allowed to see before
    bytes   how much held-out text it was measured on, from the beginning
    """

    nats_per_token: float
    bits_per_byte: float
    saw: str
    bytes: int


def baselines(dataset: TokenDataset) -> dict[str, Baseline]:
    """Returns costs of the held-out text by name, and keeps them in baselines.json beside the shards.

    uniform       ln of the number of ids
    unigram       -mean ln p(token) over held-out tokens, p from training counts + 1, over the tokenizer's ids
    zlib          level 9, on the held-out documents one after the other, nothing seen before
    lzma          LZMA2, preset 9 extreme, the same
    lzma_primed   the same after 16 MiB of training text: C(training + held-out) - C(training) with C the
                  compressed size. It is the fair comparison for a trained model, which has seen that text

    The compressors are left out if the tokenizer does not give the held-out text back unchanged: the shards
    then lack what they would have to compress.
    """
    path = dataset.path / "baselines.json"
    if path.exists():
        try:
            saved = json.loads(path.read_bytes())
            if saved["dataset"] == dataset.fingerprint:
                return {name: Baseline(**values) for name, values in saved["baselines"].items()}
        except (ValueError, KeyError, TypeError):
            pass  # another version wrote it; it is only a cache
    costs = _measure(dataset)
    content = {
        "dataset": dataset.fingerprint,
        "baselines": {name: asdict(value) for name, value in costs.items()},
    }
    with suppress(DiskFull):  # a shared, read-only folder: they are computed again next time
        write_file(path, json.dumps(content, indent=2) + "\n")
    return costs


def unigram_nats(train: np.ndarray, val: np.ndarray, ids: int) -> float:
    """Returns nats per token of `val` under `train`'s frequencies plus one; counts by id, [>= ids]."""
    log_p = np.log(train[:ids] + 1.0) - math.log(train.sum() + ids)
    return float(-(val[:ids] * log_p).sum() / val.sum())


def _measure(dataset: TokenDataset) -> dict[str, Baseline]:
    val, ids = dataset.split("val"), dataset.meta.tokenizer.size

    def from_nats(nats: float, saw: str) -> Baseline:
        return Baseline(nats, dataset.bits_per_byte(nats), saw, val.bytes)

    def from_size(size: int, text: bytes, saw: str) -> Baseline:
        bits = 8 * size / len(text)
        return Baseline(dataset.nats_per_token(bits), bits, saw, len(text))

    nats = unigram_nats(_counts(dataset, "train"), _counts(dataset, "val"), ids)
    costs = {
        "uniform": from_nats(math.log(ids), "the vocabulary"),
        "unigram": from_nats(nats, "counts of training tokens"),
    }
    if not dataset.meta.tokenizer.lossless:
        return costs
    text = leading_text(dataset, "val", COMPRESSED_BYTES)
    priming = leading_text(dataset, "train", PRIMING_BYTES)
    with ThreadPoolExecutor(2) as threads:  # 6 s each for 9 MB; liblzma releases the interpreter
        both, before = threads.map(_lzma_size, [priming + text, priming])
    costs["zlib"] = from_size(len(zlib.compress(text, 9)), text, "nothing")
    costs["lzma"] = from_size(_lzma_size(text), text, "nothing")
    costs["lzma_primed"] = from_size(both - before, text, f"the first {len(priming)} bytes of training text")
    return costs


def leading_text(dataset: TokenDataset, split: Split, limit: int) -> bytes:
    """Returns the UTF-8 of the split's first whole documents, as many as reach `limit` bytes."""
    parts: list[bytes] = []
    size = 0
    pending = documents(dataset, split)
    while size < limit and (batch := list(islice(pending, 256))):
        for text in dataset.tokenizer.decode_documents(batch):
            if size >= limit:
                break
            parts.append(text.encode())
            size += len(parts[-1])
    return b"".join(parts)


def documents(dataset: TokenDataset, split: Split) -> Iterator[list[int]]:
    """Yields the split's documents in order, as ids without BOS and EOS."""
    for tokens in dataset.shards(split):
        # EOS ends every document and is never inside one
        start = 0
        for block in range(0, len(tokens), 1 << 22):
            for at in np.flatnonzero(tokens[block : block + (1 << 22)] == dataset.meta.eos_id):
                end = block + int(at)
                yield tokens[start + 1 : end].tolist()
                start = end + 1


def _counts(dataset: TokenDataset, split: Split) -> np.ndarray:
    counts = np.zeros(dataset.vocab_size, np.int64)
    left = UNIGRAM_TOKENS
    for shard, tokens in zip(dataset.split(split).shards, dataset.shards(split), strict=True):
        for start in range(0, min(len(tokens), left), 1 << 22):
            block = tokens[start : min(start + (1 << 22), left)]
            check_ids(block, dataset.vocab_size, dataset.path / shard.file, start)
            counts += np.bincount(block, minlength=dataset.vocab_size)
        left -= min(len(tokens), left)
    return counts


def _lzma_size(text: bytes) -> int:
    return len(lzma.compress(text, format=lzma.FORMAT_RAW, filters=_LZMA))
