"""The implementation that parity compares errors with: plain PyTorch at the same precision.

It is the chunkwise form of arXiv:2412.06464 with the WY representation of arXiv:2406.06484. For each chunk of
C tokens, in the notation of `backends.gated_delta_rule`, with V standing for the values [C, V]:

    L  = strict lower triangle of diag(beta) K K^T . D       [C, C]
    T  = (I + L)^-1                                          [C, C]
    U  = T diag(beta) V - T diag(beta exp(b)) K S            [C, V]
    P  = scale * (Q K^T) . D                                 [C, C]
    O  = scale * diag(exp(b)) Q S + P U                      [C, V]
    S <- exp(b_C) S + K^T diag(exp(b_C - b)) U               [K, V]

Its gradients are PyTorch's own. It is what a careful reader of the papers would write first.
Every product rounds its operands to the training dtype and adds in float32, forward and backward, as matrix
units do. State, decay sums, exponentials and the triangular inverse are float32. The logarithms of decays
are summed segment by segment (Mamba-2's segment sums, arXiv:2405.21060) and not as differences of running
sums, so that they keep their digits where strong and weak decays meet.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

CHUNK = 64


class _Product(torch.autograd.Function):
    """Multiplies operands rounded to `dtype` and adds in float32, also in the products of its gradient."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
        a, b = a.to(dtype).float(), b.to(dtype).float()
        ctx.save_for_backward(a, b)
        ctx.dtype = dtype
        return a @ b

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None]:
        a, b = ctx.saved_tensors
        dc = grad_outputs[0].to(ctx.dtype).float()
        return dc @ b.mT, a.mT @ dc, None


def product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a @ b for float32 a [.., M, K], b [.., K, N], as a matrix unit fed with `dtype` computes it."""
    return _Product.apply(a, b, dtype)  # pyright: ignore[reportReturnType]


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    l2norm: bool,
) -> tuple[Tensor, Tensor]:
    """Returns o and final_state, with the shapes of `backends.gated_delta_rule`."""
    dtype, group = q.dtype, v.shape[2] // q.shape[2]
    q, k, v, g, beta = (x.float() for x in (q, k, v, g, beta))
    if l2norm:
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    q, k = (x.repeat_interleave(group, dim=2) for x in (q, k))
    q, k, v, g, beta = (x.movedim(1, 2) for x in (q, k, v, g, beta))  # [B, HV, T, ..]
    B, HV, length, K = q.shape
    bounds = [0, length] if cu_seqlens is None else cu_seqlens.tolist()
    rows = B if cu_seqlens is None else 1
    outputs, states = [], []
    for n in range(len(bounds) - 1):
        S = q.new_zeros((rows, HV, K, v.shape[-1]))
        if initial_state is not None:
            S = initial_state[n * rows : (n + 1) * rows]
        for start in range(bounds[n], bounds[n + 1], CHUNK):
            chunk = slice(start, min(start + CHUNK, bounds[n + 1]))
            parts = [x[:, :, chunk] for x in (q, k, v, g, beta)]
            o, S = _chunk(*parts, S=S, scale=scale, dtype=dtype)
            outputs.append(o)
        states.append(S)
    return torch.cat(outputs, dim=2).movedim(1, 2).to(dtype), torch.cat(states)


def _chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, S: Tensor, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Returns O and the state after the chunk; P is scaled with O, at the end."""
    C = g.shape[-1]
    D = _segment_sums(g).exp()
    b = g.cumsum(-1)
    b_to_end = pad(g[..., 1:], (0, 1)).flip(-1).cumsum(-1).flip(-1)  # b_C - b
    L = (beta[..., None] * product(k, k.mT, dtype) * D).tril(-1)
    identity = torch.eye(C, dtype=L.dtype, device=L.device)
    T = torch.linalg.solve_triangular(L + identity, identity, upper=False, unitriangular=True)
    written = product(T, beta[..., None] * v, dtype)
    erased = product(product(T, (beta * b.exp())[..., None] * k, dtype), S, dtype)
    U = written - erased
    from_state = b.exp()[..., None] * product(q, S, dtype)
    from_chunk = product(product(q, k.mT, dtype) * D, U, dtype)
    S = b[..., -1].exp()[..., None, None] * S + product(k.mT, b_to_end.exp()[..., None] * U, dtype)
    return scale * (from_state + from_chunk), S


def _segment_sums(g: Tensor) -> Tensor:
    """Maps g [.., C] to its sums over j < l <= i [.., C, C], -inf above the diagonal."""
    C = g.shape[-1]
    below = torch.ones((C, C), dtype=torch.bool, device=g.device).tril(-1)
    sums = g[..., :, None].expand(*g.shape, C).masked_fill(~below, 0.0).cumsum(-2)
    return sums.masked_fill(below.mT, float("-inf"))
