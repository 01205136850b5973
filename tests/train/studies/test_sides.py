"""Planted drifts of flank and wall are found, also apart; where there is none,
the interval is around 0.
"""

import math

import numpy as np
import pytest

from delta_trn.train.studies.sweep import sides
from delta_trn.train.studies.sweep.sides import Side, fit_drift, side

RATES = [float(x) for x in np.arange(-9.0, -3.9, 0.5)]
CENTER = -6.5


def plant(
    flank: float,
    wall: float,
    *,
    rng: np.random.Generator,
    noise: float = 0.02,
    scatter: float = 0.0,
    of_seeds: float = 0.0,
    seeds: int = 4,
) -> tuple[dict[tuple[float, int], dict[float, float]], dict[float, float]]:
    """Returns curves of three widths and their best rates; flank and wall meet at 2^-6.5 at the
    narrowest.

    Loss rises by 0.1 nats an octave squared below the flank's end and by 0.15 beyond the wall's.

    flank, wall     octaves per doubling by which each end moves
    noise           standard deviation of a loss
    scatter         of where a curve lies
    of_seeds        of the drifts of seeds
    """
    curves = {}
    for seed in range(seeds):
        own = of_seeds * rng.normal()
        for scale in (6.0, 7.0, 8.0):
            at, level = CENTER + scatter * rng.normal(), 4 - 0.1 * scale + 0.05 * rng.normal()
            ends = (at + (flank + own) * (scale - 6), at + (wall + own) * (scale - 6))
            curves[scale, seed] = {
                x: level
                + 0.1 * max(ends[0] - x, 0) ** 2
                + 0.15 * max(x - ends[1], 0) ** 2
                + noise * float(rng.normal())
                for x in RATES
            }
    best = {}
    for scale in (6.0, 7.0, 8.0):
        means = {x: sum(curves[scale, seed][x] for seed in range(seeds)) for x in RATES}
        best[scale] = min(means, key=lambda x: means[x])
    return curves, best


def fit(flank: float, wall: float, **options: float) -> tuple[list[Side], list[Side]]:
    rng = np.random.default_rng(0)
    pairs = [plant(flank, wall, rng=rng, **options) for _ in range(40)]
    return [side("flank", *p) for p in pairs], [side("wall", *p) for p in pairs]


def covered(found: list[Side], truth: float) -> float:
    return sum(s.low <= truth <= s.high for s in found) / len(found)


# 95% of 40, less three standard deviations of 3.4%
ENOUGH = 0.85


@pytest.mark.parametrize(
    "options", [{}, {"scatter": 0.1}, {"of_seeds": 0.1}, {"seeds": 2, "scatter": 0.1}]
)
def test_intervals_around_no_drift_contain_0_and_verdicts_rarely_say_that_it_moves(options):
    for found in fit(0.0, 0.0, **options):
        assert covered(found, 0.0) >= ENOUGH
        assert sum(s.verdict.startswith("moves") for s in found) <= 5
        assert abs(float(np.mean([s.octaves for s in found]))) < 0.03


@pytest.mark.parametrize("options", [{}, {"scatter": 0.1}])
def test_a_wall_that_moves_alone_is_told_from_the_flank(options):
    """The windows reach over the best rate, so a sixth of the wall's drift is seen on the flank."""
    flanks, walls = fit(0.0, -0.3, **options)
    assert covered(walls, -0.3) >= ENOUGH and covered(flanks, 0.0) >= ENOUGH
    assert np.mean([s.octaves for s in walls]) == pytest.approx(-0.3, abs=0.05)
    assert abs(float(np.mean([s.octaves for s in flanks]))) < 0.06
    assert sum(s.high < 0 for s in walls) >= 36, "the planted drift was not found"


def test_a_flank_that_moves_alone_is_told_from_the_wall():
    flanks, walls = fit(0.3, 0.0)
    assert sum(s.low > 0 for s in flanks) >= 36 and covered(walls, 0.0) >= ENOUGH


def test_a_curve_that_moves_as_a_whole_moves_on_both_sides():
    for found in fit(-0.8, -0.8):
        assert covered(found, -0.8) >= ENOUGH and {s.verdict for s in found} == {"moves"}


def test_seeds_that_drift_apart_widen_the_interval():
    """With seeds' own drifts taken for noise of single curves, the interval would be too short."""
    together, walls = fit(0.0, 0.0)
    apart, _ = fit(0.0, 0.0, of_seeds=0.3)
    assert covered(apart, 0.0) >= ENOUGH
    flank, wall, wide = (
        np.median([s.high - s.low for s in found]) / 2 for found in (together, walls, apart)
    )
    assert flank < 0.06 and wall < 0.10 and wide > 4 * flank


def test_the_interval_covers_the_intervals_of_all_windows(monkeypatch):
    planted = plant(0.0, -0.3, rng=np.random.default_rng(1))
    whole, parts = side("flank", *planted), []
    for inner in sides.INNER:
        monkeypatch.setattr(sides, "INNER", (inner,))
        parts.append(side("flank", *planted))
    assert len({s.octaves for s in parts}) == 3
    assert whole.low == min(s.low for s in parts) and whole.high == max(s.high for s in parts)
    assert whole.octaves == pytest.approx(np.mean([s.octaves for s in parts]))


def test_rates_that_diverge_are_left_out_and_a_side_without_rates_says_so():
    curves, best = plant(0.0, 0.0, rng=np.random.default_rng(0))
    high = {
        key: {x: y if x < -6 else math.inf for x, y in points.items()}
        for key, points in curves.items()
    }
    assert "three rates on this side" in side("wall", high, best).verdict
    assert math.isfinite(side("flank", high, best).high)


def test_losses_that_do_not_curve_determine_no_position():
    curves = {
        (6.0 + i, 0): {x: 4 - 0.1 * x + 0.01 * (-1) ** n for n, x in enumerate(RATES)}
        for i in range(3)
    }
    assert fit_drift(curves) is None
