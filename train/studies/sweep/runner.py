"""Makes the trials of a sweep in processes of this machine, several at a time.

Each trial is a run in a folder of its own and in a process of its own: one that fails or is killed
stops no other, and resumes from its newest checkpoint. (An executor of concurrent.futures ends all
of its processes when one of them is killed.)
"""

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from delta_trn.train.files import (
    disk_errors,
    open_plain,
    remove,
    require_own_folder,
    require_plain,
    write_file,
)
from delta_trn.train.run.stopping import StopRequest
from delta_trn.train.settings.errors import Diverged, TrainError
from delta_trn.train.settings.schema import RunConfig, validate
from delta_trn.train.studies.sweep.grid import Sweep, Trial
from delta_trn.train.studies.sweep.results import SAFE, Results

# forked from a process that has imported everything: a trial of seconds should not wait four for
# imports
_CONTEXT = multiprocessing.get_context("forkserver")
_PRELOADED = ["delta_trn.train.run.loop", __name__, "delta_trn.backends.gated_delta_rule.chunked"]


def execute(
    sweep: Sweep,
    folder: Path,
    *,
    jobs: int,
    devices: Sequence[str],
    threads: int,
    max_minutes: float | None,
    tell: Callable[[str], None],
) -> tuple[StopRequest, int]:
    """Makes every trial that has no result, `jobs` at a time, until all have one or a signal asks
    to stop.

    On a stop the running trials save a checkpoint, and the next call resumes them; a second signal
    ends them at once. After a kill, the next call repeats what trials have done since their last
    checkpoint. The caller holds the folder: two runners in one folder would make the same trials.
    Returns what may have stopped it, and how many trials failed.
    """
    _CONTEXT.set_forkserver_preload(_PRELOADED)
    results = Results(folder)
    known = results.read()
    waiting = [trial for trial in sweep.trials if trial.place not in known]
    before = done = len(sweep.trials) - len(waiting)
    failed, begun = 0, time.monotonic()
    free = [devices[i % len(devices)] if devices else None for i in range(jobs)]
    running: dict[int, tuple[BaseProcess, Trial, str | None]] = {}  # by what `wait` waits for
    with StopRequest(max_minutes) as stop:
        while (running or waiting) and stop.reason is None:
            while waiting and free:
                trial, device = waiting.pop(0), free.pop(0)
                process = _start(trial, _place(folder, trial), device, threads)
                running[process.sentinel] = process, trial, device
            for sentinel in wait(list(running), timeout=0.5):
                process, trial, device = running.pop(sentinel)  # type: ignore[index] - of processes
                process.join()
                free.append(device)
                result = _load_result(_place(folder, trial))
                if result is not None:
                    results.add({"key": trial.key, **trial.coordinates(), **result})
                    done += 1
                    loss = "diverged" if result["loss"] is None else f"{result['loss']:.4f}"
                    left = (
                        (time.monotonic() - begun)
                        / (done - before)
                        * (len(sweep.trials) - done)
                        / 60
                    )
                    said = (
                        f"{trial}  {loss}  ({result['seconds']:.0f} s, about {left:.0f} min left "
                        "in all)"
                    )
                    tell(f"{done}/{len(sweep.trials)}  {said}")
                elif stop.reason is None:
                    failed += 1
                    tell(f"failed  {trial}: {_reason(_place(folder, trial), process)}")
        for process, *_ in running.values():
            # it saves a checkpoint and ends; of a result the next call takes notice
            process.terminate()
        for process, *_ in running.values():
            process.join()
    return stop, failed


def _place(folder: Path, trial: Trial) -> Path:
    return folder / "trials" / trial.key


def _start(trial: Trial, place: Path, device: str | None, threads: int) -> BaseProcess:
    for path in (place.parent, place):
        require_own_folder(path)
    require_plain(Path(f"{place}.txt"))
    with disk_errors(place, SAFE):
        place.mkdir(parents=True, exist_ok=True)
    config = trial.config.model_copy(update={} if device is None else {"device": device})
    process = _CONTEXT.Process(target=_main, args=(config.model_dump_json(), str(place), threads))
    process.start()
    return process


def _reason(place: Path, process: BaseProcess) -> str:
    """Returns why a trial has no result: the last line of its output."""
    log = place.with_suffix(".txt")
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return f"{lines[-1] if lines else f'exit status {process.exitcode}'} (the whole output: {log})"


def _main(config: str, place: str, threads: int) -> None:
    """Is the body of a trial's process."""
    import torch

    with open_plain(Path(f"{place}.txt"), "ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    sys.stdout = sys.stderr = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - as long as the process
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    try:
        status = run_trial(validate(json.loads(config)), Path(place))
    except TrainError as error:
        print(error)
        status = 2
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    os._exit(status)


def _end_with_parent() -> None:
    """Ends this process when its parent is killed,
    so that the folder is free for the next runner.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def run_trial(config: RunConfig, folder: Path) -> int:
    """Trains from the start, or from the newest checkpoint in `folder`, and leaves result.json
    there.

    loss        nats per token on the held-out crops after the last step; null if it diverged
    seconds     of training, over all processes that had a part in it

    Returns the exit status: 0 with a result, otherwise 128 + the signal that stopped it.
    """
    from delta_trn.train.run.loop import train
    from delta_trn.train.run.setup import resume, start
    from delta_trn.train.studies.probes import probe_of
    from delta_trn.train.watch.display import Display

    if _load_result(folder) is not None:
        return 0  # the runner was killed before it wrote the line
    config = config.model_copy(update={"out": str(folder)})
    if (folder / "config.json").exists():
        opened = resume(folder, {"device": config.device}, None, print)
    else:
        opened = start(config)
    with opened as run:
        try:
            outcome = train(run, Display(config.steps, run.state.step, show=False), probe_of(run))
            if outcome.stopped:
                return 128 + (outcome.signal or signal.SIGTERM)
            diverged = None
        except Diverged as error:
            diverged = str(error)
        held_out = run.folder.evaluation_after(config.steps) or {}
        result = {
            "loss": None if diverged else held_out["loss"],
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
        write_file(folder / "result.json", json.dumps(result) + "\n")
        remove(folder / "checkpoints")
    return 0


def _load_result(folder: Path) -> dict[str, Any] | None:
    path = folder / "result.json"
    return json.loads(path.read_text()) if path.exists() else None
