"""Makes the model of a run, and chooses the device and the backend that compute it."""

import contextlib
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from delta_trn.backends import default_backend, machine
from delta_trn.backends.checks import BackendRefusal
from delta_trn.backends.dispatch import Call, choose
from delta_trn.models import DeltaConfig, DeltaForCausalLM
from delta_trn.models.parameters import initialize
from delta_trn.models.settings import CONFIG_NAMES
from delta_trn.train.parallel.sharding import Sharding
from delta_trn.train.settings.errors import ConfigError
from delta_trn.train.settings.schema import RunConfig

# Rows that `train.data` gives a tokenizer whose vocab_size is not set.
_KNOWN_VOCABULARIES = {"bytebpe": 4096, "gpt2": 50304, "bytes": 320}


def pick_device(name: str) -> torch.device:
    """Returns the device of that name, or the machine's preferred one for auto;
    ConfigError if absent.
    """
    try:
        return machine.pick(name)
    except (
        ValueError,
        RuntimeError,
        ImportError,
    ) as error:  # RuntimeError: PyTorch does not know the name
        raise ConfigError(f"device={name}: {str(error).splitlines()[0]}") from error


def vocabulary(config: RunConfig) -> int:
    """Returns the rows of the embedding as far as settings say, without looking at data.

    Raises ConfigError where only the tokenizer knows.
    """
    known = (
        config.model.vocab_size
        or config.data.vocab_size
        or _KNOWN_VOCABULARIES.get(config.data.tokenizer)
    )
    if known is None:
        raise ConfigError(
            f"only the tokenizer {config.data.tokenizer!r} knows its vocabulary; give "
            "model.vocab_size=N"
        )
    return known


def model_config(
    config: RunConfig,
    *,
    rows: int,
    bos: int | None = None,
    eos: int | None = None,
    pad: int | None = None,
) -> "DeltaConfig":
    """Returns the model's configuration for `rows` of vocabulary. ConfigError:
    sizes do not go together.
    """
    settings = config.model.model_dump(exclude={"vocab_size"})
    try:
        return DeltaConfig(
            **{CONFIG_NAMES[name]: value for name, value in settings.items()},
            vocab_size=rows,
            parametrization=config.parametrization,
            bos_token_id=bos,
            eos_token_id=eos,
            pad_token_id=pad,
        )
    except ValueError as error:
        raise ConfigError(f"model: {error}") from error


def make_model(
    configuration: "DeltaConfig", *, seed: int, device: torch.device
) -> "DeltaForCausalLM":
    """Returns the model with initial float32 weights, drawn on the CPU and so the same on every
    device.

    A model on the meta device has no weights: divide it first, and `materialize` it.
    """
    with (
        torch.random.fork_rng(devices=[]),
        device if device.type == "meta" else contextlib.nullcontext(),
    ):
        torch.manual_seed(seed)
        model = DeltaForCausalLM(configuration)
    cast(nn.Module, model).to(device=device, dtype=torch.float32)
    if configuration.tie_word_embeddings:
        # Moving to XLA makes a new parameter per name: the matrix would become two that train
        # separately.
        model.lm_head.weight = model.model.embed.weight
    return model


def checkpoint_blocks(model: nn.Module, device: torch.device) -> None:
    """Lets backward compute each block again, which saves memory.
    On XLA torch_xla's own function does it.
    """
    given = cast(Any, model)  # of transformers' classes
    given.gradient_checkpointing_enable({"use_reentrant": False})
    if device.type == "xla":
        given._set_gradient_checkpointing(gradient_checkpointing_func=machine.checkpoint())


def materialize(sharding: Sharding, *, seed: int, device: torch.device) -> None:
    """Gives this process's parts of a model on the meta device memory and the values of
    `make_model`.

    No process ever has more than one whole parameter, so that a model may be larger than a device
    or a host.
    """
    model = sharding.model
    cast(nn.Module, model).to_empty(device=device)
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed.weight  # as in make_model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        initialize(model, sharding.part)


def choose_backend(
    configuration: "DeltaConfig", config: RunConfig, device: torch.device, precision: str
) -> str:
    """Chooses the backend that computes the delta rule in this process from here on, and returns
    its name.

    Raises BackendRefusal, with every reason, if none can or if the one that was asked for cannot.
    """
    named = None if config.backend == "auto" else config.backend
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    heads = {
        "H": configuration.num_heads,
        "HV": configuration.num_v_heads,
        "K": configuration.head_dim_k,
        "V": configuration.head_dim_v,
    }
    capability = machine.compute_capability(device.type, device.index)
    call = Call("delta_residual", device.type, torch.float32, gradients=True, capability=capability)
    try:
        op = "gated_delta_rule" if configuration.mixer == "gated_deltanet" else configuration.mixer
        chosen = choose(replace(call, op=op, dtype=dtype, sizes=heads), named)
    except BackendRefusal as refusal:
        raise BackendRefusal(
            f"{refusal}\nleave out backend={named}, or name another: `delta-trn backends` says "
            "what runs here"
            if named
            else str(refusal)
        ) from None
    if configuration.residual in ("ddl", "ddl_lm"):
        # The residual stream is float32 also where products are in bf16.
        sizes = {"D": configuration.hidden_size, "DV": configuration.ddl_value_channels}
        choose(replace(call, sizes=sizes), chosen.name)
    # Few backends have kernels for all of a layer's small operations; PyTorch computes the others.
    default_backend(chosen.name, allow=["chunked"])
    return chosen.name
