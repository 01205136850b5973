"""Roles of families that others wrote, on the meta device: right, or refused by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from delta_trn import mup
from delta_trn.models.ecosystem import layouts
from delta_trn.models.ecosystem.roles import Scaled, is_tied, scaled_parameters
from delta_trn.models.mup import Role
from tests.support.planted_bugs import Bug, planted

LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": "width"}
# family -> configuration, model, settings besides those of `settings`; "width" and "heads" grow
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}),
    "qwen3_next": (
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {**LINEAR, **EXPERTS, "linear_num_key_heads": "heads", "linear_num_value_heads": "heads",
         "shared_expert_intermediate_size": "width"},
    ),
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {"n_embd": "width", "n_head": "heads", "n_layer": 2, "n_positions": 64},
    ),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {"num_local_experts": 4}),
    "olmo_hybrid": (
        "OlmoHybridConfig",
        "OlmoHybridForCausalLM",
        {**LINEAR, "linear_num_key_heads": "heads", "linear_num_value_heads": "heads"},
    ),
    "bert": ("BertConfig", "BertLMHeadModel", {"is_decoder": True}),
    "t5": (
        "T5Config",
        "T5ForConditionalGeneration",
        {"d_model": "width", "d_ff": "inner", "num_heads": "heads", "d_kv": 32, "num_layers": 2},
    ),
    "mamba2": (
        "Mamba2Config",
        "Mamba2ForCausalLM",
        {"num_heads": "heads", "expand": 1, "state_size": 16, "n_groups": 2},
    ),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {}),
    "deepseek_v3": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": "width",
         "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "kv_lora_rank": 32,
         "q_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32},
    ),
    "llama4": (
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        {"num_local_experts": 4, "intermediate_size_mlp": "inner", "interleave_moe_layer_step": 1},
    ),
    "kimi_linear": (
        "KimiLinearConfig",
        "KimiLinearForCausalLM",
        {"layer_types": ["linear_attention", "full_attention"], "linear_num_heads": "heads",
         "linear_head_dim": 32, "kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 16,
         "qk_rope_head_dim": 16, "v_head_dim": 32, "n_group": 1, "topk_group": 1,
         "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": "width",
         "mlp_layer_types": ["dense", "sparse"]},
    ),
    "gpt_oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "vit": ("ViTConfig", "ViTForImageClassification", {"image_size": 32, "patch_size": 8}),
}  # fmt: skip


def make(family: str, width: int, **changes: Any) -> nn.Module:
    """Makes a model on the meta device; its heads keep their size and their number grows."""
    config, model, own = FAMILIES[family]
    heads = width // 32
    grown = {"width": width, "heads": heads, "inner": 3 * width}
    settings = {
        "vocab_size": 128, "hidden_size": width, "num_hidden_layers": 2,
        "num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": 32,
        "intermediate_size": 3 * width, "pad_token_id": None, "bos_token_id": 1,
        "eos_token_id": None, "tie_word_embeddings": False,
    }  # fmt: skip
    settings |= {key: grown.get(value, value) if isinstance(value, str) else value
                 for key, value in own.items()}  # fmt: skip
    with torch.device("meta"):
        made = getattr(transformers, config)(**{**settings, **changes})
        return getattr(transformers, model)(made)


def roles(family: str, **options: Any) -> dict[str, Scaled]:
    big, small = make(family, 256), make(family, 64)
    if is_tied(big):  # T5 always is
        mup.scale_readout(big, base=small)
    rows = scaled_parameters(big, small, **options)
    return {row.name: row for row in rows}


# what a parameter's name ends with -> its role; the first that fits
EXPECTED = (
    (("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "shared.weight"), Role.EMBEDDING),
    (("wpe.weight", "position_embeddings.weight", "token_type_embeddings.weight"), Role.EMBEDDING),
    (("embeddings.weight", "cls_token", "position_embeddings", "projection.weight"), Role.EMBEDDING),
    (("lm_head.weight", "predictions.decoder.weight", "classifier.weight"), Role.READOUT),
    (("bias", "_bias", "conv1d.weight", "norm.weight", "norm_f.weight", "layernorm.weight", "sinks"), None),
    (("A_log", "dt_bias", ".D", "ln_1.weight", "ln_2.weight", "ln_f.weight"), None),
    (("layer_norm.weight", "LayerNorm.weight", "norm1.weight", "_norm_weight"), None),
    (("conv.weight", "layernorm_before.weight", "layernorm_after.weight"), None),
)  # fmt: skip


def expected(name: str) -> Role | None:
    for ends, role in EXPECTED:
        if name.endswith(ends):
            return role
    return Role.HIDDEN


@pytest.mark.parametrize("family", FAMILIES)
def test_roles_of_a_family_are_right_without_a_word(family: str):
    named = {"classifier.weight": "readout"} if family == "vit" else None
    rows = roles(family, roles=named)
    gates = ("router", "mlp.gate.weight", "shared_expert_gate", "in_proj_ba", "in_proj_a",
             "in_proj_b", "b_proj", "a_proj", "kv_a_proj_with_mqa", "q_a_proj",
             "f_proj.0", "g_proj.0", "relative_attention_bias", "f_a_proj", "g_a_proj")  # fmt: skip
    wrong = {}
    for name, row in rows.items():
        want = expected(name)
        allowed = {want} if want else {Role.VECTOR, Role.CONSTANT, Role.SCALAR}
        if any(part in name for part in gates):
            # what heads multiply grows with their number, what experts and ranks do does not
            allowed = {Role.GATE, Role.HIDDEN, Role.CONSTANT, Role.EMBEDDING, Role.VECTOR}
        if any(part in name for part in ("q_b_proj", "kv_b_proj", "f_proj.1", "g_proj.1", "f_b_proj",
                                         "g_b_proj")):  # fmt: skip
            allowed = {Role.EMBEDDING, Role.HIDDEN}  # a rank that does not grow
        if row.role not in allowed:
            wrong[name] = (tuple(row.parameter.shape), row.role.name)
    assert not wrong
    found = {row.role for row in rows.values()}
    assert {Role.EMBEDDING, Role.HIDDEN} <= found and (family == "t5" or Role.READOUT in found)


@pytest.mark.parametrize(
    ("family", "ends", "role"),
    [
        ("vit", "cls_token", Role.EMBEDDING),
        ("vit", "position_embeddings", Role.EMBEDDING),
        ("gpt_oss", "gate_up_proj", Role.HIDDEN),
        ("gpt_oss", "down_proj", Role.HIDDEN),
        ("gpt_oss", "gate_up_proj_bias", Role.VECTOR),
        ("gpt_oss", "down_proj_bias", Role.VECTOR),
        ("gpt_oss", "router.weight", Role.GATE),
        ("mixtral", "gate.weight", Role.GATE),
        ("qwen3_next", "mlp.gate.weight", Role.GATE),
        ("llama4", "feed_forward.router.weight", Role.GATE),
    ],
)
def test_parameters_that_shapes_do_not_tell_are_known_by_class(family: str, ends: str, role: Role):
    """Their rate and decay are those of what they are: bare positions once had 1/m and m times."""
    named = {"classifier.weight": "readout"} if family == "vit" else None
    found = [row for name, row in roles(family, roles=named).items() if name.endswith(ends)]
    assert found and {(row.role, row.m) for row in found} == {(role, 4)}


def test_weights_in_the_order_of_inputs_and_outputs_are_turned():
    """With one side fixed they were swapped: GPT-2's and GPT-OSS's inner sizes."""
    for family, fixed in (("gpt2", {"n_inner": 96}), ("gpt_oss", {"intermediate_size": 96})):
        big, small = make(family, 256, **fixed), make(family, 64, **fixed)
        rows = {row.name: row.role for row in scaled_parameters(big, small)}
        into = [
            role for name, role in rows.items() if name.endswith(("c_fc.weight", "gate_up_proj"))
        ]
        out = [
            role
            for name, role in rows.items()
            if name.endswith(("mlp.c_proj.weight", "experts.down_proj"))
        ]
        assert into and {*into} == {Role.GATE}, family
        assert out and {*out} == {Role.EMBEDDING}, family


class Bare(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))


def with_bare(width: int, shape: Callable[[int], tuple[int, ...]]) -> nn.Module:
    return nn.ModuleDict(
        {"tok": nn.Embedding(50, width), "own": Bare(*shape(width)), "head": nn.Linear(width, 50)}
    )


@pytest.mark.parametrize(
    ("what", "shape", "role", "rate", "decay"),
    [
        ("positions", lambda w: (1, 16, w), "embedding", 1.0, 0.0),
        ("a token", lambda w: (1, 1, w), "vector", 1.0, 0.0),
        ("prompts", lambda w: (8, w), "embedding", 1.0, 0.0),
        ("a router, x @ W", lambda w: (w, 8), "gate", 0.25, 0.4),
        ("stacked experts", lambda w: (4, w, 2 * w), "hidden", 0.25, 0.4),
    ],
)
def test_any_other_parameter_of_two_dimensions_is_refused_until_it_is_named(
    what: str, shape: Callable[[int], tuple[int, ...]], role: str, rate: float, decay: float
):
    big, small = with_bare(256, shape), with_bare(64, shape)
    options: dict[str, Any] = {"base": small, "lr": 1.0, "weight_decay": 0.1}
    with pytest.raises(ValueError, match=r"own\.weight .*Bare does not say which of the"):
        mup.parameter_groups(big, **options)
    groups = mup.parameter_groups(big, **options, roles={"own.weight": role})
    (group,) = [group for group in groups if "own.weight" in group["names"]]
    assert (group["role"], group["lr"], group["weight_decay"]) == (role, rate, pytest.approx(decay))


@pytest.mark.parametrize(
    ("layer", "role"),
    [
        (lambda w: nn.Conv2d(3, w, 3), Role.EMBEDDING),
        (lambda w: nn.Conv2d(w, w, 3), Role.HIDDEN),
        (lambda w: nn.Conv1d(w, w, 3), Role.HIDDEN),
        (lambda w: nn.Conv3d(w, 7, 3), Role.GATE),
        (lambda w: nn.ConvTranspose2d(w, 3, 3), Role.GATE),
        (lambda w: nn.Conv2d(w, w, 3, groups=w), Role.VECTOR),
        (lambda w: nn.MultiheadAttention(w, 4), Role.HIDDEN),
        (lambda w: nn.LSTM(w, w), Role.HIDDEN),
    ],
)
def test_layers_of_torch_say_their_sides(layer: Callable[[int], nn.Module], role: Role):
    def model(width: int) -> nn.Module:
        return nn.ModuleDict({"layer": layer(width), "head": nn.Linear(width, 2)})

    rows = scaled_parameters(model(32), lambda: model(8), {"head.weight": "readout"})
    matrices = {row.role for row in rows if row.parameter.dim() > 1 and "layer" in row.name}
    assert matrices == {role} and {row.m for row in rows if row.role is role} == {4}


class TestOwnFactors:
    def test_gemmas_embedding_is_smaller_by_what_the_model_multiplies_it_with(self):
        big = make("gemma3", 256)
        groups = mup.parameter_groups(big, base=lambda: make("gemma3", 64), lr=1.0)
        (group,) = [g for g in groups if "model.embed_tokens.weight" in g["names"]]
        assert (group["lr"], group["eps"]) == (0.5, pytest.approx(1e-8 / 4 * 2))
        sgd = mup.parameter_groups(big, base=lambda: make("gemma3", 64), lr=1.0, optimizer="sgd")
        (group,) = [g for g in sgd if "model.embed_tokens.weight" in g["names"]]
        assert group["lr"] == 1.0  # m over the square of the factor

    @pytest.mark.parametrize(
        ("family", "multiplier"), [("t5", 0.5), ("gemma3", 0.5), ("qwen3", 0.25)]
    )
    def test_tied_readouts_count_what_the_model_multiplies_itself(
        self, family: str, multiplier: float
    ):
        """T5 multiplies hidden states by 1/sqrt(width); Gemma's weights are smaller by 1/sqrt(m)."""
        tied = {"tie_word_embeddings": True}
        tied |= {"scale_decoder_outputs": True} if family == "t5" else {}
        big, small = make(family, 256, **tied), make(family, 64, **tied)
        mup.scale_readout(big, base=small)
        assert big.lm_head.multiplier == pytest.approx(multiplier)

    def test_logits_of_tied_gemma_do_not_depend_on_the_width_as_they_should(self):
        """Sizes of embedded tokens are the base's, seen in the model and not in the rule."""

        def real(width: int) -> nn.Module:
            config, kind, _ = FAMILIES["gemma3"]
            settings = {
                "vocab_size": 64, "hidden_size": width, "num_hidden_layers": 1, "head_dim": 16,
                "num_attention_heads": width // 16, "num_key_value_heads": width // 16,
                "intermediate_size": 2 * width,
            }  # fmt: skip
            torch.manual_seed(0)
            return getattr(transformers, kind)(getattr(transformers, config)(**settings))

        sizes = []
        for width in (64, 256):
            model = real(width)
            if width > 64:
                mup.scale_readout(model, base=lambda: real(64))
                mup.initialize(model, base=lambda: real(64))
            sizes.append(model.model.embed_tokens(torch.arange(64)).std().item())
        assert sizes[1] == pytest.approx(sizes[0], rel=0.05)

    def test_a_factor_that_is_neither_is_refused(self):
        layer = nn.Embedding(4, 16)
        layer.embed_scale = 3.0
        with pytest.raises(ValueError, match=r"multiplies its embedding by 3, expected 1 or"):
            layouts.embedding_power(layer)


@pytest.mark.parametrize(
    ("bug", "check"),
    [
        (Bug("bare parameters are matrices", "models.ecosystem.layouts:find_layout",
             "return None", "return MATRIX", ""), "refused"),
        (Bug("transformers' Conv1D is not turned", "models.ecosystem.layouts:find_layout",
             "return layout", "return MATRIX", ""), "turned"),
        (Bug("a convolution's kernel is what it sums over", "models.ecosystem.layouts:find_layout",
             "Layout(inputs=1, outputs=0)", "MATRIX", ""), "torch"),
        (Bug("Gemma's factor is forgotten", "models.ecosystem.layouts:embedding_power",
             "return 0.5", "return 0.0", ""), "gemma"),
    ],
    ids=lambda x: x.name if isinstance(x, Bug) else x,
)  # fmt: skip
def test_these_checks_can_fail(bug: Bug, check: str):
    def refused():
        test_any_other_parameter_of_two_dimensions_is_refused_until_it_is_named(
            "positions", lambda w: (1, 16, w), "embedding", 1.0, 0.0
        )

    checks = {
        "refused": refused,
        "turned": test_weights_in_the_order_of_inputs_and_outputs_are_turned,
        "torch": lambda: test_layers_of_torch_say_their_sides(
            lambda w: nn.Conv2d(3, w, 3), Role.EMBEDDING
        ),
        "gemma": TestOwnFactors().test_gemmas_embedding_is_smaller_by_what_the_model_multiplies_it_with,
    }
    checks[check]()
    with planted(bug), pytest.raises((AssertionError, ValueError, pytest.fail.Exception)):
        checks[check]()
