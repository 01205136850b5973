"""Makes a run ready to train: `start` from a configuration, `resume` from a run's folder."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.optim import Optimizer

from delta_trn.backends import machine
from delta_trn.models import DeltaConfig, DeltaForCausalLM
from delta_trn.train.checkpoints import contents as checkpoint
from delta_trn.train.checkpoints.contents import State
from delta_trn.train.checkpoints.run_folder import Origin, RunFolder, new_origin, place_for
from delta_trn.train.data.dataset import TokenDataset, open_dataset
from delta_trn.train.data.entropies import baselines
from delta_trn.train.data.loader import Loader, make_loader
from delta_trn.train.data.preparation import prepare
from delta_trn.train.files import write_file
from delta_trn.train.neuron import sharding as neuron
from delta_trn.train.neuron.feed import DeviceFeed
from delta_trn.train.parallel.agreement import given, name_ranks, require_same
from delta_trn.train.parallel.layout import Layout, is_divided, layout_of, require_divisible
from delta_trn.train.parallel.pytorch import PyTorchSharding
from delta_trn.train.parallel.sharding import Sharding
from delta_trn.train.parallel.team import Team, ask_leader, assemble, consult
from delta_trn.train.run.model import (
    checkpoint_blocks,
    choose_backend,
    make_model,
    materialize,
    model_config,
    pick_device,
)
from delta_trn.train.run.optimizer import learning_rate, make_optimizer
from delta_trn.train.settings.effects import is_prepared
from delta_trn.train.settings.errors import CheckpointError, ConfigError, DataError, RunFolderError
from delta_trn.train.settings.overrides import apply
from delta_trn.train.settings.schema import (
    DistributionSection,
    RunConfig,
    differences,
    may_change_on_resume,
)
from delta_trn.train.watch import trackers

Tell = Callable[[str], None]


@dataclass
class Run:
    """Everything that a run has while it runs. `config` has no `auto` left.

    feed    sends the loader's batches to an XLA device ahead of their steps; None on other devices
    """

    config: RunConfig
    origin: Origin
    folder: RunFolder
    dataset: TokenDataset
    device: torch.device
    sharding: Sharding
    optimizer: Optimizer
    loader: Loader
    state: State
    feed: DeviceFeed | None = None

    @property
    def model(self) -> DeltaForCausalLM:
        return self.sharding.model

    @property
    def team(self) -> Team:
        return self.sharding.team

    @property
    def layout(self) -> Layout:
        return layout_of(self.config, self.team.world)

    @property
    def batches(self) -> Loader | DeviceFeed:
        """What has this process's share of every step, with noise where dropout drops anything."""
        return self.feed or self.loader


@contextlib.contextmanager
def start(config: RunConfig) -> Iterator[Run]:
    """Yields a new run, whose folder it makes and holds. Errors in `config` are found before that.

    Under torchrun every process calls this; the first one writes.
    """
    with _join(lambda: config, "to start a run") as (config, device, team):
        path = team.leader_does(lambda: place_for(config))
        with team.leader_first():
            dataset = load_dataset(config)
        origin = team.from_leader(new_origin(config, dataset.fingerprint))
        words = "than on rank 0", "give every node the same text, or the same prepared folder"
        team.agree(lambda: _require_same_data(dataset, origin, team, *words))
        config = with_data(config, dataset)
        run = _assemble(config, origin, RunFolder(path), dataset, device, team)
        team.leader_does(lambda: _make_folder(path))
        with _hold(run.folder, team):
            team.leader_does(lambda: _begin_folder(run))
            yield run
            if run.feed is not None:
                run.feed.close()


@contextlib.contextmanager
def resume(path: Path, changes: dict[str, str], step: int | None, tell: Tell) -> Iterator[Run]:
    """Yields a run at its newest whole checkpoint, at that of `step`, or at its start if there is
    none.

    changes   keys and their new values
    tell      is called with what is not obvious: damaged checkpoints, changed keys, a start at step
              0

    Raises ConfigError for a change that would make it another run, CheckpointError if the
    checkpoint is of another one. Of the run's folders the leader's counts; RunFolderError where a
    process has another run's.
    """
    folder = RunFolder(path)
    minutes = DistributionSection().timeout_minutes
    saved, origin = ask_leader("for the run to resume", folder.read, minutes)

    def change() -> RunConfig:
        _require_same_folder(folder, saved, origin)
        return _change(saved, changes)

    also = {"--step": step}
    with _join(change, "to resume a run", also) as (config, device, team), _hold(folder, team):
        # hashing every file of a checkpoint once is enough
        if step is None:
            step = team.leader_does(lambda: folder.checkpoints.newest_whole(tell))
        elif step != 0:
            team.leader_does(lambda at=step: folder.checkpoints.require_whole(at))
        state, where = State(), folder.checkpoints.path(step or 0)
        if step:
            state, at_save = team.leader_does(lambda: _read_state(folder, where))
            checkpoint.require_same_run(at_save, config, where)
            _require_same_checkpoint(folder, step, team)
        if config.steps < state.step:
            raise ConfigError(
                f"steps={config.steps} is below step {state.step}, where the run stands; give more"
            )
        with team.leader_first():
            dataset = _reload_dataset(config)
        remedy = "put the old ones back, name their folder with data.folder=DIR, or start a new run"
        words = "than the run began with", remedy
        team.agree(lambda: _require_same_data(dataset, origin, team, *words))
        config = with_data(config, dataset)
        run = _assemble(config, origin, folder, dataset, device, team)
        if step:
            team.agree(lambda: checkpoint.restore(where, run.sharding, run.optimizer))
            run.loader.load_state_dict(state.position)
            run.state = state
        team.leader_does(lambda: _rewind(run, saved, tell))
        yield run
        if run.feed is not None:
            run.feed.close()


def _read_state(folder: RunFolder, where: Path) -> tuple[State, RunConfig]:
    """Returns the state and configuration of a checkpoint,
    with the evaluation that was made after it.
    """
    state, config = checkpoint.read_state(where)
    made = folder.evaluation_after(state.step) if state.owes else None
    if made is not None:
        state.owes = False
        state.improves(made["loss"])
        state.seconds = max(state.seconds, made["seconds"])
    return state, config


def _rewind(run: Run, saved: RunConfig, tell: Tell) -> None:
    """Puts the run's folder into the state that it had after the step where the run stands."""
    config, folder, state = run.config, run.folder, run.state
    changed = differences(saved, config)
    for key, (old, new) in changed.items():
        tell(f"{key} changes from {old} to {new}")
    if changed or state.step < config.steps or state.owes:
        # it would be taken for the result of what follows
        folder.summary_path.unlink(missing_ok=True)
    before, after = learning_rate(saved, state.step), learning_rate(config, state.step)
    if before != after and state.step < config.steps:
        tell(f"so the learning rate at step {state.step} changes from {before:.3g} to {after:.3g}")
    folder.write(config, run.origin)
    run.dataset.tokenizer.save(folder.path)  # also in the folder of an earlier version
    undone = folder.checkpoints.set_aside(state.step)
    if undone:
        tell(
            f"later checkpoints are set aside as undone-step-*: {', '.join(map(str, undone))}; the "
            "first new checkpoint removes them"
        )
    folder.rewind(state.step, owes=state.owes)
    if state.best is not None and state.best[0] in folder.checkpoints.steps():
        folder.checkpoints.point_best(state.best[0])
    tell(
        f"continuing {folder.path} after step {state.step}"
        if state.step
        else f"starting {folder.path} at step 0: no checkpoint yet"
    )


def write_baselines(run: Run) -> dict[str, dict[str, float]]:
    """Returns the data's baselines by name, and keeps them in the run's folder for its plot."""
    if not run.team.leads:
        return {}
    costs = {name: asdict(cost) for name, cost in baselines(run.dataset).items()}
    write_file(run.folder.baselines_path, json.dumps(costs, indent=1) + "\n")
    return costs


def _assemble(
    config: RunConfig,
    origin: Origin,
    folder: RunFolder,
    dataset: TokenDataset,
    device: torch.device,
    team: Team,
) -> Run:
    meta = dataset.meta
    # read and kept by every process: checkpoints need it when the data may be gone
    _ = dataset.tokenizer
    configuration = model_config(
        config,
        rows=config.model.vocab_size or meta.vocab_size,
        bos=meta.bos_id,
        eos=meta.eos_id,
        pad=meta.pad_id,
    )
    # before the optimizer, which has each process's own parts
    sharding = make_sharding(configuration, config, device, team)
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
        boundaries=config.data.boundaries,
        with_noise=configuration.dropout > 0,
    )
    # after the model's own draws: nothing here draws from it, but a model with layers of a user's
    # own may
    torch.manual_seed(config.seed)
    feed = DeviceFeed(loader, device) if neuron.serves(device) else None
    return Run(config, origin, folder, dataset, device, sharding, optimizer, loader, State(), feed)


def make_sharding(
    configuration: DeltaConfig, config: RunConfig, device: torch.device, team: Team
) -> Sharding:
    """Returns the model with initial weights, divided among a team
    by the library that serves its device.
    """
    on_neuron = neuron.serves(device)
    later = is_divided(config, team.world) and not on_neuron
    model = make_model(
        configuration, seed=config.seed, device=torch.device("meta") if later else device
    )
    if config.gradient_checkpointing:
        checkpoint_blocks(model, device)
    model.train()
    if team.mesh is None:
        return Sharding(model, team)
    if on_neuron:
        return neuron.NeuronSharding(model, config.distribution, team)
    bf16 = config.precision == "bf16"
    sharding = PyTorchSharding(model, config.distribution, team, bf16=bf16)
    if later:
        materialize(sharding, seed=config.seed, device=device)
    return sharding


@contextlib.contextmanager
def _join(
    make: Callable[[], RunConfig], purpose: str, also: Mapping[str, object] | None = None
) -> Iterator[tuple[RunConfig, torch.device, Team]]:
    """Yields the configuration without `auto`, this process's device, and the team that it has
    joined.

    make        returns the configuration
    purpose     what the processes join for, in a few words
    also        further values that must be the same on all processes, by name

    Raises on all what make() or this process's device raises on one, and ConfigError where
    processes have different configurations: before they join, since who joins whom is in the
    configuration.
    """
    config, device, failure = None, None, None
    has_auto = True
    try:
        config = make()
        trackers.require(config.log)
        require_divisible(config, machine.processes().world)
        config, device = set_up_process(config)
        has_auto = False
    except Exception as error:
        failure = error
    if machine.processes().world > 1:
        minutes = (DistributionSection() if config is None else config.distribution).timeout_minutes
        mine = given(config, resolved=not has_auto, also=also or {}, failure=failure)
        try:
            consult(purpose, mine, require_same, minutes)
        except Exception as error:
            raise error from failure
    if failure is not None:
        raise failure
    assert config is not None and device is not None
    with _compiling_in_turns(config, device), assemble(config, device) as team:
        yield config, device, team


def _compiling_in_turns(
    config: RunConfig, device: torch.device
) -> contextlib.AbstractContextManager[None]:
    """Lets one of a node's processes compile each of Triton's kernels, and the others wait for it."""
    if device.type != "cuda" or config.backend != "triton" or machine.processes().world == 1:
        return contextlib.nullcontext()
    from delta_trn.backends.gpu_stand_in.launch_adapter import compile_in_turns

    return compile_in_turns()


@contextlib.contextmanager
def _hold(folder: RunFolder, team: Team) -> Iterator[None]:
    """Holds the folder in the process that writes to it. All processes raise if it cannot."""
    with contextlib.ExitStack() as held:
        team.leader_does(lambda: held.enter_context(folder.hold()))
        yield


def _require_same_data(
    dataset: TokenDataset, origin: Origin, team: Team, than: str, remedy: str
) -> None:
    found, expected = dataset.fingerprint, origin.data
    if found != expected:
        here = f"on rank {team.rank} " if team.world > 1 else ""
        raise DataError(
            f"{dataset.path} holds other tokens {here}{than} (fingerprint {found[:16]}, expected "
            f"{expected[:16]}); {remedy}"
        )


def _require_same_folder(folder: RunFolder, saved: RunConfig, origin: Origin) -> None:
    """RunFolderError where this process finds another run in its folder than the leader, who read
    `saved`.

    On a shared disk this process may see nothing yet, or what the run had before its last resume.
    """
    if not folder.config_path.exists():
        return
    own, begun = folder.read()
    pairs = {"run.id": (origin.id, begun.id)} if origin.id != begun.id else {}
    pairs |= {
        key: pair for key, pair in differences(saved, own).items() if not may_change_on_resume(key)
    }
    if pairs:
        listed = ", ".join(
            f"{key} is {there} on rank 0 and {here} here" for key, (there, here) in pairs.items()
        )
        raise RunFolderError(
            f"{folder.config_path} is of another run than rank 0's: {listed}; give every node the "
            "same folder"
        )


def _require_same_checkpoint(folder: RunFolder, step: int, team: Team) -> None:
    """CheckpointError where a process has other files of a checkpoint:
    it would go on with other weights.
    """
    identities = team.agree(lambda: folder.checkpoints.identity(step))
    other = [rank for rank, identity in enumerate(identities) if identity != identities[0]]
    if other:
        raise CheckpointError(
            f"the checkpoint of step {step} on {name_ranks(other)} is not rank 0's (other "
            "manifest.json); give every node the same folder"
        )


def set_up_process(config: RunConfig) -> tuple[RunConfig, torch.device]:
    """Sets this process up for a run: its current device, precision, determinism, backend of
    operations.

    Returns the configuration without `auto` in device, precision and backend, and this process's
    device.
    """
    device = pick_device(config.device)
    machine.make_current(device)
    if device.type == "cpu":
        machine.keep_freed_memory()
    precision = config.precision
    if precision == "auto" and device.type == "cpu":
        # autocast's casts cost a CPU more than they save
        precision = "bf16_products" if machine.multiplies_bfloat16_faster(device) else "float32"
    elif precision == "auto":
        precision = "bf16" if machine.supports_bfloat16(device) else "float32"
    if precision == "bf16_products" and device.type != "cpu":
        raise ConfigError(
            f"precision=bf16_products is for CPUs, and this run is on {device}; give precision=bf16"
        )
    # high: TF32 for what autocast leaves in float32
    machine.set_products(
        {"float32": "highest", "bf16": "high", "bf16_products": "medium"}[precision]
    )
    if config.deterministic:
        # CUDA's own switch, read when its first handle is made; without it PyTorch refuses
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    backend = choose_backend(model_config(config, rows=1), config, device, precision)
    # without the process's own number: every process's configuration is the run's
    named = device.type if machine.processes().world > 1 else str(device)
    changes = {"device": named, "precision": precision, "backend": backend}
    return config.model_copy(update=changes), device


def load_dataset(config: RunConfig) -> TokenDataset:
    """Returns the prepared folder that data.source is,
    or the one that preparing it makes or finds.
    """
    source = Path(config.data.source).expanduser()
    if is_prepared(config.data.source):
        return open_dataset(source)  # shards without meta.json too: they are damaged, not text
    return open_dataset(prepare(config.data))


def _reload_dataset(config: RunConfig) -> TokenDataset:
    """Returns the tokens where the run had them when it was saved, or what its source gives now."""
    where = config.data.folder
    return (
        open_dataset(where)
        if where and (Path(where) / "meta.json").is_file()
        else load_dataset(config)
    )


def with_data(config: RunConfig, dataset: TokenDataset) -> RunConfig:
    """Returns the configuration with what only the data can tell: rows of the vocabulary, steps,
    the folder.

    ConfigError if the model's vocabulary is too small for the data.
    """
    rows, meta = config.model.vocab_size, dataset.meta
    ids = meta.tokenizer.size
    if rows is not None and rows < ids:
        raise ConfigError(
            f"model.vocab_size={rows} is below the tokenizer's {ids} ids; give {ids} or more, or "
            "leave it out"
        )
    steps = config.steps
    if config.epochs is not None:
        step = config.batch.sequences * config.batch.length
        steps = math.ceil(config.epochs * dataset.split("train").tokens / step)
    return config.model_copy(
        update={
            "steps": steps,
            "epochs": None,
            "model": config.model.model_copy(update={"vocab_size": rows or meta.vocab_size}),
            "data": config.data.model_copy(update={"folder": str(dataset.path.resolve())}),
        }
    )


def _change(saved: RunConfig, changes: dict[str, str]) -> RunConfig:
    """Returns the saved configuration with changes.
    ConfigError for keys that would make it another run.
    """
    if "device" in changes:
        changes = {"backend": "auto", **changes}  # another device has another backend
    config = apply(saved, changes)
    refused = {
        k: pair for k, pair in differences(saved, config).items() if not may_change_on_resume(k)
    }
    if refused:
        listed = ", ".join(f"{key} from {old} to {new}" for key, (old, new) in refused.items())
        raise ConfigError(
            f"resuming may not change {listed}: that is another run; start one with `run` and "
            "out=DIR"
        )
    return config


def _begin_folder(run: Run) -> None:
    if run.folder.is_taken():
        raise RunFolderError(
            f"{run.folder.path} was taken by another process just now; run the same again"
        )
    run.folder.write(run.config, run.origin)
    run.dataset.tokenizer.save(run.folder.path)


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunFolderError(
            f"cannot make {path} ({(error.strerror or str(error)).lower()}); choose another out=DIR"
        ) from error
