"""The Triton backend against the float64 judge over the named grid, by every backend's criterion."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="the triton extra is not installed")

from backends.cases import BY_NAME, SMALL, select
from backends.judge import verdicts
from triton_kernels import gated_delta_rule_bwd
from triton_kernels.launch import adjusted

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# Seconds in the interpreter: a seam, ends, the worst inverse, groups, packing, norms, gates.
QUICK = ["seam_65", "forget", "reflect", "gva_2", "packed_empty", "norm_zero"]
QUICK += ["gates_wide", "gates_packed"]
REST = [case.name for case in select(None if DEVICE == "cuda" else sorted(BY_NAME)) if case.name not in QUICK]
REST = [name for name in REST if DEVICE == "cuda" or BY_NAME[name].tags & SMALL or not BY_NAME[name].tags]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", QUICK + [pytest.param(name, marks=pytest.mark.slow) for name in REST])
def test_every_tensor_is_within_twice_the_baselines_error(name, dtype):
    failed = [str(v) for v in verdicts(BY_NAME[name], dtype, "triton", DEVICE) if not v.passed]
    assert not failed, "\n".join(failed)


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter knows no warps")
@pytest.mark.parametrize("warps", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", QUICK + [pytest.param(name, marks=pytest.mark.slow) for name in REST])
def test_layouts_of_four_and_eight_warps_are_right(name, dtype, warps):
    """A product's layout follows the number of warps: Triton before 3.7.1 was wrong at 4 and right at 2."""

    def forced(row):
        tiles = ("prepare", "scan", "reverse", "gradients")
        return replace(row, **{tile: replace(getattr(row, tile), warps=warps) for tile in tiles})

    with adjusted(forced):
        failed = [str(v) for v in verdicts(BY_NAME[name], dtype, "triton", DEVICE) if not v.passed]
    assert not failed, "\n".join(failed)


def test_parity_fails_when_one_term_of_the_decay_gradient_is_rounded(monkeypatch):
    """A planted fault: gam_C <dS', S> rounded to bfloat16 in a float32 call."""
    original = gated_delta_rule_bwd.gradients

    def rounded(*arguments, **named):
        carry = arguments[13]
        carry.copy_(carry.bfloat16())
        original(*arguments, **named)

    monkeypatch.setattr(gated_delta_rule_bwd, "gradients", rounded)
    failed = {v.tensor for v in verdicts(BY_NAME["seam_65"], torch.float32, "triton", DEVICE) if not v.passed}
    assert failed == {"dg"}
