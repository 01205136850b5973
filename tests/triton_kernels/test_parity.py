"""The Triton backend against the float64 judge over the named grid, by every backend's criterion."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="the triton extra is not installed")

from delta_trn.backends.parity.judge import verdicts
from delta_trn.backends.parity.rule_cases import BY_NAME, SMALL, select
from delta_trn.triton_kernels import gated_delta_rule_bwd, gated_delta_rule_fwd
from delta_trn.triton_kernels.launch import adjusted

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# The small cases take seconds in the interpreter, the others that are not slow by tag minutes.
QUICK = [case.name for case in select(tags=SMALL)]
REST = [case.name for case in select() if case.name not in QUICK]
# A seam, ends, the worst inverse, groups, packing, gates: the grid's dtypes are float32 and bfloat16.
HALF = ["seam_65", "forget", "reflect", "gva_2", "packed_empty", "gates_wide"]
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in REST]
DTYPES = [torch.float32, torch.bfloat16]


def failures(name, dtype):
    return "\n".join(str(v) for v in verdicts(BY_NAME[name], dtype, "triton", DEVICE) if not v.passed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", QUICK + SLOW)
def test_triton_is_within_twice_the_baselines_error(name, dtype):
    assert not failures(name, dtype)


@pytest.mark.parametrize("name", HALF)
def test_triton_is_within_twice_the_baselines_error_in_float16(name):
    assert not failures(name, torch.float16)


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter knows no warps")
@pytest.mark.parametrize("warps", [4, 8])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", QUICK + SLOW)
def test_parity_holds_in_layouts_of_four_and_eight_warps(name, dtype, warps):
    """A product's layout follows the number of warps: Triton before 3.7.1 was wrong at 4 and right at 2."""

    def forced(row):
        tiles = ("prepare", "scan", "reverse", "gradients")
        return replace(row, **{tile: replace(getattr(row, tile), warps=warps) for tile in tiles})

    with adjusted(forced):
        assert not failures(name, dtype)


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


def test_parity_fails_when_the_saved_states_are_rounded(monkeypatch):
    """A planted fault: states rounded to bfloat16 in a float32 call."""
    original = gated_delta_rule_fwd.scan

    def lossy(*arguments, S, U, **named):
        original(*arguments, S=S, U=U, **named)
        S.copy_(S.bfloat16())

    monkeypatch.setattr(gated_delta_rule_fwd, "scan", lossy)
    ratios = {
        v.tensor: v.error / v.allowed for v in verdicts(BY_NAME["seam_65"], torch.float32, "triton", DEVICE)
    }
    assert ratios["dq"] > 10
