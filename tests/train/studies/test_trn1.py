"""The first hour on a Trn1, without one: every stage runs, and the rate is decided rightly."""

import json

import pytest

from delta_trn.backends.bench import trn1_adapter as kernels
from delta_trn.nki_kernels.simulator import TARGETS
from delta_trn.nki_kernels.simulator.core.tables import LOAD_US
from delta_trn.nki_kernels.simulator.cost import ISSUE, RATE, SCALAR_LATENCY
from delta_trn.train.studies import trn1 as steps


@pytest.mark.parametrize("reading", [RATE, ISSUE])
def test_the_rate_stage_names_the_reading_that_the_clock_follows(reading):
    result = kernels.rate(kernels.model_clock(reading), True)
    assert result["reading"] == reading.name and f"`{reading.name}`" in result["decides"]
    assert result["cycles_per_pass"]["float32"][64] == pytest.approx(reading.cycles(64, 1), rel=0.02)


def test_the_tables_stage_finds_what_a_load_costs():
    result = kernels.tables(kernels.model_clock(ISSUE), True)
    hidden = SCALAR_LATENCY / TARGETS["trn1"].scalar_ghz / 1e3
    assert (
        result["load_us"] == pytest.approx(LOAD_US - hidden, rel=0.01)
        and "keep functions grouped" in result["decides"]
    )
    free = kernels.tables(lambda kernel, x, count, in_turns: 100.0, True)
    assert free["load_us"] == 0 and "go back to the Scalar engine" in free["decides"]


def test_the_kernel_stages_run_dry_and_write_what_they_decide(tmp_path, capsys):
    lines = tmp_path / "trn1.jsonl"
    assert kernels.main(["precision", "none", "kernel", "--dry", "rate", "--json", str(lines)]) == 0
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [row["stage"] for row in rows] == ["precision", "none", "kernel"] and all(
        row["decides"] for row in rows
    )
    assert rows[0]["products"] == "float32" and rows[2]["us"]["backward"] > rows[2]["us"]["forward"] > 100
    assert capsys.readouterr().out.count("dry: by the model, not measured") == 3


def test_a_model_in_another_process_says_the_same():
    us = kernels._modelled(RATE)
    direct = kernels.kernel(kernels.model_clock(RATE), True)["us"]
    assert us == pytest.approx(direct)


def test_the_layer_and_the_step_run_dry(tmp_path):
    lines = tmp_path / "trn1.jsonl"
    assert steps.main(["--dry", "--json", str(lines)]) == 0
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [row["stage"] for row in rows] == ["layer", "step"]
    assert rows[1]["seconds"] > 0


def test_without_a_chip_the_command_says_how_to_go_on():
    with pytest.raises(SystemExit, match="torch_xla is not installed"):
        kernels.main([])
    with pytest.raises(SystemExit, match="'speed' is not one of precision, rate, tables, none, kernel"):
        kernels.main(["speed", "--dry", "rate"])
