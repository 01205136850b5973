"""The NKI kernels of a layer and of the readout, beyond the parity grid: cuts, limits, refusals."""

from dataclasses import replace

import pytest
import torch

from delta_trn.backends import BackendRefusal, linear_cross_entropy
from delta_trn.backends import gated_rms_norm as gated_rms_norm_of_layers
from delta_trn.backends import short_convolution as short_convolution_of_layers
from delta_trn.backends.parity.layer_cases import BY_NAME, verdicts
from delta_trn.nki_kernels import cross_entropy, gated_rms_norm, plan
from delta_trn.nki_kernels.gated_rms_norm import gated_rms_norm_fwd
from delta_trn.nki_kernels.short_convolution import short_convolution_fwd
from tests.support.nki_judge import assert_passed, normal, run


@pytest.mark.slow
@pytest.mark.parametrize("name", ["conv_tiles", "norm_tiles"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernels_at_a_models_sizes_agree_with_the_judge(name, dtype):
    shape = {"conv_tiles": (1, 1024, 3072, 4), "norm_tiles": (6144, 256)}[name]
    assert_passed(verdicts(replace(BY_NAME[name], shape=shape), dtype, "nki-simulator"))


def test_a_convolution_in_two_calls_equals_one():
    """The later call continues with the inputs of the earlier one, cut anywhere."""
    generator = torch.Generator().manual_seed(0)
    x, weight = normal(generator, 1, 40, 32), normal(generator, 32, 4)
    whole = run(short_convolution_fwd, x, weight, x, False, x, False)
    for cut in (3, 17):
        later = run(short_convolution_fwd, x[:, cut:], weight, x, False, x[:, cut - 3 : cut], True)
        torch.testing.assert_close(later, whole[:, cut:], rtol=0, atol=1e-6)


def test_sizes_that_do_not_fit_are_refused():
    x, weight, position = (
        torch.ones(2, 8, 16),
        torch.ones(16, 40),
        torch.zeros(8, dtype=torch.int32),
    )
    with pytest.raises(AssertionError, match="W=40 exceeds 32 taps"):
        run(short_convolution_fwd, x, weight, x, False, x, False)
    with pytest.raises(AssertionError, match="W=1 looks back at nothing"):
        run(short_convolution_fwd, x, weight[:, :1], x, False, x[:, :0], True)
    with pytest.raises(AssertionError, match="packed sequences begin with zeros"):
        run(short_convolution_fwd, x[:1], weight[:, :4], position, True, x[:1, :3], True)
    with pytest.raises(AssertionError, match="B=2 rows cannot be packed"):
        run(short_convolution_fwd, x, weight[:, :4], position, True, x, False)
    kernel, arguments = gated_rms_norm.example(M=1, V=4097, backward=1)
    with pytest.raises(AssertionError, match="V=4097 exceeds 4096"):
        run(kernel, *arguments)


def test_an_epsilon_below_the_range_of_rsqrt_is_refused():
    x, weight = torch.ones(3, 32), torch.ones(32)
    with pytest.raises(AssertionError, match="eps=1e-30 is below"):
        run(gated_rms_norm_fwd, x, x, weight, 1e-30, True)
    with pytest.raises(BackendRefusal, match="eps is 1e-30: take a larger one"):
        gated_rms_norm_of_layers(x, x, weight, eps=1e-30, backend="nki-simulator")


@pytest.mark.parametrize("size", [1e16, 1e17])
def test_rows_with_squares_above_the_range_of_rsqrt_are_normalized(size):
    assert_passed(
        verdicts(replace(BY_NAME["gated_norm_tiny"], size=size), torch.float32, "nki-simulator")
    )


def test_rows_that_no_scale_brings_into_the_range_of_rsqrt_are_refused():
    x, weight = torch.full((3, 32), 1e18), torch.ones(32)
    with pytest.raises(
        BackendRefusal, match=r"rows of x with norms up to 4.6e\+18, .* here is 5.7e\+18"
    ):
        gated_rms_norm_of_layers(x, x, weight, eps=1e-5, backend="nki-simulator")
    assert plan.find_largest_norm(2.0**-86) == 2.0**46
    with pytest.raises(BackendRefusal, match=r"rows of x with norms up to 7e\+13"):
        gated_rms_norm_of_layers(1e-4 * x, x, weight, eps=2.0**-86, backend="nki-simulator")


def test_a_convolution_with_one_tap_takes_the_empty_prefix_that_it_has():
    leaves = [
        x.requires_grad_() for x in (torch.ones(2, 19, 24), torch.ones(24, 1), torch.ones(2, 0, 24))
    ]
    x, weight, prefix = leaves
    results = []
    for backend in ("nki-simulator", "chunked"):
        y = short_convolution_of_layers(x, weight, prefix=prefix, backend=backend)
        results.append([y, *torch.autograd.grad(y.sum(), leaves)])
    for result, expected in zip(*results, strict=True):
        torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(300, 640, 700), (200, 130, 1200)], ids=str)
def test_the_cross_entropy_in_several_parts_tiles_and_blocks_agrees_with_the_judge(
    shape, dtype, monkeypatch
):
    """Ragged in tokens, width and vocabulary; more than 512 channels take blocks of 256 words."""
    monkeypatch.setattr(cross_entropy, "MOST_TOKENS", 160)
    assert_passed(verdicts(replace(BY_NAME["loss_ignored"], shape=shape), dtype, "nki-simulator"))


def test_the_loss_without_gradients_is_the_loss_with_them():
    generator = torch.Generator().manual_seed(0)
    x, w, targets = normal(generator, 140, 24), normal(generator, 600, 24), torch.arange(140)
    alone = linear_cross_entropy(x, w, targets, backend="nki-simulator")
    assert torch.equal(
        alone, linear_cross_entropy(x, w.requires_grad_(), targets, backend="nki-simulator")
    )


def test_no_tokens_have_no_loss_and_no_gradient():
    x, w = torch.ones(0, 24, requires_grad=True), torch.ones(50, 24, requires_grad=True)
    loss = linear_cross_entropy(x, w, torch.ones(0, dtype=torch.int64), backend="nki-simulator")
    loss.backward()
    assert loss.item() == 0 and x.grad is not None and w.grad is not None and not w.grad.any()


def test_a_readout_that_does_not_fit_is_refused():
    kernel, arguments = cross_entropy.example(N=2, d=1025, V=16)
    with pytest.raises(AssertionError, match="d=1025 exceeds 1024"):
        run(kernel, *arguments)
    x, w, targets = torch.ones(2, 1025), torch.ones(3, 1025), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(
        BackendRefusal, match="d=1025 is above 1024: dweight of 256 words fills four banks"
    ):
        linear_cross_entropy(x, w, targets, backend="nki-simulator")
