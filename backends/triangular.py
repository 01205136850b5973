"""The inverse of a batch of unit lower triangular matrices, by substitution."""

from __future__ import annotations

import torch
from torch import Tensor


def triangular_inverse(L: Tensor) -> Tensor:
    """(I + strict_lower(L))^-1 for L [M, C, C]; what is on and above the diagonal of L is not read.

    Substitution, never a power series: with equal keys and beta = 2 the powers of L reach 1e18 at C = 64 while
    the inverse stays within 2.
    """
    eye = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device)
    return torch.linalg.solve_triangular(L, eye.expand_as(L), upper=False, unitriangular=True).contiguous()
