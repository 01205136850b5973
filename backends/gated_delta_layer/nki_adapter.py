"""Runs a layer's mixer in one NKI kernel forward and in another one backward.

A kernel call takes all sequences; `limits.layer_nki` refuses those that are too long. Training
keeps what backward reads: g in two parts, q, k, v and o in the dtype of x, and in float32 the
convolution's results before SiLU and the state before each chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor

from delta_trn.backends.checks import BackendRefusal
from delta_trn.backends.gated_delta_layer.contract import Gradients, Layer
from delta_trn.backends.gated_delta_rule.contract import RESET, Shapes
from delta_trn.backends.gated_delta_rule.nki_adapter import TINY
from delta_trn.backends.nki_runtime_adapter import require_within_rsqrt, run
from delta_trn.nki_kernels import plan
from delta_trn.nki_kernels.gated_delta_layer.bwd import gated_delta_layer_bwd
from delta_trn.nki_kernels.gated_delta_layer.fwd import gated_delta_layer_fwd


def forward(call: Layer, *, save: bool) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """Returns y, final_state, and what backward takes, where it follows.

    Raises BackendRefusal for an eps that rsqrt does not take, and for a scale with which gradients
    underflow.
    """
    require_within_rsqrt("eps", call.eps, plan.LEAST_RSQRT)
    if 0.0 < abs(call.scale) < TINY:
        raise BackendRefusal(
            f"nki and nki-simulator need |scale| >= {TINY:.3g} for a layer in one kernel; scale is "
            f"{call.scale}: call the three parts"
        )
    g, how = _split_decays(call), _choose(call)
    inputs = (call.x, call.weight, g, call.beta, call.gate, call.gain)
    numbers = (call.K, call.scale, call.eps, save, how.C, how.lanes, how.width)
    outputs = run(gated_delta_layer_fwd, *inputs, *_kernel_options(call), *numbers)
    y, final_state, *saved = outputs
    return y, final_state if call.output_final_state else None, [g, *saved] if save else []


def backward(dy: Tensor, dstate: Tensor | None, call: Layer, saved: list[Tensor]) -> Gradients:
    """Returns the gradients."""
    g, *kept = saved[:6]  # g, then q, k, v, o and u
    weight_t, how, options = (
        call.weight.float().t().contiguous(),
        _choose(call),
        _kernel_options(call),
    )
    inputs = (dy, call.x, weight_t, *kept, g, call.beta, call.gate, call.gain)
    states = saved[6] if len(saved) > 6 else None
    dx, dweight, dg, dbeta, dgate, dgain, dstate0, *dprefix = run(
        gated_delta_layer_bwd,
        *inputs,
        *options[:4],
        dstate,
        dstate is not None,
        *options[4:],
        states,
        call.scale,
        call.eps,
        how.C,
        how.lanes,
        how.width,
    )
    return Gradients(
        dx,
        dweight.sum(0).t().to(call.weight.dtype),  # of all sequences, [N, W, channels]
        torch.ops.aten.threshold_backward(dg, call.g, RESET),  # 0 at resets, which are no variables
        dbeta,
        dgate,
        # of all sequences and heads, [N, HV V]
        dgain.unflatten(1, (-1, call.gain.shape[0])).sum((0, 1)).to(call.gain.dtype),
        dprefix[0] if dprefix else None,
        dstate0 if call.initial_state is not None else None,
    )


def saved_shapes(call: Layer) -> Shapes:
    """Returns the shapes of the two parts of g, of q, k, v, o and u, and of the kept states."""
    (B, T, channels), (HV, V), dtype = call.x.shape, call.gate.shape[2:], call.x.dtype
    key, value = ((B, T, call.heads, call.K), dtype), ((B, T, HV, V), dtype)
    decays = ((B, T, HV, 2), call.g.dtype)
    shapes: Shapes = [decays, key, key, value, value, ((B, channels, T), torch.float32)]
    many = -(-T // plan.CHUNK) - 1
    return [*shapes, ((B, many, call.K, HV, V), torch.float32)] if many > 0 else shapes


def _choose(call: Layer) -> plan.Plan:
    """Returns how the kernels cut their work."""
    (B, T), (HV, V) = call.x.shape[:2], call.gate.shape[2:]
    lanes = plan.LAYER_LANES if call.x.dtype == torch.float32 else 8
    return plan.choose_layer(B, T, call.heads, HV, call.K, V, lanes)


def _kernel_options(call: Layer) -> tuple[Tensor | bool | None, ...]:
    """Returns the kernels' position, packed, prefix, continued, initial_state and has_state."""
    place, prefix, state = call.position, call.prefix, call.initial_state
    place = None if place is None else place.to(torch.int32)
    return place, place is not None, prefix, prefix is not None, state, state is not None


def _split_decays(call: Layer) -> Tensor:
    """Returns g in two parts: not below RESET, and RESET where a packed sequence begins."""
    g = call.g.clamp(min=RESET)
    if call.position is not None:
        g = g.masked_fill((call.position == 0)[None, :, None], RESET)
    return torch.stack(plan.split_decays(g), -1)
