"""One model on every process of a team: DDP, ZeRO-1 or FSDP2, tensor and context parallelism.

Every process calls `loss` with its share of a step's tokens, and finds the gradient of the mean over all of
them. All communication is PyTorch's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from delta_trn.train.neuron import sharding as neuron
from delta_trn.train.parallel.heads import divide_heads
from delta_trn.train.parallel.sequence import pass_states_on
from delta_trn.train.parallel.team import Team
from delta_trn.train.settings.schema import DistributionSection

if TYPE_CHECKING:
    from delta_trn.models import DeltaForCausalLM


class Parallel:
    """A model made ready for its team. Alone, it is the model itself.

    rows                    name -> order in which this model has a parameter's rows, where that is not the
                            file's order
    optimizer_shared_by     who divides the optimizer among them, in mode zero1
    """

    def __init__(self, model: DeltaForCausalLM, how: DistributionSection, team: Team):
        self.model, self.team = model, team
        self.rows: dict[str, Tensor] = {}
        self._replicated: DistributedDataParallel | None = None
        self._sharded: list[FSDPModule] = []
        self.optimizer_shared_by: ProcessGroup | None = None
        if team.mesh is None:
            return
        if neuron.serves(model.device):
            neuron.require(how)
        if team.context is not None:
            pass_states_on(model, team.context["context"])
        if how.tensor > 1:
            self.rows = divide_heads(model, team.mesh["tensor"])
        replicas = team.mesh["replica"]
        if how.mode == "fsdp":
            for module in (*model.blocks, model):
                self._sharded.append(fully_shard(module, mesh=replicas))  # type: ignore[arg-type]
            register_fsdp_forward_method(model, "loss")
        elif how.mode == "zero1" and neuron.serves(model.device):
            return  # the optimizer reduces gradients in its step
        elif replicas.size() > 1:
            if how.mode == "zero1":
                self.optimizer_shared_by = replicas.get_group()
            # buckets of gradients that every process has in the same order, because all run the same graph
            self._replicated = DistributedDataParallel(
                _Loss(model), process_group=replicas.get_group(), gradient_as_bucket_view=True
            )

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy of this process's tokens; inputs, targets [B, T].

        Under context parallelism each process of a group gives the same sequences, and its part is taken.
        """
        inputs, targets = self._part(inputs), self._part(targets)
        return (self.model.loss if self._replicated is None else self._replicated)(inputs, targets)

    @contextlib.contextmanager
    def accumulating(self, more: bool) -> Iterator[None]:
        """Around a backward pass: gradients are reduced in it unless there is `more` to come."""
        if self._replicated is not None and more:
            with self._replicated.no_sync():
                yield
            return
        for module in self._sharded:
            module.set_requires_gradient_sync(not more, recurse=False)
        yield

    def at_rest(self) -> None:
        """Give back what the last forward pass gathered: parameters are this process's parts again."""
        for module in self._sharded:
            module.reshard()

    def whole(self, name: str, x: Tensor) -> Tensor:
        """A parameter or slot from everybody's parts, rows in the file's order. All processes must call."""
        parameter = self.model.get_parameter(name.partition("/")[0])
        if x.dim() and neuron.is_part(parameter):
            x = neuron.whole(x, parameter)
        whole = (x.full_tensor() if isinstance(x, DTensor) else x).detach()
        order = self.moved(name)
        return whole if order is None or not whole.dim() else whole[order.argsort()]

    def part(self, name: str, whole: Tensor) -> Tensor:
        """The opposite: this process's part of what `whole` would return."""
        parameter = self.model.get_parameter(name.partition("/")[0])
        order = self.moved(name)
        ordered = (whole if order is None or not whole.dim() else whole[order]).to(parameter.device)
        if whole.dim() and neuron.is_part(parameter):
            return neuron.part(ordered, parameter)
        if not isinstance(parameter, DTensor) or not whole.dim():
            return ordered
        # every process has the whole: nothing needs to be sent
        return distribute_tensor(ordered, parameter.device_mesh, parameter.placements, src_data_rank=None)

    def moved(self, name: str) -> Tensor | None:
        """`rows` of a parameter, or of an optimizer's slot NAME/SLOT."""
        return self.rows.get(name.partition("/")[0])

    def saved_whole(self, name: str) -> bool:
        """Whether a checkpoint has it whole, because the parts of processes are no blocks of the file's."""
        parameter = self.model.get_parameter(name.partition("/")[0])
        return self.moved(name) is not None or neuron.is_part(parameter)

    def _part(self, tokens: Tensor) -> Tensor:
        context = self.team.context
        if context is None:
            return tokens
        return tokens.chunk(context["context"].size(), dim=1)[context["context"].get_local_rank()]


class _Loss(nn.Module):
    """DDP reduces what is computed in forward; the model's is for logits."""

    def __init__(self, model: DeltaForCausalLM):
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.model.loss(inputs, targets)


def total_norm(parameters: list[nn.Parameter]) -> Tensor:
    """The gradients' norm over all processes and parameters, on the device; the same everywhere."""
    if any(map(neuron.is_part, parameters)):
        return neuron.total_norm(parameters)
    by_mesh: dict[object, list[Tensor]] = {}
    for p in parameters:
        if p.grad is not None:
            by_mesh.setdefault(p.grad.device_mesh if isinstance(p.grad, DTensor) else None, []).append(p.grad)
    norms = [torch.nn.utils.get_total_norm(grads) for grads in by_mesh.values()]
    whole = [n.full_tensor() if isinstance(n, DTensor) else n for n in norms]
    return whole[0] if len(whole) == 1 else torch.linalg.vector_norm(torch.stack(whole))


def clip(parameters: list[nn.Parameter], limit: float | None) -> Tensor:
    """Scale all gradients so that their norm is at most `limit`. Returns the norm before.

    After the reduction: a process's own gradient is longer than their mean.
    """
    norm = total_norm(parameters)
    if limit is not None:
        whole = [p for p in parameters if not isinstance(p.grad, DTensor)]
        torch.nn.utils.clip_grads_with_norm_(whole, limit, norm)
        for p in parameters:
            if isinstance(p.grad, DTensor):
                # the same arithmetic, on this process's part
                p.grad.to_local().mul_(torch.clamp(limit / (norm + 1e-6), max=1.0))
    return norm
