"""Fits `Costs` to one half of the published points, to be tested by the other half.

Points of one family are dealt to the two halves in turns, in an order that SEED decides. A fit
starts from what the documentation says; that a column takes a sixth longer is not fitted, since
two sources have it for large products. The costs of instructions are fitted to single
instructions alone, then those of waiting for another engine to kernels.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import log, sqrt

from nki_simulator.calibration.points import Point
from nki_simulator.cost import Costs

SEED = 51
# A product in float32 takes four passes; a second input is as dear as the first.
DOCUMENTED = Costs(
    tensor_fp32=4.0, tensor_fp32_column=0.0, tensor_narrow=0.0,
    tensor_short=0.0, vector_overhead=0.0, vector_second=1.0, scalar_overhead=0.0,
    sum_overhead=64.0, tensor_wait=0.0, vector_wait=0.0, scalar_wait=0.0,
)  # fmt: skip
INSTRUCTIONS = {  # between which bounds each cost is looked for
    "tensor_fp32": (1.0, 6.0), "tensor_fp32_column": (0.0, 0.02),
    "tensor_narrow": (0.0, 0.01), "tensor_short": (0.0, 0.02), "vector_overhead": (0.0, 150.0),
    "vector_second": (0.5, 2.0), "scalar_overhead": (0.0, 150.0), "sum_overhead": (0.0, 200.0),
}  # fmt: skip
WAITS = {"tensor_wait": (0.0, 0.2), "vector_wait": (0.0, 0.3), "scalar_wait": (0.0, 0.3)}


def split(points: Sequence[Point], seed: int = SEED) -> tuple[list[Point], list[Point]]:
    """Returns two halves of the points, each family dealt to both."""
    families: dict[str, list[Point]] = defaultdict(list)
    for point in points:
        families[point.family].append(point)
    order = random.Random(seed)
    halves: tuple[list[Point], list[Point]] = ([], [])
    turn = 0
    for family in sorted(families):
        dealt = sorted(families[family], key=lambda p: p.name)
        order.shuffle(dealt)
        for point in dealt:
            halves[turn % 2].append(point)
            turn += 1
    return halves


def fit(points: Sequence[Point]) -> Costs:
    """Returns the costs that fit these points best."""
    single = [p for p in points if p.kind == "instruction"]
    costs = descend(DOCUMENTED, INSTRUCTIONS, single, rounds=12, steps=24)
    kernels = [p for p in points if p.kind != "instruction"]
    return descend(costs, WAITS, kernels, rounds=2, steps=5)


def loss(costs: Costs, points: Sequence[Point]) -> float:
    """Returns the mean error of the model as a ratio; a point that is far off counts little more
    than one that is near.
    """
    return sum(sqrt(log(max(p.ratio(costs), 0.01)) ** 2 + 1e-3) for p in points) / max(
        1, len(points)
    )


def descend(
    costs: Costs, bounds: dict[str, tuple[float, float]], points: Sequence[Point],
    rounds: int, steps: int,
) -> Costs:  # fmt: skip
    """Improves one cost after the other, by a search between its bounds."""
    if not points:
        return costs
    for _ in range(rounds):
        for name, (low, high) in bounds.items():

            def at(value: float, name: str = name, costs: Costs = costs) -> float:
                return loss(replace(costs, **{name: value}), points)

            best = search(at, low, high, steps)
            if at(best) < loss(costs, points):
                costs = replace(costs, **{name: best})
    return costs


def search(at: Callable[[float], float], low: float, high: float, steps: int) -> float:
    """Returns where `at` is least between two bounds, by the golden section."""
    section = (sqrt(5) - 1) / 2
    one, two = high - section * (high - low), low + section * (high - low)
    f, g = at(one), at(two)
    for _ in range(steps):
        if f <= g:
            high, two, g = two, one, f
            one = high - section * (high - low)
            f = at(one)
        else:
            low, one, f = one, two, g
            two = low + section * (high - low)
            g = at(two)
    return (low + high) / 2
