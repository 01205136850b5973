"""The record of a warmup: a file beside the compiler's cache, named for all that decides a run's programs.

The cache itself is keyed by content. The record only lets a run say in advance whether it will compile.
"""

import hashlib
import json
import os
import shlex
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from delta_trn.backends import machine
from delta_trn.train.files import write_file
from delta_trn.train.settings.schema import RunConfig, flatten, is_one_of

FOLDER = "delta-trn-warmup"
_ROOT = Path(__file__).resolve().parents[2]
# packages whose code decides what is traced: all sources of each count
_TRACING = (
    *("models", "backends", "triton_kernels", "nki_kernels"),
    *("train/run", "train/parallel", "train/neuron"),
)
# variables that change what is traced, or how it is compiled
_VARIABLES = (
    *("NEURON_CC_FLAGS", "XLA_FLAGS", "ALLREDUCE_GRADIENTS_BUCKET_SIZE_MB", "XLA_DISABLE_FUNCTIONALIZATION"),
    *("XLA_USE_BF16", "XLA_DOWNCAST_BF16", "NEURON_FUSE_SOFTMAX", "NEURON_CUSTOM_SILU"),
)
_COMPILERS = (
    *("torch", "transformers", "triton", "torch-xla", "torch-neuronx"),
    *("libneuronxla", "neuronx-cc", "nki", "neuronx-distributed"),
)
# keys that reach a graph, if at all, as the values of its inputs
_NOT_IN_GRAPHS = frozenset(
    (
        *("name", "out", "steps", "seed", "max_minutes", "schedule", "data", "checkpoint"),
        *("log.every", "log.wandb", "log.wandb_project", "log.tensorboard"),
        *("optimizer.lr", "evaluation.every", "evaluation.seed", "model.initializer_range"),
    )
)


@dataclass(frozen=True)
class ProgramCache:
    """Locates a compiler's cache: a folder, or a URL that starts with s3://.

    entries     pattern of a compiled program's file or folder, whose name has the compiler's key
    """

    compiler: str
    place: str
    entries: str

    def keys(self) -> frozenset[str]:
        """Returns the key of every program in the cache; none for s3, which only the compiler reads."""
        if "://" in self.place:
            return frozenset()
        return frozenset(path.name for path in Path(self.place).glob(self.entries))


def program_caches(device: torch.device, *, compiled: bool, triton: bool) -> tuple[ProgramCache, ...]:
    """Returns the caches that a process on `device` fills, the device's own compiler first.

    compiled    torch.compile is used
    triton      Triton kernels are used

    The tools' environment variables say where their caches are. XLA's CPU device has none: its runtime cannot
    load a saved program (torch_xla 2.9: "Deserializing serialized executable not supported").
    """
    caches = []
    if machine.is_neuron(device):
        flags = shlex.split(os.environ.get("NEURON_CC_FLAGS", ""))
        folders = [flag.partition("=")[2] for flag in flags if flag.startswith("--cache_dir=")]
        place = os.environ.get("NEURON_COMPILE_CACHE_URL") or "/var/tmp/neuron-compile-cache"
        caches.append(ProgramCache("neuronx-cc", folders[-1] if folders else place, "neuronxcc-*/MODULE_*"))
    if triton and device.type == "cuda":
        home = Path(os.environ.get("TRITON_HOME") or Path.home(), ".triton", "cache")
        caches.append(ProgramCache("triton", os.environ.get("TRITON_CACHE_DIR") or str(home), "*"))
    if compiled and device.type != "xla":
        place = import_module("torch._inductor.runtime.cache_dir_utils").cache_dir()
        caches.append(ProgramCache("inductor", place, "fxgraph/*/*"))
    return tuple(caches)


def caches(config: RunConfig, device: torch.device) -> tuple[ProgramCache, ...]:
    """Returns the caches that this run's compilers fill."""
    return program_caches(device, compiled=config.compile, triton=config.backend == "triton")


def compiles(config: RunConfig, device: torch.device) -> bool:
    """Whether anything of the run is compiled: not where PyTorch's own operators are called one by one."""
    return config.compile or device.type == "xla" or (config.backend == "triton" and device.type == "cuda")


def fingerprint(config: RunConfig, device: torch.device, world: int) -> str:
    """Returns 16 hex digits of what decides a run's programs; the configuration has no `auto` left.

    A key too many costs a warmup that finds everything in the cache. A key too few lets a run compile.
    """
    keys = {key: value for key, value in flatten(config) if not is_one_of(key, _NOT_IN_GRAPHS)}
    parts: list[Any] = [
        keys,
        config.schedule.warmup > 0,  # a first rate of 0 is a constant to XLA
        _versions(),
        [os.environ.get(name, "") for name in _VARIABLES],
        machine.describe(device),
        world,
    ]
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode())
    for package in _TRACING:
        for path in sorted((_ROOT / package).rglob("*.py")):
            digest.update(f"{path.relative_to(_ROOT)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def record_path(config: RunConfig, device: torch.device, world: int) -> Path:
    """Returns the file for this run: beside the leading cache, or in the user's own where that is a URL."""
    place = caches(config, device)[0].place
    if "://" in place:
        place = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(place) / FOLDER / f"{fingerprint(config, device, world)}.json"


def write_record(path: Path, graphs: list[dict[str, Any]]) -> None:
    """Writes down that these graphs are compiled."""
    path.parent.mkdir(parents=True, exist_ok=True)
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    write_file(path, json.dumps({"made": now, "graphs": graphs}, indent=1) + "\n")


def notice(config: RunConfig, device: torch.device, world: int, folder: Path) -> list[str]:
    """Returns the line before a run that says whether it was warmed; none for a run that compiles nothing."""
    if not compiles(config, device):
        return []
    if not caches(config, device):
        return ["cache      none: XLA's CPU device compiles in every process anew"]
    path = record_path(config, device, world)
    try:
        record = json.loads(path.read_bytes())
        return [f"cache      warm: {len(record['graphs'])} graphs compiled {record['made']}, {path}"]
    except (OSError, ValueError, LookupError, TypeError):  # a damaged record is none
        processes = f" --processes={world}" if world > 1 else ""
        command = f"delta-trn warmup {shlex.quote(str(folder))}{processes}"
        return [f"cache      cold: there is no {path}; this compiles first: {command}"]


def _versions() -> dict[str, str]:
    versions = {}
    for package in _COMPILERS:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions
