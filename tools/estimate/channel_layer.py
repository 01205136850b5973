"""What a layer of Kimi Delta Attention takes between its projections: kernels, and PyTorch's operations.

    kimi_layer_1x8192           32 heads of 128:128, one sequence of 8,192 tokens, a bounded decay
    kimi_layer_packed_1x8192    the same tokens as documents of one row, which places tell apart

The rule's kernels and the output's norm are estimated, and of PyTorch's operations, which `ledger`
counts, the bytes. Left out are products of matrices and the short convolution, which a layer of
flash-linear-attention has as well. That layer has no operations of PyTorch but these and those of its
rule, and packed it launches the same kernels.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from tools.estimate import layer_peers, layers, ledger, peer
from tools.estimate.simulate import Work
from tools.estimate.work import SHAPES, Launch, launches, of_documents

OF = "kimi_1x8192"
NAMES = {"kimi_layer_1x8192": False, "kimi_layer_packed_1x8192": True}
PYTORCH = "PyTorch: "


def ours(name: str) -> Iterator[Launch]:
    """Yields our launches, and PyTorch's operations of each name together."""
    shape = SHAPES[OF]
    for launch in of_documents(shape) if NAMES[name] else launches(shape):
        if launch.variant is not None:  # sums of gates are PyTorch's
            yield launch
    yield from layers.norm("gated norm", *_rows(), "gated by a sigmoid", (2, 3), (1, 2))
    for x in ledger.operations(packed=NAMES[name]):
        work = Work(0, x.bytes_of(shape.sequences * shape.tokens))
        yield Launch(PYTORCH + x.name, x.backward, None, work, x.count)


def peers() -> Iterator[tuple[Launch, ...]]:
    """Yields the configurations of each kernel of flash-linear-attention; one of them runs."""
    yield from peer.launches(SHAPES[OF])
    yield from layer_peers.gated_norm(*_rows(), "sigmoid")


@dataclass(frozen=True)
class Moved:
    """What PyTorch's operations of a layer move: how many there are, and their bytes a token."""

    count: int
    per_token: float

    @classmethod
    def of(cls, name: str) -> "Moved":
        """Counts those of a layer; `name` is one of NAMES."""
        tokens = SHAPES[OF].sequences * SHAPES[OF].tokens
        found = ledger.operations(packed=NAMES[name])
        return cls(sum(x.count for x in found), sum(x.bytes_of(tokens) for x in found) / tokens)


def _rows() -> tuple[int, int]:
    """Returns the rows of the output's norm, and their width."""
    shape = SHAPES[OF]
    return shape.sequences * shape.tokens * shape.HV, shape.V
