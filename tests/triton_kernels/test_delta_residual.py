"""The Triton kernels of Deep Delta Learning's residual update, on a GPU, emulated, or interpreted.

tests/parity judges them in float32 and bfloat16 over the whole grid; here stands what is left to
say.
"""

import pytest
import torch

pytest.importorskip("triton", reason="the triton extra is not installed")

from delta_trn.backends.parity import layer_cases
from delta_trn.triton_kernels import delta_residual

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def failures(name, dtype):
    verdicts = layer_cases.verdicts(layer_cases.BY_NAME[name], dtype, "triton", DEVICE)
    return {verdict.tensor for verdict in verdicts if not verdict.passed}


@pytest.mark.parametrize(
    "name", ["residual_odd", "residual_wide", "residual_blocks", "residual_unit"]
)
def test_residual_is_within_its_bounds_in_float16(name):
    assert not failures(name, torch.float16)


def test_parity_fails_when_dk_keeps_its_part_along_k(monkeypatch):
    """A planted fault: the normalization's gradient without its projection."""
    original = delta_residual.backward

    def unprojected(dout, x, k, v, beta, *, dk, **named):
        original(dout, x, k, v, beta, dk=dk, **named)
        dk.add_(k, alpha=0.01)

    monkeypatch.setattr(delta_residual, "backward", unprojected)
    assert failures("residual_odd", torch.float32) == {"dk"}


def test_residual_kernels_write_every_element(poison):
    x = layer_cases.inputs(layer_cases.BY_NAME["residual_odd"], torch.float32).map(
        lambda y: y.to(DEVICE)
    )
    first, second = (
        layer_cases.OPERATIONS["delta_residual"].outcome(x, "triton") for _ in range(2)
    )
    assert all(torch.equal(first[name], second[name]) for name in first)
