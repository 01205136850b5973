"""A run's folder: where its files are, which process holds it, and the configuration of the run."""

import contextlib
import json
import os
import platform
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any

from delta_trn.train.checkpoints.store import CheckpointStore
from delta_trn.train.files import (
    hold_folder,
    read_plain,
    require_plain,
    write_file,
)
from delta_trn.train.settings.errors import RunFolderError
from delta_trn.train.settings.schema import RunConfig, validate
from delta_trn.train.watch import metrics
from delta_trn.train.watch.metrics import MetricsFile

RUNS = Path("runs")
_SAMPLE = "======== step {} ========"
_HEADING = re.compile(r"^======== step (\d+) ========$", re.MULTILINE)
_VERSIONS = ("delta-trn", "torch", "transformers", "numpy")


@dataclass(frozen=True)
class Origin:
    """What config.json has beside the configuration.

    id     names the run where names are shared, as at Weights & Biases
    data   fingerprint of the tokens
    """

    id: str
    data: str
    versions: dict[str, str]


class RunFolder:
    """The files of a run: config.json, metrics.jsonl, checkpoints/,
    samples.txt, summary.json, pictures.
    """

    def __init__(self, path: Path):
        self.path = path
        self.checkpoints = CheckpointStore(path / "checkpoints")
        self.metrics = MetricsFile(path / "metrics.jsonl")
        self.config_path = path / "config.json"
        self.samples_path = path / "samples.txt"
        self.baselines_path = path / "baselines.json"
        self.summary_path = path / "summary.json"
        self.plot_path = path / "loss.png"

    def is_taken(self) -> bool:
        """Whether more than a lock is in it. A run
        that was killed before its first file leaves it free.
        """
        return self.path.exists() and any(
            not name.startswith(".") for name in os.listdir(self.path)
        )

    def read(self) -> tuple[RunConfig, Origin]:
        """Returns configuration and origin of the run.
        RunFolderError if there is none that can be read.
        """
        if not self.path.is_dir():
            raise RunFolderError(
                f"{self.path} is not a folder; a run's folder is what `run` printed"
            )
        try:
            tree = json.loads(self.config_path.read_bytes())
            origin = Origin(**tree.pop("run"))
            tree.pop("fingerprint")
        except FileNotFoundError:
            raise RunFolderError(
                f"{self.config_path} is missing: {self.path} is no run's folder; that is what "
                "`run` printed"
            ) from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise RunFolderError(
                f"{self.config_path} cannot be read ({type(error).__name__}: {error}); every "
                "checkpoint's state.json holds the same configuration"
            ) from None
        return validate(tree, where=f"{self.config_path}: "), origin

    def write(self, config: RunConfig, origin: Origin) -> None:
        """Writes config.json: the configuration, `fingerprint`, and the origin under `run`."""
        tree = {
            **config.model_dump(mode="json"),
            "fingerprint": config.fingerprint(),
            "run": vars(origin),
        }
        write_file(self.config_path, json.dumps(tree, indent=2) + "\n")

    def write_summary(self, found: dict[str, Any]) -> None:
        """Writes summary.json: what the end of a run prints, for programs."""
        write_file(self.summary_path, json.dumps(found, indent=1) + "\n")

    def read_summary(self) -> dict[str, Any] | None:
        """Returns what `write_summary` wrote; None where a run has not come to its end."""
        return json.loads(self.summary_path.read_bytes()) if self.summary_path.exists() else None

    def evaluation_after(self, step: int) -> dict[str, Any] | None:
        """Returns the line of metrics.jsonl about the evaluation after a step;
        None: it was not made.
        """
        lines = (line for line in metrics.read(self.metrics.path) if line["split"] == "val")
        return next((line for line in lines if line["step"] == step), None)

    def rewind(self, step: int, *, owes: bool = False) -> None:
        """Removes everything that was reported about later steps.

        owes    the evaluation after this step is made again, and its sample
        """
        self.metrics.truncate_after(step)
        text = read_plain(self.samples_path)
        kept = "".join(block for at, block in _blocks(text) if at < step + (not owes))
        if kept != text:
            write_file(self.samples_path, kept)

    def add_sample(self, step: int, text: str) -> None:
        """Appends a sample to samples.txt. The file is replaced,
        so that a kill leaves no half sample.
        """
        before = read_plain(self.samples_path)
        write_file(self.samples_path, f"{before}{_SAMPLE.format(step)}\n{text}\n\n")

    def last_sample(self) -> str:
        """Returns the newest text of samples.txt; empty if there is none."""
        text = read_plain(self.samples_path)
        return "".join(block.partition("\n")[2] for _, block in [*_blocks(text)][-1:])

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Holds the folder against other processes. RunFolderError if another one holds it.

        NotAPlainFile if a link lies where a run writes, before anything is written.
        """
        for path in (self.metrics.path, self.samples_path):
            require_plain(path)
        self.checkpoints.require_own()
        held = hold_folder(
            self.path,
            lambda pid: RunFolderError(
                f"{self.path} is in use by another process (pid {pid}); wait for it, or end it"
            ),
        )
        with held:
            yield


def _blocks(text: str) -> Iterator[tuple[int, str]]:
    """Yields (step, text with its heading) of every sample."""
    starts = [*(match.start() for match in _HEADING.finditer(text)), len(text)]
    for start, end in pairwise(starts):
        yield int(_HEADING.match(text, start)[1]), text[start:end]  # type: ignore[index]


def place_for(config: RunConfig) -> Path:
    """Returns the folder of a new run: `out`, or the first free one.
    RunFolderError if `out` is taken.
    """
    if config.out is not None:
        path = Path(config.out).expanduser()
        if path.exists() and not path.is_dir():
            raise RunFolderError(f"out={path} is a file; choose a folder that does not exist")
        if RunFolder(path).is_taken():
            raise RunFolderError(
                f"out={path} is taken; `delta-trn resume {path}` continues the run in it, another "
                "out=DIR begins one"
            )
        return path
    number = 1
    while RunFolder(
        path := RUNS / (config.name if number == 1 else f"{config.name}-{number}")
    ).is_taken():
        number += 1
    return path


def new_origin(config: RunConfig, data: str) -> Origin:
    """Returns the origin of a run that starts now, here."""
    versions = {"python": platform.python_version()}
    for package in _VERSIONS:
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    return Origin(id=f"{config.name}-{secrets.token_hex(4)}", data=data, versions=versions)
