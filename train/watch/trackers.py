"""Weights & Biases and TensorBoard, each only if asked for."""

from importlib.util import find_spec
from typing import Any, Protocol

from delta_trn.train.checkpoints.run_folder import Origin, RunFolder
from delta_trn.train.settings.errors import ConfigError
from delta_trn.train.settings.schema import LogSection, RunConfig
from delta_trn.train.watch.metrics import Line


class Tracker(Protocol):
    """Receives every line of metrics.jsonl."""

    def log(self, line: Line) -> None: ...
    def close(self) -> None: ...


def require(log: LogSection) -> None:
    """ConfigError if a package that the configuration asks for is not installed."""
    for name, wanted in (("wandb", log.wandb), ("tensorboard", log.tensorboard)):
        if wanted and find_spec(name) is None:
            raise ConfigError(f"log.{name}=true needs the {name} package: pip install {name}")


def open_trackers(config: RunConfig, origin: Origin, folder: RunFolder, step: int) -> list[Tracker]:
    """Returns those that the configuration asks for. TensorBoard drops what it has of steps after `step`."""
    trackers: list[Tracker] = []
    if config.log.wandb:
        trackers.append(_WeightsAndBiases(config, origin, folder))
    if config.log.tensorboard:
        trackers.append(_TensorBoard(folder, step))
    return trackers


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
