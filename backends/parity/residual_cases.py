"""The cases of `delta_residual`, judged by its equation in float64.

The samples are the equation in float32, with results rounded to the dtype and rounding errors drawn at
random. Gradients are PyTorch's own. No backend's line is used. A result has passed sums over D
and DV and STEPS roundings in a row. Inputs are the same on every machine, as in `rule_cases`.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from delta_trn.backends.delta_residual import delta_residual
from delta_trn.backends.parity.baseline import Noise, Rounding
from delta_trn.backends.parity.judge import Reference, Spread, Verdict, absolute

# dk has passed the norm, its reciprocal, y, p, s, e, y . dy and the difference of two terms, which are four
# times as large as it is where D = 1: 8 and 4^2 roundings
STEPS = 24
SAMPLES = 12
EXACT = Rounding(torch.float64)  # disturbs nothing
TENSORS = ("out", "dx", "dk", "dv", "dbeta")


@dataclass(frozen=True)
class ResidualCase:
    """Describes one case: M tokens of a stream [D, DV].

    beta    a constant; None: uniform in [0, 2)
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
    op: str = "delta_residual"


# fmt: off
CASES: tuple[ResidualCase, ...] = (
    # name, M, D, DV, reason
    ResidualCase("residual_vector", 6,  768, 1,  "the vector model at the paper's small width"),
    ResidualCase("residual_matrix", 6,  256, 4,  "the paper's expanded state"),
    ResidualCase("residual_one", 6,  1,   1,  "D = 1: without the epsilon, k is only a sign", k_eps=0.5),
    ResidualCase("residual_odd", 6,  61,  3,  "no size is a power of two"),
    ResidualCase("residual_wide", 6,  32,  130, "more columns than rows"),
    ResidualCase("residual_tiles", 130, 8,  2,  "more tokens than a tile of 128"),
    ResidualCase("residual_banks", 2,  1100, 2, "D in several banks of PSUM"),
    ResidualCase("residual_long", 2,  5000, 1, "D above the banks that a block has"),
    ResidualCase("residual_blocks", 2,  3000, 5, "X too large to stay on chip: read twice, in uneven blocks"),
    ResidualCase("residual_unit", 6,  96,  4,  "unit keys, not normalized by the operation", k_eps=None),
    ResidualCase("residual_keep", 6,  64,  4,  "beta = 0: the identity; dv and dk are exactly 0", beta=0.0),
    ResidualCase("residual_project", 6,  64,  4,  "beta = 1: what is along k is replaced", beta=1.0),
    ResidualCase("residual_reflect", 6,  64,  4,  "beta = 2: a reflection", beta=2.0),
    ResidualCase("residual_tiny", 6,  64,  4,  "|k| = 1e-5 = k_eps: the epsilon decides", norm=1e-5),
    ResidualCase("residual_huge", 6,  64,  4,  "|k| = 1e4", norm=1e4),
    ResidualCase("residual_zero", 6,  64,  4,  "k = 0: no division by it, dk is 1 / k_eps large", norm=0.0),
)
# fmt: on

BY_NAME: Mapping[str, ResidualCase] = {case.name: case for case in CASES}


def inputs(case: ResidualCase, dtype: torch.dtype) -> dict[str, Tensor]:
    """Makes x, k, v, beta and the result's gradient dout; beta in float32, or float64 with float64."""
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
    tensors = {"x": x, "k": k, "v": v, "beta": beta, "dout": normal(*x.shape)}
    return {
        name: torch.from_numpy(value).float().to(full if name == "beta" else dtype)
        for name, value in tensors.items()
    }


def outcome(x: Mapping[str, Tensor], k_eps: float | None, backend: str) -> dict[str, Tensor]:
    """Computes the result and its gradients by the public operation."""
    leaves = [x[name].detach().clone().requires_grad_() for name in ("x", "k", "v", "beta")]
    out = delta_residual(*leaves, k_eps=k_eps, backend=backend)
    return dict(zip(TENSORS, (out.detach(), *torch.autograd.grad(out, leaves, x["dout"])), strict=True))


def verdicts(case: ResidualCase, dtype: torch.dtype, backend: str, device: str = "cpu") -> list[Verdict]:
    """Runs a backend on a case and judges every tensor. Raises BackendRefusal where it refuses."""
    x = inputs(case, dtype)
    judge = formula({name: y.double() for name, y in x.items()}, case.k_eps)
    rows = torch.arange(case.M)
    spreads = {
        name: Spread(exact, rows, absolute(torch.float32 if name == "dbeta" else dtype))
        for name, exact in judge.items()
    }
    for sample in samples(x, case.k_eps):
        for name, spread in spreads.items():
            spread.add([sample[name]])
    expected = Reference(case.op, case.name, dtype, judge, spreads, case.D + case.DV + STEPS)
    return expected.verdicts(backend, outcome({n: y.to(device) for n, y in x.items()}, case.k_eps, backend))


def samples(x: Mapping[str, Tensor], k_eps: float | None) -> Iterator[dict[str, Tensor]]:
    """Yields results of the equation at the precision of x, rounded to the nearest and then at random."""
    dtype = x["x"].dtype
    yield formula(x, k_eps)
    rounding = Rounding(dtype, Noise(SAMPLES, x["x"].device))
    for _ in range(SAMPLES):
        yield formula(x, k_eps, rounding)


def formula(x: Mapping[str, Tensor], k_eps: float | None, rounding: Rounding = EXACT) -> dict[str, Tensor]:
    """Computes the equation of `backends.delta_residual` and its gradients in float32 at least.

    With noise, sums over D have an order of their own. They are products of matrices in both directions,
    which add up term by term on many CPUs; a sum adds in blocks and errs less.
    """
    order = torch.arange(x["k"].shape[1])
    if rounding.noise is not None:
        order = torch.randperm(len(order), generator=rounding.noise.generator)
    order = order.to(x["k"].device)
    x = {name: y[:, order] if name in ("x", "k", "dout") else y for name, y in x.items()}
    leaves = [x[name].detach().clone().requires_grad_() for name in ("x", "k", "v", "beta")]
    full = torch.promote_types(x["x"].dtype, torch.float32)
    X, k, v, beta = (rounding(y.to(full)) for y in leaves)
    if k_eps is not None:
        k = rounding(k / rounding(((k * k).sum(1, keepdim=True) + k_eps**2).sqrt()))
    missing = rounding(v - rounding((k[:, None, :] @ X).squeeze(1)))
    written = rounding(beta[:, None] * missing)
    out = rounding(X + k[:, :, None] @ written[:, None, :]).to(x["x"].dtype)
    gradients = torch.autograd.grad(out, leaves, x["dout"])
    results: dict[str, Tensor] = dict(zip(TENSORS, (out.detach(), *gradients), strict=True))
    back = order.argsort()
    return results | {name: results[name][:, back] for name in ("out", "dx", "dk")}
