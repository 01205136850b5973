"""The Triton kernels of Deep Delta Learning's residual update, run by Triton's interpreter (or a GPU)."""

import pytest
import torch

pytest.importorskip("triton", reason="the triton extra is not installed")

from delta_trn.backends.gated_delta_rule import triton_adapter

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ["out", "dx", "dk", "dv", "dbeta"]

# M tokens, D, DV: one column; D no power of two; more columns than rows; three turns of the loop over D
SHAPES = [(8, 768, 1), (8, 20, 3), (8, 64, 200), (8, 600, 16)]


def inputs(M, D, DV, dtype, *, scale=0.3):
    generator = torch.Generator().manual_seed(D + DV)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    x, k, v, dout = normal(M, D, DV), scale * normal(M, D), normal(M, DV), normal(M, D, DV)
    beta = 2 * torch.rand(M, generator=generator)
    beta[0] = 0
    return [y.to(DEVICE, dtype) for y in (x, k, v)] + [beta.to(DEVICE), dout.to(DEVICE, dtype)]


def plain(x, k, v, beta, dout, k_eps, dtype):
    """X' = X + beta k (v^T - k^T X) and its gradients by autograd, in `dtype`."""
    leaves = [y.to(dtype).requires_grad_() for y in (x, k, v, beta)]
    x, k, v, beta = leaves
    if k_eps is not None:
        k = k * (k.square().sum(-1, keepdim=True) + k_eps**2).rsqrt()
    missing = v - torch.einsum("md,mdv->mv", k, x)
    out = x + beta[:, None, None] * k[:, :, None] * missing[:, None, :]
    return dict(zip(NAMES, [out, *torch.autograd.grad(out, leaves, dout.to(dtype))], strict=True))


def run(x, k, v, beta, dout, k_eps):
    out = triton_adapter.delta_residual_forward(x, k, v, beta, k_eps)
    gradients = triton_adapter.delta_residual_backward(dout, x, k, v, beta, k_eps)
    return dict(zip(NAMES, [out, *gradients], strict=True))


def error(x, judge):
    return ((x.double() - judge).norm() / judge.norm().clamp_min(1e-300)).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("k_eps", [None, 1e-3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_tensor_agrees_with_float64(shape, k_eps, dtype):
    """Sums are float32 in every dtype: allowed is the error of float32, plus one rounding of the result."""
    tensors = inputs(*shape, dtype, scale=0.3 if k_eps else shape[1] ** -0.5)
    judge, honest = (plain(*tensors, k_eps, d) for d in (torch.float64, torch.float32))
    found = run(*tensors, k_eps)
    for name in NAMES:
        allowed = max(2 * error(honest[name], judge[name]), 2**-21)
        if found[name].dtype != torch.float32:
            allowed += error(judge[name].to(found[name].dtype), judge[name])
        assert error(found[name], judge[name]) <= allowed, name


def test_the_agreement_fails_without_the_projection_in_dk():
    """dk loses its part along k in the normalization; with that part left in it is far outside the bound."""
    x, k, v, beta, dout = inputs(3, 20, 3, torch.float32)
    found, judge = run(x, k, v, beta, dout, 1e-3), plain(x, k, v, beta, dout, 1e-3, torch.float64)
    y = k.double() * (k.double().square().sum(-1, keepdim=True) + 1e-6).rsqrt()
    planted = found["dk"].double() + y * (y * dout[..., 0].double()).sum(-1, keepdim=True)
    assert error(found["dk"], judge["dk"]) < 2**-20 < error(planted, judge["dk"])


def test_beta_zero_is_the_identity_to_the_bit():
    x, k, v, beta, _ = inputs(3, 20, 3, torch.bfloat16)
    assert torch.equal(triton_adapter.delta_residual_forward(x, k, v, 0 * beta, 1e-3), x)


def test_beta_two_reflects():
    """With unit k and v = 0 the update is a Householder reflection, its own inverse."""
    x, k, v, beta, _ = inputs(3, 64, 4, torch.float32)
    once = triton_adapter.delta_residual_forward(x, k, 0 * v, 0 * beta + 2, 1e-9)
    twice = triton_adapter.delta_residual_forward(once, k, 0 * v, 0 * beta + 2, 1e-9)
    assert error(once, x.double()) > 0.01 and error(twice, x.double()) < 2**-20


def test_every_element_is_written(monkeypatch):
    tensors = inputs(3, 20, 3, torch.float32)
    clean, allocate = run(*tensors, 1e-3), torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *a, **named: allocate(*a, **named).fill_(float("nan")))
    dirty = run(*tensors, 1e-3)
    assert all(torch.equal(clean[name], dirty[name]) for name in NAMES)
