"""The mixer of a Gated DeltaNet layer between its projections, in one kernel.

    q, k, v     = SiLU(conv(x))                             `short_convolution`
    o           = gated_delta_rule(q, k, v, g, beta)        q and k normalized
    y           = RMSNorm(o) * gain * SiLU(gate)            `gated_rms_norm`

A backend has a kernel for all of it, or it refuses: `models.gated_deltanet` runs the three parts
then.
"""

from __future__ import annotations

from torch import Tensor

from delta_trn.backends.gated_delta_layer.contract import Gradients, Layer, key_heads
from delta_trn.backends.gated_delta_rule.contract import make_gates, state_dtype
from delta_trn.backends.operator import Operator


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
        prefix          [B, W - 1, channels]    what came before; None: zeros
        position        [T] int64           each token's place in its own sequence, for sequences
                                            packed in B = 1: at 0 the convolution and the state
                                            forget what was before
        initial_state, output_final_state, scale        as in `gated_delta_rule`
        returns y       [B, T, HV, V]       dtype of x
            final_state [B, HV, K, V]       None if not asked for

    Raises BackendRefusal where no backend has a kernel for such a call. Differentiable as its three
    parts.
    """
    HV, V = gate.shape[2:]
    tensors = (x, weight, a, b, gate, gain, A_log, dt_bias, prefix, initial_state)
    sizes, options = _sizes(x, weight, HV, K, V), _options(position is not None)
    name, save = OPERATOR.choose(tensors, sizes, backend, *options)
    g, beta = make_gates(a, b, A_log, dt_bias, beta_max)
    call = Layer(
        x, weight, g, beta, gate.to(x.dtype), gain, prefix, position, initial_state, K=K,
        scale=K**-0.5 if scale is None else scale, eps=eps, output_final_state=output_final_state,
    )  # fmt: skip
    return OPERATOR(call, save=save, backend=name)


def find_layer_backend(
    x: Tensor,
    weight: Tensor,
    HV: int,
    K: int,
    V: int,
    *,
    packed: bool = False,
    backend: str | None = None,
) -> str | None:
    """Returns the backend whose kernel takes such a call of `gated_delta_layer`; None: none does.

    It is the default backend, or the device's own, and never one that is merely allowed. packed
    says whether the call has a position.
    """
    if x.numel() == 0:
        return None
    sizes = _sizes(x, weight, HV, K, V)
    return OPERATOR.choose((x, weight), sizes, backend, *_options(packed), required=False)[0]


def _sizes(x: Tensor, weight: Tensor, HV: int, K: int, V: int) -> dict[str, int]:
    W = weight.shape[1]
    return {"T": x.shape[1], "H": key_heads(x, HV, V, K), "HV": HV, "K": K, "V": V, "W": W}


def _options(packed: bool) -> tuple[str, ...]:
    return ("packed",) if packed else ()


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
