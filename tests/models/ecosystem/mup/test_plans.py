"""One plan of muP for any model: its table, what it changes, what it refuses, and recipes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

from delta_trn import mup
from tests.support.planted_bugs import Bug, planted

PLACE = "models.ecosystem.plans"


def qwen3(width: int, **changes) -> nn.Module:
    settings = {
        "vocab_size": 48, "hidden_size": width, "num_hidden_layers": 2, "head_dim": 16,
        "num_attention_heads": width // 16, "num_key_value_heads": width // 16,
        "intermediate_size": 3 * width, "tie_word_embeddings": False,
        "pad_token_id": None, "bos_token_id": 1, "eos_token_id": None,
    }  # fmt: skip
    torch.manual_seed(0)
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**{**settings, **changes}))


def llama(width: int, **changes) -> nn.Module:
    """Keeps the number of heads, which grow."""
    settings = {
        "vocab_size": 48, "hidden_size": width, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "intermediate_size": 3 * width, "tie_word_embeddings": True,
        "pad_token_id": None, "bos_token_id": 1, "eos_token_id": None,
    }  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**settings, **changes}))


TOKENS = torch.arange(24).reshape(2, 12)
BRANCHES = ("*.o_proj", "*.down_proj")


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(TOKENS).logits


class TestTable:
    def test_every_parameter_has_a_row_that_says_what_it_gets_and_why(self):
        model = qwen3(128)
        plan = mup.plan(model, base=lambda: qwen3(32))
        text = str(plan).splitlines()
        assert text[0].split() == [
            *("parameter", "role", "m", "rate", "init", "epsilon", "decay", "multiplier", "why")
        ]
        names = [name for name, _ in model.named_parameters()]
        assert [line.split()[0] for line in text[1:]] == names
        rows = {row.parameter: row for row in plan.rows}
        down = rows["model.layers.0.mlp.down_proj.weight"]
        assert (down.role, down.m, down.rate, down.init) == ("hidden", 4, 0.25, 0.5)
        assert (down.epsilon, down.decay, down.multiplier) == (0.25, 4, 1)
        readout = rows["lm_head.weight"]
        assert (readout.role, readout.rate, readout.init) == ("readout", 0.25, 0.25)
        assert all(row.why for row in plan.rows)

    def test_its_groups_and_initial_values_are_those_of_the_functions_that_it_is_made_of(self):
        mine, theirs = qwen3(128), qwen3(128)
        options = {"base": lambda: qwen3(32)}
        plan = mup.plan(mine, lr=4e-3, **options)
        plan.initialize()
        mup.initialize(theirs, **options)
        for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(a, b)
        own = plan.groups(weight_decay=0.1)
        wanted = mup.parameter_groups(theirs, lr=4e-3, weight_decay=0.1, **options)
        keys = ("names", "lr", "weight_decay", "eps", "role")
        assert [[g[k] for k in keys] for g in own] == [[g[k] for k in keys] for g in wanted]
        assert plan.multipliers == {} and plan.optimizer().defaults["betas"] == (0.9, 0.95)

    def test_what_muon_moves_whole_is_named(self):
        make = lambda w: nn.ModuleDict(  # noqa: E731
            {"e": nn.Embedding(9, w), "c_attn": nn.Linear(w, 3 * w), "head": nn.Linear(w, 9)}
        )
        plan = mup.plan(make(64), base=lambda: make(16), optimizer="muon")
        (row,) = [row for row in plan.rows if row.parameter == "c_attn.weight"]
        assert row.why.endswith("by Muon, several matrices in one, orthogonalized whole")
        assert type(plan.optimizer().parts[0]) is torch.optim.Muon


class TestMultipliers:
    def make(self, width: int = 128, layers: int = 4) -> tuple[nn.Module, mup.plan]:
        model = llama(width, num_hidden_layers=layers)
        base = lambda: llama(32, num_hidden_layers=2)  # noqa: E731
        return model, mup.plan(model, base=base, depth=(2, layers), branches=BRANCHES)

    def test_a_model_without_its_multipliers_is_refused_until_apply(self):
        _, plan = self.make()
        for call in (plan.groups, plan.optimizer, plan.initialize):
            with pytest.raises(ValueError, match=r"need multipliers .* call plan\.apply\(\) first"):
                call()
        plan.apply().initialize()
        assert plan.groups()
        with pytest.raises(ValueError, match="apply\\(\\) once"):
            plan.apply()

    def test_they_are_the_readouts_depths_and_attentions(self):
        model, plan = self.make()
        assert plan.apply().multipliers == pytest.approx({
            **{f"model.layers.{i}.{x}": 0.5 for i in range(4)
               for x in ("self_attn.o_proj", "mlp.down_proj")},
            **{f"model.layers.{i}.self_attn": 0.5 for i in range(4)},
            "lm_head": 0.25,
        })  # fmt: skip
        attention = model.model.layers[0].self_attn
        # 1/d: at the base 1/sqrt(16), heads are four times as large
        assert attention.scaling == pytest.approx(16**-0.5 / 4)
        seen = {}
        layer = model.model.layers[0].mlp.down_proj
        layer.register_forward_hook(lambda m, args, y: seen.update(x=args[0], y=y))
        logits(model)
        assert torch.allclose(seen["y"], F.linear(seen["x"], layer.weight) / 2)

    def test_weights_with_multipliers_do_not_load_into_a_model_without(self):
        model, plan = self.make()
        plan.apply()
        with pytest.raises(RuntimeError, match="mup_multipliers"):
            llama(128, num_hidden_layers=4).load_state_dict(model.state_dict())
        other, again = self.make()
        again.apply()
        other.load_state_dict(model.state_dict())
        assert torch.equal(logits(other), logits(model))

    @pytest.mark.parametrize("width", [128, 96])
    def test_folded_weights_compute_the_same_without_this_package(self, width: int):
        model, plan = self.make(width)
        plan.apply().initialize()
        before = logits(model)
        assert plan.fold() is model
        plain = llama(width, num_hidden_layers=4, tie_word_embeddings=False)
        plain.load_state_dict(model.state_dict())
        after = logits(plain)
        if width == 128:  # powers of two
            assert torch.equal(after, before) and torch.equal(logits(model), before)
        assert torch.allclose(after, before, rtol=1e-4, atol=1e-6)
        assert model.config.tie_word_embeddings is False

    def test_queries_behind_a_norm_cannot_be_folded(self):
        grown = {"num_attention_heads": 2, "num_key_value_heads": 2}
        make = lambda w: qwen3(w, head_dim=w // 2, **grown)  # noqa: E731
        plan = mup.plan(make(64), base=lambda: make(32)).apply()
        with pytest.raises(ValueError, match="normalizes its queries"):
            plan.fold()

    def test_epsilon_within_blocks_falls_with_depth_and_rates_of_sgd_grow(self):
        _, plan = self.make(width=32)
        plan.apply()
        eps = {name: g["eps"] for g in plan.groups(eps=1.0) for name in g["names"]}
        assert eps["model.layers.3.mlp.up_proj.weight"] == 0.5
        assert eps["model.embed_tokens.weight"] == eps["model.norm.weight"] == 1.0
        model = llama(32, num_hidden_layers=4)
        sgd = mup.plan(model, base=lambda: llama(32), optimizer="sgd", lr=1.0, depth=(2, 4),
                       branches=BRANCHES).apply()  # fmt: skip
        rates = {name: g["lr"] for g in sgd.groups() for name in g["names"]}
        assert rates["model.layers.0.mlp.up_proj.weight"] == 2 and rates["model.norm.weight"] == 1


class TestDataRules:
    def test_rates_epsilon_betas_and_decay_follow_batch_over_tokens(self):
        plan = mup.plan(
            qwen3(32), base=lambda: qwen3(32), wider=lambda: qwen3(64), lr=1.0,
            batch=(8, 32), tokens=(100, 1600),
        )  # fmt: skip
        r = 4 / 16
        groups = plan.groups(eps=1.0, weight_decay=0.1)
        assert {group["lr"] for group in groups} == {r**0.5}
        assert {group["eps"] for group in groups} == {r**-0.5}
        assert {g["weight_decay"] for g in groups} == {0.0, 0.1 * r**0.5}
        assert plan.betas(0.9, 0.95) == pytest.approx((1 - 0.1 * r, 1 - 0.05 * r))
        assert "(arXiv:2512.22382)" in str(plan)

    def test_they_are_off_by_default(self):
        plan = mup.plan(qwen3(64), base=lambda: qwen3(32), lr=1.0)
        assert max(g["lr"] for g in plan.groups()) == 1.0 and "arXiv:2512" not in str(plan)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depth": (2, 4)}, r"depth needs the modules whose output is added"),
        ({"branches": ["*.o_proj"]}, r"depth needs the modules"),
        ({"depth": (2, 4), "branches": ["*.out"]}, r"'\*\.out' matches no module"),
        ({"tokens": (0, 4)}, r"tokens=\(0, 4\): expected \(at the base, now\)"),
        ({"batch": (1, 4), "optimizer": "sgd"}, r"the rule of arXiv:2512\.22382 is AdamW's"),
        ({"weight_decay": 0.1}, r"weight_decay=0\.1: expected 'independent' or 'with_rate'"),
        ({"optimizer": "lion"}, r"optimizer='lion' has no column"),
    ],
)
def test_what_cannot_be_planned_is_refused_by_name(options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        mup.plan(qwen3(64), base=lambda: qwen3(32), **options)


def test_a_batch_too_large_for_beta1_is_refused():
    plan = mup.plan(qwen3(64), base=lambda: qwen3(32), batch=(1, 16))
    with pytest.raises(ValueError, match=r"16 times the base's, which makes beta1 = -0\.6"):
        plan.optimizer()


def test_a_saved_plan_is_the_same_plan(tmp_path: Path):
    plan = mup.plan(qwen3(64), base=lambda: qwen3(32), optimizer="muon", lr=2e-2,
                    roles={"model.norm.weight": "constant"})  # fmt: skip
    plan.save(tmp_path / "plan.json")
    again = mup.load_plan(tmp_path / "plan.json", qwen3(64))
    assert str(again) == str(plan) and again.settings == plan.settings
    model = qwen3(64)
    mup.load_plan(tmp_path / "plan.json", model).initialize()
    plan.initialize()
    assert torch.equal(model.lm_head.weight, plan.model.lm_head.weight)
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(ValueError, match=r"expected a file of plan\.save"):
        mup.load_plan(tmp_path / "plan.json", qwen3(64))


def test_it_needs_torch_and_the_standard_library_alone(tmp_path: Path):
    """In an environment without anything else that this project depends on."""
    hidden = ("transformers", "tokenizers", "datasets", "safetensors", "pydantic", "rich", "tqdm",
              "matplotlib", "huggingface_hub", "triton", "numpy", "accelerate")  # fmt: skip
    for entry in Path(torch.__file__).parents[1].iterdir():
        if not entry.name.lower().startswith(hidden):
            (tmp_path / entry.name).symlink_to(entry)
    program = """
import sys
import torch
from delta_trn import mup
make = lambda n: torch.nn.Sequential(
    torch.nn.Embedding(9, n), torch.nn.Linear(n, n), torch.nn.Linear(n, 9))
model = make(64)
plan = mup.plan(model, base=lambda: make(16))
plan.apply().initialize()
optimizer = plan.optimizer()
model(torch.arange(9)).square().mean().backward()
optimizer.step()
print(len(plan.rows), sorted(m for m in sys.modules if m in HIDDEN))
""".replace("HIDDEN", repr(hidden))
    root = Path(__file__).parents[4]
    done = subprocess.run(
        [sys.executable, "-S", "-W", "ignore", "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        env={"PYTHONPATH": f"{root}:{tmp_path}", "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "5 []\n"


class TestRecipes:
    def test_transformers_trainer_takes_the_plans_optimizer(self, tmp_path: Path):
        model = qwen3(64)
        plan = mup.plan(model, base=lambda: qwen3(32), lr=1e-2)
        plan.apply().initialize()
        rows = [{"input_ids": list(range(i, i + 8)), "labels": list(range(i, i + 8))}
                for i in range(8)]  # fmt: skip
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=4, report_to=[],
            use_cpu=True, save_strategy="no", lr_scheduler_type="constant",
        )  # fmt: skip
        before = model.lm_head.weight.clone()
        trainer = transformers.Trainer(
            model, arguments, train_dataset=rows, optimizers=(plan.optimizer(), None)
        )
        trainer.train()
        rates = {name: g["lr"] for g in trainer.optimizer.param_groups for name in g["names"]}
        assert rates["lm_head.weight"] == pytest.approx(1e-2 / 2)
        assert not torch.equal(before, model.lm_head.weight)

    @pytest.mark.parametrize("optimizer", ["muon", "adamw"])
    def test_stand_ins_for_nanochats_and_torchtitans_loops_train(self, optimizer: str):
        """nanochat: Muon for matrices and AdamW for the rest, rates scheduled by group. torchtitan:
        AdamW and a schedule of torch. Both are small stand-ins, not these projects.
        """
        model = qwen3(64)
        plan = mup.plan(model, base=lambda: qwen3(32), optimizer=optimizer, lr=2e-2)
        plan.apply().initialize()
        made = plan.optimizer(weight_decay=0.01)
        losses = []
        schedule = torch.optim.lr_scheduler.LambdaLR(made, lambda step: 1 / (1 + step))
        first = [group["lr"] for group in made.param_groups]
        for _ in range(4):
            loss = model(TOKENS, labels=TOKENS).loss
            losses.append(loss.item())
            made.zero_grad()
            loss.backward()
            made.step()
            schedule.step()
        assert losses[-1] < losses[0]
        assert [g["lr"] for g in made.param_groups] == pytest.approx([x / 5 for x in first])
        if optimizer == "muon":
            assert [type(part).__name__ for part in made.parts] == ["Muon", "AdamW"]
            assert made.parts[0].param_groups[0]["lr"] == pytest.approx(first[0] / 5)
            state = made.state_dict()
            made.load_state_dict(state)


@pytest.mark.parametrize(
    ("bug", "check"),
    [
        (Bug("a fold forgets a branch's factor", f"{PLACE}:Plan._fold",
             "p.mul_(1 / self.settings.layers)", "pass", ""), "fold"),
        (Bug("a fold leaves the attention's scale", f"{PLACE}:Plan._fold",
             "p.mul_(self.attention[name])", "pass", ""), "fold"),
        (Bug("no buffer says that apply was called", f"{PLACE}:Plan.apply",
             "if values := [*self.multipliers.values()]:", "if values := []:", ""), "load"),
        (Bug("epsilon does not follow depth", f"{PLACE}:Plan.groups",
             'group["eps"] /= s.layers', "pass", ""), "epsilon"),
        (Bug("decay does not follow batches", f"{PLACE}:Plan.groups",
             'group["weight_decay"] *= s.data**0.5', "pass", ""), "data"),
    ],
    ids=lambda x: x.name if isinstance(x, Bug) else x,
)  # fmt: skip
def test_these_checks_can_fail(bug: Bug, check: str):
    of = TestMultipliers()
    checks = {
        "fold": lambda: of.test_folded_weights_compute_the_same_without_this_package(128),
        "load": of.test_weights_with_multipliers_do_not_load_into_a_model_without,
        "epsilon": of.test_epsilon_within_blocks_falls_with_depth_and_rates_of_sgd_grow,
        "data": TestDataRules().test_rates_epsilon_betas_and_decay_follow_batch_over_tokens,
    }
    checks[check]()
    with planted(bug), pytest.raises((AssertionError, ValueError, pytest.fail.Exception)):
        checks[check]()


def test_a_base_of_shapes_does_not_tell_the_size_of_heads(tmp_path: Path):
    mup.save_base(lambda: llama(32), tmp_path / "base.json")
    with pytest.raises(ValueError, match=r"does not say how large the heads of model\.layers\.0"):
        mup.plan(llama(64), base=tmp_path / "base.json")
    mup.plan(llama(64), base=lambda: llama(32)).save(tmp_path / "plan.json")
    assert mup.load_plan(tmp_path / "plan.json", llama(64)).attention == pytest.approx(
        {f"model.layers.{i}.self_attn": 2**-0.5 for i in range(2)}
    )


def test_the_file_of_a_plan_is_json(tmp_path: Path):
    mup.plan(qwen3(64), base=lambda: qwen3(32)).save(tmp_path / "x.json")
    assert json.loads((tmp_path / "x.json").read_text())["settings"]["optimizer"] == "adamw"
