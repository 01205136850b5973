"""Defines the criterion: how far a backend is off, and how far it may be.

    judge       the literal formula in float64, on the inputs rounded to the dtype
    baseline    a plain PyTorch implementation at the same precision
    error       root mean square of the difference to the judge, over the root mean square of the judge
    allowed     FACTOR times the baseline's error, and never below the floor

The floor covers tensors that the baseline happens to compute exactly. A sum of n float32 terms of either
sign costs about sqrt(n) u32, u32 = 2^-24, because roundings in a row add in squares. Rounding to a shorter
dtype costs at most u / 2, u = eps(dtype).

    floor = sqrt(terms) u32 + (u / 2 if the dtype is not float32)

Where the judge is exactly 0 everywhere (the gradient of q when only the final state is used), the backend
must be, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from delta_trn.backends.checks import dtype_name

FACTOR = 2.0
DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Verdict:
    """Judges one tensor of one case: it passes if error <= allowed. A NaN never passes."""

    op: str
    case: str
    dtype: torch.dtype
    tensor: str
    backend: str
    error: float
    baseline: float
    allowed: float

    @property
    def passed(self) -> bool:
        return self.error <= self.allowed

    @property
    def ratio(self) -> float:
        """Returns error / allowed: above 1 it failed. A NaN counts as infinity."""
        if self.error == 0.0:
            return 0.0
        ratio = self.error / self.allowed if self.allowed else math.inf
        return math.inf if math.isnan(ratio) else ratio

    def __str__(self) -> str:
        verb = "within" if self.passed else "above"
        return (
            f"{self.backend} {self.case} {dtype_name(self.dtype)} {self.tensor}: error {self.error:.3g} "
            f"{verb} allowed {self.allowed:.3g} (baseline {self.baseline:.3g})"
        )


@dataclass(frozen=True)
class Reference:
    """Holds what a case is judged by.

    judge       the judge's tensors by name
    baseline    the baseline's error on each
    terms       how many float32 terms a result has added up
    rounded     the dtype to which intermediate results are rounded; None: the result's own
    """

    op: str
    case: str
    dtype: torch.dtype
    judge: Mapping[str, Tensor]
    baseline: Mapping[str, float]
    terms: int
    rounded: torch.dtype | None = None

    def verdicts(self, backend: str, outcome: Mapping[str, Tensor]) -> list[Verdict]:
        """Judges every tensor of the judge. Raises ValueError if `outcome` lacks one."""
        missing = sorted(set(self.judge) - set(outcome))
        if missing:
            raise ValueError(f"{backend} returned no {', '.join(missing)} for case {self.case}")
        rows = []
        for name, exact in self.judge.items():
            x, base = outcome[name], self.baseline[name]
            least = floor(self.terms, self.rounded or x.dtype)
            allowed = max(FACTOR * base, least) if exact.any() else 0.0
            rows.append(
                Verdict(self.op, self.case, self.dtype, name, backend, error(x, exact), base, allowed)
            )
        return rows


def error(x: Tensor, judge: Tensor) -> float:
    """Returns the relative root-mean-square error, and NaN for a NaN.

    Where the judge is 0 everywhere, the error is 0 for zeros and infinity for anything else.
    """
    if x.shape != judge.shape:
        raise ValueError(f"shape {tuple(x.shape)} differs from the judge's {tuple(judge.shape)}")
    judge = judge.double()
    difference = (x.to(judge.device).double() - judge).square().mean().sqrt().item()
    size = judge.square().mean().sqrt().item()
    if size == 0.0:
        return difference if math.isnan(difference) else (0.0 if difference == 0.0 else math.inf)
    return difference / size


def floor(terms: int, dtype: torch.dtype) -> float:
    """Returns the error below which no implementation can be sure to stay, as derived above."""
    single = math.sqrt(terms) * torch.finfo(torch.float32).eps / 2
    return single if dtype == torch.float32 else single + torch.finfo(dtype).eps / 2
