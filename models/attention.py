"""Softmax attention with rotary positions (arXiv:2104.09864),
for hybrid and Deep Delta Learning models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from delta_trn.models.cache import LayerCache
from delta_trn.models.config import DeltaConfig
from delta_trn.models.layers import (
    RMSNorm,
    Tags,
    apply_linear,
    at_least_float32,
    consecutive_parts,
    make_linear,
)
from delta_trn.models.mup import TABLES, Role
from delta_trn.models.sequence import Sequences

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "silu": F.silu,
    "relu": F.relu,
    "elu+1": lambda x: F.elu(x) + 1,
}


class Attention(nn.Module):
    """Attends with H heads of size D = V, so that a hybrid's layers have about the same number of
    weights.

    Logits are q.k / sqrt(D), times m ** attention of the parametrization, since D grows with width:
    1 / D in muP, equal to SP's at m = 1. With use_qk_rmsnorm, q and k pass an RMSNorm with gains of
    their own after RoPE, which makes their size independent of D.
    """

    def __init__(self, config: DeltaConfig) -> None:
        super().__init__()
        d, H, self.D = config.hidden_size, config.num_heads, config.head_dim_v
        self.theta = config.rope_theta
        # How many channels of a head RoPE rotates.
        self.rotated = int(self.D * config.rope_ratio) // 2 * 2 if config.positions == "rope" else 0
        self.scale = self.D**-0.5 * config.width_ratio ** TABLES[config.parametrization].attention
        self.q_norm = self.k_norm = self.o_norm = self.g_proj = self.k_shift = self.v_shift = None
        if config.use_qk_rmsnorm:
            self.q_norm, self.k_norm = (RMSNorm(self.D, config.rms_norm_eps) for _ in range(2))
        tags = self.tags = Tags()
        self.q_proj, self.k_proj, self.v_proj = (
            make_linear(tags, name, d, H * self.D, heads=H)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        self.activations = tuple(
            ACTIVATIONS[name]
            for name in (config.q_activation, config.k_activation, config.v_activation)
        )
        if config.use_k_shift:
            self.k_shift = Shift(d, H, "last_key")
        if config.use_v_shift:
            self.v_shift = Shift(d, H, "last_value")
        if config.using_groupnorm or config.use_output_gate:
            self.o_norm = RMSNorm(self.D, config.rms_norm_eps)
        if config.use_output_gate:
            self.g_proj = make_linear(tags, "g_proj", d, H * self.D, heads=H)
        self.o_proj = make_linear(
            tags, "o_proj", H * self.D, d, scale=config.mixer_output_scale, heads=H, of_columns=True
        )

    def forward(self, x: Tensor, sequences: Sequences, cache: LayerCache | None = None) -> Tensor:
        """Maps x [B, T, d] to [B, T, d]."""
        k, v = apply_linear(self.k_proj, x), apply_linear(self.v_proj, x)
        if self.k_shift is not None:
            k = self.k_shift(k, x, sequences, cache)
        if self.v_shift is not None:
            v = self.v_shift(v, x, sequences, cache)
        q, k, v = (
            act(y).unflatten(-1, (-1, self.D)).transpose(1, 2)  # [B, H, T, D]
            for act, y in zip(self.activations, (apply_linear(self.q_proj, x), k, v), strict=True)
        )
        if self.rotated:
            cos, sin = self._angles(sequences.position)
            q, k = self._rotate(q, cos, sin), self._rotate(k, cos, sin)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)
        if cache is not None:
            if cache.keys is not None and cache.values is not None:
                k, v = torch.cat([cache.keys, k], dim=2), torch.cat([cache.values, v], dim=2)
            cache.keys, cache.values = k, v
        mask = sequences.attendable
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=self.scale)
        y = y.transpose(1, 2)  # [B, T, H, D]
        if self.o_norm is not None:
            z = None if self.g_proj is None else apply_linear(self.g_proj, x)
            y = self.o_norm(y, None if z is None else z.unflatten(-1, (-1, self.D)))
        return apply_linear(self.o_proj, y.flatten(-2))

    def _angles(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Returns cosine and sine of every pair's angle, [B or 1, 1, T, pairs] float32."""
        pairs = torch.arange(0, self.rotated, 2, device=position.device)
        angles = position[:, None, :, None].float() * self.theta ** (-pairs.float() / self.rotated)
        return angles.cos(), angles.sin()

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotates each pair (x_i, x_{i + rotated/2}) by its angle;
        channels from `rotated` on stay.
        """
        a, b, rest = consecutive_parts(
            x, (self.rotated // 2, self.rotated // 2, self.D - self.rotated)
        )
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1).to(x.dtype)


class Shift(nn.Module):
    """Computes y_t = a_t x_{t-1} + (1 - a_t) x_t, with a [B, T, H] = sigmoid(W u)
    and x_{-1} = 0.
    """

    def __init__(self, width: int, heads: int, slot: str) -> None:
        super().__init__()
        self.tags, self.slot = Tags(), slot
        self.proj = make_linear(self.tags, "proj", width, heads, Role.GATE)

    def forward(
        self, x: Tensor, u: Tensor, sequences: Sequences, cache: LayerCache | None
    ) -> Tensor:
        """Maps x [B, T, H D] and the layer's input u [B, T, d] to y;
        the cache's slot is replaced.
        """
        if sequences.real is not None:
            x = x * sequences.real
        last = None if cache is None else getattr(cache, self.slot)
        joined = sequences.conv_input(
            x, x.new_zeros(x.shape[0], 1, x.shape[2]) if last is None else last
        )
        if cache is not None:
            setattr(cache, self.slot, joined[:, -1:].clone())
        before = joined[:, :-1]
        if sequences.is_packed:
            before = before * (sequences.position > 0)[..., None]
        a = at_least_float32(apply_linear(self.proj, u)).sigmoid()[..., None]
        before, now = (y.unflatten(-1, (a.shape[2], -1)) for y in (before, x))
        return (a * before + (1 - a) * now).flatten(-2).to(x.dtype)
