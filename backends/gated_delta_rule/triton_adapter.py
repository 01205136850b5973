"""Triton's side of the operations: allocates, launches `triton_kernels`; `triton_time_adapter` cuts
time.

Runs on CUDA tensors; on CPU tensors under TRITON_INTERPRET=1. Nothing here waits for the device:
packed lengths become tables by tensor operations, so every call may be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from delta_trn.backends.gated_delta_rule.contract import Gradients, Rule, Shapes, Step
from delta_trn.backends.gated_delta_rule.triton_time_adapter import (
    chunk_counts,
    chunk_tables,
    segment_count,
    segment_tables,
    spread_over_chunks,
)
from delta_trn.backends.operator import FIXED_SHAPES
from delta_trn.backends.rows import as_rows, empty_like_parts
from delta_trn.triton_kernels import (
    gated_delta_rule_bwd,
    gated_delta_rule_fwd,
    gated_delta_rule_refine,
    gated_delta_rule_reverse,
    gated_delta_rule_step,
    segments,
)
from delta_trn.triton_kernels.chunks import Chunks
from delta_trn.triton_kernels.hopper import gradients as hopper_gradients
from delta_trn.triton_kernels.launch import Card, config
from delta_trn.triton_kernels.launch import Config as Config
from delta_trn.triton_kernels.launch import Tile as Tile
from delta_trn.triton_kernels.launch import adjust as adjust

MAKES_GATES = True  # of a layer's projections, in the kernels
TAKES_POOL = True
# How many bytes of S and U, the states at chunk starts and what chunks write, are kept by all calls
# that wait for their backward: by a model's first layers, as many as fit. One without room is
# scanned once more in backward, a fifth of its time. None: an eighth of the device's memory, 17 GB
# of an H200; the paper's model of width 2048 has 0.94 GB per layer at 30 x 1024 tokens.
KEPT_BYTES: int | None = None
FIXED_CALLS = (
    16  # in a compiled graph, which fixes what a call keeps before it runs, so many share them
)
# U of each call that keeps its states -> bytes
kept_now: WeakIdKeyDictionary = WeakIdKeyDictionary()
kept_lock = Lock()  # pipelines and autograd call from several threads


def forward(call: Rule, *, save: bool) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """Returns o, final_state and what `backward` reads: T, P, rows; states, A; S, U; q_scaled,
    k_scaled.

    Empty are states and A, of segments, where sequences stay whole; S and U where they are not
    kept; q_scaled and k_scaled except where float16 is normalized.
    """
    q, k, v, g, beta = as_rows(call.q, call.k, call.v, call.g, call.beta)
    A_log, dt_bias = contiguous(call.A_log, call.dt_bias)
    HV, row = v.shape[2], launches(call)
    chunks = chunk_tables(q, call.cu_seqlens, row.C)
    o = v.new_empty(v.shape)
    final_state = new_final_state(call)
    alone = _is_one_token(call)
    if alone:
        gated_delta_rule_step.step(
            q[:, 0], k[:, 0], v[:, 0], g[:, 0], beta[:, 0], A_log, dt_bias,
            *contiguous(call.initial_state), o[:, 0], final_state, scale=call.scale,
            l2norm=call.l2norm, beta_max=call.beta_max,
        )  # fmt: skip
        if not save:
            return o, final_state, []
    T, P, rows = (
        q.new_empty(shape, dtype=dtype) for shape, dtype in prepared_shapes(chunks, HV, q.dtype)
    )
    q_scaled, k_scaled = (q.new_empty(q.shape) if _is_scaled(call) else None for _ in range(2))
    unit = _unit(call)
    gated_delta_rule_fwd.prepare(
        q,
        k,
        g,
        beta,
        A_log,
        dt_bias,
        q_scaled=q_scaled,
        k_scaled=k_scaled,
        T=T,
        P=P,
        rows=rows,
        scale=call.scale / unit,
        l2norm=call.l2norm,
        beta_max=call.beta_max,
        chunks=chunks,
        config=row,
    )
    if alone:
        return o, final_state, list_saved(q, T, P, rows, None, None, None, None, q_scaled, k_scaled)
    if q_scaled is not None and k_scaled is not None:
        q, k = q_scaled, k_scaled
    kept = scan_forward(
        call,
        q,
        k,
        v,
        (T, P, rows),
        o=o,
        final_state=final_state,
        save=save,
        chunks=chunks,
        row=row,
        scale=call.scale,
        unit=unit,
        units=_units_of_states(call, chunks),
    )
    return o, final_state, list_saved(q, T, P, rows, *kept, q_scaled, k_scaled) if save else []


def scan_forward(
    call: Rule, q: Tensor, k: Tensor, v: Tensor, prepared: Sequence[Tensor], *, o: Tensor,
    final_state: Tensor | None, save: bool, chunks: Chunks, row: Config, scale: float, unit: float,
    units: Tensor | None = None, kl: Tensor | None = None, last: Tensor | None = None,
) -> list[Tensor | None]:  # fmt: skip
    """Fills o and final_state from `prepared`, which is T, P and rows; in segments where these pay.

    Returns states and A of segments, S and U: what of these there is, and S and U only with `save`.
    Where these are not kept they have no memory: under checkpointing a call that is repeated must
    save tensors of the same shapes, and may find other room.
    scale, unit and units as in gated_delta_rule_fwd; kl and last are of a decay per channel.
    """
    HV, K, V = v.shape[2], q.shape[3], v.shape[3]
    how: dict[str, Any] = {"scale": scale, "unit": unit, "kl": kl, "last": last, "config": row}
    states = A = S = U = None
    kept: tuple[Tensor | None, ...] = (None, None)
    scanned, start, final = chunks, contiguous(call.initial_state)[0], final_state
    split = None if _is_one_token(call) else segment_tables(chunks, HV, K, V, row)
    if split is not None:
        shapes = _segment_shapes(split.chunks.sequences, HV, K, V)
        states, A = (q.new_empty(shape, dtype=dtype) for shape, dtype in shapes)
        ends = torch.empty_like(states)  # of each segment, if it started from zeros
        gated_delta_rule_fwd.scan(
            q, k, v, *prepared, None, o=None, final_state=ends, transition=A, S=None, U=None,
            chunks=split.chunks, **how,
        )  # fmt: skip
        segments.chain(A, ends, start, states=states, final=final, segments=split, reverse=False)
        scanned, start, final = split.chunks, states, None
    if save:
        fixed, shapes = FIXED_SHAPES.get(), state_shapes(chunks, HV, K, V, q.dtype)
        if _keeps_states(call, chunks, fixed=fixed):
            kept = S, U = tuple(q.new_empty(shape, dtype=dtype) for shape, dtype in shapes)
            with kept_lock:
                kept_now[U] = S.nbytes + U.nbytes
        elif not fixed:
            kept = tuple(q.new_empty(1, dtype=dtype).expand(shape) for shape, dtype in shapes)
    gated_delta_rule_fwd.scan(
        q,
        k,
        v,
        *prepared,
        start,
        o=o,
        final_state=final,
        S=S,
        U=U,
        units=units,
        chunks=scanned,
        **how,
    )
    return [states, A, *kept]


def backward(do: Tensor, dstate: Tensor | None, call: Rule, saved: list[Tensor]) -> Gradients:
    """Returns the gradients; those of A_log and dt_bias only where the kernels make the gates."""
    q, k, v, g, beta = as_rows(call.q, call.k, call.v, call.g, call.beta)
    A_log, dt_bias, dstate, do = contiguous(call.A_log, call.dt_bias, dstate, do.to(call.q.dtype))
    (dq, dk, dv), (dg, dbeta) = empty_like_parts((q, k, v)), empty_like_parts((g, beta))
    H, K = q.shape[2:]
    HV, V = v.shape[2:]
    row = launches(call)
    chunks = chunk_tables(q, call.cu_seqlens, row.C)
    T, P, rows, *kept, q_scaled, k_scaled = saved
    if _is_scaled(call):
        q, k = q_scaled, k_scaled
    units = _units_of_states(call, chunks, do, dstate)
    writes = None
    if q.dtype == torch.float32:
        writes = q.new_empty((chunks.count, HV, -(-V // row.reverse.columns), chunks.size))
    S, U, dY, dS, carry, dinitial = scan_backward(
        call, q, k, v, do, dstate, (T, P, rows), kept, writes=writes, chunks=chunks, row=row,
        scale=call.scale, unit=_unit(call), units=units,
    )  # fmt: skip
    if q.dtype.itemsize == 2 and not _is_one_token(call):
        gated_delta_rule_refine.refine(
            k, T, rows, dY=dY, scaled=_is_scaled(call), chunks=chunks, config=row
        )
    dgates = None
    if call.A_log is not None:
        dgates = q.new_empty((chunks.count, HV, 2), dtype=torch.float32)
    given = q, k, v, do, g, beta, A_log, dt_bias, rows, S, U, dY, dS
    how: dict[str, Any] = {"scale": call.scale, "l2norm": call.l2norm, "beta_max": call.beta_max}
    how |= {"dv": dv, "dg": dg, "dbeta": dbeta, "dgates": dgates, "chunks": chunks, "config": row}
    if q.dtype == torch.bfloat16 and hopper_gradients.takes(q, k, v, do, units, row):
        hopper_gradients.gradients(*given, carry, dq=dq, dk=dk, **how)
    else:
        # value heads that share a key are summed in float32 and in a fixed order, unlike atomics
        of_heads = [
            x if HV == H else q.new_empty((*q.shape[:2], HV, K), dtype=torch.float32)
            for x in (dq, dk)
        ]
        gated_delta_rule_bwd.gradients(
            *given,
            writes,
            carry,
            dq=of_heads[0],
            dk=of_heads[1],
            units=units,
            scaled=_is_scaled(call),
            **how,
        )
        for x, parts in zip((dq, dk), of_heads, strict=True):
            if parts is not x:
                gated_delta_rule_bwd.sum_heads(None, parts, dx=x, config=row)
    dA_log, ddt_bias = (None, None) if dgates is None else sum_gates(call, *dgates.unbind(2))
    return Gradients(dq, dk, dv, dg, dbeta, dA_log, ddt_bias, dinitial)


def scan_backward(
    call: Rule,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    dstate: Tensor | None,
    prepared: Sequence[Tensor],
    kept: Sequence[Tensor],
    *,
    writes: Tensor | None,
    chunks: Chunks,
    row: Config,
    scale: float,
    unit: float,
    units: Tensor | None = None,
    kl: Tensor | None = None,
    last: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Returns S, U, dY, dS, what initial states add to dg, and their gradient; fills `writes`.

    kept is what `scan_forward` returned, an empty tensor for None; the others are as there.
    """
    HV, K, V = v.shape[2], q.shape[3], v.shape[3]
    how: dict[str, Any] = {"scale": scale, "unit": unit, "kl": kl, "last": last, "config": row}
    states, A, S, U = kept
    initial_state = contiguous(call.initial_state)[0]
    dinitial = dfirst = None if initial_state is None else torch.empty_like(initial_state)
    scanned = chunks
    split = None if _is_one_token(call) else segment_tables(chunks, HV, K, V, row)
    cut = 0 if split is None else split.chunks.sequences
    if states.shape[0] != cut:
        raise RuntimeError(
            f"forward cut its sequences into {states.shape[0]} segments and backward expects "
            f"{cut}: leave triton_time_adapter.SEGMENT as it is between the two"
        )
    if split is not None:
        dlast, dstates = torch.empty_like(states), torch.empty_like(states)
        gated_delta_rule_reverse.reverse_scan(
            q, k, do, *prepared, None, None, None, None, dY=None, dS=None, writes=None, carry=None,
            dinitial_state=dlast, chunks=split.chunks, **how,
        )  # fmt: skip
        segments.chain(
            A, dlast, dstate, states=dstates, final=dinitial, segments=split, reverse=True
        )
        # dlast has done its work: the scan keeps there what rounding takes of the first states'
        # gradients
        scanned, initial_state, dstate, dfirst = split.chunks, states, dstates, dlast
    # not kept: empty, or one number that stands for all
    if U.untyped_storage().nbytes() < chunks.size:
        S, U = (
            q.new_empty(shape, dtype=dtype)
            for shape, dtype in state_shapes(chunks, HV, K, V, q.dtype)
        )
        gated_delta_rule_fwd.scan(
            q, k, v, *prepared, initial_state, o=None, final_state=None, S=S, U=U, units=units,
            chunks=scanned, **how,
        )  # fmt: skip
    dY, dS = torch.empty_like(U), torch.empty_like(S)
    carry = None
    if initial_state is not None:
        channels = () if last is None else (K,)
        shape = (chunks.count, HV, -(-V // row.reverse.columns), *channels)
        carry = q.new_zeros(shape, dtype=torch.float32)
    gated_delta_rule_reverse.reverse_scan(
        q, k, do, *prepared, S, U, initial_state, dstate, dY=dY, dS=dS, writes=writes, carry=carry,
        dinitial_state=dfirst, units=units, chunks=scanned, **how,
    )  # fmt: skip
    return S, U, dY, dS, carry, dinitial


def step(call: Step) -> tuple[Tensor, Tensor | None]:
    """Returns o [B, HV, V] and the new state [B, HV, K, V]; with a pool o [B T, HV, V] and None."""
    q, k, v, g, beta = as_rows(call.q, call.k, call.v, call.g, call.beta, leading=1)
    A_log, dt_bias, indices, accepted = contiguous(
        call.A_log, call.dt_bias, call.indices, call.accepted
    )
    state = call.state if indices is not None else call.state.contiguous()
    o, new = v.new_empty(v.shape), state if indices is not None else torch.empty_like(state)
    gated_delta_rule_step.step(
        q, k, v, g, beta, A_log, dt_bias, state, o, new, scale=call.scale, l2norm=call.l2norm,
        beta_max=call.beta_max, lower_bound=call.lower_bound, indices=indices, accepted=accepted,
    )  # fmt: skip
    return o, new if indices is None else None


def saved_shapes(call: Rule) -> Shapes:
    """Returns shapes and dtypes of what `forward` saves in a compiled graph, from shapes alone."""
    q, HV, row = call.q, call.v.shape[2], launches(call)
    chunks = chunk_counts(q, call.cu_seqlens, row.C)
    scaled = [(tuple(q.shape) if _is_scaled(call) else (0,), q.dtype)] * 2
    return [*prepared_shapes(chunks, HV, q.dtype), *kept_shapes(call, chunks, row), *scaled]


def kept_shapes(call: Rule, chunks: Chunks, row: Config) -> Shapes:
    """Returns shapes and dtypes of what `scan_forward` returns."""
    (HV, V), K, dtype = call.v.shape[2:], call.q.shape[3], call.q.dtype
    count = 0 if _is_one_token(call) else segment_count(chunks, HV, K, V, row)
    split = _segment_shapes(count, HV, K, V) if count else [((0,), dtype)] * 2
    kept = _keeps_states(call, chunks, fixed=True)
    return [*split, *(state_shapes(chunks, HV, K, V, dtype) if kept else [((0,), dtype)] * 2)]


def launches(call: Rule, rule: str = "") -> Config:
    """Returns the rows of the launch table for a call; `rule` as in `launch.config`."""
    K, (HV, V) = call.q.shape[3], call.v.shape[2:]
    heads, card = call.sequences * HV, card_of(call.q.device)
    return config(K, V, itemsize=call.q.element_size(), heads=heads, card=card, rule=rule)


def new_final_state(call: Rule) -> Tensor | None:
    """Returns a tensor for the final state; None where the call does not ask for it."""
    shape = (call.sequences, call.v.shape[2], call.q.shape[3], call.v.shape[3])
    return call.q.new_empty(shape, dtype=torch.float32) if call.output_final_state else None


def contiguous(*tensors: Tensor | None) -> list[Any]:
    """Returns the tensors as the kernels read them, one after the other;
    an absent one stays None.
    """
    return [None if x is None else x.contiguous() for x in tensors]


def list_saved(like: Tensor, *tensors: Tensor | None) -> list[Tensor]:
    """Returns the tensors, with an empty one in the place of each that is absent."""
    return [like.new_empty(0) if x is None else x for x in tensors]


def sum_gates(call: Rule, *parts: Tensor) -> list[Tensor | None]:
    """Returns the gradients of A_log and dt_bias, None where one is absent,
    of those in each chunk.
    """
    # two sums, since gradients may not share memory
    pairs = zip((call.A_log, call.dt_bias), parts, strict=True)
    return [None if x is None else part.sum(0).to(x.dtype) for x, part in pairs]


def _is_one_token(call: Rule) -> bool:
    """Returns whether the call is one of `step`, which then computes o and final_state: the same
    numbers whether or not gradients are wanted.
    """
    return call.cu_seqlens is None and call.q.shape[1] == 1


def _is_scaled(call: Rule) -> bool:
    """Returns whether the kernels read q and k scaled by powers of two:
    see gated_delta_rule_fwd.
    """
    return call.l2norm and call.q.dtype == torch.float16


def _unit(call: Rule) -> float:
    """Returns the power of two in which the kernels store P: see gated_delta_rule_fwd."""
    if call.q.dtype != torch.float16:
        return 1.0
    return gated_delta_rule_fwd.unit_of(call.scale, call.q.shape[3])


def _units_of_states(
    call: Rule, chunks: Chunks, do: Tensor | None = None, dstate: Tensor | None = None
) -> Tensor | None:
    """Returns the powers of two that bring states and their gradients, both float32, into float16's
    range.

    [chunks, HV, 2]: of S and U, and of dY and dS; see gated_delta_rule_fwd. None: all stay as they are.
    Nothing waits for the device, and a sequence's units depend on nothing but itself.
    """
    state, (T, HV) = call.initial_state, call.v.shape[1:3]
    if call.q.dtype != torch.float16 or (state is None and dstate is None):
        return None
    exponents = torch.zeros((2, chunks.sequences, HV), dtype=torch.int32, device=call.q.device)
    if state is not None:  # in use, states grow a little
        exponents[0] = torch.frexp(_largest(state, (2, 3))).exponent.sub_(12).clamp_(min=0)
    if do is not None and dstate is not None:
        if call.cu_seqlens is None:
            largest = _largest(do, (1, 3))
        else:
            owner = torch.searchsorted(
                call.cu_seqlens[1:], torch.arange(T, device=do.device), right=True
            )
            largest = torch.zeros_like(exponents[0], dtype=torch.float32).scatter_reduce_(
                0, owner[:, None].expand(T, HV), _largest(do, (0, 3)), "amax"
            )
        largest = torch.maximum(_unit(call) * largest, _largest(dstate, (2, 3)))
        exponent = torch.frexp(largest).exponent
        exponents[1] = exponent.where(exponent < -6, exponent.sub(12).clamp(min=0)).clamp_(min=-126)
    units = ((exponents + 127) << 23).view(torch.float32).permute(1, 2, 0)
    return spread_over_chunks(units, chunks).contiguous()


def _largest(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Returns the largest absolute value in x, in one pass over it."""
    return torch.linalg.vector_norm(x, float("inf"), dim=dims, dtype=torch.float32)


def prepared_shapes(chunks: Chunks, HV: int, dtype: torch.dtype) -> Shapes:
    """Returns the shapes of T, P and rows."""
    C = chunks.size
    head = (chunks.count, HV)
    return [((*head, C, C), dtype), ((*head, C, C), dtype), ((*head, 9, C), torch.float32)]


def state_shapes(chunks: Chunks, HV: int, K: int, V: int, dtype: torch.dtype) -> Shapes:
    """Returns the shapes of S and U."""
    return [((chunks.count, HV, K, V), dtype), ((chunks.count, HV, chunks.size, V), dtype)]


def _segment_shapes(count: int, HV: int, K: int, V: int) -> Shapes:
    """Returns the shapes of the states at segment starts, and of A."""
    return [((count, HV, K, V), torch.float32), ((count, HV, K, K), torch.float32)]


def _keeps_states(call: Rule, chunks: Chunks, *, fixed: bool) -> bool:
    """Returns whether a call keeps S and U for its backward;
    one of fixed shapes looks at no other call.
    """
    if _is_one_token(call):
        return False  # no scan runs
    (HV, V), K, device = call.v.shape[2:], call.q.shape[3], call.q.device
    size = chunks.count * HV * V * (K + chunks.size) * call.q.dtype.itemsize
    most = _kept_bytes(device) if KEPT_BYTES is None else KEPT_BYTES
    if fixed:
        return size <= most // FIXED_CALLS
    with kept_lock:
        return size + sum(n for x, n in kept_now.items() if x.device == device) <= most


@lru_cache
def card_of(device: torch.device) -> Card | None:
    """Returns what launches depend on of a GPU; None where the tensors are on none."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(device)
    return Card(properties.major, properties.multi_processor_count)


@lru_cache
def _kept_bytes(device: torch.device) -> int:
    """Returns how many bytes calls may keep for backward where KEPT_BYTES does not say."""
    if device.type == "cuda" and torch.cuda.is_available():
        return torch.cuda.get_device_properties(device).total_memory // 8
    return 8 * 2**30
