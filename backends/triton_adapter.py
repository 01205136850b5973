"""Triton's side of the operations: allocates, cuts the time axis into chunks, launches `triton_kernels`.

Runs on CUDA tensors; on CPU tensors under TRITON_INTERPRET=1. Nothing here waits for the device: packed
lengths become chunk tables by tensor operations, so every call may be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor

from triton_kernels import delta_residual, gated_delta_rule_bwd, gated_delta_rule_fwd, gated_delta_rule_step
from triton_kernels.launch import Chunks, Config, config

if TYPE_CHECKING:
    from backends.registry import Options

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
SaveH = Literal["auto", True, False]

# 512 MiB a call: eight layers of the paper's width-1024 model at 30 x 1024 tokens keep 2.3 GB in all
SAVE_H_BYTES = 512 * 2**20

_save_h: SaveH = "auto"


def keep_states(save_h: SaveH) -> None:
    """Whether forward keeps h and U (the states at chunk starts and what each chunk writes) for backward.

    True spends (2 K / C + 2) V bytes of bfloat16 per token and value head and spares backward one scan; False
    recomputes them; "auto", the default, keeps them up to SAVE_H_BYTES a call. Raises ValueError for other
    values.
    """
    global _save_h
    if save_h not in ("auto", True, False):
        raise ValueError(f"save_h={save_h!r} is none of 'auto', True, False; pass one of them")
    _save_h = save_h


def on_its_device(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Launches where the first tensor is: left alone, Triton launches on the current device."""

    @wraps(function)
    def guarded(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with torch.cuda.device_of(args[0]):
            return function(*args, **kwargs)

    return guarded


@on_its_device
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
    """o, final_state and what `backward` reads: N, P, rows, and h, U where they are kept."""
    q, k, v, g, beta = (x.contiguous() for x in (q, k, v, g, beta))
    initial_state = None if initial_state is None else initial_state.contiguous()
    HV, K, V = v.shape[2], q.shape[3], v.shape[3]
    row = config(K, V, itemsize=q.element_size())
    chunks, gates = _chunks(q, cu_seqlens, row), options.gates
    N, P, rows = (q.new_empty(shape, dtype=dtype) for shape, dtype in _prepared(chunks, HV, q.dtype))
    gated_delta_rule_fwd.prepare(
        q,
        k,
        g,
        beta,
        gates.A_log,
        gates.dt_bias,
        N,
        P,
        rows,
        scale=options.scale,
        l2norm=options.use_qk_l2norm_in_kernel,
        beta_max=gates.beta_max,
        chunks=chunks,
        config=row,
    )
    o = torch.empty_like(v)
    final_state = None
    if options.output_final_state:
        final_state = q.new_empty((chunks.sequences, HV, K, V), dtype=torch.float32)
    h = U = None
    if save and _keeps(chunks, HV, K, V, q.dtype):
        h, U = (q.new_empty(shape, dtype=dtype) for shape, dtype in _states(chunks, HV, K, V, q.dtype))
    gated_delta_rule_fwd.scan(
        q, k, v, N, P, rows, initial_state,
        o=o, final_state=final_state, h=h, U=U, chunks=chunks, config=row,
    )  # fmt: skip
    if not save:
        return o, final_state, []
    return o, final_state, [N, P, rows] if h is None or U is None else [N, P, rows, h, U]


@on_its_device
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
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, g, beta and initial_state (None without one), each in its input's dtype.

    Where the gates are made here, then those of A_log and dt_bias (None without one).
    """
    do, q, k, v, g, beta = (x.contiguous() for x in (do.to(q.dtype), q, k, v, g, beta))
    initial_state = None if initial_state is None else initial_state.contiguous()
    dstate = None if dstate is None else dstate.contiguous()
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    row = config(K, V, itemsize=q.element_size())
    chunks = _chunks(q, cu_seqlens, row)
    scale = options.scale
    N, P, rows = saved[:3]
    if len(saved) == 5:
        h, U = saved[3:]
    else:
        h, U = (q.new_empty(shape, dtype=dtype) for shape, dtype in _states(chunks, HV, K, V, q.dtype))
        gated_delta_rule_fwd.scan(
            q, k, v, N, P, rows, initial_state,
            o=None, final_state=None, h=h, U=U, chunks=chunks, config=row,
        )  # fmt: skip
    dY, dh, dv = torch.empty_like(U), torch.empty_like(h), torch.empty_like(v)
    dinitial = None if initial_state is None else torch.empty_like(initial_state)
    tiles = -(-V // row.reverse.BV)
    vdY = q.new_empty((chunks.count, HV, tiles, chunks.size), dtype=torch.float32)
    carry = q.new_empty((chunks.count, HV, tiles), dtype=torch.float32)
    gated_delta_rule_bwd.reverse_scan(
        q, k, v, do, N, P, rows, h, initial_state, dstate,
        dY=dY, dh=dh, dv=dv, vdY=vdY, carry=carry, dinitial_state=dinitial, chunks=chunks, config=row,
    )  # fmt: skip
    # grouped value heads: float32 per value head, summed below in a fixed order; atomics would sum in any
    per_head = q.dtype if HV == H else torch.float32
    dq, dk = (q.new_empty((B, T, HV, K), dtype=per_head) for _ in range(2))
    dg, dbeta = torch.empty_like(g), torch.empty_like(beta)
    gates, dgates = options.gates, None
    if gates.A_log is not None:
        dgates = q.new_empty((chunks.count, HV, 2), dtype=torch.float32)
    gated_delta_rule_bwd.gradients(
        q, k, do, g, beta, gates.A_log, gates.dt_bias, rows, h, U, dY, dh, vdY, carry,
        dq=dq, dk=dk, dg=dg, dbeta=dbeta, dgates=dgates, scale=scale, l2norm=options.use_qk_l2norm_in_kernel,
        beta_max=gates.beta_max, chunks=chunks, config=row,
    )  # fmt: skip
    if HV != H:
        dq, dk = (x.view(B, T, H, HV // H, K).sum(3).to(q.dtype) for x in (dq, dk))
    if dgates is None:
        return dq, dk, dv, dg, dbeta, dinitial
    # two sums, since results of an operator may not share memory
    dA_log, ddt_bias = (
        None if x is None else part.sum(0).to(x.dtype)
        for x, part in zip((gates.A_log, gates.dt_bias), dgates.unbind(2), strict=True)
    )
    return dq, dk, dv, dg, dbeta, dinitial, dA_log, ddt_bias


@on_its_device
def step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, options: Options
) -> tuple[Tensor, Tensor]:
    """One token: o [B, HV, V] and the new state [B, HV, K, V]."""
    q, k, v, g, beta, state = (x.contiguous() for x in (q, k, v, g, beta, state))
    o, new = torch.empty_like(v), torch.empty_like(state)
    gates = options.gates
    gated_delta_rule_step.step(
        q, k, v, g, beta, gates.A_log, gates.dt_bias, state, o, new,
        scale=options.scale, l2norm=options.use_qk_l2norm_in_kernel, beta_max=gates.beta_max,
    )  # fmt: skip
    return o, new


@on_its_device
def delta_residual_forward(x: Tensor, k: Tensor, v: Tensor, beta: Tensor, k_eps: float | None) -> Tensor:
    """X' = X + beta k (v^T - k^T X): x [M, D, DV], k [M, D], v [M, DV], beta [M]; k_eps None: k as it is."""
    x, k, v, beta = (y.contiguous() for y in (x, k, v, beta))
    out = torch.empty_like(x)
    delta_residual.forward(x, k, v, beta, out, k_eps=k_eps)
    return out


@on_its_device
def delta_residual_backward(
    dout: Tensor, x: Tensor, k: Tensor, v: Tensor, beta: Tensor, k_eps: float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, k, v, beta, each in its input's dtype."""
    dout, x, k, v, beta = (y.contiguous() for y in (dout, x, k, v, beta))
    dx, dk, dv, dbeta = (torch.empty_like(y) for y in (x, k, v, beta))
    delta_residual.backward(dout, x, k, v, beta, dx=dx, dk=dk, dv=dv, dbeta=dbeta, k_eps=k_eps)
    return dx, dk, dv, dbeta


def saved_shapes(
    q: Tensor, v: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None, options: Options
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of what `forward` saves, from shapes alone."""
    HV, K, V = v.shape[2], q.shape[3], v.shape[3]
    chunks = _counted(q, cu_seqlens, config(K, V, itemsize=q.element_size()))
    shapes = _prepared(chunks, HV, q.dtype)
    return shapes + _states(chunks, HV, K, V, q.dtype) if _keeps(chunks, HV, K, V, q.dtype) else shapes


def _counted(q: Tensor, cu_seqlens: Tensor | None, row: Config) -> Chunks:
    """Chunk counts, which shapes alone decide."""
    B, T = q.shape[:2]
    per_sequence = -(-T // row.C)
    if cu_seqlens is None:
        return Chunks(row.C, B * per_sequence, B, T, per_sequence, packed=False)
    sequences = cu_seqlens.shape[0] - 1
    return Chunks(row.C, T // row.C + sequences, sequences, T, per_sequence, packed=True)


def _chunks(q: Tensor, cu_seqlens: Tensor | None, row: Config) -> Chunks:
    """Chunk counts and, for packed sequences, the tables, computed where cu_seqlens lies."""
    dense = _counted(q, cu_seqlens, row)
    if cu_seqlens is None:
        return dense
    C, device = row.C, cu_seqlens.device
    cu_seqlens = cu_seqlens.contiguous()
    ends = ((cu_seqlens.diff() + C - 1) // C).cumsum(0)
    offsets = torch.nn.functional.pad(ends, (1, 0))
    slot = torch.arange(dense.count, device=device)
    sequence = torch.searchsorted(ends, slot, right=True).clamp_(max=dense.sequences - 1)
    start = cu_seqlens[sequence] + (slot - offsets[sequence]) * C
    length = (cu_seqlens[sequence + 1] - start).clamp_(max=C)
    return Chunks(
        C, dense.count, dense.sequences, dense.T, dense.per_sequence, True, cu_seqlens, offsets, start, length
    )


def _prepared(chunks: Chunks, HV: int, dtype: torch.dtype) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """N, P, rows."""
    C = chunks.size
    words = 1 if dtype == torch.float32 else 2
    head = (chunks.count, HV)
    return [((*head, words, C, C), dtype), ((*head, C, C), dtype), ((*head, 8, C), torch.float32)]


def _states(
    chunks: Chunks, HV: int, K: int, V: int, dtype: torch.dtype
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """h, U."""
    return [((chunks.count, HV, V, K), dtype), ((chunks.count, HV, chunks.size, V), dtype)]


def _keeps(chunks: Chunks, HV: int, K: int, V: int, dtype: torch.dtype) -> bool:
    if _save_h == "auto":
        return chunks.count * HV * V * (K + chunks.size) * dtype.itemsize <= SAVE_H_BYTES
    return _save_h
