"""What parity measures against: an honest PyTorch implementation at the same precision, and nothing clever.

The chunkwise form of arXiv:2412.06464 with the WY representation of arXiv:2406.06484, one chunk after the
other:

    A = strict_lower(diag(beta) K K^T . D)     T = (I + A)^-1     u = T diag(beta) V     w = T diag(beta exp
    b) K U = u - w S       O = scale (diag(exp b) Q S + (Q K^T . D) U)       S' = exp(b_C) S + K^T
    diag(exp(b_C - b)) U

Its gradients are PyTorch's own. It stands for what a careful reader of the papers writes in an afternoon:
every product rounds its operands to the training dtype and adds in float32, forward and backward, as matrix
units do; state, decay sums, exponentials and the triangular inverse are float32. The logarithms of decays
are summed segment by segment (Mamba-2's segment sums, arXiv:2405.21060), not as differences of running
sums, so that they keep their digits where strong and weak decays meet.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

CHUNK = 64


class _Product(torch.autograd.Function):
    """a @ b with operands rounded to `dtype` and sums in float32; so are the two products of its gradient."""

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
    """a @ b for float32 a [.., M, K], b [.., K, N], as a matrix unit fed with `dtype` computes it."""
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
    """o and final_state, shapes as in `backends.gated_delta_rule`; differentiable by PyTorch's autograd."""
    dtype, group = q.dtype, v.shape[2] // q.shape[2]
    q, k, v, g, beta = (x.float() for x in (q, k, v, g, beta))
    if l2norm:
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    q, k = (x.repeat_interleave(group, dim=2) for x in (q, k))
    q, k, v, g, beta = (x.movedim(1, 2) for x in (q, k, v, g, beta))  # [B, HV, T, ..]
    B, HV, T, K = q.shape
    bounds = [0, T] if cu_seqlens is None else cu_seqlens.tolist()
    rows = B if cu_seqlens is None else 1
    outputs, states = [], []
    for n in range(len(bounds) - 1):
        S = q.new_zeros((rows, HV, K, v.shape[-1]))
        if initial_state is not None:
            S = initial_state[n * rows : (n + 1) * rows]
        for start in range(bounds[n], bounds[n + 1], CHUNK):
            chunk = slice(start, min(start + CHUNK, bounds[n + 1]))
            cut = [x[:, :, chunk] for x in (q, k, v, g, beta)]
            o, S = _chunk(*cut, S=S, scale=scale, dtype=dtype)
            outputs.append(o)
        states.append(S)
    return torch.cat(outputs, dim=2).movedim(1, 2).to(dtype), torch.cat(states)


def _chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, S: Tensor, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    C = g.shape[-1]
    D = _segment_sums(g).exp()
    since_start = g.cumsum(-1)
    until_end = pad(g[..., 1:], (0, 1)).flip(-1).cumsum(-1).flip(-1)
    A = (beta[..., None] * product(k, k.mT, dtype) * D).tril(-1)
    identity = torch.eye(C, dtype=A.dtype, device=A.device)
    inverse = torch.linalg.solve_triangular(A + identity, identity, upper=False, unitriangular=True)
    u = product(inverse, beta[..., None] * v, dtype)
    w = product(inverse, (beta * since_start.exp())[..., None] * k, dtype)
    U = u - product(w, S, dtype)
    inter = since_start.exp()[..., None] * product(q, S, dtype)
    intra = product(product(q, k.mT, dtype) * D, U, dtype)
    S = since_start[..., -1].exp()[..., None, None] * S + product(k.mT, until_end.exp()[..., None] * U, dtype)
    return scale * (inter + intra), S


def _segment_sums(g: Tensor) -> Tensor:
    """[.., C] -> [.., C, C]: the sum of g over j < l <= i, -inf above the diagonal."""
    C = g.shape[-1]
    below = torch.ones((C, C), dtype=torch.bool, device=g.device).tril(-1)
    sums = g[..., :, None].expand(*g.shape, C).masked_fill(~below, 0.0).cumsum(-2)
    return sums.masked_fill(below.mT, float("-inf"))
