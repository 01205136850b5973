"""The gated delta rule in chunks of tokens: matrix products inside a chunk, one product from chunk
to chunk.

float32 and 16-bit tensors on a CPU take the C++ kernel. What follows serves float64, other devices,
and machines without a compiler: PyTorch's operations, of which autograd finds the gradients. For
one chunk of C tokens of one value head, in the notation of `backends.gated_delta_rule`, S is the
chunk's first state (derived from arXiv:2412.06464 and arXiv:2406.06484):

    b = cumsum(g)   gam_i = exp(b_i)   lam_i = exp(b_C - b_i)   D_ij = exp(b_i - b_j) if i >= j, else 0
    L = diag(beta) strict_lower((K K^T) . D)        R = V - diag(gam) K S       U = (I + L)^-1 diag(beta) R
    P = (Q K^T) . D         O = scale (diag(gam) Q S + P U)         S' = gam_C S + K^T diag(lam) U

`scale` multiplies O, so that a tiny one makes no other product underflow, forward or backward. lam
multiplies U and not K: its gradient is then <K dS', U>, where equal keys have equal rows, whose
roundings cancel where their writes do. Sums are float32, float64 for float64 inputs; those of g are
float64.

In Kimi Delta Attention gam and lam are [C, K], D is a matrix for each channel, and what it
multiplies is cut (`multiply_pairs`):

    kk_ij = sum_c k_ic k_jc exp(b_ic - b_jc), i > j         P_ij = sum_c q_ic k_jc exp(b_ic - b_jc),
                                                            i >= j
    L = diag(beta) kk           R = V - (K . gam) S         U = (I + L)^-1 diag(beta) R
    O = scale ((Q . gam) S + P U)                           S' = diag(gam_C) S + (K . lam)^T U
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from delta_trn.backends.gated_delta_rule import chunked_kernel, contract
from delta_trn.backends.gated_delta_rule.contract import Gradients, Rule, Shapes, Step, state_dtype

MAKES_GATES = (
    True  # by PyTorch, but inside of the call: under torch.compile they have their eager bits
)


def note(
    dtype: torch.dtype = torch.float32, device: str = "cpu", op: str = "gated_delta_rule"
) -> str:
    """Says what computes an operation in a dtype on a device, and why not the C++ kernel, of which
    each rule has one; may compile it.
    """
    channels = op.startswith("kimi_delta_attention")
    return chunked_kernel.refusal(dtype, device, channels) or chunked_kernel.library(channels).note


def chunk_size(K: int, V: int) -> int:
    """Returns the tokens of a chunk, 32 or 64.

    32 took 82 ms and 64 took 99 ms at K=32, V=64; at K=128, V=256 they took 183 ms and 147 ms.
    """
    return 64 if K > 64 else 32


def saved_shapes(call: Rule) -> Shapes:
    """Returns the shapes of what the C++ kernel saves;
    without it backward computes everything again.
    """
    if not chunked_kernel.takes(call):
        return []
    return chunked_kernel.saved_shapes(call, chunk_size(call.q.shape[3], call.v.shape[3]))


def forward(call: Rule, *, save: bool) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """Returns o, final_state and what `saved_shapes` lists."""
    call = contract.make_call_gates(call)
    if chunked_kernel.takes(call):
        return chunked_kernel.forward(call, chunk_size(call.q.shape[3], call.v.shape[3]), save=save)
    o, final_state = compute(call)
    return o, final_state if call.output_final_state else None, []


def backward(do: Tensor, dstate: Tensor | None, call: Rule, saved: list[Tensor]) -> Gradients:
    """Returns the gradients: the C++ kernel's, or autograd's,
    which also finds those through the gates.
    """
    if not chunked_kernel.takes(call):
        leaves = _leaves(call, Gradients._fields)
        with torch.enable_grad():
            outputs = compute(contract.make_call_gates(replace(call, **leaves)))
        pairs = zip(outputs, (do, dstate), strict=True)
        return Gradients(**_gradients_of(leaves, [(y, dy) for y, dy in pairs if dy is not None]))
    leaves = _leaves(call, ("g", "beta", "A_log", "dt_bias"))
    with torch.enable_grad():
        made = contract.make_call_gates(replace(call, **leaves))
    given = replace(made, g=made.g.detach(), beta=made.beta.detach())
    C = chunk_size(call.q.shape[3], call.v.shape[3])
    gradients = chunked_kernel.backward(do, dstate, given, saved, C)
    through = _gradients_of(leaves, [(made.g, gradients.g), (made.beta, gradients.beta)])
    return gradients._replace(**through)


def _leaves(call: Rule, names: Iterable[str]) -> dict[str, Tensor]:
    """Returns copies of a call's tensors of which autograd finds gradients."""
    given = {name: getattr(call, name) for name in names}
    return {name: x.detach().requires_grad_() for name, x in given.items() if x is not None}


def _gradients_of(
    leaves: dict[str, Tensor], outputs: Sequence[tuple[Tensor, Tensor]]
) -> dict[str, Tensor]:
    """Returns the leaves' gradients, from outputs and their gradients."""
    ys, dys = zip(*outputs, strict=True)
    gradients = torch.autograd.grad(ys, list(leaves.values()), dys, materialize_grads=True)
    return dict(zip(leaves, gradients, strict=True))


def step(call: Step) -> tuple[Tensor, Tensor]:
    """Returns o [B, HV, V] and the new state [B, HV, K, V] after one token."""
    call = contract.make_call_gates(call)
    if chunked_kernel.takes(call):
        return chunked_kernel.step(call)
    dtype, groups = call.state.dtype, call.v.shape[1] // call.q.shape[1]
    q, k = (
        _keys(x, dtype, call.l2norm).repeat_interleave(groups, 1)[..., None, :]
        for x in (call.q, call.k)
    )
    decay = call.g.to(dtype).exp()[..., None]
    S = call.state * (decay if call.has_channels else decay[..., None])
    R = call.v.to(dtype)[..., None, :] - k @ S
    S = S + k.mT @ (call.beta.to(dtype)[..., None, None] * R)
    return (call.scale * (q @ S))[..., 0, :].to(call.v.dtype), S


def compute(call: Rule) -> tuple[Tensor, Tensor]:
    """Returns o [B, T, HV, V] and the state after the last token [N, HV, K, V],
    chunk after chunk.
    """
    if call.cu_seqlens is not None:
        return compute_packed(call)
    (B, T, H, K), (HV, V), dtype = call.q.shape, call.v.shape[2:], state_dtype(call.q.dtype)
    C, groups = chunk_size(K, V), HV // H
    q, k = (_keys(x, dtype, call.l2norm).repeat_interleave(groups, 2) for x in (call.q, call.k))
    # g is a sum in float64: where decays of -20 and -0.01 meet, differences of float32 sums cost o
    # too much
    g = call.g.double().clamp(min=contract.RESET)
    tensors = (
        q,
        k,
        call.v.to(dtype),
        g if call.has_channels else g[..., None],
        call.beta[..., None],
    )
    chunks = [_split(x, C) for x in tensors]
    S = q.new_zeros((B, HV, K, V)) if call.initial_state is None else call.initial_state
    outputs = [call.v.new_zeros((B, HV, 0, V), dtype=dtype)]
    for q, k, v, g, beta in zip(*chunks, strict=True):
        if call.has_channels:
            o, S = compute_channels(q, k, v, g, beta.to(dtype), S)
        else:
            o, S = compute_chunk(q, k, v, g[..., 0], beta.to(dtype), S)
        outputs.append(o)
    o = torch.cat(outputs, 2).transpose(1, 2)[:, :T]
    return (call.scale * o).to(call.v.dtype), S


def compute_packed(call: Rule) -> tuple[Tensor, Tensor]:
    """Returns the same of packed sequences, one after the other;
    an empty one hands its state on.
    """
    assert call.cu_seqlens is not None
    bounds, parts = call.cu_seqlens.tolist(), []
    for n in range(call.sequences):
        tokens = slice(bounds[n], bounds[n + 1])
        alone = {name: getattr(call, name)[:, tokens] for name in ("q", "k", "v", "g", "beta")}
        first = None if call.initial_state is None else call.initial_state[n : n + 1]
        parts.append(compute(replace(call, **alone, initial_state=first, cu_seqlens=None)))
    outputs, states = zip(*parts, strict=True)
    return torch.cat(outputs, 1), torch.cat(states)


def _split(x: Tensor, C: int) -> tuple[Tensor, ...]:
    """Returns the chunks [B, HV, C, ...] of x [B, T, HV, ...], with zeros behind the last token.

    They are contiguous, since PyTorch's exponentials of other tensors end in other bits.
    """
    x = pad(x, (0, 0, 0, 0, 0, -x.shape[1] % C))
    x = x.unflatten(1, (x.shape[1] // C, C))
    return x.permute(1, 0, 3, 2, 4).contiguous().unbind()


def compute_chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns O of a chunk, not scaled, and S',
    of rows [N, HV, C, ...] and g [N, HV, C] in float64.
    """
    D, gam, lam = decays(g, S.dtype)
    L = beta * (k @ k.mT * D).tril(-1)
    U = Solve.apply(L, beta * (v - gam * (k @ S)))
    o = gam * (q @ S) + (q @ k.mT * D) @ U
    return o, gam[..., -1:, :] * S + k.mT @ (lam * U)


def compute_channels(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the same with a decay for each channel, g [N, HV, C, K] in float64."""
    behind = pad(g[..., 1:, :], (0, 0, 0, 1)).flip(-2).cumsum(-2).flip(-2)
    gam, lam = (x.exp().to(S.dtype) for x in (g.cumsum(-2), behind))
    P, kk = multiply_pairs(q, k, g.to(S.dtype))
    U = Solve.apply(beta * kk, beta * (v - (k * gam) @ S))
    o = (q * gam) @ S + P @ U
    return o, gam[..., -1, :, None] * S + (k * lam).mT @ U


def multiply_pairs(q: Tensor, k: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Returns P and kk [..., C, C] of q, k, g [..., C, K], C a power of two: products of pairs,
    decayed.

    Blocks of one token are joined to blocks of two, of four, and so on. Between the halves of a
    block the decay from token j of the left to token i of the right is right_i left_j, from the cut
    to i and from j to the cut:

        right_i = exp(sum over cut <= t <= i of g_t)        left_j = exp(sum over j < t < cut of
                                                            g_t)

    Both exponents are sums of numbers <= 0, and so are their gradients' terms: nothing overflows,
    and nothing is added and taken away again. exp(b_i) exp(-b_j) would overflow, and lose weak
    decays beside strong ones.
    """
    x = torch.stack([q, k])
    pairs = torch.stack([(q * k).sum(-1), torch.zeros_like(q[..., 0])])[..., None, None]
    upto, after = g, torch.zeros_like(g)  # the sums from a block's first token, and to its last
    size = 1
    while size < g.shape[-2]:
        halves = [y.unflatten(-2, (-1, 2, size)).unbind(-3) for y in (x, k, upto, after)]
        (_, x_right), (k_left, _), (upto_left, upto_right), (after_left, after_right) = halves
        cut = (x_right * upto_right.exp()) @ (k_left * after_left.exp()).mT
        first, second = pairs.unflatten(-3, (-1, 2)).unbind(-3)
        pairs = torch.cat([pad(first, (0, size)), torch.cat([cut, second], -1)], -2)
        # of whole blocks: the right half has the left one before it, and the left one the right one
        # behind it
        before, behind = upto_left[..., -1:, :], upto_right[..., -1:, :]
        upto = torch.stack([upto_left, upto_right + before], -3).flatten(-4, -2)
        after = torch.stack([after_left + behind, after_right], -3).flatten(-4, -2)
        size *= 2
    P, kk = pairs.squeeze(-3).unbind()
    return P, kk


def decays(g: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Returns D [..., C, C], and gam and lam [..., C, 1].

    Each sum of D is added up for itself: its gradient is then a sum, too, and no difference of
    large ones, which strong decay makes far larger than what is left. It is masked before exp,
    since exp(20 * 63) overflows.
    """
    sums = g[..., None].expand(*g.shape, g.shape[-1]).tril(-1).cumsum(-2)
    behind = pad(g[..., 1:], (0, 1)).flip(-1).cumsum(-1).flip(-1)
    gam, lam = (x.exp().to(dtype)[..., None] for x in (g.cumsum(-1), behind))
    return sums.to(dtype).exp().tril(), gam, lam


class Solve(torch.autograd.Function):
    """Returns U = (I + L)^-1 R, with gradients that take no product of two inverses.

    dR = (I + L)^-T dU      dL = -strict_lower(dR U^T)
    """

    @staticmethod
    def forward(ctx: Any, L: Tensor, R: Tensor) -> Tensor:
        T = triangular_inverse(L)
        U = T @ R
        ctx.save_for_backward(T, U)
        return U

    @staticmethod
    def backward(ctx: Any, dU: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        T, U = ctx.saved_tensors
        dR = T.mT @ dU
        return -(dR @ U.mT).tril(-1), dR


def triangular_inverse(L: Tensor) -> Tensor:
    """Returns T = (I + L)^-1 for strictly lower L [..., C, C], by log2(C) pairs of products.

    Each merges two inverted blocks of the diagonal, T1 and T2, with L21 between them. Where T holds
    such blocks, and L is masked to L21 of each pair, T L T is [[0, 0], [T2 L21 T1, 0]]:

        [[I + L1, 0], [L21, I + L2]]^-1 = [[T1, 0], [-T2 L21 T1, T2]]

    A power series would not do: with equal keys and beta = 2 the powers of L reach 6e13 at C = 32
    and 8e28 at C = 64, while no element of T is above 2. Substitution is no operation of XLA's: it
    would run on the host.
    """
    C = L.shape[-1]
    row = torch.arange(C, device=L.device)
    T = torch.eye(C, dtype=L.dtype, device=L.device).expand(L.shape)
    base = 1
    while base < C:
        block = row // base
        between = (block[:, None] == block + 1) & (block % 2 == 0)
        T = T - T @ torch.where(between, L, 0) @ T
        base *= 2
    return T


def _keys(x: Tensor, dtype: torch.dtype, normalize: bool) -> Tensor:
    """Returns queries or keys in `dtype`; a norm is divided by,
    since its cube would leave float32.
    """
    x = x.to(dtype)
    return x / (x.square().sum(-1, keepdim=True) + contract.L2NORM_EPS).sqrt() if normalize else x
