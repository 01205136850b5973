"""Weights of flash-linear-attention's KDAForCausalLM open here, and ours there, with the same numbers."""

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from delta_trn import kimi_delta_attention, load_model, save_model
from tests.models.ecosystem.record_goldens import fill, tokens
from tests.models.ecosystem.test_weight_goldens import ALLOWED, relative
from tests.models.ecosystem.test_weights import ours

SIZES = {
    "model_type": "kda", "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2, "head_dim": 12,
    "vocab_size": 23, "intermediate_size": 40,
}  # fmt: skip
DEFAULTS = {"num_v_heads": 2, "expand_v": 1, "conv_size": 4, "norm_eps": 1e-6, "lower_bound": None}
CASES = {
    "plain": {},
    "grouped": {
        **{"num_v_heads": 4, "allow_neg_eigval": True, "conv_size": 3, "norm_eps": 1e-3, "expand_v": 1.5},
        **{"safe_gate": True, "lower_bound": -5.0, "fuse_norm": False},
    },
    "bound_alone": {"lower_bound": -4.0, "safe_gate": False, "attn_mode": "chunk"},
}


def make_state(c):
    """Returns weights of a model under their names and in their shapes, float32."""
    d, inner, H, HV = (c[n] for n in ("hidden_size", "intermediate_size", "num_heads", "num_v_heads"))
    K, W = c["head_dim"], c["conv_size"]
    V = int(K * c["expand_v"])
    layer = {
        "attn_norm.weight": (d,), "mlp_norm.weight": (d,), "attn.q_proj.weight": (H * K, d),
        "attn.k_proj.weight": (H * K, d), "attn.v_proj.weight": (HV * V, d), "attn.b_proj.weight": (HV, d),
        "attn.f_proj.0.weight": (V, d), "attn.f_proj.1.weight": (HV * K, V), "attn.A_log": (HV,),
        "attn.dt_bias": (HV * K,), "attn.g_proj.0.weight": (V, d), "attn.g_proj.1.weight": (HV * V, V),
        "attn.g_proj.1.bias": (HV * V,), "attn.o_norm.weight": (V,), "attn.o_proj.weight": (d, HV * V),
        "attn.q_conv1d.weight": (H * K, 1, W), "attn.k_conv1d.weight": (H * K, 1, W),
        "attn.v_conv1d.weight": (HV * V, 1, W), "mlp.gate_proj.weight": (inner, d),
        "mlp.up_proj.weight": (inner, d), "mlp.down_proj.weight": (d, inner),
    }  # fmt: skip
    shapes = {f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in layer.items()}
    shapes |= {"model.embeddings.weight": (c["vocab_size"], d), "model.norm.weight": (d,)}
    return {name: fill(name, x) for name, x in (shapes | {"lm_head.weight": (c["vocab_size"], d)}).items()}


def norm(x, weight, c):
    return x / (x.square().mean(-1, keepdim=True) + c["norm_eps"]).sqrt() * weight


def mix(x, w, c):
    """Computes their layer, x [B, T, d] and weights by their names; the judge computes the rule."""

    def project(name):
        taps = w[f"{name}_conv1d.weight"]
        y = F.pad((x @ w[f"{name}_proj.weight"].T).mT, (taps.shape[-1] - 1, 0))
        return F.silu(F.conv1d(y, taps, groups=len(taps)).mT)

    K, V = c["head_dim"], len(w["o_norm.weight"])
    q, k, v = (project(name).unflatten(-1, (-1, n)) for name, n in (("q", K), ("k", K), ("v", V)))
    f = (x @ w["f_proj.0.weight"].T @ w["f_proj.1.weight"].T + w["dt_bias"]).unflatten(-1, (-1, K))
    rate, bound = w["A_log"].exp()[:, None], c["lower_bound"]
    g = -rate * F.softplus(f) if bound is None else bound * (rate * f).sigmoid()
    beta = (x @ w["b_proj.weight"].T).sigmoid() * (2 if c.get("allow_neg_eigval") else 1)
    o, _ = kimi_delta_attention(q, k, v, g, beta, use_qk_l2norm_in_kernel=True, backend="recurrent")
    gate = (x @ w["g_proj.0.weight"].T @ w["g_proj.1.weight"].T + w["g_proj.1.bias"]).unflatten(-1, (-1, V))
    return (norm(o, w["o_norm.weight"], c) * gate.sigmoid()).flatten(2) @ w["o_proj.weight"].T


def compute_logits(state, c, ids):
    """Returns the logits of their model by its equations."""
    w = {name: tensor.double() for name, tensor in state.items()}
    x = w["model.embeddings.weight"][ids]
    for i in range(2):
        of = {n.removeprefix(f"model.layers.{i}."): y for n, y in w.items() if f".layers.{i}." in n}
        mixer = {n.removeprefix("attn."): y for n, y in of.items() if n.startswith("attn.")}
        x = x + mix(norm(x, of["attn_norm.weight"], c), mixer, c)
        y = norm(x, of["mlp_norm.weight"], c)
        inner = F.silu(y @ of["mlp.gate_proj.weight"].T) * (y @ of["mlp.up_proj.weight"].T)
        x = x + inner @ of["mlp.down_proj.weight"].T
    return norm(x, w["model.norm.weight"], c) @ w["lm_head.weight"].T


@pytest.fixture(params=CASES)
def case(request, tmp_path):
    """Returns their settings and weights, and a folder that holds them."""
    settings = SIZES | CASES[request.param]
    state = make_state(DEFAULTS | settings)
    (tmp_path / "config.json").write_text(json.dumps(settings))
    save_file(state, tmp_path / "model.safetensors")
    return settings, state, tmp_path


def test_logits_are_those_of_their_equations(case):
    settings, state, folder = case
    c, ids = DEFAULTS | settings, tokens(23)
    model = load_model(folder, torch.float64).eval()
    with torch.no_grad():
        theirs = compute_logits(state, c, ids)
        assert relative(model(ids).logits, theirs) < ALLOWED
        # and another reading of their weights or settings would be seen
        for i, name in enumerate(("attn.dt_bias", "attn.g_proj.1.bias", "attn.A_log")):
            other = state | {f"model.layers.{i % 2}.{name}": state[f"model.layers.{i % 2}.{name}"].flip(0)}
            assert relative(compute_logits(other, c, ids), theirs) > 1000 * ALLOWED, name
        bound = {"lower_bound": -3.0 if c["lower_bound"] is None else None}
        assert relative(compute_logits(state, c | bound, ids), theirs) > 1000 * ALLOWED


def test_the_way_back_restores_weights_and_settings_bit_for_bit(case):
    settings, state, folder = case
    save_model(load_model(folder), folder / "back", "fla")
    back = load_file(folder / "back" / "model.safetensors")
    config = json.loads((folder / "back" / "config.json").read_text())
    assert back.keys() == state.keys() and all(torch.equal(back[name], x) for name, x in state.items())
    assert settings.items() <= config.items() and config["architectures"] == ["KDAForCausalLM"]


@pytest.mark.parametrize(("bound", "safe"), [(None, False), (-7.0, False), (-5.0, True)])
def test_safe_gate_is_written_only_with_a_bound_that_it_is_taken_with(bound, safe, tmp_path):
    save_model(ours(mixer="kimi_delta_attention", decay_bound=bound), tmp_path, "fla")
    written = json.loads((tmp_path / "config.json").read_text())
    assert [written[name] for name in ("model_type", "lower_bound", "safe_gate")] == ["kda", bound, safe]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"safe_gate": True}, "safe_gate=True without a lower_bound"),
        ({"lower_bound": 1.0}, "^lower_bound=1.0: "),
    ],
)
def test_a_bound_that_is_missing_or_positive_is_refused_by_their_name(change, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SIZES | change))
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path)
