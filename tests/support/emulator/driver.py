"""A Triton driver whose GPU is the emulator: kernels are compiled to PTX and run on CPU tensors.

They are compiled for sm_90; for another one where the environment says so: DELTA_TRN_EMULATED=89.
"""

from __future__ import annotations

import ctypes
import os
import re
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from triton import knobs
from triton.backends import backends
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver

from delta_trn.backends import compiler, dispatch
from delta_trn.triton_kernels import launch
from delta_trn.triton_kernels.compiling.driver import Device
from tests.support.emulator.decode import decode

ARCHITECTURE = int(os.environ.get("DELTA_TRN_EMULATED", "90"))
FLOATS = {"fp16": "<e", "fp32": "<f", "fp64": "<d"}


class Options(ctypes.Structure):
    """How kernels run, as machine.h has it.

    check           looks for races, missing fences and unwritten shared memory: five times slower
    late_copies     cp.async copies when it is waited for, else when it is issued; both are legal
    late_products   wgmma likewise
    order           of warps: 0 ascending, 1 descending, 2 shuffled at every turn
    quantum         instructions before a warp yields to the next; 0: it runs until it waits
    """

    _fields_ = [
        (name, ctypes.c_int32)
        for name in ("check", "late_copies", "late_products", "order", "quantum")
    ]


class Reported(RuntimeError):
    """A launch did what no kernel may; the message says what."""


_options = Options(late_copies=1, late_products=1)
_reports: list[str] | None = None


@contextmanager
def options(**changed: int) -> Iterator[list[str]]:
    """Changes the options for a block. Gives a list to which reports are added,
    in place of raising.
    """
    global _reports
    before = {name: getattr(_options, name) for name in changed}, _reports
    _reports = []
    for name, value in changed.items():
        setattr(_options, name, value)
    try:
        yield _reports
    finally:
        for name, value in before[0].items():
            setattr(_options, name, value)
        _reports = before[1]


@cache
def library() -> compiler.Library:
    """Returns the emulator, compiled now or before, or why there is none."""
    source = Path(__file__).with_name("emulator.cpp")
    loaded = compiler.load(source, sorted(source.parent.glob("*.h")))
    if loaded.functions is not None:
        loaded.functions.emulator_program.restype = ctypes.c_void_p
    return loaded


@cache
def find(name: str) -> tuple[int, str]:
    """Returns number and sizes of one of the emulator's operations; -1:
    it knows none of that name.
    """
    sizes = ctypes.create_string_buffer(16)
    number = library().functions.emulator_operation(name.encode(), sizes, len(sizes))
    return number, sizes.value.decode()


class Function:
    """A kernel that is ready to run. shared: bytes of shared memory that a block has."""

    def __init__(self, text: str, shared: int) -> None:
        self.text, self.shared = text, shared
        self.kernel = k = decode(text, find)
        arrays = [array.ctypes.data_as(ctypes.c_void_p) for array in (k.code, k.pool, k.constants)]
        sizes = len(k.code), len(k.pool), len(k.constants), k.slots
        self.program = ctypes.c_void_p(library().functions.emulator_program(*arrays, *sizes))

    def __call__(
        self, grid: Sequence[int], warps: int, types: Sequence[str], values: Sequence[Any]
    ) -> None:
        """Runs a grid on arguments of Triton's types, such as *bf16 or i32. Raises Reported."""
        params, ranges = [], []  # numbers of 64 bits
        for kind, value in zip(types, values, strict=True):
            if kind[0] == "*":
                value = (
                    (value.data_ptr(), _extent(value))
                    if isinstance(value, torch.Tensor)
                    else (0, 0)
                )
                ranges += [value[0], sum(value)]
                value = value[0]
            elif kind == "bf16":
                value = torch.tensor(value).bfloat16().view(torch.uint16).item()
            elif kind in FLOATS:
                value = int.from_bytes(struct.pack(FLOATS[kind], value), "little")
            params.append(int(value))
        text = ctypes.create_string_buffer(1 << 16)
        arrays = [(ctypes.c_uint64 * len(numbers))(*numbers) for numbers in (params, ranges)]
        library().functions.emulator_launch(
            self.program, (ctypes.c_uint32 * 3)(*grid), warps, self.shared, arrays[0], len(params),
            arrays[1], len(ranges) // 2, ctypes.byref(_options), text, len(text),
        )  # fmt: skip
        reports = [self._explain(line) for line in text.value.decode().splitlines()]
        if _reports is not None:
            _reports.extend(reports)
        elif reports:
            raise Reported("\n".join(reports[:8]))

    def _explain(self, report: str) -> str:
        kind, line, text, times = report.split("\t")
        above = "\n".join(self.text.split("\n")[: int(line)])
        place = re.findall(r"\.loc\s.*// (\S+)", above)[-1:]  # the line of Python
        where = ", ".join([*place, f"PTX line {line}"])
        return f"{kind} in {self.kernel.name} ({where}): {text} ({times} times)"


def _extent(x: torch.Tensor) -> int:
    """Returns the bytes from a tensor's first element to the end of its last."""
    last = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    return (last + 1) * x.element_size() if x.numel() else 0


class _Launcher:
    """Hands a launch's arguments to the function that runs it."""

    def __init__(self, src: Any, metadata: Any) -> None:
        self.types = list(src.signature.values())

    def __call__(
        self, x, y, z, stream, function, metadata, launch_metadata, enter, leave, *values
    ) -> None:
        kept = [
            (kind, value)
            for kind, value in zip(self.types, values, strict=True)
            if kind != "constexpr"
        ]
        function((x, y, z), metadata[0], *zip(*kept, strict=True))


def _load(name: str, text: bytes, shared: int, device: Any) -> tuple[Any, ...]:
    """Returns module, function, registers, spills and the most threads of a kernel."""
    return None, Function(text.decode(), shared), 0, 0, 1024


# the emulator as Triton's device
DEVICE = Device(ARCHITECTURE, _Launcher, _load)


class _Backend(CUDABackend):
    """Triton's compiler for NVIDIA's GPUs, which ends at PTX: there is no ptxas."""

    def __init__(self, target: GPUTarget) -> None:
        super().__init__(target)
        self.binary_ext = "ptx"

    def hash(self) -> str:
        return f"{super().hash()}-ptx"  # what it compiles is kept apart in Triton's cache

    def add_stages(self, stages: dict, *rest: Any) -> None:
        super().add_stages(stages, *rest)
        del stages["cubin"]


def install() -> None:
    """Makes the emulator the device that Triton runs on, in this process.
    Before a kernel is imported.
    """
    assert not knobs.runtime.interpret, "TRITON_INTERPRET=1 makes kernels Python functions"
    backends["nvidia"] = replace(backends["nvidia"], compiler=_Backend)
    driver.set_active(DEVICE)
    launch._card = launch.Card(ARCHITECTURE // 10)
    dispatch.TRITON_DEVICES.add("cpu")
