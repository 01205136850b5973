"""NKI's side of the layers' operations that have a kernel: short convolution with SiLU, gated RMS norm.

As in `backends.nki_adapter`: kernels are unrolled, so a call is of bounded length, and on CPU tensors it is
simulated. Nothing is kept for backward but inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from delta_trn.backends.gated_delta_rule.nki_adapter import require_within_rsqrt, run
from delta_trn.nki_kernels.gated_rms_norm import LEAST_EPS, gated_rms_norm_bwd, gated_rms_norm_fwd
from delta_trn.nki_kernels.short_convolution import short_convolution_bwd, short_convolution_fwd

ROWS = 2**21  # numbers of x in a call of the norm's kernel


def short_convolution_forward(
    x: Tensor, weight: Tensor, prefix: Tensor | None, position: Tensor | None, activation: str, save: bool
) -> Tensor:
    """y [B, T, C]; shapes as in `backends.short_convolution`."""
    return run(short_convolution_fwd, x, weight, *_options(prefix, position))


def short_convolution_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    prefix: Tensor | None,
    position: Tensor | None,
    activation: str,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """dx, dweight, dprefix."""
    dx, dweight, *dprefix = run(short_convolution_bwd, dy, x, weight, *_options(prefix, position))
    return dx, dweight, dprefix[0] if dprefix else None


def gated_rms_norm_forward(x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, save: bool) -> Tensor:
    """y [..., N]. Raises BackendRefusal for an eps that the Scalar engine's rsqrt does not take."""
    require_within_rsqrt("eps", eps, LEAST_EPS)
    found = [run(gated_rms_norm_fwd, rows, z, weight, eps, gate is not None) for rows, z in _pieces(x, gate)]
    return torch.cat(found).reshape(x.shape)


def gated_rms_norm_backward(
    dy: Tensor, x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, save: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """dx, dgate, dweight."""
    given = [rows for rows, _ in _pieces(dy, None)]
    found = [
        run(gated_rms_norm_bwd, m, rows, z, weight, eps, gate is not None)
        for m, (rows, z) in zip(given, _pieces(x, gate), strict=True)
    ]
    dx, *dgate, dweight = zip(*found, strict=True)
    dgate = None if gate is None else torch.cat(dgate[0]).reshape(x.shape)
    return torch.cat(dx).reshape(x.shape), dgate, torch.stack(dweight).sum(0)


def _pieces(x: Tensor, gate: Tensor | None) -> list[tuple[Tensor, Tensor | None]]:
    """Rows [M, N] of x and gate, as many as a call takes."""
    size = max(1, ROWS // x.shape[-1])
    rows = x.reshape(-1, x.shape[-1]).split(size)
    if gate is None:
        return [(part, None) for part in rows]
    return list(zip(rows, gate.reshape(-1, x.shape[-1]).split(size), strict=True))


def _options(prefix: Tensor | None, position: Tensor | None) -> tuple[Tensor | bool | None, ...]:
    """The kernels' position, packed, prefix, continued."""
    places = None if position is None else position.to(torch.int32)
    return places, position is not None, prefix, prefix is not None
