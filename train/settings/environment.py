"""Deep Delta Learning LM's settings by environment variables, as its users know them.

One recipe reads them, `ddl_lm_tinystories`, as its defaults; `run` prints those that are set.
`key=value` on the command line overrides them. WANDB_API_KEY sets log.wandb; wandb itself reads the
key.

IS_RESUME=true is refused, because `resume` is a command here. These are not read: NUM_WORKERS
(batches come from a file in memory), DATA_LENGTH (stories are packed whole), and AWS_* (any tool
can copy a run's folder).
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
    "LR": ("optimizer.lr", "schedule.min_lr"),  # the rate is constant
    "MAX_EPOCHS": ("epochs",),
    "MAX_STEPS": ("steps",),
    "MAX_TRAINING_HOURS": ("max_minutes",),
    "CHECKPOINT_PATH": ("out",),
}


def with_environment(config: RunConfig, environment: Mapping[str, str]) -> RunConfig:
    """Returns the configuration with the values of all variables set.
    ConfigError names wrong ones.
    """
    if environment.get("IS_RESUME", "").strip().lower() in ("1", "true", "yes", "on"):
        raise ConfigError(
            "IS_RESUME begins no new run: continue one with `delta-trn resume RUN_DIR`, or unset it"
        )
    changes: dict[str, str] = {}
    for variable, keys in KEYS.items():
        if text := environment.get(variable, "").strip():
            changes |= dict.fromkeys(
                keys, _in_minutes(text) if variable.endswith("_HOURS") else text
            )
    if environment.get("WANDB_API_KEY", "").strip():
        changes["log.wandb"] = "true"
    try:
        return apply(config, changes)
    except ConfigError as error:
        names = ", ".join(read_variables(environment))
        raise ConfigError(f"{error}, from the environment variables {names}") from None


def read_variables(environment: Mapping[str, str]) -> list[str]:
    """Returns NAME=value of every variable that is set, without the secret one's value."""
    names = [name for name in KEYS if environment.get(name, "").strip()]
    secret = ["WANDB_API_KEY"] if environment.get("WANDB_API_KEY", "").strip() else []
    return [f"{name}={environment[name].strip()}" for name in names] + secret


def _in_minutes(hours: str) -> str:
    try:
        return repr(60 * float(hours))
    except ValueError:
        return hours  # refused where every value is
