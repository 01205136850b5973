"""Torch's CUDA calls without a GPU, as torch documents them, in one thread.

Within `pretend`, a tensor lies in the host's memory and says that it lies on the device: there is
one, `cuda:0`. Streams, events and waits have nothing to order, since
a call is done when it returns. Times of events are the host's. Capture is refused, as torch refuses
it for a call that waits for the device. Where a tensor lies is not tracked, so a call that mixes
devices is not refused. Autocast is the host's, which casts for the same products.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from delta_trn.backends import machine

CPU = torch.device("cpu")
CAPTURE = "a stand-in of a GPU captures no CUDA graph"


class Properties(NamedTuple):
    """Holds what `torch.cuda.get_device_properties` tells of a device."""

    name: str
    major: int
    minor: int
    total_memory: int
    multi_processor_count: int


# The most used card of each compute capability. Its processors decide how a scan is cut, and its
# memory what is kept for backward.
CARDS = {
    (8, 0): Properties("A100", 8, 0, 80 * 2**30, 108),
    (8, 6): Properties("RTX 3090", 8, 6, 24 * 2**30, 82),
    (8, 9): Properties("RTX 4090", 8, 9, 24 * 2**30, 128),
    (9, 0): Properties("H100", 9, 0, 80 * 2**30, 132),
    (10, 0): Properties("B200", 10, 0, 180 * 2**30, 148),
    (12, 0): Properties("RTX 5090", 12, 0, 32 * 2**30, 170),
}


def card(capability: tuple[int, int] | None = None) -> Properties:
    """Returns what is known of a card: of this machine's, or of the most used one of a capability.

    Raises ValueError where no capability is named and no GPU is here, or for one without launches.
    """
    if capability is None:
        if not torch.cuda.is_available():
            raise ValueError(
                "this machine has no GPU that torch sees; name the compute capability of the one "
                f"that is meant: {', '.join(f'{a}.{b}' for a, b in CARDS)}"
            )
        here = torch.cuda.get_device_properties(None)
        return Properties(
            here.name, here.major, here.minor, here.total_memory, here.multi_processor_count
        )
    if capability not in CARDS:
        raise ValueError(
            f"compute capability {capability[0]}.{capability[1]} has no card here; there are: "
            f"{', '.join(f'{a}.{b} ({x.name})' for (a, b), x in CARDS.items())}"
        )
    return CARDS[capability]


class Stream:
    """A stream whose work is done when it is given."""

    cuda_stream = 0

    def __init__(self, device: Any = None, priority: int = 0, **options: Any) -> None:
        self.device = torch.device("cuda", 0)

    def wait_stream(self, stream: Stream) -> None:
        """Waits for nothing."""

    def wait_event(self, event: Event) -> None:
        """Waits for nothing."""

    def record_event(self, event: Event | None = None) -> Event:
        """Returns the event, recorded now."""
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Waits for nothing."""

    def query(self) -> bool:
        """Returns True: all work is done."""
        return True


class Event:
    """A moment of the host's clock."""

    def __init__(self, enable_timing: bool = False, **options: Any) -> None:
        self.enable_timing, self.at = enable_timing, None

    def record(self, stream: Stream | None = None) -> None:
        """Notes the time."""
        self.at = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        """Waits for nothing."""

    def synchronize(self) -> None:
        """Waits for nothing."""

    def query(self) -> bool:
        """Returns True: all work is done."""
        return True

    def elapsed_time(self, end: Event) -> float:
        """Returns the milliseconds to `end`.

        Raises ValueError for an event without timing, or one that nobody recorded, as torch does.
        """
        if not (self.enable_timing and end.enable_timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self.at is None or end.at is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return 1e3 * (end.at - self.at)


class _Graph:
    def __init__(self, *arguments: Any, **options: Any) -> None:
        raise RuntimeError(CAPTURE)


class _Cuda:
    """The functions of torch.cuda, by their names."""

    def __init__(self, properties: Properties) -> None:
        self.properties = properties._replace(name=f"stand-in of {properties.name}")
        self.Stream, self.Event, self.CUDAGraph = Stream, Event, _Graph
        self.own = Stream()

    def check(self, device: Any) -> None:
        """Raises RuntimeError for a device that is not the only one."""
        index = device if isinstance(device, int) else torch.device(device or "cuda").index
        if index not in (None, -1, 0):
            raise RuntimeError(f"CUDA error: invalid device ordinal {index}; there is one device")

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def init(self) -> None:
        pass

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None:
        self.check(device)

    def get_device_properties(self, device: Any = None) -> Properties:
        self.check(device)
        return self.properties

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        properties = self.get_device_properties(device)
        return properties.major, properties.minor

    def get_device_name(self, device: Any = None) -> str:
        return self.get_device_properties(device).name

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        return self.properties.major >= 8

    def synchronize(self, device: Any = None) -> None:
        self.check(device)

    def current_stream(self, device: Any = None) -> Stream:
        self.check(device)
        return self.own

    default_stream = current_stream

    def stream(self, stream: Stream | None) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def device(self, device: Any) -> contextlib.AbstractContextManager[None]:
        self.check(device)
        return contextlib.nullcontext()

    def device_of(self, x: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def is_current_stream_capturing(self) -> bool:
        return False

    def graph(self, *arguments: Any, **options: Any) -> None:
        raise RuntimeError(CAPTURE)

    def empty_cache(self) -> None:
        pass

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        self.check(device)

    def max_memory_allocated(self, device: Any = None) -> int:
        self.check(device)
        return 0

    memory_allocated = memory_reserved = max_memory_reserved = max_memory_allocated

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        memory = self.get_device_properties(device).total_memory
        return memory, memory

    def manual_seed(self, seed: int) -> None:
        pass

    manual_seed_all = manual_seed

    def get_rng_state(self, device: Any = "cuda") -> Tensor:
        self.check(device)
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: Any = "cuda") -> None:
        self.check(device)


def is_cuda(device: Any) -> bool:
    """Returns whether a device, or the name of one, is a GPU."""
    return (isinstance(device, torch.device) and device.type == "cuda") or (
        isinstance(device, str) and device.split(":")[0] == "cuda"
    )


class _OnDevice(TorchFunctionMode):
    """Makes tensors on the host for calls that ask for the device, and lets all say that they are
    there.

    address     of a tensor, for `data_ptr`; None: its own
    """

    def __init__(self, address: Callable[[Tensor], int] | None) -> None:
        super().__init__()
        self.address, self.place = address, torch.device("cuda", 0)
        kind: Any = torch.Tensor
        self.told: dict[Any, Callable[..., Any]] = {
            kind.device.__get__: lambda x: x.device if x.is_meta else self.place,
            kind.is_cuda.__get__: lambda x: not x.is_meta,
            kind.is_cpu.__get__: lambda x: False,
            torch.Tensor.get_device: lambda x: 0,
            torch.Tensor.pin_memory: lambda x, *device: x,
            torch.Tensor.is_pinned: lambda x, *device: True,
            torch.Tensor.cuda: lambda x, *where, **options: x,
            torch.Tensor.record_stream: lambda x, stream: None,
        }
        if address is not None:
            self.told[torch.Tensor.data_ptr] = address
            self.told[torch.Tensor.untyped_storage] = lambda x: _Storage(x, address)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self.told:
            return self.told[func](*args, **kwargs)
        if func is torch.device:  # a name of one, and no tensor on it
            return func(*args, **kwargs)
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        device = kwargs.get("device")
        if is_cuda(device) or (isinstance(device, int) and not isinstance(device, bool)):
            kwargs = {**kwargs, "device": CPU}
        if any(is_cuda(x) for x in args):
            args = tuple(CPU if is_cuda(x) else x for x in args)
        return func(*args, **kwargs)


class _Storage:
    """The storage of a tensor without memory: where it begins and how long it would be."""

    def __init__(self, x: Tensor, address: Callable[[Tensor], int]) -> None:
        self.begins = int(address(x) - x.storage_offset() * x.element_size())
        self.bytes = x.untyped_storage().nbytes()

    def data_ptr(self) -> int:
        """Returns the address of its first element."""
        return self.begins

    def nbytes(self) -> int:
        """Returns its size."""
        return self.bytes


# what remembers which devices there are
_CACHES = (machine.platforms, machine.compute_capability)


def _forget() -> None:
    for cached in _CACHES:
        cached.cache_clear()


@contextlib.contextmanager
def pretend(
    properties: Properties, address: Callable[[Tensor], int] | None = None
) -> Iterator[None]:
    """Within `with`, torch has one CUDA device, a stand-in of such a card, in this thread.

    address     of tensors without memory, see `memory.Weightless`; None: all have their own
    """
    ours = _Cuda(properties)
    names = [x for x in dir(ours) if x[0] != "_" and hasattr(torch.cuda, x)]
    autocast, generator = torch.autocast.__init__, torch.Generator

    def host(device_type: str = "cuda") -> str:
        return "cpu" if device_type == "cuda" else device_type

    def on_host(self: Any, device_type: str, *rest: Any, **options: Any) -> None:
        autocast(self, host(device_type), *rest, **options)

    class Meta(type):
        def __instancecheck__(cls, x: Any) -> bool:
            return isinstance(x, generator)

    class Generator(metaclass=Meta):
        def __new__(cls, device: Any = "cpu") -> Any:
            return generator("cpu" if is_cuda(device) else device)

    autograd: Any = torch.autograd
    run_backward = autograd._engine_run_backward

    def differentiate(*arguments: Any, **options: Any) -> Any:
        with _OnDevice(address):  # torch leaves the mode for calls that a mode may replace
            return run_backward(*arguments, **options)

    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(torch.cuda, name, getattr(ours, name)))
        stack.enter_context(mock.patch.object(torch.autocast, "__init__", on_host))
        for name in ("is_autocast_enabled", "get_autocast_dtype"):
            asked = getattr(torch, name)
            told = partial(lambda asked, *kind: asked(host(*kind)), asked)
            stack.enter_context(mock.patch.object(torch, name, told))
        stack.enter_context(mock.patch.object(torch, "Generator", Generator))
        stack.enter_context(
            mock.patch.object(torch.autograd, "_engine_run_backward", differentiate)
        )
        stack.enter_context(_OnDevice(address))
        _forget()
        stack.callback(_forget)
        yield
