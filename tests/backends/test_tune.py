"""Tuning tries neighbors of every tile, keeps the fastest,
checks its parity and names failed launches.
"""

import json
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="the triton extra is not installed")

from delta_trn.backends.bench import timing, tune
from delta_trn.triton_kernels import gated_delta_rule_fwd
from delta_trn.triton_kernels.launch import Tile, adjust, config

CASE = "ragged"


@pytest.fixture
def stopped_clock(monkeypatch):
    """Derives each call's time from its row of tiles;
    runs a call only to see whether it launches.
    """
    rows = {}

    def under(row, call):
        def run():
            with adjust(lambda _: row):
                call()

        rows[run] = row
        return run

    def time_in_turns(calls, device, seconds):
        # eight warps of the scan take half the time, half the columns of the gradients five times
        # as long
        def ms(row):
            return (0.5 if row.scan.warps == 8 else 1.0) * (
                5.0 if row.gradients.columns < 32 else 1.0
            )

        return {name: [ms(rows[call])] * 3 for name, call in calls.items()}

    monkeypatch.setattr(tune, "under", under)
    monkeypatch.setattr(tune, "time_in_turns", time_in_turns)
    monkeypatch.setattr(tune, "pass_call", lambda run, x, phase: lambda: None)
    monkeypatch.setattr(timing, "ROUNDS", (3, 3))


def test_candidate_tiles_stay_within_a_kernels_limits():
    assert tune.candidates(Tile(0, 4, 1), 128) == [Tile(0, 2, 1), Tile(0, 8, 1), Tile(0, 4, 2)]
    tiles = tune.candidates(Tile(64, 4, 2), 100)
    assert Tile(32, 4, 2) in tiles and Tile(128, 4, 2) in tiles and Tile(64, 4, 3) in tiles
    assert tune.candidates(Tile(16, 8, 4), 16) == [Tile(16, 4, 4), Tile(16, 8, 3)]
    assert tune.candidates(Tile(16, 8, 4), 16, turns=True)[-1] == Tile(16, 8, 4, upright=True)


def test_the_fastest_tile_is_kept_and_its_parity_judged(
    stopped_clock, monkeypatch, capsys, tmp_path
):
    judged = []
    monkeypatch.setattr(
        tune, "failures", lambda subject, case, dtype, row: judged.append(row) or ""
    )
    file = tmp_path / "tune.jsonl"
    assert tune.main([CASE, "--json", str(file)]) == 0
    (row,) = judged
    untuned = config(32, 32, itemsize=2)
    assert row == replace(untuned, scan=replace(untuned.scan, warps=8))
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert {line["kernel"] for line in lines} == set(tune.KERNELS)
    turned = {line["kernel"] for line in lines if line["tile"]["upright"]}
    assert turned == {"scan", "reverse"}
    assert {line["gain"]["p50"] for line in lines if line["kernel"] == "scan"} == {1.0, 2.0}
    assert f"{CASE}: {row}, parity green" in capsys.readouterr().out


def test_a_launch_that_the_device_refuses_is_named(stopped_clock, monkeypatch, capsys):
    def pass_call(run, x, phase):
        def call():
            if config(32, 32, itemsize=2).scan.stages == 2:
                raise RuntimeError("out of resource: shared memory\nsecond line")

        return call

    monkeypatch.setattr(tune, "pass_call", pass_call)
    monkeypatch.setattr(tune, "failures", lambda *_: "")
    assert tune.main([CASE]) == 0
    assert tune.main(["carry"]) == 2
    output, err = capsys.readouterr()
    assert "carry starts from a state" in err
    refusal = (
        "stages=2, rows=0, registers=None, upright=False, gluon=False): RuntimeError: out of "
        "resource: shared memory\n"
    )
    assert refusal in output
    if not torch.cuda.is_available():
        assert "in the interpreter: these times say nothing about a GPU" in output


def test_a_tuned_row_that_fails_parity_is_an_error(stopped_clock, monkeypatch, capsys):
    """Plants a scan that is wrong with eight warps, the fastest tile."""
    scan = gated_delta_rule_fwd.scan

    def wrong(*arguments, o, config, **options):
        scan(*arguments, o=o, config=config, **options)
        if o is not None and config.scan.warps == 8:
            o.mul_(1.01)

    monkeypatch.setattr(gated_delta_rule_fwd, "scan", wrong)
    assert tune.main([CASE]) == 1
    assert "parity red" in capsys.readouterr().out
