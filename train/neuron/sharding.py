"""Tensor parallelism by heads, and ZeRO-1, on Neuron: by AWS's neuronx_distributed. Not run on a chip.

Names, arguments and shapes are those of its release 0.18 (Neuron SDK 2.29, aws-neuron/neuronx-distributed).
Elsewhere PyTorch's own parts do the same: `train.tensor_parallel`, ZeroRedundancyOptimizer.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer

from delta_trn.models.attention import Attention
from delta_trn.models.gated_deltanet import GatedDeltaNet
from delta_trn.train.settings.errors import ConfigError
from delta_trn.train.settings.schema import DistributionSection

if TYPE_CHECKING:
    from delta_trn.models import DeltaForCausalLM

Named = list[tuple[str, nn.Parameter]]


def serves(device: torch.device) -> bool:
    """Whether work on `device` is divided by neuronx_distributed: torch_xla has no other."""
    return device.type == "xla"


def require(how: DistributionSection) -> None:
    """ConfigError for what is divided only by PyTorch's own parts, which have no XLA kind."""
    if how.mode == "fsdp" or how.context > 1:
        raise ConfigError(
            f"distribution.mode={how.mode} with distribution.context={how.context} is not there on Neuron; "
            "use mode=ddp or mode=zero1, and context=1"
        )


def library(module: str) -> Any:
    """A module of neuronx_distributed. ConfigError, with what to install, where it is not."""
    if find_spec("neuronx_distributed") is None:
        raise ConfigError(
            "distribution.tensor and distribution.mode=zero1 on Neuron need neuronx_distributed: install "
            "neuronx-distributed==0.17.26814 (Neuron SDK 2.28) from AWS's package index, or use mode=ddp"
        )
    return import_module(f"neuronx_distributed.{module}")


def initialize(tensor: int) -> Any:
    """neuronx_distributed's groups: `tensor` neighbors divide a layer, the others are data parallel."""
    state = library("parallel_layers.parallel_state")
    if not state.model_parallel_is_initialized():
        state.initialize_model_parallel(tensor_model_parallel_size=tensor)
    return state


def divide_heads(model: DeltaForCausalLM, parts: int) -> dict[str, Tensor]:
    """Divide every block among `parts` processes; embedding and norms stay whole. The scan sends nothing.

    SwiGLU's maps become ColumnParallelLinear and RowParallelLinear. A mixer is one region instead: its
    projections share one input, whose gradient ColumnParallelLinear would reduce once for each of them, six
    times a layer; here it is once. Their weights are marked as ColumnParallelLinear marks its own.

    Returns name -> order of rows, as `train.tensor_parallel.divide_heads` does, here of everything divided.
    """
    from delta_trn.train.parallel.heads import channels

    rank = initialize(parts).get_tensor_model_parallel_rank()
    rows = {}
    blocks: Any = model.blocks
    for index, block in enumerate(blocks):
        mixer, mlp = block.mixer, block.mlp
        for name, linear in list(mlp.named_children()):
            rows[f"blocks.{index}.mlp.{name}.weight"] = torch.arange(linear.weight.shape[0])
            setattr(mlp, name, _parallel_linear(linear, parts, rank, row=name == "down_proj"))
        for name, parameter in list(mixer.named_parameters()):
            dim = _dimension(name)
            if dim is None:
                continue
            neighbors = name == "conv.weight"
            order = channels(mixer.sizes, parts) if neighbors else torch.arange(parameter.shape[0])
            rows[f"blocks.{index}.mixer.{name}"] = order
            owner, _, slot = name.rpartition(".")
            ordered = parameter.detach()[order.to(parameter.device)]
            mixer.get_submodule(owner).register_parameter(slot, _marked(ordered, dim, parts, rank))
        if isinstance(mixer, GatedDeltaNet):
            mixer.sizes = tuple(size // parts for size in mixer.sizes)  # type: ignore[assignment]
        mixer.forward = _Region(mixer)  # type: ignore[method-assign]
    return rows


def _dimension(name: str) -> int | None:
    """Which dimension of a mixer's parameter is divided; None: it is on every process."""
    if name.startswith(("o_norm", "q_norm", "k_norm")):
        return None
    return 1 if name.startswith("o_proj") else 0


def _marked(whole: Tensor, dim: int, parts: int, rank: int) -> nn.Parameter:
    """This process's part, with the attributes that neuronx_distributed tells a divided parameter by."""
    part = nn.Parameter(whole.chunk(parts, dim)[rank].clone())
    library("parallel_layers.utils").set_tensor_model_parallel_attributes(
        part, is_parallel=True, dim=dim, stride=1, num_partitions=parts
    )
    return part


def _parallel_linear(linear: Any, parts: int, rank: int, *, row: bool) -> nn.Module:
    """Column- or RowParallelLinear with this process's part of the weight; on "meta" it draws none itself."""
    layers = library("parallel_layers.layers")
    kind = layers.RowParallelLinear if row else layers.ColumnParallelLinear
    how = {"input_is_parallel": True} if row else {"gather_output": False}
    outputs, inputs = linear.weight.shape
    made = kind(inputs, outputs, bias=False, device=torch.device("meta"), **how)
    made.weight = _marked(linear.weight.detach(), 1 if row else 0, parts, rank)
    made.tags = linear.tags
    return made


class _Region:
    """Calls the mixer's own forward on local heads: x and what heads share go in, sums of all come out.

    neuronx_distributed's pair of functions: the one that goes in copies, and sums gradients in backward; the
    one that comes out sums, and copies gradients.
    """

    def __init__(self, module: nn.Module):
        self.holder = _Holder(module)
        mappings = library("parallel_layers.mappings")
        self.enter = mappings.copy_to_tensor_model_parallel_region
        self.leave = mappings.reduce_from_tensor_model_parallel_region

    def __call__(self, x: Tensor, *others: Any) -> Tensor:
        shared = {
            name: self.enter(p)
            for name, p in self.holder.named_parameters()
            if not getattr(p, "tensor_model_parallel", False)
        }
        return self.leave(functional_call(self.holder, shared, (self.enter(x), *others)))


class _Holder(nn.Module):
    """Gives functional_call a module whose forward is the class's, not the one that was put in its place."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, *arguments: Any) -> Tensor:
        kind = GatedDeltaNet if isinstance(self.module, GatedDeltaNet) else Attention
        return kind.forward(self.module, *arguments)  # type: ignore[arg-type]


def is_part(parameter: Tensor) -> bool:
    """Whether neuronx_distributed has this parameter divided."""
    return bool(getattr(parameter, "tensor_model_parallel", False))


def whole_shape(parameter: Tensor) -> torch.Size:
    """What a file has of a parameter, of which this may be a part."""
    shape = list(parameter.shape)
    if is_part(parameter):
        shape[parameter.partition_dim] *= parameter.num_partitions  # type: ignore[attr-defined]
    return torch.Size(shape)


def whole(x: Tensor, parameter: Tensor) -> Tensor:
    """A parameter, or a slot of its shape, from all processes' parts. All must call."""
    group = library("parallel_layers.parallel_state").get_tensor_model_parallel_group()
    return _gathered(x, group, parameter.partition_dim)  # type: ignore[attr-defined]


def part(x: Tensor, parameter: Tensor) -> Tensor:
    """The opposite."""
    rank = library("parallel_layers.parallel_state").get_tensor_model_parallel_rank()
    return x.chunk(parameter.num_partitions, parameter.partition_dim)[rank].clone()  # type: ignore[attr-defined]


def total_norm(parameters: list[nn.Parameter]) -> Tensor:
    """The gradients' norm over parts and whole ones, each counted once; the same on every process."""
    return library("parallel_layers.grads").get_grad_norm(list(parameters), norm_type=2).squeeze()


def zero1(
    groups: list[dict[str, Any]], kind: type[Optimizer], limit: float | None, **options: Any
) -> Optimizer:
    """NeuronZero1Optimizer: a step of it averages gradients over processes, clips, updates, gathers.

    limit   largest norm; `grad_norm` has the one before. Without one the limit is infinite, so that it is
            measured all the same
    """
    initialize(1)
    optimizer = library("optimizer").NeuronZero1Optimizer
    return optimizer(
        groups,
        kind,
        optimizer_dtype=torch.float32,
        grad_clipping=True,
        max_norm=float("inf") if limit is None else limit,
        pin_layout=False,
        save_master_weights=True,
        **options,
    )


def step(optimizer: Any) -> Tensor:
    """One step of `zero1`'s optimizer. Returns the norm of the averaged gradients before they are clipped."""
    optimizer.step()
    return optimizer.grad_norm.squeeze()


def is_zero1(optimizer: Optimizer) -> bool:
    """Whether the optimizer is one of torch_xla's that divide themselves."""
    return hasattr(optimizer, "base_optimizer")


def zero1_memory(optimizer: Any, named: Named) -> dict[str, Tensor]:
    """NAME/SLOT -> whole tensor, from all processes' rows. All must call."""
    group = library("parallel_layers.parallel_state").get_data_parallel_group()
    found = {}
    for (name, parameter), shard in zip(named, _shards(optimizer), strict=True):
        for slot, x in optimizer.base_optimizer.state.get(shard, {}).items():
            if x is not None:
                rows = _gathered(x, group, 0)[: parameter.shape[0]] if x.dim() else x
                found[f"{name}/{slot}"] = rows.detach().contiguous()
    return found


@torch.no_grad()
def load_zero1_memory(optimizer: Any, named: Named, tensors: dict[str, Tensor]) -> None:
    """Put this process's rows back, and those of the weights, which the optimizer has a second time.

    Process r of n has part r of each tensor, padded with zeros to a multiple of n rows.
    """
    state = library("parallel_layers.parallel_state")
    n, rank = state.get_data_parallel_size(), state.get_data_parallel_rank()

    def rows(x: Tensor) -> Tensor:
        return torch.cat([x, x.new_zeros(-x.shape[0] % n, *x.shape[1:])]).chunk(n)[rank].clone()

    for (name, parameter), shard in zip(named, _shards(optimizer), strict=True):
        shard.copy_(rows(parameter))
        for key, x in tensors.items():
            owner, _, slot = key.rpartition("/")
            if owner == name:
                optimizer.base_optimizer.state[shard][slot] = (rows(x) if x.dim() else x).to(shard.device)


def _shards(optimizer: Any) -> list[Tensor]:
    return [p for group in optimizer.base_optimizer.param_groups for p in group["params"]]


def _gathered(x: Tensor, group: Any, dim: int) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x.detach().contiguous(), group=group)
    return torch.cat(parts, dim)
