"""ZeRO-1 as torch_xla has it: every tensor's rows are divided,
padded to a multiple of the processes.
"""

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..parallel_layers import parallel_state


class NeuronZero1Optimizer(Optimizer):
    def __init__(
        self,
        params: Any,
        optimizer_class: type[Optimizer],
        optimizer_dtype: torch.dtype | None = None,
        grad_clipping: bool = True,
        max_norm: float | None = None,
        pin_layout: bool = True,
        sharding_groups: Any = None,
        grad_norm_groups: Any = None,
        lazy_init: bool = False,
        bucket_cap_mb_all_gather: int = 0,
        bucket_cap_mb_reduce_scatter: int = 0,
        use_grad_acc_hook: bool = False,
        save_master_weights: bool = False,
        higher_cc_precision: bool = False,
        **defaults: Any,
    ) -> None:
        if not parallel_state.model_parallel_is_initialized():
            raise RuntimeError("initialize_model_parallel need to be called before")
        super().__init__(params, defaults)
        assert optimizer_dtype == torch.float32 and grad_clipping
        self.max_norm = 1.0 if max_norm is None else max_norm
        self.group = parallel_state.get_data_parallel_group()
        sharded = []
        for group in self.param_groups:
            shards = [nn.Parameter(self._rows(p.detach())) for p in group["params"]]
            sharded.append({**copy.copy(group), "params": shards})
        self.base_optimizer = optimizer_class(sharded, **defaults)
        self._grad_norm: Tensor | None = None

    @property
    def grad_norm(self) -> Tensor | None:
        return self._grad_norm

    def _padded(self, x: Tensor) -> Tensor:
        return torch.cat([x, x.new_zeros(-x.shape[0] % self.group.size(), *x.shape[1:])])

    def _rows(self, x: Tensor) -> Tensor:
        return self._padded(x).chunk(self.group.size())[self.group.rank()].clone()

    @torch.no_grad()
    def step(self, closure: Any = None, **options: Any) -> None:
        square = torch.zeros(1)
        for group, base in zip(self.param_groups, self.base_optimizer.param_groups, strict=True):
            base.update({key: value for key, value in group.items() if key != "params"})
            for p, shard in zip(group["params"], base["params"], strict=True):
                mean = p.grad.clone()
                dist.all_reduce(mean, group=self.group)
                shard.grad = self._rows(mean / self.group.size())
                square += shard.grad.norm() ** 2
        dist.all_reduce(square, group=self.group)
        self._grad_norm = square.sqrt()
        scale = torch.clamp(self.max_norm / (self._grad_norm + 1e-6), max=1.0)
        for base in self.base_optimizer.param_groups:
            for shard in base["params"]:
                shard.grad.mul_(scale)
        self.base_optimizer.step()
        for group, base in zip(self.param_groups, self.base_optimizer.param_groups, strict=True):
            for p, shard in zip(group["params"], base["params"], strict=True):
                parts = [torch.empty_like(shard) for _ in range(self.group.size())]
                dist.all_gather(parts, shard.detach(), group=self.group)
                p.copy_(torch.cat(parts)[: p.shape[0]])
