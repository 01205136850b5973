"""Tensor parallelism by heads with DTensor: each process computes whole heads, and the scan sends nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.func import functional_call

from delta_trn.models.gated_deltanet import GatedDeltaNet

if TYPE_CHECKING:
    from delta_trn.models import DeltaForCausalLM

SWIGLU = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
ATTENTION = {
    **{name: ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")},
    "o_proj": RowwiseParallel(),
}


def divide_heads(model: DeltaForCausalLM, mesh: DeviceMesh) -> dict[str, Tensor]:
    """Divides every block among the processes of a one-dimensional mesh; embedding and norms stay whole.

    Returns name -> order of the rows of a parameter whose rows had to be moved so that a process's heads
    are neighbors.
    """
    moved = {}
    for index, block in enumerate(model.model.blocks):
        parallelize_module(block.mlp, mesh, SWIGLU)  # type: ignore[arg-type]
        if isinstance(block.mixer, GatedDeltaNet):
            moved[f"model.blocks.{index}.mixer.conv.weight"] = channels(block.mixer.sizes, mesh.size())
            parallelize_module(block.mixer, mesh, HeadParallel())
        else:
            parallelize_module(block.mixer, mesh, ATTENTION)  # type: ignore[arg-type]
    return moved


class HeadParallel(ParallelStyle):
    """Divides GatedDeltaNet by columns of its projections and rows of o_proj: HV / n value heads per process.

    The layer's own forward runs on local tensors. Around it, in torch.distributed.tensor's terms: x is
    replicated and its gradient partial, y is partial, as is the gradient of the norm's gain that heads share.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, GatedDeltaNet)
        order = channels(module.sizes, device_mesh.size()).to(module.conv.weight.device)
        for name, parameter in list(module.named_parameters()):
            value = parameter.detach()[order] if name == "conv.weight" else parameter.detach()
            owner = module.get_submodule(name.rpartition(".")[0])
            divided = nn.Parameter(
                distribute_tensor(value, device_mesh, [_placement(name)], src_data_rank=None)
            )
            owner.register_parameter(name.rpartition(".")[2], divided)
        module.sizes = tuple(size // device_mesh.size() for size in module.sizes)  # type: ignore[assignment]
        module.forward = _Local(module, device_mesh)  # type: ignore[method-assign]
        return module


def _placement(name: str) -> Placement:
    if name.startswith("o_norm"):
        return Replicate()
    return Shard(1) if name.startswith("o_proj") else Shard(0)


class _Local:
    """Calls the layer's forward with this process's part of every parameter in its place."""

    def __init__(self, module: GatedDeltaNet, mesh: DeviceMesh):
        self.mesh, self.holder = mesh, Holder(module)

    def __call__(self, x: Tensor, *others: Any) -> Tensor:
        whole = DTensor.from_local(x, self.mesh, [Replicate()], run_check=False)
        local = whole.to_local(grad_placements=[Partial()])
        parts = {
            name: p.to_local(grad_placements=[Partial() if place.is_replicate() else place])
            for name, p in self.holder.named_parameters()
            if isinstance(p, DTensor)
            for place in p.placements
        }
        y = functional_call(self.holder, parts, (local, *others))
        return DTensor.from_local(y, self.mesh, [Partial()], run_check=False).full_tensor()


def channels(sizes: tuple[int, ...], parts: int) -> Tensor:
    """Returns channels [q, k, v] in the order process by process: [q0, k0, v0, q1, k1, v1, ...].

    >>> channels((2, 2, 4), 2).tolist()
    [0, 2, 4, 5, 1, 3, 6, 7]
    """
    segments = torch.arange(sum(sizes)).split(list(sizes))
    return torch.cat([segment.chunk(parts)[part] for part in range(parts) for segment in segments])


class Holder(nn.Module):
    """Gives functional_call a module whose forward is its class's, not the one that was put in its place."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, *arguments: Any) -> Tensor:
        return type(self.module).forward(self.module, *arguments)
