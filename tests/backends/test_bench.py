"""bench times nothing whose parity fails, gives contenders alternate turns, and says what it did not run."""

import json
from dataclasses import replace

import pytest
import torch

from delta_trn.backends import machine
from delta_trn.backends.bench import __main__ as bench
from delta_trn.backends.bench import roofline, step, timing
from delta_trn.backends.bench.__main__ import pass_call
from delta_trn.backends.bench.peers import PEERS
from delta_trn.backends.bench.roofline import Ceilings, ceilings, work
from delta_trn.backends.bench.timing import Spread, interleaved
from delta_trn.backends.gated_delta_rule import chunked
from delta_trn.backends.parity.rule_cases import BY_NAME, inputs, select
from tests.support.faults import FAULTS
from tests.support.tiny_models import assert_same

CPU = torch.device("cpu")


@pytest.fixture
def unmeasured_memory(monkeypatch):
    """Replaces the measurement of memory, which takes seconds and has a test of its own."""
    monkeypatch.setattr(bench, "memory", lambda name, case, dtype, device: 1024)


@pytest.fixture
def few_rounds(monkeypatch):
    monkeypatch.setattr(timing, "ROUNDS", (3, 3))


@pytest.mark.serial
def test_a_case_of_the_rule_is_timed_beside_its_peer(tmp_path, capsys, unmeasured_memory, few_rounds):
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
        assert row["backend"] == "hf" or 0 < row["floor_ms"] < row["ms"]["p50"]
        assert row["flops_per_s"] > 1e8 and row["bytes_per_s"] > 1e8
    output = capsys.readouterr().out
    assert "peer fla: not yet run, " in output and "forward+backward float32" in output


def test_a_step_is_timed_beside_its_peer(tmp_path, few_rounds):
    file = tmp_path / "bench.jsonl"
    assert bench.main(["--backend", "chunked", "--case", "step_paper_512", "--json", str(file)]) == 0
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(row["op"], row["pass"], row["backend"]) for row in rows] == [
        ("gated_delta_rule_step", "step", "chunked"),
        ("gated_delta_rule_step", "step", "hf"),
    ]
    assert rows[1]["ratio"]["p50"] > 0 and rows[0]["memory_bytes"] is None


def test_a_wrong_step_is_not_timed(monkeypatch, capsys):
    ours = step.gated_delta_rule_step

    def late(q, k, v, g, beta, state, *, backend, **named):
        o, new = ours(q, k, v, g, beta, state, backend=backend, **named)
        return (o, new) if backend == "recurrent" else (o, state)

    monkeypatch.setattr(step, "gated_delta_rule_step", late)
    assert bench.main(["--backend", "chunked", "--case", "step_paper_512"]) == 1
    output = capsys.readouterr().out
    assert "step_paper_512 is not timed, its parity is red" in output and " state: error" in output


def test_the_peers_step_equals_ours():
    x = inputs(BY_NAME["step_qwen3_next"], torch.float32)
    for ours, theirs in zip(step.ours("chunked", x)(), PEERS["hf"].step()(x), strict=True):
        assert_same(theirs, ours)


COPIES = (2**21, 2**23, 2**25, 2**28)


def test_a_floor_above_the_time_is_refused(tmp_path, capsys, monkeypatch, few_rounds):
    """Ceilings of 1000 operations and bytes per second are planted, which any pass beats."""
    monkeypatch.setattr(bench, "ceilings", lambda device, dtype: Ceilings(1e3, dict.fromkeys(COPIES, 1e3)))
    file = tmp_path / "bench.jsonl"
    arguments = ["--backend", "chunked", "--case", "step_paper_512", "--peer", "hf", "--json", str(file)]
    assert bench.main(arguments) == 1
    output = " ".join(capsys.readouterr().out.split())
    assert "no floor: step_paper_512, step took" in output and "run this again when it is idle" in output
    row = json.loads(file.read_text().splitlines()[0])
    assert row["floor_ms"] is None and row["flops_per_s"] == 1e3 and row["ms"]["p50"] > 0


def test_a_beaten_floor_takes_no_other_with_it():
    spread = Spread(1.0, 1.0, 1.0)
    timings = [
        bench.Timing(case, "float32", phase, "chunked", spread, None, 3, floor, None, 0.1)
        for case, phase, floor in (("cpu_train", "forward", 2.0), ("step_paper_512", "step", 0.5))
    ]
    rows, messages = bench.without_beaten_floors(timings)
    assert [row.floor_ms for row in rows] == [None, 0.5] and len(messages) == 1


def test_floors_agree_with_the_published_counts():
    """For d = 1024, B = 30, T = 1024: 54.9 GFLOP and 285 MB forward, 163 GFLOP backward with its rescan."""
    case = BY_NAME["paper_1024"]
    least = work(case, torch.bfloat16)
    assert least["forward"].flops == pytest.approx(54.9e9, rel=2e-3)
    # gates have six bytes here, eight in the published count
    assert least["forward"].bytes + 2 * 30 * 1024 * 6 == pytest.approx(285e6, rel=2e-3)
    again = 30 * 1024 * 6 * (4 * case.K * case.V + 2 * 64 * case.V)
    assert least["backward"].flops + again == pytest.approx(163e9, rel=2e-3)
    assert least["forward+backward"] == least["forward"] + least["backward"]
    grouped = work(BY_NAME["qwen3_next"], torch.bfloat16)["forward"]
    assert grouped.flops == pytest.approx(39e9, rel=0.01) and grouped.bytes == pytest.approx(203e6, rel=0.02)
    step = BY_NAME["step_qwen3_64"]
    assert work(step, torch.bfloat16)["step"].bytes == pytest.approx(8 * 64 * 32 * 128 * 128, rel=0.01)


def test_a_floor_is_the_longer_of_the_times_for_operations_and_bytes():
    limits = Ceilings(flops_per_s=1e12, copies={2**20: 1e9})
    assert limits.floor_ms(roofline.Work(2e9, 1e6)) == 2.0
    assert limits.floor_ms(roofline.Work(1e9, 5e6)) == 5.0


def test_the_floor_of_little_data_is_that_of_a_copy_in_the_cache():
    limits = Ceilings(1e15, {2**20: 8e9, 2**30: 1e9})
    assert limits.floor_ms(roofline.Work(1, 1e3)) == pytest.approx(1e3 / 8e6)
    assert limits.floor_ms(roofline.Work(1, 1e8)) == pytest.approx(1e8 / 8e6)
    assert limits.floor_ms(roofline.Work(1, 2e9)) == pytest.approx(2e9 / 1e6)
    assert [limits.facts(roofline.Work(1, size))["bytes_per_s"] for size in (1e8, 2e9)] == [8e9, 1e9]


def test_ceilings_of_this_machine_are_plausible(monkeypatch):
    monkeypatch.setattr(roofline, "PRODUCT", {"cpu": 256})
    monkeypatch.setattr(roofline, "COPY_BYTES", {"cpu": (2**20, 2**22)})
    limits = ceilings(CPU, torch.float32, seconds=0.01)
    assert 1e8 < limits.flops_per_s < 1e14 and list(limits.copies) == [2**21, 2**23]
    assert all(1e8 < rate < 1e13 for rate in limits.copies.values())


def test_a_case_whose_parity_fails_is_not_timed(
    tmp_path, capsys, monkeypatch, unmeasured_memory, few_rounds, without_cpu_kernel
):
    fault = FAULTS["masked after exp"]
    monkeypatch.setattr(chunked, fault.function, fault.mistake)
    file = tmp_path / "bench.jsonl"
    assert bench.main(["--backend", "chunked", "--case", fault.case, "--json", str(file)]) == 1
    output = capsys.readouterr().out
    assert f"{fault.case} is not timed, its parity is red" in output and "not yet run" in output
    assert file.read_text() == ""


def test_unknown_cases_and_backends_are_refused_by_name(capsys):
    assert bench.main(["--case", "nope"]) == 2
    assert "no case is named 'nope'" in capsys.readouterr().err
    assert bench.main(["--backend", "nope"]) == 2
    assert "no backend is named 'nope'" in capsys.readouterr().err


def test_contenders_take_turns_after_a_warm_up(few_rounds):
    order = []
    times = interleaved({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, CPU, seconds=0.0)
    assert order == ["a", "b"] * 4
    assert {name: len(rounds) for name, rounds in times.items()} == {"a": 3, "b": 3}


def test_a_timed_pass_runs_forward_backward_or_both():
    calls = []
    x = inputs(BY_NAME["ragged"], torch.float32)

    def run(x):
        calls.append("forward")
        y = x.v * 1.0 + 0.0 * (x.q.sum() + x.k.sum() + x.g.sum() + x.beta.sum())
        y.register_hook(lambda gradient: calls.append("backward"))
        return y

    for phase, expected in {
        "forward": ["forward"],
        "backward": ["backward"],
        "forward+backward": ["forward", "backward"],
    }.items():
        call = pass_call(run, x, phase)
        calls.clear()
        call()
        assert calls == expected


def test_a_spread_of_times_has_the_median_and_two_percentiles():
    spread = Spread.of([float(x) for x in range(1, 102)])
    assert (spread.p20, spread.p50, spread.p80) == (21.0, 51.0, 81.0)


def test_the_peers_outputs_equal_ours():
    for name in ("ragged", "gva_8", "gates"):
        x = inputs(BY_NAME[name], torch.float32)
        assert_same(PEERS["hf"].run()(x), bench.contender("chunked")(x))


def test_an_absent_peer_says_why(monkeypatch):
    assert PEERS["hf"].absent("cpu") is None
    assert PEERS["hf"].absent("xla") == "runs on cpu, cuda, not on xla"
    missing = replace(PEERS["fla"], module="no_such_package")
    assert (
        missing.absent("cuda")
        == "flash-linear-attention is not installed: pip install flash-linear-attention"
    )


@pytest.mark.serial
def test_memory_of_a_pass_is_measured_in_a_fresh_process():
    """T = 2048, H = 1, K = V = 128: q, k, v and their gradients alone are 6 MiB."""
    case = BY_NAME["long"]
    ours = bench.memory("chunked", case, torch.float32, CPU)
    theirs = bench.memory("hf", case, torch.float32, CPU)
    assert 6 * 2**20 < ours < 400 * 2**20
    assert 6 * 2**20 < theirs < 400 * 2**20
    assert machine.peak_memory(CPU) > ours


@pytest.mark.parametrize("tag, name", [("bench", "paper_1024"), ("bench-cpu", "cpu_train")])
def test_selecting_timed_cases_by_tag_includes_slow_ones(tag, name):
    assert name in [case.name for case in select(tags=frozenset({tag}))]


def _line(backend, phase, ms, **changes):
    line = {"case": "cpu_train", "pass": phase, "backend": backend, "device": "CPU", "device_type": "cpu"}
    line |= {"threads": 2, "ms": {"p50": ms}, "ratio": None, "floor_ms": None}
    return line | changes


@pytest.fixture
def measured(tmp_path):
    """Returns files of an older state, of 8 and 10 ms, and of one that takes 4 ms and has a floor of 1 ms."""
    files = {"before.jsonl": (8.0, None), "before.2.jsonl": (10.0, 5.0), "data.jsonl": (4.0, 1.0)}
    for name, (ms, floor) in files.items():
        lines = [_line("chunked", "forward", ms, floor_ms=floor), _line("hf", "forward", 20.0)]
        lines[1]["ratio"] = {"p50": 20.0 / ms}
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return [tmp_path / name for name in files]


def test_the_table_shows_both_states_against_the_floor_of_the_new_one(measured, capsys):
    assert bench.main(["table", *map(str, measured)]) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| cpu_train")]
    assert row.split(" | ")[1:] == ["forward 2.00 to 2.50 (12%)", "forward 5.00 (25%)", "not yet run |"]
