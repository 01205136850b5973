"""The contract between `delta_residual` and a backend: a call on flattened tokens, and two
functions.

forward(call, *, save) -> (out, saved)
backward(dout, call, saved) -> (dx, dk, dv, dbeta)      each in its tensor's shape and dtype
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Residual:
    """One call of `delta_residual` on M tokens: x [M, D, DV], k [M, D], v [M, DV], beta [M].

    k_eps       None: k is used as it is; else as k / sqrt(|k|^2 + k_eps^2)
    """

    x: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    k_eps: float | None = None


Gradients = tuple[Tensor, Tensor, Tensor, Tensor]
