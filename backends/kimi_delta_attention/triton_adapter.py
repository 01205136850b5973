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
from delta_trn.triton_kernels.chunks import Chunks
from delta_trn.triton_kernels.gated_delta_rule_bwd import sum_heads
from delta_trn.triton_kernels.kimi_delta_attention import bwd, fwd, gradients_hopper

MAKES_GATES = TAKES_POOL = True
step = rule.step


def forward(call: Rule, *, save: bool) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """Returns o, final_state and what `backward` reads: T, P, qg, kg, kl, last, rows; states, A; S,
    U.

    Empty are states and A, of segments, where sequences stay whole, and S and U where they are not
    kept.
    """
    dtype, call = call.q.dtype, _widen(call)
    q, k, v, g, beta, A_log, dt_bias = rule.contiguous(
        call.q, call.k, call.v, call.g, call.beta, call.A_log, call.dt_bias
    )
    row = rule.launches(call, "kimi_")
    chunks = chunk_tables(q, call.cu_seqlens, row.C)
    o = torch.empty_like(v)
    final_state = rule.new_final_state(call)
    prepared = [q.new_empty(shape, dtype=dtype) for shape, dtype in _prepared_shapes(call, chunks)]
    T, P, qg, kg, kl, last, rows = prepared
    fwd.prepare(
        q,
        k,
        g,
        beta,
        A_log,
        dt_bias,
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
    q, k, v, g, beta, A_log, dt_bias, dstate, do = rule.contiguous(
        call.q,
        call.k,
        call.v,
        call.g,
        call.beta,
        call.A_log,
        call.dt_bias,
        dstate,
        do.to(call.q.dtype),
    )
    (B, length, H, K), HV = q.shape, v.shape[2]
    row = rule.launches(call, "kimi_")
    chunks = chunk_tables(q, call.cu_seqlens, row.C)
    T, P, qg, kg, kl, last, rows, *kept = saved
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
    dv, dg, dbeta = torch.empty_like(v), torch.empty_like(g), torch.empty_like(beta)
    products = [torch.empty_like(x) for x in (P, P, qg, qg, qg, last)]
    products.append(rows.new_empty(chunks.count, HV, row.C))
    normed = call.l2norm and not gradients_hopper.adds_norms(q, k, g, A_log, call.lower_bound, row)
    combined = HV != H or normed
    dq, dk = (
        q.new_empty((B, length, HV, K), dtype=torch.float32 if combined else q.dtype)
        for _ in range(2)
    )
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
        rows,
        S,
        U,
        dY,
        dS,
        carry,
        products=products,
        dq=dq,
        dk=dk,
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
        of_heads, dq, dk = (dq, dk), torch.empty_like(q), torch.empty_like(k)
        for x, dy, dx in zip((q, k), of_heads, (dq, dk), strict=True):
            sum_heads(x if call.l2norm else None, dy, dx=dx, config=row)
    dA_log = ddt_bias = None
    if dgates is not None:
        dA_log, ddt_bias = rule.sum_gates(call, dgates[..., K], dgates[..., :K])
    return Gradients(
        dq.to(dtype), dk.to(dtype), dv.to(dtype), dg, dbeta, dA_log, ddt_bias, dinitial
    )


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
    """Returns the shapes of T, P, qg, kg, kl, last and rows."""
    HV, K, dtype = call.v.shape[2], call.q.shape[3], call.q.dtype
    T, P, rows = rule.prepared_shapes(chunks, HV, dtype)
    return [T, P, *[(tuple(call.g.shape), dtype)] * 3, ((chunks.count, HV, K), torch.float32), rows]
