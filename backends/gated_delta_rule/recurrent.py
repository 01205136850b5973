"""The gated delta rule as it is written, one token at a time; in float64 it judges every backend.

Forward, per value head (arXiv:2412.06464, eq. 10, with the state stored as [K, V]):

    S'_t = exp(g_t) S_{t-1}         r_t = S'_t^T k_t            u_t = beta_t (v_t - r_t)
    S_t  = S'_t + k_t u_t^T         o_t = scale S_t^T q_t

Backward, from the last token to the first, with D the gradient of S_t that later tokens left:

    dq_t = scale S_t do_t           D  += scale q_t do_t^T
    du   = D^T k_t                  dbeta_t = <du, v_t - r_t>   dv_t = beta_t du
    dk_t = D u_t - S'_t dv_t        D  -= k_t dv_t^T            (now the gradient of S'_t)
    dg_t = <D, S'_t>                D  <- exp(g_t) D            (now the gradient of S_{t-1})

The state is float32, float64 for float64 inputs, whatever the dtype of q, k, v. Nothing is saved: backward
walks forward once for the states at segment starts and again inside each segment, so memory grows with
T / SEGMENT + SEGMENT states instead of T.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from delta_trn.backends.registry import Options

# sqrt(2048) is 45: near the least memory at the longest case of the default suite, 32 + 64 states
SEGMENT = 64

L2NORM_EPS = 1e-6


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
    """o, final_state and nothing to save; shapes as in `backends.gated_delta_rule`."""
    Q, K, V, G, beta_ = _prepared(q, k, v, g, beta, options)
    o = V.new_empty(V.shape)
    final = _zero_states(V, K, cu_seqlens)
    for tokens, states in _sequences(V, cu_seqlens):
        S = final[states] if initial_state is None else initial_state[states].to(V.dtype)
        for t in tokens:
            S = _written(S, K[:, t], V[:, t], G[:, t], beta_[:, t])
            o[:, t] = options.scale * _read(S, Q[:, t])
        final[states] = S
    return o.to(v.dtype), final if options.output_final_state else None, []


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
    Q, K, V, G, beta_ = _prepared(q, k, v, g, beta, options)
    dO = do.to(V.dtype)
    dQ, dK, dV, dG, dbeta = (x.new_zeros(x.shape) for x in (Q, K, V, G, beta_))
    first = _zero_states(V, K, cu_seqlens) if initial_state is None else initial_state.to(V.dtype)
    dfirst = first.new_zeros(first.shape) if dstate is None else dstate.to(V.dtype).clone()
    for tokens, states in _sequences(V, cu_seqlens):
        D, S = dfirst[states], first[states]
        starts = []
        for t in tokens:
            if (t - tokens.start) % SEGMENT == 0:
                starts.append(S)
            S = _written(S, K[:, t], V[:, t], G[:, t], beta_[:, t])
        for segment in reversed(range(len(starts))):
            segment_tokens = tokens[segment * SEGMENT : (segment + 1) * SEGMENT]
            before = [starts[segment]]
            for t in segment_tokens[:-1]:
                before.append(_written(before[-1], K[:, t], V[:, t], G[:, t], beta_[:, t]))
            for t in reversed(segment_tokens):
                at = (slice(None), t)
                decay = G[at].exp()[..., None, None]
                S_decayed = decay * before.pop()
                missing = V[at] - _read(S_decayed, K[at])
                u = beta_[at][..., None] * missing
                dQ[at] = options.scale * (_recalled(S_decayed, dO[at]) + _dot(u, dO[at]) * K[at])
                D = D + _outer(options.scale * Q[at], dO[at])
                du = _read(D, K[at])
                dbeta[at] = (du * missing).sum(-1)
                dV[at] = beta_[at][..., None] * du
                dK[at] = _recalled(D, u) - _recalled(S_decayed, dV[at])
                D = D - _outer(K[at], dV[at])
                dG[at] = (D * S_decayed).sum((-1, -2))
                D = decay * D
        dfirst[states] = D
    dq = _ungrouped(dQ, q, options).to(q.dtype)
    dk = _ungrouped(dK, k, options).to(k.dtype)
    dinitial = None if initial_state is None else dfirst.to(initial_state.dtype)
    return dq, dk, dV.to(v.dtype), dG.to(g.dtype), dbeta.to(beta.dtype), dinitial


def step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, options: Options
) -> tuple[Tensor, Tensor]:
    """One token: o [B, HV, V] and the new state [B, HV, K, V]."""
    prepared = _prepared(*(x.unsqueeze(1) for x in (q, k, v, g, beta)), options=options)
    Q, K, V, G, beta_ = (x[:, 0] for x in prepared)
    S = _written(state.to(V.dtype), K, V, G, beta_)
    return (options.scale * _read(S, Q)).to(v.dtype), S


def saved_shapes(
    q: Tensor, v: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None, options: Options
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Nothing is saved."""
    return []


def _written(S: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """S_t from S_{t-1} [.., K, V] and one token's k [.., K], v [.., V], g, beta [..]."""
    S = g.exp()[..., None, None] * S
    u = beta[..., None] * (v - _read(S, k))
    return S + _outer(k, u)


def _read(S: Tensor, k: Tensor) -> Tensor:
    """S^T k."""
    return (k[..., None, :] @ S).squeeze(-2)


def _recalled(S: Tensor, v: Tensor) -> Tensor:
    """S v."""
    return (S @ v[..., None]).squeeze(-1)


def _outer(k: Tensor, v: Tensor) -> Tensor:
    """k v^T."""
    return k[..., None] * v[..., None, :]


def _dot(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum(-1, keepdim=True)


def _prepared(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, options: Options
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Everything in the state's dtype, q and k normalized where asked and one per value head."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    group = v.shape[2] // q.shape[2]
    q, k, v, g, beta = (x.to(dtype) for x in (q, k, v, g, beta))
    if options.use_qk_l2norm_in_kernel:
        q, k = (x * _reciprocal_norm(x) for x in (q, k))
    q, k = (x.repeat_interleave(group, dim=2) for x in (q, k))
    return q, k, v, g, beta


def _reciprocal_norm(x: Tensor) -> Tensor:
    return (x.square().sum(-1, keepdim=True) + L2NORM_EPS).rsqrt()


def _ungrouped(dy: Tensor, x: Tensor, options: Options) -> Tensor:
    """Gradient of x [B, T, H, K] from that of its normalized copies, dy [B, T, HV, K]: r (dy - y <y, dy>)."""
    dy = dy.unflatten(2, (x.shape[2], -1)).sum(3)
    if not options.use_qk_l2norm_in_kernel:
        return dy
    x = x.to(dy.dtype)
    r = _reciprocal_norm(x)
    y = x * r
    return r * (dy - y * _dot(y, dy))


def _zero_states(V: Tensor, K: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    N = V.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return V.new_zeros((N, V.shape[2], K.shape[3], V.shape[3]))


def _sequences(V: Tensor, cu_seqlens: Tensor | None) -> Iterator[tuple[range, slice]]:
    """Tokens, and rows of the states, that go together: the whole batch at once, or one packed sequence."""
    if cu_seqlens is None:
        yield range(V.shape[1]), slice(None)
        return
    bounds = cu_seqlens.tolist()
    for n in range(len(bounds) - 1):
        yield range(bounds[n], bounds[n + 1]), slice(n, n + 1)
