"""What a run says of its compiler's cache before it starts."""

import shlex
from pathlib import Path

import torch

from delta_trn.backends import machine as platform
from delta_trn.train.neuron.identity import Identity
from delta_trn.train.neuron.manifest import nearest, place, read
from delta_trn.train.settings.errors import TrainError
from delta_trn.train.settings.schema import RunConfig

SHOWN = 4  # differing keys in one line


def caches(config: RunConfig, device: torch.device) -> tuple[platform.ProgramCache, ...]:
    return platform.program_caches(device, compiled=config.compile, triton=config.backend == "triton")


def compiles(config: RunConfig, device: torch.device) -> bool:
    """Whether anything of the run is compiled: not where PyTorch's own operators are called one by one."""
    return config.compile or device.type == "xla" or (config.backend == "triton" and device.type == "cuda")


def notice(config: RunConfig, device: torch.device, world: int, folder: Path) -> list[str]:
    """One line, or none for a run that compiles nothing. Never in the way of the run."""
    if not compiles(config, device):
        return []
    found = caches(config, device)
    if not found:
        return ["cache      none: XLA's CPU device compiles in every process anew"]
    path, identity = place(found), Identity.of(config, device, world)
    try:
        entries = read(path)
    except TrainError as error:
        return [f"cache      unknown: {error}"]
    entry = entries.get(identity.fingerprint())
    if entry is not None:
        made, graphs = entry.get("made", "?"), len(entry.get("graphs", ()))
        return [f"cache      warm: {graphs} graphs compiled {made}, {path}"]
    differing = nearest(entries, identity)
    more = f" and {len(differing) - SHOWN} more" if len(differing) > SHOWN else ""
    why = f"; nearest differs in {', '.join(differing[:SHOWN])}{more}" if differing else ""
    processes = f" --processes={world}" if world > 1 else ""
    command = f"python -m train warmup {shlex.quote(str(folder))}{processes}"
    return [
        f"cache      cold: no entry {identity.fingerprint()} in {path}{why}; this compiles first: {command}"
    ]
