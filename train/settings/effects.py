"""Refuses a setting that would waste a run: given by the user, and without effect beside another one.

NEEDS has the pairs that waste a run, and no other: an optimizer's setting under another optimizer, how to
prepare text that is prepared, parts of attention or of Deep Delta Learning in a model without them. Only keys
that a user gives are checked: a recipe may set a key that another key makes idle.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from delta_trn.train.settings.errors import ConfigError
from delta_trn.train.settings.schema import RunConfig


@dataclass(frozen=True)
class Need:
    """A condition under which a key has an effect: `holds` for the value of another key.

    text    the condition as a message has it, such as `optimizer.name=sgd`
    """

    key: str
    text: str
    holds: Callable[[Any], bool]


def is_prepared(source: str) -> bool:
    """Returns whether a source is a folder of token shards, which needs no preparation."""
    path = Path(source).expanduser()
    return (path / "meta.json").is_file() or any(path.glob("*_train_*.bin*"))


def _needs(need: Need, section: str, names: str) -> dict[str, Need]:
    return {f"{section}{name}": need for name in names.split()}


_NAME = "optimizer.name"
_ADAMW = Need(_NAME, "optimizer.name=adamw or muon", lambda name: name != "sgd")
_MOMENTUM = Need(_NAME, "optimizer.name=sgd or muon", lambda name: name != "adamw")
_SGD = Need(_NAME, "optimizer.name=sgd", lambda name: name == "sgd")
_EPOCHS = Need("epochs", "epochs=none", lambda epochs: epochs is None)
_TEXT = Need("data.source", "a data.source that is text, not prepared shards", lambda s: not is_prepared(s))
_ATTENTION = Need("model.attention_layers", "model.attention_layers other than none", bool)
_WRITES = Need("model.residual", "model.residual other than additive", lambda kind: kind != "additive")
_STATE = Need(
    "model.residual", "model.residual=ddl or write_only", lambda kind: kind in ("ddl", "write_only")
)

NEEDS: Mapping[str, Need] = {
    "steps": _EPOCHS,
    **_needs(_ADAMW, "optimizer.", "beta1 beta2 eps"),
    "optimizer.momentum": _MOMENTUM,
    "optimizer.memory": _SGD,
    **_needs(_TEXT, "data.", "tokenizer vocab_size subset split revision text_field validation val_fraction"),
    **_needs(_TEXT, "data.", "max_documents max_tokens seed"),
    **_needs(_ATTENTION, "model.", "use_qk_rmsnorm q_activation k_activation v_activation use_k_shift"),
    **_needs(_ATTENTION, "model.", "use_v_shift use_output_gate using_groupnorm rope_ratio rope_theta"),
    **_needs(_WRITES, "model.ddl_", "k_eps beta_init beta_single_linear beta_hidden_size"),
    **_needs(_STATE, "model.ddl_", "value_channels compressor v_constant v_constant_value v_sigmoid v_input"),
    **_needs(_STATE, "model.ddl_", "v_sigmoid_scale state_shortconv_kernel_size state_read_init"),
}


def require_effect(config: RunConfig, keys: Collection[str]) -> None:
    """ConfigError for the first of the keys that a user gave and that NEEDS says changes nothing."""
    for key in keys:
        need = NEEDS.get(key)
        if need is not None and not need.holds(_value(config, need.key)):
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


def _value(config: RunConfig, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "none"
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)
