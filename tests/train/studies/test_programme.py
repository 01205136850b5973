"""The programme's stages can be made, say what they take, and width 512 waits for a prediction."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from delta_trn.train.settings.errors import UsageError
from delta_trn.train.studies.sweep.programme import (
    STAGES,
    check,
    expected_hours,
    finished,
    predict,
    require_prediction,
    together,
)
from delta_trn.train.studies.sweep.question import Sweep
from delta_trn.train.studies.sweep.results import Results
from tests.support.tiny_run import run_command

NARROW, WIDE = STAGES["widths"].sweep({}), STAGES["width_512"].sweep({})


def pretend(sweep: Sweep, folder: Path, drift: float, extra: float = 0.0) -> None:
    """Writes results whose best rate is 2^-6.5 at width 64 and moves by `drift` per doubling, and `extra`."""
    folder.mkdir()
    results, rng = Results(folder), np.random.default_rng(0)
    for t in sweep.trials({}):
        best = -6.5 + drift * math.log2(t.width / 64) + extra
        loss = 4 + 0.12 * (math.log2(t.lr) - best) ** 2 + 0.01 * float(rng.normal())
        results.add({"key": t.key, "loss": loss})


@pytest.mark.parametrize("name", STAGES)
def test_every_stage_is_a_sweep_that_fits_its_budget_with_a_fifth_to_spare(name: str):
    """Two jobs at a time; the hours are estimates from the runs of 2026-11-21."""
    stage = STAGES[name]
    sweep = stage.sweep({})
    hours = expected_hours(sweep, {}, jobs=2)
    assert 0.1 < hours < 0.8 * stage.hours
    assert {t.config.model.base_width for t in sweep.trials({})} == {64}
    done = {t.key: {"loss": 1.0} for t in sweep.trials({})}
    assert expected_hours(sweep, done, jobs=2) == 0


def test_the_prediction_for_width_512_lies_on_the_line_through_the_narrower_widths(tmp_path: Path):
    pretend(NARROW, tmp_path / "widths", drift=-0.2)
    path = tmp_path / "prediction.json"
    text = predict(NARROW, tmp_path / "widths", path)
    predicted = json.loads(path.read_text())["log2_rates"]
    for width, at in (("512", -7.1), ("1024", -7.3), ("2048", -7.5)):
        for side in ("whole", "flank", "wall"):
            p = predicted[width][side]
            assert p["low"] <= at <= p["high"] and p["at"] == pytest.approx(at, abs=0.15)
            assert f"| {width} | {side} | {p['at']:.2f} |" in text
    assert predicted["512"]["whole"]["high"] - predicted["512"]["whole"]["low"] < 0.4


@pytest.mark.parametrize(("extra", "inside"), [(0.0, "yes"), (0.8, "no")])
def test_a_prediction_is_held_against_what_width_512_measures(tmp_path: Path, extra: float, inside: str):
    pretend(NARROW, tmp_path / "widths", drift=-0.2)
    pretend(WIDE, tmp_path / "width_512", drift=-0.2, extra=extra)
    path = tmp_path / "prediction.json"
    predict(NARROW, tmp_path / "widths", path)
    lines = check(NARROW, tmp_path / "widths", WIDE, tmp_path / "width_512", path).splitlines()
    (whole,) = [line for line in lines if line.startswith("| whole |")]
    assert whole.endswith(f"| {inside} |")


def test_width_512_and_the_control_join_the_narrower_widths_in_one_report(tmp_path: Path):
    pretend(STAGES["standard"].sweep({}), tmp_path / "standard", drift=-0.9)
    pretend(NARROW, tmp_path / "widths", drift=-0.2)
    pretend(WIDE, tmp_path / "width_512", drift=-0.2)
    text = together({}, tmp_path)
    assert text + "\n" == (tmp_path / "report.md").read_text() and (tmp_path / "widths.png").exists()
    flanks = [line.split("|") for line in text.splitlines() if "| flank |" in line]
    assert {flank[1].strip(): float(flank[3]) for flank in flanks} == {
        "mup adamw": pytest.approx(-0.2, abs=0.05),
        "sp adamw": pytest.approx(-0.9, abs=0.05),
    }
    costs = text[text.index("Measured nats") :]
    assert all(f"| mup adamw | {width} | " in costs for width in (64, 128, 256, 512))


def test_width_512_is_refused_without_a_prediction_and_with_one_made_of_other_results(tmp_path: Path):
    folder, path = tmp_path / "widths", tmp_path / "prediction.json"
    with pytest.raises(UsageError, match="width 512 is not run before its best rate is predicted"):
        require_prediction(folder, path)
    pretend(NARROW, folder, drift=0.0)
    predict(NARROW, folder, path)
    require_prediction(folder, path)
    Results(folder).add({"key": "another", "loss": 1.0})
    with pytest.raises(UsageError, match="was not made of the results"):
        require_prediction(folder, path)


def test_results_that_determine_no_side_predict_nothing(tmp_path: Path):
    Results(tmp_path).add({"key": NARROW.trials({})[0].key, "loss": 1.0})
    with pytest.raises(UsageError, match="predicts nothing: whole not decided"):
        predict(NARROW, tmp_path, tmp_path / "prediction.json")
    assert not finished(NARROW, tmp_path) and not (tmp_path / "prediction.json").exists()


def test_the_command_says_what_stages_take_and_runs_none_that_is_refused(tmp_path: Path):
    out = f"out={tmp_path / 'evidence'}"
    status, text, _ = run_command("evidence", "--plan", "jobs=2", out)
    assert status == 0 and all(f"  {name}: " in text and "stops after" in text for name in STAGES)
    status, _, err = run_command("evidence", "width_512", out)
    assert status == 2 and "`delta-trn evidence widths` writes one when it ends" in err
    status, _, err = run_command("evidence", "widht", out)
    assert status == 2 and "no stage is named widht" in err
    assert not (tmp_path / "evidence").exists()


def test_a_stage_runs_ends_with_a_prediction_and_is_not_made_twice(data: Path, tmp_path: Path):
    """A stage of 1-step runs on three widths, whose losses decide nothing: the command says so."""
    out = tmp_path / "evidence"
    keys = (
        "widths=64,128,256",
        "lrs=2**-7",
        "seeds=0",
        "steps=1",
        "schedule.warmup=0",
        "jobs=1",
        f"out={out}",
    )
    small = ("batch.sequences=1", "batch.length=8", "evaluation.sequences=1", "evaluation.batch=1")
    arguments = ("evidence", "widths", *keys, *small, f"data.source={data}", "device=cpu")
    status, text, err = run_command(*arguments)
    assert status == 2 and "predicts nothing" in err and "3 runs, 0 done" in text
    assert len(Results(out / "widths").read()) == 3
    status, text, _ = run_command(*arguments)
    assert "3 runs, 3 done; about 0.0 h left on 1 cores; stops after 2 h" in text
