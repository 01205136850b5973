"""Triton's side of Kimi Delta Attention: allocates, and launches the kernels of `triton_kernels`.

Runs on CUDA tensors; on CPU tensors under TRITON_INTERPRET=1. Nothing here waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from delta_trn.backends.gated_delta_rule.contract import Gradients, Rule, Shapes, Step
from delta_trn.backends.gated_delta_rule.triton_adapter import (
    contiguous,
    launches,
    new_final_state,
    prepared_shapes,
    state_shapes,
    sum_gates,
)
from delta_trn.backends.gated_delta_rule.triton_time_adapter import chunk_counts, chunk_tables
from delta_trn.triton_kernels import gated_delta_rule_fwd, gated_delta_rule_reverse, gated_delta_rule_step
from delta_trn.triton_kernels.chunks import Chunks
from delta_trn.triton_kernels.kimi_delta_attention import bwd, fwd

MAKES_GATES = True  # of a layer's projections, in the kernels


def forward(call: Rule, *, save: bool) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """Returns o, final_state and what `backward` reads: T, P, qg, kg, kl, last, rows, S and U."""
    q, k, v, g, beta, A_log, dt_bias, initial_state = contiguous(
        call.q, call.k, call.v, call.g, call.beta, call.A_log, call.dt_bias, call.initial_state
    )
    row = launches(call, "kimi_")
    chunks = chunk_tables(q, call.cu_seqlens, row.C)
    o = torch.empty_like(v)
    final_state = new_final_state(call)
    kept = [q.new_empty(shape, dtype=dtype) for shape, dtype in _shapes(call, chunks)]
    T, P, qg, kg, kl, last, rows, S, U = kept
    fwd.prepare(
        q, k, g, beta, A_log, dt_bias, T=T, P=P, qg=qg, kg=kg, kl=kl, last=last, rows=rows, scale=call.scale,
        l2norm=call.l2norm, beta_max=call.beta_max, lower_bound=call.lower_bound, chunks=chunks, config=row,
    )  # fmt: skip
    gated_delta_rule_fwd.scan(
        qg, kg, v, T, P, rows, initial_state, o=o, final_state=final_state, S=S if save else None,
        U=U if save else None, scale=1.0, unit=1.0, kl=kl, last=last, chunks=chunks, config=row,
    )  # fmt: skip
    return o, final_state, kept if save else []


def backward(do: Tensor, dstate: Tensor | None, call: Rule, saved: list[Tensor]) -> Gradients:
    """Returns the gradients; those of A_log and dt_bias only where the kernels make the gates."""
    q, k, v, g, beta, A_log, dt_bias, initial_state, dstate, do = contiguous(
        call.q, call.k, call.v, call.g, call.beta, call.A_log, call.dt_bias, call.initial_state, dstate,
        do.to(call.q.dtype),
    )  # fmt: skip
    B, length, H, K = q.shape
    HV, V = v.shape[2:]
    row = launches(call, "kimi_")
    chunks = chunk_tables(q, call.cu_seqlens, row.C)
    T, P, qg, kg, kl, last, rows, S, U = saved
    dY, dS = torch.empty_like(U), torch.empty_like(S)
    dinitial = carry = None
    if initial_state is not None:
        dinitial = torch.empty_like(initial_state)
        carry = q.new_zeros((chunks.count, HV, -(-V // row.reverse.columns), K), dtype=torch.float32)
    gated_delta_rule_reverse.reverse_scan(
        qg, kg, do, T, P, rows, S, U, initial_state, dstate, dY=dY, dS=dS, writes=None, carry=carry,
        dinitial_state=dinitial, scale=1.0, unit=1.0, kl=kl, last=last, chunks=chunks, config=row,
    )  # fmt: skip
    dv, dg, dbeta = torch.empty_like(v), torch.empty_like(g), torch.empty_like(beta)
    products = [torch.empty_like(x) for x in (P, P, qg, qg, qg, last)]
    products.append(rows.new_empty(chunks.count, HV, row.C))
    combined = HV != H or call.l2norm
    dq, dk = (q.new_empty((B, length, HV, K), dtype=torch.float32 if combined else q.dtype) for _ in range(2))
    dgates = None if A_log is None else torch.zeros(chunks.count, HV, K + 1, device=q.device)
    bwd.gradients(
        q, k, v, do, g, beta, A_log, dt_bias, rows, S, U, dY, dS, carry, products=products, dq=dq, dk=dk,
        dv=dv, dg=dg, dbeta=dbeta, dgates=dgates, scale=call.scale, beta_max=call.beta_max,
        lower_bound=call.lower_bound, chunks=chunks, config=row,
    )  # fmt: skip
    if combined:
        of_heads, dq, dk = (dq, dk), torch.empty_like(q), torch.empty_like(k)
        for x, dy, dx in zip((q, k), of_heads, (dq, dk), strict=True):
            bwd.combine(x, dy, dx=dx, l2norm=call.l2norm)
    dA_log = ddt_bias = None
    if dgates is not None:
        dA_log, ddt_bias = sum_gates(call, dgates[..., K], dgates[..., :K])
    return Gradients(dq, dk, dv, dg, dbeta, dA_log, ddt_bias, dinitial)


def step(call: Step) -> tuple[Tensor, Tensor]:
    """Returns o [B, HV, V] and the new state [B, HV, K, V] after one token."""
    q, k, v, g, beta, A_log, dt_bias, state = contiguous(
        call.q, call.k, call.v, call.g, call.beta, call.A_log, call.dt_bias, call.state
    )
    o, new = torch.empty_like(v), torch.empty_like(state)
    gated_delta_rule_step.step(
        q, k, v, g, beta, A_log, dt_bias, state, o, new, scale=call.scale, l2norm=call.l2norm,
        beta_max=call.beta_max, lower_bound=call.lower_bound,
    )  # fmt: skip
    return o, new


def saved_shapes(call: Rule) -> Shapes:
    """Returns shapes and dtypes of what `forward` saves, from shapes alone."""
    return _shapes(call, chunk_counts(call.q, call.cu_seqlens, launches(call, "kimi_").C))


def _shapes(call: Rule, chunks: Chunks) -> Shapes:
    """Returns the shapes of T, P, qg, kg, kl, last, rows, S and U."""
    (HV, V), K, dtype = call.v.shape[2:], call.q.shape[3], call.q.dtype
    head, scaled = (chunks.count, HV), (tuple(call.g.shape), dtype)
    prepared, states = prepared_shapes(chunks, HV, dtype), state_shapes(chunks, HV, K, V, dtype)
    return [*prepared[:2], *[scaled] * 3, ((*head, K), torch.float32), prepared[2], *states]
