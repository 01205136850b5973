"""Checks of the layers' arguments, made once, before any work; in the manner of `backends.checks`."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, int64

from delta_trn.backends.checks import in_brackets, require_one_device, require_tensors, shape_of

ACTIVATIONS = ("silu", "linear")


def convolution(
    x: Tensor, weight: Tensor, prefix: Tensor | None, position: Tensor | None, activation: str
) -> None:
    """Raises TypeError or ValueError unless shapes, dtypes and devices fit `short_convolution`."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation={activation!r} is none of {', '.join(ACTIVATIONS)}; pass one of them")
    _require_floats(x=x, weight=weight, prefix=prefix)
    if x.dim() != 3 or x.shape[2] == 0:
        raise ValueError(f"x {shape_of(x)} is not [B, T, C] with C at least 1")
    if weight.dim() != 2 or weight.shape[0] != x.shape[2] or weight.shape[1] == 0:
        raise ValueError(
            f"weight {shape_of(weight)} does not fit x {shape_of(x)}; expected [{x.shape[2]}, W]"
        )
    if prefix is not None:
        wanted = (x.shape[0], weight.shape[1] - 1, x.shape[2])
        if tuple(prefix.shape) != wanted:
            raise ValueError(f"prefix {shape_of(prefix)} is not [B, W - 1, C] = {in_brackets(wanted)}")
        if prefix.dtype != x.dtype:
            raise TypeError(f"prefix is {prefix.dtype}, x is {x.dtype}; cast it to x's dtype")
    if position is not None:
        if position.dtype != int64:
            raise TypeError(f"position is {position.dtype}, not torch.int64; convert it once with .long()")
        if tuple(position.shape) != (x.shape[1],) or x.shape[0] != 1:
            raise ValueError(
                f"position {shape_of(position)} does not fit x {shape_of(x)}; packed sequences lie end to "
                "end in B=1, and position is [T]"
            )
        if prefix is not None:
            raise ValueError("prefix and position exclude each other; leave out prefix for packed sequences")
    require_one_device(x, "x", {"weight": weight, "prefix": prefix, "position": position})


def norm(x: Tensor, other: Mapping[str, Tensor | None], weight: Tensor, eps: float) -> None:
    """Raises TypeError or ValueError unless the arguments fit the norms; `other` is like x."""
    _require_floats(x=x, weight=weight, **other)
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"x {shape_of(x)} is not [..., N] with N at least 1")
    for name, y in other.items():
        if y is not None and y.shape != x.shape:
            raise ValueError(f"{name} {shape_of(y)} differs from x {shape_of(x)}; both are [..., N]")
    if tuple(weight.shape) != (x.shape[-1],):
        raise ValueError(f"weight {shape_of(weight)} does not fit x {shape_of(x)}; expected [{x.shape[-1]}]")
    if not 0 <= eps < float("inf"):
        raise ValueError(f"eps={eps} must be at least 0 and finite; 1e-6 is usual")
    require_one_device(x, "x", {"weight": weight, **other})


def readout(hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    """Raises TypeError or ValueError unless shapes, dtypes and devices fit `linear_cross_entropy`."""
    _require_floats(hidden=hidden, weight=weight)
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1] or 0 in weight.shape:
        raise ValueError(
            f"hidden {shape_of(hidden)} and weight {shape_of(weight)} do not fit; expected [M, d] and "
            "[vocabulary, d]"
        )
    if tuple(targets.shape) != (hidden.shape[0],) or targets.dtype != int64:
        raise ValueError(
            f"targets is {targets.dtype} {shape_of(targets)}; expected torch.int64 [{hidden.shape[0]}]"
        )
    require_one_device(hidden, "hidden", {"weight": weight, "targets": targets})


def _require_floats(**tensors: Tensor | None) -> None:
    present = {name: y for name, y in tensors.items() if y is not None}
    require_tensors(present)
    for name, y in present.items():
        if not y.is_floating_point():
            raise TypeError(f"{name} is {y.dtype}; pass floating point tensors")
