"""The products that XLA's tensors take: on the CPU they are F.linear, with its gradients."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from delta_trn.models import layers
from delta_trn.models.layers import LazyProducts, micro_batches
from tests.support import tiny_models


def plain(x, first, second, third, *, joined):
    return linear(x, torch.cat([first, second]) if joined else first), linear(x, third)


def lazy(x, first, second, third, *, joined):
    return LazyProducts.apply(x, torch.float64, [1 + joined, 1], first, *[second] * joined, third)


@pytest.mark.parametrize("joined", [False, True])
def test_they_are_those_of_pytorch(joined):
    tensors = [torch.randn(n, 3, dtype=torch.float64) for n in (4, 7, 2, 3)]
    results = []
    for compute in (plain, lazy):
        leaves = [y.clone().requires_grad_() for y in tensors]
        ys = compute(*leaves, joined=joined)
        total = sum((y * torch.arange(1.0, y.shape[-1] + 1)).sum() for y in ys)
        results.append([*ys, *torch.autograd.grad(total, leaves, materialize_grads=True)])
    for expected, result in zip(*results, strict=True):
        torch.testing.assert_close(result, expected)


def test_gradients_of_several_are_summed_in_the_dtype_of_x():
    x, weights = torch.randn(64, 32, requires_grad=True), torch.randn(2, 16, 32)
    ys = LazyProducts.apply(x, torch.bfloat16, [1, 1], *weights)
    (dx,) = torch.autograd.grad(ys, x, [torch.ones_like(y) for y in ys])
    parts = [torch.ones(64, 16, dtype=torch.bfloat16) @ W.bfloat16() for W in weights]
    assert [y.dtype for y in ys] == [torch.bfloat16] * 2
    assert torch.equal(dx, parts[0].float() + parts[1].float())


def test_micro_batches_of_a_step_add_up_to_the_same_bits():
    """What is frozen gets no gradient, and what is no leaf is not kept:
    it is another tensor next time.
    """
    weights = [torch.nn.Parameter(torch.randn(n, 8)) for n in (4, 2, 3, 5)]
    weights[3].requires_grad_(False)
    batches, results = torch.randn(3, 6, 8), []
    for context in (nullcontext(), micro_batches()):
        for W in weights:
            W.grad = None
        with context as shared:
            for i, x in enumerate(batches):
                ys = LazyProducts.apply(x, torch.bfloat16, [2, 1, 1], *weights)
                other = LazyProducts.apply(x, torch.bfloat16, [1], weights[0] * (i + 1))
                sum(y.float().square().sum() for y in (*ys, *other)).backward()
        results.append([W.grad for W in weights])
    assert [len(kept) for kept in shared] == [3, 3] and results[0][3] is results[1][3] is None
    for expected, result in zip(*(grads[1:3] for grads in results), strict=True):
        assert torch.equal(result, expected)
    torch.testing.assert_close(results[1][0], results[0][0])  # which has another order of its sums


@pytest.mark.parametrize("watch", ["register_forward_hook", "register_forward_pre_hook"])
def test_a_map_that_is_watched_is_called(watch):
    maps, seen = [nn.Linear(3, 2, bias=False) for _ in range(2)], []
    getattr(maps[1], watch)(lambda *_: seen.append(1))
    layers.project(torch.ones(layers.SHORT, 3), maps)
    assert seen == [1]


def test_a_block_maps_rows_unless_it_is_watched():
    model = tiny_models.model()
    block, x = (
        model.model.blocks[0],
        torch.randn(3, 5, model.config.hidden_size, dtype=torch.float64),
    )
    whole, rows = (block(y, tiny_models.rows(5)) for y in (x, x.flatten(0, 1)))
    torch.testing.assert_close(rows.view_as(whole), whole)
    assert block.takes_rows()
    block.mixer.register_forward_hook(print)
    assert not block.takes_rows()
