"""The layers' small operations on every backend: parity, packing, sums, one graph and bad input."""

import pytest
import torch

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
from delta_trn.backends.dispatch import Call, choose
from delta_trn.backends.layers import pytorch
from delta_trn.backends.layers.contract import SumNorm
from delta_trn.backends.parity import layer_cases
from delta_trn.backends.parity.layer_cases import BY_NAME, EPS
from tests.support.tiny_models import model, tokens

LAYERS = ("short_convolution", "gated_rms_norm", "add_rms_norm", "linear_cross_entropy")


def test_a_float64_norm_computes_the_silu_of_a_float32_gate_in_float64():
    x, gate, dy = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(0)).double().unbind()
    weight, results = torch.ones(6), []
    for z in (gate.float(), gate.float().double()):
        leaves = [x.clone().requires_grad_(), z.requires_grad_()]
        y = gated_rms_norm(*leaves, weight, eps=EPS, backend="chunked")
        results.append([y, *torch.autograd.grad(y, leaves, dy)])
    for single, double in zip(*results, strict=True):
        assert torch.equal(single, double.to(single.dtype))


@pytest.mark.parametrize(
    "name", ["conv_packed", "norm_head", "sigmoid_norm_head", "sum_odd", "loss_ignored"]
)
def test_triton_repeats_its_bits_and_writes_every_element(name, poison):
    x = layer_cases.inputs(BY_NAME[name], torch.bfloat16)
    first, second = (layer_cases.OPERATIONS[x.case.op].outcome(x, "triton") for _ in range(2))
    assert all(
        torch.equal(first[key], second[key]) and first[key].isfinite().all() for key in first
    )


def test_the_gradient_of_add_rms_norm_is_rounded_once():
    """The two gradients of the sum are added in float32.
    Rounding each first changed one element in four.
    """
    generator = torch.Generator().manual_seed(0)
    x, residual, dy, dtotal = torch.randn(4, 50, 64, generator=generator).bfloat16()
    exact = [y.double().requires_grad_() for y in ((residual + x), torch.ones(64))]
    y = exact[0] * (exact[0].square().mean(-1, keepdim=True) + EPS).rsqrt() * exact[1]
    expected = torch.autograd.grad([y, exact[0]], exact[0], [dy.double(), dtotal.double()])[
        0
    ].bfloat16()
    for backend in ("chunked", "triton"):
        leaf = x.clone().requires_grad_()
        outputs = add_rms_norm(leaf, residual, torch.ones(64), eps=EPS, backend=backend)
        gradient = torch.autograd.grad(outputs, leaf, [dy, dtotal])[0]
        assert (gradient == expected).float().mean() > 0.99


def test_on_neuron_add_rms_norm_keeps_the_reciprocals_of_norms_for_backward(monkeypatch):
    generator, results = torch.Generator().manual_seed(0), []
    x, residual, dy, dtotal = torch.randn(4, 50, 64, generator=generator).double()
    for devices, kept in ((), 0), (("cpu",), 1):
        monkeypatch.setattr(pytorch, "NEURON", devices)
        call = SumNorm(x, residual, torch.ones(64), EPS)
        _, total, saved = pytorch.add_rms_norm_forward(call, save=True)
        assert [(y.shape, y.dtype) for y in saved] == pytorch.add_rms_norm_saved_shapes(call)
        assert len(saved) == kept
        results.append(pytorch.add_rms_norm_backward(dy, dtotal, call, [total, *saved]))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_add_rms_norm_equals_a_sum_and_a_norm_to_the_bit():
    tensors = layer_cases.inputs(BY_NAME["sum_odd"], torch.bfloat16).tensors
    x, residual, weight = (tensors[name] for name in ("x", "residual", "weight"))
    for backend in ("chunked", "triton"):
        y, total = add_rms_norm(x, residual, weight, eps=EPS, backend=backend)
        assert torch.equal(total, x + residual)
        assert torch.equal(y, gated_rms_norm(total, None, weight, eps=EPS, backend=backend))
    wide = add_rms_norm(x, residual.float(), weight, eps=EPS)[1]
    assert wide.dtype == torch.float32 and torch.equal(wide, residual.float() + x)


def norm_call(N=64):
    return Call("gated_rms_norm", "cpu", torch.float32, {"N": N})


def test_a_default_backend_refuses_an_operation_that_it_lacks_unless_another_is_allowed():
    assert choose(norm_call()).name == "chunked"
    total = Call("add_rms_norm", "cpu", torch.float32, {"N": 64})
    with default_backend("nki-simulator"):
        assert choose(norm_call()).name == "nki-simulator"
        for call in (total, norm_call(5000)):
            with pytest.raises(
                BackendRefusal, match=r'default_backend\("nki-simulator", allow=\["\w+"\]\)'
            ):
                choose(call)
    with default_backend("nki-simulator", allow=["chunked"]):
        assert choose(norm_call()).name == "nki-simulator"
        assert choose(total).name == choose(norm_call(5000)).name == "chunked"


def test_a_default_backend_that_cannot_run_here_is_not_replaced_by_pytorch(without_triton):
    with (
        default_backend("triton"),
        pytest.raises(BackendRefusal, match="only in Triton's interpreter"),
    ):
        gated_rms_norm(ONES, None, torch.ones(4), eps=1e-6)
    with default_backend("triton", allow=["chunked"]):
        gated_rms_norm(ONES, None, torch.ones(4), eps=1e-6)


def test_a_backend_named_by_the_caller_refuses_what_it_cannot_run():
    with pytest.raises(
        BackendRefusal, match="N=5000 is above 4096: the sums of dweight fill the 8 banks"
    ):
        choose(norm_call(5000), "nki-simulator")
    with pytest.raises(BackendRefusal, match="nki-simulator  computes silu; this call is linear"):
        short_convolution(
            torch.ones(1, 2, 3), torch.ones(3, 4), activation="linear", backend="nki-simulator"
        )
    assert {row.op for row in backends.describe() if row.automatic} >= set(LAYERS)


ONES = torch.ones(2, 3, 4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: short_convolution(ONES, torch.ones(5, 4)),
            r"C=5, but C of x \[2, 3, 4\] is 4",
        ),
        (
            lambda: short_convolution(ONES[0], torch.ones(4, 4)),
            r"2 dimensions, expected \[B, T, C\]",
        ),
        (
            lambda: short_convolution(ONES, torch.ones(4, 4), prefix=ONES[:, :2]),
            "before=2, but before is 3",
        ),
        (
            lambda: short_convolution(ONES, torch.ones(4, 4), prefix=ONES.double()),
            "prefix is torch.float64",
        ),
        (
            lambda: short_convolution(ONES, torch.ones(4, 4), position=torch.arange(3)),
            "lie end to end in B=1",
        ),
        (
            lambda: short_convolution(
                ONES[:1], torch.ones(4, 4), prefix=ONES[:1], position=torch.arange(3)
            ),
            "prefix and position exclude each other",
        ),
        (
            lambda: short_convolution(ONES, torch.ones(4, 4), activation="gelu"),
            "'gelu' is none of silu, linear",
        ),
        (
            lambda: gated_rms_norm(ONES, ONES, torch.ones(4), eps=1e-6, activation="silu"),
            "'silu' is none of swish, sigmoid; pass one of them",
        ),
        (
            lambda: gated_rms_norm(ONES, None, torch.ones(4), eps=1e-6, activation="sigmoid"),
            "gate is None; pass the gate, or leave activation out",
        ),
        (
            lambda: gated_rms_norm(ONES, ONES[0], torch.ones(4), eps=1e-6),
            r"gate \[3, 4\] differs from x",
        ),
        (
            lambda: gated_rms_norm(ONES, None, torch.ones(3), eps=1e-6),
            r"weight \[3\] does not fit x",
        ),
        (
            lambda: gated_rms_norm(ONES, None, torch.ones(4), eps=-1.0),
            "eps=-1.0 must be at least 0",
        ),
        (
            lambda: gated_rms_norm(ONES.long(), None, torch.ones(4), eps=1.0),
            "x is torch.int64; pass floating",
        ),
        (
            lambda: add_rms_norm(ONES, ONES.bfloat16(), torch.ones(4), eps=1.0),
            "the sum has residual's dtype",
        ),
        (
            lambda: linear_cross_entropy(ONES[0], torch.ones(9, 5), torch.zeros(3)),
            "d=5, but d of hidden",
        ),
        (
            lambda: linear_cross_entropy(ONES[0], torch.ones(9, 4), torch.zeros(3)),
            "targets is torch.float32",
        ),
    ],
)
def test_arguments_of_layers_that_do_not_fit_are_named(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


def test_check_mode_names_bad_data_of_a_norm():
    bad = ONES.clone()
    bad[1, 2, 3] = float("nan")
    gated_rms_norm(bad, None, torch.ones(4), eps=1e-6)
    with (
        checking(),
        pytest.raises(ValueError, match=r"x at \(1, 2, 3\) is nan, which is not finite"),
    ):
        gated_rms_norm(bad, None, torch.ones(4), eps=1e-6)


def test_a_block_that_fuses_sum_and_norm_computes_the_same_bits():
    results = []
    ids = tokens(2, 9)
    for fused in (True, False):
        m = model(dtype=torch.float32)
        assert all(block.sums for block in m.model.blocks)
        for block in m.model.blocks:
            block.sums = fused
        loss = m.loss(ids[:, :-1], ids[:, 1:])
        results.append([loss.detach(), *torch.autograd.grad(loss, list(m.parameters()))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
