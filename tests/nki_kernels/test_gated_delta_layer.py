"""A layer's mixer in one NKI kernel: it errs as its parts do, fits SBUF, and runs where it can."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from delta_trn.backends import checking, default_backend, gated_delta_layer, is_one_operation, registry
from delta_trn.backends.gated_delta_layer import nki_adapter
from delta_trn.nki_kernels import plan
from delta_trn.nki_kernels.gated_delta_layer import example
from delta_trn.nki_kernels.simulator.kernel import record
from tests.support import tiny_models
from tests.support.nki_judge import normal


@dataclass(frozen=True)
class Case:
    """Sizes of a layer; lengths are those of packed sequences, given by position and resets."""

    B: int = 1
    T: int = 70
    H: int = 2
    HV: int = 2
    K: int = 16
    V: int = 24
    lengths: tuple[int, ...] | None = None
    continued: bool = False
    similar: bool = False


CASES = {
    "one token": Case(B=2, T=1),
    "ragged": Case(B=2, T=70),
    "chunks": Case(T=300, H=3, HV=3),
    "seam": Case(T=257, H=1, HV=1),
    "groups": Case(T=140, H=2, HV=6),
    "one key head": Case(T=140, H=1, HV=5, K=32),
    "whole heads": Case(T=200, H=2, HV=2, K=128, V=64),
    "wide values": Case(T=130, H=1, HV=2, K=64, V=128),
    "odd sizes": Case(T=131, H=3, HV=3, K=50, V=70),
    "packed": Case(T=270, lengths=(1, 127, 2, 140)),
    "continued": Case(B=2, T=135, continued=True),
    "similar keys": Case(T=260, K=64, V=64, similar=True),
}


def inputs(case, dtype):
    """Returns the tensors of `gated_delta_layer` by name, and its options."""
    generator = torch.Generator().manual_seed(0)
    channels = 2 * case.H * case.K + case.HV * case.V
    x = normal(generator, case.B, case.T, channels)
    if case.similar:
        x = normal(generator, 1, 1, channels) + 0.3 * x
    tensors = {
        "x": x.to(dtype),
        "weight": 0.5 * normal(generator, channels, 4),
        "a": normal(generator, case.B, case.T, case.HV) - 2 - 4 * case.similar,
        "b": normal(generator, case.B, case.T, case.HV) + 4 * case.similar,
        "gate": normal(generator, case.B, case.T, case.HV, case.V).to(dtype),
        "gain": 1 + 0.3 * normal(generator, case.V),
        "A_log": 0.3 * normal(generator, case.HV),
        "dt_bias": 0.3 * normal(generator, case.HV),
    }
    if case.continued:
        tensors["prefix"] = normal(generator, case.B, 3, channels).to(dtype)
        tensors["initial_state"] = 0.3 * normal(generator, case.B, case.HV, case.K, case.V)
    options = {"K": case.K, "scale": 1.0, "eps": 1e-5, "output_final_state": case.continued}
    if case.lengths is not None:
        options["position"] = torch.cat([torch.arange(n) for n in case.lengths])
        options["cu_seqlens"] = torch.tensor([0, *case.lengths]).cumsum(0)
    return tensors, options


def outcome(tensors, options, backend, dtype=None):
    """Returns the results and all gradients by name; with a dtype, of tensors cast to it."""
    leaves = {
        name: (x if dtype is None else x.to(dtype)).detach().requires_grad_() for name, x in tensors.items()
    }
    with default_backend(backend, allow=["chunked"]):
        y, state = gated_delta_layer(**leaves, **options)
    results = {"y": y} | ({} if state is None else {"final_state": state})
    generator = torch.Generator().manual_seed(1)
    douts = [normal(generator, *x.shape).to(x.dtype) for x in results.values()]
    grads = torch.autograd.grad(list(results.values()), list(leaves.values()), douts)
    return results | {f"d{name}": x for name, x in zip(leaves, grads, strict=True)}


@pytest.fixture
def composed(monkeypatch):
    """Returns a function that switches the kernel of the whole layer on or off."""
    runs = registry.runs
    return lambda off: monkeypatch.setattr(registry, "runs", (lambda *_: False) if off else runs)


def errors(results, judge):
    """Returns the error of each result, relative to the judge's."""
    return {
        n: ((x.double() - judge[n]).norm() / judge[n].norm().clamp(min=1e-30)).item()
        for n, x in results.items()
    }


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("dtype", "release"),
    [
        (torch.float32, "0.7.0"),
        (torch.bfloat16, "0.2.0"),
        pytest.param(torch.float32, "0.2.0", marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, "0.7.0", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_layer_errs_at_most_twice_as_much_as_its_parts(name, dtype, release, composed, monkeypatch):
    monkeypatch.setenv("DELTA_TRN_NKI", release)
    case = CASES[name]
    tensors, options = inputs(case, dtype)
    judge = outcome(tensors, options, "recurrent", torch.float64)
    composed(True)
    parts = errors(outcome(tensors, options, "nki-simulator"), judge)
    composed(False)
    whole = errors(outcome(tensors, options, "nki-simulator"), judge)
    unit = torch.finfo(dtype).eps / 2
    worse = {n: (whole[n], parts[n]) for n in whole if not whole[n] <= max(2 * parts[n], unit)}
    assert not worse


def called_kernels(monkeypatch, tensors, options):
    """Returns the names of the kernels that a call of the adapter for a whole layer runs."""
    called, run = [], nki_adapter.run

    def watch(kernel, *arguments):
        called.append(kernel.__name__)
        return run(kernel, *arguments)

    monkeypatch.setattr(nki_adapter, "run", watch)
    with torch.no_grad(), default_backend("nki-simulator"):
        gated_delta_layer(**tensors, **options)
    return called


@pytest.mark.parametrize("name", ["ragged", "packed", "continued"])
def test_one_kernel_computes_the_layer(name, monkeypatch):
    assert called_kernels(monkeypatch, *inputs(CASES[name], torch.bfloat16)) == ["gated_delta_layer_fwd"]


def test_a_layer_that_is_too_large_and_check_mode_take_the_kernels_of_the_parts(monkeypatch):
    assert not called_kernels(monkeypatch, *inputs(Case(T=3, H=1, HV=1, K=130), torch.bfloat16))
    with checking():
        assert not called_kernels(monkeypatch, *inputs(CASES["ragged"], torch.bfloat16))


@pytest.mark.parametrize(
    ("dtype", "K", "V", "fits"),
    [
        (torch.float32, 64, 128, False),
        (torch.float32, 64, 96, True),
        (torch.bfloat16, 128, 192, False),
        (torch.bfloat16, 128, 144, True),
        (torch.bfloat16, 96, 192, True),
    ],
)
def test_packed_sequences_take_one_kernel_only_where_its_masks_fit_sbuf(dtype, K, V, fits):
    """The sizes that fit are those of `test_the_largest_layers_fit_sbuf`; alone, all of them do."""
    H = 6
    x = torch.zeros(1, 8, 2 * H * K + H * V, dtype=dtype)
    for packed in (True, False):
        one = is_one_operation(
            x, torch.zeros(x.shape[2], 4), H, K, V, bounds=packed, position=packed, states=False,
            backend="nki-simulator",
        )  # fmt: skip
        assert one is (fits or not packed)


def test_the_model_computes_its_mixer_by_one_operation(monkeypatch):
    """Its loss and gradients are those of the parts, which float32 rounding may tell apart."""
    model = tiny_models.model(dtype=torch.float32, num_hidden_layers=1)
    tokens = tiny_models.tokens(1, 40)
    runs, results = registry.runs, []
    for off in (False, True):
        monkeypatch.setattr(registry, "runs", (lambda *_: False) if off else runs)
        model.zero_grad()
        with default_backend("nki-simulator", allow=["chunked"]):
            loss = model.loss(tokens, tokens)
            loss.backward()
        results.append([loss.detach(), *[p.grad.clone() for p in model.parameters()]])
    for whole, parts in zip(*results, strict=True):
        torch.testing.assert_close(whole, parts, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "H", "HV", "K", "V", "packed"),
    [
        ("bfloat16", 6, 6, 128, 256, False),
        ("bfloat16", 6, 6, 96, 192, True),
        ("bfloat16", 8, 8, 64, 128, True),
        ("bfloat16", 6, 6, 128, 144, True),
        ("float32", 8, 8, 64, 128, False),
        ("float32", 8, 8, 64, 96, True),
    ],
)
def test_the_largest_layers_fit_sbuf(dtype, H, HV, K, V, packed):
    how = plan.choose(1, H, HV, K, V, plan.LAYER_LANES if dtype == "float32" else 8)
    kernel, arguments = example(H=H, HV=HV, K=K, V=V, dtype=dtype, lanes=how.lanes, width=how.width, save=1)
    if packed:
        arguments = (*arguments[:6], np.arange(1024, dtype=np.int32), True, *arguments[8:])
    assert record(kernel, *arguments, trace=False).sbuf_peak <= 176 * 1024
