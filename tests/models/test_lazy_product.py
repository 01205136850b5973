"""The products that XLA's tensors take: on the CPU they are F.linear, with its gradients."""

import pytest
import torch
from torch.nn.functional import linear

from delta_trn.models import layers
from delta_trn.models.layers import LazyProducts, Linear


def lazy(x, *weights):
    return LazyProducts.apply(x, torch.float64, *weights)


def each(x, *weights):
    return [linear(x, weight) for weight in weights]


@pytest.mark.parametrize("shape", [(2, 5, 3), (4, 3)])
@pytest.mark.parametrize("rows", [(7,), (7, 2, 3)])
def test_they_are_those_of_pytorch(shape, rows):
    x, *weights = (torch.randn(size, dtype=torch.float64) for size in (shape, *((n, 3) for n in rows)))
    results = []
    for compute in (each, lazy):
        leaves = [y.clone().requires_grad_() for y in (x, *weights)]
        ys = compute(*leaves)
        sums = [(y * torch.arange(1.0, y.shape[-1] + 1)).sum() for y in ys]
        results.append([*ys, *torch.autograd.grad(sum(sums), leaves)])
    for expected, result in zip(*results, strict=True):
        torch.testing.assert_close(result, expected)


def test_gradients_of_several_are_summed_in_the_dtype_of_x():
    x, weights = torch.randn(64, 32, requires_grad=True), torch.randn(2, 16, 32)
    ys = LazyProducts.apply(x, torch.bfloat16, *weights)
    (dx,) = torch.autograd.grad(ys, x, [torch.ones_like(y) for y in ys])
    parts = [torch.ones(64, 16, dtype=torch.bfloat16) @ W.bfloat16() for W in weights]
    assert [y.dtype for y in ys] == [torch.bfloat16] * 2
    assert torch.equal(dx, parts[0].float() + parts[1].float())


@pytest.mark.parametrize("watch", ["register_forward_hook", "register_forward_pre_hook"])
def test_a_map_that_is_watched_is_called(watch):
    maps, seen = [Linear(3, 2), Linear(3, 2)], []
    getattr(maps[1], watch)(lambda *_: seen.append(1))
    layers.project(torch.ones(layers.SHORT, 3), maps)
    assert seen == [1]
