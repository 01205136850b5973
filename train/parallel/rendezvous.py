"""Where the processes of one start of a team meet: a part of torchrun's store that no start before
has used.

torchrun's agent keeps one store for as long as it lives, so that after a restart the addresses of
the dead are still in it (pytorch/pytorch issue 135712). Gloo reads its neighbors' addresses as soon
as there are some, and then waits for a process that is no more, until the timeout and without a
word: 2 of 3 restarts did. The count of restarts that torchrun tells is each node's own, and no name
for a start.

So the leader draws a name, and gives it to those who live:

    rank r      draws a ticket, and leaves it at  ticket/r
    leader      gives the name for every ticket it finds there, also for those of the dead:
                answer/TICKET
    rank r      reads it there, and says so at    NAME/r

Before there is a group, `leaders_word` tells all what the leader sees, such as whether a folder is
there: processes that looked for themselves on a shared disk could go different ways, and wait for
each other. The leader hears a word of every process before, such as its configuration.
"""

import functools
import time
import uuid
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

_SECONDS = 0.01  # between two looks at the tickets


def fresh_part(store: Store, rank: int, world: int, timeout: timedelta) -> Store:
    """Returns a part of `store` for the `world` processes that call this now, each with its rank.

    Raises TimeoutError with the ranks that did not come, and RuntimeError (torch's) where the
    leader did not.
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
            raise TimeoutError(
                f"timed out: of {world} processes, ranks {sorted(awaited)} did not come"
            )
        for r in awaited:
            if (
                store.check([f"ticket/{r}"])
                and (ticket := store.get(f"ticket/{r}")) not in answered
            ):
                store.set(f"answer/{ticket.decode()}", name)
                answered.add(ticket)
        time.sleep(_SECONDS)
    return PrefixStore(name, store)


def leaders_word(mine: str, say: Callable[[list[str]], str], timeout: timedelta) -> str:
    """Returns what say(words) returns on the leader, which alone calls it, with every process's by
    rank.

    Waits for all. `mine` is this process's word.
    """
    part, rank, world = _meet(timeout)
    if rank > 0:
        part.set(f"mine/{rank}", mine)
        word = part.get("word").decode()
        part.set(f"heard/{rank}", "")
        return word
    word = say([mine, *(part.get(f"mine/{other}").decode() for other in range(1, world))])
    part.set("word", word)
    # the store may end with this process
    part.wait([f"heard/{other}" for other in range(1, world)], timeout)
    return word


def _meet(timeout: timedelta) -> tuple[Store, int, int]:
    """Returns a part of torchrun's store for this meeting alone,
    this process's rank and how many come.
    """
    store, rank, world = _torchrun_store()
    store.set_timeout(timeout)
    return fresh_part(store, rank, world, timeout), rank, world


@functools.cache
def _torchrun_store() -> tuple[Store, int, int]:
    """Returns the store and the numbers that torchrun's variables name,
    the same for this whole process.
    """
    return next(rendezvous("env://"))


def join(backend: str, timeout: timedelta, device: torch.device) -> None:
    """Makes torch.distributed's default group, of the processes that torchrun's variables name.

    On CUDA the group is bound to this process's device, and NCCL connects at once: an impossible
    connection fails here and not in the first step.
    """
    part, rank, world = _meet(timeout)
    bound = device if device.type == "cuda" else None
    dist.init_process_group(
        backend, store=part, rank=rank, world_size=world, timeout=timeout, device_id=bound
    )
