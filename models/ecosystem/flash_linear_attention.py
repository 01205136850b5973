"""Turns flash-linear-attention's GatedDeltaNet and KDA language models into ours, and ours into
those.

They are GatedDeltaNetForCausalLM of version 0.5.2 and KDAForCausalLM of 0.6.0. Both sides have the
same layers under nearly the same names. Where one side has a setting that the other lacks, it is
moved into the weights if that computes the same numbers. Otherwise it is refused by name.

Our readout is S^T q sqrt(K), theirs is S^T q / sqrt(K), and one epsilon serves all norms of a
model. On the way there, the whole residual stream is therefore made s = 1/K times as large, and
epsilon s^2 times. Every norm then returns what it returned before.

    ours                                    times       because
    embedding; W_o, W_down of all layers    s           they write the stream
    final norm, embedding tied              c / s       logits read the embedding, which is s times
                                                        as large;
    final norm, readout of its own          c           c is our multiplier of the logits
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, isclose
from typing import Any

import torch
from torch import Tensor

from delta_trn.models.config import DeltaConfig

State = dict[str, Tensor]
CONVOLUTIONS = ("q_conv1d", "k_conv1d", "v_conv1d")
# settings under the same name on both sides, and those that have another one there
SAME = (
    *("hidden_size", "num_hidden_layers", "num_heads", "num_v_heads", "expand_v", "conv_size"),
    *("intermediate_size", "allow_neg_eigval", "vocab_size", "use_cache", "tie_word_embeddings"),
    *(
        "initializer_range",
        "max_position_embeddings",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    ),
)
SETTINGS = {**{name: name for name in SAME}, "head_dim": "head_dim_k", "norm_eps": "rms_norm_eps"}
# theirs alone, without effect on what a model computes: kept, so that the way back restores them
KEPT = (
    *("attn_mode", "hidden_ratio", "fuse_norm", "fuse_swiglu", "fuse_cross_entropy"),
    *("fuse_linear_cross_entropy", "use_l2warp", "safe_gate"),
)
# the values that a config.json without them stands for
DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 2048,
    "num_hidden_layers": 21,
    "num_heads": 6,
    "num_v_heads": None,
    "head_dim": 256,
    "expand_v": 2.0,
    "use_gate": True,
    "use_short_conv": True,
    "conv_size": 4,
    "allow_neg_eigval": False,
    "hidden_ratio": 4,
    "intermediate_size": None,
    "hidden_act": "swish",
    "norm_eps": 1e-6,
    "attn": None,
    "initializer_range": 0.02,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attnres_block_size": None,
}


@dataclass(frozen=True)
class Family:
    """Their models with one of our mixers: the settings, and defaults,
    that the other family has not.
    """

    mixer: str
    architecture: str
    defaults: Mapping[str, Any]
    settings: Mapping[str, str]
    constants: Mapping[str, Any]


# by the name that their config.json gives the family
FAMILIES: Mapping[str, Family] = {
    "gated_deltanet": Family(
        "gated_deltanet", "GatedDeltaNetForCausalLM", {}, {}, {"use_gate": True}
    ),
    "kda": Family(
        "kimi_delta_attention",
        "KDAForCausalLM",
        {
            "num_hidden_layers": 24,
            "num_heads": 16,
            "head_dim": 128,
            "expand_v": 1.0,
            "safe_gate": False,
        },
        {"lower_bound": "decay_bound"},
        {},
    ),
}
SAFE = -5  # the smallest bound at which their kernels take the faster products of safe_gate
# beginnings, or parts, of their names of parameters, and ours
NAMES = (
    ("model.embeddings.", "model.embed."),
    ("model.layers.", "model.blocks."),
    (".attn_norm.", ".mixer_norm."),
    (".attn.", ".mixer."),
)
BACK = tuple((ours, theirs) for theirs, ours in NAMES)


def to_config(theirs: Mapping[str, Any]) -> DeltaConfig:
    """Returns our configuration for their config.json.
    Raises ValueError that names what has no equal.
    """
    family = FAMILIES[theirs["model_type"]]
    given = {**DEFAULTS, **family.defaults, **theirs}
    wrong = []
    if given.get("safe_gate") and given.get("lower_bound") is None:
        wrong.append("safe_gate=True without a lower_bound: it promises that decays have one")
    if (bound := given.get("lower_bound")) is not None and not -inf < bound < 0:
        wrong.append(f"lower_bound={bound}: a decay's logarithm has a bound below 0")
    if not given["use_gate"]:
        wrong.append("use_gate=False: our output norm always has a gate")
    if given["hidden_act"] not in ("swish", "silu"):
        wrong.append(f"hidden_act={given['hidden_act']!r}: our MLP is SwiGLU, hidden_act='swish'")
    if given["attnres_block_size"] is not None:
        wrong.append(
            f"attnres_block_size={given['attnres_block_size']}: our residual over depth is a sum"
        )
    if given["attn"]:
        wrong.append(f"attn={given['attn']}: attention layers have another size of heads here")
    if wrong:
        raise ValueError(f"{'; '.join(wrong)}. Train on with the code that made the weights")
    names = {**SETTINGS, **family.settings}
    settings = {ours: given[name] for name, ours in names.items() if given.get(name) is not None}
    if given["intermediate_size"] is None:
        inner = int(given["hidden_size"] * (given["hidden_ratio"] or 4) * 2 / 3)
        settings["intermediate_size"] = -(-inner // 256) * 256
    if not given["use_short_conv"]:
        settings["conv_size"] = 1
    return DeltaConfig(
        parametrization="sp",
        base_width=given["hidden_size"],
        readout="none",
        mixer=family.mixer,
        fla={name: given[name] for name in KEPT if name in given},
        **settings,
    )


def from_config(config: DeltaConfig) -> dict[str, Any]:
    """Returns their config.json for our configuration.
    Raises ValueError that names what has no equal.
    """
    only: dict[str, Any] = {
        "residual": "additive",
        "norm": "rms",
        "mlp": "swiglu",
        "positions": "rope",
    }
    only |= {"base_layers": None, "attention_layers": []}
    wrong = [
        f"{name}={x!r}" for name, value in only.items() if (x := getattr(config, name)) != value
    ]
    if wrong:
        raise ValueError(
            f"{', '.join(wrong)}: that code has no such model; keep this one in our format"
        )
    model_type, family = next((key, x) for key, x in FAMILIES.items() if x.mixer == config.mixer)
    kept = getattr(config, "fla", {})
    written = {
        "model_type": model_type,
        "architectures": [family.architecture],
        **{name: getattr(config, ours) for name, ours in {**SETTINGS, **family.settings}.items()},
        "norm_eps": config.rms_norm_eps * _shrink(config) ** 2,
        **{"use_short_conv": True, "hidden_act": "swish", "attnres_block_size": None, "attn": None},
        **{**family.constants, **kept},
    }
    # safe_gate changes no number, and is refused there without such a bound
    if "lower_bound" in written:
        bound = written["lower_bound"]
        written["safe_gate"] = bound is not None and bound >= SAFE and kept.get("safe_gate", True)
    return written


def to_state(state: State, theirs: Mapping[str, Any], config: DeltaConfig) -> State:
    """Returns our weights, made of theirs."""
    ours = {_rename(name, NAMES): tensor for name, tensor in state.items()}
    for i in range(config.num_hidden_layers):
        names = [f"model.blocks.{i}.mixer.{name}.weight" for name in CONVOLUTIONS]
        parts = [ours.pop(name).squeeze(1) for name in names if name in ours]
        if not theirs.get("use_short_conv", True):  # SiLU of a convolution with one tap, which is 1
            one = next(iter(state.values()))
            parts = [one.new_ones(rows, 1) for rows in _channels(config)]
        if len(parts) == len(names):
            ours[f"model.blocks.{i}.mixer.conv.weight"] = torch.cat(parts)
    return _tie(ours, config)


def from_state(ours: State, config: DeltaConfig) -> State:
    """Returns their weights, made of ours."""
    state = {}
    for name, tensor in _tie(ours, config).items():
        tensor = _scale(tensor, _factor(name, config))
        if name.endswith("mixer.conv.weight"):
            for part, convolution in zip(
                tensor.split(_channels(config)), CONVOLUTIONS, strict=True
            ):
                state[_rename(name.replace("conv.", f"{convolution}."), BACK)] = part[
                    :, None
                ].clone()
        else:
            state[_rename(name, BACK)] = tensor
    return state


def _channels(config: DeltaConfig) -> tuple[int, int, int]:
    """Returns how many channels q, k and v have."""
    keys = config.num_heads * config.head_dim_k
    return keys, keys, config.num_v_heads * config.head_dim_v


def _rename(name: str, pairs: tuple[tuple[str, str], ...]) -> str:
    """Returns a parameter's name with each part that stands on the left
    of `pairs` replaced once.
    """
    for one, other in pairs:
        if name.startswith(one) or (one.startswith(".") and one in name):
            name = name.replace(one, other, 1)
    return name


def _scale(x: Tensor, factor: float) -> Tensor:
    """Returns factor x in x's dtype; x itself, to the bit,
    if the factor is 1 but for its own rounding.
    """
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


def _shrink(config: DeltaConfig) -> float:
    """Returns s, by which the residual stream is multiplied on the way there."""
    return 1 / config.head_dim_k if config.readout == "sqrt_k" else 1.0


def _factor(name: str, config: DeltaConfig) -> float:
    """Returns by how much our parameter is multiplied on the way there."""
    s = _shrink(config)
    if name == "model.norm.weight":
        return config.logit_scale / (s if config.tie_word_embeddings else 1)
    if (
        name.endswith((".mixer.o_proj.weight", ".mlp.down_proj.weight"))
        or name == "model.embed.weight"
    ):
        return s
    return 1.0
