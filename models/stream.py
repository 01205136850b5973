"""How an expanded residual stream [B, T, d * DV] is made of embeddings, and read back to [B, T, d].

    token conv      x_i = sum_j r_j (causal convolution over time of X)_ij           "DDL-TC"
    channel conv    x_i = sum_o r_o (sum_j w_ij X_i,o+j-left), left = (taps - 1) // 2,   "DDL-CC"
                                                                             or taps - 1 if causal

Both begin as the average over DV: taps at the identity, r = 1 / DV. (The released code overwrites that with
matrices of std 0.5 / sqrt(d), which leaves sublayers an input of rms 0.1 instead of 1.) The stream begins as
DV copies of the embedding, or (`input_embed_shortconv_kernel_size`) as DV causal convolutions of it, which
are copies at first.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from delta_trn.models.cache import LayerCache
from delta_trn.models.convolution import TokenConvolution
from delta_trn.models.initialization import constant, identity_tap
from delta_trn.models.mup import Role, Tag

if TYPE_CHECKING:
    from delta_trn.models.config import DeltaConfig
    from delta_trn.models.sequence import Sequences


class Whole(nn.Module):
    """A stream of one value a feature is read, or begun, as it is."""

    def forward(
        self, x: Tensor, sequences: Sequences, cache: LayerCache | None, slot: str = "convolution"
    ) -> Tensor:
        return x


class Repeat(nn.Module):
    """x [B, T, d] -> [B, T, d * DV], DV copies; then a convolution over time where asked for."""

    def __init__(self, config: DeltaConfig) -> None:
        super().__init__()
        self.DV, W = config.ddl_value_channels, config.input_embed_shortconv_kernel_size
        tag = Tag(Role.VECTOR, law=partial(identity_tap, at=W - 1))
        self.conv = TokenConvolution(config.hidden_size * self.DV, W, tag) if W else Whole()

    def forward(
        self, x: Tensor, sequences: Sequences, cache: LayerCache | None, slot: str = "convolution"
    ) -> Tensor:
        return self.conv(x.repeat_interleave(self.DV, dim=-1), sequences, cache, slot)


class TokenRead(nn.Module):
    """x_i = sum_j r_j (w_ij * X_ij), * over time."""

    def __init__(self, config: DeltaConfig) -> None:
        super().__init__()
        W, DV = config.ddl_state_shortconv_kernel_size, config.ddl_value_channels
        tag = Tag(Role.VECTOR, law=partial(identity_tap, at=W - 1))
        self.conv = TokenConvolution(config.hidden_size * DV, W, tag)
        self.read, self.tags = _reading_weights(config)

    def forward(
        self, x: Tensor, sequences: Sequences, cache: LayerCache | None, slot: str = "convolution"
    ) -> Tensor:
        z = self.conv(x, sequences, cache, slot)
        return z.unflatten(-1, (-1, self.read.shape[0])) @ self.read.to(z.dtype)


class ChannelRead(nn.Module):
    """x_i = sum_v w_eff[i, v] X[i, v], w_eff[i, v] = sum_j w[i, j] r[v - j + left]."""

    def __init__(self, config: DeltaConfig) -> None:
        super().__init__()
        W = config.ddl_state_shortconv_kernel_size
        self.left = W - 1 if config.ddl_state_dv_shortconv_causal else (W - 1) // 2
        self.weight = nn.Parameter(torch.empty(config.hidden_size, W))
        self.read, tags = _reading_weights(config)
        self.tags = {"weight": Tag(Role.VECTOR, law=partial(identity_tap, at=self.left)), **tags}

    def forward(
        self, x: Tensor, sequences: Sequences, cache: LayerCache | None, slot: str = "convolution"
    ) -> Tensor:
        return (x.unflatten(-1, (-1, self.read.shape[0])) * self.weights().to(x.dtype)).sum(-1)

    def weights(self) -> Tensor:
        """w_eff [d, DV]."""
        W, DV = self.weight.shape[1], self.read.shape[0]
        padded = F.pad(self.read, (W - 1 - self.left, self.left))
        # column v, row j: r[v - j + left]
        shifts = torch.stack([padded[W - 1 - j : W - 1 - j + DV] for j in range(W)])
        return self.weight @ shifts


READS: dict[str, type[nn.Module]] = {"none": Whole, "token": TokenRead, "channel": ChannelRead}


def make_read(config: DeltaConfig) -> nn.Module:
    """What reads the stream: one for both sublayers of a block, one for the readout."""
    kind = READS[config.ddl_compressor]
    return kind() if kind is Whole else kind(config)


def make_expansion(config: DeltaConfig) -> nn.Module:
    """What begins the stream."""
    if config.ddl_value_channels == 1 and not config.input_embed_shortconv_kernel_size:
        return Whole()
    return Repeat(config)


def _reading_weights(config: DeltaConfig) -> tuple[nn.Parameter, dict[str, Tag]]:
    DV, begin = config.ddl_value_channels, config.ddl_state_read_init
    law = partial(constant, value=1 / DV if begin is None else begin)
    return nn.Parameter(torch.empty(DV)), {"read": Tag(Role.SCALAR, law=law)}
