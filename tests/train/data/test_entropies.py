"""Baselines are what they are said to be: recomputed here the slow way, from the text itself."""

import json
import lzma
import math
import random
import zlib
from collections import Counter

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from delta_trn.train.data import entropies
from delta_trn.train.data.dataset import open_dataset
from delta_trn.train.data.entropies import baselines, documents, leading_text
from delta_trn.train.settings.errors import DiskFull
from tests.support.corpus import prepare_text, write_jsonl

WORDS = ["alpha", "beta", "gamma", "delta", "épsilon", "zeta", "eta", "theta"]


def write(path):
    words = random.Random(0)
    weights = [2**-i for i in range(8)]
    return write_jsonl(
        path, (" ".join(words.choices(WORDS, weights, k=i % 55 + 5)) for i in range(200))
    )


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    root = tmp_path_factory.mktemp("entropies")
    settings = {"tokenizer": "bytebpe", "vocab_size": 280, "val_fraction": 0.2}
    return open_dataset(prepare_text(write(root / "c.jsonl"), root / "out", **settings))


@pytest.fixture(scope="module")
def costs(dataset):
    return baselines(dataset)


def test_unigram_baseline_is_the_mean_code_length_of_held_out_tokens(dataset, costs):
    counts = Counter(int(i) for tokens in dataset.shards("train") for i in tokens)
    total = sum(counts.values()) + dataset.tokenizer.size
    lengths = [-math.log((counts[int(i)] + 1) / total) for x in dataset.shards("val") for i in x]
    assert costs["unigram"].nats_per_token == pytest.approx(
        math.fsum(lengths) / len(lengths), rel=1e-12
    )
    assert costs["uniform"].nats_per_token == pytest.approx(math.log(280))


def test_compressors_have_the_held_out_text_and_nothing_else(dataset, costs):
    text = b"".join(dataset.tokenizer.decode(ids).encode() for ids in documents(dataset, "val"))
    assert len(text) == dataset.split("val").bytes == costs["zlib"].bytes
    assert costs["zlib"].bits_per_byte == pytest.approx(8 * len(zlib.compress(text, 9)) / len(text))
    assert (
        len(lzma.compress(text, preset=9)) - 80
        < costs["lzma"].bits_per_byte * len(text) / 8
        <= len(text)
    )


def test_lzma_gains_from_training_text_and_not_from_the_subtraction(dataset, costs, monkeypatch):
    assert costs["lzma_primed"].bits_per_byte < costs["lzma"].bits_per_byte
    noise = random.Random(0).randbytes(dataset.split("train").bytes)
    original = entropies.leading_text
    monkeypatch.setattr(
        entropies,
        "leading_text",
        lambda d, split, n: noise if split == "train" else original(d, split, n),
    )
    assert (
        entropies._measure(dataset)["lzma_primed"].bits_per_byte
        > costs["lzma_primed"].bits_per_byte
    )


def test_nats_and_bits_convert_both_ways(dataset, costs):
    meta = dataset.split("val")
    for cost in costs.values():
        assert cost.bits_per_byte * meta.bytes * math.log(2) == pytest.approx(
            cost.nats_per_token * meta.tokens
        )
        assert dataset.nats_per_token(cost.bits_per_byte) == pytest.approx(cost.nats_per_token)
        assert dataset.bits_per_byte(cost.nats_per_token) == pytest.approx(cost.bits_per_byte)


def test_baselines_are_computed_once_and_again_for_other_data_or_another_version(
    dataset, costs, monkeypatch
):
    path = dataset.path / "baselines.json"
    for content in ("{", "[]", json.dumps({"dataset": "other", "baselines": {}})):
        path.write_text(content)
        assert baselines(dataset) == costs
        assert json.loads(path.read_text())["dataset"] == dataset.fingerprint
    path.unlink()
    monkeypatch.setattr(entropies, "write_file", _refuse)
    assert baselines(dataset) == costs and not path.exists(), "a read-only folder has no cache"
    monkeypatch.undo()
    baselines(dataset)
    monkeypatch.setattr(entropies, "_measure", None)  # calling it would raise
    assert baselines(dataset) == costs


def _refuse(*args):
    raise DiskFull("read-only")


def test_a_tokenizer_that_loses_text_has_no_compressors(tmp_path):
    vocab = {"<unk>": 0, **{word: i + 1 for i, word in enumerate(WORDS[:4])}}
    lossy = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    lossy.pre_tokenizer = pre_tokenizers.Whitespace()
    lossy.save(str(tmp_path / "tokenizer.json"))
    source = write(tmp_path / "c.jsonl")
    dataset = open_dataset(
        prepare_text(source, tmp_path / "out", tokenizer=str(tmp_path / "tokenizer.json"))
    )
    assert not dataset.meta.tokenizer.lossless
    assert set(baselines(dataset)) == {"uniform", "unigram"}


def test_leading_text_keeps_documents_whole(dataset):
    texts = [dataset.tokenizer.decode(ids) for ids in documents(dataset, "train")]
    assert leading_text(dataset, "train", 1) == texts[0].encode()
    assert (
        leading_text(dataset, "train", len(texts[0].encode()) + 1) == (texts[0] + texts[1]).encode()
    )
    assert leading_text(dataset, "train", 10**9) == "".join(texts).encode()
