"""Where the processes of one start of a team meet: a part of torchrun's store that no start before has used.

torchrun's agent keeps one store for as long as it lives, so that after a restart the addresses of the dead
are still in it (pytorch/pytorch issue 135712). Gloo reads its neighbors' addresses as soon as there are some,
and then waits for a process that is no more, until the timeout and without a word: 2 of 3 restarts did. The
count of restarts that torchrun tells is each node's own, and no name for a start.

So the leader draws a name, and gives it to those who live:

    rank r      draws a ticket, and leaves it at  ticket/r
    leader      gives the name for every ticket it finds there, also for those of the dead: answer/TICKET
    rank r      reads it there, and says so at    NAME/r
"""

import time
import uuid
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

_SECONDS = 0.01  # between two looks at the tickets


def fresh_part(store: Store, rank: int, world: int, timeout: timedelta) -> Store:
    """Returns a part of `store` for the `world` processes that call this now, each with its rank.

    Raises TimeoutError with the ranks that did not come, and RuntimeError (torch's) where the leader did not.
    """
    if rank > 0:
        ticket = uuid.uuid4().hex
        store.set(f"ticket/{rank}", ticket)
        store.wait([f"answer/{ticket}"], timeout)
        name = store.get(f"answer/{ticket}").decode()
        store.set(f"{name}/{rank}", "")
        return PrefixStore(name, store)
    name, until = uuid.uuid4().hex, time.monotonic() + timeout.total_seconds()
    awaited, answered = set(range(1, world)), set()
    while awaited := {r for r in awaited if not store.check([f"{name}/{r}"])}:
        if time.monotonic() > until:
            raise TimeoutError(f"timed out: of {world} processes, ranks {sorted(awaited)} did not come")
        for r in awaited:
            if store.check([f"ticket/{r}"]) and (ticket := store.get(f"ticket/{r}")) not in answered:
                store.set(f"answer/{ticket.decode()}", name)
                answered.add(ticket)
        time.sleep(_SECONDS)
    return PrefixStore(name, store)


def join(backend: str, timeout: timedelta, device: torch.device) -> None:
    """Makes torch.distributed's default group, of the processes that torchrun's variables name.

    On CUDA the group is bound to this process's device, and NCCL connects at once: an impossible connection
    fails here and not in the first step.
    """
    store, rank, world = next(rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    part = fresh_part(store, rank, world, timeout)
    bound = {"device_id": device} if device.type == "cuda" else {}
    dist.init_process_group(backend, store=part, rank=rank, world_size=world, timeout=timeout, **bound)
