"""Tensor parallelism by heads with DTensor: each process computes whole heads,
and the scan sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.func import functional_call

from delta_trn.models import DeltaForCausalLM
from delta_trn.models.gated_deltanet import GatedDeltaNet


def divide_heads(
    model: DeltaForCausalLM,
    parts: int,
    divide: Callable[[Tensor, int | None], nn.Parameter],
    region: Callable[[nn.Module], Callable[..., Tensor]],
) -> dict[str, Tensor]:
    """Divides every block among `parts` processes; embedding and norms of the blocks stay whole.

    divide    (a whole parameter, its divided dimension; None: all have it) -> this process's
              parameter
    region    returns what a mixer or an MLP computes from its parts, in place of its forward

    Returns name -> order of the rows of a parameter whose rows had to be moved so that a process's
    heads are neighbors.
    """
    moved = {}
    blocks: Any = model.model.blocks
    for index, block in enumerate(blocks):
        for kind in ("mixer", "mlp"):
            layer = getattr(block, kind)
            for name, parameter in list(layer.named_parameters()):
                whole = parameter.detach()
                if name == "conv.weight":
                    order = moved[f"model.blocks.{index}.{kind}.{name}"] = channels(
                        layer.sizes, parts
                    )
                    whole = whole[order.to(whole.device)]
                # the gains of norms are on every process
                is_shared = name.startswith(("o_norm", "q_norm", "k_norm", "f_proj.0", "g_proj.0"))
                dim = None if is_shared else 1 if name.startswith(("o_proj", "down_proj")) else 0
                owner, _, slot = name.rpartition(".")
                layer.get_submodule(owner).register_parameter(slot, divide(whole, dim))
            if isinstance(layer, GatedDeltaNet):
                layer.sizes = tuple(size // parts for size in layer.sizes)  # type: ignore[assignment]
            layer.forward = region(layer)
    return moved


def divide_by_dtensor(model: DeltaForCausalLM, mesh: DeviceMesh) -> dict[str, Tensor]:
    """Divides every block among the processes of a one-dimensional mesh.
    Returns what `divide_heads` does.
    """

    def divide(whole: Tensor, dim: int | None) -> nn.Parameter:
        place = Replicate() if dim is None else Shard(dim)
        return nn.Parameter(distribute_tensor(whole, mesh, [place], src_data_rank=None))

    return divide_heads(model, mesh.size(), divide, lambda layer: _Local(layer, mesh))


class _Local:
    """Calls a layer's own forward on local tensors, with this process's part of every parameter in
    its place.

    In torch.distributed.tensor's terms: x is replicated and its gradient partial, y is partial, as
    is the gradient of the norm's gain that heads share.
    """

    def __init__(self, module: nn.Module, mesh: DeviceMesh):
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
    """Gives functional_call a module whose forward is its class's,
    not the one that was put in its place.
    """

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, *arguments: Any) -> Tensor:
        return type(self.module).forward(self.module, *arguments)
