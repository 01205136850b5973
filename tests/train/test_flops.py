"""FLOPs of a token are counted from the matrices that a real model has."""

import pytest

from delta_trn.models import DeltaForCausalLM
from delta_trn.train.recipes import recipe
from delta_trn.train.run.model import model_config
from delta_trn.train.settings.overrides import apply
from delta_trn.train.watch.flops import flops_per_token, matrix_elements


@pytest.mark.parametrize("tied", ["true", "false"])
def test_every_matrix_but_the_taps_and_a_table_that_is_looked_up_multiplies_a_token(tied: str):
    config = apply(recipe("tiny"), {"model.tie_word_embeddings": tied})
    model = DeltaForCausalLM(model_config(config, rows=320))
    matrices = {n: p.numel() for n, p in model.named_parameters() if p.dim() == 2}
    looked_up = 0 if tied == "true" else matrices["model.embed.weight"]
    taps = sum(count for name, count in matrices.items() if name.endswith("conv.weight"))
    assert matrix_elements(config) == sum(matrices.values()) - taps - looked_up
    assert flops_per_token(config) > 6 * matrix_elements(config)


def test_the_delta_rules_part_grows_with_the_layers_and_is_that_of_its_products():
    """Of a head with K = V = C = 64: 4 + 2/3 + 4 + 6 + 2 times 64^3 forward, and twice backward."""
    keys = {"model.head_dim_k": "64", "model.expand_v": "1.0", "model.heads": "1"}
    config = apply(recipe("tiny"), keys)
    rule = flops_per_token(config) - 6 * matrix_elements(config)
    assert rule == pytest.approx(config.model.layers * 3 * (16 + 2 / 3) * 64**2)
