"""The cases of the layers' operations, judged by their literal formulas in float64, under autograd.

The samples are the same formula in float32, with results rounded to the dtype and rounding errors drawn at
random; only the products of the cross-entropy are in the dtype. A result has passed sums of some float32
terms, and STEPS roundings in a row.
Inputs are the same on every machine, as in `rule_cases`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from delta_trn.backends import layers
from delta_trn.backends.parity.baseline import Noise, Rounding, product
from delta_trn.backends.parity.judge import Reference, Spread, Verdict, absolute

STEPS = 24  # of a gradient through SiLU, the norm and its gain
EPS = 1e-6
SAMPLES = 12


@dataclass(frozen=True)
class LayerCase:
    """Describes one case of an operation.

    shape       short_convolution: B, T, C, W; the norms: M, N; linear_cross_entropy: M, d, vocabulary
    lengths     packed sequences of short_convolution
    prefix      short_convolution continues from earlier tokens
    plain       no SiLU, no gate
    size        of the inputs, 1 if they are nearly normal
    ignored     linear_cross_entropy ignores every n-th target
    """

    name: str
    op: str
    shape: tuple[int, ...]
    reason: str
    lengths: tuple[int, ...] | None = None
    prefix: bool = False
    plain: bool = False
    size: float = 1.0
    ignored: int = 0


# fmt: off
CASES: tuple[LayerCase, ...] = (
    LayerCase("conv_one",       "short_convolution", (2, 1, 24, 4),   "one token: three taps read zeros"),
    LayerCase("conv_short",     "short_convolution", (2, 2, 24, 4),   "fewer tokens than taps"),
    LayerCase("conv_ragged",    "short_convolution", (2, 18, 70, 4),  "no tile fits evenly"),
    LayerCase("conv_two_taps",  "short_convolution", (1, 19, 24, 2),  "the fewest taps"),
    LayerCase("conv_many_taps", "short_convolution", (1, 19, 24, 8),  "the most taps of a kernel"),
    LayerCase("conv_one_tap",   "short_convolution", (1, 20, 16, 1),   "one tap: no look back"),
    LayerCase("conv_tile",      "short_convolution", (1, 122, 24, 4), "almost 128 tokens"),
    LayerCase("conv_seam",      "short_convolution", (2, 123, 24, 4), "almost 128 tokens, two rows"),
    LayerCase("conv_tile_forward", "short_convolution", (1, 125, 24, 4), "128 tokens with what came before"),
    LayerCase("conv_seam_forward", "short_convolution", (1, 126, 24, 4), "one more"),
    LayerCase("conv_tiles",     "short_convolution", (1, 130, 136, 4), "tiles of time and of channels"),
    LayerCase("conv_cells",     "short_convolution", (2, 517, 24, 4), "cells of NKI, one short"),
    LayerCase("conv_packed_cells", "short_convolution", (1, 515, 24, 4), "sequences end at seams of cells",
              lengths=(510, 1, 2, 0, 2)),
    LayerCase("conv_wide",      "short_convolution", (1, 9, 700, 4),  "channels above a bank of PSUM"),
    LayerCase("conv_packed_tiles", "short_convolution", (1, 250, 24, 4), "sequences end at seams of tiles",
              lengths=(1, 122, 2, 0, 125)),
    LayerCase("conv_prefix_tiles", "short_convolution", (1, 131, 24, 4), "a prefix before several tiles",
              prefix=True),
    LayerCase("conv_packed",    "short_convolution", (1, 21, 24, 4),  "empty sequences, some shorter than W",
              lengths=(0, 1, 2, 0, 3, 15)),
    LayerCase("conv_prefix",    "short_convolution", (2, 19, 24, 4),  "gradient of what came before",
              prefix=True),
    LayerCase("conv_step",      "short_convolution", (3, 1, 24, 4),   "a token of decoding", prefix=True),
    LayerCase("conv_linear",    "short_convolution", (2, 19, 24, 4),  "no activation",
              prefix=True, plain=True),
    LayerCase("conv_large",     "short_convolution", (1, 19, 24, 4),  "SiLU far from 0", size=30.0),
    LayerCase("conv_small",     "short_convolution", (1, 19, 24, 4),  "SiLU at 0", size=1e-4),
    LayerCase("conv_zero",      "short_convolution", (1, 19, 24, 4),  "all zero", size=0.0),
    LayerCase("norm_one",       "gated_rms_norm",    (1, 64),         "one row"),
    LayerCase("norm_head",      "gated_rms_norm",    (70, 96),        "a head's size, no power of two"),
    LayerCase("norm_narrow",    "gated_rms_norm",    (70, 32),        "many rows per program"),
    LayerCase("norm_wide",      "gated_rms_norm",    (5, 2048),       "one row per program"),
    LayerCase("norm_tiles",     "gated_rms_norm",    (1025, 256),     "whole tiles and one row"),
    LayerCase("norm_many",      "gated_rms_norm",    (4100, 64),      "several rows per partition"),
    LayerCase("norm_bank",      "gated_rms_norm",    (5, 1100),       "a width above a bank of PSUM"),
    LayerCase("norm_plain_tiles", "gated_rms_norm",  (700, 192),      "several tiles, no gate", plain=True),
    LayerCase("gated_norm_zero", "gated_rms_norm",    (9, 64),         "all zero: epsilon alone", size=0.0),
    LayerCase("gated_norm_tiny", "gated_rms_norm",    (9, 64),         "epsilon decides", size=1e-4),
    LayerCase("norm_large",     "gated_rms_norm",    (9, 64),         "gates open or closed", size=100.0),
    LayerCase("norm_plain",     "gated_rms_norm",    (9, 1536),       "no gate", plain=True),
    LayerCase("sum_one",        "add_rms_norm",      (1, 64),         "one row"),
    LayerCase("sum_odd",        "add_rms_norm",      (37, 600),       "a width that is no power of two"),
    LayerCase("sum_wide",       "add_rms_norm",      (5, 2048),       "one row per program"),
    LayerCase("loss_one",       "linear_cross_entropy", (1, 16, 50),     "one token"),
    LayerCase("loss_ragged",    "linear_cross_entropy", (21, 48, 5003),  "a vocabulary that fills no tile"),
    LayerCase("loss_ignored",   "linear_cross_entropy", (21, 48, 300),   "one target in three is ignored",
              ignored=3),
    LayerCase("loss_none",      "linear_cross_entropy", (5, 16, 50),     "all targets are ignored: all is 0",
              ignored=1),
    LayerCase("loss_sure",      "linear_cross_entropy", (21, 48, 300),   "logits of a thousand", size=30.0),
)
# fmt: on

BY_NAME: Mapping[str, LayerCase] = {case.name: case for case in CASES}

Tensors = Mapping[str, Tensor]
Draw = Callable[..., Tensor]


@dataclass(frozen=True)
class _Operation:
    """Makes and computes the cases of one operation.

    tensors     (case, normal, rng, full) -> leaves in the order of gradients, then other inputs, then the
                gradients of the outputs, whose names begin with d
    formula     (case, tensors, rounding) -> outputs, literally, in float32 at least
    run         (case, tensors, backend) -> outputs of the public operation
    """

    tensors: Callable[[LayerCase, Draw, np.random.Generator, torch.dtype], dict[str, Tensor]]
    formula: Callable[[LayerCase, Tensors, Rounding], list[Tensor]]
    run: Callable[[LayerCase, Tensors, str], list[Tensor]]


def inputs(case: LayerCase, dtype: torch.dtype) -> dict[str, Tensor]:
    """Makes the tensors of a case: activations in `dtype`, weights in float32, or float64 with float64."""
    rng = np.random.Generator(np.random.PCG64(zlib.crc32(case.name.encode())))
    full = torch.float64 if dtype == torch.float64 else torch.float32

    def draw(*shape: int, size: float = case.size, dtype: torch.dtype = dtype) -> Tensor:
        return torch.from_numpy(size * normal(rng, *shape)).float().to(dtype)

    return _OPERATIONS[case.op].tensors(case, draw, rng, full)


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Draws nearly normal numbers: sums of twelve uniforms, which are exact, so the same on every machine."""
    return rng.random((12, *shape)).sum(0) - 6


def formula(case: LayerCase, x: Tensors, rounding: Rounding) -> list[Tensor]:
    """Computes the outputs literally, in float32 at least."""
    return _OPERATIONS[case.op].formula(case, x, rounding)


def outcome(
    case: LayerCase, x: Tensors, backend: str | None, rounding: Rounding | None = None
) -> dict[str, Tensor]:
    """Computes results and gradients by a backend, or for None by the formula in the dtypes of `x`."""
    douts = {name: y for name, y in x.items() if name.startswith("d")}
    leaves = {
        name: y.detach().clone().requires_grad_()
        for name, y in x.items()
        if y.is_floating_point() and name not in douts
    }
    tensors = {**x, **leaves}
    if backend is None:
        outputs = formula(case, tensors, rounding or Rounding(next(iter(x.values())).dtype))
    else:
        outputs = _OPERATIONS[case.op].run(case, tensors, backend)
    pairs = list(zip(douts.items(), outputs, strict=True))
    grads = torch.autograd.grad(outputs, list(leaves.values()), [dy.to(y.dtype) for (_, dy), y in pairs])
    results = {name[1:]: y.detach() for (name, _), y in pairs}
    return results | {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}


def verdicts(case: LayerCase, dtype: torch.dtype, backend: str, device: str = "cpu") -> list[Verdict]:
    """Runs a backend on a case and judges every tensor. Raises BackendRefusal where it refuses."""
    x = inputs(case, dtype)
    judge = outcome(case, {n: y.double() if y.is_floating_point() else y for n, y in x.items()}, None)
    rows = {name: torch.arange(len(y)) for name, y in judge.items() if y.dim() > 1 and "weight" not in name}
    spreads = {name: Spread(exact, rows.get(name), absolute(dtype)) for name, exact in judge.items()}
    rounding = Rounding(dtype, Noise(SAMPLES))
    for i in range(1 + SAMPLES):
        sample = outcome(case, x, None, rounding if i else None)
        for name, spread in spreads.items():
            spread.add([sample[name]])
    terms = STEPS + (case.shape[0] * case.shape[1] if case.op == "short_convolution" else sum(case.shape))
    rounded = dtype if case.op == "linear_cross_entropy" else None  # dlogits are
    expected = Reference(case.op, case.name, dtype, judge, spreads, terms, rounded)
    return expected.verdicts(backend, outcome(case, {n: y.to(device) for n, y in x.items()}, backend))


def _full(x: Tensors, rounding: Rounding) -> dict[str, Tensor]:
    """Returns the floats in float32 at least; a sample's move by an ulp here and there."""
    return {
        name: rounding(y.to(torch.promote_types(y.dtype, torch.float32))) if y.is_floating_point() else y
        for name, y in x.items()
    }


def _convolution_tensors(
    case: LayerCase, normal: Draw, rng: np.random.Generator, full: torch.dtype
) -> dict[str, Tensor]:
    B, T, C, W = case.shape
    x = {"x": normal(B, T, C), "weight": normal(C, W, size=0.5, dtype=full)}
    if case.prefix:
        x["prefix"] = normal(B, W - 1, C)
    if case.lengths is not None:
        x["position"] = torch.cat([torch.arange(n) for n in case.lengths])
    return x | {"dy": normal(B, T, C, size=1.0)}


def _convolution_formula(case: LayerCase, x: Tensors, r: Rounding) -> list[Tensor]:
    """Adds tap by tap, sequence by sequence."""
    x = _full(x, r)
    weight, outputs = x["weight"], []
    W = weight.shape[1]
    for part in x["x"].split(list(case.lengths or (x["x"].shape[1],)), dim=1):
        before = x["prefix"] if "prefix" in x else part.new_zeros(part.shape[0], W - 1, part.shape[2])
        joined = torch.cat([before, part], dim=1)
        taps = [joined[:, j : j + part.shape[1]] * weight[:, j] for j in range(W)]
        outputs.append(torch.stack(taps).sum(0))
    z = torch.cat(outputs, dim=1)
    return [z if case.plain else r(z) * r(torch.sigmoid(z))]


def _convolution(case: LayerCase, x: Tensors, backend: str) -> list[Tensor]:
    activation = "linear" if case.plain else "silu"
    options = {name: x.get(name) for name in ("prefix", "position")}
    return [layers.short_convolution(x["x"], x["weight"], **options, activation=activation, backend=backend)]


def _norm_tensors(
    case: LayerCase, normal: Draw, rng: np.random.Generator, full: torch.dtype
) -> dict[str, Tensor]:
    sums = case.op == "add_rms_norm"
    x = {"x": normal(*case.shape)}
    if not case.plain:
        x["residual" if sums else "gate"] = normal(*case.shape)
    x["weight"] = 1 + normal(case.shape[1], size=0.3, dtype=full)
    return x | {name: normal(*case.shape, size=1.0) for name in (("dy", "dtotal") if sums else ("dy",))}


def _normalize(x: Tensor, weight: Tensor, r: Rounding) -> Tensor:
    return r(x / r((x.square().mean(-1, keepdim=True) + EPS).sqrt())) * weight


def _gated_norm_formula(case: LayerCase, x: Tensors, r: Rounding) -> list[Tensor]:
    x = _full(x, r)
    y = _normalize(x["x"], x["weight"], r)
    return [y if case.plain else r(y) * r(x["gate"] * torch.sigmoid(x["gate"]))]


def _gated_norm(case: LayerCase, x: Tensors, backend: str) -> list[Tensor]:
    return [layers.gated_rms_norm(x["x"], x.get("gate"), x["weight"], eps=EPS, backend=backend)]


def _added_norm_formula(case: LayerCase, x: Tensors, r: Rounding) -> list[Tensor]:
    dtype, x = x["residual"].dtype, _full(x, r)
    # the sum is a result, and what is normalized is that result
    total = x["residual"] + x["x"]
    total = total + (total.to(dtype).to(total.dtype) - total).detach()
    return [_normalize(r.short(total), x["weight"], r), total]


def _added_norm(case: LayerCase, x: Tensors, backend: str) -> list[Tensor]:
    return [*layers.add_rms_norm(x["x"], x["residual"], x["weight"], eps=EPS, backend=backend)]


def _loss_tensors(
    case: LayerCase, normal: Draw, rng: np.random.Generator, full: torch.dtype
) -> dict[str, Tensor]:
    M, d, vocabulary = case.shape
    x = {"hidden": normal(M, d), "weight": normal(vocabulary, d, size=d**-0.5, dtype=full)}
    targets = torch.from_numpy(rng.integers(0, vocabulary, M))
    if case.ignored:
        targets[:: case.ignored] = -100
    return x | {"targets": targets, "dloss": torch.tensor(1.0, dtype=full)}


def _loss_formula(case: LayerCase, x: Tensors, r: Rounding) -> list[Tensor]:
    """Multiplies in the dtype of hidden, as implementations do; the rest is float32 at least."""
    x, targets = _full(x, r), x["targets"]
    z = r(r.short(product(x["hidden"], r.short(x["weight"]).t(), r)))
    counted = targets != -100
    target = targets.clamp(min=0)[:, None]
    if r.noise is None and z.dtype == torch.float32:
        losses = z.logsumexp(-1) - z.gather(1, target).squeeze(1)
    else:
        # the target's logit may be a sum of its own, whose rounding a sure token's loss does not cancel
        largest, goal = z.detach().amax(-1, keepdim=True), r(z).gather(1, target)
        # z - max and not z: a logit of 1000 lacks the digits that a probability of nearly 1 needs
        losses = r(r(z - largest).exp().sum(-1)).log() - (goal - largest).squeeze(1)
    return [(losses * counted).sum() / counted.sum().clamp(min=1)]


def _loss(case: LayerCase, x: Tensors, backend: str) -> list[Tensor]:
    return [layers.linear_cross_entropy(x["hidden"], x["weight"], x["targets"], backend=backend)]


_OPERATIONS: Mapping[str, _Operation] = {
    "short_convolution": _Operation(_convolution_tensors, _convolution_formula, _convolution),
    "gated_rms_norm": _Operation(_norm_tensors, _gated_norm_formula, _gated_norm),
    "add_rms_norm": _Operation(_norm_tensors, _added_norm_formula, _added_norm),
    "linear_cross_entropy": _Operation(_loss_tensors, _loss_formula, _loss),
}
