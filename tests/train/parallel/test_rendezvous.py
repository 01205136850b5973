"""Every start of a team has a part of the store of its own, whatever those before have left there."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]  its documented name
from torch.distributed.distributed_c10d import Store

from delta_trn.train.parallel.rendezvous import fresh_part

SOON = timedelta(seconds=20)


def started(store: Store, world: int) -> list[Store]:
    """Each rank's part; ranks in threads, for processes."""
    with ThreadPoolExecutor(world) as ranks:
        return list(ranks.map(lambda rank: fresh_part(store, rank, world, SOON), range(world)))


@pytest.mark.parametrize("world", [2, 5])
def test_all_have_the_same_part(world):
    parts = started(HashStore(), world)
    for rank, part in enumerate(parts):
        part.set(f"address/{rank}", str(rank))
    for part in parts:
        assert [part.get(f"address/{rank}") for rank in range(world)] == [b"%d" % r for r in range(world)]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_nothing_of_an_earlier_start_is_in_it(world):
    """Also with fewer or more processes than before, as where a node is lost or comes back."""
    store = HashStore()
    for before in started(store, 3):
        before.set("address/0", "dead")
    store.set("ticket/1", "of one that died before it was answered")
    for part in started(store, world):
        assert not part.check(["address/0"])


def test_who_does_not_come_is_named():
    store = HashStore()
    started(store, 3)  # whose tickets and answers are no sign of life
    with pytest.raises(TimeoutError, match=r"timed out: of 3 processes, ranks \[1, 2\] did not come"):
        fresh_part(store, 0, 3, timedelta(seconds=0.1))


def test_a_leader_that_does_not_come_is_not_waited_for_longer_than_asked():
    store = HashStore()
    started(store, 2)
    with pytest.raises(RuntimeError, match=r"[Ww]ait timeout"):
        fresh_part(store, 1, 2, timedelta(seconds=0.1))
