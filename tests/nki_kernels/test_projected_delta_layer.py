"""A layer's mixer with its projections in one NKI kernel: it is right, fits SBUF, and runs where it can."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from delta_trn.backends import (
    BackendRefusal,
    checking,
    default_backend,
    gated_delta_layer,
    is_projected,
    projected_delta_layer,
    registry,
)
from delta_trn.backends.gated_delta_layer import nki_adapter
from delta_trn.backends.parity import mixer_cases
from delta_trn.backends.parity.mixer_cases import BY_NAME, CASES
from delta_trn.models.gated_deltanet import GatedDeltaNet
from delta_trn.nki_kernels import plan
from delta_trn.nki_kernels.gated_delta_layer import projected
from delta_trn.nki_kernels.simulator.kernel import record
from tests.support import tiny_models
from tests.support.nki_judge import assert_passed

QUICK = (
    "projected_one",
    "projected_ragged",
    "projected_k128",
    "projected_packed_resets",
    "projected_one_key",
)
RELEASES = ("0.7.0", "0.2.0")


def pairs():
    """Returns cases and releases; by default some cases run, by the rules of one release."""
    return [
        pytest.param(case, release, id=f"{case.name}-{release}", marks=[pytest.mark.slow] * slow)
        for case in CASES
        if case.d
        for release in RELEASES
        for slow in [release != RELEASES[0] or case.name not in QUICK]
    ]


@pytest.mark.parametrize(("case", "release"), pairs())
def test_a_projected_layer_agrees_with_the_judge(case, release, monkeypatch):
    monkeypatch.setenv("DELTA_TRN_NKI", release)
    assert_passed(mixer_cases.verdicts(case, torch.bfloat16, "nki-simulator"))


@pytest.mark.parametrize("name", ["projected_ragged", "projected_packed_resets"])
def test_a_projected_layer_computed_by_its_parts_agrees_with_the_judge(name):
    assert_passed(mixer_cases.verdicts(BY_NAME[name], torch.float32, "chunked"))


def arguments(name, dtype=torch.bfloat16):
    """Returns all arguments of a call of `projected_delta_layer`, by name."""
    case = BY_NAME[name]
    return {**mixer_cases.inputs(case, dtype).tensors, **case.options()}


def called_kernels(monkeypatch, x, *, gradients=False):
    """Returns the names of the kernels that the adapter for a whole layer runs, with gradients or without."""
    called, run = [], nki_adapter.run

    def watch(kernel, *arguments):
        called.append(kernel.__name__)
        return run(kernel, *arguments)

    monkeypatch.setattr(nki_adapter, "run", watch)
    x["hidden"].requires_grad_(gradients)
    with default_backend("nki-simulator", allow=["chunked"]):
        y = projected_delta_layer(**x)
        if gradients:
            y.sum().backward()
    return called


def test_one_kernel_projects_and_one_computes_the_gradients_behind_projections(monkeypatch):
    expected = ["projected_delta_layer_fwd", "projected_delta_layer_bwd"]
    assert called_kernels(monkeypatch, arguments("projected_one"), gradients=True) == expected


def test_many_sequences_take_several_calls(monkeypatch):
    called = called_kernels(monkeypatch, arguments("projected_many"))
    assert set(called) == {"projected_delta_layer_fwd"} and len(called) > 1


def test_a_group_that_no_bundle_holds_is_projected_by_pytorch(monkeypatch):
    called = called_kernels(monkeypatch, arguments("projected_one_key"), gradients=True)
    assert called == ["gated_delta_layer_fwd"]


def test_float32_other_widths_and_check_mode_are_projected_by_pytorch(monkeypatch):
    """A product takes rows of 128, and in float32 it takes four passes."""
    with pytest.raises(BackendRefusal, match="by its parts, in float32"):
        mixer_cases.verdicts(BY_NAME["projected_one"], torch.float32, "nki-simulator")
    x = arguments("projected_one")
    for name in ("hidden", "projection", "gate_projection"):
        x[name] = x[name][..., :120].contiguous()
    assert called_kernels(monkeypatch, x) == ["gated_delta_layer_fwd"]
    with checking():
        assert not called_kernels(monkeypatch, arguments("projected_one"))


@pytest.mark.parametrize(("d", "at_once"), [(1024, True), (1152, False)])
def test_wide_hidden_states_are_projected_by_pytorch(d, at_once):
    """The limit is that of `test_the_largest_projected_layers_fit_sbuf`."""
    hidden, weight = torch.zeros(1, 8, d, dtype=torch.bfloat16), torch.zeros(3072, 4)
    assert is_projected(hidden, weight, 6, 128, 256, backend="nki-simulator") is at_once


def test_a_projected_layer_computes_the_same_bits_in_training_and_in_evaluation():
    x = arguments("projected_ragged")
    with default_backend("nki-simulator"):
        with torch.no_grad():
            y = projected_delta_layer(**x)
        x["hidden"].requires_grad_()
        z = projected_delta_layer(**x)
    assert torch.equal(y, z.detach())


def test_products_are_in_the_dtype_of_autocast():
    """Weights and hidden states in float32 give what bfloat16 ones give, and gradients in float32."""
    x = arguments("projected_one")
    wide = {
        name: y.float() if name in ("hidden", "projection", "gate_projection") else y for name, y in x.items()
    }
    wide["projection"].requires_grad_()
    with default_backend("nki-simulator"):
        y = projected_delta_layer(**x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = projected_delta_layer(**wide)
    z.sum().backward()
    assert torch.equal(y, z.detach()) and z.dtype == torch.bfloat16
    assert wide["projection"].grad.dtype == torch.float32 and wide["projection"].grad.abs().sum() > 0


def test_a_projection_is_as_exact_as_pytorchs():
    """The kernel adds up in float32 and rounds once, so y is that of PyTorch's product, but for ties."""
    x = arguments("projected_ragged")
    y = {**x, "x": F.linear(x["hidden"].float(), x["projection"].float()).bfloat16()}
    gate = F.linear(x["hidden"].float(), x["gate_projection"].float()).bfloat16()
    for name in ("hidden", "projection", "gate_projection"):
        del y[name]
    with default_backend("nki-simulator"):
        whole = projected_delta_layer(**x)
        parts, _ = gated_delta_layer(**y, gate=gate.unflatten(-1, whole.shape[2:]))
    assert (whole != parts).float().mean() < 0.02


def test_the_model_projects_in_the_layers_kernel(monkeypatch):
    """Loss and gradients in bfloat16 differ from those of PyTorch's products by its rounding alone."""
    model = tiny_models.model(dtype=torch.bfloat16, num_hidden_layers=1, hidden_size=128)
    tokens = tiny_models.tokens(1, 40)
    runs, results = registry.runs, []
    for off in (False, True):
        called = []

        def watch(op, *rest, off=off, called=called):
            called.append(op)
            return runs(op, *rest) and not (off and op == "projected_delta_layer")

        monkeypatch.setattr(registry, "runs", watch)
        model.zero_grad()
        with default_backend("nki-simulator", allow=["chunked"]):
            loss = model.loss(tokens, tokens)
            loss.backward()
        assert ("gated_delta_layer" in called) is off
        results.append([loss.detach(), *[p.grad.clone() for p in model.parameters()]])
    for whole, parts in zip(*results, strict=True):
        scale = parts.float().norm() + 1e-6
        assert (whole.float() - parts.float()).norm() <= 0.02 * scale


class Wrapped(torch.nn.Linear):
    """A map that computes more than its weight says, as an adapter of PEFT does."""


@pytest.mark.parametrize("change", ["hook", "class"])
def test_a_projection_that_is_more_than_its_weight_is_not_in_the_kernel(change, monkeypatch):
    model = tiny_models.model(dtype=torch.bfloat16, num_hidden_layers=1, hidden_size=128)
    layer, asked, runs = next(m for m in model.modules() if isinstance(m, GatedDeltaNet)), [], registry.runs
    if change == "hook":
        layer.g_proj.register_forward_hook(lambda *_: None)
    else:
        layer.g_proj.__class__ = Wrapped
    monkeypatch.setattr(registry, "runs", lambda op, *rest: asked.append(op) or runs(op, *rest))
    with default_backend("nki-simulator", allow=["chunked"]), torch.no_grad():
        model(tiny_models.tokens(1, 9))
    assert "projected_delta_layer" not in asked and "gated_delta_layer" in asked


def test_a_cache_keeps_what_was_projected():
    """Generation, which projects apart, goes on where a prompt in one kernel would have ended."""
    model = tiny_models.model(dtype=torch.bfloat16, num_hidden_layers=1, hidden_size=128)
    tokens = tiny_models.tokens(1, 12)
    with default_backend("nki-simulator", allow=["chunked"]), torch.no_grad():
        whole = model(tokens, use_cache=False).logits
        first = model(tokens[:, :11], use_cache=True)
        last = model(tokens[:, 11:], past_key_values=first.past_key_values, use_cache=True).logits
    scale = whole.float().norm()
    assert (whole[:, :11].float() - first.logits.float()).norm() <= 0.02 * scale
    assert (whole[:, 11].float() - last[:, 0].float()).norm() <= 0.02 * scale


@pytest.mark.slow
@pytest.mark.parametrize(
    ("B", "T", "H", "HV", "K", "V", "packed"),
    [
        (1, 1024, 6, 6, 128, 256, False),
        (1, 1024, 6, 6, 96, 192, True),
        (1, 1024, 8, 8, 64, 128, True),
        (1, 1024, 6, 6, 128, 144, True),
        (1, 1536, 5, 5, 128, 256, False),
        (5, 1536, 1, 1, 128, 256, False),
        (1, 1024, 3, 6, 128, 256, False),
        (1, 1536, 5, 5, 128, 144, True),
    ],
)
def test_the_largest_projected_layers_fit_sbuf(B, T, H, HV, K, V, packed):
    how = plan.choose(B, H, HV, K, V)
    kernel, given = projected.example(
        B=B, T=T, H=H, HV=HV, K=K, V=V, save=1, lanes=how.lanes, width=how.width
    )
    if packed:
        given = (*given[:10], np.arange(T, dtype=np.int32), True, *given[12:])
    assert record(kernel, *given, trace=False).sbuf_peak <= 176 * 1024
