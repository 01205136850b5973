"""The operation over depth: Deep Delta Learning's residual update."""

from __future__ import annotations

from operator import index

import torch
from torch import Tensor

from delta_trn.backends import checks, registry
from delta_trn.backends.operator import Operator

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
    tokens = (x.reshape(-1, D, DV), k.reshape(-1, D), v.reshape(-1, DV), beta.reshape(-1))
    (out,) = OPERATOR(*tokens, k_eps, backend=chosen)
    return out.reshape(x.shape)


# on flattened tokens: x [M, D, DV], k [M, D], v [M, DV], beta [M]
OPERATOR = Operator(
    OP,
    tensors=("x", "k", "v", "beta"),
    options={"k_eps": "float?"},
    fakes=lambda x, *rest: [x.new_empty(x.shape)],
    values=checks.residual_values,
)
