"""Who this process is."""

import torch.distributed as dist


def world_size() -> int:
    return dist.get_world_size()


def global_ordinal() -> int:
    return dist.get_rank()
