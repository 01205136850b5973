"""Shards hold every document whole and once, on one side;
what is killed leaves nothing that counts.
"""

import io
import os
import random
import resource
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from delta_trn.train.data import preparation
from delta_trn.train.data.dataset import open_dataset
from delta_trn.train.data.entropies import documents
from delta_trn.train.files import hold_folder
from delta_trn.train.settings.errors import (
    DataError,
    DiskFull,
    SettingsDiffer,
    ShardError,
    SourceError,
)
from tests.support.corpus import prepare_text, write_jsonl
from tests.support.tiny_run import in_child, killed_before

SHARD = 2000


def texts(count: int = 120) -> list[str]:
    """Documents of 1 to 200 words, with empty ones and copies among them."""
    words = random.Random(0)
    choices = ["alpha", "beta", "gamma", "délta"]
    lines = [" ".join(words.choices(choices, k=words.randint(1, 200))) for _ in range(count)]
    lines[10], lines[20] = "", " \n"
    lines[7] = lines[8] = lines[-1]
    return lines


def corpus(path: Path, lines: list[str] | None = None) -> Path:
    return write_jsonl(path, lines or texts())


@pytest.fixture
def source(tmp_path):
    return corpus(tmp_path / "corpus.jsonl")


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    """Without waiting for the disk, whose content a killed process leaves:
    only a power cut could lose it.
    """
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(preparation, "BATCH_DOCUMENTS", 7)
    monkeypatch.setattr(preparation, "BATCH_CHARACTERS", 5_000)


def run(source, out, **options):
    return prepare_text(source, out, **{"shard_tokens": SHARD, **options})


def files(directory: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes()
        for path in directory.iterdir()
        if not path.name.startswith(".")
    }


def split_texts(dataset, split):
    return [dataset.tokenizer.decode(ids) for ids in documents(dataset, split)]


# -- what comes out --------------------------------------------------------------------------------


def test_every_document_is_in_one_split_whole_and_in_order(source, tmp_path):
    dataset = open_dataset(run(source, tmp_path / "out"))
    train, val = split_texts(dataset, "train"), split_texts(dataset, "val")
    expected = [text for text in texts() if text.strip()]
    assert sorted(train + val) == sorted(expected)
    assert train == [text for text in expected if text in set(train)]
    assert not set(train) & set(val)
    assert 0 < len(val) < len(expected) / 5
    assert dataset.meta.skipped == {"empty documents": 2}


def test_a_shard_is_read_by_the_published_layout_and_counted(source, tmp_path):
    out = run(source, tmp_path / "out")
    names = sorted(path.name for path in out.glob("*.bin"))
    assert (
        names[0] == "corpus_train_000001.bin"
        and names[-1].startswith("corpus_val_")
        and len(names) > 3
    )
    raw = (out / names[0]).read_bytes()
    header, tokens = np.frombuffer(raw[:1024], "<i4"), np.frombuffer(raw[1024:], "<u2")
    assert header[:3].tolist() == [20240520, 1, len(tokens)] and not header[3:].any()
    assert tokens[0] == 256 and tokens[-1] == 257
    dataset = open_dataset(out)
    for split in ("train", "val"):
        meta, found = dataset.split(split), split_texts(dataset, split)
        assert meta.documents == len(found)
        assert meta.bytes == sum(len(text.encode()) for text in found)
        # plain bytes: BOS and EOS are all that is added
        assert meta.tokens == meta.bytes + 2 * len(found)
        assert meta.tokens == sum(len(tokens) for tokens in dataset.shards(split))
    dataset.check_tokens()


def test_documents_never_straddle_shards(tmp_path):
    long = "x" * 3 * SHARD  # has a shard of its own
    dataset = open_dataset(
        run(corpus(tmp_path / "c.jsonl", [*texts(30), long, *texts(60)]), tmp_path / "out")
    )
    shards = dataset.shards("train")
    assert len(shards) > 5 and 3 * SHARD + 2 in [len(x) for x in shards + dataset.shards("val")]
    for tokens in shards:
        assert tokens[0] == dataset.meta.bos_id and tokens[-1] == dataset.meta.eos_id
        assert len(tokens) <= SHARD or len(tokens) == 3 * SHARD + 2
    for first, second in pairwise(shards):
        next_document = int(np.flatnonzero(second == dataset.meta.eos_id)[0]) + 1
        assert len(first) + next_document > SHARD  # it did not fit


def test_a_vocabulary_over_16_bits_takes_uint32(source, tmp_path):
    for size, dtype in ((2**16 + 1, np.uint32), (2**16, np.uint16)):
        dataset = open_dataset(run(source, tmp_path / str(size), vocab_size=size))
        assert dataset.meta.dtype == dataset.shards("val")[0].dtype == dtype


def test_max_documents_and_max_tokens_end_a_preparation(source, tmp_path):
    by_count = open_dataset(run(source, tmp_path / "a", max_documents=40))
    expected = [text for text in texts()[:40] if text.strip()]
    assert sorted(split_texts(by_count, "train") + split_texts(by_count, "val")) == sorted(expected)
    by_tokens = open_dataset(run(source, tmp_path / "b", max_tokens=5000))
    lengths = [len(text.encode()) + 2 for text in texts() if text.strip()]
    first = int(np.searchsorted(np.cumsum(lengths), 5000)) + 1
    total = sum(by_tokens.split(split).tokens for split in ("train", "val"))
    assert total == sum(lengths[:first]) and total - lengths[first - 1] < 5000 <= total


# -- holding out -----------------------------------------------------------------------------------


def test_the_seed_alone_decides_which_documents_are_held_out(source, tmp_path):
    held_out = [
        set(split_texts(open_dataset(run(source, tmp_path / str(i), seed=i)), "val"))
        for i in range(4)
    ]
    assert len({frozenset(found) for found in held_out}) == 4
    assert held_out[0] == set(split_texts(open_dataset(run(source, tmp_path / "again")), "val"))


@pytest.mark.parametrize(
    ("count", "fraction", "held_out"), [(2000, 0.2, 400), (2, 0.01, 1), (5, 0.01, 1)]
)
def test_val_fraction_is_the_share_of_documents_held_out_but_one_at_least(
    tmp_path, count, fraction, held_out
):
    lines = [f"document {i}" for i in range(count)]
    dataset = open_dataset(
        run(corpus(tmp_path / "c.jsonl", lines), tmp_path / "out", val_fraction=fraction)
    )
    # of a binomial, five deviations
    assert (
        abs(dataset.split("val").documents - held_out)
        <= 5 * (count * fraction * (1 - fraction)) ** 0.5 // 1
    )


def test_validation_text_is_never_in_training(source, tmp_path):
    held_out = ["first", texts()[5], "", "second"]
    other = corpus(tmp_path / "held.jsonl", held_out)
    dataset = open_dataset(run(source, tmp_path / "out", validation=str(other)))
    assert split_texts(dataset, "val") == ["first", texts()[5], "second"]
    assert split_texts(dataset, "train") == [
        text for text in texts() if text.strip() and text != texts()[5]
    ]
    assert dataset.meta.skipped == {"documents also held out": 1, "empty documents": 3}


def test_the_tokenizer_is_trained_on_training_documents_only(tmp_path, monkeypatch):
    seen = []

    def make(name, vocab_size, documents):
        seen.extend(documents)
        return original(name, vocab_size, iter(seen))

    original = preparation.make_tokenizer
    monkeypatch.setattr(preparation, "make_tokenizer", make)
    source = corpus(tmp_path / "c.jsonl")
    dataset = open_dataset(run(source, tmp_path / "out", tokenizer="bytebpe", vocab_size=300))
    assert seen == split_texts(dataset, "train")


# -- doing it again --------------------------------------------------------------------------------


def test_preparing_again_with_the_same_settings_does_nothing(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, second = run(source, None), run(source, None, seed=1)
    assert first != second and first.parent == second.parent == Path("data")
    assert first.name.startswith("corpus-bytes-")
    before = {path: path.stat().st_mtime_ns for path in first.iterdir()}
    monkeypatch.setattr(preparation, "_Preparation", None)  # calling it would raise
    assert run(source, None) == first
    assert {path: path.stat().st_mtime_ns for path in first.iterdir()} == before


def test_preparing_into_a_folder_with_other_settings_names_them(source, tmp_path):
    out = run(source, tmp_path / "out")
    with pytest.raises(SettingsDiffer) as error:
        run(source, out, val_fraction=0.1, shard_tokens=SHARD + 1)
    expected = "shard_tokens: 2000 there, 2001 asked for; val_fraction: 0.05 there, 0.1 asked for"
    assert expected in str(error.value)
    assert "seed" not in str(error.value) and "choose another data.folder=DIR" in str(error.value)
    corpus(source, texts(119))
    with pytest.raises(SettingsDiffer, match=r"source: \{.*'sha256': "):
        run(source, out)


def test_prepare_refuses_a_folder_with_foreign_shards(source, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "fineweb_train_000001.bin").write_bytes(b"precious")
    with pytest.raises(SettingsDiffer, match=r"holds fineweb_train_000001\.bin and no meta\.json"):
        run(source, tmp_path / "out")


def test_text_that_cannot_be_split_leaves_the_folder_for_another_try(tmp_path):
    source = corpus(tmp_path / "c.jsonl", ["the only document", "the only document", ""])
    message = r"no document for val: 2 documents .*1 empty documents.*data.validation=PATH"
    with pytest.raises(SourceError, match=message):
        run(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    run(source, tmp_path / "out", validation=str(corpus(tmp_path / "held.jsonl", ["held out"])))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"validation": "nowhere.txt"}, r"no validation text at nowhere\.txt"),
        ({"tokenizer": "gpt3"}, r"no tokenizer 'gpt3': expected gpt2, bytebpe, bytes, or the path"),
        ({"vocab_size": 100}, r"vocab_size=100 is smaller than the tokenizer's 259 ids"),
    ],
)
def test_prepare_refuses_bad_settings(source, tmp_path, options, message):
    with pytest.raises(DataError, match=message):
        run(source, tmp_path / "out", **options)
    assert not (tmp_path / "out" / "meta.json").exists()


# -- being killed ----------------------------------------------------------------------------------

OPTIONS = {"tokenizer": "bytebpe", "vocab_size": 300}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The bytes a run writes that nobody kills, in one block."""
    root = tmp_path_factory.mktemp("undisturbed")
    return files(run(corpus(root / "corpus.jsonl", texts(30)), root / "out", **OPTIONS))


def test_a_preparation_killed_at_any_moment_leaves_nothing_that_counts(tmp_path, undisturbed):
    source, out = corpus(tmp_path / "corpus.jsonl", texts(30)), tmp_path / "out"
    call = 1
    while killed_before(call, lambda: run(source, out, **OPTIONS)):
        for shard in out.glob("*.bin"):
            # whatever has its final name is whole
            assert shard.read_bytes() == undisturbed[shard.name]
        if (out / "meta.json").exists():
            open_dataset(out).check_tokens()
        else:
            with pytest.raises(
                ShardError, match="is missing, so nothing was prepared there to its end"
            ):
                open_dataset(out)
        assert files(run(source, out, **OPTIONS)) == undisturbed, f"killed before call {call}"
        shutil.rmtree(out)
        call += 1
    assert call > 15
    assert files(out) == undisturbed


def test_a_preparation_that_another_process_made_meanwhile_is_taken(source, tmp_path, monkeypatch):
    def made_meanwhile(folder):
        monkeypatch.setattr(preparation, "hold_folder", hold_folder)
        run(source, folder)
        monkeypatch.setattr(preparation, "_Preparation", None)  # calling it would raise
        return hold_folder(folder)

    monkeypatch.setattr(preparation, "hold_folder", made_meanwhile)
    open_dataset(run(source, tmp_path / "out"))


def test_a_folder_that_its_holder_takes_away_is_held_by_those_who_waited(tmp_path, monkeypatch):
    """The holder leaves no empty folder behind; those who wait then make it again,
    one after another.
    """
    out, inside, written = tmp_path / "out", [], io.StringIO()
    # capsys may lose what a thread prints while it is read
    monkeypatch.setattr(sys, "stderr", written)

    def hold():
        with hold_folder(out):
            inside.append(out.exists())
            time.sleep(0.05)
            return inside.pop() and not inside

    with ThreadPoolExecutor(3) as threads, hold_folder(out):
        ends = [threads.submit(hold) for _ in range(3)]
        while written.getvalue().count(f"(pid {os.getpid()})") < 3:
            time.sleep(0.01)
    assert all(end.result() for end in ends)


# -- a disk that is full ---------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1500, 20_000, 60_000])
def test_a_full_disk_leaves_nothing_half_written(tmp_path, limit):
    """The kernel refuses bytes beyond RLIMIT_FSIZE as a full disk does:
    in tokenizer.json, in a shard.
    """
    source, whole, out = (
        corpus(tmp_path / "corpus.jsonl", texts(200)),
        tmp_path / "whole",
        tmp_path / "out",
    )
    options = {"shard_tokens": 10**9}
    expected = files(run(source, whole, **options))
    assert max(map(len, expected.values())) > limit

    def body():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        with pytest.raises(DiskFull, match=r"no space left to write .*run the same command again"):
            run(source, out, **options)

    assert in_child(body) == 0
    assert not out.exists()
    assert files(run(source, out, **options)) == expected


def test_prepare_says_that_a_folder_may_not_be_written(source, tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(
        DiskFull,
        match=r"may not write .*/out \(permission denied\); .*get write permission or choose another",
    ):
        run(source, tmp_path / "out")
