"""Softmax attention with rotary positions (arXiv:2104.09864), for hybrid models."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.cache import LayerCache
from models.config import DeltaConfig
from models.layers import Linear, RMSNorm
from models.mup import TABLES, Role
from models.sequence import Sequences


class Attention(nn.Module):
    """H heads of size D = V, so that the layer has as many weights as the Gated DeltaNet layer it replaces.

    Logits are q.k / sqrt(D), times m ** attention of the parametrization where D grows with width: 1 / D in
    muP, equal to SP's at m = 1. With use_qk_rmsnorm, q and k pass an RMSNorm with gains of their own after
    RoPE; then a head's size no longer shows in them, and D grows in 1 / sqrt(D) alone.
    """

    def __init__(self, config: DeltaConfig) -> None:
        super().__init__()
        d, self.D = config.hidden_size, config.head_dim_v
        inner = config.num_heads * self.D
        self.theta = config.rope_theta
        power = TABLES[config.parametrization].attention if config.scale_by == "head_dim" else 0.0
        self.scale = self.D**-0.5 * config.width_ratio**power
        self.rotates, self.q_norm, self.k_norm = config.positions == "rope", None, None
        if config.use_qk_rmsnorm:
            role = Role.VECTOR if config.scale_by == "head_dim" else Role.CONSTANT
            self.q_norm, self.k_norm = (RMSNorm(self.D, config.rms_norm_eps, role) for _ in range(2))
        self.q_proj, self.k_proj, self.v_proj = Linear(d, inner), Linear(d, inner), Linear(d, inner)
        self.o_proj = Linear(inner, d)

    def forward(self, x: Tensor, sequences: Sequences, cache: LayerCache | None = None) -> Tensor:
        """x [B, T, d] -> [B, T, d]."""
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.D)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.rotates:
            cos, sin = self._rotation(sequences.position)
            q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)
        if cache is not None:
            if cache.keys is not None and cache.values is not None:
                k, v = torch.cat([cache.keys, k], dim=2), torch.cat([cache.values, v], dim=2)
            cache.keys, cache.values = k, v
        mask = sequences.attendable
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=self.scale)
        return self.o_proj(y.transpose(1, 2).flatten(-2))

    def _rotation(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of every pair's angle, [B or 1, 1, T, D / 2] float32."""
        pairs = torch.arange(0, self.D, 2, device=position.device)
        angles = position[:, None, :, None].float() * self.theta ** (-pairs.float() / self.D)
        return angles.cos(), angles.sin()


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Each pair (x_i, x_{i + D/2}) turned by its angle."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)
