"""The residual stream: how a model starts it, reads it for a sublayer, and writes a sublayer's
output to it.

A stream is [B, T, d * DV]: DV values per feature, DV = 1 except in Deep Delta Learning's expanded
state.

Starting. The stream starts as DV copies of the embedding, or as DV causal convolutions of it, which
are copies at initialization (`input_embed_shortconv_kernel_size`).

Reading an expanded stream X back to x [B, T, d]:

    token conv      x_i = sum_j r_j (w_ij * X_ij), * causal over time                        "DDL-TC"
    channel conv    x_i = sum_o r_o sum_j w_ij X_i,o+j-left, left = (taps - 1) // 2,         "DDL-CC"
                    or taps - 1 if causal

Both start as the average over DV: taps at the identity, r = 1 / DV. (The released code overwrites
that with matrices of std 0.5 / sqrt(d), which leaves sublayers an input of rms 0.1 instead of 1.)

Writing, and how its values scale (models.mup). With m = width / base_width, k has norm 1 and so
entries of 1 / sqrt(m). A write beta k (v - k^T X)^T moves every entry of the stream by the same
amount at every width only if v grows like sqrt(m), which is then also the size of what k reads
back: `Table.value`. The maps to beta and to v's inner number go from width to one number, so they
are gates and their biases scalars, as in Gated DeltaNet. With an upstream gradient of 1 / m per
entry, the gradient of beta is k^T dX (v - p), which is m (1 / m) (1 / sqrt(m)) sqrt(m) = 1 if
everything is aligned and 1 / sqrt(m) if not; Gated DeltaNet's rows assume the latter. Taps of
convolutions have one row per channel: vectors. The reading weights r [DV] collect the width:
scalars. The direction is normalized, so its own size cancels: its maps are hidden matrices.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from delta_trn.backends import delta_residual
from delta_trn.models.config import DeltaConfig
from delta_trn.models.convolution import TokenConvolution
from delta_trn.models.initialization import constant, identity_tap, uniform
from delta_trn.models.layers import Tags, apply_linear, at_least_float32, make_linear
from delta_trn.models.mup import TABLES, Role
from delta_trn.models.parameters import Tag


class Whole(nn.Module):
    """Reads, or starts, a stream of one value per feature: x itself.

    `rest` is here and below what `TokenConvolution.forward` takes besides x.
    """

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        return x


class Repeat(nn.Module):
    """Starts a stream [B, T, d * DV]: DV copies of x [B, T, d],
    then perhaps a convolution over time.
    """

    def __init__(self, config: DeltaConfig) -> None:
        super().__init__()
        self.DV, W = config.ddl_value_channels, config.input_embed_shortconv_kernel_size
        self.conv = _identity_convolution(config, W) if W else Whole()

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        return self.conv(x.repeat_interleave(self.DV, dim=-1), *rest)


class TokenRead(nn.Module):
    """Reads x_i = sum_j r_j (w_ij * X_ij), * over time."""

    def __init__(self, config: DeltaConfig) -> None:
        super().__init__()
        self.conv = _identity_convolution(config, config.ddl_state_shortconv_kernel_size)
        self.read, self.tags = _reading_weights(config)

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        z = self.conv(x, *rest)
        return z.unflatten(-1, (-1, self.read.shape[0])) @ self.read.to(z.dtype)


class ChannelRead(nn.Module):
    """Reads x_i = sum_v w_eff[i, v] X[i, v], w_eff[i, v] = sum_j w[i, j] r[v - j + left]."""

    def __init__(self, config: DeltaConfig) -> None:
        super().__init__()
        W = config.ddl_state_shortconv_kernel_size
        self.left = W - 1 if config.ddl_state_dv_shortconv_causal else (W - 1) // 2
        self.weight = nn.Parameter(torch.empty(config.hidden_size, W))
        self.read, tags = _reading_weights(config)
        self.tags = {"weight": Tag(Role.VECTOR, law=partial(identity_tap, at=self.left)), **tags}

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        return (x.unflatten(-1, (-1, self.read.shape[0])) * self.weights().to(x.dtype)).sum(-1)

    def weights(self) -> Tensor:
        """Returns w_eff [d, DV]."""
        W, DV = self.weight.shape[1], self.read.shape[0]
        padded = F.pad(self.read, (W - 1 - self.left, self.left))
        # column v, row j: r[v - j + left]
        shifts = torch.stack([padded[W - 1 - j : W - 1 - j + DV] for j in range(W)])
        return self.weight @ shifts


class Additive(nn.Module):
    """Writes x + y."""

    def forward(self, x: Tensor, read: Tensor, context: Tensor, y: Tensor) -> Tensor:
        """Returns the stream [B, T, d DV] after a sublayer.

        x           [B, T, d DV]    the stream before it
        read        [B, T, d]       what was read of the stream
        context     [B, T, d]       that, normalized: the sublayer's input
        y           [B, T, d]       the sublayer's output
        """
        return x + y


class BiasedLinear(nn.Module):
    """Computes y = W x + b in float32, under autocast too: a rounded logit would round the gate."""

    def __init__(
        self, inputs: int, outputs: int, bias: float | None = None, role: Role = Role.GATE
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs))
        law = (
            partial(uniform, bound=inputs**-0.5) if bias is None else partial(constant, value=bias)
        )
        self.tags = {"weight": Tag(role), "bias": Tag(Role.SCALAR, law=law)}

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(
                at_least_float32(x), at_least_float32(self.weight), at_least_float32(self.bias)
            )


class Gate(nn.Module):
    """Computes beta = 2 sigmoid( W c + b ), or 2 sigmoid( W_2 tanh(W_1 c) + b ).

    The bias b starts where beta is ddl_beta_init.
    """

    def __init__(self, config: DeltaConfig) -> None:
        super().__init__()
        d, inner = config.hidden_size, config.ddl_beta_hidden_size
        p = min(max(config.ddl_beta_init / 2, 1e-6), 1 - 1e-6)
        bias = math.log(p / (1 - p))
        self.tags: Tags = {}
        if config.ddl_beta_single_linear:
            self.inner, self.proj = None, BiasedLinear(d, 1, bias)
        else:
            self.inner = make_linear(self.tags, "inner", d, inner, Role.GATE)
            self.proj = BiasedLinear(inner, 1, bias, Role.SCALAR)

    def forward(self, c: Tensor) -> Tensor:
        """Maps c [..., d] to beta [...] float32 in (0, 2)."""
        hidden = c if self.inner is None else apply_linear(self.inner, c).tanh()
        return 2 * self.proj(hidden).squeeze(-1).sigmoid()


class Value(nn.Module):
    """Computes v = scale sigmoid(W x + b), or W x + b, or a constant; times m ** `Table.value`."""

    def __init__(self, config: DeltaConfig) -> None:
        super().__init__()
        self.DV, self.constant = config.ddl_value_channels, config.ddl_v_constant_value
        self.scale = config.ddl_v_sigmoid_scale if config.ddl_v_sigmoid else None
        self.multiplier = config.width_ratio ** TABLES[config.parametrization].value
        self.proj = None if config.ddl_v_constant else BiasedLinear(config.hidden_size, self.DV)

    def forward(self, x: Tensor) -> Tensor:
        """Maps x [..., d] to v [..., DV] float32."""
        if self.proj is None:
            return x.new_full(
                (*x.shape[:-1], self.DV), self.constant * self.multiplier, dtype=torch.float32
            )
        z = self.proj(x)
        return self.multiplier * (z if self.scale is None else self.scale * z.sigmoid())


class DeepDelta(nn.Module):
    """Writes X' = X + beta k (v^T - k^T X): "Deep Delta Learning".

    k is the sublayer's output, normalized. beta comes from the context, v from what was read of the
    stream (ddl_v_input="state", the released code) or from the context ("context", the paper).
    """

    def __init__(self, config: DeltaConfig) -> None:
        super().__init__()
        self.DV, self.k_eps, self.v_input = (
            config.ddl_value_channels,
            config.ddl_k_eps,
            config.ddl_v_input,
        )
        self.gate, self.value = Gate(config), Value(config)

    def forward(self, x: Tensor, read: Tensor, context: Tensor, y: Tensor) -> Tensor:
        """Returns the stream after a sublayer; arguments as `Additive.forward`."""
        return self.write(*self.operands(x, read, context, y)).flatten(-2)

    def operands(
        self, x: Tensor, read: Tensor, context: Tensor, y: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns X [B, T, d, DV], k [B, T, d] before it is normalized,
        v [B, T, DV] and beta [B, T].
        """
        beta = self.gate(context)
        v = self.value(read if self.v_input == "state" else context)
        return x.unflatten(-1, (-1, self.DV)), y.to(x.dtype), v.to(x.dtype), beta

    def write(self, X: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
        """Returns X' [B, T, d, DV] from what `operands` returns."""
        return delta_residual(
            X, k, v, beta.to(torch.promote_types(X.dtype, beta.dtype)), k_eps=self.k_eps
        )


class WriteOnly(DeepDelta):
    """Writes X' = X + beta k v^T, erasing nothing:
    the control experiment of "Deep Delta Learning".
    """

    def write(self, X: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
        full = at_least_float32(k)
        k = full * (full.square().sum(-1, keepdim=True) + self.k_eps**2).rsqrt()
        return (X + k[..., None] * (beta[..., None] * v)[..., None, :]).to(X.dtype)


class LatentUpdate(DeepDelta):
    """Writes x' = x + beta k (v - k^T x), k and beta from the stream itself: Deep Delta Learning
    LM.

    k = W_2 SiLU(W_1 x) normalized, W_1 [d / 4, d]; beta = 2 sigmoid(W_b x + b_b); v = W_v y, one
    number.
    """

    def __init__(self, config: DeltaConfig) -> None:
        nn.Module.__init__(self)  # its value is another map
        d = config.hidden_size
        self.k_eps = config.ddl_k_eps
        self.tags: Tags = {}
        self.down = make_linear(self.tags, "down", d, d // 4)
        self.up = make_linear(self.tags, "up", d // 4, d)
        self.gate, self.value = Gate(config), make_linear(self.tags, "value", d, 1, Role.GATE)
        self.multiplier = config.width_ratio ** TABLES[config.parametrization].value

    def operands(
        self, x: Tensor, read: Tensor, context: Tensor, y: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns what `DeepDelta.operands` does, with DV = 1."""
        k = apply_linear(self.up, F.silu(apply_linear(self.down, x)))
        v = self.multiplier * at_least_float32(apply_linear(self.value, y))
        return x[..., None], k.to(x.dtype), v.to(x.dtype), self.gate(x)


READS = {"token": TokenRead, "channel": ChannelRead}
WRITES = {"ddl": DeepDelta, "write_only": WriteOnly, "ddl_lm": LatentUpdate}


def make_expansion(config: DeltaConfig) -> nn.Module:
    """Returns the module that starts the stream."""
    expanded = config.ddl_value_channels > 1 or config.input_embed_shortconv_kernel_size
    return Repeat(config) if expanded else Whole()


def make_read(config: DeltaConfig) -> nn.Module:
    """Returns a module that reads the stream: one for both sublayers of a block,
    one for the readout.
    """
    return Whole() if config.ddl_compressor == "none" else READS[config.ddl_compressor](config)


def make_write(config: DeltaConfig) -> nn.Module:
    """Returns the module that writes one sublayer's output."""
    return Additive() if config.residual == "additive" else WRITES[config.residual](config)


def _identity_convolution(config: DeltaConfig, W: int) -> TokenConvolution:
    tag = Tag(Role.VECTOR, law=partial(identity_tap, at=W - 1))
    return TokenConvolution(config.hidden_size * config.ddl_value_channels, W, tag)


def _reading_weights(config: DeltaConfig) -> tuple[nn.Parameter, dict[str, Tag]]:
    DV, initial = config.ddl_value_channels, config.ddl_state_read_init
    law = partial(constant, value=1 / DV if initial is None else initial)
    return nn.Parameter(torch.empty(DV)), {"read": Tag(Role.SCALAR, law=law)}
