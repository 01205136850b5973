"""Facts about the machine, in one place. The only import of torch_xla outside the NKI adapter."""

from __future__ import annotations

import os
import platform
import resource
import shlex
import sys
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def xla() -> ModuleType | None:
    """torch_xla, where it is installed. A torch_xla that is there but broken raises."""
    return import_module("torch_xla") if find_spec("torch_xla") is not None else None


@cache
def platforms() -> tuple[str, ...]:
    """The device types of this machine, the preferred one first."""
    kinds = []
    if find_spec("torch_xla") is not None:
        kinds.append("xla")
    if torch.cuda.is_available():
        kinds.append("cuda")
    if _torchneuron():
        kinds.append("neuron")
    return (*kinds, "cpu")


def pick(name: str | None = None) -> torch.device:
    """The device called `name` ("cpu", "cuda", "cuda:1", "xla", "neuron"), or the machine's preferred one.

    Under torchrun, "cuda" is the one of this process. Raises ValueError for one that is not here.
    """
    wanted = torch.device(platforms()[0] if name is None or name == "auto" else name)
    if wanted.type not in platforms():
        raise ValueError(f"device {wanted} is not on this machine, which has: {', '.join(platforms())}")
    if wanted.type == "xla":
        if processes().world > 1 and os.environ.get("PJRT_DEVICE") == "CPU":
            # torch_xla 2.9 makes its CPU client without addresses of others: each process sees a world of its
            # own, and all_reduce gives back what it got, without an error
            raise ValueError("XLA's CPU device knows no other processes (torch_xla 2.9): leave out torchrun")
        return _xla().device()
    if wanted.type == "neuron" and processes().world > 1:
        raise ValueError("several processes on TorchNeuron are not supported yet: leave out torchrun")
    if wanted.type == "cuda" and wanted.index is None:
        wanted = torch.device("cuda", processes().local_rank % torch.cuda.device_count())
    if wanted.type == "cuda" and (wanted.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device {wanted} is not here; CUDA devices are 0 to {torch.cuda.device_count() - 1}"
        )
    return wanted


def synchronize(device: torch.device, *, wait: bool = True) -> None:
    """Returns once everything asked of `device` is done, or with wait=False at once.

    On XLA this ends the graph that is compiled as one program: call it wherever a step is complete.
    """
    if device.type == "cuda" and wait:
        torch.cuda.synchronize(device)
    elif device.type == "neuron" and wait:
        torch.accelerator.synchronize(device)
    elif device.type == "xla":
        _xla().sync(wait=wait)


def compilations() -> int:
    """How many graphs XLA has compiled in this process."""
    _xla()
    found = import_module("torch_xla.debug.metrics").metric_data("CompileTime")
    return int(found[0]) if found else 0


def fallbacks() -> dict[str, int]:
    """ATen operations that XLA could not compile, each a wait for the device, and how often they ran."""
    _xla()
    metrics = import_module("torch_xla.debug.metrics")
    names = [name for name in metrics.counter_names() if name.startswith("aten::")]
    return {name: int(metrics.counter_value(name)) for name in names}


def is_neuron(device: torch.device) -> bool:
    """Whether an XLA device is a NeuronCore: torch_neuronx is what puts its plugin into torch_xla."""
    return device.type == "xla" and find_spec("torch_neuronx") is not None


@dataclass(frozen=True)
class ProgramCache:
    """Where a compiler keeps what it compiled, beyond the process: a folder, or a URL that starts with s3://.

    entries     pattern of one compiled program's own file or folder in it; its name has the compiler's key
    """

    compiler: str
    place: str
    entries: str

    def keys(self) -> frozenset[str]:
        """Of every program that is there now; none for s3, which only the compiler reads."""
        if "://" in self.place:
            return frozenset()
        return frozenset(path.name for path in Path(self.place).glob(self.entries))


def program_caches(device: torch.device, *, compiled: bool, triton: bool) -> tuple[ProgramCache, ...]:
    """The caches that a process on `device` fills, as their own tools' variables have them; the first leads.

    compiled    by torch.compile; `triton`: with Triton kernels
    None for XLA's CPU device: its runtime cannot load a saved program (torch_xla 2.9: "Deserializing
    serialized executable not supported"), so that every process compiles again.
    """
    found = []
    if is_neuron(device):
        flags = shlex.split(os.environ.get("NEURON_CC_FLAGS", ""))
        named = [flag.partition("=")[2] for flag in flags if flag.startswith("--cache_dir=")]
        place = os.environ.get("NEURON_COMPILE_CACHE_URL") or "/var/tmp/neuron-compile-cache"
        found.append(ProgramCache("neuronx-cc", named[-1] if named else place, "neuronxcc-*/MODULE_*"))
    if triton and device.type == "cuda":
        home = Path(os.environ.get("TRITON_HOME") or Path.home(), ".triton", "cache")
        found.append(ProgramCache("triton", os.environ.get("TRITON_CACHE_DIR") or str(home), "*"))
    if compiled and device.type != "xla":
        place = import_module("torch._inductor.runtime.cache_dir_utils").cache_dir()
        found.append(ProgramCache("inductor", place, "fxgraph/*/*"))
    return tuple(found)


def reset_peak_memory(device: torch.device) -> None:
    """Starts a new measurement of peak memory: on CUDA, and on Linux for this process."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif _CLEAR.exists():
        _CLEAR.write_text("5")  # proc(5): sets the peak resident size to the present one


def peak_memory(device: torch.device) -> int:
    """Bytes since the last reset: CUDA's allocator's peak; else this process's peak resident size."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    for line in _STATUS.read_text().splitlines() if _STATUS.exists() else []:
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def describe(device: torch.device) -> str:
    """The model name of the device, never the host's."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "xla":
        return f"XLA {os.environ.get('PJRT_DEVICE', 'device')}"
    return "NeuronCore" if device.type == "neuron" else _cpu_model()


def supports_bfloat16(device: torch.device) -> bool:
    """Whether bfloat16 products are made in hardware, so that training in it pays."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type in ("xla", "neuron"):
        return True
    flags = _cpu_flags()
    return bool(flags & {"amx_bf16", "avx512_bf16", "bf16"})


@dataclass(frozen=True)
class Processes:
    """This process among those that torchrun started; alone: 0, 1, 0."""

    rank: int
    world: int
    local_rank: int


def processes() -> Processes:
    """Read from the variables that torchrun sets."""
    return Processes(
        rank=int(os.environ.get("RANK", "0")),
        world=int(os.environ.get("WORLD_SIZE", "1")),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
    )


def collectives(device: torch.device) -> str:
    """torch.distributed's backend for tensors on `device`; on CUDA also one for the host's tensors."""
    if device.type == "xla":
        import_module("torch_xla.distributed.xla_backend")  # importing it registers the backend
        return "xla"
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def threads() -> int:
    """CPU threads PyTorch computes with inside one operation."""
    return torch.get_num_threads()


def _torchneuron() -> bool:
    """Whether PyTorch has the device that torch_neuronx 2.14 gives it on Trn2 and Trn3, without torch_xla.

    Importing torch_neuronx registers it. Not run on a chip.
    """
    if find_spec("torch_xla") is not None or find_spec("torch_neuronx") is None:
        return False
    import_module("torch_neuronx")
    found = torch.accelerator.current_accelerator(check_available=True)
    return found is not None and found.type == "neuron"


def _xla() -> ModuleType:
    module = xla()
    if module is None:
        raise ImportError("device xla needs torch_xla, which is not installed; pick another device")
    return module


@cache
def _cpu_model() -> str:
    for line in _cpuinfo():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


@cache
def _cpu_flags() -> frozenset[str]:
    for line in _cpuinfo():
        if line.startswith(("flags", "Features")):
            return frozenset(line.split(":", 1)[1].split())
    return frozenset()


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []
