"""Deep Delta Learning's update on every backend satisfies its algebra and agrees with float64."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from delta_trn.backends import BackendRefusal, checking
from delta_trn.backends.delta_residual import delta_residual
from delta_trn.backends.dispatch import BACKENDS, Call
from delta_trn.backends.parity import judge, layer_cases

M, D, DV = 5, 24, 3
RUNNABLE = [
    name
    for name, backend in BACKENDS.items()
    if "delta_residual" in backend.rows
    and not backend.unavailable("cpu")
    and not backend.refusals(
        Call("delta_residual", "cpu", torch.float32, {"D": D, "DV": DV}, gradients=True)
    )
]
IN_FLOAT64 = [
    name for name in RUNNABLE if torch.float64 in BACKENDS[name].rows["delta_residual"].dtypes
]


def precision(backend: str) -> tuple[torch.dtype, float]:
    """Returns the widest dtype of a backend, and the error allowed for sums of D terms in it."""
    dtype = torch.float64 if backend in IN_FLOAT64 else torch.float32
    return dtype, 8 * D**0.5 * torch.finfo(dtype).eps


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, k, v = (torch.randn(shape, generator=generator) for shape in ((M, D, DV), (M, D), (M, DV)))
    k = k.double()
    return x.to(dtype), (k / k.norm(dim=-1, keepdim=True)).to(dtype), v.to(dtype)


def gates(beta: float, dtype: torch.dtype) -> Tensor:
    return torch.full((M,), beta, dtype=dtype)


def operator(backend: str, k: Tensor, beta: float) -> Tensor:
    """Returns the matrix I - beta k k^T [M, D, D]:
    the operation applied to the identity, with v = 0.
    """
    X = torch.eye(D, dtype=k.dtype).expand(M, D, D).contiguous()
    return delta_residual(
        X, k, torch.zeros(M, D, dtype=k.dtype), gates(beta, k.dtype), backend=backend
    )


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0, 1.7, 2.0])
@pytest.mark.parametrize("backend", RUNNABLE)
def test_the_update_has_eigenvalues_one_and_one_minus_beta(backend, beta):
    dtype, allowed = precision(backend)
    _, k, _ = inputs(dtype)
    A = operator(backend, k, beta).double()
    values = torch.linalg.eigvalsh((A + A.mT) / 2).sort().values
    expected = torch.tensor([1.0] * (D - 1) + [1 - beta], dtype=torch.float64).sort().values
    assert (values - expected).abs().max() <= allowed
    assert (torch.linalg.det(A) - (1 - beta)).abs().max() <= D * allowed
    along = (A @ k.double()[..., None]).squeeze(-1)
    assert (along - (1 - beta) * k.double()).abs().max() <= allowed, "k is the eigenvector"


@pytest.mark.parametrize("backend", RUNNABLE)
def test_the_update_is_identity_projector_and_reflection_at_beta_0_1_and_2(backend):
    dtype, allowed = precision(backend)
    x, k, v = inputs(dtype)
    assert torch.equal(delta_residual(x, k, v, gates(0.0, dtype), backend=backend), x)
    P, R, identity = operator(backend, k, 1.0), operator(backend, k, 2.0), torch.eye(D, dtype=dtype)
    assert (P @ P - P).abs().max() <= allowed
    assert (R @ R - identity).abs().max() <= allowed and (
        R @ R.mT - identity
    ).abs().max() <= allowed
    assert (P @ P - R).abs().max() > 0.01, "a projector is no reflection"


def test_parity_fails_for_another_epsilon_in_the_norm_of_k():
    """A released kernel has k_eps^2 times D; a case of tiny keys shows the difference."""
    case = layer_cases.BY_NAME["residual_tiny"]
    operation, x = layer_cases.OPERATIONS[case.op], layer_cases.inputs(case, torch.float32)
    expected = operation.judge(x)
    other = replace(case, k_eps=case.k_eps * case.shape[1] ** 0.5)
    wrong = operation.outcome(replace(x, case=other), "chunked")
    bounds = {v.tensor: v.allowed for v in layer_cases.verdicts(case, torch.float32, "chunked")}
    assert all(
        judge.error(wrong[name], expected[name]) > 10 * bounds[name] for name in ("out", "dk", "dv")
    )


@pytest.mark.parametrize("k_eps", [None, 1e-3])
@pytest.mark.parametrize("backend", IN_FLOAT64)
def test_gradients_of_the_update_agree_with_finite_differences(backend, k_eps):
    x, k, v = (y[:2, :5].contiguous() if y.dim() > 2 else y[:2] for y in inputs())
    leaves = [x, k[:, :5].contiguous(), v, torch.tensor([0.4, 1.9], dtype=torch.float64)]
    leaves = [y.clone().requires_grad_() for y in leaves]
    assert torch.autograd.gradcheck(
        lambda *leaves: delta_residual(*leaves, k_eps=k_eps, backend=backend), leaves
    )


@pytest.mark.parametrize("backend", ["chunked", "recurrent"])
def test_the_update_keeps_dtype_and_leading_dimensions(backend):
    x, k, v = inputs(torch.bfloat16)
    beta = gates(0.5, torch.float32)
    out = delta_residual(x, k, v, beta, k_eps=1e-5, backend=backend)
    assert out.dtype == torch.bfloat16
    more = delta_residual(
        *(y.expand(2, *y.shape) for y in (x, k, v, beta)), k_eps=1e-5, backend=backend
    )
    assert more.shape == (2, M, D, DV) and torch.equal(more[1], out)


def test_autocast_changes_no_bit_of_the_update():
    x, k, v = inputs(torch.float32)
    beta = gates(0.5, torch.float32)
    plain = delta_residual(x, k, v, beta)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(delta_residual(x, k, v, beta), plain)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": torch.zeros(M, D + 1)}, r"k \[5, 25\] does not fit x \[5, 24, 3\]"),
        ({"v": torch.zeros(M, DV + 1)}, r"v \[5, 4\] does not fit x .*expected \[5, 3\]"),
        ({"beta": torch.zeros(M, 1)}, r"beta \[5, 1\] does not fit k .*expected \[5\]"),
        ({"v": torch.zeros(M, DV, dtype=torch.float64)}, "v is torch.float64, x is torch.float32"),
        ({"beta": torch.zeros(M, dtype=torch.int64)}, "beta is torch.int64 beside torch.float32 x"),
        ({"k_eps": 0.0}, "k_eps=0.0 must be above 0"),
        ({"x": torch.zeros(M, D, 0), "v": torch.zeros(M, 0)}, r"D and DV of x .*0\] must be at least 1"),
    ],
)  # fmt: skip
def test_arguments_of_the_update_that_do_not_fit_are_named(changes, message):
    x, k, v = inputs(torch.float32)
    arguments = {"x": x, "k": k, "v": v, "beta": gates(0.5, torch.float32), **changes}
    with pytest.raises((TypeError, ValueError), match=message):
        delta_residual(**arguments)


def test_check_mode_refuses_bad_beta_and_long_keys_of_the_update():
    x, k, v = inputs(torch.float32)
    beta = gates(2.5, torch.float32)
    delta_residual(x, k, v, beta)
    with checking(), pytest.raises(ValueError, match=r"beta at \(0,\) is 2.5"):
        delta_residual(x, k, v, beta)
    with checking(), pytest.raises(ValueError, match=r"the norm of k .* pass k_eps"):
        delta_residual(x, 3 * k, v, beta / 2)


def test_the_update_refuses_an_unknown_backend():
    x, k, v = inputs()
    with pytest.raises(BackendRefusal, match="no backend is named"):
        delta_residual(x, k, v, gates(0.5, x.dtype), backend="chunky")
