"""What decides which programs a run compiles. Two runs with equal identities compile the same.

Only what certainly changes no graph is left out: an identity that is told apart for nothing costs a warmup
that finds everything in the cache, one that is not costs what warming is there to avoid.
"""

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from delta_trn.backends import machine as platform
from delta_trn.train.settings.schema import RunConfig, flatten, is_one_of

ROOT = Path(__file__).resolve().parents[2]

# keys that reach a graph, if at all, as the values of its inputs
NOT_IN_GRAPHS = frozenset(
    (
        *("name", "out", "steps", "seed", "max_minutes", "schedule", "data", "checkpoint"),
        *("log.every", "log.wandb", "log.wandb_project", "log.tensorboard"),
        *("optimizer.lr", "evaluation.every", "evaluation.seed", "model.initializer_range"),
    )
)
# tools beside the operations: who measures, judges and lists
_BESIDE = (
    "__main__",
    "baseline",
    "bench",
    "cases",
    "depth_cases",
    "facts",
    "goldens",
    "judge",
    "parity",
    "peers",
)
_STEP = (
    *("step", "optimizers", "parallel", "tensor_parallel", "context_parallel", "neuron"),
    *("evaluation", "generation", "probes", "observation", "geometry"),
)
_KERNELS = {"triton": "triton_kernels", "nki": "nki_kernels", "nki-simulator": "nki_kernels"}
_PACKAGES = (
    *("torch", "transformers", "triton", "torch-xla", "torch-neuronx", "libneuronxla", "neuronx-cc", "nki"),
    "neuronx-distributed",
)
_FLAGS = {"neuron": ("NEURON_CC_FLAGS",), "xla": ("XLA_FLAGS",)}


@dataclass(frozen=True)
class Identity:
    """keys, sources (by package, a hash), versions, flags of compilers, device model, processes."""

    configuration: dict[str, Any]
    sources: dict[str, str]
    versions: dict[str, str]
    flags: dict[str, str]
    device: str
    world: int

    @classmethod
    def of(cls, config: RunConfig, device: torch.device, world: int) -> "Identity":
        """Of a run whose configuration has no `auto` left."""
        keys = {key: value for key, value in flatten(config) if not is_one_of(key, NOT_IN_GRAPHS)}
        keys["schedule.warmup"] = config.schedule.warmup > 0  # a first rate of 0 is a constant to XLA
        return cls(
            configuration=keys,
            sources=_sources(config.backend),
            versions=_versions(),
            flags=_flags(device),
            device=platform.describe(device),
            world=world,
        )

    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]

    def differences(self, other: dict[str, Any]) -> list[str]:
        """Names of what is not the same in another's dictionary."""
        found = []
        for part, mine in asdict(self).items():
            theirs = other.get(part)
            if not isinstance(mine, dict) or not isinstance(theirs, dict):
                found += [part] if mine != theirs else []
                continue
            names = sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))
            found += [f"sources of {name}" if part == "sources" else name for name in names]
        return found


def _sources(backend: str) -> dict[str, str]:
    adapters = set((ROOT / "backends").glob("*_adapter.py"))
    mine = {path for path in adapters if path.stem == f"{backend.partition('-')[0]}_adapter"}
    files = {
        "models": set((ROOT / "models").glob("*.py")) - {ROOT / "models" / "__main__.py"},
        "backends": {p for p in (ROOT / "backends").glob("*.py") if p.stem not in _BESIDE} - adapters | mine,
        "train": {path for path in (ROOT / "train").glob("*.py") if path.stem in _STEP},
    }
    if kernels := _KERNELS.get(backend):
        files[kernels] = set((ROOT / kernels).glob("*.py"))
    return {name: _hash(paths) for name, paths in files.items()}


def _hash(paths: set[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(paths):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()[:16]


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _flags(device: torch.device) -> dict[str, str]:
    names = _FLAGS["neuron"] if platform.is_neuron(device) else _FLAGS.get(device.type, ())
    return {name: os.environ[name] for name in names if os.environ.get(name)}
