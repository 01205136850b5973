"""A setting that changes nothing in a run is refused, and every other setting changes something."""

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from delta_trn.train.data import Batch
from delta_trn.train.parallel.sharding import Sharding
from delta_trn.train.recipes import RECIPES, recipe
from delta_trn.train.run.model import make_model, model_config
from delta_trn.train.run.optimizer import learning_rate, make_optimizer
from delta_trn.train.run.step import TrainingStep
from delta_trn.train.settings.effects import NEEDS, require_effect, require_effect_somewhere
from delta_trn.train.settings.errors import ConfigError
from delta_trn.train.settings.overrides import annotation, apply, change
from delta_trn.train.settings.schema import RunConfig, flatten

KEYS = [key for key, _ in flatten(RunConfig())]
CPU = torch.device("cpu")
# What decides the weights after two steps. The other keys decide where, when and on which text that happens.
MATHEMATICS = [
    key
    for key in KEYS
    if key.startswith(("model.", "optimizer.", "schedule."))
    or key in ("seed", "parametrization", "precision")
]
OTHERS = [key for key in KEYS if key not in MATHEMATICS]
SMALL = {
    "model.width": "16",
    "model.base_width": "8",
    "model.layers": "2",
    "model.heads": "2",
    "model.head_dim_k": "4",
    "model.vocab_size": "32",
    "model.intermediate_multiple": "8",
    "schedule.warmup": "2",
    "optimizer.lr": "0.1",
    "precision": "float32",
    "steps": "4",
}
ADDITIVE = {"model.residual": "additive", "model.ddl_compressor": "none", "model.ddl_value_channels": "1"}
_DDL, _CHANNELS = (
    {"model.residual": "ddl"},
    {"model.ddl_compressor": "channel", "model.ddl_value_channels": "2"},
)
# need -> changes with which it holds, changes with which it does not
STATES: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "epochs=none": ({}, {"epochs": "1"}),
    "optimizer.name=adamw or muon": ({}, {"optimizer.name": "sgd"}),
    "optimizer.name=sgd or muon": ({"optimizer.name": "muon"}, {"optimizer.name": "adamw"}),
    "optimizer.name=sgd": ({"optimizer.name": "sgd"}, {"optimizer.name": "adamw"}),
    "optimizer.weight_decay above 0": ({}, {"optimizer.weight_decay": "0"}),
    # a limit that AdamW's epsilon lets one see
    "optimizer.clip other than none": (
        {"optimizer.clip": "1e-3", "optimizer.eps": "0.5"},
        {"optimizer.clip": "none"},
    ),
    "a data.source that is text, not prepared shards": ({}, {"data.source": "PREPARED"}),
    "model.attention_layers other than none": (
        {"model.attention_layers": "0"},
        {"model.attention_layers": ""},
    ),
    "model.intermediate_size=none": ({}, {"model.intermediate_size": "16"}),
    "model.positions=learned": ({"model.positions": "learned"}, {"model.positions": "rope"}),
    "model.residual other than additive": (_DDL, ADDITIVE),
    "model.residual=ddl or write_only": (_DDL, ADDITIVE),
}
# key -> what else it takes for an effect that the table does not ask for
MORE: dict[str, dict[str, str]] = {
    "model.ddl_state_shortconv_kernel_size": _CHANNELS,
    "model.ddl_state_read_init": _CHANNELS,
    "model.ddl_state_dv_shortconv_causal": _CHANNELS,
    "model.ddl_beta_hidden_size": {"model.ddl_beta_single_linear": "false"},
    "model.ddl_v_constant_value": {"model.ddl_v_constant": "true"},
}
OTHER_VALUES = {
    "parametrization": "sp",
    "precision": "bf16",
    "optimizer.name": "sgd",
    "optimizer.eps": "0.5",
    "optimizer.clip": "1e-3",
    "optimizer.clip_norm": "width",
    "optimizer.momentum": "0.5",
    "schedule.warmup": "1",
    "schedule.decay_steps": "3",
    "schedule.min_lr": "0.05",
    "model.expand_v": "1",
    "model.attention_layers": "1",
    "model.rms_norm_eps": "0.1",
    "model.scale_by": "heads",
    "model.rope_ratio": "0.5",
    "model.rope_theta": "10",
    "model.positions": "learned",
    **dict.fromkeys((f"model.{x}_activation" for x in "qkv"), "silu"),
    "model.norm": "layer",
    "model.mlp": "gelu",
    "model.residual": "ddl",
    "model.ddl_compressor": "channel",
    "model.ddl_state_read_init": "0.3",
    "model.ddl_k_eps": "0.5",
    "model.ddl_v_input": "context",
    "model.intermediate_multiple": "32",
    "model.intermediate_size": "24",
    "data.source": "text",
    "data.loader": "stream",
    "distribution.mode": "fsdp",
    "checkpoint.asynchronous": "true",
    "log.wandb_project": "other",
    "sample.prompt": "other",
}


def other_value(key: str, config: RunConfig) -> str:
    value = dict(flatten(config))[key]
    if key in OTHER_VALUES:
        return OTHER_VALUES[key]
    if isinstance(value, bool):
        return str(not value).lower()
    if isinstance(value, int):
        return str(2 * value or 3)
    if isinstance(value, float):
        return str(value / 2 or 0.25)
    numeric = re.search("int|float", str(annotation(key)))
    return "1" if numeric and value is None else "other"


def base(key: str) -> RunConfig:
    """Returns a run in which everything that a key needs holds."""
    holds = STATES[NEEDS[key].text][0] if key in NEEDS else {}
    return change(RunConfig(), SMALL | holds | MORE.get(key, {}))


def without(config: RunConfig, text: str, prepared: Path) -> RunConfig:
    """Returns a run in which one need does not hold."""
    idle = {k: str(prepared) if v == "PREPARED" else v for k, v in STATES[text][1].items()}
    return change(config, idle)


@cache
def weights_after_two_steps(text: str) -> bytes | None:
    """Returns the weights of a run after two steps; None where the model refuses its settings."""
    config = RunConfig.model_validate_json(text)
    try:
        configuration = model_config(config, rows=config.model.vocab_size or 32)
    except ConfigError:
        return None
    model = make_model(configuration, seed=config.seed, device=CPU)
    sharding = Sharding(model.train())
    torch.manual_seed(0)

    def loss(inputs: torch.Tensor, targets: torch.Tensor, *_: object) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=config.precision == "bf16"):
            return model.loss(inputs, targets)

    step = TrainingStep(loss, make_optimizer(sharding, config), sharding, micro=2, clip=config.optimizer.clip)
    tokens = torch.randint(32, (2, 9), generator=torch.Generator().manual_seed(1))
    for finished in (1, 2, 3):
        step(Batch(tokens[:, :-1], tokens[:, 1:]), learning_rate(config, finished))
    return b"".join(p.detach().numpy().tobytes() for p in model.parameters())


def weights(config: RunConfig) -> bytes | None:
    return weights_after_two_steps(config.model_copy(update={"out": None}).model_dump_json())


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    (folder / "meta.json").write_text("{}")
    return folder


@pytest.mark.parametrize("key", MATHEMATICS)
def test_a_setting_of_the_mathematics_changes_the_weights_where_its_needs_hold(key):
    config = base(key)
    changed = apply(config, {key: other_value(key, config)})
    assert weights(config) not in (None, weights(changed))


def test_every_setting_that_is_not_of_the_mathematics_is_read_by_the_code():
    code = "\n".join(
        path.read_text()
        for path in Path("train").rglob("*.py")
        if path.parent.name != "settings" and path.name != "recipes.py"
    )
    assert [key for key in OTHERS if not re.search(rf"\.{key.rpartition('.')[2]}\b", code)] == []


@pytest.mark.parametrize(("key", "text"), [(key, need.text) for key, need in NEEDS.items()])
def test_a_setting_without_one_of_its_needs_is_refused_and_would_change_nothing(key, text, prepared):
    config = without(base(key), text, prepared)
    value = other_value(key, config)
    with pytest.raises(
        ConfigError, match=rf"{re.escape(key)}=.* has no effect with .*leave {key} out"
    ) as error:
        apply(config, {key: value})
    assert text in str(error.value)
    if key in MATHEMATICS:
        assert weights(change(config, {key: value})) in (None, weights(config))


def test_every_key_of_the_table_exists_and_every_need_is_tested():
    assert NEEDS.keys() <= set(KEYS)
    assert {need.text for need in NEEDS.values()} == STATES.keys()
    assert all(need.key in KEYS for need in NEEDS.values())


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_may_have_settings_without_effect(name):
    """Only what a user gives is checked: `resume` and other keys must go on with a recipe's own settings."""
    assert apply(recipe(name), {"seed": "3"}).seed == 3


def test_a_floor_above_the_learning_rate_is_refused_whichever_of_the_two_is_given():
    for changes in ({"schedule.min_lr": "0.02"}, {"optimizer.lr": "0.0005"}):
        with pytest.raises(ConfigError, match=r"schedule.min_lr=.* is above optimizer.lr=.*give schedule"):
            apply(recipe("tiny"), changes)
    assert apply(recipe("tiny"), {"optimizer.lr": "0.0005", "schedule.min_lr": "0.0005"})


def test_a_setting_may_be_idle_in_some_of_several_runs_but_not_in_all():
    runs: list[Any] = [apply(recipe("tiny"), {"optimizer.name": name}) for name in ("adamw", "sgd")]
    require_effect_somewhere(runs, ["optimizer.momentum"])
    with pytest.raises(ConfigError, match=r"optimizer.momentum=0.98 has no effect"):
        require_effect_somewhere(runs[:1], ["optimizer.momentum"])
    require_effect(runs[0], ["optimizer.beta1"])


def test_a_power_of_two_is_a_learning_rate_of_a_run():
    assert apply(recipe("tiny"), {"optimizer.lr": "2**-8.5"}).optimizer.lr == 2**-8.5
