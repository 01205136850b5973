"""What is in a checkpoint, and how a run is put back into the state it was saved in.

config.json, model.safetensors, generation_config.json    the model as transformers' from_pretrained reads it
tokenizer.json, tokenizer_config.json, ...                the tokenizer, so that the folder stands alone
optimizer.safetensors                                     NAME/SLOT -> tensor
random.safetensors                                        generator states
state.json                                                step, data position, best so far, configuration
manifest.json                                             sizes and hashes of the others
"""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.optim import Optimizer
from transformers.utils import logging as transformers_logging

from .config import RunConfig, differences, may_change_on_resume, validated
from .errors import CheckpointError, Diverged
from .optimizers import load_state_tensors, state_tensors
from .parallel import Parallel

if TYPE_CHECKING:
    from models import DeltaForCausalLM
    from train.data import TextTokenizer

FORMAT = 1


@dataclass
class State:
    """Where a run stands between two steps.

    tokens      trained on so far, by all devices
    seconds     of training so far, over all processes
    position    the loader's state_dict
    best        [step, validation loss] of the lowest so far
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    position: dict[str, Any] = field(default_factory=dict)
    best: tuple[int, float] | None = None


@dataclass(frozen=True)
class Contents:
    """The tensors of a checkpoint, whole: `weights` by name, `optimizer` as NAME/SLOT."""

    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]


def contents(parallel: Parallel, optimizer: Optimizer) -> Contents:
    """What `write` needs, from everybody's parts. All processes must call."""
    return Contents(parallel.weights(), parallel.gathered(state_tensors(optimizer)))


def write(
    folder: Path,
    *,
    state: State,
    config: RunConfig,
    model: "DeltaForCausalLM",
    contents: "Contents",
    tokenizer: "TextTokenizer",
) -> None:
    """Fill a folder. Diverged if a weight is not finite: that would rotate good checkpoints out."""
    once = {id(p): (name, p) for name, p in reversed(contents.weights.items())}  # a tied matrix has two names
    if bad := [name for name, p in reversed(once.values()) if not bool(torch.isfinite(p).all())]:
        raise Diverged(
            f"{len(bad)} parameters are not finite after step {state.step}, {bad[0]} first; {REMEDY}"
        )
    with _without_bars():
        model.save_pretrained(folder, state_dict=contents.weights)
    tokenizer.save(folder)
    # an optimizer without memory is written as an empty file: safetensors has no trouble with that
    save_file(contents.optimizer, folder / "optimizer.safetensors")
    save_file(_random_states(), folder / "random.safetensors")
    content = {
        "format": FORMAT,
        **asdict(state),
        "tokenizer": tokenizer.sha256,
        "fingerprint": config.fingerprint(),
        "config": config.model_dump(mode="json"),
    }
    (folder / "state.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


REMEDY = "lower optimizer.lr, or lengthen schedule.warmup"


def read_state(folder: Path) -> tuple[State, RunConfig]:
    """Where the run stood, and the configuration it had. CheckpointError if this code cannot read it."""
    path = folder / "state.json"
    content = json.loads(path.read_bytes())
    if content.get("format") != FORMAT:
        raise CheckpointError(f"{path} has format {content.get('format')}, this code reads {FORMAT}")
    best = content["best"]
    state = State(
        content["step"],
        content["tokens"],
        content["seconds"],
        content["position"],
        (best[0], best[1]) if best else None,
    )
    return state, validated(content["config"], where=f"{path}: ")


def require_same_run(saved: RunConfig, now: RunConfig, where: Path) -> None:
    """CheckpointError naming every differing key that may not change between saving and resuming."""
    differing = {k: pair for k, pair in differences(saved, now).items() if not may_change_on_resume(k)}
    if differing:
        listed = ", ".join(f"{key} was {old}, is {new}" for key, (old, new) in differing.items())
        raise CheckpointError(
            f"{where} was saved with another configuration: {listed}; put that back in config.json, or begin "
            "a new run"
        )


def restore(folder: Path, parallel: Parallel, optimizer: Optimizer) -> None:
    """Put weights, optimizer and generators into the saved state, however many processes saved it."""
    load_weights(folder, parallel)
    slots = load_file(folder / "optimizer.safetensors")
    load_state_tensors(optimizer, {key: parallel.part(key, whole) for key, whole in slots.items()})
    _set_random_states(load_file(folder / "random.safetensors"))


def load_weights(folder: Path, into: "DeltaForCausalLM | Parallel") -> None:
    """Put saved weights into a model, or each process's part. CheckpointError unless they are its own."""
    parallel = into if isinstance(into, Parallel) else None
    model = into.model if isinstance(into, Parallel) else into
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("model*.safetensors")):
        tensors.update(load_file(path))
    own = model.state_dict(keep_vars=True)
    wrong = [
        f"{name} {tuple(t.shape)}"
        for name, t in tensors.items()
        if name not in own or own[name].shape != t.shape
    ]
    given = {id(own[name]) for name in tensors if name in own}
    # a tied matrix has two names and is saved under one
    missing = [name for name, parameter in own.items() if name not in tensors and id(parameter) not in given]
    if wrong or missing:
        raise CheckpointError(
            f"the weights in {folder} are not this model's: {len(missing)} missing, {len(wrong)} unknown or "
            f"of another shape, {(missing + wrong)[0]} first; begin a new run"
        )
    parts = {name: t if parallel is None else parallel.part(name, t) for name, t in tensors.items()}
    model.load_state_dict(parts, strict=False)


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    """Transformers draws a bar for every file it writes, through the run's own."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def _random_states() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _set_random_states(states: dict[str, Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
