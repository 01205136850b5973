"""The attributes by which a divided parameter is known."""

from torch import Tensor


def set_tensor_model_parallel_attributes(
    tensor: Tensor,
    is_parallel: bool,
    dim: int,
    stride: int,
    num_partitions: int = -1,
    rank_ordering: list[int] | None = None,
) -> None:
    for name in ("tensor_model_parallel", "partition_dim", "partition_stride", "num_partitions"):
        assert not hasattr(tensor, name)
    tensor.tensor_model_parallel = is_parallel
    tensor.partition_dim = dim
    tensor.partition_stride = stride
    tensor.num_partitions = num_partitions
    tensor.rank_ordering = rank_ordering
