"""Errors of function tables, for samples that stand for Trainium's Scalar engine in float32.

The Scalar engine looks a function up in a table. On trn1 its exp is off by a relative error with a
median of 1.5e-6 and a maximum of 1.5e-5, where float32 alone would be off by 6e-8 (others measured
it; docs/trainium.md). So float32 on the chip is as exact as its functions are, and what is allowed
there comes from samples whose functions have such errors:

    f(x) (1 + e)    |e| = MOST u^(log2(MOST / MEDIAN)), u uniform in [0, 1], either sign

The median of |e| is MEDIAN and its maximum MOST. A table gives the same number for the same
argument, so u is a hash of the bits of x, of the function and of the sample. How errors of
neighboring arguments hang together is not known: in every other sample they are independent, and in
the rest one error belongs to a piece of the table, 64 for each power of two, so that it does not
cancel in sums.

Some errors depend on one argument alone: with exp(0) off, so is the state after one token. The
largest of a few draws is then no bound. So at each argument the samples share the range among them
(Latin hypercube sampling, McKay 1979): of n samples each has another n-th of the range.

Only exp was measured. All functions get its error: sigmoid and the reciprocal root of a norm are
known to be as good (0.51 of a bfloat16 ulp in a norm), and about softplus nothing is known.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

MEDIAN, MOST = 1.5e-6, 1.5e-5
PIECE = 17  # low bits of a float32 that do not tell pieces of a table apart
SIMULATED = "DELTA_TRN_NKI_FUNCTIONS"  # the simulator's: "measured:SEED" gives its functions errors


def judges_functions(backend: str) -> bool:
    """Returns whether a backend's functions have errors that its samples must have, too.

    The chip's always have, and those of our simulator where SIMULATED says so. Where a result is
    rounded to bfloat16, that is 260 times as large, and next to nothing is granted.
    """
    simulated = backend == "nki-simulator" and bool(os.environ.get(SIMULATED))
    return backend == "nki" or simulated


class Tables:
    """Gives functions of float32 tensors the errors of a table, another table for each sample.

    count       of all samples
    """

    def __init__(self, seed: int, count: int, most: float = MOST) -> None:
        self.seed, self.count, self.most = seed, count, most
        self.power = math.log2(MOST / MEDIAN)
        self.next = 0
        self.begin(1)
        self.next = 0

    def begin(self, samples: int) -> None:
        """Goes on to the next tables, for so many samples, which tensors have along their first
        axis; for one they need no axis.
        """
        self.places = torch.arange(self.next, self.next + samples) % self.count
        self.next += samples

    def __call__(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Returns function(x) with errors; its gradient has errors of its own."""
        y = function(x)
        name = getattr(function, "__name__", repr(function))
        there, back = (self.factors(f"{name}{way}", x) for way in ("", "'"))
        return _Scaled.apply(y, there, back)  # pyright: ignore[reportReturnType]

    def factors(self, name: str, x: Tensor) -> Tensor:
        """Returns 1 + e for each element of x, and of the table of this name."""
        if x.dtype != torch.float32:
            raise TypeError(f"tables have float32 arguments, not {x.dtype}")
        places = self.places.to(x.device)
        if len(places) > 1:
            if x.shape[0] != len(places):
                raise ValueError(f"{x.shape[0]} rows for {len(places)} samples")
            places = places.view(-1, *[1] * (x.dim() - 1))
        bits = x.detach().contiguous().view(torch.int32).long()
        bits = torch.where(places % 2 == 0, bits, bits >> PIECE)
        same = _mix(_mix(bits ^ zlib.crc32(name.encode())) ^ self.seed)  # in all samples
        steps = torch.tensor([k for k in range(1, self.count + 1) if math.gcd(k, self.count) == 1])
        step = steps.to(x.device)[same % len(steps)]
        share = (step * places + (same >> 8)) % self.count  # a permutation of the samples
        within = (_mix(same + places + 1) & 0xFFFFFF).double() / 2**24
        s = 2 * (share + within) / self.count - 1
        return (1 + self.most * s.sign() * s.abs() ** self.power).float()


class _Scaled(torch.autograd.Function):
    """Multiplies a tensor by one tensor, and its gradient by another."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, there: Tensor, back: Tensor) -> Tensor:
        ctx.back = back
        return y * there

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        return grad_outputs[0] * ctx.back, None, None


def _mix(x: Tensor) -> Tensor:
    """Returns 32 well-mixed bits of each integer (Wellons's lowbias32)."""
    x = x & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x735A2D97) & 0xFFFFFFFF
    return x ^ (x >> 15)
