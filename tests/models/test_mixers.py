"""What both mixers promise of their parameters and gates: marks, starting decays, precision."""

import pytest
import torch
from torch import nn

from delta_trn.models.parameters import tagged_parameters
from tests.support.tiny_models import model, rows

MIXERS = {
    "gdn": {},
    "kimi": {"mixer": "kimi_delta_attention"},
    "bounded": {"mixer": "kimi_delta_attention", "decay_bound": -5.0},
}
OWN = ("A_log", "dt_bias", "conv.weight")  # of the mixer, which act on all that is remembered


@pytest.mark.parametrize("name", MIXERS)
def test_parameters_whose_values_are_remembered_are_marked_as_stored(name):
    """A map is stored if what it makes of a token changes another that is far away.

    SGD's learning rates in muP are divided by what such values gain in memory.
    """
    T = 70
    mixer = model(num_hidden_layers=1, num_v_heads=8, **MIXERS[name]).model.blocks[0].mixer
    mixer.A_log.data.fill_(-8.0)  # hardly a decay
    made = {}
    for place, module in mixer.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda _m, _i, y, place=place: made.update({place: y}))
    x = torch.randn(1, T, 32, dtype=torch.float64, requires_grad=True)
    last = mixer(x, rows(T))[0, -1].sum()
    places = list(made)
    gradients = torch.autograd.grad(last, [made[place] for place in places])
    remembered = {
        f"{place}.weight"
        for place, gradient in zip(places, gradients, strict=True)
        if gradient.reshape(T, -1)[9].any()
    }
    tags = {place: tag for place, _, tag in tagged_parameters(mixer)}
    assert {f"{place}.weight" for place in places} == {
        place for place in tags if place.startswith(tuple("qkvabfgo")) and "proj" in place
        and place.endswith("weight")
    }  # fmt: skip
    assert {place for place, tag in tags.items() if tag.stored} == remembered | set(OWN)


def test_a_bounded_decay_starts_at_a_rate_of_one_and_learns():
    """From rates of up to 16, as an unbounded one starts, its sigmoid has no slope."""
    for name in ("kimi", "bounded"):
        mixer = model(seed=3, num_hidden_layers=1, **MIXERS[name]).model.blocks[0].mixer
        assert (mixer.A_log == 0).all() == (name == "bounded"), name
        g, _ = mixer.gates(torch.randn(1, 9, 32, dtype=torch.float64), rows(9))
        if name == "bounded":
            (slope,) = torch.autograd.grad(g.sum(), mixer.dt_bias)
            assert (slope.abs() > 9e-3).all()  # at most 5/4 for each of nine tokens


@pytest.mark.parametrize("name", MIXERS)
def test_write_strengths_are_computed_in_float32_under_autocast(name):
    mixer = model(dtype=torch.float32, num_hidden_layers=1, **MIXERS[name]).model.blocks[0].mixer
    x = torch.randn(2, 9, 32)
    _, expected = mixer.gates(x, rows(9))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        g, beta = mixer.gates(x, rows(9))
    assert g.dtype == beta.dtype == torch.float32
    assert torch.equal(beta, expected)
