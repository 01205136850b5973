"""Prints the cost model beside published times on Trn1, and how it does on times that it was not
fitted to.

The points are dealt to two halves. Costs are fitted to each half and tested on the other one, whose
median has to be within MEDIAN. The costs of the model, `COSTS`, are near the fit of all points; the
prices of waiting are those that fit kiln's kernels of small dependent instructions, which ours are
like, and whose engines' busy times show them: AccelOpt's and AWS's have their operands early. Every
point that is farther than FAR under COSTS or under the fit of the other half is listed with
its reason; none is left out.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from statistics import median

from nki_simulator.calibration.fit import SEED, fit, split
from nki_simulator.calibration.measurements import SOURCES
from nki_simulator.calibration.points import (
    Point,
    extend,
    list_instructions,
    list_kernels,
    list_programs,
)
from nki_simulator.calibration.programs import arguments, gemm
from nki_simulator.core.targets import TARGETS
from nki_simulator.cost import COSTS, Costs, estimate
from nki_simulator.kernel import record

MEDIAN = (0.9, 1.1)  # of each half under the fit of the other one
FAR = 0.1
TRN2_US = 240.0  # of a product of 2048 x 2048 x 2048 in bfloat16, public, by hand-written NKI


@dataclass(frozen=True)
class Comparison:
    """A point, the half that it is in, and model / measured under COSTS and under the fit of the
    other half.
    """

    point: Point
    half: str
    ratio: float
    untouched: float

    @property
    def far(self) -> bool:
        return max(abs(self.ratio - 1), abs(self.untouched - 1)) > FAR


def compare(points: Sequence[Point], fits: tuple[Costs, Costs] | None = None) -> list[Comparison]:
    """Returns each point beside the model; `fits` are those of the two halves, if they are known."""
    halves = split(points)
    one, two = fits or (fit(halves[0]), fit(halves[1]))
    return [
        Comparison(p, name, p.ratio(), p.ratio(other))
        for name, half, other in (("A", halves[0], two), ("B", halves[1], one))
        for p in half
    ]


def table(comparisons: Sequence[Comparison]) -> str:
    """Returns the comparison as a Markdown table, one line per point."""
    lines = [
        "| point | source | half | measured, us | model, us | model / measured | "
        "by the fit of the other half |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {c.point.name} | {c.point.source} | {c.half} | {c.point.us:.4g} | "
        f"{c.ratio * c.point.us:.4g} | {c.ratio:.2f} | {c.untouched:.2f} |"
        for c in comparisons
    ]
    return "\n".join(lines)


def verdict(comparisons: Sequence[Comparison]) -> tuple[list[str], bool]:
    """Returns a line for each half and for all, the points that are far with their reasons, and
    whether the aims are met.
    """
    lines, met = [], True
    for half, other in (("A", "B"), ("B", "A")):
        ratios = sorted(c.untouched for c in comparisons if c.half == half)
        middle = median(ratios)
        good = MEDIAN[0] <= middle <= MEDIAN[1]
        met &= good
        near = sum(abs(r - 1) <= FAR for r in ratios)
        lines.append(
            f"half {half} by the fit of half {other}: {len(ratios)} points, median {middle:.3f}, "
            f"{near} within {FAR:.0%}: {'within' if good else 'OUTSIDE'} the aim"
        )
    ratios = [c.ratio for c in comparisons]
    near = sum(abs(r - 1) <= FAR for r in ratios)
    lines.append(
        f"all by the model: {len(ratios)} points, median {median(ratios):.3f}, {near} within {FAR:.0%}"
    )
    lines += ["", f"Points beyond {FAR:.0%}:", ""]
    for c in comparisons:
        if c.far:
            met &= bool(c.point.reason)
            reason = c.point.reason or "NO REASON IS KNOWN"
            lines.append(f"- {c.point.name}: {c.ratio:.2f}, {c.untouched:.2f}: {reason}")
    return lines, met


def describe(names: Sequence[str], fits: Sequence[Costs]) -> str:
    """Returns several costs as a Markdown table."""
    lines = [f"| cost | {' | '.join(names)} |", "| --- |" + " ---: |" * len(names)]
    values = zip(*(astuple(costs) for costs in fits), strict=True)
    for field, row in zip(fields(Costs), values, strict=True):
        lines.append(f"| {field.name} | {' | '.join(f'{value:.4g}' for value in row)} |")
    return "\n".join(lines)


def price_trn2() -> float:
    """Returns what the model has for the product whose time on Trn2 is public, in microseconds."""
    target, runs = replace(TARGETS["trn2"], refused=""), []
    samples, parts = (1, 2), 2
    for n in samples:  # 512 x 1024 n of the result; the whole has four such rows of blocks
        run = record(gemm, *arguments(gemm, n, 2048), target="trn2", strict=False)
        runs.append(estimate(run.trace, target).schedule)
    return sum(w * t for w, t in zip(extend(samples, parts, 4), runs, strict=True))


def main(folder: Path | None = None) -> int:
    """Runs the comparison. Returns 1 if a median or a point without a reason is too far off."""
    points = [*list_instructions(), *list_programs()]
    points += list_kernels(folder) if folder else []
    halves = split(points)
    fits = (fit(halves[0]), fit(halves[1]))
    comparisons = compare(points, fits)
    lines, met = verdict(comparisons)
    print("Model against published measurements on Trn1. Nothing was measured here.")
    if not folder:
        print("The public delta-rule kernels are left out: they need --kernels DIR.")
    print(f"\n{table(comparisons)}\n\nHalves by seed {SEED}.\n", *lines, sep="\n")
    print(
        "",
        describe(("fit of A", "fit of B", "fit of all", "model"), (*fits, fit(points), COSTS)),
        sep="\n",
    )
    trn2 = price_trn2()
    print(
        f"\ntrn2: {trn2:.0f} us by the model for the product of 2048 x 2048 x 2048 that takes "
        f"{TRN2_US:.0f}, {trn2 / TRN2_US:.2f} times: "
        + ("no time is estimated there." if TARGETS["trn2"].refused else "times are estimated.")
    )
    print("\nSources:", *(f"{name}: {address}" for name, address in SOURCES.items()), sep="\n  ")
    return 0 if met else 1
