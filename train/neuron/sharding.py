"""Training on several NeuronCores: data parallel and ZeRO-1. Not run on a chip.

Replicas average gradients by `train.neuron.reduction`. ZeRO-1 is that of AWS's neuronx_distributed, with
the names and arguments of its release 0.17 (Neuron SDK 2.28, aws-neuron/neuronx-distributed at v2.28.0).
Elsewhere PyTorch's own parts do it: `train.parallel.pytorch`.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from delta_trn.backends import machine
from delta_trn.train.neuron import reduction
from delta_trn.train.parallel.sharding import Sharding, named_parameters
from delta_trn.train.parallel.team import Team
from delta_trn.train.settings.errors import ConfigError
from delta_trn.train.settings.schema import DistributionSection

if TYPE_CHECKING:
    from delta_trn.models import DeltaForCausalLM


def serves(device: torch.device) -> bool:
    """Whether work on `device` is divided by this module: torch_xla has no FSDP2 and no DTensor."""
    return device.type == "xla"


def require(how: DistributionSection) -> None:
    """ConfigError for what is divided only by PyTorch's own parts, which have no XLA kind."""
    if how.mode == "fsdp" or how.context > 1 or how.tensor > 1:
        raise ConfigError(
            f"distribution.mode={how.mode} with distribution.context={how.context} and "
            f"distribution.tensor={how.tensor} is not there on Neuron; use mode=ddp or mode=zero1, context=1 "
            "and tensor=1"
        )


class NeuronSharding(Sharding):
    """A model on the NeuronCores of a team of at least two processes."""

    def __init__(self, model: DeltaForCausalLM, how: DistributionSection, team: Team):
        super().__init__(model, team)
        assert team.mesh is not None  # there are two or more
        require(how)
        self._zero1 = how.mode == "zero1"
        self._bucket = reduction.bucket_bytes()
        # they are equal anyway, drawn from one seed or read from one file
        machine.broadcast([*model.parameters(), *model.buffers()], root=0)

    def make_optimizer(
        self, kind: type[Optimizer], groups: list[dict[str, Any]], *, clip: float | None, **options: Any
    ) -> Optimizer:
        """Under ZeRO-1 a NeuronZero1Optimizer: its step averages gradients, clips, updates and gathers.

        Without a `clip` the limit is infinite, so that the norm is measured all the same.
        """
        if not self._zero1:
            return super().make_optimizer(kind, groups, clip=clip, **options)
        if any(group["clip"] != 1 for group in groups):
            raise ConfigError(
                "optimizer.clip_norm=width is not there with distribution.mode=zero1 on Neuron, whose "
                "optimizer clips by itself; give clip_norm=global or mode=ddp"
            )
        state = library("parallel_layers.parallel_state")
        if not state.model_parallel_is_initialized():
            state.initialize_model_parallel(tensor_model_parallel_size=1)
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
            parameters = (parameter for _, parameter in named_parameters(optimizer))
            reduction.average(parameters, self.team.world, self._bucket)
            return super().step(optimizer, clip)
        optimizer.step()  # which reduces gradients, too
        return optimizer.grad_norm.squeeze()

    def slots(self, optimizer: Any) -> dict[str, Tensor]:
        """Under ZeRO-1 whole tensors, from all processes' rows. All must call."""
        if not self._zero1:
            return super().slots(optimizer)
        tensors = {}
        for (name, parameter), shard in zip(named_parameters(optimizer), _shards(optimizer), strict=True):
            for slot, x in optimizer.base_optimizer.state.get(shard, {}).items():
                if x is not None:
                    rows = _gathered(x)[: parameter.shape[0]] if x.dim() else x
                    tensors[f"{name}/{slot}"] = rows.detach().contiguous()
        return tensors

    @torch.no_grad()
    def _load_slots(self, optimizer: Any, slots: list[dict[str, Tensor]]) -> None:
        """Under ZeRO-1 this process's rows, and those of the weights, which the optimizer has a second time.

        Process r of n has part r of each tensor, padded with zeros to a multiple of n rows.
        """
        if not self._zero1:
            super()._load_slots(optimizer, slots)
            return
        n, rank = self.team.world, self.team.rank

        def rows(x: Tensor) -> Tensor:
            return torch.cat([x, x.new_zeros(-x.shape[0] % n, *x.shape[1:])]).chunk(n)[rank].clone()

        for (_, parameter), shard in zip(named_parameters(optimizer), _shards(optimizer), strict=True):
            shard.copy_(rows(parameter))
        # there are no slots where the optimizer has no memory yet
        for shard, tensors in zip(_shards(optimizer), slots, strict=False):
            for slot, x in tensors.items():
                optimizer.base_optimizer.state[shard][slot] = (rows(x) if x.dim() else x).to(shard.device)


def library(module: str) -> Any:
    """Returns a module of neuronx_distributed. ConfigError says what to install where it is missing."""
    if find_spec("neuronx_distributed") is None:
        raise ConfigError(
            "distribution.mode=zero1 on Neuron needs neuronx_distributed: install "
            "neuronx-distributed==0.17.26814 (Neuron SDK 2.28) from AWS's package index, or use mode=ddp"
        )
    return import_module(f"neuronx_distributed.{module}")


def _shards(optimizer: Any) -> list[Tensor]:
    return [p for group in optimizer.base_optimizer.param_groups for p in group["params"]]


def _gathered(x: Tensor) -> Tensor:
    group = library("parallel_layers.parallel_state").get_data_parallel_group()
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x.detach().contiguous(), group=group)
    return torch.cat(parts)
