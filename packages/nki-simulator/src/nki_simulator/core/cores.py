"""Two physical cores as one logical core (LNC 2 on Trn2 and Trn3). Each runs the kernel in its own
thread.

The cores share the arguments and the shared_hbm tensors: the n-th shared allocation of one core is
the n-th of the other. Everything else is private. `meet` is the barrier of core_barrier and
sendrecv.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from nki_simulator.core.memory import Storage


class Pair:
    """The tensors, the barrier and the mailbox that two cores share."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.barrier = threading.Barrier(2, timeout=60)
        self.tensors: list[Storage] = []
        self.mail: dict[tuple[int, int], np.ndarray] = {}

    def storage(self, index: int, make: Callable[[], Storage]) -> Storage:
        """Return the index-th shared tensor; the core that asks first makes it."""
        with self.lock:
            if index == len(self.tensors):
                self.tensors.append(make())
            return self.tensors[index]

    def meet(self) -> None:
        """Wait for the other core."""
        self.barrier.wait()


def run_both(pair: Pair, bodies: list[Callable[[], Any]]) -> list[Any]:
    """Run both bodies and return their results; the first failure ends both and is raised."""

    def run(body: Callable[[], Any]) -> Any:
        try:
            return body()
        except threading.BrokenBarrierError:
            return None  # the other core's failure is the cause
        except BaseException:
            pair.barrier.abort()
            raise

    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(run, body) for body in bodies]
    results = [core.result() for core in running]
    if pair.barrier.broken:
        raise RuntimeError("the two cores did not reach the same barrier within 60 s")
    return results
