"""A driver of Triton without a GPU: kernels are compiled for a named compute capability, and what
a launch does is given.

    installed(Device(90))       kernels are compiled, or come from Triton's cache, and are not run
    recording(Device(90))       nothing is compiled, either: every launch is noted, once for each
                                kernel that it needs

What is noted is all that Triton compiles a kernel from, so `cache.fill` compiles the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

# an MI300X, on which dispatch refuses these kernels: nothing was executed, with an A100's launches
AMD = 942
KIBIBYTES = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99, AMD: 64}
# bytes of shared memory that a program may have, by architecture: 90 is sm_90
SHARED = {architecture: 1024 * size for architecture, size in KIBIBYTES.items()}


class Record(NamedTuple):
    """A kernel that a launch needs: all that Triton compiles it from."""

    function: JITFunction
    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]
    target: GPUTarget

    def __str__(self) -> str:
        given = {self.function.arg_names[place[0]]: x for place, x in self.constants.items()}
        shown = ", ".join(f"{name}={x}" for name, x in given.items() if x is not None)
        return f"{self.function.__name__}({shown}), {self.options['num_warps']} warps"


class LaunchesNothing:
    """Stands for what hands arguments to a GPU."""

    def __init__(self, src: Any, metadata: Any) -> None:
        pass

    def __call__(self, *arguments: Any) -> None:
        pass


def _load_nothing(name: str, binary: bytes, shared: int, device: Any) -> tuple[Any, ...]:
    """Returns module, function, registers, spills and the most threads of a kernel that nobody
    runs.
    """
    return None, None, 0, 0, 1024


class Device:
    """A GPU as Triton sees it: what its runtime and its compiler ask of a driver.

    architecture    90 for sm_90
    launcher        class that Triton makes of a compiled kernel, to call it with a launch's
                    arguments
    load            (name, binary, shared bytes, device) -> module, function, registers, spills, most
                    threads
    """

    def __init__(
        self,
        architecture: int,
        launcher: Callable[[Any, Any], Any] = LaunchesNothing,
        load: Callable[..., tuple[Any, ...]] = _load_nothing,
    ) -> None:
        self.architecture, self.launcher_cls, self.load_binary = architecture, launcher, load
        self.utils = self

    def get_device_properties(self, device: Any) -> dict[str, int]:
        return {"max_shared_mem": SHARED[self.architecture]}

    def get_current_device(self) -> Any:
        """Returns the key of Triton's caches: those of a GPU that is here stay as they are."""
        return self

    def get_current_stream(self, device: Any) -> int:
        return 0

    def set_current_device(self, device: Any) -> None:
        pass

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.architecture, 32)

    def map_python_to_cpp_type(self, kind: str) -> str:
        return kind


@contextmanager
def installed(device: Device) -> Iterator[None]:
    """Within `with`, Triton's device is `device`. Raises RuntimeError under TRITON_INTERPRET=1."""
    if knobs.runtime.interpret:
        raise RuntimeError(
            "TRITON_INTERPRET is set, so the kernels are Python functions; unset it to compile them"
        )
    before = driver._active
    driver.set_active(device)  # type: ignore[arg-type]
    try:
        yield
    finally:
        driver._active = before


@contextmanager
def recording(device: Device) -> Iterator[list[Record]]:
    """Within `with`, launches are noted in the list that it gives: nothing is compiled or run."""
    found: dict[tuple[JITFunction, str], Record] = {}
    noted: list[Record] = []
    before = knobs.runtime.jit_cache_hook

    def note(*, key: str, fn: Any, compile: dict[str, Any], **rest: Any) -> bool:
        place = fn.jit_function, key
        if place not in found:
            options = json.loads(compile["specialization_data"])["options"]
            # JSON has no tuples, and Triton's options no lists
            options = {name: tuple(x) if isinstance(x, list) else x for name, x in options.items()}
            found[place] = Record(
                fn.jit_function,
                compile["signature"],
                compile["constants"],
                compile["configs"][0],
                options,
                device.get_current_target(),
            )
            noted.append(found[place])
        return True  # Triton then neither compiles nor launches

    with installed(device):
        knobs.runtime.jit_cache_hook = note  # type: ignore[assignment]
        try:
            yield noted
        finally:
            knobs.runtime.jit_cache_hook = before
