"""The contract between a layer's mixer and a backend that computes it in one piece.

    forward(call, *, save) -> (y, final_state or None, saved)
    backward(dy, dstate, call, saved) -> Gradients
    saved_shapes(call) -> shape and dtype of each tensor in `saved`

Shapes and equations are in `backends.gated_delta_layer`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


@dataclass(frozen=True)
class Layer:
    """One call of `gated_delta_layer`; g and beta are gates, not projections,
    and q and k are normalized.
    """

    x: Tensor
    weight: Tensor
    g: Tensor
    beta: Tensor
    gate: Tensor
    gain: Tensor
    prefix: Tensor | None = None
    position: Tensor | None = None
    initial_state: Tensor | None = None
    K: int = 1
    scale: float = 1.0
    eps: float = 1e-6
    output_final_state: bool = False

    @property
    def heads(self) -> int:
        """H, the number of query and key heads."""
        HV, V = self.gate.shape[2:]
        return key_heads(self.x, HV, V, self.K)


def key_heads(x: Tensor, HV: int, V: int, K: int) -> int:
    """Returns H, where x has 2 H K + HV V channels."""
    return (x.shape[2] - HV * V) // (2 * K)


class Gradients(NamedTuple):
    """The gradients of a `Layer`'s tensors; None where a tensor is absent."""

    x: Tensor
    weight: Tensor
    g: Tensor
    beta: Tensor
    gate: Tensor
    gain: Tensor
    prefix: Tensor | None = None
    initial_state: Tensor | None = None
