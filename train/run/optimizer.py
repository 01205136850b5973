"""AdamW and Nesterov SGD with one group for each set of factors in the muP table."""

from collections import defaultdict
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW, Optimizer

from delta_trn.models.parameters import ScaledParameter, scaled_parameters
from delta_trn.train.neuron import sharding as neuron
from delta_trn.train.settings.errors import CheckpointError
from delta_trn.train.settings.schema import RunConfig

if TYPE_CHECKING:
    from delta_trn.models import DeltaForCausalLM


def rows(model: "DeltaForCausalLM", config: RunConfig) -> list[ScaledParameter]:
    """What every parameter gets in this run."""
    o = config.optimizer
    return scaled_parameters(
        model,
        optimizer=o.name,
        lr=o.lr,
        weight_decay=o.weight_decay,
        independent_weight_decay=o.independent_weight_decay,
        memory=o.memory,
    )


def make_optimizer(
    model: "DeltaForCausalLM",
    config: RunConfig,
    device: torch.device,
    *,
    shared_by: ProcessGroup | None = None,
) -> Optimizer:
    """The optimizer over all parameters. Each group has `factor`, its rate over the run's, and `names`.

    shared_by   processes of which each keeps and updates its part of the parameters (ZeRO-1), and sends it
    """
    o = config.optimizer
    adaptive = o.name == "adamw"
    members: dict[tuple[float, float, float, Hashable], list[ScaledParameter]] = defaultdict(list)
    for row in rows(model, config):
        # fused kernels take parameters of one kind: whole, or divided among the same processes
        kind = getattr(row.parameter, "device_mesh", None)
        members[row.lr / o.lr, row.weight_decay, row.epsilon if adaptive else 1.0, kind].append(row)
    groups: list[dict[str, Any]] = [
        {
            "params": [row.parameter for row in group],
            "names": [row.name for row in group],
            "factor": factor,
            "lr": factor * o.lr,
            "weight_decay": decay,
            **({"eps": epsilon * o.eps} if adaptive else {}),
        }
        for (factor, decay, epsilon, _), group in members.items()
    ]
    # one kernel over all parameters instead of ten small ones for each; other devices have their own
    fused = device.type in ("cpu", "cuda")
    kind: Any
    options: dict[str, Any]
    if o.name == "sgd":
        kind, options = SGD, {"momentum": o.momentum, "nesterov": o.momentum > 0}
        # DTensor has no rule for SGD's fused kernel (torch 2.13); it has one for AdamW's
        fused = fused and not any(isinstance(p, DTensor) for group in groups for p in group["params"])
    else:
        kind, options = AdamW, {"betas": (o.beta1, o.beta2)}
    if config.distribution.mode == "zero1" and neuron.serves(device) and dist.is_initialized():
        return neuron.zero1(groups, kind, o.clip, lr=o.lr, **options)
    if shared_by is None:
        return kind(groups, lr=o.lr, fused=fused, **options)
    return ZeroRedundancyOptimizer(groups, kind, shared_by, lr=o.lr, fused=fused, **options)


def set_learning_rate(optimizer: Optimizer, lr: float) -> None:
    """Give every group `lr` times its factor."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["factor"]


def state_tensors(optimizer: Optimizer) -> dict[str, Tensor]:
    """This process's memory as NAME/SLOT -> tensor, NAME the parameter's, so that groups do not matter."""
    if neuron.is_zero1(optimizer):
        return neuron.zero1_memory(optimizer, _named(optimizer))
    local = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
    tensors = {}
    for name, parameter in updated_here(optimizer):
        for slot, value in local.state.get(parameter, {}).items():
            if value is not None:
                tensors[f"{name}/{slot}"] = value.detach().contiguous()
    return tensors


def updated_here(optimizer: Optimizer) -> list[tuple[str, torch.nn.Parameter]]:
    """(name, parameter) of those that this process updates: under ZeRO-1 its share, else all."""
    if not isinstance(optimizer, ZeroRedundancyOptimizer):
        return _named(optimizer)
    mine = {id(p) for group in optimizer.optim.param_groups for p in group["params"]}
    return [(name, parameter) for name, parameter in _named(optimizer) if id(parameter) in mine]


def load_state_tensors(optimizer: Optimizer, tensors: dict[str, Tensor]) -> None:
    """Put this process's memory back. CheckpointError unless it is that of exactly these parameters."""
    slots: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for key, value in tensors.items():
        name, _, slot = key.rpartition("/")
        slots[name][slot] = value
    names = [name for name, _ in _named(optimizer)]
    mine = {name for name, _ in updated_here(optimizer)}
    if tensors and set(slots) != mine:
        odd = sorted(set(slots) ^ mine)
        raise CheckpointError(
            f"the saved optimizer is of another model: {len(odd)} parameters differ, {odd[0]} first; begin "
            "a new run"
        )
    if neuron.is_zero1(optimizer):
        neuron.load_zero1_memory(optimizer, _named(optimizer), tensors)
        return
    # load_state_dict moves each tensor to where this kind of optimizer wants it
    optimizer.load_state_dict(
        {
            "state": {index: slots[name] for index, name in enumerate(names) if name in slots},
            "param_groups": _numbered(optimizer),
        }
    )


def _numbered(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The groups as state_dict has them, with numbers for parameters. ZeRO-1's own is only on the leader."""
    groups, first = [], 0
    for group in optimizer.param_groups:
        last = first + len(group["params"])
        groups.append({**group, "params": list(range(first, last))})
        first = last
    return groups


def _named(optimizer: Optimizer) -> list[tuple[str, torch.nn.Parameter]]:
    """(name, parameter) in the order of the optimizer's own numbering."""
    return [
        pair for group in optimizer.param_groups for pair in zip(group["names"], group["params"], strict=True)
    ]
