"""PyTorch's own ways to divide a model: DDP, FSDP2, tensor parallelism by DTensor, context
parallelism.

`distribution.mode=zero1` is FSDP2 that keeps the weights gathered between the forward and backward
passes of a step: a process stores the optimizer's memory of its part alone, and the weights of all.

Where products are in bf16, FSDP2 sends the blocks' matrices in bf16, which is what autocast rounds
them to, and their gradients in float32. It cannot send one block's parameters in two types. So the
blocks' other parameters, gains, taps and gates, are whole on every process, in float32: they are
small.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from delta_trn.models import DeltaForCausalLM
from delta_trn.train.parallel.heads import divide_by_dtensor
from delta_trn.train.parallel.sequence import pass_states_on
from delta_trn.train.parallel.sharding import Sharding
from delta_trn.train.parallel.team import Team
from delta_trn.train.settings.errors import ConfigError
from delta_trn.train.settings.schema import DistributionSection


class PyTorchSharding(Sharding):
    """A model divided by torch.distributed, among the processes of a team of at least two."""

    def __init__(
        self, model: DeltaForCausalLM, how: DistributionSection, team: Team, *, bf16: bool = False
    ):
        super().__init__(model, team)
        assert team.mesh is not None  # there are two or more
        self._fully_sharded: list[FSDPModule] = []
        self._whole: list[str] = []  # names of parameters that FSDP2 leaves whole
        self._keeps_weights = how.mode == "zero1"
        self._replicated: DistributedDataParallel | None = None
        if team.context is not None:
            pass_states_on(model, team.context["context"])
        replicas = team.mesh["replica"]
        self._by_heads = how.tensor > 1
        if self._by_heads:
            if replicas.size() > 1 and how.mode != "fsdp":
                raise ConfigError(
                    f"distribution.mode={how.mode} does not go with "
                    f"distribution.tensor={how.tensor} on {team.world} processes; use "
                    f"distribution.mode=fsdp, or distribution.tensor={team.world}"
                )
            self.rows = divide_by_dtensor(model, team.mesh["tensor"])
        if how.mode == "fsdp" or (how.mode == "zero1" and replicas.size() > 1):
            self._shard_fully(replicas, bf16=bf16)
            register_fsdp_forward_method(model, "loss")
        elif replicas.size() > 1:
            # every process has gradients' buckets in the same order, because all run the same graph
            self._replicated = DistributedDataParallel(
                _Loss(model), process_group=replicas.get_group(), gradient_as_bucket_view=True
            )

    def _shard_fully(self, replicas: DeviceMesh, *, bf16: bool) -> None:
        model: Any = self.model
        options: dict[str, Any] = {
            "mesh": replicas,
            "reshard_after_forward": not self._keeps_weights,
        }
        for index, block in enumerate(model.model.blocks):
            if bf16:
                whole = parameters_in_float32(block)
                self._whole += [f"model.blocks.{index}.{name}" for name in whole]
                options["ignored_params"] = set(whole.values())
                options["mp_policy"] = MixedPrecisionPolicy(
                    param_dtype=torch.bfloat16,
                    reduce_dtype=torch.float32,
                    cast_forward_inputs=False,
                )
            self._fully_sharded.append(fully_shard(block, **options))
        options.pop("mp_policy", None)
        self._fully_sharded.append(fully_shard(model, **options))

    def loss(self, inputs: Tensor, targets: Tensor, **others: Tensor | None) -> Tensor:
        """Under context parallelism each process of a group has the same sequences,
        and its part is taken.
        """
        compute = self._replicated or self.model.loss
        parts = {name: self._segment(x) for name, x in others.items() if x is not None}
        return compute(self._segment(inputs), self._segment(targets), **parts)

    def _segment(self, tokens: Tensor) -> Tensor:
        context = self.team.context
        if context is None:
            return tokens
        return tokens.chunk(context["context"].size(), dim=1)[context["context"].get_local_rank()]

    @contextlib.contextmanager
    def accumulating(self, more: bool) -> Iterator[None]:
        for module in self._fully_sharded:
            module.set_requires_gradient_sync(not more, recurse=False)
            if self._keeps_weights:
                module.set_reshard_after_backward(not more, recurse=False)
        with self._replicated.no_sync() if self._replicated and more else contextlib.nullcontext():
            yield

    def at_rest(self) -> None:
        for module in self._fully_sharded:
            module.reshard()

    @property
    def is_divided(self) -> bool:
        return self._by_heads or bool(self._fully_sharded)

    def step(self, optimizer: Optimizer, clip: float | None) -> Tensor:
        if self._whole:
            self._average_gradients()
        return super().step(optimizer, clip)

    @torch.no_grad()
    def _average_gradients(self) -> None:
        """Does for the parameters that FSDP2 leaves whole what it does for its own,
        in one collective.
        """
        assert self.team.mesh is not None
        replicas = self.team.mesh["replica"]
        gradients = [
            p.grad for p in map(self.model.get_parameter, self._whole) if p.grad is not None
        ]
        local = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
        together = torch.cat([g.flatten() for g in local])
        dist.all_reduce(together, group=replicas.get_group())
        parts = (together / replicas.size()).split([g.numel() for g in local])
        for gradient, mean in zip(local, parts, strict=True):
            gradient.copy_(mean.view_as(gradient))

    def norm(self, parameters: list[nn.Parameter]) -> Tensor:
        by_mesh: dict[object, list[Tensor]] = {}
        for p in parameters:
            if p.grad is not None:
                mesh = p.grad.device_mesh if isinstance(p.grad, DTensor) else None
                by_mesh.setdefault(mesh, []).append(p.grad)
        norms = [torch.nn.utils.get_total_norm(gradients) for gradients in by_mesh.values()]
        whole = [n.full_tensor() if isinstance(n, DTensor) else n for n in norms]
        return whole[0] if len(whole) == 1 else torch.linalg.vector_norm(torch.stack(whole))

    def _scale(self, parameters: list[nn.Parameter], clip: float, norm: Tensor) -> None:
        super()._scale([p for p in parameters if not isinstance(p.grad, DTensor)], clip, norm)
        for p in parameters:
            if isinstance(p.grad, DTensor):
                # the same arithmetic, on this process's part
                p.grad.to_local().mul_(torch.clamp(clip / (norm + 1e-6), max=1.0))


class _Loss(nn.Module):
    """DDP reduces what is computed in forward; the model's is for logits."""

    def __init__(self, model: DeltaForCausalLM):
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, targets: Tensor, **others: Tensor | None) -> Tensor:
        return self.model.loss(inputs, targets, **others)


def parameters_in_float32(block: nn.Module) -> dict[str, nn.Parameter]:
    """Returns by name what a block computes with in float32, also where products are in bf16.

    That is everything but the matrices of linear maps, and among these the gates' projections.
    """
    rounded = {
        f"{name}.weight"
        for name, module in block.named_modules()
        if isinstance(module, nn.Linear) and not name.endswith(("a_proj", "b_proj"))
    }
    return {name: p for name, p in block.named_parameters() if name not in rounded}
