"""Shards of a small corpus have the bytes that this project has always written, per format and tokenizer."""

import hashlib
import random

import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from delta_trn.train.data import open_dataset
from delta_trn.train.data.tokenizer import byte_alphabet
from tests.support.corpus import prepare_text, write_jsonl

WORDS = ["alpha", "délta", "漢字", "🙂", "\treturn", "\r\n", "\n", "2020-01-01", "\u2028", "\x0b", "\x85"]


def texts() -> list[str]:
    numbers = random.Random(7)
    return [
        "2020-01-01",
        "",
        *(" ".join(numbers.choices(WORDS, k=numbers.randint(1, 90))) for _ in range(98)),
    ]


def write(path):
    """Writes the texts in the format of the path's name, with both kinds of line ends."""
    if path.suffix == ".jsonl":
        return write_jsonl(path, texts())
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": texts()}), path, row_group_size=30)
        return path
    separator = {"sections": "\r\n<|endoftext|>\n", "book": "\r\n\r\n"}[path.stem]
    path.write_bytes(separator.join(texts() * 3).encode())
    return path


def tokenizer_file(path):
    """Writes a tokenizer with one merge, and special tokens of its own."""
    vocab = {token: i for i, token in enumerate(["<s>", "</s>", *byte_alphabet(), "al"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "l")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path))
    return str(path)


GOLDENS = {
    ("sections.txt", "bytes"): "15e5fe4f8ee9604c",
    ("book.txt", "bytes"): "1676e37ac54522e1",
    ("rows.jsonl", "bytes"): "3353c2aa4cf298c6",
    ("rows.parquet", "bytes"): "3353c2aa4cf298c6",
    ("sections.txt", "bytebpe"): "0b2d9d6ad53bad6d",
    ("book.txt", "bytebpe"): "f1c7a5a252a0765b",
    ("rows.jsonl", "bytebpe"): "264d862c5e5292af",
    ("rows.parquet", "bytebpe"): "264d862c5e5292af",
    ("sections.txt", "file"): "84eeecca9d31d807",
    ("book.txt", "file"): "3af17c597da3ed98",
    ("rows.jsonl", "file"): "2c118917038b15fb",
    ("rows.parquet", "file"): "2c118917038b15fb",
}


@pytest.mark.parametrize("name", ["sections.txt", "book.txt", "rows.jsonl", "rows.parquet"])
@pytest.mark.parametrize("tokenizer", ["bytes", "bytebpe", "file"])
def test_shards_have_the_golden_bytes(tmp_path, name, tokenizer):
    settings = {"tokenizer": tokenizer, "shard_tokens": 5000, "val_fraction": 0.2}
    if tokenizer == "bytebpe":
        settings["vocab_size"] = 300
    elif tokenizer == "file":
        settings["tokenizer"] = tokenizer_file(tmp_path / "tokenizer.json")
    out = prepare_text(write(tmp_path / name), tmp_path / "out", **settings)
    digest = hashlib.sha256()
    for shard in sorted(out.glob("*.bin")):
        digest.update(shard.name.encode() + shard.read_bytes())
    assert digest.hexdigest()[:16] == GOLDENS[name, tokenizer]
    open_dataset(out).check_tokens()
