"""Deep Delta Learning models: every residual, what it equals in limiting cases,
sizes and caches.
"""

from typing import Any, cast

import pytest
import torch
from torch import Tensor

from delta_trn.models import DeltaForCausalLM
from delta_trn.train.recipes import recipe
from delta_trn.train.run.model import model_config
from tests.support.tiny_models import assert_same, model, tokens

ATTENTION = {"attention_layers": [0, 1, 2], "expand_v": 1.0, "use_qk_rmsnorm": True}
MATRIX = {"residual": "ddl", "ddl_value_channels": 4}
VARIANTS: dict[str, dict[str, Any]] = {
    "vector": {"residual": "ddl"},
    "token": {**MATRIX, "ddl_compressor": "token", **ATTENTION},
    "token-conv": {**MATRIX, "ddl_compressor": "token", "input_embed_shortconv_kernel_size": 4},
    "channel": {**MATRIX, "ddl_compressor": "channel", "attention_layers": [1]},
    "channel-conv": {
        **MATRIX,
        "ddl_compressor": "channel",
        "input_embed_shortconv_kernel_size": 3,
        **ATTENTION,
    },
    "write-only": {**MATRIX, "residual": "write_only", "ddl_compressor": "channel"},
    "context": {"residual": "ddl", "ddl_v_input": "context", "ddl_v_sigmoid": False},
    "two-maps": {"residual": "ddl", "ddl_beta_single_linear": False, "ddl_beta_hidden_size": 8},
    "constant": {"residual": "ddl", "ddl_v_constant": True, **ATTENTION},
    "causal-channel": {
        **MATRIX,
        "ddl_compressor": "channel",
        "ddl_state_dv_shortconv_causal": True,
    },
    "shifts": {
        "residual": "ddl",
        "use_k_shift": True,
        "use_v_shift": True,
        "q_activation": "silu",
        "k_activation": "elu+1",
        "v_activation": "relu",
        "rope_ratio": 0.5,
        **ATTENTION,
    },
    "output-gate": {
        **MATRIX,
        "ddl_compressor": "token",
        "use_output_gate": True,
        "rope_ratio": 0.0,
        "attention_layers": [0, 2],
    },
    "group-norm": {
        "residual": "ddl",
        "using_groupnorm": True,
        "depth_scaled_init": True,
        **ATTENTION,
    },
    "lm": {
        "residual": "ddl_lm",
        "positions": "learned",
        "max_position_embeddings": 64,
        "norm": ("layer"),
        "mlp": "gelu",
        "attention_layers": [0, 1, 2],
    },
}


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> dict[str, Any]:
    return VARIANTS[request.param]


def perturbed_model(seed: int = 0, **changes: Any) -> DeltaForCausalLM:
    """Returns a model whose convolutions and reading weights are away
    from their initial identity.
    """
    m = model(seed, **changes)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, p in m.named_parameters():
            if "read" in name or "expand" in name:
                p.add_(0.3 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return m


def blocks(m: DeltaForCausalLM) -> list[Any]:
    return list(m.model.blocks)


def logits(m: DeltaForCausalLM, ids: Tensor, **options: Any) -> Tensor:
    return m(ids, **options).logits


@pytest.mark.parametrize("attention_layers", [[], [0, 1, 2]], ids=["gdn", "attention"])
def test_deep_delta_generation_with_a_cache_equals_the_forward_without(variant, attention_layers):
    """Tries every residual with either mixer, and prompts shorter
    and longer than a convolution's taps.
    """
    m, ids = perturbed_model(**{**variant, "attention_layers": attention_layers}), tokens(2, 8)
    with torch.no_grad():
        whole = logits(m, ids, use_cache=False)
        for prompt in (1, 3, 6):
            first = m(ids[:, :prompt], use_cache=True)
            parts, cache = [first.logits], first.past_key_values
            for t in range(prompt, 8):
                parts.append(logits(m, ids[:, t : t + 1], past_key_values=cache))
            assert_same(torch.cat(parts, dim=1), whole, what=f"prompt of {prompt}", factor=4)


def test_beams_take_along_what_the_embeddings_and_the_readouts_convolutions_remember():
    m, ids = perturbed_model(**VARIANTS["token-conv"]), tokens(2, 5)
    options = {"num_beams": 4, "num_return_sequences": 2, "do_sample": False, "max_new_tokens": 12}
    cached, uncached = (m.generate(ids, use_cache=use, **options) for use in (True, False))
    assert torch.equal(cached, uncached)


def test_deep_delta_is_causal_and_separates_packed_and_padded_sequences(variant):
    """No token sees a later one; packing and padding change nothing;
    every parameter gets a gradient.
    """
    m, ids = perturbed_model(**variant), tokens(1, 11)
    with torch.no_grad():
        whole = logits(m, ids)
        assert_same(logits(m, ids[:, :6]), whole[:, :6], what="causal")
        bounds = torch.tensor([0, 4, 4, 11])
        parts = torch.cat([logits(m, ids[:, :4]), logits(m, ids[:, 4:])], dim=1)
        assert_same(logits(m, ids, cu_seqlens=bounds), parts, what="packed", factor=4)
        padded = torch.cat([torch.zeros(1, 3, dtype=torch.int64), ids], dim=1)
        mask = torch.tensor([[0] * 3 + [1] * 11])
        assert_same(logits(m, padded, attention_mask=mask)[:, 3:], whole, what="padded", factor=4)
        assert (whole[:, 4:] - logits(m, ids[:, 4:])).abs().max() > 1e-3, (
            "earlier tokens have no influence"
        )
    m.loss(ids[:, :-1], ids[:, 1:]).backward()
    assert [name for name, p in m.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_a_saved_deep_delta_model_loads_as_the_same(tmp_path):
    m, ids = perturbed_model(dtype=torch.float32, **VARIANTS["channel-conv"]), tokens(1, 7)
    m.save_pretrained(tmp_path)
    again = DeltaForCausalLM.from_pretrained(tmp_path)
    saved, loaded = m.state_dict(), again.state_dict()
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)
    # not to the bit: where weights lie in memory decides how products are summed
    with torch.no_grad():
        assert_same(logits(again.eval(), ids), logits(m, ids), what="loaded", factor=4)


@pytest.mark.parametrize("name", ["vector", "token-conv", "channel", "write-only", "lm"])
def test_closed_gates_leave_the_embedding(name):
    """With beta = 0 the logits are the readout of the embedding, whatever the blocks compute."""
    m, ids = model(**VARIANTS[name]), tokens(2, 7)
    with torch.no_grad():
        for module in m.modules():
            if type(module).__name__ == "Gate":
                module.proj.weight.zero_()  # type: ignore[union-attr]
                module.proj.bias.fill_(-1e4)  # type: ignore[union-attr]
        x = m.model.embed(ids)
        if m.model.positions is not None:
            x = x + m.model.positions(torch.arange(7))
        expected = m.config.logit_scale * m.lm_head(m.model.norm(x))
        assert_same(logits(m, ids), expected, what="identity")


@pytest.mark.parametrize("compressor", ["token", "channel"])
def test_an_expanded_state_of_one_channel_is_the_vector_model(compressor):
    """Holds with DV = 1 and the compressor at its identity,
    where one tap of a channel convolution acts.
    """
    vector, ids = model(**VARIANTS["vector"]), tokens(2, 8)
    matrix = model(residual="ddl", ddl_value_channels=1, ddl_compressor=compressor)
    shared = vector.state_dict()
    missing = matrix.load_state_dict(shared, strict=False)
    assert not missing.unexpected_keys and all("read" in name for name in missing.missing_keys)
    with torch.no_grad():
        assert_same(logits(matrix, ids), logits(vector, ids), what=compressor)


def test_copies_of_the_state_start_equal_and_diverge():
    """The DV columns start as copies and would stay so only
    if v were one number for all of them.
    """
    m, ids = model(**VARIANTS["channel"]), tokens(1, 6)
    with torch.no_grad():
        states = m(ids, output_hidden_states=True).hidden_states
    first, last = (x.unflatten(-1, (-1, 4)) for x in (states[0], states[-1]))
    assert torch.equal(first[..., 0], first[..., 3])
    assert (last[..., 0] - last[..., 3]).abs().max() > 1e-3


@pytest.mark.parametrize("compressor", ["channel", "token"])
def test_inputs_of_sublayers_have_rms_one_at_initialization(compressor):
    """Holds for the averaging initialization; the released one leaves far less."""
    sizes = {
        "hidden_size": 256,
        "base_width": 256,
        "num_hidden_layers": 2,
        "initializer_range": 0.02,
    }
    sizes["rms_norm_eps"] = 1e-5
    m = model(
        **sizes, **MATRIX, ddl_compressor=compressor, attention_layers=[0, 1], dtype=torch.float32
    )
    seen: list[float] = []
    for block in blocks(m):
        for norm in (block.mixer_norm, block.mlp_norm):
            norm.register_forward_hook(lambda _, x, y: seen.append(float(y.square().mean().sqrt())))
    with torch.no_grad():
        m(tokens(2, 8))
        assert len(seen) == 4 and all(abs(x - 1) < 0.1 for x in seen), seen
        read = blocks(m)[0].read
        taps = read.weight if compressor == "channel" else read.conv.weight
        taps.normal_(0, 0.5 * 256**-0.5)  # the released code's, which the same check finds
        seen.clear()
        m(tokens(2, 8))
    assert seen[0] < 0.5


ONE = {
    "residual": "ddl",
    "ddl_value_channels": 1,
    "ddl_compressor": "none",
    "input_embed_shortconv_kernel_size": 0,
}
COUNTS: dict[str, tuple[str, dict[str, Any], int]] = {
    "small, CC and EC": ("ddl_small", {}, 123_722_668 + 12_288),
    "small, CC": ("ddl_small", {"input_embed_shortconv_kernel_size": 0}, 123_722_668),
    "small, TC and EC": ("ddl_small", {"ddl_compressor": "token"}, 123_842_476 + 12_288),
    "small, vector": ("ddl_small", ONE, 123_590_400 + 36_912),
    "small, sum": ("ddl_small", {**ONE, "residual": "additive"}, 123_590_400),
    "medium, CC and EC": ("ddl_medium", {}, 353_856_852 + 16_384),
    "medium, TC and EC": ("ddl_medium", {"ddl_compressor": "token"}, 354_164_052 + 16_384),
    "LM": ("ddl_lm_tinystories", {}, 34_849_552),
}


@pytest.mark.parametrize("name", COUNTS)
def test_recipes_have_the_papers_parameter_counts(name):
    """The paper says 123.59M, 123.84M, 123.72M; 354.16M, 353.86M; DDL-LM has 34.85M."""
    of, changes, count = COUNTS[name]
    run = recipe(of)
    run = run.model_copy(update={"model": run.model.model_copy(update=changes)})
    with torch.device("meta"):
        m = DeltaForCausalLM(model_config(run, rows=50257 if name == "LM" else 50304))
    assert sum(p.numel() for p in m.parameters()) == count


def test_gates_of_ddl_lm_start_at_0238():
    """ddl_beta_init is the value of a gate; the released code overwrites it and starts at 1."""
    run = recipe("ddl_lm_tinystories")
    small = run.model.model_copy(update={"layers": 2, "attention_layers": (0, 1)})
    torch.manual_seed(0)
    m = DeltaForCausalLM(model_config(run.model_copy(update={"model": small}), rows=64)).eval()
    gates: list[Tensor] = []
    for module in m.modules():
        if type(module).__name__ == "Gate":
            module.register_forward_hook(lambda _, x, beta: gates.append(cast(Tensor, beta)))
    with torch.no_grad():
        m(torch.randint(0, 64, (2, 16)))
    assert len(gates) == 4
    assert all((beta - 0.2384).abs().max() < 0.01 for beta in gates)
    assert sum(p.numel() for p in blocks(m)[0].mixer_write.parameters()) == 74_497


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"residual": "delta"}, "residual=delta: expected 'additive', 'ddl'"),
        (
            {"residual": "ddl", "ddl_value_channels": 4},
            "ddl_value_channels=4 with ddl_compressor='none'",
        ),
        (
            {"ddl_value_channels": 4, "ddl_compressor": "token"},
            "residual='additive' has one value per feature",
        ),
        ({"residual": "ddl", "ddl_beta_init": -2.0}, "ddl_beta_init=-2.0: expected at least 0"),
        ({"residual": "ddl", "ddl_k_eps": 0.0}, "ddl_k_eps=0.0: expected more than 0"),
        ({"ddl_v_imput": "state"}, "did you mean ddl_v_input"),
        ({"dropout": 1.0}, "dropout=1.0: expected less than 1"),
        ({"label_smoothing": 1.0}, "label_smoothing=1.0"),
        ({"rope_ratio": 1.5}, "rope_ratio=1.5"),
        ({"mixer_output_init": -1.0}, "mixer_output_init=-1.0: expected at least 0"),
        ({"mixer_output_init": float("inf")}, "mixer_output_init=inf: expected a finite number"),
        ({"k_activation": "tanh"}, "k_activation=tanh: expected 'identity', 'silu', 'relu'"),
        ({"ddl_v_dim1_constant": True}, "did you mean ddl_v_constant"),
        ({"forgetting": 0.0}, "forgetting=0.0: expected more than 0"),
    ],
)
def test_wrong_options_are_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        model(**changes)


def test_a_position_beyond_the_last_learned_one_is_refused():
    m = model(**VARIANTS["lm"])
    with pytest.raises(
        ValueError, match="position 64 has no embedding: max_position_embeddings=64"
    ):
        m(tokens(1, 65))
