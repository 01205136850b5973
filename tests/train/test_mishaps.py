"""What fails beside training costs nothing of it: a sample, a picture, a tracker, a probe, the
display.

A checkpoint is written before the evaluation and the sample of its step, and a line names what
failed.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from delta_trn.train.run import loop
from delta_trn.train.studies import probes
from delta_trn.train.watch import display, loss_plot, summary
from tests.support import team_run, tiny_run
from tests.support.tiny_run import final_state, keys, read_metrics, train


def fail(*arguments: object, **options: object) -> None:
    raise RuntimeError("out of\nluck")


def steps_of(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").glob("step-*"))


def weights(run: Path) -> bytes:
    return final_state(run)["model.safetensors"]


class Failing:
    """A tracker whose method `when` fails."""

    def __init__(self, when: str):
        self.when, self.calls = when, 0

    def log(self, values: dict, step: int) -> None:
        self.calls += 1
        if self.when == "log":
            fail()

    def finish(self) -> None:
        if self.when == "finish":
            fail()


class TestARunGoesOn:
    def test_where_a_sample_fails(self, data, finished, tmp_path, monkeypatch):
        monkeypatch.setattr(loop, "continue_text", fail)
        output = train("run", "tiny", *keys(data, tmp_path / "run"))
        assert "no sample at step 6: RuntimeError: out of luck" in output
        assert steps_of(tmp_path / "run") == steps_of(finished)
        assert weights(finished) == weights(tmp_path / "run")
        assert read_metrics(tmp_path / "run") == read_metrics(finished), "evaluations are there"

    @pytest.mark.parametrize("module", [loss_plot, summary], ids=["picture", "last page"])
    def test_where_its_last_page_fails(
        self, data, finished, tmp_path, monkeypatch, module, request
    ):
        what = request.node.callspec.id
        monkeypatch.setattr(module, "plot_loss" if module is loss_plot else "closing", fail)
        output = train("run", "tiny", *keys(data, tmp_path / "run"))
        assert f"no {what}: RuntimeError: out of luck" in output
        assert final_state(tmp_path / "run") == final_state(finished)

    @pytest.mark.parametrize("when", ["init", "log", "finish"])
    def test_where_a_tracker_fails(self, data, finished, tmp_path, monkeypatch, when):
        tracker = Failing(when)
        wandb = ModuleType("wandb")
        wandb.__spec__ = ModuleSpec("wandb", None)
        wandb.init = fail if when == "init" else lambda **options: tracker  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "wandb", wandb)
        output = train("run", "tiny", *keys(data, tmp_path / "run"), "log.wandb=true")
        assert output.count("no wandb from here on: RuntimeError: out of luck") == 1
        assert tracker.calls == {"init": 0, "log": 1, "finish": 14}[when], "it gets nothing more"
        assert final_state(tmp_path / "run") == final_state(finished)

    def test_where_a_probe_fails(self, data, finished, tmp_path, monkeypatch):
        monkeypatch.setattr(probes, "measure", fail)
        output = train("run", "tiny", *keys(data, tmp_path / "run"), "log.probes=true")
        assert "no probes at step" in output
        assert weights(tmp_path / "run") == weights(finished)

    def test_where_the_display_fails(self, data, finished, tmp_path, monkeypatch):
        monkeypatch.setattr(display.Display, "update", fail)
        output = train("run", "tiny", *keys(data, tmp_path / "run"))
        assert "no progress line at step 6: RuntimeError" in output
        assert final_state(tmp_path / "run") == final_state(finished)

    def test_where_its_output_is_on_a_full_disk(self, data, finished, tmp_path):
        words = [sys.executable, "-m", "delta_trn", "run", "tiny", *keys(data, tmp_path / "run")]
        with open("/dev/full", "w") as full:
            ended = subprocess.run(
                words, stdout=full, stderr=subprocess.PIPE, text=True, timeout=200
            )
        assert ended.returncode == 0 and "No space left on device" in ended.stderr, ended.stderr
        assert ended.stderr.count("the work goes on") == 1
        assert final_state(tmp_path / "run") == final_state(finished)


class TestACheckpointIsThere:
    def test_when_its_evaluation_fails(self, data, finished, tmp_path, monkeypatch):
        out = tmp_path / "run"
        with monkeypatch.context() as patched:
            patched.setattr(loop, "evaluate", fail)
            with pytest.raises(RuntimeError, match="luck"):
                tiny_run.run_command("run", "tiny", *keys(data, out, evaluation__every=4))
        assert steps_of(out) == ["step-00000004"]
        train("resume", out, "evaluation.every=6")
        assert weights(out) == weights(finished)

    @pytest.mark.parametrize("at", ["sample", "evaluation"])
    def test_when_the_process_is_killed_in_its(self, data, tmp_path, monkeypatch, at):
        """The resumed run makes the evaluation and the sample
        that the checkpoint owes, once each.
        """
        changes = {"evaluation__every": 4}
        train("run", "tiny", *keys(data, tmp_path / "whole", **changes))
        out = tmp_path / "run"

        def die(*arguments: object, **options: object) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        def killed() -> None:
            monkeypatch.setattr(loop, "continue_text" if at == "sample" else "evaluate", die)
            train("run", "tiny", *keys(data, out, **changes))

        assert tiny_run.in_child(killed) == signal.SIGKILL
        assert steps_of(out) == ["step-00000004"]
        assert json.loads((out / "checkpoints/step-00000004/state.json").read_bytes())["owes"]
        train("resume", out)
        assert final_state(out) == final_state(tmp_path / "whole")

    def test_and_its_evaluation_is_not_made_again_when_it_was_reported(
        self, finished, tmp_path, monkeypatch
    ):
        out = tmp_path / "run"
        shutil.copytree(finished, out, symlinks=True)
        monkeypatch.setattr(loop, "evaluate", fail)
        train("resume", out)
        assert final_state(out) == final_state(finished)


def fail_to_sample(arguments: list[str], log: str) -> None:
    """Runs training where no process can sample."""
    loop.continue_text = fail  # type: ignore[assignment]
    tiny_run.run_and_exit(arguments, log)


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_processes_go_on_where_a_sample_fails_and_a_divided_model_has_none(data, tmp_path, mode):
    out, logs = tmp_path / "run", tmp_path / "logs"
    words = ["run", "tiny", *keys(data, out, distribution__mode=mode)]
    team_run.train(2, words, logs, fail_to_sample)
    output = (logs / "rank-0").read_text()
    assert ("no sample at step 12: RuntimeError: out of luck" in output) == (mode == "ddp")
    assert ("no samples: no process has all weights" in output) == (mode == "fsdp")
    assert steps_of(out)[-1] == "step-00000012"
