"""Shards are hashed when they are first opened, and again only when something about the files has changed."""

import multiprocessing
import os
import shutil
from pathlib import Path

import pytest

from delta_trn.train.data import hashes, open_dataset
from delta_trn.train.settings.errors import DiskFull, ShardError
from tests.support.corpus import prepare_text, write_jsonl
from tests.train.data.test_errors import TRAIN, VAL, flip, record_hash


@pytest.fixture
def folder(tmp_path):
    texts = [f"document {i} " * 20 for i in range(60)]
    return prepare_text(write_jsonl(tmp_path / "corpus.jsonl", texts), tmp_path / "out")


@pytest.fixture
def hashed(monkeypatch):
    """Returns the names of the files that are hashed from now on."""
    names: list[str] = []
    original = hashes.sha256_of

    def count(path: Path) -> str:
        names.append(path.name)
        return original(path)

    monkeypatch.setattr(hashes, "sha256_of", count)
    return names


def test_the_first_opening_hashes_every_shard_and_later_ones_none(folder, hashed):
    first = open_dataset(folder)
    assert sorted(hashed) == [TRAIN, VAL]
    assert open_dataset(folder).fingerprint == first.fingerprint
    assert len(hashed) == 2


def replace(path: Path):
    flip(Path(shutil.copy2(path, path.with_name("beside"))))
    os.replace(path.with_name("beside"), path)


@pytest.mark.parametrize("change", [flip, replace])
def test_a_shard_that_changes_after_its_first_opening_is_refused(folder, change):
    open_dataset(folder)
    change(folder / TRAIN)
    for _ in range(2):
        with pytest.raises(ShardError, match=r"train_000001\.bin changed since it was prepared"):
            open_dataset(folder)


def test_a_byte_changed_back_in_time_is_refused(folder):
    """The time of writing can be set, that of the last change cannot."""
    open_dataset(folder)
    status = (folder / TRAIN).stat()
    flip(folder / TRAIN)
    os.utime(folder / TRAIN, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(ShardError, match="changed since"):
        open_dataset(folder)


def test_a_change_without_a_trace_in_the_files_status_is_not_seen(folder, monkeypatch):
    """What the mark cannot see: the test above can fail. `data info --check` reads every token."""
    monkeypatch.setattr(hashes, "_status", lambda path: [path.stat().st_size, 0, 0, 0])
    open_dataset(folder)
    flip(folder / TRAIN)
    dataset = open_dataset(folder)
    with pytest.raises(ShardError, match="sha256 differs"):
        dataset.check_tokens()


def test_a_copied_folder_is_hashed_again_although_it_brings_its_mark(folder, tmp_path, hashed):
    open_dataset(folder)
    open_dataset(Path(shutil.copytree(folder, tmp_path / "copy")))
    assert len(hashed) == 4


@pytest.mark.parametrize("content", ["", "{", "[]", '{"x": 1}', '{"x": {"status": 1}}'])
def test_a_damaged_mark_is_written_anew(folder, hashed, content):
    (folder / hashes.MARKS).write_text(content)
    open_dataset(folder)
    open_dataset(folder)
    assert len(hashed) == 2


@pytest.fixture
def read_only(folder, tmp_path, monkeypatch):
    """Refuses to write below the folder, as a read-only mount does: root may write where modes forbid it."""
    original = hashes.hold_folder

    def hold(place: Path):
        if place == folder:
            raise DiskFull(f"may not write {place}")
        return original(place)

    monkeypatch.setattr(hashes, "hold_folder", hold)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def test_the_mark_of_a_read_only_folder_lies_in_the_users_cache(read_only, tmp_path, hashed):
    before = sorted(os.listdir(read_only))
    open_dataset(read_only)
    open_dataset(read_only)
    assert len(hashed) == 2
    assert sorted(os.listdir(read_only)) == before
    assert len(list((tmp_path / "cache" / "delta-trn" / "shards").glob(f"*/{hashes.MARKS}"))) == 1
    flip(read_only / VAL)
    with pytest.raises(ShardError, match=r"val_000000\.bin changed since"):
        open_dataset(read_only)


def test_without_any_place_for_a_mark_every_opening_hashes(read_only, tmp_path, hashed):
    (tmp_path / "cache").write_text("not a folder")
    open_dataset(read_only)
    open_dataset(read_only)
    assert len(hashed) == 4


def test_of_several_processes_one_hashes(folder):
    context = multiprocessing.get_context("fork")
    with context.Pool(3) as pool:
        counts = pool.map(_count_hashed, [str(folder)] * 3, chunksize=1)
    assert sum(counts) == 2, counts


def _count_hashed(folder: str) -> int:
    import time

    original, names = hashes.sha256_of, []

    def slow(path: Path) -> str:
        names.append(path)
        time.sleep(0.3)
        return original(path)

    hashes.sha256_of = slow
    open_dataset(folder)
    hashes.sha256_of = original
    return len(names)


def test_shards_without_a_hash_are_taken_with_a_word_and_refused_once_they_change(folder, capsys, hashed):
    expected = open_dataset(folder).fingerprint
    for split in ("train", "val"):
        record_hash(folder, split, None)
    (folder / hashes.MARKS).unlink()
    assert open_dataset(folder).fingerprint == expected
    words = capsys.readouterr().err
    assert words.count("\n") == 1 and "meta.json has no sha256 of corpus_" in words
    assert open_dataset(folder).fingerprint == expected
    assert capsys.readouterr().err == "" and len(hashed) == 4
    flip(folder / TRAIN)
    with pytest.raises(ShardError, match="changed since"):
        open_dataset(folder)


def test_a_long_check_is_announced(folder, monkeypatch, capsys):
    monkeypatch.setattr(hashes, "WORTH_A_LINE", 1)
    open_dataset(folder)
    assert "checking the hashes of 0.0 GiB of shards in" in capsys.readouterr().err
    open_dataset(folder)
    assert capsys.readouterr().err == ""
