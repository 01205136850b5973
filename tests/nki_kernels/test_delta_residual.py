"""The NKI kernels of the residual update, beyond the parity grid: cuts and refusals."""

from dataclasses import replace

import pytest
import torch

from delta_trn.backends import BackendRefusal, delta_residual
from delta_trn.backends.delta_residual import nki_adapter
from delta_trn.backends.delta_residual.contract import Residual
from delta_trn.backends.parity.layer_cases import BY_NAME, OPERATIONS, inputs, verdicts
from delta_trn.nki_kernels import delta_residual as kernels
from delta_trn.nki_kernels import plan
from delta_trn.nki_kernels.delta_residual import (
    delta_residual_bwd,
    delta_residual_fwd,
)
from tests.support.nki_judge import (
    EXACT,
    ROUNDED_PRODUCTS,
    assert_close,
    assert_passed,
    normal,
    record_run,
    run,
)


def tensors(dtype):
    """Returns x, k, v, beta and the gradient of the result for five tokens."""
    generator = torch.Generator().manual_seed(0)
    x, dout = normal(generator, 5, 20, 3).to(dtype), normal(generator, 5, 20, 3).to(dtype)
    k, v = normal(generator, 5, 20).to(dtype), normal(generator, 5, 3).to(dtype)
    return x, k, v, 2 * torch.rand(5, generator=generator), dout


def test_an_update_of_nearly_nothing_keeps_its_digits():
    """The stream holds nearly v along k, so that v - p cancels."""
    case, outcome = (
        inputs(BY_NAME["residual_project"], torch.float32),
        OPERATIONS["delta_residual"].outcome,
    )
    x, k = case.tensors["x"], case.tensors["k"]
    y = k / k.norm(dim=-1, keepdim=True)
    case.tensors["v"] = torch.einsum("md,mdv->mv", y, x) + 1e-3 * case.tensors["v"]
    judge, baseline = outcome(case.double(), "recurrent"), outcome(case, "recurrent")
    assert_close(outcome(case, "nki-simulator"), judge, baseline, terms=64 + 4)


def test_only_dk_passes_the_tensor_engine():
    """Products rounded to bfloat16 change dk and nothing else."""
    x, k, v, beta, dout = tensors(torch.float32)
    exact, rounded = (
        run(delta_residual_bwd, dout, x, k, v, beta, 1e-3, numerics=numerics)
        for numerics in (EXACT, ROUNDED_PRODUCTS)
    )
    assert [torch.equal(a, b) for a, b in zip(exact, rounded, strict=True)] == [
        True,
        False,
        True,
        True,
    ]


@pytest.mark.parametrize("beta_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_adapter_cuts_tokens_without_changing_results(beta_dtype, monkeypatch):
    """More tokens than a kernel call takes; beta in its own dtype or in that of x."""
    x, k, v, beta, dout = tensors(torch.bfloat16)
    beta = beta.to(beta_dtype)
    out = run(delta_residual_fwd, x, k, v, beta, 1e-3)
    whole = [out, *run(delta_residual_bwd, dout, x, k, v, beta, 1e-3)]
    assert [t.dtype for t in whole] == [torch.bfloat16] * 4 + [beta_dtype]
    monkeypatch.setattr(plan, "TOKENS", 2)
    call = Residual(x, k, v, beta, 1e-3)
    out, _ = nki_adapter.forward(call, save=True)
    cut = [out, *nki_adapter.backward(dout, call, [])]
    assert all(torch.equal(a, b) for a, b in zip(whole, cut, strict=True))


def test_a_width_that_does_not_fit_is_refused():
    kernel, arguments = kernels.example(M=1, D=13000, DV=1)
    with pytest.raises(AssertionError, match="D=13000 exceeds 12288"):
        run(kernel, *arguments)


@pytest.mark.slow
@pytest.mark.parametrize("backward", [0, 1])
def test_the_largest_sizes_of_the_residual_fit_on_chip(backward):
    for D, DV in ((12288, 1), (8192, 1), (2048, 4), (1280, 4), (768, 16), (64, 200)):
        for dtype in ("float32", "bfloat16"):
            kernel, arguments = kernels.example(M=2, D=D, DV=DV, dtype=dtype, backward=backward)
            record_run(kernel, *arguments, trace=False)  # raises where SBUF or PSUM overflow


def test_an_epsilon_below_the_range_of_rsqrt_is_refused():
    x, k, v, beta, _ = tensors(torch.float32)
    with pytest.raises(AssertionError, match="k_eps=1e-15 is below"):
        run(delta_residual_fwd, x, k, v, beta, 1e-15)


def test_an_epsilon_below_the_range_of_rsqrt_is_refused_before_a_kernel_is_called(monkeypatch):
    x, k, v, beta, _ = tensors(torch.float32)
    monkeypatch.setattr(nki_adapter, "run", None)
    with pytest.raises(
        BackendRefusal, match=r"need k_eps >= 1.14e-13, .*; k_eps is 1e-15: take a larger one"
    ):
        delta_residual(x, k, v, beta, k_eps=1e-15, backend="nki-simulator")


@pytest.mark.parametrize("norm", [1e17, 4e18])
def test_keys_with_norms_far_above_the_range_of_rsqrt_are_normalized(norm):
    case = replace(BY_NAME["residual_odd"], norm=norm)
    assert_passed(verdicts(case, torch.float32, "nki-simulator"))


def test_keys_whose_norm_no_scale_brings_into_the_range_of_rsqrt_are_refused():
    x, k, v, beta, _ = tensors(torch.float32)
    with pytest.raises(
        BackendRefusal, match=r"rows of k with norms up to 4.6e\+18, .*: scale k down"
    ):
        delta_residual(x, 1e20 * k, v, beta, k_eps=1e-5, backend="nki-simulator")
