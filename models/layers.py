"""The small parts: linear maps and norms that know their muP role, the short convolution, SwiGLU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.cache import LayerCache
from models.mup import Role


class Linear(nn.Linear):
    """y = W x, W [outputs, inputs], with a role."""

    def __init__(self, inputs: int, outputs: int, role: Role = Role.HIDDEN) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.roles = {"weight": role}


class Embedding(nn.Embedding):
    """Token id -> row."""

    roles = {"weight": Role.EMBEDDING}


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * w over the last dimension, in float32, returned in x's dtype."""

    roles = {"weight": Role.VECTOR}

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size]."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


class GatedRMSNorm(RMSNorm):
    """y = RMSNorm(x) * SiLU(z)."""

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        """x, z [..., size]."""
        normed = F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps)
        return (normed * F.silu(z.float())).to(x.dtype)


class ShortConvolution(nn.Module):
    """Causal depthwise convolution over time, then SiLU: y_t = SiLU( sum_j w_j * x_{t - W + 1 + j} ), W taps.

    Before the first token of a sequence there are zeros.
    """

    roles = {"weight": Role.VECTOR}

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, taps))

    def forward(
        self, x: Tensor, position: Tensor | None = None, cache: LayerCache | None = None, name: str = ""
    ) -> Tensor:
        """x [B, T, C] -> [B, T, C].

        position    [T] each token's place in its own packed sequence; None: one sequence a row
        cache       read and written under `name`: the last W - 1 inputs, zeros where there were fewer
        """
        w, taps = self.weight.to(x.dtype), self.weight.shape[1]
        if position is not None:
            return F.silu(self._packed(x, w, position))
        T = x.shape[1]
        if cache is None:
            y = F.conv1d(x.transpose(1, 2), w[:, None], padding=taps - 1, groups=w.shape[0])[..., :T]
        else:
            past = cache.convolution.get(name)
            past = x.new_zeros(x.shape[0], taps - 1, x.shape[2]) if past is None else past
            x = torch.cat([past, x], dim=1)
            cache.convolution[name] = x[:, T:]
            y = F.conv1d(x.transpose(1, 2), w[:, None], groups=w.shape[0])
        return F.silu(y).transpose(1, 2)

    def _packed(self, x: Tensor, w: Tensor, position: Tensor) -> Tensor:
        T, taps = x.shape[1], w.shape[1]
        y = x * w[:, -1]
        for lag in range(1, min(taps, T)):
            inside = (position[lag:] >= lag)[:, None]
            y = y + F.pad(x[:, : T - lag] * w[:, -1 - lag] * inside, (0, 0, lag, 0))
        return y


class SwiGLU(nn.Module):
    """y = W_down( SiLU(W_gate x) * W_up x )."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = Linear(width, inner), Linear(width, inner)
        self.down_proj = Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., width]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
