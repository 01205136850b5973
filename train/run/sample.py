"""Text from a model: what `generate` prints and what a run writes into samples.txt."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from delta_trn.backends import machine
from delta_trn.models.cache import CACHE_NAME
from delta_trn.train.checkpoints.contents import load_weights
from delta_trn.train.checkpoints.run_folder import RunFolder
from delta_trn.train.data import TextTokenizer, load_tokenizer
from delta_trn.train.parallel.sharding import Sharding
from delta_trn.train.settings.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from delta_trn.models import DeltaForCausalLM

INCOMPLETE = "\ufffd"  # what the decoder gives for bytes whose character is not complete yet


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. temperature 0: the most probable; top_k None, top_p None: from all."""

    tokens: int = 200
    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, good, expected in (
            ("tokens", self.tokens >= 1, "at least 1"),
            ("temperature", 0 <= self.temperature < float("inf"), "0 or more"),
            ("top_k", self.top_k is None or self.top_k >= 1, "at least 1"),
            ("top_p", self.top_p is None or 0 < self.top_p <= 1, "more than 0 and at most 1"),
            ("repetition_penalty", 0 < self.repetition_penalty < float("inf"), "more than 0"),
        ):
            if not good:
                raise ConfigError(f"{name}={getattr(self, name)}: expected {expected}")


def continue_text(
    model: "DeltaForCausalLM",
    tokenizer: TextTokenizer,
    prompt: str,
    sampling: Sampling,
    stream: Callable[[str], None] | None = None,
) -> str:
    """Returns the prompt's continuation, up to `sampling.tokens` tokens or the end of the document.

    `stream` gets the text piece by piece as it is made. The process's random numbers are left as they were.
    """
    device = next(model.parameters()).device
    ids = torch.tensor([tokenizer.encode(prompt)], device=device)
    streamer = TextStream(tokenizer, stream) if stream else None
    options: dict[str, Any] = {"do_sample": sampling.temperature > 0}
    if sampling.temperature > 0:
        options |= {
            "temperature": sampling.temperature,
            "top_k": sampling.top_k or 0,  # 0 and 1.0 are transformers' words for all
            "top_p": sampling.top_p if sampling.top_p is not None else 1.0,
        }
    generate: Any = cast(Any, model).generate  # transformers declares it for other classes than its models
    was_training = model.training
    model.eval()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(sampling.seed)
            if device.type == "xla":
                out = token_by_token(model, ids, sampling, tokenizer.eos, streamer)
                return tokenizer.decode(out[0, ids.shape[1] :].tolist())
            out = generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=sampling.tokens,
                repetition_penalty=sampling.repetition_penalty,
                eos_token_id=tokenizer.eos,
                pad_token_id=tokenizer.pad,
                streamer=streamer,
                **options,
            )
    finally:
        model.train(was_training)
    return tokenizer.decode(out[0, ids.shape[1] :])


@torch.no_grad()
def token_by_token(
    model: "DeltaForCausalLM",
    ids: Tensor,
    sampling: Sampling,
    eos: int,
    streamer: "TextStream | None" = None,
) -> Tensor:
    """Continues ids [1, T] to [1, T + new] on the CPU, as transformers' generate does, but in fixed shapes.

    One graph for the prompt and one for every token after it, however many: on XLA generate's own would be
    compiled anew for each length. With attention layers they still grow, by their past.
    """
    device, drawn = ids.device, ids.cpu()
    if streamer:
        streamer.put(drawn)
    processors, cache, given = _processors(sampling), None, ids
    for _ in range(sampling.tokens):
        output: Any = cast(Any, model)(given, **{CACHE_NAME: cache}, use_cache=True, logits_to_keep=1)
        cache = getattr(output, CACHE_NAME)
        machine.synchronize(
            device, wait=False
        )  # with the states, or the next graph would have this one in it
        scores = processors(drawn, output.logits[:, -1].cpu().float())
        if sampling.temperature > 0:
            token = torch.multinomial(scores.softmax(-1), num_samples=1)
        else:
            token = scores.argmax(-1, keepdim=True)
        drawn, given = torch.cat([drawn, token.cpu()], dim=1), token.to(device)
        if streamer:
            streamer.put(token)
        if int(token) == eos:
            break
    if streamer:
        streamer.end()
    return drawn


def _processors(sampling: Sampling) -> Any:
    """Returns transformers' own processors, in the order of its generate."""
    from transformers.generation import logits_process as known

    found: Any = known.LogitsProcessorList()
    if sampling.repetition_penalty != 1:
        found.append(known.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.temperature > 0:
        found.append(known.TemperatureLogitsWarper(sampling.temperature))
        if sampling.top_k is not None:
            found.append(known.TopKLogitsWarper(sampling.top_k))
        if sampling.top_p is not None:
            found.append(known.TopPLogitsWarper(sampling.top_p))
    return found


class TextStream:
    """A streamer for transformers: it receives the prompt first, then token after token."""

    def __init__(self, tokenizer: TextTokenizer, stream: Callable[[str], None]):
        self._tokenizer, self._stream = tokenizer, stream
        self._ids: list[int] = []
        self._sent = 0
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        self._ids += value.flatten().tolist()
        text = self._tokenizer.decode(self._ids)
        if not text.endswith(INCOMPLETE):
            self._send(text)

    def end(self) -> None:
        self._send(self._tokenizer.decode(self._ids))

    def _send(self, text: str) -> None:
        if len(text) > self._sent:
            self._stream(text[self._sent :])
            self._sent = len(text)


def chosen_checkpoint(folder: RunFolder, which: str) -> Path:
    """Returns the folder that "best", "last" or a step names. CheckpointError unless it is whole."""
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
                f"{folder.path} has no best checkpoint: no evaluation yet, or checkpoint.keep_best=false; "
                f"choose last or one of {', '.join(map(str, steps))}"
            )
        return best
    if not which.isdecimal():
        raise CheckpointError(
            f"checkpoint={which!r}: expected best, last, or one of {', '.join(map(str, steps))}"
        )
    return folder.checkpoints.require_whole(int(which))


def load_for_generation(folder: Path, device: torch.device) -> tuple["DeltaForCausalLM", TextTokenizer]:
    """Returns model and tokenizer of a checkpoint's folder. CheckpointError if they do not fit."""
    from delta_trn.models import DeltaConfig, DeltaForCausalLM

    configuration = DeltaConfig.from_pretrained(folder)
    tokenizer = load_tokenizer(folder)
    require_fit(configuration, tokenizer, folder)
    model = DeltaForCausalLM(configuration)
    load_weights(folder, Sharding(model))
    cast(nn.Module, model).to(device)
    return model.eval(), tokenizer


def require_fit(configuration: Any, tokenizer: TextTokenizer, folder: Path) -> None:
    """CheckpointError unless every id has a row, special tokens agree, and the tokenizer is the run's."""
    problems = []
    if tokenizer.size > configuration.vocab_size:
        problems.append(f"it has {tokenizer.size} ids, the model {configuration.vocab_size} rows")
    for name in ("bos", "eos", "pad"):
        models, its = getattr(configuration, f"{name}_token_id"), getattr(tokenizer, name)
        if models != its:
            problems.append(f"{name} is {its}, the model was trained with {models}")
    state = folder / "state.json"
    saved = json.loads(state.read_bytes()).get("tokenizer") if state.is_file() else None
    if saved is not None and saved != tokenizer.sha256:
        problems.append(f"its sha256 is {tokenizer.sha256[:16]}, the model was trained with {saved[:16]}")
    if problems:
        raise CheckpointError(
            f"the tokenizer in {folder} does not fit the model: {'; '.join(problems)}; copy the tokenizer "
            "files from the prepared data, or use another checkpoint"
        )
