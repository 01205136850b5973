"""Tokens' rows in memory: which tensors a kernel reads where they lie, and which of them make up
one tensor.

A layer cuts q, k and v out of one tensor [B, T, channels]. A kernel that is told how far a token
lies from the next reads them there. It writes their gradients side by side, which then are the
gradient of that tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

ALIGNED = 16  # bytes that a thread loads at once


def as_rows(*tensors: Tensor | None, leading: int = 2) -> list[Any]:
    """Returns each tensor, or None, as kernels read it: copied only where `has_rows` says no."""
    return [x if x is None or has_rows(x, leading) else x.contiguous() for x in tensors]


def has_rows(x: Tensor, leading: int = 2) -> bool:
    """Returns whether x has each token's elements together, and one distance from a token to the
    next.

    leading says how many dimensions count tokens: 2 of [B, T, ...], 1 of [B, ...]. Vectors, which
    have two more, must begin at a multiple of 16 bytes. One token of a longer sequence is copied:
    its distance is that sequence's length, and a kernel would be compiled for it.

        >>> whole = torch.zeros(2, 3, 24)
        >>> [has_rows(x) for x in (whole[..., 8:].unflatten(2, (2, 8)), whole[..., 1:], whole.mT)]
        [True, True, False]
    """
    if x.is_contiguous():
        return True
    row = x.stride(leading - 1)
    one_distance = leading == 1 or x.shape[0] == 1 or x.stride(0) == x.shape[1] * row
    if x.dim() == leading + 2 and (x.data_ptr() % ALIGNED or row * x.itemsize % ALIGNED):
        return False
    return one_distance and x.shape[leading - 1] > 1 and _is_dense(x, leading)


def find_whole(parts: Sequence[Tensor]) -> Tensor | None:
    """Returns the tensor [B, T, channels] that parts [B, T, ...] side by side make up; None: there
    is none.

    >>> whole = torch.arange(12).view(1, 2, 6)
    >>> find_whole(whole.split([2, 4], -1)).equal(whole), find_whole([whole[..., :2], whole[..., 3:]])
    (True, None)
    """
    first = parts[0]
    B, T = first.shape[:2]
    sizes = [x.shape[2:].numel() for x in parts]
    row, place, storage = sum(sizes), first.storage_offset(), first.untyped_storage().data_ptr()
    for x, size in zip(parts, sizes, strict=True):
        near = x.dtype == first.dtype and x.untyped_storage().data_ptr() == storage
        strides = (B == 1 or x.stride(0) == T * row) and (T == 1 or x.stride(1) == row)
        if not (near and strides and x.storage_offset() == place and _is_dense(x, 2)):
            return None
        place += size
    return first.as_strided((B, T, row), (T * row, row, 1))


def empty_like_parts(parts: Sequence[Tensor]) -> list[Tensor]:
    """Returns tensors of the parts' shapes without values: side by side as the parts are,
    else contiguous.
    """
    whole = find_whole(parts)
    if whole is None:
        return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in parts]
    pieces = torch.empty_like(whole).split([x.shape[2:].numel() for x in parts], -1)
    return [piece.view(x.shape) for piece, x in zip(pieces, parts, strict=True)]


def _is_dense(x: Tensor, leading: int) -> bool:
    """Returns whether the elements behind the leading dimensions lie together and in order."""
    expected = 1
    for size, stride in zip(
        reversed(x.shape[leading:]), reversed(x.stride()[leading:]), strict=True
    ):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True
