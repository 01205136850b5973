"""Sends batches to an XLA device ahead of their step, by AWS's documented way (MpDeviceLoader).

A thread reads and sends batches that no step has taken yet. So the loader's own position is too far
on, and each batch comes with the position behind it: a checkpoint has that of the last batch that a
step has taken.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from delta_trn.backends import machine
from delta_trn.train.data.loader import Batch, Loader


class DeviceFeed:
    """Yields a loader's batches on an XLA device.
    After the first one the loader belongs to a thread.
    """

    def __init__(self, loader: Loader, device: torch.device):
        self._loader, self._device = loader, device
        self._coming: Iterator[list[Tensor]] | None = None
        # of each batch on its way: the loader's position behind it, and which of its fields are
        # there
        self._read: deque[tuple[dict[str, Any], list[bool]]] = deque()
        self._position: dict[str, Any] | None = None
        self._error: Exception | None = None
        self._closed = False

    def next_batch(self) -> Batch:
        """Returns the next batch. It raises what reading it has raised."""
        if self._coming is None:
            self._coming = machine.send_ahead(self._batches(), self._device)
        tensors = next(self._coming, None)
        if tensors is None:  # the thread has ended
            raise self._error or RuntimeError("the feed is closed")
        self._position, present = self._read.popleft()
        fields = iter(tensors)
        return Batch(*(next(fields) if there else None for there in present))  # type: ignore[arg-type]

    def state_dict(self) -> dict[str, Any]:
        """Returns where the first batch comes from that no step has taken,
        for `Loader.load_state_dict`.
        """
        return self._loader.state_dict() if self._position is None else self._position

    def close(self) -> None:
        """Ends the threads, which otherwise wait until the process ends."""
        self._closed = True
        if self._coming is not None:
            for _ in self._coming:
                pass  # a thread that waits for room in a queue goes on, and ends

    def _batches(self) -> Iterator[list[Tensor]]:
        """Reads on a thread, whose exceptions nobody would see."""
        try:
            while not self._closed:
                batch = self._loader.next_batch()
                self._read.append((self._loader.state_dict(), [x is not None for x in batch]))
                yield [x for x in batch if x is not None]
        except Exception as error:
            self._error = error
