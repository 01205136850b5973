"""Linear maps of which each process has columns or rows."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .mappings import copy_to_tensor_model_parallel_region, reduce_from_tensor_model_parallel_region
from .parallel_state import get_tensor_model_parallel_size
from .utils import set_tensor_model_parallel_attributes


class ColumnParallelLinear(nn.Module):
    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        gather_output: bool = True,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        assert not bias and not gather_output, "the stand-in has no bias, and leaves outputs divided"
        n = get_tensor_model_parallel_size()
        self.weight = nn.Parameter(torch.empty(output_size // n, input_size, device=device, dtype=dtype))
        set_tensor_model_parallel_attributes(self.weight, True, dim=0, stride=1, num_partitions=n)

    def forward(self, input: Tensor, slice_indices: Tensor | None = None) -> Tensor:
        return F.linear(copy_to_tensor_model_parallel_region(input), self.weight)


class RowParallelLinear(nn.Module):
    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        input_is_parallel: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        assert not bias and input_is_parallel, "the stand-in has no bias, and takes divided inputs"
        n = get_tensor_model_parallel_size()
        self.weight = nn.Parameter(torch.empty(output_size, input_size // n, device=device, dtype=dtype))
        set_tensor_model_parallel_attributes(self.weight, True, dim=1, stride=1, num_partitions=n)

    def forward(self, input_: Tensor, slice_indices: Tensor | None = None) -> Tensor:
        return reduce_from_tensor_model_parallel_region(F.linear(input_, self.weight))
