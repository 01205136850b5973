"""Probes of a divided run measure what those of one process measure.

Probes are written with six digits, and the weights differ by rounding. Control runs, which begin one rounding
away, show how much that changes each probe. A probe of a part of a matrix, or of a wrongly gathered one, is
off by a share of itself.
"""

from pathlib import Path
from typing import Any

import pytest

from delta_trn.train.watch.metrics import read
from tests.support import team_run, tiny_run

CHANGES: dict[str, Any] = {
    "steps": 4,
    "batch.sequences": 4,
    "model.heads": 4,
    "model.width": 32,
    "evaluation.every": 2,
    "sample.tokens": 0,
    "log.probes": "true",
    # SGD does not divide by a gradient's size, and so leaves rounding small
    "optimizer.name": "sgd",
    "optimizer.lr": 0.05,
}
WAYS: dict[str, dict[str, Any]] = {
    "fsdp": {"distribution.mode": "fsdp"},
    "tensor": {"distribution.tensor": 2},
    "ddp": {},
    "zero1": {"distribution.mode": "zero1"},
    "context": {"distribution.context": 2},
}


def probes(run: Path) -> dict[int, dict[str, float]]:
    return {line["step"]: line["probes"] for line in read(run / "metrics.jsonl") if "probes" in line}


def differences(run: Path, expected: Path, controls: list[Path]) -> dict[str, tuple[float, float]]:
    """Returns every probe that is off by more than rounding, with what is expected."""
    mine, theirs, others = probes(run), probes(expected), [probes(control) for control in controls]
    assert mine.keys() == theirs.keys() == {2, 4}
    off = {}
    for step, values in theirs.items():
        assert mine[step].keys() == values.keys()
        for name, value in values.items():
            spread = max(abs(other[step][name] - value) for other in others)
            if not abs(mine[step][name] - value) <= DIGITS * abs(value) + tiny_run.SPREAD * spread:
                off[f"{name} at step {step}"] = mine[step][name], value
    return off


@pytest.fixture(scope="module")
def alone(data, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("alone") / "run"
    tiny_run.train("run", "tiny", *tiny_run.keys(data, out, **CHANGES))
    return out


@pytest.fixture(scope="module")
def controls(data, tmp_path_factory) -> list[Path]:
    """Returns runs of one process whose weights begin one rounding away."""
    runs = []
    for seed in range(3):
        runs.append(tmp_path_factory.mktemp("control") / "run")
        with tiny_run.nudge_weights(seed):
            tiny_run.train("run", "tiny", *tiny_run.keys(data, runs[-1], **CHANGES))
    return runs


# two numbers of six digits each
DIGITS = 1e-5
SLOW = {"ddp", "zero1", "context"}


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[pytest.mark.slow] if way in SLOW else []) for way in WAYS]
)
def test_probes_of_two_processes_are_those_of_one(data, alone, controls, tmp_path, way):
    """Risk 1: under FSDP and tensor parallelism a probe met a part of a matrix and ended the run."""
    out = tmp_path / "run"
    keys = tiny_run.keys(data, out, **{**CHANGES, **WAYS[way]})
    team_run.train(2, ["run", "tiny", *keys], tmp_path / "logs")
    assert not differences(out, alone, controls)


def test_probes_of_another_run_are_off_by_more_than_rounding(data, alone, controls, tmp_path):
    """The comparison can fail: another learning rate changes updates and little else."""
    out = tmp_path / "run"
    tiny_run.train("run", "tiny", *tiny_run.keys(data, out, **{**CHANGES, "optimizer.lr": 0.051}))
    off = differences(out, alone, controls)
    assert any("update" in name for name in off) and any("/lr" in name for name in off)
