"""Our models, and transformers' patched ones, under PEFT and transformers' Trainer."""

import subprocess
import sys

import pytest
import torch
from peft import LNTuningConfig, LoraConfig, PeftModel, TaskType, get_peft_model
from peft.utils import constants
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

from delta_trn import DeltaConfig, DeltaForCausalLM, patch_transformers
from delta_trn.backends.parity.judge import error
from tests.support.families import FAMILIES, make, tokens
from tests.support.tiny_run import nudge, tolerance

# one row of logits, summed in another order: merged weights are W + B A, and not two products
ALLOWED = 2**-16


SIZES = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2}


def our_model():
    torch.manual_seed(0)
    return DeltaForCausalLM(DeltaConfig(**SIZES))


class TestLoRA:
    """Low-rank adapters at every linear layer, with initial values that change the logits."""

    def settings(self):
        return LoraConfig(
            task_type=TaskType.CAUSAL_LM, r=4, target_modules="all-linear", init_lora_weights=False
        )

    # our layers join products of 32 inputs from 32 tokens on
    @pytest.mark.parametrize("length", [9, 40])
    @pytest.mark.parametrize("family", ["ours", *FAMILIES])
    def test_adapters_train_merge_and_load_again(self, family, length, tmp_path):
        """Ours in float64: with this seed's adapter float32's own error is
        as large as 5e-4 on some CPUs.
        """
        begin = (lambda: our_model().double()) if family == "ours" else lambda: make(family)
        allowed = 2**-32 if family == "ours" else ALLOWED
        ids, plain = tokens(2, length), begin().eval()
        before = plain(ids).logits.detach()
        if not isinstance(plain, DeltaForCausalLM):
            patch_transformers(plain, backend="chunked")
        torch.manual_seed(1)
        adapted = get_peft_model(plain, self.settings()).eval()
        outputs = adapted(ids, labels=ids)
        outputs.loss.backward()
        gradients = {n: p.grad for n, p in adapted.named_parameters() if p.grad is not None}
        assert gradients and all("lora" in name for name in gradients)
        assert all(gradient.any() for gradient in gradients.values())
        adapted.save_pretrained(tmp_path)
        loaded = PeftModel.from_pretrained(begin().eval(), tmp_path).eval()
        assert error(loaded(ids).logits, outputs.logits.detach()) < allowed
        merged = loaded.merge_and_unload()
        assert error(merged(ids).logits, outputs.logits.detach()) < allowed
        assert error(before, outputs.logits.detach()) > 100 * ALLOWED

    @pytest.mark.parametrize("smoothing", [0.0, 0.1])
    def test_the_loss_counts_an_adapter_at_the_readout(self, smoothing):
        plain = DeltaForCausalLM(
            DeltaConfig(**SIZES, tie_word_embeddings=False, label_smoothing=smoothing)
        )
        settings = LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False)
        adapted, ids = get_peft_model(plain, settings).train(), tokens(2, 9)
        outputs = adapted(ids, labels=ids)
        logits, targets = outputs.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
        expected = torch.nn.functional.cross_entropy(logits, targets, label_smoothing=smoothing)
        assert error(outputs.loss, expected.detach()) < ALLOWED
        outputs.loss.backward()
        assert all(p.grad.any() for p in adapted.parameters() if p.requires_grad)
        with adapted.disable_adapter():
            assert abs(adapted(ids, labels=ids).loss - expected) > 1e-3
        assert error(adapted.merge_and_unload()(ids).logits, outputs.logits.detach()) < ALLOWED

    def test_every_linear_layer_of_a_mixer_gets_an_adapter(self):
        targets = get_peft_model(our_model(), self.settings()).targeted_module_names
        names = {name.split(".")[-1] for name in targets}
        assert names >= {"q_proj", "k_proj", "v_proj", "g_proj", "a_proj", "b_proj", "o_proj"}


def train(folder, batch, accumulation, *, packed=False, count=True, seed=None):
    """Trains four steps of eight sequences, of which some tokens are no targets; returns the
    losses.

    `seed` moves every initial weight by one rounding.
    """
    model = our_model()
    if seed is not None:
        nudge(model, seed)
    model.accepts_loss_kwargs = count
    generator = torch.Generator().manual_seed(1)
    rows = []
    for i in range(16):
        ids = torch.randint(2, 61, (12,), generator=generator)
        labels = ids.clone()
        labels[: i % 9] = -100
        rows.append({"input_ids": ids.tolist(), "labels": labels.tolist()})
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        max_steps=4,
        learning_rate=1e-2,
        optim="sgd",
        lr_scheduler_type="constant",
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        seed=0,
        data_seed=0,
    )
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True) if packed else None
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, data_collator=collator)
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def distance(losses, expected):
    return max(abs(a - b) / b for a, b in zip(losses, expected, strict=True))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return train(tmp_path_factory.mktemp("whole"), 8, 1)


@pytest.fixture(scope="module")
def allowed(whole, tmp_path_factory):
    """Returns what rounding may do to these losses,
    from two runs whose weights began one rounding away.
    """
    folder = tmp_path_factory.mktemp("control")
    return tolerance(
        [distance(train(folder / f"{seed}", 8, 1, seed=seed), whole) for seed in range(2)]
    )


class TestTrainer:
    @pytest.mark.parametrize("packed", [False, True], ids=["rows", "flattened"])
    @pytest.mark.parametrize(("batch", "accumulation"), [(2, 4), (1, 8)])
    def test_accumulated_losses_are_those_of_the_whole_batch(
        self, whole, allowed, tmp_path, batch, accumulation, packed
    ):
        losses = train(tmp_path, batch, accumulation, packed=packed)
        assert distance(losses, whole) <= allowed

    @pytest.mark.slow
    def test_a_compiled_patched_model_logs_the_same_losses(self, tmp_path):
        """By inductor; tokens of one length, so that one graph serves all."""
        runs = []
        for compiled in (False, True):
            model, losses = make("qwen3_5").train(), []
            with patch_transformers(model, backend="chunked"):
                rows = [
                    {"input_ids": ids.tolist(), "labels": ids.tolist()} for ids in tokens(16, 12)
                ]
                arguments = TrainingArguments(
                    output_dir=str(tmp_path / str(compiled)),
                    per_device_train_batch_size=4,
                    max_steps=3,
                    learning_rate=1e-3,
                    logging_steps=1,
                    report_to=[],
                    use_cpu=True,
                    save_strategy="no",
                    disable_tqdm=True,
                    seed=0,
                    torch_compile=compiled,
                )
                trainer = Trainer(model=model, args=arguments, train_dataset=rows)
                trainer.train()
                losses += [line["loss"] for line in trainer.state.log_history if "loss" in line]
            torch.compiler.reset()
            runs.append(losses)
        assert len(runs[0]) == 3 and distance(runs[1], runs[0]) < 1e-4

    def test_a_mean_of_means_is_another_loss(self, whole, allowed, tmp_path):
        assert distance(train(tmp_path, 1, 8, count=False), whole) > 10 * allowed


IN_ANOTHER_ORDER = """
{}
from peft.utils import constants
assert constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING["delta_trn"] == ["q_proj", "v_proj"]
"""


class TestTargetsThatNobodyNames:
    def test_adapters_lie_where_those_of_a_llama_do(self):
        adapted = get_peft_model(our_model(), LoraConfig(task_type=TaskType.CAUSAL_LM))
        layers = {
            name.split(".lora_A")[0] for name, _ in adapted.named_parameters() if "lora_A" in name
        }
        assert {name.rpartition(".")[2] for name in layers} == {"q_proj", "v_proj"}
        assert len(layers) == 2 * SIZES["num_hidden_layers"]

    def test_every_table_of_peft_names_layers_that_our_models_have(self):
        known = {name.rpartition(".")[2] for name, _ in our_model().named_modules()}
        tables = [
            table["delta_trn"]
            for name, table in vars(constants).items()
            if name.endswith("_MODULES_MAPPING") and "llama" in table
        ]
        assert len(tables) > 20 and known.issuperset(name for table in tables for name in table)

    def test_norms_are_tuned(self):
        adapted = get_peft_model(our_model(), LNTuningConfig(task_type=TaskType.CAUSAL_LM))
        ids = tokens(2, 9)
        adapted(ids, labels=ids).loss.backward()
        tuned = {n: p.grad for n, p in adapted.named_parameters() if p.requires_grad}
        assert len(tuned) == 2 * SIZES["num_hidden_layers"] + 1
        assert all(gradient is not None and gradient.any() for gradient in tuned.values())

    @pytest.mark.parametrize("first", ["import peft, delta_trn", "import delta_trn, peft"])
    def test_the_order_of_imports_does_not_count(self, first):
        run = [sys.executable, "-c", IN_ANOTHER_ORDER.format(first)]
        subprocess.run(run, check=True, timeout=300)
