"""The first hour on a Trn1, without one: every stage runs, and decides by what its clock says."""

import json

import pytest

from nki_simulator import Numerics, record
from nki_simulator.core.tables import LOAD_US
from nki_simulator.cost import COSTS
from tools import first_hour_chain as chain
from tools import first_hour_trn1 as hour


def test_every_stage_runs_dry_and_writes_what_it_decides(tmp_path):
    lines = tmp_path / "trn1.jsonl"
    assert hour.main(["--dry", "--json", str(lines)]) == 0
    rows = {row["stage"]: row for row in map(json.loads, lines.read_text().splitlines())}
    assert set(rows["chain"].values()) >= {"right", "graphs of several kernels can run"}
    assert list(rows) == ["chain", "precision", "rate", "tables", "kernel", "layer", "step"]
    assert all(row["decides"] for row in rows.values())
    assert (
        rows["precision"]["products"] == "float32"
        and "can be green" in rows["precision"]["decides"]
    )
    assert "can be trusted" in rows["rate"]["decides"]
    assert rows["rate"]["cycles"]["float32"]["64"] == pytest.approx(
        COSTS.product(64, 128, 128, fp32=True), rel=0.02
    )
    assert LOAD_US / 2 < rows["tables"]["load_us"] < LOAD_US
    assert rows["kernel"]["us"] == pytest.approx(hour.MODEL_US, rel=0.05)
    assert "can be trusted" in rows["kernel"]["decides"]
    assert rows["step"]["seconds"] > 0


def test_loads_of_tables_that_take_no_time_decide_otherwise():
    free = hour.tables(lambda kernel, x, count, in_turns: 100.0, True)
    assert free["load_us"] == 0 and "go back to the Scalar engine" in free["decides"]


def test_a_form_that_fails_names_what_follows_and_the_others_go_on(monkeypatch, capsys):
    def refuse(x):
        raise RuntimeError("[XTP003] too many\nand more")

    forms = dict(chain.FORMS)
    names = ("one kernel", "refused", "one tensor passed twice")
    kept = {name: forms.get(name, (refuse, 2, "go on")) for name in names}
    monkeypatch.setattr(chain, "FORMS", kept)
    monkeypatch.setattr(chain, "summed", chain.doubled_through_scratch)
    found = hour.chain(lambda *_: 0.0, True)
    assert (
        found["refused"] == "FAILED: go on ([XTP003] too many)" and found["one kernel"] == "right"
    )
    assert found["one tensor passed twice"].startswith("FAILED: a kernel needs two tensors")
    assert (
        found["decides"] == "look at refused first"
        and "chain: refused ..." in capsys.readouterr().out
    )
    monkeypatch.setattr(chain, "FORMS", {"refused": kept["refused"], **kept})
    assert list(hour.chain(lambda *_: 0.0, True)) == ["refused", "decides"], (
        "nothing runs, so nothing else is said"
    )
    monkeypatch.setattr(chain, "FORMS", {"one kernel": (lambda x: 3 * x, 2, "stop")})
    assert hour.chain(lambda *_: 0.0, True)["one kernel"] == "WRONG numbers: stop"


@pytest.mark.parametrize("precision", ["float32", "tfloat32", "bfloat16"])
def test_the_precision_of_products_is_named(precision):
    results = record(hour.products, *hour.operands(), numerics=Numerics(matmul=precision)).outputs
    assert hour.verdict(results)[0] == precision


def test_a_stage_that_fails_lets_the_next_run(monkeypatch, tmp_path):
    monkeypatch.setattr(hour, "operands", lambda: 1 / 0)
    lines = tmp_path / "trn1.jsonl"
    assert hour.main(["precision", "tables", "--dry", "--json", str(lines)]) == 1
    first, second = map(json.loads, lines.read_text().splitlines())
    assert first["decides"].startswith("FAILED, look at it first: ZeroDivisionError")
    assert "loads count" in second["decides"]


def test_without_a_chip_the_command_says_how_to_go_on():
    with pytest.raises(SystemExit, match="torch_xla is not installed"):
        hour.main([])
    with (
        pytest.MonkeyPatch.context() as patched,
        pytest.raises(SystemExit, match="nki is not installed"),
    ):
        patched.setattr(hour.machine, "platforms", lambda: ("xla",))
        hour.main([])
    with pytest.raises(
        SystemExit, match="'speed' is not one of chain, precision, rate, tables, kernel"
    ):
        hour.main(["speed", "--dry"])
