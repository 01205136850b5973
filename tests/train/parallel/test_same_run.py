"""Processes that were given different runs are refused on every rank,
before anything is written.
"""

import contextlib
import itertools
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from delta_trn.train.parallel.agreement import given, require_same
from delta_trn.train.recipes import recipe
from delta_trn.train.run.setup import resume, start
from delta_trn.train.settings.errors import CheckpointError, ConfigError, DataError, RunFolderError
from delta_trn.train.settings.overrides import apply, parse
from tests.support import team_run, tiny_run
from tests.support.corpus import prepare_text

SECONDS = 60  # in which no process may wait for another in vain; a machine may be busy


def refusal(*ranks: dict[str, str], steps: tuple[int | None, ...] = (), failure: Any = None) -> str:
    """Returns what processes with these changes of one recipe are told;
    nothing where they may train.
    """
    among = []
    for changes, step in itertools.zip_longest(ranks, steps):
        config = apply(recipe("tiny"), changes)
        among.append(given(config, resolved=True, also={"--step": step}, failure=failure))
    try:
        require_same(among)
    except ConfigError as error:
        return str(error)
    return ""


def test_only_paths_of_their_own_disks_may_differ():
    with TemporaryDirectory() as a, TemporaryDirectory() as b:
        assert not refusal(*({"data.source": x, "data.folder": x} for x in (a, b)))
        assert "data.source is " in refusal({"data.source": a}, {})
        assert f"out is {a} on rank 0, {b} on rank 1;" in refusal({"out": a}, {"out": b})
    for name in ("~nobody/a", "a" * 5000):
        assert f"data.source is {name} on rank 0, " in refusal({"data.source": name}, {})
    rates = [{"optimizer.lr": lr} for lr in ("0.1", "0.2", "0.1", "0.2", "0.2")]
    assert "optimizer.lr is 0.1 on ranks 0, 2, 0.2 on ranks 1, 3-4;" in refusal(*rates)
    assert "--step is none on rank 0, 4 on rank 1;" in refusal({}, {}, steps=(None, 4))
    assert refusal({}, {}, failure=ConfigError("no device")) == "no device"


def run_as_given(arguments: list[str], log: str) -> None:
    """Runs the command of this rank: arguments are the commands of all ranks, as JSON."""
    tiny_run.run_and_exit(json.loads(arguments[int(os.environ["RANK"])]), log)


def end_ranks(commands: list[list[str]], logs: Path) -> list[int]:
    """Returns the exit codes of processes of which each has a command of its own."""
    words = [json.dumps(command) for command in commands]
    return team_run.join(team_run.start(len(words), words, logs, run_as_given), logs, SECONDS)


def test_another_rate_on_one_process_is_refused_on_both(data, tmp_path):
    out, logs = tmp_path / "run", tmp_path / "logs"
    both = [["run", "tiny", *tiny_run.keys(data, out, optimizer__lr=lr)] for lr in (0.1, 0.2)]
    assert end_ranks(both, logs) == [2, 2], team_run.read_logs(logs)
    for path in logs.iterdir():
        output = path.read_text()
        assert (
            "optimizer.lr is 0.1 on rank 0, 0.2 on rank 1; give every process the same" in output
        ), output
        assert "Traceback" not in output
    assert not out.exists()


def test_equal_runs_from_different_paths_and_device_names_train(data, tmp_path):
    out, copy = tmp_path / "run", tmp_path / "copy"
    shutil.copytree(data, copy)
    both = [
        ["run", "tiny", *tiny_run.keys(source, out, device=device, steps=2, precision=precision)]
        for source, device, precision in ((data, "cpu", "float32"), (copy, "cpu:0", "float32"))
    ]
    logs = tmp_path / "logs"
    assert end_ranks(both, logs) == [0, 0], team_run.read_logs(logs)
    assert json.loads((out / "config.json").read_bytes())["data"]["source"] == str(data)


@contextlib.contextmanager
def refused(kind: type[Exception], *words: str) -> Iterator[None]:
    with pytest.raises(kind) as caught:
        yield
    message = str(caught.value)
    assert type(caught.value) is kind and all(word in message for word in words), message
    print(message, file=sys.stderr)


def check_starts(arguments: list[str], log: str) -> None:
    """Checks on each of two processes that runs are refused in which they differ."""
    tiny_run.redirect_output(log)
    data, other, folder = arguments
    second = os.environ["RANK"] == "1"
    out = Path(folder) / "run"

    def begin(first: dict[str, Any], then: dict[str, Any]) -> None:
        changes = {key: str(value) for key, value in (then if second else first).items()}
        with start(apply(recipe("tiny"), {**parse(tiny_run.keys(Path(data), out)), **changes})):
            raise AssertionError("a run of two configurations has begun")

    # in the order in which keys are declared
    with refused(
        ConfigError, "steps is 12 on rank 0, 13 on rank 1; seed is 1 on rank 0, 2 on rank 1; give"
    ):
        begin({"seed": 1}, {"seed": 2, "steps": 13})
    with refused(ConfigError, "out is ", f"{out} on rank 0, {out}-2 on rank 1;"):
        begin({}, {"out": f"{out}-2"})
    with refused(ConfigError, "precision is float32 on rank 0, bf16_products on rank 1;"):
        begin({"precision": "float32"}, {"precision": "bf16_products"})
    # would end one of them, or make groups that wait for each other
    with refused(ConfigError, "batch.sequences is 4 on rank 0, 7 on rank 1;"):
        begin({}, {"batch.sequences": 7})
    with refused(ConfigError, "distribution.tensor is 1 on rank 0, 2 on rank 1;"):
        begin({}, {"distribution.tensor": 2})
    with refused(ConfigError, "on rank 1: ", "device=nowhere"):
        begin({}, {"device": "nowhere"})
    with refused(ConfigError, "cannot be shared by 2 data-parallel"):
        begin({"batch.sequences": 7}, {"batch.sequences": 7})
    with refused(ConfigError, "data.source is ", " on rank 0, python-stdlib on rank 1;"):
        begin({}, {"data.source": "python-stdlib"})
    with refused(DataError, f"{other} holds other tokens on rank 1 than on rank 0"):
        begin({}, {"data.source": other})
    assert not out.exists() and not Path(f"{out}-2").exists()


def test_runs_in_which_two_processes_differ_are_not_begun(data, tmp_path):
    text = tmp_path / "other.txt"
    text.write_text("<|endoftext|>".join(f"{n} is no sum" for n in range(50)))
    other = prepare_text(text, tmp_path / "other", val_fraction=0.1)
    finish([data, other, tmp_path], tmp_path / "logs", check_starts)


def finish(arguments: list[object], logs: Path, work: Any) -> None:
    codes = team_run.join(team_run.start(2, arguments, logs, work), logs, SECONDS)
    assert codes == [0, 0], team_run.read_logs(logs)


def check_resumes(arguments: list[str], log: str) -> None:
    """Checks on each of two processes that runs are refused which they would resume differently."""
    tiny_run.redirect_output(log)
    second = os.environ["RANK"] == "1"
    out, other_rate, other_run, other_weights = map(Path, arguments)

    def go_on(
        first: dict[str, str],
        then: dict[str, str],
        steps: tuple[int | None, int | None] = (None, None),
        path: Path = out,
    ) -> None:
        with resume(path if second else out, then if second else first, steps[second], print):
            raise AssertionError("a run of two configurations was resumed")

    with refused(
        ConfigError, "steps is 13 on rank 0, 14 on rank 1; log.every is ", ", 3 on rank 1; give"
    ):
        go_on({"steps": "13"}, {"steps": "14", "log.every": "3"})
    with refused(ConfigError, "on rank 1: resuming may not change optimizer.lr from 0.01 to 0.02"):
        go_on({}, {"optimizer.lr": "0.02"})
    with refused(ConfigError, "--step is none on rank 0, 0 on rank 1;"):
        go_on({}, {}, steps=(None, 0))
    with refused(
        RunFolderError,
        "on rank 1: ",
        "optimizer.lr is 0.01 on rank 0 and 0.02 here; give every node",
    ):
        go_on({}, {}, path=other_rate)
    with refused(RunFolderError, "on rank 1: ", "run.id is ", "and another here; give every node"):
        go_on({}, {}, path=other_run)
    with refused(CheckpointError, "the checkpoint of step 12 on rank 1 is not rank 0's"):
        go_on({}, {}, path=other_weights)


def contents(folder: Path) -> dict[str, bytes]:
    """Returns what is in a folder, without the lock."""
    return {
        str(path): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name[0] != "."
    }


def test_runs_that_two_processes_would_resume_differently_are_left_alone(finished, tmp_path):
    folders = [tmp_path / name for name in ("run", "rate", "id", "weights")]
    for folder in folders:
        shutil.copytree(finished, folder, symlinks=True)
    out, rate, run, weights = folders
    tree = json.loads((out / "config.json").read_bytes())
    optimizer, origin = {**tree["optimizer"], "lr": 0.02}, {**tree["run"], "id": "another"}
    (rate / "config.json").write_text(json.dumps({**tree, "optimizer": optimizer}))
    (run / "config.json").write_text(json.dumps({**tree, "run": origin}))
    manifest = weights / "checkpoints" / "step-00000012" / "manifest.json"
    manifest.write_text(manifest.read_text() + "\n")
    before = contents(out)
    finish(list(folders), tmp_path / "logs", check_resumes)
    assert contents(out) == before
