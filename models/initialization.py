"""Laws of initial values: each fills a float32 tensor from a random generator and returns it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

SMALLEST_A = 1e-4  # of A ~ U(0, 16): a head with A = 0 has log A = -inf and would never learn
SMALLEST_DT = 1e-4  # of dt ~ logU(0.001, 0.1), as in Mamba2's code


def constant(x: Tensor, generator: torch.Generator, *, value: float) -> Tensor:
    """Fills x with one number."""
    return x.fill_(value)


def uniform(x: Tensor, generator: torch.Generator, *, bound: float) -> Tensor:
    """Draws x from U(-bound, bound)."""
    return x.uniform_(-bound, bound, generator=generator)


def identity_tap(x: Tensor, generator: torch.Generator, *, at: int) -> Tensor:
    """Fills x [C, W] with 1 at tap `at` and 0 elsewhere:
    a convolution that starts as the identity.
    """
    x.zero_()
    x[:, at] = 1.0
    return x


def taps(x: Tensor, generator: torch.Generator) -> Tensor:
    """Draws x [C, W] from U(-1, 1) / sqrt(W), PyTorch's law of a depthwise convolution:
    no width in it.
    """
    return uniform(x, generator, bound=x.shape[1] ** -0.5)


def decay_rates(x: Tensor, generator: torch.Generator, *, factor: float = 1.0) -> Tensor:
    """Fills x with log A, A / factor ~ U(0, 16).

    This is Mamba2's law and that of arXiv:2606.04048's code; the paper's text has a_log uniform
    instead.
    """
    return x.uniform_(0, 16 * factor, generator=generator).clamp_(min=SMALLEST_A).log_()


def time_steps(x: Tensor, generator: torch.Generator) -> Tensor:
    """Fills x with softplus^-1(dt), dt log-uniform in [0.001, 0.1]."""
    dt = (
        x.uniform_(math.log(1e-3), math.log(1e-1), generator=generator)
        .exp_()
        .clamp_(min=SMALLEST_DT)
    )
    return dt + torch.log(-torch.expm1(-dt))
