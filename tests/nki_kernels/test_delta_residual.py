"""The NKI kernels of Deep Delta Learning's residual update on the simulator, against autograd in float64."""

import pytest
import torch

from delta_trn.backends import BackendRefusal, delta_residual
from delta_trn.backends.gated_delta_rule import nki_adapter
from delta_trn.backends.parity.judge import error
from delta_trn.nki_kernels import delta_residual as kernels
from delta_trn.nki_kernels.delta_residual import (
    add_projection,
    delta_residual_bwd,
    delta_residual_fwd,
    diagonal,
)
from delta_trn.nki_kernels.language import nisa, nl
from delta_trn.nki_kernels.simulator.subset import findings
from tests.support.nki_judge import (
    DTYPES,
    EXACT,
    ROUNDED_PRODUCTS,
    assert_close,
    hbm_bytes,
    normal,
    recorded,
    run,
)

NAMES = ["out", "dx", "dk", "dv", "dbeta"]

# M tokens, D, DV: one token, one column; the papers' widths; D no power of two; more than one tile of tokens,
# the last one ragged; D in several PSUM banks; X too large to stay on chip, so read twice, in uneven blocks;
# more columns than rows
SHAPES = [
    (1, 768, 1),
    (3, 768, 4),
    (3, 20, 3),
    (130, 32, 4),
    (2, 1100, 2),
    (2, 3000, 5),
    (2, 5000, 1),
    (2, 24, 200),
]


def inputs(M, D, DV, dtype, *, normalize, hard=""):
    generator = torch.Generator().manual_seed(D + DV)
    x, v, dout = normal(generator, M, D, DV), normal(generator, M, DV), normal(generator, M, D, DV)
    k = normal(generator, M, D) * (0.3 if normalize else D**-0.5)
    beta = 2 * torch.rand(M, generator=generator)
    if M > 1:
        beta[0] = 0
    if hard == "zero keys":
        k[::2] = 0
    if hard == "huge keys":
        k = 1e4 * k
    if hard == "beta 2":
        beta = 0 * beta + 2
    if hard == "known":  # the stream holds nearly v along y: v - p cancels
        y = k / k.norm(dim=-1, keepdim=True)
        v = torch.einsum("md,mdv->mv", y, x) + 1e-3 * v
    return [t.to(dtype) for t in (x, k, v)] + [beta, dout.to(dtype)]


def plain(x, k, v, beta, dout, k_eps, dtype):
    """X' = X + beta k (v^T - k^T X) and its gradients by autograd, in `dtype`."""
    leaves = [t.to(dtype).requires_grad_() for t in (x, k, v, beta)]
    x, k, v, beta = leaves
    if k_eps is not None:
        k = k * (k.square().sum(-1, keepdim=True) + k_eps**2).rsqrt()
    missing = v - torch.einsum("md,mdv->mv", k, x)
    out = x + beta[:, None, None] * k[:, :, None] * missing[:, None, :]
    grads = torch.autograd.grad(out, leaves, dout.to(dtype))
    return dict(zip(NAMES, [out.detach(), *grads], strict=True))


def both(x, k, v, beta, dout, k_eps, target="trn1"):
    out = run(delta_residual_fwd, x, k, v, beta, k_eps, target=target)
    grads = run(delta_residual_bwd, dout, x, k, v, beta, k_eps, target=target)
    return dict(zip(NAMES, [out, *grads], strict=True))


def check(shape, dtype, k_eps, hard="", target="trn1"):
    tensors = inputs(*shape, dtype, normalize=k_eps is not None, hard=hard)
    judge, honest = (plain(*tensors, k_eps, d) for d in (torch.float64, torch.float32))
    found = both(*tensors, k_eps, target=target)
    assert [found[name].dtype for name in NAMES] == [dtype] * 4 + [torch.float32]
    assert_close(found, judge, honest, terms=shape[1] + shape[2])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k_eps", [None, 1e-5])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_tensor_agrees_with_float64(shape, k_eps, dtype):
    check(shape, dtype, k_eps)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(512, 768, 4), (512, 768, 1), (300, 1024, 4)], ids=str)
def test_models_agree_with_float64(shape, dtype):
    check(shape, dtype, 1e-5)


@pytest.mark.parametrize("hard", ["zero keys", "huge keys", "beta 2", "known"])
def test_hard_inputs(hard):
    check((5, 96, 4), torch.float32, 1e-5, hard)


@pytest.mark.parametrize("target", ["trn2", "trn3"])
def test_later_generations(target):
    check((3, 96, 4), torch.bfloat16, 1e-5, target=target)


def test_beta_zero_is_the_identity_to_the_bit():
    x, k, v, beta, _ = inputs(3, 20, 3, torch.bfloat16, normalize=True)
    assert torch.equal(run(delta_residual_fwd, x, k, v, 0 * beta, 1e-3), x)


def test_beta_two_reflects():
    """With unit k and v = 0 the update is a Householder reflection, its own inverse."""
    x, k, v, beta, _ = inputs(3, 64, 4, torch.float32, normalize=True)
    once = run(delta_residual_fwd, x, k, 0 * v, 0 * beta + 2, 1e-9)
    twice = run(delta_residual_fwd, once, k, 0 * v, 0 * beta + 2, 1e-9)
    assert error(once, x.double()) > 0.01 and error(twice, x.double()) < 2**-20


def test_only_dk_passes_the_tensor_engine():
    """Products rounded to bfloat16 change dk and nothing else."""
    x, k, v, beta, dout = inputs(3, 20, 3, torch.float32, normalize=True)
    exact, rounded = (
        run(delta_residual_bwd, dout, x, k, v, beta, 1e-3, numerics=numerics)
        for numerics in (EXACT, ROUNDED_PRODUCTS)
    )
    assert [torch.equal(a, b) for a, b in zip(exact, rounded, strict=True)] == [True, False, True, True]


@pytest.mark.parametrize("beta_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_adapter_cuts_tokens(beta_dtype, monkeypatch):
    """More tokens than a kernel call takes; beta in its own dtype or in that of x; no tokens at all."""
    x, k, v, beta, dout = inputs(5, 20, 3, torch.bfloat16, normalize=True)
    beta = beta.to(beta_dtype)
    whole = both(x, k, v, beta, dout, 1e-3)
    assert whole["dbeta"].dtype == beta_dtype
    monkeypatch.setattr(nki_adapter, "TOKENS", 2)
    cut = [
        nki_adapter.delta_residual_forward(x, k, v, beta, 1e-3),
        *nki_adapter.delta_residual_backward(dout, x, k, v, beta, 1e-3),
    ]
    assert all(torch.equal(whole[name], y) for name, y in zip(NAMES, cut, strict=True))
    empty = nki_adapter.delta_residual_backward(*(y[:0] for y in (dout, x, k, v, beta)), 1e-3)
    assert [y.shape for y in empty] == [y[:0].shape for y in (x, k, v, beta)]


def _first_block_only(p, xt, keys, d0):
    """The sums over D forget all but the first block."""
    if d0 == 0:
        add_projection(p, xt, keys, d0)


def _wrong_sign(x, eye, sign):
    """dX' e + X s for dX' e - X s."""
    return diagonal(x, eye, 1.0)


def _no_projection(x, y):
    """dk keeps its part along k: s . e and p . s count as 0."""
    out = nl.ndarray((x.shape[0], 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=out, value=0.0)
    return out


@pytest.mark.parametrize(
    ("function", "fault", "shape", "tensor"),
    [
        ("add_projection", _first_block_only, (2, 3000, 5), "out"),
        ("diagonal", _wrong_sign, (3, 20, 3), "dk"),
        ("multiply_rows", _no_projection, (3, 20, 3), "dk"),
    ],
)
def test_a_planted_fault_is_seen(function, fault, shape, tensor, monkeypatch):
    monkeypatch.setattr(kernels, function, fault)
    with pytest.raises(AssertionError, match=rf"{tensor}: error .* above"):
        check(shape, torch.float32, 1e-5)


def _no_norm(x, eps):
    """k is taken as it is, although it is not of length 1."""
    out = nl.ndarray((x.shape[0], 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=out, value=1.0)
    return out


def test_a_fault_planted_in_the_forward_kernel_is_seen(monkeypatch):
    monkeypatch.setattr(kernels, "invert_norms", _no_norm)
    with pytest.raises(AssertionError, match=r"out: error .* above"):
        check((3, 20, 3), torch.float32, 1e-5)


@pytest.mark.parametrize("kernel", [delta_residual_fwd, delta_residual_bwd])
def test_source_is_in_the_subset_of_every_release(kernel):
    assert findings(kernel, portable=True) == ()


@pytest.mark.parametrize("backward", [0, 1])
def test_x_travels_once_where_it_fits_on_chip(backward):
    """The paper's two widths: HBM bytes are those of inputs and outputs."""
    for D in (768, 1024):
        moved, least = hbm_bytes(*kernels.example(M=128, D=D, DV=4, backward=backward))
        assert moved == least


def test_a_width_that_does_not_fit_is_refused():
    kernel, arguments = kernels.example(M=1, D=13000, DV=1)
    with pytest.raises(AssertionError, match="D=13000 exceeds 12288"):
        run(kernel, *arguments)


@pytest.mark.slow
@pytest.mark.parametrize("backward", [0, 1])
def test_the_largest_sizes_fit_on_chip(backward):
    for D, DV in ((12288, 1), (8192, 1), (2048, 4), (1280, 4), (768, 16), (64, 200)):
        for dtype in ("float32", "bfloat16"):
            kernel, arguments = kernels.example(M=2, D=D, DV=DV, dtype=dtype, backward=backward)
            recorded(kernel, *arguments, trace=False)  # raises where SBUF or PSUM overflow


def test_an_epsilon_below_the_range_of_rsqrt_is_refused():
    x, k, v, beta, _ = inputs(3, 20, 3, torch.float32, normalize=True)
    with pytest.raises(AssertionError, match="k_eps=1e-15 is below"):
        run(delta_residual_fwd, x, k, v, beta, 1e-15)


def test_such_an_epsilon_is_refused_before_a_kernel_is_called(monkeypatch):
    x, k, v, beta, _ = inputs(3, 20, 3, torch.float32, normalize=True)
    monkeypatch.setattr(nki_adapter, "run", None)
    with pytest.raises(
        BackendRefusal, match=r"need k_eps >= 1.14e-13, .*; k_eps is 1e-15: take a larger one"
    ):
        delta_residual(x, k, v, beta, k_eps=1e-15, backend="nki-simulator")
