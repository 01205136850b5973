"""Prints model against published measurement, for both readings of the Tensor engine's rate.

The model's time is the one in program order. Constants of the model come from one source; the
others are held out. The published busy time of the Vector and the Scalar engine is compared, too,
where there is one.
"""

from dataclasses import dataclass
from statistics import median

from nki_simulator.calibration.measurements import (
    FITTED,
    MEASUREMENTS,
    SOURCES,
    Measurement,
)
from nki_simulator.calibration.programs import arguments
from nki_simulator.cost import ISSUE, READINGS, estimates
from nki_simulator.kernel import record

MEDIAN, FARTHEST = (0.9, 1.1), 1.3  # what the model has to reach


@dataclass(frozen=True)
class Comparison:
    """The model's times of one measurement in milliseconds, by reading."""

    measurement: Measurement
    in_order: dict[str, float]
    vector: float
    scalar: float

    def ratio(self, reading: str = ISSUE.name) -> float:
        """Returns model / measured."""
        return self.in_order[reading] / self.measurement.ms


def compare(measurement: Measurement) -> Comparison:
    """Simulates a published kernel, and extends its time
    to the published size along a straight line.
    """
    runs = []
    for repetitions in measurement.samples:
        given = arguments(measurement.program, repetitions, measurement.size)
        # Some originals fill the 16 KiB of SBUF that the compiler keeps, or spill: no strict
        # checks.
        run = record(measurement.program, *given, target="trn1", strict=False)
        runs.append(estimates(run.trace, run.target))

    def extend(times: list[float]) -> float:
        first, last = measurement.samples[0], measurement.samples[-1]
        slope = (times[-1] - times[0]) / (last - first) if last > first else 0.0
        return measurement.runs * (times[-1] + (measurement.parts - last) * slope) / 1e3

    by_reading = {reading.name: [run[i] for run in runs] for i, reading in enumerate(READINGS)}
    slow = by_reading[ISSUE.name]
    return Comparison(
        measurement,
        {name: extend([e.schedule for e in costs]) for name, costs in by_reading.items()},
        extend([e.engines["vector"] for e in slow]),
        extend([e.engines["scalar"] for e in slow]),
    )


def table(comparisons: list[Comparison]) -> str:
    """Returns the comparison as a Markdown table, one line per measurement."""
    names = [reading.name for reading in READINGS]
    lines = [
        f"| kernel | source | measured, ms | {' | '.join(f'{n}, ms' for n in names)} "
        f"| {' | '.join(f'{n} / measured' for n in names)} | Vector busy | Scalar busy |",
        "| --- | --- | ---: |" + " ---: |" * (2 * len(names) + 2),
    ]
    for c in comparisons:
        m = c.measurement
        times = " | ".join(f"{c.in_order[n]:.3f}" for n in names)
        ratios = " | ".join(f"{c.ratio(n):.2f}" for n in names)
        busy = [
            f"{model / measured:.2f}" if measured else ""
            for model, measured in ((c.vector, m.vector), (c.scalar, m.scalar))
        ]
        lines.append(
            f"| {m.kernel} | {m.source} | {m.ms:.3f} | {times} | {ratios} | {' | '.join(busy)} |"
        )
    return "\n".join(lines)


def verdict(comparisons: list[Comparison]) -> tuple[list[str], bool]:
    """Returns a line for all, for the fitted and for the held-out points,
    and whether the aims are met.
    """
    lines, met = [], True
    for name, chosen in (
        ("all", comparisons),
        (f"fitted ({FITTED})", [c for c in comparisons if c.measurement.source == FITTED]),
        ("held out", [c for c in comparisons if c.measurement.source != FITTED]),
    ):
        for reading in READINGS:
            ratios = sorted(c.ratio(reading.name) for c in chosen)
            middle = median(ratios)
            good = (
                MEDIAN[0] <= middle <= MEDIAN[1]
                and ratios[0] >= 1 / FARTHEST
                and ratios[-1] <= FARTHEST
            )
            met &= good
            lines.append(
                f"{name}, {reading.name}: {len(ratios)} points, median {middle:.2f}, "
                f"{ratios[0]:.2f} to {ratios[-1]:.2f}: {'within' if good else 'OUTSIDE'} the aims"
            )
    return lines, met


def main() -> int:
    """Runs the comparison. Returns 1 if the model is farther
    from a measurement than the aims allow.
    """
    comparisons = [compare(m) for m in MEASUREMENTS]
    lines, met = verdict(comparisons)
    print(
        "Model in program order against published measurements on Trn1. Nothing was measured "
        "here.\n"
    )
    print(table(comparisons) + "\n", *lines, "", sep="\n")
    print("\nSources:", *(f"{name}: {address}" for name, address in SOURCES.items()), sep="\n  ")
    return 0 if met else 1
