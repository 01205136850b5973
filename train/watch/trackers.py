"""Weights & Biases, if it is asked for."""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

from delta_trn.train.checkpoints.run_folder import Origin, RunFolder
from delta_trn.train.settings.errors import ConfigError
from delta_trn.train.settings.schema import LogSection, RunConfig
from delta_trn.train.watch.display import attempt
from delta_trn.train.watch.metrics import Line


def require(log: LogSection) -> None:
    """ConfigError if the package that the configuration asks for is not installed."""
    if log.wandb and find_spec("wandb") is None:
        raise ConfigError("log.wandb=true needs the wandb package: pip install wandb")


class Tracker:
    """Sends every line of metrics.jsonl to Weights & Biases, where log.wandb asks for it.

    Once it has failed it sends nothing more, and a line says so: the run goes on, and metrics.jsonl
    has everything.
    """

    def __init__(
        self, config: RunConfig, origin: Origin, folder: RunFolder, tell: Callable[[str], None]
    ):
        self._tell = tell
        self._run: Any = (
            self._attempt(lambda: _begin(config, origin, folder)) if config.log.wandb else None
        )

    def log(self, lines: Sequence[Line]) -> None:
        run = self._run
        if (
            run is not None
            and self._attempt(lambda: [run.log(_values(x), step=x["step"]) for x in lines]) is None
        ):
            self._run = None

    def close(self) -> None:
        if self._run is not None:
            self._attempt(self._run.finish)

    def _attempt(self, work: Callable[[], Any]) -> Any:
        return attempt("wandb from here on", work, self._tell)


def _begin(config: RunConfig, origin: Origin, folder: RunFolder) -> Any:
    import wandb  # type: ignore[import-not-found]

    return wandb.init(
        project=config.log.wandb_project,
        id=origin.id,
        name=config.name,
        dir=str(folder.path),
        config=config.model_dump(mode="json"),
        resume="allow",
    )


def _values(line: Line) -> dict[str, Any]:
    split, probes = line["split"], line.get("probes", {})
    values = {f"{split}/{k}": v for k, v in line.items() if k not in ("step", "split", "probes")}
    return values | {f"probes/{k}": v for k, v in probes.items()}
