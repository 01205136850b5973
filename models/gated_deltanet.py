"""Gated DeltaNet as a token mixer (arXiv:2412.06464)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from delta_trn.backends import (
    find_layer_backend,
    gated_delta_layer,
    gated_delta_rule,
    gated_delta_rule_step,
    log_decay,
    write_strength,
)
from delta_trn.models.cache import LayerCache
from delta_trn.models.config import DeltaConfig
from delta_trn.models.convolution import ShortConvolution
from delta_trn.models.head_numbers import Float32Numbers
from delta_trn.models.initialization import decay_rates, taps, time_steps
from delta_trn.models.layers import (
    NORM_FORWARDS,
    Forwards,
    RMSNorm,
    Tags,
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

# What the gates' projections are set to at padding: softplus and sigmoid are 0 there, in every
# precision.
CLOSED = -1e4
# What the decay's projection is set to at a sequence's first token: exp(g) is 0 for any A_log from
# -40 to 40, which erases the state.
FORGET = 1e20
# q, k and v side by side, the output's gate, a, b
Projected = tuple[Tensor, Tensor, Tensor, Tensor]
IN_THE_KERNEL: Forwards = {ShortConvolution: ShortConvolution.forward, **NORM_FORWARDS}


class GatedDeltaNet(Float32Numbers):
    """The gated delta rule between projections; width d, H heads of size K, HV value heads of size
    V.

        q, k, v = SiLU(conv( W_q x, W_k x, W_v x ))         [B, T, H, K] twice, [B, T, HV, V]
        g       = -exp(A_log) softplus(W_a x + dt_bias)     [B, T, HV] float32, the logarithm of the
                                                            decay
        beta    = sigmoid(W_b x)                            [B, T, HV] float32; doubled with
                                                            allow_neg_eigval
        o       = gated_delta_rule(q, k, v, g, beta)        [B, T, HV, V], q and k normalized, scale
                                                            sqrt(K)
        y       = W_o ( RMSNorm(o) * SiLU(W_g x) )          [B, T, d]

    The scale is sqrt(K) here, while the operation's default is K**-0.5, as in softmax attention.
    The norm after the readout cancels any scale, but for its epsilon. With K**-0.5 and taps drawn
    like hidden matrices, as in the released code, o is so small that epsilon is 1700 times o^2 at
    width 1536: the norm no longer normalizes, it multiplies by 1000. sqrt(K) keeps epsilon
    negligible at every width.

    scan    computes o for whole sequences. It is meant to be replaced: a function with the
            arguments and results of `backends.gated_delta_rule`, such as another implementation, or
            one that passes states between processes. A single token that continues a cache goes
            through `gated_delta_rule_step`.
    """

    rule, step = staticmethod(gated_delta_rule), staticmethod(gated_delta_rule_step)
    decays = 1  # of a token and head

    def __init__(self, config: DeltaConfig) -> None:
        super().__init__()
        d, H, HV = config.hidden_size, config.num_heads, config.num_v_heads
        K, V = config.head_dim_k, config.head_dim_v
        self.K, self.V, self.sizes = K, V, (H * K, H * K, HV * V)
        self.beta_max = 2.0 if config.allow_neg_eigval else 1.0
        self.scale = K**0.5 if config.readout == "sqrt_k" else K**-0.5
        self.scan: Callable[..., tuple[Tensor, Tensor | None]] = self.rule
        tags = self.tags = Tags()
        self.q_proj = make_linear(tags, "q_proj", d, H * K, heads=H)
        self.k_proj = make_linear(tags, "k_proj", d, H * K, stored=True, heads=H)
        self.v_proj = make_linear(tags, "v_proj", d, HV * V, stored=True, heads=HV)
        self.o_proj = make_linear(
            tags, "o_proj", HV * V, d, scale=config.mixer_output_scale, heads=HV, of_columns=True
        )
        self._make_gates(config)
        self.b_proj = make_linear(tags, "b_proj", d, HV, Role.GATE, stored=True)
        tap = Tag(Role.VECTOR, law=taps, stored=True)
        self.conv = ShortConvolution(sum(self.sizes), config.conv_size, tap)
        wide = torch.promote_types(torch.get_default_dtype(), torch.float32)
        self.A_log = nn.Parameter(torch.empty(HV, dtype=wide))
        self.dt_bias = nn.Parameter(torch.empty(HV * self.decays, dtype=wide))
        rates = partial(decay_rates, factor=config.forgetting)
        tags["A_log"] = Tag(Role.SCALAR, law=rates, stored=True)
        role = Role.SCALAR if self.decays == 1 else Role.VECTOR
        tags["dt_bias"] = Tag(role, law=time_steps, stored=True)
        self.o_norm = RMSNorm(V, config.rms_norm_eps)

    def _make_gates(self, config: DeltaConfig) -> None:
        """Makes the projections of the decays and of the output's gate."""
        d, HV = config.hidden_size, config.num_v_heads
        self.a_proj = make_linear(self.tags, "a_proj", d, HV, Role.GATE, stored=True)
        self.g_proj = make_linear(self.tags, "g_proj", d, HV * self.V, heads=HV)

    def forward(self, x: Tensor, sequences: Sequences, cache: LayerCache | None = None) -> Tensor:
        """Maps x [B, T, d], zero at padding, or on XLA [B T, d], to the same shape."""
        qkv, gate, *more = self._project(x)
        qkv, (a, b) = in_sequences(qkv, sequences), self._gate_inputs(x, sequences, *more)
        gate = gate.view(*qkv.shape[:2], -1, self.V)
        backend = self._find_kernel(qkv, sequences, cache)
        if backend is None:
            y = self._mix((self.conv(qkv, sequences, cache), gate, a, b), sequences, cache)
        else:
            y = self._mix_in_one_kernel((qkv, gate, a, b), sequences, cache, backend)
        return apply_linear(self.o_proj, y.reshape(*x.shape[:-1], -1))

    def _project(self, x: Tensor) -> Sequence[Tensor]:
        """Returns q, k and v side by side, the output's gate, and what `_gate_inputs` takes more."""
        return project(x, (self.q_proj, self.k_proj, self.v_proj), (self.g_proj,))

    def _find_kernel(
        self, qkv: Tensor, sequences: Sequences, cache: LayerCache | None
    ) -> str | None:
        """Returns the backend that computes all between the projections in one kernel;
        None: `_mix` does.
        """
        changed = self.scan is not gated_delta_rule
        watched = not all(is_untouched(m, IN_THE_KERNEL) for m in (self.conv, self.o_norm))
        token = cache is not None and cache.state is not None and qkv.shape[1] == 1
        if changed or watched or token or (sequences.is_packed and qkv.shape[0] > 1):
            return None
        HV = self.sizes[2] // self.V
        return find_layer_backend(
            qkv, self.conv.weight, HV, self.K, self.V, packed=sequences.is_packed
        )

    def _mix_in_one_kernel(
        self, parts: Projected, sequences: Sequences, cache: LayerCache | None, backend: str
    ) -> Tensor:
        """Returns y [B, T, HV, V] of what was projected."""
        qkv, gate, a, b = parts
        state = None if cache is None else cache.state
        qkv, prefix = self.conv.take(qkv, sequences, cache)
        y, state = gated_delta_layer(
            qkv, self.conv.weight, a, b, gate, self.o_norm.weight, K=self.K, A_log=self.A_log,
            dt_bias=self.dt_bias, beta_max=self.beta_max, scale=self.scale, eps=self.o_norm.eps,
            prefix=prefix, position=sequences.position.flatten() if sequences.is_packed else None,
            initial_state=state, output_final_state=cache is not None, backend=backend,
        )  # fmt: skip
        if cache is not None:
            cache.state = state
        return y

    def _mix(self, parts: Projected, sequences: Sequences, cache: LayerCache | None) -> Tensor:
        """Returns the same of what was convolved: the rule, then the norm,
        each on its own backend.
        """
        qkv, gate, a, b = parts
        q, k, v = consecutive_parts(qkv, self.sizes)
        q, k = q.unflatten(-1, (-1, self.K)), k.unflatten(-1, (-1, self.K))
        v = v.unflatten(-1, (-1, self.V))
        state, options = None if cache is None else cache.state, self._options(sequences)
        if state is not None and qkv.shape[1] == 1:
            o, state = self.step(*(y[:, 0] for y in (q, k, v, a, b)), state=state, **options)
            o = o[:, None]
        else:
            options["output_final_state"] = cache is not None
            o, state = self.scan(q, k, v, a, b, initial_state=state, **options)
        if cache is not None:
            cache.state = state
        return self._gate_output(o, gate)

    def _gate_output(self, o: Tensor, gate: Tensor) -> Tensor:
        return self.o_norm(o, gate)

    def gates(self, x: Tensor, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """Returns g and beta [B, T, HV] in float32, under autocast too:
        in bfloat16 a decay of 0.999 is 1.
        """
        a, z = self._gate_inputs(x, sequences)
        with torch.autocast(x.device.type, enabled=False):
            return log_decay(a, self.A_log, self.dt_bias), write_strength(z, self.beta_max)

    def _gate_inputs(self, x: Tensor, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """Returns W_a x and W_b x [B, T, HV]; padding gets values that neither forget nor write.

        The first token of a sequence gets a value that forgets all, which is exact: exp(g) is 0,
        and so is every gradient that would pass.
        """
        both = in_sequences(self._project_gates(x), sequences)
        if sequences.real is not None:
            both = both.masked_fill(~sequences.real, CLOSED)
        HV = both.shape[-1] // (self.decays + 1)
        a, z = consecutive_parts(both, [self.decays * HV, HV])
        if sequences.begins is not None:
            a = a.masked_fill(sequences.begins, min(FORGET, torch.finfo(a.dtype).max))
        return a, z

    def _project_gates(self, x: Tensor) -> Tensor:
        """Returns W_a x and W_b x side by side, in the dtype of their weights."""
        with torch.autocast(x.device.type, enabled=False):
            return project(in_dtype_of(x, self.a_proj, self.b_proj), (self.a_proj, self.b_proj))[0]

    def _options(self, sequences: Sequences) -> dict[str, Any]:
        """Returns the options of the delta rule, which makes g and beta from the projections."""
        return {
            "scale": self.scale,
            "use_qk_l2norm_in_kernel": True,
            "use_gate_in_kernel": True,
            "A_log": self.A_log,
            "dt_bias": self.dt_bias,
            "use_beta_sigmoid_in_kernel": True,
            "allow_neg_eigval": self.beta_max == 2.0,
        }


def in_sequences(y: Tensor, sequences: Sequences) -> Tensor:
    """Returns y [B, T, n], or rows [B T, n], as [B, T, n]."""
    return y if y.dim() == 3 else y.view(-1, sequences.position.shape[-1], y.shape[-1])
