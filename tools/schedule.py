"""Finds the orders of the NKI kernels' stages, and writes them to nki_kernels/orders.json.

    python -m tools.schedule                    remakes all orders: minutes, and the same on every
                                                machine
    python -m tools.schedule RULE_FORWARD       remakes one

It starts from a rule: stages stand as soon as what they need stands, evenly spread over a few
turns, and those of odd bundles half a turn later. From there it anneals: it moves one entry to
another time, keeps what the cost model finds faster, and for a while some of what it finds slower.
An order may take no more of SBUF, PSUM and time than tests allow, in the largest sizes of each
kernel. Times are trn1's: for other targets the model gives none. Neither the orders that stand in
the file nor the machine matter: all chance comes from one seed.
"""

import argparse
import json
import math
import random
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from delta_trn.nki_kernels import gated_delta_rule_bwd, gated_delta_rule_fwd, orders
from delta_trn.nki_kernels.gated_delta_layer import bwd, cells, fwd
from delta_trn.nki_kernels.kimi_delta_attention import bwd as channels_bwd
from delta_trn.nki_kernels.kimi_delta_attention import fwd as channels_fwd
from delta_trn.nki_kernels.schedule import ALL, BUNDLES, EVEN, ODD, list_waits, rank
from nki_simulator.core.targets import resolve
from tools.instruction_times import Trace, build_timer, find_kind, number_entries

SIZES = (  # that an order is judged by
    {"T": 1024, "H": 6, "K": 128, "V": 256, "lanes": 6, "width": 3},
    {"T": 1024, "H": 8, "K": 64, "V": 128, "lanes": 8, "width": 4},
    {"T": 1024, "H": 2, "HV": 4, "K": 128, "V": 128, "lanes": 6, "width": 2},
)
CHANNEL_SIZES = (  # with a decay per channel
    {"T": 1024, "H": 4, "K": 128, "V": 128, "lanes": 4, "width": 2},
    {"T": 1024, "H": 4, "K": 64, "V": 128, "lanes": 4, "width": 2},
)
RUNS = 0.3  # of all proposals
SIDE_BY_SIDE = ("spread columns", "substitute", "merge", *cells.CONVOLUTION)  # forward: ALL bundles
SHARES = {
    "substitute": 2, "merge": 12, "window": 16, "taps": 16, "silu": 16,
    "load taps": 8, "multiply taps": 8, "sum taps": 8, "store dx": 4,
}  # fmt: skip


def check_times(options: Mapping[str, Any]) -> None:
    """Raises ValueError if options name a target for which no time is estimated."""
    target = resolve(options.get("target", "trn1"))
    if target.refused:
        raise ValueError(
            f"an order cannot be judged by times on {target.name}: {target.refused}; judge it on "
            "trn1, or bound SBUF and PSUM alone"
        )


@dataclass(frozen=True)
class Bound:
    """Says what an order may take where a test bounds it."""

    options: dict[str, Any]  # of the kernel's example, and a target
    sbuf: int = 171_000  # bytes per partition: a twentieth stays free
    time: float = math.inf  # microseconds
    psum: int = 8  # banks

    def __post_init__(self) -> None:
        if math.isfinite(self.time):
            check_times(self.options)


@dataclass(frozen=True)
class Search:
    """Says for a kernel where its order comes from."""

    module: ModuleType
    options: dict[str, int]  # of its example
    turns: float  # over which the rule spreads a chunk's stages
    proposals: int
    bounds: tuple[Bound, ...]
    sizes: tuple[dict[str, Any], ...] = SIZES

    def __post_init__(self) -> None:
        for own in self.sizes:
            check_times(own)


RULE = {"T": 512, "dtype": "float32", "every": 2}
WIDE = Bound(RULE | {"H": 6, "K": 128, "V": 256, "lanes": 6, "width": 3})
NARROW = Bound(RULE | {"H": 8, "K": 64, "V": 128, "lanes": 8, "width": 4})
CHANNEL_BOUNDS = (
    Bound(CHANNEL_SIZES[0]),
    Bound(CHANNEL_SIZES[0] | RULE | {"V": 256}),
    Bound(CHANNEL_SIZES[0] | {"V": 256}),
    Bound({"T": 1000, "H": 1, "HV": 3, "K": 64, "V": 128, "lanes": 4, "width": 2}),
    Bound({"T": 300, "H": 2, "HV": 4, "K": 32, "V": 32, "lanes": 4, "width": 2}),
)
LONG = {"T": 1536, "K": 128, "V": 256, "lanes": 6, "width": 3}
SEARCHES = {
    "RULE_FORWARD": Search(
        gated_delta_rule_fwd,
        {"every": 0},
        5.0,
        100_000,
        (
            WIDE,
            NARROW,
            Bound({"T": 1024, "H": 1, "K": 128, "V": 128, "width": 1, "every": 0}, time=95.0),
        ),
    ),
    "RULE_BACKWARD": Search(  # of more than 512 tokens, which do not hold all that waits for later chunks
        gated_delta_rule_bwd,
        {"every": 2},
        1.25,
        100_000,
        (
            *(Bound(bound.options | {"T": 1024}) for bound in (WIDE, NARROW)),
            Bound(SIZES[0] | {"every": 2}),
        ),
    ),
    "LAYER_FORWARD": Search(
        fwd,
        {"save": 1},
        4.0,
        30_000,
        (
            Bound(LONG | {"H": 5, "save": 1}),
            Bound(LONG | {"H": 5, "K": 64, "V": 128, "dtype": "float32", "save": 1}),
            Bound(SIZES[1] | {"packed": True, "save": 1}),
        ),
    ),
    "LAYER_BACKWARD": Search(bwd, {}, 2.5, 100_000, (Bound(SIZES[0]), Bound(LONG | {"H": 5}))),
    "CHANNELS_FORWARD": Search(
        channels_fwd, {"every": 2}, 3.0, 40_000, CHANNEL_BOUNDS, CHANNEL_SIZES
    ),
    "CHANNELS_BACKWARD": Search(
        channels_bwd, {"every": 2}, 1.25, 40_000, CHANNEL_BOUNDS, CHANNEL_SIZES
    ),
}


class Plan:
    """The entries of an order, each at a time in turns, and the waits between them."""

    def __init__(self, search: Search) -> None:
        stages = search.module.STAGES
        forward = search.module in (gated_delta_rule_fwd, channels_fwd, fwd)
        again = [stage.name for stage in stages].index("apply T") if not forward else len(stages)
        self.entries: list[tuple[str, int, int, int]] = []  # stage, bundles, share, shares
        for i, stage in enumerate(stages):
            shares = SHARES.get(
                stage.name, 2 if i >= again and search.options.get("every") == 2 else 1
            )
            if stage.name == "substitute" and not forward:
                shares = 1
            for bundles in (ALL,) if forward and stage.name in SIDE_BY_SIDE else (EVEN, ODD):
                self.entries += [
                    (stage.name, bundles, share, shares) for share in range(1, shares + 1)
                ]
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
        numbers = number_entries((name, bundles, share) for name, bundles, share, _ in self.entries)
        self.packed = np.array(
            [
                (numbers[name, bundles, share], 0, find_kind(name), share, shares)
                for name, bundles, share, shares in self.entries
            ],
            np.int32,
        )
        self.of = defaultdict(list)
        for wait in self.waits:
            self.of[wait[0]].append(wait)
            self.of[wait[1]].append(wait)

    def move(self, times: list[float], rng: random.Random) -> list[float] | None:
        """Returns times of which one, or a run of one bundle's, is another,
        or None if a wait forbids it.
        """
        at, by = rng.randrange(len(times)), rng.gauss(0.0, rng.choice((0.01, 0.05, 0.3)))
        own = [at]
        if rng.random() < RUNS and at not in self.steps:
            stop = times[at] + rng.choice((0.05, 0.2, 1.0))
            bundles = self.entries[at][1]
            own = [
                i for i, entry in enumerate(self.entries)
                if entry[1] == bundles and i not in self.steps and times[at] <= times[i] <= stop
            ]  # fmt: skip
        moved = list(times)
        for i in own:
            moved[i] = max(0.0, times[i] + by)
            if i in self.steps:
                moved[i] %= 1.0
        return moved if all(self.holds(moved, i) for i in own) else None

    def holds(self, times: list[float], i: int) -> bool:
        """Returns whether an entry comes after what it waits for, and before what waits for it."""
        return all(times[own] > times[maker] - back for own, maker, back in self.of[i])

    def apply_rule(self, turns: float) -> list[float]:
        """Returns the times of the rule."""
        times = [0.0] * len(self.entries)
        for bundles in (EVEN, ODD):
            left = [
                i
                for i, e in enumerate(self.entries)
                if e[1] in (bundles, ALL) and i not in self.steps
            ]
            for at, count in enumerate([len(left)] * len(left)):
                i = next(
                    i
                    for i in left
                    if all(own != i or back or j not in left for own, j, back in self.of[i])
                )
                left.remove(i)
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
        return [
            (*self.entries[i][:2], math.floor(times[i]), *self.entries[i][2:]) for i in by_place
        ]

    def pack(self, times: list[float]) -> np.ndarray:
        """Returns the order of these times as `Trace.time_packed` takes it."""
        late = np.floor(times)
        at = np.argsort(np.subtract(times, late), kind="stable")
        packed = self.packed[at]
        packed[:, 1] = late[at]
        return packed


class Judge:
    """Prices the orders of a search."""

    def __init__(self, search: Search, plan: Plan, timer: Any, rule: list[float]) -> None:
        self.timer = timer
        order = plan.order(rule)
        self.traces = [
            Trace(search.module, search.options | sizes, order) for sizes in search.sizes
        ]
        self.bounds = [
            (bound, Trace(search.module, bound.options, order)) for bound in search.bounds
        ]
        self.first = [trace.time_packed(plan.pack(rule), timer)[0] for trace in self.traces]

    def time(self, packed: np.ndarray) -> list[float]:
        """Returns the estimate of each of the search's sizes."""
        return [trace.time_packed(packed, self.timer, peaks=False)[0] for trace in self.traces]

    def compare(self, packed: np.ndarray) -> float:
        """Returns the mean estimate, as a share of the rule's."""
        shares = [own / rule for own, rule in zip(self.time(packed), self.first, strict=True)]
        return sum(shares) / len(shares)

    def find_excess(self, packed: np.ndarray) -> float:
        """Returns by which shares an order is beyond its bounds, or 0."""
        excess = 0.0
        for bound, trace in self.bounds:
            time, sbuf, psum = trace.time_packed(packed, self.timer)
            most = zip((time, sbuf, psum), (bound.time, bound.sbuf, bound.psum), strict=True)
            excess += sum(max(0.0, own / allowed - 1.0) for own, allowed in most)
        return excess


def anneal(name: str, timer: Any, seed: int = 0) -> tuple[Any, list[float], list[float]]:
    """Returns the best order that is found, and the times of the rule and of that order,
    per example.
    """
    search = SEARCHES[name]
    plan, rng = Plan(search), random.Random(seed)
    times = plan.apply_rule(search.turns)
    judge = Judge(search, plan, timer, times)
    packed, cost, least, best = plan.pack(times), math.inf, math.inf, list(times)
    for i in range(search.proposals):
        heat = 4e-3 * (1e-2 ** (i / search.proposals))
        moved = plan.move(times, rng)
        if moved is None:
            continue
        order = plan.pack(moved)
        if not np.array_equal(order, packed):
            limit = cost - heat * math.log(1.0 - rng.random())
            now = judge.compare(order)
            if now > limit:
                continue
            excess = judge.find_excess(order)
            if now + excess > limit:
                continue
            packed, cost = order, now + excess
            if excess == 0.0 and cost < least:
                least, best = cost, moved
        times = moved
    if least == math.inf:
        raise RuntimeError(
            f"{name}: no order keeps the bounds of tools/schedule.py; raise its proposals"
        )
    order = plan.order(best)
    table = [entry[:3] for entry in order]
    rank(name, search.module.STAGES, table)
    return table, judge.first, judge.time(plan.pack(best))


def write(tables: dict[str, Any], made: Mapping[str, Sequence[float]]) -> None:
    """Writes the orders, and what those cost that a search made."""
    found = {
        name: {
            "made": [round(x, 2) for x in made[name]],
            "order": [f"{stage} {BUNDLES[bundles]} {late}" for stage, bundles, late in table],
        }
        for name, table in tables.items()
    }
    orders.FILE.write_text(json.dumps(found, indent=1) + "\n")


def main(arguments: list[str]) -> None:
    """Remakes the named orders, or all."""
    parser = argparse.ArgumentParser(description="finds the orders of the NKI kernels' stages")
    parser.add_argument(
        "names", nargs="*", metavar="ORDER", help=f"one of {', '.join(SEARCHES)}; else all"
    )
    options = parser.parse_args(arguments)
    names = options.names or list(SEARCHES)
    unknown = [name for name in names if name not in SEARCHES]
    if unknown:
        parser.error(f"no order is named {unknown[0]}; name one of {', '.join(SEARCHES)}")
    timer = build_timer()
    tables = dict(orders.ORDERS)
    made: dict[str, Sequence[float]] = {name: orders.MADE.get(name, ()) for name in SEARCHES}
    for name in names:
        tables[name], rule, found = anneal(name, timer)
        print(
            name,
            "rule",
            [round(x, 1) for x in rule],
            "found",
            [round(x, 1) for x in found],
            flush=True,
        )
        made[name] = found
        write(tables, made)


if __name__ == "__main__":
    main(sys.argv[1:])
