"""Text from a model: what `generate` prints and what a run writes into samples.txt."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import nn
from transformers import TextStreamer

from delta_trn.backends import default_backend
from delta_trn.models import DeltaConfig, DeltaForCausalLM
from delta_trn.train.checkpoints.contents import load_weights
from delta_trn.train.checkpoints.run_folder import RunFolder
from delta_trn.train.data.tokenizer import TextTokenizer, load_tokenizer
from delta_trn.train.parallel.sharding import Sharding
from delta_trn.train.settings.errors import CheckpointError
from delta_trn.train.settings.schema import SampleSection

T = TypeVar("T")


def continue_text(
    model: "DeltaForCausalLM",
    tokenizer: TextTokenizer,
    prompt: str,
    how: SampleSection,
    *,
    seed: int,
    repetition_penalty: float = 1.0,
    stream: Callable[[str], None] | None = None,
) -> str:
    """Returns the prompt's continuation, up to `how.tokens` tokens or the end of the document.

    `stream` gets the text piece by piece as it is made. The process's random numbers are left as
    they were.
    """
    device = next(model.parameters()).device
    if on_xla := device.type == "xla":  # which would compile a graph for each length
        weights, device = (
            {name: x.cpu() for name, x in model.state_dict().items()},
            torch.device("cpu"),
        )
        model = type(model)(model.config)
        model.load_state_dict(weights)
    ids, streamer = torch.tensor([tokenizer.encode(prompt)], device=device), None
    if stream is not None:
        # it sends whole words, so that no character is sent in parts
        streamer = TextStreamer(cast(Any, tokenizer), skip_prompt=True)
        streamer.on_finalized_text = lambda text, stream_end=False: stream(text)
    options: dict[str, Any] = {"do_sample": how.temperature > 0}
    if how.temperature > 0:
        # 0 and 1.0 are transformers' words for all
        options |= {
            "temperature": how.temperature,
            "top_k": how.top_k or 0,
            "top_p": how.top_p or 1.0,
        }
    generate: Any = cast(
        Any, model
    ).generate  # transformers declares it for other classes than its models
    was_training = model.training
    model.eval()
    try:
        with (
            default_backend("chunked") if on_xla else contextlib.nullcontext(),
            torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
        ):
            torch.manual_seed(seed)
            out = generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=how.tokens,
                repetition_penalty=repetition_penalty,
                eos_token_id=tokenizer.eos,
                pad_token_id=tokenizer.pad,
                streamer=streamer,
                **options,
            )
    finally:
        model.train(was_training)
    return tokenizer.decode(out[0, ids.shape[1] :])


def choose_checkpoint(folder: RunFolder, which: str) -> Path:
    """Returns the folder that "best", "last" or a step names.
    CheckpointError unless it is whole.
    """
    steps = folder.checkpoints.steps()
    if not steps:
        raise CheckpointError(
            f"{folder.path} has no checkpoint yet; `delta-trn resume {folder.path}` makes one"
        )
    if which == "last":
        return folder.checkpoints.require_whole(steps[-1])
    if which == "best":
        best = folder.checkpoints.require_best()
        if best is None:
            raise CheckpointError(
                f"{folder.path} has no best checkpoint: no evaluation yet, or "
                f"checkpoint.keep_best=false; choose last or one of {', '.join(map(str, steps))}"
            )
        return best
    if not which.isdecimal():
        raise CheckpointError(
            f"checkpoint={which!r}: expected best, last, or one of {', '.join(map(str, steps))}"
        )
    return folder.checkpoints.require_whole(int(which))


def read_checkpoint(folder: RunFolder, which: str, read: Callable[[Path], T]) -> T:
    """Returns what `read` makes of the folder that "best", "last" or a step names,
    `choose_checkpoint`'s.

    A run that goes on saves new checkpoints and removes old ones, perhaps this one while it is
    read. Then it is chosen again: what is read is a whole checkpoint.
    """
    while True:
        steps = folder.checkpoints.steps()
        try:
            return read(choose_checkpoint(folder, which))
        except Exception:
            if folder.checkpoints.steps() == steps:
                raise


def load_for_generation(
    folder: Path, device: torch.device
) -> tuple["DeltaForCausalLM", TextTokenizer]:
    """Returns model and tokenizer of a checkpoint's folder."""
    model = DeltaForCausalLM(DeltaConfig.from_pretrained(folder))
    load_weights(folder, Sharding(model))
    cast(nn.Module, model).to(device)
    return model.eval(), load_tokenizer(folder)
