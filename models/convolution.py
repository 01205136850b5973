"""The short convolution: causal, depthwise, over time, then SiLU; and one without."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.cache import LayerCache
from models.mup import Tag
from models.sequence import Sequences


class ShortConvolution(nn.Module):
    """y_t = SiLU( sum_j w_j * x_{t - W + 1 + j} ), W taps; before a sequence there are zeros."""

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
        last = None if cache is None else getattr(cache, slot)
        x = F.pad(x, (0, 0, before, 0)) if last is None else sequences.conv_input(x, last)
        if cache is not None:
            setattr(cache, slot, x[:, T:].clone())  # a view would keep the whole prompt
        return self.convolve(x, None if sequences.cu_seqlens is None else sequences.position[0])

    def convolve(self, x: Tensor, position: Tensor | None) -> Tensor:
        """x [B, W - 1 + T, C] -> [B, T, C]; position [T] of each token in its packed sequence, or None."""
        return _Convolution.apply(x, self.weight, position)  # type: ignore[no-any-return]


class TokenConvolution(ShortConvolution):
    """y_t = sum_j w_j * x_{t - W + 1 + j}: no activation."""

    def convolve(self, x: Tensor, position: Tensor | None) -> Tensor:
        taps = self.weight.to(torch.promote_types(x.dtype, torch.float32)).t()
        W, T = taps.shape[0], x.shape[1] - taps.shape[0] + 1
        y = x[:, W - 1 :] * taps[W - 1]
        for j in range(W - 1):
            part = x[:, j : j + T]
            if position is not None:
                part = part * (position >= W - 1 - j)[:, None]
            y = y + part * taps[j]
        return y.to(x.dtype)


class _Convolution(torch.autograd.Function):
    """W shifted multiply-adds: on a CPU a quarter of the time of conv1d with groups, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, position: Tensor | None) -> Tensor:
        """x [B, W - 1 + T, C]; weight [C, W]; position [T] of each token in its packed sequence, or None."""
        taps = weight.to(torch.promote_types(x.dtype, torch.float32)).t().contiguous()
        W, T = taps.shape[0], x.shape[1] - taps.shape[0] + 1
        z = x[:, W - 1 :] * taps[W - 1]
        for j in range(W - 1):
            part = x[:, j : j + T]
            if position is not None:
                part = part * (position >= W - 1 - j)[:, None]
            z.addcmul_(part, taps[j])
        ctx.save_for_backward(x, weight, position, z.to(x.dtype))
        return F.silu(z).to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, weight, position, z = ctx.saved_tensors
        full = torch.promote_types(x.dtype, torch.float32)
        taps = weight.to(full).t().contiguous()
        W, T = taps.shape[0], dy.shape[1]
        dz = torch.ops.aten.silu_backward(dy.to(full), z.to(full))
        dx = dz.new_zeros(x.shape)
        dtaps = []
        for j in range(W):
            part = dz if position is None or j == W - 1 else dz * (position >= W - 1 - j)[:, None]
            dx[:, j : j + T].addcmul_(part, taps[j])
            dtaps.append((part * x[:, j : j + T]).sum((0, 1)))
        return dx.to(x.dtype), torch.stack(dtaps, dim=1).to(weight.dtype), None
