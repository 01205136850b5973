"""Reads facts about the machine: devices, memory, versions, the checkout's commit.

Only this module and the NKI runtime import torch_xla.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@cache
def platforms() -> tuple[str, ...]:
    """Returns the device types of this machine, the preferred one first."""
    names = []
    if find_spec("torch_xla") is not None:
        names.append("xla")
    if torch.cuda.is_available():
        names.append("cuda")
    if _torchneuron():
        names.append("neuron")
    return (*names, "cpu")


def pick(name: str | None = None) -> torch.device:
    """Returns the device called `name` ("cpu", "cuda:1", "xla", "neuron"), or the machine's
    preferred one.

    Under torchrun, "cuda" is this process's own. Raises ValueError for a device that is not here.
    """
    wanted = torch.device(platforms()[0] if name is None or name == "auto" else name)
    if wanted.type not in platforms():
        raise ValueError(
            f"device {wanted} is not on this machine, which has: {', '.join(platforms())}; pick "
            "one of them"
        )
    if wanted.type == "xla":
        if processes().world > 1 and os.environ.get("PJRT_DEVICE") == "CPU":
            # torch_xla 2.9 gives its CPU client no other addresses: each process is alone in its
            # world, and all_reduce returns its input without an error
            raise ValueError(
                "XLA's CPU device knows no other processes (torch_xla 2.9): leave out torchrun"
            )
        return _xla().device()
    if wanted.type == "neuron" and processes().world > 1:
        raise ValueError(
            "several processes on TorchNeuron are not supported yet: leave out torchrun"
        )
    if wanted.type == "cuda" and wanted.index is None:
        wanted = torch.device("cuda", processes().local_rank % torch.cuda.device_count())
    if wanted.type == "cuda" and (wanted.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device {wanted} is not here; CUDA devices are 0 to {torch.cuda.device_count() - 1}"
        )
    return wanted


def make_current(device: torch.device) -> None:
    """Makes `device` the CUDA device of calls that name none. Other kinds of device have no such
    state.

    Call it before anything else touches CUDA: pinned memory, FSDP and NCCL take the current device,
    and each first use of a GPU leaves half a gigabyte of context there.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)


def synchronize(device: torch.device, *, wait: bool = True) -> None:
    """Waits until `device` has finished its work; returns at once with wait=False.

    On XLA this ends the graph that is compiled as one program: call it wherever a step is complete.
    """
    if device.type == "cuda" and wait:
        torch.cuda.synchronize(device)
    elif device.type == "neuron" and wait:
        torch.accelerator.synchronize(device)
    elif device.type == "xla":
        _xla().sync(wait=wait)


def compilations() -> int:
    """Returns how many graphs XLA has compiled in this process."""
    _xla()
    times = import_module("torch_xla.debug.metrics").metric_data("CompileTime")
    return int(times[0]) if times else 0


def all_reduce(x: Tensor, *, scale: float, groups: list[list[int]] | None) -> Tensor:
    """Returns `scale` times the sum of x over the processes of this one's group; None: over all.

    It is recorded in XLA's graph. The layout is left to the compiler, as AWS's libraries leave it.
    """
    model = import_module("torch_xla.core.xla_model")
    return model.all_reduce(model.REDUCE_SUM, x, scale=scale, groups=groups, pin_layout=False)


def broadcast(tensors: list[Tensor], *, root: int, groups: list[list[int]] | None) -> None:
    """Gives `tensors` the values that they have on process `root`, which is in this one's group."""
    model = import_module("torch_xla.core.xla_model")
    model.collective_broadcast(tensors, root_ordinal=root, groups=groups, pin_layout=False)
    _xla().sync()


def send_ahead(
    batches: Iterable[list[Tensor]], device: torch.device, ahead: int = 2
) -> Iterator[list[Tensor]]:
    """Yields lists of tensors on an XLA device. Threads read about twice `ahead` more, and send
    them.

    Asking for the next ends the graph, as `synchronize` does. What `batches` raises ends the
    iteration.
    """
    loader = import_module("torch_xla.distributed.parallel_loader")
    return iter(
        loader.MpDeviceLoader(
            batches, device, loader_prefetch_size=ahead, device_prefetch_size=ahead
        )
    )


def checkpoint() -> Callable[..., Any]:
    """Returns torch_xla's function for torch.utils.checkpoint's, which looks for a module
    `torch.xla`.

    It restores no generator's state: dropout here draws from numbers that come with the batch.
    """
    function = import_module("torch_xla.utils.checkpoint").checkpoint
    return partial(function, use_reentrant=True, preserve_rng_state=False)


def reset_peak_memory(device: torch.device) -> None:
    """Starts a new measurement of peak memory: on CUDA, and on Linux for this process."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif _CLEAR.exists():
        _CLEAR.write_text("5")  # proc(5): sets the peak resident size to the current one


def peak_memory(device: torch.device) -> int:
    """Returns the peak in bytes since the last reset: of CUDA's allocator,
    else of the resident size.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    for line in _STATUS.read_text().splitlines() if _STATUS.exists() else []:
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def describe(device: torch.device) -> str:
    """Returns the model name of the device; never the host's name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "xla":
        return f"XLA {os.environ.get('PJRT_DEVICE', 'device')}"
    return "NeuronCore" if device.type == "neuron" else _cpu_model()


# A process has one precision of float32 products; torch.set_float32_matmul_precision describes the
# names.
_products = "highest"


def set_products(precision: str) -> None:
    """Sets how this process multiplies float32 matrices: "highest", "high" or "medium".

    On a CPU with AMX "medium" rounds the factors to bfloat16, and adds up in float32: a product of
    1024 x 192 by 192 x 512 took a quarter of the time. Other CPUs multiply as before.
    """
    global _products
    torch.set_float32_matmul_precision(precision)
    _products = precision


def product_rate(device: torch.device, dtype: torch.dtype = torch.float32) -> float:
    """Measures the operations per second of one large matrix product, in a tenth of a second or so.

    A multiplication and an addition are two operations. The best of five counts, since what else
    the machine does can only make a product slower. float32 products are those that `set_products`
    has chosen.
    """
    n = 8192 if device.type == "cuda" else 1024
    a = torch.ones((n, n), dtype=dtype, device=device)
    seconds = []
    for _ in range(5):
        synchronize(device)
        start = time.perf_counter()
        torch.mm(a, a)
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return 2 * n**3 / min(seconds)


def exact_products() -> contextlib.AbstractContextManager[None]:
    """Within `with`, float32 products are as exact as float32,
    whatever `set_products` allows elsewhere.
    """
    return _exact_products() if _products == "medium" else contextlib.nullcontext()


@contextlib.contextmanager
def _exact_products() -> Iterator[None]:
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(_products)


def keep_freed_memory() -> None:
    """Lets glibc keep freed blocks of up to 32 MiB, its limit, for the next tensors of this
    process.

    By default it returns them to the system, which clears each page anew: a step of quickstart took
    210 ms instead of 191. Other C libraries are left as they are.
    """
    if platform.libc_ver()[0] == "glibc":
        library = ctypes.CDLL(None)
        # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD of malloc.h
        for option, size in ((-3, 2**25), (-1, 2**30)):
            library.mallopt(option, size)


def spare_host(device: torch.device) -> None:
    """Lets Python's garbage collector pass over all objects of now, on XLA,
    whose host records every step.
    """
    if device.type == "xla":
        gc.collect()
        gc.freeze()


def return_freed_memory() -> None:
    """Lets glibc return freed memory to the system,
    so that its next use counts in the resident size.
    """
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def multiplies_bfloat16_faster(device: torch.device) -> bool:
    """Returns whether float32 products by way of bfloat16 pay on this CPU: it has AMX."""
    return device.type == "cpu" and "amx_bf16" in cpu_flags()


@cache
def compute_capability(device: str, place: int | None = None) -> tuple[int, int] | None:
    """Returns the compute capability of a CUDA device, such as (9, 0); None where there is none."""
    if device != "cuda" or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability(place)


def supports_bfloat16(device: torch.device) -> bool:
    """Returns whether the hardware multiplies in bfloat16, so that training in it pays."""
    if device.type == "cuda":
        return (compute_capability("cuda", device.index) or (0, 0)) >= (8, 0)
    if device.type in ("xla", "neuron"):
        return True
    flags = cpu_flags()
    return bool(flags & {"amx_bf16", "avx512_bf16", "bf16"})


@dataclass(frozen=True)
class Processes:
    """Numbers this process among those that torchrun started; 0, 1, 0 without torchrun."""

    rank: int
    world: int
    local_rank: int


def processes() -> Processes:
    """Returns this process's numbers, from the variables that torchrun sets."""
    return Processes(
        rank=int(os.environ.get("RANK", "0")),
        world=int(os.environ.get("WORLD_SIZE", "1")),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
    )


def collectives(device: torch.device) -> str:
    """Returns torch.distributed's backend for tensors on `device`; on CUDA,
    one for the host's as well.
    """
    if device.type == "xla":
        import_module("torch_xla.distributed.xla_backend")  # importing it registers the backend
        return "xla"
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def facts(device: torch.device) -> dict[str, Any]:
    """Describes where a measurement is made: device, versions, threads and commit, but no host's
    name.

    The version of a package that is not installed is None; so is the commit where there is no
    checkout.
    """
    commit = _git("rev-parse", "--short=12", "HEAD")
    return {
        "device": describe(device),
        "device_type": device.type,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "triton", "transformers", "numpy")},
        "commit": commit,
        "dirty": None
        if commit is None
        else bool(_git("status", "--porcelain", "--untracked-files=no")),
    }


@cache
def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@cache
def _git(*command: str) -> str | None:
    try:
        completed = subprocess.run(
            ["git", *command], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return completed.stdout.strip()


def _torchneuron() -> bool:
    """Returns whether PyTorch has the device that torch_neuronx 2.14 adds on Trn2 and Trn3.

    Importing torch_neuronx registers it. This has not run on a chip.
    """
    if find_spec("torch_xla") is not None or find_spec("torch_neuronx") is None:
        return False
    import_module("torch_neuronx")
    device = torch.accelerator.current_accelerator(check_available=True)
    return device is not None and device.type == "neuron"


def _xla() -> ModuleType:
    if find_spec("torch_xla") is None:
        raise ImportError("device xla needs torch_xla, which is not installed; pick another device")
    return import_module("torch_xla")


@cache
def _cpu_model() -> str:
    for line in _cpuinfo():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


@cache
def cpu_flags() -> frozenset[str]:
    """Returns the names of the instruction sets of this CPU;
    none where the system does not tell.
    """
    for line in _cpuinfo():
        if line.startswith(("flags", "Features")):
            return frozenset(line.split(":", 1)[1].split())
    return frozenset()


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []
