"""bench times nothing whose parity fails, gives contenders alternate turns,
and says what it did not run.
"""

import contextlib
import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from delta_trn.backends import machine
from delta_trn.backends.bench import __main__ as bench
from delta_trn.backends.bench import roofline, timing
from delta_trn.backends.bench.peers import PEERS, computed_by, name_backends
from delta_trn.backends.bench.roofline import Ceilings, Work, ceilings, work
from delta_trn.backends.bench.timing import time_in_turns
from delta_trn.backends.gated_delta_rule.chunked import note
from delta_trn.backends.parity import channel_cases, rule
from delta_trn.backends.parity.rule_cases import BY_NAME, inputs
from tests.support import planted_bugs
from tests.support.tiny_models import assert_same

CPU = torch.device("cpu")


@pytest.fixture
def quick(monkeypatch):
    """Times three rounds, and does not measure memory,
    which takes seconds and has a test of its own.
    """
    monkeypatch.setattr(timing, "ROUNDS", (3, 3))
    monkeypatch.setattr(bench, "memory", lambda name, case, dtype, device: 1024)


def run(case, file, *options):
    """Returns the exit status and the lines of the file."""
    status = bench.main(["--backend", "chunked", "--case", case, "--json", str(file), *options])
    return status, [json.loads(line) for line in file.read_text().splitlines()]


def test_a_case_of_the_rule_is_timed_beside_its_peer(tmp_path, capsys, monkeypatch, quick):
    """With ceilings that no pass beats, however busy the machine is."""
    monkeypatch.setattr(bench, "ceilings", lambda device, dtype: Ceilings(1e15, {2**21: 1e13}))
    status, rows = run("ragged", tmp_path / "bench.jsonl")
    assert status == 0
    passes = {(row["backend"], row["pass"]) for row in rows}
    assert passes == {(name, phase) for name in ("chunked", "hf") for phase in bench.figures.PASSES}
    for row in rows:
        assert 0 < row["ms"]["p20"] <= row["ms"]["p50"] <= row["ms"]["p80"] and row["rounds"] == 3
        assert (row["ratio"] is None) == (row["backend"] == "chunked")
        assert (row["worst_error"] is None) == (row["backend"] == "hf")
        assert row["dtype"] == "float32" and {
            "torch",
            "threads",
            "device",
            "commit",
            "dirty",
        } <= set(row)
        assert (row["memory_bytes"] is None) == (row["pass"] != "forward+backward")
        assert row["backend"] == "hf" or 0 < row["floor_ms"] < row["ms"]["p50"]
        assert row["flops_per_s"] > 1e8 and row["bytes_per_s"] > 1e8
    output = capsys.readouterr().out
    assert "peer fla: not yet run, " in output and "times ours" in output
    assert output.startswith(f"chunked ({note()}) on ")


def test_what_flash_linear_attention_hands_its_calls_to_is_named(monkeypatch):
    """Its release 0.6.0 notes every function that another backend than Triton has computed,
    or refused.
    """
    assert name_backends() == "Triton"
    notes = {
        "gated_delta_rule:chunk_gated_delta_rule:flash_qla",
        "common:chunk_bwd_dqkwg:tilelang:fail",
    }
    registry = SimpleNamespace(_logged=notes)
    fla = SimpleNamespace(
        _operation_registries={"gated_delta_rule": registry}, _function_registries={}
    )
    monkeypatch.setitem(sys.modules, "fla.backends", fla)
    assert name_backends() == "chunk_gated_delta_rule by flash_qla"


def test_which_kernel_of_ours_prepares_a_case_is_named(monkeypatch):
    pytest.importorskip("triton", reason="the triton extra is not installed")
    from delta_trn.triton_kernels.kimi_delta_attention import prepare_hopper

    monkeypatch.setattr(prepare_hopper, "compiles", lambda config: True)
    case = channel_cases.BY_NAME["kimi_safe"]
    bounded = replace(case, decay="plain", gates="plain", lower_bound=-5.0)
    for changed, words in (
        (case, "prepare in Gluon"),
        (bounded, "prepare in Gluon"),
        (replace(bounded, lower_bound=None), "plain prepare: decay unbounded"),
        (replace(bounded, norm="unit"), "plain prepare: Gluon's takes normalized keys"),
    ):
        assert computed_by("triton", inputs(changed, torch.bfloat16)).startswith(words)
    assert computed_by("chunked", inputs(case, torch.bfloat16)) is None
    monkeypatch.undo()
    x = inputs(case, torch.float32)
    assert computed_by("triton", x) == "plain prepare: Gluon's is of Hopper, in 16 bits"


def test_packed_sequences_are_timed_beside_one_of_as_many_tokens(tmp_path, monkeypatch, quick):
    monkeypatch.setattr(bench, "ceilings", lambda device, dtype: Ceilings(1e15, {2**21: 1e13}))
    status, rows = run("packed", tmp_path / "bench.jsonl")
    assert status == 0 and [row["ratio"] is None for row in rows] == [True, False] * 3
    assert [row["backend"] for row in rows] == ["chunked", "chunked in one"] * 3


def test_a_step_is_timed_beside_its_peer_and_a_floor_above_its_time_is_refused(
    tmp_path, capsys, monkeypatch, quick
):
    """Ceilings of 1000 operations and bytes per second are planted, which any pass beats."""
    monkeypatch.setattr(
        bench, "ceilings", lambda device, dtype: Ceilings(1e3, {2**21: 1e3, 2**28: 1e3})
    )
    status, (ours, theirs) = run("step_paper_512", tmp_path / "bench.jsonl", "--peer", "hf")
    assert status == 1
    assert [(x["op"], x["pass"], x["backend"]) for x in (ours, theirs)] == [
        ("gated_delta_rule_step", "step", "chunked"),
        ("gated_delta_rule_step", "step", "hf"),
    ]
    assert theirs["ratio"]["p50"] > 0 and ours["memory_bytes"] is None and ours["ms"]["p50"] > 0
    assert ours["floor_ms"] is None and ours["flops_per_s"] == 1e3
    output = capsys.readouterr().out
    assert (
        "no floor: step_paper_512, step took" in output
        and "run this again when it is idle" in output
    )


def test_a_wrong_step_is_not_timed(monkeypatch, capsys, tmp_path):
    ours = rule.gated_delta_rule_step

    def late(q, k, v, g, beta, *, state, **named):
        o, _ = ours(q, k, v, g, beta, state=state, **named)
        return o, state

    monkeypatch.setattr(rule, "gated_delta_rule_step", late)
    status, (line,) = run("step_paper_512", tmp_path / "bench.jsonl")
    assert status == 1 and line["pass"] is None and "its parity is red" in line["failed"]
    output = capsys.readouterr().out
    assert (
        "step_paper_512 is not timed, its parity is red" in output
        and " final_state: error" in output
    )


def test_a_case_whose_parity_fails_is_not_timed(tmp_path, capsys, quick, without_cpu_kernel):
    with planted_bugs.planted(planted_bugs.BY_NAME["chunked: decays are masked after exp"]):
        status, (line,) = run("heavy", tmp_path / "bench.jsonl")
    assert status == 1 and "its parity is red" in line["failed"] and "ms" not in line
    assert "heavy is not timed, its parity is red" in capsys.readouterr().out


def test_a_case_that_raises_is_named_and_the_others_are_timed(tmp_path, capsys, monkeypatch, quick):
    judge = bench.judge

    def fail(subject, case, dtype):
        if case.name == "ragged":
            raise RuntimeError("out of resource: shared memory")
        return judge(subject, case, dtype)

    monkeypatch.setattr(bench, "judge", fail)
    monkeypatch.setattr(bench, "ceilings", lambda device, dtype: Ceilings(1e15, {2**21: 1e13}))
    file = tmp_path / "bench.jsonl"
    status, lines = run("ragged", file, "--case", "overwrite", "--peer", "hf")
    assert status == 1 and (lines[0]["case"], lines[0]["pass"]) == ("ragged", None)
    assert lines[0]["failed"] == "RuntimeError: out of resource: shared memory"
    assert [line["case"] for line in lines[1:]] == ["overwrite"] * len(bench.figures.PASSES) * 2
    assert all(line["ms"]["p50"] > 0 for line in lines[1:])
    assert "ragged" in capsys.readouterr().out
    assert {line["case"] for line in bench.figures.read([file])} == {"overwrite"}


def test_small_cases_are_never_taken_for_measurements(tmp_path, monkeypatch, quick):
    monkeypatch.setattr(bench, "ceilings", lambda device, dtype: Ceilings(1e15, {2**21: 1e13}))
    for name in ("ROUNDS", "CACHE_BYTES"):
        monkeypatch.setattr(timing, name, getattr(timing, name))
    for name in ("PRODUCT", "COPY_BYTES"):
        monkeypatch.setattr(roofline, name, dict(getattr(roofline, name)))
    file = tmp_path / "bench.jsonl"
    status, lines = run("qwen3_packed", file, "--small", "--peer", "fla")
    assert status == 0 and all(line["small"] for line in lines) and lines
    assert bench.figures.read([file]) == []
    cut = bench.smaller(BY_NAME["qwen3_packed"])
    assert (cut.B, cut.T, cut.H, cut.HV, cut.K) == (1, 36, 1, 2, 128)


class _Cuda:
    """torch.cuda of a device whose default stream no graph may take in, as CUDA's rules are."""

    def __init__(self):
        self.now, self.captures = "default", None

    def Stream(self):
        return SimpleNamespace(wait_stream=lambda other: None, name="side")

    def current_stream(self):
        return SimpleNamespace(wait_stream=lambda other: None, name=self.now)

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.now = self.now, stream.name
        yield
        self.now = before

    def CUDAGraph(self):
        return SimpleNamespace(replay=lambda: None)

    @contextlib.contextmanager
    def graph(self, graph, stream=None):
        self.captures = "other" if stream is None else stream.name
        with self.stream(SimpleNamespace(name=self.captures)):
            yield
        self.captures = None

    def synchronize(self):
        pass


def test_a_backward_pass_is_captured_on_the_stream_of_its_forward_pass(monkeypatch):
    """Autograd runs a backward operation where its forward operation ran."""
    cuda = _Cuda()
    monkeypatch.setattr(timing.torch, "cuda", cuda)

    def make():
        forward_ran_on = cuda.now

        def backward():
            if cuda.captures and forward_ran_on != cuda.captures:
                raise RuntimeError("operation would make the legacy stream depend on a capture")

        return backward

    def waits():
        def call():
            if cuda.captures:
                raise RuntimeError("operation not permitted when stream is capturing\nmore")

        return call

    calls = timing.modes({"ours": make, "peer": waits}, torch.device("cuda"))[" (graph)"]
    assert callable(calls["ours"])
    assert calls["peer"] == "operation not permitted when stream is capturing"


def test_the_peers_outputs_and_step_equal_ours():
    for name in ("ragged", "gva_8", "gates"):
        x = inputs(BY_NAME[name], torch.float32)
        assert_same(PEERS["hf"].run()(x), bench.contender("chunked")(x))
    x = inputs(BY_NAME["step_qwen3_next"], torch.float32)
    for ours, theirs in zip(
        bench.step_call("chunked", x)(), bench.step_call("hf", x)(), strict=True
    ):
        assert_same(theirs, ours)


@pytest.mark.skipif(
    bool(PEERS["hf"].absent("cpu", True)), reason="this transformers has no Kimi Linear"
)
@pytest.mark.parametrize("name", ["kimi_ragged", "kimi_gva", "kimi_gates", "kimi_bound"])
def test_the_peers_kimi_delta_attention_equals_ours(name):
    x = inputs(channel_cases.BY_NAME[name], torch.float32)
    assert_same(PEERS["hf"].run()(x), bench.contender("chunked")(x))


def test_an_absent_peer_says_why():
    old = replace(PEERS["hf"], channels_module="transformers.models.of_tomorrow").absent(
        "cpu", True
    )
    assert "has no transformers.models.of_tomorrow: pip install --upgrade transformers" in old
    assert PEERS["hf"].absent("cpu") is None
    assert PEERS["hf"].absent("xla") == "runs on cpu, cuda, not on xla"
    missing = replace(PEERS["fla"], module="no_such_package").absent("cuda")
    assert missing == "flash-linear-attention is not installed: pip install flash-linear-attention"


def test_unknown_cases_and_backends_are_refused_by_name(capsys):
    assert bench.main(["--case", "nope"]) == 2
    assert "no case is named 'nope'" in capsys.readouterr().err
    assert bench.main(["--case", "three"]) == 2
    assert "three starts from a state" in capsys.readouterr().err
    assert bench.main(["--backend", "nope"]) == 2
    assert "no backend is named 'nope'" in capsys.readouterr().err


def test_floors_agree_with_the_published_counts():
    """For d = 1024, B = 30, T = 1024: 54.9 GFLOP and 285 MB forward,
    163 GFLOP backward with its rescan.
    """
    case = BY_NAME["paper_1024"]
    least = work(case, torch.bfloat16)
    assert least["forward"].flops == pytest.approx(54.9e9, rel=2e-3)
    # gates have six bytes here, eight in the published count
    assert least["forward"].bytes + 2 * 30 * 1024 * 6 == pytest.approx(285e6, rel=2e-3)
    again = 30 * 1024 * 6 * (4 * case.K * case.V + 2 * 64 * case.V)
    assert least["backward"].flops + again == pytest.approx(163e9, rel=2e-3)
    assert least["forward+backward"] == least["forward"] + least["backward"]
    grouped = work(BY_NAME["qwen3_next"], torch.bfloat16)["forward"]
    assert grouped.flops == pytest.approx(39e9, rel=0.01) and grouped.bytes == pytest.approx(
        203e6, rel=0.02
    )
    step = BY_NAME["step_qwen3_64"]
    assert work(step, torch.bfloat16)["step"].bytes == pytest.approx(
        8 * 64 * 32 * 128 * 128, rel=0.01
    )


def test_a_floor_is_the_longer_time_and_that_of_little_data_is_a_copy_in_the_cache():
    limits = Ceilings(flops_per_s=1e12, copies={2**20: 8e9, 2**30: 1e9})
    assert limits.floor_ms(Work(2e9, 8e6)) == 2.0 and limits.floor_ms(Work(1e9, 4e7)) == 5.0
    assert [limits.bytes_per_s(Work(1, size)) for size in (1e3, 1e8, 2e9)] == [8e9, 8e9, 1e9]


def test_ceilings_of_this_machine_are_plausible(monkeypatch):
    monkeypatch.setattr(roofline, "PRODUCT", {"cpu": 256})
    monkeypatch.setattr(roofline, "COPY_BYTES", {"cpu": (2**20, 2**22)})
    limits = ceilings(CPU, torch.float32, seconds=0.01)
    assert 1e8 < limits.flops_per_s < 1e14 and list(limits.copies) == [2**21, 2**23]
    assert all(1e8 < rate < 1e13 for rate in limits.copies.values())


def test_contenders_take_turns_after_a_warm_up(quick):
    order = []
    times = time_in_turns(
        {"a": lambda: order.append("a"), "b": lambda: order.append("b")}, CPU, seconds=0.0
    )
    assert order == ["a", "b"] * 4
    assert {name: len(rounds) for name, rounds in times.items()} == {"a": 3, "b": 3}


def test_a_timed_pass_runs_forward_backward_or_both():
    calls = []

    def run(x):
        calls.append("forward")
        y = x.v * 1.0 + 0.0 * (x.q.sum() + x.k.sum() + x.g.sum() + x.beta.sum())
        y.register_hook(lambda gradient: calls.append("backward"))
        return y

    for phase in bench.figures.PASSES:
        call = bench.pass_call(run, inputs(BY_NAME["ragged"], torch.float32), phase)
        calls.clear()
        call()
        assert calls == phase.split("+")


def test_memory_of_a_pass_is_measured_in_a_fresh_process():
    """T = 2048, H = 1, K = V = 128: q, k, v and their gradients alone are 6 MiB."""
    ours = bench.memory("chunked", BY_NAME["long"], torch.float32, CPU)
    assert 6 * 2**20 < ours < 400 * 2**20 and machine.peak_memory(CPU) > ours


def test_the_table_has_ratios_of_all_runs_and_the_floor_as_a_share_of_our_time(tmp_path, capsys):
    about = {
        "case": "cpu_train",
        "pass": "forward",
        "device": "CPU",
        "device_type": "cpu",
        "threads": 2,
    }
    files = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    for file, ms in zip(files, (4.0, 5.0), strict=True):
        ours = {**about, "backend": "chunked", "ms": {"p50": ms}, "ratio": None, "floor_ms": 1.0}
        theirs = {**about, "backend": "hf", "ratio": {"p50": 20 / ms}, "floor_ms": None}
        file.write_text(f"{json.dumps(ours)}\n{json.dumps(theirs)}\n")
    assert bench.main(["table", *map(str, files)]) == 0
    lines = capsys.readouterr().out.splitlines()
    (row,) = [line for line in lines if line.startswith("| cpu_train")]
    assert row.split(" | ")[1:] == ["forward 4.00 to 5.00 (25%) |"]
    assert "hf over ours: CPU, 2 threads" in lines[0] and "fla" not in lines[0]
    assert sum(line.startswith("|") for line in lines) == 3  # what was not measured has no line
    assert lines[-1] == "Not yet run: `triton` beside fla on cuda."
