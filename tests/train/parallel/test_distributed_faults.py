"""What happens to some processes of a run: nothing reported as saved is lost, and the run goes on from it."""

import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import team_run, tiny_run
from tests.support.tiny_run import final_state, read_metrics


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return tiny_run.prepare_data(tmp_path_factory.mktemp("data"))


def keys(data: Path, out: Path) -> list[str]:
    return tiny_run.keys(data, out, steps=40, log__every=1, checkpoint__every=5, evaluation__every=20)


@pytest.fixture(scope="module")
def undisturbed(data, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    team_run.train(2, ["run", "tiny", *keys(data, folder / "run")], folder / "logs")
    return folder / "run"


def wait_for(out: Path, step: int) -> None:
    until = time.monotonic() + 100
    while max((line["step"] for line in read_metrics(out)), default=0) < step:
        assert time.monotonic() < until, "the run does not get there"
        time.sleep(0.005)


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_sigterm_to_all_saves_and_the_rest_is_the_same_run(data, undisturbed, tmp_path):
    out = tmp_path / "run"
    processes = team_run.start(2, ["run", "tiny", *keys(data, out)], tmp_path / "logs")
    wait_for(out, 7)
    for process in processes:
        os.kill(process.pid, signal.SIGTERM)
    logs = tmp_path / "logs"
    assert team_run.join(processes, logs) == [128 + signal.SIGTERM] * 2, team_run.read_logs(logs)
    assert "stopped by SIGTERM" in (logs / "rank-0").read_text()
    team_run.train(2, ["resume", out], tmp_path / "again")
    assert final_state(out) == final_state(undisturbed)


@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_sigkill_of_one_ends_the_other_and_the_rest_is_the_same_run(data, undisturbed, tmp_path, victim):
    """The other one finds its neighbor gone at the next collective; under torchrun it would be ended."""
    out = tmp_path / "run"
    processes = team_run.start(2, ["run", "tiny", *keys(data, out)], tmp_path / "logs")
    wait_for(out, 7)
    os.kill(processes[victim].pid, signal.SIGKILL)
    logs = tmp_path / "logs"
    codes = team_run.join(processes, logs)
    assert codes[victim] == -signal.SIGKILL
    assert codes[1 - victim] == 2, team_run.read_logs(logs)
    said = (logs / f"rank-{1 - victim}").read_text()
    assert "another of the 2 processes has ended" in said and "Traceback" not in said
    assert (out / "checkpoints" / "step-00000005").is_dir()
    team_run.train(2, ["resume", out], tmp_path / "again")
    assert final_state(out) == final_state(undisturbed)


SHARDED = {"distribution__mode": "fsdp", "checkpoint__every": 4, "evaluation__every": 6, "log__every": 1}


@pytest.fixture(scope="module")
def sharded(data, tmp_path_factory) -> Path:
    """A finished run of two processes with checkpoints at 6, 8 and 12, which two files each make up."""
    folder = tmp_path_factory.mktemp("sharded")
    team_run.train(2, ["run", "tiny", *tiny_run.keys(data, folder / "run", **SHARDED)], folder / "logs")
    return folder / "run"


def dying_while_it_writes(arguments: list[str], log: str) -> None:
    """On each process; the second dies in its second checkpoint, of four syncs each."""
    if os.environ["RANK"] == "1":
        tiny_run.die_before(6)
    tiny_run.run_and_exit(arguments, log)


@pytest.mark.parametrize("asynchronous", ["false", pytest.param("true", marks=pytest.mark.slow)])
def test_sigkill_while_a_checkpoint_is_written_leaves_it_unseen(data, sharded, tmp_path, asynchronous):
    out, logs = tmp_path / "run", tmp_path / "logs"
    given = [*tiny_run.keys(data, out, **SHARDED), f"checkpoint.asynchronous={asynchronous}"]
    codes = team_run.join(team_run.start(2, ["run", "tiny", *given], logs, dying_while_it_writes), logs)
    assert codes == [2, -signal.SIGKILL], team_run.read_logs(logs)
    assert "another of the 2 processes has ended" in (logs / "rank-0").read_text()
    assert [path.name for path in (out / "checkpoints").glob("step-*")] == ["step-00000004"]
    team_run.train(2, ["resume", out], tmp_path / "again")
    assert final_state(out) == final_state(sharded)


@pytest.mark.parametrize("name", ["shard-00002-*", pytest.param("model-00001-*", marks=pytest.mark.slow)])
def test_a_part_cut_short_is_found_and_the_one_before_taken(data, sharded, tmp_path, name):
    out, logs = tmp_path / "run", tmp_path / "again"
    shutil.copytree(sharded, out, symlinks=True)
    (part,) = (out / "checkpoints" / "step-00000012").glob(name)
    part.write_bytes(part.read_bytes()[:-10])
    team_run.train(2, ["resume", out], logs)
    said = (logs / "rank-0").read_text()
    assert "checkpoint of step 12 is damaged" in said and part.name in said and "after step 8" in said
    assert final_state(out) == final_state(sharded)


def with_a_small_disk(arguments: list[str], log: str) -> None:
    """On each process; one can write no file of more than 5,000 bytes, as if its disk were full."""
    rank, *others = arguments
    if os.environ["RANK"] == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, 5_000))
    tiny_run.run_and_exit(others, log)


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_full_disk_of_one_ends_all_with_what_it_says(data, tmp_path, rank):
    out, logs = tmp_path / "run", tmp_path / "logs"
    arguments = [rank, "run", "tiny", *tiny_run.keys(data, out, **SHARDED)]
    codes = team_run.join(team_run.start(2, arguments, logs, with_a_small_disk), logs)
    assert codes == [2, 2], team_run.read_logs(logs)
    for path in logs.iterdir():
        said = path.read_text()
        assert "no space left to write" in said and "python -m train resume" in said, said
        assert "Traceback" not in said
    assert not list((out / "checkpoints").iterdir())


@pytest.mark.slow
def test_one_that_does_not_answer_ends_the_other_with_what_it_waited_for(data, tmp_path):
    out, logs = tmp_path / "run", tmp_path / "logs"
    given = tiny_run.keys(data, out, steps=5000, log__every=1, distribution__timeout_minutes=0.5)
    processes = team_run.start(2, ["run", "tiny", *given], logs)
    wait_for(out, 3)
    os.kill(processes[1].pid, signal.SIGSTOP)
    try:
        processes[0].join(timeout=120)
        said = (logs / "rank-0").read_text()
        assert processes[0].exitcode == 2, said
        assert "did not answer for distribution.timeout_minutes=0.5" in said and " in train." in said
    finally:
        for process in processes:
            process.kill()
            process.join()


@pytest.fixture
def cable(tmp_path):
    """A network namespace, joined to this one by a pair of devices. (its name, here, there, address here)"""
    if shutil.which("ip") is None:
        pytest.skip("no `ip` to make a network namespace with")
    tag = f"{os.getpid() % 100_000}"
    space, here, there = f"delta{tag}", f"dh{tag}", f"dt{tag}"
    third = os.getpid() % 250
    made = subprocess.run(["ip", "netns", "add", space], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"network namespaces may not be made here: {made.stderr.strip()}")
    try:
        for command in (
            f"link add {here} type veth peer name {there} netns {space}",
            f"addr add 10.231.{third}.1/24 dev {here}",
            f"link set {here} up",
            f"-n {space} addr add 10.231.{third}.2/24 dev {there}",
            f"-n {space} link set {there} up",
            f"-n {space} link set lo up",
        ):
            done = subprocess.run(["ip", *command.split()], capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"`ip {command}` is refused here: {done.stderr.strip()}")
        yield space, here, there, f"10.231.{third}.1"
    finally:
        subprocess.run(["ip", "netns", "delete", space], capture_output=True)


@pytest.mark.slow
def test_a_lost_network_ends_the_run_with_what_it_waited_for_and_it_goes_on(data, tmp_path, cable):
    space, here, there, address = cable
    out, port = tmp_path / "run", team_run.free_port()
    given = tiny_run.keys(
        data, out, steps=3000, log__every=1, checkpoint__every=50, distribution__timeout_minutes=0.5
    )
    processes = []
    for rank, (prefix, device) in enumerate((([], here), (["ip", "netns", "exec", space], there))):
        variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": address}
        variables |= {"MASTER_PORT": port, "GLOO_SOCKET_IFNAME": device, "OMP_NUM_THREADS": 1}
        with open(tmp_path / f"rank-{rank}", "w") as log:
            processes.append(
                subprocess.Popen(
                    [*prefix, sys.executable, "-m", "train", "run", "tiny", *given],
                    env={**os.environ, **{name: str(value) for name, value in variables.items()}},
                    stdout=log,
                    stderr=log,
                )
            )
    try:
        wait_for(out, 60)
        subprocess.run(["ip", "link", "set", here, "down"], check=True)
        codes = [process.wait(timeout=200) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for rank in range(2):
        said = (tmp_path / f"rank-{rank}").read_text()
        assert codes[rank] == 2, said
        assert "did not answer for distribution.timeout_minutes=0.5" in said, said
    last = max(int(path.name[5:]) for path in (out / "checkpoints").glob("step-*"))
    assert last >= 50
    logs = tmp_path / "again"
    team_run.train(2, ["resume", out, f"steps={last + 2}"], logs)
    assert f"after step {last}" in (logs / "rank-0").read_text()


@pytest.mark.slow
def test_torchrun_restarts_and_the_run_goes_on_by_itself(data, undisturbed, tmp_path):
    out, log = tmp_path / "run", tmp_path / "log"
    with open(log, "w") as file:
        agent = subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"),
                *("--max-restarts=2", "-m", "train", "run", "--or-resume", "tiny", *keys(data, out)),
            ],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=file,
            stderr=file,
        )
    try:
        wait_for(out, 7)
        os.kill(children(agent.pid)[-1], signal.SIGKILL)
        assert agent.wait(timeout=200) == 0, log.read_text()
    finally:
        agent.kill()
    assert "continuing" in log.read_text()
    assert final_state(out) == final_state(undisturbed)


@pytest.mark.slow
def test_torchrun_goes_on_with_the_node_that_is_left(data, tmp_path):
    """Two agents of one process each stand for two nodes; one is lost with all it has, and world becomes 1.

    SGD, and the tolerance of test_distributed.py: gradients are then sums in another order.
    """
    given = {"steps": 40, "log__every": 1, "checkpoint__every": 5, "evaluation__every": 20}
    given |= {"optimizer__name": "sgd", "optimizer__lr": 0.05, "optimizer__momentum": 0.5}
    tiny_run.train("run", "tiny", *tiny_run.keys(data, tmp_path / "alone", **given))
    out, port = tmp_path / "run", team_run.free_port()
    limits = "last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3"
    words = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc_per_node=1"),
        *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-conf={limits}"),
        *("--rdzv-id=tiny", "--local-addr=127.0.0.1", "--max-restarts=3"),
        *("-m", "train", "run", "--or-resume", "tiny", *tiny_run.keys(data, out, **given)),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    logs = [tmp_path / "stays.log", tmp_path / "lost.log"]
    nodes = []
    try:
        for log in logs:
            with open(log, "w") as file:
                nodes.append(subprocess.Popen(words, env=environment, stdout=file, stderr=file))
            time.sleep(1)  # the first one has the meeting point, which has to outlive the other
        wait_for(out, 12)
        assert "processes  2" in logs[0].read_text()
        for pid in (nodes[1].pid, *children(nodes[1].pid)):
            os.kill(pid, signal.SIGKILL)
        assert nodes[0].wait(timeout=200) == 0, logs[0].read_text()
    finally:
        for node in nodes:
            for pid in children(node.pid) if node.poll() is None else ():
                os.kill(pid, signal.SIGKILL)
            node.kill()
            node.wait()
    said = logs[0].read_text()
    assert "continuing" in said and said.count("processes  2") == 1, said
    for mine, alone in zip(read_metrics(out), read_metrics(tmp_path / "alone"), strict=True):
        assert (mine["step"], mine["split"]) == (alone["step"], alone["split"])
        assert mine["loss"] == pytest.approx(alone["loss"], rel=40 * 300 * 2**-24)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_ten_random_kills(data, tmp_path, seed, mode="fsdp"):
    """Five times: 50. Any process at any moment, also while checkpoints are written beside training."""
    rng = random.Random(seed)
    given = {"distribution__mode": mode, "steps": 40, "log__every": 1, "checkpoint__every": 2}
    given |= {"evaluation__every": 10, "distribution__timeout_minutes": 2}
    team_run.train(2, ["run", "tiny", *tiny_run.keys(data, tmp_path / "whole", **given)], tmp_path / "logs")
    out = tmp_path / "run"
    words = ["run", "--or-resume", "tiny", *tiny_run.keys(data, out, **given), "checkpoint.asynchronous=true"]
    killed = 0
    for n, target in enumerate(sorted(rng.uniform(-1, 38) for _ in range(10))):
        logs = tmp_path / f"logs-{n}"
        processes = team_run.start(2, words, logs)
        until = time.monotonic() + 100
        while all(process.is_alive() for process in processes) and time.monotonic() < until:
            if max((line["step"] for line in read_metrics(out)), default=0) >= target:
                break
            time.sleep(0.002)
        victim = rng.choice(processes)
        victim.join(rng.uniform(0, 0.2))
        victim.kill()
        victim.join()
        killed += victim.exitcode == -signal.SIGKILL
        # the other is left to find out, and where it was still joining ended, as torchrun does
        for process in processes:
            process.join(20)
            process.kill()
            process.join()
            assert process.exitcode in (0, 2, -signal.SIGKILL), team_run.read_logs(logs)
    assert killed >= 8
    team_run.train(2, words, tmp_path / "last")
    assert final_state(out) == final_state(tmp_path / "whole")
