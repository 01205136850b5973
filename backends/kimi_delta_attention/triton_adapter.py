"""Triton's side of Kimi Delta Attention: allocates, and launches the kernels of `triton_kernels`.

Runs on CUDA tensors; on CPU tensors under TRITON_INTERPRET=1. Nothing here waits for the device.

float16 is computed in float32, and takes its time: the kernels store decayed keys and states, and
their gradients, and a decay of exp(-20) alone leaves float16's range.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from delta_trn.backends.gated_delta_rule import triton_adapter as rule
from delta_trn.backends.gated_delta_rule.contract import Gradients, Rule, Shapes
from delta_trn.backends.gated_delta_rule.triton_time_adapter import chunk_counts, chunk_tables
from delta_trn.backends.rows import as_rows, empty_like_parts
from delta_trn.triton_kernels.chunks import Chunks
from delta_trn.triton_kernels.gated_delta_rule_bwd import sum_heads
from delta_trn.triton_kernels.kimi_delta_attention import (
    bwd,
    fwd,
    gradients_hopper,
    prepare_hopper,
)

MAKES_GATES = TAKES_POOL = TAKES_PLACES = True
step = rule.step


def forward(call: Rule, *, save: bool) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """Returns o, final_state and what `backward` reads: T, P, last, rows; states, A; S, U.

    qg, kg and kl, three times q, are not kept: backward makes them once more. Empty are states and
    A, of segments, where sequences stay whole, and S and U where they are not kept.
    """
    dtype, call = call.q.dtype, _widen(call)
    q, k, v, g, beta = as_rows(call.q, call.k, call.v, call.g, call.beta)
    A_log, dt_bias, position = rule.contiguous(call.A_log, call.dt_bias, call.position)
    row = rule.launches(call, "kimi_")
    chunks = chunk_tables(q, call.cu_seqlens, row.C)
    o = v.new_empty(v.shape)
    final_state = rule.new_final_state(call)
    prepared = [q.new_empty(shape, dtype=dtype) for shape, dtype in _prepared_shapes(call, chunks)]
    T, P, last, rows = prepared
    qg, kg, kl = (q.new_empty(g.shape) for _ in range(3))
    fwd.prepare(
        q,
        k,
        g,
        beta,
        A_log,
        dt_bias,
        position,
        T=T,
        P=P,
        qg=qg,
        kg=kg,
        kl=kl,
        last=last,
        rows=rows,
        scale=call.scale,
        l2norm=call.l2norm,
        beta_max=call.beta_max,
        lower_bound=call.lower_bound,
        chunks=chunks,
        config=row,
    )
    kept = rule.scan_forward(
        call,
        qg,
        kg,
        v,
        (T, P, rows),
        o=o,
        final_state=final_state,
        save=save,
        chunks=chunks,
        row=row,
        scale=1.0,
        unit=1.0,
        kl=kl,
        last=last,
    )
    return o.to(dtype), final_state, [*prepared, *rule.list_saved(q, *kept)] if save else []


def backward(do: Tensor, dstate: Tensor | None, call: Rule, saved: list[Tensor]) -> Gradients:
    """Returns the gradients; those of A_log and dt_bias only where the kernels make the gates."""
    dtype, call = call.q.dtype, _widen(call)
    q, k, v, g, beta = as_rows(call.q, call.k, call.v, call.g, call.beta)
    A_log, dt_bias, position, dstate, do = rule.contiguous(
        call.A_log, call.dt_bias, call.position, dstate, do.to(call.q.dtype)
    )
    (B, length, H, K), HV = q.shape, v.shape[2]
    row = rule.launches(call, "kimi_")
    chunks = chunk_tables(q, call.cu_seqlens, row.C)
    T, P, last, rows, *kept = saved
    qg, kg, kl = (q.new_empty(g.shape) for _ in range(3))
    fwd.copy(
        q,
        k,
        g,
        A_log,
        dt_bias,
        position,
        rows,
        qg=qg,
        kg=kg,
        kl=kl,
        scale=call.scale,
        l2norm=call.l2norm,
        lower_bound=call.lower_bound,
        chunks=chunks,
        config=row,
    )
    S, U, dY, dS, carry, dinitial = rule.scan_backward(
        call,
        qg,
        kg,
        v,
        do,
        dstate,
        (T, P, rows),
        kept,
        writes=None,
        chunks=chunks,
        row=row,
        scale=1.0,
        unit=1.0,
        kl=kl,
        last=last,
    )
    (dq, dk, dv), (dg, dbeta) = empty_like_parts((q, k, v)), empty_like_parts((g, beta))
    products = [torch.empty_like(x) for x in (P, P, qg, qg, qg, last)]
    products.append(rows.new_empty(chunks.count, HV, row.C))
    adds = gradients_hopper.adds_norms(q, k, g, call.lower_bound, row)
    combined, of_heads = HV != H or (call.l2norm and not adds), (dq, dk)
    if combined:
        of_heads = [q.new_empty((B, length, HV, K), dtype=torch.float32) for _ in range(2)]
    dgates = None
    if A_log is not None:  # only packed sequences leave slots unused, which no program fills
        make = torch.zeros if chunks.packed else torch.empty
        dgates = make((chunks.count, HV, K + 1), dtype=torch.float32, device=q.device)
    bwd.gradients(
        q,
        k,
        v,
        do,
        g,
        beta,
        A_log,
        dt_bias,
        position,
        rows,
        S,
        U,
        dY,
        dS,
        carry,
        products=products,
        dq=of_heads[0],
        dk=of_heads[1],
        dv=dv,
        dg=dg,
        dbeta=dbeta,
        dgates=dgates,
        scale=call.scale,
        l2norm=call.l2norm,
        beta_max=call.beta_max,
        lower_bound=call.lower_bound,
        chunks=chunks,
        config=row,
    )
    if combined:
        for x, dy, dx in zip((q, k), of_heads, (dq, dk), strict=True):
            sum_heads(x if call.l2norm else None, dy, dx=dx, config=row)
    dA_log = ddt_bias = None
    if dgates is not None:
        dA_log, ddt_bias = rule.sum_gates(call, dgates[..., K], dgates[..., :K])
    return Gradients(
        dq.to(dtype), dk.to(dtype), dv.to(dtype), dg, dbeta, dA_log, ddt_bias, dinitial
    )


def name_kernels(call: Rule) -> str:
    """Returns which kernel prepares a call, and why it is not the faster one."""
    call = _widen(call)
    row = rule.launches(call, "kimi_")
    tensors = as_rows(call.q, call.k, call.g)
    if call.l2norm and prepare_hopper.takes(*tensors, call.lower_bound, row):
        return "prepare in Gluon"
    if not prepare_hopper.compiles(row):
        return "plain prepare: Gluon's is of Hopper, in 16 bits"
    if call.lower_bound is None:
        return "plain prepare: decay unbounded"
    return "plain prepare: Gluon's takes normalized keys, bounds from -5 on and channels by eights"


def saved_shapes(call: Rule) -> Shapes:
    """Returns shapes and dtypes of what `forward` saves, from shapes alone."""
    call = _widen(call)
    row = rule.launches(call, "kimi_")
    chunks = chunk_counts(call.q, call.cu_seqlens, row.C)
    return [*_prepared_shapes(call, chunks), *rule.kept_shapes(call, chunks, row)]


def _widen(call: Rule) -> Rule:
    """Returns the call as the kernels compute it: float16 in float32."""
    if call.q.dtype != torch.float16:
        return call
    return replace(call, q=call.q.float(), k=call.k.float(), v=call.v.float())


def _prepared_shapes(call: Rule, chunks: Chunks) -> Shapes:
    """Returns the shapes of T, P, last and rows."""
    HV, K, dtype = call.v.shape[2], call.q.shape[3], call.q.dtype
    T, P, rows = rule.prepared_shapes(chunks, HV, dtype)
    return [T, P, ((chunks.count, HV, K), torch.float32), rows]
