"""Runs a layer's mixer in one NKI kernel forward and in another one backward, where it fits.

A kernel call takes as many sequences as `plan.count_sequences` says; `limits.nki` refuses a sequence that is
too long for one call. Training keeps what backward reads: q, k, v and o in the dtype of x, and in float32 the
convolution's results before SiLU and the state before each chunk. Where more value heads share a key head
than a bundle holds, backward is the kernels of the three parts, and training keeps q, k, v, o, and fewer
states.
"""

from __future__ import annotations

import torch
from torch import Tensor

from delta_trn.backends.gated_delta_layer.contract import Gradients, Layer, Sizes
from delta_trn.backends.gated_delta_rule import nki_adapter as rule
from delta_trn.backends.gated_delta_rule.contract import RESET, Rule, Shapes
from delta_trn.backends.layers import nki_adapter as layers
from delta_trn.backends.layers.contract import Convolution, GatedNorm
from delta_trn.backends.nki_runtime_adapter import require_within_rsqrt, run
from delta_trn.nki_kernels import plan
from delta_trn.nki_kernels.gated_delta_layer.bwd import gated_delta_layer_bwd
from delta_trn.nki_kernels.gated_delta_layer.fwd import gated_delta_layer_fwd


def forward(call: Layer, *, save: bool) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """Returns y, final_state, and what backward's kernel or kernels take, where it follows.

    Raises BackendRefusal for an eps that rsqrt does not take.
    """
    require_within_rsqrt("eps", call.eps, plan.LEAST_RSQRT)
    whole, g = _is_one_kernel(call), _split_decays(call)
    parts: list[tuple[Tensor, ...]] = []
    for rows, how in _cut(call.sizes):
        parts.append(
            run(
                gated_delta_layer_fwd,
                call.x[rows],
                call.weight,
                g[rows],
                call.beta[rows],
                call.gate[rows],
                call.gain,
                *_kernel_options(call, rows),
                call.K,
                call.scale,
                call.eps,
                (2 if whole else 1) if save else 0,
                (1 if whole else how.every) if save else 0,
                how.C,
                how.lanes,
                how.width,
            )
        )
    y, final_state, *saved = _join(parts)
    return y, final_state if call.output_final_state else None, saved


def backward(dy: Tensor, dstate: Tensor | None, call: Layer, saved: list[Tensor]) -> Gradients:
    """Returns the gradients: by one kernel where it takes the call, else by those of the three parts."""
    if not _is_one_kernel(call):
        return _backward_of_parts(dy, dstate, call, saved)
    kept, states = saved[:5], saved[5:]  # q, k, v, o and u
    g, weight_t = _split_decays(call), call.weight.float().t().contiguous()
    parts: list[tuple[Tensor, ...]] = []
    for rows, how in _cut(call.sizes):
        options = _kernel_options(call, rows)
        parts.append(
            run(
                gated_delta_layer_bwd,
                dy[rows],
                call.x[rows],
                weight_t,
                *(tensor[rows] for tensor in kept),
                g[rows],
                call.beta[rows],
                call.gate[rows],
                call.gain,
                *options[:4],
                call.gain if dstate is None else dstate[rows],
                dstate is not None,
                *options[4:],
                *_backward_options(call, states, rows, how),
            )
        )
    dx, dweight, dg, dbeta, dgate, dgain, dstate0, *dprefix = _join(parts)
    return Gradients(
        dx,
        _sum_weight(call, dweight),
        dg.masked_fill(call.g <= RESET, 0.0),  # which is no variable
        dbeta,
        dgate,
        _sum_gain(call, dgain),
        dprefix[0] if dprefix else None,
        dstate0 if call.initial_state is not None else None,
    )


def _sum_weight(call: Layer, dweight: Tensor) -> Tensor:
    """Returns the taps' gradient: the sum of those of all sequences, [N, W, channels]."""
    return dweight.sum(0).t().to(call.weight.dtype)


def _sum_gain(call: Layer, dgain: Tensor) -> Tensor:
    """Returns the gain's gradient: the sum of those of all sequences and heads, [N, HV V]."""
    return dgain.unflatten(1, (-1, call.gain.shape[0])).sum((0, 1)).to(call.gain.dtype)


def _backward_of_parts(dy: Tensor, dstate: Tensor | None, call: Layer, saved: list[Tensor]) -> Gradients:
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
    """Returns the shapes of q, k, v and o, of u for one kernel, and of the kept states."""
    (B, T, channels), (HV, V), dtype = call.x.shape, call.gate.shape[2:], call.x.dtype
    key, value = ((B, T, call.heads, call.K), dtype), ((B, T, HV, V), dtype)
    shapes: Shapes = [key, key, value, value]
    many = plan.stretches(T) - 1
    if _is_one_kernel(call):
        shapes.append(((B, channels, T), torch.float32))
        many = -(-T // plan.CHUNK) - 1
    return [*shapes, ((B, many, call.K, HV, V), torch.float32)] if many > 0 else shapes


def _cut(sizes: Sizes) -> list[tuple[slice, plan.Plan]]:
    """Returns the sequences of each kernel call, and how it cuts its work."""
    B, T, H, HV, K, V, dtype = sizes
    together = plan.count_sequences(T, HV)
    most = plan.LAYER_LANES if dtype == torch.float32 else 8
    calls = []
    for b in range(0, B, together):
        rows = slice(b, min(b + together, B))
        calls.append((rows, plan.choose(rows.stop - b, H, HV, K, V, most)))
    return calls


def _is_one_kernel(call: Layer) -> bool:
    """Returns whether one kernel computes the gradients, and not those of the three parts."""
    sizes = call.sizes
    group = sizes.HV // sizes.H  # of value heads that share a key head: bundles hold it whole
    return not 0.0 < call.scale < rule.TINY and all(group <= how.width for _, how in _cut(sizes))


def _position(call: Layer) -> tuple[Tensor, bool]:
    """Returns the kernels' arguments position and packed; position is any tensor where nothing is packed."""
    position = call.position
    return (call.weight, False) if position is None else (position.to(torch.int32), True)


def _kernel_options(call: Layer, rows: slice) -> tuple[Tensor | bool, ...]:
    """Returns the kernels' position, packed, prefix, continued, initial_state and has_state."""
    return (
        *_position(call),
        call.weight if call.prefix is None else call.prefix[rows],
        call.prefix is not None,
        call.gain if call.initial_state is None else call.initial_state[rows],
        call.initial_state is not None,
    )


def _backward_options(
    call: Layer, states: list[Tensor], rows: slice, how: plan.Plan
) -> tuple[Tensor | float, ...]:
    """Returns the last arguments of both backward kernels: states, scale, eps, C, lanes and width."""
    kept = states[0][rows] if states else call.gain
    return kept, call.scale, call.eps, how.C, how.lanes, how.width


def _join(parts: list[tuple[Tensor, ...]]) -> list[Tensor]:
    """Returns the outputs of all calls, sequence behind sequence."""
    return [x[0] if len(x) == 1 else torch.cat(x) for x in zip(*parts, strict=True)]


def _decays(call: Layer) -> Tensor:
    """Returns g as the rule takes it: not below RESET, and RESET where a packed sequence begins."""
    g = call.g.clamp(min=RESET)
    return g if call.position is None else g.masked_fill((call.position == 0)[None, :, None], RESET)


def _split_decays(call: Layer) -> Tensor:
    """Returns `_decays` in two parts, as kernels take it."""
    return torch.stack(plan.split_decays(_decays(call)), -1)
