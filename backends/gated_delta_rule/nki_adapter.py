"""Cuts a call of a delta rule into NKI kernel calls of bounded length, runs them, and joins
results.

The module serves two backends, `nki` and `nki-simulator`; `backends.nki_runtime_adapter` tells them
apart by the device. A kernel call takes all sequences. Kernels are unrolled, so it takes at most
`plan.LANE_CHUNKS` chunks of a sequence, over all heads; longer sequences are cut in time, and the
state is handed on.

A g below RESET, -inf included, is raised to it: kernels multiply g by triangles of zeros and ones,
and 0 times -inf is NaN. Their sums leave out what they do not need, so tokens beside such a g keep
their digits, and its gradient is 0. XLA fuses the clamp into what makes g. On chip it would stand
before each chunk's first product, and cost 1 to 5% in order by the simulator's model.

Lengths are constants of a kernel. Packed sequences without initial and final states, as in
training, need no lengths: a decay that erases the state at each first token makes them one
sequence. Otherwise they are cut by their lengths, read from cu_seqlens on the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import frexp

import torch
from torch import Tensor
from torch.nn.functional import pad

from delta_trn.backends.checks import BackendRefusal
from delta_trn.backends.gated_delta_rule.contract import (
    L2NORM_EPS,
    RESET,
    Gradients,
    Rule,
    Shapes,
    Step,
)
from delta_trn.backends.nki_runtime_adapter import require_norms_within_rsqrt, run
from delta_trn.nki_kernels import plan
from delta_trn.nki_kernels.gated_delta_rule_bwd import gated_delta_rule_bwd
from delta_trn.nki_kernels.gated_delta_rule_fwd import gated_delta_rule_fwd
from delta_trn.nki_kernels.gated_delta_rule_step import gated_delta_rule_step, has_lines
from delta_trn.nki_kernels.kimi_delta_attention.bwd import kimi_delta_attention_bwd
from delta_trn.nki_kernels.kimi_delta_attention.fwd import kimi_delta_attention_fwd

TINY = 2.0**-32  # a scale below it is applied to gradients, not in the kernel


@dataclass(frozen=True)
class Piece:
    """Names part of a call: some sequences over some tokens. `rows` index q, `sequences` index the
    states.

    `kept` is where this piece's saved states lie. The one before kept.start is the state that it
    starts from; the first piece starts from the call's initial state instead.
    """

    rows: slice
    sequences: slice
    tokens: slice
    kept: slice

    @property
    def handed_on(self) -> slice:
        return slice(self.kept.start - 1, self.kept.start)


def pieces(q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> list[list[Piece]]:
    """Returns the pieces of each group of sequences in the order of time;
    none for empty sequences.
    """
    B, T, HV = q.shape[0], q.shape[1], v.shape[2]
    if cu_seqlens is None:
        groups = [(slice(0, B), slice(0, B), 0, T, 0)]
    else:
        bounds = _bounds(cu_seqlens)
        groups, kept = [], 0
        for n in range(len(bounds) - 1):
            groups.append((slice(0, 1), slice(n, n + 1), bounds[n], bounds[n + 1], kept))
            kept += max(0, plan.stretches(bounds[n + 1] - bounds[n]) - 1)
    length = max(1, plan.LANE_CHUNKS // (HV * plan.EVERY)) * plan.CHUNK * plan.EVERY
    lists = []
    for rows, sequences, start, stop, kept in groups:
        group = []
        for first in range(start, stop, length):
            last = min(first + length, stop)
            low = kept + (first - start) // (plan.CHUNK * plan.EVERY)
            high = low + plan.stretches(last - first) - 1
            group.append(Piece(rows, sequences, slice(first, last), slice(low, high)))
        lists.append(group)
    return lists


def saved_shapes(call: Rule) -> Shapes:
    """Returns the shape of the states before stretches, [B, stretches, K, HV, V];
    nothing for short T.
    """
    (B, T, _, K), (HV, V) = call.q.shape, call.v.shape[2:]
    whole = call.cu_seqlens is None or _is_stateless(call)
    many = plan.stretches(T) - 1 if whole else T // (plan.CHUNK * plan.EVERY)
    return [((B, many, K, HV, V), torch.float32)] if many > 0 else []


def forward(call: Rule, *, save: bool) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """Returns o, final_state and the states that backward starts from.

    Raises BackendRefusal for lengths on the device, and for norms that rsqrt does not
    take.
    """
    call = _prepare(call)
    q, v, g = call.q, call.v, _decays(call)
    kernel = kimi_delta_attention_fwd if call.has_channels else gated_delta_rule_fwd
    (H, K), (HV, V) = q.shape[2:], v.shape[2:]
    outs, finals, states = [], [], []
    for group, rows, sequences in _groups(q, v, call.cu_seqlens):
        S = None if call.initial_state is None else call.initial_state[sequences]
        for piece in group:
            inputs = [x[piece.rows, piece.tokens] for x in (q, call.k, v, g, call.beta)]
            sizes = plan.choose(rows.stop - rows.start, H, HV, K, V, channels=call.has_channels)
            if save and S is not None and piece is not group[0]:
                states.append((piece.rows, piece.handed_on, S.transpose(1, 2).unsqueeze(1)))
            how = (sizes.every if save else 0, sizes.C, sizes.lanes, sizes.width)
            given = S is not None
            o, S, *kept = run(kernel, *inputs, S, call.scale, call.l2norm, given, *how)
            outs.append((piece.rows, piece.tokens, o))
            states += [(piece.rows, piece.kept, x) for x in kept]
        if S is None:
            S = q.new_zeros((sequences.stop - sequences.start, HV, K, V), dtype=torch.float32)
        finals.append(S)
    o = _join(outs, v)
    final_state = torch.cat(finals) if call.output_final_state else None
    shapes = saved_shapes(call) if save else []
    return (
        o,
        final_state,
        [_join(states, q.new_zeros(shape, dtype=dtype)) for shape, dtype in shapes],
    )


def backward(do: Tensor, dstate: Tensor | None, call: Rule, saved: list[Tensor]) -> Gradients:
    """Returns the gradients; the pieces of a sequence run from the last to the first."""
    if 0.0 < abs(call.scale) < TINY:
        # gradients are linear in scale dO. The kernel's scale r_q dO times r_k U, of raw keys,
        # underflows at a scale of 1e-20 and norms of 1e12, where dq is 1e-33. dstate, which may not
        # be divided by a number so small, has a pass of its own
        power = 2.0 ** frexp(call.scale)[1]
        scaled = backward(do, None, replace(call, scale=call.scale / power), saved)
        of_o = Gradients._make(None if x is None else x * power for x in scaled)
        if dstate is None:
            return of_o
        of_state = backward(torch.zeros_like(do), dstate, replace(call, scale=1.0), saved)
        both = zip(of_o, of_state, strict=True)
        return Gradients._make(None if x is None or y is None else x + y for x, y in both)
    call = _prepare(call)
    inputs = q, _, v, g, _ = (call.q, call.k, call.v, call.g, call.beta)
    g = _decays(call)
    kernel = kimi_delta_attention_bwd if call.has_channels else gated_delta_rule_bwd
    (H, K), (HV, V) = q.shape[2:], v.shape[2:]
    parts: list[list[tuple[slice, slice, Tensor]]] = [[] for _ in inputs]
    firsts = []
    for group, rows, sequences in _groups(q, v, call.cu_seqlens):
        dS = None if dstate is None else dstate[sequences]
        for piece in reversed(group):
            tensors = [x[piece.rows, piece.tokens] for x in (q, call.k, v, g, call.beta, do)]
            sizes = plan.choose(rows.stop - rows.start, H, HV, K, V, channels=call.has_channels)
            S = None if call.initial_state is None else call.initial_state[sequences]
            if piece is not group[0]:
                S = saved[0][piece.rows, piece.handed_on].squeeze(1).transpose(1, 2)
            states = (
                saved[0][piece.rows, piece.kept] if piece.kept.start < piece.kept.stop else None
            )
            options = (call.scale, call.l2norm, dS is not None, S is not None)
            how = (sizes.every, sizes.C, sizes.lanes, sizes.width)
            *gradients, dS = run(kernel, *tensors, dS, S, states, *options, *how)
            for part, gradient, x in zip(parts, gradients, inputs, strict=True):
                part.append((piece.rows, piece.tokens, _sum_parts(gradient, x)))
        if dS is None:
            dS = q.new_zeros((sequences.stop - sequences.start, HV, K, V), dtype=torch.float32)
        firsts.append(dS)
    dinitial = None if call.initial_state is None else torch.cat(firsts)
    joined = (_join(part, x) for part, x in zip(parts, inputs, strict=True))
    return Gradients(*joined, initial_state=dinitial)


def step(call: Step) -> tuple[Tensor, Tensor]:
    """Returns o and the new state; a kernel call takes as many sequences as plan.STEP_HEADS allows.

    Raises BackendRefusal like `forward`.
    """
    _require_norms(call)
    K, V = call.q.shape[-1], call.v.shape[-1]
    if not has_lines(K, V):
        # K is prime and cannot be split over partitions: pad it by one zero
        q, k, state = pad(call.q, (0, 1)), pad(call.k, (0, 1)), pad(call.state, (0, 0, 0, 1))
        g = pad(call.g, (0, 1)) if call.has_channels else call.g
        o, state = step(replace(call, q=q, k=k, g=g, state=state))
        return o, state[:, :, :K].contiguous()
    g = call.g.clamp(min=RESET)
    B, HV = call.v.shape[:2]
    together = max(1, plan.STEP_HEADS // HV)
    results = []
    for b in range(0, B, together):
        tensors = [x[b : b + together] for x in (call.q, call.k, call.v, g, call.beta, call.state)]
        results.append(run(gated_delta_rule_step, *tensors, call.scale, call.l2norm))
    if len(results) == 1:
        return results[0]
    outs, states = zip(*results, strict=True)
    return torch.cat(outs), torch.cat(states)


def _groups(
    q: Tensor, v: Tensor, cu_seqlens: Tensor | None
) -> Iterator[tuple[list[Piece], slice, slice]]:
    """Yields each group's pieces, its rows of q and its sequences;
    an empty sequence has no pieces.
    """
    for n, group in enumerate(pieces(q, v, cu_seqlens)):
        if group:
            yield group, group[0].rows, group[0].sequences
        else:
            yield group, slice(0, 1), slice(n, n + 1)


def _prepare(call: Rule) -> Rule:
    """Returns the call as kernels take it: packed sequences without states as one,
    no g below RESET.
    """
    _require_norms(call)
    g = call.g.clamp(min=RESET)
    if call.cu_seqlens is None or not _is_stateless(call):
        return replace(call, g=g)
    return replace(call, g=g.masked_fill(_first_tokens(g, call.cu_seqlens), RESET), cu_seqlens=None)


def _decays(call: Rule) -> Tensor:
    """Returns g as a kernel takes it: in two parts, or per channel,
    where the kernel makes the parts.
    """
    return call.g if call.has_channels else torch.stack(plan.split_decays(call.g), -1)


def _require_norms(call: Rule | Step) -> None:
    if call.l2norm:
        require_norms_within_rsqrt({"q": call.q, "k": call.k}, L2NORM_EPS)


def _is_stateless(call: Rule) -> bool:
    """Returns whether sequences begin with no state and nobody asks for their last one."""
    return call.initial_state is None and not call.output_final_state


def _first_tokens(g: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Returns where in g [1, T, HV, ..] a packed sequence begins,
    on the device that cu_seqlens is on.
    """
    T = g.shape[1]  # empty sequences at the end begin at T, which is cut off again
    first = torch.zeros(T + 1, dtype=torch.bool, device=g.device)
    return first.index_fill(0, cu_seqlens[:-1].long(), True)[:T].view(1, T, *[1] * (g.dim() - 2))


def _bounds(cu_seqlens: Tensor) -> list[int]:
    """Reads the bounds on the host. Raises BackendRefusal where
    that would end XLA's graph in every step.
    """
    if cu_seqlens.device.type == "cpu":
        return cu_seqlens.tolist()
    raise BackendRefusal(
        "nki takes packed sequences (cu_seqlens) only without states: lengths are constants of a "
        "compiled kernel; leave out initial_state and output_final_state, or call it once per "
        "sequence"
    )


def _sum_parts(grad: Tensor, x: Tensor) -> Tensor:
    """Sums the parts in which the kernel leaves a key head's gradient if its group is large."""
    parts = grad.shape[2] // x.shape[2]
    return grad if parts == 1 else grad.unflatten(2, (x.shape[2], parts)).sum(3).to(x.dtype)


def _join(parts: list[tuple[slice, slice, Tensor]], like: Tensor) -> Tensor:
    """Puts parts at their rows and places in a tensor like `like`;
    a part that is all of it is returned.
    """
    if len(parts) == 1 and parts[0][2].shape == like.shape:
        return parts[0][2]
    out = torch.zeros_like(like)
    for rows, places, x in parts:
        out[rows, places] = x
    return out
