"""The operation over depth: Deep Delta Learning's residual update, and its custom operators.

torch.compile sees `delta_trn::delta_residual` and `delta_trn::delta_residual_backward`, on flattened tokens;
the backend's name is an argument, as in `backends.autograd`.
"""

from __future__ import annotations

from operator import index
from typing import Any

import torch
from torch import Tensor

from backends import checks, registry
from backends.registry import adapter

OP = "delta_residual"


def delta_residual(
    x: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    k_eps: float | None = None,
    backend: str | None = None,
) -> Tensor:
    r"""One rank-1 correction of a residual stream per token ("Deep Delta Learning").

        X' = X + beta k (v^T - k^T X) = (I - beta k k^T) X + beta k v^T

    beta 0 keeps X, 1 replaces what X holds along k by v, 2 reflects it (v = 0: a Householder reflection).

        x           [..., D, DV] or [..., D]    float64, float32, bfloat16, float16
        k           [..., D]                    dtype of x; |k| <= 1, or see k_eps
        v           [..., DV] or [...]          dtype of x
        beta        [...]                       in [0, 2]; float32, or the dtype of x
        returns     like x

    k_eps makes the operation normalize: k / sqrt(|k|^2 + k_eps^2). Sums are float32 (float64 for float64
    inputs) on every backend, also under autocast. Differentiable once in x, k, v and beta.

    backend as in `gated_delta_rule`: a name, or None for the process's default, else the one for the tensors'
    device. Raises BackendRefusal, with every reason, and never substitutes; TypeError and ValueError for
    arguments that do not fit.
    """
    checks.residual_arguments(x, k, v, beta, k_eps)
    D = index(k.shape[-1])
    DV = 1 if x.dim() == k.dim() else index(x.shape[-1])
    gradients = torch.is_grad_enabled() and any(y.requires_grad for y in (x, k, v, beta))
    selection = registry.SELECTION
    name = selection.name if backend is None else backend
    chosen = registry.chosen_name(
        OP, x.device.type, x.dtype, (1, 1, D, DV), False, gradients, name, selection.allow
    )
    out = _forward(x.reshape(-1, D, DV), k.reshape(-1, D), v.reshape(-1, DV), beta.reshape(-1), k_eps, chosen)
    return out.view(x.shape)


@torch.library.custom_op(
    "delta_trn::delta_residual",
    mutates_args=(),
    schema="(Tensor x, Tensor k, Tensor v, Tensor beta, float? k_eps, str backend) -> Tensor",
)
def _forward(x: Tensor, k: Tensor, v: Tensor, beta: Tensor, k_eps: float | None, backend: str) -> Tensor:
    """x [M, D, DV], k [M, D], v [M, DV], beta [M]."""
    checks.residual_values(x, k, v, beta, k_eps)
    with torch.autocast(x.device.type, enabled=False):
        return adapter(backend, OP).delta_residual_forward(x, k, v, beta, k_eps).contiguous()


@_forward.register_fake
def _(x: Tensor, k: Tensor, v: Tensor, beta: Tensor, k_eps: float | None, backend: str) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op(
    "delta_trn::delta_residual_backward",
    mutates_args=(),
    schema="(Tensor dout, Tensor x, Tensor k, Tensor v, Tensor beta, float? k_eps, str backend)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)
def _backward(
    dout: Tensor, x: Tensor, k: Tensor, v: Tensor, beta: Tensor, k_eps: float | None, backend: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx, dk, dv, dbeta, each in its input's dtype."""
    with torch.autocast(x.device.type, enabled=False):
        grads = adapter(backend, OP).delta_residual_backward(dout, x, k, v, beta, k_eps)
    dx, dk, dv, dbeta = (y.contiguous() for y in grads)
    return dx, dk, dv, dbeta


@_backward.register_fake
def _(
    dout: Tensor, x: Tensor, k: Tensor, v: Tensor, beta: Tensor, k_eps: float | None, backend: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), k.new_empty(k.shape), v.new_empty(v.shape), beta.new_empty(beta.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.k_eps, ctx.backend = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    return *_backward(dout, *ctx.saved_tensors, ctx.k_eps, ctx.backend), None, None


_forward.register_autograd(_differentiate, setup_context=_keep)


class _Lazy(torch.autograd.Function):
    """The same without operators."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, k: Tensor, v: Tensor, beta: Tensor, k_eps: float | None, backend: str
    ) -> Tensor:
        checks.residual_values(x, k, v, beta, k_eps)
        ctx.save_for_backward(x, k, v, beta)
        ctx.k_eps, ctx.backend = k_eps, backend
        with torch.autocast(x.device.type, enabled=False):
            return adapter(backend, OP).delta_residual_forward(x, k, v, beta, k_eps)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        with torch.autocast(dout.device.type, enabled=False):
            grads = adapter(ctx.backend, OP).delta_residual_backward(dout, *ctx.saved_tensors, ctx.k_eps)
        return *grads, None, None


def _refuse_second_derivative(ctx: Any, *grads: Tensor) -> None:
    raise RuntimeError(
        "delta_residual has no second derivative; drop create_graph=True, "
        "or write the update in PyTorch operations"
    )


_backward.register_autograd(_refuse_second_derivative)
