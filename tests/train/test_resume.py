"""A run killed and resumed is, bit for bit, the run that was not: lines, samples, weights, optimizer.

SIGKILL leaves no chance to tidy up. It comes at random moments and, because those rarely hit the microseconds
between two renames, also before each single operation that makes something durable.
"""

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.support import tiny_run
from tests.support.tiny_run import final_state, keys, read_metrics, start, train


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return tiny_run.prepare_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def undisturbed(data, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    train("run", "tiny", *keys(data, out))
    return out


def interrupted_run(data: Path, out: Path, log: Path, kills: int, seed: int) -> list[int]:
    """Start a run, kill and resume it at random moments, let it finish. The last step before each kill."""
    rng = random.Random(seed)
    steps = []
    # a target is a step to wait for, so that kills spread over the run however fast the machine is; the delay
    # after it is some steps long, or a checkpoint
    for target in sorted(rng.uniform(-1, 11) for _ in range(kills)):
        begun = (out / "config.json").exists()
        child = start(["resume", out] if begun else ["run", "tiny", *keys(data, out, log__every=1)], log)
        assert child.pid is not None
        while child.is_alive() and last_step(out) < target:
            time.sleep(0.001)
        child.join(rng.uniform(0, 0.1))
        if child.is_alive():
            os.kill(child.pid, signal.SIGKILL)
        child.join()
        assert child.exitcode in (-signal.SIGKILL, 0), log.read_text()
        steps.append(last_step(out))
    train(*(["resume", out] if (out / "config.json").exists() else ["run", "tiny", *keys(data, out)]))
    return steps


def last_step(out: Path) -> int:
    return max((line["step"] for line in read_metrics(out)), default=0)


class TestKilled:
    def test_at_random_moments(self, data, undisturbed, tmp_path):
        interrupted_run(data, tmp_path / "run", tmp_path / "log", kills=3, seed=1)
        assert final_state(tmp_path / "run") == final_state(undisturbed)

    @pytest.mark.slow
    def test_at_twenty_random_moments(self, data, undisturbed, tmp_path):
        everywhere = []
        for seed in range(5):
            out = tmp_path / f"run{seed}"
            steps = interrupted_run(data, out, tmp_path / "log", kills=4, seed=100 + seed)
            assert final_state(out) == final_state(undisturbed), (seed, steps)
            everywhere += steps
        assert sum(step < 12 for step in everywhere) >= 15, f"{everywhere}: too many came after the end"

    def test_before_operations_that_make_things_durable(self, data, undisturbed, tmp_path):
        self.kill_before(data, undisturbed, tmp_path, operations=[2, 9, 31, 40])

    @pytest.mark.slow
    def test_before_every_operation_that_makes_things_durable(self, data, undisturbed, tmp_path):
        killed = self.kill_before(data, undisturbed, tmp_path, operations=range(1, 500))
        assert killed > 60, "four checkpoints of ten files each are far more operations"

    def kill_before(self, data: Path, undisturbed: Path, tmp_path: Path, operations) -> int:
        """SIGKILL just before the n-th fsync, rename, replace or truncate. How many runs were killed."""
        killed = 0
        for n in operations:
            out = tmp_path / "run"
            shutil.rmtree(out, ignore_errors=True)
            arguments = ["run", "tiny", *keys(data, out)]
            child = tiny_run.WARM.Process(target=_killed_before, args=(n, arguments, str(tmp_path / "log")))
            child.start()
            child.join()
            if child.exitcode == 0:
                break
            assert child.exitcode == -signal.SIGKILL, (tmp_path / "log").read_text()
            killed += 1
            train(*(["resume", out] if (out / "config.json").exists() else arguments))
            assert final_state(out) == final_state(undisturbed), f"killed before operation {n}"
        return killed

    def test_a_line_cut_short_is_repaired(self, data, undisturbed, tmp_path):
        out = tmp_path / "run"
        shutil.copytree(undisturbed, out, symlinks=True)
        for name in ("step-00000012", "step-00000008"):
            shutil.rmtree(out / "checkpoints" / name)
        metrics = out / "metrics.jsonl"
        metrics.write_bytes(metrics.read_bytes()[:-7])
        train("resume", out)
        assert final_state(out) == final_state(undisturbed)

    def test_lines_that_a_checkpoint_had_promised_are_not_made_up(self, data, undisturbed, tmp_path):
        """The comparison can fail: with a line gone from the middle, the resumed run's file stays shorter."""
        out = tmp_path / "run"
        shutil.copytree(undisturbed, out, symlinks=True)
        shutil.rmtree(out / "checkpoints" / "step-00000012")
        metrics = out / "metrics.jsonl"
        metrics.write_bytes(b"".join(metrics.read_bytes().splitlines(keepends=True)[1:]))
        train("resume", out)
        assert final_state(out) != final_state(undisturbed)


class TestForgets:
    """The comparison of the tests above sees each part of the state: without it the resumed run differs."""

    @pytest.mark.parametrize("what", ["optimizer", "position", "weights"])
    def test_what_is_not_restored_shows(self, data, undisturbed, tmp_path, monkeypatch, what):
        from delta_trn.train.checkpoints import contents as checkpoint
        from delta_trn.train.data.loader import RandomCrops
        from delta_trn.train.parallel.sharding import Sharding
        from delta_trn.train.run import setup as assembly

        out = tmp_path / "run"
        shutil.copytree(undisturbed, out, symlinks=True)
        shutil.rmtree(out / "checkpoints" / "step-00000012")
        if what == "optimizer":
            monkeypatch.setattr(Sharding, "load_slots", lambda self, optimizer, tensors: None)
        elif what == "position":
            monkeypatch.setattr(RandomCrops, "load_state_dict", lambda self, state: None)
        else:
            monkeypatch.setattr(checkpoint, "load_weights", lambda folder, model: None)
        assert assembly.checkpoint is checkpoint
        train("resume", out)
        assert final_state(out)["model.safetensors"] != final_state(undisturbed)["model.safetensors"]
        assert final_state(out)["metrics"] != final_state(undisturbed)["metrics"]


class TestContinuing:
    def test_more_steps(self, data, undisturbed, tmp_path):
        """With the schedule's end given, more steps are the steps that a longer run would have made."""
        short, long = tmp_path / "short", tmp_path / "long"
        train("run", "tiny", *keys(data, long, steps=18, schedule__decay_steps=18))
        train("run", "tiny", *keys(data, short, steps=12, schedule__decay_steps=18))
        said = train("resume", short, "steps=18")
        assert "steps changes from 12 to 18" in said
        assert final_state(short) == final_state(long)
        assert json.loads((short / "config.json").read_bytes())["steps"] == 18

    def test_stream_and_accumulation(self, data, tmp_path):
        changes = {"data__loader": "stream", "batch__micro": 2, "optimizer__name": "sgd"}
        train("run", "tiny", *keys(data, tmp_path / "a", **changes))
        train("run", "tiny", *keys(data, tmp_path / "b", **changes, steps=7, schedule__decay_steps=12))
        train("run", "tiny", *keys(data, tmp_path / "c", **changes, schedule__decay_steps=12))
        train("resume", tmp_path / "b", "steps=12")
        weights = [final_state(tmp_path / name)["model.safetensors"] for name in "abc"]
        assert weights[0] == weights[1] == weights[2]

    def test_a_finished_run_says_its_end_again(self, undisturbed, tmp_path):
        out = tmp_path / "run"
        shutil.copytree(undisturbed, out, symlinks=True)
        said = train("resume", out)
        assert "after step 12" in said and "this model (tiny)" in said and "steps=24" in said
        assert final_state(out) == final_state(undisturbed)

    def test_a_run_without_a_checkpoint_starts_over(self, undisturbed, tmp_path):
        out = tmp_path / "run"
        out.mkdir()
        shutil.copy(undisturbed / "config.json", out)
        (out / "metrics.jsonl").write_text('{"step": 1, "split": "train", "loss": 9.9}\n{"step"')
        said = train("resume", out)
        assert "at step 0: no checkpoint yet" in said
        assert final_state(out) == final_state(undisturbed)

    def test_a_moved_folder_and_moved_data(self, data, undisturbed, tmp_path):
        out, elsewhere = tmp_path / "moved", tmp_path / "elsewhere"
        shutil.copytree(undisturbed, out, symlinks=True)
        shutil.copytree(data, elsewhere)
        shutil.rmtree(out / "checkpoints" / "step-00000012")
        said = train("resume", out, f"data.folder={elsewhere}")
        assert f"to {elsewhere}" in said
        assert final_state(out) == final_state(undisturbed)

    def test_run_or_resume_begins_and_later_continues(self, data, undisturbed, tmp_path):
        """The command that torchrun repeats after a death: the same words each time."""
        out = tmp_path / "run"
        words = ["run", "--or-resume", "tiny", *keys(data, out)]
        train(*words)
        assert final_state(out) == final_state(undisturbed)
        shutil.rmtree(out / "checkpoints" / "step-00000012")
        said = train(*words)
        assert "after step 8" in said and " changes from " not in said
        assert final_state(out) == final_state(undisturbed)
        said = train("run", "--or-resume", "tiny", *keys(data, out, checkpoint__every=5))
        assert "checkpoint.every changes from 4 to 5" in said

    def test_run_or_resume_refuses_another_run_and_names_the_keys(self, data, undisturbed):
        words = ["run", "--or-resume", "tiny", *keys(data, undisturbed)]
        status, _, err = tiny_run.run_command(*words, "optimizer.lr=0.5", "model.layers=3")
        assert status == 2 and "another run" in err
        assert "optimizer.lr was " in err and ", is 0.5" in err and "model.layers was 2, is 3" in err
        status, _, err = tiny_run.run_command("run", "--or-resume", "tiny")
        assert status == 2 and "needs out=DIR" in err

    def test_seconds_go_on_from_where_they_were(self, undisturbed, tmp_path):
        out = tmp_path / "run"
        shutil.copytree(undisturbed, out, symlinks=True)
        began = time.monotonic()
        train("resume", out, "steps=13")
        passed = time.monotonic() - began
        times = [line["seconds"] for line in tiny_run.read(out / "metrics.jsonl")]
        assert times == sorted(times)
        assert times[-1] - times[-4] < passed


def _killed_before(n: int, arguments: list[str], log: str) -> None:
    """In a child: `python -m train ...` that dies by SIGKILL before its n-th durable operation."""
    tiny_run.die_before(n)
    tiny_run.run_and_exit([str(argument) for argument in arguments], log)
