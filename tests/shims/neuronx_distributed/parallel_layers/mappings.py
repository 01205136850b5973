"""Into and out of the region where processes have different things."""

import torch
import torch.distributed as dist
from torch import Tensor

from .parallel_state import get_tensor_model_parallel_group


def _reduce(x: Tensor) -> Tensor:
    x = x.clone()
    dist.all_reduce(x, group=get_tensor_model_parallel_group())
    return x


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return _reduce(gradient)


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return _reduce(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def copy_to_tensor_model_parallel_region(input_: Tensor, process_group: object = None) -> Tensor:
    return _Copy.apply(input_)


def reduce_from_tensor_model_parallel_region(
    input_: Tensor, process_group: object = None
) -> Tensor:
    return _Reduce.apply(input_)
