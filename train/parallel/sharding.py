"""The one interface between training and the ways to divide a model, with one process as its
plainest case.

    Sharding            one process: nothing is divided                                  (here)
    PyTorchSharding     DDP, FSDP2, DTensor, context parallelism                         (parallel/pytorch.py)
    NeuronSharding      replicas, heads and ZeRO-1 by neuronx_distributed                (neuron/sharding.py)

`train.run.setup.make_sharding` chooses. The loop, the step, the optimizer and checkpoints call
these methods and ask nothing else. Names are those of parameters, or NAME/SLOT for the optimizer's
memory of one.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from delta_trn.models import DeltaForCausalLM
from delta_trn.train.parallel.team import Team
from delta_trn.train.settings.errors import CheckpointError


class Sharding:
    """A model that is ready for its team, and the optimizer's part in that.

    Every process calls `loss` with its share of a step's tokens, and has the gradient of the mean
    over all of them after the last backward pass.

    rows    name -> order in which this model has a parameter's rows, where that is not the file's
            order
    """

    def __init__(self, model: DeltaForCausalLM, team: Team | None = None):
        self.model, self.team = model, team or Team()
        self.rows: dict[str, Tensor] = {}

    def loss(self, inputs: Tensor, targets: Tensor, **others: Tensor | None) -> Tensor:
        """Returns the mean cross-entropy of this process's tokens;
        arguments are the fields of a Batch.
        """
        return self.model.loss(inputs, targets, **others)

    def accumulating(self, more: bool) -> contextlib.AbstractContextManager[None]:
        """Surrounds a backward pass: gradients are reduced in it unless there is `more` to come."""
        return contextlib.nullcontext()

    def at_rest(self) -> None:
        """Gives back what the last forward pass gathered:
        parameters are this process's parts again.
        """

    @property
    def is_divided(self) -> bool:
        """Whether a forward pass takes all processes, because none has all the weights."""
        return False

    # The optimizer

    def make_optimizer(
        self,
        kind: type[Optimizer],
        groups: list[dict[str, Any]],
        *,
        clip: float | None,
        **options: Any,
    ) -> Optimizer:
        """Returns the optimizer that `step` moves. `clip` is for those that clip by themselves."""
        return kind(groups, **options)

    def step(self, optimizer: Optimizer, clip: float | None) -> Tensor:
        """Scales all gradients so that their norm is at most `clip`, and moves the weights.

        Returns the norm before: the root of the sum of `clip` |g|^2 over the optimizer's groups. It
        is taken after the reduction: a process's own gradient is longer than the mean of all.
        """
        parameters = [parameter for _, parameter in named_parameters(optimizer)]
        norm = self._norm_of_groups(optimizer)
        if clip is not None:
            self._scale(parameters, clip, norm)
        optimizer.step()
        return norm

    def _norm_of_groups(self, optimizer: Optimizer) -> Tensor:
        by_weight: dict[float, list[nn.Parameter]] = defaultdict(list)
        for group in optimizer.param_groups:
            by_weight[group["clip"]] += group["params"]
        with_gradient = {
            w: ps for w, ps in by_weight.items() if any(p.grad is not None for p in ps)
        }
        norms = [
            math.sqrt(weight) * self.norm(ps) for weight, ps in (with_gradient or {1.0: []}).items()
        ]
        return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))

    def norm(self, parameters: list[nn.Parameter]) -> Tensor:
        """Returns the gradients' norm over all processes and parameters, on the device."""
        return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])

    def _scale(self, parameters: list[nn.Parameter], clip: float, norm: Tensor) -> None:
        torch.nn.utils.clip_grads_with_norm_(parameters, clip, norm)

    def slots(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """Returns this process's memory as NAME/SLOT -> tensor,
        so that the groups do not matter.
        """
        return {
            f"{name}/{slot}": value.detach().contiguous()
            for name, parameter in named_parameters(optimizer)
            for slot, value in optimizer.state.get(parameter, {}).items()
            if value is not None
        }

    def load_slots(self, optimizer: Optimizer, tensors: dict[str, Tensor]) -> None:
        """Puts this process's memory back. CheckpointError unless it is that
        of exactly these parameters.
        """
        slots: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for key, value in tensors.items():
            name, _, slot = key.rpartition("/")
            slots[name][slot] = value
        names = [name for name, _ in named_parameters(optimizer)]
        odd = sorted(slots.keys() ^ set(names))
        if tensors and odd:
            raise CheckpointError(
                f"the saved optimizer is of another model: {len(odd)} parameters differ, {odd[0]} "
                "first; begin a new run"
            )
        self._load_slots(optimizer, [slots[name] for name in names] if tensors else [])

    def _load_slots(self, optimizer: Optimizer, slots: list[dict[str, Tensor]]) -> None:
        # load_state_dict moves each tensor to where this kind of optimizer wants it
        optimizer.load_state_dict({**optimizer.state_dict(), "state": dict(enumerate(slots))})

    # Parameters and slots as files have them

    def tensors(self) -> dict[str, Tensor]:
        """Returns the weights that a checkpoint has, by name. A tied matrix has two,
        and gets the first.
        """
        return dict(self.model.named_parameters())

    def whole(self, name: str, x: Tensor) -> Tensor:
        """Returns a parameter or slot put together, rows in the file's order.
        All processes must call.
        """
        whole = self._gather(self._parameter(name), x).detach()
        order = self._order(name)
        return whole if order is None or not whole.dim() else whole[order.argsort()]

    def part(self, name: str, whole: Tensor) -> Tensor:
        """Returns this process's part of what `whole` returns: the inverse."""
        parameter, order = self._parameter(name), self._order(name)
        ordered = (whole if order is None or not whole.dim() else whole[order]).to(parameter.device)
        return self._divide(parameter, ordered)

    def saves_whole(self, name: str) -> bool:
        """Returns whether this is gathered before it is saved:
        its parts are no blocks of the saved one.
        """
        return self._order(name) is not None

    def shape(self, name: str) -> torch.Size:
        """Returns the shape that a file has of a parameter."""
        return self._parameter(name).shape

    def _gather(self, parameter: Tensor, x: Tensor) -> Tensor:
        return x.full_tensor() if isinstance(x, DTensor) else x

    def _divide(self, parameter: Tensor, whole: Tensor) -> Tensor:
        if not isinstance(parameter, DTensor) or not whole.dim():
            return whole
        # every process has the whole: nothing needs to be sent
        return distribute_tensor(
            whole, parameter.device_mesh, parameter.placements, src_data_rank=None
        )

    def _parameter(self, name: str) -> nn.Parameter:
        return self.model.get_parameter(name.partition("/")[0])

    def _order(self, name: str) -> Tensor | None:
        return self.rows.get(name.partition("/")[0])


def named_parameters(optimizer: Optimizer) -> list[tuple[str, nn.Parameter]]:
    """Returns (name, parameter) in the order of the optimizer's own numbering."""
    return [
        pair
        for group in optimizer.param_groups
        for pair in zip(group["names"], group["params"], strict=True)
    ]
