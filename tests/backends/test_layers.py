"""The layers' small operations on every backend: against float64, their algebra, one graph, bad input."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the triton extra is not installed")

from delta_trn import backends
from delta_trn.backends import (
    BackendRefusal,
    add_rms_norm,
    checking,
    default_backend,
    gated_rms_norm,
    linear_cross_entropy,
    short_convolution,
)
from delta_trn.backends.layers import CONVOLUTION, CROSS_ENTROPY, NORM, SUM_NORM
from delta_trn.backends.layers.contract import Convolution, GatedNorm, Readout, SumNorm
from delta_trn.backends.parity import layer_cases
from delta_trn.backends.parity.judge import DTYPES, error
from delta_trn.backends.parity.layer_cases import BY_NAME, CASES, EPS
from delta_trn.backends.registry import BACKENDS, Call, choose
from delta_trn.triton_kernels import cross_entropy, rms_norm
from delta_trn.triton_kernels import short_convolution as convolution_kernels
from tests.support.tiny_models import model, tokens

SAME = 2**-22  # a vector register's exponential and its remainder's differ in the last bit


def runs(backend, case):
    """Whether the backend declares the case and runs on CPU tensors here."""
    capability = BACKENDS[backend].capabilities.get(case.op)
    if capability is None or BACKENDS[backend].unavailable("cpu"):
        return False
    form = {"short_convolution": ("silu", "linear"), "gated_rms_norm": ("gated", "plain")}.get(
        case.op, ("", "")
    )
    call = Call(case.op, "cpu", torch.float32, {"W": 4}, gradients=True, form=form[case.plain])
    return not BACKENDS[backend].refusals(call)


LAYERS = ("short_convolution", "gated_rms_norm", "add_rms_norm", "linear_cross_entropy")
PAIRS = [(backend, case) for backend in BACKENDS for case in CASES if runs(backend, case)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("backend", "case"), PAIRS, ids=lambda x: getattr(x, "name", x))
def test_parity(backend, case, dtype):
    failed = [str(v) for v in layer_cases.verdicts(case, dtype, backend) if not v.passed]
    assert not failed, "\n".join(failed)


def test_every_operation_is_tested_on_every_backend_that_has_kernels():
    assert {case.op for case in CASES} == set(LAYERS)
    tested = {(backend, case.op) for backend, case in PAIRS}
    assert tested >= {("chunked", op) for op in LAYERS} | {("triton", op) for op in LAYERS}
    assert tested >= {("nki-simulator", "short_convolution"), ("nki-simulator", "gated_rms_norm")}


def _kernel(module, name, monkeypatch, change):
    """Its launcher, with arguments changed by `change`."""
    launcher = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *given, **named: launcher(*change(given), **named))


@pytest.mark.parametrize(
    ("module", "name", "place", "case", "tensor"),
    [
        (convolution_kernels, "forward", 3, "conv_packed", "y"),
        (convolution_kernels, "backward", 4, "conv_packed", "dx"),
        (rms_norm, "backward", 1, "sum_odd", "dx"),
    ],
)
def test_parity_fails_when_a_kernel_is_not_told_something(module, name, place, case, tensor, monkeypatch):
    """Positions of packed tokens, forward and backward; the gradient of the sum itself."""

    def without(given):
        absent = given[place] if given[place] is None else 0 * given[place] + 9 * (place > 1)
        return (*given[:place], absent, *given[place + 1 :])

    _kernel(module, name, monkeypatch, without)
    failed = {v.tensor for v in layer_cases.verdicts(BY_NAME[case], torch.float32, "triton") if not v.passed}
    assert tensor in failed


def test_parity_fails_when_a_target_that_does_not_count_does(monkeypatch):
    _kernel(cross_entropy, "softmax_", monkeypatch, lambda given: (*given[:2], given[2] * 0 + 1, given[3]))
    found = layer_cases.verdicts(BY_NAME["loss_ignored"], torch.float32, "triton")
    assert {v.tensor for v in found if not v.passed} == {"loss", "dhidden", "dweight"}


@pytest.mark.parametrize("name", ["conv_packed", "norm_head", "sum_odd", "loss_ignored"])
def test_triton_gives_the_same_bits_again_and_writes_everything(name, poison):
    case, given = BY_NAME[name], layer_cases.inputs(BY_NAME[name], torch.bfloat16)
    first, second = (layer_cases.outcome(case, given, "triton") for _ in range(2))
    assert all(torch.equal(first[key], second[key]) and first[key].isfinite().all() for key in first)


@pytest.mark.parametrize("backend", ["chunked", "triton"])
def test_packed_sequences_do_not_see_each_other(backend):
    case = BY_NAME["conv_packed"]
    given = layer_cases.inputs(case, torch.float32)
    x, weight, position = (given[name] for name in ("x", "weight", "position"))
    packed = short_convolution(x, weight, position=position, backend=backend)
    assert case.lengths is not None
    alone = [
        short_convolution(part, weight, backend=backend)
        for part in x.split(case.lengths, dim=1)
        if part.numel()
    ]
    assert error(packed, torch.cat(alone, dim=1)) < SAME
    assert error(packed, short_convolution(x, weight, backend=backend)) > 0.01


@pytest.mark.parametrize("backend", ["chunked", "triton"])
def test_a_prefix_is_what_came_before(backend):
    given = layer_cases.inputs(BY_NAME["conv_ragged"], torch.float32)
    x, weight = given["x"], given["weight"]
    whole = short_convolution(x, weight, backend=backend)
    rest = short_convolution(x[:, 9:], weight, prefix=x[:, 6:9], backend=backend)
    assert error(rest, whole[:, 9:]) < SAME


def test_the_sum_is_the_sum_to_the_bit():
    given = layer_cases.inputs(BY_NAME["sum_odd"], torch.bfloat16)
    x, residual, weight = (given[name] for name in ("x", "residual", "weight"))
    for backend in ("chunked", "triton"):
        y, total = add_rms_norm(x, residual, weight, eps=EPS, backend=backend)
        assert torch.equal(total, x + residual)
        assert torch.equal(y, gated_rms_norm(total, None, weight, eps=EPS, backend=backend))
    wide = add_rms_norm(x, residual.float(), weight, eps=EPS)[1]
    assert wide.dtype == torch.float32 and torch.equal(wide, residual.float() + x)


def calls() -> list[tuple]:
    """An operator and a call of it for every form of every operation."""
    conv, norm, total, loss = (
        layer_cases.inputs(BY_NAME[name], torch.float32)
        for name in ("conv_prefix", "norm_head", "sum_odd", "loss_ignored")
    )
    conv, norm, total = ([x for name, x in given.items() if name[0] != "d"] for given in (conv, norm, total))
    return [
        (CONVOLUTION, Convolution(*conv)),
        (NORM, GatedNorm(*norm, EPS)),
        (NORM, GatedNorm(norm[0], None, norm[2], EPS)),
        (SUM_NORM, SumNorm(*total, EPS)),
        (CROSS_ENTROPY, Readout(loss["hidden"], loss["weight"], loss["targets"])),
    ]


@pytest.mark.parametrize("backend", ["chunked", "triton"])
@pytest.mark.parametrize("which", range(5))
def test_one_graph_under_compile(which, backend):
    """What torch.compile runs is the custom operator; its results and gradients are the eager ones."""
    torch._dynamo.reset()
    operator, call = calls()[which]
    tensors = {name: x for name, x in vars(call).items() if isinstance(x, Tensor)}
    leaves = {name: x.clone().requires_grad_() if x.is_floating_point() else x for name, x in tensors.items()}
    wanted = [x for x in leaves.values() if x.requires_grad]

    def loss(leaves):
        outputs = operator(replace(call, **leaves), save=True, backend=backend)
        return sum((y * torch.arange(1.0, y.numel() + 1).view(y.shape).sin()).sum() for y in outputs)

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    found, expected = (torch.autograd.grad(f(leaves), wanted) for f in (compiled, loss))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    torch.library.opcheck(
        getattr(torch.ops.delta_trn, operator.name).default,
        (*vars(call).values(), True, backend),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_a_second_derivative_is_refused():
    x, weight = torch.randn(2, 5, 8, requires_grad=True), torch.randn(8, 4)
    (grad,) = torch.autograd.grad(short_convolution(x, weight).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="short_convolution has no second derivative"):
        grad.sum().backward()


def norm_call(N=64):
    return Call("gated_rms_norm", "cpu", torch.float32, {"N": N}, form="gated")


def test_a_default_backend_that_lacks_an_operation_refuses_it_unless_another_is_allowed():
    assert choose(norm_call()).name == "chunked"
    total = Call("add_rms_norm", "cpu", torch.float32, {"N": 64})
    with default_backend("nki-simulator"):
        assert choose(norm_call()).name == "nki-simulator"
        for call in (total, norm_call(5000)):
            with pytest.raises(BackendRefusal, match=r'default_backend\("nki-simulator", allow=\["\w+"\]\)'):
                choose(call)
    with default_backend("nki-simulator", allow=["chunked"]):
        assert choose(norm_call()).name == "nki-simulator"
        assert choose(total).name == choose(norm_call(5000)).name == "chunked"


def test_a_default_backend_that_cannot_run_here_is_not_replaced_by_pytorch(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with default_backend("triton"), pytest.raises(BackendRefusal, match="only in Triton's interpreter"):
        gated_rms_norm(ONES, None, torch.ones(4), eps=1e-6)
    with default_backend("triton", allow=["chunked"]):
        gated_rms_norm(ONES, None, torch.ones(4), eps=1e-6)


def test_a_backend_named_by_the_caller_is_strict():
    with pytest.raises(BackendRefusal, match="N=5000 is above 4096: the sums of dweight fill the 8 banks"):
        choose(norm_call(5000), "nki-simulator")
    with pytest.raises(BackendRefusal, match="nki-simulator  computes silu; this call is linear"):
        short_convolution(torch.ones(1, 2, 3), torch.ones(3, 4), activation="linear", backend="nki-simulator")
    assert {row.op for row in backends.describe() if row.automatic} >= set(LAYERS)


ONES = torch.ones(2, 3, 4)


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda: short_convolution(ONES, torch.ones(5, 4)), r"weight \[5, 4\] does not fit x \[2, 3, 4\]"),
        (lambda: short_convolution(ONES[0], torch.ones(4, 4)), r"x \[3, 4\] is not \[B, T, C\]"),
        (lambda: short_convolution(ONES, torch.ones(4, 4), prefix=ONES[:, :2]), r"is not \[B, W - 1, C\]"),
        (lambda: short_convolution(ONES, torch.ones(4, 4), prefix=ONES.double()), "prefix is torch.float64"),
        (
            lambda: short_convolution(ONES, torch.ones(4, 4), position=torch.arange(3)),
            "lie end to end in B=1",
        ),
        (
            lambda: short_convolution(ONES[:1], torch.ones(4, 4), prefix=ONES[:1], position=torch.arange(3)),
            "prefix and position exclude each other",
        ),
        (
            lambda: short_convolution(ONES, torch.ones(4, 4), activation="gelu"),
            "'gelu' is none of silu, linear",
        ),
        (lambda: gated_rms_norm(ONES, ONES[0], torch.ones(4), eps=1e-6), r"gate \[3, 4\] differs from x"),
        (lambda: gated_rms_norm(ONES, None, torch.ones(3), eps=1e-6), r"weight \[3\] does not fit x"),
        (lambda: gated_rms_norm(ONES, None, torch.ones(4), eps=-1.0), "eps=-1.0 must be at least 0"),
        (
            lambda: gated_rms_norm(ONES.long(), None, torch.ones(4), eps=1.0),
            "x is torch.int64; pass floating",
        ),
        (lambda: add_rms_norm(ONES, ONES.bfloat16(), torch.ones(4), eps=1.0), "the sum has residual's dtype"),
        (lambda: linear_cross_entropy(ONES[0], torch.ones(9, 5), torch.zeros(3)), "do not fit; expected"),
        (lambda: linear_cross_entropy(ONES[0], torch.ones(9, 4), torch.zeros(3)), "targets is torch.float32"),
    ],
)
def test_arguments_that_do_not_fit_are_named(call, complaint):
    with pytest.raises((TypeError, ValueError), match=complaint):
        call()


def test_data_is_checked_where_asked():
    bad = ONES.clone()
    bad[1, 2, 3] = float("nan")
    gated_rms_norm(bad, None, torch.ones(4), eps=1e-6)
    with checking(), pytest.raises(ValueError, match=r"x at \(1, 2, 3\) is nan, which is not finite"):
        gated_rms_norm(bad, None, torch.ones(4), eps=1e-6)


def test_a_block_makes_its_sum_and_its_norm_at_once_and_nothing_changes():
    found = []
    ids = tokens(2, 9)
    for at_once in (True, False):
        m = model(dtype=torch.float32)
        assert all(block.sums for block in m.blocks)
        for block in m.blocks:
            block.sums = at_once
        loss = m.loss(ids[:, :-1], ids[:, 1:])
        found.append([loss.detach(), *torch.autograd.grad(loss, list(m.parameters()))])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
