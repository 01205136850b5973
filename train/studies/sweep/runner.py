"""Trials side by side, each in a process of its own.

Schedulers share nothing but the sweep's folder: any number of them, started by hand or by torchrun, work
through one sweep together. Whoever holds a trial's folder makes that trial; the others come back to it later.
"""

import json
import multiprocessing
import os
import signal
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from delta_trn.train.files import disk_errors
from delta_trn.train.run.stopping import StopRequest
from delta_trn.train.settings.errors import RunFolderError, TrainError
from delta_trn.train.settings.schema import RunConfig, validated
from delta_trn.train.studies.sweep.question import Sweep, Trial
from delta_trn.train.studies.sweep.results import SAFE, Results, losses
from delta_trn.train.studies.sweep.trial import Stopped, left_result, run_trial

Tell = Callable[[str], None]

BUSY = 75  # a trial's exit status where another scheduler holds its folder
SECONDS_BEFORE_TRYING_AGAIN = 5.0
SECONDS_TO_SAVE = 60.0

# forked from a process that has imported everything: a trial of seconds should not wait four for imports
_CONTEXT = multiprocessing.get_context("forkserver")
_PRELOADED = [
    "delta_trn.train.run.setup",
    "delta_trn.train.run.loop",
    "delta_trn.train.studies.sweep.runner",
    "models",
    "delta_trn.backends.gated_delta_rule.chunked",
]


@dataclass
class _Slot:
    """A place for one trial at a time."""

    device: str | None
    trial: Trial | None = None
    process: BaseProcess | None = None


@dataclass(frozen=True)
class Ended:
    """How a scheduler ended. `failed`: what each trial that could not be made has said."""

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
    tell: Tell,
) -> Ended:
    """Make every trial that has no result, `jobs` at a time, until all have one or a signal asks to stop.

    A stop lets the trials save a checkpoint, and the next call goes on from there; a kill costs what trials
    have done since their last checkpoint.
    """
    with StopRequest(max_minutes) as stop:
        scheduler = _Scheduler(sweep, folder, jobs, devices, threads, tell)
        try:
            scheduler.work(stop)
        finally:
            scheduler.end_trials()
    return Ended(stop.reason, stop.signal, scheduler.failed)


class _Scheduler:
    def __init__(
        self, sweep: Sweep, folder: Path, jobs: int, devices: Sequence[str], threads: int, tell: Tell
    ):
        self.sweep, self.folder, self.threads, self.tell = sweep, folder, threads, tell
        self.results = Results(folder)
        self.slots = [_Slot(devices[i % len(devices)] if devices else None) for i in range(jobs)]
        self.failed: dict[str, str] = {}
        self.not_before: dict[str, float] = {}
        _CONTEXT.set_forkserver_preload(_PRELOADED)

    def work(self, stop: StopRequest) -> None:
        while stop.reason is None:
            known = self.results.read()
            wanted = unique(self.sweep.trials(losses(known)))
            running = {slot.trial.key for slot in self.slots if slot.trial}
            now = time.monotonic()
            open_ = [t for t in wanted if t.key not in known and t.key not in self.failed]
            ready = [t for t in open_ if t.key not in running and self.not_before.get(t.key, 0) <= now]
            for slot in self.slots:
                if slot.trial is None and ready:
                    self._start(slot, ready.pop(0))
            busy = [slot.process for slot in self.slots if slot.process]
            if not busy and not open_:
                return
            wait([process.sentinel for process in busy], timeout=0.5) if busy else time.sleep(0.5)
            for slot in self.slots:
                if slot.process is not None and slot.process.exitcode is not None:
                    self._collect(slot)

    def end_trials(self) -> None:
        """Ask every trial to save and stop, and wait until it has."""
        processes = [slot.process for slot in self.slots if slot.process]
        for process in processes:
            process.terminate()
        for process in processes:
            process.join(SECONDS_TO_SAVE)
            if process.exitcode is None:
                process.kill()
                process.join()
        for slot in self.slots:
            if slot.process is not None:
                self._collect(slot)

    def _start(self, slot: _Slot, trial: Trial) -> None:
        place = self.folder / "trials" / trial.key
        if (left := left_result(place)) is not None:
            self._record(trial, left)
            return
        config = trial.config
        if slot.device is not None:
            config = config.model_copy(update={"device": slot.device})
        with disk_errors(place, SAFE):
            place.mkdir(parents=True, exist_ok=True)
        slot.trial = trial
        slot.process = _CONTEXT.Process(
            target=_child, args=(config.model_dump_json(), str(place), self.threads)
        )
        slot.process.start()

    def _collect(self, slot: _Slot) -> None:
        trial, process = slot.trial, slot.process
        assert trial is not None and process is not None
        slot.trial = slot.process = None
        place = self.folder / "trials" / trial.key
        if (left := left_result(place)) is not None:
            self._record(trial, left)
        elif process.exitcode == BUSY:
            self.not_before[trial.key] = time.monotonic() + SECONDS_BEFORE_TRYING_AGAIN
        elif process.exitcode not in (128 + signal.SIGTERM, 128 + signal.SIGINT, -signal.SIGTERM):
            log = _log(place)
            lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
            why = lines[-1] if lines else f"exit status {process.exitcode}"
            self.failed[trial.key] = f"{describe(trial)}: {why} (all of it in {log})"
            self.tell(f"failed  {self.failed[trial.key]}")

    def _record(self, trial: Trial, result: dict) -> None:
        series = trial.series
        shared = trial.config.model.width == trial.config.model.base_width
        self.results.add(
            {
                "key": trial.key,
                "arm": series.arm,
                # at the base width all parametrizations are one, and the trial belongs to every series
                "parametrization": "any" if shared else series.parametrization,
                "optimizer": series.optimizer,
                "width": trial.width,
                "lr": trial.lr,
                "seed": trial.seed,
                **result,
            }
        )
        known = self.results.read()
        wanted = unique(self.sweep.trials(losses(known)))
        done = sum(t.key in known for t in wanted)
        loss = "diverged" if result["loss"] is None else f"{result['loss']:.4f}"
        left = seconds_left(wanted, known, len(self.slots))
        rest = "" if left is None else f"   about {_duration(left)} left"
        self.tell(f"{done}/{len(wanted)}  {describe(trial)}  {loss}  ({result['seconds']:.0f} s){rest}")


def unique(trials: Sequence[Trial]) -> list[Trial]:
    """One trial for every key, the first."""
    return list({trial.key: trial for trial in reversed(trials)}.values())[::-1]


def describe(trial: Trial) -> str:
    """`mup adamw width 128 lr 2^-7 seed 1`"""
    import math

    return f"{trial.series} width {trial.width} lr 2^{math.log2(trial.lr):.4g} seed {trial.seed}"


def seconds_left(wanted: Sequence[Trial], known: dict, jobs: int) -> float | None:
    """Work that is known of, at the median time of a trial of its width and optimizer; None before the first.

    Where a width has no finished trial, it takes the nearest one's time, times the ratio of widths squared.
    """
    took: dict[tuple[int, str], list[float]] = defaultdict(list)
    for result in known.values():
        if result["loss"] is not None:
            took[result["width"], result["optimizer"]].append(result["seconds"])
    if not took:
        return None
    typical = {place: statistics.median(values) for place, values in took.items()}
    total = 0.0
    for trial in wanted:
        if trial.key in known:
            continue
        place = (trial.width, trial.series.optimizer)
        near = min(typical, key=lambda p: (abs(p[0] - place[0]), p[1] != place[1]))
        total += typical[near] * (place[0] / near[0]) ** 2
    return total / jobs


def _log(place: Path) -> Path:
    return place.with_name(f"{place.name}.txt")


def _duration(seconds: float) -> str:
    from delta_trn.train.watch.display import duration

    return duration(seconds)


def _child(config: str, place: str, threads: int) -> None:
    """The body of a trial's process."""
    import torch

    descriptor = os.open(_log(Path(place)), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - for the rest of the process
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    _die_with_parent()
    # a trial is one process, whatever launched the sweep
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    torch.set_num_threads(threads)
    status = _run(validated(json.loads(config)), Path(place))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _run(config: RunConfig, place: Path) -> int:
    import traceback

    try:
        run_trial(config, place)
    except Stopped as stopped:
        return 128 + (stopped.signal or signal.SIGTERM)
    except RunFolderError as error:
        print(error)
        return BUSY if "in use by another process" in str(error) else 2
    except TrainError as error:
        print(error)
        return 2
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _die_with_parent() -> None:
    """A scheduler that is killed cannot end its trials: they end themselves, and their folders are free."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(BUSY)

    threading.Thread(target=watch, daemon=True).start()
