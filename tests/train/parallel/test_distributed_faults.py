"""Faults in some processes of a run lose nothing that was reported as saved,
and the run can continue.
"""

import json
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


def keys(data: Path, out: Path) -> list[str]:
    return tiny_run.keys(
        data, out, steps=40, log__every=1, checkpoint__every=5, evaluation__every=20
    )


@pytest.fixture(scope="module")
def undisturbed(data, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    team_run.train(2, ["run", "tiny", *keys(data, folder / "run")], folder / "logs")
    return folder / "run"


def wait_for(out: Path, step: int) -> None:
    deadline = time.monotonic() + 100
    while max((line["step"] for line in read_metrics(out)), default=0) < step:
        assert time.monotonic() < deadline, f"the run does not reach step {step}"
        time.sleep(0.005)


def list_children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_sigterm_to_all_processes_saves_and_the_resumed_run_is_the_same(
    data, undisturbed, tmp_path
):
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


def test_sigterm_to_one_process_ends_a_long_evaluation_of_both(data, tmp_path):
    out, logs = tmp_path / "run", tmp_path / "logs"
    processes = team_run.start(
        2, ["run", "tiny", *keys(data, out), "evaluation.sequences=40000"], logs
    )
    wait_for(out, 20)
    os.kill(processes[1].pid, signal.SIGTERM)
    assert team_run.join(processes, logs) == [128 + signal.SIGTERM] * 2, team_run.read_logs(logs)
    assert "stopped by SIGTERM after step 20" in (logs / "rank-0").read_text()
    assert not [line for line in read_metrics(out) if line["split"] == "val"]
    state = json.loads((out / "checkpoints" / "step-00000020" / "state.json").read_bytes())
    assert state["owes"], "the resumed run begins with the evaluation"


@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_sigkill_of_one_process_ends_both_and_the_resumed_run_is_the_same(
    data, undisturbed, tmp_path, victim
):
    """The other process notices at the next collective. Under torchrun it would be ended."""
    out = tmp_path / "run"
    processes = team_run.start(2, ["run", "tiny", *keys(data, out)], tmp_path / "logs")
    wait_for(out, 7)
    os.kill(processes[victim].pid, signal.SIGKILL)
    logs = tmp_path / "logs"
    codes = team_run.join(processes, logs)
    assert codes[victim] == -signal.SIGKILL
    assert codes[1 - victim] == 2, team_run.read_logs(logs)
    output = (logs / f"rank-{1 - victim}").read_text()
    assert "another of the 2 processes has ended" in output and "Traceback" not in output
    assert (out / "checkpoints" / "step-00000005").is_dir()
    team_run.train(2, ["resume", out], tmp_path / "again")
    assert final_state(out) == final_state(undisturbed)


SHARDED = {
    "distribution__mode": "fsdp",
    "checkpoint__every": 4,
    "evaluation__every": 6,
    "log__every": 1,
}


@pytest.fixture(scope="module")
def sharded(data, tmp_path_factory) -> Path:
    """Runs two processes to the end. The checkpoints at 6, 8 and 12 consist of two files each."""
    folder = tmp_path_factory.mktemp("sharded")
    team_run.train(
        2, ["run", "tiny", *tiny_run.keys(data, folder / "run", **SHARDED)], folder / "logs"
    )
    return folder / "run"


def die_while_writing(arguments: list[str], log: str) -> None:
    """Runs training on each process. Rank 1 dies in its second checkpoint,
    of 3 syncs and 3 renames.
    """
    if os.environ["RANK"] == "1":
        tiny_run.die_before(9)
    tiny_run.run_and_exit(arguments, log)


def test_a_checkpoint_interrupted_by_sigkill_is_not_visible(data, sharded, tmp_path):
    out, logs = tmp_path / "run", tmp_path / "logs"
    arguments = tiny_run.keys(data, out, **SHARDED)
    codes = team_run.join(
        team_run.start(2, ["run", "tiny", *arguments], logs, die_while_writing), logs
    )
    assert codes == [2, -signal.SIGKILL], team_run.read_logs(logs)
    assert "another of the 2 processes has ended" in (logs / "rank-0").read_text()
    assert [path.name for path in (out / "checkpoints").glob("step-*")] == ["step-00000004"]
    team_run.train(2, ["resume", out], tmp_path / "again")
    assert final_state(out) == final_state(sharded)


@pytest.mark.parametrize(
    "name", ["optimizer-*-00002-*", pytest.param("model-00001-*", marks=pytest.mark.slow)]
)
def test_resume_skips_a_sharded_checkpoint_with_a_truncated_part(data, sharded, tmp_path, name):
    out, logs = tmp_path / "run", tmp_path / "again"
    shutil.copytree(sharded, out, symlinks=True)
    (part,) = (out / "checkpoints" / "step-00000012").glob(name)
    part.write_bytes(part.read_bytes()[:-10])
    team_run.train(2, ["resume", out], logs)
    output = (logs / "rank-0").read_text()
    assert (
        "checkpoint of step 12 is damaged" in output
        and part.name in output
        and "after step 8" in output
    )
    assert final_state(out) == final_state(sharded)


def run_with_a_small_disk(arguments: list[str], log: str) -> None:
    """Runs training on each process. One cannot write files above 5,000 bytes,
    as if its disk were full.
    """
    rank, *others = arguments
    if os.environ["RANK"] == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, 5_000))
    tiny_run.run_and_exit(others, log)


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_full_disk_of_one_process_ends_all_with_its_message(data, tmp_path, rank):
    out, logs = tmp_path / "run", tmp_path / "logs"
    arguments = [rank, "run", "tiny", *tiny_run.keys(data, out, **SHARDED)]
    codes = team_run.join(team_run.start(2, arguments, logs, run_with_a_small_disk), logs)
    assert codes == [2, 2], team_run.read_logs(logs)
    for path in logs.iterdir():
        output = path.read_text()
        assert "no space left to write" in output and "delta-trn resume" in output, output
        assert "Traceback" not in output
    assert not list((out / "checkpoints").iterdir())


@pytest.mark.slow
def test_a_stopped_process_ends_the_other_after_the_timeout(data, tmp_path):
    out, logs = tmp_path / "run", tmp_path / "logs"
    arguments = tiny_run.keys(
        data, out, steps=5000, log__every=1, distribution__timeout_minutes=0.5
    )
    processes = team_run.start(2, ["run", "tiny", *arguments], logs)
    wait_for(out, 3)
    os.kill(processes[1].pid, signal.SIGSTOP)
    try:
        processes[0].join(timeout=120)
        output = (logs / "rank-0").read_text()
        assert processes[0].exitcode == 2, output
        assert "did not answer for distribution.timeout_minutes=0.5" in output
    finally:
        for process in processes:
            process.kill()
            process.join(10)


@pytest.fixture
def cable(tmp_path):
    """Makes a network namespace with a pair of devices into it.

    Returns its name, the device here, the device there, and the address here.
    """
    if shutil.which("ip") is None:
        pytest.skip("no `ip` to make a network namespace with")
    tag = f"{os.getpid() % 100_000}"
    space, here, there = f"delta{tag}", f"dh{tag}", f"dt{tag}"
    third = os.getpid() % 250
    result = subprocess.run(
        ["ip", "netns", "add", space], capture_output=True, text=True, timeout=20
    )
    if result.returncode:
        pytest.skip(f"network namespaces cannot be made here: {result.stderr.strip()}")
    try:
        for command in (
            f"link add {here} type veth peer name {there} netns {space}",
            f"addr add 10.231.{third}.1/24 dev {here}",
            f"link set {here} up",
            f"-n {space} addr add 10.231.{third}.2/24 dev {there}",
            f"-n {space} link set {there} up",
            f"-n {space} link set lo up",
        ):
            result = subprocess.run(
                ["ip", *command.split()], capture_output=True, text=True, timeout=20
            )
            if result.returncode:
                pytest.skip(f"`ip {command}` is refused here: {result.stderr.strip()}")
        yield space, here, there, f"10.231.{third}.1"
    finally:
        subprocess.run(["ip", "netns", "delete", space], capture_output=True, timeout=20)


@pytest.mark.slow
def test_a_lost_network_ends_the_run_after_the_timeout_and_it_resumes(data, tmp_path, cable):
    space, here, there, address = cable
    out, port = tmp_path / "run", team_run.find_free_port()
    arguments = tiny_run.keys(
        data, out, steps=3000, log__every=1, checkpoint__every=50, distribution__timeout_minutes=0.5
    )
    processes = []
    for rank, (prefix, device) in enumerate((([], here), (["ip", "netns", "exec", space], there))):
        variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": address}
        variables |= {"MASTER_PORT": port, "GLOO_SOCKET_IFNAME": device, "OMP_NUM_THREADS": 1}
        with open(tmp_path / f"rank-{rank}", "w") as log:
            processes.append(
                subprocess.Popen(
                    [*prefix, sys.executable, "-m", "train", "run", "tiny", *arguments],
                    env={**os.environ, **{name: str(value) for name, value in variables.items()}},
                    stdout=log,
                    stderr=log,
                )
            )
    try:
        wait_for(out, 60)
        subprocess.run(["ip", "link", "set", here, "down"], check=True, timeout=20)
        codes = [process.wait(timeout=200) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for rank in range(2):
        output = (tmp_path / f"rank-{rank}").read_text()
        assert codes[rank] == 2, output
        assert "did not answer for distribution.timeout_minutes=0.5" in output, output
    last = max(int(path.name[5:]) for path in (out / "checkpoints").glob("step-*"))
    assert last >= 50
    logs = tmp_path / "again"
    team_run.train(2, ["resume", out, f"steps={last + 2}"], logs)
    assert f"after step {last}" in (logs / "rank-0").read_text()


@pytest.mark.slow
def test_a_run_continues_when_torchrun_restarts_it(data, undisturbed, tmp_path):
    out, log = tmp_path / "run", tmp_path / "log"
    with open(log, "w") as file:
        agent = subprocess.Popen(
            [
                *(
                    sys.executable,
                    "-m",
                    "torch.distributed.run",
                    "--standalone",
                    "--nproc_per_node=2",
                ),
                *(
                    "--max-restarts=2",
                    "-m",
                    "train",
                    "run",
                    "--or-resume",
                    "tiny",
                    *keys(data, out),
                ),
            ],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=file,
            stderr=file,
        )
    try:
        wait_for(out, 7)
        os.kill(list_children(agent.pid)[-1], signal.SIGKILL)
        assert agent.wait(timeout=200) == 0, log.read_text()
    finally:
        agent.kill()
    assert "continuing" in log.read_text()
    assert final_state(out) == final_state(undisturbed)


@pytest.mark.slow
def test_a_run_continues_on_the_remaining_node_under_torchrun(data, tmp_path):
    """Two agents of one process each stand for two nodes. One is killed, and one process remains.

    Gradients are then sums in another order, so that the tolerance comes from control runs.
    """
    changes = {"steps": 40, "log__every": 1, "checkpoint__every": 5, "evaluation__every": 20}
    changes |= {"optimizer__name": "sgd", "optimizer__lr": 0.05, "optimizer__momentum": 0.5}
    tiny_run.train("run", "tiny", *tiny_run.keys(data, tmp_path / "alone", **changes))
    out, port = tmp_path / "run", team_run.find_free_port()
    limits = "last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3"
    words = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc_per_node=1"),
        *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-conf={limits}"),
        *("--rdzv-id=tiny", "--local-addr=127.0.0.1", "--max-restarts=3"),
        *("-m", "train", "run", "--or-resume", "tiny", *tiny_run.keys(data, out, **changes)),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    logs = [tmp_path / "stays.log", tmp_path / "lost.log"]
    nodes = []
    try:
        for log in logs:
            with open(log, "w") as file:
                nodes.append(subprocess.Popen(words, env=environment, stdout=file, stderr=file))
            # the first node hosts the rendezvous, which has to outlive the other
            team_run.wait_for_server(port)
        wait_for(out, 12)
        assert "processes  2" in logs[0].read_text()
        for pid in (nodes[1].pid, *list_children(nodes[1].pid)):
            os.kill(pid, signal.SIGKILL)
        assert nodes[0].wait(timeout=200) == 0, logs[0].read_text()
    finally:
        for node in nodes:
            for pid in list_children(node.pid) if node.poll() is None else ():
                os.kill(pid, signal.SIGKILL)
            node.kill()
            node.wait(10)
    output = logs[0].read_text()
    assert "continuing" in output and output.count("processes  2") == 1, output
    controls = []
    for seed in range(3):
        control = tmp_path / f"control-{seed}"
        with tiny_run.nudge_weights(seed):
            tiny_run.train("run", "tiny", *tiny_run.keys(data, control, **changes))
        controls.append(tiny_run.metric_distance(control, tmp_path / "alone", "loss"))
    distance = tiny_run.metric_distance(out, tmp_path / "alone", "loss")
    assert distance <= tiny_run.tolerance(controls)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_a_run_of_two_processes_survives_ten_random_kills(data, tmp_path, seed):
    """Kills any process at any moment, also while checkpoints are written beside training."""
    rng = random.Random(seed)
    changes = {"distribution__mode": "fsdp", "steps": 40, "log__every": 1, "checkpoint__every": 2}
    changes |= {"evaluation__every": 10, "distribution__timeout_minutes": 2}
    team_run.train(
        2, ["run", "tiny", *tiny_run.keys(data, tmp_path / "whole", **changes)], tmp_path / "logs"
    )
    out = tmp_path / "run"
    words = ["run", "--or-resume", "tiny", *tiny_run.keys(data, out, **changes)]
    killed = 0
    for n, target in enumerate(sorted(rng.uniform(-1, 38) for _ in range(10))):
        logs = tmp_path / f"logs-{n}"
        processes = team_run.start(2, words, logs)
        deadline = time.monotonic() + 100
        while all(process.is_alive() for process in processes) and time.monotonic() < deadline:
            if max((line["step"] for line in read_metrics(out)), default=0) >= target:
                break
            time.sleep(0.002)
        victim = rng.choice(processes)
        victim.join(rng.uniform(0, 0.2))
        victim.kill()
        victim.join(10)
        killed += victim.exitcode == -signal.SIGKILL
        # the other process must notice; if it was still joining it is ended, as torchrun does
        for process in processes:
            process.join(20)
            process.kill()
            process.join(10)
            assert process.exitcode in (0, 2, -signal.SIGKILL), team_run.read_logs(logs)
    assert killed >= 8
    team_run.train(2, words, tmp_path / "last")
    assert final_state(out) == final_state(tmp_path / "whole")
