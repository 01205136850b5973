"""What Trn1's compiler refuses, or its array gets wrong, by measurements of others: rules of the
target.

They hold on the generations that `Rule.generations` names, in strict runs, unless `record(...,
without=...)` or the environment variable DELTA_TRN_NKI_WITHOUT, a list with semicolons, names them.
Source of all: docs/neuron-notes.md and the probes of foxl-ai/kiln (trn1.2xlarge, neuronx-cc
2.27.5334, nki 0.6.0).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from nki_simulator.core.memory import NkiTensor


@dataclass(frozen=True)
class ChipRule:
    """What is refused, and what to write instead."""

    instead: str
    source: str
    generations: tuple[int, ...] = (2,)


GPSIMD, SUMS, OPEN = "gpsimd products", "several sums", "open sums"
DIMENSIONS, BIAS, TRANSPOSE = "four dimensions", "bias of a copy", "transposition within SBUF"
TILES = "tiles of 32 columns"
CHIP: dict[str, ChipRule] = {
    GPSIMD: ChipRule(
        "use the Vector engine; it costs no more where one operand is read from PSUM",
        "NCC_IXCG965 in float32, bfloat16 and fp8, three probes",
    ),
    SUMS: ChipRule(
        "give each sum of two or more products a PSUM tensor of its own, or add single products on "
        "the Vector engine",
        "every sum but the last loses its first term, silently: tools/probe_psum_interleave.py",
    ),
    OPEN: ChipRule(
        "copy after the last product, or add to another tensor",
        "an open group that is read fails (AWS Labs), or is closed by the read",
    ),
    DIMENSIONS: ChipRule(
        "issue it in parts of three free dimensions",
        "AWS's page on access patterns; [TEN404] of aws-neuron-sdk 1120",
    ),
    BIAS: ChipRule("add it on the Vector engine, or use another function", "NCC_IBVF043"),
    TRANSPOSE: ChipRule("transpose between HBM and SBUF, or on the Tensor engine", "the verifier"),
    # one kernel was refused, at 64 rows and 32 columns; small heads and short chunks have such tiles
    TILES: ChipRule("use more than 64 rows, or more columns", "NCC_IBIR058"),
}


def rules_on(generation: int, without: Iterable[str] = ()) -> frozenset[str]:
    """Returns the names of the rules that hold on a generation.

    >>> sorted(rules_on(2, CHIP.keys() - {OPEN})), rules_on(3)
    (['open sums'], frozenset())
    """
    unknown = set(without) - set(CHIP)
    if unknown:
        raise ValueError(f"{min(unknown)!r} is not a rule of a chip: {', '.join(CHIP)}")
    return frozenset(n for n, r in CHIP.items() if generation in r.generations) - set(without)


@dataclass
class Sums:
    """The sums of products in one PSUM tensor, in the order of their first product.

    A sum is what products of one place add up to: [place, first instruction, last, products].
    """

    made: list[list] = field(default_factory=list)
    last_read: int = -1

    def add(self, place: tuple, index: int, adds: bool) -> list:
        """Follows a product, and returns its sum."""
        if adds:
            for own in reversed(self.made):
                if overlap(own[0], place):
                    own[2], own[3] = index, own[3] + 1
                    return own
        self.made.append([place, index, index, 1])
        return self.made[-1]

    def begin_again(self, place: tuple) -> None:
        """Forgets the sums of a place that another engine overwrites: what is added to its zeros is
        separate, as in the attention of zml, which ran on inf2.
        """
        self.made = [own for own in self.made if not overlap(own[0], place)]

    @property
    def long(self) -> int:
        """The number of sums of two or more products."""
        return sum(own[3] > 1 for own in self.made)


def overlap(one: tuple, two: tuple) -> bool:
    """Returns whether two places, (partitions, bytes), have bytes in common."""
    return all(a[0] < b[1] and b[0] < a[1] for a, b in zip(one, two, strict=True))


def place_of(tensor: NkiTensor) -> tuple:
    """Returns which partitions and which bytes of each a tensor touches."""
    return (tensor.partition, tensor.partition + tensor.shape[0]), tensor.span


def count_dimensions(tensor: NkiTensor) -> int:
    """Returns the free dimensions of a tensor on chip, those that run on merged."""
    n, before = 0, None
    for size, stride in zip(tensor.array.shape[1:], tensor.array.strides[1:], strict=True):
        if size > 1:
            n += before is None or before != stride * size
            before = stride
    return n
