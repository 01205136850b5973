"""What is in a checkpoint, and how a run is restored from it.

config.json, generation_config.json           the model's configuration, as from_pretrained reads it
model.safetensors                             its weights; of N processes
                                              model-0000i-of-0000N.safetensors and
                                              model.safetensors.index.json: whole matrices, shared
                                              by size
tokenizer.json, tokenizer_config.json, ...    the tokenizer, so that the folder stands alone
optimizer-....safetensors                     NAME/SLOT -> each process's part with its offsets
random.safetensors                            generator states
state.json                                    step, data position, best so far, configuration
manifest.json                                 sizes and hashes of the others

The snapshot gathers the weights, one matrix at a time, because from_pretrained wants whole
matrices: each forward pass of FSDP gathers as much. The optimizer, twice as large, is never
gathered. Its parts are written by torch.distributed.checkpoint, whose names for its files nothing
here depends on.

torch.distributed.checkpoint's reader gives each process the parts that it has now. A run continues
on any number of processes, divided in any way.
"""

import contextlib
import json
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from delta_trn.train.data.tokenizer import TextTokenizer
from delta_trn.train.parallel.sharding import Sharding, named_parameters
from delta_trn.train.parallel.team import Team
from delta_trn.train.settings.errors import CheckpointError, Diverged
from delta_trn.train.settings.schema import RunConfig, differences, may_change_on_resume, validate

FORMAT = 1
REMEDY = "lower optimizer.lr, or lengthen schedule.warmup"
_PARTS = "optimizer"
_RANDOM = "random.safetensors"
_GENERATORS = ("cpu", "cuda")  # the names in it


@dataclass
class State:
    """Where a run stands between two steps.

    tokens      tokens trained on so far, by all devices
    seconds     seconds of training so far, in all processes that continued the run one after
                another
    position    the loader's state_dict
    best        (step, validation loss) of the lowest so far
    owes        whether the evaluation after this step, or its sample, is still to be made. A
                checkpoint is written before them; a resumed run finds in metrics.jsonl whether they
                were made
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    position: dict[str, Any] = field(default_factory=dict)
    best: tuple[int, float] | None = None
    owes: bool = False

    def improves(self, loss: float) -> bool:
        """Notes this step's held-out loss. Returns whether it is the lowest so far."""
        better = self.best is None or loss < self.best[1]
        if better:
            self.best = self.step, loss
        return better


@dataclass(frozen=True)
class Snapshot:
    """What one process writes of a run, in the host's memory.

    weights     whole matrices by name, those that this process writes
    owners      name -> process that writes it, of all weights
    optimizer   NAME/SLOT -> part, or the whole
    """

    state: State
    weights: dict[str, Tensor]
    owners: dict[str, int]
    optimizer: dict[str, Tensor]
    generators: dict[str, Tensor]


def snapshot(sharding: Sharding, optimizer: Optimizer, state: State) -> Snapshot:
    """Returns what `write` needs. All processes must call."""
    sharding.at_rest()
    named = sharding.tensors()
    slots = sharding.slots(optimizer)
    slots |= {key: sharding.whole(key, x) for key, x in slots.items() if sharding.saves_whole(key)}
    # what all have whole, one writes
    shared = named | {key: x for key, x in slots.items() if not isinstance(x, DTensor)}
    owners = _assign({name: x.numel() for name, x in shared.items()}, sharding.team.world)

    def mine(name: str) -> bool:
        return owners.get(name, sharding.team.rank) == sharding.team.rank

    weights = {}
    for name, p in named.items():
        whole = sharding.whole(name, p)
        if mine(name):
            weights[name] = _on_host(whole)
    return Snapshot(
        state,
        weights,
        {name: owners[name] for name in named},
        {key: _on_host(x) for key, x in slots.items() if mine(key)},
        random_states(sharding.model.device),
    )


def require_finite(snapshot: Snapshot, rank: int) -> None:
    """Diverged if a weight is not finite: saving it would rotate good checkpoints out."""
    if bad := [name for name, p in snapshot.weights.items() if not bool(torch.isfinite(p).all())]:
        raise Diverged(
            f"{len(bad)} of the parameters that process {rank} saves are not finite after step "
            f"{snapshot.state.step}, {bad[0]} first; {REMEDY}"
        )


def write_optimizer(folder: Path, snapshot: Snapshot, team: Team) -> None:
    """Writes the optimizer's memory, each process its parts. All must call, before `write`, and
    wait here.

    What fails on one process, torch.distributed.checkpoint raises on all.
    """
    parts = _own_folder(folder, team.rank) / _PARTS
    parts.mkdir(parents=True)
    with _plain_library():
        writer = HuggingFaceStorageWriter(str(parts), save_distributed=True)
        state_dict_saver.save(
            snapshot.optimizer,
            storage_writer=writer,
            process_group=team.hosts,
            no_dist=team.world == 1,
        )


def write(
    folder: Path,
    snapshot: Snapshot,
    *,
    config: RunConfig,
    sharding: Sharding,
    tokenizer: "TextTokenizer",
) -> list[Path]:
    """Writes the rest, and returns all files of this process. No process waits for another."""
    rank, world, own = (
        sharding.team.rank,
        sharding.team.world,
        _own_folder(folder, sharding.team.rank),
    )
    model = sharding.model
    save_file(snapshot.weights, own / _weights_file(rank, world), metadata={"format": "pt"})
    if sharding.team.leads:
        # what save_pretrained writes beside weights; FSDP has given the model a class of its own
        model.config.architectures = [type(model).__name__.removeprefix("FSDP")]
        model.config.dtype = torch.float32
        model.config.save_pretrained(own)
        model.generation_config.save_pretrained(own)
        if world > 1:
            places = {name: _weights_file(owner, world) for name, owner in snapshot.owners.items()}
            _write_json(
                own / "model.safetensors.index.json", {"metadata": {}, "weight_map": places}
            )
        tokenizer.save(own)
        save_file(snapshot.generators, own / _RANDOM)
        content = {
            "format": FORMAT,
            **asdict(snapshot.state),
            "tokenizer": tokenizer.sha256,
            "fingerprint": config.fingerprint(),
            "config": config.model_dump(mode="json"),
        }
        _write_json(own / "state.json", content)
    for path in (own / _PARTS).iterdir():
        path.rename(own / f"{_PARTS}-{path.name}")
    (own / _PARTS).rmdir()
    files = [path.rename(folder / path.name) for path in sorted(own.iterdir())]
    own.rmdir()
    return files


def _own_folder(folder: Path, rank: int) -> Path:
    """Returns where a process writes, so that it knows its files whatever a library calls them."""
    return folder / f"process-{rank}"


def _weights_file(rank: int, world: int) -> str:
    return "model.safetensors" if world == 1 else f"model-{rank + 1:05d}-of-{world:05d}.safetensors"


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _assign(sizes: Mapping[str, int], world: int) -> dict[str, int]:
    """Assigns the largest tensors first, each to the least loaded rank."""
    loads, owners = [0] * world, {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        owners[name] = loads.index(min(loads))
        loads[owners[name]] += sizes[name]
    return owners


def _on_host(x: Tensor) -> Tensor:
    return x.detach().cpu().contiguous()


def read_state(folder: Path) -> tuple[State, RunConfig]:
    """Returns a checkpoint's state and configuration.
    CheckpointError if this code cannot read it.
    """
    path = folder / "state.json"
    content = json.loads(path.read_bytes())
    if content.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has format {content.get('format')}, this code reads {FORMAT}"
        )
    state = State(**{f.name: content[f.name] for f in fields(State) if f.name in content})
    state.best = tuple(content["best"]) if content["best"] else None
    return state, validate(content["config"], where=f"{path}: ")


def require_same_run(saved: RunConfig, now: RunConfig, where: Path) -> None:
    """CheckpointError naming every differing key that may not change between saving
    and resuming.
    """
    differing = {
        k: pair for k, pair in differences(saved, now).items() if not may_change_on_resume(k)
    }
    if differing:
        listed = ", ".join(f"{key} was {old}, is {new}" for key, (old, new) in differing.items())
        raise CheckpointError(
            f"{where} was saved with another configuration: {listed}; put that back in "
            "config.json, or begin a new run"
        )


def restore(folder: Path, sharding: Sharding, optimizer: Optimizer) -> None:
    """Puts weights, optimizer and generators into the saved state,
    however many processes saved it.
    """
    load_weights(folder, sharding)
    own, saved = dict(named_parameters(optimizer)), {}
    for key, (size, dtype) in _sizes(folder).items():
        name, slash, _ = key.rpartition("/")
        if slash and name in own:
            if not size or sharding.saves_whole(name):
                saved[key] = torch.empty(size, dtype=dtype)
            else:
                saved[key] = torch.empty_like(own[name].detach(), dtype=dtype)
    _read(folder, saved)
    slots = {
        key: sharding.part(key, x) if sharding.saves_whole(key) else x for key, x in saved.items()
    }
    sharding.load_slots(optimizer, slots)
    set_random_states(load_file(folder / _RANDOM), sharding.model.device)


def load_weights(folder: Path, sharding: Sharding) -> None:
    """Puts saved weights into a model, each process its part.
    CheckpointError unless they are its own.
    """
    own = sharding.model.state_dict(keep_vars=True)
    saved = {
        key: size
        for key, (size, _) in _sizes(folder).items()
        if "/" not in key and key not in _GENERATORS
    }
    wrong = [
        f"{name} {tuple(size)}"
        for name, size in saved.items()
        if name not in own or sharding.shape(name) != size
    ]
    present = {id(own[name]) for name in saved if name in own}
    # a tied matrix has two names and is saved under one
    missing = [
        name
        for name, parameter in own.items()
        if name not in saved and id(parameter) not in present
    ]
    if wrong or missing:
        raise CheckpointError(
            f"the weights in {folder} are not this model's: {len(missing)} missing, {len(wrong)} "
            f"unknown or of another shape, {(missing + wrong)[0]} first; begin a new run"
        )
    targets = {name: own[name].detach() for name in saved}
    wholes = {name: torch.empty(saved[name]) for name in saved if sharding.saves_whole(name)}
    _read(folder, targets | wholes)
    for name, whole in wholes.items():
        targets[name].copy_(sharding.part(name, whole))


def _sizes(folder: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Returns shape and dtype of every tensor of a checkpoint, by name."""
    known = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {
        name: (meta.size, meta.properties.dtype)
        for name, meta in known.items()
        if isinstance(meta, TensorStorageMetadata)
    }


def _read(folder: Path, into: dict[str, Tensor]) -> None:
    """Fills tensors, or this process's parts of them, by name. No process waits for another."""
    with _plain_library():
        state_dict_loader.load(
            into, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True
        )


@contextlib.contextmanager
def _plain_library() -> Iterator[None]:
    """Raises the first process's own error instead
    of torch.distributed.checkpoint's wrapper of it.
    """
    try:
        with warnings.catch_warnings():
            # it warns that one process works alone, which is intended
            warnings.simplefilter("ignore")
            yield
    except CheckpointException as packed:
        raise packed.failures[min(packed.failures)][0] from packed


def random_states(device: torch.device) -> dict[str, Tensor]:
    """Returns the states of the generators of the CPU and of `device`, by kind."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_states(states: dict[str, Tensor], device: torch.device) -> None:
    """Puts the generators of the CPU and of `device` into the states
    that `random_states` returned.
    """
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
