"""Checks of the layers' arguments, made once, before any work;
in the manner of `backends.checks`.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, int64

from delta_trn.backends.checks import require_one_device, require_shapes, require_tensors, shape_of

ACTIVATIONS = ("silu", "linear")
GATE_ACTIVATIONS = ("swish", "sigmoid")


def convolution(
    x: Tensor, weight: Tensor, prefix: Tensor | None, position: Tensor | None, activation: str
) -> None:
    """Raises TypeError or ValueError unless shapes, dtypes and devices fit `short_convolution`."""
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"activation={activation!r} is none of {', '.join(ACTIVATIONS)}; pass one of them"
        )
    letters = {"x": "B T C", "weight": "C W", "prefix": "B before C", "position": "T"}
    before = weight.shape[-1] - 1 if isinstance(weight, Tensor) and weight.dim() else 0
    others = {name: y for name, y in (("prefix", prefix), ("position", position)) if y is not None}
    sizes = require_shapes(letters, {"x": x, "weight": weight, **others}, {"before": before})
    _require_floats(x=x, weight=weight, prefix=prefix)
    if sizes["C"] == 0 or sizes["W"] == 0:
        raise ValueError(
            f"x {shape_of(x)} has C={sizes['C']}, weight has W={sizes['W']}; both are at least 1"
        )
    if prefix is not None and prefix.dtype != x.dtype:
        raise TypeError(f"prefix is {prefix.dtype}, x is {x.dtype}; cast it to x's dtype")
    if position is not None:
        if position.dtype != int64:
            raise TypeError(
                f"position is {position.dtype}, not torch.int64; convert it once with .long()"
            )
        if sizes["B"] != 1:
            raise ValueError(
                f"B={sizes['B']} with position; packed sequences lie end to end in B=1: reshape to one row, "
                "or leave position out"
            )
        if prefix is not None:
            raise ValueError(
                "prefix and position exclude each other; leave out prefix for packed sequences"
            )
    require_one_device(x, "x", {"weight": weight, "prefix": prefix, "position": position})


def gated_norm(x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, activation: str) -> None:
    """Raises TypeError or ValueError unless the arguments fit `gated_rms_norm`."""
    if activation not in GATE_ACTIVATIONS:
        raise ValueError(
            f"activation={activation!r} is none of {', '.join(GATE_ACTIVATIONS)}; pass one of them"
        )
    if gate is None and activation != "swish":
        raise ValueError(
            f"activation={activation!r} is applied to a gate, and gate is None; pass the gate, or "
            "leave activation out"
        )
    norm(x, {"gate": gate}, weight, eps)


def norm(x: Tensor, other: Mapping[str, Tensor | None], weight: Tensor, eps: float) -> None:
    """Raises TypeError or ValueError unless the arguments fit the norms; `other` is like x."""
    _require_floats(x=x, weight=weight, **other)
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"x {shape_of(x)} is not [..., N] with N at least 1")
    for name, y in other.items():
        if y is not None and y.shape != x.shape:
            raise ValueError(
                f"{name} {shape_of(y)} differs from x {shape_of(x)}; both are [..., N]"
            )
    if tuple(weight.shape) != (x.shape[-1],):
        raise ValueError(
            f"weight {shape_of(weight)} does not fit x {shape_of(x)}; expected [{x.shape[-1]}]"
        )
    if not 0 <= eps < float("inf"):
        raise ValueError(f"eps={eps} must be at least 0 and finite; 1e-6 is usual")
    require_one_device(x, "x", {"weight": weight, **other})


def readout(hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    """Raises TypeError or ValueError unless shapes,
    dtypes and devices fit `linear_cross_entropy`.
    """
    letters = {"hidden": "M d", "weight": "vocabulary d", "targets": "M"}
    sizes = require_shapes(letters, {"hidden": hidden, "weight": weight, "targets": targets})
    _require_floats(hidden=hidden, weight=weight)
    if sizes["d"] == 0 or sizes["vocabulary"] == 0:
        raise ValueError(f"weight {shape_of(weight)} is not [vocabulary, d] with both at least 1")
    if targets.dtype != int64:
        raise ValueError(
            f"targets is {targets.dtype}; expected torch.int64: convert it once with .long()"
        )
    require_one_device(hidden, "hidden", {"weight": weight, "targets": targets})


def _require_floats(**tensors: Tensor | None) -> None:
    present = {name: y for name, y in tensors.items() if y is not None}
    require_tensors(present)
    for name, y in present.items():
        if not y.is_floating_point():
            raise TypeError(f"{name} is {y.dtype}; pass floating point tensors")
