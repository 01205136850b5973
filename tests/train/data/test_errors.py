"""What can be wrong with a folder of shards: each damage is refused by path, with what to do about it."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from delta_trn.train.data import evaluation_batches, make_loader, open_dataset
from delta_trn.train.data.shards import HEADER_BYTES, encode_header
from delta_trn.train.files import sha256_of
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


def header(folder: Path, word: int, value: int, file: str = TRAIN):
    raw = bytearray((folder / file).read_bytes())
    raw[4 * word : 4 * word + 4] = np.array([value], "<i4").tobytes()
    (folder / file).write_bytes(raw)


def meta(folder: Path, change):
    content = json.loads((folder / "meta.json").read_text())
    change(content)
    (folder / "meta.json").write_text(json.dumps(content))


def record_hash(folder: Path, split: str, sha256: str | None):
    meta(folder, lambda m: m["splits"][split]["shards"][0].update(sha256=sha256))


def flip(path: Path):
    """Changes one bit of one token, which leaves the file's size and header as they are."""
    raw = bytearray(path.read_bytes())
    raw[HEADER_BYTES + 20] ^= 1
    path.write_bytes(raw)


def name_shard(folder: Path, name: str):
    meta(folder, lambda m: m["splits"]["train"]["shards"][0].update(file=name))


def cut(path: Path, size: int):
    path.write_bytes(path.read_bytes()[:size])


def widen(folder: Path):
    raw = (folder / VAL).read_bytes()
    (folder / VAL).write_bytes(
        raw[:HEADER_BYTES] + np.frombuffer(raw[HEADER_BYTES:], "<u2").astype("<u4").tobytes()
    )


def out_of_vocabulary(folder: Path, file: str = TRAIN):
    tokens = np.fromfile(folder / file, "<u2", offset=HEADER_BYTES)
    tokens[100:] = 999
    (folder / file).write_bytes(encode_header(len(tokens)) + tokens.tobytes())
    split = "val" if file == VAL else "train"
    record_hash(folder, split, sha256_of(folder / file))


def empty(folder: Path):
    (folder / VAL).write_bytes(encode_header(0))
    meta(folder, lambda m: m["splits"]["val"].update(tokens=0))
    meta(folder, lambda m: m["splits"]["val"]["shards"][0].update(tokens=0))


def one_more(folder: Path):
    path = folder / VAL
    path.write_bytes(path.read_bytes() + b"\0\0")


# fmt: off
ON_OPENING = [
    (lambda f: shutil.rmtree(f), r"meta\.json is missing, so nothing was prepared there to its end; make"),
    (lambda f: cut(f / "meta.json", 100), r"cannot be used: the file: invalid json.*prepare the data again"),
    (lambda f: meta(f, lambda m: m.pop("bos_id")), r"meta\.json cannot be used: bos_id: field required"),
    (lambda f: meta(f, lambda m: m.update(format=2)), r"json cannot be used: format: input should be 1"),
    (lambda f: (f / TRAIN).unlink(), r"corpus_train_000001\.bin is missing; run .* again"),
    (lambda f: cut(f / TRAIN, 4000), r"is truncated: 4000 bytes, but \d+ tokens of uint16 .*; copy it again"),
    (lambda f: cut(f / TRAIN, 1000), r"train_000001\.bin is truncated: 1000 bytes"),
    (one_more, r"val_000000\.bin is too long: \d+ bytes"),
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


@pytest.mark.parametrize("kind", ["random_crop", "stream"])
def test_a_token_out_of_the_vocabulary_is_refused_before_the_model_sees_it(folder, kind):
    out_of_vocabulary(folder)
    dataset = open_dataset(folder)  # headers and sizes are right
    loader = make_loader(dataset, "train", kind=kind, batch=4, sequence=64, seed=0)
    with pytest.raises(
        ShardError, match=r"train_000001\.bin has token id 999 at position \d+, but vocab_size is 320"
    ):
        for _ in range(50):
            loader.next_batch()


def test_an_error_about_a_token_names_its_position(folder):
    out_of_vocabulary(folder, VAL)
    with pytest.raises(ShardError, match=r"val_000000\.bin has token id 999 at position 100,"):
        evaluation_batches(open_dataset(folder), batch=8, sequence=32, batches=8)
    with pytest.raises(ShardError, match=r"val_000000\.bin has token id 999 at position 100,"):
        open_dataset(folder).check_tokens()


def test_check_tokens_finds_a_token_changed_after_opening(folder):
    dataset = open_dataset(folder)
    flip(folder / TRAIN)
    with pytest.raises(ShardError, match=r"changed since it was prepared \(sha256 differs\)"):
        dataset.check_tokens()


def test_the_tokenizer_of_other_shards_is_refused(folder):
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace("<|pad|>", "<|padding|>"))
    config = folder / "tokenizer_config.json"
    config.write_text(config.read_text().replace("<|pad|>", "<|padding|>"))
    with pytest.raises(ShardError, match=r"tokenizer\.json is not the one the shards were made with"):
        open_dataset(folder).tokenizer.decode([1])
