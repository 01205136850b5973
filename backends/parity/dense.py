"""The gated delta rule as one triangular system per sequence: the fast float64 judge of random cases.

The recurrence takes milliseconds per token in Python, and a hundred thousand cases have ten million tokens.
Unrolled over a whole sequence of length C, in the notation of `backends.gated_delta_rule`:

    (I + L) U = diag(beta) (V - diag(exp(b)) K S)      solved by substitution
    O = scale (diag(exp(b)) Q S + lower(Q K^T) . D U)
    S <- exp(b_C) S + K^T diag(D_C) U                  D_C is the last row of D

D is made of segment sums, each added up on its own, so that neither a reset nor a running sum of a million
costs a digit. Gradients are PyTorch's own. Sequences of about the same length are computed as one batch,
padded by tokens that neither decay, write nor read. Nothing here is shared with a backend, gates included; a
test compares it with `recurrent`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from delta_trn.backends.parity import baseline
from delta_trn.backends.parity.baseline import Noise, make_gates

# ((q, k [n, L, H, K], v [n, L, HV, V], g, beta [n, L, HV]), S [n, HV, K, V], scale, l2norm) -> o, states
Form = Callable[[tuple[Tensor, ...], Tensor, float, bool], tuple[Tensor, Tensor]]


def gated_delta_rule(
    tensors: Mapping[str, Tensor],
    options: Mapping[str, Any],
    form: Form,
    noise: Noise | None = None,
) -> dict[str, Tensor]:
    """Returns o and final_state of a call of the public operation, by `form`; differentiable.

    Gates are made in float32, float64 for float64 inputs, and so are the results. With `noise` the gates are
    rounded at random: a decay of 250 tokens has the rounding of each of them. Autograd has s (1 - s) for the
    gradient of a sigmoid s, without a digit where s is about 1; that of the judge has its digits.
    """
    q, k, v = (tensors[name] for name in ("q", "k", "v"))
    full = torch.promote_types(q.dtype, torch.float32)
    gated, beta_max = options.get("use_gate_in_kernel"), 2.0 if options.get("allow_neg_eigval") else 1.0
    if not options.get("use_beta_sigmoid_in_kernel"):
        beta_max = 0.0
    z, judged = tensors["beta"], form is substitution
    g, beta = make_gates(
        tensors["g"], z, tensors.get("A_log") if gated else None, tensors.get("dt_bias"),
        0.0 if judged else beta_max, noise,
    )  # fmt: skip
    if judged and beta_max:
        s = torch.special.expit(z.detach())
        beta = beta_max * (s + s * torch.special.expit(-z.detach()) * (z - z.detach()))
    scale, l2norm = options.get("scale"), bool(options.get("use_qk_l2norm_in_kernel"))
    cu_seqlens, S = tensors.get("cu_seqlens"), tensors.get("initial_state")
    sequences = q.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    if S is None:
        S = v.new_zeros((sequences, v.shape[2], q.shape[3], v.shape[3]), dtype=full)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    o, states = v.new_zeros(v.shape, dtype=full).flatten(0, 1), S
    for index, tokens, inside in _batches(cu_seqlens, q.shape[0], q.shape[1]):
        parts = tuple(_padded(x, tokens, inside) for x in (q, k, v, g, beta))
        rows, finals = form(parts, S[index], scale, l2norm)
        o = o.index_put((tokens[inside],), rows[inside].to(full))
        states = states.index_put((index,), finals)
    return {"o": o.view(v.shape), "final_state": states}


def _padded(x: Tensor, tokens: Tensor, inside: Tensor) -> Tensor:
    """Returns the tokens' rows of x [B, T, ..], as [n, L, ..]; zeros where they are not inside."""
    x = x.flatten(0, 1)[tokens]
    return x.masked_fill(~inside.view(*inside.shape, *[1] * (x.dim() - 2)), 0.0)


def substitution(parts: tuple[Tensor, ...], S: Tensor, scale: float, l2norm: bool) -> tuple[Tensor, Tensor]:
    """Computes the equations above in the dtype of S; the `Form` of the judge."""
    q, k, v, g, beta = parts
    group = v.shape[2] // q.shape[2]
    if l2norm:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(group, dim=2) for x in (q, k))
    Q, K, V, g, beta = (x.to(S.dtype).movedim(1, 2) for x in (q, k, v, g, beta))
    L = g.shape[-1]
    after = torch.ones(L, L, dtype=torch.bool, device=g.device).triu(1)  # [j, i]: i > j
    sums = g[..., None, :].expand(*g.shape, L).masked_fill(~after, 0.0).cumsum(-1)
    D = sums.masked_fill(after.mT, -torch.inf).exp().mT
    b = g.cumsum(-1)
    from_start = b.exp()[..., None]
    A = torch.eye(L, dtype=S.dtype, device=g.device) + beta[..., None] * ((K @ K.mT) * D).tril(-1)
    missing = beta[..., None] * (V - from_start * (K @ S))
    U = torch.linalg.solve_triangular(A, missing, upper=False, unitriangular=True)
    O = scale * (from_start * (Q @ S) + ((Q @ K.mT) * D) @ U)
    finals = from_start[..., -1:, :] * S + (K * D[..., -1, :, None]).mT @ U
    return O.movedim(1, 2), finals


def chunkwise(
    parts: tuple[Tensor, ...], S: Tensor, scale: float, l2norm: bool, chunk: int = baseline.CHUNK,
    noise: Noise | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Computes by the baseline; the `Form` of samples."""
    q, k, v, g, beta = parts
    return baseline.gated_delta_rule(q, k, v, g, beta, S, None, scale, l2norm, chunk=chunk, noise=noise)


def _batches(cu_seqlens: Tensor | None, B: int, T: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yields sequences of about the same length: their numbers [n], tokens [n, L], and which are inside."""
    bounds = [n * T for n in range(B + 1)] if cu_seqlens is None else cu_seqlens.tolist()
    groups: dict[int, list[int]] = {}
    for n in range(len(bounds) - 1):
        length = bounds[n + 1] - bounds[n]
        if length:
            groups.setdefault(length.bit_length(), []).append(n)
    for numbers in groups.values():
        starts, ends = (torch.tensor([bounds[n + i] for n in numbers])[:, None] for i in (0, 1))
        tokens = starts + torch.arange(int((ends - starts).max()))
        yield torch.tensor(numbers), tokens.clamp(max=bounds[-1] - 1), tokens < ends
