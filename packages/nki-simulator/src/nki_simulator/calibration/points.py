"""Published times on Trn1 as points that the cost model can be held to, in microseconds.

    instruction   one instruction alone, where nothing waits         instructions.csv
    kernel        a kernel from its first to its last instruction    measurements.csv
    call          a call of a graph that holds one kernel            kernels.csv, with --kernels
    busy          how long one engine of a kernel was busy           measurements.csv, kernels.csv

The kernels of measurements.csv are written again in `programs`. Those of kernels.csv are other
people's files, which the user fetches: `kiln/kernels/` of foxl-ai/kiln at f5a7faf3 has
delta_rule.py, delta_rule_v2.py and kda_decode.py.
"""

import csv
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from nki_simulator import aliases
from nki_simulator.calibration.instructions import trace_instruction
from nki_simulator.calibration.measurements import MEASUREMENTS, Measurement
from nki_simulator.calibration.programs import arguments
from nki_simulator.core.machine import Record
from nki_simulator.core.targets import TARGETS, Target
from nki_simulator.cost import (
    COSTS,
    LAUNCH_US,
    Costs,
    Estimate,
    estimate,
    instruction_cost,
    lay_out,
)
from nki_simulator.kernel import record

HBM_GB_S = 273.0  # at which a graph reads what its kernel wrote, to add it up
TRN1 = TARGETS["trn1"]


class Traced:
    """A recorded kernel call, to be estimated under several `Costs`."""

    def __init__(self, trace: Sequence[Record], target: Target = TRN1) -> None:
        self.trace = trace
        self.target = target
        self.layout = lay_out(trace, target)
        self._last: tuple[Costs, Estimate] | None = None
        self._prices: tuple[Costs, list[tuple[float, float]]] | None = None

    def estimate(self, costs: Costs) -> Estimate:
        """Returns the estimate; what a call before has computed is not computed again."""
        alone = replace(costs, tensor_wait=0.0, vector_wait=0.0, scalar_wait=0.0)
        if self._prices is None or self._prices[0] != alone:
            self._prices = alone, [instruction_cost(r, self.target, alone) for r in self.trace]
        if self._last is None or self._last[0] is not costs:
            given = (self.trace, self.target, costs, self.layout, self._prices[1])
            self._last = costs, estimate(*given)
        return self._last[1]


@dataclass(frozen=True)
class Point:
    """A published time, and the model's as a sum of weighted estimates of short runs.

    `engine` names the engine whose busy time was published, "" that of the whole kernel. Points of
    one `family` have one cause in common; each family is dealt to both halves. `reason` says why
    the model is far from the point, where it is.
    """

    name: str
    kind: str
    family: str
    source: str
    us: float
    reason: str = ""
    runs: tuple[tuple[float, Traced], ...] = ()
    engine: str = ""
    outside: float = 0.0  # of the kernel: the launch, and what else the graph does
    instruction: Record | None = None
    times: int = 1

    def predict(self, costs: Costs = COSTS) -> float:
        """Returns the model's time in microseconds."""
        if self.instruction is not None:
            return self.times * instruction_cost(self.instruction, TRN1, costs)[0]
        total = self.outside
        for weight, run in self.runs:
            e = run.estimate(costs)
            total += weight * (e.engines[self.engine] if self.engine else e.schedule)
        return total

    def ratio(self, costs: Costs = COSTS) -> float:
        """Returns model / measured."""
        return self.predict(costs) / self.us


def extend(samples: Sequence[float], parts: float, runs: int = 1) -> tuple[float, ...]:
    """Returns the weights that lead from runs of `samples` parts along a straight line to `parts`.

    >>> extend((1, 2), 5), extend((3,), 3, 2)
    ((-3.0, 4.0), (2.0,))
    """
    if len(samples) == 1:
        return (float(runs),)
    far = (parts - samples[-1]) / (samples[-1] - samples[0])
    return (-far * runs, (1 + far) * runs)


def rows(name: str) -> list[dict[str, str]]:
    """Returns the rows of one of this folder's tables."""
    with (Path(__file__).parent / name).open(newline="") as file:
        return list(csv.DictReader(file))


def list_instructions() -> Iterator[Point]:
    """Yields the points of single instructions."""
    for row in rows("instructions.csv"):
        yield Point(
            row["instruction"], "instruction", row["family"], row["source"],
            float(row["ns"]) / 1e3, row["reason"],
            instruction=trace_instruction(row["program"], *row["arguments"].split()),
            times=int(row["times"]),
        )  # fmt: skip


def list_programs(measurements: Sequence[Measurement] = MEASUREMENTS) -> Iterator[Point]:
    """Yields the points of kernels that `programs` writes again, and of their engines."""
    for m in measurements:
        # Some originals fill the 16 KiB of SBUF that the compiler keeps, or spill: no strict checks.
        traced = [
            Traced(
                record(
                    m.program, *arguments(m.program, n, m.size), target="trn1", strict=False
                ).trace
            )
            for n in m.samples
        ]
        weights = extend(m.samples, m.parts, m.runs)
        runs = tuple(zip(weights, traced, strict=True))
        yield Point(m.kernel, "kernel", m.source, m.source, m.ms * 1e3, m.reason, runs)
        for engine, ms, reason in (
            ("vector", m.vector, m.vector_reason),
            ("scalar", m.scalar, m.scalar_reason),
        ):
            if ms:
                name = f"{m.kernel}: {engine.title()} busy"
                yield Point(
                    name, "busy", f"{engine} busy", m.source, ms * 1e3, reason, runs, engine
                )


@dataclass
class Files:
    """Other people's kernels in a folder, recorded once for each shape."""

    folder: Path
    modules: dict[str, ModuleType] = field(default_factory=dict)
    traces: dict[tuple, Traced] = field(default_factory=dict)

    def load(self, file: str) -> ModuleType:
        """Imports a file of the folder as part of a package, as its relative imports need."""
        package = "nki_simulator_calibrated"
        if not (self.folder / file).is_file():
            raise SystemExit(
                f"{self.folder} has no {file}; fetch kiln/kernels/ of github.com/foxl-ai/kiln"
            )
        if package not in sys.modules:
            parent = ModuleType(package)
            parent.__path__ = [str(self.folder)]
            sys.modules[package] = parent
        if file not in self.modules:
            with aliases.as_nki():
                self.modules[file] = importlib.import_module(f"{package}.{file[:-3]}")
        return self.modules[file]

    def trace(self, row: Mapping[str, str], size: int) -> Traced:
        """Records a kernel at `size` tokens, or rows of one token."""
        key = (row["function"], row["kind"], row["heads"], row["units"], row["second"], size)
        if key not in self.traces:
            function = getattr(self.load(row["file"]), row["function"])
            given = self._step(row, size) if row["kind"] == "step" else self._chunks(row, size)
            # A chip has run it, so nothing is asked of it here: no strict checks.
            run = record(function, *given, target="trn1", nki="0.6.0", strict=False)
            self.traces[key] = Traced(run.trace)
        return self.traces[key]

    def _chunks(self, row: Mapping[str, str], tokens: int) -> list[Any]:
        normal, uniform = _numbers()
        K, V, kda = int(row["key_heads"]), int(row["heads"]), row["kind"] == "kda"
        q, k = normal(tokens, K, 128) / 11, normal(tokens, K, 128) / 11
        g = -uniform(tokens, V, 128) if kda else -uniform(tokens, V)
        constants = self.load("delta_rule.py").consts_np()
        second = [int(row["second"]), 0] if "v2" in row["file"] else []
        more = [constants, int(kda), int(row["units"]), *second, 0]
        return [q, k, normal(tokens, V, 128), g, uniform(tokens, V), normal(V, 128, 128), *more]

    def _step(self, row: Mapping[str, str], batch: int) -> list[Any]:
        normal, uniform = _numbers()
        heads = int(row["heads"])
        slots = np.stack([np.arange(batch), np.arange(batch)]).astype(np.int32)
        q, k, v = (normal(batch, heads, 128) for _ in range(3))
        g, beta = -uniform(batch, heads, 128), uniform(batch, heads)
        pool = normal(batch, heads, 128, 128)
        return [pool, slots, q, k, v, g, beta, np.eye(128, dtype=np.float32), 0]


def _numbers() -> tuple[Callable[..., np.ndarray], Callable[..., np.ndarray]]:
    rng = np.random.default_rng(0)
    return (
        lambda *shape: rng.standard_normal(shape, dtype=np.float32),
        lambda *shape: rng.random(shape, dtype=np.float32),
    )


def list_kernels(folder: Path) -> Iterator[Point]:
    """Yields the points of other people's kernels, whose files are in `folder`."""
    files = Files(folder)
    for row in rows("kernels.csv"):
        size, heads = int(row["tokens"]), int(row["heads"])
        samples: Sequence[int] = (size,)
        if row["kind"] != "step":
            # groups of units come out even, so that a straight line leads on
            units = int(row["units"])
            chunks = next(
                n for n in range(1, 99) if n * heads % units == 0 and n * heads >= 2 * units
            )
            samples = (128 * chunks, 256 * chunks)
            if size <= samples[-1]:
                samples = (size,)
        runs = tuple(
            zip(
                extend(samples, size),
                (files.trace(row, n) for n in samples),
                strict=True,
            )
        )
        outside = 0.0
        if row["launches"] == "1":  # the graph also adds up the output, so that little returns
            outside = LAUNCH_US
            if row["kind"] != "step":
                outside += size * heads * 128 * 4 / (HBM_GB_S * 1e3)
        kind = "busy" if row["engine"] else "call" if outside else "kernel"
        yield Point(
            row["kernel"], kind, row["family"], row["source"], float(row["us"]), row["reason"],
            runs, row["engine"], outside,
        )  # fmt: skip
