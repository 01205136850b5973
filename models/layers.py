"""Linear maps, norms and MLPs whose parameters know their muP role."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, chain, islice
from typing import Any, TypeGuard, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn.modules.module import _has_any_global_hook

from delta_trn.backends import add_rms_norm, gated_rms_norm
from delta_trn.backends.layers import GateActivation
from delta_trn.backends.rows import find_whole
from delta_trn.models.initialization import constant
from delta_trn.models.mup import Role
from delta_trn.models.parameters import Tag

Forwards = Mapping[type[nn.Module], Callable[..., Any]]
SHORT = 64  # tokens of a sequence for which putting weights side by side costs more than it saves


Tags = dict[str, Tag]


class _Unfilled(nn.Linear):
    def reset_parameters(self) -> None:
        """Leaves the numbers as they are: `initialize` fills the whole model."""


class _UnfilledEmbedding(nn.Embedding):
    def reset_parameters(self) -> None:
        """Leaves the numbers as they are."""


def make_linear(
    tags: Tags,
    name: str,
    inputs: int,
    outputs: int,
    role: Role = Role.HIDDEN,
    *,
    scale: float = 1.0,
    stored: bool = False,
    heads: int = 1,
    of_columns: bool = False,
    ratio: float | None = None,
    bias: bool = False,
) -> nn.Linear:
    """Returns a map y = W x, or W x + b, whose numbers nobody has drawn, and tags them.

    It is PyTorch's own class, which quantizers and adapters look for. They may put another layer in
    its place before its numbers are drawn, so that the tags are its owner's.

    tags    the owner's, where `name` is the map's name there
    others  options are those of `Tag`, `ratio` is its `inputs`
    """
    made = cast(nn.Linear, _Unfilled(inputs, outputs, bias))
    made.__class__ = nn.Linear  # which would draw numbers that nobody uses from torch's generator
    tags[f"{name}.weight"] = Tag(
        role, scale=scale, stored=stored, heads=heads, of_columns=of_columns, inputs=ratio
    )
    if bias:
        tags[f"{name}.bias"] = Tag(Role.VECTOR, law=partial(constant, value=0.0))
    return made


def make_embedding(tags: Tags, name: str, rows: int, width: int, tag: Tag) -> nn.Embedding:
    """Returns a map from a token id to a row of the weight, made as `make_linear` makes one."""
    embedding = cast(nn.Embedding, _UnfilledEmbedding(rows, width))
    embedding.__class__ = nn.Embedding
    tags[f"{name}.weight"] = tag
    return embedding


def apply_linear(m: nn.Module, x: Tensor) -> Tensor:
    """Returns m(x) for a map of ours, x [..., inputs], or for what stands in its place.

    On XLA, products are those of `multiply`. A bias has the weight's dtype there, where training
    rounds matrices alone.
    """
    if not is_linear(m):
        return m(x)
    if x.device.type == "xla":
        (y,) = multiply(x, [m.weight])
        return y if m.bias is None else y + m.bias.to(y.dtype)
    if m.bias is None:
        return F.linear(x, m.weight)
    # of rows: of a part of wider ones, in three dimensions, the bias would be added after
    rows = x.reshape(-1, x.shape[-1])
    y = F.linear(rows, m.weight, m.bias.to(m.weight.dtype))
    return y.view(*x.shape[:-1], m.weight.shape[0])


def project(x: Tensor, *groups: Sequence[nn.Linear]) -> Sequence[Tensor]:
    """Returns the outputs of each group of maps side by side, [..., sum of outputs], of x [..., T,
    inputs].

    A group is one product, unless sequences are short, as in decoding: then putting the weights
    side by side would cost more than it saves. How many there are does not count, since one product
    ends in other bits than three, and a row must not depend on its batch. Where another layer
    stands in a map's place, as those of PEFT and of quantizers do, each map of its group is called
    (`multiplies`).
    """
    if not all(_can_join(x, maps) for maps in groups):
        return [
            torch.cat([apply_linear(m, x) for m in maps], dim=-1)
            if maps[1:]
            else apply_linear(maps[0], x)
            for maps in groups
        ]
    return multiply(x, *([m.weight for m in maps] for maps in groups))


def _can_join(x: Tensor, maps: Sequence[nn.Linear]) -> bool:
    return not _is_short(x.shape[-2]) and all(map(multiplies, maps))


def _is_short(T: int) -> bool:
    """Returns whether so many tokens are few; a graph of many lengths is one for long ones."""
    if not torch.compiler.is_compiling():
        return T < SHORT
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(T < SHORT)


def multiplies(m: nn.Module) -> bool:
    """Returns whether a call of m only multiplies by m.weight, so that the weight may be read
    instead.
    """
    return is_linear(m) and m.bias is None


def is_linear(m: nn.Module) -> TypeGuard[nn.Linear]:
    """Returns whether a call of m only multiplies by m.weight and adds m.bias.

    The weight must be a plain tensor, or stand for one while a program is recorded: a subclass of
    Tensor, as torchao's, may have no other operation than the product.
    """
    if not is_untouched(m, LINEAR_MAPS):
        return False
    return type(m.weight) in (Tensor, nn.Parameter) or isinstance(
        m.weight, (FakeTensor, FunctionalTensor)
    )


def is_untouched(m: nn.Module, forwards: Forwards) -> bool:
    """Returns whether a call of m runs the forward that `forwards` has for m's class, and no more.

    It is False for a subclass, which torch's parametrizations make, too; where somebody has
    replaced `forward`, of m, as accelerate does, or of the class; and where hooks wait for the
    call.
    """
    forward = forwards.get(type(m))
    if forward is None or forward is not type(m).forward or "forward" in vars(m):
        return False
    hooks = m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks
    return not (hooks or _has_any_global_hook())


def in_dtype_of(x: Tensor, *maps: nn.Module) -> Tensor:
    """Returns x in the dtype of the first map whose weight has floating-point numbers of 16 bits or
    more.

    Returns x itself if there is none: quantizers store integers or 8-bit numbers, to which x must
    not be rounded, and some of their layers have no `weight`.
    """
    for m in maps:
        dtype = getattr(getattr(m, "weight", None), "dtype", torch.uint8)
        if dtype.is_floating_point and dtype.itemsize > 1:
            return x.to(dtype)
    return x


def multiply(x: Tensor, *groups: Sequence[Tensor]) -> Sequence[Tensor]:
    """Returns W x of each group of weights side by side; on XLA by few operations:
    the host records all.
    """
    if x.device.type != "xla":
        return [F.linear(x, _join(own)) for own in groups]
    dtype = torch.get_autocast_dtype("xla") if torch.is_autocast_enabled("xla") else x.dtype
    ys = LazyProducts.apply(
        x.flatten(0, -2), dtype, [*map(len, groups)], *chain.from_iterable(groups)
    )
    return ys if x.dim() == 2 else [y.view(*x.shape[:-1], -1) for y in ys]  # type: ignore[union-attr]


def _join(own: Sequence[Tensor]) -> Tensor:
    return torch.cat([*own]) if own[1:] else own[0]


def _cut(joined: Tensor, own: Sequence[Tensor]) -> Sequence[Tensor]:
    return consecutive_parts(joined, [len(W) for W in own], 0) if own[1:] else [joined]


Shared = tuple[
    dict[tuple[Any, ...], Tensor], dict[tuple[int, ...], tuple[Sequence[Tensor], Tensor]]
]
_shared: Shared | None = None  # weights, side by side and cast; and the sums of their gradients


@contextmanager
def micro_batches() -> Iterator[Shared]:
    """Lets a step's micro-batches on XLA cast the weights of a product, and cut its gradients,
    once.

    Within the block no weight may change. At its end they get their gradients; until then a product
    adds its own by one operation, instead of a cast, and a part and a sum for each weight.
    """
    global _shared
    casts, sums = _shared = {}, {}
    try:
        yield casts, sums
    finally:
        _shared = None
    for own, total in sums.values():
        for W, part in zip(own, _cut(total, own), strict=True):
            if W.requires_grad:
                W.grad = part.clone() if W.grad is None else W.grad + part


class LazyProducts(torch.autograd.Function):
    """Computes y = W x of rows x in a dtype, for each W of so many weights side
    by side as `sizes` say.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dtype: torch.dtype, sizes: Sequence[int], *weights: Tensor
    ) -> Any:
        ctx.shared = _shared if all(W.is_leaf for W in weights) else None
        casts, rest = {} if ctx.shared is None else ctx.shared[0], iter(weights)
        ctx.dtype, ctx.owns, joined = x.dtype, [tuple(islice(rest, n)) for n in sizes], []
        for own in ctx.owns:
            key = dtype, *map(id, own)
            if key not in casts:
                casts[key] = _join(own).to(dtype)
            joined.append(casts[key])
        rows = x.to(dtype)  # once, where autograd would cast x for each product
        ctx.save_for_backward(rows, *joined)
        return tuple(torch.mm(rows, W.t()) for W in joined)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> Any:  # type: ignore[override]
        rows, *joined = ctx.saved_tensors
        dx, *others = (torch.mm(dy, W) for dy, W in zip(dys, joined, strict=True))
        sums, dweights = (
            ctx.shared[1] if ctx.shared is not None and ctx.shared is _shared else None,
            [],
        )
        for dy, own in zip(dys, ctx.owns, strict=True):
            dW, key = torch.mm(dy.t(), rows), tuple(map(id, own))
            if sums is None:
                dweights += _cut(dW.to(own[0].dtype), own)
                continue
            dweights += [None] * len(own)
            if key in sums:
                sums[key][1].add_(dW)
            else:
                sums[key] = own, dW.to(own[0].dtype)
        return sum(others, dx.to(ctx.dtype)), None, None, *dweights


def consecutive_parts(x: Tensor, sizes: Sequence[int], dim: int = -1) -> tuple[Tensor, ...]:
    """Returns the parts of x along `dim` that have these sizes, in order: what x.split(sizes, dim)
    returns.

    Gradients that lie side by side, as Triton's kernels write those of q, k and v, are joined
    without a copy. On XLA parts are slices. torch-neuronx switches torch_xla's functionalization
    off, and then split with a list of sizes returns wrong elements in every dimension but the first
    (pytorch/xla issue 8640).

    >>> [part.tolist() for part in consecutive_parts(torch.arange(5), (2, 3))]
    [[0, 1], [2, 3, 4]]
    """
    plain = torch.compiler.is_compiling() or type(x) is not Tensor or torch._C._is_tracing()
    known = dim == -1 and (x.dim() == 3 or x.device.type == "xla")
    if plain or not (known and torch.is_grad_enabled() and x.requires_grad):
        return _split(x, sizes, dim)
    return Parts.apply(x, sizes)  # type: ignore[return-value]


def _split(x: Tensor, sizes: Sequence[int], dim: int) -> tuple[Tensor, ...]:
    if x.device.type != "xla":
        return x.split(list(sizes), dim)
    ends = list(accumulate(sizes))
    return tuple(x.narrow(dim, end - size, size) for size, end in zip(sizes, ends, strict=True))


class Parts(torch.autograd.Function):
    """Cuts x [B, T, channels], or any on XLA, into views;
    joins gradients where they lie, or by a copy.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
        return _split(x, sizes, -1)

    @staticmethod
    def backward(ctx: Any, *parts: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        again = torch.is_grad_enabled() or torch.compiler.is_compiling()
        whole = None if again or parts[0].device.type == "xla" else find_whole(parts)
        return (torch.cat(parts, -1) if whole is None else whole), None


class RMSNorm(nn.Module):
    """Computes y = x / sqrt(mean(x^2) + eps) * w over the last dimension,
    in float32; y has x's dtype.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(size)), eps
        self.tags = {"weight": Tag(Role.VECTOR, law=partial(constant, value=1.0))}

    def forward(
        self, x: Tensor, z: Tensor | None = None, activation: GateActivation = "swish"
    ) -> Tensor:
        """Returns y of x [..., size]; with z of the same shape y * SiLU(z),
        or y * sigmoid(z) where `activation` is "sigmoid".
        """
        return gated_rms_norm(x, z, self.weight, eps=self.eps, activation=activation)

    def of_sum(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the norm of residual + x, and that sum, by one operation.

        The dtype of `residual` must be no narrower than x's.
        """
        return add_rms_norm(x, residual, self.weight, eps=self.eps)


class LayerNorm(nn.Module):
    """Computes y = (x - mean(x)) / sqrt(var(x) + eps) * w over the last dimension, in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(size)), eps
        self.tags = {"weight": Tag(Role.VECTOR, law=partial(constant, value=1.0))}

    def forward(self, x: Tensor) -> Tensor:
        """Returns y of x [..., size], in x's dtype."""
        full = at_least_float32(x)
        return F.layer_norm(full, self.weight.shape, self.weight.to(full.dtype), None, self.eps).to(
            x.dtype
        )

    def of_sum(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the norm of residual + x, and that sum, as `RMSNorm.of_sum` does."""
        total = residual + x
        return self(total), total


NORMS: dict[str, type[RMSNorm] | type[LayerNorm]] = {"rms": RMSNorm, "layer": LayerNorm}
# What each class computes as long as nobody has put another forward in its place.
LINEAR_MAPS: Forwards = {nn.Linear: nn.Linear.forward}
NORM_FORWARDS: Forwards = {kind: kind.forward for kind in NORMS.values()}


class SwiGLU(nn.Module):
    """Computes y = W_down( SiLU(W_gate x) * W_up x ).

    scale multiplies the initial std of W_down; ratio is inner over the base model's, if not the
    width's.
    """

    def __init__(
        self, width: int, inner: int, scale: float = 1.0, ratio: float | None = None
    ) -> None:
        super().__init__()
        self.tags: Tags = {}
        self.gate_proj = make_linear(self.tags, "gate_proj", width, inner)
        self.up_proj = make_linear(self.tags, "up_proj", width, inner)
        self.down_proj = make_linear(self.tags, "down_proj", inner, width, scale=scale, ratio=ratio)

    def forward(self, x: Tensor) -> Tensor:
        """Maps x [..., width] to the same shape."""
        gate, up = project(x, (self.gate_proj,), (self.up_proj,))
        return apply_linear(self.down_proj, F.silu(gate) * up)


class GeluMLP(nn.Module):
    """Computes y = W_down GELU(W_up x); arguments as those of `SwiGLU`."""

    def __init__(
        self, width: int, inner: int, scale: float = 1.0, ratio: float | None = None
    ) -> None:
        super().__init__()
        self.tags: Tags = {}
        self.up_proj = make_linear(self.tags, "up_proj", width, inner)
        self.down_proj = make_linear(self.tags, "down_proj", inner, width, scale=scale, ratio=ratio)

    def forward(self, x: Tensor) -> Tensor:
        """Maps x [..., width] to the same shape."""
        return apply_linear(self.down_proj, F.gelu(apply_linear(self.up_proj, x)))


MLPS: dict[str, type[SwiGLU] | type[GeluMLP]] = {"swiglu": SwiGLU, "gelu": GeluMLP}


class Dropout(nn.Module):
    """Drops entries with probability p while training, and divides the others by 1 - p.

    Which entries are dropped follows from `noise`, a random number per token, and from no
    generator. So a sequence has the same mask in whichever process, micro-batch or part of a
    sequence it is computed.

    site    tells this place in the model from others
    """

    def __init__(self, p: float, site: int) -> None:
        super().__init__()
        self.p, self.site = p, site

    def forward(self, x: Tensor, noise: Tensor | None = None) -> Tensor:
        """Maps x [B, T, d] to the same shape; noise [B, T] int32, None:
        torch's own generator decides.
        """
        if not self.training or self.p == 0:
            return x
        if noise is None:
            return F.dropout(x, self.p)
        kept = draw(noise, x.shape[-1], self.site) >= int(self.p * 2**31)
        return x * kept * (1 / (1 - self.p))


def draw(noise: Tensor, size: int, site: int) -> Tensor:
    """Returns [B, T, size] int32, uniform from 0 to 2^31 - 1: a hash of each token's noise, channel
    and site.

    The steps are those of MurmurHash3's finalizer. Products wrap around at 32 bits.
    """
    channels = torch.arange(size, device=noise.device, dtype=torch.int32)
    keys = _mix(_mix(channels + (site << 16)))
    return _mix(noise[..., None] ^ keys) & 0x7FFFFFFF


def _mix(x: Tensor) -> Tensor:
    x = x * -0x7A143595
    x = x ^ ((x >> 15) & 0x1FFFF)  # the mask makes a logical shift of an arithmetic one
    return x * -0x3D4D51CB


def at_least_float32(x: Tensor) -> Tensor:
    """Returns x in float32, or in float64 if it has that dtype already."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
