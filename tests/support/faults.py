"""Holds mistakes that implementations of the gated delta rule have really made, to be planted in `chunked`.

Each mistake replaces one function of `chunked`, and parity must turn red. A check that has never failed
proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from delta_trn.backends.gated_delta_rule import chunked

_compute_chunk, _decays = chunked.compute_chunk, chunked.decays


def _state_in_bfloat16(*tensors: Tensor) -> tuple[Tensor, Tensor]:
    """Hands the state from chunk to chunk in the training dtype."""
    *rows, S = tensors
    return _compute_chunk(*rows, S.bfloat16().to(S.dtype))


def _neumann_inverse(L: Tensor) -> Tensor:
    """Computes (I + L)^-1 as (I - L)(I + L^2)(I + L^4)..., whose powers lose every digit."""
    power = -L.tril(-1)
    eye = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device)
    inverse = eye + power
    for _ in range(L.shape[-1].bit_length() - 1):
        power = power @ power
        inverse = inverse + inverse @ power
    return inverse


def _masked_after_exp(g: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Takes exp of the whole square in float32 and then masks it, which multiplies infinity by 0."""
    _, gam, lam = _decays(g, dtype)
    C, b = g.shape[-1], g.cumsum(-1).to(dtype)
    return (b[..., :, None] - b[..., None, :]).exp() * torch.ones(C, C, dtype=dtype).tril(), gam, lam


def _pairs_that_cancel(g: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Takes differences of sums in float32, so that dg is column sums of pairs from their row sums."""
    _, gam, lam = _decays(g, dtype)
    b = g.to(dtype).cumsum(-1)
    return (b[..., :, None] - b[..., None, :]).tril().exp().tril(), gam, lam


def _writes_that_cancel(g: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Subtracts later tokens' writes from <dS', S'> of the last state: a small difference of large sums."""
    D, gam, _ = _decays(g, dtype)
    b = g.to(dtype).cumsum(-1)
    return D, gam, (b[..., -1:] - b).exp()[..., None]


@dataclass(frozen=True)
class Fault:
    """Names the function of `chunked` that `mistake` replaces, and where parity must see it."""

    function: str
    mistake: Callable[..., Tensor | tuple[Tensor, ...]]
    case: str
    tensor: str


FAULTS = {
    "state in bfloat16": Fault("compute_chunk", _state_in_bfloat16, "carry", "o"),
    "state in bfloat16, long": Fault("compute_chunk", _state_in_bfloat16, "long_free", "final_state"),
    "power series inverse": Fault("triangular_inverse", _neumann_inverse, "collide", "o"),
    "power series inverse, near": Fault("triangular_inverse", _neumann_inverse, "near_1", "dk"),
    "masked after exp": Fault("decays", _masked_after_exp, "forget", "o"),
    "writes that cancel": Fault("decays", _writes_that_cancel, "forget", "dg"),
    "pairs that cancel": Fault("decays", _pairs_that_cancel, "gates_wide", "dA_log"),
}
