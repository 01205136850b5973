"""Every start of a team uses its own part of the store, whatever earlier starts have left there."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]  its documented name
from torch.distributed.distributed_c10d import Store

from delta_trn.train.parallel.rendezvous import fresh_part

SOON = timedelta(seconds=20)


def start_ranks(store: Store, world: int) -> list[Store]:
    """Returns the part of each rank. Threads stand in for processes."""
    with ThreadPoolExecutor(world) as ranks:
        return list(ranks.map(lambda rank: fresh_part(store, rank, world, SOON), range(world)))


@pytest.mark.parametrize("world", [2, 5])
def test_all_ranks_of_a_start_share_one_part_of_the_store(world):
    parts = start_ranks(HashStore(), world)
    for rank, part in enumerate(parts):
        part.set(f"address/{rank}", str(rank))
    for part in parts:
        assert [part.get(f"address/{rank}") for rank in range(world)] == [
            b"%d" % r for r in range(world)
        ]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_start_sees_nothing_of_an_earlier_start(world):
    """This holds with fewer or more processes than before, as when a node is lost or returns."""
    store = HashStore()
    for before in start_ranks(store, 3):
        before.set("address/0", "dead")
    store.set("ticket/1", "of one that died before it was answered")
    for part in start_ranks(store, world):
        assert not part.check(["address/0"])


def test_a_timeout_names_the_ranks_that_did_not_come():
    store = HashStore()
    start_ranks(store, 3)  # their tickets and answers are no sign of life
    with pytest.raises(
        TimeoutError, match=r"timed out: of 3 processes, ranks \[1, 2\] did not come"
    ):
        fresh_part(store, 0, 3, timedelta(seconds=0.1))


def test_waiting_for_a_missing_leader_ends_after_the_timeout():
    store = HashStore()
    start_ranks(store, 2)
    with pytest.raises(RuntimeError, match=r"[Ww]ait timeout"):
        fresh_part(store, 1, 2, timedelta(seconds=0.1))
