"""The small operations of a layer: short convolution, RMS norm, cross-entropy of a readout.

Each is computed in PyTorch on any device (`layers.pytorch`), and by kernels where a backend has
them. A name in `backend`, or the default backend, is strict: what it cannot run it refuses, unless
`default_backend` allows another.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from delta_trn.backends.checks import require_finite
from delta_trn.backends.layers import checks
from delta_trn.backends.layers.contract import Convolution, GatedNorm, Readout, SumNorm
from delta_trn.backends.operator import Operator

Activation = Literal["silu", "linear"]
GateActivation = Literal["swish", "sigmoid"]


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
        position    [T] int64       each token's place in its own sequence, for sequences packed in
                                    B = 1: it sees none before its sequence's first, whose place is
                                    0; without prefix
        returns y   [B, T, C]       dtype of x

    Sums are float32 (float64 for float64 inputs). Differentiable once in x, weight and prefix.
    Raises BackendRefusal, TypeError and ValueError as `gated_delta_rule` does.
    """
    checks.convolution(x, weight, prefix, position, activation)
    name, save = CONVOLUTION.choose(
        (x, weight, prefix), {"C": x.shape[-1], "W": weight.shape[-1]}, backend,
        activation, *(() if position is None else ("packed",)),
    )  # fmt: skip
    (y,) = CONVOLUTION(
        Convolution(x, weight, prefix, position, activation), save=save, backend=name
    )
    return y


def gated_rms_norm(
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor,
    *,
    eps: float,
    activation: GateActivation = "swish",
    backend: str | None = None,
) -> Tensor:
    r"""RMS norm of rows, times a gain, times a function of a gate: the output norm of Gated DeltaNet
    (arXiv:2412.06464) and, with a sigmoid, of Kimi Delta Attention (arXiv:2510.26692).

        y = x / sqrt(mean(x^2) + eps) * weight * f(gate)

        activation "swish"      f(z) = z sigmoid(z), which is SiLU
        activation "sigmoid"    f(z) = sigmoid(z)

        x, gate     [..., N]    float64, float32, bfloat16, float16; None: no gate, the plain norm
        weight      [N]         any float
        returns y   [..., N]    dtype of x

    `activation` has the name and the values that it has in flash-linear-attention's
    FusedRMSNormGated. Sums are float32 (float64 for float64 inputs). Differentiable once in all
    three; raises as `gated_delta_rule` does.
    """
    checks.gated_norm(x, gate, weight, eps, activation)
    form = "plain" if gate is None else "gated" if activation == "swish" else activation
    name, save = NORM.choose((x, gate, weight), {"N": x.shape[-1]}, backend, form)
    (y,) = NORM(GatedNorm(x, gate, weight, eps, activation), save=save, backend=name)
    return y


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, *, eps: float, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    r"""A residual sum and the RMS norm of it, in one pass over both.

        total = residual + x        y = total / sqrt(mean(total^2) + eps) * weight

        x, residual [..., N]    a dtype each, residual's no narrower: float64, float32, bfloat16,
                                float16
        weight      [N]         any float
        returns y, total        [..., N] in residual's dtype

    Numerics and errors as for `gated_rms_norm`; differentiable through both results.
    """
    checks.norm(x, {"residual": residual}, weight, eps)
    if torch.promote_types(x.dtype, residual.dtype) != residual.dtype:
        raise TypeError(
            f"x is {x.dtype}, residual is {residual.dtype}; cast x: the sum has residual's dtype"
        )
    name, save = SUM_NORM.choose((x, residual, weight), {"N": x.shape[-1]}, backend)
    y, total = SUM_NORM(SumNorm(x, residual, weight, eps), save=save, backend=name)
    return y, total


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    backend: str | None = None,
) -> Tensor:
    r"""Mean cross-entropy of a linear readout; the logits of all tokens are never in memory
    together.

        mean over targets != ignore_index of  logsumexp(z) - z[target],  z = weight hidden

        hidden      [M, d]              float64, float32, bfloat16, float16; times the logits'
                                        multiplier
        weight      [vocabulary, d]     any float; products are in hidden's dtype
        targets     [M] int64
        returns     [] float32 (float64 for float64), nats; 0 if every target is ignored

    Gradients are computed together with the loss, some tokens at a time: one softmax, nothing
    recomputed. Differentiable once in hidden and weight; raises as `gated_delta_rule` does.
    """
    checks.readout(hidden, weight, targets)
    sizes = {"d": weight.shape[1], "vocabulary": weight.shape[0]}
    name, save = CROSS_ENTROPY.choose((hidden, weight), sizes, backend)
    (loss,) = CROSS_ENTROPY(Readout(hidden, weight, targets, ignore_index), save=save, backend=name)
    return loss


CONVOLUTION = Operator(
    "short_convolution",
    Convolution,
    prefix="short_convolution_",
    fakes=lambda call: [call.x.new_empty(call.x.shape)],
    gradients=(("x",), ("weight",), ("prefix",)),
    values=lambda call: require_finite({"x": call.x, "weight": call.weight, "prefix": call.prefix}),
)
NORM = Operator(
    "gated_rms_norm",
    GatedNorm,
    prefix="gated_rms_norm_",
    fakes=lambda call: [call.x.new_empty(call.x.shape)],
    values=lambda call: require_finite({"x": call.x, "gate": call.gate, "weight": call.weight}),
)
SUM_NORM = Operator(
    "add_rms_norm",
    SumNorm,
    prefix="add_rms_norm_",
    outputs=("y", "total"),
    fakes=lambda call: [call.residual.new_empty(call.residual.shape) for _ in range(2)],
    # the total is in memory anyway, for what the residual stream meets next; its terms need not be
    reads=("weight", "total"),
    gradients=(("x", "residual"), ("weight",)),
    gradient_fakes=lambda call, saved: [x.new_empty(x.shape) for x in (saved[0], call.weight)],
    values=lambda call: require_finite(
        {"x": call.x, "residual": call.residual, "weight": call.weight}
    ),
)
CROSS_ENTROPY = Operator(
    "linear_cross_entropy",
    Readout,
    prefix="linear_cross_entropy_",
    fakes=lambda call: [
        call.hidden.new_empty((), dtype=torch.promote_types(call.hidden.dtype, torch.float32))
    ],
    reads=(),
    gradients=(("hidden",), ("weight",)),
    gradient_fakes=lambda call, saved: [x.new_empty(x.shape) for x in saved[:2]],
    values=lambda call: require_finite({"hidden": call.hidden, "weight": call.weight}),
    rounds=True,
)
