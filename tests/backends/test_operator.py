# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false,
# reportOptionalMemberAccess=false
"""The operator around every backend: its gradients, one graph under torch.compile,
and what it refuses.
"""

import warnings

import pytest
import torch
import torch.utils.checkpoint
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.functional import normalize

from delta_trn.backends import (
    add_rms_norm,
    default_backend,
    delta_residual,
    dispatch,
    gated_delta_rule,
    gated_delta_rule_step,
    gated_rms_norm,
    linear_cross_entropy,
    short_convolution,
)
from delta_trn.backends.dispatch import adapter
from delta_trn.backends.gated_delta_rule import OPERATOR, STEP_OPERATOR
from delta_trn.backends.operator import Operator

BACKENDS = ["chunked", "recurrent"]
RUNNABLE = [name for name, backend in dispatch.BACKENDS.items() if not backend.unavailable("cpu")]


def tensors(B=2, T=5, H=2, HV=2, K=3, V=2, N=None, dtype=torch.float64, state=True, norm=False):
    generator = torch.Generator().manual_seed(5)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, k = normal(B, T, H, K), normal(B, T, H, K)
    q, k = (2 * x if norm else normalize(x, dim=-1) for x in (q, k))
    leaves = [q, k, normal(B, T, HV, V), -normal(B, T, HV).abs(), 2 * normal(B, T, HV).sigmoid()]
    leaves = [x.to(dtype) for x in leaves]
    if state:
        leaves.append(
            normal(N or B, HV, K, V).to(torch.float64 if dtype == torch.float64 else torch.float32)
        )
    return [x.requires_grad_() for x in leaves]


def call(*leaves, backend, norm=False):
    """Calls gated_delta_rule on q, k, v, g, beta and perhaps initial_state."""
    return gated_delta_rule(
        *leaves[:5], initial_state=leaves[5] if leaves[5:] else None, output_final_state=True,
        use_qk_l2norm_in_kernel=norm, backend=backend,
    )  # fmt: skip


def test_nothing_is_saved_where_no_gradient_is_wanted(monkeypatch):
    saves = []
    forward = adapter("chunked").forward

    def spy(call, *, save):
        saves.append(save)
        return forward(call, save=save)

    monkeypatch.setattr(adapter("chunked"), "forward", spy)
    leaves = tensors()
    with torch.no_grad():
        o, _ = call(*leaves, backend="chunked")
    assert not o.requires_grad
    call(*(x.detach() for x in leaves), backend="chunked")
    with torch.inference_mode():
        call(*leaves, backend="chunked")
    o, _ = call(*leaves, backend="chunked")
    assert o.requires_grad
    assert saves == [False, False, False, True]


def test_operators_pass_pytorchs_opcheck():
    """opcheck examines the schema, the fake implementation and the registration of autograd."""
    leaves = tensors(dtype=torch.float32)
    no_gates = (None, None)  # neither A_log nor dt_bias
    options = (0.5, 0.0, True, True, None, True, "chunked")
    rule = (*leaves[:5], *no_gates, leaves[5], None, None, *options)
    torch.library.opcheck(torch.ops.delta_trn.gated_delta_rule.default, rule)
    packed = [x[:1].detach().requires_grad_() for x in leaves[:5]]
    bounds = torch.tensor([0, 2, 2, 5])
    states = torch.zeros(3, 2, 3, 2)
    # outputs are not compared: the buffers saved for packed sequences end in rows that nobody
    # writes
    torch.library.opcheck(
        torch.ops.delta_trn.gated_delta_rule.default,
        (*packed, *no_gates, states, bounds, None, 0.5, 0.0, False, True, None, True, "chunked"),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )
    step = [x.detach()[:, 0] for x in leaves[:5]]
    torch.library.opcheck(
        torch.ops.delta_trn.gated_delta_rule_step.default,
        (*step, leaves[5].detach(), *no_gates, None, None, 0.5, 0.0, True, None, False, "chunked"),
    )
    channels = (
        -leaves[0].detach().repeat(1, 1, leaves[2].shape[2], 1)[:, :, : leaves[2].shape[2]].abs()
    )
    channels.requires_grad_()
    kimi = (*leaves[:3], channels, leaves[4], *no_gates, leaves[5], None, None, *options)
    torch.library.opcheck(torch.ops.delta_trn.kimi_delta_attention.default, kimi)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_the_rule_compiles_to_one_graph_with_the_same_bits(dynamic):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def layer(*leaves):
        q, k, v, g, beta, state = leaves
        o, last = call(q * 1.5, k, v, g, beta.sigmoid(), state, backend="chunked", norm=True)
        return o * 2.0, last

    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=dynamic)
    for T in (5, 7, 9) if dynamic else (5,):
        leaves = tensors(T=T, dtype=torch.float32)
        expected, outputs = layer(*leaves), compiled(*leaves)
        gradients = [
            torch.autograd.grad(y[0].sum() + y[1].square().sum(), leaves)
            for y in (expected, outputs)
        ]
        for x, y in zip((*expected, *gradients[0]), (*outputs, *gradients[1]), strict=True):
            assert torch.equal(x, y)
    assert counter.frame_count == 1


def test_packed_calls_compile_to_the_same_bits():
    torch._dynamo.reset()
    leaves = [x[:1].detach().requires_grad_() for x in tensors(dtype=torch.float32, state=False)]
    bounds = torch.tensor([0, 1, 1, 5])

    def packed(*leaves):
        return gated_delta_rule(
            *leaves, cu_seqlens=bounds, output_final_state=True, backend="chunked"
        )

    outputs = torch.compile(packed, backend="aot_eager", fullgraph=True)(*leaves)
    for x, y in zip(outputs, packed(*leaves), strict=True):
        assert torch.equal(x, y)


def test_autocast_changes_no_bit_of_outputs_and_gradients():
    """Products are computed in the dtype of q, forward and backward, also inside autocast."""
    leaves = tensors(dtype=torch.float32)
    expected = call(*leaves, backend="chunked")
    expected_gradients = torch.autograd.grad(expected[0].sum(), leaves)
    step = [x.detach()[:, 0] for x in leaves[:5]] + [leaves[5].detach()]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = call(*leaves, backend="chunked")
        gradients = torch.autograd.grad(outputs[0].sum(), leaves)
        after = gated_delta_rule_step(*step, backend="chunked")
    expected_after = gated_delta_rule_step(*step, backend="chunked")
    for x, y in zip(
        (*outputs, *gradients, *after),
        (*expected, *expected_gradients, *expected_after),
        strict=True,
    ):
        assert torch.equal(x, y)


def test_only_compiled_calls_go_through_the_custom_operators(monkeypatch):
    """The operators would take two thirds of the time of an eager call
    to an adapter that does nothing.
    """
    leaves = tensors()
    expected = call(*leaves, backend="chunked")

    def fail(*arguments):
        raise AssertionError("a custom operator was called")

    for operator, direction in (
        (OPERATOR, "forward"),
        (OPERATOR, "backward"),
        (STEP_OPERATOR, "forward"),
    ):
        monkeypatch.setattr(operator, direction, fail)
    outputs = call(*leaves, backend="chunked")
    torch.autograd.grad(outputs[0].sum(), leaves)
    gated_delta_rule_step(
        *(x.detach()[:, 0] for x in leaves[:5]), leaves[5].detach(), backend="chunked"
    )
    assert torch.equal(outputs[0], expected[0])
    with pytest.raises(
        torch._dynamo.exc.TorchDynamoException, match="a custom operator was called"
    ):
        torch.compile(call, backend="eager", fullgraph=True)(*leaves, backend="chunked")


def test_a_second_derivative_of_the_rule_is_refused():
    leaves = tensors()
    o, _ = call(*leaves, backend="chunked")
    with pytest.raises(
        RuntimeError, match="gated_delta_rule has no second derivative; drop create_graph"
    ):
        torch.autograd.grad(o.sum(), leaves[:1], create_graph=True)


def test_gradients_of_a_call_with_save_false_are_refused():
    leaves = tensors()
    o, _, _ = torch.ops.delta_trn.gated_delta_rule(
        *leaves[:5],
        None,
        None,
        leaves[5],
        None,
        None,
        1.0,
        0.0,
        False,
        False,
        None,
        False,
        "chunked",
    )
    with pytest.raises(
        RuntimeError, match="was called with save=False and is now asked for gradients"
    ):
        o.sum().backward()


def test_checkpointing_the_rule_gives_the_same_gradients():
    leaves = tensors()

    def layer(*leaves):
        return call(*leaves, backend="chunked")

    expected = torch.autograd.grad(layer(*leaves)[0].sum(), leaves)
    o, _ = torch.utils.checkpoint.checkpoint(layer, *leaves, use_reentrant=False)
    for x, y in zip(torch.autograd.grad(o.sum(), leaves), expected, strict=True):
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
    leaves = [x.detach() for x in tensors(state=False)]
    compiled = torch.compile(gated_delta_rule, backend="eager", fullgraph=True)
    for name in ("recurrent", "chunked", "recurrent"):
        with default_backend(name):
            compiled(*leaves)
    assert ran == ["recurrent", "chunked", "recurrent"]


def operations(B=2, T=3):
    """Returns a call of each operation, and its tensors, all of whose gradients are wanted."""
    H, K, V, C = 2, 4, 3, 6

    def normal(*shape):
        return torch.randn(shape, generator=torch.Generator().manual_seed(6))

    token = [
        normal(B, H, K),
        normal(B, H, K),
        normal(B, H, V),
        -normal(B, H).abs(),
        normal(B, H).sigmoid(),
    ]
    tokens = [x[:, None].expand(B, T, *x.shape[1:]) for x in token]
    gates, state = [normal(H), normal(H)], normal(B, H, K, V)
    targets = torch.arange(B * T) % 5

    def rule(q, k, v, g, beta, A_log, dt_bias, state, **options):
        parameters = {"use_gate_in_kernel": True, "A_log": A_log, "dt_bias": dt_bias}
        options |= parameters | {"initial_state": state, "output_final_state": True}
        return gated_delta_rule(q, k, v, g, beta, **options)

    def residual(x, k, v, beta, **options):
        return (delta_residual(x, k, v, beta, k_eps=1e-3, **options),)

    return {
        "rule": (rule, [*tokens, *gates, state]),
        "step": (gated_delta_rule_step, [*token, state]),
        "residual": (
            residual,
            [normal(B, T, K, V), normal(B, T, K), normal(B, T, V), normal(B, T).sigmoid()],
        ),
        "convolution": (
            lambda x, w, prefix, **o: (short_convolution(x, w, prefix=prefix, **o),),
            [normal(B, T, C), normal(C, 4), normal(B, 3, C)],
        ),
        "norm": (
            lambda x, z, w, **o: (gated_rms_norm(x, z, w, eps=1e-6, **o),),
            [normal(B, T, C), normal(B, T, C), normal(C)],
        ),
        "norm with a sigmoid": (
            lambda x, z, w, **o: (gated_rms_norm(x, z, w, eps=1e-6, activation="sigmoid", **o),),
            [normal(B, T, C), normal(B, T, C), normal(C)],
        ),
        "norm without a gate": (
            lambda x, w, **o: (gated_rms_norm(x, None, w, eps=1e-6, **o),),
            [normal(B, T, C), normal(C)],
        ),
        "sum": (
            lambda x, y, w, **o: add_rms_norm(x, y, w, eps=1e-6, **o),
            [normal(B, T, C), normal(B, T, C), normal(C)],
        ),
        "loss": (
            lambda h, w, **o: (linear_cross_entropy(h, w, targets.to(h.device), **o),),
            [normal(B * T, C), normal(5, C)],
        ),
    }


def results(function, tensors, **options):
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    outputs = function(*leaves, **options)
    return [*outputs, *torch.autograd.grad(sum(y.sum() for y in outputs), leaves)]


EMPTY = [
    (name, backend, B, T)
    for name in operations()
    for backend in RUNNABLE
    if backend == "chunked" or name in ("rule", "residual")
    for B, T in ((0, 3), (2, 0))
    if (name, T) != ("step", 0)
]


@pytest.mark.parametrize(("name", "backend", "B", "T"), EMPTY)
def test_a_call_without_elements_returns_its_states_and_zero_gradients(
    name, backend, B, T, monkeypatch
):
    monkeypatch.setattr(Operator, "compute", lambda *arguments: pytest.fail("a backend was called"))
    function, tensors = operations(B, T)[name]
    shapes = [y.shape for y in function(*(x.to("meta") for x in tensors))]
    (*outputs,) = results(function, tensors, backend=backend)
    outputs, gradients = outputs[: len(shapes)], outputs[len(shapes) :]
    assert [y.shape for y in outputs] == shapes
    assert not any(y.requires_grad for y in function(*tensors, backend=backend))
    for x, gradient in zip(tensors, gradients, strict=True):
        states = name == "rule" and x is tensors[-1]  # they are outputs, too
        assert torch.equal(gradient, torch.full_like(x, float(states)))
    if name == "rule":
        assert torch.equal(outputs[1], tensors[-1])
    if name == "loss":
        assert outputs[0] == 0


@pytest.mark.parametrize("backend", RUNNABLE)
def test_packed_sequences_may_all_be_empty(backend):
    leaves = [
        x[:1, :0].detach().requires_grad_() for x in tensors(state=False, dtype=torch.float32)
    ]
    bounds = torch.zeros(4, dtype=torch.int64)
    o, state = gated_delta_rule(
        *leaves, cu_seqlens=bounds, output_final_state=True, backend=backend
    )
    assert o.shape == (1, 0, 2, 2) and torch.equal(state, torch.zeros(3, 2, 3, 2))
    with pytest.raises(ValueError, match="cu_seqlens runs from 0 to 1; it must run from 0 to T=0"):
        gated_delta_rule(*leaves, cu_seqlens=bounds + torch.tensor([0, 0, 0, 1]), backend=backend)


@pytest.mark.parametrize("name", operations())
def test_meta_tensors_give_shapes_and_dtypes_of_outputs_and_gradients(name):
    function, tensors = operations()[name]
    shapes = [(x.shape, x.dtype) for x in results(function, tensors)]
    meta = results(function, [x.to("meta") for x in tensors])
    assert [(x.shape, x.dtype) for x in meta] == shapes and all(x.is_meta for x in meta)


class CheckedGraph(torch.fx.Interpreter):
    """Runs a graph, and examines the schema and the fake implementation
    of this project's operations.
    """

    checked = 0

    def call_function(self, target, args, kwargs):
        if "delta_trn" in str(target):
            self.checked += 1
            torch.library.opcheck(
                target, args, kwargs, test_utils=("test_schema", "test_faketensor")
            )
        return super().call_function(target, args, kwargs)


@pytest.mark.parametrize("backend", [name for name in ("chunked", "triton") if name in RUNNABLE])
@pytest.mark.parametrize("name", operations())
def test_every_operation_compiles_to_one_graph_with_the_same_gradients(name, backend):
    torch._dynamo.reset()
    function, tensors = operations()[name]

    def call(*leaves):
        return function(*leaves, backend=backend)

    compiled, graphs = torch.compile(call, fullgraph=True, backend="aot_eager"), []
    for x, y in zip(results(compiled, tensors), results(call, tensors), strict=True):
        assert torch.equal(x, y)

    def check_later(graph, _):
        graphs.append(CheckedGraph(graph))
        return graphs[-1].run

    torch._dynamo.reset()
    torch.compile(call, fullgraph=True, backend=check_later)(*(x.requires_grad_() for x in tensors))
    assert [graph.checked for graph in graphs] == [1]


@pytest.mark.parametrize("name", operations())
def test_a_traced_call_is_one_operation_with_gradients(name):
    function, tensors = operations()[name]
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    with warnings.catch_warnings():
        # of torch.jit: it is deprecated, and shapes become constants
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(function, tuple(leaves))
    for x, y in zip(results(traced, tensors), results(function, tensors), strict=True):
        assert torch.equal(x, y)
    assert "delta_trn::" in str(traced.graph)


@pytest.mark.parametrize("name", operations())
@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp"])
def test_transforms_of_torch_func_are_refused_in_plain_words(transform, name):
    function, tensors = operations()[name]
    first, *rest = tensors
    calls = {
        "vmap": lambda: torch.vmap(lambda x: function(x, *rest))(first[None]),
        "grad": lambda: torch.func.grad(lambda x: function(x, *rest)[0].sum())(first),
        "jvp": lambda: torch.func.jvp(lambda x: function(x, *rest), (first,), (first,)),
    }
    with pytest.raises(TypeError, match="make the mapped dimension part of the batch"):
        calls[transform]()
