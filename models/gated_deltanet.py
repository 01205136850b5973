"""Gated DeltaNet as a token mixer (arXiv:2412.06464)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from delta_trn.backends import gated_delta_rule, gated_delta_rule_step, log_decay, write_strength
from delta_trn.models.cache import LayerCache
from delta_trn.models.config import DeltaConfig
from delta_trn.models.convolution import ShortConvolution
from delta_trn.models.initialization import decay_rates, taps, time_steps
from delta_trn.models.layers import Linear, RMSNorm, joint
from delta_trn.models.mup import Role, Tag
from delta_trn.models.sequence import Sequences


class GatedDeltaNet(nn.Module):
    """The gated delta rule between projections; d width, H heads of size K, HV value heads of size V.

    q, k, v = SiLU(conv( W_q x, W_k x, W_v x ))     [B, T, H, K] twice, [B, T, HV, V]
    g       = -exp(A_log) softplus(W_a x + dt_bias) [B, T, HV] float32, the logarithm of the decay
    beta    = sigmoid(W_b x)                        [B, T, HV] float32; twice that with allow_neg_eigval
    o       = the gated delta rule of these, q and k normalized, times sqrt(K)
    y       = W_o ( RMSNorm(o) * SiLU(W_g x) )
    """

    def __init__(self, config: DeltaConfig) -> None:
        super().__init__()
        d, H, HV = config.hidden_size, config.num_heads, config.num_v_heads
        K, V = config.head_dim_k, config.head_dim_v
        self.K, self.V, self.sizes = K, V, (H * K, H * K, HV * V)
        self.beta_max = 2.0 if config.allow_neg_eigval else 1.0
        # sqrt(K) keeps the output norm's epsilon negligible at every width. With K**-0.5 and taps like hidden
        # matrices, as released, epsilon is 1700 times o^2 at width 1536 and the norm a mere factor of 1000
        self.scale = K**0.5 if config.readout == "sqrt_k" else K**-0.5
        # where width adds heads, a gate's projection is a matrix like others, and a head's number one of many
        grow = config.scale_by == "heads"
        gate, scalar, gain = (
            (Role.HIDDEN, Role.VECTOR, Role.CONSTANT) if grow else (Role.GATE, Role.SCALAR, Role.VECTOR)
        )
        self.q_proj, self.k_proj, self.v_proj = Linear(d, H * K), Linear(d, H * K), Linear(d, HV * V)
        self.g_proj, self.o_proj = Linear(d, HV * V), Linear(HV * V, d)
        self.a_proj, self.b_proj = Linear(d, HV, gate), Linear(d, HV, gate)
        released = config.init == "authors"
        tap = Tag(Role.VECTOR, like=Role.HIDDEN) if released else Tag(Role.VECTOR, law=taps)
        self.conv = ShortConvolution(sum(self.sizes), config.conv_size, tap)
        self.A_log, self.dt_bias = nn.Parameter(torch.empty(HV)), nn.Parameter(torch.empty(HV))
        rates = partial(decay_rates, factor=config.forgetting)
        self.tags = {"A_log": Tag(scalar, law=rates), "dt_bias": Tag(scalar, law=time_steps)}
        self.o_norm = RMSNorm(V, config.rms_norm_eps, gain)
        for part in (self, self.k_proj, self.v_proj, self.a_proj, self.b_proj, self.conv):
            part.tags = {name: replace(tag, stored=True) for name, tag in part.tags.items()}

    def forward(self, x: Tensor, sequences: Sequences, cache: LayerCache | None = None) -> Tensor:
        """x [B, T, d], zero at padding -> [B, T, d]."""
        qkv = self.conv(joint(x, self.q_proj, self.k_proj, self.v_proj), sequences, cache)
        q, k, v = qkv.split(self.sizes, dim=-1)
        o = self._scan(
            q.unflatten(-1, (-1, self.K)),
            k.unflatten(-1, (-1, self.K)),
            v.unflatten(-1, (-1, self.V)),
            self._gate_arguments(x, sequences),
            sequences.cu_seqlens,
            cache,
        )
        y = self.o_norm(o, self.g_proj(x).unflatten(-1, (-1, self.V)))
        return self.o_proj(y.flatten(-2))

    def gates(self, x: Tensor, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """g and beta [B, T, HV] in float32, under autocast too: a decay of 0.999 is 1 in bfloat16."""
        za, zb = self._projected(x)
        with torch.autocast(x.device.type, enabled=False):
            g = log_decay(za, self.A_log, self.dt_bias)
            beta = write_strength(zb, self.beta_max)
        if (real := sequences.real) is not None:
            g, beta = g * real, beta * real  # padding neither forgets nor writes
        return g, beta

    def _projected(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """W_a x and W_b x [B, T, HV]."""
        with torch.autocast(x.device.type, enabled=False):
            za, zb = joint(x.to(self.a_proj.weight.dtype), self.a_proj, self.b_proj).chunk(2, dim=-1)
        return za, zb

    def _gate_arguments(self, x: Tensor, sequences: Sequences) -> dict[str, Any]:
        """The operation's g and beta: what they are made of, or with padding themselves."""
        if sequences.real is not None:
            return dict(zip(("g", "beta"), self.gates(x, sequences), strict=True))
        za, zb = self._projected(x)
        return {
            "g": za,
            "beta": zb,
            "use_gate_in_kernel": True,
            "A_log": self.A_log,
            "dt_bias": self.dt_bias,
            "use_beta_sigmoid_in_kernel": True,
            "allow_neg_eigval": self.beta_max == 2.0,
        }

    def _scan(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: dict[str, Any],
        cu_seqlens: Tensor | None,
        cache: LayerCache | None,
    ) -> Tensor:
        if cache is not None and cache.state is not None and q.shape[1] == 1:
            gates = gates | {name: gates[name][:, 0] for name in ("g", "beta")}
            o, cache.state = gated_delta_rule_step(
                q[:, 0],
                k[:, 0],
                v[:, 0],
                state=cache.state,
                scale=self.scale,
                use_qk_l2norm_in_kernel=True,
                **gates,
            )
            return o[:, None]
        o, state = gated_delta_rule(
            q,
            k,
            v,
            **gates,
            scale=self.scale,
            initial_state=None if cache is None else cache.state,
            output_final_state=cache is not None,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=cu_seqlens,
        )
        if cache is not None:
            cache.state = state
        return o
