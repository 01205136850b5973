"""What can be wrong with a folder of shards: each damage is refused by path,
with what to do about it.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from delta_trn.train.data.dataset import open_dataset
from delta_trn.train.data.loader import evaluation_batches, make_loader
from delta_trn.train.data.shards import HEADER_BYTES, encode_header
from delta_trn.train.settings.errors import ShardError
from tests.support.corpus import prepare_text, write_jsonl

TRAIN, VAL = "corpus_train_000001.bin", "corpus_val_000000.bin"
TEXTS = [f"document {i} " * 20 for i in range(60)]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    root = tmp_path_factory.mktemp("errors")
    return prepare_text(write_jsonl(root / "corpus.jsonl", TEXTS), root / "out")


@pytest.fixture
def folder(prepared, tmp_path):
    return Path(shutil.copytree(prepared, tmp_path / "data"))


def put(path: Path, at: int, content: bytes):
    raw = path.read_bytes()
    path.write_bytes(raw[:at] + content + raw[at + len(content) :])


def header(folder: Path, word: int, value: int):
    put(folder / TRAIN, 4 * word, np.array([value], "<i4").tobytes())


def meta(folder: Path, change):
    content = json.loads((folder / "meta.json").read_text())
    change(content)
    (folder / "meta.json").write_text(json.dumps(content))


def name_shard(folder: Path, name: str):
    meta(folder, lambda m: m["splits"]["train"]["shards"][0].update(file=name))


def cut(path: Path, size: int):
    path.write_bytes(path.read_bytes()[:size])


def widen(folder: Path):
    tokens = np.fromfile(folder / VAL, "<u2", offset=HEADER_BYTES)
    put(folder / VAL, HEADER_BYTES, tokens.astype("<u4").tobytes())


def empty(folder: Path):
    (folder / VAL).write_bytes(encode_header(0))
    meta(folder, lambda m: m["splits"]["val"].update(tokens=0))
    meta(folder, lambda m: m["splits"]["val"]["shards"][0].update(tokens=0))


# fmt: off
ON_OPENING = [
    (lambda f: shutil.rmtree(f), r"meta\.json is missing, so nothing was prepared there to its end; make"),
    (lambda f: cut(f / "meta.json", 100), r"cannot be used: the file: invalid json.*prepare the data again"),
    (lambda f: meta(f, lambda m: m.pop("bos_id")), r"meta\.json cannot be used: bos_id: field required"),
    (lambda f: meta(f, lambda m: m.update(format=2)), r"json cannot be used: format: input should be 1"),
    (lambda f: (f / TRAIN).unlink(), r"corpus_train_000001\.bin is missing; run .* again"),
    (lambda f: cut(f / TRAIN, 4000), r"is truncated: 4000 bytes, but \d+ tokens of uint16 .*; copy it again"),
    (lambda f: cut(f / TRAIN, 1000), r"train_000001\.bin is truncated: 1000 bytes"),
    (lambda f: put(f / VAL, (f / VAL).stat().st_size, b"00"), r"val_000000\.bin is too long: \d+ bytes"),
    (widen, r"val_000000\.bin is too long: \d+ bytes, but \d+ tokens of uint16"),
    (lambda f: header(f, 0, 7), r"starts with 7, 1, \d+ where a shard has the magic number 20240520"),
    (lambda f: header(f, 1, 2), r"starts with 20240520, 2, .* version 1 and"),
    (lambda f: header(f, 2, 9), r"starts with 20240520, 1, 9 .* by meta\.json, \d+ tokens"),
    (empty, r"has no tokens in split 'val'"),
    (lambda f: meta(f, lambda m: m["splits"].pop("val")), r"has no tokens in split 'val'"),
    (lambda f: name_shard(f, "../x.bin"), r"shards\.0\.file: string should match pattern"),
    (lambda f: name_shard(f, "/tmp/x.bin"), r"shards\.0\.file: string should match pattern"),
    (lambda f: name_shard(f, "a\0b.bin"), r"shards\.0\.file: string should match pattern"),
]
# fmt: on


@pytest.mark.parametrize(("damage", "message"), ON_OPENING)
def test_open_dataset_refuses_a_damaged_folder(folder, damage, message):
    open_dataset(folder)
    damage(folder)
    with pytest.raises(ShardError, match=message):
        open_dataset(folder)


READERS = {
    "random_crop": lambda data: make_loader(
        data, "val", batch=64, sequence=32, seed=0
    ).next_batch(),
    "stream": lambda data: make_loader(
        data, "val", kind="stream", batch=8, sequence=32, seed=0
    ).next_batch(),
    "evaluation": lambda data: evaluation_batches(data, batch=8, sequence=32, batches=8),
    "check": lambda data: data.check_tokens(),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_token_out_of_the_vocabulary_is_refused_before_the_model_sees_it(folder, reader):
    put(folder / VAL, HEADER_BYTES + 2 * 100, np.array([999], "<u2").tobytes())
    dataset = open_dataset(folder)  # headers and sizes are right
    message = r"val_000000\.bin has token id 999 at position 100, but vocab_size is 320"
    with pytest.raises(ShardError, match=message):
        READERS[reader](dataset)


def test_check_tokens_finds_a_token_changed_after_opening(folder):
    dataset = open_dataset(folder)
    put(folder / TRAIN, HEADER_BYTES + 20, b"?")
    with pytest.raises(ShardError, match=r"changed since it was prepared \(sha256 differs\)"):
        dataset.check_tokens()


def test_the_tokenizer_of_other_shards_is_refused(folder):
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace("<|pad|>", "<|padding|>"))
    config = folder / "tokenizer_config.json"
    config.write_text(config.read_text().replace("<|pad|>", "<|padding|>"))
    with pytest.raises(
        ShardError, match=r"tokenizer\.json is not the one the shards were made with"
    ):
        open_dataset(folder).tokenizer.decode([1])
