"""Runs a layer's mixer forward in one NKI kernel, and backward in the kernels of its three parts.

A kernel call takes as many sequences as `plan.count_sequences` says; a sequence that is too long for one call
is not computed at once (`Capability.limits`). Training keeps what backward's kernels read: q, k, v and o in
the dtype of x, and states.
"""

from __future__ import annotations

import torch
from torch import Tensor

from delta_trn.backends.gated_delta_layer.contract import Gradients, Layer
from delta_trn.backends.gated_delta_rule import nki_adapter as rule
from delta_trn.backends.gated_delta_rule.contract import RESET, Rule, Shapes
from delta_trn.backends.layers import nki_adapter as layers
from delta_trn.backends.layers.contract import Convolution, GatedNorm
from delta_trn.backends.nki_runtime_adapter import require_within_rsqrt, run
from delta_trn.nki_kernels import plan
from delta_trn.nki_kernels.gated_delta_layer import gated_delta_layer_fwd


def forward(call: Layer, *, save: bool) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """Returns y, final_state, and q, k, v, o and the states where backward follows.

    Raises BackendRefusal for an eps that the Scalar engine's rsqrt does not take.
    """
    require_within_rsqrt("eps", call.eps, plan.LEAST_RSQRT)
    (B, T), (HV, V) = call.x.shape[:2], call.gate.shape[2:]
    g = torch.stack(plan.split_decays(_decays(call)), -1)
    together = plan.count_sequences(T, HV)
    position = call.weight if call.position is None else call.position.to(torch.int32)
    most = plan.LAYER_LANES if call.x.dtype == torch.float32 else 8
    parts: list[tuple[Tensor, ...]] = []
    for b in range(0, B, together):
        rows = slice(b, min(b + together, B))
        sizes = plan.choose(rows.stop - rows.start, call.heads, HV, call.K, V, most)
        parts.append(
            run(
                gated_delta_layer_fwd,
                call.x[rows],
                call.weight,
                g[rows],
                call.beta[rows],
                call.gate[rows],
                call.gain,
                position,
                call.position is not None,
                call.weight if call.prefix is None else call.prefix[rows],
                call.prefix is not None,
                call.gain if call.initial_state is None else call.initial_state[rows],
                call.initial_state is not None,
                call.K,
                call.scale,
                call.eps,
                save,
                sizes.every if save else 0,
                sizes.C,
                sizes.lanes,
                sizes.width,
            )
        )
    y, final_state, *saved = (x[0] if len(x) == 1 else torch.cat(x) for x in zip(*parts, strict=True))
    return y, final_state if call.output_final_state else None, saved


def backward(dy: Tensor, dstate: Tensor | None, call: Layer, saved: list[Tensor]) -> Gradients:
    """Returns the gradients: of the norm, then of the rule, then of the convolution."""
    q, k, v, o, *states = saved
    do, dgate, dgain = layers.gated_rms_norm_backward(dy, GatedNorm(o, call.gate, call.gain, call.eps), [])
    inner = Rule(
        q, k, v, _decays(call), call.beta, initial_state=call.initial_state, scale=call.scale, l2norm=True,
        output_final_state=call.output_final_state,
    )  # fmt: skip
    d = rule.backward(do, dstate, inner, states)
    dqkv = torch.cat([x.flatten(2) for x in (d.q, d.k, d.v)], -1)
    dx, dweight, dprefix = layers.short_convolution_backward(
        dqkv, Convolution(call.x, call.weight, call.prefix, call.position), []
    )
    assert dgate is not None
    dg = d.g.masked_fill(call.g <= RESET, 0.0)
    return Gradients(dx, dweight, dg, d.beta, dgate, dgain, dprefix, d.initial_state)


def saved_shapes(call: Layer) -> Shapes:
    """Returns the shapes of q, k, v, o, and of the states before stretches."""
    (B, T, _), (HV, V), dtype = call.x.shape, call.gate.shape[2:], call.x.dtype
    shapes: Shapes = [((B, T, call.heads, call.K), dtype)] * 2 + [((B, T, HV, V), dtype)] * 2
    many = plan.stretches(T) - 1
    return [*shapes, ((B, many, call.K, HV, V), torch.float32)] if many > 0 else shapes


def _decays(call: Layer) -> Tensor:
    """Returns g as kernels take it: not below RESET, and RESET where a packed sequence begins."""
    g = call.g.clamp(min=RESET)
    return g if call.position is None else g.masked_fill((call.position == 0)[None, :, None], RESET)
