"""`delta-trn export` writes whole folders that stand alone,
and says what is wrong where it cannot.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from delta_trn.train.__main__ import main
from delta_trn.train.run import export as exporting
from tests.support import load_without_package, tiny_run, warm
from tests.support.tiny_run import keys, run_command, train

HIDING = Path(load_without_package.__file__).read_text().partition("\n\n\ndef load(")[0]
PACKAGE_BLOCKED = f"{HIDING}\n\nsys.meta_path.insert(0, Hiding())\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    data = tiny_run.prepare_data(folder)
    changes = {"steps": 20, "evaluation__every": 10, "checkpoint__every": 10}
    train("run", "tiny", *keys(data, folder / "run", **changes))
    return folder / "run"


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory) -> Path:
    to = tmp_path_factory.mktemp("to") / "model"
    train("export", run, "--to", to, "--checkpoint", "last", "--remote-code")
    return to


def example(card: str) -> str:
    """Returns the Python block of a model card."""
    match = re.search(r"```python\n(.*?)```", card, re.DOTALL)
    assert match
    return match[1]


class TestContent:
    def test_it_has_the_weights_of_the_checkpoint_and_nothing_for_training(self, run, exported):
        names = {path.name for path in exported.iterdir() if path.suffix != ".py"}
        tokenizer = {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"}
        model = {"config.json", "generation_config.json", "model.safetensors", "README.md"}
        assert names == tokenizer | model
        saved = load_file(run / "checkpoints" / "step-00000020" / "model.safetensors")
        written = load_file(exported / "model.safetensors")
        assert set(saved) == set(written) and all(
            torch.equal(saved[name], written[name]) for name in saved
        )
        modes = {path.stat().st_mode for path in exported.iterdir()}
        assert len(modes) == 1, "safetensors lets only the owner read what it writes"

    def test_its_tokenizer_pads_on_the_left_and_its_special_tokens_are_the_models(self, exported):
        tokenizer = AutoTokenizer.from_pretrained(exported)
        generation = json.loads((exported / "generation_config.json").read_text())
        assert tokenizer.padding_side == "left"
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            assert generation[name] == getattr(tokenizer, name)

    def test_the_card_has_the_figures_of_the_runs_own_files(self, run, exported):
        card = (exported / "README.md").read_text()
        last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
        assert last["split"] == "val" and last["step"] == 20
        parameters = sum(x.numel() for x in load_file(exported / "model.safetensors").values())
        figures = (
            f"{last['loss']:.4f} nats",
            f"{last['bits_per_byte']:.4f} bits",
            f"{last['tokens']:,} tokens",
        )
        for figure in (*figures, "20 steps", f"{parameters:,} parameters", "adamw"):
            assert figure in card
        assert str(run.parent) not in card, "a path of the machine that trained it"

    def test_the_best_checkpoint_is_exported_unless_another_is_named(self, run, tmp_path):
        best = (run / "checkpoints" / "best").resolve()
        train("export", run, "--to", tmp_path / "model")
        saved, written = (load_file(f / "model.safetensors") for f in (best, tmp_path / "model"))
        assert all(torch.equal(saved[name], written[name]) for name in saved)
        assert not list((tmp_path / "model").glob("*.py"))

    def test_the_example_of_the_card_runs(self, exported, tmp_path):
        """With remote code it runs where the package cannot be imported."""
        code = example((exported / "README.md").read_text())
        assert "import delta_trn" not in code
        environment = {**os.environ, "HF_HOME": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, "-I", "-c", PACKAGE_BLOCKED + code],
            cwd=exported, env=environment, capture_output=True, text=True, timeout=100,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("['Once") and "<|" not in done.stdout

    def test_the_example_of_a_card_without_code_imports_the_package(
        self, run, tmp_path, monkeypatch, capsys
    ):
        train("export", run, "--to", tmp_path / "model")
        monkeypatch.chdir(tmp_path / "model")
        code = example(Path("README.md").read_text())
        assert code.startswith("import delta_trn") and "trust" not in code
        exec(code, {})
        assert capsys.readouterr().out.startswith("['Once")

    def test_dtype_and_license_are_a_choice_and_the_card_says_them(self, run, exported, tmp_path):
        train(
            "export",
            run,
            "--to",
            tmp_path / "half",
            "--dtype",
            "bfloat16",
            "--license",
            "cc-by-4.0",
        )
        weights = load_file(tmp_path / "half" / "model.safetensors")
        assert {(x.dtype, name.endswith(("A_log", "dt_bias"))) for name, x in weights.items()} == {
            (torch.bfloat16, False), (torch.float32, True),
        }  # fmt: skip
        card = (tmp_path / "half" / "README.md").read_text()
        assert (
            "\nlicense: cc-by-4.0\n" in card
            and "| weights | bfloat16, trained in float32 |" in card
        )
        assert AutoModelForCausalLM.from_pretrained(tmp_path / "half").dtype == torch.bfloat16
        assert "license:" not in (exported / "README.md").read_text()

    def test_it_loads_in_the_dtype_that_was_saved(self, exported):
        model = AutoModelForCausalLM.from_pretrained(exported, dtype="auto")
        assert model.dtype == torch.float32 and model.generation_config.eos_token_id == 257


def _export_until_the_card(words: list[str]) -> None:
    """Runs the command in a process that ends where the card would be written."""
    exporting.model_card = lambda *arguments: os._exit(9)
    main(words)


class TestAtomic:
    def test_a_failed_export_leaves_nothing(self, run, tmp_path, monkeypatch):
        def fail(*arguments, **options):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(exporting, "model_card", fail)
        status, _, err = run_command("export", run, "--to", tmp_path / "model")
        assert status == 2 and "no space left to write" in err and "free some space" in err
        assert not list(tmp_path.iterdir())

    def test_a_killed_export_leaves_no_folder_and_the_next_one_is_whole(self, run, tmp_path):
        """The process ends at once, without a chance to clean up,
        when weights and tokenizer are written.
        """
        words = ["export", str(run), "--to", str(tmp_path / "model")]
        child = warm.Process(target=_export_until_the_card, args=(words,))
        child.start()
        assert tiny_run.join(child) == 9 and not (tmp_path / "model").exists()
        assert (tmp_path / ".model.tmp" / "model.safetensors").exists()
        train(*words)
        assert (tmp_path / "model" / "README.md").exists() and not (
            tmp_path / ".model.tmp"
        ).exists()


class TestRefusals:
    def test_a_folder_with_something_in_it_is_refused_and_stays(self, run, tmp_path):
        (tmp_path / "notes.txt").write_text("mine")
        status, out, err = run_command("export", run, "--to", tmp_path)
        assert (status, out) == (2, "") and "not an empty folder; choose another --to DIR" in err
        assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]

    def test_an_empty_folder_is_taken(self, run, tmp_path):
        (tmp_path / "model").mkdir()
        train("export", run, "--to", tmp_path / "model")
        assert (tmp_path / "model" / "config.json").exists()

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["nowhere"], "nowhere is not a folder; a run's folder is what `run` printed"),
            (["{run}", "--checkpoint", "7"], "no checkpoint of step 7"),
            (["{run}", "--checkpoint", "newest"], "expected best, last, or one of 10, 20"),
        ],
    )
    def test_what_is_not_there_is_named(self, run, tmp_path, words, message):
        words = [word.format(run=run) for word in words]
        status, _, err = run_command("export", *words, "--to", tmp_path / "model")
        assert status == 2 and message in err and not list(tmp_path.iterdir())
