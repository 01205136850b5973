"""A folder from somebody else harms nothing outside of it: links in it are replaced or refused.

Every name that a command writes is tried as a link to a file elsewhere, which must stay as it is.
"""

import ast
import os
import secrets
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path

import pytest

from delta_trn.train import files
from delta_trn.train.checkpoints.store import CheckpointStore
from delta_trn.train.files import (
    make_fresh_folder,
    open_plain,
    read_plain,
    require_plain,
    write_file,
)
from delta_trn.train.settings.errors import NotAPlainFile
from delta_trn.train.studies.sweep.results import Results
from delta_trn.train.watch.metrics import MetricsFile
from tests.support.planted_bugs import Bug, planted
from tests.support.tiny_run import (
    final_state,
    in_child,
    killed_before,
    make_text,
    run_command,
    train,
)

TRAIN = Path(files.__file__).parent
# A link of one of these names is replaced or left alone. The temporary names are those of before.
REPLACED = (
    ".lock.pid",
    ".config.json.tmp",
    ".samples.txt.tmp",
    ".loss.png.tmp",
    ".summary.json.tmp",
    ".baselines.json.tmp",
    ".tokenizer.json.tmp",
    ".tokenizer_config.json.tmp",
    ".special_tokens_map.json.tmp",
    "config.json",
    "summary.json",
    "loss.png",
    "tokenizer.json",
    "checkpoints/best",
    "checkpoints/.best.tmp",
    "checkpoints/.step-00000013.tmp",
    "checkpoints/.step-00000004.old",
)
# A run appends to these, reads them to write them again, or locks them: a link is refused.
REFUSED = ("metrics.jsonl", "samples.txt", ".lock")


class Outside:
    """Files elsewhere that links in a folder lead to, and what was in them."""

    def __init__(self, folder: Path):
        self.folder, self.before = folder, dict[Path, bytes]()
        folder.mkdir()

    def link(self, place: Path) -> None:
        """Puts a link at `place` to a file with the content that was there."""
        target = self.folder / f"{len(self.before)}-{place.name}"
        target.write_bytes(place.read_bytes() if place.is_file() else b"what is mine\n")
        if place.is_symlink() or place.exists():
            place.unlink()
        place.symlink_to(target)
        self.before[target] = target.read_bytes()

    def changed(self) -> list[str]:
        """Returns the names of the files that are not as they were."""
        return [p.name for p, x in self.before.items() if not p.is_file() or p.read_bytes() != x]


@pytest.fixture
def outside(tmp_path: Path) -> Outside:
    return Outside(tmp_path / "outside")


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run", symlinks=True))


def link_all(run: Path, outside: Outside, names: Iterable[str] = REPLACED) -> None:
    for name in names:
        outside.link(run / name)


class TestLinksInARun:
    def test_change_nothing_elsewhere_when_it_is_resumed_and_plotted(
        self, finished, run, outside, tmp_path
    ):
        link_all(run, outside)
        train("resume", run, "steps=14", "checkpoint.every=1")
        train("plot", run)
        assert outside.changed() == []
        other = Path(shutil.copytree(finished, tmp_path / "other", symlinks=True))
        train("resume", other, "steps=14", "checkpoint.every=1")
        assert final_state(run) == final_state(other), "and the run is as without them"

    @pytest.mark.parametrize("name", REFUSED)
    def test_are_refused_where_a_run_appends(self, run, outside, name):
        outside.link(run / name)
        status, _, said = run_command("resume", run, "steps=13")
        assert (status, outside.changed()) == (2, [])
        assert f"{run / name} is a symbolic link" in said and "put a copy" in said

    @pytest.mark.parametrize("name", REFUSED)
    def test_hard_links_and_pipes_are_refused_too(self, run, outside, name, tmp_path):
        place = run / name
        place.touch()
        os.link(place, tmp_path / "second")
        status, _, said = run_command("resume", run, "steps=13")
        assert status == 2 and f"{place} is a file with 2 names" in said
        place.unlink()
        os.mkfifo(place)
        status, _, said = run_command("resume", run, "steps=13")
        assert status == 2 and f"{place} is a pipe" in said, "and nothing waits for a writer"

    def test_a_folder_of_checkpoints_is_not_another_runs(self, finished, run, tmp_path):
        other = Path(shutil.copytree(finished, tmp_path / "other", symlinks=True))
        shutil.rmtree(run / "checkpoints")
        (run / "checkpoints").symlink_to(other / "checkpoints")
        before = sorted(path.name for path in (other / "checkpoints").iterdir())
        status, _, said = run_command("resume", run, "steps=14", "checkpoint.every=1")
        assert status == 2 and f"{run / 'checkpoints'} is a symbolic link" in said
        assert sorted(path.name for path in (other / "checkpoints").iterdir()) == before

    def test_a_run_whose_whole_folder_is_reached_by_a_link_is_resumed(self, run, tmp_path):
        (tmp_path / "link").symlink_to(run)
        train("resume", tmp_path / "link", "steps=13")


def test_links_in_a_folder_of_data_change_nothing_elsewhere(tmp_path, outside):
    folder, source = tmp_path / "data", tmp_path / "text.txt"
    folder.mkdir()
    source.write_text(make_text())
    for name in (".lock.pid", ".unfinished", ".meta.json.tmp", "meta.json"):
        outside.link(folder / name)
    (folder / "meta.json").unlink()
    train("data", "prepare", source, f"data.folder={folder}", "data.tokenizer=bytes")
    assert outside.changed() == []
    (folder / ".lock").unlink()
    outside.link(folder / ".lock")
    (folder / "meta.json").unlink()
    for shard in folder.glob("*.bin"):
        shard.unlink()
    status, _, said = run_command(
        "data", "prepare", source, f"data.folder={folder}", "data.tokenizer=bytes"
    )
    assert (status, outside.changed()) == (2, []) and ".lock is a symbolic link" in said


class TestReplacedFiles:
    @pytest.mark.parametrize("kind", ["link", "link to nothing", "file", "pipe", "folder"])
    def test_are_never_written_through_what_has_their_temporary_name(
        self, tmp_path, outside, monkeypatch, kind
    ):
        numbers = iter(["0" * 16, "1" * 16])
        monkeypatch.setattr(secrets, "token_hex", lambda size: next(numbers))
        beside = tmp_path / f".file.{'0' * 16}.tmp"
        if kind == "pipe":
            os.mkfifo(beside)
        elif kind == "folder":
            beside.mkdir()
        else:
            outside.link(beside)
        if kind == "link to nothing":
            (target,) = outside.before
            target.unlink()
            outside.before.clear()
        monkeypatch.setattr(files, "_remove_leftovers", lambda path: None)
        write_file(tmp_path / "file", "new")
        assert (tmp_path / "file").read_text() == "new" and outside.changed() == []
        assert list(outside.folder.iterdir()) == list(outside.before)

    def test_have_the_mode_that_the_umask_gives(self, tmp_path):
        write_file(tmp_path / "file", "new")
        (tmp_path / "other").touch()
        assert (tmp_path / "file").stat().st_mode == (tmp_path / "other").stat().st_mode

    def test_of_killed_writers_leave_nothing_after_the_next_write(self, tmp_path):
        path = tmp_path / "file"
        killed = 0
        while killed_before(killed + 1, lambda: write_file(path, "whole")):
            killed += 1
            assert not path.exists() or path.read_text() == "whole"
        left = [p.name for p in tmp_path.iterdir() if p != path]
        assert killed >= 2 and len(left) <= 1
        write_file(path, "new")
        assert [p.name for p in tmp_path.iterdir()] == ["file"]

    def test_are_not_taken_from_a_writer_that_is_at_work(self, tmp_path):
        path = tmp_path / "file"
        with files.replace_file(path) as file:
            file.write(b"slow")
            assert in_child(lambda: write_file(path, "quick")) == 0
            assert path.read_text() == "quick"
        assert path.read_text() == "slow"

    def test_do_not_take_the_place_of_a_folder(self, tmp_path):
        (tmp_path / "file").mkdir()
        with pytest.raises(NotAPlainFile, match="file is a folder"):
            write_file(tmp_path / "file", "new")
        assert [p.name for p in tmp_path.iterdir()] == ["file"]


class TestPlainFiles:
    def test_are_the_only_ones_that_are_appended_to(self, tmp_path, outside):
        for append in (
            lambda path: MetricsFile(path / "metrics.jsonl").append([{"step": 1}]),
            lambda path: MetricsFile(path / "metrics.jsonl").truncate_after(0),
            lambda path: Results(path).add({"seed": 0, "loss": 1.0}),
        ):
            for name in ("metrics.jsonl", "sweep.jsonl"):
                outside.link(tmp_path / name)
            with pytest.raises(NotAPlainFile, match="is a symbolic link"):
                append(tmp_path)
        assert outside.changed() == []

    def test_are_opened_without_a_race(self, tmp_path, outside, monkeypatch):
        """A link that is made after the look at the file is not followed."""
        outside.link(tmp_path / "file")
        monkeypatch.setattr(files, "require_plain", lambda path: True)
        with pytest.raises(OSError, match="symbolic links"):
            open_plain(tmp_path / "file", "ab")

    def test_are_made_where_there_are_none(self, tmp_path):
        assert not require_plain(tmp_path / "file") and read_plain(tmp_path / "file") == ""
        with open_plain(tmp_path / "file", "ab") as file:
            file.write(b"one")
        assert read_plain(tmp_path / "file") == "one"
        assert stat.S_IMODE((tmp_path / "file").stat().st_mode) & 0o600 == 0o600


def test_a_folder_of_checkpoints_that_is_a_link_is_not_written_to(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "checkpoints").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NotAPlainFile, match="is a symbolic link"):
        CheckpointStore(tmp_path / "checkpoints").begin(1)


def test_a_fresh_folder_is_not_what_a_link_leads_to(tmp_path, outside):
    outside.link(tmp_path / "file")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "kept").touch()
    (tmp_path / "folder").symlink_to(tmp_path / "full")
    for name in ("file", "folder"):
        make_fresh_folder(tmp_path / name)
        assert list((tmp_path / name).iterdir()) == [] and not (tmp_path / name).is_symlink()
    assert outside.changed() == [] and (tmp_path / "full" / "kept").exists()


# Functions that open a file to write it in another way, and why nothing can lie in its place.
OTHER_WRITERS = {
    "files.py:_new_beside": "is the way",
    "files.py:open_plain": "is the way",
    "checkpoints/contents.py:_write_json": "in a folder that was made for it just now",
    "checkpoints/store.py:finish": "in a folder that was made for it just now",
    "run/export.py:export": "in a folder that was made for it just now",
    "commands/convert.py:main": "in a folder that was empty",
    "data/shards.py:append": "in a folder that was made for it just now",
    "studies/sweep/runner.py:_main": "the output of this process",
    "commands/throughput.py:main": "a file that the command line names",
}


def test_every_writer_goes_one_of_these_ways():
    """Whoever adds a writer uses train/files.py, or says here why nothing can be in its way."""
    found = set()
    for path in TRAIN.rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef) and any(map(_writes, ast.walk(function))):
                found.add(f"{path.relative_to(TRAIN)}:{function.name}")
    assert found == set(OTHER_WRITERS)


def _writes(node: ast.AST) -> bool:
    """Returns whether a node is a call that opens a file to write, or with a mode that varies."""
    if not isinstance(node, ast.Call):
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name == "open":
        modes = [x.value for x in node.args if isinstance(x, ast.Constant)]
        varies = isinstance(node.func, ast.Name) and len(node.args) > len(modes) + 1
        return varies or any(set(str(mode)) & set("wax+") for mode in modes if len(str(mode)) < 4)
    flags = [x.attr for x in ast.walk(node) if isinstance(x, ast.Attribute)]
    return name in ("write_text", "write_bytes") or "O_CREAT" in flags


PREDICTABLE = Bug(
    "files: a temporary name can be predicted", "train.files:_new_beside",
    "path.with_name(f\".{path.name}.{secrets.token_hex(8)}.tmp\")",
    "path.with_name(f\".{path.name}.tmp\")", "",
)  # fmt: skip
FOLLOWED = Bug(
    "files: a link is followed", "train.files:_new_beside",
    "os.O_EXCL | _NO_LINK", "os.O_TRUNC", "",
)  # fmt: skip
APPENDED = Bug(
    "files: links are appended to", "train.files:require_plain", "os.lstat(path)", "os.stat(path)", ""
)  # fmt: skip


def test_planted_bugs_are_seen(run, outside):
    link_all(run, outside)
    with planted(PREDICTABLE), planted(FOLLOWED):
        train("plot", run)
    assert any("loss.png.tmp" in name for name in outside.changed())
    outside.link(run / "samples.txt")
    with planted(APPENDED):
        assert require_plain(run / "samples.txt"), "the refusal was the look at the link itself"
