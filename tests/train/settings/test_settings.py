"""Configuration: overrides are strict, the fingerprint covers the mathematics,
recipes match the paper.
"""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from delta_trn.train.recipes import RECIPES, recipe, summary
from delta_trn.train.settings.errors import ConfigError, UsageError
from delta_trn.train.settings.overrides import apply, change, parse
from delta_trn.train.settings.schema import (
    NOT_MATHEMATICS,
    RunConfig,
    declaration,
    differences,
    flatten,
    is_one_of,
    may_change_on_resume,
    validate,
)

KEYS = [key for key, _ in flatten(RunConfig())]

# these names are fixed, because other people's scripts use them
FIXED = (
    *(
        "steps",
        "seed",
        "out",
        "device",
        "backend",
        "parametrization",
        "optimizer.name",
        "optimizer.lr",
    ),
    *("model.width", "model.base_width", "data.source"),
)


def override(*assignments: str) -> RunConfig:
    return apply(recipe("tiny"), parse(assignments))


def choose_other(key: str, value: Any) -> str:
    """Returns another valid value of a key, as a user types it."""
    special = {
        "attention_layers": "1",
        "name": "sgd" if key.startswith("optimizer") else "other",
        "parametrization": "sp",
        "precision": "bf16",
        "clip_norm": "width",
        "mixer": "kimi_delta_attention",
        "decay_bound": "-5",
        "positions": "learned",
        "norm": "layer",
        "mlp": "gelu",
        "residual": "ddl",
        "ddl_compressor": "channel",
        "ddl_v_input": "context",
        **dict.fromkeys(("q_activation", "k_activation", "v_activation"), "silu"),
        "loader": "stream",
        "mode": "fsdp",
        "schedule.decay_steps": "77",
    }
    leaf = key.rpartition(".")[2]
    if key in special or leaf in special:
        return special.get(key, special.get(leaf, ""))
    if isinstance(value, bool):
        return str(not value).lower()
    if isinstance(value, int):
        return str(2 * value + 2)
    if isinstance(value, float):
        return str(value / 2 or 0.25)
    if value is None:
        kind = str(declaration(key).annotation)
        return "1" if "int" in kind or "float" in kind else "other"
    return "other"


class TestOverrides:
    def test_overrides_convert_values_to_the_types_of_their_keys(self):
        config = override(
            "steps=7",
            "optimizer.lr=2**-8",
            "optimizer.clip=none",
            "model.attention_layers=0,1",
            "compile=true",
            "max_minutes=1.5",
            "data.source=HuggingFaceFW/fineweb-edu",
            "data.subset=sample-10BT",
        )
        assert (config.steps, config.optimizer.lr, config.optimizer.clip) == (7, 2**-8, None)
        assert (config.model.attention_layers, config.compile, config.max_minutes) == (
            (0, 1),
            True,
            1.5,
        )
        assert config.data.subset == "sample-10BT"

    def test_overrides_leave_the_recipe_unchanged(self):
        before = recipe("tiny")
        apply(before, {"steps": "999"})
        assert before == recipe("tiny")

    def test_documented_keys_exist_and_every_key_has_a_description(self):
        assert set(FIXED) <= set(KEYS)
        assert [key for key in KEYS if len(declaration(key).description or "") < 4] == []

    @pytest.mark.parametrize(
        ("assignment", "nearest"),
        [
            ("model.widht=3", "model.width"),
            ("lr=1", "optimizer.lr"),
            ("step=3", "steps"),
            ("batch.sequence=3", "batch.sequences"),
            ("optimiser.lr=3", "optimizer.lr"),
        ],
    )
    def test_an_unknown_key_is_refused_with_the_nearest_known_one(self, assignment, nearest):
        with pytest.raises(ConfigError, match=f"unknown key.*nearest known: .*{nearest}"):
            override(assignment)

    @pytest.mark.parametrize(
        ("assignment", "message"),
        [
            ("steps=x", "steps=x: expected a whole number"),
            ("steps=1.5", "steps=1.5: expected a whole number"),
            ("steps=0", "steps=0: expected at least 1"),
            ("steps=none", "steps=none: expected a whole number"),
            ("optimizer.lr=-1", "optimizer.lr=-1: expected more than 0"),
            ("optimizer.lr=inf", "optimizer.lr=inf: expected a finite number"),
            ("optimizer.lr=nan", "optimizer.lr=nan: expected"),
            ("optimizer.beta1=1", "optimizer.beta1=1: expected less than 1"),
            ("optimizer.name=adam", "optimizer.name=adam: expected 'adamw', 'sgd' or 'muon'"),
            (
                "parametrization=mu",
                "expected 'sp', 'mup_original', 'mup' or 'mup_authors'",
            ),
            ("compile=perhaps", "compile=perhaps: expected true or false"),
            ("model.attention_layers=a", "model.attention_layers=a: expected a whole number"),
            ("name=../x", "name=../x: expected letters, digits"),
            ("batch.micro=3", "batch.micro=3 does not divide batch.sequences=4"),
            ("evaluation.batch=3", "evaluation.batch=3 does not divide evaluation.sequences=4"),
            ("schedule.decay_steps=4", "schedule.decay_steps=4 is not above schedule.warmup=4"),
            (
                "optimizer.momentum=0.9",
                "optimizer.momentum=0.9 has no effect here: it needs optimizer.name=sgd or muon",
            ),
            ("model=3", "model is a section, not a key"),
            ("steps.x=3", "unknown key 'steps.x'"),
            ("=3", "unknown key ''"),
        ],
    )
    def test_a_wrong_value_is_refused_with_what_was_expected(self, assignment, message):
        with pytest.raises(ConfigError) as error:
            override(assignment)
        assert message in str(error.value)

    @pytest.mark.parametrize("assignments", [("steps",), ("steps=1", "steps=2")])
    def test_a_key_without_a_value_or_given_twice_is_refused(self, assignments):
        with pytest.raises(UsageError):
            parse(assignments)


class TestTree:
    def test_the_configuration_is_frozen_and_refuses_unknown_keys(self):
        with pytest.raises(ValidationError):
            RunConfig().steps = 3  # type: ignore[misc]
        with pytest.raises(ConfigError, match="oops=1"):
            validate({"model": {"oops": 1}})

    @pytest.mark.parametrize("name", RECIPES)
    def test_a_recipe_survives_a_round_trip_through_json(self, name):
        config = recipe(name)
        again = validate(json.loads(json.dumps(config.model_dump(mode="json"))))
        assert again == config
        assert again.fingerprint() == config.fingerprint()

    def test_the_fingerprint_covers_the_mathematics_and_nothing_else(self):
        before = recipe("tiny")
        for key, value in flatten(before):
            of_batch = key in ("batch.micro", "evaluation.batch")
            after = change(before, {key: "2" if of_batch else choose_other(key, value)})
            assert list(differences(before, after)) == [key]
            changes = before.fingerprint() != after.fingerprint()
            assert changes == (not is_one_of(key, NOT_MATHEMATICS)), key

    def test_only_keys_without_effect_on_the_result_may_change_on_resume(self):
        assert may_change_on_resume("steps")
        assert may_change_on_resume("checkpoint.every")
        assert may_change_on_resume("device")
        fixed = ("model.width", "optimizer.lr", "seed", "out")
        for key in (*fixed, "evaluation.sequences", "data.source", "precision"):
            assert not may_change_on_resume(key), key


class TestRecipes:
    def test_the_adamw_recipe_has_the_papers_values(self):
        r = recipe("gdn_mup_adamw")
        assert (r.model.layers, r.model.heads, r.model.base_width, r.parametrization) == (
            8,
            6,
            256,
            "mup",
        )
        s, o = r.schedule, r.optimizer
        assert (r.steps, s.warmup, s.min_lr, s.decay_steps) == (20_000, 2000, 5e-5, None)
        assert (r.batch.sequences, r.batch.length, r.batch.micro) == (480, 1024, 60)
        assert (o.name, o.beta1, o.beta2) == ("adamw", 0.9, 0.95)
        assert (o.eps, o.weight_decay, o.clip) == (1e-8, 0.1, 1.0)
        assert (r.seed, r.precision, r.evaluation.every) == (42, "bf16", 1000)
        assert (r.data.source, r.data.tokenizer) == ("HuggingFaceFW/fineweb-edu", "gpt2")
        # its start, 0.02 for every matrix at width 256, one rate for all, decay that falls with the
        # rate
        assert (r.model.mixer_output_init, r.model.initializer_range, r.model.embedding_init) == (
            1,
            0.02,
            1,
        )
        assert {o.embedding_lr, o.readout_lr, o.gate_lr, o.scalar_lr, o.vector_lr} == {1.0}
        assert not o.independent_weight_decay and (o.lr, o.clip_norm) == (1e-3, "global")

    def test_our_recipe_differs_from_the_papers_in_what_was_found_here(self):
        differing = differences(recipe("gdn_mup_adamw"), recipe("gdn_adamw"))
        assert {key: now for key, (_, now) in differing.items()} == {
            "name": "gdn_adamw",
            "model.mixer_output_init": 0.0,
            "optimizer.independent_weight_decay": True,
            "optimizer.embedding_lr": 4.0,
        }

    def test_the_sgd_recipe_differs_from_adamw_as_in_the_paper(self):
        differing = differences(recipe("gdn_mup_adamw"), recipe("gdn_mup_sgd"))
        assert {key: now for key, (_, now) in differing.items()} == {
            "name": "gdn_mup_sgd",
            "optimizer.name": "sgd",
            "optimizer.lr": 0.4,
            "optimizer.weight_decay": 0.0,
            "batch.micro": 30,
        }
        assert recipe("gdn_mup_sgd").optimizer.momentum == 0.98

    @pytest.mark.parametrize("name", RECIPES)
    def test_every_recipe_has_a_one_line_summary(self, name):
        assert 20 < len(summary(name)) < 110
        assert recipe(name).name == name
