"""The gated delta rule as it is written, one token at a time; in float64 it judges every backend.

Forward, per value head (arXiv:2412.06464, eq. 10, with the state stored as [K, V]):

    S'_t = exp(g_t) S_{t-1}         r_t = S'_t^T k_t            u_t = beta_t (v_t - r_t)
    S_t  = S'_t + k_t u_t^T         o_t = scale S_t^T q_t

Backward, from the last token to the first; dS is at first the gradient of S_t that later tokens
cause:

    dq_t = scale S_t do_t           dS += scale q_t do_t^T
    du   = dS^T k_t                 dbeta_t = <du, v_t - r_t>   dv_t = beta_t du
    dk_t = dS u_t - S'_t dv_t       dS -= k_t dv_t^T            (now the gradient of S'_t)
    dg_t = <dS, S'_t>               dS <- exp(g_t) dS           (now the gradient of S_{t-1})

Kimi Delta Attention has a decay for each of the K rows of S: exp(g_t) is a column, and <dS, S'_t>
one sum for each row. Here g is [.., K] then, and [.., 1] where a head has one decay.

A layer's projections a and z become gates first, where the call has them:

    x = a + dt_bias                 g = -exp(A_log) softplus(x)     beta = beta_max sigmoid(z)
    da = -exp(A_log) sigmoid(x) dg  dA_log = sum g dg               ddt_bias = sum da
    dz = beta_max sigmoid(z) sigmoid(-z) dbeta

or, with a lower bound, y = exp(A_log) x:

    g = lower_bound sigmoid(y)      dy = lower_bound sigmoid(y) sigmoid(-y) dg
    da = exp(A_log) dy              dA_log = sum y dy               ddt_bias = sum da

As the judge this file shares no line with another: from the contract it has only the dataclasses.

The state is float32, float64 for float64 inputs, whatever the dtype of q, k, v. Nothing is saved:
backward walks forward once for the states at segment starts and again inside each segment, so
memory grows with T / SEGMENT + SEGMENT states instead of T.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from delta_trn.backends.gated_delta_rule.contract import Gradients, Rule, Shapes, Step

MAKES_GATES = True  # of a layer's projections
# sqrt(2048) is 45: near the least memory at the longest case of the default suite, 32 + 64 states
SEGMENT = 64


def forward(call: Rule, *, save: bool) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """Returns o and final_state; saves nothing."""
    Q, K, V, g, beta = _prepare(call)
    o = V.new_empty(V.shape)
    final = _zero_states(call)
    for tokens, rows in _sequences(call):
        S = final[rows] if call.initial_state is None else call.initial_state[rows].to(V.dtype)
        for t in tokens:
            S = _write(S, K[:, t], V[:, t], g[:, t], beta[:, t])
            o[:, t] = call.scale * _read(S, Q[:, t])
        final[rows] = S
    return o.to(call.v.dtype), final if call.output_final_state else None, []


def backward(do: Tensor, dstate: Tensor | None, call: Rule, saved: list[Tensor]) -> Gradients:
    """Returns the gradients; walks each segment forward for its states, then back."""
    Q, K, V, g, beta = _prepare(call)
    dO = do.to(V.dtype)
    dQ, dK, dV, dg, dbeta = (x.new_zeros(x.shape) for x in (Q, K, V, g, beta))
    first = _zero_states(call) if call.initial_state is None else call.initial_state.to(V.dtype)
    dfirst = first.new_zeros(first.shape) if dstate is None else dstate.to(V.dtype).clone()
    for tokens, rows in _sequences(call):
        dS, S = dfirst[rows], first[rows]
        starts = []
        for t in tokens:
            if (t - tokens.start) % SEGMENT == 0:
                starts.append(S)
            S = _write(S, K[:, t], V[:, t], g[:, t], beta[:, t])
        for segment in reversed(range(len(starts))):
            segment_tokens = tokens[segment * SEGMENT : (segment + 1) * SEGMENT]
            before = [starts[segment]]
            for t in segment_tokens[:-1]:
                before.append(_write(before[-1], K[:, t], V[:, t], g[:, t], beta[:, t]))
            for t in reversed(segment_tokens):
                token = (slice(None), t)  # of every row of the batch
                decay = g[token].exp()[..., None]
                S_decayed = decay * before.pop()
                missing = V[token] - _read(S_decayed, K[token])
                u = beta[token][..., None] * missing
                dQ[token] = call.scale * (
                    _apply(S_decayed, dO[token]) + _dot(u, dO[token]) * K[token]
                )
                dS = dS + _outer(call.scale * Q[token], dO[token])
                du = _read(dS, K[token])
                dbeta[token] = (du * missing).sum(-1)
                dV[token] = beta[token][..., None] * du
                dK[token] = _apply(dS, u) - _apply(S_decayed, dV[token])
                dS = dS - _outer(K[token], dV[token])
                by_row = (dS * S_decayed).sum(-1)
                dg[token] = by_row if _has_channels(call) else by_row.sum(-1, keepdim=True)
                dS = decay * dS
        dfirst[rows] = dS
    dq = _gradient_of_input(dQ, call.q, call.l2norm).to(call.q.dtype)
    dk = _gradient_of_input(dK, call.k, call.l2norm).to(call.k.dtype)
    dinitial = None if call.initial_state is None else dfirst.to(call.initial_state.dtype)
    dg, dbeta, dA_log, ddt_bias = _gradients_of_gates(dg, dbeta, g, call)
    dv = dV.to(call.v.dtype)
    return Gradients(dq, dk, dv, dg, dbeta, dA_log, ddt_bias, initial_state=dinitial)


def step(call: Step) -> tuple[Tensor, Tensor]:
    """Returns o [B, HV, V] and the new state [B, HV, K, V] after one token."""
    Q, K, V, g, beta = (x[:, 0] for x in _prepare(call.as_sequence()))
    S = _write(call.state.to(V.dtype), K, V, g, beta)
    return (call.scale * _read(S, Q)).to(call.v.dtype), S


def saved_shapes(call: Rule) -> Shapes:
    """Returns nothing, since nothing is saved."""
    return []


def _write(S: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Returns S_t from S_{t-1} [.., K, V] and one token's k [.., K], v [.., V],
    g [.., 1 or K], beta [..].
    """
    S = g.exp()[..., None] * S
    u = beta[..., None] * (v - _read(S, k))
    return S + _outer(k, u)


def _read(S: Tensor, k: Tensor) -> Tensor:
    """Returns S^T k."""
    return (k[..., None, :] @ S).squeeze(-2)


def _apply(S: Tensor, v: Tensor) -> Tensor:
    """Returns S v."""
    return (S @ v[..., None]).squeeze(-1)


def _outer(k: Tensor, v: Tensor) -> Tensor:
    """Returns k v^T."""
    return k[..., None] * v[..., None, :]


def _dot(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum(-1, keepdim=True)


def _has_channels(call: Rule) -> bool:
    """Returns whether each of the K rows of S has a decay of its own."""
    return call.g.dim() == call.q.dim()


def _prepare(call: Rule) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns q, k, v, g, beta in the state's dtype, q and k normalized where asked,
    one per value head.
    """
    dtype = _full(call)
    group = call.v.shape[2] // call.q.shape[2]
    q, k, v, g, beta = (x.to(dtype) for x in (call.q, call.k, call.v, call.g, call.beta))
    if call.l2norm:
        q, k = (x * _reciprocal_norm(x) for x in (q, k))
    q, k = (x.repeat_interleave(group, dim=2) for x in (q, k))
    g = g if _has_channels(call) else g[..., None]
    if call.A_log is not None:
        x, A_log = _projection(call, dtype)
        if call.lower_bound is None:
            g = -_rate_times(torch.logaddexp(x, torch.zeros_like(x)), A_log, x)
        else:
            g = call.lower_bound * torch.sigmoid(_bounded(x, A_log))
    if call.beta_max:
        beta = call.beta_max * torch.sigmoid(beta)
    return q, k, v, g, beta


def _gradients_of_gates(
    dg: Tensor, dbeta: Tensor, g: Tensor, call: Rule
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Returns the gradients of what the call has as g and beta, of A_log and of dt_bias."""
    dA_log = ddt_bias = None
    if call.A_log is not None:
        x, A_log = _projection(call, dg.dtype)
        if call.lower_bound is None:
            by_rate = g.clamp(min=-torch.finfo(dg.dtype).max) * dg
            dg = -_rate_times(torch.sigmoid(x), A_log, x) * dg
        else:
            y = _bounded(x, A_log)
            dy = call.lower_bound * torch.sigmoid(y) * torch.sigmoid(-y) * dg
            by_rate, dg = y * dy, _rate(A_log) * dy
        dA_log = by_rate.sum((0, 1, 3)).to(call.A_log.dtype)
        ddt_bias = (
            None
            if call.dt_bias is None
            else dg.sum((0, 1)).view(call.dt_bias.shape).to(call.dt_bias.dtype)
        )
    if call.beta_max:
        z = call.beta.to(dbeta.dtype)
        # not s (1 - s), which has no digits where s is about 1
        dbeta = call.beta_max * torch.sigmoid(z) * torch.sigmoid(-z) * dbeta
    return dg.view(call.g.shape).to(call.g.dtype), dbeta.to(call.beta.dtype), dA_log, ddt_bias


def _projection(call: Rule, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns a + dt_bias [B, T, HV, 1 or K], and A_log [HV, 1]."""
    assert call.A_log is not None
    x = call.g.to(dtype)
    x = x if _has_channels(call) else x[..., None]
    if call.dt_bias is not None:
        x = x + call.dt_bias.to(dtype).view(x.shape[2], -1)
    return x, call.A_log.to(dtype)[:, None]


def _bounded(x: Tensor, A_log: Tensor) -> Tensor:
    """Returns exp(A_log) x, within what a sigmoid tells from 0 and 1."""
    return (_rate(A_log) * x).clamp(-800.0, 800.0)


def _rate(A_log: Tensor) -> Tensor:
    """Returns exp(A_log), finite: times a projection
    that is not tiny it bounds the sigmoid anyway.
    """
    return A_log.clamp(max=600.0 if A_log.dtype == torch.float64 else 80.0).exp()


def _rate_times(y: Tensor, A_log: Tensor, x: Tensor) -> Tensor:
    """Returns exp(A_log) y for y = softplus(x) or sigmoid(x), which both are exp(x) far below 0.

    Neither factor is infinite or 0 where the product is not: exp(A_log) overflows at 89, exp(x)
    ends at -103.
    """
    root = (0.5 * A_log.to(x.dtype).clamp(max=170.0)).exp()
    far = (root * (0.5 * x).exp()).square()
    return torch.where(x < -40.0, far, root * (root * y)).clamp(max=torch.finfo(x.dtype).max)


def _reciprocal_norm(x: Tensor) -> Tensor:
    return (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def _gradient_of_input(dy: Tensor, x: Tensor, l2norm: bool) -> Tensor:
    """Returns the gradient of x [B, T, H, K] from dy [B, T, HV, K], that of its copies y, one per
    value head.

    Normalized copies are y = r x with r = 1 / |x|:  dx = r (dy - y <y, dy>).
    """
    dy = dy.unflatten(2, (x.shape[2], -1)).sum(3)
    if not l2norm:
        return dy
    x = x.to(dy.dtype)
    r = _reciprocal_norm(x)
    y = x * r
    return r * (dy - y * _dot(y, dy))


def _full(call: Rule) -> torch.dtype:
    return torch.float64 if call.q.dtype == torch.float64 else torch.float32


def _zero_states(call: Rule) -> Tensor:
    shape = (call.sequences, call.v.shape[2], call.k.shape[3], call.v.shape[3])
    return call.v.new_zeros(shape, dtype=_full(call))


def _sequences(call: Rule) -> Iterator[tuple[range, slice]]:
    """Yields tokens, and the rows of their states: the whole batch at once,
    or one packed sequence.
    """
    if call.cu_seqlens is None:
        yield range(call.v.shape[1]), slice(None)
        return
    bounds = call.cu_seqlens.tolist()
    for n in range(len(bounds) - 1):
        yield range(bounds[n], bounds[n + 1]), slice(n, n + 1)
