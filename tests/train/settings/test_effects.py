"""A setting that would waste a run is refused, and every other setting is read by the code."""

import re
from pathlib import Path
from typing import Any

import pytest

from delta_trn.models.settings import CONFIG_NAMES
from delta_trn.train.recipes import RECIPES, recipe
from delta_trn.train.settings.effects import NEEDS, require_effect, require_effect_somewhere
from delta_trn.train.settings.errors import ConfigError
from delta_trn.train.settings.overrides import apply, change
from delta_trn.train.settings.schema import RunConfig, flatten

KEYS = dict(flatten(RunConfig()))
ADDITIVE = {
    "model.residual": "additive",
    "model.ddl_compressor": "none",
    "model.ddl_value_channels": "1",
}
# need -> changes of the defaults with which it does not hold
IDLE: dict[str, dict[str, str]] = {
    "epochs=none": {"epochs": "1"},
    "optimizer.name=adamw or muon": {"optimizer.name": "sgd"},
    "optimizer.name=sgd or muon": {"optimizer.name": "adamw"},
    "optimizer.name=sgd": {"optimizer.name": "adamw"},
    "model.tie_word_embeddings=false": {"model.tie_word_embeddings": "true"},
    "a data.source that is text, not prepared shards": {"data.source": "PREPARED"},
    "model.attention_layers other than none": {"model.attention_layers": ""},
    "model.residual other than additive": ADDITIVE,
    "model.residual=ddl or write_only": ADDITIVE,
}


def test_every_setting_is_read_by_the_code():
    """Those of a model under the name that its configuration has."""
    places = [path for name in ("train", "models") for path in Path(name).rglob("*.py")]
    declared = (
        "schema.py",
        "effects.py",
        "environment.py",
        "recipes.py",
        "settings.py",
        "sizes.py",
    )
    code = "\n".join(path.read_text() for path in places if path.name not in declared)
    names = [CONFIG_NAMES.get(key.removeprefix("model."), key.rpartition(".")[2]) for key in KEYS]
    assert [name for name in names if not re.search(rf"\.{name}\b", code)] == []


@pytest.mark.parametrize("need", NEEDS, ids=lambda need: need[0])
def test_a_setting_without_its_need_is_refused(need, tmp_path):
    (tmp_path / "meta.json").write_text("{}")
    text, _, section, names = need
    idle = {key: value.replace("PREPARED", str(tmp_path)) for key, value in IDLE[text].items()}
    config = change(RunConfig(), idle)
    for key in (f"{section}{name}" for name in names.split()):
        assert key in KEYS
        with pytest.raises(
            ConfigError, match=rf"{key}=.* has no effect here: it needs {text}; leave"
        ):
            require_effect(config, [key])


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_may_have_settings_without_effect(name):
    """Only what a user gives is checked: `resume` and other keys must go
    on with a recipe's own settings.
    """
    assert apply(recipe(name), {"seed": "3"}).seed == 3


def test_a_floor_above_the_learning_rate_is_refused_whichever_of_the_two_is_given():
    for changes in ({"schedule.min_lr": "0.2"}, {"optimizer.lr": "0.0005"}):
        with pytest.raises(
            ConfigError, match=r"schedule.min_lr=.* is above optimizer.lr=.*give schedule"
        ):
            apply(recipe("tiny"), changes)
    assert apply(recipe("tiny"), {"optimizer.lr": "0.0005", "schedule.min_lr": "0.0005"})


def test_a_setting_may_be_idle_in_some_of_several_runs_but_not_in_all():
    runs: list[Any] = [apply(recipe("tiny"), {"optimizer.name": name}) for name in ("adamw", "sgd")]
    require_effect_somewhere(runs, ["optimizer.momentum"])
    with pytest.raises(ConfigError, match=r"optimizer.momentum=0.98 has no effect"):
        require_effect_somewhere(runs[:1], ["optimizer.momentum"])
    require_effect(runs[0], ["optimizer.beta1"])
