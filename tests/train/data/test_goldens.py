"""Shards of a small corpus have the bytes that this project has always written,
per format and tokenizer.
"""

import csv
import hashlib
import random
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from delta_trn.train.data.dataset import open_dataset
from delta_trn.train.data.tokenizer import byte_alphabet
from tests.support.corpus import PACKERS, pack, prepare_text, write_jsonl

WORDS = [
    "alpha",
    "délta",
    "漢字",
    "🙂",
    "\treturn",
    "\r\n",
    "\n",
    "2020-01-01",
    "\u2028",
    "\x0b",
    "\x85",
]


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
    path.with_name("tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    return str(path)


GOLDENS = {
    ("sections.txt", "bytes"): "15e5fe4f8ee9604c",
    ("book.txt", "bytes"): "396961174e7ebd5d",
    ("rows.jsonl", "bytes"): "3353c2aa4cf298c6",
    ("rows.parquet", "bytes"): "3353c2aa4cf298c6",
    ("rows.jsonl", "bytebpe"): "264d862c5e5292af",
    ("sections.txt", "file"): "84eeecca9d31d807",
}


def digest(folder: Path) -> str:
    """Returns the first digits of a hash of all shards with their names."""
    found = hashlib.sha256()
    for shard in sorted(folder.glob("*.bin")):
        found.update(shard.name.encode() + shard.read_bytes())
    return found.hexdigest()[:16]


@pytest.mark.parametrize(("name", "tokenizer"), GOLDENS)
def test_shards_have_the_golden_bytes(tmp_path, name, tokenizer):
    settings = {"tokenizer": tokenizer, "shard_tokens": 5000, "val_fraction": 0.2}
    if tokenizer == "bytebpe":
        settings["vocab_size"] = 300
    elif tokenizer == "file":
        settings["tokenizer"] = tokenizer_file(tmp_path / "tokenizer.json")
    out = prepare_text(write(tmp_path / name), tmp_path / "out", **settings)
    assert digest(out) == GOLDENS[name, tokenizer]
    open_dataset(out).check_tokens()


@pytest.mark.parametrize("name", ["sections.txt", "book.txt", "rows.jsonl"])
def test_shards_of_a_packed_file_have_the_golden_bytes_of_the_file_in_it(tmp_path, name):
    path = write(tmp_path / name)
    for kind in PACKERS:
        out = tmp_path / kind
        prepare_text(pack(path, kind), out, tokenizer="bytes", shard_tokens=5000, val_fraction=0.2)
        assert digest(out) == GOLDENS[name, "bytes"], kind


def test_a_table_of_the_same_texts_has_the_golden_bytes_of_the_rows(tmp_path):
    """Line ends, quotes, commas and tabs inside of a cell are part of the text."""
    for suffix, delimiter in ((".csv", ","), (".tsv", "\t")):
        path = tmp_path / f"rows{suffix}"
        with path.open("w", encoding="utf-8-sig", newline="") as file:
            rows = csv.writer(file, delimiter=delimiter)
            rows.writerows([("n", "text"), *enumerate(texts())])
        for source in (path, pack(path, "gz")):
            out = tmp_path / f"{source.name}-out"
            prepare_text(source, out, tokenizer="bytes", shard_tokens=5000, val_fraction=0.2)
            assert digest(out) == GOLDENS["rows.jsonl", "bytes"]
