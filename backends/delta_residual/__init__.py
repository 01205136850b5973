"""The operation over depth: Deep Delta Learning's residual update."""

from __future__ import annotations

from operator import index

from torch import Tensor

from delta_trn.backends.checks import (
    in_brackets,
    is_checking,
    require_dtypes,
    require_finite,
    require_one_device,
    require_short_keys,
    require_strengths,
    require_tensors,
    shape_of,
)
from delta_trn.backends.delta_residual.contract import Residual
from delta_trn.backends.operator import Operator


def delta_residual(
    x: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    k_eps: float | None = None,
    backend: str | None = None,
) -> Tensor:
    r"""Corrects a residual stream, by rank 1 for each token ("Deep Delta Learning").

        X' = X + beta k (v^T - k^T X) = (I - beta k k^T) X + beta k v^T

    beta 0 keeps X, 1 replaces what X holds along k by v, 2 reflects it (v = 0: a Householder
    reflection).

        x           [..., D, DV] or [..., D]    float64, float32, bfloat16, float16
        k           [..., D]                    dtype of x; |k| <= 1, or see k_eps
        v           [..., DV] or [...]          dtype of x
        beta        [...]                       in [0, 2]; float32, or the dtype of x
        returns     like x

    k_eps makes the operation normalize: k / sqrt(|k|^2 + k_eps^2). Sums are float32 (float64 for
    float64 inputs) on every backend, also under autocast. Differentiable once in x, k, v and beta.

    backend as in `gated_delta_rule`: a name, or None for the default backend, else the one for the
    tensors' device. Raises BackendRefusal, with every reason, and never substitutes; TypeError and
    ValueError for arguments that do not fit.

        >>> import torch
        >>> from delta_trn import delta_residual
        >>> x, k = torch.tensor([[1.0, 1.0]]), torch.tensor([[1.0, 0.0]])
        >>> delta_residual(x, k, v=torch.tensor([5.0]), beta=torch.tensor([1.0]))
        tensor([[5., 1.]])
    """
    _check(x, k, v, beta, k_eps)
    D = index(k.shape[-1])
    DV = 1 if x.dim() == k.dim() else index(x.shape[-1])
    name, save = OPERATOR.choose((x, k, v, beta), {"D": D, "DV": DV}, backend)
    tokens = (x.reshape(-1, D, DV), k.reshape(-1, D), v.reshape(-1, DV), beta.reshape(-1))
    (out,) = OPERATOR(Residual(*tokens, k_eps), save=save, backend=name)
    return out.reshape(x.shape)


def _check(x: Tensor, k: Tensor, v: Tensor, beta: Tensor, k_eps: float | None) -> None:
    """Raises TypeError or ValueError unless shapes, dtypes and devices fit."""
    require_tensors({"x": x, "k": k, "v": v, "beta": beta})
    lead = tuple(k.shape[:-1])
    if k.dim() < 1 or x.dim() not in (k.dim(), k.dim() + 1) or x.shape[: k.dim()] != k.shape:
        raise ValueError(
            f"k {shape_of(k)} does not fit x {shape_of(x)}; with x [..., D, DV] or [..., D] k is "
            "[..., D]"
        )
    wanted = lead if x.dim() == k.dim() else (*lead, x.shape[-1])
    if tuple(v.shape) != wanted:
        raise ValueError(
            f"v {shape_of(v)} does not fit x {shape_of(x)}; expected {in_brackets(wanted)}"
        )
    if tuple(beta.shape) != lead:
        raise ValueError(
            f"beta {shape_of(beta)} does not fit k {shape_of(k)}; expected {in_brackets(lead)}"
        )
    if 0 in x.shape[len(lead) :]:
        raise ValueError(f"D and DV of x {shape_of(x)} must be at least 1")
    require_dtypes(x, "x", {"k": k, "v": v}, {"beta": beta})
    require_one_device(x, "x", {"k": k, "v": v, "beta": beta})
    if k_eps is not None and not 0 < k_eps < float("inf"):
        raise ValueError(
            f"k_eps={k_eps} must be above 0 and finite, or None where k has norm 1 already"
        )


def _check_values(call: Residual) -> None:
    """Raises ValueError, in check mode, for data outside the operation's domain."""
    if not is_checking():
        return
    require_finite({"x": call.x, "k": call.k, "v": call.v, "beta": call.beta})
    require_strengths(call.beta, "2 sigmoid(b)")
    if call.k_eps is None:
        require_short_keys(call.k, "k_eps")


OPERATOR = Operator(
    "delta_residual",
    Residual,
    fakes=lambda call: [call.x.new_empty(call.x.shape)],
    values=_check_values,
)
