"""Mistakes that implementations of the gated delta rule have really made, to be planted in `chunked`.

Each replaces one of its functions; parity must turn red. A check that has never failed proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from delta_trn.backends.gated_delta_rule import chunked
from delta_trn.backends.gated_delta_rule.chunk_layout import Layout


def _state_in_bfloat16(A: Tensor, states: Tensor, steps: list[tuple[slice, slice, slice]]) -> None:
    """The state is handed from chunk to chunk in the training dtype."""
    for rows, first, last in steps:
        states[first] = states[first].bfloat16().to(states.dtype)
        states[last].baddbmm_(A[rows], states[first])


def _sums_in_float32(at: Layout, g: Tensor, HV: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Decays between two tokens as differences of float32 sums that a strong decay has made large."""
    b, *_ = _decays(at, g, HV, dtype)
    b = b.to(dtype).diff(dim=-1, prepend=b.new_zeros(len(b), 1, dtype=dtype)).cumsum(-1)
    return b, b.exp()[..., None], (b[:, -1:] - b).exp()[..., None]


def _neumann_inverse(L: Tensor) -> Tensor:
    """(I + L)^-1 = (I - L)(I + L^2)(I + L^4)...: right on paper, and its powers lose every digit."""
    power = -L.tril(-1)
    eye = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device)
    inverse = eye + power
    for _ in range(L.shape[-1].bit_length() - 1):
        power = power @ power
        inverse = inverse + inverse @ power
    return inverse


def _masked_after_exp(b: Tensor, dtype: torch.dtype) -> Tensor:
    """exp over the whole square in the state's float32, then a mask: infinity times 0."""
    C, b = b.shape[-1], b.to(dtype)
    return (b[:, :, None] - b[:, None, :]).exp() * torch.ones(C, C, dtype=b.dtype, device=b.device).tril()


def _pairs_that_cancel(pairs: Tensor, reads: Tensor, written: Tensor, carried: Tensor) -> Tensor:
    """Row sums of pairs minus column sums: 1e-7 of them is left where a decay of -100 leaves nothing."""
    inside = pairs.sum(-1) - pairs.sum(-2) + reads
    before = torch.nn.functional.pad(written[:, :-1].cumsum(-1), (1, 0))
    return inside.flip(-1).cumsum(-1).flip(-1) + before + carried[:, None]


def _cancelling_decay_gradient(pairs: Tensor, reads: Tensor, written: Tensor, carried: Tensor) -> Tensor:
    """<dS', S'> of the chunk's last state minus what later tokens wrote: a small difference of large sums."""
    inside = pairs.sum(-1) - pairs.sum(-2) + reads
    behind = inside.flip(-1).cumsum(-1).flip(-1)
    total = carried + written.sum(-1)
    return behind + total[:, None] - written.flip(-1).cumsum(-1).flip(-1)


_decays = chunked._decays


@dataclass(frozen=True)
class Fault:
    """function: of `chunked`, replaced by `mistake`.  case, tensor: where parity in float32 must see it."""

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
