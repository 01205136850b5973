"""Times a kernel's instructions in another order than the one in which they were recorded.

A kernel is recorded once, with what each instruction waits for and which tiles it touches. For another order
its instructions are only sorted; tools/instruction_times.cpp times them as the simulator's cost model does.
"""

import ctypes
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from delta_trn.nki_kernels.gated_delta_layer import cells, fwd
from delta_trn.nki_kernels.schedule import list_work
from delta_trn.nki_kernels.simulator import record
from delta_trn.nki_kernels.simulator.core.machine import Engine, current
from delta_trn.nki_kernels.simulator.core.memory import HBM, PSUM, SBUF
from delta_trn.nki_kernels.simulator.core.tables import LOAD_US, SETS, owners
from delta_trn.nki_kernels.simulator.cost import (
    PSUM_PORT,
    SBUF_PORT,
    accumulates,
    find_queue,
    instruction_cost,
    list_dependencies,
    list_ports,
)  # fmt: skip

BANK_BYTES = 2048  # of PSUM, per partition


class Trace:
    """A kernel's instructions by what issued them, to be timed in another order."""

    def __init__(self, module: ModuleType, options: dict[str, int]) -> None:
        kernel, arguments = module.example(dtype="bfloat16", **options)
        marks: list[tuple[Any, int]] = []
        listing = "list_layer_work" if module is fwd else "list_work"
        original = getattr(module, listing)
        self.cells: list[dict[str, int]] = []
        self.chunks = 0
        self.lives: list[Any] = []

        def watch(order: Any, *more: Any) -> Iterator[Any]:
            self.cells = more[0] if len(more) == 2 else []
            self.chunks = more[-1]
            for unit in original(order, *more):
                marks.append((unit[:4], current().count))
                yield unit
            marks.append((None, current().count))
            self.lives = current().lives

        setattr(module, listing, watch)
        try:
            run = record(kernel, *arguments, check_source=False)
        finally:
            setattr(module, listing, original)
        stops = [start for _, start in marks[1:]]
        self.units = {
            unit: np.arange(start, stop, dtype=np.int32)
            for (unit, start), stop in zip(marks, stops, strict=False)
        }
        self.first = np.arange(marks[0][1], dtype=np.int32)
        self.rest = np.arange(marks[-1][1], len(run.trace), dtype=np.int32)
        self._pack(run)

    def _pack(self, run: Any) -> None:
        """Puts what the timer needs of every instruction into arrays."""
        trace, target = run.trace, run.target
        queues = {name: i for i, name in enumerate(("tensor", "vector", "scalar", "gpsimd", "sync"))}
        queues |= {"dma": 8, "dma stores": 9}
        sets = {name: 1 << i for i, name in enumerate(SETS)}
        costs = [instruction_cost(step, target) for step in trace]
        needs = [sorted(own) for own in list_dependencies(trace)]
        tiles = [
            sorted({o.region.storage for o in (*step.reads, *step.writes) if o.buffer not in HBM})
            for step in trace
        ]
        functions = [
            owners(step.flags.get("function", "copy")) if step.engine is Engine.scalar else ()
            for step in trace
        ]
        ports = [list_ports(step, target) for step in trace]
        waits = [not accumulates(trace[j], trace[i]) for i, own in enumerate(needs) for j in own]
        sbuf = [life.free_bytes if life.buffer is SBUF else 0 for life in self.lives]
        psum = [-(-life.free_bytes // BANK_BYTES) if life.buffer is PSUM else 0 for life in self.lives]
        self.arrays = (
            np.array([queues[find_queue(step)] for step in trace], np.int32),
            np.array([(SBUF_PORT in own) + 2 * (PSUM_PORT in own) for own in ports], np.int32),
            np.array([busy for busy, _ in costs]), np.array([latency for _, latency in costs]),
            np.array([sum(sets[name] for name in own) for own in functions], np.uint64), LOAD_US, 8,
            *flatten(needs), np.array(waits, np.int8), *flatten(tiles), len(self.lives),
            np.array(sbuf, np.int64), np.array(psum, np.int64),
        )  # fmt: skip

    def time(self, order: Any, timer: Any) -> tuple[float, int, int]:
        """Returns the estimate in microseconds, and the peaks of SBUF and PSUM, of another order."""
        if self.cells:
            late = {bundles: turns for name, bundles, turns, *_ in order if name == "load"}
            for cell in self.cells:
                cell["turn"] = cell["t0"] // 128 + late[cell["stream"] % 2]
            work = cells.list_layer_work(order, self.cells, self.chunks)
        else:
            work = list_work(order, self.chunks)
        units = [self.units[unit[:4]] for unit in work if unit[:4] in self.units]
        sequence = np.concatenate([self.first, *units, self.rest])
        peaks = np.zeros(2, np.int64)
        time = timer(
            len(sequence),
            *(x.ctypes.data if isinstance(x, np.ndarray) else x for x in (sequence, *self.arrays, peaks)),
        )
        return time, int(peaks[0]), int(peaks[1])


def flatten(lists: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Returns where each list begins in all of them, one behind the other, and these."""
    starts = np.cumsum([0, *map(len, lists)])
    return starts.astype(np.int32), np.array([x for own in lists for x in own], np.int32)


def build_timer() -> Any:
    """Compiles the timer."""
    folder = Path(tempfile.mkdtemp())
    source = Path(__file__).with_suffix(".cpp")
    subprocess.run(["g++", "-O2", "-shared", "-fPIC", "-o", folder / "timer.so", source], check=True)
    timer = ctypes.CDLL(str(folder / "timer.so")).time_order
    pointer, number = ctypes.c_void_p, ctypes.c_int
    timer.restype = ctypes.c_double
    timer.argtypes = [
        number, *[pointer] * 6, ctypes.c_double, number, *[pointer] * 5, number, *[pointer] * 3,
    ]  # fmt: skip
    return timer
