"""muP for models that were not written for it: roles from shapes,
rates and initial values from roles.
"""

import pytest
import torch
import transformers
from torch import nn

from delta_trn import mup
from delta_trn.models import DeltaConfig, DeltaForCausalLM
from delta_trn.models.ecosystem.roles import scaled_parameters
from delta_trn.models.ecosystem.widths import small_taps
from delta_trn.models.mup import Role
from delta_trn.models.parameters import scaled_parameters as scaled_by_tags


def sizes(width):
    """Returns settings whose heads keep their size, as published families do."""
    heads = width // 32
    return {
        "vocab_size": 128,
        "hidden_size": width,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": 32,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_num_key_heads": heads,
        "linear_num_value_heads": 2 * heads,
        "intermediate_size": round(2.7 * width / 16) * 16,
        "pad_token_id": None,
        "bos_token_id": 1,
        "eos_token_id": None,
        "tie_word_embeddings": False,
    }


def qwen3_next(width, **changes):
    settings = {**sizes(width), "num_experts": 0, **changes}
    return transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**settings))


def base():
    return qwen3_next(64)


def language_model(width, tied=False):
    layers = nn.Sequential(nn.Embedding(50, width), nn.Linear(width, width), nn.Linear(width, 50))
    layers[2].weight = layers[0].weight if tied else layers[2].weight
    return layers


class Experts(nn.Module):
    def __init__(self, *shape):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))


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
            # rounded sizes: fan-in exact
            "model.layers.0.mlp.down_proj.weight": (Role.HIDDEN, 688 / 176),
            "lm_head.weight": (Role.READOUT, 4),
        }
        assert {name: (rows[name].role, rows[name].m) for name in expected} == expected
        assert rows.keys() == {name for name, _ in model.named_parameters()}

    def test_roles_and_rates_of_our_models_are_those_of_their_tags(self):
        """Our models say what each parameter is, while here only shapes tell."""

        def make(width):
            sizes = {
                "vocab_size": 61,
                "hidden_size": width,
                "base_width": 64,
                "num_hidden_layers": 2,
            }
            return DeltaForCausalLM(DeltaConfig(**sizes, num_heads=2, tie_word_embeddings=False))

        with torch.device("meta"):
            model, small = make(256), make(64)
        tags = {
            row.name: row
            for row in scaled_by_tags(model, optimizer="adamw", lr=1.0, weight_decay=0.1)
        }
        fan_in = {name: p.shape[-1] for name, p in small.named_parameters()}
        groups = mup.parameter_groups(model, base=small, lr=1.0, weight_decay=0.1)
        coupled = mup.parameter_groups(
            model, base=small, lr=1.0, weight_decay=0.1, independent_weight_decay=False
        )
        with_the_rate = {
            name: group["weight_decay"] for group in coupled for name in group["names"]
        }
        for group in groups:
            for name in group["names"]:
                row, rate = tags[name], tags[name].lr
                if row.role is Role.READOUT:
                    rate /= 4  # its multiplier
                if "down_proj" in name:
                    rate = fan_in[name] / row.shape[-1]  # sizes are rounded
                assert (
                    group["lr"] == pytest.approx(rate) and with_the_rate[name] == row.weight_decay
                ), name
                # one step takes the same share of a matrix at every width
                assert group["lr"] * group["weight_decay"] == pytest.approx(row.weight_decay), name

    def test_named_roles_go_before_inferred_ones(self):
        model = qwen3_next(128)
        rows = scaled_parameters(model, base, {"*.A_log": "scalar", "*.dt_bias": Role.CONSTANT})
        roles = {row.name.split(".")[-1]: row.role for row in rows}
        assert roles["A_log"] is Role.SCALAR and roles["dt_bias"] is Role.CONSTANT

    def test_parameters_without_a_role_are_all_named(self):
        model = nn.ModuleDict({"a": nn.Embedding(9, 8), "b": nn.Linear(8, 8), "c": Experts(8, 8)})
        small = nn.ModuleDict({"a": nn.Embedding(7, 4), "c": Experts(4, 4)})
        message = (
            r"(?s)no muP role for 4 parameters.*a\.weight.*b\.bias.*c\.weight \(8, 8\): the base "
            r"model has \(4, 4\), and Experts does not say which of the 2 dimensions of its weight"
        )
        with pytest.raises(ValueError, match=message):
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

    def test_the_readout_of_a_model_of_torch_is_its_last_layer_over_the_vocabulary(self):
        roles = {
            row.name: row.role
            for row in scaled_parameters(language_model(8), lambda: language_model(4))
        }
        assert roles["2.weight"] is Role.READOUT and roles["1.weight"] is Role.HIDDEN

    def test_a_matrix_that_may_be_the_readout_has_to_be_named(self):
        """As a gate its initial values would fall as 1/sqrt(m)
        instead of 1/m, and it would decay.
        """

        def make(width):
            return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 1))

        with pytest.raises(
            ValueError, match=r"2\.weight: read the width.*roles=\{'2.weight': 'readout'\}"
        ):
            mup.parameter_groups(make(16), base=lambda: make(4), lr=1.0)
        rows = scaled_parameters(make(16), lambda: make(4), {"2.weight": "readout"})
        assert [(row.role, row.m) for row in rows if row.name == "2.weight"] == [(Role.READOUT, 4)]
        assert len(scaled_parameters(make(16), lambda: make(4), {"2.weight": "gate"})) == 4

    @pytest.mark.parametrize(
        ("make", "role", "m"),
        [
            (lambda n: nn.Conv2d(8 * n, 8 * n, 3), "hidden", 4),
            (lambda n: nn.ConvTranspose1d(8 * n, 6, 3), "hidden", 4),
            (lambda n: nn.Conv2d(3, 8 * n, 3), "embedding", 4),
            (lambda n: nn.Embedding(10 + n, 8 * n), "embedding", 4),
            (lambda n: nn.Linear(8 * n, 10 - n), "readout", 4),
            (lambda n: nn.Linear(8 * n, 6 * n * n), "hidden", 4),
            (lambda n: Experts(2 * n, 3 * n, 8 * n), "hidden", 4),
            (lambda n: Experts(2 * n, 3 * n, 8), "hidden", 1),
        ],
    )
    def test_a_named_role_takes_m_from_the_dimension_that_it_sums_over(self, make, role, m):
        (row, *_) = scaled_parameters(make(4), lambda: make(1), {"weight": role, "*": "constant"})
        assert (row.role.name.lower(), row.m) == (role, m)

    def test_a_named_role_without_such_a_dimension_is_refused(self):
        with pytest.raises(
            ValueError, match=r"bias \(16,\).*\(4,\), in which a hidden has no dimension"
        ):
            scaled_parameters(nn.Linear(16, 16), lambda: nn.Linear(4, 4), {"bias": "hidden"})


class TestBases:
    def test_wrappers_are_seen_through_in_the_model_and_in_the_base(self):
        def wrap(model):
            model.model.layers[0] = torch.compile(model.model.layers[0])
            return nn.DataParallel(torch.compile(model))

        rows = [(row.name, row.role, row.m) for row in scaled_parameters(qwen3_next(128), base)]
        for model, small in ((wrap(qwen3_next(128)), base()), (qwen3_next(128), wrap(base()))):
            assert [(row.name, row.role, row.m) for row in scaled_parameters(model, small)] == rows

    def test_a_base_of_other_depth_gives_its_layers_to_all_of_the_same_shape(self):
        types = ["linear_attention", "full_attention"] * 2
        deep = qwen3_next(128, num_hidden_layers=4, layer_types=types)
        rows = {row.name: (row.role, row.m) for row in scaled_parameters(deep, base)}
        names = [name for name in rows if ".layers.1." in name]
        assert names and all(rows[name] == rows[name.replace(".1.", ".3.")] for name in names)
        other = nn.Sequential(*(nn.Linear(4, n) for n in (4, 5)))
        with pytest.raises(ValueError, match=r"2\.weight \(8, 8\): the base model has none"):
            scaled_parameters(
                nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))), other, {"1.*": "constant"}
            )

    def test_a_file_and_shapes_by_name_are_bases(self, tmp_path):
        small, path = base(), tmp_path / "base.json"
        mup.save_base(small, path)
        shapes = {name: tuple(p.shape) for name, p in small.named_parameters()}
        model, again = qwen3_next(128), qwen3_next(128)
        again.load_state_dict(model.state_dict())
        for other in (path, str(path), shapes):
            for given, wanted in zip(
                mup.parameter_groups(model, base=other, lr=1.0),
                mup.parameter_groups(model, base=small, lr=1.0),
                strict=True,
            ):
                assert given == wanted
        mup.initialize(model, base=path)
        mup.initialize(again, base=small)
        assert all(
            torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True)
        )
        with pytest.raises(ValueError, match="has no values"):
            mup.initialize(qwen3_next(128), base=shapes)
        path.write_text("[1]")
        with pytest.raises(ValueError, match=r"base=.*expected a file of mup\.save_base"):
            mup.parameter_groups(model, base=path, lr=1.0)

    def test_the_random_numbers_of_the_caller_are_left_alone(self):
        model, before = qwen3_next(128), torch.get_rng_state()
        mup.parameter_groups(model, base=base, lr=1.0)
        mup.initialize(model, base=base)
        assert torch.equal(torch.get_rng_state(), before)


def test_at_the_base_width_a_wider_model_tells_what_decays_and_what_is_muons():
    """Nothing grows there: every matrix was a constant, without decay,
    and with it at any other width.
    """
    model, options = qwen3_next(64), {"base": base, "lr": 1.0, "weight_decay": 0.1}
    for changes in ({}, {"optimizer": "muon", "weight_decay": 0.0}):
        with pytest.raises(ValueError, match=r"has the base's shapes.*pass wider="):
            mup.parameter_groups(model, **{**options, **changes})
    with torch.device("meta"):
        wide = qwen3_next(128)
    decays = [
        {name: (g["weight_decay"] > 0, g["use_muon"]) for g in groups for name in g["names"]}
        for groups in (
            mup.parameter_groups(model, **options, optimizer="muon", wider=lambda: qwen3_next(128)),
            mup.parameter_groups(wide, **options, optimizer="muon"),
        )
    ]
    assert decays[0] == decays[1] and any(decay for decay, _ in decays[0].values())


class TestMuon:
    @pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
    def test_a_step_of_muon_has_the_spectral_norm_that_what_a_matrix_computes_needs(self, adjust):
        """That is sqrt(rows / columns), for square, tall and wide matrices, also of other shape."""

        def make(n):
            sizes = ((8 * n, 8 * n), (8 * n, 20 * n), (24 * n, 8 * n), (8 * n, 16 * n * n))
            return nn.ModuleList([nn.Linear(*size, bias=False) for size in sizes])

        norms = []
        for n in (1, 4):
            model = make(n)
            groups = mup.parameter_groups(
                model,
                base=lambda: make(1),
                lr=0.01,
                optimizer="muon",
                adjust_lr_fn=adjust,
                weight_decay=0.1,
                wider=lambda: make(2),
            )
            assert all(group["use_muon"] and "eps" not in group for group in groups)
            assert all(
                group["lr"] * group["weight_decay"] == pytest.approx(1e-3) for group in groups
            )
            before = [layer.weight.detach().clone() for layer in model]
            for i, layer in enumerate(model):
                torch.manual_seed(i)
                layer.weight.grad = torch.outer(*(torch.randn(k) for k in layer.weight.shape))
            torch.optim.Muon(
                [{**g, "weight_decay": 0.0} for g in groups], adjust_lr_fn=adjust
            ).step()
            steps = [
                torch.linalg.matrix_norm(a - b.weight.detach(), 2).item()
                for a, b in zip(before, model, strict=True)
            ]
            sizes = [(rows / columns) ** 0.5 for rows, columns in (a.shape for a in before)]
            norms.append([step / size for step, size in zip(steps, sizes, strict=True)])
        # singular values after Newton's and Schulz's steps lie between 0.7 and 1.2; a wrong law is
        # off by 2
        assert norms[1] == pytest.approx(norms[0], rel=0.25)

    def test_what_muon_does_not_move_has_adamws_groups(self):
        model = language_model(16)
        groups = {
            name: group
            for group in mup.parameter_groups(
                model, base=lambda: language_model(4), lr=1.0, optimizer="muon"
            )
            for name in group["names"]
        }
        assert groups["1.weight"]["use_muon"] and groups["1.weight"]["lr"] == 1
        assert not groups["2.weight"]["use_muon"] and groups["2.weight"]["lr"] == 1 / 4
        of_adamw = mup.parameter_groups(model, base=lambda: language_model(4), lr=1.0)
        for group in (group for group in of_adamw if group["names"] != ["1.weight"]):
            assert {k: groups[group["names"][0]][k] for k in ("lr", "eps")} == {
                k: group[k] for k in ("lr", "eps")
            }
        with pytest.raises(ValueError, match="adjust_lr_fn='x': expected 'original'"):
            mup.parameter_groups(
                model, base=lambda: language_model(4), lr=1.0, optimizer="muon", adjust_lr_fn="x"
            )


class TestTied:
    def test_a_tied_readout_is_refused_until_it_is_scaled(self):
        model, small = (
            qwen3_next(128, tie_word_embeddings=True),
            qwen3_next(64, tie_word_embeddings=True),
        )
        with pytest.raises(
            ValueError, match=r"mup\.scale_readout\(model, base=.*tie_word_embeddings=False"
        ):
            scaled_parameters(model, small)
        ids = torch.arange(12)[None]
        plain, names = model(ids).logits, [*model.state_dict()]
        mup.scale_readout(model, base=small)
        assert torch.allclose(model(ids).logits, plain / 2) and [*model.state_dict()] == names
        rows = {row.name: (row.role, row.m) for row in scaled_parameters(model, small)}
        assert (
            rows["model.embed_tokens.weight"] == (Role.EMBEDDING, 2)
            and "lm_head.weight" not in rows
        )
        (group,) = (
            g for g in mup.parameter_groups(model, base=small, lr=1.0) if g["role"] == "embedding"
        )
        assert group["lr"] == 1 and group["eps"] == 1e-8 / 2, (
            "AdamW's rate and epsilon of the table"
        )
        with pytest.raises(ValueError, match="scaled already"):
            mup.scale_readout(model, base=small)
        with pytest.raises(ValueError, match="readout is tied, and would take the embedding"):
            mup.initialize(model, base=small, readout_init=0)

    def test_a_tied_readout_of_a_model_of_torch_is_scaled_and_others_are_refused(self):
        model, small = language_model(16, tied=True), language_model(4, tied=True)
        x = torch.randn(3, 16)
        before = model[2](x)
        mup.scale_readout(model, base=small)
        assert torch.allclose(model[2](x) - model[2].bias, (before - model[2].bias) / 4, atol=1e-6)
        assert model[2].weight is model[0].weight and len(scaled_parameters(model, small)) == 4
        with pytest.raises(ValueError, match="no readout that is tied"):
            mup.scale_readout(language_model(16), base=small)


class TestInitialValues:
    def test_sizes_follow_the_base_model_whatever_the_law(self):
        """Matrices with std 0.02 at every width fall as 1/sqrt(m),
        those from 1/sqrt(fan-in) stay.
        """
        model, other = qwen3_next(256), language_model(64)
        for wide, small, law in ((model, base(), 0.0), (other, language_model(16), -0.5)):
            before = {name: p.detach().clone() for name, p in wide.named_parameters()}
            rows = {row.name: row for row in scaled_parameters(wide, small)}
            mup.initialize(wide, base=lambda small=small: small)
            powers = {Role.HIDDEN: -0.5 - law, Role.READOUT: -1.0 - law}
            for name, p in wide.named_parameters():
                # torch draws a bias as its matrix
                power = -law if name.endswith("bias") else powers.get(rows[name].role, 0.0)
                factor = (rows[name].m if "down_proj" in name else 4) ** power
                assert torch.allclose(p, before[name] * factor, rtol=1e-6, atol=0), name

    def test_a_law_that_is_neither_is_followed_by_the_sizes_measured(self):
        model = nn.Linear(256, 256, bias=False)
        nn.init.normal_(model.weight, std=0.3)
        mup.initialize(model, base=lambda: nn.Linear(64, 64, bias=False))
        assert model.weight.std().item() == pytest.approx(0.5 * 192**-0.5, rel=0.03)

    def test_nothing_changes_at_the_base_width_with_the_same_seed(self):
        """A_log is one number per head: scaled to another draw's size it moved
        by a factor of 0.4 to 2.4.
        """
        torch.manual_seed(0)
        expected = base().state_dict()
        torch.manual_seed(0)
        model = base()
        mup.initialize(model, base=base)
        mup.parameter_groups(model, base=base, lr=1.0)
        assert all(torch.equal(x, expected[name]) for name, x in model.state_dict().items())

    def test_what_no_rule_scales_is_left_alone(self):
        model = qwen3_next(128)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        mup.initialize(model, base=base)
        for name in ("A_log", "dt_bias", "conv1d.weight", "norm.weight", "layernorm.weight"):
            found = [(p, before[n]) for n, p in model.named_parameters() if n.endswith(name)]
            assert found and all(torch.equal(p, q) for p, q in found), name

    def test_small_taps_are_warned_of_and_drawn_again_and_the_readout_starts_where_it_is_told(self):
        model = qwen3_next(128)
        assert len(list(small_taps(model))) == 1
        with pytest.warns(UserWarning, match=r"mup\.draw_taps\(model\)"):
            mup.initialize(model, base=base, readout_init=0)
        assert not model.lm_head.weight.any()
        mup.draw_taps(model)
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
