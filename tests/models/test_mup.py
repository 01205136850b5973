"""The muP table has the papers' numbers, its tags fit shapes,
and initial values follow their laws.
"""

import copy
import math
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from torch import nn

from delta_trn.models import DeltaConfig, DeltaForCausalLM
from delta_trn.models.mup import OPTIMIZERS, TABLES, Role
from delta_trn.models.parameters import ScaledParameter, scaled_parameters, tagged_parameters
from tests.models.test_ddl import VARIANTS as DDL
from tests.support.tiny_models import VARIANTS, config, model, tokens

MODELS = {**VARIANTS, **DDL}


def meta_model(width: int, **changes: Any) -> DeltaForCausalLM:
    """Returns a meta model of base width 64; width enlarges 4 heads."""
    sizes = {"hidden_size": width, "base_width": 64, "initializer_range": 0.02}
    with torch.device("meta"):
        return DeltaForCausalLM(config(**sizes, **changes))


def rows(
    m: DeltaForCausalLM, optimizer: str = "adamw", **changes: Any
) -> dict[str, ScaledParameter]:
    options = {"lr": 1.0, "weight_decay": 0.1, **changes}
    return {row.name: row for row in scaled_parameters(m, optimizer=optimizer, **options)}


# one parameter of each class of arXiv:2606.04048
CLASSES = {
    "model.embed.weight": "embedding",
    "lm_head.weight": "head",
    **{f"model.blocks.0.mixer.{x}_proj.weight": "matrix" for x in "qkvgo"},
    **{f"model.blocks.0.mlp.{x}_proj.weight": "matrix" for x in ("gate", "up", "down")},
    **{f"model.blocks.1.mixer.{x}_proj.weight": "matrix" for x in "qo"},
    **{f"model.blocks.0.mixer.{x}_proj.weight": "gate" for x in "ab"},
    **{f"model.blocks.0.mixer.{x}": "scalar" for x in ("A_log", "dt_bias")},
    **{
        f"model.blocks.0.{x}.weight": "vector"
        for x in ("mixer_norm", "mlp_norm", "mixer.o_norm", "mixer.conv")
    },
    "model.norm.weight": "vector",
}
# learning-rate factors at m = n, and of the initial standard deviation and the logits
SGD = {
    "sp": {},
    "mup_original": {"embedding": "n", "head": "n", "vector": "n"},
    "mup": {"embedding": "n", "head": "n", "vector": "n", "gate": "n**-0.5", "scalar": "n**0.5"},
    "mup_authors": {"embedding": "n", "head": "n", "gate": "n**-0.5", "scalar": "n**0.5"},
}
ADAMW = {
    "sp": {},
    "mup_original": {"matrix": "1/n", "gate": "1/n"},
    "mup": {"matrix": "1/n", "gate": "1/n"},
    "mup_authors": {"matrix": "1/n", "gate": "1/n", "vector": "1/n"},
}
STD = {name: {} if name == "sp" else {"matrix": "n**-0.5", "gate": "n**-0.5"} for name in TABLES}
MULTIPLIER = {name: {} if name == "sp" else {"embedding": "1/n", "head": "1/n"} for name in TABLES}


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("tied", [True, False])
def test_every_class_of_parameters_has_the_factors_of_its_paper(name: str, n: int, tied: bool):
    def factor(table: dict[str, dict[str, str]], group: str) -> float:
        return float(eval(table[name].get(group, "1"), {"n": n}))

    # an inner size that needs no rounding, so that its ratio is the width's
    sizes = {"intermediate_size": 160 * n, "attention_layers": [1]}
    m = meta_model(64 * n, parametrization=name, tie_word_embeddings=tied, **sizes)
    for optimizer, table in (("adamw", ADAMW), ("sgd", SGD)):
        scaled = rows(m, optimizer, lr=0.25)
        for parameter, group in CLASSES.items():
            if parameter == "lm_head.weight" and tied:
                assert parameter not in scaled
                continue
            row = scaled[parameter]
            assert row.lr == 0.25 * factor(table, group), parameter
            untied_embedding = group == "embedding" and not tied
            assert row.multiplier == factor(MULTIPLIER, group) or untied_embedding, parameter
            if group in ("scalar", "vector"):
                assert row.init_std is None, parameter
            else:
                assert row.init_std == 0.02 * factor(STD, group), parameter
            assert row.weight_decay == (0.1 if group in ("matrix", "gate") else 0.0), parameter
    assert m.config.logit_scale == factor(MULTIPLIER, "head")


@pytest.mark.parametrize(("width", "ratio"), [(768, 2048 / 768), (1536, 4096 / 768)])
def test_the_output_of_an_mlp_is_scaled_by_its_own_inputs_which_are_rounded_up(
    width: int, ratio: float
):
    """int(8 d / 3) is rounded up to 256s, so that at d = 256, 768 inputs,
    it is 4/3 of what d says.
    """

    def down(**changes: Any) -> dict[str, ScaledParameter]:
        options = {"base_width": 256, "num_hidden_layers": 1, **changes}
        with torch.device("meta"):
            scaled = {
                o: rows(DeltaForCausalLM(DeltaConfig(hidden_size=width, **options)), o)
                for o in OPTIMIZERS
            }
        return {o: table["model.blocks.0.mlp.down_proj.weight"] for o, table in scaled.items()}

    m = width / 256
    by_shape, of_authors = down(), down(parametrization="mup_authors")
    assert by_shape["adamw"].lr == pytest.approx(1 / ratio) and of_authors["adamw"].lr == 1 / m
    assert by_shape["adamw"].epsilon == pytest.approx(1 / ratio)
    assert by_shape["muon"].lr == pytest.approx(ratio**-0.5) and by_shape["sgd"].lr == 1
    assert by_shape["adamw"].init_std == pytest.approx(0.02 * ratio**-0.5)
    assert of_authors["adamw"].init_std == pytest.approx(0.02 * m**-0.5)
    # with a size of one's own, nothing says what the base model's was
    assert down(intermediate_size=3 * width)["adamw"].lr == 1 / m
    assert down(parametrization="sp")["adamw"].lr == 1


class TestDepth:
    def test_sublayers_add_their_outputs_times_base_layers_over_layers(self):
        ids = tokens(2, 9)
        plain = model(num_hidden_layers=4)
        same, shared = (
            model(num_hidden_layers=4, base_layers=4),
            model(num_hidden_layers=4, base_layers=2),
        )
        assert torch.equal(plain(ids).logits, same(ids).logits)
        with torch.no_grad():
            for block in plain.model.blocks:
                for matrix in (block.mixer.o_proj.weight, block.mlp.down_proj.weight):
                    matrix.mul_(0.5)
        assert torch.allclose(plain(ids).logits, shared(ids).logits, rtol=1e-12, atol=1e-12)
        assert not torch.allclose(same(ids).logits, shared(ids).logits)

    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    def test_rates_in_blocks_follow_completep(self, optimizer: str):
        """arXiv:2505.01618, alpha = 1: Adam's epsilon falls as 1 / layers,
        rates stay. SGD's grow.
        """
        four, plain = (
            rows(meta_model(64, num_hidden_layers=4, base_layers=n), optimizer) for n in (2, None)
        )
        for name, row in four.items():
            depth = 2 if name.startswith("model.blocks.") else 1
            assert (
                row.epsilon == plain[name].epsilon / depth and row.init_std == plain[name].init_std
            )
            assert row.lr == plain[name].lr * (depth if optimizer == "sgd" else 1)

    def test_gradients_in_blocks_are_of_one_size_at_every_depth_in_the_norm_that_is_clipped(self):
        """Their squares add up to 1 / layers of it; `clip` weighs them with layers."""
        norms = []
        for layers in (2, 4, 8):
            m = model(num_hidden_layers=layers, base_layers=2, initializer_range=0.1)
            ids = tokens(4, 17)
            m.loss(ids[:, :-1], ids[:, 1:]).backward()
            scaled = [row for row in rows(m).values() if ".mlp." in row.name]
            square = sum(row.parameter.grad.square().sum() for row in scaled)
            (clip,) = {row.clip for row in scaled if "down_proj" in row.name}
            norms.append([clip * square, square])
        weighted, unweighted = (math.log(norms[2][i] / norms[0][i]) / math.log(4) for i in (0, 1))
        assert abs(weighted) < 0.25 and unweighted == pytest.approx(weighted - 1, abs=1e-6)

    def test_a_depth_rule_is_refused_for_residuals_that_are_no_sums(self):
        with pytest.raises(ValueError, match="base_layers=2 is a rule for sums"):
            config(base_layers=2, residual="ddl")


@pytest.mark.parametrize("variant", MODELS)
def test_declared_roles_are_those_that_shapes_imply(variant: str):
    """A role says how many dimensions of a parameter grow with width;
    so do its shapes at two widths.
    """
    narrow, wide = (tagged_parameters(meta_model(width, **MODELS[variant])) for width in (64, 128))
    for (name, p, tag), (_, q, _) in zip(narrow, wide, strict=True):
        grew = sum(a != b for a, b in zip(p.shape, q.shape, strict=True))
        assert tag.role.growing == grew, f"{name}: declared {tag.role.name}, {grew} dimensions grew"


def test_a_parameter_without_a_role_is_named():
    m = model()
    m.model.blocks[1].mlp.extra = nn.Parameter(torch.zeros(3, 2))
    with pytest.raises(ValueError, match=r"\.1.mlp.extra \(3, 2\) has no muP role.*tags of SwiGLU"):
        rows(m)
    with pytest.raises(ValueError, match=r"optimizer='lion' has no column.*adamw, sgd"):
        rows(model(), "lion")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", TABLES)
def test_independent_weight_decay_is_the_same_at_every_width(optimizer: str, name: str):
    """One step removes the share lr * decay of a weight."""
    per_step = []
    for n in (1, 2, 4):
        m = meta_model(64 * n, parametrization=name)
        scaled = rows(m, optimizer, lr=0.5, independent_weight_decay=True)
        per_step.append([row.lr * row.weight_decay for row in scaled.values()])
    assert per_step[1] == pytest.approx(per_step[0])
    assert per_step[2] == pytest.approx(per_step[0])
    coupled = rows(meta_model(256, parametrization="mup"))["model.blocks.0.mlp.up_proj.weight"]
    assert coupled.lr * coupled.weight_decay == pytest.approx(0.1 / 4), (
        "the default depends on the width"
    )


class TestInitialValues:
    def test_decays_and_taps_follow_mamba2s_laws(self):
        m = DeltaForCausalLM(
            DeltaConfig(vocab_size=9, hidden_size=64, num_heads=1, num_v_heads=4000, head_dim_k=1)
        )
        layer = m.model.blocks[0].mixer
        A, dt = layer.A_log.exp(), torch.nn.functional.softplus(layer.dt_bias)
        assert A.min() > 0 and A.max() < 16 and A.mean().item() == pytest.approx(8, rel=0.05)
        assert dt.min() > 0.99e-3 and dt.max() < 1.01e-1
        assert dt.log().mean().item() == pytest.approx(math.log(1e-2), rel=0.05)
        assert (layer.conv.weight.abs() <= 0.5).all()
        assert layer.conv.weight.std().item() == pytest.approx(12**-0.5, rel=0.05)
        assert (layer.o_norm.weight == 1).all() and (m.model.norm.weight == 1).all()

    def test_a_seed_determines_initial_weights_and_the_next_model_differs(self):
        a, b = model(seed=3), model(seed=3)
        c = DeltaForCausalLM(config())
        assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
        assert not torch.equal(b.model.embed.weight, c.double().model.embed.weight)

    def test_initial_values_do_not_depend_on_other_parameters(self):
        """With more layers, another mixer or untied logits,
        equal names and shapes have equal values.
        """
        plain = dict(model().named_parameters())
        for changes in (
            {"num_hidden_layers": 5},
            {"attention_layers": [0]},
            {"tie_word_embeddings": False},
            {"conv_size": 2},
        ):
            other = dict(model(**changes).named_parameters())
            shared = [
                n
                for n in plain
                if n in other and plain[n].shape == other[n].shape and "attn" not in n
            ]
            assert len(shared) > 20
            for name in shared:
                if changes.get("attention_layers") and name.startswith("model.blocks.0.mixer."):
                    continue  # attention gives these names to other weights
                assert torch.equal(plain[name], other[name]), name

    def test_initial_values_and_tags_are_the_same_after_construction_on_meta_and_copies(self):
        torch.manual_seed(0)
        expected = DeltaForCausalLM(config())
        torch.manual_seed(0)
        with torch.device("meta"):
            m = DeltaForCausalLM(config())
        m.to_empty(device="cpu").tie_weights()
        m.initialize_weights()
        assert len(rows(copy.deepcopy(m).to(torch.bfloat16))) == len(list(m.parameters()))
        assert all(
            torch.equal(a, b) for a, b in zip(m.parameters(), expected.parameters(), strict=True)
        )


class TestTable:
    def test_every_parametrization_gives_every_role_a_rule_with_a_source(self):
        for table in TABLES.values():
            assert set(table.rules) == set(Role)
            assert all(rule.source for rule in table.rules.values())

    def test_the_table_of_the_docs_is_the_one_that_optimizers_read(self):
        page = (Path(__file__).parents[2] / "docs" / "mup.md").read_text()
        page = page.partition("\n## What every parameter gets\n")[2]
        lines = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("|")][2:32]
        powers = {"1": 0.0, "m": 1.0, "1/m": -1.0, "√m": 0.5, "1/√m": -0.5}
        printed = [[powers[cell.strip()] for cell in line[2:]] for line in lines]
        columns = ("init_std", "multiplier", "lr_adamw", "lr_sgd", "epsilon")
        roles = [role for role in Role if role is not Role.CONSTANT]
        tables = [TABLES[name] for name in ("sp", "mup_original", "mup")]
        assert [line[0].strip() for line in lines[::5]] == [role.meaning for role in roles]
        assert printed == [[getattr(t[role], x) for t in tables] for role in roles for x in columns]

    def test_adams_epsilon_scales_as_gradients_do(self):
        """Compares powers of width of initial gradients under muP with the table's powers for
        epsilon.

        Measures rms gradients of a hidden matrix, of gains and of the embedding, as medians of 15
        seeds: the embedding's have outliers of twenty times the median. The power is -1 within 0.25
        from m = 4 to 16; it holds for large widths, and is -1.6 from m = 1 to 4.
        Gates and scalars of 4 heads are too few numbers to measure.
        """
        names = ("model.embed.weight", "model.blocks.1.mlp.down_proj.weight", "model.norm.weight")
        sizes: dict[str, list[float]] = {name: [] for name in names}
        for width in (128, 512):
            seeds: dict[str, list[float]] = {name: [] for name in names}
            for seed in range(15):
                m = trainable(width, "mup", seed=seed)
                ids = tokens(8, 33, seed=seed)
                m.loss(ids[:, :-1], ids[:, 1:]).backward()
                for name in names:
                    gradient = m.get_parameter(name).grad
                    assert gradient is not None
                    seeds[name].append(gradient.square().mean().sqrt().item())
            for name in names:
                sizes[name].append(median(seeds[name]))
        for name, (narrow, wide) in sizes.items():
            slope = math.log(wide / narrow) / math.log(4)
            assert slope == pytest.approx(TABLES["mup"][rows(m)[name].role].epsilon, abs=0.25), name


def trainable(width: int, parametrization: str, seed: int = 0) -> DeltaForCausalLM:
    """Returns a model of two layers and base width 32 whose initial weights are large enough
    to matter.
    """
    torch.manual_seed(seed)
    return DeltaForCausalLM(
        config(
            hidden_size=width,
            base_width=32,
            num_hidden_layers=2,
            parametrization=parametrization,
            initializer_range=0.15,
        )
    )
