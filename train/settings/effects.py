"""Refuses a setting that would waste a run: given by the user, and without effect beside another
one.

NEEDS has the pairs that waste a run, and no other: an optimizer's setting under another optimizer,
how to prepare text that is prepared, parts of attention or of Deep Delta Learning in a model
without them. Only keys that a user gives are checked: a recipe may set a key that another key makes
idle.
"""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from delta_trn.train.settings.errors import ConfigError
from delta_trn.train.settings.schema import RunConfig, flatten


def is_prepared(source: str) -> bool:
    """Returns whether a source is a folder of token shards, which needs no preparation."""
    path = Path(source).expanduser()
    return (path / "meta.json").is_file() or any(path.glob("*_train_*.bin*"))


# what the keys need, as a message has it; whether that holds; the keys, after the section that they
# share
NEEDS: tuple[tuple[str, Callable[[RunConfig], bool], str, str], ...] = (
    ("epochs=none", lambda c: c.epochs is None, "", "steps"),
    (
        "optimizer.name=adamw or muon",
        lambda c: c.optimizer.name != "sgd",
        "optimizer.",
        "beta1 beta2 eps",
    ),
    ("optimizer.name=sgd or muon", lambda c: c.optimizer.name != "adamw", "optimizer.", "momentum"),
    ("optimizer.name=sgd", lambda c: c.optimizer.name == "sgd", "optimizer.", "memory"),
    (
        "model.tie_word_embeddings=false",
        lambda c: not c.model.tie_word_embeddings,
        "optimizer.",
        "readout_lr",
    ),
    (
        "a data.source that is text, not prepared shards",
        lambda c: not is_prepared(c.data.source),
        "data.",
        "tokenizer vocab_size subset split revision text_field validation val_fraction "
        "max_documents max_tokens seed",
    ),
    (
        "model.attention_layers other than none",
        lambda c: bool(c.model.attention_layers),
        "model.",
        "use_qk_rmsnorm q_activation k_activation v_activation use_k_shift use_v_shift "
        "use_output_gate using_groupnorm rope_ratio rope_theta",
    ),
    (
        "model.residual other than additive",
        lambda c: c.model.residual != "additive",
        "model.ddl_",
        "k_eps beta_init beta_single_linear beta_hidden_size",
    ),
    (
        "model.residual=ddl or write_only",
        lambda c: c.model.residual in ("ddl", "write_only"),
        "model.ddl_",
        "value_channels compressor v_constant v_constant_value v_sigmoid v_input v_sigmoid_scale "
        "state_shortconv_kernel_size state_read_init",
    ),
)


def require_effect(config: RunConfig, keys: Collection[str]) -> None:
    """ConfigError for the first of the keys that a user gave and
    that NEEDS says changes nothing.
    """
    for text, holds, section, names in NEEDS:
        idle = [
            key
            for key in keys
            if key.removeprefix(section) in names.split() and key.startswith(section)
        ]
        if idle and not holds(config):
            value = dict(flatten(config))[idle[0]]
            raise ConfigError(
                f"{idle[0]}={value} has no effect here: it needs {text}; leave {idle[0]} out, or "
                "change that"
            )
    low, peak = config.schedule.min_lr, config.optimizer.lr
    if low > peak and not {"schedule.min_lr", "optimizer.lr"}.isdisjoint(keys):
        raise ConfigError(
            f"schedule.min_lr={low:g} is above optimizer.lr={peak:g}, so that the rate would rise "
            f"to it; give schedule.min_lr={peak:g} or less"
        )


def require_effect_somewhere(configs: Sequence[RunConfig], keys: Collection[str]) -> None:
    """ConfigError for a key without effect in all of several runs:
    one may need what another ignores.
    """
    for key in keys:
        refusals = []
        for config in configs:
            try:
                require_effect(config, (key,))
            except ConfigError as error:
                refusals.append(error)
        if len(refusals) == len(configs):
            raise refusals[0]
