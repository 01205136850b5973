"""Runs a layer's mixer in one NKI kernel forward and in another one backward.

A kernel call takes as many sequences as `plan.count_sequences` says; `limits.nki` refuses a sequence that is
too long for one call. Training keeps what backward reads: q, k, v and o in the dtype of x, and in float32 the
convolution's results before SiLU and the state before each chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor

from delta_trn.backends.checks import BackendRefusal
from delta_trn.backends.gated_delta_layer.contract import Gradients, Layer, Sizes
from delta_trn.backends.gated_delta_rule.contract import RESET, Shapes
from delta_trn.backends.gated_delta_rule.nki_adapter import TINY
from delta_trn.backends.nki_runtime_adapter import require_within_rsqrt, run
from delta_trn.nki_kernels import plan
from delta_trn.nki_kernels.gated_delta_layer.bwd import gated_delta_layer_bwd
from delta_trn.nki_kernels.gated_delta_layer.fwd import gated_delta_layer_fwd


def forward(call: Layer, *, save: bool) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """Returns y, final_state, and what backward takes, where it follows.

    Raises BackendRefusal for an eps that rsqrt does not take, and for a scale with which gradients underflow.
    """
    require_within_rsqrt("eps", call.eps, plan.LEAST_RSQRT)
    if 0.0 < abs(call.scale) < TINY:
        raise BackendRefusal(
            f"nki and nki-simulator need |scale| >= {TINY:.3g} for a layer in one kernel; scale is "
            f"{call.scale}: call the three parts"
        )
    g = _split_decays(call)
    parts: list[tuple[Tensor, ...]] = []
    for rows, how in _cut(call.sizes):
        inputs = (call.x[rows], call.weight, g[rows], call.beta[rows], call.gate[rows], call.gain)
        numbers = (call.K, call.scale, call.eps, save, how.C, how.lanes, how.width)
        parts.append(run(gated_delta_layer_fwd, *inputs, *_kernel_options(call, rows), *numbers))
    y, final_state, *saved = _join(parts)
    return y, final_state if call.output_final_state else None, saved


def backward(dy: Tensor, dstate: Tensor | None, call: Layer, saved: list[Tensor]) -> Gradients:
    """Returns the gradients."""
    kept, states = saved[:5], saved[5:]  # q, k, v, o and u
    g, weight_t = _split_decays(call), call.weight.float().t().contiguous()
    parts: list[tuple[Tensor, ...]] = []
    for rows, how in _cut(call.sizes):
        options = _kernel_options(call, rows)
        inputs = (dy[rows], call.x[rows], weight_t, *(tensor[rows] for tensor in kept), g[rows],
                  call.beta[rows], call.gate[rows], call.gain)  # fmt: skip
        dlast = call.gain if dstate is None else dstate[rows]
        before = states[0][rows] if states else call.gain
        numbers = (call.scale, call.eps, how.C, how.lanes, how.width)
        parts.append(
            run(
                gated_delta_layer_bwd, *inputs, *options[:4], dlast, dstate is not None, *options[4:], before,
                *numbers,
            )
        )  # fmt: skip
    dx, dweight, dg, dbeta, dgate, dgain, dstate0, _, *dprefix = _join(parts)
    return Gradients(
        dx,
        dweight.sum(0).t().to(call.weight.dtype),  # of all sequences, [N, W, channels]
        dg.masked_fill(call.g <= RESET, 0.0),  # which is no variable
        dbeta,
        dgate,
        # of all sequences and heads, [N, HV V]
        dgain.unflatten(1, (-1, call.gain.shape[0])).sum((0, 1)).to(call.gain.dtype),
        dprefix[0] if dprefix else None,
        dstate0 if call.initial_state is not None else None,
    )


def saved_shapes(call: Layer) -> Shapes:
    """Returns the shapes of q, k, v, o and u, and of the kept states."""
    (B, T, channels), (HV, V), dtype = call.x.shape, call.gate.shape[2:], call.x.dtype
    key, value = ((B, T, call.heads, call.K), dtype), ((B, T, HV, V), dtype)
    shapes: Shapes = [key, key, value, value, ((B, channels, T), torch.float32)]
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


def _kernel_options(call: Layer, rows: slice) -> tuple[Tensor | bool, ...]:
    """Returns the kernels' position, packed, prefix, continued, initial_state and has_state.

    Where a call has none of these tensors, any other one stands for it.
    """
    return (
        call.weight if call.position is None else call.position.to(torch.int32),
        call.position is not None,
        call.weight if call.prefix is None else call.prefix[rows],
        call.prefix is not None,
        call.gain if call.initial_state is None else call.initial_state[rows],
        call.initial_state is not None,
    )


def _join(parts: list[tuple[Tensor, ...]]) -> list[Tensor]:
    """Returns the outputs of all calls, sequence behind sequence."""
    return [x[0] if len(x) == 1 else torch.cat(x) for x in zip(*parts, strict=True)]


def _split_decays(call: Layer) -> Tensor:
    """Returns g in two parts: not below RESET, and RESET where a packed sequence begins."""
    g = call.g.clamp(min=RESET)
    if call.position is not None:
        g = g.masked_fill((call.position == 0)[None, :, None], RESET)
    return torch.stack(plan.split_decays(g), -1)
