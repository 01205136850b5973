"""muP for models that were not written for it: roles from shapes, rates and initial values from roles."""

import pytest
import torch
import transformers
from torch import nn

from delta_trn import mup
from delta_trn.models import DeltaConfig, DeltaForCausalLM
from delta_trn.models.ecosystem.widths import scaled_parameters, small_taps
from delta_trn.models.mup import Role
from delta_trn.models.parameters import scaled_parameters as scaled_by_tags


def sizes(width):
    """Returns settings whose heads keep their size, as published families do."""
    heads = width // 32
    return {
        "vocab_size": 128, "hidden_size": width, "num_hidden_layers": 2, "num_attention_heads": heads,
        "num_key_value_heads": heads, "head_dim": 32, "layer_types": ["linear_attention", "full_attention"],
        "linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_num_key_heads": heads,
        "linear_num_value_heads": 2 * heads, "intermediate_size": round(2.7 * width / 16) * 16,
        "pad_token_id": None, "bos_token_id": 1, "eos_token_id": None, "tie_word_embeddings": False,
    }  # fmt: skip


def qwen3_next(width, **changes):
    settings = {**sizes(width), "num_experts": 0, **changes}
    return transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**settings))


def base():
    return qwen3_next(64)


class TestRoles:
    def test_roles_of_qwen3_next_are_those_of_the_table(self):
        with torch.device("meta"):
            model = qwen3_next(256)
        rows = {row.name: row for row in scaled_parameters(model, base)}
        expected = {
            "model.embed_tokens.weight": (Role.EMBEDDING, 4),
            "model.layers.0.linear_attn.in_proj_qkvz.weight": (Role.HIDDEN, 4),
            "model.layers.0.linear_attn.conv1d.weight": (Role.VECTOR, 4),
            "model.layers.0.linear_attn.A_log": (Role.VECTOR, 4),  # more heads: one of many
            "model.layers.0.linear_attn.norm.weight": (Role.CONSTANT, 1),
            "model.layers.0.input_layernorm.weight": (Role.VECTOR, 4),
            "model.layers.0.mlp.down_proj.weight": (Role.HIDDEN, 688 / 176),  # rounded sizes: fan-in exact
            "lm_head.weight": (Role.READOUT, 4),
        }
        assert {name: (rows[name].role, rows[name].m) for name in expected} == expected
        assert rows.keys() == {name for name, _ in model.named_parameters()}

    def test_roles_and_rates_of_our_models_are_those_of_their_tags(self):
        """Our models say what each parameter is, while here only shapes tell."""

        def make(width):
            sizes = {"vocab_size": 61, "hidden_size": width, "base_width": 64, "num_hidden_layers": 2}
            return DeltaForCausalLM(DeltaConfig(**sizes, num_heads=2, tie_word_embeddings=False))

        with torch.device("meta"):
            model, small = make(256), make(64)
        tags = {row.name: row for row in scaled_by_tags(model, optimizer="adamw", lr=1.0, weight_decay=0.1)}
        fan_in = {name: p.shape[-1] for name, p in small.named_parameters()}
        groups = mup.parameter_groups(model, base=small, lr=1.0, weight_decay=0.1)
        coupled = mup.parameter_groups(
            model, base=small, lr=1.0, weight_decay=0.1, independent_weight_decay=False
        )
        with_the_rate = {name: group["weight_decay"] for group in coupled for name in group["names"]}
        for group in groups:
            for name in group["names"]:
                row, rate = tags[name], tags[name].lr
                if row.role is Role.READOUT:
                    rate /= 4  # its multiplier
                if "down_proj" in name:
                    rate = fan_in[name] / row.shape[-1]  # sizes are rounded
                assert group["lr"] == pytest.approx(rate) and with_the_rate[name] == row.weight_decay, name
                # one step takes the same share of a matrix at every width
                assert group["lr"] * group["weight_decay"] == pytest.approx(row.weight_decay), name

    def test_a_compiled_model_has_the_roles_of_the_model_inside(self):
        model = qwen3_next(128)
        rows = [(row.name, row.role, row.m) for row in scaled_parameters(torch.compile(model), base)]
        assert rows == [(row.name, row.role, row.m) for row in scaled_parameters(model, base)]

    def test_named_roles_go_before_inferred_ones(self):
        model = qwen3_next(128)
        rows = scaled_parameters(model, base, {"*.A_log": "scalar", "*.dt_bias": Role.CONSTANT})
        roles = {row.name.split(".")[-1]: row.role for row in rows}
        assert roles["A_log"] is Role.SCALAR and roles["dt_bias"] is Role.CONSTANT

    def test_parameters_without_a_role_are_all_named(self):
        model = nn.ModuleDict({"a": nn.Embedding(9, 8), "b": nn.Linear(8, 8), "c": nn.Conv2d(8, 8, 3)})
        small = nn.ModuleDict({"a": nn.Embedding(7, 4), "c": nn.Conv2d(4, 4, 3)})
        with pytest.raises(
            ValueError, match=r"(?s)no muP role for 4 parameters.*a\.weight.*b\.bias.*c\.weight"
        ):
            mup.parameter_groups(model, base=small, lr=1.0)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"roles": {"*.A_log": "number"}}, "no role is named 'number'"),
            ({"roles": {"*.A_lg": "scalar"}}, r"match no parameter"),
            ({"optimizer": "lion"}, "optimizer='lion' has no column"),
        ],
    )
    def test_bad_options_are_refused_with_what_there_is(self, changes, message):
        with pytest.raises(ValueError, match=message):
            mup.parameter_groups(qwen3_next(128), base=base, lr=1.0, **changes)

    @pytest.mark.parametrize("tied", [False, True])
    def test_the_readout_of_a_model_of_torch_is_its_last_layer_over_the_vocabulary(self, tied):
        def make(width):
            layers = nn.Sequential(nn.Embedding(50, width), nn.Linear(width, width), nn.Linear(width, 50))
            layers[2].weight = layers[0].weight if tied else layers[2].weight
            return layers

        if tied:
            with pytest.raises(ValueError, match=r"tied.*tie_word_embeddings=False"):
                scaled_parameters(make(8), lambda: make(4))
        else:
            roles = {row.name: row.role for row in scaled_parameters(make(8), lambda: make(4))}
            assert roles["2.weight"] is Role.READOUT and roles["1.weight"] is Role.HIDDEN


class TestInitialValues:
    def test_sizes_follow_the_base_model_whatever_the_law(self):
        model, small = qwen3_next(256), base()
        rows = {row.name: row for row in scaled_parameters(model, small)}
        mup.initialize(model, base=lambda: small)
        powers = {Role.HIDDEN: -0.5, Role.READOUT: -1.0}
        before = dict(small.named_parameters())
        for name, p in model.named_parameters():
            wanted = before[name].square().mean().sqrt() * rows[name].m ** powers.get(rows[name].role, 0.0)
            if "conv1d" not in name:
                assert p.square().mean().sqrt().item() == pytest.approx(wanted.item(), rel=1e-5), name

    def test_taps_too_small_for_the_output_norm_are_drawn_again_and_the_readout_starts_where_it_is_told(self):
        model = qwen3_next(128)
        assert len(list(small_taps(model))) == 1
        mup.initialize(model, base=base, readout_init=0)
        assert not model.lm_head.weight.any()
        assert not list(small_taps(model))
        taps = model.model.layers[0].linear_attn.conv1d.weight
        assert taps.std().item() == pytest.approx(12**-0.5, rel=0.05) and taps.abs().max() <= 0.5

    def test_loaded_weights_and_a_second_call_are_refused(self, tmp_path):
        qwen3_next(128).save_pretrained(tmp_path)
        model = transformers.Qwen3NextForCausalLM.from_pretrained(tmp_path)
        with pytest.raises(ValueError, match="loaded from"):
            mup.initialize(model, base=base)
        mup.initialize(model, base=base, loaded=True)
        with pytest.raises(ValueError, match="already"):
            mup.initialize(model, base=base, loaded=True)

    def test_a_base_without_values_is_refused(self):
        with torch.device("meta"):
            small = base()
        with pytest.raises(ValueError, match="no values"):
            mup.initialize(qwen3_next(128), base=small)
