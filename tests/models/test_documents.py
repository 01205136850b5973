"""Rows of several documents: each is read as it would be alone, in output and in every gradient."""

from typing import Any

import pytest
import torch
from torch import Tensor

from delta_trn.backends import default_backend
from delta_trn.backends.parity.judge import error
from delta_trn.models import DeltaForCausalLM
from tests.support.tiny_models import ORDINARY, VARIANTS, assert_same, model, tokens
from tests.support.tiny_run import SPREAD

MODELS: dict[str, dict[str, Any]] = {
    **VARIANTS,
    "deep-delta": {
        "residual": "ddl",
        "ddl_value_channels": 4,
        "ddl_compressor": "token",
        "input_embed_shortconv_kernel_size": 4,
        "attention_layers": [1],
        "use_k_shift": True,
    },
    "learned-positions": {
        "positions": "learned",
        "max_position_embeddings": 64,
        "attention_layers": [0],
    },
}
# a document of a single token, one shorter than the convolution, and bounds elsewhere in the other
# row
LENGTHS = ([33, 1, 2, 4], [5, 35])
every_model = pytest.mark.parametrize("name", MODELS)


def places(lengths: tuple[list[int], ...] = LENGTHS) -> Tensor:
    """Returns the position_ids of rows with documents of these lengths."""
    return torch.stack(
        [torch.cat([torch.arange(n, dtype=torch.int32) for n in row]) for row in lengths]
    )


def gradients(m: DeltaForCausalLM) -> dict[str, Tensor]:
    return {name: p.grad for name, p in m.named_parameters() if p.grad is not None}


@every_model
def test_loss_and_gradients_of_documents_in_rows_are_those_of_documents_alone(name):
    """The tolerance of a gradient is what another order of summation,
    that of `recurrent`, changes in it.
    """
    m, ids, targets = model(**MODELS[name]), tokens(2, 40), tokens(2, 40, seed=2)

    def alone(backend: str) -> tuple[Tensor, dict[str, Tensor]]:
        m.zero_grad()
        loss = torch.zeros((), dtype=torch.float64)
        with default_backend(backend, allow=["chunked"]):
            for row, lengths in enumerate(LENGTHS):
                documents = zip(ids[row].split(lengths), targets[row].split(lengths), strict=True)
                loss = loss + sum(len(x) / 80 * m.loss(x[None], y[None]) for x, y in documents)
            loss.backward()
        return loss, gradients(m)

    together = m.loss(ids, targets, places())
    together.backward()
    mine = gradients(m)
    loss, expected = alone("chunked")
    control = alone("recurrent")[1]
    assert_same(together, loss)
    for parameter, gradient in expected.items():
        spread = error(control[parameter], gradient) / (ORDINARY * 2**-53)
        assert_same(mine[parameter], gradient, what=parameter, factor=max(10, SPREAD * spread))


def leak(m: DeltaForCausalLM, position_ids: Tensor | None) -> Tensor:
    """Returns how the last document of a row of 33 + 7 tokens depends
    on each token's embedding: [40].
    """
    x = m.model.embed(tokens(1, 40)).detach().requires_grad_()
    weights = torch.randn(7, 32, generator=torch.Generator().manual_seed(3)).to(x)
    (m.model.hidden(x, position_ids=position_ids)[0, 33:] * weights).sum().backward()
    assert x.grad is not None
    return x.grad.abs().sum((0, 2))


@every_model
def test_no_gradient_passes_from_a_document_to_the_one_before(name):
    m = model(**MODELS[name])
    passed = leak(m, places(([33, 7],)))
    assert bool((passed[:33] == 0).all()) and bool((passed[33:] > 0).all())
    assert bool((leak(m, None)[:33] > 0).all()), (
        "without position_ids every token before has an influence"
    )


@pytest.mark.parametrize("backend", ["chunked", "triton", "nki-simulator"])
def test_every_backend_forgets_all_at_a_document_whatever_its_rates(backend):
    if backend == "triton":
        pytest.importorskip("triton", reason="Triton is not installed")
    m = model(dtype=torch.float32, num_hidden_layers=1)
    m.model.blocks[0].mixer.A_log.data = torch.tensor([-30.0, 0.0, 5.0, 20.0])
    ids, targets = tokens(2, 40), tokens(2, 40, seed=2)
    with default_backend(backend, allow=["chunked"]):
        passed = leak(m, places(([33, 7],)))
        m.loss(ids, targets, places()).backward()
    assert bool((passed[:33] == 0).all()) and bool((passed[33:] > 0).all())
    assert all(bool(gradient.isfinite().all()) for gradient in gradients(m).values())


def test_contradictory_bounds_are_refused():
    with pytest.raises(
        ValueError, match=r"give each token its place in its own document, and no cache"
    ):
        model().loss(tokens(2, 40), tokens(2, 40), places()[:1])
