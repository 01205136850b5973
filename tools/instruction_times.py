"""Times a kernel's instructions in another order than the one in which they were recorded.

A kernel is recorded once, with what each instruction waits for and which tiles it touches. For
another order its instructions are only sorted; tools/instruction_times.cpp times them as the
simulator's cost model does.
"""

import ctypes
import functools
import inspect
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np

from delta_trn.nki_kernels.gated_delta_layer import cells, fwd
from nki_simulator import record
from nki_simulator.core.machine import Engine, Machine, current
from nki_simulator.core.memory import HBM, PSUM, SBUF
from nki_simulator.core.tables import LOAD_US, SETS, owners
from nki_simulator.cost import (
    COSTS,
    PSUM_PORT,
    SBUF_PORT,
    accumulates,
    find_queue,
    instruction_cost,
    list_dependencies,
    list_ports,
)  # fmt: skip


class Trace:
    """A kernel's instructions by what issued them, to be timed in another order of the same
    entries.

    They are recorded in `order`, (stage, bundles, late, share, shares) each. All bundles have to be
    of one wave. `options` are the example's, and may name a target.
    """

    def __init__(self, module: ModuleType, options: dict[str, Any], order: Any) -> None:
        options = {"dtype": "bfloat16", **options}
        target, packed = options.pop("target", "trn1"), options.pop("packed", False)
        kernel, arguments = module.example(**options)
        if packed:
            at = list(inspect.signature(kernel.function).parameters).index("position")
            position = np.arange(len(arguments[0][0]), dtype=np.int32)
            arguments = (*arguments[:at], position, True, *arguments[at + 2 :])
        marks: list[tuple[Any, int]] = []
        listing = "list_layer_work" if module is fwd else "list_work"
        original = getattr(module, listing)
        layer: list[dict[str, int]] = []
        chunks = 0
        lives: list[Any] = []

        def watch(order: Any, *more: Any) -> Iterator[Any]:
            nonlocal layer, chunks, lives
            layer, chunks = more[0] if len(more) == 2 else [], more[-1]
            for unit in original(order, *more):
                marks.append((unit[:4], current().count))
                yield unit
            marks.append((None, current().count))
            lives = current().lives

        with (
            mock.patch.object(module, listing, watch),
            mock.patch.object(module, "ORDER", tuple(order)),
            mock.patch.object(Machine, "check_capacity"),
        ):
            run = record(kernel, *arguments, target=target, check_source=False)
        self.index = number_entries(
            (stage, bundles, share) for stage, bundles, _, share, _ in order
        )
        of_entry = np.zeros((len(order), chunks, 2), np.int32)
        of_step = np.zeros((3, len(layer) + 2, 2), np.int32)
        for (unit, start), (_, stop) in pairwise(marks):
            stage, bundles, at, share = unit
            if stage in cells.CONVOLUTION:
                of_step[cells.CONVOLUTION.index(stage), at] = start, stop
            else:
                of_entry[self.index[stage, bundles, share], at] = start, stop
        loads = [self.index["load", cell["stream"] % 2, 1] for cell in layer]
        self.arrays = (
            chunks, of_entry, of_step, of_step.shape[1], len(layer),
            np.array([cell["t0"] // 128 for cell in layer], np.int32), np.array(loads, np.int32),
            marks[0][1], marks[-1][1], len(run.trace), *pack_instructions(run, lives),
        )  # fmt: skip
        self.given = tuple(x.ctypes.data if isinstance(x, np.ndarray) else x for x in self.arrays)

    def time(self, order: Any, timer: Any) -> tuple[float, int, int]:
        """Returns the estimate in microseconds, and the peaks of SBUF and PSUM, of an order."""
        if {(stage, bundles, share) for stage, bundles, _, share, _ in order} != set(self.index):
            raise ValueError(
                "the order has other entries than were recorded; remake it: tools/schedule.py"
            )
        entries = [
            (self.index[stage, bundles, share], late, find_kind(stage), share, shares)
            for stage, bundles, late, share, shares in order
        ]
        return self.time_packed(np.array(entries, np.int32), timer)

    def time_packed(
        self, entries: np.ndarray, timer: Any, peaks: bool = True
    ) -> tuple[float, int, int]:
        """Does what `time` does, of entries (number, late, `find_kind`, share, shares);
        peaks cost time.
        """
        found = np.zeros(2, np.int64)
        time = timer(
            len(entries), entries.ctypes.data, found.ctypes.data if peaks else None, *self.given
        )
        return time, int(found[0]), int(found[1])


def number_entries(entries: Iterable[tuple[str, int, int]]) -> dict[tuple[str, int, int], int]:
    """Numbers the entries of an order, (stage, bundles, share), whatever that order is."""
    return {entry: i for i, entry in enumerate(sorted(entries))}


def find_kind(stage: str) -> int:
    """Returns which stage of a layer's convolution this is, or -1."""
    return cells.CONVOLUTION.index(stage) if stage in cells.CONVOLUTION else -1


def pack_instructions(run: Any, lives: list[Any]) -> tuple[Any, ...]:
    """Puts what the timer needs of every instruction into arrays."""
    trace, target = run.trace, run.target
    queues = {name: i for i, name in enumerate(("tensor", "vector", "scalar", "gpsimd", "sync"))}
    queues |= {"dma": 8, "dma stores": 9}
    sets = {name: 1 << i for i, name in enumerate(SETS)}
    costs = [instruction_cost(step, target) for step in trace]
    needs = [  # between engines, the timer follows tensors itself, as another order needs it
        sorted(j for j in own if find_queue(trace[j]) == find_queue(trace[i]))
        for i, own in enumerate(list_dependencies(trace))
    ]
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
    sbuf = [life.free_bytes if life.buffer is SBUF else 0 for life in lives]
    psum = [life.free_bytes if life.buffer is PSUM else 0 for life in lives]
    return (
        np.array([queues[find_queue(step)] for step in trace], np.int32),
        np.array([(SBUF_PORT in own) + 2 * (PSUM_PORT in own) for own in ports], np.int32),
        np.array([busy for busy, _ in costs]), np.array([latency for _, latency in costs]),
        np.array([sum(sets[name] for name in own) for own in functions], np.uint64), LOAD_US, 8,
        *flatten(needs), np.array(waits, np.int8), *flatten([list_uses(step) for step in trace]),
        np.array([COSTS.wait(step.engine) for step in trace]), *flatten(tiles), len(lives),
        np.array(sbuf, np.int64), np.array(psum, np.int64),
    )  # fmt: skip


def list_uses(step: Any) -> list[int]:
    """Returns each tensor of an instruction, eight times its number, with how it is used: 1 read, 2
    written on chip, 4 written in HBM.
    """
    uses: dict[int, int] = {}
    for operands, how in ((step.reads, 1), (step.writes, 2)):
        for o in operands:
            own = 4 if how == 2 and o.buffer in HBM else how
            uses[o.region.storage] = uses.get(o.region.storage, 0) | own
    return [8 * storage + how for storage, how in sorted(uses.items())]


def flatten(lists: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Returns where each list begins in all of them, one behind the other, and these."""
    starts = np.cumsum([0, *map(len, lists)])
    return starts.astype(np.int32), np.array([x for own in lists for x in own], np.int32)


@functools.cache
def build_timer() -> Any:
    """Compiles the timer."""
    folder = Path(tempfile.mkdtemp())
    source = Path(__file__).with_suffix(".cpp")
    # without contraction, the same bits on every machine
    flags = ("-O2", "-ffp-contract=off", "-shared", "-fPIC")
    subprocess.run(["g++", *flags, "-o", folder / "timer.so", source], check=True)
    timer = ctypes.CDLL(str(folder / "timer.so")).time_order
    pointer, number = ctypes.c_void_p, ctypes.c_int
    timer.restype = ctypes.c_double
    timer.argtypes = [
        number,
        pointer,
        pointer,
        number,
        pointer,
        pointer,
        number,
        number,
        pointer,
        pointer,
        number,
        number,
        number,
        *[pointer] * 5,
        ctypes.c_double,
        number,
        *[pointer] * 8,
        number,
        *[pointer] * 2,
    ]
    return timer
