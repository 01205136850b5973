"""The norm over parts and whole parameters."""

import torch
import torch.distributed as dist
from torch import Tensor

from .parallel_state import get_tensor_model_parallel_group, get_tensor_model_parallel_size


def get_grad_norm(
    parameters: list[Tensor],
    norm_type: float = 2,
    zero1_optimizer: bool = False,
    zero1_optimizer_groups: list[list[int]] | None = None,
    force_spmd: bool = True,
) -> Tensor:
    """[1], as the package has it: whole ones count for 1 / n on each process."""
    assert norm_type == 2 and not zero1_optimizer and isinstance(parameters, list)
    total = torch.zeros(1)
    for p in parameters:
        if p.grad is not None:
            share = (
                1
                if getattr(p, "tensor_model_parallel", False)
                else get_tensor_model_parallel_size()
            )
            total += p.grad.norm() ** 2 / share
    dist.all_reduce(total, group=get_tensor_model_parallel_group())
    return total.sqrt()
