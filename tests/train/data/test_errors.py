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


def outside(folder: Path, link: bool = False) -> str:
    """Moves a shard out of the folder, and returns how meta.json may name it there."""
    (folder / TRAIN).rename(folder.parent / "x.bin")
    if link:
        (folder / "inside.bin").symlink_to(folder.parent / "x.bin")
    return "inside.bin" if link else "../x.bin"


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


ON_OPENING = [
    ("no folder", lambda f: shutil.rmtree(f), r"data is not a folder; make it with"),
    ("no meta", lambda f: (f / "meta.json").unlink(), r"meta\.json is missing; make it with"),
    (
        "half prepared",
        lambda f: (f / "meta.json").rename(f / ".unfinished"),
        r"data was not prepared to its end; run the same .* again",
    ),
    (
        "meta cut short",
        lambda f: cut(f / "meta.json", 100),
        r"meta\.json cannot be used: the file: invalid json.*prepare the data again",
    ),
    (
        "meta lacks",
        lambda f: meta(f, lambda m: m.pop("bos_id")),
        r"meta\.json cannot be used: bos_id: field required",
    ),
    (
        "meta of later",
        lambda f: meta(f, lambda m: m.update(format=2)),
        r"meta\.json has format 2, this code reads 1",
    ),
    ("missing shard", lambda f: (f / TRAIN).unlink(), r"corpus_train_000001\.bin is missing; run .* again"),
    (
        "truncated",
        lambda f: cut(f / TRAIN, 4000),
        r"train_000001\.bin is truncated: 4000 bytes, but \d+ tokens of uint16 .* make \d+; copy it again",
    ),
    ("too long", one_more, r"val_000000\.bin is too long: \d+ bytes"),
    ("only a header", lambda f: cut(f / TRAIN, 1024), r"train_000001\.bin is truncated: 1024 bytes"),
    ("half a header", lambda f: cut(f / TRAIN, 1000), r"holds 1000 bytes, less than its header of 1024"),
    (
        "wrong magic",
        lambda f: header(f, 0, 7),
        r"starts with 7, not with the magic number 20240520; it is not a token shard",
    ),
    ("wrong version", lambda f: header(f, 1, 2), r"has version 2, this code reads version 1"),
    ("negative count", lambda f: header(f, 2, -5), r"gives a count of -5 tokens, expected 0 or more"),
    ("another count", lambda f: header(f, 2, 9), r"gives 9 tokens, meta\.json gives \d+"),
    ("another dtype", widen, r"holds 4 bytes per token \(uint32\), meta\.json says uint16"),
    ("empty split", empty, r"has no tokens in split 'val'"),
    ("no split", lambda f: meta(f, lambda m: m["splits"].pop("val")), r"has no tokens in split 'val'"),
    (
        "sums differ",
        lambda f: meta(f, lambda m: m["splits"]["train"].update(tokens=1)),
        r"counts 1 tokens in 'train', its shards \d+",
    ),
    (
        "a shard outside",
        lambda f: name_shard(f, outside(f)),
        r"names the shard '../x.bin', which lies outside",
    ),
    (
        "a shard by its whole path",
        lambda f: name_shard(f, str((f / outside(f)).resolve())),
        r"names the shard '/.*x\.bin', which lies outside of its folder; .*: copy it there",
    ),
    ("a link out", lambda f: name_shard(f, outside(f, link=True)), r"'inside.bin', which lies outside"),
    ("no file name", lambda f: name_shard(f, "a\0b"), r"names the shard 'a\\x00b', which lies outside"),
]


@pytest.mark.parametrize(
    ("damage", "message"), [row[1:] for row in ON_OPENING], ids=[row[0] for row in ON_OPENING]
)
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
