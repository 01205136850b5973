"""Finds the orders of the NKI kernels' stages, and writes them to nki_kernels/orders.py.

    python -m tools.schedule                    remakes all orders: minutes, and the same on every machine
    python -m tools.schedule rule_forward       remakes one
    python -m tools.schedule --times            prints what the orders cost, and what the rule alone would

It starts from a rule: stages stand as soon as what they need stands, evenly spread over a few turns, and
those of odd bundles half a turn later. From there it anneals: it moves one entry to another time, keeps what
the cost model finds faster, and for a while some of what it finds slower. A kernel is recorded once; for
another order its instructions are only sorted and timed again, by tools/schedule_times.cpp.
"""

import argparse
import ctypes
import math
import random
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from delta_trn.nki_kernels import gated_delta_rule_bwd, gated_delta_rule_fwd, orders
from delta_trn.nki_kernels.gated_delta_layer import bwd, cells, fwd
from delta_trn.nki_kernels.schedule import ALL, EVEN, ODD, list_waits, list_work, rank
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

SIZES = {"T": 1024, "H": 6, "K": 128, "V": 256, "lanes": 6, "width": 3}
FEW = {"T": 1024, "H": 8, "K": 64, "V": 128, "lanes": 8, "width": 4}
SIDE_BY_SIDE = (
    "spread columns",
    "substitute",
    "merge",
    *cells.CONVOLUTION,
)  # forward, of all bundles at once
SHARES = {
    "substitute": 3, "merge": 9, "window": 16, "taps": 16, "silu": 16,
    "load taps": 8, "multiply taps": 8, "sum taps": 8, "store dx": 4,
}  # fmt: skip
BANK_BYTES = 2048  # of PSUM, per partition
HEAD = '''"""Has the orders in which the kernels issue their stages; `tools/schedule.py` writes this file.

`nki_kernels.schedule` says what an entry means.
"""

from delta_trn.nki_kernels.schedule import ALL, EVEN, ODD
'''


@dataclass(frozen=True)
class Search:
    """Says for a kernel where its order comes from."""

    module: ModuleType
    options: dict[str, int]  # of its example
    turns: float  # over which the rule spreads a chunk's stages
    sbuf: int  # most bytes of SBUF per partition in SIZES
    psum: int  # most banks of PSUM
    proposals: int


SEARCHES = {
    "RULE_FORWARD": Search(gated_delta_rule_fwd, {"every": 0}, 5.0, 132_000, 8, 20_000),
    "RULE_BACKWARD": Search(gated_delta_rule_bwd, {"every": 2}, 2.0, 144_000, 8, 20_000),
    "LAYER_FORWARD": Search(fwd, {"save": 2}, 5.0, 160_000, 8, 12_000),
    "LAYER_BACKWARD": Search(bwd, {}, 2.0, 167_500, 7, 12_000),
}


class Trace:
    """A kernel's instructions by what issued them, to be timed in another order."""

    def __init__(self, search: Search, sizes: dict[str, int]) -> None:
        kernel, arguments = search.module.example(dtype="bfloat16", **sizes, **search.options)
        marks: list[tuple[Any, int]] = []
        listing = "list_layer_work" if search.module is fwd else "list_work"
        original = getattr(search.module, listing)
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

        setattr(search.module, listing, watch)
        try:
            run = record(kernel, *arguments, check_source=False)
        finally:
            setattr(search.module, listing, original)
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


class Plan:
    """The entries of an order, each at a time in turns, and the waits between them."""

    def __init__(self, search: Search) -> None:
        stages = search.module.STAGES
        forward = search.module in (gated_delta_rule_fwd, fwd)
        again = [stage.name for stage in stages].index("apply T") if not forward else len(stages)
        self.entries: list[tuple[str, int, int, int]] = []  # stage, bundles, share, shares
        for i, stage in enumerate(stages):
            shares = SHARES.get(stage.name, 2 if i >= again and search.options.get("every") == 2 else 1)
            if stage.name == "substitute" and not forward:
                shares = 1
            for bundles in (ALL,) if forward and stage.name in SIDE_BY_SIDE else (EVEN, ODD):
                self.entries += [(stage.name, bundles, share, shares) for share in range(1, shares + 1)]
        self.steps = [i for i, (name, *_) in enumerate(self.entries) if name in cells.CONVOLUTION]
        self.waits: list[tuple[int, int, int]] = []  # entry, the one that it waits for, chunks back
        for bundles in (EVEN, ODD):
            own = {(e[0], e[2]): i for i, e in enumerate(self.entries) if e[1] in (bundles, ALL)}
            counts = {e[0]: e[3] for e in self.entries}
            for name, share, _, maker, part, back in list_waits(stages, counts):
                self.waits.append((own[name, share], own[maker, part], back))
            for (name, share), i in own.items():
                if (name, share + 1) in own:
                    self.waits.append((own[name, share + 1], i, 0))
        self.of = defaultdict(list)
        for wait in self.waits:
            self.of[wait[0]].append(wait)
            self.of[wait[1]].append(wait)

    def holds(self, times: list[float], i: int) -> bool:
        """Returns whether an entry comes after what it waits for, and before what waits for it."""
        return all(times[own] > times[maker] - back for own, maker, back in self.of[i])

    def apply_rule(self, turns: float) -> list[float]:
        """Returns the times of the rule."""
        times = [0.0] * len(self.entries)
        for bundles in (EVEN, ODD):
            left = [i for i, e in enumerate(self.entries) if e[1] in (bundles, ALL) and i not in self.steps]
            count, placed = len(left), set(self.steps)
            for at in range(count):
                i = next(
                    i for i in left if all(j in placed or back for own, j, back in self.of[i] if own == i)
                )
                left.remove(i)
                placed.add(i)
                times[i] = max(times[i], turns * at / count + bundles / 2)
        for i in self.steps:
            times[i] = (self.entries[i][2] - 0.5) / self.entries[i][3]
        for _ in range(len(times)):
            for own, maker, back in self.waits:
                times[own] = max(times[own], times[maker] - back + 1e-4)
        return times

    def order(self, times: list[float]) -> list[tuple[str, int, int, int, int]]:
        """Returns the order of these times: (stage, bundles, late, share, shares)."""
        by_place = sorted(range(len(times)), key=lambda i: times[i] - math.floor(times[i]))
        return [(*self.entries[i][:2], math.floor(times[i]), *self.entries[i][2:]) for i in by_place]


def anneal(name: str, timer: Any, seed: int = 0) -> tuple[Any, list[float], list[float]]:
    """Returns the best order that is found, and the times of the rule and of that order, per example."""
    search = SEARCHES[name]
    traces = [Trace(search, sizes) for sizes in (SIZES, FEW)]
    plan, rng = Plan(search), random.Random(seed)
    times = plan.apply_rule(search.turns)
    first = [trace.time(plan.order(times), timer) for trace in traces]

    def price(order: Any) -> float:
        own = [trace.time(order, timer) for trace in traces]
        beyond = max(0.0, own[0][1] / search.sbuf - 1.0) + max(0.0, own[0][2] / search.psum - 1.0)
        return sum(a[0] / b[0] for a, b in zip(own, first, strict=True)) / len(own) + beyond

    cost = least = price(plan.order(times))
    best = list(times)
    for i in range(search.proposals):
        heat = 4e-3 * (1e-2 ** (i / search.proposals))
        at = rng.randrange(len(times))
        moved = list(times)
        moved[at] = max(0.0, times[at] + rng.gauss(0.0, rng.choice((0.01, 0.05, 0.3))))
        if at in plan.steps:
            moved[at] %= 1.0
        if not plan.holds(moved, at):
            continue
        now = price(plan.order(moved))
        if now <= cost or rng.random() < math.exp((cost - now) / heat):
            times, cost = moved, now
            if cost < least:
                least, best = cost, list(times)
    order = plan.order(best)
    rank(name, search.module.STAGES, [entry[:3] for entry in order])
    return (
        [entry[:3] for entry in order],
        [own[0] for own in first],
        [trace.time(order, timer)[0] for trace in traces],
    )


def print_times(names: list[str], timer: Any) -> None:
    """Prints what today's orders cost, and what the rule alone would, in microseconds."""
    for name in names:
        search = SEARCHES[name]
        plan = Plan(search)
        for sizes in (SIZES, FEW):
            trace = Trace(search, sizes)
            rule = trace.time(plan.order(plan.apply_rule(search.turns)), timer)
            print(name, "table", trace.time(search.module.ORDER, timer), "rule", rule)


def write(tables: dict[str, Any]) -> None:
    """Writes the module of the orders."""
    lines = [HEAD]
    for name, table in tables.items():
        lines.append(f"\n{name} = (")
        line = "   "
        for stage, bundles, late in table:
            entry = f' ("{stage}", {("EVEN", "ODD", "ALL")[bundles]}, {late}),'
            if len(line) + len(entry) > 110:
                lines.append(line)
                line = "   "
            line += entry
        lines += [line, ")  # fmt: skip"]
    Path(orders.__file__).write_text("\n".join(lines) + "\n")


def main(arguments: list[str]) -> None:
    """Remakes the named orders, or all."""
    parser = argparse.ArgumentParser(description="finds the orders of the NKI kernels' stages")
    parser.add_argument("names", nargs="*", default=list(SEARCHES), choices=[[], *SEARCHES], metavar="ORDER")
    parser.add_argument("--times", action="store_true", help="print what the orders cost, and write nothing")
    options = parser.parse_args(arguments)
    timer = build_timer()
    if options.times:
        print_times(options.names, timer)
        return
    tables = {name: getattr(orders, name) for name in SEARCHES}
    for name in options.names:
        tables[name], rule, found = anneal(name, timer)
        print(name, "rule", [round(x, 1) for x in rule], "found", [round(x, 1) for x in found], flush=True)
        write(tables)


if __name__ == "__main__":
    main(sys.argv[1:])
