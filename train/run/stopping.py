"""Reasons to stop between two steps: a signal, or the time that was allowed."""

import signal
import time
from types import FrameType
from typing import Any


class StopRequest:
    """Within `with`, the first SIGTERM, SIGHUP or Ctrl-C sets `reason`, and the second ends the
    process.

    SIGHUP comes when the terminal closes. Where it is ignored, as under nohup, it stays ignored.
    """

    def __init__(self, max_minutes: float | None):
        self._minutes = max_minutes
        self._until = None if max_minutes is None else time.monotonic() + 60 * max_minutes
        self._before: dict[int, Any] = {}
        self.signal: int | None = None

    @property
    def is_over(self) -> bool:
        """Whether the allowed time is over."""
        return self._until is not None and time.monotonic() >= self._until

    @property
    def reason(self) -> str | None:
        """Why to stop now; None: go on."""
        return self.reason_for(self.signal or 0, self.is_over)

    def reason_for(self, number: int, is_over: bool) -> str | None:
        """Returns why to stop: a signal of that number (0: none), or that the time is over.

        Several processes give what they have agreed on. A signal that comes to one of them later
        waits for the next step: the others know nothing of it, and would go on without this one.
        """
        if number:
            self.signal = number
            return signal.Signals(number).name
        return f"max_minutes={self._minutes:g}" if is_over else None

    def __enter__(self) -> "StopRequest":
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
