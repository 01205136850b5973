"""The operation computes g and beta from a layer's projections: in Triton's kernels, by PyTorch
elsewhere.

Parity compares the results with float64, in its cases `gates`, `gates_wide` and `gates_packed`.
"""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import softplus

from delta_trn.backends import (
    checking,
    gated_delta_rule,
    gated_delta_rule_step,
    log_decay,
    write_strength,
)
from delta_trn.backends.dispatch import BACKENDS
from delta_trn.backends.gated_delta_rule.contract import LazyDecay, make_gates
from delta_trn.backends.parity import rule
from delta_trn.backends.parity.judge import error
from delta_trn.backends.parity.rule_cases import Case, inputs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IN_KERNELS = pytest.param(
    "triton",
    marks=pytest.mark.skipif(bool(BACKENDS["triton"].unavailable(DEVICE)), reason="needs triton"),
)
B, T, H, HV, K, V = 2, 5, 1, 2, 16, 16


def arguments(dtype=torch.float32):
    """Returns leaves q, k, v, a, z, A_log, dt_bias."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((B, T, H, K), (B, T, H, K), (B, T, HV, V), (B, T, HV), (B, T, HV), (HV,), (HV,))
    tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    return [x.to(DEVICE).requires_grad_() for x in tensors]


def gate_options(A_log, dt_bias=None, **more):
    return {
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "A_log": A_log,
        "dt_bias": dt_bias,
        "use_beta_sigmoid_in_kernel": True,
    } | more


@pytest.mark.parametrize("neg", [False, True])
def test_gates_of_the_operation_follow_their_formulas(neg):
    q, k, v, a, z, A_log, dt_bias = (x.double() for x in arguments())
    o, _ = gated_delta_rule(
        q, k, v, a, z, backend="recurrent", **gate_options(A_log, dt_bias, allow_neg_eigval=neg)
    )
    g = -A_log.exp() * softplus(a + dt_bias)
    beta = (2 if neg else 1) * z.sigmoid()
    expected, _ = gated_delta_rule(
        q, k, v, g, beta, backend="recurrent", use_qk_l2norm_in_kernel=True
    )
    assert error(o, expected) < 1e-14
    assert torch.equal(log_decay(a, A_log, dt_bias), g) and torch.equal(
        write_strength(z, 1 + neg), beta
    )


def test_lazy_decays_of_channels_have_the_gradients_of_autograd():
    """A rate holds for all channels of a head, and a bias for one."""
    tensors = [torch.randn(shape, dtype=torch.float64) for shape in ((5, 2, 3), (2, 1), (2, 3))]
    results = []
    for compute in (log_decay, LazyDecay.apply):
        leaves = [x.clone().requires_grad_() for x in tensors]
        results.append(torch.autograd.grad(compute(*leaves).square().sum(), leaves))
    for expected, result in zip(*results, strict=True):
        torch.testing.assert_close(result, expected)


def test_the_formulas_of_lazy_tensors_are_those_of_autograd():
    """float32 keeps its digits, also where neither the rate nor softplus is a float32 alone."""
    x, rate = torch.linspace(-170, 60, 2000)[:, None], torch.tensor([-60.0, -3.0, 0.3, 5.0, 79.0])
    dg = torch.linspace(-2, 3, 2000)[:, None].expand(-1, 5)
    results = []
    for compute, dtype in (
        (log_decay, torch.float64),
        (LazyDecay.apply, torch.float64),
        (LazyDecay.apply, torch.float32),
    ):
        leaves = [x.expand(-1, 5).to(dtype), rate.to(dtype), torch.zeros(5, dtype=dtype)]
        leaves = [leaf.requires_grad_() for leaf in leaves]
        g = compute(*leaves)
        results.append([y.double() for y in (g, *torch.autograd.grad(g, leaves, dg.to(dtype)))])
    for judge, exact, rounded in zip(*results, strict=True):
        torch.testing.assert_close(exact, judge, rtol=1e-13, atol=1e-60)
        known = (judge.abs() > 1e-30) & (judge.abs() < 1e30)
        assert ((rounded - judge)[known].abs() <= 2.0**-20 * judge[known].abs()).all()


@pytest.mark.parametrize("backend", ["chunked", IN_KERNELS])
def test_the_operation_computes_either_gate_alone_and_without_a_bias(backend):
    q, k, v, a, z, A_log, _ = arguments()
    g, beta = log_decay(a, A_log), write_strength(z)
    norm = {"use_qk_l2norm_in_kernel": True, "backend": backend}
    expected = gated_delta_rule(q, k, v, g, beta, **norm)[0]
    expected_gradients = torch.autograd.grad(expected.sum(), [a, z, A_log], retain_graph=True)
    decay = gated_delta_rule(q, k, v, a, beta, use_gate_in_kernel=True, A_log=A_log, **norm)[0]
    strength = gated_delta_rule(q, k, v, g, z, use_beta_sigmoid_in_kernel=True, **norm)[0]
    for o in (decay, strength):
        torch.testing.assert_close(o, expected)
        gradients = torch.autograd.grad(o.sum(), [a, z, A_log], retain_graph=True)
        torch.testing.assert_close(gradients, expected_gradients)


@pytest.mark.parametrize("backend", ["chunked", IN_KERNELS])
def test_gradients_of_gate_parameters_have_the_parameters_dtypes(backend):
    *inputs, A_log, dt_bias = arguments(torch.bfloat16)
    A_log = A_log.detach().float().requires_grad_()
    o, _ = gated_delta_rule(*inputs, backend=backend, **gate_options(A_log, dt_bias))
    dA_log, ddt_bias = torch.autograd.grad(o.sum(), [A_log, dt_bias])
    assert (dA_log.dtype, ddt_bias.dtype) == (torch.float32, torch.bfloat16)


def test_a_float64_call_computes_gates_of_float32_parameters_in_float64():
    *inputs, A_log, dt_bias = (x.detach() for x in arguments())
    inputs = [x.double() for x in inputs]
    token = [x[:, 0] for x in inputs]
    state = torch.zeros(B, HV, K, V, dtype=torch.float64)
    results = []
    for parameters in ((A_log, dt_bias), (A_log.double(), dt_bias.double())):
        options = gate_options(*parameters, backend="chunked")
        results.append(
            [
                gated_delta_rule(*inputs, **options)[0],
                *gated_delta_rule_step(*token, state, **options),
            ]
        )
    for single, double in zip(*results, strict=True):
        assert torch.equal(single, double)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [3, 6])
def test_a_token_has_the_same_bits_at_any_place_and_beside_any_other(heads, dtype):
    """PyTorch takes a tensor's last elements one by one, with other bits:
    rows depended on their batch.
    """
    generator = torch.Generator().manual_seed(1)
    sizes = ((3, K), (3, K), (heads, V), (heads,), (heads,))
    inputs = [torch.randn(1, 96, *size, generator=generator).to(dtype) for size in sizes]
    options = gate_options(*torch.randn(2, heads, generator=generator), backend="chunked")

    def outcome(bounds, rows=1, **more):
        """Returns o and the gradients of q, k, v, a,
        z [rows, time, ...] of tokens first to last.
        """
        first, last = bounds
        leaves = [x[:, first:last].unflatten(1, (rows, -1)).squeeze(0) for x in inputs]
        leaves = [x.detach().requires_grad_() for x in leaves]
        o, _ = gated_delta_rule(*leaves, **options, **more)
        return [o.detach(), *torch.autograd.grad(o.float().square().sum(), leaves)]

    together = outcome((0, 96), cu_seqlens=torch.tensor([0, 32, 69, 96])), outcome((0, 96), rows=3)
    for bounds, results in (
        ((32, 69), together[0]),
        ((69, 96), together[0]),
        ((64, 96), together[1]),
    ):
        whole = [x.flatten(0, 1)[slice(*bounds)] for x in results]
        for alone, x in zip(outcome(bounds), whole, strict=True):
            assert torch.equal(alone[0], x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_extreme_projections_and_parameters_give_the_gates_of_the_formula(dtype):
    """exp(A_log) overflows from 89 on in float32, and softplus underflows from -104 on:
    0 times infinity.
    """
    values = torch.tensor(
        [-1e30, -1e4, -300.0, -150.0, -100.0, -61.0, -59.0, 0.0, 90.0, 301.0, 1e20]
    )
    a, A_log = (x.to(dtype).requires_grad_() for x in (values[:, None], values))
    g = log_decay(a.expand(11, 11), A_log)
    # exp(A_log + log softplus(a)); below -40, softplus(a) is exp(a) in every dtype
    a_, A_ = a.detach().double(), A_log.detach().double()
    expected = -(A_ + torch.where(a_ < -40, a_, softplus(a_.clamp(min=-40)).log())).exp()
    resets = expected < -2000
    assert (g[resets] < -2000).all()
    eps = 200 * torch.finfo(dtype).eps  # of exponents up to 300
    torch.testing.assert_close(g[~resets].double(), expected[~resets], rtol=eps, atol=1e-20)
    dA_log, da = torch.autograd.grad(g, [A_log, a], (~resets).to(dtype))
    expected = expected.where(~resets, 0.0)
    torch.testing.assert_close(dA_log.double(), expected.sum(0), rtol=2 * eps, atol=1e-20)
    assert da.isfinite().all()


BAD = {
    "no A_log": (
        {"A_log": None, "dt_bias": None},
        ValueError,
        "use_gate_in_kernel=True without A_log; .*pass A_log .*or leave use_gate_in_kernel out "
        "if g is finished",
    ),
    "not asked for": (
        {"use_gate_in_kernel": False},
        ValueError,
        "A_log and dt_bias passed with use_gate_in_kernel=False, .*leave A_log and dt_bias out "
        "if g is finished, or pass use_gate_in_kernel=True and, as g, what the layer projects, "
        "before dt_bias and softplus:",
    ),
    "bias alone": (
        {"use_gate_in_kernel": False, "A_log": None},
        ValueError,
        "dt_bias passed with use_gate_in_kernel=False, .*leave dt_bias out if g is finished",
    ),
    "neg without sigmoid": (
        {"use_beta_sigmoid_in_kernel": False, "allow_neg_eigval": True},
        ValueError,
        "allow_neg_eigval=True with use_beta_sigmoid_in_kernel=False, .*leave allow_neg_eigval "
        "out if beta is finished, or pass use_beta_sigmoid_in_kernel=True and, as beta, what the "
        "layer projects",
    ),
    "shape": (
        {"A_log": torch.zeros(3)},
        ValueError,
        r"A_log \[3\] is \[HV\] with HV=3, but HV is 2",
    ),
    "integers": (
        {"dt_bias": torch.zeros(2, dtype=torch.int32)},
        TypeError,
        "dt_bias is torch.int32",
    ),
    "a list": ({"A_log": [0.0, 0.0]}, TypeError, "A_log is a list; pass a torch.Tensor"),
    "device": ({"A_log": torch.zeros(2, device="meta")}, ValueError, "A_log is on meta, q is on"),
}


@pytest.mark.parametrize("changes, error, message", BAD.values(), ids=BAD)
def test_bad_gate_arguments_are_named(changes, error, message):
    *tensors, A_log, dt_bias = (x.detach() for x in arguments())
    with pytest.raises(error, match=message):
        gated_delta_rule(*tensors, **gate_options(A_log, dt_bias) | changes)
    token = [x[:, 0] for x in tensors]
    with pytest.raises(error, match=message):
        gated_delta_rule_step(
            *token, torch.zeros(B, HV, K, V), **gate_options(A_log, dt_bias) | changes
        )


def test_either_remedy_of_a_refused_gate_gives_the_same_numbers_and_the_flag_alone_does_not():
    *tensors, a, z, A_log, dt_bias = (x.detach().double() for x in arguments())
    g, beta = make_gates(a, z, A_log, dt_bias, 1.0)
    parameters = {"A_log": A_log, "dt_bias": dt_bias}
    with pytest.raises(
        ValueError, match="leave A_log and dt_bias out if g is finished, or pass use_gate"
    ):
        gated_delta_rule(*tensors, g, beta, **parameters)
    finished, _ = gated_delta_rule(*tensors, g, beta)
    projected, _ = gated_delta_rule(*tensors, a, beta, use_gate_in_kernel=True, **parameters)
    torch.testing.assert_close(projected, finished, rtol=1e-12, atol=1e-12)
    again, _ = gated_delta_rule(*tensors, g, beta, use_gate_in_kernel=True, **parameters)
    assert (again - finished).norm() > 1e-3 * finished.norm()


@pytest.mark.parametrize("backend", ["chunked", IN_KERNELS])
def test_check_mode_checks_the_computed_gates(backend):
    q, k, v, a, z, A_log, dt_bias = (x.detach() for x in arguments())
    a, z = a.abs() + 1, 5 * z.abs()  # as they stand, a is no log decay and z no write strength
    with checking():
        gated_delta_rule(q, k, v, a, z, backend=backend, **gate_options(A_log, dt_bias))
        with pytest.raises(
            ValueError, match=r"g at .* above 0; .*projects, also use_gate_in_kernel=True"
        ):
            gated_delta_rule(q, k, v, a, z.sigmoid(), backend=backend, use_qk_l2norm_in_kernel=True)
        A_log[1] = float("nan")
        with pytest.raises(ValueError, match="is not finite"):
            gated_delta_rule(q, k, v, a, z, backend=backend, **gate_options(A_log, dt_bias))


@pytest.mark.parametrize("rate", [20.0, 83.9, 100.0])
@pytest.mark.parametrize("backend", ["recurrent", "chunked", IN_KERNELS])
def test_gates_of_huge_rates_have_gradients(backend, rate):
    """A projection far below 0 makes a usual decay of any rate;
    its gradient was NaN (infinity times 0).
    """
    x = inputs(Case("rates", 1, 9, 2, 8, 8, "", gates="plain", state=True), torch.float32)
    a = torch.linspace(-rate - 50, -rate + 3, 18).view(x.g.shape)
    a[0, 0] = 30.0  # a reset of the first head
    x = replace(x, g=a, A_log=torch.tensor([rate, rate - 10]), dt_bias=torch.zeros(2))
    reference = rule.reference_for(x)
    assert {spread.count for spread in reference.spreads.values()} == {
        2 + len(rule.CHUNKS) * rule.SAMPLES
    }
    assert reference.judge["dg"].abs().max() > 1e-3
    verdicts = reference.verdicts(backend, rule.outcome(x.to(DEVICE), backend))
    assert [str(verdict) for verdict in verdicts if not verdict.passed] == []


@pytest.mark.parametrize(
    ("x", "log_rate", "dg"),
    [(-79.821868, 83.758888, 3.3e-22), (-37.0622, 35.6939, 3.6e-33), (-63.8566, -1.42, 1.0)],
)
def test_a_small_gradient_of_a_decay_does_not_underflow_on_its_way(x, log_rate, dg):
    """A rate of exp(84) beside softplus(-80) is a decay of -50, whose gradient is 1e-22."""
    a, A_log = torch.tensor([x]), torch.tensor([log_rate])
    gradients = []
    for dtype in (torch.float32, torch.float64):
        leaves = [x.to(dtype).requires_grad_() for x in (a, A_log)]
        g = log_decay(*leaves)
        gradients.append(torch.autograd.grad(g, leaves, torch.full_like(g, dg)))
    for x, y in zip(*gradients, strict=True):
        assert x.item() == pytest.approx(y.item(), rel=1e-6) and y.item() != 0
