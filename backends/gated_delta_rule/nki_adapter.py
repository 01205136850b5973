"""NKI's side of the operations: cuts a call into kernel calls of bounded length, runs them, joins results.

One module for two backends. On XLA tensors (`nki`) a kernel call is recorded in the lazy graph and compiled
with it, on TorchNeuron's it is an operator's (`backends.neuron_adapter`); on CPU tensors (`nki-simulator`) it
runs under `nki.simulate`: our simulator, or AWS's where its nki package is installed.

Kernels are unrolled, so a call is at most LANE_CHUNKS chunks of one head each; longer ones are cut in
sequences first, then in time, where the state is handed on.

Lengths are constants of a kernel. Packed sequences that nobody gives a state to or asks one of, as in
training, need none: a decay that erases the state at each first token makes them one sequence, whatever their
lengths. Otherwise they are cut by their lengths, read from cu_seqlens on the host.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from delta_trn.backends import neuron_adapter
from delta_trn.backends.registry import BackendRefusal
from delta_trn.nki_kernels.delta_residual import LEAST_EPS, delta_residual_bwd, delta_residual_fwd
from delta_trn.nki_kernels.gated_delta_rule_bwd import gated_delta_rule_bwd
from delta_trn.nki_kernels.gated_delta_rule_fwd import gated_delta_rule_fwd
from delta_trn.nki_kernels.gated_delta_rule_step import gated_delta_rule_step
from delta_trn.nki_kernels.language import nki
from delta_trn.nki_kernels.tiles import FAR_BELOW

if TYPE_CHECKING:
    from delta_trn.backends.registry import Options

TARGET = "NEURON_PLATFORM_TARGET_OVERRIDE"
LANE_CHUNKS = 64  # 8,000 instructions backward, 4,000 forward
STEP_HEADS = 256  # a decode step of so many is 1,500 to 2,600 instructions
TOKENS = 8192  # of the residual update: with four columns 1,200 instructions forward, 4,400 backward
CHUNK = 128
EVERY = 2  # chunks between kept states: 1.2 times the least bytes a step instead of 1.5, in bfloat16
WIDTH = 4  # a C x C matrix of each of 4 lanes is one bank of PSUM
LANES = ((64, 128, 8), (128, 256, 6), (256, 512, 2))  # K, V up to these: so many leave a tenth of SBUF free


@dataclass(frozen=True)
class Plan:
    """How the kernels cut their work; see `gated_delta_rule_fwd`."""

    every: int
    C: int
    lanes: int
    width: int


def plan(N: int, H: int, HV: int, K: int, V: int) -> Plan:
    """Lanes that fit SBUF, in two bundles where there are two; the simulator's peaks are in the tests."""
    lanes = next(n for most_k, most_v, n in LANES if most_k >= K and most_v >= V)
    width = max(min(max(2, lanes // 2), -(-N * HV // 2)), min(HV // H, lanes, WIDTH))
    return Plan(EVERY, CHUNK, lanes, width)


@dataclass(frozen=True)
class Piece:
    """Part of a call: some sequences over some tokens. rows index q, sequences the states.

    kept is where the states lie that this piece keeps. The one before kept.start is the state that it found,
    if that was handed on to it; the first piece finds the call's initial state.
    """

    rows: slice
    sequences: slice
    tokens: slice
    kept: slice

    @property
    def handed_on(self) -> slice:
        return slice(self.kept.start - 1, self.kept.start)


def stretches(T: int) -> int:
    """Backward solves a sequence of T tokens in so many stretches; each but the first needs a kept state."""
    return -(-T // (CHUNK * EVERY))


def pieces(q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> list[list[Piece]]:
    """Per group of sequences its pieces in the order of time; none for empty sequences."""
    B, T, HV = q.shape[0], q.shape[1], v.shape[2]
    if cu_seqlens is None:
        together = max(1, min(B, LANE_CHUNKS // max(1, HV * stretches(T) * EVERY)))
        groups = [(slice(b, min(b + together, B)),) * 2 + (0, T, 0) for b in range(0, B, together)]
    else:
        bounds = _bounds(cu_seqlens)
        groups, kept = [], 0
        for n in range(len(bounds) - 1):
            groups.append((slice(0, 1), slice(n, n + 1), bounds[n], bounds[n + 1], kept))
            kept += max(0, stretches(bounds[n + 1] - bounds[n]) - 1)
    length = max(1, LANE_CHUNKS // (HV * EVERY)) * CHUNK * EVERY
    found = []
    for rows, sequences, start, stop, kept in groups:
        cut = []
        for at in range(start, stop, length):
            end, first = min(at + length, stop), kept + (at - start) // (CHUNK * EVERY)
            many = stretches(end - at) - 1
            cut.append(Piece(rows, sequences, slice(at, end), slice(first, first + many)))
        found.append(cut)
    return found


def saved_shapes(
    q: Tensor, v: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None, options: Options
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """States before stretches [B, how many there may be, K, HV, V]; nothing for short sequences."""
    (B, T, _, K), (HV, V) = q.shape, v.shape[2:]
    whole = cu_seqlens is None or _stateless(initial_state, options)
    many = stretches(T) - 1 if whole else T // (CHUNK * EVERY)
    return [((B, many, K, HV, V), torch.float32)] if many > 0 else []


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    options: Options,
    *,
    save: bool,
) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """o, final_state and the states that backward starts from."""
    if cu_seqlens is not None and _stateless(initial_state, options):
        g, cu_seqlens = g.masked_fill(_first_tokens(g, cu_seqlens), FAR_BELOW), None
    (H, K), (HV, V) = q.shape[2:], v.shape[2:]
    outs, finals, states = [], [], []
    for group, rows, sequences in _groups(q, v, cu_seqlens):
        S = None if initial_state is None else initial_state[sequences]
        for piece in group:
            cut = [x[piece.rows, piece.tokens] for x in (q, k, v, g, beta)]
            how = plan(rows.stop - rows.start, H, HV, K, V)
            if save and S is not None and piece is not group[0]:
                states.append((piece.rows, piece.handed_on, S.transpose(1, 2).unsqueeze(1)))
            o, S, *kept = run(
                gated_delta_rule_fwd,
                *cut,
                S,
                options.scale,
                options.use_qk_l2norm_in_kernel,
                S is not None,
                how.every if save else 0,
                how.C,
                how.lanes,
                how.width,
            )
            outs.append((piece.rows, piece.tokens, o))
            states += [(piece.rows, piece.kept, x) for x in kept]
        if S is None:
            S = q.new_zeros((sequences.stop - sequences.start, HV, K, V), dtype=torch.float32)
        finals.append(S)
    o = _joined(outs, v)
    final_state = torch.cat(finals) if options.output_final_state else None
    promised = saved_shapes(q, v, initial_state, cu_seqlens, options) if save else []
    return o, final_state, [_joined(states, q.new_zeros(shape, dtype=dtype)) for shape, dtype in promised]


def backward(
    do: Tensor,
    dstate: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    saved: list[Tensor],
    options: Options,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, v, g, beta and initial_state (None without one), each in its input's dtype."""
    if cu_seqlens is not None and _stateless(initial_state, options):
        first = _first_tokens(g, cu_seqlens)
        g = g.masked_fill(first, FAR_BELOW)
        dq, dk, dv, dg, dbeta, _ = backward(do, None, q, k, v, g, beta, None, None, saved, options)
        return dq, dk, dv, dg.masked_fill(first, 0.0), dbeta, None
    (H, K), (HV, V) = q.shape[2:], v.shape[2:]
    inputs = (q, k, v, g, beta)
    grads: list[list[tuple[slice, slice, Tensor]]] = [[] for _ in inputs]
    firsts = []
    for group, rows, sequences in _groups(q, v, cu_seqlens):
        dS = None if dstate is None else dstate[sequences]
        for piece in reversed(group):
            cut = [x[piece.rows, piece.tokens] for x in (*inputs, do)]
            how = plan(rows.stop - rows.start, H, HV, K, V)
            S = None if initial_state is None else initial_state[sequences]
            if piece is not group[0]:
                S = saved[0][piece.rows, piece.handed_on].squeeze(1).transpose(1, 2)
            *found, dS = run(
                gated_delta_rule_bwd,
                *cut,
                dS,
                S,
                saved[0][piece.rows, piece.kept] if piece.kept.start < piece.kept.stop else None,
                options.scale,
                options.use_qk_l2norm_in_kernel,
                dS is not None,
                S is not None,
                how.every,
                how.C,
                how.lanes,
                how.width,
            )
            for i, x in enumerate(inputs):
                grads[i].append((piece.rows, piece.tokens, _summed(found[i], x)))
        if dS is None:
            dS = q.new_zeros((sequences.stop - sequences.start, HV, K, V), dtype=torch.float32)
        firsts.append(dS)
    dq, dk, dv, dg, dbeta = (_joined(found, x) for found, x in zip(grads, inputs, strict=True))
    return dq, dk, dv, dg, dbeta, None if initial_state is None else torch.cat(firsts)


def step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, options: Options
) -> tuple[Tensor, Tensor]:
    """One token: o [B, HV, V] and the new state; as many sequences a kernel call as STEP_HEADS allows."""
    B, HV = v.shape[:2]
    together = max(1, STEP_HEADS // HV)
    found = []
    for b in range(0, B, together):
        cut = [x[b : b + together] for x in (q, k, v, g, beta, state)]
        found.append(run(gated_delta_rule_step, *cut, options.scale, options.use_qk_l2norm_in_kernel))
    if len(found) == 1:
        return found[0]
    outs, states = zip(*found, strict=True)
    return torch.cat(outs), torch.cat(states)


def delta_residual_forward(x: Tensor, k: Tensor, v: Tensor, beta: Tensor, k_eps: float | None) -> Tensor:
    """X' = X + beta k (v^T - k^T X): x [M, D, DV], k [M, D], v [M, DV], beta [M]; k_eps None: k as it is.

    Raises BackendRefusal for a k_eps whose square the Scalar engine's rsqrt does not take.
    """
    if k_eps is not None:
        require_within_rsqrt("k_eps", k_eps, LEAST_EPS)
    pieces = zip(*(y.split(TOKENS) for y in (x, k, v, beta)), strict=True)
    return torch.cat([run(delta_residual_fwd, *piece, k_eps) for piece in pieces if piece[0].numel()] or [x])


def delta_residual_backward(
    dout: Tensor, x: Tensor, k: Tensor, v: Tensor, beta: Tensor, k_eps: float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, k, v, beta, each in its input's dtype."""
    pieces = zip(*(y.split(TOKENS) for y in (dout, x, k, v, beta)), strict=True)
    found = [run(delta_residual_bwd, *piece, k_eps) for piece in pieces if piece[0].numel()]
    dx, dk, dv, dbeta = (torch.cat(parts) for parts in zip(*(found or [(x, k, v, beta)]), strict=True))
    return dx, dk, dv, dbeta


def _groups(q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> Iterator[tuple[list[Piece], slice, slice]]:
    """Each group's pieces, its rows of q and its sequences; an empty sequence is a group without pieces."""
    for n, group in enumerate(pieces(q, v, cu_seqlens)):
        if group:
            yield group, group[0].rows, group[0].sequences
        else:
            yield group, slice(0, 1), slice(n, n + 1)


def _stateless(initial_state: Tensor | None, options: Options) -> bool:
    """Whether packed sequences begin with nothing and leave nothing."""
    return initial_state is None and not options.output_final_state


def _first_tokens(g: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Where in g [1, T, HV] a packed sequence begins, on the device that cu_seqlens is on."""
    T = g.shape[1]  # where empty sequences begin that end the row
    first = torch.zeros(T + 1, dtype=torch.bool, device=g.device)
    return first.index_fill(0, cu_seqlens[:-1].long(), True)[:T].view(1, T, 1)


def _bounds(cu_seqlens: Tensor) -> list[int]:
    """The lengths, on the host. Raises BackendRefusal where that would end XLA's graph in every step."""
    if cu_seqlens.device.type == "cpu":
        return cu_seqlens.tolist()
    raise BackendRefusal(
        "nki takes packed sequences (cu_seqlens) only without states: lengths are constants of a compiled "
        "kernel; leave out initial_state and output_final_state, or call it once per sequence"
    )


def _summed(grad: Tensor, x: Tensor) -> Tensor:
    """The kernel leaves a key head's gradient in parts where its group of value heads is large."""
    parts = grad.shape[2] // x.shape[2]
    return grad if parts == 1 else grad.unflatten(2, (x.shape[2], parts)).sum(3).to(x.dtype)


def _joined(found: list[tuple[slice, slice, Tensor]], like: Tensor) -> Tensor:
    """Parts at their rows and places in a tensor like `like`; one that is everything, as it is."""
    if len(found) == 1 and found[0][2].shape == like.shape:
        return found[0][2]
    out = torch.zeros_like(like)
    for rows, places, x in found:
        out[rows, places] = x
    return out


def require_within_rsqrt(name: str, value: float, least: float) -> None:
    """BackendRefusal for an epsilon that the kernels' rsqrt does not take: they would fail an assertion."""
    if value < least:
        raise BackendRefusal(
            f"nki and nki-simulator need {name} >= {least:.3g}, from where on the Scalar engine's rsqrt is "
            f'right; {name} is {value}: take a larger one, or backend="chunked"'
        )


def run(kernel: Any, *args: Any) -> Any:
    """A kernel call: recorded in XLA's graph, an operator of TorchNeuron, or simulated on CPU tensors."""
    if args[0].device.type != "cpu":
        dense = tuple(x.contiguous() if isinstance(x, Tensor) else x for x in args)
        return neuron_adapter.launch(kernel, dense) if args[0].device.type == "neuron" else kernel(*dense)
    outputs = simulate(kernel, *(_array(x) if isinstance(x, Tensor) else x for x in args))
    return tuple(map(_tensor, outputs)) if isinstance(outputs, tuple) else _tensor(outputs)


def simulate(kernel: Any, *args: Any) -> Any:
    """The kernel's outputs on NumPy arrays, for Trn1 unless Neuron's own variable names a target: where that
    is not set, AWS's simulator takes the rules of Trn3.
    """
    named = os.environ.get(TARGET)
    os.environ[TARGET] = named or "trn1"
    try:
        return nki.simulate(kernel)(*args)
    finally:
        if named is None:
            del os.environ[TARGET]


def _array(x: Tensor) -> np.ndarray:
    x = x.detach().contiguous()
    if x.dtype == torch.bfloat16:
        return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return x.numpy()


def _tensor(x: np.ndarray) -> Tensor:
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)
