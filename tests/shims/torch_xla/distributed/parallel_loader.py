"""Reads ahead as far as the package's threads may get, and so as far as a position can be wrong."""

from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import Any


class PerDeviceLoader:
    def __init__(self, loader: "ParallelLoader", device: Any) -> None:
        self._loader = loader

    def __iter__(self) -> "PerDeviceLoader":
        return self

    def __next__(self) -> Any:
        if not self._loader.ahead:
            raise StopIteration
        item = self._loader.ahead.popleft()
        self._loader.ahead.extend(islice(self._loader.left, 1))
        return item

    def __len__(self) -> int:
        """The length of what was given, which need not have one:
        an iterator must not be asked `if x`.
        """
        return len(self._loader.given)


class ParallelLoader:
    def __init__(
        self,
        cpu_loader: Any,
        devices: list[Any],
        batchdim: int = 0,
        batches_per_execution: int = 1,
        loader_prefetch_size: int = 16,
        device_prefetch_size: int = 8,
        host_to_device_transfer_threads: int = 1,
        input_sharding: Any = None,
    ) -> None:
        self.given, self.left = cpu_loader, iter(cpu_loader)
        self.ahead = deque(islice(self.left, loader_prefetch_size + device_prefetch_size))

    def per_device_loader(self, device: Any) -> PerDeviceLoader:
        return PerDeviceLoader(self, device)


class MpDeviceLoader:
    def __init__(self, loader: Iterable[Any], device: Any, **kwargs: Any) -> None:
        self._loader, self._device, self._options = loader, device, kwargs

    def __iter__(self) -> PerDeviceLoader:
        return ParallelLoader(self._loader, [self._device], **self._options).per_device_loader(
            self._device
        )
