"""The mixer of a Gated DeltaNet layer between its projections: convolution, gated delta rule, gated norm.

    q, k, v     = SiLU(conv(x))                             `short_convolution`
    o           = gated_delta_rule(q, k, v, g, beta)        q and k normalized
    y           = RMSNorm(o) * gain * SiLU(gate)            `gated_rms_norm`

A backend may compute all of it at once. Where the one that runs the rule does not, or not for this call, the
layer is the three operations one after the other, each on its own backend, as if they had been called.
"""

from __future__ import annotations

from operator import index

import torch
from torch import Tensor

from delta_trn.backends import registry
from delta_trn.backends.gated_delta_layer.contract import Gradients, Layer, key_heads
from delta_trn.backends.gated_delta_rule import OPERATOR as RULE
from delta_trn.backends.gated_delta_rule import gated_delta_rule
from delta_trn.backends.gated_delta_rule.contract import make_gates, state_dtype
from delta_trn.backends.layers import gated_rms_norm, short_convolution
from delta_trn.backends.operator import Operator

CHUNK = 128  # tokens that count as one in the size "chunks"
MANY = 6  # value heads, at least, of which tokens count as the size "tokens of many heads"


def gated_delta_layer(
    x: Tensor,
    weight: Tensor,
    a: Tensor,
    b: Tensor,
    gate: Tensor,
    gain: Tensor,
    *,
    K: int,
    A_log: Tensor,
    dt_bias: Tensor | None = None,
    beta_max: float = 1.0,
    scale: float | None = None,
    eps: float,
    prefix: Tensor | None = None,
    position: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    r"""The mixer of a layer, from what its projections make to what its output projection takes.

        q, k, v = SiLU(conv(x))     g = -exp(A_log) softplus(a + dt_bias)     beta = beta_max sigmoid(b)
        o = gated_delta_rule(q, k, v, g, beta)      y = RMSNorm(o) * gain * SiLU(gate)

    With B, T, H, HV, K, V as in `gated_delta_rule`, and channels = 2 H K + HV V:

        x               [B, T, channels]    q, k and v side by side, before the convolution
        weight          [channels, W]       of the convolution, any float
        a, b            [B, T, HV]          the gates' projections, float32 or the dtype of x
        gate            [B, T, HV, V]       dtype of x
        gain            [V]                 any float
        A_log, dt_bias  [HV]
        prefix, position                    as in `short_convolution`
        cu_seqlens, initial_state, output_final_state, scale        as in `gated_delta_rule`
        returns y       [B, T, HV, V]       dtype of x
            final_state [N, HV, K, V]       None if not asked for

    Where sequences are packed, position says where each begins, and the rule forgets what was before: by
    cu_seqlens, or by an a of 1e20 at each first token. Differentiable and refusing as its three parts.
    """
    HV, V = gate.shape[2:]
    H = key_heads(x, HV, V, K)
    factor: float = K**-0.5 if scale is None else scale
    tensors = (x, weight, a, b, gate, gain, A_log, dt_bias, prefix, initial_state)
    chosen = choose(
        "gated_delta_layer", tensors, weight, HV, K, V, bounds=cu_seqlens is not None,
        position=position is not None, states=initial_state is not None or output_final_state,
        backend=backend,
    )  # fmt: skip
    if chosen is not None:
        name, save = chosen
        with torch.autocast(x.device.type, enabled=False):
            g, beta = make_gates(a, b, A_log, dt_bias, beta_max)
        call = Layer(
            x, weight, g, beta, gate.to(x.dtype), gain, prefix, position, initial_state, K=K, scale=factor,
            eps=eps, output_final_state=output_final_state,
        )  # fmt: skip
        return OPERATOR(call, save=save, backend=name)
    qkv = short_convolution(x, weight, prefix=prefix, position=position, backend=backend)
    q, k, v = qkv.split([H * K, H * K, HV * V], 2)
    o, final_state = gated_delta_rule(
        q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (HV, V)), a, b, factor,
        initial_state, output_final_state, use_qk_l2norm_in_kernel=True, cu_seqlens=cu_seqlens,
        use_gate_in_kernel=True, A_log=A_log, dt_bias=dt_bias, use_beta_sigmoid_in_kernel=True,
        allow_neg_eigval=beta_max == 2.0, backend=backend,
    )  # fmt: skip
    return gated_rms_norm(o, gate, gain, eps=eps, backend=backend), final_state


def is_one_operation(
    x: Tensor,
    weight: Tensor,
    HV: int,
    K: int,
    V: int,
    *,
    bounds: bool = False,
    position: bool = False,
    states: bool = False,
    backend: str | None = None,
) -> bool:
    """Returns whether a backend computes such a call of `gated_delta_layer` at once.

    It is the backend that runs the rule. In check mode none does, since each part checks what it is given.
    bounds, position and states say whether the call has cu_seqlens, position, and initial or final states.
    """
    chosen = choose(
        "gated_delta_layer", (x, weight), weight, HV, K, V, bounds=bounds, position=position, states=states,
        backend=backend,
    )  # fmt: skip
    return chosen is not None


def choose(
    op: str,
    tensors: tuple[Tensor | None, ...],
    weight: Tensor,
    HV: int,
    K: int,
    V: int,
    *,
    bounds: bool,
    position: bool,
    states: bool,
    backend: str | None,
) -> tuple[str, bool] | None:
    """Returns what `Operator.choose` does for the rule, or None if its backend does not run all of `op`.

    The first tensor is [B, T, channels or d], of the dtype in which the call computes.
    """
    x = tensors[0]
    assert x is not None
    channels, W = weight.shape
    if x.numel() == 0 or W == 1 or (bounds and (states or not position)):
        return None
    H = (channels - HV * V) // (2 * K)
    sizes = {"H": H, "HV": HV, "K": K, "V": V}
    name, gradients = RULE.choose(tensors, sizes, backend, packed=bounds)
    size, packed_size = x.element_size(), x.element_size() * position  # masks of packed sequences lie in SBUF
    more = {
        "W": W, "tokens of many heads": x.shape[1] * (HV >= MANY), "chunks": HV * -(-x.shape[1] // CHUNK),
        "K bytes": K * size, "V bytes": V * size, "packed V bytes": V * packed_size,
        "packed K V bytes": K * V * packed_size, "group": HV // H, "d": x.shape[2],
    }  # fmt: skip
    constants = tuple((word, index(value)) for word, value in {**sizes, **more}.items())
    device = "cpu" if x.is_meta else x.device.type
    if not registry.runs(op, name, device, x.dtype, constants, bounds, gradients):
        return None
    return name, gradients


def _outputs_like(call: Layer) -> tuple[Tensor, Tensor | None]:
    """Returns uninitialized tensors like y and final_state."""
    final_state = None
    if call.output_final_state:
        B, _, HV, V = call.gate.shape
        final_state = call.x.new_empty((B, HV, call.K, V), dtype=state_dtype(call.x.dtype))
    return call.gate.new_empty(call.gate.shape), final_state


OPERATOR = Operator(
    "gated_delta_layer",
    Layer,
    fakes=_outputs_like,
    outputs=("y", "final_state?"),
    gradients=[(name,) for name in Gradients._fields],
)
