"""Reasons to stop between two steps: a signal, or the time that was allowed."""

import signal
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any


class StopRequest:
    """Within `with`, the first SIGTERM or Ctrl-C sets `reason` and the second ends the process."""

    def __init__(self, max_minutes: float | None):
        self._minutes = max_minutes
        self._until = None if max_minutes is None else time.monotonic() + 60 * max_minutes
        self._before: dict[int, Any] = {}
        self.signal: int | None = None

    @property
    def reason(self) -> str | None:
        """Why to stop now; None: go on."""
        if self.signal is not None:
            return signal.Signals(self.signal).name
        if self._until is not None and time.monotonic() >= self._until:
            return f"max_minutes={self._minutes:g}"
        return None

    def together(self, largest: Callable[[int], int]) -> str | None:
        """`reason` of any of several processes, the same for all. `largest`: of everybody's numbers.

        What comes to this process after its number was sent waits for the next time: the others know nothing
        of it, and would go on without it.
        """
        mine = 1 + self.signal if self.signal is not None else int(self.reason is not None)
        asked = largest(mine)
        if asked > 1:
            self.signal = asked - 1
            return signal.Signals(self.signal).name
        return f"max_minutes={self._minutes:g}" if asked else None

    def __enter__(self) -> "StopRequest":
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
