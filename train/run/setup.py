"""From a configuration, or a run's folder, to everything that training needs, ready between two steps."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from delta_trn.backends import machine as platform
from delta_trn.train.checkpoints import contents as checkpoint
from delta_trn.train.checkpoints.contents import State
from delta_trn.train.checkpoints.run_folder import Origin, RunFolder, new_origin, place_for
from delta_trn.train.data import (
    Loader,
    TokenDataset,
    baselines,
    make_loader,
    open_dataset,
    prepare,
)
from delta_trn.train.files import write_file
from delta_trn.train.neuron import sharding as neuron
from delta_trn.train.parallel.layout import Layout, layout_of, require_divisible
from delta_trn.train.parallel.pytorch import PyTorchSharding
from delta_trn.train.parallel.sharding import Sharding
from delta_trn.train.parallel.team import Team, assembled
from delta_trn.train.run.model import choose_backend, make_model, model_config, pick_device
from delta_trn.train.run.optimizer import learning_rate, make_optimizer
from delta_trn.train.settings.errors import ConfigError, DataError, RunFolderError
from delta_trn.train.settings.overrides import apply
from delta_trn.train.settings.schema import RunConfig, differences, may_change_on_resume
from delta_trn.train.watch import trackers

if TYPE_CHECKING:
    from delta_trn.models import DeltaForCausalLM

Tell = Callable[[str], None]


@dataclass
class Run:
    """Everything of a run that is there while it runs. `config` has no `auto` left."""

    config: RunConfig
    origin: Origin
    folder: RunFolder
    dataset: TokenDataset
    device: torch.device
    sharding: Sharding
    optimizer: Optimizer
    loader: Loader
    state: State

    @property
    def model(self) -> DeltaForCausalLM:
        return self.sharding.model

    @property
    def team(self) -> Team:
        return self.sharding.team

    @property
    def layout(self) -> Layout:
        return layout_of(self.config, self.team.world)


@contextlib.contextmanager
def begun(config: RunConfig, tell: Tell) -> Iterator[Run]:
    """A new run, its folder made and held. What can be wrong with `config` is found before.

    Under torchrun every process calls this; the first one writes.
    """
    trackers.require(config.log)
    with _teamed(config) as (config, device, team):
        path = team.told(place_for(config))
        with team.leader_first():
            dataset = _dataset(config)
        config = _with_data(config, dataset)
        origin = team.told(new_origin(config, dataset.fingerprint))
        _same_data(dataset, origin)
        run = _assembled(config, origin, RunFolder(path), dataset, device, team)
        if team.leads:
            _make(path)
        with _held(run.folder, team):
            if team.leads:
                if run.folder.is_taken():
                    raise RunFolderError(
                        f"{path} was taken by another process just now; run the same command again"
                    )
                run.folder.write(config, run.origin)
            yield run


@contextlib.contextmanager
def reopened(path: Path, changes: dict[str, str] | RunConfig, step: int | None, tell: Tell) -> Iterator[Run]:
    """A run continued from its newest whole checkpoint, that of `step`, or its start if there is none.

    changes   keys and their new values, or the whole configuration as it was given to begin the run
    tell      hears what is not obvious: damaged checkpoints, changed keys, a start at step 0

    Raises ConfigError for a change that would make it another run, CheckpointError if the checkpoint is of
    another one.
    """
    folder = RunFolder(path)
    saved, origin = folder.read()
    config = (
        _given_again(path, saved, changes) if isinstance(changes, RunConfig) else _changed(saved, changes)
    )
    trackers.require(config.log)
    with _teamed(config) as (config, device, team), _held(folder, team):
        # hashing every file of a checkpoint once is enough
        if step is None:
            step = team.agreed(lambda: folder.checkpoints.newest_whole(tell) if team.leads else None)[0]
        elif step != 0:
            team.agreed(lambda at=step: folder.checkpoints.require_whole(at) if team.leads else None)
        state = State()
        if step:
            state, at_save = checkpoint.read_state(folder.checkpoints.path(step))
            checkpoint.require_same_run(at_save, config, folder.checkpoints.path(step))
        if config.steps < state.step:
            raise ConfigError(
                f"steps={config.steps} is below step {state.step}, where the run stands; give more"
            )
        with team.leader_first():
            dataset = _dataset_again(config, origin)
        config = _with_data(config, dataset)
        run = _assembled(config, origin, folder, dataset, device, team)
        if step:
            checkpoint.restore(folder.checkpoints.path(step), run.sharding, run.optimizer)
            run.loader.load_state_dict(state.position)
            run.state = state
        team.agreed(lambda: _put_back(run, saved, tell) if team.leads else None)
        yield run


def _put_back(run: Run, saved: RunConfig, tell: Tell) -> None:
    """The run's folder as it was after the step where the run stands."""
    config, folder, state = run.config, run.folder, run.state
    for key, (old, new) in differences(saved, config).items():
        tell(f"{key} changes from {old} to {new}")
    before, after = learning_rate(saved, state.step), learning_rate(config, state.step)
    if before != after and state.step < config.steps:
        tell(f"so the learning rate at step {state.step} changes from {before:.3g} to {after:.3g}")
    folder.write(config, run.origin)
    undone = folder.checkpoints.set_aside(state.step)
    if undone:
        tell(f"later checkpoints are set aside as undone-step-*: {', '.join(map(str, undone))}")
    folder.rewind(state.step)
    if state.best is not None and state.best[0] in folder.checkpoints.steps():
        folder.checkpoints.point_best(state.best[0])
    tell(
        f"continuing {folder.path} after step {state.step}"
        if state.step
        else f"starting {folder.path} at step 0: no checkpoint yet"
    )


def held_out_costs(run: Run) -> dict[str, dict[str, float]]:
    """The data's baselines by name, kept in the run's folder for its plot and summary."""
    if not run.team.leads:
        return {}
    found = {name: asdict(cost) for name, cost in baselines(run.dataset).items()}
    write_file(run.folder.baselines_path, json.dumps(found, indent=1) + "\n")
    return found


def _assembled(
    config: RunConfig,
    origin: Origin,
    folder: RunFolder,
    dataset: TokenDataset,
    device: torch.device,
    team: Team,
) -> Run:
    meta = dataset.meta
    configuration = model_config(
        config,
        rows=config.model.vocab_size or meta.vocab_size,
        bos=meta.bos_id,
        eos=meta.eos_id,
        pad=meta.pad_id,
    )
    model = make_model(configuration, seed=config.seed, device=device)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    model.train()
    # before the optimizer: it is to have each process's own parts
    sharding = shard(model, config, team)
    optimizer = make_optimizer(sharding, config)
    loader = make_loader(
        dataset,
        "train",
        kind=config.data.loader,
        batch=config.batch.sequences // team.data_world,
        sequence=config.batch.length,
        seed=config.seed,
        rank=team.data_rank,
        world=team.data_world,
    )
    # after the model's own draws: nothing in training draws from it today, and resuming restores it
    torch.manual_seed(config.seed)
    return Run(config, origin, folder, dataset, device, sharding, optimizer, loader, State())


def shard(model: DeltaForCausalLM, config: RunConfig, team: Team) -> Sharding:
    """Divides a model among the processes of a team, by the library that serves its device."""
    if team.mesh is None:
        return Sharding(model, team)
    kind = neuron.NeuronSharding if neuron.serves(model.device) else PyTorchSharding
    return kind(model, config.distribution, team)


@contextlib.contextmanager
def _teamed(config: RunConfig) -> Iterator[tuple[RunConfig, torch.device, Team]]:
    """The resolved configuration, this process's device, and the team it is in for as long as this lasts."""
    require_divisible(config, platform.processes().world)
    config, device = _resolved(config)
    with assembled(config, device) as team:
        yield config, device, team


def _held(folder: RunFolder, team: Team) -> contextlib.AbstractContextManager[None]:
    """The folder held by the process that writes to it."""
    return folder.hold() if team.leads else contextlib.nullcontext()


def _same_data(dataset: TokenDataset, origin: Origin) -> None:
    if dataset.fingerprint != origin.data:
        raise DataError(
            f"{dataset.path} holds other tokens here than on the first process (fingerprint "
            f"{dataset.fingerprint[:16]}, expected {origin.data[:16]}); give every node the same folder"
        )


def _resolved(config: RunConfig) -> tuple[RunConfig, torch.device]:
    """Device, precision and backend in place of `auto`; the process set up for them."""
    device = pick_device(config.device)
    precision = config.precision
    if precision == "auto":
        # some CPUs have bf16 products, most emulate them slower than float32
        accelerated = device.type != "cpu" and platform.supports_bfloat16(device)
        precision = "bf16" if accelerated else "float32"
    if precision == "bf16":
        torch.set_float32_matmul_precision("high")  # TF32 for what autocast leaves in float32
    if config.deterministic:
        # CUDA's own switch, read when its first handle is made; without it PyTorch refuses
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    backend = choose_backend(model_config(config, rows=1), config, device, precision)
    # without the process's own number: every process's configuration is the run's
    named = device.type if platform.processes().world > 1 else str(device)
    changes = {"device": named, "precision": precision, "backend": backend}
    return config.model_copy(update=changes), device


def _dataset(config: RunConfig) -> TokenDataset:
    """The prepared folder that data.source is, or the one that preparing it makes or finds."""
    source = Path(config.data.source).expanduser()
    if (source / "meta.json").is_file() or any(source.glob("*_train_*.bin*")):
        return open_dataset(source)  # shards without meta.json too: they are damaged, not text
    return open_dataset(prepare(config.data))


def _dataset_again(config: RunConfig, origin: Origin) -> TokenDataset:
    """The tokens a run was begun with, where they were or prepared anew. DataError if they differ now."""
    where = config.data.folder
    dataset = open_dataset(where) if where and (Path(where) / "meta.json").is_file() else _dataset(config)
    if dataset.fingerprint != origin.data:
        raise DataError(
            f"{dataset.path} holds other tokens than the run began with (fingerprint "
            f"{dataset.fingerprint[:16]}, expected {origin.data[:16]}); put the old ones back, name their "
            "folder with data.folder=DIR, or begin a new run"
        )
    return dataset


def _with_data(config: RunConfig, dataset: TokenDataset) -> RunConfig:
    """What only the data could tell. ConfigError if the model's vocabulary is too small for it."""
    rows, ids = config.model.vocab_size, dataset.meta.tokenizer.size
    if rows is not None and rows < ids:
        raise ConfigError(
            f"model.vocab_size={rows} is below the tokenizer's {ids} ids; give {ids} or more, or leave it out"
        )
    steps = config.steps
    if config.epochs is not None:
        step = config.batch.sequences * config.batch.length
        steps = math.ceil(config.epochs * dataset.split("train").tokens / step)
    return config.model_copy(
        update={
            "steps": steps,
            "epochs": None,
            "model": config.model.model_copy(update={"vocab_size": rows or dataset.vocab_size}),
            "data": config.data.model_copy(update={"folder": str(dataset.path.resolve())}),
        }
    )


def _changed(saved: RunConfig, changes: dict[str, str]) -> RunConfig:
    """The saved configuration with changes. ConfigError for keys that make another run of it."""
    if "device" in changes:
        changes = {"backend": "auto", **changes}  # another device has another backend
    config = apply(saved, changes)
    if refused := _refused(saved, config):
        listed = ", ".join(f"{key} from {old} to {new}" for key, (old, new) in refused.items())
        raise ConfigError(
            f"resuming may not change {listed}: that is another run; begin one with `run` and out=DIR"
        )
    return config


def _given_again(path: Path, saved: RunConfig, given: RunConfig) -> RunConfig:
    """`given` with what the run found out where it says auto. ConfigError if it is not the run's."""
    found: dict[str, Any] = {"out": saved.out}
    if given.device in ("auto", saved.device):
        found["device"] = saved.device
        found |= {} if given.backend != "auto" else {"backend": saved.backend}
    if given.precision == "auto":
        found["precision"] = saved.precision
    if given.epochs is not None:
        found["steps"] = saved.steps  # until the data says how many they are
    config = given.model_copy(
        update={
            **found,
            "model": given.model.model_copy(
                update={"vocab_size": given.model.vocab_size or saved.model.vocab_size}
            ),
            "data": given.data.model_copy(update={"folder": given.data.folder or saved.data.folder}),
        }
    )
    if refused := _refused(saved, config):
        listed = ", ".join(f"{key} was {old}, is {new}" for key, (old, new) in refused.items())
        raise ConfigError(
            f"{path} holds another run: {listed}; give what it was begun with, or another out=DIR"
        )
    return config


def _refused(saved: RunConfig, now: RunConfig) -> dict[str, tuple[Any, Any]]:
    return {k: pair for k, pair in differences(saved, now).items() if not may_change_on_resume(k)}


def _make(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunFolderError(
            f"cannot make {path} ({(error.strerror or str(error)).lower()}); choose another out=DIR"
        ) from error
