"""AdamW, Muon and Nesterov SGD, with one group per set of factors in the muP table,
and their schedule.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW, Optimizer

from delta_trn.models import DeltaForCausalLM
from delta_trn.models.mup import Role
from delta_trn.models.parameters import ScaledParameter, scaled_parameters
from delta_trn.train.parallel.sharding import Sharding
from delta_trn.train.run.model import model_config, vocabulary
from delta_trn.train.run.muon import Muon
from delta_trn.train.settings.schema import RunConfig


def learning_rate(config: RunConfig, finished: int) -> float:
    """Returns the rate for the step after `finished` steps, before a parameter's own factor.

        i < w     lr(i) = lr i / w
        i >= w    lr(i) = min_lr + (1 + cos(pi r)) / 2 (lr - min_lr),    r = min(1, (i - w) / (e - w))

    with i = finished, w = schedule.warmup, e = schedule.decay_steps or steps (arXiv:2606.04048,
    section 6.1).
    """
    peak, warmup, low = config.optimizer.lr, config.schedule.warmup, config.schedule.min_lr
    if finished < warmup:
        return peak * finished / warmup
    end = config.schedule.decay_steps or config.steps
    if finished >= end:
        return low
    r = (finished - warmup) / (end - warmup)
    return low + 0.5 * (1 + math.cos(math.pi * r)) * (peak - low)


def list_scaled(config: RunConfig) -> list[ScaledParameter]:
    """Returns what every parameter of a run gets, from a model without memory."""
    with torch.device("meta"):
        model = DeltaForCausalLM(model_config(config, rows=vocabulary(config)))
    return rows(model, config)


def rows(model: DeltaForCausalLM, config: RunConfig) -> list[ScaledParameter]:
    """Returns what every parameter of this model gets in a run."""
    o = config.optimizer
    return scaled_parameters(
        model,
        optimizer=o.name,
        lr=o.lr,
        weight_decay=o.weight_decay,
        independent_weight_decay=o.independent_weight_decay,
        memory=o.memory,
        rates={
            Role.EMBEDDING: o.embedding_lr, Role.READOUT: o.readout_lr, Role.GATE: o.gate_lr,
            Role.SCALAR: o.scalar_lr, Role.VECTOR: o.vector_lr,
        },
    )  # fmt: skip


def make_optimizer(sharding: Sharding, config: RunConfig) -> Optimizer:
    """Returns the optimizer. Each of its groups has `names`, and `factor`, its rate over the run's.

    `clip` of a group is the weight of its squared gradient in the norm that is clipped.
    """
    o = config.optimizer
    adaptive = o.name != "sgd"
    members: dict[tuple[float, float, float, float, Hashable], list[ScaledParameter]] = defaultdict(
        list
    )
    for row in rows(sharding.model, config):
        # fused kernels take parameters of one kind: whole, or divided among the same processes
        kind = getattr(row.parameter, "device_mesh", None)
        if o.name == "muon" and row.role is Role.HIDDEN and len(row.shape) == 2:
            # these are whole on every process; the keys tell Muon that a group is of matrices
            kind = (
                ("heads", row.tag.heads),
                ("of_columns", row.tag.of_columns),
                ("momentum", o.momentum),
            )
        epsilon, clip = (
            row.epsilon if adaptive else 1.0,
            row.clip if o.clip_norm == "width" else 1.0,
        )
        members[row.lr / o.lr, row.weight_decay, epsilon, clip, kind].append(row)
    groups: list[dict[str, Any]] = [
        {
            "params": [row.parameter for row in group],
            "names": [row.name for row in group],
            "factor": factor,
            "clip": clip,
            "lr": factor * o.lr,
            "weight_decay": decay,
            **({"eps": epsilon * o.eps} if adaptive else {}),
            **(dict(kind) if isinstance(kind, tuple) else {}),
        }
        for (factor, decay, epsilon, clip, kind), group in members.items()
    ]
    # one kernel over all parameters instead of ten small ones for each; other devices have their
    # own
    fused = sharding.model.device.type in ("cpu", "cuda")
    if adaptive:
        betas = (o.beta1, o.beta2)
        rule = Muon if o.name == "muon" else AdamW
        return sharding.make_optimizer(rule, groups, clip=o.clip, lr=o.lr, fused=fused, betas=betas)
    # DTensor has no rule for SGD's fused kernel (torch 2.13); it has one for AdamW's
    fused = fused and not any(isinstance(p, DTensor) for group in groups for p in group["params"])
    return sharding.make_optimizer(
        SGD, groups, clip=o.clip, lr=o.lr, fused=fused, momentum=o.momentum, nesterov=o.momentum > 0
    )


def set_learning_rate(optimizer: Optimizer, lr: float) -> None:
    """Gives every group `lr` times its factor."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["factor"]
