"""States at chosen positions, on every backend, against a plain loop in float64."""

import re
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch.nn.functional import normalize

from delta_trn.backends import gated_delta_rule, kimi_delta_attention
from delta_trn.backends.dispatch import BACKENDS
from delta_trn.backends.parity.judge import error

T, H, HV, K, V = 40, 1, 2, 16, 16
AT = (1, 32, 33, T)  # chunked's chunks have 32 tokens
ONE_ROW, PACKED = None, (0, 0, 5, 5, 33, T, T)
layouts = pytest.mark.parametrize("bounds", [ONE_ROW, PACKED], ids=["rows", "packed"])


def draw(bounds, at=AT, dtype=torch.float32):
    """Returns q, k, v, g, beta, the initial state, and gradients of o and of states,
    of at[-1] tokens.
    """
    (B, N), T = (2, 2) if bounds is None else (1, len(bounds) - 1), at[-1]
    random = torch.Generator().manual_seed(0)
    sizes = ((B, T, H, K), (B, T, H, K), (B, T, HV, V), (B, T, HV), (B, T, HV), (N, HV, K, V))
    sizes += ((B, T, HV, V), (B, len(at), HV, K, V))
    q, k, v, g, beta, *rest = (torch.randn(size, generator=random) for size in sizes)
    tensors = (normalize(q, dim=-1), normalize(k, dim=-1), v, -g.exp() / 4, beta.sigmoid(), *rest)
    return [x.to(dtype) for x in tensors]


def loop(q, k, v, g, beta, state, *, bounds, at):
    """Returns o and the states after `at` tokens, by the equations of the operation."""
    q, k = q.expand(-1, -1, HV, -1), k.expand(-1, -1, HV, -1)
    outs, states, S = [], [], state
    for t in range(at[-1]):
        for n, (first, last) in enumerate(pairwise(bounds or ())):
            S = state[n : n + 1] if first == t < last else S
        S = g[:, t].exp()[..., None, None] * S
        u = beta[:, t, :, None] * (v[:, t] - (k[:, t, :, None] @ S)[..., 0, :])
        S = S + k[:, t, ..., None] * u[..., None, :]
        outs.append(K**-0.5 * (q[:, t, :, None] @ S)[..., 0, :])
        states += [S] if t + 1 in at else []
    return torch.stack(outs, 1), torch.stack(states, 1)


def operation(*tensors, bounds=None, at=None, **options):
    *inputs, state = tensors
    cu_seqlens = None if bounds is None else torch.tensor(bounds)
    options |= {} if at is None else {"return_states_at": at}
    return gated_delta_rule(*inputs, initial_state=state, cu_seqlens=cu_seqlens, **options)


def outcome(function, tensors, **options):
    """Returns o, the states, and the gradients of six inputs."""
    *inputs, do, dstates = tensors
    leaves = [x.detach().requires_grad_() for x in inputs]
    outputs = function(*leaves, **options)
    return [*outputs, *torch.autograd.grad(outputs, leaves, [do, dstates])]


@layouts
@pytest.mark.parametrize("backend", ["chunked", "recurrent", "triton", "nki-simulator"])
def test_states_and_their_gradients_are_those_of_a_loop_over_tokens(backend, bounds):
    """They err at most twice as much as the loop does in float32."""
    if reason := BACKENDS[backend].unavailable("cpu"):
        pytest.skip(reason)
    at = AT
    if backend in ("triton", "nki-simulator"):  # interpreted
        at, bounds = (6, 8), bounds and (0, 0, 5, 5, 7, 8, 8)
    tensors = draw(bounds, at)
    expected = outcome(loop, [x.double() for x in tensors], bounds=bounds, at=at)
    results = outcome(operation, tensors, bounds=bounds, at=at, backend=backend)
    control = outcome(loop, tensors, bounds=bounds, at=at)
    assert [(x.shape, x.dtype) for x in results] == [(x.shape, x.dtype) for x in control]
    ours, theirs = (
        max(error(x.double(), y) for x, y in zip(xs, expected, strict=True))
        for xs in (results, control)
    )
    assert ours <= 2 * max(theirs, torch.finfo(torch.float32).eps)


def test_states_on_chunk_boundaries_change_no_bit_and_a_call_goes_on_from_one():
    *inputs, _, _ = draw(ONE_ROW)
    expected, last = operation(*inputs, output_final_state=True)
    o, states = operation(*inputs, at=(32, T))
    assert torch.equal(o, expected) and torch.equal(states[:, 1], last)
    rest, _ = operation(*(x[:, 32:] for x in inputs[:5]), states[:, 0])
    assert torch.equal(rest, o[:, 32:])


def test_states_may_have_values_first_and_none_may_be_asked_for():
    *inputs, state, _, _ = draw(ONE_ROW)
    _, states = operation(*inputs, state, at=range(1, T, 9))
    _, transposed = operation(*inputs, state.mT, at=range(1, T, 9), state_v_first=True)
    assert states.shape == (2, 5, HV, K, V) and torch.equal(transposed, states.mT)
    o, none = operation(*inputs, None, at=())
    assert none.shape == (2, 0, HV, K, V) and torch.equal(o, operation(*inputs, None)[0])
    assert operation(*(x[:, :0] for x in inputs), None, at=())[1].shape == none.shape


@layouts
def test_states_compile_to_one_graph_with_the_same_bits(bounds):
    torch._dynamo.reset()
    *tensors, dstates = draw(bounds)
    tensors.append(dstates[:, 2:])
    compiled = torch.compile(operation, backend="aot_eager", fullgraph=True)
    results = (outcome(run, tensors, bounds=bounds, at=AT[2:]) for run in (operation, compiled))
    for x, y in zip(*results, strict=True):
        assert torch.equal(x, y)


BAD = (
    (
        (0, 3),
        ValueError,
        "return_states_at has 0 after 0; positions are numbers of tokens and rise",
    ),
    ((3, 3), ValueError, "return_states_at has 3 after 3"),
    (
        (3, 41),
        ValueError,
        "return_states_at has 41 after 3; positions are numbers of tokens and rise from 1 to",
    ),
    (torch.tensor([3]), TypeError, "return_states_at is a Tensor; pass a tuple of ints"),
    ((3.0,), TypeError, "pass a tuple of ints"),
    (3, TypeError, "return_states_at is a int; pass a tuple of ints"),
)


@pytest.mark.parametrize(("at", "wrong", "message"), BAD)
def test_bad_positions_are_refused_by_name(at, wrong, message):
    with pytest.raises(wrong, match=re.escape(message)):
        operation(*draw(ONE_ROW)[:6], at=at)


def test_the_final_state_beside_states_is_refused():
    with pytest.raises(
        ValueError, match="leave it out, and name 40, or the end of each packed sequence"
    ):
        operation(*draw(ONE_ROW)[:6], at=(3,), output_final_state=True)


@pytest.mark.parametrize("last", [39, 41])
def test_bounds_that_do_not_end_with_the_row_are_found_before_the_first_piece(last):
    with pytest.raises(
        ValueError, match=f"cu_seqlens runs from 0 to {last}; it must run from 0 to T=40"
    ):
        operation(*draw(PACKED)[:6], bounds=(*PACKED[:-1], last), at=(7,))


def of_gates(rule, dtype, at=None):
    """Returns the gradients of A_log and dt_bias [HV], or [HV, K], which are bfloat16 numbers."""
    random = torch.Generator().manual_seed(3)
    draw, tokens = partial(torch.randn, generator=random), 1024
    channels = (K,) if rule is kimi_delta_attention else ()
    q, k = (normalize(draw(1, tokens, 1, K), dim=-1).to(dtype) for _ in "qk")
    v, a = draw(1, tokens, HV, V).to(dtype), draw(1, tokens, HV, *channels).to(dtype)
    beta, do = draw(1, tokens, HV).sigmoid().to(dtype), draw(1, tokens, HV, V).to(dtype)
    leaves = [draw(HV).bfloat16(), draw(HV, *channels).bfloat16()]
    leaves = [x.to(torch.promote_types(x.dtype, dtype)) if at is LOOP else x for x in leaves]
    A_log, dt_bias = (x.requires_grad_() for x in leaves)
    if at is LOOP:
        rates = A_log.exp().view(HV, *[1] * len(channels))
        g, o, S = -rates * (a + dt_bias).exp().add(1).log(), [], v.new_zeros(1, HV, K, V)
        for t in range(tokens):
            S = g[:, t].exp().view(1, HV, -1, 1) * S
            u = beta[:, t, :, None] * (v[:, t] - (k[:, t, :, None] @ S)[..., 0, :])
            S = S + k[:, t, ..., None] * u[..., None, :]
            o.append(K**-0.5 * (q[:, t, :, None] @ S)[..., 0, :])
        o = torch.stack(o, 1)
    else:
        options = {"use_gate_in_kernel": True, "A_log": A_log, "dt_bias": dt_bias}
        o, _ = rule(q, k, v, a, beta, **options, return_states_at=at)
    return torch.autograd.grad(o, (A_log, dt_bias), do)


LOOP = "loop"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rule", [gated_delta_rule, kimi_delta_attention])
def test_gradients_of_short_parameters_are_rounded_once_and_not_once_a_piece(rule, dtype):
    """The judge is a loop in float64. The control is the call that is not cut."""
    exact = of_gates(rule, torch.float64, LOOP)
    whole, cut = of_gates(rule, dtype), of_gates(rule, dtype, tuple(range(16, 1025, 16)))
    for found, control, judge in zip(cut, whole, exact, strict=True):
        assert found.dtype == control.dtype == torch.bfloat16
        allowed = max(error(control.double(), judge), 2**-9)
        assert error(found.double(), judge) <= 1.5 * allowed
