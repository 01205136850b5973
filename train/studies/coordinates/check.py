"""The coordinate check: how what a model computes, and its first changes, scale with width.

Under muP nothing that another layer reads grows or vanishes with width, neither at initialization nor in what
a few steps change (`theory.py`). The size of a tensor is the root mean square of its entries. Its change is
that of the difference to its value for the same tokens before training. A slope is the power of width with
which either grows.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from delta_trn.train.studies.coordinates.theory import theory_of
from delta_trn.train.studies.fits import Line, line
from delta_trn.train.studies.probes import rms

TOLERANCE = 0.1  # how far a slope may be from theory, beside twice its standard error
Outputs = tuple[int, dict[str, list[Tensor]]]  # step, name -> tensors that count alike


@dataclass(frozen=True)
class Reading:
    """Root mean squares at one width: of a tensor, and of its change since step 0 (then 0)."""

    parametrization: str
    optimizer: str
    width: int
    seed: int
    step: int
    tensor: str
    size: float
    change: float


@dataclass(frozen=True)
class Slope:
    """The power of width with which a tensor's `quantity`, "size" or "change", grows, and the verdict."""

    parametrization: str
    optimizer: str
    tensor: str
    quantity: str
    step: int
    slope: float
    stderr: float
    expected: tuple[float, float]
    passes: bool


def compare(
    outputs: Iterator[Outputs], parametrization: str, optimizer: str, width: int, seed: int
) -> Iterator[Reading]:
    """Reads what a model computes after each step, beside what it computed at first."""
    before: dict[str, list[Tensor]] = {}
    for step, now in outputs:
        before = before or now
        for name, parts in now.items():
            first = before.get(name, [])
            if [x.shape for x in parts] != [x.shape for x in first]:
                continue  # an expert, say, that gets other tokens
            change = joint_rms([a - b for a, b in zip(parts, first, strict=True)])
            yield Reading(parametrization, optimizer, width, seed, step, name, joint_rms(parts), change)


def joint_rms(parts: Sequence[Tensor]) -> float:
    """Returns the root mean square of tensors that count alike."""
    return math.sqrt(sum(rms(part) ** 2 for part in parts) / len(parts))


def slopes(readings: Sequence[Reading]) -> list[Slope]:
    """Fits every parametrization, optimizer, tensor, quantity and step, over widths and seeds.

    Changes are judged from step 1 on. A tensor that is exactly 0 everywhere, before a readout or a mixer that
    starts at 0 has learned, is not judged; a change that is still 0 after the last step fails. A slope's
    error comes from the scatter of all widths and seeds about the line.
    """
    groups: dict[tuple[str, str, str, str, int], list[tuple[int, float]]] = defaultdict(list)
    for r in readings:
        groups[r.parametrization, r.optimizer, r.tensor, "size", r.step].append((r.width, r.size))
        if r.step:
            groups[r.parametrization, r.optimizer, r.tensor, "change", r.step].append((r.width, r.change))
    last = max((r.step for r in readings), default=0)
    return [
        _slope(*group, points)
        for group, points in groups.items()
        if group[-1] == last or any(y for _, y in points)
    ]


def _slope(
    parametrization: str,
    optimizer: str,
    tensor: str,
    quantity: str,
    step: int,
    points: Sequence[tuple[int, float]],
) -> Slope:
    theory = theory_of(tensor)
    low, high = theory.size if quantity == "size" else theory.change
    if quantity == "size" and step:
        # what training has added counts too, and may be as large as the rest
        low, high = min(low, theory.change[0]), max(high, theory.change[1])
    if all(0 < y < math.inf for _, y in points):
        fit = line([math.log2(x) for x, _ in points], [math.log2(y) for _, y in points])
    else:
        fit = Line(math.nan, math.nan)
    reach = TOLERANCE + 2 * fit.stderr
    passes = low - reach <= fit.slope <= high + reach
    return Slope(
        parametrization, optimizer, tensor, quantity, step, fit.slope, fit.stderr, (low, high), passes
    )


@dataclass(frozen=True)
class Verdict:
    """One tensor: its slopes, and the steps at which a slope departs from theory.

    start           its size before training; None where that is 0
    size, change    after the last step
    """

    parametrization: str
    optimizer: str
    tensor: str
    start: Slope | None
    size: Slope
    change: Slope
    fails_at: tuple[str, ...]

    @property
    def passes(self) -> bool:
        return not self.fails_at


def verdicts(judged: Sequence[Slope]) -> list[Verdict]:
    """Judges every parametrization, optimizer and tensor."""
    groups: dict[tuple[str, str, str], list[Slope]] = defaultdict(list)
    for s in judged:
        groups[s.parametrization, s.optimizer, s.tensor].append(s)
    rows = []
    for key, group in groups.items():
        last = {s.quantity: s for s in sorted(group, key=lambda s: s.step)}
        fails = tuple(f"{s.quantity} at step {s.step}" for s in group if not s.passes)
        start = next((s for s in group if s.step == 0), None)
        rows.append(Verdict(*key, start, last["size"], last["change"], fails))
    return rows
