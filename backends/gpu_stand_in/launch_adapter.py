"""Notes what a call would launch on a GPU, and compiles it: for operations, models and runs alike.

with record_launches(card((9, 0))) as found:        no GPU is needed, nothing is computed
    gated_delta_rule(...)                           or a model's step, on device "cuda"
for record, outcome in fill(found): ...             Triton's cache has them all then
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from torch._subclasses import FakeTensor

from delta_trn.backends import stand_ins
from delta_trn.backends.gated_delta_rule import triton_adapter
from delta_trn.backends.gpu_stand_in.cuda import Properties, pretend
from delta_trn.backends.gpu_stand_in.memory import Weightless, address
from delta_trn.triton_kernels.compiling.cache import compile_in_turns as compile_in_turns
from delta_trn.triton_kernels.compiling.cache import counting as counting
from delta_trn.triton_kernels.compiling.cache import fill as fill
from delta_trn.triton_kernels.compiling.driver import Device, Record, installed, recording


@contextlib.contextmanager
def record_launches(card: Properties) -> Iterator[list[Record]]:
    """Within `with`, there is a stand-in of `card`, on which launches are noted and not done.

    Tensors of floating-point numbers have no memory. Gives the list of what was noted, each kernel
    once.
    """
    with recording(_device(card)) as found, _torch_on(card):
        yield found


@contextlib.contextmanager
def compile_only(card: Properties) -> Iterator[None]:
    """Within `with`, the same, but what is launched is compiled first, as on a GPU, and not run."""
    with installed(_device(card)), _torch_on(card):
        yield


def _device(card: Properties) -> Device:
    return Device(10 * card.major + card.minor)


@contextlib.contextmanager
def _torch_on(card: Properties) -> Iterator[None]:
    caches = triton_adapter.card_of, triton_adapter._kept_bytes
    # to everyone else a fake tensor has no kernel; here its kernels are what is asked for
    plain = mock.patch.object(stand_ins, "PLAIN", stand_ins.PLAIN | {FakeTensor})
    with plain, pretend(card, address), Weightless():
        for cached in caches:  # of a GPU that is here
            cached.cache_clear()
        try:
            yield
        finally:
            for cached in caches:
                cached.cache_clear()
