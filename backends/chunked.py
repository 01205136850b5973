"""The gated delta rule in chunks of tokens: matrix products inside a chunk, one product from chunk to chunk.

Forward, for one chunk of C tokens of one value head, S its first state [K, V] and o the elementwise product
(derived from arXiv:2412.06464 and arXiv:2406.06484):

    b = cumsum(g)   gam_i = exp(b_i)   lam_i = exp(b_C - b_i)   D_ij = exp(b_i - b_j) if i >= j, else 0
    P = (q k^T) o D     G = (k k^T) o D         N = (I + strict_lower(diag(beta) G))^-1
    [w | u] = N diag(beta) [-diag(gam) k | v]   [A | Z] = (diag(lam) k)^T [w | u]
    S' = (gam_C I + A) S + Z                    U = u + w S                 o = scale (diag(gam) q S + P U)

Only S' waits for the chunk before. Backward, with dO = scale do and dS' the gradient of S':

    dS = (gam_C I + A)^T dS' + (diag(gam) q)^T dO + w^T P^T dO              (again all that waits)
    dU = P^T dO + diag(lam) k dS'               dR = N^T dU                 dv = diag(beta) dR
    dP = (dO U^T) o D                           dG = -strict_lower((dR U^T) o D)
    dq = diag(gam) dO S^T + dP k
    dk = diag(beta) (dG k - diag(gam) dR S^T) + dP^T q + dG^T diag(beta) k + diag(lam) U dS'^T

q and k lie one above the other in one matrix of 2 C rows, dO and -dR in another, so each product serves both.
dbeta and dg are in `backward` and `log_decay_gradient`. Computed in float32, float64 for float64 inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from backends.registry import Options
from backends.triangular import triangular_inverse

L2NORM_EPS = 1e-6
# elements of the largest tensor inside a block of chunks, 4 MiB in float32: B=8 T=512 H=6 K=32 V=64
# took 82 ms of CPU time; with 2^17, 93; without blocks, 112
BLOCK = 1 << 20


def chunk_size(K: int, V: int) -> int:
    """Tokens per chunk: 32 took 82 ms and 64 took 99 at K=32 V=64; at K=128 V=256, 183 and 147."""
    return 64 if K > 64 else 32


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which all is computed and states are kept."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Layout:
    """Where tokens lie: chunk major, [chunks, heads, C, ...]; chunks never straddle sequences.

    active      for every c, how many sequences have a c-th chunk; these lie together, longest sequence first
    order       the sequences, longest first; None: as they come
    tokens      [chunks C] the token at every place, T where there is none; None: all sequences have length T
    places      [T] the place of every token
    """

    B: int
    T: int
    C: int
    active: list[int]
    order: Tensor | None = None
    tokens: Tensor | None = None
    places: Tensor | None = None

    @property
    def chunks(self) -> int:
        return sum(self.active)

    def split(self, x: Tensor, out: Tensor, factor: float = 1.0) -> Tensor:
        """x [B, T, H, ...] into out [chunks, H, G, C, ...], times `factor`; zero where there is no token."""
        if self.tokens is not None:
            x = torch.cat([x[0], x.new_zeros((1, *x.shape[2:]))])[self.tokens].unflatten(0, (-1, self.C))
            _copy(x.transpose(1, 2).unsqueeze(2), out, factor)
            return out
        n, tail = divmod(self.T, self.C)
        out = out.unflatten(0, (-1, self.B))
        if n:
            whole = x[:, : n * self.C].unflatten(1, (n, self.C)).transpose(0, 1).transpose(2, 3)
            _copy(whole.unsqueeze(3), out[:n], factor)
        if tail:
            _copy(x[:, n * self.C :].transpose(1, 2).unsqueeze(2), out[n][:, :, :, :tail], factor)
            out[n][:, :, :, tail:].zero_()
        return out.flatten(0, 1)

    def join(self, y: Tensor, out: Tensor, factor: float = 1.0) -> Tensor:
        """y [chunks, H, C, ...] back into out [B, T, H, ...], times `factor`."""
        if self.places is not None:
            y = y.transpose(1, 2).flatten(0, 1)[self.places]
            _copy(y.unsqueeze(0), out, factor)
            return out
        n, tail = divmod(self.T, self.C)
        y = y.unflatten(0, (-1, self.B))
        if n:
            _copy(
                y[:n].transpose(2, 3).transpose(0, 1),
                out[:, : n * self.C].unflatten(1, (n, self.C)),
                factor,
            )
        if tail:
            _copy(y[n][:, :, :tail].transpose(1, 2), out[:, n * self.C :], factor)
        return out


def _copy(x: Tensor, out: Tensor, factor: float) -> None:
    """out = factor x, the product taken in the wider of the two dtypes."""
    if factor == 1.0:
        out.copy_(x)
    elif x.dtype == out.dtype:
        torch.mul(x, factor, out=out)
    elif x.element_size() < out.element_size():
        out.copy_(x).mul_(factor)
    else:
        out.copy_(x * factor)


def layout(B: int, T: int, C: int, cu_seqlens: Tensor | None) -> Layout:
    """Chunks of B sequences of T tokens, or of the packed ones."""
    if cu_seqlens is None:
        return Layout(B, T, C, [B] * (-(-T // C)))
    bounds = cu_seqlens.cpu()
    starts, lengths = bounds[:-1], bounds.diff()
    counts = (lengths + C - 1) // C
    order = torch.argsort(counts, descending=True, stable=True)
    steps = int(counts.max())
    active = [int((counts > step).sum()) for step in range(steps)]
    first, chunk_step = [], []
    for step, n in enumerate(active):
        first.append(order[:n])
        chunk_step.append(torch.full((n,), step))
    empty = torch.zeros(0, dtype=torch.int64)
    sequence = torch.cat(first) if first else empty
    offset = (torch.cat(chunk_step) if first else empty)[:, None] * C + torch.arange(C)
    inside = offset < lengths[sequence][:, None]
    tokens = torch.where(inside, starts[sequence][:, None] + offset, T).flatten()
    places = torch.empty(T + 1, dtype=torch.int64)
    places[tokens] = torch.arange(tokens.numel())
    device = cu_seqlens.device
    return Layout(B, T, C, active, order.to(device), tokens.to(device), places[:T].to(device))


def capacity(B: int, T: int, C: int, cu_seqlens: Tensor | None) -> int:
    """Chunks that there may be: known without looking at the data."""
    return B * (-(-T // C)) if cu_seqlens is None else T // C + cu_seqlens.shape[0] - 1


def saved_shapes(
    q: Tensor, v: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None, options: Options
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """What forward leaves for backward: q above k, their reciprocal norms, P above G, N, [w | u], A, S, U."""
    (B, T, _, K), (HV, V) = q.shape, v.shape[2:]
    C, dtype = chunk_size(K, V), state_dtype(q.dtype)
    M = capacity(B, T, C, cu_seqlens) * HV
    shapes = [
        (M, 2, C, K),
        (M, 2, C, 1) if options.use_qk_l2norm_in_kernel else (0,),
        (M, 2, C, C),
        (M, C, C),
        (M, C, K + V),
        (M, K, K + V),
        (M, K, V),
        (M, C, V),
    ]
    return [(shape, dtype) for shape in shapes]


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
    """o, final_state and what `saved_shapes` lists; shapes as in `backends.gated_delta_rule`."""
    (B, T, H, K), (HV, V) = q.shape, v.shape[2:]
    C, dtype, group = chunk_size(K, V), state_dtype(q.dtype), HV // H
    at = layout(B, T, C, cu_seqlens)
    M = at.chunks * HV
    buffers = [
        q.new_empty(shape, dtype=d) for shape, d in saved_shapes(q, v, initial_state, cu_seqlens, options)
    ]
    qk, r, PG, N, wu, AZ, S, U = (x[:M] for x in buffers)
    for i, x in enumerate((q, k)):
        at.split(x, qk[:, i].unflatten(0, (-1, H, group)))
    if options.use_qk_l2norm_in_kernel:
        torch.sum(qk.square(), -1, keepdim=True, out=r)
        r.add_(L2NORM_EPS).rsqrt_()
        qk.mul_(r)
    Q, K_ = qk[:, 0], qk[:, 1]
    b, gam, lam = _decays(at, g, HV, dtype)
    beta_ = at.split(beta, gam.new_empty((at.chunks, HV, 1, C))).view(M, C, 1)
    at.split(v, wu.view(at.chunks, HV, 1, C, K + V)[..., K:])
    for rows in _blocks(M, C, K, V):
        k_, b_, gam_, lam_, be = K_[rows], b[rows], gam[rows], lam[rows], beta_[rows]
        pg = torch.bmm(qk[rows].view(-1, 2 * C, K), k_.mT, out=PG[rows].view(-1, 2 * C, C)).view(-1, 2, C, C)
        pg.mul_(decay_matrix(b_)[:, None])
        N[rows] = triangular_inverse(pg[:, 1] * be)
        kv = wu.new_empty(k_.shape[0], C, K + V)
        torch.mul(k_, be * gam_, out=kv[..., :K]).neg_()
        torch.mul(wu[rows][..., K:], be, out=kv[..., K:])
        torch.bmm(N[rows], kv, out=wu[rows])
        torch.bmm((k_ * lam_).mT, wu[rows], out=AZ[rows])
        AZ[rows].diagonal(dim1=-2, dim2=-1).add_(gam_[:, -1])
    first = _states(initial_state, at, S, HV, cu_seqlens)
    final = _scan(AZ[..., :K], AZ[..., K:], S, first, at, HV)
    o_ = U.new_empty(U.shape)
    for rows in _blocks(M, C, K, V):
        torch.baddbmm(wu[rows][..., K:], wu[rows][..., :K], S[rows], out=U[rows])
        torch.bmm(Q[rows] * gam[rows], S[rows], out=o_[rows])
        o_[rows].baddbmm_(PG[rows, 0], U[rows])
    o = at.join(o_.view(at.chunks, HV, C, V), v.new_empty(v.shape), options.scale)
    if at.order is not None:
        final = final[at.order.argsort()]
    return o, final if options.output_final_state else None, buffers if save else []


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
    (B, T, H, K), (HV, V) = q.shape, v.shape[2:]
    C, dtype, group = chunk_size(K, V), state_dtype(q.dtype), HV // H
    at = layout(B, T, C, cu_seqlens)
    M = at.chunks * HV
    qk, r, PG, N, wu, AZ, S, U = (x[:M] for x in saved)
    Q, K_ = qk[:, 0], qk[:, 1]
    b, gam, lam = _decays(at, g, HV, dtype)
    beta_ = at.split(beta, gam.new_empty((at.chunks, HV, 1, C))).view(M, C, 1)
    dOR = S.new_empty((M, 2, C, V))
    at.split(do, dOR[:, 0].unflatten(0, (-1, HV, 1)), options.scale)
    dO = dOR[:, 0]
    dU, dZ = U.new_empty(U.shape), S.new_empty(S.shape)
    for rows in _blocks(M, C, K, V):
        torch.bmm(PG[rows, 0].mT, dO[rows], out=dU[rows])
        torch.bmm((Q[rows] * gam[rows]).mT, dO[rows], out=dZ[rows])
        dZ[rows].baddbmm_(wu[rows][..., :K].mT, dU[rows])
    dS = S.new_empty(S.shape)
    dlast = _states(dstate, at, S, HV, cu_seqlens)
    dfirst = _scan_back(AZ[..., :K], dZ, dS, dlast, at, HV)
    del dZ
    V_ = at.split(v, S.new_empty((at.chunks, HV, 1, C, V))).view(M, C, V)
    dqk, dg_, dbeta_ = qk.new_empty(qk.shape), gam.new_empty(b.shape), gam.new_empty(b.shape)
    for rows in _blocks(M, C, K, V):
        k_, gam_, be, dor, d_qk = K_[rows], gam[rows], beta_[rows], dOR[rows].view(-1, 2 * C, V), dqk[rows]
        dR = torch.bmm(N[rows].mT, dU[rows].baddbmm_(k_ * lam[rows], dS[rows]))
        torch.neg(dR, out=dOR[rows, 1])
        pairs = torch.bmm(dor, U[rows].mT).view(-1, 2, C, C)
        weighted = pairs * PG[rows]
        weighted.diagonal(dim1=-2, dim2=-1).zero_()
        pairs.mul_(decay_matrix(b[rows])[:, None])
        pairs[:, 1].diagonal(dim1=-2, dim2=-1).zero_()
        pairs, factors = pairs.view(-1, 2 * C, C), torch.stack((torch.ones_like(be), be), 1)
        torch.bmm(dor, S[rows].mT, out=d_qk.view(-1, 2 * C, K)).view_as(d_qk).mul_(gam_[:, None])
        read = weighted.sum(-1) + (d_qk * qk[rows]).sum(-1)
        d_qk.view(-1, 2 * C, K).baddbmm_(pairs, k_)
        dk_ = torch.bmm(U[rows], dS[rows].mT).mul_(lam[rows])
        written = (dk_ * k_).sum(-1)
        dk_.baddbmm_(pairs.mT, (qk[rows] * factors).view(-1, 2 * C, K))
        d_qk[:, 1].mul_(be).add_(dk_)
        if options.use_qk_l2norm_in_kernel:
            along = (d_qk * qk[rows]).sum(-1, keepdim=True)
            d_qk.addcmul_(qk[rows], along, value=-1).mul_(r[rows])
        columns = torch.bmm(factors.view(-1, 1, 2 * C), weighted.view(-1, 2 * C, C))[:, 0]
        inside = torch.addcmul(read[:, 0], read[:, 1], be[..., 0]) - columns
        carried = gam_[:, -1, 0] * (dS[rows] * S[rows]).sum((-1, -2))
        dg_[rows] = log_decay_gradient(inside, written, carried)
        torch.add(read[:, 1], (dR * V_[rows]).sum(-1), out=dbeta_[rows])
        torch.mul(dR, be, out=dU[rows])
    dv = at.join(dU.view(at.chunks, HV, C, V), v.new_empty(v.shape))
    dq, dk = (
        at.join(_ungrouped(dqk[:, i].view(at.chunks, H, group, C, K)), x.new_empty(x.shape))
        for i, x in enumerate((q, k))
    )
    dg = at.join(dg_.view(at.chunks, HV, C), g.new_empty(g.shape))
    dbeta = at.join(dbeta_.view(at.chunks, HV, C), beta.new_empty(beta.shape))
    dinitial = None
    if initial_state is not None:
        dinitial = dfirst if at.order is None else dfirst[at.order.argsort()]
    return dq, dk, dv, dg, dbeta, dinitial


def step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, options: Options
) -> tuple[Tensor, Tensor]:
    """One token: o [B, HV, V] and the new state [B, HV, K, V]."""
    B, HV, K, V = state.shape
    dtype = state.dtype
    qk = torch.stack((q, k), 2).to(dtype)
    if options.use_qk_l2norm_in_kernel:
        qk = qk * (qk.square().sum(-1, keepdim=True) + L2NORM_EPS).rsqrt()
    if q.shape[1] != HV:
        qk = qk.repeat_interleave(HV // q.shape[1], 1)
    qk = qk.reshape(B * HV, 2, K)
    S = state.reshape(B * HV, K, V) * g.to(dtype).exp().reshape(-1, 1, 1)
    u = torch.baddbmm(v.to(dtype).reshape(-1, 1, V), qk[:, 1:], S, alpha=-1) * beta.to(dtype).reshape(
        -1, 1, 1
    )
    S.baddbmm_(qk[:, 1:].mT, u)
    o = torch.bmm(qk[:, :1], S).mul_(options.scale)
    return o.view(B, HV, V).to(v.dtype), S.view(B, HV, K, V)


def decay_matrix(b: Tensor) -> Tensor:
    """D [M, C, C] from the sums of log-decays b [M, C]; masked before exp, for exp(20 * 63) is infinite."""
    C = b.shape[-1]
    above = torch.full((C, C), -torch.inf, dtype=b.dtype, device=b.device).triu_(1)
    return (b[:, :, None] - b[:, None, :]).add_(above).exp_()


def log_decay_gradient(inside: Tensor, written: Tensor, carried: Tensor) -> Tensor:
    """dg [M, C] without a difference of large sums.

    Token t's decay acts on what tokens before t left: on products that read at or after t what was there
    before t (`inside`: by token of reading, minus by token of writing, diagonals left out since a token does
    not decay itself), on what the chunk's earlier tokens wrote to its last state (`written`), and on its
    first state's way to the last (`carried` [M]). The plain q dq - k dk form subtracts sums that strong
    decay makes far larger than their difference: rounded to bfloat16, its relative error was 348 at decay
    rate 16, this one's .0014.
    """
    behind = inside.flip(-1).cumsum(-1).flip(-1)
    # shifted, not cumsum - written: the last token's own write is of order 1, those before it e^-20 of that
    before = torch.nn.functional.pad(written[:, :-1].cumsum(-1), (1, 0))
    return behind.add_(before).add_(carried[:, None])


def _blocks(M: int, C: int, K: int, V: int) -> Iterator[slice]:
    """Chunks to do at a time, so that what is only passed on from product to product stays in the cache."""
    rows = max(1, BLOCK // (C * max(2 * C, K + V)))
    for start in range(0, M, rows):
        yield slice(start, min(start + rows, M))


def _decays(at: Layout, g: Tensor, HV: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """b [M, C] float64, and gam, lam [M, C, 1]."""
    # in float64: where decays of -20 and -0.01 meet, differences of float32 sums cost o more than parity allows
    b = at.split(g, g.new_empty((at.chunks, HV, 1, at.C), dtype=torch.float64)).view(-1, at.C).cumsum(-1)
    return b, b.exp().to(dtype)[..., None], (b[:, -1:] - b).exp().to(dtype)[..., None]


def _states(x: Tensor | None, at: Layout, S: Tensor, HV: int, cu_seqlens: Tensor | None) -> Tensor:
    """States, or their gradients, [N, HV, K, V] in the order of the layout; a new tensor."""
    N = at.B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if x is None:
        return S.new_zeros((N, HV, *S.shape[1:]))
    return x.to(S.dtype, copy=True) if at.order is None else x[at.order].to(S.dtype)


def _scan(A: Tensor, Z: Tensor, S: Tensor, states: Tensor, at: Layout, HV: int) -> Tensor:
    """Fills S [M, K, V] with every chunk's first state; `states` become the last ones."""
    states_ = states.flatten(0, 1)
    start = 0
    for n in at.active:
        rows = slice(start, start + n * HV)
        S[rows] = states_[: n * HV]
        torch.baddbmm(Z[rows], A[rows], S[rows], out=states_[: n * HV])
        start += n * HV
    return states


def _scan_back(A: Tensor, dZ: Tensor, dS: Tensor, states: Tensor, at: Layout, HV: int) -> Tensor:
    """Fills dS with the gradient of every chunk's last state; `states` become gradients of the first ones."""
    states_ = states.flatten(0, 1)
    end = at.chunks * HV
    for n in reversed(at.active):
        rows = slice(end - n * HV, end)
        dS[rows] = states_[: n * HV]
        torch.baddbmm(dZ[rows], A[rows].mT, dS[rows], out=states_[: n * HV])
        end -= n * HV
    return states


def _ungrouped(x: Tensor) -> Tensor:
    """[chunks, H, G, C, K] -> [chunks, H, C, K], summed over the value heads of a group."""
    return x[:, :, 0] if x.shape[2] == 1 else x.sum(2)
