"""A run that is killed and resumed equals an undisturbed run bit for bit, in every file.

SIGKILL leaves no chance to tidy up. It comes at random moments. Those rarely hit the microseconds
between two renames, so it also comes before each single operation that makes something durable.
"""

import json
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

from delta_trn.train.checkpoints import contents as checkpoint
from delta_trn.train.data.loader import Loader, RandomCrops
from delta_trn.train.parallel.sharding import Sharding
from delta_trn.train.run import setup
from tests.support import tiny_run, warm
from tests.support.tiny_run import final_state, keys, read_metrics, start, train


def run_with_kills(
    data: Path, finished: Path, out: Path, log: Path, *, kills: int, seed: int
) -> list[int]:
    """Kills a run at random moments before its end, and resumes it. Returns the last step before
    each kill.

    A kill that comes after the last step does not count, and what there is then equals the finished
    run: the run is begun again. So neither a fast machine nor a loaded one changes how many kills a
    run survives.
    """
    rng = random.Random(seed)
    pace = max(line["seconds"] for line in tiny_run.read(finished / "metrics.jsonl")) / 12
    steps: list[int] = []
    for _ in range(4 * kills):
        if len(steps) == kills:
            break
        # each kill comes a little after a step that lies between those before it and the end
        target = rng.uniform(last_step(out), last_step(out) + 12 / kills)
        resuming = (out / "config.json").exists()
        child = start(
            ["resume", out] if resuming else ["run", "tiny", *keys(data, out, log__every=1)], log
        )
        deadline = time.monotonic() + 100
        while child.is_alive() and last_step(out) < target and time.monotonic() < deadline:
            time.sleep(0.001)
        child.join(rng.uniform(0, pace))
        child.kill()
        code = tiny_run.join(child)
        assert code in (-signal.SIGKILL, 0), log.read_text()
        if code == -signal.SIGKILL:
            steps.append(last_step(out))
        if last_step(out) == 12:  # nothing is left to kill
            train("resume", out)
            assert final_state(out) == final_state(finished), steps
            shutil.rmtree(out)
    assert len(steps) == kills, f"{steps}: the others came after the end"
    train(
        *(["resume", out] if (out / "config.json").exists() else ["run", "tiny", *keys(data, out)])
    )
    assert final_state(out) == final_state(finished), steps
    return steps


def last_step(out: Path) -> int:
    return max((line["step"] for line in read_metrics(out)), default=0)


class TestKilled:
    def test_a_run_killed_at_random_moments_resumes_the_same(self, data, finished, tmp_path):
        run_with_kills(data, finished, tmp_path / "run", tmp_path / "log", kills=3, seed=1)

    @pytest.mark.slow
    @pytest.mark.parametrize("seed", range(100, 110))
    def test_a_run_killed_at_fifty_random_moments_resumes_the_same(
        self, data, finished, tmp_path, seed
    ):
        """Each of ten seeds kills five times: `python -m pytest -m slow -k fifty tests/train`.

        test_distributed_faults.py does the same to two processes.
        """
        run_with_kills(data, finished, tmp_path / "run", tmp_path / "log", kills=5, seed=seed)

    def test_a_run_killed_before_some_disk_operations_resumes_the_same(
        self, data, finished, tmp_path
    ):
        self.kill_before(data, finished, tmp_path, operations=[2, 9, 31, 40])

    @pytest.mark.slow
    def test_a_run_killed_before_every_disk_operation_resumes_the_same(
        self, data, finished, tmp_path
    ):
        killed = self.kill_before(data, finished, tmp_path, operations=range(1, 500))
        assert killed > 60, "four checkpoints of ten files each are far more operations"

    def kill_before(self, data: Path, finished: Path, tmp_path: Path, operations) -> int:
        """Kills runs before their n-th fsync, rename, replace or truncate.
        Returns how many were killed.
        """
        killed = 0
        for n in operations:
            out = tmp_path / "run"
            shutil.rmtree(out, ignore_errors=True)
            arguments = ["run", "tiny", *keys(data, out)]
            child = warm.Process(target=_die_before, args=(n, arguments, str(tmp_path / "log")))
            child.start()
            code = tiny_run.join(child)
            if code == 0:
                break
            assert code == -signal.SIGKILL, (tmp_path / "log").read_text()
            killed += 1
            train(*(["resume", out] if (out / "config.json").exists() else arguments))
            assert final_state(out) == final_state(finished), f"killed before operation {n}"
        return killed

    def test_resume_repairs_a_metrics_line_cut_short(self, data, finished, tmp_path):
        out = tmp_path / "run"
        shutil.copytree(finished, out, symlinks=True)
        for name in ("step-00000012", "step-00000008"):
            shutil.rmtree(out / "checkpoints" / name)
        metrics = out / "metrics.jsonl"
        metrics.write_bytes(metrics.read_bytes()[:-7])
        train("resume", out)
        assert final_state(out) == final_state(finished)


class TestForgets:
    """The tests above can fail: without any one part of the state, the resumed run differs."""

    @pytest.mark.parametrize("what", ["optimizer", "position", "weights"])
    def test_a_run_resumed_without_part_of_its_state_differs(
        self, data, finished, tmp_path, monkeypatch, what
    ):
        out = tmp_path / "run"
        shutil.copytree(finished, out, symlinks=True)
        shutil.rmtree(out / "checkpoints" / "step-00000012")
        if what == "optimizer":
            monkeypatch.setattr(Sharding, "load_slots", lambda self, optimizer, tensors: None)
        elif what == "position":
            monkeypatch.setattr(RandomCrops, "load_state_dict", lambda self, state: None)
        else:
            monkeypatch.setattr(checkpoint, "load_weights", lambda folder, model: None)
        train("resume", out)
        assert final_state(out)["model.safetensors"] != final_state(finished)["model.safetensors"]
        assert final_state(out)["metrics"] != final_state(finished)["metrics"]


class TestContinuing:
    def test_resuming_with_more_steps_equals_a_longer_run(self, data, finished, tmp_path):
        """With a fixed end of the schedule, the added steps are those of a longer run."""
        short, long = tmp_path / "short", tmp_path / "long"
        train("run", "tiny", *keys(data, long, steps=18, schedule__decay_steps=18))
        train("run", "tiny", *keys(data, short, steps=12, schedule__decay_steps=18))
        output = train("resume", short, "steps=18")
        assert "steps changes from 12 to 18" in output
        assert final_state(short) == final_state(long)
        assert json.loads((short / "config.json").read_bytes())["steps"] == 18

    def test_resume_continues_the_stream_loader_with_gradient_accumulation(self, data, tmp_path):
        changes = {"data__loader": "stream", "batch__micro": 2, "optimizer__name": "sgd"}
        train("run", "tiny", *keys(data, tmp_path / "a", **changes))
        train(
            "run", "tiny", *keys(data, tmp_path / "b", **changes, steps=7, schedule__decay_steps=12)
        )
        train("run", "tiny", *keys(data, tmp_path / "c", **changes, schedule__decay_steps=12))
        train("resume", tmp_path / "b", "steps=12")
        weights = [final_state(tmp_path / name)["model.safetensors"] for name in "abc"]
        assert weights[0] == weights[1] == weights[2]

    def test_a_run_with_dropout_resumes_the_same(self, data, tmp_path, monkeypatch):
        changes = {"model__dropout": 0.3, "schedule__decay_steps": 12}
        train("run", "tiny", *keys(data, tmp_path / "whole", **changes))
        train("run", "tiny", *keys(data, tmp_path / "cut", **changes, steps=7))
        shutil.copytree(tmp_path / "cut", tmp_path / "other", symlinks=True)
        train("resume", tmp_path / "cut", "steps=12")
        whole = final_state(tmp_path / "whole")["model.safetensors"]
        assert final_state(tmp_path / "cut")["model.safetensors"] == whole
        # the comparison can fail: masks that start over differ
        noise = Loader.noise
        monkeypatch.setattr(Loader, "noise", lambda loader: noise(loader) ^ 1)
        train("resume", tmp_path / "other", "steps=12")
        assert final_state(tmp_path / "other")["model.safetensors"] != whole

    def test_a_generator_that_a_run_has_drawn_from_is_restored(self, data, tmp_path, monkeypatch):
        """Nothing here draws from it in training, but a layer of a user's own may."""
        next_batch = RandomCrops.next_batch
        monkeypatch.setattr(
            RandomCrops, "next_batch", lambda loader: (torch.rand(3), next_batch(loader))[1]
        )
        train("run", "tiny", *keys(data, tmp_path / "run", steps=4))
        saved, begin = torch.get_rng_state(), torch.Generator().manual_seed(42).get_state()
        assert not torch.equal(saved, begin), (
            "the run has drawn nothing, so that the test shows nothing"
        )
        torch.manual_seed(999)
        with setup.resume(tmp_path / "run", {}, None, print):
            assert torch.equal(torch.get_rng_state(), saved)

    def test_a_finished_run_is_not_measured_again_on_resume(self, finished, tmp_path, monkeypatch):
        out = tmp_path / "run"
        shutil.copytree(finished, out, symlinks=True)
        before = (out / "summary.json").read_bytes()

        def measure(*arguments, **options):
            raise AssertionError("measured again")

        with monkeypatch.context() as patched:
            patched.setattr("delta_trn.train.watch.summary.measure", measure)
            patched.setattr("delta_trn.train.run.setup.baselines", measure)
            patched.setattr("delta_trn.train.watch.loss_plot.plot_loss", measure)
            output = train("resume", out)
            with pytest.raises(AssertionError, match="measured again"):
                train("resume", out, "checkpoint.keep_last=2")
        assert (
            "finished   all 12 steps were trained before" in output
            and ", as before" in output  # nobody asked for its backend now
            and str(out / "loss.png") in output
        )
        assert not (out / "summary.json").exists(), "another configuration is measured anew"
        assert "finished   all" not in train("resume", out)
        assert (out / "summary.json").read_bytes() == before

    def test_resuming_a_run_without_a_checkpoint_starts_over(self, finished, tmp_path):
        out = tmp_path / "run"
        out.mkdir()
        shutil.copy(finished / "config.json", out)
        (out / "metrics.jsonl").write_text('{"step": 1, "split": "train", "loss": 9.9}\n{"step"')
        output = train("resume", out)
        assert "at step 0: no checkpoint yet" in output
        assert final_state(out) == final_state(finished)

    def test_a_run_resumes_after_its_folder_and_data_have_moved(self, data, finished, tmp_path):
        out, elsewhere = tmp_path / "moved", tmp_path / "elsewhere"
        shutil.copytree(finished, out, symlinks=True)
        shutil.copytree(data, elsewhere)
        shutil.rmtree(out / "checkpoints" / "step-00000012")
        output = train("resume", out, f"data.folder={elsewhere}")
        assert f"to {elsewhere}" in output
        assert final_state(out) == final_state(finished)

    def test_or_resume_starts_a_run_and_later_continues_it(self, data, finished, tmp_path):
        """torchrun repeats the same command after a process has died."""
        out = tmp_path / "run"
        words = ["run", "--or-resume", "tiny", *keys(data, out)]
        train(*words)
        assert final_state(out) == final_state(finished)
        shutil.rmtree(out / "checkpoints" / "step-00000012")
        output = train(*words)
        assert "after step 8" in output and " changes from " not in output
        assert final_state(out) == final_state(finished)
        output = train("run", "--or-resume", "tiny", *keys(data, out, checkpoint__every=5))
        assert "checkpoint.every changes from 4 to 5" in output

    def test_or_resume_refuses_another_run_and_names_the_changed_keys(self, data, finished):
        words = keys(data, finished, optimizer__lr=0.5, model__layers=3)
        status, _, err = tiny_run.run_command("run", "--or-resume", "tiny", *words)
        assert status == 2 and "another run" in err
        assert "optimizer.lr from 0.01 to 0.5" in err and "model.layers from 2 to 3" in err
        status, _, err = tiny_run.run_command("run", "--or-resume", "transfer", f"out={finished}")
        assert status == 2 and "name from tiny to transfer" in err
        status, _, err = tiny_run.run_command("run", "--or-resume", "tiny")
        assert status == 2 and "needs out=DIR" in err


def _die_before(n: int, arguments: list[str], log: str) -> None:
    """Runs `delta-trn ...` in a child that dies by SIGKILL before its n-th durable operation."""
    tiny_run.die_before(n)
    tiny_run.run_and_exit([str(argument) for argument in arguments], log)
