"""Ends a process that waits for the device longer than others may be missing.

Where one process of several does not reach its part of a collective, the others' NeuronCores wait
for it without end and without an error, and so does each host that asks its device for a number.
The hosts' own agreements (`Team`) end after distribution.timeout_minutes; a wait for the device
knows no time limit, so a thread here ends the process.

A first step, evaluation or checkpoint compiles, which may take longer: those have no limit.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator

# What may compile: a step three times (`compiling.STEPS`), anything else once.
FREE = {"step": 3}
STATUS = 2  # as for any run that other processes have left
LEAVING_SECONDS = 60.0  # XLA waits at exit for graphs that may never end


class Watchdog:
    """Watches the waits of one process of `world`; 0 minutes: no wait is watched."""

    def __init__(self, minutes: float, world: int) -> None:
        self._minutes, self._world = minutes, world
        self._counts: Counter[str] = Counter()
        self._until: float | None = None
        self._what = ""
        self._closed = threading.Event()
        if minutes > 0:
            threading.Thread(target=self._watch, daemon=True, name="watchdog").start()

    @contextlib.contextmanager
    def over(self, kind: str) -> Iterator[None]:
        """Limits what is done within: "step", "fetch", "evaluation" or "checkpoint"."""
        self._counts[kind] += 1
        if self._counts[kind] <= FREE.get(kind, 1):
            yield
            return
        self._what = f"{kind} {self._counts[kind]}"
        self._begin()
        try:
            yield
        finally:
            self._until = None

    def beat(self) -> None:
        """Says that what is watched goes on: its time begins anew."""
        if self._until is not None:
            self._begin()

    def leave(self) -> None:
        """Ends the process soon, if it does not end by itself: XLA may wait at exit."""
        if self._minutes > 0:
            self._until = None
            timer = threading.Timer(LEAVING_SECONDS, os._exit, (STATUS,))
            timer.daemon = True
            timer.start()

    def close(self) -> None:
        """Ends the thread."""
        self._until = None
        self._closed.set()

    def _begin(self) -> None:
        self._until = time.monotonic() + 60 * self._minutes

    def _watch(self) -> None:
        while not self._closed.wait(min(1.0, 6 * self._minutes)):
            until = self._until
            if until is not None and time.monotonic() > until:
                print(
                    f"error: the device did not answer for distribution.timeout_minutes="
                    f"{self._minutes:g} in {self._what} of this process: another of the "
                    f"{self._world} processes has ended, or has not come to the same collective, "
                    "which its own output explains; checkpoints on the disk are whole: resume the "
                    "run, or have torchrun --max-restarts=N restart `run --or-resume`; if "
                    "collectives hang again, reboot the instance",
                    file=sys.stderr,
                    flush=True,
                )
                os._exit(STATUS)
