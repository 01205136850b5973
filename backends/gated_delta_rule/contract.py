"""The contract between the delta rules and a backend: a call, its gradients, and four functions.

Kimi Delta Attention is the same contract with g [..., HV, K], a decay per channel of a key. A
backend says in its rows of the table which of the two it computes.

To add a backend, write a module with the functions of `Adapter` and add a row to the table of
`backends.dispatch`. The grid of `backends.parity` and its judge then apply to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

L2NORM_EPS = 1e-6
# A g at or below this is a reset: its decay is exactly 0 in every dtype (in float64 from -746 on,
# in float32 from -104 on). A backend that sums log decays first raises every g below RESET to it,
# so that the sum keeps the digits of the other tokens.
RESET = -1024.0
VECTORS = (
    32  # elements of the most vectors that PyTorch computes at once: two of 512 bits in float32
)
ONE_THREAD = 32767  # PyTorch divides more elements among threads
MOST_COLUMNS = ONE_THREAD // VECTORS

Shapes = list[tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class Rule:
    """One call of `gated_delta_rule`; shapes, dtypes and equations are in
    `backends.gated_delta_rule`.

    g           one more dimension, K, makes it a call of `kimi_delta_attention`; dt_bias is [HV, K]
                then
    A_log       if present, g is the projection a of the gate:  g <- -exp(A_log) softplus(a + dt_bias)
    lower_bound     with A_log, the gate is another:  g <- lower_bound sigmoid(exp(A_log) (a +
                                                      dt_bias)); without it, g is given, and the
                                                      caller promises that it is -inf, which is a
                                                      reset, in all channels of a head, or at least
                                                      lower_bound
    position    int64 [B, T], each token's place in its own sequence: one whose place is 0 forgets
                what was before it, whatever its g is. Of `kimi_delta_attention` without cu_seqlens
    beta_max    if above 0, beta is a projection, too:  beta <- beta_max sigmoid(beta)
    l2norm      q and k are to be normalized

    Tensors may have any strides.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    initial_state: Tensor | None = None
    cu_seqlens: Tensor | None = None
    position: Tensor | None = None
    scale: float = 1.0
    beta_max: float = 0.0
    l2norm: bool = False
    output_final_state: bool = False
    lower_bound: float | None = None

    @property
    def has_channels(self) -> bool:
        """Whether each channel of a key has a decay of its own."""
        return self.g.dim() == self.q.dim()

    @property
    def sequences(self) -> int:
        """N, the number of sequences."""
        return self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1


@dataclass(frozen=True)
class Step:
    """One call of `gated_delta_rule_step`: one token per sequence, with the options of `Rule`.

    With indices [B, T] state is a pool, and q, k, v, g, beta have the T tokens of each sequence one
    behind the other, [B T, ...]; accepted [B] may be absent. Only a module that says `TAKES_POOL =
    True` sees such a call: it writes into the pool and returns o and None. For the others
    `states.step_in_pool` takes states out of it, token by token.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    state: Tensor
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    indices: Tensor | None = None
    accepted: Tensor | None = None
    scale: float = 1.0
    beta_max: float = 0.0
    l2norm: bool = False
    lower_bound: float | None = None

    has_channels = Rule.has_channels

    def as_sequence(self) -> Rule:
        """Returns the call of `gated_delta_rule` with T = 1 that computes the same."""
        q, k, v, g, beta = (x[:, None] for x in (self.q, self.k, self.v, self.g, self.beta))
        return Rule(
            q, k, v, g, beta, self.A_log, self.dt_bias, self.state, None, None, self.scale,
            self.beta_max, self.l2norm, output_final_state=True, lower_bound=self.lower_bound,
        )  # fmt: skip


AnyCall = TypeVar("AnyCall", Rule, Step)


class Gradients(NamedTuple):
    """The gradients of a `Rule`'s tensors, each in its tensor's shape and dtype; None where it is
    absent.

    No two may share an element; dq, dk, dv, and dg, dbeta, may lie side by side in one tensor.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    initial_state: Tensor | None = None


class Adapter(Protocol):
    """A backend of the gated delta rule: a module with these four functions.

    Arguments have been checked, autocast is off, and autograd records nothing here. Only a module
    that says `MAKES_GATES = True` ever sees `A_log` or `beta_max`; for the others PyTorch makes g
    and beta before. Only one that says `TAKES_PLACES = True` sees `position`; for the others g is
    -inf where a token forgets, or is made of what makes it so.
    """

    def forward(self, call: Rule, *, save: bool) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        """Returns o, final_state and the tensors that backward needs besides the call's own.

        final_state is None unless `call.output_final_state`; the list is empty unless `save`.
        """
        ...

    def backward(
        self, do: Tensor, dstate: Tensor | None, call: Rule, saved: list[Tensor]
    ) -> Gradients:
        """Returns all gradients, from those of o and final_state (None: zeros) and what forward
        saved.

        Under torch.compile the tensors are the caller's, so none may be written to.
        """
        ...

    def step(self, call: Step) -> tuple[Tensor, Tensor | None]:
        """Returns o and the new state; `call.state` stays as it is,
        unless it is a pool: see `Step`.
        """
        ...

    def saved_shapes(self, call: Rule) -> Shapes:
        """Returns shape and dtype of what forward saves, from shapes alone: torch.compile asks with
        tensors that have no data, and the lengths of packed sequences are not known.
        """
        ...


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of states, and of PyTorch's sums, for inputs of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def log_decay(
    a: Tensor, A_log: Tensor, dt_bias: Tensor | None = None, lower_bound: float | None = None
) -> Tensor:
    """Returns g = -exp(A_log) softplus(a + dt_bias), the logarithm of the decay (arXiv:2405.21060).

    With a lower bound it is lower_bound sigmoid(exp(A_log) (a + dt_bias)), of Kimi Delta
    Attention's layers. a is [..., HV], A_log and dt_bias are [HV]. Computed in the dtype of a, in
    float32 at least: a decay of 0.999 is 1 in bfloat16. No factor overflows alone, so that no 0
    meets an infinity, and none is so small that a small gradient of g underflows on its way.

        >>> log_decay(torch.zeros(1), torch.zeros(1)).exp()
        tensor([0.5000])
    """
    a = _full(a)
    log_rate, bias = A_log.to(a.dtype), None if dt_bias is None else dt_bias.to(a.dtype)
    if a.device.type == "xla" and lower_bound is None:
        return LazyDecay.apply(a, log_rate, bias)  # type: ignore[return-value]
    x = a if bias is None else a + bias
    if lower_bound is not None:
        # beyond 800 a sigmoid is 0 or 1 in every dtype, and infinity times its gradient would be
        # NaN
        return lower_bound * (log_rate.clamp(max=80.0).exp() * x).clamp(-800.0, 800.0).sigmoid()
    # softplus(x) is exp(x) below -40; above, exp(80) softplus(x) is a reset already
    y = x.clamp(max=-40.0)
    far = (log_rate + y).clamp(max=80.0).exp() * (
        1.0 + _find_lost_in_sum(log_rate.detach(), y.detach())
    )
    # PyTorch's softplus is the identity above a threshold, by default 20: there it would cost
    # float64 1e-10
    near = log_rate.detach().clamp(max=80.0).exp() * F.softplus(x.clamp(min=-40.0), threshold=40.0)
    # times exp(0), whose gradient sums near dg, not rate (softplus dg): what is in brackets
    # underflows
    log_rate = log_rate.clamp(-100.0, 80.0)
    near = (log_rate - log_rate.detach()).exp() * near
    return -torch.where(x < -40.0, far, near)


EXP_40 = 2.3538526683702e17


class LazyDecay(torch.autograd.Function):
    """Computes g of a, the logarithm of the rate and dt_bias [HV], and its gradients, by formulas.

    Autograd would find the same gradients by three times as many operations, and the host records
    each.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, log_rate: Tensor, bias: Tensor | None) -> Tensor:
        x = a if bias is None else a + bias
        root = (0.5 * log_rate).exp().clamp(max=EXP_40)
        rate = root.square()
        # below -40 the root of -g, of which neither factor underflows, and whose exponents are
        # exact
        far, small = ((0.5 * x).exp() * root).square(), x < -40.0
        decay = torch.where(small, far, rate * F.softplus(x, threshold=40.0))
        ctx.save_for_backward(x, small, rate, decay)
        return -decay

    @staticmethod
    def backward(ctx: Any, dg: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:  # type: ignore[override]
        x, small, rate, decay = ctx.saved_tensors
        ddecay = -dg
        dx = ddecay * torch.where(small, decay, rate * x.sigmoid())
        tokens = tuple(range(dx.dim() - rate.dim()))
        dbias = dx.sum(tokens) if ctx.needs_input_grad[2] else None
        return dx, (ddecay * decay).sum(tokens), dbias


def _find_lost_in_sum(x: Tensor, y: Tensor) -> Tensor:
    """Returns what rounding takes from x + y (Knuth's TwoSum): 4e-6 of -65,
    as much as exp(-65) would err.
    """
    total = x + y
    other = total - x
    return ((x - (total - other)) + (y - other)).nan_to_num(nan=0.0).clamp(-0.1, 0.1)


def write_strength(z: Tensor, beta_max: float = 1.0) -> Tensor:
    """Returns beta = beta_max sigmoid(z), in float32 at least.

    >>> write_strength(torch.zeros(1), beta_max=2.0)
    tensor([1.])
    """
    beta = _full(z).sigmoid()
    return beta if beta_max == 1.0 else beta_max * beta


def make_gates(
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    beta_max: float,
    lower_bound: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns g [..., HV] or [..., HV, K] and beta [..., HV] of a call;
    differentiable in all arguments.
    """
    with torch.autocast("cpu" if g.is_meta else g.device.type, enabled=False):
        # first of all: the gradients of shorter ones, sums over pieces and channels, are rounded
        # once then
        A_log, dt_bias = (None if x is None else x.to(_full(g).dtype) for x in (A_log, dt_bias))
        if A_log is not None and g.dim() > beta.dim():
            g = _make_channels(g, A_log, dt_bias, lower_bound)
        elif A_log is not None:
            g = _in_whole_vectors(lambda a: log_decay(a, A_log, dt_bias, lower_bound), g)
        if beta_max > 0:
            beta = _in_whole_vectors(lambda z: write_strength(z, beta_max), beta)
    return g, beta


def _make_channels(
    a: Tensor, A_log: Tensor, dt_bias: Tensor | None, lower_bound: float | None
) -> Tensor:
    """Returns g [..., HV, K] of a, with A_log [HV] and dt_bias [HV, K];
    head by head if K is large.
    """
    HV, K = a.shape[-2:]
    heads = max(1, min(HV, MOST_COLUMNS // K))
    parts = []
    for h in (slice(n, n + heads) for n in range(0, HV, heads)):
        rate = A_log[h].repeat_interleave(K)
        bias = None if dt_bias is None else dt_bias[h].reshape(-1)
        part = a[..., h, :].flatten(-2)
        parts.append(
            _in_whole_vectors(
                partial(log_decay, A_log=rate, dt_bias=bias, lower_bound=lower_bound), part
            )
        )
    return torch.cat(parts, -1).view(a.shape)


def _in_whole_vectors(gate: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Returns gate(x) of x [..., HV]; on CPUs a token's bits depend neither on its place nor on the
    others.

    PyTorch takes what is left of a thread's share behind its last whole vector one by one, and so
    all that is not contiguous; softplus and sigmoid end in other bits then. Here no such rest
    remains: pieces are whole vectors of one thread, for up to MOST_COLUMNS heads.
    """
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return gate(x)
    rows = x.reshape(-1, x.shape[-1])
    whole = F.pad(rows, (0, 0, 0, -len(rows) % VECTORS)).contiguous()
    size = VECTORS * max(1, ONE_THREAD // (VECTORS * x.shape[-1]))
    return torch.cat([gate(piece) for piece in whole.split(size)])[: len(rows)].view(x.shape)


def make_call_gates(call: AnyCall) -> AnyCall:
    """Returns the call with g and beta made by PyTorch,
    for a backend whose kernels cannot make them.
    """
    if call.A_log is None and not call.beta_max:
        return call
    g, beta = make_gates(*gates_of(call))
    return replace(call, g=g, beta=beta, A_log=None, dt_bias=None, beta_max=0.0, lower_bound=None)


# What softplus makes a reset of: exp(g) is 0 for any A_log from -40 to 40.
FORGET = 1e20


def spread_places(call: Rule, *, makes_gates: bool) -> Rule:
    """Returns the call without `position`, for a backend whose kernels do not read it: where a
    token's place is 0 its g is a reset.

    makes_gates     whether the backend makes g of a projection. A bounded gate forgets nothing at
                    once, whatever it is made of, so PyTorch makes that one here
    """
    if call.position is None:
        return call
    first = (call.position == 0)[..., None, None]
    if makes_gates and call.A_log is not None and call.lower_bound is None:
        g = call.g.masked_fill(first, min(FORGET, torch.finfo(call.g.dtype).max))
        return replace(call, g=g, position=None)
    if call.A_log is not None:
        g, _ = make_gates(call.g, call.beta, call.A_log, call.dt_bias, 0.0, call.lower_bound)
        call = replace(call, g=g, A_log=None, dt_bias=None, lower_bound=None)
    return replace(call, g=call.g.masked_fill(first, -torch.inf), position=None)


def gates_of(
    call: Rule | Step,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, float, float | None]:
    """Returns what `make_gates` takes of a call."""
    return call.g, call.beta, call.A_log, call.dt_bias, call.beta_max, call.lower_bound


def _full(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
