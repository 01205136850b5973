"""The cases of a layer's small operations and of `delta_residual`, judged by their literal
formulas.

Of the samples only the products of the cross-entropy are in the dtype; the rest is float32 at
least. A result has passed sums of some float32 terms, and STEPS roundings in a row.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from delta_trn.backends import delta_residual, layers
from delta_trn.backends.parity.baseline import Rounding, product
from delta_trn.backends.parity.cases import STEPS, Inputs, Operation, Tensors
from delta_trn.backends.parity.judge import Verdict

EPS = 1e-6


@dataclass(frozen=True)
class LayerCase:
    """Describes one case of an operation.

    shape       short_convolution: B, T, C, W; the norms: M, N; linear_cross_entropy: M, d,
                vocabulary; delta_residual: M tokens of a stream [D, DV]
    lengths     packed sequences of short_convolution
    prefix      short_convolution continues from earlier tokens
    plain       no SiLU, no gate
    sigmoid     the norm's gate is multiplied as its sigmoid
    size        of the inputs, 1 if they are nearly normal
    ignored     linear_cross_entropy ignores every n-th target
    beta        of delta_residual, a constant; None: uniform in [0, 2)
    k_eps       of delta_residual; None: k is a unit vector; else the operation normalizes vectors
                of `norm`
    """

    name: str
    op: str
    shape: tuple[int, ...]
    reason: str
    lengths: tuple[int, ...] | None = None
    prefix: bool = False
    plain: bool = False
    sigmoid: bool = False
    size: float = 1.0
    ignored: int = 0
    beta: float | None = None
    k_eps: float | None = 1e-5
    norm: float = 1.0


def _of(op: str) -> Callable[..., LayerCase]:
    """Returns a function of a case's other fields."""
    return lambda name, shape, reason, **form: LayerCase(name, op, shape, reason, **form)


_conv, _norm, _sum = _of("short_convolution"), _of("gated_rms_norm"), _of("add_rms_norm")
_loss, _residual = _of("linear_cross_entropy"), _of("delta_residual")

# fmt: off
CASES: tuple[LayerCase, ...] = (
    _conv("conv_one",             (2, 1, 24, 4),   "one token: three taps read zeros"),
    _conv("conv_short",           (2, 2, 24, 4),   "fewer tokens than taps"),
    _conv("conv_ragged",          (2, 18, 70, 4),  "no tile fits evenly"),
    _conv("conv_two_taps",        (1, 19, 24, 2),  "the fewest taps"),
    _conv("conv_many_taps",       (1, 19, 24, 8),  "the most taps of a kernel"),
    _conv("conv_one_tap",         (1, 20, 16, 1),  "one tap: no look back"),
    _conv("conv_tile",            (1, 122, 24, 4), "almost 128 tokens"),
    _conv("conv_seam",            (2, 123, 24, 4), "almost 128 tokens, two rows"),
    _conv("conv_tile_forward",    (1, 125, 24, 4), "128 tokens with what came before"),
    _conv("conv_seam_forward",    (1, 126, 24, 4), "one more"),
    _conv("conv_tiles",           (1, 130, 136, 4), "tiles of time and of channels"),
    _conv("conv_cells",           (2, 517, 24, 4), "cells of NKI, one short"),
    _conv("conv_packed_cells",    (1, 515, 24, 4), "sequences end at seams of cells",
          lengths=(510, 1, 2, 0, 2)),
    _conv("conv_wide",            (1, 9, 700, 4),  "channels above a bank of PSUM"),
    _conv("conv_packed_tiles",    (1, 250, 24, 4), "sequences end at seams of tiles",
          lengths=(1, 122, 2, 0, 125)),
    _conv("conv_prefix_tiles",    (1, 131, 24, 4), "a prefix before several tiles", prefix=True),
    _conv("conv_packed",          (1, 21, 24, 4),  "empty sequences, some shorter than W",
          lengths=(0, 1, 2, 0, 3, 15)),
    _conv("conv_prefix",          (2, 19, 24, 4),  "gradient of what came before", prefix=True),
    _conv("conv_step",            (3, 1, 24, 4),   "a token of decoding", prefix=True),
    _conv("conv_linear",          (2, 19, 24, 4),  "no activation", prefix=True, plain=True),
    _conv("conv_large",           (1, 19, 24, 4),  "SiLU far from 0", size=30.0),
    _conv("conv_small",           (1, 19, 24, 4),  "SiLU at 0", size=1e-4),
    _conv("conv_zero",            (1, 19, 24, 4),  "all zero", size=0.0),
    _norm("norm_one",             (1, 64),         "one row"),
    _norm("norm_head",            (70, 96),        "a head's size, no power of two"),
    _norm("norm_narrow",          (70, 32),        "many rows per program"),
    _norm("norm_wide",            (5, 2048),       "one row per program"),
    _norm("norm_tiles",           (1025, 256),     "whole tiles and one row"),
    _norm("norm_many",            (4100, 64),      "several rows per partition"),
    _norm("norm_bank",            (5, 1100),       "a width above a bank of PSUM"),
    _norm("norm_plain_tiles",     (700, 192),      "several tiles, no gate", plain=True),
    _norm("gated_norm_zero",      (9, 64),         "all zero: epsilon alone", size=0.0),
    _norm("gated_norm_tiny",      (9, 64),         "epsilon decides", size=1e-4),
    _norm("norm_large",           (9, 64),         "gates open or closed", size=100.0),
    _norm("norm_plain",           (9, 1536),       "no gate", plain=True),
    _norm("sigmoid_norm_one",     (1, 64),         "one row", sigmoid=True),
    _norm("sigmoid_norm_head",    (70, 96),        "a head's size, no power of two", sigmoid=True),
    _norm("sigmoid_norm_tiles",   (1025, 128),     "whole tiles and one row", sigmoid=True),
    _norm("sigmoid_norm_wide",    (5, 1100),       "one ragged row per program", sigmoid=True),
    _norm("sigmoid_norm_large",   (9, 64),         "gates open or closed", sigmoid=True, size=100.0),
    _norm("sigmoid_norm_tiny",    (9, 64),         "epsilon decides, gates half open", sigmoid=True,
          size=1e-4),
    _sum("sum_one",               (1, 64),         "one row"),
    _sum("sum_odd",               (37, 600),       "a width that is no power of two"),
    _sum("sum_wide",              (5, 2048),       "one row per program"),
    _loss("loss_one",             (1, 16, 50),     "one token"),
    _loss("loss_ragged",          (21, 48, 5003),  "a vocabulary that fills no tile"),
    _loss("loss_ignored",         (21, 48, 300),   "one target in three is ignored", ignored=3),
    _loss("loss_none",            (5, 16, 50),     "all targets are ignored: all is 0", ignored=1),
    _loss("loss_sure",            (21, 48, 300),   "logits of a thousand", size=30.0),
    _residual("residual_vector",  (6, 768, 1),     "the vector model at the paper's small width"),
    _residual("residual_matrix",  (6, 256, 4),     "the paper's expanded state"),
    _residual("residual_one",     (6, 1, 1),       "D = 1: without the epsilon, k is only a sign", k_eps=0.5),
    _residual("residual_odd",     (6, 61, 3),      "no size is a power of two"),
    _residual("residual_wide",    (6, 32, 130),    "more columns than rows"),
    _residual("residual_tiles",   (130, 8, 2),     "more tokens than a tile of 128"),
    _residual("residual_banks",   (2, 1100, 2),    "D in several banks of PSUM"),
    _residual("residual_long",    (2, 5000, 1),    "D above the banks that a block has"),
    _residual("residual_blocks",  (2, 3000, 5),
              reason="X too large to stay on chip: read twice, in uneven blocks"),
    _residual("residual_unit",    (6, 96, 4),      "unit keys, not normalized by the operation", k_eps=None),
    _residual("residual_keep",    (6, 64, 4),      "beta = 0: the identity; dv, dk are exactly 0", beta=0.0),
    _residual("residual_project", (6, 64, 4),      "beta = 1: what is along k is replaced", beta=1.0),
    _residual("residual_reflect", (6, 64, 4),      "beta = 2: a reflection", beta=2.0),
    _residual("residual_tiny",    (6, 64, 4),      "|k| = 1e-5 = k_eps: the epsilon decides", norm=1e-5),
    _residual("residual_huge",    (6, 64, 4),      "|k| = 1e4", norm=1e4),
    _residual("residual_zero",    (6, 64, 4),      "k = 0: no division by it; dk is 1 / k_eps", norm=0.0),
)
# fmt: on

BY_NAME: Mapping[str, LayerCase] = {case.name: case for case in CASES}

Draw = Callable[..., Tensor]


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Draws nearly normal numbers: sums of twelve uniforms, which are exact,
    so the same on every machine.
    """
    return rng.random((12, *shape)).sum(0) - 6


def inputs(case: LayerCase, dtype: torch.dtype) -> Inputs:
    """Makes the tensors of a case: activations in `dtype`, weights in float32,
    or float64 with float64.
    """
    rng = np.random.Generator(np.random.PCG64(zlib.crc32(case.name.encode())))
    full = torch.float64 if dtype == torch.float64 else torch.float32

    def draw(*shape: int, size: float = case.size, dtype: torch.dtype = dtype) -> Tensor:
        return torch.from_numpy(size * normal(rng, *shape)).float().to(dtype)

    return _PARTS[case.op][0](case, draw, rng, full)


def formula(
    case: LayerCase, x: Tensors, rounding: Rounding, chunk: int | None = None
) -> dict[str, Tensor]:
    """Computes the outputs literally, in float32 at least."""
    return _PARTS[case.op][1](case, x, rounding)


def verdicts(
    case: LayerCase, dtype: torch.dtype, backend: str, device: str = "cpu"
) -> list[Verdict]:
    """Runs a backend on a case and judges every tensor. Raises BackendRefusal where it refuses."""
    return OPERATIONS[case.op].verdicts(case, dtype, backend, device)


def _full(x: Tensors, rounding: Rounding) -> dict[str, Tensor]:
    """Returns the floats in float32 at least; a sample's move by an ulp here and there."""
    return {
        name: rounding(y.to(torch.promote_types(y.dtype, torch.float32)))
        if y.is_floating_point()
        else y
        for name, y in x.items()
    }


def _convolution_tensors(
    case: LayerCase, normal: Draw, rng: np.random.Generator, full: torch.dtype
) -> Inputs:
    B, T, C, W = case.shape
    x = {"x": normal(B, T, C), "weight": normal(C, W, size=0.5, dtype=full)}
    if case.prefix:
        x["prefix"] = normal(B, W - 1, C)
    if case.lengths is not None:
        x["position"] = torch.cat([torch.arange(n) for n in case.lengths])
    return Inputs(case, x, {"y": normal(B, T, C, size=1.0)})


def _convolution_formula(case: LayerCase, x: Tensors, r: Rounding) -> dict[str, Tensor]:
    """Adds tap by tap, sequence by sequence."""
    x = _full(x, r)
    weight, outputs = x["weight"], []
    W = weight.shape[1]
    for part in x["x"].split(list(case.lengths or (x["x"].shape[1],)), dim=1):
        before = (
            x["prefix"] if "prefix" in x else part.new_zeros(part.shape[0], W - 1, part.shape[2])
        )
        joined = torch.cat([before, part], dim=1)
        taps = [joined[:, j : j + part.shape[1]] * weight[:, j] for j in range(W)]
        outputs.append(torch.stack(taps).sum(0))
    z = torch.cat(outputs, dim=1)
    return {"y": z if case.plain else r(z) * r(r.function(torch.sigmoid, z))}


def _norm_tensors(
    case: LayerCase, normal: Draw, rng: np.random.Generator, full: torch.dtype
) -> Inputs:
    sums = case.op == "add_rms_norm"
    x = {"x": normal(*case.shape)}
    if not case.plain:
        x["residual" if sums else "gate"] = normal(*case.shape)
    x["weight"] = 1 + normal(case.shape[1], size=0.3, dtype=full)
    outputs = ("y", "total") if sums else ("y",)
    return Inputs(case, x, {name: normal(*case.shape, size=1.0) for name in outputs})


def _normalize(x: Tensor, weight: Tensor, r: Rounding) -> Tensor:
    return r(x / r(r.function(torch.sqrt, x.square().mean(-1, keepdim=True) + EPS))) * weight


def _gated_norm_formula(case: LayerCase, x: Tensors, r: Rounding) -> dict[str, Tensor]:
    x = _full(x, r)
    y = _normalize(x["x"], x["weight"], r)
    if case.plain:
        return {"y": y}
    opened = r.function(torch.sigmoid, x["gate"])
    return {"y": r(y) * r(opened if case.sigmoid else x["gate"] * opened)}


def _added_norm_formula(case: LayerCase, x: Tensors, r: Rounding) -> dict[str, Tensor]:
    dtype, x = x["residual"].dtype, _full(x, r)
    # the sum is a result, and what is normalized is that result
    total = x["residual"] + x["x"]
    total = total + (total.to(dtype).to(total.dtype) - total).detach()
    return {"y": _normalize(r.short(total), x["weight"], r), "total": total}


def _loss_tensors(
    case: LayerCase, normal: Draw, rng: np.random.Generator, full: torch.dtype
) -> Inputs:
    M, d, vocabulary = case.shape
    x = {"hidden": normal(M, d), "weight": normal(vocabulary, d, size=d**-0.5, dtype=full)}
    targets = torch.from_numpy(rng.integers(0, vocabulary, M))
    if case.ignored:
        targets[:: case.ignored] = -100
    return Inputs(case, x | {"targets": targets}, {"loss": torch.tensor(1.0, dtype=full)})


def _loss_formula(case: LayerCase, x: Tensors, r: Rounding) -> dict[str, Tensor]:
    """Multiplies in the dtype of hidden, as implementations do; the rest is float32 at least."""
    x, targets = _full(x, r), x["targets"]
    z = r(r.short(product(x["hidden"], r.short(x["weight"]).t(), r)))
    counted = targets != -100
    target = targets.clamp(min=0)[:, None]
    if r.noise is None and z.dtype == torch.float32:
        losses = z.logsumexp(-1) - z.gather(1, target).squeeze(1)
    else:
        # the target's logit may be a sum of its own, whose rounding a sure token's loss does not
        # cancel
        largest, goal = z.detach().amax(-1, keepdim=True), r(z).gather(1, target)
        # z - max and not z: a logit of 1000 lacks the digits that a probability of nearly 1 needs
        total = r(r.function(torch.exp, r(z - largest)).sum(-1))
        logs = r.function(torch.log, total)
        if r.noise is not None and r.noise.tables is not None:
            # whoever keeps the logarithm for the gradient, p = exp(z - log), has its error there
            kept = logs.detach()
            p = r.function(torch.exp, r(z - largest - kept[:, None])).sum(-1)
            logs = kept + (p - p.detach())
        losses = logs - (goal - largest).squeeze(1)
    return {"loss": (losses * counted).sum() / counted.sum().clamp(min=1)}


def _residual_tensors(
    case: LayerCase, draw: Draw, rng: np.random.Generator, full: torch.dtype
) -> Inputs:
    M, D, DV = case.shape
    x, k, v = draw(M, D, DV), normal(rng, M, D), draw(M, DV)
    beta = 2 * rng.random(M) if case.beta is None else np.full(M, case.beta)
    k *= case.norm / np.sqrt((k * k).sum(-1, keepdims=True))
    if case.k_eps is None:
        k *= 1 - 2**-7  # so that rounding to bfloat16 leaves no key longer than 1
    keys, strengths = (torch.from_numpy(y).float() for y in (k, beta))
    tensors = {"x": x, "k": keys.to(x.dtype), "v": v, "beta": strengths.to(full)}
    return Inputs(case, tensors, {"out": draw(M, D, DV)})


def _residual_formula(case: LayerCase, x: Tensors, r: Rounding) -> dict[str, Tensor]:
    """With noise, sums over D have an order of their own.

    They are products of matrices in both directions, which add up term by term on many CPUs; a sum
    adds in blocks and errs less.
    """
    dtype, order = x["x"].dtype, torch.arange(x["k"].shape[1])
    if r.noise is not None:
        order = torch.randperm(len(order), generator=r.noise.generator)
    order = order.to(x["k"].device)
    x = _full({name: y[:, order] if name in ("x", "k") else y for name, y in x.items()}, r)
    X, k, v, beta = x["x"], x["k"], x["v"], x["beta"]
    if case.k_eps is not None:
        k = r(k / r(r.function(torch.sqrt, (k * k).sum(1, keepdim=True) + case.k_eps**2)))
    missing = r(v - r((k[:, None, :] @ X).squeeze(1)))
    written = r(beta[:, None] * missing)
    out = r(X + k[:, :, None] @ written[:, None, :]).to(dtype)
    return {"out": out[:, order.argsort()]}


def _run(case: LayerCase, x: Tensors, backend: str) -> dict[str, Tensor]:
    """Calls the public operation."""
    if case.op == "short_convolution":
        y = layers.short_convolution(
            **x, activation="linear" if case.plain else "silu", backend=backend
        )
    elif case.op == "gated_rms_norm":
        y = layers.gated_rms_norm(
            x["x"],
            x.get("gate"),
            x["weight"],
            eps=EPS,
            activation="sigmoid" if case.sigmoid else "swish",
            backend=backend,
        )
    elif case.op == "add_rms_norm":
        y, total = layers.add_rms_norm(**x, eps=EPS, backend=backend)
        return {"y": y, "total": total}
    elif case.op == "linear_cross_entropy":
        loss = layers.linear_cross_entropy(x["hidden"], x["weight"], x["targets"], backend=backend)
        return {"loss": loss}
    else:
        return {"out": delta_residual(**x, k_eps=case.k_eps, backend=backend)}
    return {"y": y}


def _terms(case: LayerCase, name: str) -> int:
    if case.op == "delta_residual":
        return STEPS + case.shape[1] + case.shape[2]
    return STEPS + (
        case.shape[0] * case.shape[1] if case.op == "short_convolution" else sum(case.shape)
    )


def _parts(case: LayerCase, name: str, y: Tensor) -> Tensor | None:
    """Returns the number of each row; None for a sum over all rows."""
    return None if y.dim() == 0 or y.numel() == 0 or "weight" in name else torch.arange(len(y))


# what makes the tensors of a case, and its formula
_PARTS: Mapping[str, tuple[Callable[..., Inputs], Callable[..., dict[str, Tensor]]]] = {
    "short_convolution": (_convolution_tensors, _convolution_formula),
    "gated_rms_norm": (_norm_tensors, _gated_norm_formula),
    "add_rms_norm": (_norm_tensors, _added_norm_formula),
    "linear_cross_entropy": (_loss_tensors, _loss_formula),
    "delta_residual": (_residual_tensors, _residual_formula),
}
_operation = partial(Operation, inputs, formula, _run, _terms, _parts)
OPERATIONS: Mapping[str, Operation] = {
    op: _operation(rounded=op == "linear_cross_entropy", full=("dbeta",)) for op in _PARTS
}
