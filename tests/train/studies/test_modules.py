"""The coordinate check of models that are not ours: flat under muP's groups,
and red where it must be.
"""

import json

import pytest
import torch
import transformers
from torch import nn

from delta_trn import mup
from delta_trn.train.studies.coordinates import modules, report
from delta_trn.train.studies.coordinates.modules import PLAIN, Maker, readings
from delta_trn.train.studies.coordinates.operations import OWN_UPDATE
from tests.models.ecosystem.test_widths import qwen3_next, sizes
from tests.support.tiny_run import run_command

HERE = "tests.train.studies.test_modules"
MIXERS = ("model.layers.0.linear_attn", "model.layers.1.self_attn")


def qwen3_5(width):
    config = transformers.Qwen3_5TextConfig(**sizes(width))
    return transformers.Qwen3_5ForCausalLM(config)


def perceptron(width):
    return nn.Sequential(
        nn.Embedding(50, width), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 50)
    )


def tied(width):
    model = perceptron(width)
    model[0].weight = model[3].weight  # its size follows a law of width
    return model


class Regression(nn.Module):
    """Returns its loss, and has no tokens."""

    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width))
        self.readout = nn.Linear(width, 1)

    def forward(self, x, y):
        return (self.readout(self.layers(x)) - y).square().mean()


def numbers(seed):
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(seed))
    return {"x": x, "y": x[:, :1] * x[:, 1:2]}


def many_tokens(seed):
    return torch.randint(128, (4, 64), generator=torch.Generator().manual_seed(seed))


def right(model, width):
    options = {"base": lambda: perceptron(64)}
    mup.initialize(model, **options, readout_init=0)
    return torch.optim.AdamW(mup.parameter_groups(model, **options, lr=2**-8))


def wrong(model, width):
    return torch.optim.AdamW(model.parameters(), lr=2**-8)


def nothing_of(model, width):
    return 0


def text(width):
    return "a model"


def constant(width):
    return nn.Linear(2, 2)


def without_width():
    return nn.Linear(2, 2)


def judge(make, parametrization, optimizer="adamw", *, rate=None, roles=None, **changes):
    sizes = {"widths": (64, 128, 256), "steps": 2, "seeds": 4} | changes
    rate = rate or {"adamw": 2**-8, "sgd": 0.1}[optimizer]
    start = Maker(make, 64, roles or {}).start(parametrization, optimizer, rate)
    return {
        v.tensor: v
        for v in report.judge(list(readings(start, parametrization, optimizer, **sizes)))
    }


@pytest.mark.parametrize("make", [qwen3_next, qwen3_5])
def test_every_module_of_qwen3_is_flat_under_our_groups(make):
    rows = judge(make, "mup")
    assert {*MIXERS, "model.layers.0.mlp", "logits", "logit_next"} <= rows.keys()
    # what a matrix adds itself also goes along with unrelated tokens by chance
    slopes = {name: abs(v.change.slope) for name, v in rows.items() if OWN_UPDATE not in name}
    slopes |= {f"{name} before": abs(v.start.slope) for name, v in rows.items() if v.start}
    assert max(slopes.values()) < 0.1, max(slopes.items(), key=lambda row: row[1])
    assert all(v.passes for v in rows.values())


def test_plain_adamw_is_red_in_the_forward_pass_and_in_what_is_learned():
    rows = judge(qwen3_next, PLAIN, seeds=2)
    for name in (*MIXERS, "model.layers.0.mlp"):
        assert (
            not rows[name].passes and rows[name].start.slope > 0.4 and rows[name].change.slope > 0.4
        ), name


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("make", [perceptron, tied])
def test_a_model_of_torch_is_flat_under_our_groups_and_not_without(make, optimizer):
    failed = {
        name: v.fails_at
        for name, v in judge(make, "mup", optimizer, steps=4).items()
        if not v.passes
    }
    assert not failed
    assert not all(v.passes for v in judge(make, PLAIN, optimizer, steps=4).values())


def test_a_model_without_tokens_is_checked_with_the_callers_batch_and_roles():
    rows = judge(Regression, "mup", batch=numbers, roles={"readout.weight": "readout"})
    assert all(v.passes for v in rows.values()) and "readout" in rows
    assert not judge(Regression, PLAIN, batch=numbers)["layers.2"].passes


def test_many_distinct_tokens_lower_the_slope_of_logits_and_not_that_of_the_next():
    """Unrelated tokens overlap by chance as 1/sqrt(width),
    and are most of the vocabulary's logits.
    """
    rows = judge(qwen3_next, "mup", batch=many_tokens, steps=1, seeds=2)
    assert rows["logits"].change.slope < -0.1 < rows["logit_next"].change.slope


def test_modules_with_weights_are_read_once_per_call_and_others_are_not():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Tanh(), layer := nn.Linear(4, 4), layer)
    with modules.watch(model) as outputs:
        model(torch.tensor([1, 2]))
    assert {name: len(parts) for name, parts in outputs.items()} == {"0": 1, "2": 2}


def test_tokens_are_few_of_the_vocabulary_and_differ_by_seed():
    ids, others = (modules.draw_tokens(perceptron(8), seed) for seed in (0, 1))
    assert len(ids.unique()) <= modules.DISTINCT and not torch.equal(ids, others)


class TestCommand:
    def run(self, tmp_path, function, *keys):
        return run_command(
            "coord-check", "--module", f"{HERE}:{function}", f"out={tmp_path}/out", *keys
        )

    def test_a_module_is_checked_reported_and_drawn(self, tmp_path):
        status, out, err = self.run(tmp_path, "perceptron", "seeds=4")
        assert status == 0, err
        assert "| logit_next |" in out and "✗" in out  # plain
        tree = json.loads((tmp_path / "out" / "coordinates.json").read_text())
        assert (
            tree["subject"] == f"{HERE}:perceptron" and len(tree["readings"]) == 2 * 3 * 4 * 5 * 7
        )
        assert (tmp_path / "out" / "coordinates.png").read_bytes().startswith(b"\x89PNG")

    def test_the_callers_own_optimizer_is_checked(self, tmp_path):
        """It may call muP's functions, as `right` does, or forget them."""
        status, out, err = self.run(tmp_path, "perceptron", f"optimizer={HERE}:right", "seeds=4")
        assert status == 0 and "| right own change |" in out and "plain" not in out, out + err
        status, out, _ = self.run(tmp_path, "perceptron", f"optimizer={HERE}:wrong", "seeds=4")
        assert status == 1 and "fails  wrong own 1:" in out

    def test_a_wrong_role_is_red(self, tmp_path):
        status, out, _ = self.run(
            tmp_path, "perceptron", "parametrizations=mup", "roles=1.weight:constant"
        )
        assert status == 1 and "fails  adamw mup 1:" in out

    @pytest.mark.parametrize(
        ("function", "key", "message"),
        [
            ("nothing", "", "has no attribute 'nothing'"),
            ("HERE", "", "is a str, expected a function"),
            ("without_width", "", "without_width does not take a width"),
            ("text", "", "text(64) returned a str, expected a torch.nn.Module"),
            ("constant", "", "expected more at the larger width"),
            ("Regression", "roles=readout.weight:readout", "pass batch=package:make_batch"),
            ("perceptron", "parametrizations=mupp", "expected plain, sp"),
            ("perceptron", "optimizers=lion", "expected adamw, sgd"),
            ("perceptron", "lr.adamw=-1", "optimizer.lr=-1"),
            ("perceptron", "roles=1.weight", "roles=1.weight: expected pattern:role"),
            ("perceptron", "roles=x:gate", "match no parameter"),
            ("perceptron", "batch=nowhere:f", "No module named 'nowhere'"),
            ("perceptron", f"optimizer={HERE}:text optimizers=sgd", "optimizers=sgd has no effect"),
            (
                "perceptron",
                f"optimizer={HERE}:nothing_of",
                "returned a int, expected step() and zero_grad()",
            ),
            ("perceptron", "model.width=3", "--module has no key 'model.width'"),
        ],
    )
    def test_bad_input_is_refused_before_anything_is_trained(
        self, tmp_path, function, key, message
    ):
        status, _, err = self.run(tmp_path, function, *key.split())
        assert status == 2 and message in err, err
        assert "--module package:function" in run_command("coord-check")[2]

    def test_a_loss_that_is_not_finite_is_refused_with_what_to_do(self):
        with pytest.raises(modules.ConfigError, match="take a lower rate"):
            judge(Regression, PLAIN, "sgd", batch=numbers, rate=1e30, steps=4)
