"""One checkpoint on its way to the disk, while training waits or while it goes on."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait


class Saving:
    """Runs one job at a time, `asynchronous` in a thread. What a job raises, the next `settle` raises.

    The interpreter does not end before the thread's job has: what a run has begun to save, it saves.
    """

    def __init__(self, asynchronous: bool):
        self.asynchronous = asynchronous
        self._thread = ThreadPoolExecutor(1, "saving")
        self._job: Future[None] | None = None

    @property
    def failed(self) -> bool:
        """Whether `settle` would raise at once."""
        return self._job is not None and self._job.done() and self._job.exception() is not None

    def begin(self, job: Callable[[], None]) -> None:
        """Have the job done, after the one before it."""
        self.settle()
        if self.asynchronous:
            self._job = self._thread.submit(job)
        else:
            job()

    def settle(self) -> None:
        """Return when the job is done. Raises what it raised."""
        job, self._job = self._job, None
        if job is not None:
            job.result()

    def wait(self) -> None:
        """Return when the job is over, whatever has come of it."""
        if self._job is not None:
            wait([self._job])
