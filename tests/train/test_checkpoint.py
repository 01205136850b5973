"""Checkpoints are whole or absent: damage is detected, and a full disk loses nothing."""

import errno
import json
import os
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from delta_trn.train.checkpoints.contents import load_weights
from delta_trn.train.checkpoints.store import MANIFEST, CheckpointStore, describe
from delta_trn.train.parallel.sharding import Sharding
from delta_trn.train.settings.errors import CheckpointError, DiskFull
from tests.support import tiny_run


@pytest.fixture
def copy(finished, tmp_path) -> Path:
    """Returns a copy of the finished run that a test may change."""
    shutil.copytree(finished, tmp_path / "run", symlinks=True)
    return tmp_path / "run"


def fill(folder: Path) -> None:
    (folder / "a.bin").write_bytes(bytes(range(256)) * 40)
    (folder / "state.json").write_text("{}")


def save(store: CheckpointStore, step: int, write=fill) -> Path:
    """Saves a checkpoint of the files that `write` returns, or of all files if it returns None."""
    with store.writing(step) as folder:
        store.begin(step)
        files = write(folder)
        store.finish(step, [describe(folder.iterdir() if files is None else files)])
    return store.path(step)


@pytest.fixture
def store(tmp_path) -> CheckpointStore:
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    for step in (5, 10, 15):
        save(store, step)
    return store


def test_lines_of_metrics_are_on_the_disk_before_a_checkpoint_is(data, tmp_path, monkeypatch):
    """Else a machine that loses its power has a checkpoint of steps whose lines are gone."""
    on_disk, at_checkpoints, fsync = {}, [], os.fsync
    finish = CheckpointStore.finish

    def noted(descriptor: int) -> None:
        fsync(descriptor)
        on_disk[os.fstat(descriptor).st_ino] = os.fstat(descriptor).st_size

    def finished(*given: Any) -> None:
        written = (tmp_path / "run" / "metrics.jsonl").stat()
        at_checkpoints.append((on_disk.get(written.st_ino), written.st_size))
        finish(*given)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(CheckpointStore, "finish", finished)
    changes: Any = {"checkpoint.every": 1, "evaluation.every": 2}
    tiny_run.train("run", "tiny", *tiny_run.keys(data, tmp_path / "run", steps=3, **changes))
    assert len(at_checkpoints) == 3
    assert all(synced == size > 0 for synced, size in at_checkpoints), at_checkpoints


class TestContent:
    def test_transformers_loads_model_and_tokenizer_from_a_checkpoint(self, finished):
        folder = finished / "checkpoints" / "step-00000012"
        model = AutoModelForCausalLM.from_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        ids = tokenizer("1 + 1 = 2", return_tensors="pt")["input_ids"]
        assert ids[0, 0] == model.config.bos_token_id
        with torch.no_grad():
            assert torch.isfinite(model(ids).logits).all()
        saved = load_file(folder / "model.safetensors")
        assert {t.dtype for t in saved.values()} == {torch.float32}
        for name, tensor in model.state_dict().items():
            if name in saved:
                assert torch.equal(tensor, saved[name]), name

    def test_a_checkpoint_has_only_safetensors_and_json(self, finished):
        names = {path.name for path in (finished / "checkpoints" / "step-00000012").iterdir()}
        assert {path.rpartition(".")[2] for path in names} == {"safetensors", "json"}

    @pytest.mark.parametrize("mask", [0o022, 0o077])
    def test_every_file_of_a_checkpoint_has_the_mode_that_the_umask_leaves(self, copy, mask):
        before = os.umask(mask)
        try:
            tiny_run.train("resume", copy, "steps=13")
        finally:
            os.umask(before)
        files = list((copy / "checkpoints" / "step-00000013").iterdir())
        assert "model.safetensors" in {path.name for path in files}
        assert {path.stat().st_mode & 0o777 for path in files} == {0o666 & ~mask}

    def test_loading_weights_of_another_model_is_refused(self, finished, tmp_path):
        model = AutoModelForCausalLM.from_pretrained(finished / "checkpoints" / "step-00000012")
        narrow = type(model)(
            type(model.config)(**{**model.config.to_dict(), "num_hidden_layers": 1})
        )
        with pytest.raises(CheckpointError, match=r"0 missing, .* unknown"):
            load_weights(finished / "checkpoints" / "step-00000012", Sharding(narrow))
        deep = type(model)(type(model.config)(**{**model.config.to_dict(), "num_hidden_layers": 3}))
        with pytest.raises(CheckpointError, match=r"missing, 0 unknown.*blocks.2"):
            load_weights(finished / "checkpoints" / "step-00000012", Sharding(deep))


class TestStore:
    def test_rotation_keeps_the_newest_checkpoints_and_the_best(self, store):
        store.point_best(5)
        save(store, 20)
        store.rotate(2)
        assert store.steps() == [5, 15, 20] and store.best() == 5
        store.point_best(20)
        store.rotate(2)
        assert store.steps() == [15, 20] and store.require_best() == store.path(20)
        assert not list(store.directory.glob(".*"))

    def test_a_damaged_best_checkpoint_is_refused_with_the_steps_there_are(self, store):
        assert store.require_best() is None
        store.point_best(5)
        (store.directory / "best" / "a.bin").unlink()
        with pytest.raises(CheckpointError, match=r"step 5 is damaged: .*other steps: 10, 15"):
            store.require_best()

    def test_going_back_before_the_best_checkpoint_removes_it(self, store):
        store.point_best(10)
        store.set_aside(10)
        assert store.best() == 10
        store.set_aside(5)
        assert store.best() is None and not list(store.directory.glob("best*"))

    def test_a_manifest_lists_only_the_files_of_its_own_process(self, store):
        """A process that wrote none must not hash the files of others, which may be incomplete."""

        def part(*names: str):
            def write(folder: Path) -> list[Path]:
                fill(folder)
                return [folder / name for name in names]

            return write

        for names in ((), ("a.bin",)):
            folder = save(store, 20, part(*names))
            assert list(json.loads((folder / MANIFEST).read_bytes())["files"]) == list(names)

    @pytest.mark.parametrize("name", ["a.bin", "state.json", MANIFEST])
    def test_every_kind_of_damage_to_a_checkpoint_is_detected(self, store, name):
        path = store.path(15) / name
        whole = path.read_bytes()
        damages = {
            "missing": lambda: path.unlink(),
            "empty": lambda: path.write_bytes(b""),
            "cut": lambda: path.write_bytes(whole[:-9]),
            "longer": lambda: path.write_bytes(whole + b"}"),
            "one bit": lambda: path.write_bytes(bytes([whole[0] ^ 1]) + whole[1:]),
        }
        assert store.damage(15) is None
        for what, damage in damages.items():
            damage()
            assert store.damage(15) is not None, what
            with pytest.raises(CheckpointError, match=r"step 15 is damaged.*other steps: 5, 10"):
                store.require_whole(15)
            path.write_bytes(whole)
        assert store.damage(15) is None

    def test_the_newest_whole_checkpoint_is_chosen_and_damaged_ones_are_reported(self, store):
        (store.path(15) / "a.bin").write_bytes(b"")
        (store.path(10) / "state.json").unlink()
        messages: list[str] = []
        assert store.newest_whole(messages.append) == 5
        assert (
            len(messages) == 2
            and "step 15" in messages[0]
            and "0 bytes, expected 10240" in messages[0]
        )

    def test_only_damaged_checkpoints_are_an_error_but_no_checkpoints_are_not(
        self, store, tmp_path
    ):
        for step in store.steps():
            (store.path(step) / "a.bin").unlink()
        with pytest.raises(
            CheckpointError, match=r"no checkpoint of step 7 .* there are: 5, 10, 15"
        ):
            store.require_whole(7)
        with pytest.raises(CheckpointError, match=r"every checkpoint in .* is damaged"):
            store.newest_whole(lambda text: None)
        assert CheckpointStore(tmp_path / "none").newest_whole(lambda text: None) is None


class TestFullDisk:
    def test_a_full_disk_keeps_earlier_checkpoints_and_leaves_no_partial_one(self, store):
        def full(folder: Path) -> None:
            fill(folder)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with pytest.raises(
            DiskFull, match=r"no space left .*step-00000020.*whole \(step 5, step 10, step 15\)"
        ):
            save(store, 20, full)
        assert store.steps() == [5, 10, 15]
        assert [store.damage(step) for step in store.steps()] == [None] * 3
        assert not list(store.directory.glob(".*"))

    def test_a_full_disk_at_any_file_operation_loses_no_checkpoint(self, store, monkeypatch):
        """The n-th sync or rename fails with ENOSPC, for every n."""

        def contents() -> list[list[str]]:
            return [
                sorted(path.name for path in store.path(step).iterdir()) for step in (5, 10, 15)
            ]

        before = contents()
        for n in range(100):
            # it may exist, because the last sync follows the rename
            shutil.rmtree(store.path(20), ignore_errors=True)
            calls = 0

            def failing(function, wait=n):
                def call(*arguments):
                    nonlocal calls
                    calls += 1
                    if calls == wait + 1:
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                    return function(*arguments)

                return call

            with monkeypatch.context() as patch:
                patch.setattr(os, "fsync", failing(os.fsync))
                patch.setattr(os, "rename", failing(os.rename))
                try:
                    save(store, 20)
                except DiskFull:
                    pass
                else:
                    break
            assert contents() == before
            assert all(store.damage(step) is None for step in store.steps())
        assert n == 6, "three files, two folders, one rename: otherwise something is not synced"
        assert store.steps() == [5, 10, 15, 20]

    def test_a_run_that_meets_a_file_size_limit_stops_and_resumes(self, finished, tmp_path):
        """The kernel enforces the limit, so that every writer meets it as it would a full disk."""
        data = json.loads((finished / "config.json").read_bytes())["data"]["folder"]
        out, log = tmp_path / "run", tmp_path / "log"
        limit = 20_000  # metrics.jsonl and JSON fit, weights do not
        child = tiny_run.start(["run", "tiny", *tiny_run.keys(Path(data), out)], log)
        assert child.pid is not None
        resource.prlimit(child.pid, resource.RLIMIT_FSIZE, (limit, limit))
        status, output = tiny_run.join(child), log.read_text()
        assert status == 2, output
        assert "no space left" in output and "delta-trn resume" in output
        assert "Traceback" not in output
        assert not list((out / "checkpoints").glob("*"))
        tiny_run.train("resume", out)
        assert tiny_run.final_state(out) == tiny_run.final_state(finished)


class TestDamagedRun:
    def test_resume_falls_back_to_the_newest_whole_checkpoint_and_reports_it(self, finished, copy):
        (weights,) = (copy / "checkpoints" / "step-00000012").glob("optimizer-*.safetensors")
        weights.write_bytes(weights.read_bytes()[:-10])
        output = tiny_run.train("resume", copy)
        assert "checkpoint of step 12 is damaged" in output and "after step 8" in output
        assert tiny_run.final_state(copy) == tiny_run.final_state(finished)

    def test_the_first_checkpoint_of_a_resumed_run_removes_what_it_undid(
        self, finished, copy, monkeypatch
    ):
        """Until then the undone checkpoints stay, because only then is there something
        in their place.
        """
        undone = ["undone-step-00000008", "undone-step-00000012"]
        at_start = []
        rotate = CheckpointStore.rotate

        def note(store: CheckpointStore, *arguments: Any) -> None:
            at_start.append(sorted(path.name for path in store.directory.glob("undone-*")))
            assert store.steps()[-1] == 8, "the new checkpoint is whole"
            rotate(store, *arguments)

        monkeypatch.setattr(CheckpointStore, "rotate", note)
        tiny_run.train("resume", copy, "--step", 6, "steps=8")
        assert at_start == [undone]
        assert not list((copy / "checkpoints").glob("undone-*"))
