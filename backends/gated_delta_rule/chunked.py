"""The gated delta rule in chunks of tokens: matrix products inside a chunk, one product from chunk to chunk.

Forward, for one chunk of C tokens of one value head, in the notation of `backends.gated_delta_rule`. Here
q, k [C, K] and v [C, V] are the chunk's rows, since K and V are sizes in the code. S is the chunk's first
state (derived from arXiv:2412.06464 and arXiv:2406.06484). `scale` multiplies o at the end and dO at the
beginning, so that a tiny one makes no product underflow; it stands nowhere else:

    b = cumsum(g)   gam_i = exp(b_i)   lam_i = exp(b_C - b_i)   D_ij = exp(b_i - b_j) if i >= j, else 0
    P = (q k^T) . D     overlap = strict_lower((k k^T) . D)     L = diag(beta) overlap      T = (I + L)^-1
    w = -T diag(beta gam) k                     u = T diag(beta) v
    A = gam_C I + (diag(lam) k)^T w             Z = (diag(lam) k)^T u
    S' = A S + Z                                U = u + w S                 o = diag(gam) q S + P U

A [K, K] is the chunk's transition. Only S' waits for the chunk before. Backward reads `overlap` [C, C] rather
than L, since beta may be 0; dO is the gradient of o, dS' that of S':

    dS = A^T dS' + (diag(gam) q)^T dO + w^T P^T dO                          (the only one that waits)
    dU = P^T dO + diag(lam) k dS'               dR = T^T dU                 dv = diag(beta) dR
    dP = (dO U^T) . D                           dkk = strict_lower((dv U^T) . D)
    dq = diag(gam) dO S^T + dP k
    dk = diag(lam) U dS'^T - diag(gam) dv S^T + dP^T q - (dkk + dkk^T) k

The gradient of k k^T is -dkk. dbeta is in `backward`, dg in `log_decay_gradient`. Sums are float32, float64
for float64 inputs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from delta_trn.backends.gated_delta_rule import chunked_kernel
from delta_trn.backends.gated_delta_rule.chunk_layout import Layout, capacity, lay_out
from delta_trn.backends.gated_delta_rule.contract import (
    L2NORM_EPS,
    RESET,
    Gradients,
    Rule,
    Shapes,
    Step,
    state_dtype,
)
from delta_trn.backends.gated_delta_rule.triangular import triangular_inverse

# elements of the largest tensor of the chunks that are computed together
BLOCK = 1 << 20


def chunk_size(K: int, V: int) -> int:
    """Returns the tokens of a chunk, 32 or 64.

    32 took 82 ms and 64 took 99 ms at K=32, V=64; at K=128, V=256 they took 183 ms and 147 ms.
    """
    return 64 if K > 64 else 32


def saved_shapes(call: Rule) -> Shapes:
    """Returns the shapes of q, k, their reciprocal norms, v, D, P, `overlap`, T, w, A, U and all states."""
    (B, length, _, K), (HV, V) = call.q.shape, call.v.shape[2:]
    C, dtype = chunk_size(K, V), state_dtype(call.q.dtype)
    if chunked_kernel.takes(call.q):
        return chunked_kernel.saved_shapes(call, C)
    M = capacity(B, length, C, call.cu_seqlens) * HV
    norms = (M, C, 1) if call.l2norm else (0,)
    shapes = [(M, C, K), (M, C, K), norms, norms, (M, C, V), *[(M, C, C)] * 4]
    shapes += [(M, C, K), (M, K, K), (M, C, V), (M + call.sequences * HV, K, V)]
    return [(shape, dtype) for shape in shapes]


def forward(call: Rule, *, save: bool) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """Returns o, final_state and what `saved_shapes` lists. Each of M rows is a chunk of one value head."""
    q, k, v, g, beta = call.q, call.k, call.v, call.g, call.beta
    (B, length, H, K), (HV, V) = q.shape, v.shape[2:]
    C, dtype, group = chunk_size(K, V), state_dtype(q.dtype), HV // H
    if chunked_kernel.takes(q):
        return chunked_kernel.forward(call, C, save=save)
    layout, block = lay_out(B, length, C, HV, call.cu_seqlens), _block_size(C, K, V)
    M = layout.chunks * HV
    saved = [q.new_empty(shape, dtype=saved_dtype) for shape, saved_dtype in saved_shapes(call)]
    # packed sequences may need fewer chunks than `saved_shapes` allows for
    Q, K_, rq, rk, V_, D, P, overlap, T, w, A, U = (x[:M] for x in saved[:-1])
    states = saved[-1][: M + layout.N * HV]
    g_, gam, lam = _decays(layout, g, HV, dtype)
    # [B, T, HV] -> [M, C, 1]: chunks first, then heads, so that a row's tokens lie together
    beta_ = layout.split(beta, gam.new_empty((layout.chunks, HV, 1, C))).view(M, C, 1)
    # [B, T, H, K] -> [M, C, K]: the head of a group is copied to each of its value heads
    for x, chunks in ((q, Q), (k, K_)):
        layout.split(x, chunks.unflatten(0, (-1, H, group)))
    # [B, T, HV, V] -> [M, C, V]: a value head is a group of its own
    layout.split(v, V_.unflatten(0, (-1, HV, 1)))
    # the first N HV states are those of the sequences, [N, HV, K, V] -> [N HV, K, V]
    states[: layout.N * HV] = (
        0 if call.initial_state is None else layout.sorted(call.initial_state).flatten(0, 1)
    )
    after = states[layout.N * HV :]  # [M, K, V]: the state after each row
    o_ = torch.empty_like(U)
    for span, steps in layout.spans(block):
        for i in _blocks(span, block):
            if call.l2norm:
                for x, r in ((Q[i], rq[i]), (K_[i], rk[i])):
                    torch.linalg.vecdot(x, x, out=r[..., 0])
                    x.mul_(r.add_(L2NORM_EPS).rsqrt_())
            k_i, beta_i = K_[i], beta_[i]
            D[i] = decay_matrix(g_[i], dtype)
            torch.bmm(Q[i], k_i.mT, out=P[i]).mul_(D[i])
            torch.bmm(k_i, k_i.mT, out=overlap[i]).mul_(D[i]).diagonal(dim1=-2, dim2=-1).zero_()
            T[i] = triangular_inverse(overlap[i] * beta_i)
            torch.bmm(T[i], k_i * (beta_i * -gam[i]), out=w[i])
            torch.bmm(T[i], V_[i] * beta_i, out=U[i])
            written = (k_i * lam[i]).mT
            torch.bmm(written, w[i], out=A[i]).diagonal(dim1=-2, dim2=-1).add_(gam[i, -1])
            torch.bmm(written, U[i], out=after[i])
        _scan(A, states, steps)
        for i in _blocks(span, block):
            S = layout.firsts(states, i)
            U[i].baddbmm_(w[i], S)
            torch.bmm(Q[i] * gam[i], S, out=o_[i]).baddbmm_(P[i], U[i])
    # [M, C, V] -> [chunks, HV, C, V] -> [B, T, HV, V]
    o = layout.join(o_.view(layout.chunks, HV, C, V), v.new_empty(v.shape), call.scale)
    final_state = layout.lasts(states.unflatten(0, (-1, HV))) if call.output_final_state else None
    return o, final_state, saved if save else []


def backward(do: Tensor, dstate: Tensor | None, call: Rule, saved: list[Tensor]) -> Gradients:
    """Returns the gradients; rows as in `forward`, spans of time from the last to the first."""
    q, k, v, g, beta = call.q, call.k, call.v, call.g, call.beta
    (B, length, H, K), (HV, V) = q.shape, v.shape[2:]
    C, dtype, group = chunk_size(K, V), state_dtype(q.dtype), HV // H
    if chunked_kernel.takes(q):
        return chunked_kernel.backward(do, dstate, call, saved, C)
    layout, block = lay_out(B, length, C, HV, call.cu_seqlens), _block_size(C, K, V)
    M = layout.chunks * HV
    Q, K_, rq, rk, V_, D, P, overlap, T, w, A, U = (x[:M] for x in saved[:-1])
    states = saved[-1][: M + layout.N * HV]
    _, gam, lam = _decays(layout, g, HV, dtype)
    beta_ = layout.split(beta, gam.new_empty((layout.chunks, HV, 1, C))).view(M, C, 1)
    dO = layout.split(do, torch.empty_like(U).unflatten(0, (-1, HV, 1)), call.scale).view(M, C, V)
    dU, dstates = torch.empty_like(U), torch.empty_like(states)
    layout.put_lasts(dstates.unflatten(0, (-1, HV)), dstate)
    dafter, dQ, dK = dstates[layout.N * HV :], torch.empty_like(Q), torch.empty_like(K_)
    dg_, dbeta_ = gam.new_empty((M, C)), gam.new_empty((M, C))
    for span, steps in reversed(layout.spans(block)):
        for i in _blocks(span, block):
            torch.bmm(P[i].mT, dO[i], out=dU[i])
            layout.put_firsts(dstates, i, torch.bmm((Q[i] * gam[i]).mT, dO[i]).baddbmm_(w[i].mT, dU[i]))
        _scan_back(A, dstates, steps)
        for i in _blocks(span, block):
            k_i, beta_i, S = K_[i], beta_[i], layout.firsts(states, i)
            # lam follows the product, and `written` is not <U dS'^T, k>: equal keys have equal rows here,
            # whose roundings cancel where their writes do
            dwritten = torch.bmm(k_i, dafter[i]).mul_(lam[i])
            written = _dot(dwritten, U[i])
            dR = torch.bmm(T[i].mT, dU[i].add_(dwritten))
            dP, dkk = torch.bmm(dO[i], U[i].mT), torch.bmm(dR, U[i].mT)
            read, undone = dP * P[i], dkk * overlap[i]
            read.diagonal(dim1=-2, dim2=-1).zero_()  # nothing decays from a token to itself
            dP.mul_(D[i])
            dkk.mul_(D[i]).mul_(beta_i).diagonal(dim1=-2, dim2=-1).zero_()
            dq = torch.bmm(dO[i], S.mT, out=dQ[i]).mul_(gam[i])
            dk_S = torch.bmm(dR, S.mT).mul_(gam[i])
            dk = torch.bmm(U[i], dafter[i].mT, out=dK[i]).mul_(lam[i])
            predicted = _dot(dk_S, k_i)
            torch.sub(_dot(dR, V_[i]), predicted, out=dbeta_[i]).sub_(undone.sum(-1))
            read.addcmul_(undone, beta_i, value=-1)
            reads = _dot(dq, Q[i]).addcmul_(predicted, beta_i[..., 0], value=-1)
            carried = gam[i, -1, 0] * _dot(dafter[i].flatten(1), S.flatten(1))
            dg_[i] = log_decay_gradient(read, reads, written, carried)
            dq.baddbmm_(dP, k_i)
            dk.addcmul_(dk_S, beta_i, value=-1).baddbmm_(dP.mT, Q[i]).baddbmm_(dkk + dkk.mT, k_i, alpha=-1)
            if call.l2norm:
                dq.addcmul_(Q[i], _dot(dq, Q[i])[..., None], value=-1).mul_(rq[i])
                dk.addcmul_(k_i, _dot(dk, k_i)[..., None], value=-1).mul_(rk[i])
            torch.mul(dR, beta_i, out=dU[i])
    dv = layout.join(dU.view(layout.chunks, HV, C, V), v.new_empty(v.shape))
    dq, dk = (
        layout.join(_sum_group(y.view(layout.chunks, H, group, C, K)), x.new_empty(x.shape))
        for y, x in ((dQ, q), (dK, k))
    )
    dg = layout.join(dg_.view(layout.chunks, HV, C), g.new_empty(g.shape))
    dbeta = layout.join(dbeta_.view(layout.chunks, HV, C), beta.new_empty(beta.shape))
    dfirst = dstates[: layout.N * HV].view(layout.N, HV, K, V)
    dinitial = None if call.initial_state is None else layout.in_call_order(dfirst)
    return Gradients(dq, dk, dv, dg, dbeta, initial_state=dinitial)


def step(call: Step) -> tuple[Tensor, Tensor]:
    """Returns o [B, HV, V] and the new state [B, HV, K, V] after one token."""
    if chunked_kernel.takes(call.q):
        return chunked_kernel.step(call)
    q, k, v, g, beta, state = call.q, call.k, call.v, call.g, call.beta, call.state
    B, HV, K, V = state.shape
    dtype = state.dtype
    qk = torch.stack((q, k), 2).to(dtype)  # [B, H, 2, K]
    if call.l2norm:
        qk = qk * (qk.square().sum(-1, keepdim=True) + L2NORM_EPS).rsqrt()
    if q.shape[1] != HV:
        qk = qk.repeat_interleave(HV // q.shape[1], 1)
    qk = qk.reshape(B * HV, 2, K)
    S = state.reshape(B * HV, K, V) * g.to(dtype).exp().reshape(-1, 1, 1)
    missing = torch.baddbmm(v.to(dtype).reshape(-1, 1, V), qk[:, 1:], S, alpha=-1)
    u = missing * beta.to(dtype).reshape(-1, 1, 1)
    S.baddbmm_(qk[:, 1:].mT, u)
    o = torch.bmm(qk[:, :1], S).mul_(call.scale)
    return o.view(B, HV, V).to(v.dtype), S.view(B, HV, K, V)


def decay_matrix(g: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns D [M, C, C] from g [M, C] in float64; masked before exp, since exp(20 * 63) overflows."""
    if dtype == torch.float64:
        # no wider dtype holds differences of running sums, so that each sum is added up for itself
        sums = g[:, :, None].expand(*g.shape, g.shape[1]).tril(-1).cumsum(-2)
    else:
        b = g.cumsum(-1)
        sums = (b[:, :, None] - b[:, None, :]).to(dtype)
    # to zero and not to -infinity, whose exponential took 10 times as long
    return sums.tril_().exp_().tril_()


def log_decay_gradient(pairs: Tensor, reads: Tensor, written: Tensor, carried: Tensor) -> Tensor:
    """Returns dg [M, C] without a difference of large sums.

    Token t's decay acts on everything that was written before t and is read at or after t, in four parts:

        pairs [M, C, C]     i reads what j wrote, i >= t > j
        reads [M, C]        i reads the chunk's first state, i >= t
        written [M, C]      the chunk's last state holds what j wrote, j < t
        carried [M]         the last state holds the first one

    The plain form q dq - k dk subtracts sums that strong decay makes far larger than their difference:
    rounded to bfloat16, its relative error was 348 at decay rate 16; here it is .0014. Row sums of `pairs`
    minus column sums also cancel, in float32: dA_log, which multiplies what is left by g, had 32 times the
    allowed error.
    """
    from_t_on = torch.ones_like(pairs[0]).triu_()
    behind = (from_t_on @ pairs).tril_(-1).sum(-1).add_(reads.flip(-1).cumsum(-1).flip(-1))
    # shifted, not cumsum - written: the last token's own write is of order 1, those before it e^-20 of that
    before = torch.nn.functional.pad(written[:, :-1].cumsum(-1), (1, 0))
    return behind.add_(before).add_(carried[:, None])


def _block_size(C: int, K: int, V: int) -> int:
    """Returns how many rows to compute together, so that intermediate products stay in the cache."""
    return max(1, BLOCK // (C * max(C, K + V)))


def _blocks(rows: slice, block: int) -> Iterator[slice]:
    for start in range(rows.start, rows.stop, block):
        yield slice(start, min(start + block, rows.stop))


def _decays(layout: Layout, g: Tensor, HV: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Returns g [M, C] in float64, no less than RESET, and gam and lam [M, C, 1]."""
    # in float64: where decays of -20 and -0.01 meet, differences of float32 sums cost o more than is allowed
    g_ = layout.split(g, g.new_empty((layout.chunks, HV, 1, layout.C), dtype=torch.float64))
    g_ = g_.view(-1, layout.C).clamp_(min=RESET)
    after = torch.nn.functional.pad(g_[:, 1:], (0, 1)).flip(-1).cumsum(-1).flip(-1)
    return g_, g_.cumsum(-1).exp().to(dtype)[..., None], after.exp().to(dtype)[..., None]


def _scan(A: Tensor, states: Tensor, steps: list[tuple[slice, slice, slice]]) -> None:
    """Turns Z into S' after every chunk, in states [N HV + M, K, V]."""
    for rows, first, last in steps:
        states[last].baddbmm_(A[rows], states[first])


def _scan_back(A: Tensor, dstates: Tensor, steps: list[tuple[slice, slice, slice]]) -> None:
    """Adds to the gradient of every state [N HV + M, K, V] what comes from the state after it."""
    for rows, first, last in reversed(steps):
        dstates[first].baddbmm_(A[rows].mT, dstates[last])


def _dot(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum(-1)


def _sum_group(x: Tensor) -> Tensor:
    """Returns x [chunks, H, group, C, K] summed over the value heads of a group: [chunks, H, C, K]."""
    return x[:, :, 0] if x.shape[2] == 1 else x.sum(2)
