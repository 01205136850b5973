"""Defines the criterion: how far a backend is off, and how far it may be.

    judge       the literal formula in float64, on the inputs rounded to the dtype
    samples     a plain PyTorch implementation at the same precision, several times, with rounding
                errors of its own each time
    error       of a part: root mean square of the difference to the judge
    floor       sqrt(terms) u32 + (u / 2 if the dtype is shorter than float32), times the size of
                the judge

A result passes if none of these is exceeded; "largest" is over the samples:

    whole tensor            max(2 largest, floor)               sizes are root mean squares
    a sequence and head     max(4 largest, 2 floor)
    an element              16 (largest + floor |judge| + sqrt(terms) u32 RMS of its sequence and
                            head), where largest is at least the root mean square of those of its
                            vector

Why several samples, and these factors: where the error of a tensor is one number (dg of one head,
when nothing decays), sample and backend draw it from one distribution, and chance makes the
backend's twice one sample's in 30 of 100 draws. The largest of 14 normal samples is exceeded
twofold by 2 in 1000, fourfold by 4 in a million, eightfold by 1 in 10^9. So a few whole tensors,
more parts and millions of elements can be judged; `chance_factor` has what lies between.
Implementations also put their errors into different elements, which differ by a factor of up to 11
where the inverse is badly conditioned (near_2). The last term of an element is there because every
implementation subtracts numbers of the size of their neighbors somewhere.

The floor covers what the samples happen to compute exactly. A sum of n float32 terms of either sign
costs about sqrt(n) u32, u32 = 2^-24, because roundings in a row add in squares. Rounding to a
shorter dtype costs at most u / 2, u = eps(dtype). In float64, u32 is 2^-53, and the judge is no
more exact than the rest: its error is in the error of every sample, too, so that two right
implementations pass that differ from it alike.

On Trainium functions come from tables, and are off by more than float32 rounds. There the samples'
functions have such errors, too (`tables.py`), so that the allowance is twice what the formula makes
of them; everything else is as above.

Products below the least normal number of the sums' dtype may be 0 in any implementation, so a
difference of that size (`absolute`) is none. Where the judge is 0 everywhere, nothing is relative
to it: the backend must be 0 where the samples are (the gradient of q when only the final state is
used), and else as near to it as they are (that of the initial state after one token with q = k and
beta = 1).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from delta_trn.backends.checks import dtype_name

FACTOR, PART_FACTOR, ELEMENT_FACTOR = 2.0, 4.0, 16.0
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Verdict:
    """Judges one tensor of one case: it passes if error <= allowed, and part and element <= 1.

    part, element   the error of the worst sequence and head, and of the worst element, over what is
                    allowed

    A NaN never passes.
    """

    op: str
    case: str
    dtype: torch.dtype
    tensor: str
    backend: str
    error: float
    baseline: float
    allowed: float
    part: float = 0.0
    element: float = 0.0

    @property
    def passed(self) -> bool:
        return self.error <= self.allowed and self.part <= 1.0 and self.element <= 1.0

    @property
    def ratio(self) -> float:
        """Returns the largest error over what is allowed: above 1 it failed.
        A NaN counts as infinity.
        """
        whole = (
            0.0 if self.error == 0.0 else self.error / self.allowed if self.allowed else math.inf
        )
        ratios = (whole, self.part, self.element)
        return math.inf if any(map(math.isnan, ratios)) else max(ratios)

    def __str__(self) -> str:
        verb = "within" if self.passed else "above"
        return (
            f"{self.backend} {self.case} {dtype_name(self.dtype)} {self.tensor}: error "
            f"{self.error:.3g} {verb} allowed {self.allowed:.3g} (baseline {self.baseline:.3g}); "
            f"of what is allowed, worst sequence and head {self.part:.3g}, worst element "
            f"{self.element:.3g}"
        )


@dataclass
class Spread:
    """Holds the largest errors of the samples: of the whole tensor, of each part and of each
    element.

    parts   the number of its part for each index of the judge's first axes; None: the tensor has no
            parts
    energy  each part's squared errors, added up over elements and samples
    """

    judge: Tensor
    parts: Tensor | None = None
    absolute: float = 0.0
    count: int = 0
    whole: float = 0.0
    part: Tensor = field(init=False)
    energy: Tensor = field(init=False)
    element: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.part = torch.zeros_like(self.size(self.judge))
        self.energy = torch.zeros_like(self.part)
        self.element = torch.zeros_like(self.judge)

    def difference(self, x: Tensor) -> Tensor:
        """Returns |x - judge|; 0 where the dtype of x can hardly hold the judge."""
        difference = (x.to(self.judge) - self.judge).abs()
        return difference.masked_fill_(self.judge.abs() > torch.finfo(x.dtype).max / 2, 0.0)

    def size(self, x: Tensor) -> Tensor:
        """Returns the root mean square of each part."""
        total, count = self.squares(x)
        return (total / count.clamp(min=1)).sqrt()

    def squares(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns each part's sum of squares, and how many elements it has."""
        labels = (
            x.new_zeros((), dtype=torch.long) if self.parts is None else self.parts.to(x.device)
        )
        rows = x.square().reshape(labels.numel(), -1)
        total = rows.new_zeros(int(labels.max()) + 1 if labels.numel() else 1)
        count = torch.zeros_like(total).index_add_(
            0, labels.reshape(-1), torch.ones_like(rows.sum(1))
        )
        return total.index_add_(0, labels.reshape(-1), rows.sum(1)), count * rows.shape[1]

    def of_elements(self, part: Tensor) -> Tensor:
        """Returns the numbers of the parts, for each element of the judge."""
        if self.parts is None:
            return part[0].expand(self.judge.shape)
        labels = self.parts.to(part.device)
        return part[labels].reshape(labels.shape + (1,) * (self.judge.dim() - labels.dim()))

    def of_vectors(self) -> Tensor:
        """Returns `element`, but at least the root mean square of the element's vector, the last
        axis.

        Another order of the same sums has its errors in other elements of a vector.
        """
        if self.judge.dim() <= (0 if self.parts is None else self.parts.dim()):
            return self.element
        return torch.maximum(self.element, self.element.square().mean(-1, keepdim=True).sqrt())

    def add(self, samples: Iterable[Tensor]) -> None:
        """Adds samples of the tensor; what is not finite is no sample.

        All of a sample's difference counts. Less `absolute`, it could be next to 0 beside what is
        left of a backend's that is hardly larger.
        """
        for sample in samples:
            difference = self.difference(sample)
            if difference.isfinite().all():
                self.whole = max(self.whole, _size(difference))
                self.part = torch.maximum(self.part, self.size(difference))
                self.energy += self.squares(difference)[0]
                self.element = torch.maximum(self.element, difference)
                self.count += 1


@dataclass(frozen=True)
class Reference:
    """Holds what a case is judged by.

    judge       the judge's tensors by name
    spreads     the samples' errors on each
    terms       how many float32 terms a result has added up
    rounded     the dtype to which intermediate results are rounded, besides the result's own
    inputs      those of a rule's case for which this is so
    """

    op: str
    case: str
    dtype: torch.dtype
    judge: Mapping[str, Tensor]
    spreads: Mapping[str, Spread]
    terms: int
    rounded: torch.dtype | None = None
    inputs: Any = None

    @property
    def baseline(self) -> dict[str, float]:
        """Returns the largest error of the samples, relative to the judge."""
        return {
            name: _relative(spread.whole, self.judge[name]) for name, spread in self.spreads.items()
        }

    def verdicts(
        self, backend: str, outcome: Mapping[str, Tensor], names: Iterable[str] | None = None
    ) -> list[Verdict]:
        """Judges the tensors of these names; None: all of the judge's. Raises ValueError for one
        that `outcome` lacks.
        """
        names = list(self.judge if names is None else names)
        missing = sorted(set(names) - set(outcome))
        if missing:
            raise ValueError(f"{backend} returned no {', '.join(missing)} for case {self.case}")
        return [self._verdict(backend, name, outcome[name]) for name in names]

    def _verdict(self, backend: str, name: str, x: Tensor) -> Verdict:
        exact, spread = self.judge[name], self.spreads[name]
        if x.shape != exact.shape:
            raise ValueError(
                f"shape {tuple(x.shape)} differs from the judge's {tuple(exact.shape)}"
            )
        sums = floor(self.terms, torch.promote_types(x.dtype, torch.float32))
        least = max(floor(self.terms, dtype) for dtype in (self.rounded or x.dtype, x.dtype))
        base = _relative(spread.whole, exact)
        difference = (spread.difference(x) - spread.absolute).clamp_(min=0)
        relative = _relative(_size(difference), exact)
        here = self.op, self.case, self.dtype, name, backend
        if not (exact.abs() > spread.absolute).any():
            return Verdict(*here, _size(difference), spread.whole, FACTOR * spread.whole)
        size = spread.size(exact)
        part = torch.maximum(PART_FACTOR * spread.part, 2 * least * size)
        element = spread.of_vectors() + least * exact.abs() + sums * spread.of_elements(size)
        return Verdict(
            *here, relative, base, max(FACTOR * base, least),
            _worst(spread.size(difference), part), _worst(difference, ELEMENT_FACTOR * element),
        )  # fmt: skip


def absolute(dtype: torch.dtype, largest: float = 1.0, terms: int = 1) -> float:
    """Returns the difference that is none: what underflows in sums of so many products with numbers
    up to `largest`, and four roundings among the dtype's numbers near 0, each by half their
    distance.
    """
    sums, result = torch.finfo(torch.promote_types(dtype, torch.float32)), torch.finfo(dtype)
    return max(sums.tiny * max(1.0, largest) * terms, 2 * result.tiny * result.eps)


def error(x: Tensor, judge: Tensor) -> float:
    """Returns the relative root-mean-square error, and NaN for a NaN.

    Where the judge is 0 everywhere, the error is 0 for zeros and infinity for anything else.
    """
    if x.shape != judge.shape:
        raise ValueError(f"shape {tuple(x.shape)} differs from the judge's {tuple(judge.shape)}")
    judge = judge.double()
    return _relative(_size(x.to(judge) - judge), judge)


def floor(terms: int, dtype: torch.dtype) -> float:
    """Returns the error below which no implementation can be sure to stay, as derived above."""
    sums = math.sqrt(terms) * torch.finfo(torch.promote_types(dtype, torch.float32)).eps / 2
    short = dtype not in (torch.float32, torch.float64)
    return sums + torch.finfo(dtype).eps / 2 if short else sums


def chance_factor(parts: float) -> float:
    """Returns which multiple of the largest sample's error chance exceeds 4 times in a million.

    Where the error of a part is one number, normal of variance s_h, the tensor's squared error is a
    sum of such squares, about chi-squared (Satterthwaite 1946) of nu degrees of freedom:

        nu = (sum s_h)^2 / sum s_h^2        mean and variance of the sum are those of sum(s)
                                            chi2(nu) / nu

    nu is the number of parts if all err alike, and 1 if one carries everything. Backend and n
    samples draw from it independently, with density p and distribution F, so that

        chance(f) = integral of p(x) F(x / f^2)^n dx        3.4e-6 at nu = 1, f = 4, n = 14

    The f of that chance is 4, 2.81, 2.42, 2.21, 2.07 for nu = 1 to 5, which 1 + 3 nu^(-2/3) is
    within 3%; from 5.2 on FACTOR is more. A part of many independent numbers varies less, and gets
    the factor of one.
    """
    return max(FACTOR, 1 + (PART_FACTOR - 1) * max(parts, 1.0) ** (-2 / 3))


def _size(x: Tensor) -> float:
    return x.square().mean().sqrt().item()


def _relative(difference: float, judge: Tensor) -> float:
    size = _size(judge)
    if size == 0.0:
        return difference if math.isnan(difference) else (0.0 if difference == 0.0 else math.inf)
    return difference / size


def _worst(difference: Tensor, allowed: Tensor) -> float:
    """Returns the largest difference over what is allowed; 0 / 0 is 0, and a NaN stays."""
    ratio = torch.where(difference == 0, 0.0, difference / allowed)
    return ratio.max().item() if ratio.numel() else 0.0
