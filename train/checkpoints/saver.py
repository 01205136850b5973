"""Saves a run between two steps: a snapshot, its way to the disk,
and what is kept of earlier ones.
"""

from delta_trn.train.checkpoints import contents
from delta_trn.train.checkpoints.store import describe
from delta_trn.train.run.setup import Run


class Saver:
    """Saves the step at which a run stands. All processes call each method at the same step."""

    def __init__(self, run: Run):
        self._run = run
        self._saved = run.state.step  # the step whose checkpoint is there already; 0: none
        self._has_saved = False

    def save(self) -> None:
        """Writes a checkpoint, unless this step has one."""
        run, step = self._run, self._run.state.step
        if self._saved == step:
            return
        run.state.position = run.batches.state_dict()
        snapshot = contents.snapshot(run.sharding, run.optimizer, run.state)
        team, store = run.team, run.folder.checkpoints

        def prepare() -> None:
            run.folder.metrics.sync()  # a checkpoint promises that its lines of metrics are there
            contents.require_finite(snapshot, rank=team.rank)

        # before the processes write together: one that raised there would leave the others in a
        # collective
        team.agree(prepare)
        with store.writing(step, leads=team.leads) as folder:
            team.leader_does(lambda: store.begin(step))
            contents.write_optimizer(folder, snapshot, team)
            write = {
                "config": run.config,
                "sharding": run.sharding,
                "tokenizer": run.dataset.tokenizer,
            }
            parts = team.agree(lambda: describe(contents.write(folder, snapshot, **write)))
            team.leader_does(lambda: store.finish(step, parts))
        self._saved, self._has_saved = step, True

    def tidy(self) -> None:
        """Has `best` lead to this step if it is the best, and removes checkpoints that are not to
        be kept.

        It follows the evaluation, so that a model whose held-out loss is not finite removes no good
        one.
        """
        if self._saved == self._run.state.step:
            self._run.team.leader_does(self._tidy)

    def _tidy(self) -> None:
        run, options = self._run, self._run.config.checkpoint
        if options.keep_best and run.state.best is not None and run.state.best[0] == self._saved:
            run.folder.checkpoints.point_best(self._saved)
        if self._has_saved:
            run.folder.checkpoints.rotate(options.keep_last)
