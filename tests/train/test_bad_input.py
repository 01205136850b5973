"""A mistaken command ends with one line that says what is wrong and what to do,
and changes no file.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from delta_trn.train.data.shards import HEADER_BYTES
from delta_trn.train.files import sha256_of
from delta_trn.train.run.step import TrainingStep
from tests.support import tiny_run
from tests.support.corpus import prepare_text
from tests.support.tiny_run import keys, run_command, train


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Returns a folder with prepared shards in data/ and a finished run in run/;
    see `copy` to damage it.
    """
    folder = tmp_path_factory.mktemp("place")
    tiny_run.prepare_data(folder)
    train("run", "tiny", *keys(folder / "data", folder / "run", sample__tokens=0))
    return folder


@pytest.fixture
def copy(place, tmp_path) -> Path:
    shutil.copytree(place, tmp_path / "place", symlinks=True)
    # the copied run reads the copied data
    path = tmp_path / "place" / "run" / "config.json"
    configuration = json.loads(path.read_bytes())
    configuration["data"]["folder"] = str(tmp_path / "place" / "data")
    path.write_text(json.dumps(configuration))
    return tmp_path / "place"


def error_line(*arguments: object) -> str:
    """Runs a command that must fail; returns the one line that says why."""
    status, out, err = run_command(*arguments)
    assert status == 2, out + err
    *before, last = err.splitlines()
    # `prepare` reports its progress on stderr before that line
    assert last.startswith("error: ") and not any(
        "error" in x or "Traceback" in x for x in before
    ), err
    return last


def read_tree(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


WRONG_KEYS = {
    "unknown key": (["stepz=3"], "unknown key 'stepz'; the nearest known: steps"),
    "value heads": (["model.v_heads=3"], "num_v_heads=3 is not a multiple of num_heads=2"),
    "too narrow": (["model.width=1"], "is too narrow for num_heads=2"),
    "attention layer": (["model.attention_layers=5"], "attention_layers=[5] must be"),
    "vocabulary": (
        ["model.vocab_size=100"],
        "model.vocab_size=100 is below the tokenizer's 259 ids",
    ),
    "device": (["device=abacus"], "device=abacus"),
    "device not here": (["device=cuda:77"], "device=cuda:77"),
    "backend": (["backend=numpy"], "no backend is named 'numpy'"),
    "backend not here": (["backend=triton"], "leave out backend=triton"),
    "package": (["log.wandb=true"], "log.wandb=true needs the wandb package: pip install"),
    "source": (["data.source=no/such/place"], "no/such/place"),
    "sequence too long": (["batch.length=100000"], "choose a shorter sequence"),
    "tokenizer": (
        ["data.source=TEXT", "data.tokenizer=no-such.json"],
        "no tokenizer 'no-such.json'",
    ),
    "tokenizer size": (["data.source=TEXT", "data.vocab_size=100"], "vocab_size=100"),
}


@pytest.mark.parametrize("case", WRONG_KEYS)
def test_run_refuses_the_mistake(place, tmp_path, monkeypatch, case, request):
    monkeypatch.chdir(tmp_path)  # where data/ would be written
    changes, message = WRONG_KEYS[case]
    if case == "backend not here":
        request.getfixturevalue("without_triton")
    defaults = {key.partition("=")[0]: key for key in keys(place / "data", tmp_path / "run")}
    changes = [change.replace("TEXT", str(place / "sums.txt")) for change in changes]
    for change in changes:
        defaults.pop(change.partition("=")[0], None)
    assert message in error_line("run", "tiny", *defaults.values(), *changes)
    assert not (tmp_path / "run").exists(), "a run that cannot begin leaves no folder"


class TestFolders:
    def test_run_does_not_overwrite_an_existing_run(self, place):
        before = read_tree(place / "run")
        message = error_line("run", "tiny", *keys(place / "data", place / "run"))
        assert f"delta-trn resume {place / 'run'}" in message and "out=DIR" in message
        assert read_tree(place / "run") == before

    def test_run_does_not_overwrite_a_folder_with_other_files(self, place):
        before = read_tree(place / "data")
        assert "is taken" in error_line("run", "tiny", *keys(place / "data", place / "data"))
        assert read_tree(place / "data") == before

    def test_run_refuses_a_file_as_its_folder(self, place):
        assert "is a file" in error_line("run", "tiny", *keys(place / "data", place / "sums.txt"))

    def test_run_refuses_a_folder_that_cannot_be_made(self, place):
        assert "cannot make" in error_line(
            "run", "tiny", *keys(place / "data", place / "sums.txt" / "run")
        )

    @pytest.mark.parametrize("name", ["resume", "generate", "plot"])
    def test_commands_refuse_a_folder_that_holds_no_run(self, place, name):
        rest = ["--prompt", "x"] if name == "generate" else []
        assert "is no run's folder" in error_line(name, place / "data", *rest)
        assert "is not a folder" in error_line(name, place / "nothing", *rest)

    @pytest.mark.parametrize("content", ["", "{", "[]", '{"steps": 3}'])
    def test_resume_refuses_a_damaged_config_json(self, copy, content):
        (copy / "run" / "config.json").write_text(content)
        before = read_tree(copy / "run")
        assert "config.json" in error_line("resume", copy / "run")
        assert read_tree(copy / "run") == before

    def test_an_unknown_recipe_is_refused_with_the_nearest_name(self):
        assert "did you mean quickstart" in error_line("run", "quickstrt")


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "meta missing": (lambda d: (d / "meta.json").unlink(), "meta.json"),
    "meta damaged": (lambda d: (d / "meta.json").write_text("{"), "meta.json cannot be used"),
    "shard missing": (lambda d: next(d.glob("*_train_*.bin")).unlink(), "_train_"),
    "shard cut": (lambda d: _truncate(next(d.glob("*_val_*.bin"))), "_val_"),
    "not a shard": (lambda d: next(d.glob("*_train_*.bin")).write_bytes(b"x" * 4096), "_train_"),
    "tokenizer missing": (
        lambda d: (d / "tokenizer.json").unlink(),
        "tokenizer.json cannot be read",
    ),
}


class TestData:
    @pytest.mark.parametrize("case", DAMAGES)
    def test_run_refuses_damaged_data(self, copy, tmp_path, case):
        damage, message = DAMAGES[case]
        damage(copy / "data")
        assert message in error_line("run", "tiny", *keys(copy / "data", tmp_path / "new"))
        assert not (tmp_path / "new" / "config.json").exists()

    def test_a_tokenizer_that_goes_while_a_run_trains_takes_no_checkpoint_with_it(
        self, copy, tmp_path, monkeypatch
    ):
        step, out = TrainingStep.__call__, tmp_path / "new"

        def step_and_lose(*arguments):
            assert (out / "tokenizer.json").is_file()
            (copy / "data" / "tokenizer.json").unlink(missing_ok=True)
            return step(*arguments)

        monkeypatch.setattr(TrainingStep, "__call__", step_and_lose)
        train("run", "tiny", *keys(copy / "data", out))
        kept = (out / "tokenizer.json").read_bytes()
        assert (out / "checkpoints" / "step-00000012" / "tokenizer.json").read_bytes() == kept

    def test_run_refuses_a_token_beyond_the_vocabulary(self, copy, tmp_path):
        path = next((copy / "data").glob("*_train_*.bin"))
        content = bytearray(path.read_bytes())
        content[HEADER_BYTES:] = b"\xff" * (len(content) - HEADER_BYTES)
        path.write_bytes(content)
        meta = json.loads((copy / "data" / "meta.json").read_bytes())
        meta["splits"]["train"]["shards"][0]["sha256"] = sha256_of(path)
        (copy / "data" / "meta.json").write_text(json.dumps(meta))
        assert "has token id 65535" in error_line(
            "run", "tiny", *keys(copy / "data", tmp_path / "new")
        )

    def test_resume_refuses_other_data_than_the_run_began_with(self, copy, tmp_path):
        other = tmp_path / "other"
        other.mkdir()
        (other / "text.txt").write_text(tiny_run.make_text().replace("1", "3"))
        prepare_text(other / "text.txt", other / "data")
        before = read_tree(copy / "run")
        message = error_line("resume", copy / "run", "steps=20", f"data.folder={other / 'data'}")
        assert "holds other tokens than the run began with" in message
        assert read_tree(copy / "run") == before


OTHER_RUNS = {
    "model": (["model.width=32"], "model.width from 16 to 32"),
    "two keys": (["optimizer.lr=1", "seed=3"], "seed from 42 to 3, optimizer.lr from 0.01 to 1.0"),
    "folder": (["out=elsewhere"], "out from"),
    "crops": (["evaluation.sequences=2"], "evaluation.sequences from 4 to 2"),
    "fewer steps": (["steps=3"], "steps=3 is below step 12"),
    "no such step": (["--step", "7"], "no checkpoint of step 7"),
}


class TestResume:
    @pytest.mark.parametrize("case", OTHER_RUNS)
    def test_resume_refuses_changes_that_make_another_run(self, place, case):
        changes, message = OTHER_RUNS[case]
        before = read_tree(place / "run")
        assert message in error_line("resume", place / "run", *changes)
        assert read_tree(place / "run") == before

    def test_resume_refuses_a_config_json_edited_by_hand(self, copy):
        path = copy / "run" / "config.json"
        content = json.loads(path.read_bytes())
        content["optimizer"]["lr"] = 0.5
        path.write_text(json.dumps(content))
        before = read_tree(copy / "run")
        message = error_line("resume", copy / "run", "steps=20")
        assert (
            "step-00000012 was saved with another configuration: optimizer.lr was 0.01, is 0.5"
            in message
        )
        assert read_tree(copy / "run") == before

    def test_resume_names_every_checkpoint_when_all_are_damaged(self, copy):
        for path in (copy / "run" / "checkpoints").glob("step-*/model.safetensors"):
            path.write_bytes(path.read_bytes()[:100])
        before = read_tree(copy / "run")
        status, out, err = run_command("resume", copy / "run", "steps=20")
        assert status == 2 and "every checkpoint in" in err and "restore one from a backup" in err
        assert out.count("is damaged") == 3, "each damaged checkpoint is named"
        assert read_tree(copy / "run") == before


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])
