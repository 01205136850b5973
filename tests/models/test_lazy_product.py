"""The product that XLA's tensors take: on the CPU it is F.linear, with its gradients."""

import pytest
import torch
from torch.nn.functional import linear

from delta_trn.models.layers import LazyProduct


@pytest.mark.parametrize("shape", [(2, 5, 3), (4, 3)])
def test_it_is_that_of_pytorch(shape):
    x, weight = torch.randn(shape, dtype=torch.float64), torch.randn(7, 3, dtype=torch.float64)
    results = []
    for compute in (linear, lambda *leaves: LazyProduct.apply(*leaves, torch.float64)):
        leaves = [y.clone().requires_grad_() for y in (x, weight)]
        y = compute(*leaves)
        results.append([y, *torch.autograd.grad(y, leaves, torch.ones(7, dtype=y.dtype).expand_as(y))])
    for expected, result in zip(*results, strict=True):
        torch.testing.assert_close(result, expected)
