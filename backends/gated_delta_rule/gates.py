"""The gates of Gated DeltaNet: a decay and a write strength, of what a layer projects.

    g = -exp(A_log) softplus(a + dt_bias)       the logarithm of the decay
    beta = beta_max sigmoid(z)                  how strongly a token writes

Source: arXiv:2412.06464, with Mamba-2's decay (arXiv:2405.21060). In float32 at least: a decay of 0.999 is 1
in bfloat16. A backend whose kernels make them (`Capability.gates`) is given a and z; for the others
`Gates.applied` makes them in PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


def log_decay(a: Tensor, A_log: Tensor, dt_bias: Tensor | None = None) -> Tensor:
    """g [..., HV] <= 0 of a [..., HV]; A_log, dt_bias [HV]."""
    a = _full(a)
    return -_full(A_log).exp() * F.softplus(a if dt_bias is None else a + _full(dt_bias))


def write_strength(z: Tensor, beta_max: float = 1.0) -> Tensor:
    """beta in [0, beta_max], like z."""
    return beta_max * _full(z).sigmoid()


@dataclass(frozen=True)
class Gates:
    """What g and beta of a call are. Nothing set: themselves.

    A_log, dt_bias  [HV]; with A_log, g is a
    beta_max        1 or 2: beta is z
    """

    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    beta_max: float = 0.0

    @property
    def given(self) -> bool:
        """Whether there is anything to make."""
        return self.A_log is not None or self.beta_max > 0

    def applied(self, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        """g and beta themselves, differentiable in all that they are made of."""
        with torch.autocast(g.device.type, enabled=False):
            if self.A_log is not None:
                g = log_decay(g, self.A_log, self.dt_bias)
            if self.beta_max > 0:
                beta = write_strength(beta, self.beta_max)
        return g, beta


AS_GIVEN = Gates()


def _full(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
