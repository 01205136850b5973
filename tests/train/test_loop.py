"""The training loop: what it reports and saves, when it stops,
and that observation changes nothing.
"""

import itertools
import json
import math
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from delta_trn.train.checkpoints.run_folder import RunFolder
from delta_trn.train.data.dataset import open_dataset
from delta_trn.train.recipes import recipe
from delta_trn.train.run import loop, stopping
from delta_trn.train.run.evaluate import held_out_windows
from delta_trn.train.run.stopping import StopRequest
from delta_trn.train.settings.overrides import change
from delta_trn.train.watch.metrics import read
from tests.support import tiny_run
from tests.support.planted_bugs import Bug, planted
from tests.support.tiny_run import (
    ONE_SUM,
    keys,
    metric_distance,
    nudge_weights,
    read_metrics,
    tolerance,
    train,
)


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(sorted((run / "checkpoints").glob("step-*"))[-1] / "model.safetensors")


def losses(run: Path, split: str = "train") -> list[float]:
    return [line["loss"] for line in read_metrics(run) if line["split"] == split]


@pytest.fixture(scope="module")
def rounding(data, finished, tmp_path_factory) -> float:
    """Returns how far rounding alone may move a loss of the finished run."""
    controls = []
    for seed in range(3):
        out = tmp_path_factory.mktemp("control") / "run"
        with nudge_weights(seed):
            train("run", "tiny", *keys(data, out))
        controls.append(metric_distance(out, finished, "loss"))
    return tolerance(controls)


class TestReports:
    def test_metrics_have_one_line_per_step_and_evaluation_in_order(self, finished):
        steps = [(line["step"], line["split"]) for line in read(finished / "metrics.jsonl")]
        expected = [(i, "train") for i in range(1, 13)]
        expected.insert(6, (6, "val"))
        assert steps == [*expected, (12, "val")]

    def test_metrics_lines_have_the_documented_fields(self, finished):
        train_line, val_line = (
            next(line for line in read(finished / "metrics.jsonl") if line["split"] == split)
            for split in ("train", "val")
        )
        assert {"step", "split", "loss", "tokens", "tokens_per_s", "lr", "grad_norm"} <= set(
            train_line
        )
        assert {"step", "split", "loss", "tokens", "perplexity", "bits_per_byte"} <= set(val_line)
        assert (
            train_line["tokens"] == 64
            and train_line["lr"] == 0.0
            and train_line["tokens_per_s"] > 0
        )
        assert val_line["perplexity"] == pytest.approx(math.exp(val_line["loss"]))
        # tokens are bytes, but bytes also pay for BOS and EOS: a little more than the loss in bits
        assert 1.0 < val_line["bits_per_byte"] / (val_line["loss"] / math.log(2)) < 1.02

    def test_a_run_rotates_checkpoints_and_keeps_the_best(self, data, tmp_path):
        out = tmp_path / "run"
        changes = {"checkpoint.every": 2, "checkpoint.keep_last": 1, "evaluation.every": 3}
        train("run", "tiny", *keys(data, out, **changes))
        val = losses(out, "val")
        best = 3 * (val.index(min(val)) + 1)
        kept = {path.name for path in (out / "checkpoints").iterdir()}
        assert kept == {"step-00000012", f"step-{best:08d}", "best"}
        assert os.readlink(out / "checkpoints" / "best") == f"step-{best:08d}"

    def test_a_tiny_run_lowers_its_loss(self, data, tmp_path):
        out = tmp_path / "run"
        train("run", "tiny", *keys(data, out, steps=60, batch__length=32, evaluation__every=30))
        assert losses(out)[0] == pytest.approx(math.log(320), abs=0.1), (
            "an untrained model is uniform"
        )
        assert losses(out, "val")[-1] < 3.0 < losses(out)[0] - 2

    def test_the_final_report_compares_with_baselines_and_says_how_to_continue(
        self, data, tmp_path
    ):
        out = tmp_path / "run"
        output = train("run", "tiny", *keys(data, out))
        for words in (
            "perplexity",
            "bits/byte",
            "token frequencies",
            "zlib",
            "lzma",
            "this model (tiny)",
        ):
            assert words in output, words
        assert f" resume {out} steps=24" in output and f" generate {out}" in output
        assert str(out / "loss.png") in output and (out / "loss.png").stat().st_size > 10_000
        assert re.search(
            r"delta rule by chunked \((a C\+\+ kernel, compiled by|PyTorch, since) ",
            " ".join(output.split()),
        )
        assert "lzma stores an exact repeat once, however far back" in output, (
            "it wins, and a line says why"
        )


class TestSameMathematics:
    def test_two_runs_of_one_configuration_are_equal_bit_for_bit(self, data, finished, tmp_path):
        train("run", "tiny", *keys(data, tmp_path / "run"))
        assert tiny_run.final_state(tmp_path / "run") == tiny_run.final_state(finished)

    @pytest.mark.parametrize(
        "changes",
        [
            {
                "evaluation__every": 1,
                "evaluation__sequences": 8,
                "sample__tokens": 9,
                "log__every": 1,
            },
            {
                "sample__tokens": 0,
                "checkpoint__every": 1,
                "log__every": 100,
                "deterministic": "true",
            },
        ],
        ids=lambda changes: " ".join(changes),
    )
    def test_evaluation_logging_and_saving_do_not_change_a_run(
        self, data, finished, tmp_path, changes
    ):
        try:
            train("run", "tiny", *keys(data, tmp_path / "run", **changes))
        finally:
            torch.use_deterministic_algorithms(False)
        assert losses(tmp_path / "run") == losses(finished)
        for name, tensor in weights(finished).items():
            assert torch.equal(weights(tmp_path / "run")[name], tensor), name

    def test_micro_batches_change_losses_only_as_rounding_does(
        self, data, finished, rounding, tmp_path
    ):
        train("run", "tiny", *keys(data, tmp_path / "run", batch__micro=2))
        assert metric_distance(tmp_path / "run", finished, "loss") <= rounding
        train("run", "tiny", *keys(data, tmp_path / "other", optimizer__eps=1e-4))
        assert metric_distance(tmp_path / "other", finished, "loss") > 10 * rounding, (
            "the bound can fail"
        )

    def test_gradient_checkpointing_keeps_every_loss_bit_for_bit(self, data, finished, tmp_path):
        train("run", "tiny", *keys(data, tmp_path / "run", gradient_checkpointing="true"))
        assert losses(tmp_path / "run") == losses(finished)

    def test_evaluation_does_not_depend_on_its_batch(self, data, finished, tmp_path):
        train("run", "tiny", *keys(data, tmp_path / "run", evaluation__batch=1))
        assert losses(tmp_path / "run", "val") == pytest.approx(
            losses(finished, "val"), rel=ONE_SUM
        )

    def test_bf16_losses_are_those_of_float32_with_bf16_rounding(self, data, finished, tmp_path):
        """The control begins with weights that one rounding to bf16 moved."""
        with nudge_weights(0, torch.finfo(torch.bfloat16).eps):
            train("run", "tiny", *keys(data, tmp_path / "control"))
        train("run", "tiny", *keys(data, tmp_path / "run", precision="bf16"))
        allowed = tolerance([metric_distance(tmp_path / "control", finished, "loss")])
        assert 0 < metric_distance(tmp_path / "run", finished, "loss") <= allowed
        train("run", "tiny", *keys(data, tmp_path / "other", seed=1))
        assert metric_distance(tmp_path / "other", finished, "loss") > allowed

    @pytest.mark.slow
    def test_a_compiled_run_has_the_losses_of_an_eager_one(
        self, data, finished, rounding, tmp_path
    ):
        train("run", "tiny", *keys(data, tmp_path / "run", compile="true"))
        assert metric_distance(tmp_path / "run", finished, "loss") <= rounding


class TestEvaluation:
    def test_held_out_windows_cover_every_token_once_in_order(self, data):
        dataset = open_dataset(data)
        text = dataset.shards("val")[0].astype("int64")
        config = change(recipe("tiny"), {"batch.length": "16"})
        batches = list(held_out_windows(config, dataset, tokens=10**9, batch=3))
        inputs = torch.cat([batch.inputs.flatten() for batch in batches]).numpy()
        targets = torch.cat([batch.targets.flatten() for batch in batches]).numpy()
        whole = (len(text) - 1) // 16 * 16
        assert (inputs == text[:whole]).all() and (targets == text[1 : whole + 1]).all()
        assert (
            sum(len(b.inputs) for b in held_out_windows(config, dataset, tokens=100, batch=4)) == 6
        )

    def test_the_final_evaluation_can_measure_the_held_out_text_in_order(
        self, data, finished, tmp_path
    ):
        out = tmp_path / "run"
        output = train("run", "tiny", *keys(data, out, evaluation__final_tokens=10**6))
        summary = json.loads((out / "summary.json").read_bytes())
        crops = json.loads((finished / "summary.json").read_bytes())
        assert crops["held_out"] == 4 * 16 and crops["loss"] == losses(finished, "val")[-1]
        assert summary["held_out"] > 256
        assert f"{summary['held_out']:,} held-out tokens after step 12" in output
        assert (
            summary["loss"] == pytest.approx(crops["loss"], abs=0.5)
            and summary["loss"] != crops["loss"]
        )
        assert summary["perplexity"] == pytest.approx(math.exp(summary["loss"]))
        assert {"unigram", "zlib", "lzma"} <= set(summary["baselines"])
        again = train("resume", out)
        assert json.loads((out / "summary.json").read_bytes()) == summary
        assert f"{summary['loss']:.4f}" in again


class TestNotFinite:
    def test_a_run_that_diverges_names_its_intact_checkpoint(self, data, tmp_path, monkeypatch):
        out = tmp_path / "run"
        rate = loop.learning_rate
        monkeypatch.setattr(
            loop, "learning_rate", lambda config, i: rate(config, i) if i < 9 else 1e38
        )
        status, _, err = tiny_run.run_command(
            "run", "tiny", *keys(data, out, optimizer__clip="none")
        )
        assert status == 2 and "the checkpoint of step 8 is intact" in err
        monkeypatch.undo()
        assert (
            sorted(path.name for path in (out / "checkpoints").glob("step-*"))[-1]
            == "step-00000008"
        )
        train("resume", out)
        assert len(losses(out)) == 12

    def test_infinite_weights_are_never_saved(self, data, tmp_path, monkeypatch):
        """A finite gradient can still lead to an infinite weight,
        which only the next loss would show.
        """
        out = tmp_path / "run"
        step = loop.TrainingStep.__call__
        count = itertools.count(1)

        def poison_weight(self, *arguments):
            result = step(self, *arguments)
            if next(count) == 8:
                with torch.no_grad():
                    self.optimizer.param_groups[-1]["params"][-1][0] = math.inf
            return result

        monkeypatch.setattr(loop.TrainingStep, "__call__", poison_weight)
        status, _, err = tiny_run.run_command("run", "tiny", *keys(data, out))
        assert status == 2 and "not finite after step 8" in err
        assert (
            sorted(path.name for path in (out / "checkpoints").glob("step-*"))[-1]
            == "step-00000006"
        )


class TestStopping:
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP], ids=["Ctrl-C", "hang-up"])
    def test_a_signal_saves_and_says_how_to_continue(
        self, data, finished, tmp_path, monkeypatch, number
    ):
        out = tmp_path / "run"
        step, count = loop.TrainingStep.__call__, itertools.count(1)

        def interrupt(self, *arguments):
            if next(count) == 5:
                os.kill(os.getpid(), number)
            return step(self, *arguments)

        monkeypatch.setattr(loop.TrainingStep, "__call__", interrupt)
        status, output, _ = tiny_run.run_command("run", "tiny", *keys(data, out))
        monkeypatch.undo()
        assert status == 128 + number
        assert f"stopped by {signal.Signals(number).name} after step 5" in output
        assert f" resume {out}" in output
        assert (
            sorted(path.name for path in (out / "checkpoints").glob("step-*"))[-1]
            == "step-00000005"
        )
        train("resume", out)
        assert tiny_run.final_state(out) == tiny_run.final_state(finished)

    @pytest.mark.parametrize("which", [0, -1], ids=["the first", "the last"])
    def test_a_signal_ends_an_evaluation_which_the_resumed_run_makes_first(
        self, data, finished, tmp_path, monkeypatch, which
    ):
        """A long evaluation outlasted torchrun's 30 s of grace, and the run was killed unsaved."""
        out, original, batches = tmp_path / "run", loop.evaluate, []

        def evaluated(run):
            return [line["step"] for line in read_metrics(run) if line["split"] == "val"]

        at = evaluated(finished)[which]

        def evaluate(loss, crops, *rest):
            def interrupted(*tensors):
                batches.append(len(losses(out)))  # steps so far
                if batches.count(at) == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                return loss(*tensors)

            return original(interrupted, crops, *rest)

        monkeypatch.setattr(loop, "evaluate", evaluate)
        status, output, _ = tiny_run.run_command("run", "tiny", *keys(data, out))
        monkeypatch.undo()
        assert status == 128 + signal.SIGTERM and f"stopped by SIGTERM after step {at}" in output
        assert batches.count(at) == 1, "no batch after the signal"
        assert at not in evaluated(out)
        train("resume", out)
        assert tiny_run.final_state(out) == tiny_run.final_state(finished)
        assert evaluated(out) == evaluated(finished)

    def test_a_run_stops_at_max_minutes_and_resumes_to_the_same_result(
        self, data, finished, tmp_path, monkeypatch
    ):
        clock = [0.0]

        def ticking() -> float:
            clock[0] += 1.0
            return clock[0]

        monkeypatch.setattr(stopping.time, "monotonic", ticking)
        out = tmp_path / "run"
        output = train("run", "tiny", *keys(data, out, max_minutes=0.1))
        assert "stopped by max_minutes=0.1" in output
        before = len(losses(out))
        assert 0 < before < 12
        monkeypatch.undo()
        train("resume", out, "max_minutes=none")
        assert tiny_run.final_state(out) == tiny_run.final_state(finished)

    def test_a_hang_up_that_is_ignored_stays_ignored(self):
        """As under nohup."""
        before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
        try:
            with StopRequest(None) as stop:
                os.kill(os.getpid(), signal.SIGHUP)
                time.sleep(0.01)
                assert stop.reason is None
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        finally:
            signal.signal(signal.SIGHUP, before)

    def test_a_second_signal_interrupts_at_once(self):
        # a shell starts background processes with SIGINT ignored
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with pytest.raises(KeyboardInterrupt), StopRequest(None) as stop:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.01)
                assert stop.reason == "SIGINT"
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.01)
        finally:
            signal.signal(signal.SIGINT, before)

    def test_a_signal_waits_until_all_processes_agree_on_it(self):
        """A process that stopped alone would leave the others waiting."""
        with StopRequest(None) as stop:
            agreed = stop.signal or 0
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)
            assert stop.reason_for(agreed, False) is None
            assert stop.reason == "SIGTERM"

    def test_resuming_a_run_in_use_by_another_process_is_refused(self, finished):
        with RunFolder(finished).hold():
            status, _, err = tiny_run.run_command("resume", finished, "steps=14")
        assert status == 2 and f"in use by another process (pid {os.getpid()})" in err


def too_much() -> None:
    torch.empty(2**60, dtype=torch.uint8)


def host_error() -> None:
    raise MemoryError


def device_error() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore words")


class TestTooLittleMemory:
    @pytest.mark.parametrize("ask", [too_much, host_error, device_error])
    def test_on_any_device_gets_the_advice(self, data, tmp_path, monkeypatch, ask):
        """The first is what torch says on a CPU, for which it has no class of its own."""
        monkeypatch.setattr(loop.TrainingStep, "__call__", lambda self, *arguments: ask())
        status, _, said = tiny_run.run_command("run", "tiny", *keys(data, tmp_path / "run"))
        assert status == 2 and "resume with a smaller batch.micro" in said, said
        assert "cpu has too little memory for 4 x 16 tokens at once (" in said

    def test_is_not_every_error(self, data, tmp_path, monkeypatch):
        def other(self, *arguments):
            raise RuntimeError("something else")

        monkeypatch.setattr(loop.TrainingStep, "__call__", other)
        with pytest.raises(RuntimeError, match="something else"):
            tiny_run.run_command("run", "tiny", *keys(data, tmp_path / "run"))

    def test_planted_bugs_are_seen(self, data, tmp_path, monkeypatch):
        bug = Bug("", "train.run.loop:_is_out_of_memory", " or on_host", "", "")
        with planted(bug), pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
            self.test_on_any_device_gets_the_advice(data, tmp_path, monkeypatch, too_much)
