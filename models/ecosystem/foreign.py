"""Gated DeltaNet language models of others: their names, layouts and settings, to ours and back.

    fla         flash-linear-attention 0.5.2, GatedDeltaNetForCausalLM
    authors     gdn.py, gdn-sp.py and gdn-mup.py, the released code of arXiv:2606.04048

Both have our layers under nearly the same names. Where one side has a setting that the other lacks, it is
moved into the weights if that computes the same numbers. Otherwise it is refused by name.

Our readout is S^T q sqrt(K), theirs is S^T q / sqrt(K), and one epsilon serves all norms of a model. On the
way there, the whole residual stream is therefore made s = 1/K times as large, and epsilon s^2 times. Every
norm then returns what it returned before.

    ours                                    times       because
    embedding; W_o, W_down of all layers    s           they write the stream
    final norm, embedding tied              c / s       logits read the embedding, which is s times as large;
    final norm, readout of its own          c           c is our multiplier of the logits over theirs
    W_q of attention layers                 m^p         p is our power of m on attention's logits: -1/2 in muP
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isclose
from typing import Any

import torch
from torch import Tensor

from delta_trn.models.config import DeltaConfig
from delta_trn.models.mup import TABLES, Role

State = dict[str, Tensor]
CONVOLUTIONS = ("q_conv1d", "k_conv1d", "v_conv1d")
# their names of settings, and ours
SHARED = {
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_hidden_layers",
    "num_v_heads": "num_v_heads",
    "head_dim": "head_dim_k",
    "expand_v": "expand_v",
    "conv_size": "conv_size",
    "intermediate_size": "intermediate_size",
    "allow_neg_eigval": "allow_neg_eigval",
    "norm_eps": "rms_norm_eps",
    "vocab_size": "vocab_size",
    "use_cache": "use_cache",
}
TOKENS = {name: name for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
FLA = {
    **SHARED,
    **TOKENS,
    "num_heads": "num_heads",
    "tie_word_embeddings": "tie_word_embeddings",
    "initializer_range": "initializer_range",
    "max_position_embeddings": "max_position_embeddings",
}
AUTHORS = {**SHARED, **TOKENS, "num_attention_heads": "num_heads", "block_size": "max_position_embeddings"}
# theirs alone, without effect on what a model computes: kept, so that the way back restores them
FLA_KEPT = (
    *("attn_mode", "hidden_ratio", "fuse_norm", "fuse_swiglu", "fuse_cross_entropy"),
    *("fuse_linear_cross_entropy", "use_l2warp"),
)
# the values that a config.json without them stands for
_LAYER_DEFAULTS = {
    "expand_v": 2.0,
    "use_gate": True,
    "use_short_conv": True,
    "allow_neg_eigval": False,
    "conv_size": 4,
    "num_v_heads": None,
    "hidden_ratio": 4,
    "intermediate_size": None,
    "hidden_act": "swish",
    "norm_eps": 1e-6,
    "attn": None,
    "initializer_range": 0.02,
}
_FLA_DEFAULTS = {
    **_LAYER_DEFAULTS,
    "hidden_size": 2048,
    "head_dim": 256,
    "num_heads": 6,
    "num_hidden_layers": 21,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attnres_block_size": None,
}
_AUTHORS_DEFAULTS = {
    **_LAYER_DEFAULTS,
    "hidden_size": 768,
    "head_dim": 96,
    "num_attention_heads": 6,
    "num_hidden_layers": 12,
    "vocab_size": 50304,
    "mup": False,
    "hidden_size_base": 768,
    "hidden_init_std_factor": 0.5,
    "linear_attn_layers": None,
    "nanogpt_next_model_type": "gdn",
}


@dataclass(frozen=True)
class Format:
    """How another code stores a Gated DeltaNet language model.

    names           pairs of (their, our) beginnings of parameter names, outside of layers
    to_settings     config.json to the arguments of DeltaConfig; raises ValueError for what ours cannot be
    from_settings   the reverse, but for the shared settings
    """

    model_type: str
    architecture: str
    names: tuple[tuple[str, str], ...]
    defaults: Mapping[str, Any]
    shared: Mapping[str, str]
    to_settings: Callable[[dict[str, Any]], dict[str, Any]]
    from_settings: Callable[[DeltaConfig], dict[str, Any]]

    def config(self, theirs: Mapping[str, Any]) -> DeltaConfig:
        """Returns our configuration for their config.json. Raises ValueError that names what has no equal."""
        given = {**self.defaults, **theirs}
        _refuse_layers(given)
        settings = {ours: given[name] for name, ours in self.shared.items() if name in given}
        if settings["intermediate_size"] is None:
            inner = int(given["hidden_size"] * (given["hidden_ratio"] or 4) * 2 / 3)
            settings["intermediate_size"] = -(-inner // 256) * 256
        if not given["use_short_conv"]:
            settings["conv_size"] = 1
        settings = {name: value for name, value in settings.items() if value is not None}
        return DeltaConfig(init="authors", readout="none", **settings, **self.to_settings(given))

    def settings(self, config: DeltaConfig) -> dict[str, Any]:
        """Returns their config.json for our configuration. Raises ValueError that names what has no equal."""
        _refuse_settings(config)
        theirs = {name: getattr(config, ours) for name, ours in self.shared.items()}
        theirs["norm_eps"] = config.rms_norm_eps * _shrink(config) ** 2
        theirs |= {"use_gate": True, "use_short_conv": True, "hidden_act": "swish"}
        kind = {"model_type": self.model_type, "architectures": [self.architecture]}
        return {**kind, **theirs, **self.from_settings(config)}

    def weights(self, state: State, theirs: Mapping[str, Any], config: DeltaConfig) -> State:
        """Returns our weights, made of theirs."""
        given = {**self.defaults, **theirs}
        ours = {_swap(name, self.names): tensor for name, tensor in state.items()}
        for i in set(range(config.num_hidden_layers)) - set(config.attention_layers):
            names = [f"model.blocks.{i}.mixer.{name}.weight" for name in CONVOLUTIONS]
            parts = [ours.pop(name).squeeze(1) for name in names if name in ours]
            if not given["use_short_conv"]:  # SiLU of a convolution with one tap, which is 1
                one = next(iter(state.values()))
                parts = [one.new_ones(rows, 1) for rows in _channels(config)]
            if len(parts) == len(names):
                ours[f"model.blocks.{i}.mixer.conv.weight"] = torch.cat(parts)
        return _tie({name: _scale(x, _undone(name, given)) for name, x in ours.items()}, config)

    def state(self, ours: State, theirs: Mapping[str, Any], config: DeltaConfig) -> State:
        """Returns their weights, made of ours."""
        given = {**self.defaults, **theirs}
        back = tuple((ours, theirs) for theirs, ours in self.names)
        state = {}
        for name, tensor in _tie(ours, config).items():
            tensor = _scale(tensor, _factor(name, given, config))
            if name.endswith("mixer.conv.weight"):
                for part, convolution in zip(tensor.split(_channels(config)), CONVOLUTIONS, strict=True):
                    state[_swap(name.replace("conv.", f"{convolution}."), back)] = part[:, None].clone()
            else:
                state[_swap(name, back)] = tensor
        if self.model_type == "nanogpt-pro":  # their tied embedding is what was loaded as lm_head
            state.setdefault("lm_head.weight", state["transformer.wte.weight"].clone())
        return state


def _channels(config: DeltaConfig) -> tuple[int, int, int]:
    """Returns how many channels q, k and v have."""
    keys = config.num_heads * config.head_dim_k
    return keys, keys, config.num_v_heads * config.head_dim_v


def _swap(name: str, pairs: tuple[tuple[str, str], ...]) -> str:
    """Returns a parameter's name with each part that stands on the left of `pairs` replaced once."""
    for one, other in pairs:
        if name.startswith(one) or (one.startswith(".") and one in name):
            name = name.replace(one, other, 1)
    return name


def _scale(x: Tensor, factor: float) -> Tensor:
    """Returns factor x in x's dtype; x itself, to the bit, if the factor is 1 but for its own rounding."""
    return x if isclose(factor, 1) else (x.double() * factor).to(x.dtype)


def _tie(state: State, config: DeltaConfig) -> State:
    """Returns the weights with one matrix for embedding and readout where they are tied."""
    if not config.tie_word_embeddings:
        return state
    state = dict(state)
    head = state.pop("lm_head.weight", None)
    if head is not None and not torch.equal(state.setdefault("model.embed.weight", head), head):
        raise ValueError(
            "tie_word_embeddings=True, but lm_head and the embedding differ; which one counts? Set "
            "tie_word_embeddings to false in config.json, or delete one of them from the weights"
        )
    return state


def _refuse_layers(given: Mapping[str, Any]) -> None:
    """Raises ValueError that names every setting of theirs that our layers cannot be."""
    wrong = []
    if not given["use_gate"]:
        wrong.append("use_gate=False: our output norm always has a gate")
    if given["hidden_act"] not in ("swish", "silu"):
        wrong.append(f"hidden_act={given['hidden_act']!r}: our MLP is SwiGLU, hidden_act='swish'")
    if given.get("attnres_block_size") is not None:
        wrong.append(f"attnres_block_size={given['attnres_block_size']}: our residual over depth is a sum")
    if wrong:
        raise ValueError(f"{'; '.join(wrong)}. Train on with the code that made the weights")


def _fla_to_settings(given: dict[str, Any]) -> dict[str, Any]:
    settings = {
        "parametrization": "sp",
        "base_width": given["hidden_size"],
        "fla": {name: given[name] for name in FLA_KEPT if name in given},
    }
    specs = [given["attn"]] if isinstance(given["attn"], dict) else given["attn"] or []
    V, layers, thetas = int(given["head_dim"] * given["expand_v"]), [], set()
    for spec in specs:
        size = given["hidden_size"] // spec["num_heads"]
        expected = {
            "num_heads": (spec["num_heads"], given["num_heads"]),
            "num_kv_heads": (spec.get("num_kv_heads") or spec["num_heads"], spec["num_heads"]),
            "qkv_bias": (bool(spec.get("qkv_bias")), False),
            "window_size": (spec.get("window_size"), None),
            "head size hidden_size / num_heads": (size, V),
        }
        if wrong := [f"{name}={a}, not {b}" for name, (a, b) in expected.items() if a != b]:
            raise ValueError(
                f"attn has {', '.join(wrong)}: our attention layers have as many heads as the others, of "
                "the size of a value, without bias and window. Train on with the code that made the weights"
            )
        layers += spec["layers"]
        thetas.add(float(spec.get("rope_theta") or 10_000.0))
    if len(thetas) > 1:
        raise ValueError(f"attn has rope_theta {sorted(thetas)}; our attention layers have one for all")
    if layers:
        settings |= {"attention_layers": tuple(sorted(layers)), "rope_theta": thetas.pop()}
    return settings


def _fla_from_settings(config: DeltaConfig) -> dict[str, Any]:
    settings = {"attnres_block_size": None, "attn": None, **getattr(config, "fla", {})}
    if config.attention_layers:
        heads, size = config.num_heads, config.head_dim_v
        if heads * size != config.hidden_size:
            raise ValueError(
                f"attention layers with {heads} heads of size {size} = expand_v head_dim_k; there it is "
                f"hidden_size / num_heads = {config.hidden_size / heads:g}"
            )
        settings["attn"] = {
            "layers": list(config.attention_layers), "num_heads": heads, "num_kv_heads": heads,
            "qkv_bias": False, "window_size": None, "rope_theta": config.rope_theta,
        }  # fmt: skip
    return settings


def _authors_to_settings(given: dict[str, Any]) -> dict[str, Any]:
    if given["linear_attn_layers"]:
        raise ValueError(
            f"linear_attn_layers={given['linear_attn_layers']} are attention layers, with heads of another "
            "size than ours; train on with the code that made the weights"
        )
    if not _authors_scale(given):
        deviation = given["initializer_range"]
        return {"parametrization": "sp", "base_width": given["hidden_size"], "initializer_range": deviation}
    base = given["hidden_size_base"]
    deviation = given["hidden_init_std_factor"] / base**0.5
    return {"parametrization": "mup_authors", "base_width": base, "initializer_range": deviation}


def _authors_from_settings(config: DeltaConfig) -> dict[str, Any]:
    if config.attention_layers:
        raise ValueError(
            f"attention_layers={config.attention_layers}: that code has heads of another size there; "
            "keep this model in our format"
        )
    if not config.tie_word_embeddings:
        raise ValueError("tie_word_embeddings=False: that code always ties; keep this model in our format")
    theirs = {"mup": False, "initializer_range": config.initializer_range}
    if TABLES[config.parametrization][Role.EMBEDDING].multiplier != 0:
        factor = config.initializer_range * config.base_width**0.5
        theirs = {"mup": True, "hidden_size_base": config.base_width, "hidden_init_std_factor": factor}
    return {**theirs, "nanogpt_next_model_type": "gdn"}


def _authors_scale(given: Mapping[str, Any]) -> bool:
    """Returns whether their model scales with width; gdn-sp.py ignores `mup`."""
    return bool(given.get("mup")) and given.get("nanogpt_next_model_type") != "gdn-sp"


def _authors_ratio(given: Mapping[str, Any]) -> float:
    """Returns base width / width, by which their model multiplies logits, or 1."""
    return given["hidden_size_base"] / given["hidden_size"] if _authors_scale(given) else 1.0


def _refuse_settings(config: DeltaConfig) -> None:
    """Raises ValueError that names every setting of ours that neither code has."""
    only: dict[str, Any] = {"residual": "additive", "norm": "rms", "mlp": "swiglu", "positions": "rope"}
    only |= {"value_skip": 0.0, "base_layers": None, "output_norm_eps": None}
    if config.attention_layers:
        only |= dict.fromkeys(("q_activation", "k_activation", "v_activation"), "identity")
        only |= dict.fromkeys(("use_qk_rmsnorm", "use_k_shift", "use_v_shift"), False)
        only |= {"using_groupnorm": False, "use_output_gate": False, "rope_ratio": 1.0}
    if wrong := [
        f"{name}={getattr(config, name)!r}" for name, value in only.items() if getattr(config, name) != value
    ]:
        raise ValueError(f"{', '.join(wrong)}: that code has no such model; keep this one in our format")


def _shrink(config: DeltaConfig) -> float:
    """Returns s, by which the residual stream is multiplied on the way there."""
    return 1 / config.head_dim_k if config.readout == "sqrt_k" else 1.0


def _factor(name: str, theirs: Mapping[str, Any], config: DeltaConfig) -> float:
    """Returns by how much our parameter is multiplied on the way there."""
    s, m, table = _shrink(config), config.width_ratio, TABLES[config.parametrization]
    tied = config.tie_word_embeddings
    if name == "model.norm.weight":
        role = Role.EMBEDDING if tied else Role.READOUT
        return m ** table[role].multiplier / _authors_ratio(theirs) / (s if tied else 1)
    if name.endswith((".mixer.o_proj.weight", ".mlp.down_proj.weight")) or name == "model.embed.weight":
        return s
    if name.endswith("q_proj.weight") and int(name.split(".")[2]) in config.attention_layers:
        return m**table.attention if config.scale_by == "head_dim" else 1.0
    return 1.0


def _undone(name: str, theirs: Mapping[str, Any]) -> float:
    """Returns by how much our parameter is larger than theirs: gdn-mup.py multiplies W_o by base / width."""
    scaled = name.endswith("mixer.o_proj.weight") and theirs.get("nanogpt_next_model_type") == "gdn-mup"
    return _authors_ratio(theirs) if scaled else 1.0


_LAYERS = ((".attn_norm.", ".mixer_norm."), (".attn.", ".mixer."))
FORMATS = {
    "fla": Format(
        model_type="gated_deltanet",
        architecture="GatedDeltaNetForCausalLM",
        names=(
            ("model.embeddings.", "model.embed."),
            ("model.layers.", "model.blocks."),
            ("model.norm.", "model.norm."),
            *_LAYERS,
        ),
        defaults=_FLA_DEFAULTS,
        shared=FLA,
        to_settings=_fla_to_settings,
        from_settings=_fla_from_settings,
    ),
    "authors": Format(
        model_type="nanogpt-pro",
        architecture="GPT",
        names=(
            ("transformer.wte.", "model.embed."),
            ("transformer.h.", "model.blocks."),
            ("ln_f.", "model.norm."),
            *_LAYERS,
        ),
        defaults=_AUTHORS_DEFAULTS,
        shared=AUTHORS,
        to_settings=_authors_to_settings,
        from_settings=_authors_from_settings,
    ),
}
