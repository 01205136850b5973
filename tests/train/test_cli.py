"""The command line: what it lists, what it prints, how it ends, and that it does not keep anybody waiting."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from delta_trn.train.__main__ import COMMANDS
from delta_trn.train.recipes import RECIPES
from delta_trn.train.settings.schema import RunConfig, flatten
from tests.support import tiny_run
from tests.support.tiny_run import keys, run_command, train

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return tiny_run.prepare_data(tmp_path_factory.mktemp("data"))


def python(*arguments: object, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    given = [sys.executable, *map(str, arguments)]
    return subprocess.run(given, cwd=cwd, env=environment, capture_output=True, text=True, timeout=200)


class TestOverview:
    @pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",)])
    def test_it_lists_commands_and_recipes_with_a_line_each(self, arguments):
        said = train(*arguments)
        for name in (*COMMANDS, *RECIPES):
            assert any(line.strip().startswith(name) for line in said.splitlines()), name
        assert max(map(len, said.splitlines())) < 140

    def test_an_unknown_command_lists_the_known(self):
        status, _, err = run_command("trian")
        assert status == 2 and all(name in err for name in COMMANDS)
        assert "did you mean run" in run_command("rnu")[2]

    @pytest.mark.parametrize("name", COMMANDS)
    def test_every_command_has_help(self, name, capsys):
        with pytest.raises(SystemExit) as end:
            run_command(name, "--help")
        assert end.value.code == 0

    def test_keys_prints_every_key_with_its_value_and_meaning(self):
        said = train("run", "quickstart", "--keys", "optimizer.lr=0.125").splitlines()
        assert len(said) == len(list(flatten(RunConfig())))
        assert any(line.startswith("optimizer.lr=0.125 ") for line in said)
        assert any(line.startswith("data.source=python-stdlib ") for line in said)


class TestParameters:
    def test_json_has_the_tables_columns_for_every_parameter(self):
        from delta_trn.models import DeltaForCausalLM
        from delta_trn.train.recipes import recipe
        from delta_trn.train.run.optimizer import scaled

        rows = json.loads(train("parameters", "tiny", "--json"))
        assert {tuple(row) for row in rows} == {
            ("name", "shape", "role", "init_std", "multiplier", "lr", "weight_decay")
        }
        expected = scaled(recipe("tiny"))
        assert [row["name"] for row in rows] == [row.name for row in expected]
        assert [row["lr"] for row in rows] == [row.lr for row in expected]
        assert isinstance(expected[0].parameter, type(next(DeltaForCausalLM.parameters(_model()))))
        by_name = {row["name"]: row for row in rows}
        assert by_name["embed.weight"]["shape"] == [320, 32]
        assert by_name["norm.weight"]["init_std"] is None

    def test_the_papers_rules_at_twice_the_base_width(self):
        """m = 2. AdamW: hidden matrices 1/m; SGD: gates 1/sqrt(m), scalars sqrt(m), embedding m."""
        given = ("model.width=32", "model.base_width=16", "--json")
        adamw = {r["name"]: r for r in json.loads(train("parameters", "tiny", *given, "optimizer.lr=1"))}
        sgd = {
            r["name"]: r
            for r in json.loads(train("parameters", "tiny", *given, "optimizer.name=sgd", "optimizer.lr=1"))
        }
        mixer = "blocks.0.mixer"
        assert adamw[f"{mixer}.q_proj.weight"]["lr"] == 0.5 and sgd[f"{mixer}.q_proj.weight"]["lr"] == 1.0
        assert adamw[f"{mixer}.a_proj.weight"]["lr"] == 0.5
        assert sgd[f"{mixer}.a_proj.weight"]["lr"] == pytest.approx(2**-0.5)
        assert adamw[f"{mixer}.A_log"]["lr"] == 1.0 and sgd[f"{mixer}.A_log"]["lr"] == pytest.approx(2**0.5)
        assert adamw["embed.weight"]["lr"] == 1.0 and sgd["embed.weight"]["lr"] == 2.0
        assert adamw[f"{mixer}.q_proj.weight"]["init_std"] == pytest.approx(0.02 * 2**-0.5)
        assert adamw["embed.weight"]["multiplier"] == 0.5 and adamw["embed.weight"]["weight_decay"] == 0

    def test_the_table_has_a_row_a_parameter(self):
        said = train("parameters", "tiny").splitlines()
        assert said[0].split() == ["name", "shape", "role", "init_std", "multiplier", "lr", "weight_decay"]
        assert len(said) == 1 + len(json.loads(train("parameters", "tiny", "--json")))

    def test_the_papers_largest_model_takes_no_memory(self):
        rows = json.loads(train("parameters", "gdn_mup_adamw", "model.width=1536", "--json"))
        total = 0
        for row in rows:
            size = 1
            for n in row["shape"]:
                size *= n
            total += size
        assert total == pytest.approx(341.83e6, rel=1e-3)


def _model():
    import torch

    from delta_trn.models import DeltaForCausalLM
    from delta_trn.train.recipes import recipe
    from delta_trn.train.run.model import model_config

    with torch.device("meta"):
        return DeltaForCausalLM(model_config(recipe("tiny"), rows=320))


class TestFolders:
    def test_without_out_the_first_free_folder_is_taken(self, data, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        given = [k for k in keys(data, tmp_path, steps=1, sample__tokens=0) if not k.startswith("out=")]
        for name in ("tiny", "tiny-2", "tiny-3"):
            said = train("run", "tiny", *given)
            assert f"in runs/{name}\n" in said
            assert (tmp_path / "runs" / name / "config.json").is_file()
        train("run", "tiny", *given, "name=other")
        assert (tmp_path / "runs" / "other").is_dir()

    def test_an_empty_folder_may_be_given(self, data, tmp_path):
        train("run", "tiny", *keys(data, tmp_path, steps=1, sample__tokens=0))
        assert (tmp_path / "metrics.jsonl").is_file()

    def test_plot_draws_again(self, data, tmp_path):
        out = tmp_path / "run"
        train("run", "tiny", *keys(data, out, steps=2, sample__tokens=0))
        picture = (out / "loss.png").read_bytes()
        (out / "loss.png").unlink()
        assert train("plot", out) == f"{out / 'loss.png'}\n"
        assert (out / "loss.png").read_bytes() == picture

    def test_data_is_a_command_of_its_own(self, tmp_path):
        source = tmp_path / "text.txt"
        source.write_text(tiny_run.make_text())
        train("data", "prepare", source, "--out", tmp_path / "data", "--tokenizer", "bytes", "--quiet")
        train("run", "tiny", *keys(tmp_path / "data", tmp_path / "run", steps=1, sample__tokens=0))


class TestProcess:
    def test_a_mistake_is_told_before_torch_is_loaded(self):
        found = python(
            "-c",
            "import sys; from train.__main__ import main; status = main(['run', 'quickstart', 'stesp=3']); "
            "print(status, {'torch', 'numpy', 'transformers', 'matplotlib'} & set(sys.modules))",
        )
        assert found.stdout == "2 set()\n", found.stderr
        assert "unknown key 'stesp'" in found.stderr

    def test_the_overview_loads_nothing(self):
        found = python(
            "-c",
            "import sys; from train.__main__ import main; main([]); "
            "print({'torch', 'numpy', 'transformers'} & set(sys.modules))",
        )
        assert found.stdout.endswith("set()\n")

    def test_a_closed_pipe_is_no_error(self):
        given = f"{sys.executable} -m train run quickstart --keys | head -1"
        found = subprocess.run(given, shell=True, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert found.stdout.startswith("name=quickstart") and not found.stderr

    def test_as_a_process_it_trains_obeys_sigterm_and_resumes(self, data, tmp_path):
        out, log = tmp_path / "run", tmp_path / "log"
        never = 100_000
        changes = {"steps": never, "sample.tokens": 0, "checkpoint.every": never, "evaluation.every": never}
        given = [sys.executable, "-m", "train", "run", "tiny", *keys(data, out, **changes)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with open(log, "w") as file:
            child = subprocess.Popen(given, stdout=file, stderr=file, env=environment, cwd=tmp_path)
        end = time.monotonic() + 120
        while not (out / "metrics.jsonl").exists() and child.poll() is None and time.monotonic() < end:
            time.sleep(0.1)
        child.send_signal(signal.SIGTERM)
        assert child.wait(60) == 128 + signal.SIGTERM, log.read_text()
        said = log.read_text()
        assert "stopped by SIGTERM after step" in said and f"python -m train resume {out}" in said
        assert "Traceback" not in said
        step = tiny_run.read_metrics(out)[-1]["step"]
        assert f"continuing {out} after step {step}" in train("resume", out, f"steps={step + 3}")
        assert tiny_run.read_metrics(out)[-1]["step"] == step + 3
