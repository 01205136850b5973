"""What happens to some processes of a run: nothing reported as saved is lost, and the run goes on from it."""

import os
import signal
import time
from pathlib import Path

import pytest
import team_run
import tiny_run
from tiny_run import left_by, lines


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return tiny_run.prepared(tmp_path_factory.mktemp("data"))


def keys(data: Path, out: Path) -> list[str]:
    return tiny_run.keys(data, out, steps=40, log__every=1, checkpoint__every=5, evaluation__every=20)


@pytest.fixture(scope="module")
def undisturbed(data, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    team_run.train(2, ["run", "tiny", *keys(data, folder / "run")], folder / "logs")
    return folder / "run"


def wait_for(out: Path, step: int) -> None:
    until = time.monotonic() + 100
    while max((line["step"] for line in lines(out)), default=0) < step:
        assert time.monotonic() < until, "the run does not get there"
        time.sleep(0.005)


def test_sigterm_to_all_saves_and_the_rest_is_the_same_run(data, undisturbed, tmp_path):
    out = tmp_path / "run"
    processes = team_run.start(2, ["run", "tiny", *keys(data, out)], tmp_path / "logs")
    wait_for(out, 7)
    for process in processes:
        os.kill(process.pid, signal.SIGTERM)
    logs = tmp_path / "logs"
    assert team_run.joined(processes, logs) == [128 + signal.SIGTERM] * 2, team_run.said(logs)
    assert "stopped by SIGTERM" in (logs / "rank-0").read_text()
    team_run.train(2, ["resume", out], tmp_path / "again")
    assert left_by(out) == left_by(undisturbed)


@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_sigkill_of_one_ends_the_other_and_the_rest_is_the_same_run(data, undisturbed, tmp_path, victim):
    """The other one finds its neighbor gone at the next collective; under torchrun it would be ended."""
    out = tmp_path / "run"
    processes = team_run.start(2, ["run", "tiny", *keys(data, out)], tmp_path / "logs")
    wait_for(out, 7)
    os.kill(processes[victim].pid, signal.SIGKILL)
    logs = tmp_path / "logs"
    codes = team_run.joined(processes, logs)
    assert codes[victim] == -signal.SIGKILL
    assert codes[1 - victim] != 0, team_run.said(logs)
    assert (out / "checkpoints" / "step-00000005").is_dir()
    team_run.train(2, ["resume", out], tmp_path / "again")
    assert left_by(out) == left_by(undisturbed)
