"""The grid of `delta_residual`, and its judge: the equation in float64, on inputs rounded to the dtype.

Allowed is FACTOR times the error of the equation in float32, results rounded to the dtype, and never less
than a floor: sums over D and DV of float32 terms, STEPS roundings in a row, and one of the result. Inputs are
made as in `backends.cases`: the same on every machine.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from delta_trn.backends.delta_residual import delta_residual
from delta_trn.backends.delta_residual import recurrent as depth_recurrent
from delta_trn.backends.delta_residual.contract import Residual
from delta_trn.backends.parity.judge import Verdict, judged
from delta_trn.backends.registry import BACKENDS

# dk has passed the norm, its reciprocal, y, p, s, e, y . dy and the difference of two terms, four times as
# large as it is where D = 1: 8 and 4^2 roundings
STEPS = 24
OP = "delta_residual"
TENSORS = ("out", "dx", "dk", "dv", "dbeta")


@dataclass(frozen=True)
class DepthCase:
    """One row: M tokens of a stream [D, DV].

    beta    a constant, or None: uniform in [0, 2)
    k_eps   None: k is a unit vector; else the operation normalizes vectors of norm `norm`
    """

    name: str
    M: int
    D: int
    DV: int
    reason: str
    beta: float | None = None
    k_eps: float | None = 1e-5
    norm: float = 1.0


# fmt: off
CASES: tuple[DepthCase, ...] = (
    #          name                 M   D    DV
    DepthCase("residual_vector",    6,  768, 1,  "the vector model at the paper's small width"),
    DepthCase("residual_matrix",    6,  256, 4,  "the paper's expanded state"),
    DepthCase("residual_one",       6,  1,   1,  "D = 1: without the epsilon, k is only a sign", k_eps=0.5),
    DepthCase("residual_odd",       6,  61,  3,  "no size is a power of two"),
    DepthCase("residual_wide",      6,  32,  130, "more columns than rows"),
    DepthCase("residual_tiles",     130, 8,  2,  "more tokens than a tile of 128"),
    DepthCase("residual_banks",     2,  1100, 2, "D in several banks of PSUM"),
    DepthCase("residual_long",      2,  5000, 1, "D above the banks that a block has"),
    DepthCase("residual_blocks",    2,  3000, 5, "X too large to stay on chip: read twice, in uneven blocks"),
    DepthCase("residual_unit",      6,  96,  4,  "unit keys, not normalized by the operation", k_eps=None),
    DepthCase("residual_keep",      6,  64,  4,  "beta = 0: the identity; dv and dk are exactly 0", beta=0.0),
    DepthCase("residual_project",   6,  64,  4,  "beta = 1: what is along k is replaced", beta=1.0),
    DepthCase("residual_reflect",   6,  64,  4,  "beta = 2: a reflection", beta=2.0),
    DepthCase("residual_tiny",      6,  64,  4,  "|k| = 1e-5 = k_eps: the epsilon decides", norm=1e-5),
    DepthCase("residual_huge",      6,  64,  4,  "|k| = 1e4", norm=1e4),
    DepthCase("residual_zero",      6,  64,  4,  "k = 0: no division by it, dk is 1 / k_eps large", norm=0.0),
)
# fmt: on

BY_NAME: Mapping[str, DepthCase] = {case.name: case for case in CASES}


def inputs(case: DepthCase, dtype: torch.dtype) -> dict[str, Tensor]:
    """x, k, v, beta and the gradient of the result; beta in float32, or float64 with float64."""
    rng = np.random.Generator(np.random.PCG64(zlib.crc32(case.name.encode())))

    def normal(*shape: int) -> np.ndarray:
        # twelve uniforms: exact sums, so the same on every machine
        return rng.random((12, *shape)).sum(0) - 6

    x, k, v = normal(case.M, case.D, case.DV), normal(case.M, case.D), normal(case.M, case.DV)
    beta = 2 * rng.random(case.M) if case.beta is None else np.full(case.M, case.beta)
    k *= case.norm / np.sqrt((k * k).sum(-1, keepdims=True))
    if case.k_eps is None:
        k *= 1 - 2**-7  # so that rounding to bfloat16 leaves no key longer than 1
    full = torch.float64 if dtype == torch.float64 else torch.float32
    found = {"x": x, "k": k, "v": v, "beta": beta, "dout": normal(*x.shape)}
    return {
        name: torch.from_numpy(value).float().to(full if name == "beta" else dtype)
        for name, value in found.items()
    }


def outcome(given: Mapping[str, Tensor], k_eps: float | None, backend: str) -> dict[str, Tensor]:
    """Result and gradients by the public operation."""
    leaves = [given[name].detach().clone().requires_grad_() for name in ("x", "k", "v", "beta")]
    out = delta_residual(*leaves, k_eps=k_eps, backend=backend)
    return dict(zip(TENSORS, (out.detach(), *torch.autograd.grad(out, leaves, given["dout"])), strict=True))


def verdicts(case: DepthCase, dtype: torch.dtype, backend: str, device: str = "cpu") -> list[Verdict]:
    """Runs a backend on a case and judges every tensor. Raises BackendRefusal where it refuses."""
    given = inputs(case, dtype)
    judge = _equation({name: x.double() for name, x in given.items()}, case.k_eps)
    honest = _equation(given, case.k_eps)
    found = outcome({name: x.to(device) for name, x in given.items()}, case.k_eps, backend)
    return judged(case.name, OP, dtype, backend, found, honest, judge, case.D + case.DV + STEPS)


def measure(
    backend: str, device: str, dtypes: Sequence[torch.dtype], names: Sequence[str] | None = None
) -> Iterator[Verdict]:
    """The verdicts of a backend on all cases, or on those named; none if it lacks the operation."""
    capability = BACKENDS[backend].capabilities.get(OP)
    if capability is None:
        return
    for name in BY_NAME if names is None else names:
        for dtype in dtypes:
            if dtype in capability.dtypes:
                yield from verdicts(BY_NAME[name], dtype, backend, device)


def _equation(given: Mapping[str, Tensor], k_eps: float | None) -> dict[str, Tensor]:
    x, k, v, beta, dout = (given[name] for name in ("x", "k", "v", "beta", "dout"))
    call = Residual(x, k, v, beta, k_eps)
    out, _ = depth_recurrent.forward(call, save=False)
    grads = depth_recurrent.backward(dout, call, [])
    return dict(zip(TENSORS, (out, *grads), strict=True))
