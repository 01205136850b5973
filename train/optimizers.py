"""AdamW and Nesterov SGD with one group for each set of factors in the muP table."""

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

from models.mup import ScaledParameter, scaled_parameters

from .config import RunConfig
from .errors import CheckpointError

if TYPE_CHECKING:
    from models import DeltaForCausalLM


def rows(model: "DeltaForCausalLM", config: RunConfig) -> list[ScaledParameter]:
    """What every parameter gets in this run."""
    o = config.optimizer
    return scaled_parameters(
        model,
        optimizer=o.name,
        lr=o.lr,
        weight_decay=o.weight_decay,
        independent_weight_decay=o.independent_weight_decay,
    )


def make_optimizer(model: "DeltaForCausalLM", config: RunConfig, device: torch.device) -> Optimizer:
    """The optimizer over all parameters. Each group has `factor`, its rate over the run's, and `names`."""
    o = config.optimizer
    adaptive = o.name == "adamw"
    members: dict[tuple[float, float, float], list[ScaledParameter]] = defaultdict(list)
    for row in rows(model, config):
        members[row.lr / o.lr, row.weight_decay, row.epsilon if adaptive else 1.0].append(row)
    groups: list[dict[str, Any]] = [
        {
            "params": [row.parameter for row in group],
            "names": [row.name for row in group],
            "factor": factor,
            "lr": factor * o.lr,
            "weight_decay": decay,
            **({"eps": epsilon * o.eps} if adaptive else {}),
        }
        for (factor, decay, epsilon), group in members.items()
    ]
    # one kernel over all parameters instead of ten small ones for each; other devices have their own
    fused = device.type in ("cpu", "cuda")
    if o.name == "sgd":
        return SGD(groups, lr=o.lr, momentum=o.momentum, nesterov=o.momentum > 0, fused=fused)
    return AdamW(groups, lr=o.lr, betas=(o.beta1, o.beta2), fused=fused)


def set_learning_rate(optimizer: Optimizer, lr: float) -> None:
    """Give every group `lr` times its factor."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["factor"]


def state_tensors(optimizer: Optimizer) -> dict[str, Tensor]:
    """The optimizer's memory as NAME/SLOT -> tensor, NAME the parameter's, so that groups do not matter."""
    tensors = {}
    for name, parameter in _named(optimizer):
        for slot, value in optimizer.state.get(parameter, {}).items():
            if value is not None:
                tensors[f"{name}/{slot}"] = value.detach().contiguous()
    return tensors


def load_state_tensors(optimizer: Optimizer, tensors: dict[str, Tensor]) -> None:
    """Put the memory back. CheckpointError unless it is that of exactly these parameters."""
    slots: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for key, value in tensors.items():
        name, _, slot = key.rpartition("/")
        slots[name][slot] = value
    names = [name for name, _ in _named(optimizer)]
    if tensors and set(slots) != set(names):
        odd = sorted(set(slots) ^ set(names))
        raise CheckpointError(
            f"the saved optimizer is of another model: {len(odd)} parameters differ, {odd[0]} first; begin "
            "a new run"
        )
    # load_state_dict moves each tensor to where this kind of optimizer wants it
    optimizer.load_state_dict(
        {
            "state": {index: slots[name] for index, name in enumerate(names) if name in slots},
            "param_groups": optimizer.state_dict()["param_groups"],
        }
    )


def _named(optimizer: Optimizer) -> list[tuple[str, torch.nn.Parameter]]:
    """(name, parameter) in the order of the optimizer's own numbering."""
    return [
        pair for group in optimizer.param_groups for pair in zip(group["names"], group["params"], strict=True)
    ]
