"""Mistakes that implementations of the gated delta rule have really made, to be planted in `chunked`.

Each replaces one of its functions; parity must turn red. A check that has never failed proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from backends import chunked


def _state_in_bfloat16(
    A: Tensor, Z: Tensor, S: Tensor, states: Tensor, at: chunked.Layout, HV: int
) -> Tensor:
    """The state is handed from chunk to chunk in the training dtype."""
    flat, start = states.flatten(0, 1), 0
    for n in at.active:
        rows = slice(start, start + n * HV)
        S[rows] = flat[: n * HV].bfloat16().to(S.dtype)
        torch.baddbmm(Z[rows], A[rows], S[rows], out=flat[: n * HV])
        start += n * HV
    return states


def _neumann_inverse(L: Tensor) -> Tensor:
    """(I + L)^-1 = (I - L)(I + L^2)(I + L^4)...: right on paper, and its powers lose every digit."""
    power = -L.tril(-1)
    eye = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device)
    inverse = eye + power
    for _ in range(L.shape[-1].bit_length() - 1):
        power = power @ power
        inverse = inverse + inverse @ power
    return inverse


def _masked_after_exp(b: Tensor) -> Tensor:
    """exp over the whole square, then a mask: infinity times 0."""
    C = b.shape[-1]
    return (b[:, :, None] - b[:, None, :]).exp() * torch.ones(C, C, dtype=b.dtype, device=b.device).tril()


def _cancelling_decay_gradient(inside: Tensor, written: Tensor, carried: Tensor) -> Tensor:
    """<dS', S'> of the chunk's last state minus what later tokens wrote: a small difference of large sums."""
    behind = inside.flip(-1).cumsum(-1).flip(-1)
    total = carried + written.sum(-1)
    return behind + total[:, None] - written.flip(-1).cumsum(-1).flip(-1)


@dataclass(frozen=True)
class Fault:
    """function: of `chunked`, replaced by `mistake`.  case, tensor: where parity in float32 must see it."""

    function: str
    mistake: Callable[..., Tensor]
    case: str
    tensor: str


FAULTS = {
    "state in bfloat16": Fault("_scan", _state_in_bfloat16, "carry", "o"),
    "state in bfloat16, long": Fault("_scan", _state_in_bfloat16, "long_free", "final_state"),
    "power series inverse": Fault("triangular_inverse", _neumann_inverse, "collide", "o"),
    "power series inverse, near": Fault("triangular_inverse", _neumann_inverse, "near_1", "dk"),
    "masked after exp": Fault("decay_matrix", _masked_after_exp, "forget", "o"),
    "cancelling decay gradient": Fault("log_decay_gradient", _cancelling_decay_gradient, "heavy", "dg"),
    "cancelling decay gradient, strong": Fault(
        "log_decay_gradient", _cancelling_decay_gradient, "forget", "dg"
    ),
}
