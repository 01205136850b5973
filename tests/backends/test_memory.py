"""Which parameters learn through the state, and whose rates the memory of the state divides."""

import pytest
import torch

from delta_trn.models.gated_deltanet import GatedDeltaNet
from delta_trn.models.parameters import scaled_parameters, tagged_parameters
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

    The upstream gradient is at the last token. Tokens before the reach of its taps contribute only
    to projections that the state stores.
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
