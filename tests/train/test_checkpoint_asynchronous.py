"""Saver while training goes on: the same checkpoints, at most one on its way, and no failure unseen."""

import errno
import os
import threading
from pathlib import Path

import pytest

from delta_trn.train.checkpoints import contents as checkpoint
from delta_trn.train.checkpoints.saver import Saver
from tests.support import team_run, tiny_run
from tests.support.tiny_run import final_state, read_metrics


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return tiny_run.prepare_data(tmp_path_factory.mktemp("data"))


def keys(data: Path, out: Path, **changes: object) -> list[str]:
    return tiny_run.keys(data, out, log__every=1, checkpoint__asynchronous="true", **changes)


class TestSaver:
    def test_a_job_goes_on_while_its_caller_does_and_the_next_waits_for_it(self):
        may_end, done = threading.Event(), []
        saver = Saver(asynchronous=True)

        def first() -> None:
            may_end.wait(60)
            done.append(1)

        saver.begin(first)
        assert done == [] and not saver.failed
        threading.Timer(0.05, may_end.set).start()
        saver.begin(lambda: done.append(2))
        assert done[0] == 1
        saver.settle()
        assert done == [1, 2]

    def test_what_a_job_raises_is_seen_and_raised_once(self):
        saver = Saver(asynchronous=True)
        saver.begin(lambda: 1 / 0)
        saver.wait()
        assert saver.failed
        with pytest.raises(ZeroDivisionError):
            saver.begin(lambda: None)
        saver.settle()

    def test_in_turn_it_is_done_when_begin_returns(self):
        done: list[int] = []
        Saver(asynchronous=False).begin(lambda: done.append(1))
        assert done == [1]


def slowly(before_writing: list[int], monkeypatch) -> None:
    """Have every checkpoint written only after training has taken two more steps, or ended."""
    write, step = checkpoint.write, threading.Condition()
    from delta_trn.train.run.loop import _Loop

    one_step, settle = _Loop._one_step, Saver.settle
    taken, ending = [0], [False]

    def stepped(self):
        one_step(self)
        with step:
            taken[0] = self.run.state.step
            step.notify_all()

    def settling(self):
        with step:
            ending[0] = True
            step.notify_all()
        settle(self)
        ending[0] = False

    def late(folder, snapshot, **options):
        with step:
            assert step.wait_for(lambda: ending[0] or taken[0] >= snapshot.state.step + 2, timeout=60)
            before_writing.append(taken[0] - snapshot.state.step)
        return write(folder, snapshot, **options)

    monkeypatch.setattr(_Loop, "_one_step", stepped)
    monkeypatch.setattr(Saver, "settle", settling)
    monkeypatch.setattr(checkpoint, "write", late)


def test_it_writes_what_was_there_when_it_was_told_to(data, tmp_path, monkeypatch):
    tiny_run.train("run", "tiny", *tiny_run.keys(data, tmp_path / "expected", log__every=1))
    steps_between: list[int] = []
    slowly(steps_between, monkeypatch)
    tiny_run.train("run", "tiny", *keys(data, tmp_path / "run"))
    assert steps_between == [2, 2, 2, 0], "the last one after the last step, the others during others"
    for name in ("step-00000006", "step-00000008", "step-00000012"):
        assert final_state(tmp_path / "run", name) == final_state(tmp_path / "expected", name)


def test_without_a_copy_the_comparison_fails(data, tmp_path, monkeypatch):
    tiny_run.train("run", "tiny", *tiny_run.keys(data, tmp_path / "expected", log__every=1))
    slowly([], monkeypatch)
    monkeypatch.setattr(checkpoint, "_on_host", lambda x, copy: x.detach())
    tiny_run.train("run", "tiny", *keys(data, tmp_path / "run"))
    name = "step-00000008"
    assert final_state(tmp_path / "run", name) != final_state(tmp_path / "expected", name)


def test_a_failure_is_raised_at_the_next_step(data, tmp_path, monkeypatch):
    def full(folder, snapshot, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint, "write", full)
    monkeypatch.setattr(Saver, "begin", _and_wait(Saver.begin))
    status, out, err = tiny_run.run_command("run", "tiny", *keys(data, tmp_path / "run"))
    assert status == 2 and "no space left" in err and "step-00000004" in err and "none yet" in err
    steps = [line["step"] for line in read_metrics(tmp_path / "run")]
    assert max(steps) == 4, "the fifth step is not even reported"
    assert "checkpoint is written" not in out
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


def _and_wait(begin):
    def begin_and_wait(self, job):
        begin(self, job)
        self.wait()

    return begin_and_wait


def test_of_several_processes(data, tmp_path):
    for name, arguments in (("expected", tiny_run.keys), ("run", keys)):
        given = {"distribution__mode": "fsdp", "steps": 8, "evaluation__every": 8}
        team_run.train(
            2, ["run", "tiny", *arguments(data, tmp_path / name, **given)], tmp_path / f"{name}-logs"
        )
    assert final_state(tmp_path / "run") == final_state(tmp_path / "expected")
