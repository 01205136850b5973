"""Progress of a long preparation: a bar with the time left on a terminal, a line now and then elsewhere."""

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

SECONDS_BETWEEN_LINES = 10.0


class Report:
    """Shows how far one phase is. `update` is cheap enough to call for every batch of documents."""

    def __init__(self, *, show: bool):
        console = Console(stderr=True)
        self._show = show
        self._bar = (
            Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.percentage:>3.0f}%"),
                TextColumn("{task.fields[amount]}"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=console,
            )
            if show and console.is_terminal
            else None
        )
        self._task = None
        self._said = self._began = time.monotonic()
        self._tokens_before = 0
        self._fraction_before: float | None = None

    def __enter__(self) -> "Report":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def phase(self, name: str, tokens: int = 0) -> None:
        """Begin a phase; `tokens` were there before it, so that they do not count in its rate."""
        self._said = self._began = time.monotonic()
        self._tokens_before, self._fraction_before = tokens, None
        if self._bar:
            self._task = self._bar.add_task(name, total=None, amount="")
        elif self._show:
            print(name, file=sys.stderr, flush=True)

    def update(self, fraction: float | None, tokens: int) -> None:
        """`fraction` of the phase done, None where nobody knows how much there is."""
        now = time.monotonic()
        rate = (tokens - self._tokens_before) / max(now - self._began, 1e-9)
        amount = f"{tokens:,} tokens, {rate:,.0f}/s"
        if self._bar and self._task is not None:
            total = None if fraction is None else 1.0
            self._bar.update(self._task, amount=amount, total=total, completed=fraction)
            return
        if self._fraction_before is None:
            self._fraction_before = fraction  # a continued run did not just do all of it
            self._began = now
        elif self._show and now - self._said >= SECONDS_BETWEEN_LINES:
            self._said = now
            left = ""
            done = (fraction or 0.0) - (self._fraction_before or 0.0)
            if fraction is not None and done > 0:
                left = f" {fraction:.0%}, {(now - self._began) * (1 - fraction) / done:.0f} s left,"
            print(f" {left} {amount}", file=sys.stderr, flush=True)
