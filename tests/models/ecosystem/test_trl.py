"""TRL and PEFT fine-tune our models and patched ones, by the script of docs/fine-tuning.md."""

import json
import math
import os
import re
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3_5ForConditionalGeneration

from delta_trn import DeltaConfig, DeltaForCausalLM, load_model, patch_transformers
from delta_trn.train.data.tokenizer import plain_bytes
from tests.support.families import FAMILIES, GATED, make, write_whole

trl = pytest.importorskip("trl", reason="trl is not installed here; make test-trl has it")
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
            json.loads(line)["messages"],
            chat_template=template,
            return_dict=True,
            return_tensors="pt",
            return_assistant_tokens_mask=True,
        )
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
    for family in GATED:
        make(family, vocab_size=BYTES).save_pretrained(folder / family)
    write_whole(folder / "released", "qwen3_5", vocab_size=BYTES)
    for name, base in (("ours", 32), ("ours-wide", 8)):
        torch.manual_seed(0)
        DeltaForCausalLM(
            DeltaConfig(
                vocab_size=BYTES, hidden_size=32, base_width=base, num_hidden_layers=2, num_heads=2,
                intermediate_multiple=16, attention_layers=[1], initializer_range=0.1,
            )
        ).save_pretrained(folder / name)  # fmt: skip
    for name in (*GATED, "qwen", "released", "ours", "ours-wide"):
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


def test_a_released_folder_comes_out_with_its_vision_tower_and_mtp_layers(place):
    found = fine_tune(place, "released", "released-all")
    assert found[-1] < found[0]
    before, after = (
        {
            name: x
            for file in (place / folder).glob("*.safetensors")
            for name, x in load_file(file).items()
        }
        for folder in ("released", "released-all")
    )
    kept = {name for name, x in before.items() if torch.equal(x, after[name])}
    assert before.keys() == after.keys()
    assert {name for name in before if "visual" in name or "mtp" in name} <= kept and len(
        before
    ) > len(kept)
    whole = Qwen3_5ForConditionalGeneration.from_pretrained(place / "released-all")
    assert whole.dtype == torch.bfloat16


def test_what_all_weights_have_learned_opens_in_transformers(place):
    model = AutoModelForCausalLM.from_pretrained(place / "qwen-all")
    before = AutoModelForCausalLM.from_pretrained(place / "qwen")
    moved = [
        name
        for name, p in model.named_parameters()
        if not torch.equal(p, before.get_parameter(name))
    ]
    assert len(moved) > 10


# Three models in TRL's own trainers: ours at m = 1 and at m = 4, and a patched one.
MODELS = ("ours", "ours-wide", "qwen")
SUMS = [(a, b) for a in range(1, 5) for b in (1, 20)]
ROWS = [{"prompt": f"{a} + {b} =", "completion": f" {a + b}" + "!" * (a % 3)} for a, b in SUMS]
PAIRS = [
    {"prompt": row["prompt"], "chosen": row["completion"], "rejected": " none"} for row in ROWS
]
ONE_STEP = {
    "per_device_train_batch_size": 8,
    "max_steps": 1,
    "logging_steps": 1,
    "report_to": [],
    "use_cpu": True,
    "save_strategy": "no",
    "disable_tqdm": True,
    "bf16": False,
    "gradient_checkpointing": False,
}
LENGTH = 48
ALL = {"completion_only_loss": False}  # else, what the prompt says is read and not learned
MODES = {
    "padded": ALL,
    "completion-only": {},
    "packed": {"packing": True, **ALL},
    "packed, completion-only": {"packing": True},
    "packed and cut": {"packing": True, "packing_strategy": "wrapped", **ALL},
    "padding-free": {"padding_free": True, "max_length": None, **ALL},
}


def opened(place: Path, name: str):
    """Returns the model to train, patched if it is of transformers."""
    model = load_model(place / name)
    if not isinstance(model, DeltaForCausalLM):
        patch_transformers(model)
    return model


@lru_cache
def judge(place: Path, name: str):
    """Returns the same model, not patched, and its tokenizer."""
    return load_model(place / name).eval(), AutoTokenizer.from_pretrained(place / name)


def own_log_p(place: Path, name: str, ids: list[int]) -> torch.Tensor:
    """Returns what the model, alone with one sequence, says of every next token:
    [T - 1, vocabulary].
    """
    with torch.no_grad():
        logits = judge(place, name)[0](torch.tensor([ids]), use_cache=False).logits
    return logits[0, :-1].log_softmax(-1)


def own_losses(place: Path, name: str, ids: list[int], begin: int) -> torch.Tensor:
    """Returns minus the log-probability of each token from `begin` on."""
    log_p = own_log_p(place, name, ids)
    return -log_p.gather(1, torch.tensor(ids)[1:, None])[max(begin - 1, 0) :, 0]


def first_line(trainer) -> dict[str, float]:
    """Trains one step, and returns what was logged of it."""
    trainer.train()
    return trainer.state.log_history[0]


def adapters(how: str) -> LoraConfig | None:
    return (
        LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        if how == "lora"
        else None
    )


@pytest.mark.parametrize(
    ("name", "mode", "how"),
    [
        *((name, mode, how) for name in MODELS for mode in MODES for how in ("all", "lora")),
        *((family, "packed", "all") for family in GATED),
    ],
)
def test_the_first_logged_loss_of_sft_is_the_models_own(place, name, mode, how, tmp_path):
    tokenizer = judge(place, name)[1]
    settings = {"max_length": LENGTH, **ONE_STEP, **MODES[mode]}
    if "num_experts" in FAMILIES.get(name, ("", "", {}))[2]:
        settings["router_aux_loss_coef"] = 0.0  # TRL adds the routers' loss unless told not to
    settings = trl.SFTConfig(output_dir=str(tmp_path), **settings)
    line = first_line(
        trl.SFTTrainer(
            opened(place, name),
            settings,
            train_dataset=Dataset.from_list(ROWS),
            processing_class=tokenizer,
            peft_config=adapters(how),
        )
    )
    prompts = [tokenizer(row["prompt"])["input_ids"] for row in ROWS]
    texts = [row["prompt"] + row["completion"] + tokenizer.eos_token for row in ROWS]
    rows = [tokenizer(text)["input_ids"] for text in texts]
    if mode == "packed and cut":
        stream = [token for ids in rows for token in ids]
        rows = [stream[i : i + LENGTH] for i in range(0, len(stream), LENGTH)]
    begins = (
        [0] * len(rows) if "completion_only_loss" in MODES[mode] else [len(ids) for ids in prompts]
    )
    own = torch.cat(
        [own_losses(place, name, ids, begin) for ids, begin in zip(rows, begins, strict=True)]
    )
    assert line["loss"] == pytest.approx(own.mean().item(), rel=1e-5)


@pytest.mark.parametrize("how", ["all", "lora"])
@pytest.mark.parametrize("name", MODELS)
def test_the_log_probabilities_of_dpo_are_the_models_own(place, name, how, tmp_path):
    tokenizer = judge(place, name)[1]
    line = first_line(
        trl.DPOTrainer(
            opened(place, name),
            None,
            trl.DPOConfig(output_dir=str(tmp_path), **ONE_STEP),
            train_dataset=Dataset.from_list(PAIRS),
            processing_class=tokenizer,
            peft_config=adapters(how),
        )
    )
    for kind in ("chosen", "rejected"):
        own = 0.0
        for row in PAIRS:
            begin = len(tokenizer(row["prompt"])["input_ids"])
            ids = tokenizer(row["prompt"] + row[kind] + tokenizer.eos_token)["input_ids"]
            own -= own_losses(place, name, ids, begin).sum().item() / len(PAIRS)
        assert line[f"logps/{kind}"] == pytest.approx(own, rel=1e-5)
    assert line["loss"] == pytest.approx(math.log(2), rel=1e-5)  # beside a copy of itself


@pytest.mark.parametrize("how", ["all", "lora"])
@pytest.mark.parametrize("name", MODELS)
def test_the_entropy_of_grpo_is_the_models_own(place, name, how, tmp_path):
    seen = []

    def reward(prompts, completions, completion_ids, **others):
        seen.extend(zip(prompts, completion_ids, strict=True))
        return [float(len(set(ids))) for ids in completion_ids]

    tokenizer = judge(place, name)[1]
    settings = trl.GRPOConfig(
        output_dir=str(tmp_path), **ONE_STEP, num_generations=2, max_completion_length=6, beta=0.1
    )
    prompts = Dataset.from_list([{"prompt": row["prompt"]} for row in ROWS])
    line = first_line(
        trl.GRPOTrainer(
            opened(place, name),
            reward,
            settings,
            train_dataset=prompts,
            processing_class=tokenizer,
            peft_config=adapters(how),
        )
    )
    entropies = []
    for prompt, made in seen:
        ids = tokenizer(prompt)["input_ids"]
        log_p = own_log_p(place, name, [*ids, *made])[len(ids) - 1 :]
        entropies.append(-(log_p.exp() * log_p).sum(-1))
    assert len(seen) == 8 and line["entropy"] == pytest.approx(
        torch.cat(entropies).mean().item(), rel=1e-5
    )
    assert line["kl"] == pytest.approx(0, abs=1e-6)
