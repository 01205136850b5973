"""Makes the trials of a sweep in processes of this machine, several at a time.

Each trial is a run in a folder of its own and in a process of its own: one that fails or is killed stops no
other, and resumes from its newest checkpoint. (A ProcessPoolExecutor ends all of its workers when one of them
is killed, and gives each task a new process from Python 3.11 on only.)
"""

import json
import multiprocessing
import os
import shutil
import signal
import statistics
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from delta_trn.train.files import disk_errors, write_file
from delta_trn.train.run.stopping import StopRequest
from delta_trn.train.settings.errors import Diverged, RunFolderError, TrainError
from delta_trn.train.settings.schema import RunConfig, validated
from delta_trn.train.studies.sweep.question import Sweep, Trial
from delta_trn.train.studies.sweep.results import SAFE, Result, Results, losses
from delta_trn.train.watch.display import duration

SECONDS_TO_SAVE = 60.0
# what a trial's process exits with when it was asked to stop
STOPPED = (128 + signal.SIGTERM, 128 + signal.SIGINT, -signal.SIGTERM)
# the trials of a runner that was killed may hold their folders for another moment
TRIES, SECONDS_BETWEEN_TRIES = 3, 1.0

# forked from a process that has imported everything: a trial of seconds should not wait four for imports
_CONTEXT = multiprocessing.get_context("forkserver")
_PRELOADED = [
    "delta_trn.train.run.setup",
    "delta_trn.train.run.loop",
    "delta_trn.train.studies.sweep.runner",
    "delta_trn.models",
    "delta_trn.backends.gated_delta_rule.chunked",
]


@dataclass(frozen=True)
class Ended:
    """How a sweep ended. `failed` maps the key of each trial that could not be made to the reason."""

    stopped: str | None
    signal: int | None
    failed: dict[str, str]


def execute(
    sweep: Sweep,
    folder: Path,
    *,
    jobs: int,
    devices: Sequence[str],
    threads: int,
    max_minutes: float | None,
    tell: Callable[[str], None],
) -> Ended:
    """Makes every trial that has no result, `jobs` at a time, until all have one or a signal asks to stop.

    On a stop the running trials save a checkpoint, and the next call resumes them. After a kill, the next
    call repeats what trials have done since their last checkpoint. The caller holds the folder: two runners
    in one folder would make the same trials.
    """
    with StopRequest(max_minutes) as stop:
        runner = _Runner(sweep, folder, jobs, devices, threads, tell)
        try:
            while stop.reason is None and runner.start_trials():
                wait([process.sentinel for process in runner.running], timeout=0.5)
                runner.collect_trials()
        finally:
            runner.end_trials()
    return Ended(stop.reason, stop.signal, runner.failed)


class _Runner:
    def __init__(
        self,
        sweep: Sweep,
        folder: Path,
        jobs: int,
        devices: Sequence[str],
        threads: int,
        tell: Callable[[str], None],
    ):
        self.sweep, self.folder, self.jobs, self.threads, self.tell = sweep, folder, jobs, threads, tell
        self.results = Results(folder)
        self.free = [devices[i % len(devices)] if devices else None for i in range(jobs)]
        self.running: dict[BaseProcess, tuple[Trial, str | None]] = {}
        self.failed: dict[str, str] = {}
        _CONTEXT.set_forkserver_preload(_PRELOADED)

    def start_trials(self) -> bool:
        """Starts trials while there is room. Returns whether any is running."""
        known, busy = self.results.read(), {trial.key for trial, _ in self.running.values()}
        for trial in self.sweep.trials(losses(known)):
            if not self.free:
                break
            if trial.key in known or trial.key in busy or trial.key in self.failed:
                continue
            place, device = self._place(trial), self.free.pop(0)
            with disk_errors(place, SAFE):
                place.mkdir(parents=True, exist_ok=True)
            config = trial.config
            if device is not None:
                config = config.model_copy(update={"device": device})
            process = _CONTEXT.Process(
                target=_main, args=(config.model_dump_json(), str(place), self.threads)
            )
            process.start()
            self.running[process] = trial, device
        return bool(self.running)

    def collect_trials(self) -> None:
        """Writes down and reports the trials that have ended."""
        for process in [p for p in self.running if p.exitcode is not None]:
            trial, device = self.running.pop(process)
            self.free.append(device)
            place = self._place(trial)
            if (result := _load_result(place)) is not None:
                self._record(trial, result)
            elif process.exitcode not in STOPPED:
                log = _log(place)
                lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
                reason = lines[-1] if lines else f"exit status {process.exitcode}"
                self.failed[trial.key] = f"{trial}: {reason} (the whole output: {log})"
                self.tell(f"failed  {self.failed[trial.key]}")

    def end_trials(self) -> None:
        """Asks every running trial to save a checkpoint and end, and waits until it has."""
        for process in self.running:
            process.terminate()
        for process in self.running:
            process.join(SECONDS_TO_SAVE)
            if process.exitcode is None:
                process.kill()
                process.join()
        self.collect_trials()

    def _place(self, trial: Trial) -> Path:
        return self.folder / "trials" / trial.key

    def _record(self, trial: Trial, result: Mapping[str, Any]) -> None:
        self.results.add({**_description(trial), **result})
        known = self.results.read()
        wanted = self.sweep.trials(losses(known))
        done = sum(t.key in known for t in wanted)
        loss = "diverged" if result["loss"] is None else f"{result['loss']:.4f}"
        left = seconds_left(wanted, known, self.jobs)
        rest = "" if left is None else f"   about {duration(left)} left"
        self.tell(f"{done}/{len(wanted)}  {trial}  {loss}  ({result['seconds']:.0f} s){rest}")


def _description(trial: Trial) -> dict[str, Any]:
    """Returns the part of a result that is known before its trial is made."""
    # at the base width all parametrizations are one, and the trial belongs to every series
    shared = trial.config.model.width == trial.config.model.base_width
    return {
        "key": trial.key,
        "arm": trial.series.arm,
        "parametrization": "any" if shared else trial.series.parametrization,
        "optimizer": trial.series.optimizer,
        "width": trial.width,
        "lr": trial.lr,
        "seed": trial.seed,
    }


def seconds_left(wanted: Sequence[Trial], known: Mapping[str, Result], jobs: int) -> float | None:
    """Estimates the time that the trials without a result will take; None before the first result.

    A trial takes the median time of its width and optimizer. Where a width has no result yet, the nearest
    width's time is scaled by the ratio of widths squared.
    """
    times: dict[tuple[int, str], list[float]] = defaultdict(list)
    for result in known.values():
        if result["loss"] is not None:
            times[result["width"], result["optimizer"]].append(result["seconds"])
    if not times:
        return None
    typical = {place: statistics.median(values) for place, values in times.items()}
    total = 0.0
    for trial in wanted:
        if trial.key in known:
            continue
        width, optimizer = trial.width, trial.series.optimizer
        near = min(typical, key=lambda place: (abs(place[0] - width), place[1] != optimizer))
        total += typical[near] * (width / near[0]) ** 2
    return total / jobs


def _log(place: Path) -> Path:
    return place.with_name(f"{place.name}.txt")


def _main(config: str, place: str, threads: int) -> None:
    """Is the body of a trial's process."""
    import torch

    descriptor = os.open(_log(Path(place)), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - for the rest of the process
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    _end_with_parent()
    torch.set_num_threads(threads)
    try:
        status = _run_trial(validated(json.loads(config)), Path(place))
    except TrainError as error:
        print(error)
        status = 2
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _end_with_parent() -> None:
    """Ends this process when its parent is killed, so that the folder is free for the next runner."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _run_trial(config: RunConfig, folder: Path) -> int:
    for _ in range(TRIES - 1):
        try:
            return run_trial(config, folder)
        except RunFolderError:
            time.sleep(SECONDS_BETWEEN_TRIES)
    return run_trial(config, folder)


def run_trial(config: RunConfig, folder: Path) -> int:
    """Trains from the start, or from the newest checkpoint in `folder`, and leaves result.json there.

    loss        nats per token on the held-out crops after the last step; null if it diverged
    train_loss  mean over the last tenth of the steps
    clipped     share of the steps whose gradient was longer than optimizer.clip
    seconds     of training, over all processes that had a part in it

    Returns the exit status: 0 with a result, otherwise 128 + the signal that stopped it.
    """
    from delta_trn.train.run.loop import train
    from delta_trn.train.run.setup import resume, start
    from delta_trn.train.studies.probes.mixer import observers
    from delta_trn.train.watch.display import Display
    from delta_trn.train.watch.metrics import read

    if _load_result(folder) is not None:
        return 0  # the runner was killed before it wrote the line
    config = config.model_copy(update={"out": str(folder)})
    if (folder / "config.json").exists():
        opened = resume(folder, {"device": config.device}, None, print)
    else:
        opened = start(config)
    with opened as run:
        try:
            outcome = train(run, Display(config.steps, run.state.step, show=False), observers(run))
            if outcome.stopped:
                return 128 + (outcome.signal or signal.SIGTERM)
            diverged = None
        except Diverged as error:
            diverged = str(error)
        lines = list(read(run.folder.metrics.path))
        held_out = [line["loss"] for line in lines if line["split"] == "val" and line["step"] == config.steps]
        training = [line for line in lines if line["split"] == "train"]
        norms = [line["grad_norm"] for line in training if line["grad_norm"] is not None]
        clip = config.optimizer.clip
        tail = [line["loss"] for line in training if line["step"] > 0.9 * config.steps]
        result = {
            "loss": None if diverged else held_out[-1],
            "train_loss": None if diverged else sum(tail) / len(tail),
            "steps": run.state.step,
            "tokens": run.state.tokens,
            "seconds": round(run.state.seconds, 2),
            "diverged": diverged,
            **({} if clip is None or not norms else {"clipped": sum(n > clip for n in norms) / len(norms)}),
            "parameters": sum(p.numel() for p in run.model.parameters()),
            "fingerprint": config.fingerprint(),
            "data": run.origin.data[:16],
            "device": str(run.device),
            "precision": run.config.precision,
            "backend": run.config.backend,
            "versions": run.origin.versions,
        }
        write_file(folder / "result.json", json.dumps(result) + "\n")
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return 0


def _load_result(folder: Path) -> dict[str, Any] | None:
    path = folder / "result.json"
    return json.loads(path.read_text()) if path.exists() else None
