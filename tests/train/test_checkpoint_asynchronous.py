"""Saver during training: it writes the same checkpoints, one at a time, and reports every failure."""

import errno
import os
import threading
from pathlib import Path

import pytest

from delta_trn.train.checkpoints import contents as checkpoint
from delta_trn.train.checkpoints.saver import Saver
from delta_trn.train.run.step import TrainingStep
from tests.support import team_run, tiny_run
from tests.support.tiny_run import final_state, read_metrics


def keys(data: Path, out: Path, **changes: object) -> list[str]:
    return tiny_run.keys(data, out, log__every=1, checkpoint__asynchronous="true", **changes)


class TestSaver:
    def test_a_save_job_runs_beside_its_caller_and_the_next_waits_for_it(self):
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

    def test_an_exception_in_a_save_job_is_raised_once_by_the_next_begin(self):
        saver = Saver(asynchronous=True)
        saver.begin(lambda: 1 / 0)
        saver.wait()
        assert saver.failed
        with pytest.raises(ZeroDivisionError):
            saver.begin(lambda: None)
        saver.settle()

    def test_a_synchronous_save_is_done_when_begin_returns(self):
        done: list[int] = []
        Saver(asynchronous=False).begin(lambda: done.append(1))
        assert done == [1]


def delay_writing(steps_between: list[int], monkeypatch) -> None:
    """Delays the writing of every checkpoint until training has taken two more steps, or has ended.

    Appends to `steps_between` how many steps were taken in between.
    """
    write, step = checkpoint.write, threading.Condition()
    one_step, settle = TrainingStep.__call__, Saver.settle
    taken, ending = [0], [False]

    def counted(self, *arguments):
        result = one_step(self, *arguments)
        with step:
            taken[0] += 1
            step.notify_all()
        return result

    def announce_end(self):
        with step:
            ending[0] = True
            step.notify_all()
        settle(self)
        ending[0] = False

    def write_late(folder, snapshot, **options):
        with step:
            assert step.wait_for(lambda: ending[0] or taken[0] >= snapshot.state.step + 2, timeout=200)
            steps_between.append(taken[0] - snapshot.state.step)
        return write(folder, snapshot, **options)

    monkeypatch.setattr(TrainingStep, "__call__", counted)
    monkeypatch.setattr(Saver, "settle", announce_end)
    monkeypatch.setattr(checkpoint, "write", write_late)


def test_an_asynchronous_checkpoint_holds_the_state_of_its_own_step(data, tmp_path, monkeypatch):
    tiny_run.train("run", "tiny", *tiny_run.keys(data, tmp_path / "expected", log__every=1))
    steps_between: list[int] = []
    delay_writing(steps_between, monkeypatch)
    tiny_run.train("run", "tiny", *keys(data, tmp_path / "run"))
    assert steps_between == [2, 2, 2, 0], "the last one after the last step, the others during others"
    for name in ("step-00000006", "step-00000008", "step-00000012"):
        assert final_state(tmp_path / "run", name) == final_state(tmp_path / "expected", name)


def test_an_asynchronous_checkpoint_without_a_copy_holds_a_later_state(data, tmp_path, monkeypatch):
    tiny_run.train("run", "tiny", *tiny_run.keys(data, tmp_path / "expected", log__every=1))
    delay_writing([], monkeypatch)
    monkeypatch.setattr(checkpoint, "_on_host", lambda x, copy: x.detach())
    tiny_run.train("run", "tiny", *keys(data, tmp_path / "run"))
    name = "step-00000008"
    assert final_state(tmp_path / "run", name) != final_state(tmp_path / "expected", name)


def test_a_failed_asynchronous_save_ends_the_run_after_the_same_step(data, tmp_path, monkeypatch):
    def fail(folder, snapshot, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint, "write", fail)
    begin = Saver.begin
    monkeypatch.setattr(Saver, "begin", lambda self, job: (begin(self, job), self.wait()))
    status, out, err = tiny_run.run_command("run", "tiny", *keys(data, tmp_path / "run"))
    assert status == 2 and "no space left" in err and "step-00000004" in err and "none yet" in err
    steps = [line["step"] for line in read_metrics(tmp_path / "run")]
    assert max(steps) == 4, "the fifth step is not even reported"
    assert "checkpoint is written" not in out
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


def test_asynchronous_and_synchronous_checkpoints_of_two_processes_are_equal(data, tmp_path):
    for name, arguments in (("expected", tiny_run.keys), ("run", keys)):
        changes = {"distribution__mode": "fsdp", "steps": 8, "evaluation__every": 8}
        team_run.train(
            2, ["run", "tiny", *arguments(data, tmp_path / name, **changes)], tmp_path / f"{name}-logs"
        )
    assert final_state(tmp_path / "run") == final_state(tmp_path / "expected")
