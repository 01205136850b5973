"""make measure, without a GPU: what fails is named and passed over, and all other lines are written."""

import json
import os

import pytest

pytest.importorskip("triton", reason="the triton extra is not installed")

from delta_trn.backends.parity import channel_cases, layer_cases, rule_cases
from tests.support.emulator import driver
from tools import measure_gpu

THROUGH = "tests.support.emulated"


@pytest.fixture
def emulated(monkeypatch):
    """Lets the processes that a test starts compile kernels, which the emulator runs."""
    if driver.library().functions is None:
        pytest.skip(f"{driver.library().note}: no emulator")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.timeout(900)
def test_one_kernel_that_does_not_launch_costs_its_own_case_alone(
    emulated, monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(measure_gpu, "HEADLINE", ("kimi_8192", "paper_512"))
    monkeypatch.setattr(measure_gpu, "DRY_LIMIT_S", 600)
    groups = [("channels", ["kimi_hopper"]), ("rule", ["seam_65"])]
    monkeypatch.setattr(measure_gpu, "groups", lambda: groups)
    monkeypatch.setenv(
        "DELTA_TRN_FAILING_KERNEL", "kimi_delta_attention.gradients_hopper.gradients_kernel"
    )
    steps = ["headline", "parity"]
    assert measure_gpu.main([*steps, "--out", str(tmp_path), "--dry", THROUGH]) == 1
    failed, *timed = sorted(lines(tmp_path / "data.jsonl"), key=lambda line: line["case"])
    assert (failed["case"], failed["pass"]) == ("kimi_8192", None)
    assert failed["failed"].startswith("OutOfResources: out of resource: shared memory")
    passes = {line["pass"] for line in timed if "ms" in line}
    assert passes == {"forward", "backward", "forward+backward"}
    dropped = [line for line in timed if "failed" in line]
    assert {line["pass"] for line in dropped} == {f"{name} (graph)" for name in passes}
    assert all("not captured: " in line["failed"] for line in dropped)
    assert {line["case"] for line in timed} == {"paper_512"} and all(x["small"] for x in timed)
    judged = lines(tmp_path / "parity.jsonl")
    (ended,) = [line for line in judged if "failed" in line]
    assert ended["case"] == "kimi_hopper" and not ended["passed"]
    assert all(line["passed"] for line in judged if line["case"] == "seam_65")
    tensors = {line["tensor"] for line in judged if line["case"] == "seam_65"}
    assert tensors == {"o", "final_state", "dq", "dk", "dv", "dg", "dbeta", "dh0"}
    jobs = {line["name"]: line for line in lines(tmp_path / "measure.jsonl")}
    assert {name: line["status"] for name, line in jobs.items()} == {
        "kimi_8192": 1,
        "paper_512": 0,
        "channels": 1,
        "rule": 0,
    }
    assert "headline kimi_8192, parity channels" in capsys.readouterr().out


def test_nothing_else_is_tried_where_no_kernel_can_be_launched(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    before = dict(os.environ)
    assert measure_gpu.main(["machine", "headline", "--out", str(tmp_path)]) == 2
    assert [line["step"] for line in lines(tmp_path / "measure.jsonl")] == ["machine"]
    assert dict(os.environ) == before, "what follows in this process has another environment"
    output = capsys.readouterr().out
    assert "MISSING: torch" in output and "with its remedy" in output


def test_a_process_that_does_not_end_is_stopped_and_named(tmp_path, monkeypatch):
    monkeypatch.setattr(measure_gpu, "LIMIT_S", 1)
    m = measure_gpu.Measurement(tmp_path, None)
    assert m.run(
        [measure_gpu.Job("headline", "slow", ("timeit", "-n1", "import time; time.sleep(9)"))]
    )
    (line,) = lines(tmp_path / "measure.jsonl")
    assert line["status"] == 124 and m.failed == ["headline slow"]


def test_every_case_of_parity_is_judged_once_and_hoppers_come_first():
    names = [name for _, some in measure_gpu.groups() for name in some]
    every = {**rule_cases.BY_NAME, **channel_cases.BY_NAME}
    quick = {name for name, case in every.items() if "slow" not in case.tags}
    quick |= {*rule_cases.STEPS, *channel_cases.STEPS, *layer_cases.BY_NAME}
    assert len(names) == len(set(names)) and set(names) == quick
    assert names[0] == "hopper_2" and names.index("packed") < names.index("one")
    assert {*measure_gpu.HEADLINE} == {n for n, x in every.items() if "headline" in x.tags}
