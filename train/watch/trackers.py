"""Weights & Biases and TensorBoard, each only if asked for."""

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Protocol, TypeVar

from delta_trn.train.checkpoints.run_folder import Origin, RunFolder
from delta_trn.train.settings.errors import ConfigError
from delta_trn.train.settings.schema import LogSection, RunConfig
from delta_trn.train.watch.display import attempt
from delta_trn.train.watch.metrics import Line

T = TypeVar("T")


class Tracker(Protocol):
    """Receives every line of metrics.jsonl."""

    def log(self, line: Line) -> None: ...
    def close(self) -> None: ...


def require(log: LogSection) -> None:
    """ConfigError if a package that the configuration asks for is not installed."""
    for name, wanted in (("wandb", log.wandb), ("tensorboard", log.tensorboard)):
        if wanted and find_spec(name) is None:
            raise ConfigError(f"log.{name}=true needs the {name} package: pip install {name}")


def trackers_of(
    config: RunConfig, origin: Origin, folder: RunFolder, step: int
) -> dict[str, Callable[[], Tracker]]:
    """Returns how to open those that the configuration asks for. TensorBoard drops steps after `step`."""
    known: dict[str, tuple[bool, Callable[[], Tracker]]] = {
        "wandb": (config.log.wandb, lambda: _WeightsAndBiases(config, origin, folder)),
        "tensorboard": (config.log.tensorboard, lambda: _TensorBoard(folder, step)),
    }
    return {name: opened for name, (wanted, opened) in known.items() if wanted}


class Trackers:
    """Opens trackers, and sends them lines.

    One that fails gets nothing more, and a line says so: the run goes on, and metrics.jsonl has everything.
    """

    def __init__(self, makers: Mapping[str, Callable[[], Tracker]], tell: Callable[[str], None]):
        self._tell = tell
        made = {name: self._attempt(name, make) for name, make in makers.items()}
        self._trackers = {name: tracker for name, tracker in made.items() if tracker is not None}

    def log(self, lines: Sequence[Line]) -> None:
        for name, tracker in list(self._trackers.items()):
            if self._attempt(name, lambda tracker=tracker: [tracker.log(line) for line in lines]) is None:
                del self._trackers[name]

    def close(self) -> None:
        for name, tracker in self._trackers.items():
            self._attempt(name, tracker.close)

    def _attempt(self, name: str, work: Callable[[], T]) -> T | None:
        return attempt(f"{name} from here on", work, self._tell)


def _values(line: Line) -> dict[str, Any]:
    values = {
        f"{line.split}/{k}": v for k, v in line.as_dict().items() if k not in ("step", "split", "probes")
    }
    return values | {f"probes/{k}": v for k, v in (line.probes or {}).items()}


class _WeightsAndBiases:
    def __init__(self, config: RunConfig, origin: Origin, folder: RunFolder):
        import wandb  # type: ignore[import-not-found]

        self._run = wandb.init(
            project=config.log.wandb_project,
            id=origin.id,
            name=config.name,
            dir=str(folder.path),
            config=config.model_dump(mode="json"),
            resume="allow",
        )

    def log(self, line: Line) -> None:
        self._run.log(_values(line), step=line.step)

    def close(self) -> None:
        self._run.finish()


class _TensorBoard:
    def __init__(self, folder: RunFolder, step: int):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder.path / "tensorboard"), purge_step=step + 1)

    def log(self, line: Line) -> None:
        for name, value in _values(line).items():
            self._writer.add_scalar(name, value, line.step)

    def close(self) -> None:
        self._writer.close()
