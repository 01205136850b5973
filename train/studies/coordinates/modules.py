"""The coordinate check: the output of every module of a model, at several widths, in the first
steps.

Under muP nothing that another layer reads grows or vanishes with width, neither before training nor
in what a few steps change. The size of an output is the root mean square of its entries. Its change
is that of the difference to its value for the same tokens before training.

Models are those of a recipe (`of_recipe`), or of anybody's function `make(width)` (`Maker`).
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
from torch.utils._pytree import tree_leaves

from delta_trn.models.ecosystem.roles import find_readout, is_tied, scaled_parameters
from delta_trn.models.ecosystem.widths import draw_taps, initialize, parameter_groups, scale_readout
from delta_trn.models.mup import Role
from delta_trn.train.parallel.sharding import Sharding
from delta_trn.train.run.model import make_model, model_config, pick_device, vocabulary
from delta_trn.train.run.optimizer import make_optimizer, set_learning_rate
from delta_trn.train.settings.errors import ConfigError
from delta_trn.train.settings.schema import RunConfig
from delta_trn.train.studies.coordinates.operations import Operations, OwnUpdates
from delta_trn.train.studies.probes import rms

PLAIN, OWN = "plain", "own"
# Tokens are drawn from few of the vocabulary. What is learned of a token then outweighs what its
# gradient shares by chance with unrelated tokens, which is 1 / sqrt(width) and would look like a
# law of width.
DISTINCT, ROWS, TOKENS = 16, 4, 64
# width, seed -> a model and what trains it
Start = Callable[[int, int], tuple[nn.Module, torch.optim.Optimizer]]
# seed -> what a model's forward gets: a tensor, a sequence, or a mapping of arguments
MakeBatch = Callable[[int], "Mapping[str, Any] | Sequence[Any] | Tensor"]


@dataclass(frozen=True)
class Reading:
    """Root mean squares at one width: of a module's output,
    and of its change since step 0 (then 0).
    """

    parametrization: str
    optimizer: str
    width: int
    seed: int
    step: int
    tensor: str
    size: float
    change: float


def readings(
    start: Start,
    parametrization: str,
    optimizer_name: str,
    *,
    widths: Sequence[int],
    steps: int,
    seeds: int,
    batch: MakeBatch | None = None,
    first_seed: int = 0,
) -> Iterator[Reading]:
    """Trains on one batch over and over at every width and seed, and reads every module before and
    after.

    So are gains, taps, biases and numbers of heads themselves, since another's output hides how
    they move, each matrix's own update, attention's logits and what bare parameters are used for
    (`operations`). Seeds begin with `first_seed`.

    One batch is best for few steps: tokens that were not trained on share less with those that
    were, the wider the model.

    batch   None: random tokens. Tokens are passed as labels, too, where a model takes labels
    """
    for width in widths:
        for seed in range(first_seed, first_seed + seeds):
            model, optimizer = start(width, seed)
            own = OwnUpdates(model, optimizer, find_readout(model))
            given = batch(seed) if batch else draw_tokens(model, seed)
            before: dict[str, list[Tensor]] = {}
            for step in range(steps + 1):
                optimizer.zero_grad()
                with watch(model.eval()) as now, Operations(model, now):
                    loss = _loss(model, given, now)
                own.forget()
                now.update({name: [p.detach().clone()] for name, p in vectors(model)})
                if not math.isfinite(loss.item()):
                    raise ConfigError(
                        f"the loss is {loss.item()} at step {step}: take a lower rate, "
                        "lr.adamw=2**-10"
                    )
                before = before or now
                for name, parts in now.items():
                    first = before.get(name, [])
                    if [x.shape for x in parts] != [x.shape for x in first]:
                        continue  # an expert, say, that gets other tokens
                    change = _joint_rms([a - b for a, b in zip(parts, first, strict=True)])
                    size = _joint_rms(parts)
                    yield Reading(
                        parametrization, optimizer_name, width, seed, step, name, size, change
                    )
                for name, size in own.read():
                    yield Reading(
                        parametrization, optimizer_name, width, seed, step, name, size, size
                    )
                if step < steps:
                    loss.backward()
                    optimizer.step()


def vectors(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields (name, parameter) of what multiplies or shifts channels or heads one by one."""
    for prefix, module in model.named_modules():
        for attribute, p in module.named_parameters(recurse=False):
            tag = getattr(module, "tags", {}).get(attribute)
            depthwise = isinstance(module, nn.Conv1d) and module.groups > 1
            if p.dim() == 1 or depthwise or (tag and tag.role is Role.VECTOR):
                yield f"{prefix}.{attribute}".lstrip("."), p


def _joint_rms(parts: Sequence[Tensor]) -> float:
    return math.sqrt(sum(rms(part) ** 2 for part in parts) / len(parts))


def of_recipe(config: RunConfig) -> Start:
    """Returns what starts a recipe's model, under the configuration's parametrization
    and optimizer.
    """

    def start(width: int, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        sized = config.model.model_copy(update={"width": width})
        own = config.model_copy(update={"model": sized, "seed": seed})
        settings = model_config(own, rows=vocabulary(config))
        model = make_model(settings, seed=seed, device=pick_device(config.device))
        optimizer = make_optimizer(Sharding(model), own)
        set_learning_rate(optimizer, config.optimizer.lr)
        return model, optimizer

    return start


@dataclass(frozen=True)
class Maker:
    """Anybody's models.

    make        width -> model
    base        muP's base width, the smallest that is checked
    roles       pattern of parameters' names -> role, where shapes do not tell
    """

    make: Callable[[int], nn.Module]
    base: int
    roles: Mapping[str, str] = field(default_factory=dict)

    def model(self, width: int, seed: int = 0) -> nn.Module:
        """Makes a model. Raises ConfigError if `make` cannot."""
        torch.manual_seed(seed)
        name = getattr(self.make, "__name__", repr(self.make))
        try:
            inspect.signature(self.make).bind(width)
        except TypeError as error:
            raise ConfigError(f"{name} does not take a width: {error}") from None
        model = self.make(width)
        if not isinstance(model, nn.Module):
            raise ConfigError(
                f"{name}({width}) returned a {type(model).__name__}, expected a torch.nn.Module"
            )
        return model

    def require_growth(self, wide: int, of_mup: bool = True) -> None:
        """Raises ConfigError unless models grow with the width, and,
        if asked, muP can scale them.
        """
        small, large = self.model(self.base), self.model(wide)
        fewer, more = (sum(p.numel() for p in model.parameters()) for model in (small, large))
        if fewer >= more:
            raise ConfigError(
                f"the model has {fewer:,} weights at width {self.base} and {more:,} at {wide}; "
                "expected more at the larger width"
            )
        if not of_mup:
            return
        try:
            if is_tied(large):
                scale_readout(large, base=small)
            scaled_parameters(large, small, self.roles)
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def start(self, parametrization: str, optimizer: str, lr: float) -> Start:
        """Returns what starts a model.

        The plain one is trained with one learning rate; the others get muP's initial values and
        groups from `delta_trn.mup`. Readouts that are not tied begin at 0: from their own size they
        add noise to all gradients that only dies out at larger widths.
        """
        base, of_mup = self.model(self.base), parametrization != PLAIN
        if of_mup:
            draw_taps(base)

        def start(width: int, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
            model = self.model(width, seed)
            groups: Any = list(model.parameters())
            if of_mup:
                draw_taps(model)
                options: Any = {"base": base, "table": parametrization, "roles": self.roles}
                if tied := is_tied(model):
                    scale_readout(model, base=base, table=options["table"])
                initialize(model, **options, readout_init=1.0 if tied else 0.0)
                groups = parameter_groups(model, **options, lr=lr, optimizer=optimizer)
            kind = torch.optim.AdamW if optimizer == "adamw" else torch.optim.SGD
            return model, kind(groups, lr=lr, weight_decay=0.0)

        return start

    def start_own(self, make_optimizer: Callable[[nn.Module, int], Any]) -> Start:
        """Returns what starts a model that the caller's own script initializes and trains."""

        def start(width: int, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
            model = self.model(width, seed)
            optimizer = make_optimizer(model, width)
            if not all(callable(getattr(optimizer, name, None)) for name in ("step", "zero_grad")):
                raise ConfigError(
                    f"optimizer=... returned a {type(optimizer).__name__}, expected step() and "
                    "zero_grad()"
                )
            return model, optimizer

        return start


def draw_tokens(model: nn.Module, seed: int) -> Tensor:
    """Returns random tokens [ROWS, TOKENS] for the model's vocabulary.
    Raises ConfigError if it has none.
    """
    find = getattr(model, "get_input_embeddings", lambda: None)
    embedding = find() or next((m for m in model.modules() if isinstance(m, nn.Embedding)), None)
    vocabulary = getattr(embedding, "num_embeddings", 0)
    if not vocabulary:
        raise ConfigError(
            f"{type(model).__name__} has no embedding to draw tokens for; pass "
            "batch=package:make_batch, a function from a seed to the arguments of the model's "
            "forward"
        )
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randperm(vocabulary, generator=generator)[:DISTINCT]
    tokens = drawn[torch.randint(len(drawn), (ROWS, TOKENS), generator=generator)]
    return tokens.to(next(model.parameters()).device)


@contextlib.contextmanager
def watch(model: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """Within `with`, keeps what every module with weights computes: the first floating tensor of
    each call.

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
    """Returns the model's loss, or else that of the next token;
    adds the logits of next tokens to outputs.
    """
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


def _entry(output: Any, name: Literal["loss", "logits"]) -> Tensor | None:
    """Returns what a model calls its loss or its logits;
    a bare tensor is the one that its shape says.
    """
    if isinstance(output, Mapping):
        return output.get(name)
    tensor = _first_tensor(output)
    bare = tensor if tensor is not None and (tensor.dim() == 0) == (name == "loss") else None
    return getattr(output, name, bare)


def _first_tensor(output: Any) -> Tensor | None:
    """Returns the first floating tensor of what a module returned."""
    parts = tree_leaves(output)
    return next((x for x in parts if isinstance(x, Tensor) and x.is_floating_point()), None)
