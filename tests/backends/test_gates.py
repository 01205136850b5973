"""g and beta made by the operation of what a layer projects: in Triton's kernels, by PyTorch elsewhere.

Errors against the float64 judge are parity's affair, in its cases `gates`, `gates_wide`, `gates_packed`; a
fault planted there (`faults.py`, "pairs that cancel") shows in the gradients of gates alone.
"""

import pytest
import torch
from torch.nn.functional import softplus

from delta_trn.backends import checking, gated_delta_rule, gated_delta_rule_step, log_decay, write_strength
from delta_trn.backends.gated_delta_rule import contract
from delta_trn.backends.registry import BACKENDS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IN_KERNELS = pytest.param(
    "triton", marks=pytest.mark.skipif(bool(BACKENDS["triton"].unavailable(DEVICE)), reason="needs triton")
)
B, T, H, HV, K, V = 2, 5, 1, 2, 16, 16


def arguments(dtype=torch.float32):
    """q, k, v, a, z, and A_log, dt_bias."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((B, T, H, K), (B, T, H, K), (B, T, HV, V), (B, T, HV), (B, T, HV), (HV,), (HV,))
    given = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    return [x.to(DEVICE).requires_grad_() for x in given]


def projected(A_log, dt_bias=None, **more):
    return {
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "A_log": A_log,
        "dt_bias": dt_bias,
        "use_beta_sigmoid_in_kernel": True,
    } | more


@pytest.mark.parametrize("neg", [False, True])
def test_the_operation_makes_what_the_formulas_say(neg):
    q, k, v, a, z, A_log, dt_bias = (x.double() for x in arguments())
    found, _ = gated_delta_rule(
        q, k, v, a, z, backend="recurrent", **projected(A_log, dt_bias, allow_neg_eigval=neg)
    )
    g = -A_log.exp() * softplus(a + dt_bias)
    beta = (2 if neg else 1) * z.sigmoid()
    right, _ = gated_delta_rule(q, k, v, g, beta, backend="recurrent", use_qk_l2norm_in_kernel=True)
    assert torch.equal(found, right)
    assert torch.equal(log_decay(a, A_log, dt_bias), g) and torch.equal(write_strength(z, 1 + neg), beta)


@pytest.mark.parametrize("backend", ["chunked", IN_KERNELS])
def test_either_gate_may_be_made_alone_and_without_a_bias(backend):
    q, k, v, a, z, A_log, _ = arguments()
    g, beta = log_decay(a, A_log), write_strength(z)
    norm = {"use_qk_l2norm_in_kernel": True, "backend": backend}
    right = gated_delta_rule(q, k, v, g, beta, **norm)[0]
    grads = torch.autograd.grad(right.sum(), [a, z, A_log], retain_graph=True)
    decay = gated_delta_rule(q, k, v, a, beta, use_gate_in_kernel=True, A_log=A_log, **norm)[0]
    strength = gated_delta_rule(q, k, v, g, z, use_beta_sigmoid_in_kernel=True, **norm)[0]
    torch.testing.assert_close(decay, right)
    torch.testing.assert_close(strength, right)
    for o in (decay, strength):
        found = torch.autograd.grad(o.sum(), [a, z, A_log], retain_graph=True)
        torch.testing.assert_close(found, grads)


@pytest.mark.parametrize("backend", ["chunked", IN_KERNELS])
def test_a_gradient_has_its_parameters_dtype(backend):
    given = arguments(torch.bfloat16)
    A_log = given[5].detach().float().requires_grad_()
    o, _ = gated_delta_rule(*given[:5], backend=backend, **projected(A_log, given[6]))
    dA_log, ddt_bias = torch.autograd.grad(o.sum(), [A_log, given[6]])
    assert (dA_log.dtype, ddt_bias.dtype) == (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("backend", ["chunked", IN_KERNELS])
def test_one_head_has_gates_too(backend):
    """Whose gradients, one number each, must not be two views of one tensor."""
    given = arguments()
    given = [x.detach()[:, :, :1].requires_grad_() for x in given[:5]] + [
        x.detach()[:1].requires_grad_() for x in given[5:]
    ]
    q, k, v, a, z, A_log, dt_bias = given
    o, _ = gated_delta_rule(q, k, v, a, z, backend=backend, **projected(A_log, dt_bias))
    grads = torch.autograd.grad(o.sum(), given)
    assert [grad.shape for grad in grads] == [x.shape for x in given]


@pytest.mark.parametrize("backend", ["chunked", IN_KERNELS])
def test_steps_are_the_sequence_token_by_token(backend):
    q, k, v, a, z, A_log, dt_bias = (x.detach() for x in arguments())
    told = projected(A_log, dt_bias, allow_neg_eigval=True, backend=backend)
    o, final = gated_delta_rule(q, k, v, a, z, output_final_state=True, **told)
    state, outputs = torch.zeros(B, HV, K, V, device=DEVICE), []
    for t in range(T):
        token = (x[:, t].contiguous() for x in (q, k, v, a, z))
        y, state = gated_delta_rule_step(*token, state, **told)
        outputs.append(y)
    torch.testing.assert_close(torch.stack(outputs, 1), o)
    torch.testing.assert_close(state, final)


@pytest.mark.parametrize(
    "backend, makes", [("chunked", True), pytest.param("triton", False, marks=IN_KERNELS.marks)]
)
def test_pytorch_makes_gates_only_where_kernels_do_not(backend, makes, monkeypatch):
    made = []
    right = contract.make_gates

    def spy(*arguments):
        made.append(arguments)
        return right(*arguments)

    monkeypatch.setattr(contract, "make_gates", spy)
    q, k, v, a, z, A_log, dt_bias = arguments()
    o, _ = gated_delta_rule(q, k, v, a, z, backend=backend, **projected(A_log, dt_bias))
    o.sum().backward()
    gated_delta_rule_step(
        *(x.detach()[:, 0] for x in (q, k, v, a, z)),
        torch.zeros(B, HV, K, V, device=DEVICE),
        backend=backend,
        **projected(A_log.detach(), dt_bias.detach()),
    )
    assert len(made) == (2 if makes else 0)


@pytest.mark.parametrize("backend", [IN_KERNELS])
def test_the_operators_keep_their_promises_with_gates(backend):
    q, k, v, a, z, A_log, dt_bias = arguments()
    tail = (None, None, 0.25, 1.0, True, True, True, backend)
    for gates in ((A_log, dt_bias), (A_log, None)):
        torch.library.opcheck(
            torch.ops.delta_trn.gated_delta_rule.default,
            (q, k, v, a, z, *gates, *tail),
            test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
        )


@pytest.mark.parametrize("backend", ["chunked", IN_KERNELS])
def test_gates_compile_into_the_one_graph(backend):
    torch._dynamo.reset()
    given = arguments()

    def layer(q, k, v, a, z, A_log, dt_bias):
        return gated_delta_rule(q, k, v, 2 * a, z, backend=backend, **projected(A_log, dt_bias))[0]

    expected, found = layer(*given), torch.compile(layer, backend="aot_eager", fullgraph=True)(*given)
    grads = [torch.autograd.grad(y.square().sum(), given) for y in (expected, found)]
    for x, y in zip((expected, *grads[0]), (found, *grads[1]), strict=True):
        assert torch.equal(x, y)


BAD = {
    "no A_log": ({"A_log": None, "dt_bias": None}, ValueError, "use_gate_in_kernel=True without A_log"),
    "not asked for": (
        {"use_gate_in_kernel": False},
        ValueError,
        "A_log and dt_bias given with use_gate_in_kernel=False",
    ),
    "neg without sigmoid": (
        {"use_beta_sigmoid_in_kernel": False, "allow_neg_eigval": True},
        ValueError,
        "allow_neg_eigval=True doubles the sigmoid",
    ),
    "shape": ({"A_log": torch.zeros(3)}, ValueError, r"A_log \[3\] is not \[HV\] = \[2\]"),
    "integers": ({"dt_bias": torch.zeros(2, dtype=torch.int32)}, TypeError, "dt_bias is torch.int32"),
    "a list": ({"A_log": [0.0, 0.0]}, TypeError, "A_log is a list; pass a torch.Tensor"),
    "device": ({"A_log": torch.zeros(2, device="meta")}, ValueError, "A_log is on meta, q is on"),
}


@pytest.mark.parametrize("changes, error, message", BAD.values(), ids=BAD)
def test_bad_gates_are_named_before_any_work(changes, error, message):
    *tensors, A_log, dt_bias = (x.detach() for x in arguments())
    with pytest.raises(error, match=message):
        gated_delta_rule(*tensors, **projected(A_log, dt_bias) | changes)
    token = [x[:, 0] for x in tensors]
    with pytest.raises(error, match=message):
        gated_delta_rule_step(*token, torch.zeros(B, HV, K, V), **projected(A_log, dt_bias) | changes)


@pytest.mark.parametrize("backend", ["chunked", IN_KERNELS])
def test_check_mode_judges_the_gates_that_are_made(backend):
    q, k, v, a, z, A_log, dt_bias = (x.detach() for x in arguments())
    a, z = a.abs() + 1, 5 * z.abs()  # neither is a decay or a strength
    with checking():
        gated_delta_rule(q, k, v, a, z, backend=backend, **projected(A_log, dt_bias))
        with pytest.raises(ValueError, match=r"g at .* above 0"):
            gated_delta_rule(q, k, v, a, z.sigmoid(), backend=backend, use_qk_l2norm_in_kernel=True)
        A_log[1] = float("nan")
        with pytest.raises(ValueError, match="is not finite"):
            gated_delta_rule(q, k, v, a, z, backend=backend, **projected(A_log, dt_bias))
