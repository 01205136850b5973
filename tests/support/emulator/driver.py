"""A Triton driver whose GPU is the emulator: kernels are compiled to PTX for sm_90 and run on CPU tensors."""

from __future__ import annotations

import ctypes
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from triton import knobs
from triton.backends import backends
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver

from delta_trn.backends import compiler, dispatch
from tests.support.emulator.decode import Unsupported, decode

SHARED_BYTES = 232448  # of a block, at most, as on an H100
FORMATS = {"i1": "b", "i8": "b", "u8": "B", "i16": "h", "u16": "H", "i32": "i", "u32": "I", "i64": "q",
           "u64": "Q", "fp16": "e", "fp32": "f", "fp64": "d"}  # fmt: skip


class Options(ctypes.Structure):
    """How kernels run, as machine.h has it.

    check           looks for races, missing fences and unwritten shared memory: five times slower
    late_copies     cp.async copies when it is waited for, else when it is issued; both are legal
    late_products   wgmma likewise
    order           of warps: 0 ascending, 1 descending, 2 shuffled at every turn
    quantum         instructions before a warp yields to the next; 0: it runs until it waits
    rough           sums cut off as tensor cores do, approximations off by a last digit at random
    """

    _fields_ = [(name, ctypes.c_int32) for name in
                ("check", "late_copies", "late_products", "order", "quantum", "rough")]  # fmt: skip


OPTIONS = Options(late_copies=1, late_products=1)


@contextmanager
def options(**changed: int) -> Iterator[list[str]]:
    """Changes the options for a block. Gives a list to which reports are added, in place of raising."""
    global _kept
    before, kept = {name: getattr(OPTIONS, name) for name in changed}, _kept
    _kept = []
    for name, value in changed.items():
        setattr(OPTIONS, name, value)
    try:
        yield _kept
    finally:
        for name, value in before.items():
            setattr(OPTIONS, name, value)
        _kept = kept


@dataclass(frozen=True)
class Launch:
    """What one launch was, and what it did that no kernel may."""

    kernel: str
    grid: tuple[int, ...]
    warps: int
    seconds: float
    instructions: int
    reports: list[str] = field(default_factory=list)


launches: list[Launch] = []  # those since it was last cleared
_kept: list[str] | None = None


class Reported(RuntimeError):
    """A launch did what no kernel may; the message says what."""


@cache
def library() -> compiler.Library:
    """Returns the emulator, compiled now or before, or why there is none."""
    source = Path(__file__).with_name("emulator.cpp")
    loaded = compiler.load(source, sorted(source.parent.glob("*.h")))
    if loaded.functions is not None:
        loaded.functions.emulator_program.restype = ctypes.c_void_p
    return loaded


def _functions() -> ctypes.CDLL:
    functions = library().functions
    assert functions is not None, library().note
    return functions


@cache
def find(name: str) -> tuple[int, str]:
    """Returns number and sizes of one of the emulator's operations; -1: it knows none of that name."""
    sizes = ctypes.create_string_buffer(16)
    return _functions().emulator_operation(name.encode(), sizes, len(sizes)), sizes.value.decode()


def _pointer(array: np.ndarray) -> ctypes.c_void_p:
    return array.ctypes.data_as(ctypes.c_void_p)


class Function:
    """A kernel that is ready to run. shared: bytes of shared memory that a block has."""

    def __init__(self, text: str, shared: int) -> None:
        self.text, self.shared = text, shared
        self.kernel = k = decode(text, find)
        columns = [np.ascontiguousarray(k.constants[name]) for name in ("value", "slot", "wide")]
        self.program = ctypes.c_void_p(
            _functions().emulator_program(
                _pointer(k.code), len(k.code), _pointer(k.pool), len(k.pool), *map(_pointer, columns),
                len(k.constants), k.slots,
            )
        )  # fmt: skip

    def __call__(self, grid: Sequence[int], warps: int, types: Sequence[str], values: Sequence[Any]) -> None:
        """Runs a grid on arguments of Triton's types, such as *bf16 or i32."""
        k = self.kernel
        params = bytearray(sum(k.params[-1]) if k.params else 1)
        ranges = []
        for (_, at), kind, value in zip(k.params, types, values, strict=False):
            if kind[0] == "*":
                address = value.data_ptr() if hasattr(value, "data_ptr") else int(value or 0)
                ranges += [address, address + _extent(value)] if hasattr(value, "data_ptr") else [0, 0]
                struct.pack_into("<Q", params, at, address)
            elif kind == "bf16":
                params[at : at + 2] = struct.pack("<f", torch.tensor(value).bfloat16().item())[2:]
            else:
                struct.pack_into("<" + FORMATS[kind], params, at, value)
        text, executed = ctypes.create_string_buffer(1 << 16), ctypes.c_uint64()
        start = time.perf_counter()
        _functions().emulator_launch(
            self.program, (ctypes.c_uint32 * 3)(*grid), warps, self.shared, bytes(params),
            (ctypes.c_uint64 * len(ranges))(*ranges), len(ranges) // 2, ctypes.byref(OPTIONS),
            ctypes.c_uint64(len(launches)), text, len(text), ctypes.byref(executed),
        )  # fmt: skip
        seconds = time.perf_counter() - start
        reports = [self._explain(line) for line in text.value.decode().splitlines()]
        launches.append(Launch(k.name, tuple(grid), warps, seconds, executed.value, reports))
        if _kept is not None:
            _kept.extend(reports)
        elif reports:
            raise Reported("\n".join(reports[:8]))

    def _explain(self, report: str) -> str:
        kind, line, text, times = report.split("\t")
        place = f"{self.kernel.sources.get(int(line), '?')}, PTX line {line}"
        return f"{kind} in {self.kernel.name} ({place}): {text} ({times} times)"


def _extent(x: torch.Tensor) -> int:
    """Returns the bytes from a tensor's first element to the end of its last."""
    if not x.numel():
        return 0
    return (sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) + 1) * x.element_size()


class _Utils:
    """What Triton's compiler asks a driver for."""

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple:
        return None, Function(binary.decode(), shared), 0, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {
            "max_shared_mem": SHARED_BYTES,
            "multiprocessor_count": 132,
            "warpSize": 32,
            "max_num_regs": 65536,
        }


class _Launcher:
    """Hands a launch's arguments to the function that runs it."""

    def __init__(self, src: Any, metadata: Any) -> None:
        self.types = list(src.signature.values())

    def __call__(self, x, y, z, stream, function, metadata, launch_metadata, enter, leave, *values) -> None:
        kept = [(kind, value) for kind, value in zip(self.types, values, strict=True) if kind != "constexpr"]
        function((x, y, z), metadata[0], *zip(*kept, strict=True))


class _Driver(DriverBase):
    """The emulator as Triton's device."""

    launcher_cls = _Launcher

    def __init__(self) -> None:
        self.utils = _Utils()
        self.get_current_device = self.get_current_stream = lambda *device: 0
        self.set_current_device = lambda device: None

    @classmethod
    def is_active(cls) -> bool:
        return False

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        return torch.cpu

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_benchmarker(self) -> Any:
        raise Unsupported("the emulator has no clock")


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
    """Makes the emulator the device that Triton runs on, in this process. Before a kernel is imported."""
    assert not knobs.runtime.interpret, "TRITON_INTERPRET=1 makes kernels Python functions"
    backends["nvidia"] = replace(backends["nvidia"], compiler=_Backend)
    driver.set_active(_Driver())
    dispatch.TRITON_DEVICES.add("cpu")
