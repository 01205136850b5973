"""What becomes of a sublayer's output: how a block reads its residual stream, and writes to it.

A stream is [B, T, d * DV]: DV values a feature, DV = 1 but in Deep Delta Learning's expanded state. A model
has one kind of `Write`, chosen here, one for each sublayer, and `models.stream` what reads an expanded one.

How the values scale (models.mup). With m = width / base_width, k has norm 1 and so entries of 1 / sqrt(m).
A write beta k (v - k^T X)^T moves every entry of the stream by as much at every width only if v grows like
sqrt(m), which is then also the size of what k reads back: `Table.value`. The maps to beta and to v's inner
number go from width to one number: gates, and their biases scalars, like Gated DeltaNet's; with the upstream
gradient 1 / m an entry, that of beta is k^T dX (v - p) = m (1 / m) (1 / sqrt(m)) sqrt(m): as large at every m
if aligned, 1 / sqrt(m) if not, which is what Gated DeltaNet's rows assume. Taps of convolutions have one row
a channel: vectors; the reading weights r [DV] collect the width: scalars. The direction is normalized, so its
own size cancels: its maps are hidden matrices like the others.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from delta_trn.backends import delta_residual
from delta_trn.models.initialization import constant
from delta_trn.models.layers import Linear, at_least_float32
from delta_trn.models.mup import TABLES, Role, Tag

if TYPE_CHECKING:
    from delta_trn.models.config import DeltaConfig


class Additive(nn.Module):
    """x + y."""

    def forward(self, x: Tensor, read: Tensor, context: Tensor, y: Tensor) -> Tensor:
        """The stream x [B, T, d]; `read` [B, T, d], what was read of it; `context`, that normalized; y."""
        return x + y


class BiasedLinear(nn.Module):
    """y = W x + b in float32, under autocast too: a logit's rounding would be a gate's."""

    def __init__(self, inputs: int, outputs: int, bias: float | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs))
        law = partial(uniform, bound=inputs**-0.5) if bias is None else partial(constant, value=bias)
        self.tags = {"weight": Tag(Role.GATE), "bias": Tag(Role.SCALAR, law=law)}

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(at_least_float32(x), at_least_float32(self.weight), at_least_float32(self.bias))


class Gate(nn.Module):
    """beta = 2 sigmoid( W c + b ), or 2 sigmoid( W_2 tanh(W_1 c) + b ); b begins where beta is beta_init."""

    def __init__(self, config: DeltaConfig) -> None:
        super().__init__()
        d, inner = config.hidden_size, config.ddl_beta_hidden_size
        p = min(max(config.ddl_beta_init / 2, 1e-6), 1 - 1e-6)
        bias = math.log(p / (1 - p))
        self.inner = None if config.ddl_beta_single_linear else Linear(d, inner, Role.GATE)
        self.proj = BiasedLinear(d if self.inner is None else inner, 1, bias)
        if self.inner is not None:
            self.proj.tags["weight"] = Tag(Role.SCALAR)

    def forward(self, c: Tensor) -> Tensor:
        """c [..., d] -> [...] float32 in (0, 2)."""
        hidden = c if self.inner is None else self.inner(c).tanh()
        return 2 * self.proj(hidden).squeeze(-1).sigmoid()


class Value(nn.Module):
    """v = scale sigmoid(W x + b), or W x + b, or a constant; times m ** value of the parametrization."""

    def __init__(self, config: DeltaConfig) -> None:
        super().__init__()
        self.DV, self.constant = config.ddl_value_channels, config.ddl_v_constant_value
        self.scale = config.ddl_v_sigmoid_scale if config.ddl_v_sigmoid else None
        self.multiplier = config.width_ratio ** TABLES[config.parametrization].value
        self.proj = None if config.ddl_v_constant else BiasedLinear(config.hidden_size, self.DV)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., d] -> [..., DV] float32."""
        if self.proj is None:
            return x.new_full((*x.shape[:-1], self.DV), self.constant * self.multiplier, dtype=torch.float32)
        z = self.proj(x)
        return self.multiplier * (z if self.scale is None else self.scale * z.sigmoid())


class DeepDelta(nn.Module):
    """X' = X + beta k (v^T - k^T X): "Deep Delta Learning".

    k is the sublayer's output, normalized; beta comes from the context, v from what was read of the stream
    (v_input = "state", as released) or from the context ("context", as published).
    """

    def __init__(self, config: DeltaConfig) -> None:
        super().__init__()
        self.DV, self.k_eps, self.v_input = config.ddl_value_channels, config.ddl_k_eps, config.ddl_v_input
        self.gate, self.value = Gate(config), Value(config)

    def forward(self, x: Tensor, read: Tensor, context: Tensor, y: Tensor) -> Tensor:
        """As `Additive`; x is [B, T, d DV]."""
        return self.write(*self.operands(x, read, context, y)).flatten(-2)

    def operands(
        self, x: Tensor, read: Tensor, context: Tensor, y: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """X [B, T, d, DV], k [B, T, d] before it is normalized, v [B, T, DV], beta [B, T]."""
        beta = self.gate(context)
        v = self.value(read if self.v_input == "state" else context)
        return x.unflatten(-1, (-1, self.DV)), y.to(x.dtype), v.to(x.dtype), beta

    def write(self, X: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
        """X [B, T, d, DV], k [B, T, d], v [B, T, DV], beta [B, T]."""
        return delta_residual(X, k, v, beta.to(torch.promote_types(X.dtype, beta.dtype)), k_eps=self.k_eps)


class WriteOnly(DeepDelta):
    """X' = X + beta k v^T: the control that "Deep Delta Learning" asks for. Nothing is erased."""

    def write(self, X: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
        full = at_least_float32(k)
        k = full * (full.square().sum(-1, keepdim=True) + self.k_eps**2).rsqrt()
        return (X + k[..., None] * (beta[..., None] * v)[..., None, :]).to(X.dtype)


class LatentUpdate(nn.Module):
    """x' = x + beta k (v - k^T x), k and beta from the stream itself: Deep Delta Learning LM.

    k = W_2 SiLU(W_1 x) normalized, W_1 [d / 4, d]; beta = 2 sigmoid(W_b x + b_b); v = W_v y, one number.
    """

    def __init__(self, config: DeltaConfig) -> None:
        super().__init__()
        d = config.hidden_size
        self.k_eps = config.ddl_k_eps
        self.down, self.up = Linear(d, d // 4), Linear(d // 4, d)
        self.gate, self.value = Gate(config), Linear(d, 1, Role.GATE)
        self.multiplier = config.width_ratio ** TABLES[config.parametrization].value

    def forward(self, x: Tensor, read: Tensor, context: Tensor, y: Tensor) -> Tensor:
        """As `Additive`."""
        X, k, v, beta = self.operands(x, read, context, y)
        beta = beta.to(torch.promote_types(X.dtype, beta.dtype))
        return delta_residual(X, k, v, beta, k_eps=self.k_eps).squeeze(-1)

    def operands(
        self, x: Tensor, read: Tensor, context: Tensor, y: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As `DeepDelta.operands`, DV = 1."""
        k = self.up(F.silu(self.down(x)))
        v = self.multiplier * at_least_float32(self.value(y))
        return x[..., None], k.to(x.dtype), v.to(x.dtype), self.gate(x)


WRITES: dict[str, type[nn.Module]] = {
    "additive": Additive,
    "ddl": DeepDelta,
    "write_only": WriteOnly,
    "ddl_lm": LatentUpdate,
}


def make_write(config: DeltaConfig) -> nn.Module:
    """The write of one sublayer."""
    kind = WRITES[config.residual]
    return kind() if kind is Additive else kind(config)


def uniform(x: Tensor, generator: torch.Generator, *, bound: float) -> Tensor:
    """U(-bound, bound)."""
    return x.uniform_(-bound, bound, generator=generator)
