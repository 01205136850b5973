"""Which settings have an effect only beside others, and the refusal of a setting that has none.

A key that is not in NEEDS always has an effect. Only keys that a user gives are checked: a recipe may set a
key that another key makes idle. How many processes are started is no setting, so `distribution.mode` and
`distribution.timeout_minutes` are not in the table, although one process alone does without both.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from delta_trn.train.settings.errors import ConfigError
from delta_trn.train.settings.schema import NAMED_SOURCES, RunConfig


@dataclass(frozen=True)
class Need:
    """A condition under which a key has an effect.

    text    the condition as a message has it, such as `optimizer.name=sgd`
    key     the setting that decides
    holds   whether the condition holds in a configuration
    """

    text: str
    key: str
    holds: Callable[[RunConfig], bool]


def _value(config: RunConfig, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "none"
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def _is(key: str, *values: object) -> Need:
    """Returns the need that a key has one of some values."""
    text = " or ".join(map(_shown, values))
    return Need(f"{key}={text}", key, lambda config: _value(config, key) in values)


def _is_not(key: str, value: object) -> Need:
    return Need(f"{key} other than {_shown(value)}", key, lambda config: _value(config, key) != value)


def _above_0(key: str) -> Need:
    return Need(f"{key} above 0", key, lambda config: _value(config, key) > 0)


def is_prepared(source: str) -> bool:
    """Returns whether a source is a folder of token shards, which needs no preparation."""
    path = Path(source).expanduser()
    return (path / "meta.json").is_file() or any(path.glob("*_train_*.bin*"))


def _has_delta_net(config: RunConfig) -> bool:
    """Returns whether any layer is Gated DeltaNet."""
    return len(set(config.model.attention_layers)) < config.model.layers


_ADAMW, _SGD = _is("optimizer.name", "adamw", "muon"), _is("optimizer.name", "sgd")
_MOMENTUM = _is("optimizer.name", "sgd", "muon")
_TEXT = Need(
    "a data.source that is text, not prepared shards", "data.source", lambda c: not is_prepared(c.data.source)
)
_HUB = Need(
    "a Hugging Face dataset as data.source",
    "data.source",
    lambda c: c.data.source not in NAMED_SOURCES and not Path(c.data.source).expanduser().exists(),
)
_FIELDS = Need(
    "a data.source with fields, such as .jsonl",
    "data.source",
    lambda c: c.data.source not in NAMED_SOURCES and Path(c.data.source).suffix != ".txt",
)
_NO_HELD_OUT_TEXT = _is("data.validation", None)
_SAMPLES, _DRAWN = _above_0("sample.tokens"), _above_0("sample.temperature")
_DELTA_NET = Need("a layer that is not in model.attention_layers", "model.attention_layers", _has_delta_net)
_ATTENTION = _is_not("model.attention_layers", ())
_ROPE = _is("model.positions", "rope")
_WRITES = _is_not("model.residual", "additive")
_STATE = _is("model.residual", "ddl", "write_only")
_COMPRESSED = _is_not("model.ddl_compressor", "none")
_COMPUTED_V = _is("model.ddl_v_constant", False)

NEEDS: Mapping[str, tuple[Need, ...]] = {
    "steps": (_is("epochs", None),),
    **dict.fromkeys(("optimizer.beta1", "optimizer.beta2", "optimizer.eps"), (_ADAMW,)),
    "optimizer.independent_weight_decay": (_above_0("optimizer.weight_decay"),),
    "optimizer.clip_norm": (_is_not("optimizer.clip", None),),
    "optimizer.momentum": (_MOMENTUM,),
    "optimizer.memory": (_SGD,),
    **dict.fromkeys(
        (
            "data.tokenizer",
            "data.vocab_size",
            "data.validation",
            "data.shard_tokens",
            "data.max_documents",
            "data.max_tokens",
            "data.workers",
        ),
        (_TEXT,),
    ),
    **dict.fromkeys(("data.val_fraction", "data.seed"), (_TEXT, _NO_HELD_OUT_TEXT)),
    **dict.fromkeys(("data.subset", "data.split", "data.revision"), (_TEXT, _HUB)),
    "data.text_field": (_TEXT, _FIELDS),
    **dict.fromkeys(("sample.prompt", "sample.temperature"), (_SAMPLES,)),
    **dict.fromkeys(("sample.top_k", "sample.top_p"), (_SAMPLES, _DRAWN)),
    "log.wandb_project": (_is("log.wandb", True),),
    **dict.fromkeys(
        (
            "model.v_heads",
            "model.conv_size",
            "model.allow_neg_eigval",
            "model.forgetting",
            "model.readout",
            "model.output_norm_eps",
            "model.value_skip",
            "model.o_gradient_bound",
        ),
        (_DELTA_NET,),
    ),
    "model.init": (
        Need(
            "a Gated DeltaNet layer or model.tie_word_embeddings=true",
            "model.tie_word_embeddings",
            lambda c: _has_delta_net(c) or c.model.tie_word_embeddings,
        ),
    ),
    "model.intermediate_multiple": (_is("model.intermediate_size", None),),
    "model.max_position_embeddings": (_is("model.positions", "learned"),),
    **dict.fromkeys(
        (
            "model.use_qk_rmsnorm",
            "model.q_activation",
            "model.k_activation",
            "model.v_activation",
            "model.use_k_shift",
            "model.use_v_shift",
            "model.use_output_gate",
        ),
        (_ATTENTION,),
    ),
    "model.using_groupnorm": (_ATTENTION, _is("model.use_output_gate", False)),
    "model.rope_ratio": (_ATTENTION, _ROPE),
    "model.rope_theta": (_ATTENTION, _ROPE, _above_0("model.rope_ratio")),
    **dict.fromkeys(
        (
            "model.ddl_value_channels",
            "model.ddl_compressor",
            "model.input_embed_shortconv_kernel_size",
            "model.ddl_v_constant",
        ),
        (_STATE,),
    ),
    **dict.fromkeys(
        ("model.ddl_state_shortconv_kernel_size", "model.ddl_state_read_init"), (_STATE, _COMPRESSED)
    ),
    "model.ddl_state_dv_shortconv_causal": (_STATE, _is("model.ddl_compressor", "channel")),
    **dict.fromkeys(("model.ddl_k_eps", "model.ddl_beta_init", "model.ddl_beta_single_linear"), (_WRITES,)),
    "model.ddl_beta_hidden_size": (_WRITES, _is("model.ddl_beta_single_linear", False)),
    **dict.fromkeys(("model.ddl_v_sigmoid", "model.ddl_v_input"), (_STATE, _COMPUTED_V)),
    "model.ddl_v_sigmoid_scale": (_STATE, _COMPUTED_V, _is("model.ddl_v_sigmoid", True)),
    "model.ddl_v_constant_value": (_STATE, _is("model.ddl_v_constant", True)),
}


def require_effect(config: RunConfig, keys: Collection[str]) -> None:
    """ConfigError for the first of the keys that a user gave and that changes nothing in this run."""
    for key in keys:
        for need in NEEDS.get(key, ()):
            if not need.holds(config):
                value, state = _shown(_value(config, key)), _shown(_value(config, need.key))
                raise ConfigError(
                    f"{key}={value} has no effect with {need.key}={state}: it needs {need.text}; leave "
                    f"{key} out, or change {need.key}"
                )
    low, peak = config.schedule.min_lr, config.optimizer.lr
    if low > peak and not {"schedule.min_lr", "optimizer.lr"}.isdisjoint(keys):
        raise ConfigError(
            f"schedule.min_lr={low:g} is above optimizer.lr={peak:g}, so that the rate would rise to it; "
            f"give schedule.min_lr={peak:g} or less"
        )


def require_effect_somewhere(configs: Sequence[RunConfig], keys: Collection[str]) -> None:
    """ConfigError for a key without effect in all of several runs: one may need what another ignores."""
    for key in keys:
        refusals = []
        for config in configs:
            try:
                require_effect(config, (key,))
            except ConfigError as error:
                refusals.append(error)
        if len(refusals) == len(configs):
            raise refusals[0]
