"""Models that several files look at: one of each family of transformers, and one of ours."""

import pytest
import torch

from delta_trn import DeltaConfig, DeltaForCausalLM
from tests.support.families import FAMILIES, INDEXED, make


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    return make(request.param)


@pytest.fixture(scope="module", params=[name for name in FAMILIES if name != INDEXED])
def packing_model(request):
    return make(request.param)


@pytest.fixture(scope="module")
def qwen():
    return make("qwen3_next")


@pytest.fixture(scope="module")
def ours():
    torch.manual_seed(0)
    return DeltaForCausalLM(DeltaConfig(vocab_size=61, hidden_size=32, num_hidden_layers=2)).eval()
