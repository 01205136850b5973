"""No time without a green parity; contenders take turns; what was not run says so."""

import json
from dataclasses import replace

import pytest
import torch
from faults import FAULTS

from backends import bench, chunked, device
from backends.bench import Spread, interleaved, prepared
from backends.cases import BY_NAME, inputs, select
from backends.peers import PEERS

CPU = torch.device("cpu")


@pytest.fixture
def unmeasured_memory(monkeypatch):
    """Its two fresh processes take seconds, and have a test of their own."""
    monkeypatch.setattr(bench, "memory", lambda name, case, dtype, device: 1024)


@pytest.fixture
def few_rounds(monkeypatch):
    monkeypatch.setattr(bench, "ROUNDS", (3, 3))


def test_a_case_is_timed_beside_its_peer(tmp_path, capsys, unmeasured_memory, few_rounds):
    file = tmp_path / "bench.jsonl"
    assert bench.main(["--backend", "chunked", "--case", "ragged", "--json", str(file)]) == 0
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    passes = {(row["backend"], row["pass"]) for row in rows}
    assert passes == {(name, phase) for name in ("chunked", "hf") for phase in bench.PASSES}
    for row in rows:
        assert 0 < row["ms"]["p20"] <= row["ms"]["p50"] <= row["ms"]["p80"] and row["rounds"] == 3
        assert (row["ratio"] is None) == (row["backend"] == "chunked")
        assert (row["worst_error"] is None) == (row["backend"] == "hf")
        assert row["dtype"] == "float32" and {"torch", "threads", "device", "commit", "dirty"} <= set(row)
        assert (row["memory_bytes"] is None) == (row["pass"] != "forward+backward")
    said = capsys.readouterr().out
    assert "peer fla: not yet run, " in said and "forward+backward float32" in said


def test_no_time_without_a_green_parity(tmp_path, capsys, monkeypatch, unmeasured_memory, few_rounds):
    fault = FAULTS["masked after exp"]
    monkeypatch.setattr(chunked, fault.function, fault.mistake)
    file = tmp_path / "bench.jsonl"
    assert bench.main(["--backend", "chunked", "--case", fault.case, "--json", str(file)]) == 1
    said = capsys.readouterr().out
    assert f"{fault.case} is not timed, its parity is red" in said and "not yet run" in said
    assert file.read_text() == ""


def test_what_is_asked_for_and_not_there_is_an_error(capsys):
    assert bench.main(["--case", "nope"]) == 2
    assert "no case is named 'nope'" in capsys.readouterr().err
    assert bench.main(["--backend", "nope"]) == 2
    assert "no backend is named 'nope'" in capsys.readouterr().err


def test_contenders_take_turns_after_a_warm_up(few_rounds):
    order = []
    times = interleaved({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, CPU, seconds=0.0)
    assert order == ["a", "b"] * 4
    assert {name: len(found) for name, found in times.items()} == {"a": 3, "b": 3}


def test_a_pass_does_what_its_name_says():
    calls = []
    given = inputs(BY_NAME["ragged"], torch.float32)

    def run(x):
        calls.append("forward")
        y = x.v * 1.0 + 0.0 * (x.q.sum() + x.k.sum() + x.g.sum() + x.beta.sum())
        y.register_hook(lambda grad: calls.append("backward"))
        return y

    for phase, expected in {
        "forward": ["forward"],
        "backward": ["backward"],
        "forward+backward": ["forward", "backward"],
    }.items():
        call = prepared(run, given, phase)
        calls.clear()
        call()
        assert calls == expected


def test_spread():
    spread = Spread.of([float(x) for x in range(1, 102)])
    assert (spread.p20, spread.p50, spread.p80) == (21.0, 51.0, 81.0)


def test_peers_compute_the_same_thing():
    """Else their times would compare nothing."""
    for name in ("ragged", "gva_8", "gates"):
        given = inputs(BY_NAME[name], torch.float32)
        ours = bench.contender("chunked")(given)
        torch.testing.assert_close(PEERS["hf"].run()(given), ours, rtol=1e-4, atol=1e-5)


def test_absent_peers_say_why(monkeypatch):
    assert PEERS["hf"].absent("cpu") is None
    assert PEERS["hf"].absent("xla") == "runs on cpu, cuda, not on xla"
    missing = replace(PEERS["fla"], module="no_such_package")
    assert (
        missing.absent("cuda")
        == "flash-linear-attention is not installed: pip install flash-linear-attention"
    )


@pytest.mark.serial
def test_memory_is_what_a_pass_takes():
    """T = 2048, H = 1, K = V = 128: q, k, v and their gradients alone are 6 MiB."""
    case = BY_NAME["long"]
    ours = bench.memory("chunked", case, torch.float32, CPU)
    theirs = bench.memory("hf", case, torch.float32, CPU)
    assert 6 * 2**20 < ours < 400 * 2**20
    assert 6 * 2**20 < theirs < 400 * 2**20
    assert device.peak_memory(CPU) > ours


@pytest.mark.parametrize("tag, some", [("bench", "paper_1024"), ("bench-cpu", "cpu_train")])
def test_there_is_something_to_time_without_naming_it(tag, some):
    """Timed cases are slow ones, which asking for them by tag must not lose."""
    assert some in [case.name for case in select(tags=frozenset({tag}))]
