"""The table and picture of arms at one learning rate."""

import math

import pytest

from train.sweep.comparison import compared, draw, table


def result(arm: str, seed: int, loss: float | None, lr: float = 0.004) -> dict:
    return {
        "arm": arm,
        "seed": seed,
        "loss": loss,
        "lr": lr,
        "width": 96,
        "optimizer": "adamw",
        "parameters": 1200,
    }


RESULTS = {
    "a": result("worse", 0, 5.0),
    "b": result("worse", 1, 5.2),
    "c": result("better", 1, 4.0),
    "d": result("better", 0, 4.2),
}


def test_arms_are_in_order_with_mean_and_spread(tmp_path):
    arms = compared(RESULTS)
    assert [arm.arm for arm in arms] == ["better", "worse"]
    assert arms[0].losses == (4.2, 4.0) and arms[0].mean == pytest.approx(4.1)
    assert arms[0].deviation == pytest.approx(math.sqrt(0.02))
    assert "| better | 1,200 | 2 | 4.1000 | 0.1414 |" in table(arms)
    picture = draw(arms, tmp_path / "c.png")
    assert picture is not None and picture.stat().st_size > 5000


def test_a_diverged_arm_is_last_without_a_spread(tmp_path):
    arms = compared({**RESULTS, "e": result("broken", 0, None)})
    assert arms[-1].arm == "broken" and arms[-1].deviation is None
    assert "| broken | 1,200 | 1 | inf | - |" in table(arms)


def test_arms_at_several_rates_or_one_arm_are_no_comparison():
    assert compared({**RESULTS, "e": result("worse", 0, 4.0, lr=0.008)}) == []
    assert compared({"a": RESULTS["a"]}) == [] and compared({}) == []
