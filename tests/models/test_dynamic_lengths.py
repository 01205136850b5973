"""One graph of a model takes sequences of every length: compiled, and exported."""

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from delta_trn.backends import default_backend
from delta_trn.models import layers
from tests.support.tiny_models import VARIANTS, assert_same, model, tokens

LENGTHS = (10, 63, 64, 130)  # eagerly, weights are put side by side from 64 tokens on
variants = pytest.mark.parametrize("variant", ["gdn", "kimi", "hybrid"])


def make(variant: str):
    attention = [0] if variant == "hybrid" else []
    return model(**{**VARIANTS[variant], "num_hidden_layers": 1, "attention_layers": attention})


class Logits(nn.Module):
    def __init__(self, m: nn.Module) -> None:
        super().__init__()
        self.m = m

    def forward(self, ids: Tensor) -> Tensor:
        return self.m(ids, use_cache=False).logits


@pytest.mark.parametrize("variant", ["gdn", "kimi"])
def test_a_model_compiles_once_for_all_lengths(variant):
    m, counter, counts = make(variant), CompileCounterWithBackend("aot_eager"), []
    torch._dynamo.reset()
    compiled = torch.compile(m, dynamic=True, fullgraph=True, backend=counter)
    for T in LENGTHS:
        ids = tokens(2, T)
        losses = [f(ids, labels=ids, use_cache=False).loss for f in (compiled, m)]
        gradients = [torch.autograd.grad(loss, m.model.embed.weight)[0] for loss in losses]
        assert_same(losses[0], losses[1], what=f"{T} tokens")
        assert_same(gradients[0], gradients[1], what=f"gradient, {T} tokens", factor=10)
        counts.append(counter.frame_count)
    assert counts == counts[:1] * len(LENGTHS)


def exported(variant: str, at: int):
    length = torch.export.Dim("T", min=2, max=4096)
    with torch.no_grad():
        made = make(variant)
        shapes = {"ids": {1: length}}
        return made, torch.export.export(
            Logits(made), (tokens(2, at),), dynamic_shapes=shapes, strict=False
        ).module()


@pytest.mark.parametrize("at", [20, 100])
@variants
def test_an_exported_model_takes_every_length(variant, at):
    m, program = exported(variant, at)
    for T in LENGTHS:
        assert_same(program(tokens(2, T)), m(tokens(2, T), use_cache=False).logits, what=str(T))


def test_a_length_that_is_compared_is_no_longer_free(monkeypatch):
    """So the test above can fail."""
    monkeypatch.setattr(layers, "_is_short", lambda T: bool(T < layers.SHORT))
    with pytest.raises(Exception, match="Constraints violated"):
        exported("gdn", 20)


def test_a_backend_whose_limits_look_at_the_length_keeps_it():
    """NKI's kernel of a whole layer takes so many chunks: its choice is one of a length."""
    failure = pytest.raises(Exception, match="Constraints violated")
    with default_backend("nki-simulator", allow=["chunked"]), failure:
        exported("gdn", 20)
