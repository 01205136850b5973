"""The grid of the layers' operations, and their judge: the literal formula in float64, under autograd.

Allowed is FACTOR times the error of the same formula in float32, results rounded to the dtype, and never less
than a floor: sums of so many float32 terms, STEPS roundings in a row, and one of the result. Products of the
cross-entropy alone are in the dtype. Inputs are made as in `backends.cases`: the same on every machine.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from delta_trn.backends import layers
from delta_trn.backends.parity.judge import Verdict, judged
from delta_trn.backends.registry import BACKENDS, BackendRefusal

STEPS = 24  # of a gradient through SiLU, the norm and its gain
EPS = 1e-6


@dataclass(frozen=True)
class LayerCase:
    """One row.

    shape       short_convolution: B, T, C, W; the norms: M, N; linear_cross_entropy: M, d, vocabulary
    lengths     packed sequences of short_convolution
    prefix      short_convolution continues from tokens before
    plain       no SiLU, no gate
    size        of the inputs, 1 if they are nearly normal
    ignored     of linear_cross_entropy: every so manieth target does not count
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
    LayerCase("conv_tile",      "short_convolution", (1, 122, 24, 4), "a tile of NKI's backward exactly"),
    LayerCase("conv_seam",      "short_convolution", (2, 123, 24, 4), "a token more"),
    LayerCase("conv_tile_forward", "short_convolution", (1, 125, 24, 4), "a tile of NKI's forward"),
    LayerCase("conv_seam_forward", "short_convolution", (1, 126, 24, 4), "there, a token more"),
    LayerCase("conv_tiles",     "short_convolution", (1, 130, 136, 4), "tiles of time and of channels"),
    LayerCase("conv_wide",      "short_convolution", (1, 9, 700, 4),  "channels above a bank of PSUM"),
    LayerCase("conv_packed_tiles", "short_convolution", (1, 250, 24, 4), "sequences end at seams of tiles",
              lengths=(1, 122, 2, 0, 125)),
    LayerCase("conv_prefix_tiles", "short_convolution", (1, 123, 24, 4), "a prefix before several tiles",
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
    LayerCase("norm_narrow",    "gated_rms_norm",    (70, 32),        "many rows a program"),
    LayerCase("norm_wide",      "gated_rms_norm",    (5, 2048),       "a row a program"),
    LayerCase("norm_tiles",     "gated_rms_norm",    (1025, 256),     "a row more than whole tiles"),
    LayerCase("norm_many",      "gated_rms_norm",    (4100, 64),      "several rows per partition"),
    LayerCase("norm_bank",      "gated_rms_norm",    (5, 1100),       "a width above a bank of PSUM"),
    LayerCase("norm_plain_tiles", "gated_rms_norm",  (700, 192),      "several tiles, no gate", plain=True),
    LayerCase("norm_zero",      "gated_rms_norm",    (9, 64),         "all zero: epsilon alone", size=0.0),
    LayerCase("gated_norm_tiny", "gated_rms_norm",    (9, 64),         "epsilon decides", size=1e-4),
    LayerCase("norm_large",     "gated_rms_norm",    (9, 64),         "gates open or closed", size=100.0),
    LayerCase("norm_plain",     "gated_rms_norm",    (9, 1536),       "no gate", plain=True),
    LayerCase("sum_one",        "add_rms_norm",      (1, 64),         "one row"),
    LayerCase("sum_odd",        "add_rms_norm",      (37, 600),       "a width that is no power of two"),
    LayerCase("sum_wide",       "add_rms_norm",      (5, 2048),       "a row a program"),
    LayerCase("loss_one",       "linear_cross_entropy", (1, 16, 50),     "one token"),
    LayerCase("loss_ragged",    "linear_cross_entropy", (21, 48, 5003),  "a vocabulary that fills no tile"),
    LayerCase("loss_ignored",   "linear_cross_entropy", (21, 48, 300),   "some do not count", ignored=3),
    LayerCase("loss_none",      "linear_cross_entropy", (5, 16, 50),     "none counts: all is 0",
              ignored=1),
    LayerCase("loss_sure",      "linear_cross_entropy", (21, 48, 300),   "logits of a thousand", size=30.0),
)
# fmt: on

BY_NAME: Mapping[str, LayerCase] = {case.name: case for case in CASES}


def inputs(case: LayerCase, dtype: torch.dtype) -> dict[str, Tensor]:
    """Leaves first, in the order of gradients; then what has none; then the gradients of the outputs."""
    rng = np.random.Generator(np.random.PCG64(zlib.crc32(case.name.encode())))
    full = torch.float64 if dtype == torch.float64 else torch.float32

    def normal(*shape: int, size: float = case.size, dtype: torch.dtype = dtype) -> Tensor:
        # twelve uniforms: exact sums, so the same on every machine
        return torch.from_numpy(size * (rng.random((12, *shape)).sum(0) - 6)).float().to(dtype)

    if case.op == "short_convolution":
        B, T, C, W = case.shape
        given = {"x": normal(B, T, C), "weight": normal(C, W, size=0.5, dtype=full)}
        if case.prefix:
            given["prefix"] = normal(B, W - 1, C)
        if case.lengths is not None:
            given["position"] = torch.cat([torch.arange(n) for n in case.lengths])
        return given | {"dy": normal(B, T, C, size=1.0)}
    if case.op == "linear_cross_entropy":
        M, d, vocabulary = case.shape
        given = {"hidden": normal(M, d), "weight": normal(vocabulary, d, size=d**-0.5, dtype=full)}
        targets = torch.from_numpy(rng.integers(0, vocabulary, M))
        if case.ignored:
            targets[:: case.ignored] = -100
        return given | {"targets": targets, "dloss": torch.tensor(1.0, dtype=full)}
    given = {"x": normal(*case.shape)}
    if not case.plain:
        given["gate" if case.op == "gated_rms_norm" else "residual"] = normal(*case.shape)
    given["weight"] = 1 + normal(case.shape[1], size=0.3, dtype=full)
    douts = ["dy"] if case.op == "gated_rms_norm" else ["dy", "dtotal"]
    return given | {name: normal(*case.shape, size=1.0) for name in douts}


def literal(case: LayerCase, given: Mapping[str, Tensor]) -> list[Tensor]:
    """The outputs, as the formula says, in float32 at least; products in the dtype of hidden."""
    if case.op == "linear_cross_entropy":
        return [_cross_entropy(given["hidden"], given["weight"], given["targets"])]
    full = {name: x.to(torch.promote_types(x.dtype, torch.float32)) for name, x in given.items()}
    if case.op == "short_convolution":
        return [_convolution(case, full)]
    x = full["x"]
    if case.op == "add_rms_norm":
        # the sum is a result, and what is normalized is that result
        x = full["residual"] + x
        x = x + (x.to(given["residual"].dtype).to(x.dtype) - x).detach()
    y = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * full["weight"]
    if case.op == "add_rms_norm":
        return [y, x]
    return [y if case.plain else y * full["gate"] * torch.sigmoid(full["gate"])]


def ours(case: LayerCase, given: Mapping[str, Tensor], backend: str) -> list[Tensor]:
    """The outputs of the public operation."""
    if case.op == "short_convolution":
        activation = "linear" if case.plain else "silu"
        options = {name: given.get(name) for name in ("prefix", "position")}
        y = layers.short_convolution(
            given["x"], given["weight"], **options, activation=activation, backend=backend
        )
        return [y]
    if case.op == "linear_cross_entropy":
        return [
            layers.linear_cross_entropy(given["hidden"], given["weight"], given["targets"], backend=backend)
        ]
    if case.op == "add_rms_norm":
        return [
            *layers.add_rms_norm(given["x"], given["residual"], given["weight"], eps=EPS, backend=backend)
        ]
    return [layers.gated_rms_norm(given["x"], given.get("gate"), given["weight"], eps=EPS, backend=backend)]


def outcome(case: LayerCase, given: Mapping[str, Tensor], backend: str | None) -> dict[str, Tensor]:
    """Results and gradients, by a backend, or by the formula in the dtypes given."""
    douts = {name: x for name, x in given.items() if name.startswith("d")}
    leaves = {
        name: x.detach().clone().requires_grad_()
        for name, x in given.items()
        if x.is_floating_point() and name not in douts
    }
    full = {**given, **leaves}
    outputs = literal(case, full) if backend is None else ours(case, full, backend)
    grads = torch.autograd.grad(outputs, list(leaves.values()), [
        dout.to(y.dtype) for y, dout in zip(outputs, douts.values(), strict=True)
    ])  # fmt: skip
    found = {name[1:]: y.detach() for name, y in zip(douts, outputs, strict=True)}
    return found | {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}


def verdicts(case: LayerCase, dtype: torch.dtype, backend: str, device: str = "cpu") -> list[Verdict]:
    """Runs a backend on a case and judges every tensor. Raises BackendRefusal where it refuses."""
    given = inputs(case, dtype)
    judge = outcome(case, {name: _double(x) for name, x in given.items()}, None)
    honest = outcome(case, given, None)
    found = outcome(case, {name: x.to(device) for name, x in given.items()}, backend)
    terms = STEPS + (case.shape[0] * case.shape[1] if case.op == "short_convolution" else sum(case.shape))
    return judged(case.name, case.op, dtype, backend, found, honest, judge, terms)


def measure(
    backend: str, device: str, dtypes: Sequence[torch.dtype], names: Sequence[str] | None = None
) -> Iterator[Verdict]:
    """The verdicts of a backend on all cases of what it has, or on those named."""
    for name in BY_NAME if names is None else names:
        case = BY_NAME[name]
        capability = BACKENDS[backend].capabilities.get(case.op)
        known = frozenset() if capability is None else capability.dtypes
        for dtype in (dtype for dtype in dtypes if dtype in known):
            try:
                yield from verdicts(case, dtype, backend, device)
            except BackendRefusal:
                # a form it does not declare, which no default would send it either
                if names is not None:
                    raise


def _convolution(case: LayerCase, given: Mapping[str, Tensor]) -> Tensor:
    """Tap by tap, sequence by sequence."""
    x, weight = given["x"], given["weight"]
    W = weight.shape[1]
    found = []
    for part in x.split(list(case.lengths or (x.shape[1],)), dim=1):
        if "prefix" in given:
            joined = torch.cat([given["prefix"], part], dim=1)
        else:
            joined = F.pad(part, (0, 0, W - 1, 0))
        taps = [joined[:, j : j + part.shape[1]] * weight[:, j] for j in range(W)]
        found.append(torch.stack(taps).sum(0))
    z = torch.cat(found, dim=1)
    return z if case.plain else z * torch.sigmoid(z)


def _cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Products in the dtype of hidden, as an honest implementation has them; the rest in float32 at least."""
    z = hidden @ weight.to(hidden.dtype).t()
    z = z.to(torch.promote_types(z.dtype, torch.float32))
    kept = targets != -100
    losses = z.logsumexp(-1) - z.gather(1, targets.clamp(min=0)[:, None]).squeeze(1)
    return (losses * kept).sum() / kept.sum().clamp(min=1)


def _double(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x
