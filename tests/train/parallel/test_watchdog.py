"""A process that waits for a device without end is ended, on stand-ins over gloo.

The stand-in's collective of one process never returns, as a NeuronCore's does not where another
process does not come to it.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from delta_trn.backends import machine
from delta_trn.train.neuron import reduction, watchdog
from delta_trn.train.neuron.watchdog import Watchdog
from delta_trn.train.run import step
from tests.support import team_run, tiny_run
from tests.train.parallel.test_neuron import keys, run_on_stand_in

MINUTES = 0.2  # of waiting for the device; the hosts' own groups wait as long
LOST = 6  # the step in which a process is lost


def lose_one(arguments: list[str], log: str) -> None:
    """Runs training on stand-ins. In step LOST process 1 is killed, and the collective of process 0
    does not return.
    """
    average, steps = reduction.average, []

    def hang(*given):
        steps.append(1)
        if len(steps) == LOST:
            if os.environ["RANK"] == "1":
                os.kill(os.getpid(), signal.SIGKILL)
            while True:
                time.sleep(1)
        average(*given)

    reduction.average = hang
    run_on_stand_in(arguments, log)


def lose_one_unwatched(arguments: list[str], log: str) -> None:
    watchdog.Watchdog._begin = lambda self: None
    lose_one(arguments, log)


def start(data: Path, tmp_path: Path, work) -> tuple[list, Path]:
    changes = {"distribution.timeout_minutes": MINUTES, "checkpoint.every": 2}
    arguments = ["run", "tiny", *keys(data, tmp_path / "run", "sgd", changes)]
    return team_run.start(2, arguments, tmp_path / "logs", work), tmp_path / "logs"


def test_a_missing_process_ends_the_others_after_the_time_limit(data, tmp_path):
    processes, logs = start(data, tmp_path, lose_one)
    codes = team_run.join(processes, logs, seconds=200)
    output = (logs / "rank-0").read_text()
    assert codes == [watchdog.STATUS, -signal.SIGKILL], output
    assert (
        f"the device did not answer for distribution.timeout_minutes={MINUTES:g} in step" in output
    )
    assert "another of the 2 processes has ended" in output and "resume the run" in output
    assert (tmp_path / "run" / "checkpoints" / "step-00000004").is_dir()


def test_without_the_watchdog_the_others_would_wait_without_end(data, tmp_path):
    processes, logs = start(data, tmp_path, lose_one_unwatched)
    try:
        processes[1].join(150)
        assert processes[1].exitcode == -signal.SIGKILL, team_run.read_logs(logs)
        processes[0].join(60 * MINUTES + 4)
        assert processes[0].exitcode is None
    finally:
        for process in processes:
            process.kill()
            process.join(10)


class TestWatchdog:
    @pytest.fixture
    def ended(self, monkeypatch):
        """Returns the statuses by which the process would have ended."""
        statuses: list[int] = []
        monkeypatch.setattr(watchdog.os, "_exit", statuses.append)
        return statuses

    def test_what_may_compile_has_no_limit(self, ended):
        dog = Watchdog(0.1 / 60, 2)
        for _ in range(3):
            with dog.over("step"):
                time.sleep(0.2)
        with dog.over("evaluation"):
            time.sleep(0.2)
        assert not ended
        with dog.over("step"):
            time.sleep(0.4)
        dog.close()
        assert ended and set(ended) == {watchdog.STATUS}

    def test_what_goes_on_is_not_ended(self, ended):
        dog = Watchdog(0.3 / 60, 2)
        for _ in range(2):
            with dog.over("evaluation"):
                for _ in range(6):
                    time.sleep(0.1)
                    dog.beat()
        time.sleep(0.5)
        dog.close()
        assert not ended

    def test_a_process_that_has_lost_the_others_ends_even_where_xla_waits_at_exit(
        self, ended, monkeypatch
    ):
        monkeypatch.setattr(watchdog, "LEAVING_SECONDS", 0.05)
        Watchdog(0.0, 1).leave()
        time.sleep(0.2)
        assert not ended, "other devices' processes end by themselves"
        dog = Watchdog(30.0, 2)
        dog.leave()
        time.sleep(0.3)
        dog.close()
        assert ended == [watchdog.STATUS]


def note_graphs(arguments: list[str], log: str) -> None:
    """Runs training on stand-ins, and writes for each step the numbers of its graphs that have a
    collective, and how many graphs it has.
    """
    ends: list[int] = [0]
    collectives: list[int] = []
    lines = open(f"{log}.graphs", "w")  # noqa: SIM115 - until the process ends
    synchronize, call = machine.synchronize, step.TrainingStep.__call__

    def end_graph(*given, **options):
        ends[0] += 1
        synchronize(*given, **options)

    def note(function):
        def noted(*given, **options):
            # of the hosts' own groups no graph knows
            if not options.get("group") or options["group"] is not hosts[0]:
                collectives.append(ends[0])
            return function(*given, **options)

        return noted

    hosts: list = [None]

    def one_step(self, batch, lr):
        hosts[0] = self.sharding.team.hosts
        ends[0] = 0
        collectives.clear()
        result = call(self, batch, lr)
        print(json.dumps([sorted(set(collectives)), ends[0]]), file=lines, flush=True)
        return result

    machine.synchronize, step.TrainingStep.__call__ = end_graph, one_step
    torch_distributed = sys.modules["torch.distributed"]
    for name in ("all_reduce", "all_gather", "broadcast"):
        setattr(torch_distributed, name, note(getattr(torch_distributed, name)))
    run_on_stand_in(arguments, log)


def note_graphs_of_split_buckets(arguments: list[str], log: str) -> None:
    """Ends the graph after every bucket's all-reduce."""
    reduce = machine.all_reduce

    def ends(x, **options):
        result = reduce(x, **options)
        machine.synchronize(x.device, wait=False)
        return result

    machine.all_reduce = ends
    note_graphs(arguments, log)


def graphs_of(data: Path, tmp_path: Path, changes: dict, work=note_graphs) -> list:
    changes = {"batch.micro": 2, "steps": 3, **changes}
    optimizer = "adamw" if "distribution.mode" in changes else "sgd"
    arguments = ["run", "tiny", *keys(data, tmp_path / "run", optimizer, changes)]
    team_run.train(2, arguments, tmp_path / "logs", work)
    text = (tmp_path / "logs" / "rank-0.graphs").read_text()
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("changes", [{}, {"distribution.mode": "zero1"}], ids=["ddp", "zero1"])
def test_collectives_stand_in_one_graph_of_a_step(data, tmp_path, changes):
    """Each graph with a collective costs 2.8 to 5.1 ms with 32 processes: the last one has all."""
    steps = graphs_of(data, tmp_path, changes)
    assert len(steps) == 3
    for collectives, ends in steps:
        assert ends >= 3, "two micro-batches and the update"
        assert collectives == [ends - 1]


def test_a_collective_in_another_graph_is_seen(data, tmp_path):
    steps = graphs_of(data, tmp_path, {}, note_graphs_of_split_buckets)
    assert all(len(collectives) > 1 for collectives, _ in steps)


def test_a_run_on_neuron_ends_as_before(data, tmp_path):
    """The watchdog stays silent where nothing is lost."""
    changes = {"distribution.timeout_minutes": 0.5}
    arguments = ["run", "tiny", *keys(data, tmp_path / "run", "sgd", changes)]
    team_run.train(2, arguments, tmp_path / "logs", run_on_stand_in)
    assert "did not answer" not in team_run.read_logs(tmp_path / "logs")
    assert tiny_run.final_state(tmp_path / "run")
