"""What a language model's loss is to be compared with: predictors without context, and compressors.

Everything is measured on the same held-out text and paid the same way: nats for each token, BOS and EOS among
them, and bits for each byte of UTF-8. With n tokens and m bytes,  bits/byte = nats/token * n / (m ln 2).
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

from delta_trn.train.data.dataset import Split, TokenDataset
from delta_trn.train.files import write_file
from delta_trn.train.settings.errors import DiskFull

UNIGRAM_TOKENS = 2**28  # of each split: a unigram model of more is the same model
COMPRESSED_BYTES = 2**24  # of held-out text: LZMA at its best takes half a minute for them
PRIMING_BYTES = 2**24  # of training text
# 64 MiB of dictionary: all of the priming text stays within reach
_LZMA = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME}]


@dataclass(frozen=True)
class Baseline:
    """One predictor's cost of the held-out text.

    saw     what it was allowed to see before
    bytes   of held-out text it was measured on, from the beginning
    """

    nats_per_token: float
    bits_per_byte: float
    saw: str
    bytes: int


def baselines(dataset: TokenDataset) -> dict[str, Baseline]:
    """Costs of the held-out text by name, cheapest predictor first; kept in baselines.json beside the shards.

    uniform       ln of the number of ids
    unigram       -mean ln p(token) over held-out tokens, p from training counts + 1, over the tokenizer's ids
    zlib          level 9, on the held-out documents one after the other, nothing seen before
    lzma          LZMA2, preset 9 extreme, the same
    lzma_primed   the same after training text: C(training + held-out) - C(training), C the compressed size.
                  The fair one to compare a trained model with: both have seen the training text (here, its
                  first 16 MiB)

    The compressors are left out where the tokenizer does not give the held-out text back as it was: then the
    shards do not hold what they would have to compress.
    """
    path = dataset.path / "baselines.json"
    if path.exists():
        try:
            saved = json.loads(path.read_bytes())
            if saved["dataset"] == dataset.fingerprint:
                return {name: Baseline(**values) for name, values in saved["baselines"].items()}
        except (ValueError, KeyError, TypeError):
            pass  # not what this version writes: it is only a cache
    found = _measure(dataset)
    content = {
        "dataset": dataset.fingerprint,
        "baselines": {name: asdict(value) for name, value in found.items()},
    }
    with suppress(DiskFull):  # a shared, read-only folder: they are computed again next time
        write_file(path, json.dumps(content, indent=2) + "\n")
    return found


def unigram_nats(train: np.ndarray, val: np.ndarray, ids: int) -> float:
    """Nats a token of `val` under add-one-smoothed frequencies of `train`; counts by id, [>= ids]."""
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
    found = {
        "uniform": from_nats(math.log(ids), "the vocabulary"),
        "unigram": from_nats(nats, "counts of training tokens"),
    }
    if not dataset.meta.tokenizer.lossless:
        return found
    text = leading_text(dataset, "val", COMPRESSED_BYTES)
    priming = leading_text(dataset, "train", PRIMING_BYTES)
    with ThreadPoolExecutor(2) as threads:  # 6 s each for 9 MB, and liblzma lets go of the interpreter
        both, before = threads.map(_lzma_size, [priming + text, priming])
    found["zlib"] = from_size(len(zlib.compress(text, 9)), text, "nothing")
    found["lzma"] = from_size(_lzma_size(text), text, "nothing")
    found["lzma_primed"] = from_size(both - before, text, f"the first {len(priming)} bytes of training text")
    return found


def leading_text(dataset: TokenDataset, split: Split, limit: int) -> bytes:
    """UTF-8 of the split's first whole documents, one after the other, until `limit` bytes are reached."""
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
    """The split's documents in order, as ids without BOS and EOS."""
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
    for tokens in dataset.shards(split):
        for start in range(0, min(len(tokens), left), 1 << 22):
            block = tokens[start : min(start + (1 << 22), left)]
            counts += np.bincount(block, minlength=dataset.vocab_size)
        left -= min(len(tokens), left)
    return counts


def _lzma_size(text: bytes) -> int:
    return len(lzma.compress(text, format=lzma.FORMAT_RAW, filters=_LZMA))
