"""Draws the sizes of random cases: a stream of uniforms, shapes with the seams of chunks, packings.

Sizes are cut until a case is affordable, so that a hundred thousand take an hour of two cores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

T = TypeVar("T")
Array = np.ndarray

SEAMS = (8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257, 320, 321, 385)
# most multiply-adds of a case: T rows, HV, and what a token costs; emulators take a thousand times as long
WORK = {"ordinary": 4e7, "heavy": 3e8, "emulated": 6e6}
STATES = {"ordinary": 4e5, "emulated": 6e4}  # most elements of packed sequences' states


class Uniforms:
    """Draws everything from the uniforms of one generator, whose stream NumPy never changes."""

    def __init__(self, *seed: int) -> None:
        self.generator = np.random.Generator(np.random.PCG64(seed))

    def array(self, *shape: int) -> Array:
        return self.generator.random(shape)

    def normal(self, *shape: int) -> Array:
        """Returns nearly normal numbers of variance 1: sums of four uniforms."""
        return (sum(self.array(*shape) for _ in range(4)) - 2.0) * np.sqrt(3.0)

    def chance(self, probability: float) -> bool:
        return bool(self.generator.random() < probability)

    def integer(self, low: int, high: int) -> int:
        """Returns an integer from low to high, both included."""
        return low + int(self.generator.random() * (high + 1 - low))

    def between(self, low: float, high: float) -> float:
        return low + (high - low) * float(self.generator.random())

    def pick(self, choices: Mapping[T, float] | Sequence[T]) -> T:
        """Returns one of the choices, by their weights if they have any."""
        weights = choices if isinstance(choices, Mapping) else dict.fromkeys(choices, 1.0)
        place = float(self.generator.random()) * sum(weights.values())
        for choice, weight in weights.items():
            place -= weight
            if place < 0:
                return choice
        return next(reversed(list(weights)))


@dataclass
class Sizes:
    """The sizes of a random case, and the words that describe them."""

    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    lengths: list[int] | None = None
    words: list[str] = field(default_factory=list)

    @property
    def work(self) -> float:
        return self.B * self.T * self.HV * (self.K * self.V + 64.0 * (self.K + self.V))


def draw_head(rng: Uniforms, most: int) -> int:
    """Returns a head size up to `most`: usual ones, odd ones, a few, any."""
    usual = {16: 3, 32: 5, 64: 6, 96: 1, 128: 2, 192: 0.5, 256: 1}
    if most > 256:
        usual |= {384: 0.5, 512: 0.5}
    choice = rng.pick({"usual": 55, "odd": 25, "few": 10, "any": 10})
    if choice == "usual":
        return rng.pick(usual)
    return {"odd": rng.integer(1, 72), "few": rng.integer(1, 4), "any": rng.integer(65, most)}[choice]


def draw_time(rng: Uniforms, small: bool) -> int:
    """Returns a length: none, one, two, at a seam of chunks, or any up to 400; shorter where `small`."""
    choice = rng.pick({"none": 1, "one": 4, "two": 3, "seam": 45, "any": 37, "long": 10})
    length = {
        "none": 0, "one": 1, "two": 2, "seam": rng.pick(SEAMS), "any": rng.integer(3, 200),
        "long": rng.integer(200, 400),
    }[choice]  # fmt: skip
    return length if not small or length < 150 else length % 150


def draw_lengths(rng: Uniforms, T: int) -> list[int]:
    """Cuts T tokens into sequences: a few, hundreds, on chunk boundaries, some empty."""
    style = rng.pick({"few": 40, "chunks": 25, "hundreds": 10, "ones": 5, "one": 5})
    if style == "one":
        lengths = [T]
    elif style == "ones":
        lengths = [1] * T or [0]
    elif style == "chunks":  # all but the last are whole chunks
        lengths, left = [], T
        while left > 64 and len(lengths) < 5:
            lengths.append(64 * rng.integer(1, min(3, left // 64)))
            left -= lengths[-1]
        lengths.append(left)
    else:
        cuts = rng.integer(1, 5) if style == "few" else rng.integer(20, 300)
        places = sorted(rng.integer(0, T) for _ in range(cuts))
        lengths = [b - a for a, b in zip([0, *places], [*places, T], strict=True)]
    if rng.chance(0.3):
        for _ in range(rng.integer(1, 3)):
            lengths.insert(rng.integer(0, len(lengths)), 0)
    return lengths


def draw_sizes(rng: Uniforms, check: str, small: bool) -> Sizes:
    """Draws sizes, and cuts them until the case is affordable."""
    B = rng.pick({0: 1, 1: 55, 2: 24, 3: 12, 4: 8})
    H, group = rng.pick({1: 45, 2: 30, 3: 10, 4: 10, 6: 5}), rng.pick({1: 60, 2: 22, 3: 6, 4: 8, 8: 4})
    sizes = Sizes(B, draw_time(rng, small), H, H * group, draw_head(rng, 256), draw_head(rng, 512))
    packed = check == "alone" or (check not in ("cut", "rows") and rng.chance(0.2))
    if packed:
        sizes.B = 1
    if check == "rows" and not packed:
        sizes.B = max(sizes.B, 2)
    limit = WORK["emulated" if small else "heavy" if rng.chance(0.04) else "ordinary"]
    while sizes.work > limit:
        if sizes.B > 2:
            sizes.B -= 1
        elif sizes.HV > 4:
            sizes.H, sizes.HV = 1, min(sizes.HV // sizes.H, 4)
        elif rng.chance(0.5) and sizes.T > 70:
            sizes.T = 64 + sizes.T // 4
        elif sizes.HV > 1 and rng.chance(0.5):
            sizes.H, sizes.HV = 1, sizes.HV // 2
        elif max(sizes.K, sizes.V) > 40:
            sizes.K, sizes.V = (n if n <= 40 else n // 2 for n in (sizes.K, sizes.V))
        else:
            sizes.T = sizes.T // 2
    if packed:
        most = max(4, int(STATES["emulated" if small else "ordinary"] / (sizes.HV * sizes.K * sizes.V)))
        sizes.lengths = draw_lengths(rng, sizes.T)
        if len(sizes.lengths) > most:
            sizes.lengths[most - 1 :] = [sum(sizes.lengths[most - 1 :])]
        sizes.words.append(f"packed={len(sizes.lengths)}")
    return sizes
