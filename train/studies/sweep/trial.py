"""One trial: a run in its own folder, until its held-out loss is known. Then only its lines stay."""

import json
import shutil
from pathlib import Path
from typing import Any

from delta_trn.train.files import write_file
from delta_trn.train.settings.errors import Diverged
from delta_trn.train.settings.schema import RunConfig

RESULT = "result.json"


class Stopped(Exception):
    """The trial was told to stop and has saved a checkpoint. `signal`: by which signal, if by one."""

    def __init__(self, signal: int | None):
        super().__init__(signal)
        self.signal = signal


def run_trial(config: RunConfig, folder: Path) -> dict[str, Any]:
    """Train from the start, or from the newest checkpoint in `folder`; leaves result.json and returns it.

    loss        nats a token on the held-out crops after the last step; null: diverged
    train_loss  mean over the last tenth of the steps
    seconds     of training, over all processes that had a part in it
    """
    from delta_trn.train.run.loop import train
    from delta_trn.train.run.setup import begun, reopened
    from delta_trn.train.studies.probes.mixer import observers
    from delta_trn.train.watch.display import Display
    from delta_trn.train.watch.metrics import read

    config = config.model_copy(update={"out": str(folder)})
    if (folder / "config.json").exists():
        opened = reopened(folder, {"device": config.device}, None, print)
    else:
        opened = begun(config, print)
    with opened as run:
        try:
            outcome = train(run, Display(config.steps, run.state.step, show=False), observers(run))
            if outcome.stopped:
                raise Stopped(outcome.signal)
            diverged = None
        except Diverged as error:
            diverged = str(error)
        lines = list(read(run.folder.metrics.path))
        ends = [line["loss"] for line in lines if line["split"] == "val" and line["step"] == config.steps]
        tail = [
            line["loss"] for line in lines if line["split"] == "train" and line["step"] > 0.9 * config.steps
        ]
        result = {
            "loss": None if diverged else ends[-1],
            "train_loss": None if diverged else sum(tail) / len(tail),
            "steps": run.state.step,
            "tokens": run.state.tokens,
            "seconds": round(run.state.seconds, 2),
            "diverged": diverged,
            "parameters": sum(p.numel() for p in run.model.parameters()),
            "fingerprint": config.fingerprint(),
            "data": run.origin.data[:16],
            "device": str(run.device),
            "precision": run.config.precision,
            "backend": run.config.backend,
            "versions": run.origin.versions,
        }
        write_file(folder / RESULT, json.dumps(result) + "\n")
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return result


def left_result(folder: Path) -> dict[str, Any] | None:
    """What a trial left whose sweep was killed before it wrote the line."""
    path = folder / RESULT
    return json.loads(path.read_text()) if path.exists() else None
