"""Right gradients, eagerly and by custom operators; one graph under torch.compile; clear words where neither
can be.
"""

import pytest
import torch
import torch.utils.checkpoint
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.functional import normalize

from delta_trn.backends import default_backend, gated_delta_rule, gated_delta_rule_step
from delta_trn.backends.gated_delta_rule import OPERATOR, STEP_OPERATOR
from delta_trn.backends.registry import adapter

BACKENDS = ["chunked", "recurrent"]

# T = 5: parity crosses the chunks of one backend and the segments of the other; here every element counts
VARIANTS = {
    "plain": {},
    "state": {"state": True, "final": True},
    "final only": {"state": True, "final": True, "through": ("final_state",)},
    "grouped": {"H": 1, "HV": 3},
    "packed": {"B": 1, "bounds": (0, 0, 2, 3, 3, 5), "state": True, "final": True},
    "normalized": {"norm": True, "H": 1, "HV": 2, "final": True},
}


def tensors(B=2, T=5, H=2, HV=2, K=3, V=2, N=None, dtype=torch.float64, state=True, norm=False):
    generator = torch.Generator().manual_seed(5)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, k = normal(B, T, H, K), normal(B, T, H, K)
    q, k = (2 * x if norm else normalize(x, dim=-1) for x in (q, k))
    given = [q, k, normal(B, T, HV, V), -normal(B, T, HV).abs(), 2 * normal(B, T, HV).sigmoid()]
    given = [x.to(dtype) for x in given]
    if state:
        given.append(normal(N or B, HV, K, V).to(torch.float64 if dtype == torch.float64 else torch.float32))
    return [x.requires_grad_() for x in given]


def call(*given, backend, final=True, norm=False, bounds=None, **options):
    """gated_delta_rule on q, k, v, g, beta and perhaps initial_state."""
    q, k, v, g, beta, *state = given
    return gated_delta_rule(
        q,
        k,
        v,
        g,
        beta,
        initial_state=state[0] if state else None,
        output_final_state=final,
        use_qk_l2norm_in_kernel=norm,
        cu_seqlens=None if bounds is None else torch.tensor(bounds),
        backend=backend,
        **options,
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_gradients_are_those_of_finite_differences(variant, backend):
    sizes = {name: variant[name] for name in ("B", "H", "HV", "norm") if name in variant}
    bounds = variant.get("bounds")
    given = tensors(**sizes, state=variant.get("state", False), N=len(bounds) - 1 if bounds else None)
    final, through = variant.get("final", False), variant.get("through", ("o", "final_state"))

    def outputs(*given):
        o, state = call(*given, backend=backend, final=final, norm=variant.get("norm", False), bounds=bounds)
        return [y for name, y in (("o", o), ("final_state", state)) if y is not None and name in through]

    assert torch.autograd.gradcheck(lambda *given: tuple(outputs(*given)), given)


def test_gradcheck_can_fail(monkeypatch):
    """A backward that forgets the decay's gradient is caught."""
    right = adapter("chunked").backward

    def wrong(*arguments):
        gradients = right(*arguments)
        return gradients._replace(g=0.99 * gradients.g)

    monkeypatch.setattr(adapter("chunked"), "backward", wrong)
    with pytest.raises(RuntimeError, match="Jacobian mismatch"):
        torch.autograd.gradcheck(lambda *given: call(*given, backend="chunked"), tensors())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("wanted", range(6), ids=["q", "k", "v", "g", "beta", "initial_state"])
def test_one_gradient_alone_is_the_same_as_among_all(wanted, backend):
    given = tensors()
    all_grads = torch.autograd.grad(sum(y.sum() for y in call(*given, backend=backend)), given)
    alone = [x.detach().requires_grad_(i == wanted) for i, x in enumerate(given)]
    (grad,) = torch.autograd.grad(sum(y.sum() for y in call(*alone, backend=backend)), [alone[wanted]])
    assert torch.equal(grad, all_grads[wanted])


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_through_one_output_add_up_to_those_through_both(backend):
    given = tensors()
    o, state = call(*given, backend=backend)
    through_o = torch.autograd.grad(o.sum(), given, retain_graph=True)
    through_state = torch.autograd.grad(state.sum(), given, retain_graph=True, materialize_grads=True)
    both = torch.autograd.grad(o.sum() + state.sum(), given)
    assert not through_state[0].any(), "q has no part in the final state"
    for x, y, z in zip(through_o, through_state, both, strict=True):
        torch.testing.assert_close(x + y, z)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_is_saved_where_no_gradient_is_wanted(backend, monkeypatch):
    saves = []
    right = adapter(backend).forward

    def spy(call, *, save):
        saves.append(save)
        return right(call, save=save)

    monkeypatch.setattr(adapter(backend), "forward", spy)
    given = tensors()
    with torch.no_grad():
        o, _ = call(*given, backend=backend)
    assert not o.requires_grad
    call(*(x.detach() for x in given), backend=backend)
    with torch.inference_mode():
        call(*given, backend=backend)
    o, _ = call(*given, backend=backend)
    assert o.requires_grad
    assert saves == [False, False, False, True]


@pytest.mark.parametrize("backend", BACKENDS)
def test_operators_keep_their_promises_to_pytorch(backend):
    """Schema, fake implementations and autograd registration, by PyTorch's own examination."""
    given = tensors(dtype=torch.float32)
    as_given = (None, None)
    options = (0.5, 0.0, True, True, True, backend)
    rule = (*given[:5], *as_given, given[5], None, *options)
    torch.library.opcheck(torch.ops.delta_trn.gated_delta_rule.default, rule)
    packed = [x[:1].detach().requires_grad_() for x in given[:5]]
    bounds = torch.tensor([0, 2, 2, 5])
    states = torch.zeros(3, 2, 3, 2)
    # without comparing outputs: what is saved for packed sequences has room to spare, filled by nobody
    torch.library.opcheck(
        torch.ops.delta_trn.gated_delta_rule.default,
        (*packed, *as_given, states, bounds, 0.5, 0.0, False, True, True, backend),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )
    step = [x.detach()[:, 0] for x in given[:5]]
    torch.library.opcheck(
        torch.ops.delta_trn.gated_delta_rule_step.default,
        (*step, given[5].detach(), *as_given, 0.5, 0.0, True, False, backend),
    )


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiles_to_one_graph_with_the_same_bits(backend, dynamic):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def layer(*given):
        q, k, v, g, beta, state = given
        o, last = call(q * 1.5, k, v, g, beta.sigmoid(), state, backend=backend, norm=True)
        return o * 2.0, last

    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=dynamic)
    for T in (5, 7, 9) if dynamic else (5,):
        given = tensors(T=T, dtype=torch.float32)
        expected, found = layer(*given), compiled(*given)
        grads = [torch.autograd.grad(y[0].sum() + y[1].square().sum(), given) for y in (expected, found)]
        for x, y in zip((*expected, *grads[0]), (*found, *grads[1]), strict=True):
            assert torch.equal(x, y)
    assert counter.frame_count == 1


def test_a_packed_and_a_step_call_compile_too():
    torch._dynamo.reset()
    given = [x[:1].detach().requires_grad_() for x in tensors(dtype=torch.float32, state=False)]
    bounds = torch.tensor([0, 1, 1, 5])

    def packed(*given):
        return gated_delta_rule(*given, cu_seqlens=bounds, output_final_state=True, backend="chunked")

    found = torch.compile(packed, backend="aot_eager", fullgraph=True)(*given)
    for x, y in zip(found, packed(*given), strict=True):
        assert torch.equal(x, y)
    step = [x.detach()[:, 0] for x in given]
    state = torch.zeros(1, 2, 3, 2)
    compiled = torch.compile(gated_delta_rule_step, backend="aot_eager", fullgraph=True)
    for x, y in zip(compiled(*step, state), gated_delta_rule_step(*step, state), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_changes_no_bit(backend):
    """Products are made in the dtype of q, forward and backward, whatever the context says."""
    given = tensors(dtype=torch.float32)
    expected = call(*given, backend=backend)
    right = torch.autograd.grad(expected[0].sum(), given)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = call(*given, backend=backend)
        grads = torch.autograd.grad(found[0].sum(), given)
        steps = gated_delta_rule_step(
            *(x.detach()[:, 0] for x in given[:5]), given[5].detach(), backend=backend
        )
    plain = gated_delta_rule_step(*(x.detach()[:, 0] for x in given[:5]), given[5].detach(), backend=backend)
    for x, y in zip((*found, *grads, *steps), (*expected, *right, *plain), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_have_the_dtypes_of_their_inputs(backend):
    q, k, v, g, beta, state = tensors(dtype=torch.bfloat16)
    g = g.detach().float().requires_grad_()
    grads = torch.autograd.grad(
        call(q, k, v, g, beta, state, backend=backend)[0].sum(), [q, k, v, g, beta, state]
    )
    short, full = torch.bfloat16, torch.float32
    assert [grad.dtype for grad in grads] == [short, short, short, full, short, full]


@pytest.mark.parametrize("backend", BACKENDS)
def test_inputs_of_any_strides_are_the_same_inputs(backend):
    given = tensors()
    expected = call(*given, backend=backend)
    right = torch.autograd.grad(expected[0].sum(), given)
    strided = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in given]
    assert not strided[0].is_contiguous()
    found = call(*strided, backend=backend)
    grads = torch.autograd.grad(found[0].sum(), strided)
    for x, y in zip((*found, *grads), (*expected, *right), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-14, atol=1e-14)


def test_custom_operators_are_for_graphs_alone(monkeypatch):
    """Around an adapter that does nothing they are two thirds of a call's time."""
    given = tensors()
    expected = call(*given, backend="chunked")

    def refused(*given):
        raise AssertionError("a custom operator was called")

    for operator, direction in ((OPERATOR, "forward"), (OPERATOR, "backward"), (STEP_OPERATOR, "forward")):
        monkeypatch.setattr(operator, direction, refused)
    found = call(*given, backend="chunked")
    torch.autograd.grad(found[0].sum(), given)
    gated_delta_rule_step(*(x.detach()[:, 0] for x in given[:5]), given[5].detach(), backend="chunked")
    assert torch.equal(found[0], expected[0])
    with pytest.raises(torch._dynamo.exc.TorchDynamoException, match="a custom operator was called"):
        torch.compile(call, backend="eager", fullgraph=True)(*given, backend="chunked")


def test_a_second_derivative_is_refused():
    given = tensors()
    o, _ = call(*given, backend="chunked")
    (dq,) = torch.autograd.grad(o.sum(), given[:1], create_graph=True)
    with pytest.raises(
        RuntimeError, match="gated_delta_rule has no second derivative; drop create_graph=True"
    ):
        dq.sum().backward()


def test_gradients_of_what_was_not_saved_are_refused():
    given = tensors()
    o, _, _ = torch.ops.delta_trn.gated_delta_rule(
        *given[:5], None, None, given[5], None, 1.0, 0.0, False, False, False, "chunked"
    )
    with pytest.raises(RuntimeError, match="was called with save=False and is now asked for gradients"):
        o.sum().backward()


def test_checkpointing_gives_the_same_gradients():
    given = tensors()

    def layer(*given):
        return call(*given, backend="chunked")

    expected = torch.autograd.grad(layer(*given)[0].sum(), given)
    o, _ = torch.utils.checkpoint.checkpoint(layer, *given, use_reentrant=False)
    for x, y in zip(torch.autograd.grad(o.sum(), given), expected, strict=True):
        assert torch.equal(x, y)


def test_a_compiled_function_follows_the_process_default(monkeypatch):
    torch._dynamo.reset()
    ran = []
    for name in BACKENDS:
        inner = adapter(name).forward

        def spy(*args, _inner=inner, _name=name, **options):
            ran.append(_name)
            return _inner(*args, **options)

        monkeypatch.setattr(adapter(name), "forward", spy)
    given = [x.detach() for x in tensors(state=False)]
    compiled = torch.compile(gated_delta_rule, backend="eager", fullgraph=True)
    for name in ("recurrent", "chunked", "recurrent"):
        with default_backend(name):
            compiled(*given)
    assert ran == ["recurrent", "chunked", "recurrent"]
