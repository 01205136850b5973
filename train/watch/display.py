"""How a run looks while it runs: a live line on a terminal, a line now and then elsewhere."""

import os
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

SECONDS_BETWEEN_LINES = 10.0
WIDTH_IN_A_FILE = 110  # rich would take 80, and wrap the tables


def console(*, quiet: bool = False) -> Console:
    """Standard output as it is at the time of the call; quiet: nothing is printed."""
    seen = Console(highlight=False, soft_wrap=True, quiet=quiet)
    if seen.is_terminal:
        return seen
    return Console(highlight=False, soft_wrap=True, width=WIDTH_IN_A_FILE, quiet=quiet)


def leads() -> bool:
    """Whether this is the one among torchrun's processes that speaks. Known before torch is loaded."""
    return os.environ.get("RANK", "0") == "0"


def duration(seconds: float) -> str:
    """75 -> '1:15', 4000 -> '1:06:40'."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


class Display:
    """Shows steps, loss, tokens/s and the time left. Cheap enough to be told of every fetch."""

    def __init__(self, steps: int, at: int, *, show: bool = True):
        self._steps, self._first = steps, at
        self._console = console()
        self._show = show
        self._began = self._said = time.monotonic()
        self._bar = (
            Progress(
                TextColumn("[bold]{task.completed}/{task.total}"),
                BarColumn(bar_width=None),
                TextColumn("{task.percentage:>3.0f}%"),
                TextColumn("loss [bold]{task.fields[loss]}"),
                TextColumn("{task.fields[rate]} tokens/s"),
                TextColumn("lr {task.fields[lr]}"),
                _Left(),
                console=self._console,
                expand=True,
            )
            if show and self._console.is_terminal
            else None
        )
        if self._bar:
            self._task = self._bar.add_task(
                "", total=steps, completed=at, loss="-", rate="-", lr="-", left="-"
            )

    def __enter__(self) -> "Display":
        self._began = self._said = time.monotonic()
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def update(self, step: int, loss: float, tokens_per_s: float, lr: float) -> None:
        """After a fetch: `loss` is the last one, `tokens_per_s` the rate since the fetch before."""
        now = time.monotonic()
        left = (now - self._began) / max(step - self._first, 1) * (self._steps - step)
        if self._bar:
            self._bar.update(
                self._task,
                completed=step,
                loss=f"{loss:.4f}",
                rate=f"{tokens_per_s:,.0f}",
                lr=f"{lr:.2e}",
                left=duration(left),
            )
        elif self._show and now - self._said >= SECONDS_BETWEEN_LINES:
            self._said = now
            self.tell(
                f"step {step}/{self._steps}  loss {loss:.4f}  {tokens_per_s:,.0f} tokens/s  lr {lr:.2e}  "
                f"{duration(left)} left"
            )

    def tell(self, text: str) -> None:
        """A line that stays."""
        if self._show:
            self._console.print(text, markup=False)
            if not self._console.is_terminal:
                self._console.file.flush()  # a log that is being followed is behind a pipe


class _Left(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.fields['left']} left")
