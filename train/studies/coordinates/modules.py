"""The coordinate check: the output of every module of a model, at several widths, in the first steps.

Under muP nothing that another layer reads grows or vanishes with width, neither before training nor in what a
few steps change. The size of an output is the root mean square of its entries. Its change is that of the
difference to its value for the same tokens before training.

Models are those of a recipe, or of anybody's function `make(width)`. Of the latter, the plain one is trained
with one learning rate; the others get muP's initial values and groups from `delta_trn.mup`, with the smallest
width as the base.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from delta_trn.models.ecosystem.widths import (
    find_readout,
    initialize,
    parameter_groups,
    scaled_parameters,
)
from delta_trn.train.data import Batch
from delta_trn.train.parallel.sharding import Sharding
from delta_trn.train.run.model import make_model, model_config
from delta_trn.train.run.optimizer import learning_rate, make_optimizer
from delta_trn.train.run.step import TrainingStep, loss_function
from delta_trn.train.settings.errors import ConfigError
from delta_trn.train.settings.schema import RunConfig
from delta_trn.train.studies.probes import rms

PLAIN = "plain"
# Tokens are drawn from few of the vocabulary. What is learned of a token then outweighs what its gradient
# shares by chance with unrelated tokens, which is 1 / sqrt(width) and would look like a law of width.
DISTINCT, ROWS, TOKENS = 16, 4, 64
Outputs = tuple[int, dict[str, list[Tensor]]]  # step, module -> what its calls returned


@dataclass(frozen=True)
class Reading:
    """Root mean squares at one width: of a module's output, and of its change since step 0 (then 0)."""

    parametrization: str
    optimizer: str
    width: int
    seed: int
    step: int
    tensor: str
    size: float
    change: float


def compare(
    outputs: Iterator[Outputs], parametrization: str, optimizer: str, width: int, seed: int
) -> Iterator[Reading]:
    """Reads outputs after each step, beside those before training."""
    before: dict[str, list[Tensor]] = {}
    for step, now in outputs:
        before = before or now
        for name, parts in now.items():
            first = before.get(name, [])
            if [x.shape for x in parts] != [x.shape for x in first]:
                continue  # an expert, say, that gets other tokens
            change = _joint_rms([a - b for a, b in zip(parts, first, strict=True)])
            yield Reading(parametrization, optimizer, width, seed, step, name, _joint_rms(parts), change)


def _joint_rms(parts: Sequence[Tensor]) -> float:
    return math.sqrt(sum(rms(part) ** 2 for part in parts) / len(parts))


def recipe_readings(
    config: RunConfig,
    *,
    widths: Sequence[int],
    steps: int,
    seeds: int,
    batches: Callable[[int], Iterator[Batch]],
    scheduled: bool = False,
) -> Iterator[Reading]:
    """Trains our own model `steps` at every width and seed, and reads its modules before and after.

    config      a configuration without `auto`: its model, parametrization, optimizer and learning rate count
    batches     seed -> the batches to train on, the same at every width. The first is looked at. One batch
                over and over is best for few steps: tokens that were not trained on share less with those
                that were, the wider the model
    scheduled   whether the rate follows the configuration's schedule; then only steps 1, 2, 4, ... and the
                last are read
    """
    for width in widths:
        for seed in range(seeds):
            model = config.model.model_copy(update={"width": width})
            own = config.model_copy(update={"model": model, "seed": seed})
            outputs = _train_recipe(own, steps, batches(seed), scheduled)
            yield from compare(outputs, config.parametrization, config.optimizer.name, width, seed)


def _train_recipe(
    config: RunConfig, steps: int, batches: Iterator[Batch], scheduled: bool
) -> Iterator[Outputs]:
    batch, device, rows = next(batches), torch.device(config.device), config.model.vocab_size
    assert rows is not None, "the data set it"
    model = make_model(model_config(config, rows=rows), seed=config.seed, device=device)
    loss, sharding = loss_function(model, config, device), Sharding(model)
    optimizer = make_optimizer(sharding, config)
    step = TrainingStep(loss, optimizer, sharding, micro=len(batch.inputs), clip=config.optimizer.clip)
    tokens, targets = batch.inputs.to(device), batch.targets.to(device)
    for number in range(steps + 1):
        if number:
            rate = learning_rate(config, number - 1) if scheduled else config.optimizer.lr
            step(batch if number == 1 else next(batches), rate)
        if scheduled and number != steps and number & (number - 1):  # neither the last nor a power of 2
            continue
        with torch.no_grad(), watched(model) as outputs:
            logits = model(tokens, use_cache=False).logits
        yield number, {**outputs, "logit_next": [logits.gather(-1, targets[..., None])]}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is trained, and how.

    make        width -> model
    batch       seed -> what the model's forward gets: a tensor, a sequence, or a mapping of arguments; None:
                random tokens. Tokens are passed as labels, too, where a model takes labels
    rates       optimizer ("adamw", "sgd") -> learning rate at the smallest width
    roles       pattern of parameters' names -> role, where shapes do not tell
    readout_init    times the readout's initial values, under muP. From their own size, a readout adds noise
                to all gradients that only dies out at larger widths
    """

    make: Callable[[int], nn.Module]
    widths: Sequence[int]
    steps: int
    seeds: int
    rates: Mapping[str, float]
    batch: Callable[[int], Mapping[str, Any] | Sequence[Any] | Tensor] | None = None
    roles: Mapping[str, str] = field(default_factory=dict)
    readout_init: float = 0.0
    device: str = "cpu"

    def model(self, width: int, seed: int = 0) -> nn.Module:
        """Makes a model. Raises ConfigError if `make` cannot."""
        torch.manual_seed(seed)
        try:
            inspect.signature(self.make).bind(width)
        except TypeError as error:
            raise ConfigError(f"{_name(self.make)} does not take a width: {error}") from None
        model = self.make(width)
        if not isinstance(model, nn.Module):
            raise ConfigError(
                f"{_name(self.make)}({width}) returned a {type(model).__name__}, expected a torch.nn.Module"
            )
        return model.eval().to(self.device)


def require_widths(plan: Plan, parametrizations: Sequence[str]) -> None:
    """Raises ConfigError unless models grow with the width, and muP can scale them."""
    narrow, wide = plan.widths[0], plan.widths[-1]
    small, large = plan.model(narrow), plan.model(wide)
    fewer, more = (sum(p.numel() for p in model.parameters()) for model in (small, large))
    if fewer >= more:
        raise ConfigError(
            f"{_name(plan.make)} makes {fewer:,} weights at width {narrow} and {more:,} at {wide}; expected "
            "more at the larger width"
        )
    if set(parametrizations) != {PLAIN}:
        try:
            scaled_parameters(large, small, plan.roles)
        except ValueError as error:
            raise ConfigError(str(error)) from None


def module_readings(plan: Plan, parametrization: str, optimizer: str) -> Iterator[Reading]:
    """Trains at every width and seed, and reads every module's output before and after each step.

    parametrization   PLAIN, or a table of `models.mup`
    """
    base = plan.model(plan.widths[0])
    for width in plan.widths:
        for seed in range(plan.seeds):
            model = plan.model(width, seed)
            groups: Any = list(model.parameters())
            rate = plan.rates[optimizer]
            if parametrization != PLAIN:
                options: Any = {"base": base, "table": parametrization, "roles": plan.roles}
                initialize(model, **options, readout_init=plan.readout_init)
                groups = parameter_groups(model, **options, lr=rate, optimizer=optimizer)
            kind = torch.optim.AdamW if optimizer == "adamw" else torch.optim.SGD
            outputs = _train(plan, model, kind(groups, lr=rate, weight_decay=0.0), seed)
            yield from compare(outputs, parametrization, optimizer, width, seed)


def _train(plan: Plan, model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> Iterator[Outputs]:
    """Yields every module's output before each step and after the last."""
    batch = plan.batch(seed) if plan.batch else draw_tokens(model, seed)
    for step in range(plan.steps + 1):
        with watched(model) as outputs:
            loss = _loss(model, _moved(batch, plan.device), outputs)
        if not math.isfinite(loss.item()):
            raise ConfigError(f"the loss is {loss.item()} at step {step}: take a lower rate, lr.adamw=2**-10")
        yield step, outputs
        if step < plan.steps:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def draw_tokens(model: nn.Module, seed: int) -> Tensor:
    """Returns random tokens [ROWS, TOKENS] for the model's vocabulary. Raises ConfigError if it has none."""
    find = getattr(model, "get_input_embeddings", lambda: None)
    embedding = find() or next((m for m in model.modules() if isinstance(m, nn.Embedding)), None)
    vocabulary = getattr(embedding, "num_embeddings", 0)
    if not vocabulary:
        raise ConfigError(
            f"{type(model).__name__} has no embedding to draw tokens for; pass batch=package:make_batch, a "
            "function from a seed to the arguments of the model's forward"
        )
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randperm(vocabulary, generator=generator)[:DISTINCT]
    return drawn[torch.randint(len(drawn), (ROWS, TOKENS), generator=generator)]


@contextlib.contextmanager
def watched(model: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """Within `with`, keeps what every module with weights computes: the first floating tensor of each call.

    The readout's are called "logits": theory says something else about them.
    """
    outputs: dict[str, list[Tensor]] = defaultdict(list)
    readout, handles = find_readout(model), []

    def keep(_: nn.Module, __: Any, output: Any, *, name: str) -> None:
        if (tensor := _first_tensor(output)) is not None:
            outputs[name].append(tensor.detach())

    for name, module in model.named_modules():
        if not name or next(module.parameters(), None) is None:
            continue
        shown = "logits" if module is readout else name
        handles.append(module.register_forward_hook(partial(keep, name=shown)))
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def _loss(model: nn.Module, batch: Any, outputs: dict[str, list[Tensor]]) -> Tensor:
    """Returns the model's loss, or else that of the next token; adds the logits of next tokens to outputs."""
    tokens = batch
    if isinstance(batch, Mapping):
        output, tokens = model(**batch), batch.get("input_ids")
    elif isinstance(batch, Tensor):
        takes_labels = "labels" in inspect.signature(model.forward).parameters
        output = model(batch, labels=batch) if takes_labels else model(batch)
    else:
        output = model(*batch)
    loss, logits = (_entry(output, name) for name in ("loss", "logits"))
    known = isinstance(tokens, Tensor) and tokens.dim() == 2 and not tokens.is_floating_point()
    if known and tokens is not None and logits is not None and logits.shape[:-1] == tokens.shape:
        following = tokens[:, 1:].long()
        outputs["logit_next"] = [logits.detach()[:, :-1].gather(-1, following[..., None])]
        if loss is None:
            loss = cross_entropy(logits[:, :-1].flatten(0, 1).float(), following.flatten())
    if loss is None or loss.dim():
        raise ConfigError(
            f"{type(model).__name__} returns no loss: its forward must return one, or logits "
            "[rows, tokens, vocabulary] of the tokens that it gets"
        )
    return loss


def _moved(batch: Any, device: str) -> Any:
    """Returns a batch whose tensors are on the device."""
    if isinstance(batch, Mapping):
        return {name: _moved(x, device) for name, x in batch.items()}
    if isinstance(batch, tuple | list):
        return [_moved(x, device) for x in batch]
    return batch.to(device) if isinstance(batch, Tensor) else batch


def _entry(output: Any, name: Literal["loss", "logits"]) -> Tensor | None:
    """Returns what a model calls its loss or its logits; a bare tensor is the one that its shape says."""
    if isinstance(output, Mapping):
        return output.get(name)
    tensor = _first_tensor(output)
    bare = tensor if tensor is not None and (tensor.dim() == 0) == (name == "loss") else None
    return getattr(output, name, bare)


def _first_tensor(output: Any) -> Tensor | None:
    """Returns the first floating tensor of what a module returned."""
    if isinstance(output, Tensor):
        return output if output.is_floating_point() else None
    parts = output.values() if isinstance(output, Mapping) else output
    if not isinstance(output, Mapping | Sequence) or isinstance(output, str):
        return None
    return next((x for part in parts if (x := _first_tensor(part)) is not None), None)


def _name(function: Any) -> str:
    return getattr(function, "__name__", repr(function))
