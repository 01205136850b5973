"""Groups: tensor-parallel neighbors, and those of the same place in theirs."""

import torch.distributed as dist

_GROUPS: dict[str, dist.ProcessGroup] = {}


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    context_parallel_size: int = 1,
    expert_model_parallel_size: int = 1,
    skip_collective_init: bool = False,
    lnc_size: int = 1,
    mesh_only: bool = False,
) -> None:
    world, n = dist.get_world_size(), tensor_model_parallel_size
    assert pipeline_model_parallel_size == context_parallel_size == expert_model_parallel_size == 1
    for first in range(0, world, n):
        ranks = list(range(first, first + n))
        group = dist.new_group(ranks, backend="gloo")
        if dist.get_rank() in ranks:
            _GROUPS["tensor"] = group
    for first in range(n):
        ranks = list(range(first, world, n))
        group = dist.new_group(ranks, backend="gloo")
        if dist.get_rank() in ranks:
            _GROUPS["data"] = group


def model_parallel_is_initialized() -> bool:
    return bool(_GROUPS)


def get_tensor_model_parallel_group(as_list: bool = False) -> dist.ProcessGroup:
    return _GROUPS["tensor"]


def get_tensor_model_parallel_rank() -> int:
    return _GROUPS["tensor"].rank()


def get_tensor_model_parallel_size() -> int:
    return _GROUPS["tensor"].size()


def get_data_parallel_group(as_list: bool = False) -> dist.ProcessGroup:
    return _GROUPS["data"]


def get_data_parallel_rank() -> int:
    return _GROUPS["data"].rank()


def get_data_parallel_size() -> int:
    return _GROUPS["data"].size()
