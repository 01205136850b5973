"""The contract between the layers' operations and a backend: four calls, and two functions for
each.

    OP_forward(call, *, save) -> (*outputs, saved)
    OP_backward(*gradients of the outputs, call, saved) -> gradients OP_saved_shapes(call) -> shape
    and dtype of each tensor in `saved`; a module without it saves nothing
    TAKES_SUBCLASSES        names the operations that are PyTorch's own for a DTensor and other
                            subclasses

Shapes and equations are in `backends.layers`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

Shapes = list[tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class Convolution:
    """One call of `short_convolution`; backward returns dx, dweight, dprefix."""

    x: Tensor
    weight: Tensor
    prefix: Tensor | None = None
    position: Tensor | None = None
    activation: str = "silu"


@dataclass(frozen=True)
class GatedNorm:
    """One call of `gated_rms_norm`; backward returns dx, dgate, dweight."""

    x: Tensor
    gate: Tensor | None
    weight: Tensor
    eps: float = 1e-6
    activation: str = "swish"  # of the gate


@dataclass(frozen=True)
class SumNorm:
    """One call of `add_rms_norm`, whose outputs are y and total.

    Backward's call has the weight alone, and `saved` begins with total. It returns the gradient of
    the sum, which is that of both its terms, and dweight.
    """

    x: Tensor
    residual: Tensor
    weight: Tensor
    eps: float = 1e-6


@dataclass(frozen=True)
class Readout:
    """One call of `linear_cross_entropy`; forward saves its gradients, and backward's call has no
    tensors.

    Backward returns dhidden, dweight.
    """

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    ignore_index: int = -100
