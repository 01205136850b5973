"""The first hour on a Trn1, without one: every stage runs, and decides by what its clock says."""

import json

import pytest

from delta_trn.nki_kernels.simulator import Numerics, record
from delta_trn.nki_kernels.simulator.core.tables import LOAD_US
from delta_trn.nki_kernels.simulator.cost import ISSUE
from tools import first_hour_trn1 as hour


def test_every_stage_runs_dry_and_writes_what_it_decides(tmp_path):
    lines = tmp_path / "trn1.jsonl"
    assert hour.main(["--dry", "--json", str(lines)]) == 0
    rows = {row["stage"]: row for row in map(json.loads, lines.read_text().splitlines())}
    assert list(rows) == ["precision", "rate", "tables", "kernel", "layer", "step"]
    assert all(row["decides"] for row in rows.values())
    assert rows["precision"]["products"] == "float32" and "can be green" in rows["precision"]["decides"]
    assert rows["rate"]["reading"] == "issue"
    assert rows["rate"]["cycles_per_pass"]["float32"]["64"] == pytest.approx(ISSUE.cycles(64, 1), rel=0.02)
    assert LOAD_US / 2 < rows["tables"]["load_us"] < LOAD_US
    assert rows["kernel"]["us"] == pytest.approx(hour.MODEL_US, rel=0.05)
    assert "can be trusted" in rows["kernel"]["decides"]
    assert rows["step"]["seconds"] > 0


def test_loads_of_tables_that_take_no_time_decide_otherwise():
    free = hour.tables(lambda kernel, x, count, in_turns: 100.0, True)
    assert free["load_us"] == 0 and "go back to the Scalar engine" in free["decides"]


@pytest.mark.parametrize("precision", ["float32", "tfloat32", "bfloat16"])
def test_the_precision_of_products_is_named(precision):
    results = record(hour.products, *hour.operands(), numerics=Numerics(matmul=precision)).outputs
    assert hour.verdict(results)[0] == precision


def test_without_a_chip_the_command_says_how_to_go_on():
    with pytest.raises(SystemExit, match="torch_xla is not installed"):
        hour.main([])
    with pytest.raises(SystemExit, match="'speed' is not one of precision, rate, tables, kernel"):
        hour.main(["speed", "--dry"])
