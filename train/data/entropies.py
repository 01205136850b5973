"""What to compare a language model's loss with: predictors without context, and compressors.

All are measured on the same held-out text, in nats per token, BOS and EOS included, and in bits per
byte of UTF-8. With n tokens and m bytes:

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
    """What one predictor pays for the first `bytes` of the held-out text.

    bits_per_byte   None where the tokenizer loses text
    """

    nats_per_token: float
    bits_per_byte: float | None
    bytes: int


def baselines(dataset: TokenDataset) -> dict[str, Baseline]:
    """Returns costs of the held-out text by name, and keeps them in baselines.json beside the
    shards.

    uniform       ln of the number of ids
    unigram       -mean ln p(token) over held-out tokens, p from training counts + 1, over the
                  tokenizer's ids
    zlib          level 9, on the held-out documents one after the other, nothing seen before
    lzma          LZMA2, preset 9 extreme, the same
    lzma_primed   the same after 16 MiB of training text: C(training + held-out) - C(training) with
                  C the compressed size. It is the fair comparison for a trained model, which has
                  seen that text

    The compressors are left out if the tokenizer does not give the held-out text back unchanged:
    the shards then lack what they would have to compress.
    """
    path = dataset.path / "baselines.json"
    # none yet, or another version wrote it
    with suppress(OSError, ValueError, KeyError, TypeError):
        saved = json.loads(path.read_bytes())
        if saved["dataset"] == dataset.fingerprint:
            kept = {name: Baseline(**values) for name, values in saved["baselines"].items()}
            # an earlier version gave bits per byte of text that the tokenizer had lost
            if all(
                (x.bits_per_byte is None) != dataset.meta.tokenizer.lossless for x in kept.values()
            ):
                return kept
    costs = _measure(dataset)
    values = {name: asdict(value) for name, value in costs.items()}
    with suppress(DiskFull):  # a shared, read-only folder: they are computed again next time
        content = {"dataset": dataset.fingerprint, "baselines": values}
        write_file(path, json.dumps(content, indent=2) + "\n")
    return costs


def _measure(dataset: TokenDataset) -> dict[str, Baseline]:
    ids, train, val = (
        dataset.meta.tokenizer.size,
        _counts(dataset, "train"),
        _counts(dataset, "val"),
    )
    log_p = np.log(train[:ids] + 1.0) - math.log(train.sum() + ids)
    nats = {"uniform": math.log(ids), "unigram": float(-(val[:ids] * log_p).sum() / val.sum())}
    size = dataset.split("val").bytes
    costs = {name: Baseline(cost, dataset.bits_per_byte(cost), size) for name, cost in nats.items()}
    if not dataset.meta.tokenizer.lossless:
        return costs
    text = leading_text(dataset, "val", COMPRESSED_BYTES)
    priming = leading_text(dataset, "train", PRIMING_BYTES)
    with ThreadPoolExecutor(2) as threads:  # 6 s each for 9 MB; liblzma releases the interpreter
        both, before = threads.map(_lzma_size, [priming + text, priming])
    sizes = {
        "zlib": len(zlib.compress(text, 9)),
        "lzma": _lzma_size(text),
        "lzma_primed": both - before,
    }
    for name, compressed in sizes.items():
        bits = 8 * compressed / len(text)
        costs[name] = Baseline(dataset.nats_per_token(bits), bits, len(text))
    return costs


def leading_text(dataset: TokenDataset, split: Split, limit: int) -> bytes:
    """Returns the UTF-8 of the split's first whole documents, as many as reach `limit` bytes."""
    text = bytearray()
    for ids in documents(dataset, split):
        if len(text) >= limit:
            break
        text += dataset.tokenizer.decode(ids).encode()
    return bytes(text)


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
    rows, left = dataset.meta.vocab_size, UNIGRAM_TOKENS
    counts = np.zeros(rows, np.int64)
    for shard, tokens in zip(dataset.split(split).shards, dataset.shards(split), strict=True):
        for start in range(0, min(len(tokens), left), 1 << 22):
            block = tokens[start : min(start + (1 << 22), left)]
            check_ids(block, rows, dataset.path / shard.file, start)
            counts += np.bincount(block, minlength=rows)
        left -= min(len(tokens), left)
    return counts


def _lzma_size(text: bytes) -> int:
    return len(lzma.compress(text, format=lzma.FORMAT_RAW, filters=_LZMA))
