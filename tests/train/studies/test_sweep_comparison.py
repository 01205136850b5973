"""Arms are compared at their own best rates, and each named question takes one command."""

import math

import pytest
import torch

from delta_trn.models import DeltaForCausalLM
from delta_trn.train.run.model import model_config, vocabulary
from delta_trn.train.settings.schema import RunConfig
from delta_trn.train.studies.sweep.arms import ARMS
from delta_trn.train.studies.sweep.comparison import Compared, compare, table
from delta_trn.train.studies.sweep.output import draw_comparison
from delta_trn.train.studies.sweep.question import QUESTIONS, Sweep, define
from delta_trn.train.studies.sweep.report import reports

AXES = {"widths": "16,64", "lrs": "2**-8..2**-6", "seeds": "0,1", "refine": "0"}


def sweep(**changes: str) -> Sweep:
    return define("tiny", {**AXES, "arms": "model.readout=sqrt_k,none", **changes})


def comparison(study: Sweep, best: dict[tuple[str, int], float], level: dict[str, float]) -> list[Compared]:
    """Compares parabolas with minima level[arm] at log2 rate best[arm, width]; seed 1 lies 0.2 higher."""
    results = {}
    for t in study.trials({}):
        arm = t.series.arm or t.series.parametrization
        x, low = math.log2(t.lr), best[arm, t.width]
        loss = level[arm] + 0.1 * (x - low) ** 2 + 0.2 * t.seed
        results[t.key] = {"key": t.key, "loss": None if math.isinf(loss) else loss, "parameters": 1200}
    return compare(reports(study, results))


BEST = {("sqrt_k", 16): -7.0, ("sqrt_k", 64): -7.0, ("none", 16): -8.0, ("none", 64): -6.0}


def test_every_arm_is_compared_at_its_own_best_rate(tmp_path):
    """At one rate for both, `none` would look 0.1 worse than it is."""
    rows = comparison(sweep(), BEST, {"sqrt_k": 4.0, "none": 4.1})
    assert [(r.width, r.arm, r.rate) for r in rows] == [
        (16, "sqrt_k", -7), (16, "none", -8), (64, "sqrt_k", -7), (64, "none", -6),
    ]  # fmt: skip
    for row in rows:
        level = 4.0 if row.arm == "sqrt_k" else 4.1
        assert row.losses == pytest.approx({0: level, 1: level + 0.2})
        assert row.mean == pytest.approx(level + 0.1)
        assert row.deviation == pytest.approx(math.sqrt(0.02)) and row.parameters == 1200
    assert [r.at_an_end for r in rows] == [False, True, False, True]
    # the narrowest width's rate costs nothing where the optimum stays, and 0.1 * 2^2 two octaves away
    assert rows[0].carried is None and rows[1].carried is None
    assert rows[2].carried == rows[2].losses
    assert rows[3].carried == pytest.approx({0: 4.5, 1: 4.7})
    picture = draw_comparison(rows, tmp_path / "c.png")
    assert picture is not None and picture.stat().st_size > 5000


def test_arms_are_compared_seed_by_seed():
    """Seeds differ by 0.2 and arms of one seed by exactly 0.1; pairing removes the 0.2."""
    rows = comparison(sweep(), BEST, {"sqrt_k": 4.0, "none": 4.1})
    difference, error = rows[1].above(rows[0]) or (0, 0)
    assert difference == pytest.approx(0.1) and error == pytest.approx(0, abs=1e-12)
    text = table(rows).splitlines()
    assert text[3].startswith("| 16 | none | 1,200 | 2^-8, an end | 2 | 4.2000 | 0.1414 | +0.1000 ± 0.0000 |")
    assert text[5].endswith("| 4.6000 |")


def test_a_diverged_arm_ranks_last_and_has_no_spread(tmp_path):
    rows = comparison(sweep(widths="16", lrs="2**-7"), BEST, {"sqrt_k": 4.0, "none": math.inf})
    assert [r.arm for r in rows] == ["sqrt_k", "none"] and rows[1].deviation is None
    assert "| 16 | none | 1,200 | 2^-7 | 2 | inf | - | - | - |" in table(rows)
    assert draw_comparison(rows, tmp_path / "c.png") is None


def test_comparison_names_the_parametrization_and_the_optimizer_where_they_differ():
    study = define("tiny", {**AXES, "parametrizations": "sp,mup", "optimizers": "adamw,sgd"})
    best = {(name, width): -7.0 for name in ("sp", "mup") for width in (16, 64)}
    rows = comparison(study, best, {"sp": 4.0, "mup": 4.0})
    assert {r.arm for r in rows} == {"sp adamw", "sp sgd", "mup adamw", "mup sgd"}


def test_a_single_series_gives_no_comparison():
    study = define("tiny", AXES)
    assert comparison(study, {("mup", 16): -7.0, ("mup", 64): -7.0}, {"mup": 4.0}) == []


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_question_takes_at_most_fifteen_minutes(name: str):
    """A run takes 20 s at width 64 and 60 s at others, on two cores. Residuals may take 30 minutes."""
    question = QUESTIONS[name]
    trials = define(question.recipe, question.axes).trials({})
    assert {t.series.arm for t in trials} <= {arm.name for arm in ARMS[name]}
    seconds = sum(20 if t.width == 64 else 60 for t in trials) / 2
    assert seconds <= (30 if name == "ddl_residuals" else 15) * 60
    assert all(len({t.seed for t in trials if t.width == width}) > 1 for width in {t.width for t in trials})


def test_residuals_are_compared_at_equal_numbers_of_parameters():
    """Without smaller MLPs, a direction, a gate and a compressor in each layer make TC 2.1% larger."""

    def parameters(config: RunConfig) -> int:
        with torch.device("meta"):
            model = DeltaForCausalLM(model_config(config, rows=vocabulary(config)))
        return sum(p.numel() for p in model.parameters())

    question = QUESTIONS["ddl_residuals"]
    trials = define(question.recipe, question.axes).trials({})
    counts = {t.series.arm: parameters(t.config) for t in trials}
    assert len(counts) == 5 and max(counts.values()) < 1.001 * min(counts.values())
