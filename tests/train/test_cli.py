"""The command line: its lists, its output, its exit codes, and how little it imports."""

import ast
import contextlib
import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure

import delta_trn
from delta_trn import load_model
from delta_trn.__main__ import main as whole
from delta_trn.train.__main__ import COMMANDS, WAITING, main, set_waiting
from delta_trn.train.commands.run import USUAL
from delta_trn.train.recipes import RECIPES, recipe
from delta_trn.train.run.optimizer import list_scaled
from delta_trn.train.settings.schema import RunConfig, flatten
from tests.support import tiny_run, warm
from tests.support.tiny_models import assert_same
from tests.support.tiny_run import keys, run_command, train

ROOT = Path(__file__).parents[2]
DEFAULTS = dict(flatten(RunConfig()))


def run_python(*arguments: object, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, *map(str, arguments)]
    return subprocess.run(
        words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=200
    )


class TestOverview:
    def test_the_whole_overview_lists_every_command_and_recipe_in_short_lines(self):
        output = train("--help-all")
        parameters = sum(math.prod(row.shape) for row in list_scaled(recipe("tiny")))
        assert f"{round(parameters / 1000)} thousand parameters" in output
        for name in (*COMMANDS, *RECIPES):
            assert any(line.strip().startswith(name) for line in output.splitlines()), name
        assert max(map(len, output.splitlines())) < 140

    def test_the_version_is_that_of_the_distribution(self):
        assert train("--version").strip() == f"delta-trn {delta_trn.__version__}"
        assert "__version__" in dir(delta_trn) and delta_trn.__version__[0].isdigit()

    def test_an_unknown_command_is_refused_with_the_known_ones(self):
        status, _, err = run_command("trian")
        assert status == 2 and all(name in err for name in COMMANDS)
        assert "did you mean run" in run_command("rnu")[2]

    def test_a_torch_that_training_was_not_tested_with_is_refused_with_what_to_install(
        self, monkeypatch
    ):
        monkeypatch.setattr("delta_trn.train.__main__.version", lambda name: "2.8.1+cu126")
        status, _, err = run_command("run", "tiny", "--keys")
        assert status == 2 and "torch 2.8.1+cu126 is too old" in err and "install torch>=2.9" in err
        monkeypatch.setattr("delta_trn.train.__main__.version", lambda name: "2.10.0")
        assert run_command("run", "tiny", "--keys")[0] == 0

    def test_every_command_prints_help_and_exits_with_0(self):
        for name in COMMANDS:
            with pytest.raises(SystemExit) as end:
                run_command(name, "--help")
            assert end.value.code == 0, name

    def test_help_of_a_command_is_its_own_help(self, capsys):
        with pytest.raises(SystemExit) as end:
            main(["help", "resume"])
        assert end.value.code == 0 and "delta-trn resume [-h]" in capsys.readouterr().out
        assert "did you mean resume" in run_command("help", "resum")[2]

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
    @pytest.mark.parametrize(
        "arguments", [["backends"], ["help"], ["run", "tiny", "--keys"]], ids=str
    )
    def test_a_full_disk_behind_what_is_printed_is_a_sentence(self, arguments, monkeypatch):
        errors = io.StringIO()
        monkeypatch.setattr(sys, "stderr", errors)
        with contextlib.suppress(OSError), open("/dev/full", "w") as full:  # closing it fails, too
            monkeypatch.setattr(sys, "stdout", full)
            full.reconfigure(line_buffering=True)
            assert whole(arguments) == 2
        assert re.fullmatch(
            r"error: .*No space left on device; make room, or print to another place\n",
            errors.getvalue(),
        )

    def test_help_lists_the_usual_commands_and_names_the_others(self):
        short, whole = train(), train("--help-all")
        assert "train from the start" in short and all(name in short for name in COMMANDS)
        assert "its width" not in short and "its width" in whole and "--help-all" not in whole

    def test_the_keys_option_prints_the_usual_keys_and_what_a_recipe_changes(self):
        output = train("run", "quickstart", "--keys", "optimizer.beta1=0.8").splitlines()
        keys = {line[2:].partition("=")[0] for line in output if re.match(r"[* ] [\w.]+=", line)}
        changed = {key for key, value in flatten(recipe("quickstart")) if value != DEFAULTS[key]}
        assert keys == USUAL | changed | {"optimizer.beta1"} and len(USUAL) < 50
        assert "--all-keys" in output[-1]

    def test_the_all_keys_option_prints_every_key_with_its_value(self):
        output = train("run", "quickstart", "--all-keys", "optimizer.lr=0.125").splitlines()
        keys = [line[2:].partition("=")[0] for line in output if re.match(r"[* ] [\w.]+=", line)]
        assert keys == [key for key, _ in flatten(RunConfig())]
        assert any(line.startswith("* optimizer.lr=0.125 ") for line in output)
        assert "[0.001]" in " ".join(output)
        assert any(line.startswith("  data.source=python-stdlib ") for line in output)
        assert any("adamw | sgd | muon: " in line for line in output)
        assert {"run", "model", "log"} <= set(output) and max(map(len, output)) <= 110


class TestOptions:
    @pytest.mark.parametrize(
        ("words", "expected"),
        [
            (["run", "tiny", "--steps", "5"], "delta-trn run has no option --steps; .*: steps=5 "),
            (
                ["run", "tiny", "--lr=0.1", "steps=5"],
                "has no option --lr=0.1; .*: optimizer.lr=0.1 ",
            ),
            (["run", "tiny", "--batch-size"], "has no option --batch-size; .*=VALUE "),
            (["sweep", "tiny", "--widths", "64,128"], "no option --widths; .* widths=64,128 "),
        ],
    )
    def test_a_key_spelled_as_an_option_is_refused_with_its_right_spelling(self, words, expected):
        status, _, err = run_command(*words)
        assert status == 2 and re.search(expected, err), err


@pytest.mark.parametrize(("command", "wanted"), [("run", "RECIPE"), ("resume", "RUN_DIR")])
def test_a_command_without_its_subject_names_that_alone_as_missing(command, wanted, capsys):
    with pytest.raises(SystemExit):
        main([command])
    assert capsys.readouterr().err.endswith(f"the following arguments are required: {wanted}\n")


# Flags that share their name with a key of the configuration, and why they stay flags.
SAME_NAME = {
    ("backends/bench/__main__.py", "--backend"): "bench has no configuration; decided so",
    ("backends/parity/__main__.py", "--backend"): "parity has no configuration; decided so",
    (
        "train/commands/generate.py",
        "--prompt",
    ): "what to continue; sample.prompt is of a run's samples",
}


def flags_of(source: str) -> set[str]:
    """Returns the options that a module's source gives to argparse."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    added = [call for call in calls if getattr(call.func, "attr", None) == "add_argument"]
    names = [arg.value for call in added for arg in call.args if isinstance(arg, ast.Constant)]
    return {name for name in names if name.startswith("--")}


class TestOneLanguage:
    KEYS = frozenset(key.rpartition(".")[2] for key, _ in flatten(RunConfig()))

    def test_no_command_has_a_flag_for_a_key_of_the_configuration(self):
        names = ("backends", "delta_trn", "models", "nki_kernels", "train", "triton_kernels")
        flags = {
            (str(path.relative_to(ROOT)), flag)
            for name in names
            for path in (ROOT / name).rglob("*.py")
            for flag in flags_of(path.read_text())
        }
        assert len(flags) > 40
        same = {(path, flag) for path, flag in flags if flag[2:].replace("-", "_") in self.KEYS}
        assert same == set(SAME_NAME)


class TestParameters:
    def test_parameters_json_has_the_scaling_of_every_parameter(self):
        rows = json.loads(train("parameters", "tiny", "--json"))
        assert {tuple(row) for row in rows} == {
            ("name", "shape", "role", "init_std", "multiplier", "lr", "weight_decay")
        }
        expected = list_scaled(recipe("tiny"))
        assert [row["name"] for row in rows] == [row.name for row in expected]
        assert [row["lr"] for row in rows] == [row.lr for row in expected]
        by_name = {row["name"]: row for row in rows}
        assert by_name["model.embed.weight"]["shape"] == [320, 32]
        assert by_name["model.norm.weight"]["init_std"] is None

    def test_parameters_follow_the_papers_rules_at_twice_the_base_width(self):
        """m = 2. AdamW: hidden matrices 1/m; SGD: gates 1/sqrt(m), scalars sqrt(m), embedding m."""
        widths = ("model.width=32", "model.base_width=16", "--json")
        adamw = {
            r["name"]: r for r in json.loads(train("parameters", "tiny", *widths, "optimizer.lr=1"))
        }
        sgd = {
            r["name"]: r
            for r in json.loads(
                train("parameters", "tiny", *widths, "optimizer.name=sgd", "optimizer.lr=1")
            )
        }
        mixer = "model.blocks.0.mixer"
        assert (
            adamw[f"{mixer}.q_proj.weight"]["lr"] == 0.5
            and sgd[f"{mixer}.q_proj.weight"]["lr"] == 1.0
        )
        assert adamw[f"{mixer}.a_proj.weight"]["lr"] == 0.5
        assert sgd[f"{mixer}.a_proj.weight"]["lr"] == pytest.approx(2**-0.5)
        assert adamw[f"{mixer}.A_log"]["lr"] == 1.0 and sgd[f"{mixer}.A_log"][
            "lr"
        ] == pytest.approx(2**0.5)
        assert adamw["model.embed.weight"]["lr"] == 1.0 and sgd["model.embed.weight"]["lr"] == 2.0
        assert adamw[f"{mixer}.q_proj.weight"]["init_std"] == pytest.approx(0.02 * 2**-0.5)
        assert (
            adamw["model.embed.weight"]["multiplier"] == 0.5
            and adamw["model.embed.weight"]["weight_decay"] == 0
        )


class TestFolders:
    def test_a_run_without_out_takes_the_first_free_folder(self, data, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        arguments = [
            k for k in keys(data, tmp_path, steps=1, sample__tokens=0) if not k.startswith("out=")
        ]
        for name in ("tiny", "tiny-2", "tiny-3"):
            output = train("run", "tiny", *arguments)
            assert f"in runs/{name}\n" in output
            assert (tmp_path / "runs" / name / "config.json").is_file()
        train("run", "tiny", *arguments, "name=other")
        assert (tmp_path / "runs" / "other").is_dir()

    def test_plot_draws_the_same_loss_picture_again(self, data, tmp_path):
        out = tmp_path / "run"
        train("run", "tiny", *keys(data, out, steps=2, sample__tokens=0))
        picture = (out / "loss.png").read_bytes()
        (out / "loss.png").unlink()
        assert train("plot", out) == f"{out / 'loss.png'}\n"
        assert (out / "loss.png").read_bytes() == picture

    def test_a_picture_that_may_not_be_written_needs_permission_and_no_space(
        self, finished, monkeypatch
    ):
        def refuse(*arguments: object, **options: object) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Figure, "savefig", refuse)
        status, _, err = run_command("plot", finished)
        assert (
            status == 2
            and "may not write" in err
            and "get write permission" in err
            and "space" not in err
        )


class TestProcess:
    def test_an_unknown_key_is_reported_before_torch_is_imported(self):
        process = run_python(
            "-c",
            "import sys; from train.__main__ import main; status = main(['run', 'quickstart', "
            "'stesp=3']); print(status, {'torch', 'numpy', 'transformers', 'matplotlib'} & "
            "set(sys.modules))",
        )
        assert process.stdout == "2 set()\n", process.stderr
        assert "unknown key 'stesp'" in process.stderr

    def test_a_closed_pipe_prints_no_error(self):
        command = f"{sys.executable} -m train run quickstart --keys | head -1"
        process = subprocess.run(
            command, shell=True, cwd=ROOT, capture_output=True, text=True, timeout=200
        )
        assert process.stdout.startswith("* differs") and not process.stderr

    def test_a_run_whose_reader_goes_away_trains_on_and_says_so(self, data, finished, tmp_path):
        out, log = tmp_path / "run", tmp_path / "log"
        child = warm.Process(
            target=_run_without_a_reader, args=(["run", "tiny", *keys(data, out)], str(log))
        )
        child.start()
        assert tiny_run.join(child) == 0
        assert (
            log.read_text().count("the output cannot be written (Broken pipe); the work goes on")
            == 1
        )
        assert "Traceback" not in log.read_text() and "rror" not in log.read_text()
        assert tiny_run.final_state(out) == tiny_run.final_state(finished)

    @pytest.mark.parametrize("words", [["resume"], ["generate", "--prompt", "é\u2028漢"]])
    def test_an_output_that_takes_ascii_only_gets_escapes_and_no_traceback(
        self, finished, tmp_path, words
    ):
        out, written = tmp_path / "run", io.TextIOWrapper(io.BytesIO(), encoding="ascii")
        shutil.copytree(finished, out, symlinks=True)
        (out / "samples.txt").write_text("======== step 12 ========\né\ufffd\n\n", encoding="utf-8")
        with contextlib.redirect_stdout(written):
            assert main([words[0], str(out), *words[1:]]) == 0
        written.seek(0)
        text = written.read()
        assert ("\\ufffd" in text and "nats/token" in text) or "\\xe9\\u2028\\u6f22" in text

    def test_a_training_process_stops_on_sigterm_and_its_run_resumes(self, data, tmp_path):
        out, log = tmp_path / "run", tmp_path / "log"
        never = 100_000
        changes = {
            "steps": never,
            "sample.tokens": 0,
            "checkpoint.every": never,
            "evaluation.every": never,
        }
        command = [sys.executable, "-m", "train", "run", "tiny", *keys(data, out, **changes)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with open(log, "w") as file:
            child = subprocess.Popen(
                command, stdout=file, stderr=file, env=environment, cwd=tmp_path
            )
        deadline = time.monotonic() + 200
        while (
            not (out / "metrics.jsonl").exists()
            and child.poll() is None
            and time.monotonic() < deadline
        ):
            time.sleep(0.1)
        child.send_signal(signal.SIGTERM)
        assert child.wait(60) == 128 + signal.SIGTERM, log.read_text()
        output = log.read_text()
        assert "stopped by SIGTERM after step" in output and f" resume {out}" in output
        assert "Traceback" not in output
        step = tiny_run.read_metrics(out)[-1]["step"]
        assert f"continuing {out} after step {step}" in train("resume", out, f"steps={step + 3}")
        assert tiny_run.read_metrics(out)[-1]["step"] == step + 3


class TestConvert:
    def test_a_run_can_be_written_for_flash_linear_attention(self, finished, tmp_path):
        assert "format fla" in train(
            "convert", finished, "--to", tmp_path / "fla", "--format", "fla"
        )
        ours, theirs = (
            load_model(finished / "checkpoints" / "step-00000012"),
            load_model(tmp_path / "fla"),
        )
        ids = torch.arange(60)[None]
        with torch.no_grad():
            assert_same(theirs(ids).logits, ours(ids).logits)
        assert (tmp_path / "fla" / "tokenizer.json").is_file()


def _run_without_a_reader(arguments: list[str], log: str) -> None:
    """Runs `delta-trn ...` with an output that nobody reads, as with `| head -1`."""
    tiny_run.redirect_output(log)
    reading, writing = os.pipe()
    os.close(reading)
    os.dup2(writing, 1)
    os._exit(main([str(argument) for argument in arguments]))


@pytest.mark.parametrize(
    ("given", "loaded", "expected"),
    [
        ({}, False, WAITING),
        ({"GOMP_SPINCOUNT": "7"}, False, {"GOMP_SPINCOUNT": "7"}),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, False, {"OMP_WAIT_POLICY": "ACTIVE"}),
        ({}, True, {}),
    ],
)
def test_idle_threads_wait_as_the_user_says_or_for_a_while(given, loaded, expected, monkeypatch):
    """OpenMP's variables are read when torch is loaded, and mean nothing later."""
    modules = {name: module for name, module in sys.modules.items() if loaded or name != "torch"}
    monkeypatch.setattr(sys, "modules", modules)
    environment = dict(given)
    set_waiting(environment)
    monkeypatch.undo()
    assert environment == expected
