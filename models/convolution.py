"""The short convolution: causal, depthwise, over time, then SiLU; and one without."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from delta_trn.backends import short_convolution
from delta_trn.models.cache import LayerCache
from delta_trn.models.mup import Tag
from delta_trn.models.sequence import Sequences

if TYPE_CHECKING:
    from delta_trn.backends.layers import Activation


class ShortConvolution(nn.Module):
    """y_t = SiLU( sum_j w_j * x_{t - W + 1 + j} ), W taps; before a sequence there are zeros."""

    activation: Activation = "silu"

    def __init__(self, channels: int, W: int, tag: Tag) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, W))
        self.tags = {"weight": tag}

    def forward(
        self, x: Tensor, sequences: Sequences, cache: LayerCache | None = None, slot: str = "convolution"
    ) -> Tensor:
        """x [B, T, C] -> [B, T, C] in x's dtype, computed in float32; the cache's `slot` is moved on."""
        T, before = x.shape[1], self.weight.shape[1] - 1
        if sequences.real is not None:
            x = x * sequences.real
        prefix = None if cache is None else getattr(cache, slot)
        if prefix is not None:
            prefix, x = sequences.conv_input(x, prefix).split([before, T], dim=1)
        if cache is not None:
            seen = x.new_zeros(x.shape[0], before, x.shape[2]) if prefix is None else prefix
            recent = x[:, max(T - before, 0) :]
            setattr(cache, slot, torch.cat([seen, recent], dim=1)[:, recent.shape[1] :])
        packed = sequences.cu_seqlens is not None
        return short_convolution(
            x,
            self.weight,
            prefix=prefix,
            position=sequences.position[0] if packed else None,
            activation=self.activation,
        )


class TokenConvolution(ShortConvolution):
    """y_t = sum_j w_j * x_{t - W + 1 + j}: no activation."""

    activation = "linear"
