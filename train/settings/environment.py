"""Deep Delta Learning LM's settings by environment variables, as its users know them.

They are the defaults of one recipe, `ddl_lm_tinystories`; `key=value` on the command line comes after them,
and config.json has the result. No other recipe reads them.

    variable                key
    TOKENIZER_NAME          data.tokenizer
    DATASET, DATA_SUBSET    data.source, data.subset
    BLOCK_SIZE              batch.length and model.max_position_embeddings
    BATCH_SIZE              batch.sequences
    LR                      optimizer.lr and schedule.min_lr: the rate is constant
    MAX_EPOCHS              epochs, which the prepared text turns into steps
    MAX_STEPS               steps
    MAX_TRAINING_HOURS      max_minutes, times 60
    CHECKPOINT_PATH         out
    WANDB_API_KEY           log.wandb=true if it is not empty; wandb itself reads the key

IS_RESUME=true is refused: to resume is a command here. Not read: NUM_WORKERS, since batches are cut from a
file in memory; DATA_LENGTH, since stories are packed whole; AWS_*, since a run's folder can be copied by
whatever copies files.
"""

from collections.abc import Mapping

from delta_trn.train.settings.errors import ConfigError
from delta_trn.train.settings.overrides import apply
from delta_trn.train.settings.schema import RunConfig

KEYS: Mapping[str, tuple[str, ...]] = {
    "TOKENIZER_NAME": ("data.tokenizer",),
    "DATASET": ("data.source",),
    "DATA_SUBSET": ("data.subset",),
    "BLOCK_SIZE": ("model.max_position_embeddings", "batch.length"),
    "BATCH_SIZE": ("batch.sequences",),
    "LR": ("optimizer.lr", "schedule.min_lr"),
    "MAX_EPOCHS": ("epochs",),
    "MAX_STEPS": ("steps",),
    "MAX_TRAINING_HOURS": ("max_minutes",),
    "CHECKPOINT_PATH": ("out",),
}


def with_environment(config: RunConfig, environment: Mapping[str, str]) -> RunConfig:
    """The configuration with what the variables say; empty ones say nothing. ConfigError names wrong ones."""
    if environment.get("IS_RESUME", "").strip().lower() in ("1", "true", "yes", "on"):
        raise ConfigError(
            "IS_RESUME begins no new run: continue one with `python -m train resume RUN_DIR`, or unset it"
        )
    changes: dict[str, str] = {}
    for variable, keys in KEYS.items():
        if text := environment.get(variable, "").strip():
            changes |= dict.fromkeys(keys, _in_minutes(text) if variable.endswith("_HOURS") else text)
    if environment.get("WANDB_API_KEY", "").strip():
        changes["log.wandb"] = "true"
    try:
        return apply(config, changes)
    except ConfigError as error:
        given = ", ".join(f"{name}={environment[name]}" for name in KEYS if environment.get(name))
        raise ConfigError(f"{error}, from the environment variables {given}") from None


def _in_minutes(hours: str) -> str:
    try:
        return repr(60 * float(hours))
    except ValueError:
        return hours  # refused where every value is
