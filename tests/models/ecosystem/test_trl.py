"""TRL and PEFT fine-tune our models and patched ones, by the script of docs/fine-tuning.md."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from delta_trn import DeltaConfig, DeltaForCausalLM, load_model
from delta_trn.train.data.tokenizer import plain_bytes
from tests.support.families import make

pytest.importorskip("trl", reason="trl is not installed here; make test-trl has it")
PAGE = (Path(__file__).parents[3] / "docs" / "fine-tuning.md").read_text()
BYTES = 320


def losses(folder: Path) -> list[float]:
    """Returns the losses that a run has logged, in the order of its steps."""
    (state,) = sorted(folder.glob("checkpoint-*/trainer_state.json"))[-1:]
    return [line["loss"] for line in json.loads(state.read_text())["log_history"] if "loss" in line]


def own_loss(place: Path, folder: str) -> float:
    """Returns the loss that a model has of the answers, each conversation in a row of its own."""
    model = load_model(place / folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(place / folder)
    template = (place / "chat.jinja").read_text()
    total, count = 0.0, 0
    for line in (place / "sums.jsonl").read_text().splitlines():
        row = tokenizer.apply_chat_template(
            json.loads(line)["messages"], chat_template=template, return_dict=True, return_tensors="pt",
            return_assistant_tokens_mask=True,
        )  # fmt: skip
        learned = torch.as_tensor(row["assistant_masks"]).reshape(-1)[1:].bool()
        with torch.no_grad():
            log_p = model(row["input_ids"]).logits[0, :-1].log_softmax(-1)
        total -= log_p.gather(1, row["input_ids"][0, 1:, None])[learned].sum().item()
        count += int(learned.sum())
    return total / count


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Returns a folder with the page's files and small models to begin with."""
    folder = tmp_path_factory.mktemp("trl")
    for name, text in re.findall(r"^```\w+ file=(\S+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        (folder / name).write_text(text)
    small = {"hidden_size": 64, "vocab_size": BYTES, "max_position_embeddings": 256}
    make("qwen3_5", **small).save_pretrained(folder / "qwen")
    for name, base in (("ours", 32), ("ours-wide", 8)):
        torch.manual_seed(0)
        DeltaForCausalLM(
            DeltaConfig(
                vocab_size=BYTES, hidden_size=32, base_width=base, num_hidden_layers=2, num_heads=2,
                intermediate_multiple=16, attention_layers=[1], initializer_range=0.1,
            )
        ).save_pretrained(folder / name)  # fmt: skip
    for name in ("qwen", "ours", "ours-wide"):
        plain_bytes().save(folder / name)
    return folder


def fine_tune(place: Path, model: str, out: str, *how: str) -> list[float]:
    """Runs the page's script, and returns the losses."""
    offline = {"HF_HOME": str(place / "cache"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    words = [sys.executable, "fine_tune.py", model, "sums.jsonl", out, *how]
    done = subprocess.run(
        words, env={**os.environ, **offline}, cwd=place, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr
    return losses(place / out)


@pytest.mark.parametrize("how", ["all", "lora"])
@pytest.mark.parametrize("model", ["qwen", "ours", "ours-wide"])
def test_the_script_of_the_page_lowers_the_loss(place, model, how):
    found = fine_tune(place, model, f"{model}-{how}", *(["lora"] if how == "lora" else []))
    assert found[-1] < found[0]
    assert found[0] == pytest.approx(own_loss(place, model), rel=1e-5)
    weights = {p.name for p in (place / f"{model}-{how}").iterdir()}
    assert ("adapter_model.safetensors" if how == "lora" else "model.safetensors") in weights


def test_what_all_weights_have_learned_opens_in_transformers(place):
    model = AutoModelForCausalLM.from_pretrained(place / "qwen-all")
    before = AutoModelForCausalLM.from_pretrained(place / "qwen")
    moved = [name for name, p in model.named_parameters() if not torch.equal(p, before.get_parameter(name))]
    assert len(moved) > 10
