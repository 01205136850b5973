"""Initial values: every parameter by its own law, from its own random numbers."""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from delta_trn.models.mup import tagged_parameters

if TYPE_CHECKING:
    from delta_trn.models.language_model import DeltaForCausalLM

SMALLEST_A = 1e-4  # of A ~ U(0, 16): log(0) would never learn
SMALLEST_DT = 1e-4  # of dt ~ logU(0.001, 0.1), as in Mamba2's code


@torch.no_grad()
def initialize(model: DeltaForCausalLM) -> None:
    """Fills every parameter that no checkpoint has given and that has memory, which on meta none has.

    A parameter's numbers depend on its name and on one draw from torch's global generator, not on what is
    made before it: models that share a layer begin with the same one. They are drawn in float32 on the CPU:
    neither device nor dtype changes them.
    """
    missing = [
        (name, parameter, tag)
        for name, parameter, tag in tagged_parameters(model)
        # the mark transformers leaves on what it has loaded
        if not (parameter.is_meta or getattr(parameter, "_is_hf_initialized", False))
    ]
    if not missing:
        return
    seed = int(torch.randint(2**62, (), device="cpu"))
    for name, parameter, tag in missing:
        digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        values = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
        std = tag.std(model.config)
        if tag.law is not None:
            values = tag.law(values, generator)
        elif std is not None:
            values.normal_(0.0, std, generator=generator)
        parameter.copy_(values)


def ones(x: Tensor, generator: torch.Generator) -> Tensor:
    """1 everywhere."""
    return x.fill_(1.0)


def constant(x: Tensor, generator: torch.Generator, *, value: float) -> Tensor:
    """One number everywhere."""
    return x.fill_(value)


def identity_tap(x: Tensor, generator: torch.Generator, *, at: int) -> Tensor:
    """[C, W]: 1 at one tap, so that the convolution begins as the identity."""
    x.zero_()
    x[:, at] = 1.0
    return x


def taps(x: Tensor, generator: torch.Generator) -> Tensor:
    """[C, W] ~ U(-1, 1) / sqrt(W), PyTorch's own for a depthwise convolution: one scale at every width."""
    bound = x.shape[1] ** -0.5
    return x.uniform_(-bound, bound, generator=generator)


def decay_rates(x: Tensor, generator: torch.Generator, *, factor: float = 1.0) -> Tensor:
    """log A, A / factor ~ U(0, 16): Mamba2's, and arXiv:2606.04048's code; its text has a_log uniform."""
    return x.uniform_(0, 16 * factor, generator=generator).clamp_(min=SMALLEST_A).log_()


def time_steps(x: Tensor, generator: torch.Generator) -> Tensor:
    """softplus^-1(dt), dt log-uniform in [0.001, 0.1]."""
    dt = x.uniform_(math.log(1e-3), math.log(1e-1), generator=generator).exp_().clamp_(min=SMALLEST_DT)
    return dt + torch.log(-torch.expm1(-dt))
