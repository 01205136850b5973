"""Which parameters learn through the state, and how their gradients grow with the memory of the state."""

import math
from collections import defaultdict

import pytest
import torch
from torch import Tensor

from delta_trn.models.gated_deltanet import GatedDeltaNet
from delta_trn.models.parameters import scaled_parameters, tagged_parameters
from delta_trn.train.studies.fits import Line, line
from delta_trn.train.studies.probes import rms
from tests.support.tiny_models import model, rows

STORED = {
    "k_proj.weight",
    "v_proj.weight",
    "a_proj.weight",
    "b_proj.weight",
    "conv.weight",
    "A_log",
    "dt_bias",
}


def test_stored_parameters_are_those_that_learn_from_later_tokens():
    """Token t is unit vector t, so column t of a projection's gradient is what token t contributes.

    The upstream gradient is at the last token. Tokens before the reach of its taps contribute only to
    projections that the state stores.
    """
    layer: GatedDeltaNet = model(hidden_size=32, attention_layers=[2]).model.blocks[0].mixer
    T, taps = 32, layer.conv.weight.shape[1]
    y = layer(torch.eye(T, dtype=torch.float64)[None], rows(T))
    y[0, -1].sum().backward()
    tags = {name: tag for name, _, tag in tagged_parameters(layer)}
    assert {name for name, tag in tags.items() if tag.stored} == STORED
    for name in ("q", "k", "v", "g", "a", "b"):
        gradient = layer.get_parameter(f"{name}_proj.weight").grad
        assert gradient is not None
        early = gradient[:, : T - taps].abs().max() > 0
        assert early == tags[f"{name}_proj.weight"].stored, name


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_memory_divides_only_rates_of_stored_parameters_under_sgd(optimizer: str):
    m = model(attention_layers=[1])

    def rates(memory: float) -> dict[str, float]:
        scaled = scaled_parameters(m, optimizer=optimizer, lr=0.5, weight_decay=0.1, memory=memory)
        return {row.name: row.lr for row in scaled}

    plain, slow = rates(1.0), rates(16.0)
    divided = {name for name in plain if slow[name] != plain[name]}
    of_state = {f"model.blocks.{i}.mixer.{name}" for i in (0, 2) for name in STORED}
    assert divided == (of_state if optimizer == "sgd" else set())
    assert all(slow[name] == plain[name] / 16 for name in divided)
    with pytest.raises(ValueError, match=r"memory=0\.0 must be above 0"):
        rates(0.0)


def powers_of_memory(*, coherent: bool) -> dict[str, Line]:
    """Fits powers of L = 1 / (1 - alpha), 5 to 67 tokens, to rms gradients of one layer at initialization.

    `coherent` gives every token the same upstream gradient.
    """
    T, dt, sizes, log_memory = 256, 0.03, defaultdict(list), []
    for A in (8.0, 2.0, 0.5):
        for seed in range(3):
            m = model(
                seed, torch.float32, hidden_size=96, num_heads=2, num_hidden_layers=1, rms_norm_eps=1e-12
            )
            layer, readouts = m.model.blocks[0].mixer, []
            with torch.no_grad():  # one alpha for every head and token
                layer.A_log.fill_(math.log(A))
                layer.dt_bias.fill_(math.log(math.expm1(dt)))
                layer.a_proj.weight.mul_(1e-3)
            layer.o_norm.register_forward_pre_hook(lambda _, args, out=readouts: out.append(args[0]))
            generator = torch.Generator().manual_seed(seed)
            y: Tensor = layer(torch.randn(2, T, 96, generator=generator), rows(T))
            upstream = torch.randn(1 if coherent else 2, 1 if coherent else T, 96, generator=generator)
            y.backward(upstream.expand(y.shape))
            log_memory.append(math.log2(1 / -math.expm1(-A * dt)))
            sizes["o"].append(math.log2(rms(readouts[0])))
            for name, p in layer.named_parameters():
                assert p.grad is not None
                sizes[name].append(math.log2(rms(p.grad)))
    return {name: line(log_memory, values) for name, values in sizes.items()}


@pytest.mark.parametrize("coherent", [False, True])
def test_gradients_of_stored_parameters_do_not_grow_with_memory(coherent: bool):
    """arXiv:2606.04048 divides rates by L in section 5.1, which assumes that gradients grow like L.

    The readout grows with L, but the norm after it divides that out: no gradient grows like L or sqrt(L),
    even if all tokens have the same upstream gradient.
    """
    powers = powers_of_memory(coherent=coherent)
    assert powers["o"].slope > 0.25
    for name in STORED:
        fit = powers[name]
        assert fit.slope < 0.2 + 2 * fit.stderr, f"{name}: L^{fit.slope:.2f} +- {fit.stderr:.2f}"
    if not coherent:
        assert abs(powers["v_proj.weight"].slope) < 0.1
