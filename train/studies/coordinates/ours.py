"""Readings of our own models: the tensors that arXiv:2606.04048 has laws for, seen by hooks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from delta_trn.train.data import Batch
from delta_trn.train.parallel.sharding import Sharding
from delta_trn.train.run.model import make_model, model_config
from delta_trn.train.run.optimizer import learning_rate, make_optimizer
from delta_trn.train.run.step import TrainingStep, loss_function
from delta_trn.train.settings.schema import RunConfig
from delta_trn.train.studies.coordinates.check import Outputs, Reading, compare
from delta_trn.train.studies.probes import ModelView, normalized, observed

if TYPE_CHECKING:
    from delta_trn.models import DeltaForCausalLM


def readings(
    config: RunConfig,
    *,
    widths: Sequence[int],
    steps: int,
    seeds: Sequence[int],
    batches: Callable[[int], Iterator[Batch]],
    scheduled: bool = False,
) -> Iterator[Reading]:
    """Trains `steps` at every width, and reads every tensor before and after each step.

    config      a configuration without `auto`: its model, parametrization, optimizer and learning rate count
    batches     seed -> the batches to train on, the same at every width. The first is looked at. One batch
                over and over is best for few steps: tokens that were not trained on share less with those
                that were, the wider the model
    scheduled   whether the rate follows the configuration's schedule; then only steps 1, 2, 4, ... and the
                last are read
    """
    for width in widths:
        for seed in seeds:
            model = config.model.model_copy(update={"width": width})
            own = config.model_copy(update={"model": model, "seed": seed})
            outputs = _train(own, steps, batches(seed), scheduled)
            yield from compare(outputs, config.parametrization, config.optimizer.name, width, seed)


def _train(config: RunConfig, steps: int, batches: Iterator[Batch], scheduled: bool) -> Iterator[Outputs]:
    batch, device = next(batches), torch.device(config.device)
    rows = config.model.vocab_size
    assert rows is not None, "the data set it"
    model = make_model(model_config(config, rows=rows), seed=config.seed, device=device)
    sharding = Sharding(model)
    step = TrainingStep(
        loss_function(model, config, device),
        make_optimizer(sharding, config),
        sharding,
        micro=len(batch.inputs),
        clip=config.optimizer.clip,
    )
    first: dict[int, Tensor] = {}
    looked_at = batch.inputs.to(device), batch.targets.to(device)
    yield 0, tensors(model, *looked_at, first)
    for number in range(1, steps + 1):
        rate = learning_rate(config, number - 1) if scheduled else config.optimizer.lr
        step(batch if number == 1 else next(batches), rate)
        if not scheduled or number == steps or not number & (number - 1):  # the last, or a power of 2
            yield number, tensors(model, *looked_at, first)


@torch.no_grad()
def tensors(
    model: DeltaForCausalLM, tokens: Tensor, targets: Tensor, inputs: dict[int, Tensor]
) -> dict[str, list[Tensor]]:
    """Reads the tensors of TENSORS that the model has, one per layer.

    tokens, targets   [B, T] int64, the tokens to look at and those that follow them
    inputs            layer -> the input of its token mixer before training; filled on the first call
    """
    training = model.training
    model.eval()
    with observed(model) as views:
        logits = model(tokens, use_cache=False).logits
    model.train(training)
    following = logits.gather(-1, targets[..., None])
    ends = {"hidden": [views[0].stream[-1]], "logits": [logits], "logit_next": [following]}
    ends["mlp"] = views[0].mlps
    for i, view in views[0].mixers.items():
        inputs.setdefault(i, view.x)
    return {
        **ends,
        **mixer_tensors(views[0], inputs),
        **write_tensors(views[0], math.sqrt(model.config.width_ratio)),
    }


def mixer_tensors(view: ModelView, inputs: Mapping[int, Tensor]) -> dict[str, list[Tensor]]:
    """Reads the tensors of the token mixers."""
    values: dict[str, list[Tensor]] = defaultdict(list)
    for i, mixer in view.mixers.items():
        layer = mixer.mixer
        q, k, v = mixer.split()
        za, zb = mixer.gate_inputs()
        g, beta = mixer.gates()
        root = math.sqrt(layer.K)
        of_layer = {
            "q": q,
            "k": k,
            "v": v,
            "q_unit": normalized(q) * root,
            "k_unit": normalized(k) * root,
            "gate_decay": za,
            "gate_beta": zb,
            "alpha": g.exp(),
            "beta": beta,
            "state": mixer.state() * root,
            "o": mixer.o / layer.scale,
            "o_norm": layer.o_norm(mixer.o),
            "mixer": mixer.out,
            "own_q": layer.q_proj(inputs[i]),
            "own_k": layer.k_proj(inputs[i]),
            "own_v": layer.v_proj(inputs[i]),
            "own_decay": layer.a_proj(inputs[i]),
            "own_beta": layer.b_proj(inputs[i]),
            # copies: the optimizer writes where the parameter is
            "dt_bias": layer.dt_bias.clone(),
            "A_log": layer.A_log.clone(),
        }
        for name, value in of_layer.items():
            values[name].append(value)
    return values


def write_tensors(view: ModelView, root: float) -> dict[str, list[Tensor]]:
    """Reads what Deep Delta Learning's writes compute; what grows with width is divided by `root`."""
    values: dict[str, list[Tensor]] = defaultdict(list)
    for write in view.writes.values():
        X, k, v, beta = write.operands()
        values["write_beta"].append(beta)
        values["write_value"].append(v / root)
        values["write_along"].append(torch.einsum("...d,...dv->...v", k, X) / root)
        values["written"].append(write.out - write.inputs[0])
    return values
