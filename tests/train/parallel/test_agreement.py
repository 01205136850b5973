"""What happens to one process of a team reaches all of them, and none waits for another in vain."""

import itertools
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from delta_trn.train.checkpoints import contents
from delta_trn.train.checkpoints.run_folder import RunFolder
from delta_trn.train.parallel.team import ask_leader, assemble
from delta_trn.train.recipes import recipe
from delta_trn.train.run import loop
from delta_trn.train.settings.errors import ConfigError
from delta_trn.train.watch import metrics
from tests.support import team_run, tiny_run

GRACE = 30  # seconds between SIGTERM and SIGKILL under torchrun


def leads() -> bool:
    return os.environ["RANK"] == "0"


def check_agreement(arguments: list[str], log: str) -> None:
    """Checks on each of two processes what a team agrees on. An AssertionError ends the process."""
    tiny_run.redirect_output(log)
    assert ask_leader("who leads", lambda: os.environ["RANK"], minutes=1) == "0"
    with pytest.raises(ConfigError, match="only the leader looks"):
        ask_leader("who refuses", refuse_on_the_leader, minutes=1)
    with pytest.raises(ConfigError, match="rank 0 asks to start, rank 1 to resume; give"):
        ask_leader("to start" if leads() else "to resume", lambda: None, minutes=1)
    with assemble(recipe("tiny"), torch.device("cpu")) as team:
        assert team.agree(lambda: team.rank) == [0, 1]
        assert team.leader_does(lambda: team.rank) == 0
        with pytest.raises(ConfigError, match="only the leader looks"):
            team.agree(refuse_on_the_leader)
        assert team.largest([team.rank, 7]) == [1, 7]


def refuse_on_the_leader() -> None:
    if leads():
        raise ConfigError("only the leader looks")


def test_what_one_process_raises_or_finds_all_raise_or_know(tmp_path):
    team_run.train(2, [], tmp_path / "logs", check_agreement)


def spoil_a_weight(arguments: list[str], log: str) -> None:
    """Runs training on each process. The second one's first weight is not finite when it is
    to be saved.
    """
    take = contents.snapshot

    def spoiled(*arguments: Any, **options: Any) -> contents.Snapshot:
        snapshot = take(*arguments, **options)
        if not leads():
            next(iter(snapshot.weights.values())).view(-1)[0] = float("nan")
        return snapshot

    contents.snapshot = spoiled
    tiny_run.run_and_exit(arguments, log)


def test_a_weight_that_is_not_finite_on_one_process_ends_all_with_its_name(data, tmp_path):
    """Risk 2: the others waited for 30 minutes, and the reason was lost."""
    out, logs = tmp_path / "run", tmp_path / "logs"
    keys = tiny_run.keys(data, out, distribution__mode="fsdp")
    codes = team_run.join(team_run.start(2, ["run", "tiny", *keys], logs, spoil_a_weight), logs)
    assert codes == [2, 2], team_run.read_logs(logs)
    for path in logs.iterdir():
        output = path.read_text()
        assert "process 1 saves are not finite after step 4" in output, output
        assert ".weight first" in output and "Traceback" not in output
    assert not list((out / "checkpoints").glob("step-*"))


def see_another_disk(arguments: list[str], log: str) -> None:
    """Runs training on each process. To the second one the disk shows nothing of the run,
    or an old run.
    """
    shows, *words = arguments
    if not leads():
        begin = RunFolder.__init__

        def look_elsewhere(self: RunFolder, path: Path) -> None:
            begin(self, path)
            self.config_path = (
                path / "not-there-yet" if shows == "nothing" else Path(shows) / "config.json"
            )

        RunFolder.__init__ = look_elsewhere
        RunFolder.is_taken = lambda self: shows != "nothing"
        metrics.read = lambda path: []
    tiny_run.run_and_exit(words, log)


def test_a_run_is_resumed_if_the_leader_sees_it(data, finished, tmp_path):
    """Risk 7: on a shared disk one process may not see yet what another wrote."""
    out, logs = tmp_path / "run", tmp_path / "logs"
    shutil.copytree(finished, out, symlinks=True)
    shutil.rmtree(out / "checkpoints" / "step-00000012")
    keys = tiny_run.keys(data, out, evaluation__final_tokens=64)
    team_run.train(2, ["nothing", "run", "--or-resume", "tiny", *keys], logs, see_another_disk)
    assert "after step 8" in (logs / "rank-0").read_text()
    assert (out / "checkpoints" / "step-00000012").is_dir()
    logs = tmp_path / "again"
    team_run.train(2, ["nothing", "resume", out, "steps=13"], logs, see_another_disk)
    assert "after step 12" in (logs / "rank-0").read_text()


def test_a_run_is_begun_if_the_leader_sees_none(data, finished, tmp_path):
    """Risk 7, the other way round: one process still sees a run that was removed."""
    keys = tiny_run.keys(data, tmp_path / "run", steps=2)
    words = [finished, "run", "--or-resume", "tiny", *keys]
    team_run.train(2, words, tmp_path / "logs", see_another_disk)
    assert (tmp_path / "run" / "checkpoints" / "step-00000002").is_dir()


def step_slowly(arguments: list[str], log: str) -> None:
    """Runs training on each process, a third of a second for each step."""
    step, count = loop.TrainingStep.__call__, itertools.count(1)

    def slow(self: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        time.sleep(0.3)
        print("begins step", next(count), file=sys.stderr)
        return step(self, *arguments)

    loop.TrainingStep.__call__ = slow  # type: ignore[method-assign]
    tiny_run.run_and_exit(arguments, log)


def test_sigterm_to_one_process_is_answered_within_seconds(data, tmp_path):
    """Risk 12: steps were slow and log.every was large, and torchrun killed before a checkpoint."""
    out, logs = tmp_path / "run", tmp_path / "logs"
    never = 10_000
    changes = {
        "steps": never,
        "log.every": never,
        "checkpoint.every": never,
        "evaluation.every": never,
    }
    processes = team_run.start(
        2, ["run", "tiny", *tiny_run.keys(data, out, **changes)], logs, step_slowly
    )
    deadline = time.monotonic() + 100
    while "begins step 9\n" not in team_run.read_logs(logs):
        assert time.monotonic() < deadline, team_run.read_logs(logs)
        time.sleep(0.05)
    os.kill(processes[1].pid or 0, signal.SIGTERM)
    codes = team_run.join(processes, logs, seconds=GRACE)
    assert codes == [128 + signal.SIGTERM] * 2, team_run.read_logs(logs)
    assert "stopped by SIGTERM" in (logs / "rank-0").read_text()
    (checkpoint,) = (out / "checkpoints").glob("step-*")
    assert 9 <= int(checkpoint.name[5:]) < 15
