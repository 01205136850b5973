"""A segment of a divided sequence depends on the segments before it,
and on nothing that comes after.
"""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from delta_trn.models.convolution import ShortConvolution
from delta_trn.models.mup import Role
from delta_trn.models.parameters import Tag
from delta_trn.models.sequence import Sequences
from delta_trn.train.parallel import sequence

WORLD, K, V = 3, 2, 4


def mesh_of(rank: int) -> Any:
    return SimpleNamespace(get_local_rank=lambda: rank, size=lambda: WORLD)


@pytest.fixture
def gather(monkeypatch):
    """Returns a function that sets what the gather of all processes yields,
    as a tensor with a gradient.
    """

    def set_gathered(parts: Tensor) -> Tensor:
        parts = parts.clone().requires_grad_()
        monkeypatch.setattr(sequence, "gather", lambda x, mesh: parts)
        return parts

    return set_gathered


def segments(overflow: float | None) -> Tensor:
    """Returns [A, B] of three segments; the last one's overflow."""
    parts = torch.randn(WORLD, 1, 1, K, K + V, generator=torch.Generator().manual_seed(0))
    if overflow is not None:
        parts[-1] = overflow
    return parts


@pytest.mark.parametrize("overflow", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("rank", range(WORLD))
def test_a_segment_that_overflows_changes_no_state_before_it(gather, rank, overflow):
    A, B = segments(None)[rank].split([K, V], dim=-1)
    states, gradients = [], []
    for last in (None, overflow):
        parts = gather(segments(last))
        S = sequence.state_before(A, B, mesh_of(rank))
        S.square().sum().backward()
        states.append(S.detach())
        assert parts.grad is not None, "every process takes part in the gather's gradient"
        gradients.append(parts.grad)
    assert torch.equal(states[0], states[1]) and torch.equal(gradients[0], gradients[1])
    assert torch.equal(states[0], torch.zeros(1, 1, K, V)) == (rank == 0)


@pytest.mark.parametrize("rank", range(WORLD))
def test_a_segment_that_overflows_changes_no_convolution_before_it(gather, rank):
    module = ShortConvolution(4, 3, Tag(Role.VECTOR))
    torch.nn.init.normal_(module.weight, generator=torch.Generator().manual_seed(1))
    model: Any = nn.ModuleList([module])
    sequence.pass_states_on(model, mesh_of(rank))
    x = torch.randn(1, 5, 4, generator=torch.Generator().manual_seed(2))
    ends = torch.randn(WORLD, 1, 2, 4, generator=torch.Generator().manual_seed(3))
    results = []
    for last in (None, math.inf):
        parts = gather(ends)
        if last is not None:
            parts.data[-1] = last
        y = module(x, Sequences.rows(5, torch.device("cpu")))
        y.square().sum().backward()
        assert parts.grad is not None, "every process takes part in the gather's gradient"
        results.append((y.detach(), parts.grad))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


def test_a_segment_that_overflows_does_change_the_state_after_it(gather):
    """The comparisons above can fail: an overflow in the first segment reaches the second."""
    parts = segments(None)
    parts[0] = math.inf
    gather(parts)
    assert not sequence.state_before(*parts[1].split([K, V], dim=-1), mesh_of(1)).isfinite().all()
