"""The short convolution over time: causal, depthwise, followed by SiLU or by nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from delta_trn.backends import short_convolution
from delta_trn.models.cache import LayerCache
from delta_trn.models.layers import consecutive_parts
from delta_trn.models.parameters import Tag
from delta_trn.models.sequence import Sequences

if TYPE_CHECKING:
    from delta_trn.backends.layers import Activation


class ShortConvolution(nn.Module):
    """Computes y_t = SiLU( sum_j w_j * x_{t - W + 1 + j} ) with W taps;
    zeros stand before a sequence.
    """

    activation: Activation = "silu"

    def __init__(self, channels: int, W: int, tag: Tag) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, W))
        self.tags = {"weight": tag}

    def forward(
        self,
        x: Tensor,
        sequences: Sequences,
        cache: LayerCache | None = None,
        slot: str = "convolution",
    ) -> Tensor:
        """Maps x [B, T, C] to [B, T, C] in x's dtype, computed in float32.

        The attribute `slot` of the cache holds the last W - 1 inputs; it is replaced.
        """
        x, prefix = self.take(x, sequences, cache, slot)
        if sequences.is_packed:  # rows of several sequences are one row of more
            one, place = x.reshape(1, -1, x.shape[2]), sequences.position.flatten()
            return short_convolution(
                one, self.weight, position=place, activation=self.activation
            ).view_as(x)
        return short_convolution(x, self.weight, prefix=prefix, activation=self.activation)

    def take(
        self, x: Tensor, sequences: Sequences, cache: LayerCache | None, slot: str = "convolution"
    ) -> tuple[Tensor, Tensor | None]:
        """Returns x, 0 at padding, and the inputs before it;
        keeps the last ones for the next call.
        """
        T, before = x.shape[1], self.weight.shape[1] - 1
        if sequences.real is not None:
            x = x * sequences.real
        prefix = None if cache is None else getattr(cache, slot)
        if prefix is not None:
            prefix, x = consecutive_parts(sequences.conv_input(x, prefix), (before, T), dim=1)
        if cache is not None:
            seen = x.new_zeros(x.shape[0], before, x.shape[2]) if prefix is None else prefix
            recent = x[:, max(T - before, 0) :]
            setattr(cache, slot, torch.cat([seen, recent], dim=1)[:, recent.shape[1] :])
        return x, prefix


class TokenConvolution(ShortConvolution):
    """Computes y_t = sum_j w_j * x_{t - W + 1 + j}, without an activation."""

    activation = "linear"
