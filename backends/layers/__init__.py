"""The small operations of a layer: short convolution, RMS norm, cross-entropy of a readout.

What they compute is said here, once; PyTorch's form is in `backends.layers_pytorch`, for any device, and
kernels take its place where there are some. A name in `backend` is strict; the process's default
(`backends.use`) is a first choice.
"""

from __future__ import annotations

from operator import index
from typing import Literal

import torch
from torch import Tensor

from delta_trn.backends import registry
from delta_trn.backends.checks import finite
from delta_trn.backends.layers import checks as layer_checks
from delta_trn.backends.operator import Operator

Activation = Literal["silu", "linear"]


def short_convolution(
    x: Tensor,
    weight: Tensor,
    *,
    prefix: Tensor | None = None,
    position: Tensor | None = None,
    activation: Activation = "silu",
    backend: str | None = None,
) -> Tensor:
    r"""A causal depthwise convolution over time, of W taps, then SiLU or nothing.

        z_t = sum_j weight_j * x_{t - W + 1 + j}        y = z sigmoid(z), or z

        x           [B, T, C]       float64, float32, bfloat16, float16
        weight      [C, W]          any float; the last tap is the token's own
        prefix      [B, W - 1, C]   dtype of x: what came before; None: zeros
        position    [T] int64       each token's place in its own sequence, for sequences packed in B = 1: it
                                    sees none before its sequence's first, whose place is 0; without prefix
        returns y   [B, T, C]       dtype of x

    Sums are float32 (float64 for float64 inputs). Differentiable once in x, weight and prefix. Raises
    BackendRefusal, TypeError and ValueError as `gated_delta_rule` does.
    """
    layer_checks.convolution(x, weight, prefix, position, activation)
    sizes = index(x.shape[-1]), index(weight.shape[-1])
    given = (x, weight, prefix, position)
    name, save = _chosen(
        "short_convolution", given, sizes, backend, form=activation, packed=position is not None
    )
    return _CONVOLUTION(*given, activation, save, backend=name)[0]


def gated_rms_norm(
    x: Tensor, gate: Tensor | None, weight: Tensor, *, eps: float, backend: str | None = None
) -> Tensor:
    r"""RMS norm of rows, times a gain, times SiLU of a gate: Gated DeltaNet's output norm (arXiv:2412.06464).

        y = x / sqrt(mean(x^2) + eps) * weight * gate sigmoid(gate)

        x, gate     [..., N]    float64, float32, bfloat16, float16; None: no gate, the plain norm
        weight      [N]         any float
        returns y   [..., N]    dtype of x

    Sums are float32 (float64 for float64 inputs). Differentiable once in all three; raises as
    `gated_delta_rule` does.
    """
    layer_checks.norm(x, {"gate": gate}, weight, eps)
    given, form = (x, gate, weight), "plain" if gate is None else "gated"
    name, save = _chosen("gated_rms_norm", given, (index(x.shape[-1]), 1), backend, form=form)
    return _NORM(*given, eps, save, backend=name)[0]


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, *, eps: float, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    r"""A residual sum and the RMS norm of it, in one pass over both.

        total = residual + x        y = total / sqrt(mean(total^2) + eps) * weight

        x, residual [..., N]    a dtype each, residual's no narrower: float64, float32, bfloat16, float16
        weight      [N]         any float
        returns y, total        [..., N] in residual's dtype

    Numerics and errors as for `gated_rms_norm`; differentiable through both results.
    """
    layer_checks.norm(x, {"residual": residual}, weight, eps)
    if torch.promote_types(x.dtype, residual.dtype) != residual.dtype:
        raise TypeError(f"x is {x.dtype}, residual is {residual.dtype}; cast x: the sum has residual's dtype")
    given = (x, residual, weight)
    name, save = _chosen("add_rms_norm", given, (index(x.shape[-1]), 1), backend)
    y, total = _SUM_NORM(*given, eps, save, backend=name)
    return y, total


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, ignore_index: int = -100, backend: str | None = None
) -> Tensor:
    r"""Mean cross-entropy of a linear readout; the logits of all tokens are never in memory together.

        mean over targets != ignore_index of  logsumexp(z) - z[target],  z = weight hidden

        hidden      [M, d]              float64, float32, bfloat16, float16; times the logits' multiplier
        weight      [vocabulary, d]     any float; products are in hidden's dtype
        targets     [M] int64
        returns     [] float32 (float64 for float64), nats; 0 if every target is ignored

    Gradients are computed together with the loss, some tokens at a time: one softmax, nothing recomputed.
    Differentiable once in hidden and weight; raises as `gated_delta_rule` does.
    """
    layer_checks.readout(hidden, weight, targets)
    sizes = index(weight.shape[1]), index(weight.shape[0])
    given = (hidden, weight, targets)
    name, save = _chosen("linear_cross_entropy", given, sizes, backend)
    return _CROSS_ENTROPY(*given, ignore_index, save, backend=name)[0]


def _chosen(
    op: str,
    given: tuple[Tensor | None, ...],
    sizes: tuple[int, int],
    backend: str | None,
    *,
    form: str = "",
    packed: bool = False,
) -> tuple[str, bool]:
    """The backend's name, and whether gradients are wanted."""
    gradients = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given)
    x, selection = given[0], registry.SELECTION
    assert x is not None
    name = registry.chosen_name(
        op, x.device.type, x.dtype, (1, 1, *sizes), packed, gradients, backend,
        selection.allow, selection.name, form,
    )  # fmt: skip
    return name, gradients


_CONVOLUTION = Operator(
    "short_convolution",
    tensors=("x", "weight", "prefix?", "position?"),
    options={"activation": "str", "save": "bool"},
    fakes=lambda x, *rest: [x.new_empty(x.shape)],
    gradients=(("x",), ("weight",), ("prefix",)),
    values=lambda x, weight, prefix, *rest: finite({"x": x, "weight": weight, "prefix": prefix}),
)
_NORM = Operator(
    "gated_rms_norm",
    tensors=("x", "gate?", "weight"),
    options={"eps": "float", "save": "bool"},
    fakes=lambda x, *rest: [x.new_empty(x.shape)],
    values=lambda x, gate, weight, *rest: finite({"x": x, "gate": gate, "weight": weight}),
)
_SUM_NORM = Operator(
    "add_rms_norm",
    tensors=("x", "residual", "weight"),
    options={"eps": "float", "save": "bool"},
    outputs=("y", "total"),
    fakes=lambda x, residual, *rest: [residual.new_empty(residual.shape), residual.new_empty(residual.shape)],
    # the total is in memory anyway, for what the residual stream meets next; its terms need not be
    reads=("total", "weight"),
    gradients=(("x", "residual"), ("weight",)),
    backward_fakes=lambda dy, dtotal, total, weight, *rest: [
        total.new_empty(total.shape),
        weight.new_empty(weight.shape),
    ],
    values=lambda x, residual, weight, *rest: finite({"x": x, "residual": residual, "weight": weight}),
)
_CROSS_ENTROPY = Operator(
    "linear_cross_entropy",
    tensors=("hidden", "weight", "targets"),
    options={"ignore_index": "int", "save": "bool"},
    fakes=lambda hidden, *rest: [
        hidden.new_empty((), dtype=torch.promote_types(hidden.dtype, torch.float32))
    ],
    reads=(),
    gradients=(("hidden",), ("weight",)),
    backward_fakes=lambda dloss, dhidden, dweight, *rest: [
        dhidden.new_empty(dhidden.shape),
        dweight.new_empty(dweight.shape),
    ],
    values=lambda hidden, weight, *rest: finite({"hidden": hidden, "weight": weight}),
)
