"""The group of all replicas, which is the only one here."""

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
    assert tensor_model_parallel_size == pipeline_model_parallel_size == context_parallel_size == 1
    _GROUPS["data"] = dist.new_group(backend="gloo")


def model_parallel_is_initialized() -> bool:
    return bool(_GROUPS)


def get_data_parallel_group(as_list: bool = False) -> dist.ProcessGroup:
    return _GROUPS["data"]
