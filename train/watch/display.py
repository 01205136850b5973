"""How a long job looks while it runs: a live line on a terminal,
a line every ten seconds elsewhere.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

SECONDS_BETWEEN_LINES = 10.0
NARROW = 72  # characters, below which sentences are wrapped here, and tables lose a column
WIDTH_IN_A_FILE = 110  # rich would take 80, and wrap the tables

T = TypeVar("T")
B = TypeVar("B", bound="Bar")


class _Output:
    """A stream that may fail: a reader that goes, as with `| head`, a full disk, a closed terminal.

    The work goes on without it, and says so on stderr.
    """

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _try(self, work: Callable[[], object]) -> None:
        try:
            work()
        except OSError as error:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            with contextlib.suppress(OSError):
                os.dup2(nowhere, self._stream.fileno())
            try:
                why = (
                    f"the output cannot be written ({error.strerror}); the work goes on, and "
                    "Ctrl-C ends it"
                )
                print(why, file=sys.stderr)
            except OSError:
                os.dup2(nowhere, sys.stderr.fileno())


def console(*, quiet: bool = False, stderr: bool = False) -> Console:
    """Returns a console on standard output, or standard error, as it is at the time of the call."""
    stream: Any = _Output(sys.stderr if stderr else sys.stdout)
    out = Console(highlight=False, markup=False, soft_wrap=True, quiet=quiet, file=stream)
    if not out.is_terminal:
        out.width = WIDTH_IN_A_FILE
    elif out.width < NARROW:
        out.soft_wrap = False  # a terminal that wraps breaks words; rich breaks between them
    return out


def attempt(what: str, work: Callable[[], T], tell: Callable[[str], None]) -> T | None:
    """Returns what work() returns. Where it fails, tells so in one line and returns None."""
    try:
        return work()
    except Exception as error:
        words = " ".join(str(error).split())
        with contextlib.suppress(Exception):
            tell(f"no {what}: {type(error).__name__}: {words}")
        return None


def leads() -> bool:
    """Returns whether this is the one among torchrun's processes that prints,
    before torch is loaded.
    """
    return os.environ.get("RANK", "0") == "0"


def duration(seconds: float) -> str:
    """Writes seconds as '1:15' (75) or '1:06:40' (4000)."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


class Bar:
    """Shows what share of a job is done and the time left. Cheap enough to call for every batch.

    >>> with Bar(console()) as bar:
    ...     bar.begin("tokenizing")
    ...     bar.advance(0.25, "1,000 tokens")
    tokenizing
    """

    def __init__(self, console: Console):
        self._console = console
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[text]}", markup=False),
        )
        live = console.is_terminal and not console.quiet
        self._bar = Progress(*columns, console=console, expand=True) if live else None
        self.begin("")

    def __enter__(self: B) -> B:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar:
            self._bar.stop()

    def begin(self, name: str, share: float | None = None) -> None:
        """Begins a phase of which `share` was done before. None:
        as much as the first `advance` says.
        """
        self._began = self._last_line = time.monotonic()
        self._share_before = share
        if self._bar:
            for task in self._bar.task_ids:
                self._bar.remove_task(task)
            self._task = self._bar.add_task(name, total=None, text="")
        elif name:
            self.tell(name)

    def advance(self, share: float | None, text: str) -> None:
        """Shows what share of the phase is done, and the time left. None:
        nobody knows how much there is.
        """
        now = time.monotonic()
        if self._share_before is None and share is not None:
            self._share_before, self._began = share, now
        done = (share or 0.0) - (self._share_before or 0.0)
        if share is not None and done > 0:
            text += f"  {duration((now - self._began) * (1 - share) / done)} left"
        if self._bar:
            total = None if share is None else 1.0
            self._bar.update(self._task, total=total, completed=share, text=text)
        elif now - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = now
            self.tell(text)

    def tell(self, text: str) -> None:
        """Prints a line that stays."""
        self._console.print(text)


class Display(Bar):
    """Shows the steps, loss and speed of a run that stands at step `at`.

    peak    tokens/s if the machine did nothing but the model's products, at its best; None: not
            known
    """

    def __init__(self, steps: int, at: int, *, show: bool = True, peak: float | None = None):
        super().__init__(console(quiet=not show))
        self._steps, self._peak = steps, peak
        self.begin("", at / steps)

    def update(self, step: int, loss: float, tokens_per_s: float) -> None:
        """Shows the last loss, the rate since the call before,
        and its share of the machine's peak.
        """
        line = f"step {step}/{self._steps}  loss {loss:.4f}  {tokens_per_s:,.0f} tokens/s"
        if self._peak is not None:
            line += f"  {tokens_per_s / self._peak:.0%} of peak"
        self.advance(step / self._steps, line)
