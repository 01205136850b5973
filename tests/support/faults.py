"""Holds mistakes that implementations of the gated delta rule have really made, to be planted in `chunked`.

Each mistake replaces one function of `chunked`, and parity must turn red. A check that has never failed
proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


def _state_in_bfloat16(A: Tensor, states: Tensor, steps: list[tuple[slice, slice, slice]]) -> None:
    """Hands the state from chunk to chunk in the training dtype."""
    for rows, first, last in steps:
        states[first] = states[first].bfloat16().to(states.dtype)
        states[last].baddbmm_(A[rows], states[first])


def _neumann_inverse(L: Tensor) -> Tensor:
    """Computes (I + L)^-1 as (I - L)(I + L^2)(I + L^4)..., whose powers lose every digit."""
    power = -L.tril(-1)
    eye = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device)
    inverse = eye + power
    for _ in range(L.shape[-1].bit_length() - 1):
        power = power @ power
        inverse = inverse + inverse @ power
    return inverse


def _masked_after_exp(g: Tensor, dtype: torch.dtype) -> Tensor:
    """Takes exp of the whole square in float32 and then masks it, which multiplies infinity by 0."""
    C, b = g.shape[-1], g.cumsum(-1).to(dtype)
    return (b[:, :, None] - b[:, None, :]).exp() * torch.ones(C, C, dtype=b.dtype, device=b.device).tril()


def _pairs_that_cancel(pairs: Tensor, reads: Tensor, written: Tensor, carried: Tensor) -> Tensor:
    """Subtracts column sums of pairs from row sums, which leaves 1e-7 where a decay of -100 leaves 0."""
    inside = pairs.sum(-1) - pairs.sum(-2) + reads
    before = torch.nn.functional.pad(written[:, :-1].cumsum(-1), (1, 0))
    return inside.flip(-1).cumsum(-1).flip(-1) + before + carried[:, None]


def _cancelling_decay_gradient(pairs: Tensor, reads: Tensor, written: Tensor, carried: Tensor) -> Tensor:
    """Subtracts later tokens' writes from <dS', S'> of the last state: a small difference of large sums."""
    inside = pairs.sum(-1) - pairs.sum(-2) + reads
    behind = inside.flip(-1).cumsum(-1).flip(-1)
    total = carried + written.sum(-1)
    return behind + total[:, None] - written.flip(-1).cumsum(-1).flip(-1)


@dataclass(frozen=True)
class Fault:
    """Names the function of `chunked` that `mistake` replaces, and where parity must see it."""

    function: str
    mistake: Callable[..., Tensor | tuple[Tensor, ...] | None]
    case: str
    tensor: str


FAULTS = {
    "state in bfloat16": Fault("_scan", _state_in_bfloat16, "carry", "o"),
    "state in bfloat16, long": Fault("_scan", _state_in_bfloat16, "long_free", "final_state"),
    "power series inverse": Fault("triangular_inverse", _neumann_inverse, "collide", "o"),
    "power series inverse, near": Fault("triangular_inverse", _neumann_inverse, "near_1", "dk"),
    "masked after exp": Fault("decay_matrix", _masked_after_exp, "forget", "o"),
    "cancelling decay gradient, strong": Fault(
        "log_decay_gradient", _cancelling_decay_gradient, "forget", "dg"
    ),
    "pairs that cancel": Fault("log_decay_gradient", _pairs_that_cancel, "gates_wide", "dA_log"),
}
