"""A layer's mixer in one NKI kernel: it agrees with the judge, fits SBUF, and runs where it can."""

import numpy as np
import pytest
import torch

from delta_trn.backends import (
    BackendRefusal,
    checking,
    default_backend,
    find_layer_backend,
    gated_delta_layer,
    nki_runtime_adapter,
)
from delta_trn.backends.gated_delta_layer import nki_adapter
from delta_trn.backends.parity import mixer_cases
from delta_trn.backends.parity.baseline import Rounding
from delta_trn.backends.parity.layer_cases import EPS
from delta_trn.backends.parity.mixer_cases import BY_NAME, CASES, MixerCase
from delta_trn.models import gated_deltanet
from delta_trn.nki_kernels import plan
from delta_trn.nki_kernels.gated_delta_layer import bwd, fwd
from nki_simulator.core.machine import Machine
from nki_simulator.kernel import record
from tests.support import tiny_models
from tests.support.nki_judge import assert_passed

RELEASES = (
    (torch.float32, "0.7.0"),
    (torch.bfloat16, "0.2.0"),
    (torch.float32, "0.2.0"),
    (torch.bfloat16, "0.7.0"),
)
QUICK = (
    "mixer_one",
    "mixer_short",
    "mixer_ragged",
    "mixer_129",
    "mixer_groups",
    "mixer_odd",
    "mixer_k128",
    "mixer_packed_empty",
    "mixer_packed_resets",
    "mixer_near_2",
    "mixer_zero_keys",
    "mixer_reset",
)
REFUSED = {torch.float32: ("mixer_k128", "mixer_v256"), torch.bfloat16: ()}
ALWAYS_REFUSED = ("mixer_k136", "mixer_taps", "mixer_one_key")


def pairs():
    """Returns cases, dtypes and releases; by default each dtype runs
    by the rules of one release.
    """
    return [
        pytest.param(
            case, *pair, id=f"{case.name}-{pair[0]}-{pair[1]}", marks=[pytest.mark.slow] * slow
        )
        for case in CASES
        for i, pair in enumerate(RELEASES)
        for slow in [i > 1 or case.name not in (*QUICK, *ALWAYS_REFUSED)]
    ]


@pytest.mark.parametrize(("case", "dtype", "release"), pairs())
def test_the_layer_agrees_with_the_judge(case, dtype, release, monkeypatch):
    monkeypatch.setenv("DELTA_TRN_NKI", release)
    if case.name in (*ALWAYS_REFUSED, *REFUSED[dtype]):
        with pytest.raises(
            BackendRefusal, match=r"nki-simulator +([KVW]=\d+ is|5 value heads per key head)"
        ):
            mixer_cases.verdicts(case, dtype, "nki-simulator")
    else:
        assert_passed(mixer_cases.verdicts(case, dtype, "nki-simulator"))


def arguments(case, dtype):
    """Returns all arguments of a call of `gated_delta_layer`, by name."""
    tensors = mixer_cases.inputs(case, dtype).tensors
    return {**{name: x for name, x in tensors.items() if name != "cu_seqlens"}, **case.options()}


def called_kernels(monkeypatch, case, *, gradients=False):
    """Returns the names of the kernels that the adapter for a whole layer runs,
    with gradients or without.
    """
    called, run = [], nki_adapter.run

    def watch(kernel, *arguments):
        called.append(kernel.__name__)
        return run(kernel, *arguments)

    monkeypatch.setattr(nki_adapter, "run", watch)
    x = arguments(case, torch.bfloat16)
    x["x"].requires_grad_(gradients)
    with default_backend("nki-simulator"):
        y, _ = gated_delta_layer(**x)
        if gradients:
            y.sum().backward()
    return called


@pytest.mark.parametrize("name", ["mixer_ragged", "mixer_packed", "mixer_carry"])
def test_one_kernel_computes_the_layer(name, monkeypatch):
    assert called_kernels(monkeypatch, BY_NAME[name]) == ["gated_delta_layer_fwd"]


@pytest.mark.parametrize("name", ["mixer_many", "mixer_packed", "mixer_carry", "mixer_groups"])
def test_one_kernel_computes_the_gradients(name, monkeypatch):
    expected = ["gated_delta_layer_fwd", "gated_delta_layer_bwd"]
    assert called_kernels(monkeypatch, BY_NAME[name], gradients=True) == expected


def test_one_call_takes_all_sequences_and_no_tensor_twice(monkeypatch):
    taken, run = [], nki_runtime_adapter.simulate

    def watch(kernel, *arguments):
        taken.append([id(x) for x in arguments if isinstance(x, np.ndarray)])
        return run(kernel, *arguments)

    monkeypatch.setattr(nki_runtime_adapter, "simulate", watch)
    called_kernels(monkeypatch, BY_NAME["mixer_many"], gradients=True)
    assert len(taken) == 2 and all(len(set(ids)) == len(ids) for ids in taken)


def test_check_mode_refuses_the_layer_so_that_each_part_is_looked_at():
    x = arguments(BY_NAME["mixer_ragged"], torch.bfloat16)
    with (
        checking(),
        pytest.raises(BackendRefusal, match="check mode looks at what each of the three parts"),
    ):
        gated_delta_layer(**x, backend="nki-simulator")


@pytest.mark.parametrize("scale", [1e-20, -1e-20])
def test_a_scale_with_which_gradients_would_underflow_is_refused(scale):
    x = arguments(BY_NAME["mixer_ragged"], torch.bfloat16) | {"scale": scale}
    with pytest.raises(BackendRefusal, match=f"scale is {scale}: call the three parts"):
        gated_delta_layer(**x, backend="nki-simulator")


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
        weight = torch.zeros(x.shape[2], 4)
        found = find_layer_backend(x, weight, H, K, V, packed=packed, backend="nki-simulator")
        assert (found is not None) is (fits or not packed)


def test_the_model_computes_its_mixer_by_one_operation(monkeypatch):
    """Its loss and gradients are those of the parts, which float32 rounding may tell apart."""
    model = tiny_models.model(dtype=torch.float32, num_hidden_layers=1)
    tokens = tiny_models.tokens(1, 40)
    results = []
    for off in (False, True):
        if off:
            monkeypatch.setattr(gated_deltanet, "find_layer_backend", lambda *_, **__: None)
        model.zero_grad()
        with default_backend("nki-simulator", allow=["chunked"]):
            loss = model.loss(tokens, tokens)
            loss.backward()
        results.append([loss.detach(), *[p.grad.clone() for p in model.parameters()]])
    for whole, parts in zip(*results, strict=True):
        torch.testing.assert_close(whole, parts, rtol=1e-4, atol=1e-6)


def test_a_layer_computes_the_same_bits_in_training_and_in_evaluation():
    x = arguments(BY_NAME["mixer_ragged"], torch.bfloat16)
    with default_backend("nki-simulator"):
        with torch.no_grad():
            y, _ = gated_delta_layer(**x)
        x["x"].requires_grad_()
        z, _ = gated_delta_layer(**x)
    assert torch.equal(y, z.detach())


def slope_of_silu(u):
    u = u.double()
    return u.sigmoid() * (1 + u * (1 - u.sigmoid()))


def test_gradients_keep_their_digits_where_the_slope_of_silu_is_near_0():
    """One token, whose u is within 0.004 of the place where SiLU' is 0:
    bfloat16 would round it as far.
    """
    H, K, V, W = 2, 16, 24, 4
    channels = 2 * H * K + H * V
    rng = torch.Generator().manual_seed(0)
    weight = torch.zeros(channels, W)
    weight[:, -1] = -1.2784645 + 0.001 * torch.randn(channels, generator=rng)
    x = {
        "x": torch.ones(1, 1, channels, dtype=torch.bfloat16),
        "weight": weight,
        "a": torch.zeros(1, 1, H),
        "b": torch.zeros(1, 1, H),
        "gate": torch.ones(1, 1, H, V, dtype=torch.bfloat16),
        "gain": torch.rand(V, generator=rng),
        "A_log": torch.zeros(H),
    }
    case, exact = MixerCase("slope", 1, 1, H, K, V, ""), Rounding(torch.float64)
    results = []
    for judged in (True, False):
        own = {name: value.clone() if judged else value.double() for name, value in x.items()}
        own["weight"].requires_grad_()
        if judged:
            y, _ = gated_delta_layer(**own, K=K, eps=EPS, backend="nki-simulator")
        else:
            y = mixer_cases.formula(case, own, exact, None)["y"]
        (y.double() * torch.linspace(-1, 1, y.numel()).reshape(y.shape)).sum().backward()
        results.append(own["weight"].grad[2 * H * K :, -1].double())
    assert (results[0] / results[1] - 1).abs().median() < 2**-7
    exact, rounded = (slope_of_silu(u[2 * H * K :, -1]) for u in (weight, weight.bfloat16()))
    assert (rounded / exact - 1).abs().median() > 2**-2


@pytest.mark.parametrize(
    ("HV", "T", "at_once"), [(6, 1024, True), (6, 1025, False), (5, 1025, True)]
)
def test_long_sequences_take_one_kernel_only_with_few_value_heads(HV, T, at_once):
    """The limits are the sizes of `test_the_largest_layers_fit_sbuf`."""
    x = torch.zeros(1, T, HV * 512, dtype=torch.bfloat16)
    weight = torch.zeros(x.shape[2], 4)
    found = find_layer_backend(x, weight, HV, 128, 256, backend="nki-simulator")
    assert (found is not None) is at_once


@pytest.mark.parametrize(
    ("T", "HV", "most"), [(1024, 3, 6), (1025, 1, 5), (1025, 3, 3), (1025, 5, 5)]
)
def test_long_waves_are_narrow(T, HV, most):
    how = plan.choose_layer(8, T, HV, HV, 128, 256, 8)
    waves = plan.list_waves(8, HV, HV, how.width, how.lanes)
    assert max(sum(bundle["lanes"] for bundle in wave) for wave in waves) == most


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "B", "T", "H", "HV", "K", "V", "packed"),
    [
        ("bfloat16", 1, 1024, 6, 6, 128, 256, False),
        ("bfloat16", 1, 1024, 6, 6, 96, 192, True),
        ("bfloat16", 1, 1024, 8, 8, 64, 128, True),
        ("bfloat16", 1, 1024, 6, 6, 128, 144, True),
        ("bfloat16", 1, 1536, 5, 5, 128, 256, False),
        ("bfloat16", 5, 1536, 1, 1, 128, 256, False),
        ("bfloat16", 1, 1024, 3, 6, 128, 256, False),
        ("bfloat16", 1, 1536, 5, 5, 128, 144, True),
        ("float32", 1, 1024, 8, 8, 64, 128, False),
        ("float32", 1, 1024, 8, 8, 64, 96, True),
        ("float32", 1, 1536, 5, 5, 64, 128, False),
        ("float32", 1, 1536, 5, 5, 64, 96, True),
    ],
)
def test_the_largest_layers_fit_sbuf(dtype, B, T, H, HV, K, V, packed):
    """A twentieth stays free, since compilers overlap work."""
    for backward in (False, True):
        assert (
            measure_sbuf(dtype, B, T, H, HV, K, V, packed, backward=backward) <= 0.95 * 176 * 1024
        )


@pytest.mark.slow
@pytest.mark.parametrize(("B", "H"), [(1, 6), (2, 3)])
def test_six_lanes_of_a_long_sequence_do_not_fit_sbuf(B, H, monkeypatch):
    """Without its limits on long sequences, a layer would not fit the chip."""
    monkeypatch.setattr(Machine, "check_capacity", lambda _: None)
    monkeypatch.setattr(plan, "LONG_LANES", 6)
    assert measure_sbuf("bfloat16", B, 1536, H, H, 128, 256, False) > 176 * 1024


def measure_sbuf(dtype, B, T, H, HV, K, V, packed, *, backward=False):
    """Returns a kernel's peak of SBUF per partition in bytes, in training."""
    how = plan.choose_layer(B, T, H, HV, K, V, plan.LAYER_LANES if dtype == "float32" else 8)
    kernel, arguments = (bwd if backward else fwd).example(
        B=B, T=T, H=H, HV=HV, K=K, V=V, dtype=dtype, lanes=how.lanes, width=how.width,
        **({} if backward else {"save": 1}),
    )  # fmt: skip
    if packed:
        at = 12 if backward else 6  # of `position`
        arguments = (*arguments[:at], np.arange(T, dtype=np.int32), True, *arguments[at + 2 :])
    return record(kernel, *arguments, trace=False).sbuf_peak


def test_a_group_that_no_bundle_holds_is_refused_by_the_kernel():
    kernel, arguments = bwd.example(T=8, H=1, HV=5, K=16, V=24, lanes=4, width=4)
    with pytest.raises(AssertionError, match="5 value heads per key head exceed a bundle of 4"):
        record(kernel, *arguments, trace=False)
