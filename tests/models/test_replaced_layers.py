"""Layers that others put in the place of ours are called, however long a sequence is.

Every replacement computes FACTOR W x, or keeps the weight elsewhere, where the map had W x. So the
judge is the untouched model with that weight in its place.
"""

import warnings
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_full_backward_hook,
    register_module_full_backward_pre_hook,
)
from torch.nn.utils import parametrizations, parametrize, weight_norm

from delta_trn.models import gated_deltanet
from delta_trn.models.layers import RMSNorm
from tests.support.tiny_models import assert_same, model, rows, tokens

FACTOR = 1.5
LENGTHS = (63, 64, 100)  # from 64 tokens on weights are put side by side
MIXERS = ("gated_deltanet", "kimi_delta_attention")
OF_MIXERS = {
    "gated_deltanet": ("q_proj", "k_proj", "v_proj", "g_proj", "a_proj", "b_proj"),
    "kimi_delta_attention": ("q_proj", "k_proj", "v_proj", "g_proj.0", "f_proj.1", "b_proj"),
}
MAPS = {
    mixer: (*(f"mixer.{name}" for name in OF_MIXERS[mixer]), "mlp.gate_proj", "mlp.up_proj")
    for mixer in MIXERS
}
MAP = "mixer.v_proj"


class Scaled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return FACTOR * super().forward(input)


class ScaledCall(nn.Linear):
    def __call__(self, *args: Any) -> Any:
        return FACTOR * super().__call__(*args)


class LoRA(nn.Linear):
    """Computes W x + B A x with a frozen W, as loralib.Linear does;
    at first B A = (FACTOR - 1) W.
    """

    def __init__(self, old: nn.Linear) -> None:
        super().__init__(old.in_features, old.out_features, bias=False)
        self.weight = nn.Parameter(old.weight.detach(), requires_grad=False)
        self.A = nn.Parameter(torch.eye(old.in_features, dtype=old.weight.dtype))
        self.B = nn.Parameter((FACTOR - 1) * old.weight.detach())

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + linear(linear(input, self.A), self.B)


class Stored(Tensor):
    """A weight in a form of its own, as torchao's, of which nothing can be asked but a product."""

    @staticmethod
    def __new__(cls, values: Tensor) -> "Stored":
        return Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype)

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return "Stored()"

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is linear:
            return linear(args[0], args[1].values, *args[2:])
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return Stored(args[0].values)
        raise NotImplementedError(f"{func} of a weight in a form of its own")


class Packed(nn.Module):
    """Computes W x in x's dtype, float64; `weight` has the codes of W,
    unless it has another name.
    """

    def __init__(self, old: nn.Linear, dtype: torch.dtype, name: str = "weight") -> None:
        super().__init__()
        codes = (20 * old.weight.detach()).clamp(-100, 100).round()
        self.shift, self.name = (128 if dtype == torch.uint8 else 0), name
        self.register_buffer(name, (codes + self.shift).to(dtype))

    def values(self) -> Tensor:
        return (getattr(self, self.name).double() - self.shift) / 20

    def forward(self, x: Tensor) -> Tensor:
        return linear(x.double(), self.values())


def plain(old: nn.Linear) -> nn.Linear:
    new = nn.Linear(old.in_features, old.out_features, bias=False)
    new.weight = old.weight
    return new


def of_class(old, kind=Scaled):
    new = kind(old.in_features, old.out_features, bias=False)
    new.weight = old.weight
    return new


def own_forward(old):
    before = old.forward
    old.forward = lambda x: FACTOR * before(x)
    return old


def hook(old):
    old.register_forward_hook(lambda _, args, y: FACTOR * y)
    return old


def pre_hook(old):
    old.register_forward_pre_hook(lambda _, args: (FACTOR * args[0],))
    return old


class Times(nn.Module):
    def forward(self, W: Tensor) -> Tensor:
        return FACTOR * W


def parametrized(old):
    return parametrize.register_parametrization(old, "weight", Times(), unsafe=True)


def scale_magnitudes(m, name):
    with torch.no_grad():
        m.get_parameter(name).mul_(FACTOR)
    return m


def norms(old):
    return scale_magnitudes(parametrizations.weight_norm(old), "parametrizations.weight.original0")


def old_norms(old):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return scale_magnitudes(weight_norm(old), "weight_g")


def stored(old):
    new = plain(old)
    new.weight = nn.Parameter(Stored(FACTOR * old.weight.detach()), requires_grad=False)
    return new


REPLACEMENTS = {
    "subclass": of_class,
    "subclass's call": partial(of_class, kind=ScaledCall),
    "own forward": own_forward,
    "hook": hook,
    "pre-hook": pre_hook,
    "parametrization": parametrized,
    "weight norm": norms,
    "old weight norm": old_norms,
    "LoRA": LoRA,
    "stored": stored,
}


def make(mixer, **options):
    """Returns a model of one layer, whose projections of the gates are large enough to be seen."""
    return model(mixer=mixer, num_hidden_layers=1, **options)


def replace(m, name, replacement):
    owner, _, slot = f"model.blocks.0.{name}".rpartition(".")
    new = replacement(m.get_submodule(f"{owner}.{slot}"))
    setattr(m.get_submodule(owner), slot, new)
    return new


def scale(m, name, factor=FACTOR):
    with torch.no_grad():
        m.get_submodule(f"model.blocks.0.{name}").weight.mul_(factor)


def run(m, T):
    """Returns the logits [1, T, vocabulary] and the gradient of the embedding,
    which lies below the layer.
    """
    x = tokens(1, T)
    logits = m(x, use_cache=False).logits
    loss = (
        logits * torch.linspace(-1, 1, logits[0].numel(), dtype=logits.dtype).view_as(logits)
    ).mean()
    return (
        logits.detach(),
        loss,
        torch.autograd.grad(loss, m.model.embed.weight, retain_graph=True)[0],
    )


def compare(theirs, ours):
    """Asserts for each length that logits and gradients agree; yields their loss and the length."""
    for T in LENGTHS:
        logits, loss, gradient = run(theirs, T)
        expected, _, expected_gradient = run(ours, T)
        assert_same(logits, expected, what=f"{T} tokens")
        assert_same(gradient, expected_gradient, what=f"gradient, {T} tokens", factor=10)
        yield loss, T


@pytest.mark.parametrize("mixer", MIXERS)
def test_the_factor_of_each_map_matters(mixer):
    """So a replacement that is passed by would be seen below."""
    before = run(make(mixer), 64)[0]
    for name in MAPS[mixer]:
        after = make(mixer)
        scale(after, name)
        assert (run(after, 64)[0] - before).abs().max() > 1e-4, name


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("kind", REPLACEMENTS)
def test_layers_in_the_maps_places_compute_what_they_compute_alone(mixer, kind):
    ours, theirs = make(mixer), make(mixer)
    for name in MAPS[mixer]:
        scale(ours, name)
        replace(theirs, name, REPLACEMENTS[kind])
    for _ in compare(theirs, ours):
        pass


@pytest.mark.parametrize("mixer", MIXERS)
def test_adapters_get_the_gradients_of_the_weights_that_they_add_to(mixer):
    ours, theirs = make(mixer), make(mixer)
    for name in MAPS[mixer]:
        scale(ours, name)
    adapters = [replace(theirs, name, LoRA).B for name in MAPS[mixer]]
    weights = [ours.get_parameter(f"model.blocks.0.{name}.weight") for name in MAPS[mixer]]
    for loss, T in compare(theirs, ours):
        gradients = torch.autograd.grad(loss, adapters)
        expected = torch.autograd.grad(run(ours, T)[1], weights)
        for name, dB, dW in zip(MAPS[mixer], gradients, expected, strict=True):
            assert_same(dB, dW, what=f"{name}, {T} tokens", factor=10)


@pytest.mark.parametrize("mixer", MIXERS)
def test_a_bias_of_a_map_is_added(mixer):
    """A token does not see later ones, so that it has the same logits
    in a sequence of 63 tokens.
    """
    for name in MAPS[mixer]:
        m, short = make(mixer), LENGTHS[0]
        bias = torch.linspace(1, 2, replace(m, name, plain).out_features, dtype=torch.float64)
        before = run(m, short)[0]
        m.get_submodule(f"model.blocks.0.{name}").bias = nn.Parameter(bias)
        expected = run(m, short)[0]
        assert (expected - before).abs().max() > 1e-4, name
        for T in LENGTHS:
            assert_same(run(m, T)[0][:, :short], expected, what=f"{name}, {T} tokens", factor=10)


BACKWARD = ("register_full_backward_hook", "register_full_backward_pre_hook")


@pytest.mark.parametrize("watch", ["register_forward_hook", "register_forward_pre_hook", *BACKWARD])
def test_hooks_of_every_kind_are_called_once(watch):
    m, seen = make(MIXERS[0]), []
    getattr(replace(m, MAP, plain), watch)(lambda *_: seen.append(1))
    for T in LENGTHS:
        seen.clear()
        run(m, T)
        assert seen == [1], f"{T} tokens"


REGISTER = (
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_full_backward_hook,
    register_module_full_backward_pre_hook,
)


@pytest.mark.filterwarnings("ignore:For backward hooks", "ignore:Full backward hook")
@pytest.mark.parametrize("register", REGISTER)
def test_hooks_of_all_modules_are_called(register):
    m, seen = make(MIXERS[0]), []
    maps = [m.get_submodule(f"model.blocks.0.{name}") for name in MAPS["gated_deltanet"]]
    handle = register(lambda module, *_: seen.append(module) if module in maps else None)
    try:
        for T in LENGTHS:
            seen.clear()
            run(m, T)
            assert len(seen) == len(maps) and set(seen) == set(maps), f"{T} tokens"
    finally:
        handle.remove()


def test_a_forward_that_was_put_into_the_class_computes():
    ours, theirs = make(MIXERS[0]), make(MIXERS[0])
    changed = theirs.model.blocks[0].get_submodule(MAP)
    scale(ours, MAP)

    def forward(self: nn.Linear, x: Tensor) -> Tensor:
        return (FACTOR if self is changed else 1) * linear(x, self.weight)

    with patch.object(nn.Linear, "forward", forward):
        for _ in compare(theirs, ours):
            pass


@pytest.mark.parametrize("form", ["uint8", "int8", "int32", "float8_e4m3fn", "no weight"])
@pytest.mark.parametrize(
    ("mixer", "names"),
    [("gated_deltanet", ("a_proj", "b_proj")), ("kimi_delta_attention", ("b_proj",))],
)
def test_inputs_of_the_gates_are_not_rounded_to_what_a_quantizer_stores(mixer, names, form):
    named = "codes" if form == "no weight" else "weight"
    dtype = torch.uint8 if form == "no weight" else getattr(torch, form)
    ours, theirs = make(mixer), make(mixer)
    for name in names:
        packed = replace(theirs, f"mixer.{name}", lambda old: Packed(old, dtype, named))
        with torch.no_grad():
            ours.get_submodule(f"model.blocks.0.mixer.{name}").weight.copy_(packed.values())
    for _ in compare(theirs, ours):
        pass


def test_a_gate_of_another_dtype_takes_part_beside_a_packed_one():
    """Autocast is off there: what is no quantizer's must get x in its own dtype."""
    m = make("gated_deltanet", dtype=torch.bfloat16)
    replace(m, "mixer.a_proj", lambda old: Packed(old, torch.uint8))
    x = torch.randn(1, 64, 32)
    assert m.model.blocks[0].mixer._project_gates(x).shape == (1, 64, 8)


@pytest.mark.parametrize(
    "kind", ["subclass", "subclass's call", "own forward", "hook", "pre-hook", "LoRA"]
)
def test_a_loss_calls_what_stands_in_the_readouts_place(kind):
    m = make(MIXERS[0], tie_word_embeddings=False)
    m.lm_head = REPLACEMENTS[kind](m.lm_head)
    x = tokens(2, 70)
    logits = m(x).logits
    expected = cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())
    assert_same(m(x, labels=x).loss, expected)
    assert_same(m.loss(x[:, :-1], x[:, 1:]), expected)


def test_a_readout_that_does_more_than_its_rows_say_is_taken_as_a_whole():
    m = make(MIXERS[0], tie_word_embeddings=False)
    before, x = m(tokens(1, 5)).logits, tokens(1, 5)
    m.set_output_embeddings(plain(m.lm_head))
    assert_same(m(x).logits, before)
    m.set_output_embeddings(of_class(m.lm_head))
    assert_same(m(x).logits, FACTOR * before)


def scaled_norm(m):
    class Louder(RMSNorm):
        def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
            return FACTOR * super().forward(x, z)

    new = Louder(m.weight.shape[0], m.eps)
    new.weight = m.weight
    return new


@pytest.mark.parametrize("kind", [scaled_norm, own_forward, hook])
def test_what_stands_in_a_norms_place_computes(kind):
    ours, theirs = make(MIXERS[0]), make(MIXERS[0])
    scale(ours, "mlp_norm")
    replace(theirs, "mlp_norm", kind)
    for _ in compare(theirs, ours):
        pass


@pytest.mark.parametrize("name", ["conv", "o_norm"])
@pytest.mark.parametrize("kind", [own_forward, hook, pre_hook])
def test_a_kernel_of_a_whole_layer_passes_by_no_part_that_others_replaced(name, kind, monkeypatch):
    monkeypatch.setattr(gated_deltanet, "find_layer_backend", lambda *_, **__: "some")
    mixer, x = make(MIXERS[0]).model.blocks[0].mixer, SimpleNamespace(shape=(1, 64))
    assert mixer._find_kernel(x, rows(64), None) == "some"
    setattr(mixer, name, kind(getattr(mixer, name)))
    assert mixer._find_kernel(x, rows(64), None) is None
