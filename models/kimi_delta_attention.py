"""Kimi Delta Attention as a token mixer (arXiv:2510.26692)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from delta_trn.backends import (
    kimi_delta_attention,
    kimi_delta_attention_step,
    log_decay,
    write_strength,
)
from delta_trn.models.config import DeltaConfig
from delta_trn.models.gated_deltanet import CLOSED, GatedDeltaNet, in_sequences
from delta_trn.models.initialization import constant
from delta_trn.models.layers import (
    apply_linear,
    consecutive_parts,
    in_dtype_of,
    is_untouched,
    make_linear,
    project,
)
from delta_trn.models.mup import Role
from delta_trn.models.parameters import Tag
from delta_trn.models.sequence import Sequences

PAIRS = {nn.Sequential: nn.Sequential.forward}  # of two maps, whose first ones may be joined


class KimiDeltaAttention(GatedDeltaNet):
    """Gated DeltaNet with a decay for each channel of a key, and gates of rank V; all else is its.

        f       = W_f1 W_f0 x + dt_bias                     [B, T, HV, K]
        g       = -exp(A_log) softplus(f)                   float32; A_log [HV]
                  or decay_bound sigmoid(exp(A_log) f)      with a bound below 0, g's smallest value
        o       = kimi_delta_attention(q, k, v, g, beta)    [B, T, HV, V], q and k normalized, scale
                                                            sqrt(K)
        y       = W_o ( RMSNorm(o) * sigmoid(W_g1 W_g0 x + b_g) )

    Parameters have flash-linear-attention's names. muP: V grows with the width, so W_f0 and W_g0
    [V, d] as well as W_f1 [HV K, V] and W_g1 [HV V, V] are hidden matrices; dt_bias has a number
    per channel.
    """

    rule, step = staticmethod(kimi_delta_attention), staticmethod(kimi_delta_attention_step)

    def __init__(self, config: DeltaConfig) -> None:
        self.decays, self.bound = config.head_dim_k, config.decay_bound
        super().__init__(config)
        # a rate of 10 would start a bounded decay where it has no gradient
        if self.bound is not None:
            self.tags["A_log"] = Tag(Role.SCALAR, law=partial(constant, value=0.0), stored=True)

    def _make_gates(self, config: DeltaConfig) -> None:
        d, HV, K, V, tags = config.hidden_size, config.num_v_heads, self.K, self.V, self.tags
        self.f_proj = nn.Sequential(
            make_linear(tags, "f_proj.0", d, V, stored=True),
            make_linear(tags, "f_proj.1", V, HV * K, stored=True, heads=HV),
        )
        self.g_proj = nn.Sequential(
            make_linear(tags, "g_proj.0", d, V),
            make_linear(tags, "g_proj.1", V, HV * V, heads=HV, bias=True),
        )

    def _project(self, x: Tensor) -> Sequence[Tensor]:
        """Returns q, k and v side by side, the output's gate, and f without its bias.

        The first maps of both gates are one product, whose gradient of x is one, too.
        """
        if not all(is_untouched(m, PAIRS) and len(m) == 2 for m in (self.f_proj, self.g_proj)):
            (qkv,) = project(x, (self.q_proj, self.k_proj, self.v_proj))
            return qkv, self.g_proj(x), self.f_proj(x)
        (f0, f1), (g0, g1) = self.f_proj, self.g_proj
        qkv, low = project(x, (self.q_proj, self.k_proj, self.v_proj), (f0, g0))
        f, gate = consecutive_parts(low, (self.V, self.V))
        return qkv, apply_linear(g1, gate), apply_linear(f1, f)

    def _gate_output(self, o: Tensor, gate: Tensor) -> Tensor:
        return self.o_norm(o, gate, "sigmoid")

    def gates(self, x: Tensor, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """Returns g [B, T, HV, K] and beta [B, T, HV], in float32."""
        a, z = self._gate_inputs(x, sequences)
        with torch.autocast(a.device.type, enabled=False):
            g = log_decay(a, self.A_log[:, None], self.dt_bias.view(-1, self.K), self.bound)
            if sequences.begins is not None:
                g = g.masked_fill(sequences.begins[..., None], -torch.inf)
            return g, write_strength(z, self.beta_max)

    def _project_gates(self, x: Tensor) -> Tensor:
        """Returns f without its bias and W_b x side by side, for who looks at both."""
        with torch.autocast(x.device.type, enabled=False):
            z = apply_linear(self.b_proj, in_dtype_of(x, self.b_proj))
        return torch.cat([self.f_proj(x), z], dim=-1)

    def _gate_inputs(
        self, x: Tensor, sequences: Sequences, f: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns f [B, T, HV, K] without its bias and W_b x [B, T, HV], each a tensor of its own;
        padding gets values that neither forget nor write.

        Where sequences begin, the rule is told, since a bounded decay forgets nothing at once,
        whatever it is made of.
        """
        with torch.autocast(x.device.type, enabled=False):
            z = apply_linear(self.b_proj, in_dtype_of(x, self.b_proj))
        a, z = (
            in_sequences(self.f_proj(x) if f is None else f, sequences),
            in_sequences(z, sequences),
        )
        if sequences.real is not None:
            a, z = a.masked_fill(~sequences.real, CLOSED), z.masked_fill(~sequences.real, CLOSED)
        return a.unflatten(-1, (-1, self.K)), z

    def _options(self, sequences: Sequences) -> dict[str, Any]:
        options = super()._options(sequences) | {"lower_bound": self.bound}
        return options | ({"position": sequences.position} if sequences.is_packed else {})
