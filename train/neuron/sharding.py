"""Training on several NeuronCores: data parallel, by heads, and ZeRO-1. Not run on a chip.

Replicas average their gradients by `train.neuron.reduction`. Heads and ZeRO-1 are divided by AWS's
neuronx_distributed; names, arguments and shapes are those of its release 0.17 (Neuron SDK 2.28,
aws-neuron/neuronx-distributed at v2.28.0). Elsewhere PyTorch's own parts do it:
`train.parallel.pytorch`.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer

from delta_trn.backends import machine
from delta_trn.models import DeltaForCausalLM
from delta_trn.train.neuron import reduction
from delta_trn.train.parallel.heads import Holder, divide_heads
from delta_trn.train.parallel.sharding import Sharding, named_parameters
from delta_trn.train.parallel.team import Team
from delta_trn.train.settings.errors import ConfigError
from delta_trn.train.settings.schema import DistributionSection


def serves(device: torch.device) -> bool:
    """Whether work on `device` is divided by this module: torch_xla has no FSDP2 and no DTensor."""
    return device.type == "xla"


def require(how: DistributionSection) -> None:
    """ConfigError for what is divided only by PyTorch's own parts, which have no XLA kind."""
    if how.mode == "fsdp" or how.context > 1 or (how.mode == "zero1" and how.tensor > 1):
        raise ConfigError(
            f"distribution.mode={how.mode} with distribution.context={how.context} and "
            f"distribution.tensor={how.tensor} is not there on Neuron; use mode=ddp, or mode=zero1 "
            "with tensor=1, and context=1"
        )


class NeuronSharding(Sharding):
    """A model on the NeuronCores of a team of at least two processes."""

    def __init__(self, model: DeltaForCausalLM, how: DistributionSection, team: Team):
        super().__init__(model, team)
        assert team.mesh is not None  # there are two or more
        require(how)
        self._zero1 = how.mode == "zero1"
        self._by_heads = how.tensor > 1
        if self._by_heads:
            self.rows = _divide_heads(model, how.tensor)
        self._replicas = team.world // how.tensor
        self._groups = reduction.replica_groups(team.world, how.tensor)
        self._bucket = reduction.bucket_bytes()
        if self._replicas > 1:
            # they are equal anyway, drawn from one seed or read from one file
            tensors = [*model.parameters(), *model.buffers()]
            machine.broadcast(tensors, root=team.rank % how.tensor, groups=self._groups)

    def make_optimizer(
        self,
        kind: type[Optimizer],
        groups: list[dict[str, Any]],
        *,
        clip: float | None,
        **options: Any,
    ) -> Optimizer:
        """Under ZeRO-1 a NeuronZero1Optimizer: its step averages gradients, clips, updates and
        gathers.

        Without a `clip` the limit is infinite, so that the norm is measured all the same.
        """
        if not self._zero1:
            return super().make_optimizer(kind, groups, clip=clip, **options)
        if any(group["clip"] != 1 for group in groups):
            raise ConfigError(
                "optimizer.clip_norm=width is not there with distribution.mode=zero1 on Neuron, "
                "whose optimizer clips by itself; give clip_norm=global or mode=ddp"
            )
        initialize(1)
        options.pop("fused")  # it is for CPUs and GPUs
        return library("optimizer").NeuronZero1Optimizer(
            groups,
            kind,
            optimizer_dtype=torch.float32,
            grad_clipping=True,
            max_norm=float("inf") if clip is None else clip,
            pin_layout=False,
            save_master_weights=True,
            **options,
        )

    def step(self, optimizer: Any, clip: float | None) -> Tensor:
        if not self._zero1:
            if self._replicas > 1:
                parameters = (parameter for _, parameter in named_parameters(optimizer))
                reduction.average(parameters, self._replicas, self._groups, self._bucket)
            return super().step(optimizer, clip)
        optimizer.step()  # which reduces gradients, too
        return optimizer.grad_norm.squeeze()

    @property
    def is_divided(self) -> bool:
        return self._by_heads

    def norm(self, parameters: list[nn.Parameter]) -> Tensor:
        """Counts parts and what is whole once each."""
        if not self._by_heads:
            return super().norm(parameters)
        return (
            library("parallel_layers.grads").get_grad_norm(list(parameters), norm_type=2).squeeze()
        )

    def slots(self, optimizer: Any) -> dict[str, Tensor]:
        """Under ZeRO-1 whole tensors, from all processes' rows. All must call."""
        if not self._zero1:
            return super().slots(optimizer)
        group = library("parallel_layers.parallel_state").get_data_parallel_group()
        tensors = {}
        for (name, parameter), shard in zip(
            named_parameters(optimizer), _shards(optimizer), strict=True
        ):
            for slot, x in optimizer.base_optimizer.state.get(shard, {}).items():
                if x is not None:
                    rows = _gather(x, group, 0)[: parameter.shape[0]] if x.dim() else x
                    tensors[f"{name}/{slot}"] = rows.detach().contiguous()
        return tensors

    @torch.no_grad()
    def _load_slots(self, optimizer: Any, slots: list[dict[str, Tensor]]) -> None:
        """Under ZeRO-1 this process's rows, and those of the weights, which the optimizer has a
        second time.

        Process r of n has part r of each tensor, padded with zeros to a multiple of n rows.
        """
        if not self._zero1:
            super()._load_slots(optimizer, slots)
            return
        state = library("parallel_layers.parallel_state")
        n, rank = state.get_data_parallel_size(), state.get_data_parallel_rank()

        def rows(x: Tensor) -> Tensor:
            return torch.cat([x, x.new_zeros(-x.shape[0] % n, *x.shape[1:])]).chunk(n)[rank].clone()

        for (_, parameter), shard in zip(
            named_parameters(optimizer), _shards(optimizer), strict=True
        ):
            shard.copy_(rows(parameter))
        # there are no slots where the optimizer has no memory yet
        for shard, tensors in zip(_shards(optimizer), slots, strict=False):
            for slot, x in tensors.items():
                optimizer.base_optimizer.state[shard][slot] = (rows(x) if x.dim() else x).to(
                    shard.device
                )

    def saves_whole(self, name: str) -> bool:
        return _is_part(self._parameter(name))

    def shape(self, name: str) -> torch.Size:
        parameter: Any = self._parameter(name)
        shape = list(parameter.shape)
        if _is_part(parameter):
            shape[parameter.partition_dim] *= parameter.num_partitions
        return torch.Size(shape)

    def _gather(self, parameter: Any, x: Tensor) -> Tensor:
        if not x.dim() or not _is_part(parameter):
            return x
        group = library("parallel_layers.parallel_state").get_tensor_model_parallel_group()
        return _gather(x, group, parameter.partition_dim)

    def _divide(self, parameter: Any, whole: Tensor) -> Tensor:
        if not whole.dim() or not _is_part(parameter):
            return whole
        rank = library("parallel_layers.parallel_state").get_tensor_model_parallel_rank()
        return whole.chunk(parameter.num_partitions, parameter.partition_dim)[rank].clone()


def library(module: str) -> Any:
    """Returns a module of neuronx_distributed.
    ConfigError says what to install where it is missing.
    """
    if find_spec("neuronx_distributed") is None:
        raise ConfigError(
            "distribution.tensor and distribution.mode=zero1 on Neuron need neuronx_distributed: "
            "install neuronx-distributed==0.17.26814 (Neuron SDK 2.28) from AWS's package index, "
            "or use mode=ddp"
        )
    return import_module(f"neuronx_distributed.{module}")


def initialize(tensor: int) -> Any:
    """Makes neuronx_distributed's groups: `tensor` neighbors divide a layer,
    the others are data parallel.
    """
    state = library("parallel_layers.parallel_state")
    if not state.model_parallel_is_initialized():
        state.initialize_model_parallel(tensor_model_parallel_size=tensor)
    return state


def _divide_heads(model: DeltaForCausalLM, parts: int) -> dict[str, Tensor]:
    """Divides every block among `parts` processes, and marks parts as neuronx_distributed marks its
    own.

    Its ColumnParallelLinear would reduce the gradient of an input once for each projection that it
    has, six times per mixer; in a region it is once.
    """
    rank = initialize(parts).get_tensor_model_parallel_rank()

    def divide(whole: Tensor, dim: int | None) -> nn.Parameter:
        if dim is None:
            return nn.Parameter(whole)
        if whole.shape[dim] % parts:  # heads were found to be whole before
            raise ConfigError(
                f"distribution.tensor={parts} does not divide {whole.shape[dim]}, the inner size "
                "of an MLP, into the equal parts that Neuron needs; give another "
                "model.intermediate_size"
            )
        part = nn.Parameter(whole.chunk(parts, dim)[rank].clone())
        library("parallel_layers.utils").set_tensor_model_parallel_attributes(
            part, is_parallel=True, dim=dim, stride=1, num_partitions=parts
        )
        return part

    return divide_heads(model, parts, divide, _Region)


class _Region:
    """Calls the layer's own forward on local heads, or on the local part of an MLP's inner size.

    neuronx_distributed has a pair of functions for it. `enter` copies x and what the heads share,
    and sums their gradients in backward; `leave` sums the outputs of all processes, and copies the
    gradient.
    """

    def __init__(self, module: nn.Module):
        self.holder = Holder(module)
        mappings = library("parallel_layers.mappings")
        self.enter = mappings.copy_to_tensor_model_parallel_region
        self.leave = mappings.reduce_from_tensor_model_parallel_region

    def __call__(self, x: Tensor, *others: Any) -> Tensor:
        shared = {
            name: self.enter(p) for name, p in self.holder.named_parameters() if not _is_part(p)
        }
        return self.leave(functional_call(self.holder, shared, (self.enter(x), *others)))


def _is_part(parameter: Tensor) -> bool:
    return bool(getattr(parameter, "tensor_model_parallel", False))


def _shards(optimizer: Any) -> list[Tensor]:
    return [p for group in optimizer.base_optimizer.param_groups for p in group["params"]]


def _gather(x: Tensor, group: Any, dim: int) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x.detach().contiguous(), group=group)
    return torch.cat(parts, dim)
