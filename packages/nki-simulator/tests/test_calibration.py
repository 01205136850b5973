"""The published kernels compute what their names say,
and the model is near their published times.
"""

from dataclasses import fields, replace
from itertools import cycle

import numpy as np
import pytest

from nki_simulator import TARGETS, record
from nki_simulator.__main__ import main
from nki_simulator.calibration import compare as comparing
from nki_simulator.calibration import fit as fitting
from nki_simulator.calibration import points as pointing
from nki_simulator.calibration import programs
from nki_simulator.calibration.compare import Comparison, compare, verdict
from nki_simulator.calibration.fit import DOCUMENTED, INSTRUCTIONS, SEED, fit, split
from nki_simulator.calibration.measurements import MEASUREMENTS, SOURCES
from nki_simulator.calibration.points import Point, list_instructions, list_kernels, list_programs
from nki_simulator.calibration.programs import arguments
from nki_simulator.cost import COSTS, Costs, estimate


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


def test_every_published_kernel_is_tested_and_every_point_has_a_source():
    assert {m.program for m in MEASUREMENTS} <= set(EXPECTED)
    tables = [
        pointing.rows(name) for name in ("instructions.csv", "kernels.csv", "measurements.csv")
    ]
    assert {row["source"] for rows in tables for row in rows} == set(SOURCES)


@pytest.mark.parametrize("kernel", ["SiLU", "bmm"])
def test_two_short_runs_extend_to_the_busy_time_and_nearly_to_the_time_of_a_long_one(kernel):
    measurement = next(m for m in MEASUREMENTS if m.kernel.startswith(kernel))
    shorter = replace(measurement, parts=12, runs=1, samples=(3, 6))
    run = record(
        measurement.program, *arguments(measurement.program, 12, measurement.size), strict=False
    )
    whole = estimate(run.trace, run.target)
    extended = {point.engine: point for point in list_programs([shorter])}
    assert abs(extended[""].predict() / whole.schedule - 1) < 0.03
    assert abs(extended["scalar"].predict() / whole.engines["scalar"] - 1) < 1e-6


@pytest.fixture(scope="module")
def single() -> list[Point]:
    return list(list_instructions())


def test_the_model_is_near_single_instructions_or_says_why(single):
    ratios = sorted(point.ratio() for point in single)
    assert 0.95 < ratios[len(ratios) // 2] < 1.05 and len(ratios) == 40
    far = [point for point in single if abs(point.ratio() - 1) > comparing.FAR]
    assert len(far) < 10 and all(point.reason for point in far)


def test_halves_hold_every_point_once_and_something_of_each_family(single):
    halves = split(single)
    names = [[point.name for point in half] for half in halves]
    assert sorted(names[0] + names[1]) == sorted(point.name for point in single)
    assert abs(len(halves[0]) - len(halves[1])) <= 1
    for family in {point.family for point in single}:
        members = [p for p in single if p.family == family]
        if len(members) > 1:
            assert all(any(p.family == family for p in half) for half in halves), family
    again, other = split(single), split(single, SEED + 1)
    assert [[p.name for p in half] for half in again] == names
    assert [[p.name for p in half] for half in other] != names


def test_a_fit_finds_the_costs_that_made_its_points(single):
    """Points made from known costs, which are none of the model's, give these costs back."""
    true = replace(
        COSTS, tensor_fp32=2.0, tensor_fp32_column=0.01, tensor_narrow=0.004, tensor_short=0.001,
        vector_overhead=90.0, vector_second=1.5, scalar_overhead=70.0, sum_overhead=20.0,
    )  # fmt: skip
    made = [replace(point, us=point.predict(true)) for point in single]
    found = fit(made)
    for name in INSTRUCTIONS:
        assert getattr(found, name) == pytest.approx(getattr(true, name), rel=0.05), name
    assert max(abs(point.ratio(found) - 1) for point in made) < 0.02
    assert max(abs(point.ratio(COSTS) - 1) for point in made) > 0.2


def test_the_costs_of_instructions_are_the_fit_of_all_their_points(single):
    """What they are fitted to is in the repository; waits are fitted to kernels that are not."""
    found = fit(single)
    assert fitting.loss(COSTS, single) < 1.05 * fitting.loss(found, single)
    assert fitting.loss(DOCUMENTED, single) > 1.5 * fitting.loss(found, single)


def at(*ratios: float, reason: str = "known") -> list[Comparison]:
    point = Point("a product", "instruction", "product", "kiln", 1.0, reason)
    return [Comparison(point, h, r, r) for h, r in zip(cycle("AB"), ratios, strict=False)]


def test_verdict_names_medians_outside_the_aim_and_points_without_a_reason():
    lines, met = verdict(at(0.8, 1.0, 1.0, 1.05, 1.25, 0.95))
    assert met and sum("known" in line for line in lines) == 2
    lines, met = verdict(at(1.0, 1.0, 1.2, 1.0, reason=""))
    assert not met and lines[-1] == "- a product: 1.20, 1.20: NO REASON IS KNOWN"
    for ratios in ((0.85, 1.0), (1.0, 1.15)):
        lines, met = verdict(at(*ratios))
        assert not met and sum("OUTSIDE" in line for line in lines) == 1


def test_a_half_is_judged_by_the_fit_of_the_other():
    instructions = list_instructions()
    points = [p for p in instructions if p.family == "vector"]
    high, low = replace(COSTS, vector_overhead=200.0), COSTS
    found = compare(points, (high, low))
    assert all(c.untouched == c.point.ratio(low) for c in found if c.half == "A")
    assert all(c.untouched == c.point.ratio(high) for c in found if c.half == "B")


def test_the_model_is_close_to_published_times_of_each_source():
    """The points that take long are left to the command; its lines are under results/."""
    for name in ("SiLU 4096x7168", "mamba, first, 256x512", "RoPE 128x262144, tiles of 2048"):
        (measurement,) = (m for m in MEASUREMENTS if m.kernel == name)
        (point,) = (p for p in list_programs([measurement]) if not p.engine)
        assert 0.8 < point.ratio() < 1.2


def test_calibrate_prints_every_point_and_what_trn2_lacks(capsys, monkeypatch, single):
    monkeypatch.setattr(comparing, "list_programs", lambda: iter(()))
    monkeypatch.setattr(comparing, "price_trn2", lambda: 600.0)
    assert main(["calibrate"]) == 0
    printed = capsys.readouterr().out
    assert all(f"| {point.name} | {point.source} | " in printed for point in single)
    assert f"Halves by seed {SEED}." in printed and "need --kernels DIR" in printed
    assert "half A by the fit of half B" in printed and "half B by the fit of half A" in printed
    assert all(f"| {field.name} | " in printed for field in fields(Costs))
    assert "2.50 times: no time is estimated there." in printed


def test_trn2_is_refused_for_as_long_as_the_model_misses_its_public_time():
    far = abs(comparing.price_trn2() / comparing.TRN2_US - 1) > comparing.FAR
    assert far == bool(TARGETS["trn2"].refused)


FILE = """
import nki
import nki.isa as nisa
import nki.language as nl

def consts_np():
    return np.zeros((4, 4), np.float32)

import numpy as np

@nki.jit
def kiln_delta_rule_kernel(q, k, v, g, beta, S0, cst, kind: int, ug: int, rev: int):
    out = nl.ndarray(v.shape, dtype=nl.float32, buffer=nl.shared_hbm)
    tile = nl.ndarray((128, 128), dtype=nl.float32, buffer=nl.sbuf)
    for unit in range(v.shape[0] // 128 * v.shape[1]):
        nisa.dma_copy(dst=tile, src=S0[0])
        for head in range(v.shape[1]):
            nisa.dma_copy(dst=out[unit // v.shape[1] * 128 : unit // v.shape[1] * 128 + 128, head], src=tile)
    return out
"""


def test_other_peoples_kernels_are_read_from_the_folder_that_is_named(tmp_path, monkeypatch):
    rows = [row for row in pointing.rows("kernels.csv") if row["heads"] == "2"][:3]
    (tmp_path / "delta_rule.py").write_text(FILE)
    monkeypatch.setattr(pointing, "rows", lambda name: rows)
    few, some, many = list_kernels(tmp_path)
    assert [p.name for p in (few, some, many)] == [row["kernel"] for row in rows]
    assert few.kind == "call" and few.outside > 140 and len(many.runs) == 2
    assert few.predict() - few.outside < some.predict() - some.outside < many.predict()
    with pytest.raises(SystemExit, match=r"has no delta_rule.py; fetch kiln/kernels/"):
        list(list_kernels(tmp_path / "nowhere"))
