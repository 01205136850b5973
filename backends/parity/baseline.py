"""The implementation that parity compares errors with: plain PyTorch at the same precision.

It is the chunkwise form of arXiv:2412.06464 with the WY representation of arXiv:2406.06484. For
each chunk of C tokens, in the notation of `backends.gated_delta_rule`, with V standing for the
values [C, V]:

    L  = strict lower triangle of diag(beta) K K^T . D       [C, C]
    T  = (I + L)^-1                                          [C, C]
    U  = T diag(beta) V - T diag(beta exp(b)) K S            [C, V]
    P  = scale * (Q K^T) . D                                 [C, C]
    O  = scale * diag(exp(b)) Q S + P U                      [C, V]
    S <- exp(b_C) S + K^T diag(exp(b_C - b)) U               [K, V]

Where each channel of a key decays, D is a matrix for each of them, and what it multiplies is a sum
of them:

    (K K^T . D)_ij -> sum over c of k_ic (k_jc D_ijc)        diag(exp(b)) Q -> Q . exp(b)      and so on

Its gradients are PyTorch's own. It is what a careful reader of the papers would write first. Every
product rounds its operands to the training dtype and adds in float32, forward and backward, as
matrix units do. State, decay sums, exponentials and the triangular inverse are float32, float64 for
float64 inputs. The logarithms of decays are summed segment by segment (Mamba-2's segment sums,
arXiv:2405.21060) and not as differences of running sums, so that they keep their digits where
strong and weak decays meet.

It shares no line with the judge or with a backend, gates included. Several samples are computed at
once, each with rounding errors of its own (`Rounding`), since one sample's error may be small by
chance.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from delta_trn.backends.parity.tables import Tables

CHUNK = 64
AT_ONCE = 1 << 18  # terms of channels that are computed together, where channels decay
# Random samples of a short dtype scale v and states by this. Without it, beta = 1 and a single
# write give U = v exactly, and no product would round, as it does with any other beta.
UNIT = 1.1


class Noise:
    """Draws random numbers as slices of one pool, at random places:
    drawing took longer than the products.

    tables      the errors of functions, where they have some
    """

    POOL = 1 << 21

    def __init__(
        self, seed: int, device: torch.device | str = "cpu", tables: Tables | None = None
    ) -> None:
        self.tables = tables
        self.generator = torch.Generator().manual_seed(seed)
        pool = torch.randint(1 << 31, (self.POOL,), generator=self.generator, dtype=torch.int32)
        self.bits = pool.to(device)
        self.ulps: dict[torch.dtype, Tensor] = {}

    def integers(self, x: Tensor) -> Tensor:
        """Returns an integer in [0, 2^31) for each element of x."""
        return self._like(self.bits, x)

    def factors(self, x: Tensor) -> Tensor:
        """Returns 1 for each element of x but one in eight, which gets 1 + eps or 1 - eps.

        In float64 one in two: there the judge's own error counts, and a sample that moves nothing
        has it.
        """
        if x.dtype not in self.ulps:
            few = 1 << (29 if x.dtype == torch.float64 else 27)
            signs = (self.bits < few).to(x.dtype) - (self.bits >= 2**31 - few).to(x.dtype)
            self.ulps[x.dtype] = 1 + torch.finfo(x.dtype).eps * signs
        return self._like(self.ulps[x.dtype], x)

    def orders(self, n: int, size: int) -> Tensor:
        """Returns n permutations of `size` channels, [n, size]."""
        return torch.stack([torch.randperm(size, generator=self.generator) for _ in range(n)])

    def _like(self, pool: Tensor, x: Tensor) -> Tensor:
        n, half = x.numel(), self.POOL // 2
        start = int(torch.randint(half, (), generator=self.generator))
        if n <= half:
            return pool[start : start + n].view(x.shape)
        return pool.roll(start).repeat(-(-n // self.POOL))[:n].view(x.shape)


@dataclass(frozen=True)
class Rounding:
    """Rounds to the nearest; with `noise` at random (Monte Carlo arithmetic, Parker 1997).

    dtype   of the operands of products. With noise an operand goes to either neighbor, so that its
            mean is exact; and every result moves by an ulp one time in eight, about what rounding
            to it costs
    """

    dtype: torch.dtype
    noise: Noise | None = None

    def operand(self, x: Tensor) -> Tensor:
        """Returns x rounded to `dtype`, in its own dtype."""
        if self.noise is not None and x.dtype == torch.float32 != self.dtype:
            # a float32 has 2^extra bit patterns for each of the shorter dtype
            extra = round(math.log2(torch.finfo(self.dtype).eps / torch.finfo(torch.float32).eps))
            random = self.noise.integers(x) >> (31 - extra)
            x = ((x.view(torch.int32) + random) & -(1 << extra)).view(torch.float32)
        return x.to(self.dtype).to(x.dtype)

    def disturb(self, x: Tensor) -> Tensor:
        """Returns x with an element in eight moved by an ulp."""
        return x if self.noise is None else x * self.noise.factors(x)

    def function(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Returns function(x), with the error of a table where the noise has tables."""
        tables = self.noise and self.noise.tables
        return tables(function, x) if tables else function(x)

    def short(self, x: Tensor) -> Tensor:
        """Returns a result rounded to `dtype`; its gradient is rounded, too."""
        return _BothWays.apply(x, self.operand)  # pyright: ignore[reportReturnType]

    def __call__(self, x: Tensor) -> Tensor:
        """Returns a result, disturbed; its gradient is disturbed, too."""
        return x if self.noise is None else _BothWays.apply(x, self.disturb)  # pyright: ignore[reportReturnType]


class _BothWays(torch.autograd.Function):
    """Changes a tensor, and its gradient in the same way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.change = change
        return change(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return ctx.change(grad_outputs[0]), None


class _Product(torch.autograd.Function):
    """Multiplies rounded operands, also in the products of its gradient."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, rounding: Rounding) -> Tensor:
        a, b = rounding.operand(a), rounding.operand(b)
        ctx.save_for_backward(a, b)
        ctx.rounding = rounding
        return add_up(a, b, rounding)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None]:
        (a, b), rounding = ctx.saved_tensors, ctx.rounding
        dc = rounding.operand(grad_outputs[0])
        return add_up(dc, b.mT, rounding), add_up(a.mT, dc, rounding), None


class _Inverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, L: Tensor, rounding: Rounding) -> Tensor:
        T = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device).expand(L.shape).clone()
        for j in range(L.shape[-1] - 1):
            T[..., j + 1 :, : j + 1] -= L[..., j + 1 :, j, None] * T[..., j, None, : j + 1]
        ctx.save_for_backward(T)
        ctx.rounding = rounding
        return T

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        (T,) = ctx.saved_tensors
        return -add_up(add_up(T.mT, grad_outputs[0], ctx.rounding), T.mT, ctx.rounding).tril(
            -1
        ), None


def invert(L: Tensor, rounding: Rounding) -> Tensor:
    """Returns (I + L)^-1 for strictly lower L [.., C, C], by substitution:
    row j from the rows after it.
    """
    return _Inverse.apply(L, rounding)  # pyright: ignore[reportReturnType]


def add_up(a: Tensor, b: Tensor, rounding: Rounding) -> Tensor:
    """Returns a @ b; where operands are not rounded, terms are added one by one in their order.

    These are the same sums on every CPU. A BLAS adds in the order that suits its registers and
    threads: with one thread or two, with AVX-512 or without, the errors of case reflect differed by
    a factor of 20.
    """
    (M, K), N = a.shape[-2:], b.shape[-1]
    if rounding.dtype.itemsize < 4 or K == 0:
        return a @ b
    # einsum would add the terms of a number in several sums
    if a.device.type == "cpu" and M * N > 1:
        axes = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        total = a.new_empty((*axes, M, N))
        lefts = a.mT.expand(*axes, K, M).reshape(-1, K, M).contiguous().numpy()
        rights = b.expand(*axes, K, N).reshape(-1, K, N).contiguous().numpy()
        for left, right, out in zip(lefts, rights, total.view(-1, M, N).numpy(), strict=True):
            np.einsum("km,kn->mn", left, right, out=out)  # adds row after row of both
        return total
    total = a[..., :1] * b[..., :1, :]
    for i in range(1, K):
        total += a[..., i, None] * b[..., i, None, :]
    return total


def product(a: Tensor, b: Tensor, rounding: Rounding) -> Tensor:
    """Returns a @ b for a [.., M, K], b [.., K, N],
    as a matrix unit fed with a shorter dtype computes it.
    """
    return _Product.apply(a, b, rounding)  # pyright: ignore[reportReturnType]


def make_gates(
    a: Tensor,
    z: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    beta_max: float,
    noise: Noise | None,
    lower_bound: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns g and beta of a call, in float32 at least: from a layer's projections, where they are
    such.

        g = -exp(A_log) softplus(a + dt_bias) = -r (r softplus(x)) = -(r exp(x/2))^2 for x far below
        0

    With r = exp(A_log / 2) no factor, and no gradient on its way, overflows where the other
    underflows. With a lower bound g = lower_bound sigmoid(exp(A_log) x).
    """
    g, beta = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (a, z))
    rounding = Rounding(g.dtype, noise)
    if A_log is not None:
        channels = g.dim() - beta.dim()  # their axis, if there is one, is the last
        head = (..., None, None, slice(None), *[slice(None)] * channels)
        x = g if dt_bias is None else g + dt_bias.to(g.dtype)[head]
        r = rounding.function(torch.exp, 0.5 * A_log.to(g.dtype))
        r = rounding(r[..., None] if channels else r)[head]
        if lower_bound is None:
            near = r * (r * rounding(rounding.function(_softplus, x.clamp(min=-40.0))))
            far = (r * rounding(rounding.function(torch.exp, 0.5 * x.clamp(max=-40.0)))).square()
            g = rounding(-torch.where(x < -40.0, far, near))
        else:
            y = rounding(r * (r * x)).clamp(-800.0, 800.0)
            g = rounding(lower_bound * rounding.function(torch.sigmoid, y))
    if beta_max:
        beta = rounding(beta_max * rounding.function(torch.sigmoid, beta))
    return g, beta


def _softplus(x: Tensor) -> Tensor:
    return torch.logaddexp(x, torch.zeros_like(x))


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
    *,
    chunk: int = CHUNK,
    noise: Noise | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns o and final_state, with the shapes of `backends.gated_delta_rule`.

    All tensors may have an axis of samples before those. With noise, each sample adds K and V up in
    an order of its own, by a permutation of the channels, which changes nothing but rounding.
    Without it, a product that nearly cancels has one error in all samples, and a backend that adds
    in another order has another.
    """
    channels, K, V = g.dim() == q.dim(), None, None
    if noise is not None:
        samples = q.shape[0] if q.dim() > 4 else 1
        K, V = (noise.orders(samples, x.shape[-1]).to(x.device) for x in (q, v))
        q, k, v = _reorder(q, K), _reorder(k, K), _reorder(v, V)
        g = _reorder(g, K) if channels else g
        initial_state = None if initial_state is None else _reorder(initial_state, V, K)
    dtype, group = q.dtype, v.shape[-2] // q.shape[-2]
    full, rounding = torch.promote_types(dtype, torch.float32), Rounding(dtype, noise)
    q, k, v, g, beta = (x.to(full) for x in (q, k, v, g, beta))
    unit = 1.0 if noise is None or dtype == full else UNIT
    v = v * unit
    if l2norm:
        squares = (x.square().sum(-1, keepdim=True) + 1e-6 for x in (q, k))
        norms = (rounding(rounding.function(torch.rsqrt, x)) for x in squares)
        q, k = (rounding(x * r) for x, r in zip((q, k), norms, strict=True))
    q, k = (x.repeat_interleave(group, dim=-2) for x in (q, k))
    q, k, v = (x.movedim(-3, -2) for x in (q, k, v))  # [.., B, HV, T, K or V]
    g, beta = g.movedim(-3, -2) if channels else g.mT, beta.mT
    lengths = [q.shape[-2]] if cu_seqlens is None else cu_seqlens.diff().tolist()
    sizes = [min(chunk, length - start) for length in lengths for start in range(0, length, chunk)]
    # split, not slices: the gradient of a slice is as large as the whole
    time = (-2, -2, -2, -2 if channels else -1, -1)
    parts = zip(
        *(x.split(sizes, axis) for x, axis in zip((q, k, v, g, beta), time, strict=True)),
        strict=True,
    )
    step = _channel_chunk if channels else _chunk
    rows = q.shape[-4] if cu_seqlens is None else 1
    zeros = q.new_zeros((*q.shape[:-4], rows * len(lengths), q.shape[-3], q.shape[-1], v.shape[-1]))
    first = zeros if initial_state is None else initial_state.to(full) * unit
    outputs, states = [v[..., :0, :]], []
    for length, S in zip(lengths, first.split(rows, -4), strict=True):
        for _ in range(0, length, chunk):
            o, S = step(*next(parts), S=S, scale=scale, unit=unit, rounding=rounding)
            outputs.append(o)
        states.append(S / unit)
    o, S = torch.cat(outputs, dim=-2).movedim(-2, -3).to(dtype), torch.cat(states, dim=-4)
    if K is None or V is None:
        return o, S
    return _reorder(o, V.argsort(-1)), _reorder(S, V.argsort(-1), K.argsort(-1))


def _reorder(x: Tensor, *orders: Tensor) -> Tensor:
    """Returns x with the channels of its last axis, and of the one before, in another order.

    An order is [samples, channels] or [1, channels].
    """
    for axis, order in enumerate(orders, 1):
        shape = [1] * x.dim()
        shape[-axis], shape[0] = order.shape[1], order.shape[0]
        x = x.gather(x.dim() - axis, order.view(shape).expand_as(x))
    return x


def _chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    S: Tensor,
    scale: float,
    unit: float,
    rounding: Rounding,
) -> tuple[Tensor, Tensor]:
    """Returns O, and the state after the chunk in the unit of v and S;
    P is scaled with O, at the end.
    """
    r = rounding
    # a sum of -170 is rounded by 3e-14. In float64 the judge is no better, and samples whose sums
    # were alike had no such error
    sums = r if g.dtype == torch.float64 else lambda x: x
    D = r(r.function(torch.exp, sums(_segment_sums(g))))
    gam = r(r.function(torch.exp, sums(g.cumsum(-1))))
    after = pad(g[..., 1:], (0, 1)).flip(-1).cumsum(-1).flip(-1)  # b_C - b
    lam = r(r.function(torch.exp, sums(after)))
    L = r((beta[..., None] * product(k, k.mT, r) * D).tril(-1))
    T = r(invert(L, r))
    written = product(T, r(beta[..., None] * v), r)
    erased = product(product(T, r((beta * gam)[..., None] * k), r), S, r)
    U = r(written - erased)
    # read in o's own unit, so that its gradient is rounded no more than otherwise
    from_state = (gam / unit)[..., None] * r(product(q, S, r))
    from_chunk = r(product(r(product(q, k.mT, r) * D) / unit, U, r))
    S = r(gam[..., -1][..., None, None] * S + product(k.mT, r(lam[..., None] * U), r))
    return scale * (from_state + from_chunk), S


def _channel_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    S: Tensor,
    scale: float,
    unit: float,
    rounding: Rounding,
) -> tuple[Tensor, Tensor]:
    """Returns the same where channels decay, g [.., C, K];
    kk and P add up channel after channel.
    """
    r = rounding
    gam = r(r.function(torch.exp, r(g.cumsum(-2))))
    after = pad(g[..., 1:, :], (0, 0, 0, 1)).flip(-2).cumsum(-2).flip(-2)
    lam = r(r.function(torch.exp, r(after)))
    both = torch.stack((k, q)).mT  # [2, .., K, C]
    sums = torch.zeros_like(both[..., :1, :].mT * both[..., :1, :])
    few = max(1, AT_ONCE // max(1, sums[0].numel()))
    for x, g_c in zip(both.split(few, -2), g.mT.split(few, -2), strict=True):
        decayed = r.short(r(x[0, ..., None, :] * r(r.function(torch.exp, r(_segment_sums(g_c))))))
        for term in (r.short(x)[..., None] * decayed).unbind(-3):
            sums = sums + term
    kk, P = sums
    T = r(invert(r((beta[..., None] * kk).tril(-1)), r))
    written = product(T, r(beta[..., None] * v), r)
    erased = product(product(T, r(r(beta[..., None] * gam) * k), r), S, r)
    U = r(written - erased)
    from_state = r(product(r(q * gam), S, r)) / unit
    from_chunk = r(product(r(P / unit), U, r))
    S = r(gam[..., -1, :, None] * S + product(r(k * lam).mT, U, r))
    return scale * (from_state + from_chunk), S


def _segment_sums(g: Tensor) -> Tensor:
    """Maps g [.., C] to its sums over j < l <= i [.., C, C], -inf above the diagonal."""
    C = g.shape[-1]
    below = torch.ones((C, C), dtype=torch.bool, device=g.device).tril(-1)
    sums = g[..., :, None].expand(*g.shape, C).masked_fill(~below, 0.0).cumsum(-2)
    return sums.masked_fill(below.mT, float("-inf"))
