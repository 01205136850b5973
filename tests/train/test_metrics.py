"""metrics.jsonl survives kills; the loss picture,
the progress display and the trackers show its lines.
"""

import io
import json
import math
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
from PIL import Image
from rich.console import Console

from delta_trn.train.checkpoints.run_folder import Origin, RunFolder
from delta_trn.train.commands.run import keys
from delta_trn.train.recipes import recipe
from delta_trn.train.settings.errors import ConfigError, RunFolderError
from delta_trn.train.settings.overrides import apply
from delta_trn.train.settings.schema import RunConfig
from delta_trn.train.watch import display as progress
from delta_trn.train.watch import loss_plot, summary
from delta_trn.train.watch.display import Display, duration
from delta_trn.train.watch.loss_plot import plot_loss
from delta_trn.train.watch.metrics import Line, MetricsFile, read
from delta_trn.train.watch.trackers import Tracker, require


def make_line(step: int, split: str = "train", loss: float = 2.0) -> Line:
    return {
        "step": step,
        "split": split,
        "loss": loss,
        "tokens": 10 * step,
        "seconds": 0.5,
        "lr": 0.1,
    }


def write_lines(path, count: int = 5) -> MetricsFile:
    file = MetricsFile(path)
    file.append(make_line(step) for step in range(1, count + 1))
    file.sync()
    return file


class TestFile:
    def test_metrics_file_keeps_numbers_bit_for_bit(self, tmp_path):
        numbers = [0.1 + 0.2, 1e-300, 2.5, math.pi, 5.802205562591553]
        file = MetricsFile(tmp_path / "metrics.jsonl")
        file.append(make_line(i, loss=x) for i, x in enumerate(numbers))
        assert [row["loss"] for row in read(file.path)] == numbers

    def test_truncating_metrics_keeps_the_evaluation_of_the_last_step(self, tmp_path):
        file = MetricsFile(tmp_path / "metrics.jsonl")
        file.append([make_line(1), make_line(2), make_line(2, "val"), make_line(3), make_line(4)])
        file.truncate_after(2)
        steps = [(row["step"], row["split"]) for row in read(file.path)]
        assert steps == [(1, "train"), (2, "train"), (2, "val")]

    def test_a_metrics_line_cut_at_any_byte_is_removed(self, tmp_path):
        path = tmp_path / "metrics.jsonl"
        write_lines(path).close()
        whole = path.read_bytes()
        before = len(b"".join(whole.splitlines(keepends=True)[:4]))
        for cut in range(before, len(whole)):
            path.write_bytes(whole[:cut])
            assert [row["step"] for row in read(path)] == [1, 2, 3, 4]
            file = MetricsFile(path)
            file.truncate_after(5)
            assert path.read_bytes() == whole[:before], cut
        file.append([make_line(5)])
        file.close()
        assert path.read_bytes() == whole

    def test_truncation_removes_a_damaged_metrics_line_and_all_after_it(self, tmp_path):
        """A power cut can lose a block in the middle of an unsynced file,
        and leaves zeros there.
        """
        path = tmp_path / "metrics.jsonl"
        write_lines(path).close()
        parts = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(parts[0] + b"\0" * (len(parts[1]) - 1) + b"\n" + b"".join(parts[2:]))
        MetricsFile(path).truncate_after(5)
        assert [row["step"] for row in read(path)] == [1]


class TestPlot:
    def write_run(self, tmp_path, costs: dict | None = None) -> RunFolder:
        tmp_path.mkdir(exist_ok=True)
        folder = RunFolder(tmp_path)
        folder.write(RunConfig(name="tiny"), Origin("tiny-0", "data", {}))
        folder.metrics.append([make_line(i, loss=5 / i + 1) for i in range(1, 41)])
        folder.metrics.append([make_line(i, "val", loss=5 / i + 1.2) for i in (20, 40)])
        folder.metrics.close()
        if costs:
            folder.baselines_path.write_text(json.dumps(costs))
        return folder

    def test_the_loss_picture_is_a_large_image_in_many_colours(self, tmp_path):
        path = plot_loss(self.write_run(tmp_path))
        with Image.open(path) as image:
            assert image.size[0] > 1000
            assert len(image.convert("RGB").resize((100, 60)).getcolors(6000) or []) > 20

    def test_the_loss_picture_draws_baselines(self, tmp_path):
        bare = plot_loss(self.write_run(tmp_path / "a")).read_bytes()
        costs = {"zlib": {"nats_per_token": 3.0, "bits_per_byte": 2.0}}
        assert plot_loss(self.write_run(tmp_path / "b", costs)).read_bytes() != bare

    def test_the_loss_picture_of_a_finished_run_has_the_number_of_its_summary_and_no_other(
        self, tmp_path, monkeypatch
    ):
        folder, figures = self.write_run(tmp_path), []
        monkeypatch.setattr(loss_plot, "save_figure", lambda figure, path: figures.append(figure))
        plot_loss(folder)
        folder.write_summary({"step": 40, "held_out": 5000, "loss": 1.4242})
        plot_loss(folder)
        # nothing is known of how many held-out tokens there are, so no label says "all"
        folder.write_summary({"step": 40, "held_out": 128, "loss": 1.325})
        plot_loss(folder)
        texts = [
            [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
            for figure in figures
        ]
        crops = "held-out crops, 1.3250 at step 40"
        assert texts == [
            ["training", crops],
            ["training", "5,000 held-out tokens in order, 1.4242", crops],
            ["training", crops],
        ], "a summary that repeats the last evaluation is no measurement of its own"
        title = figures[0].axes[0].get_title(loc="left")
        assert title == f"{tmp_path.name}: tiny, width 256, adamw, lr 0.001"

    def test_a_loss_picture_of_a_run_without_a_step_is_refused(self, tmp_path):
        with pytest.raises(RunFolderError, match="no training step yet"):
            plot_loss(RunFolder(tmp_path))


class TestDisplay:
    def test_the_display_writes_one_line_per_ten_seconds_to_a_log_file(self, capsys, monkeypatch):
        clock = [0.0]
        monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
        with Display(1000, 0) as display:
            for step in range(1, 101):
                clock[0] += 0.5
                display.update(step, 3.25, 1234.5)
            display.tell("[a line] that stays")
        *printed, last = capsys.readouterr().out.splitlines()
        assert len(printed) == 5  # 50 seconds, with ten between lines
        assert printed[0] == "step 20/1000  loss 3.2500  1,234 tokens/s  8:10 left"
        assert last == "[a line] that stays"

    def test_the_display_shows_progress_and_messages_on_a_terminal(self, monkeypatch):
        nowhere = open("/dev/null", "w")  # noqa: SIM115
        out = Console(force_terminal=True, markup=False, width=80, record=True, file=nowhere)
        monkeypatch.setattr(progress, "console", lambda quiet: out)
        with Display(100_000, 40_000, peak=4000) as display:
            display.update(50_000, 3.25, 1234.5)
            display.tell("[a line] that stays")
        text = out.export_text()
        whole = "step 50000/100000  loss 3.2500  1,234 tokens/s  31% of peak"  # in 80 columns
        assert whole in text and "left" in text and "[a line] that stays" in text

    def test_the_display_of_a_resumed_run_estimates_from_its_own_steps(self, capsys, monkeypatch):
        clock = [0.0]
        monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
        with Display(100, 90) as display:
            clock[0] = 20.0
            display.update(95, 1.0, 10.0)
        assert capsys.readouterr().out.strip().endswith("0:20 left")

    def test_durations_are_shown_as_minutes_or_hours(self):
        assert [duration(x) for x in (0, 59.6, 75, 3600)] == ["0:00", "1:00", "1:15", "1:00:00"]


class TestTracker:
    """A stand-in has the parts of wandb's interface that are used."""

    def test_wandb_gets_every_line_and_the_runs_own_id(self, tmp_path, monkeypatch):
        calls: list[tuple] = []
        run = SimpleNamespace(
            log=lambda values, step: calls.append(("log", step, values)),
            finish=lambda: calls.append(("finish",)),
        )
        wandb = ModuleType("wandb")
        wandb.__spec__ = ModuleSpec("wandb", None)
        wandb.init = lambda **options: calls.append(("init", options)) or run  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "wandb", wandb)
        config = apply(recipe("tiny"), {"log.wandb": "true"})
        require(config.log)
        tracker = Tracker(config, Origin("tiny-1", "data", {}), RunFolder(tmp_path), print)
        tracker.log([make_line(3), {**make_line(3, "val"), "probes": {"rms": 1.0}}])
        tracker.close()
        options = calls[0][1]
        assert (options["id"], options["resume"], options["project"]) == (
            "tiny-1",
            "allow",
            "delta-trn",
        )
        assert options["config"]["optimizer"]["lr"] == config.optimizer.lr
        assert calls[1][:2] == ("log", 3) and calls[1][2]["train/loss"] == 2.0
        assert calls[2][2]["val/loss"] == 2.0 and calls[2][2]["probes/rms"] == 1.0
        assert calls[3] == ("finish",)

    def test_a_missing_package_is_refused_before_a_run(self, monkeypatch):
        monkeypatch.setattr("delta_trn.train.watch.trackers.find_spec", lambda package: None)
        with pytest.raises(ConfigError, match="needs the wandb package: pip install wandb"):
            require(apply(recipe("tiny"), {"log.wandb": "true"}).log)


class TestNarrowTerminals:
    """40 characters a line: nothing is cut off, and no word is broken."""

    @pytest.fixture(autouse=True)
    def narrow(self, monkeypatch):
        monkeypatch.setenv("COLUMNS", "40")

    def test_keys_and_meanings_stand_below_each_other(self):
        lines = keys(recipe("quickstart"), every=True).splitlines()
        meanings = [line for line in lines if line.startswith(" " * 6)]
        assert len(meanings) > 100 and max(map(len, meanings)) <= 40
        assert sum(len(line.strip()) for line in meanings) > 20 * len(meanings)

    @pytest.mark.parametrize("bits", [1.5, None])
    def test_the_table_of_the_result_is_whole(self, bits):
        console, cost = (
            Console(width=40, record=True),
            {"nats_per_token": 2.0, "bits_per_byte": bits},
        )
        found = {
            "tokens": 10, "seconds": 1, "held_out": 128, "step": 4, "loss": 1.75,
            "bits_per_byte": bits, "baselines": {"lzma_primed": cost},
        }  # fmt: skip
        console.print(summary._table("quickstart", found, is_narrow=True))
        words = console.export_text()
        assert "\u2026" not in words and "nats/token" in words and "1.7500" in words

    def test_sentences_break_between_words(self, monkeypatch):
        monkeypatch.setattr(progress, "_Output", lambda stream: io.StringIO())
        monkeypatch.setenv("FORCE_COLOR", "1")
        console = progress.console()
        sentence = "a sentence of words that are longer than forty characters, however short"
        console.print(sentence)
        lines = console.file.getvalue().splitlines()
        assert " ".join(line.strip() for line in lines) == sentence
        assert len(lines) == 2 and max(map(len, lines)) <= 40
