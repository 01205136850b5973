"""Saving a run: a snapshot while training waits, and its way to the disk while training waits or goes on."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from delta_trn.train.checkpoints import contents
from delta_trn.train.checkpoints.contents import Snapshot
from delta_trn.train.checkpoints.store import describe
from delta_trn.train.run.setup import Run


class Saver:
    """Writes one checkpoint at a time, `asynchronous` on a thread. `settle` raises what went wrong there.

    The interpreter does not end before the thread's work has: a save that has begun is finished.
    """

    def __init__(self, asynchronous: bool, saved: int = 0):
        """`saved` is the step whose checkpoint is there already; 0: none."""
        self.asynchronous, self.saved = asynchronous, saved
        self._has_saved = False
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
        self.saved, self._has_saved = run.state.step, True

    def tidy(self, run: Run) -> None:
        """Has `best` lead to this step if it is the best, and removes checkpoints that are not to be kept.

        It follows the evaluation, so that a model whose held-out loss is not finite removes no good one. It
        waits for nothing; the thread does it after the save. All processes must call.
        """
        if self.saved != run.state.step:
            return
        before, step, best, rotate = self._job, self.saved, run.state.best, self._has_saved

        def after_the_save() -> None:
            if before is not None:
                before.result()
            run.team.leader_does(lambda: _tidy(run, step, best, rotate))

        self._job = None
        self.begin(after_the_save)

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


def _tidy(run: Run, step: int, best: tuple[int, float] | None, rotate: bool) -> None:
    store, options = run.folder.checkpoints, run.config.checkpoint
    if options.keep_best and best is not None and best[0] == step:
        store.point_best(step, contents.is_only_for_resuming)
    if rotate:
        store.rotate(options.keep_last)
