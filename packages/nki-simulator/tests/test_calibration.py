"""The published kernels compute what their names say,
and the model is near their published times.
"""

from dataclasses import replace

import numpy as np
import pytest

from nki_simulator import record
from nki_simulator.__main__ import main
from nki_simulator.calibration import compare as comparing
from nki_simulator.calibration import programs
from nki_simulator.calibration.compare import (
    Comparison,
    compare,
    verdict,
)
from nki_simulator.calibration.measurements import FITTED, MEASUREMENTS, SOURCES
from nki_simulator.calibration.programs import arguments
from nki_simulator.cost import READINGS, estimate


def selective_scan(delta, u, a, b, c):
    state, out = np.zeros(a.shape), np.empty(delta.shape)
    for t in range(delta.shape[1]):
        now = delta[:, t : t + 1]
        state = np.exp(now * a) * state + now * u[:, t : t + 1] * b[:, t]
        out[:, t] = state @ c[:, t]
    return out


def rotated(x, cos, sin):
    even, odd = np.split(x, 2)
    return np.concatenate([even * cos - odd * sin, odd * cos + even * sin])


def adamw(w, g, m, v):
    return w * (1 - 1e-5) - 0.01 * (0.9 * m + 0.1 * g) / (
        np.sqrt(1000 * (0.999 * v + 0.001 * g * g)) + 1e-8
    )


EXPECTED = {
    programs.gemm: (lambda a, b: a.T @ b, 256),
    programs.transpose_matmul: (lambda a, b: a.T @ b, 256),
    programs.matmul: (lambda a, b, eye: a @ b, 1024),
    programs.bmm: (lambda a, b, eye: a @ b, 64),
    programs.rmsnorm_matmul: (lambda x, w, eye: x / np.sqrt((x * x).mean(1, keepdims=True)) @ w, 0),
    programs.silu: (lambda x: x / (1 + np.exp(-x)), 0),
    programs.adamw: (adamw, 0),
    programs.rope: (rotated, 0),
    programs.rope_wide: (rotated, 0),
    programs.mamba: (selective_scan, 600),
    programs.mamba_keeping: (selective_scan, 64),
    programs.mamba_tiled: (selective_scan, 1024),
}


@pytest.mark.parametrize("program", EXPECTED, ids=lambda p: p.__name__)
def test_a_published_kernel_computes_its_operation(program):
    reference, size = EXPECTED[program]
    given = arguments(program, 1, size)
    run = record(program, *given, nki="0.7.0", check_source=False)
    expected = reference(*(x.astype(np.float64) for x in given))
    error = np.linalg.norm(run.outputs.astype(np.float64) - expected) / np.linalg.norm(expected)
    assert error < (3e-3 if program is programs.gemm else 1e-6)


def test_every_published_kernel_is_tested_and_has_a_source():
    assert {m.program for m in MEASUREMENTS} <= set(EXPECTED)
    assert {m.source for m in MEASUREMENTS} == set(SOURCES)
    assert any(m.source != FITTED for m in MEASUREMENTS)


@pytest.mark.parametrize("kernel", ["SiLU", "bmm"])
def test_two_short_runs_extend_to_the_busy_time_and_nearly_to_the_time_of_a_long_one(kernel):
    measurement = next(m for m in MEASUREMENTS if m.kernel.startswith(kernel))
    shorter = replace(measurement, parts=12, runs=1, samples=(3, 6))
    run = record(
        measurement.program, *arguments(measurement.program, 12, measurement.size), strict=False
    )
    whole = estimate(run.trace, run.target)
    extended = compare(shorter)
    assert abs(extended.in_order["issue"] * 1e3 / whole.schedule - 1) < 0.03
    assert abs(extended.scalar * 1e3 / whole.engines["scalar"] - 1) < 1e-6


def test_verdict_names_points_and_medians_outside_the_aims():
    def at(*ratios):
        return [
            Comparison(m, {r.name: ratio * m.ms for r in READINGS}, 0.0, 0.0)
            for source in (FITTED, "AWS")
            for m in [next(m for m in MEASUREMENTS if m.source == source)]
            for ratio in ratios
        ]

    assert verdict(at(0.8, 1.0, 1.25))[1]
    for ratios in ((0.75, 1.0, 1.0), (1.0, 1.0, 1.35), (0.85, 0.85), (1.2, 1.2)):
        lines, met = verdict(at(*ratios))
        assert not met and all("OUTSIDE" in line for line in lines)


def test_the_model_is_close_to_published_times_of_each_source():
    """The points that take long are left to the command; its lines are under results/."""
    for name in ("SiLU 4096x7168", "bmm 16x4096x64x4096, fp32", "mamba, first, 256x512"):
        (measurement,) = (m for m in MEASUREMENTS if m.kernel == name)
        assert 1 / comparing.FARTHEST < compare(measurement).ratio() < comparing.FARTHEST


def test_calibrate_prints_the_table(capsys, monkeypatch):
    names = ("RoPE 128x262144, tiles of 2048", "mamba, first, 4096x512")
    monkeypatch.setattr(comparing, "MEASUREMENTS", [m for m in MEASUREMENTS if m.kernel in names])
    assert main(["calibrate"]) == 0
    printed = capsys.readouterr().out
    assert (
        "| RoPE 128x262144, tiles of 2048 | AccelOpt | 3.333 |" in printed
        and "github.com/zhang677/AccelOpt" in printed
    )
    assert "held out, issue: 1 points" in printed
