"""Makes the trials of a sweep in processes of this machine, several at a time.

Each trial is a run in a folder of its own and in a process of its own: one that fails or is killed stops no
other, and resumes from its newest checkpoint. A thread waits for each process. (A ProcessPoolExecutor ends
all of its workers when one of them is killed.)
"""

import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from delta_trn.train.files import disk_errors, write_file
from delta_trn.train.run.stopping import StopRequest
from delta_trn.train.settings.errors import Diverged, TrainError
from delta_trn.train.settings.schema import RunConfig, validated
from delta_trn.train.studies.sweep.grid import Sweep, Trial
from delta_trn.train.studies.sweep.results import SAFE, Results

SECONDS_TO_SAVE = 60.0

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
    """How a sweep ended: why it stopped early, by which signal, and how many trials could not be made."""

    stopped: str | None
    signal: int | None
    failed: int


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
    _CONTEXT.set_forkserver_preload(_PRELOADED)
    runner = _Runner(folder, jobs, devices, threads)
    results, failed = Results(folder), 0
    known = results.read()
    open_ones = [trial for trial in sweep.trials if trial.place not in known]
    done = len(sweep.trials) - len(open_ones)
    with StopRequest(max_minutes) as stop, ThreadPoolExecutor(jobs) as pool:
        waiting: dict[Future[str | None], Trial] = {
            pool.submit(runner.make, trial): trial for trial in open_ones
        }
        while waiting:
            ended, _ = wait(waiting, timeout=0.5, return_when=FIRST_COMPLETED)
            for future in ended:
                trial = waiting.pop(future)
                result = _load_result(runner.folder_of(trial))
                if result is not None:
                    results.add({"key": trial.key, **trial.coordinates(), **result})
                    done += 1
                    loss = "diverged" if result["loss"] is None else f"{result['loss']:.4f}"
                    tell(f"{done}/{len(sweep.trials)}  {trial}  {loss}  ({result['seconds']:.0f} s)")
                elif (reason := future.result()) is not None:
                    failed += 1
                    tell(f"failed  {trial}: {reason}")
            if stop.reason is not None:
                runner.stop()
    return Ended(stop.reason, stop.signal, failed)


class _Runner:
    """Makes trials, each in a process, on the devices that are free."""

    def __init__(self, folder: Path, jobs: int, devices: Sequence[str], threads: int):
        self.folder, self.threads = folder, threads
        self.free: SimpleQueue[str | None] = SimpleQueue()
        for i in range(jobs):
            self.free.put(devices[i % len(devices)] if devices else None)
        self.lock, self.stopping = threading.Lock(), False
        self.running: set[BaseProcess] = set()

    def folder_of(self, trial: Trial) -> Path:
        return self.folder / "trials" / trial.key

    def make(self, trial: Trial) -> str | None:
        """Makes a trial and waits for its end. Returns why there is no result; None if it was stopped."""
        place, device = self.folder_of(trial), self.free.get()
        config = trial.config.model_copy(update={} if device is None else {"device": device})
        try:
            with self.lock:
                if self.stopping:
                    return None
                with disk_errors(place, SAFE):
                    place.mkdir(parents=True, exist_ok=True)
                arguments = (config.model_dump_json(), str(place), self.threads)
                process = _CONTEXT.Process(target=_main, args=arguments)
                process.start()
                self.running.add(process)
            process.join()
            with self.lock:  # `stop` walks over them
                self.running.discard(process)
        finally:
            self.free.put(device)
        if self.stopping:
            return None
        log = _log(place)
        lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
        reason = lines[-1] if lines else f"exit status {process.exitcode}"
        return f"{reason} (the whole output: {log})"

    def stop(self) -> None:
        """Asks every running trial, once, to save a checkpoint and end; kills those that do not."""
        with self.lock:
            if self.stopping:
                return
            self.stopping = True
            for process in self.running:
                process.terminate()
                killer = threading.Timer(SECONDS_TO_SAVE, process.kill)
                killer.daemon = True
                killer.start()


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
        status = run_trial(validated(json.loads(config)), Path(place))
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
            outcome = train(run, Display(config.steps, run.state.step, show=False))
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
