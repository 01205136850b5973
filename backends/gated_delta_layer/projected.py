"""The mixer of a Gated DeltaNet layer from hidden states on: `gated_delta_layer` and its projections.

    x           = W h                                       q, k and v side by side
    gate        = W_z h
    y           = gated_delta_layer(x, .., gate, ..)

A backend may compute all of it at once, so that engines that wait for the rule multiply. Where the one that
runs the rule does not, or not for this call, these are PyTorch's products and `gated_delta_layer`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from delta_trn.backends.gated_delta_layer import choose, gated_delta_layer
from delta_trn.backends.gated_delta_layer.contract import ProjectedGradients, ProjectedLayer
from delta_trn.backends.operator import Operator

ROWS = 128  # of a product: d is a multiple of them


def projected_delta_layer(
    hidden: Tensor,
    projection: Tensor,
    gate_projection: Tensor,
    weight: Tensor,
    a: Tensor,
    b: Tensor,
    gain: Tensor,
    *,
    K: int,
    A_log: Tensor,
    dt_bias: Tensor | None = None,
    beta_max: float = 1.0,
    scale: float | None = None,
    eps: float,
    position: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    r"""The mixer of a layer, with the projections of q, k, v and the gate.

        x = W h     gate = W_z h        y = gated_delta_layer(x, weight, a, b, gate, gain)

        hidden              [B, T, d]           h
        projection          [channels, d]       W, channels = 2 H K + HV V
        gate_projection     [HV V, d]           W_z
        returns y           [B, T, HV, V]

    The rest is as in `gated_delta_layer`, which it equals in what it refuses and differentiates. Products are
    in the dtype of `hidden`, or in autocast's under autocast.
    """
    HV, V = a.shape[2], gain.shape[0]
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, projection, gate_projection = (x.to(dtype) for x in (hidden, projection, gate_projection))
    tensors = (hidden, projection, gate_projection, weight, a, b, gain, A_log, dt_bias)
    chosen = _choose(tensors, weight, HV, K, V, cu_seqlens is not None, position is not None, backend)
    if chosen is None:
        x, gate = F.linear(hidden, projection), F.linear(hidden, gate_projection)
        y, _ = gated_delta_layer(
            x, weight, a, b, gate.unflatten(-1, (HV, V)), gain, K=K, A_log=A_log, dt_bias=dt_bias,
            beta_max=beta_max, scale=scale, eps=eps, position=position, cu_seqlens=cu_seqlens,
            backend=backend,
        )  # fmt: skip
        return y
    name, save = chosen
    call = ProjectedLayer(
        hidden, projection, gate_projection, weight, a, b, gain, A_log, dt_bias, position, K=K,
        scale=K**-0.5 if scale is None else scale, eps=eps, beta_max=beta_max,
    )  # fmt: skip
    return OPERATOR(call, save=save, backend=name)[0]


def is_projected(
    hidden: Tensor,
    weight: Tensor,
    HV: int,
    K: int,
    V: int,
    *,
    bounds: bool = False,
    position: bool = False,
    backend: str | None = None,
) -> bool:
    """Returns whether a backend computes such a call of `projected_delta_layer` at once.

    bounds and position say whether the call has cu_seqlens and position.
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        hidden = hidden.detach().to(torch.get_autocast_dtype(device))
    return _choose((hidden, weight), weight, HV, K, V, bounds, position, backend) is not None


def _choose(
    tensors: tuple[Tensor | None, ...],
    weight: Tensor,
    HV: int,
    K: int,
    V: int,
    bounds: bool,
    position: bool,
    backend: str | None,
) -> tuple[str, bool] | None:
    """Returns what `gated_delta_layer.choose` does; hidden states come first."""
    assert tensors[0] is not None
    if tensors[0].shape[-1] % ROWS:
        return None
    return choose(
        "projected_delta_layer", tensors, weight, HV, K, V, bounds=bounds, position=position, states=False,
        backend=backend,
    )  # fmt: skip


OPERATOR = Operator(
    "projected_delta_layer",
    ProjectedLayer,
    prefix="projected_",
    fakes=lambda call: (call.hidden.new_empty((*call.b.shape, call.gain.shape[0])),),
    outputs=("y",),
    gradients=[(name,) for name in ProjectedGradients._fields],
)
