"""Saving a run: a snapshot while training waits, and its way to the disk while training waits or goes on."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from delta_trn.train.checkpoints import contents
from delta_trn.train.checkpoints.contents import Snapshot, State
from delta_trn.train.checkpoints.store import describe
from delta_trn.train.run.setup import Run


class Saver:
    """Writes one checkpoint at a time, `asynchronous` on a thread. `settle` raises what went wrong there.

    The interpreter does not end before the thread's work has: a save that has begun is finished.
    """

    def __init__(self, asynchronous: bool):
        self.asynchronous = asynchronous
        self._thread = ThreadPoolExecutor(1, "saving")
        self._job: Future[None] | None = None

    @property
    def failed(self) -> bool:
        """Whether `settle` would raise at once."""
        return self._job is not None and self._job.done() and self._job.exception() is not None

    def save(self, run: Run) -> None:
        """Takes a snapshot of the run and writes it, after the one before it. All processes must call."""
        self.settle()  # both use the same group of processes
        run.state.position = run.position()
        snapshot = contents.snapshot(run.sharding, run.optimizer, run.state, copy=self.asynchronous)
        # a checkpoint promises that its lines of metrics are there
        run.team.agreed(run.folder.metrics.sync)
        self.begin(lambda: _write(run, snapshot))

    def begin(self, job: Callable[[], None]) -> None:
        """Does the job, or has the thread do it, after the one before it."""
        self.settle()
        if self.asynchronous:
            self._job = self._thread.submit(job)
        else:
            job()

    def settle(self) -> None:
        """Returns when the job is done. Raises what it raised."""
        job, self._job = self._job, None
        if job is not None:
            job.result()

    def wait(self) -> None:
        """Returns when the job is over, whatever has come of it."""
        if self._job is not None:
            wait([self._job])


def _write(run: Run, snapshot: Snapshot) -> None:
    team, store, step = run.team, run.folder.checkpoints, snapshot.state.step
    # before the processes write together: one that raised there would leave the others in a collective
    team.agreed(lambda: contents.require_finite(snapshot, rank=team.rank))
    with store.writing(step, leads=team.leads) as folder:
        team.leader_does(lambda: store.begin(step))
        if team.world > 1:
            contents.write_parts(folder, snapshot, team)  # which raises on all what it raises on one
        parts = team.agreed(
            lambda: describe(
                contents.write(
                    folder,
                    snapshot,
                    config=run.config,
                    sharding=run.sharding,
                    tokenizer=run.dataset.tokenizer,
                )
            )
        )
        team.leader_does(lambda: store.finish(step, parts))
    team.leader_does(lambda: _tidy(run, snapshot.state))


def _tidy(run: Run, state: State) -> None:
    """Points `best` at the new checkpoint if it is the best, and removes those that are not to be kept."""
    store, options = run.folder.checkpoints, run.config.checkpoint
    if options.keep_best and state.best is not None and state.best[0] == state.step:
        store.point_best(state.step, contents.is_only_for_resuming)
    store.rotate(options.keep_last)
