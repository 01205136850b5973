"""One graph with the collectives of ZeRO-1, for torchrun: what stage `zero1` starts twice.

    python -m torch.distributed.run --standalone --nproc_per_node=2 -m tools.first_hour_ranks DEVICE

Each process scatters a sum, doubles its part, and gathers all parts; on the CPU by gloo. The exit
status is 1 where a number is wrong.
"""

import sys
from collections.abc import Sequence
from datetime import timedelta
from importlib import import_module

import torch
import torch.distributed as dist

from delta_trn.backends import machine
from delta_trn.train.parallel.rendezvous import join

PER_RANK = 4


def reduce_and_gather(x: torch.Tensor, world: int, rank: int) -> torch.Tensor:
    """Returns twice the sum of x over all processes, by way of each one's part."""
    if x.device.type == "xla":
        model = import_module("torch_xla.core.xla_model")
        part = model.reduce_scatter(
            model.REDUCE_SUM, x, scale=1.0, scatter_dim=0, shard_count=world, pin_layout=False
        )
        return model.all_gather(2 * part, dim=0, pin_layout=False)
    total = x.clone()
    dist.all_reduce(total)
    parts = [torch.empty(PER_RANK) for _ in range(world)]
    dist.all_gather(parts, 2 * total.chunk(world)[rank])
    return torch.cat(parts)


def main(arguments: Sequence[str]) -> int:
    device = machine.pick(arguments[0])
    join(machine.collectives(device), timedelta(minutes=20), device)
    here = machine.processes()
    x = torch.arange(here.world * PER_RANK, dtype=torch.float32)
    found = reduce_and_gather((x + here.rank).to(device), here.world, here.rank)
    machine.synchronize(device)
    expected = 2 * (here.world * x + sum(range(here.world)))
    right = torch.equal(found.cpu(), expected)
    print(f"rank {here.rank}: {'right' if right else f'WRONG: {found.cpu().tolist()}'}", flush=True)
    dist.destroy_process_group()
    return int(not right)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
