"""The inverse of a batch of unit lower triangular matrices, by substitution and block merging."""

from __future__ import annotations

import torch
from torch import Tensor

BASE = 16


def triangular_inverse(L: Tensor) -> Tensor:
    """Returns T = (I + strict_lower(L))^-1 for L [M, C, C], C a power of two; the rest of L is not used.

    Blocks of 16 on the diagonal are inverted by substitution. Two inverted blocks T1 and T2, with L21 between
    them, are then merged:

        [[I + L1, 0], [L21, I + L2]]^-1 = [[T1, 0], [-T2 L21 T1, T2]]

    This takes 2.7 ms where substitution alone took 12 (768 matrices, C = 32). A power series would not do:
    with equal keys and beta = 2 the powers of L reach 6e13 at C = 32 and 8e28 at C = 64, while no element of
    T is above 2.
    """
    if L.device.type == "xla":
        return merged_inverse(L)  # substitution is no operation of XLA's: it would run on the host
    M, C, _ = L.shape
    base = min(BASE, C)
    eye = torch.eye(base, dtype=L.dtype, device=L.device)
    T = torch.zeros_like(L, memory_format=torch.contiguous_format)
    for start in range(0, C, base):
        block = slice(start, start + base)
        T[:, block, block] = torch.linalg.solve_triangular(
            L[:, block, block], eye.expand(M, base, base), upper=False, unitriangular=True
        )
    while base < C:
        for start in range(0, C, 2 * base):
            first, second = slice(start, start + base), slice(start + base, start + 2 * base)
            merged = torch.bmm(torch.bmm(T[:, second, second], L[:, second, first]), T[:, first, first])
            torch.neg(merged, out=T[:, second, first])
        base *= 2
    return T


def merged_inverse(L: Tensor) -> Tensor:
    """Returns the same by merging alone, from blocks of 1, in log2(C) pairs of products.

    Masks replace slices. Where T holds the inverted blocks of the diagonal, and L is masked to L21 of each
    pair, T L T is [[0, 0], [T2 L21 T1, 0]].
    """
    C = L.shape[-1]
    row = torch.arange(C, device=L.device)
    T = torch.eye(C, dtype=L.dtype, device=L.device).expand(L.shape)
    base = 1
    while base < C:
        block = row // base
        between = (block[:, None] == block + 1) & (block % 2 == 0)
        T = T - T @ torch.where(between, L, 0) @ T
        base *= 2
    return T
