"""Dropout's masks follow from each token's own number, and not from where the token is computed."""

import pytest
import torch
from torch import Tensor

from delta_trn.models import DeltaConfig, DeltaForCausalLM
from delta_trn.models.layers import Dropout, draw

T, D = 24, 48


def random_noise(rows: int, tokens: int = T, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, (rows, tokens), generator=generator).int()


def make_model(**changes: object) -> DeltaForCausalLM:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "base_width": 32,
        "num_hidden_layers": 2,
        "num_heads": 2,
    }
    model = DeltaForCausalLM(DeltaConfig(**sizes, intermediate_multiple=16, dropout=0.3, **changes))
    return model.double().train()


def loss_and_gradients(model: DeltaForCausalLM, ids: Tensor, noise: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss = model.loss(ids, ids.roll(-1, 1), noise=noise)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_entries_are_dropped_with_the_probability_and_the_mean_stays(p):
    x = torch.ones(64, T, D)
    y = Dropout(p, site=3)(x, random_noise(64))
    assert y.unique().tolist() == pytest.approx([0.0, 1 / (1 - p)])
    error = (p * (1 - p) / x.numel()) ** 0.5
    assert abs((y == 0).double().mean() - p) < 4 * error
    # no token and no channel has its own rate: their rates vary as those of independent draws
    for dims, count in (((0, 1), 64 * T), ((2,), D)):
        rates = (y == 0).double().mean(dims)
        assert rates.var().item() == pytest.approx(p * (1 - p) / count, rel=0.5)


@pytest.mark.parametrize(
    "apart",
    [
        pytest.param(lambda noise: (draw(noise, D, 1), draw(noise, D, 2)), id="sites"),
        pytest.param(lambda noise: (draw(noise, D, 1), draw(noise.roll(1, 0), D, 1)), id="samples"),
        pytest.param(
            lambda noise: (draw(noise, D, 1)[..., :-1], draw(noise, D, 1)[..., 1:]), id="channels"
        ),
        pytest.param(
            lambda noise: (draw(noise, D, 1), draw(noise ^ 1, D, 1)), id="numbers of one bit apart"
        ),
    ],
)
def test_masks_of_two_places_are_independent(apart):
    a, b = (x.double() / 2**31 - 0.5 for x in apart(random_noise(256)))
    for left, right in ((a, b), ((a > 0.3).double() - 0.2, (b > 0.3).double() - 0.2)):
        correlation = (left * right).mean() / (left.square().mean() * right.square().mean()).sqrt()
        assert abs(correlation) < 4 / a.numel() ** 0.5


@pytest.mark.parametrize("residual", ["additive", "ddl"])
def test_a_batch_with_dropout_has_the_mean_gradient_of_its_sequences(residual):
    model, ids, noise = make_model(residual=residual), torch.randint(64, (4, T)), random_noise(4)
    whole = loss_and_gradients(model, ids, noise)
    parts = [loss_and_gradients(model, ids[b : b + 1], noise[b : b + 1]) for b in range(4)]
    for expected, *terms in zip(whole, *parts, strict=True):
        torch.testing.assert_close(sum(terms) / 4, expected, rtol=1e-9, atol=1e-12)
    others = loss_and_gradients(model, ids, noise.roll(1, 0))
    assert abs(others[0] - whole[0]) > 1e-6, (
        "the masks have no effect, so that the comparison shows nothing"
    )


def test_gradient_checkpointing_draws_the_same_masks_again():
    model, ids, noise = make_model(), torch.randint(64, (2, T)), random_noise(2)
    expected = loss_and_gradients(model, ids, noise)
    model.gradient_checkpointing_enable()
    for a, b in zip(loss_and_gradients(model, ids, noise), expected, strict=True):
        assert torch.equal(a, b)


def test_dropout_with_noise_changes_neither_the_generator_nor_a_model_that_evaluates():
    model, ids, noise = make_model(), torch.randint(64, (2, T)), random_noise(2)
    before = torch.get_rng_state()
    loss_and_gradients(model, ids, noise)
    assert torch.equal(torch.get_rng_state(), before)
    model.eval()
    assert torch.equal(model.loss(ids, ids, noise=noise), model.loss(ids, ids))


@pytest.mark.slow
def test_a_compiled_dropout_drops_the_same_entries():
    """Half is the probability at which a compiler may take a comparison with 0 before a product."""
    dropout = Dropout(0.5, 1)
    compiled = torch.compile(dropout, dynamic=False)
    for seed in (1, 2):
        x, noise = torch.randn(3, T, D), random_noise(3, seed=seed)
        assert torch.equal(compiled(x, noise), dropout(x, noise))
