"""Gated DeltaNet as a token mixer (arXiv:2412.06464)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backends import gated_delta_rule, gated_delta_rule_step
from models.cache import LayerCache
from models.config import DeltaConfig
from models.layers import GatedRMSNorm, Linear, ShortConvolution
from models.mup import Role
from models.sequence import Sequences


class GatedDeltaNet(nn.Module):
    """The gated delta rule between projections; d width, H heads of size K, HV value heads of size V.

    q, k = SiLU(conv(W_q x)), SiLU(conv(W_k x))     [B, T, H, K]     normalized inside the operation
    v    = SiLU(conv(W_v x))                        [B, T, HV, V]
    g    = -exp(A_log) softplus(W_a x + dt_bias)    [B, T, HV]       float32, the logarithm of the decay
    beta = sigmoid(W_b x), twice that with allow_neg_eigval
    o    = the gated delta rule of these, times sqrt(K)
    y    = W_o ( RMSNorm(o) * SiLU(W_g x) )
    """

    roles = {"A_log": Role.SCALAR, "dt_bias": Role.SCALAR}

    def __init__(self, config: DeltaConfig) -> None:
        super().__init__()
        d, H, HV, K, V = (
            config.hidden_size,
            config.num_heads,
            config.num_v_heads,
            config.head_dim_k,
            config.head_dim_v,
        )
        self.K, self.V = K, V
        self.beta_max = 2.0 if config.allow_neg_eigval else 1.0
        # o = sqrt(K) S^T q with unit q: o is of the size of S's columns however large K is, so the norm's epsilon
        # stays negligible; with the released K**-0.5 it dominates (o^2 / eps = 0.0006 at width 1536)
        self.scale = K**0.5 if config.readout == "sqrt_k" else K**-0.5
        self.q_proj, self.k_proj, self.v_proj = Linear(d, H * K), Linear(d, H * K), Linear(d, HV * V)
        self.g_proj, self.o_proj = Linear(d, HV * V), Linear(HV * V, d)
        self.a_proj, self.b_proj = Linear(d, HV, Role.GATE), Linear(d, HV, Role.GATE)
        self.q_conv = ShortConvolution(H * K, config.conv_size)
        self.k_conv = ShortConvolution(H * K, config.conv_size)
        self.v_conv = ShortConvolution(HV * V, config.conv_size)
        self.A_log, self.dt_bias = nn.Parameter(torch.empty(HV)), nn.Parameter(torch.empty(HV))
        self.o_norm = GatedRMSNorm(V, config.rms_norm_eps)

    def forward(self, x: Tensor, sequences: Sequences, cache: LayerCache | None = None) -> Tensor:
        """x [B, T, d] -> [B, T, d]."""
        T = x.shape[1]
        real = sequences.real_now(T)
        if real is not None:
            x = x * real  # padding must not reach the convolutions
        position = sequences.position(T)
        q = self.q_conv(self.q_proj(x), position, cache, "q").unflatten(-1, (-1, self.K))
        k = self.k_conv(self.k_proj(x), position, cache, "k").unflatten(-1, (-1, self.K))
        v = self.v_conv(self.v_proj(x), position, cache, "v").unflatten(-1, (-1, self.V))
        g = -self.A_log.float().exp() * F.softplus(self.a_proj(x).float() + self.dt_bias.float())
        beta = self.beta_max * self.b_proj(x).float().sigmoid()
        if real is not None:
            g, beta = g * real, beta * real  # padding neither forgets nor writes
        o = self._scan(q, k, v, g, beta, sequences.cu_seqlens, cache)
        y = self.o_norm(o, self.g_proj(x).unflatten(-1, (-1, self.V)))
        return self.o_proj(y.flatten(-2))

    def _scan(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        cu_seqlens: Tensor | None,
        cache: LayerCache | None,
    ) -> Tensor:
        if cache is not None and cache.state is not None and q.shape[1] == 1:
            now = (x[:, 0] for x in (q, k, v, g, beta))
            o, cache.state = gated_delta_rule_step(
                *now, cache.state, scale=self.scale, use_qk_l2norm_in_kernel=True
            )
            return o[:, None]
        o, state = gated_delta_rule(
            q,
            k,
            v,
            g,
            beta,
            scale=self.scale,
            initial_state=None if cache is None else cache.state,
            output_final_state=cache is not None,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=cu_seqlens,
        )
        if cache is not None:
            cache.state = state
        return o
