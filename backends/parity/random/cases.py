"""Draws random cases of every operation; SEED:INDEX names a case, and is the same case on every machine.

Inputs are made of PCG64 uniforms and IEEE arithmetic, as those of `rule_cases`. What is drawn: shapes (no
tokens and no rows among them), packings, decays from none to resets, gates made inside, keys, write
strengths, states, scales, dtypes, strides, which outputs are in the loss, which inputs require gradients,
and one property (`properties`) that the case checks besides the judge.

What is left out, and why:

- keys longer than 1 without normalization: 1 - beta |k|^2 leaves [-1, 1], and the state grows without bound;
- heads of one feature that the operation normalizes, unless the norm is tiny, and norms of rows of one: a
  unit vector of one feature has no derivative, and what is left of it is rounding. For the same reason no
  layer of large x with heads of less than 32 features: of these, SiLU may leave one;
- norms above 1e13: the reciprocal root of Trainium's Scalar engine ends at 1e29;
- in float16, values above 30 of v and states, scales above sqrt(K), v below 1e-3, and layers of keys that are
  0, whose gradient is 1,000 times that of a unit key: operands of products have float16's range, 6e-8 to
  65504, in every implementation that computes in the dtype of q.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from delta_trn.backends.checks import dtype_name
from delta_trn.backends.dispatch import BACKENDS
from delta_trn.backends.parity import layer_cases, mixer_cases, residual_cases
from delta_trn.backends.parity.layer_cases import LayerCase
from delta_trn.backends.parity.mixer_cases import BOTH, MixerCase
from delta_trn.backends.parity.random.sizes import (
    Sizes,
    Uniforms,
    draw_head,
    draw_lengths,
    draw_sizes,
    draw_time,
)
from delta_trn.backends.parity.residual_cases import ResidualCase

Array = np.ndarray

OPERATIONS: Mapping[str, float] = {
    "gated_delta_rule": 70, "gated_delta_rule_step": 6, "delta_residual": 7, "short_convolution": 6,
    "gated_rms_norm": 4, "add_rms_norm": 4, "linear_cross_entropy": 3,
}  # fmt: skip
DTYPES = {torch.float32: 40, torch.bfloat16: 35, torch.float16: 15, torch.float64: 10}
# what a case checks besides the judge, for each operation that has it
PROPERTIES: Mapping[str, Mapping[str, float]] = {
    "gated_delta_rule": {
        "judge": 30,
        "again": 10,
        "alone": 25,
        "rows": 15,
        "cut": 15,
        "wanted": 10,
        "steps": 8,
    },
    "gated_delta_rule_step": {"judge": 3, "again": 1, "rows": 3},
    "delta_residual": {"judge": 3, "again": 1, "rows": 2, "wanted": 1},
    "short_convolution": {"judge": 3, "again": 1, "rows": 2, "wanted": 1, "alone": 2, "cut": 2},
    "gated_rms_norm": {"judge": 3, "again": 1, "rows": 2, "wanted": 1},
    "add_rms_norm": {"judge": 3, "again": 1, "rows": 2, "wanted": 1},
    "linear_cross_entropy": {"judge": 3, "again": 1, "wanted": 1},
    "gated_delta_layer": {"judge": 4, "again": 1, "rows": 2, "wanted": 1, "alone": 2, "cut": 2},
}
# Layers are drawn by a stream of their own, so that other cases kept their names
LAYERS, STREAM = 0.04, 9


@dataclass(frozen=True)
class RandomCase:
    """Holds one case: a call, the gradients of its outputs, and what is checked.

    name        SEED:INDEX
    words       what is special about it, for people
    tensors     the arguments that are tensors, by name; with any strides
    options     the other arguments
    douts       the gradients of the outputs in the loss; empty: the call runs without gradients
    wanted      the tensors that require gradients
    check       the property that is checked besides the judge, one of PROPERTIES
    terms       how many float32 terms a result has added up
    layer       the case of `layer_cases` or `mixer_cases` whose formula judges it
    device      the type of device on which the backend runs; the tensors here are on the CPU
    """

    name: str
    op: str
    dtype: torch.dtype
    words: str
    tensors: Mapping[str, Tensor]
    options: Mapping[str, Any]
    douts: Mapping[str, Tensor]
    wanted: tuple[str, ...]
    check: str
    terms: int
    layer: LayerCase | MixerCase | None = None
    device: str = "cpu"

    def __str__(self) -> str:
        shapes = " ".join(f"{name}{list(self.tensors[name].shape)}" for name in list(self.tensors)[:3])
        return f"{self.name} {self.op} {dtype_name(self.dtype)} {shapes} {self.words} [{self.check}]"

    def floats(self) -> list[str]:
        """Returns the names of the tensors that can have a gradient."""
        return [name for name, x in self.tensors.items() if x.is_floating_point()]


def draw(seed: int, index: int, backend: str, device: str = "cpu") -> RandomCase:
    """Draws case SEED:INDEX from the operations and dtypes of a backend; small where `device` is emulated."""
    rng = Uniforms(seed, index)
    rows = BACKENDS[backend].rows
    op = rng.pick({name: weight for name, weight in OPERATIONS.items() if name in rows})
    if "gated_delta_layer" in rows and Uniforms(seed, index, STREAM).chance(LAYERS):
        op = "gated_delta_layer"
    dtype = rng.pick({x: weight for x, weight in DTYPES.items() if x in rows[op].dtypes})
    small = device in BACKENDS[backend].emulated
    check = rng.pick(PROPERTIES[op])
    parts = _DRAWS[op](rng, f"{seed}:{index}", op, dtype, check, small)
    tensors = {name: _with_strides(rng, x) for name, x in parts.tensors.items()}
    douts = {name: _with_strides(rng, x, expanded=True) for name, x in parts.douts.items()}
    names = [name for name, x in tensors.items() if x.is_floating_point()]
    wanted = tuple(names)
    if check == "wanted" or rng.chance(0.2):
        wanted = tuple(name for name in names if rng.chance(0.5))
    if check == "steps" or (op == "gated_delta_rule_step" and rng.chance(0.7)):
        wanted = ()
    return RandomCase(
        f"{seed}:{index}", op, dtype, " ".join(parts.words), tensors, parts.options,
        douts if wanted else {}, wanted, check, parts.terms, parts.layer, device,
    )  # fmt: skip


@dataclass
class _Parts:
    """Holds what the operations draw differently."""

    tensors: dict[str, Tensor]
    douts: dict[str, Tensor]
    options: dict[str, Any]
    words: list[str]
    terms: int
    layer: LayerCase | MixerCase | None = None


def _tensor(x: Array, dtype: torch.dtype) -> Tensor:
    with np.errstate(over="ignore"):
        return torch.from_numpy(np.asarray(x, dtype=np.float64)).to(dtype)


def _draw_rule(rng: Uniforms, name: str, op: str, dtype: torch.dtype, check: str, small: bool) -> _Parts:
    step = op == "gated_delta_rule_step"
    if step:
        check = "rows" if check == "rows" else "judge"
    s = draw_sizes(rng, check, small)
    if step:
        s.T, s.lengths, s.B = 1, None, max(s.B, 1) if rng.chance(0.97) else 0
    words, half = s.words, dtype == torch.float16
    full = torch.float64 if dtype == torch.float64 else torch.float32
    gate_dtype = rng.pick([full, dtype])
    q, k, normalized = _keys(rng, s, dtype, words)
    size = rng.pick({1.0: 12, 30.0: 1, 1e-3: 1} if half else {1.0: 12, 1e4: 1, 1e-4: 1, 1e-30: 1})
    if size != 1.0:
        words.append(f"v={size:g}")
    tensors = {
        "q": _tensor(q, dtype), "k": _tensor(k, dtype),
        "v": _tensor(size * rng.normal(s.B, s.T, s.HV, s.V), dtype),
    }  # fmt: skip
    options: dict[str, Any] = {"use_qk_l2norm_in_kernel": normalized} if normalized else {}
    projected = rng.chance(0.25)
    tensors |= _projections(rng, s, full, gate_dtype, options, words) if projected else {
        "g": _decays(rng, (s.B, s.T, s.HV), gate_dtype, words),
        "beta": _tensor(_strengths(rng, (s.B, s.T, s.HV), words), gate_dtype),
    }  # fmt: skip
    sequences = s.B if s.lengths is None else len(s.lengths)
    states = (sequences, s.HV, s.K, s.V)
    kind = rng.pick({"none": 45, "random": 40, "huge": 8, "tiny": 7})
    if step or kind != "none":
        most = 30.0 if half else 1e4
        scale = {"none": 0.0, "random": size / np.sqrt(s.K), "huge": most, "tiny": 1e-10 * size}[kind]
        tensors["initial_state"] = _tensor(scale * rng.normal(*states), full)
        words.append(f"state={kind}")
    _scale(rng, s.K, half, options, words)
    if step:
        tensors = {name: x if name in ("A_log", "dt_bias", "initial_state") else x[:, 0] for name, x in
                   tensors.items()}  # fmt: skip
        tensors["state"] = tensors.pop("initial_state")
        outputs = {"o": (s.B, s.HV, s.V), "state": states}
    else:
        if s.lengths is not None:
            tensors["cu_seqlens"] = torch.tensor(np.cumsum([0, *s.lengths]))
        options["output_final_state"] = True if check in ("cut", "steps") else rng.chance(0.7)
        outputs = {"o": (s.B, s.T, s.HV, s.V), "final_state": states}
    douts = {key: _tensor(rng.normal(*shape), dtype if key == "o" else full) for key, shape in
             outputs.items() if key == "o" or step or options["output_final_state"]}  # fmt: skip
    if len(douts) == 2 and rng.chance(0.5):
        del douts[rng.pick(list(douts))]
    return _Parts(tensors, douts, options, words, s.K + s.V + min(s.T, 64))


def _keys(rng: Uniforms, s: Sizes, dtype: torch.dtype, words: list[str]) -> tuple[Array, Array, bool]:
    """Returns q and k, and whether the operation is to normalize them."""
    x, y = rng.normal(s.B, s.T, s.H, s.K), rng.normal(s.B, s.T, s.H, s.K)
    alike = rng.pick({"random": 70, "equal": 12, "near": 12, "pairs": 6})
    q, k = _unit(x), _unit(y)
    if alike in ("equal", "near"):
        same = _unit(rng.normal(s.B, 1, s.H, s.K)) + 0.0 * k
        k = same if alike == "equal" else _unit(np.sqrt(0.999) * same + np.sqrt(0.001) * k)
    elif alike == "pairs" and s.T > 1:
        k[:, 1::2] = k[:, : s.T - 1 : 2][:, : k[:, 1::2].shape[1]]
    norm = rng.pick({"unit": 40, "plain": 30, "zero": 8, "zeros": 2, "tiny": 8, "huge": 8, "short": 6})
    one = s.K == 1
    if one:
        norm = {"plain": "unit", "huge": "tiny"}.get(norm, norm)
    words += [f"keys={alike}"] * (alike != "random") + [f"norm={norm}"] * (norm != "unit")
    if norm in ("unit", "short"):
        short = rng.array(s.B, s.T, s.H, 1) if norm == "short" else 1.0
        # rounding must leave no key longer than 1: with beta = 2 the state would grow
        return q, k * short * (1 - 2 * torch.finfo(dtype).eps), rng.chance(0.2) and not one
    rows = (s.B, s.T, s.H, 1)
    if norm == "plain":
        return q * (0.25 + 4 * rng.array(*rows)), k * (0.25 + 4 * rng.array(*rows)), True
    if norm in ("zero", "zeros"):
        kept = [rng.array(*rows) >= (0.125 if norm == "zero" else 2.0) for _ in range(2)]
        return q * kept[0], k * kept[1] * (1 - 2 * torch.finfo(dtype).eps), rng.chance(0.6) and not one
    half = dtype == torch.float16
    size = rng.pick([1e-3, 1e-4] if half else [1e-3, 1e-5, 1e-10, 1e-25]) if norm == "tiny" else rng.pick(
        [1e3, 1e4] if half else [1e3, 1e4, 1e8, 1e13]
    )  # fmt: skip
    return q * size, k * size, True


def _unit(x: Array) -> Array:
    squares = np.ascontiguousarray(np.moveaxis(x * x, -1, 0))
    return x / np.sqrt(np.maximum(np.add.reduce(squares, axis=0), 1e-300))[..., None]


def _decays(rng: Uniforms, shape: tuple[int, ...], dtype: torch.dtype, words: list[str]) -> Tensor:
    """Returns g: usual, none, strong, and resets between tokens that must keep their digits."""
    x, y, z = (rng.array(*shape) for _ in range(3))
    kind = rng.pick({
        "plain": 25, "weak": 15, "none": 10, "strong": 6, "mixed": 10, "heavy": 6, "edge": 6, "far": 4,
        "reset": 18,
    })  # fmt: skip
    words.append(f"g={kind}")
    if kind != "reset":
        values = {
            "plain": -(x * x * x), "weak": -(x * x * x) / 50.0, "none": 0.0 * x, "strong": 0.0 * x - 20.0,
            "mixed": np.where(z < 0.125, -20.0 * y, -x / 50.0), "heavy": -16.0 * x,
            "edge": np.where(z < 0.25, -80.0 - 40.0 * y, -x / 50.0),
            "far": np.where(z < rng.pick([0.1, 0.5, 2.0]), -1e4, -x),
        }[kind]  # fmt: skip
        return _tensor(values, dtype)
    reset = {"-1e4": -1e4, "-1e12": -1e12, "-1e16": -1e16, "-1e30": -1e30, "inf": -np.inf}
    word = rng.pick([*reset, "min", "any"])
    words[-1] += word
    values = np.where(z < rng.pick([0.02, 0.125, 0.5, 2.0]), 1.0, -(x * x * x) / rng.pick([1.0, 50.0]))
    g = _tensor(values, dtype)
    every = [*reset.values(), torch.finfo(dtype).min]
    if word == "any":
        chosen = _tensor(np.array(every)[(y * len(every)).astype(int)], dtype)
    else:
        chosen = _tensor(np.full(shape, torch.finfo(dtype).min if word == "min" else reset[word]), dtype)
    return torch.where(g > 0, chosen, g)


def _strengths(rng: Uniforms, shape: tuple[int, ...], words: list[str]) -> Array:
    kind = rng.pick({"to 1": 45, "to 2": 20, "1": 12, "2": 10, "0": 4, "some 0": 5, "small": 4})
    words += [f"beta={kind.replace(' ', '_')}"] * (kind != "to 1")
    x = rng.array(*shape)
    return {
        "to 1": x, "to 2": 2 * x, "1": 0 * x + 1, "2": 0 * x + 2, "0": 0 * x,
        "some 0": np.where(x < 0.5, 0.0, x), "small": 1e-4 * x,
    }[kind]  # fmt: skip


def _projections(
    rng: Uniforms, s: Sizes, full: torch.dtype, dtype: torch.dtype, options: dict[str, Any], words: list[str]
) -> dict[str, Tensor]:
    """Returns g and beta, of which at least one is a layer's projection, and the gate's parameters."""
    shape = (s.B, s.T, s.HV)
    which, wide = rng.pick({"both": 3, "g": 1, "beta": 1}), rng.pick({4.0: 5, 40.0: 2, 200.0: 1})
    words.append(f"gates={which}{wide:g}")
    tensors = {name: _tensor(wide * (2 * rng.array(*shape) - 1), dtype) for name in ("g", "beta")}
    if which == "beta":
        tensors["g"] = _decays(rng, shape, dtype, words)
    else:
        options["use_gate_in_kernel"] = True
        parameter = rng.pick([full, full, torch.float32, torch.bfloat16])
        A_log = 5.75 * rng.array(s.HV) - 3.0
        if rng.chance(0.15):  # decays that overflow
            A_log = np.where(rng.array(s.HV) < 0.5, 100.0 * rng.array(s.HV), A_log)
            words.append("A=huge")
        tensors["A_log"] = _tensor(A_log, parameter)
        if rng.chance(0.7):
            tensors["dt_bias"] = _tensor(5.0 * rng.array(s.HV) - 7.0, parameter)
    if which == "g":
        tensors["beta"] = _tensor(_strengths(rng, shape, words), dtype)
    else:
        options["use_beta_sigmoid_in_kernel"] = True
        if rng.chance(0.5):
            options["allow_neg_eigval"] = True
    return tensors


def _scale(rng: Uniforms, K: int, half: bool, options: dict[str, Any], words: list[str]) -> None:
    kind = rng.pick({"default": 60, "root": 15, "one": 10, "tiny": 5, "zero": 2, "negative": 8})
    if kind != "default":
        tiny = 1e-4 if half else rng.pick([1e-4, 1e-20])
        options["scale"] = {"root": K**0.5, "one": 1.0, "tiny": tiny, "zero": 0.0, "negative": -0.3}[kind]
        words.append(f"scale={options['scale']:.3g}")


def _draw_residual(rng: Uniforms, name: str, op: str, dtype: torch.dtype, check: str, small: bool) -> _Parts:
    M = rng.pick({rng.integer(1, 40): 3, rng.pick([1, 127, 128, 129]): 1})
    D, DV = rng.pick({draw_head(rng, 256): 3, rng.integer(500, 2000): 1}), rng.integer(1, 8)
    norm = rng.pick([0.0, 1e-5, 1e-3, 1.0, 30.0] + [1e4] * (dtype != torch.float16))
    norm = min(norm, 1e-5) if D == 1 else norm
    case = ResidualCase(
        name, M if D < 500 else min(M, 8), D, DV, "", beta=rng.pick({0.0: 1, 1.0: 2, 2.0: 2, None: 5}),
        k_eps=rng.pick({None: 1, 1e-5: 3} if norm == 1.0 and D > 1 else {1e-5: 1}), norm=norm,
    )  # fmt: skip
    x = residual_cases.inputs(case, dtype)
    dout = x.pop("dout")
    words = [f"norm={norm:g}", f"beta={case.beta}"]
    return _Parts(x, {"out": dout}, {"k_eps": case.k_eps}, words, case.D + case.DV + residual_cases.STEPS)


def _draw_layer(rng: Uniforms, name: str, op: str, dtype: torch.dtype, check: str, small: bool) -> _Parts:
    lengths = None
    prefix = plain = False
    size = rng.pick({1.0: 8, 1e-4: 1, 30.0: 1, 0.0: 0.5})
    if op == "short_convolution":
        shape = (
            rng.integer(1, 3),
            max(draw_time(rng, small), 1),
            rng.integer(1, 80),
            rng.pick({4: 6, 1: 1, 2: 1, 3: 1, 8: 1}),
        )
        if check == "alone" or (check == "judge" and rng.chance(0.2)):
            lengths, shape = tuple(draw_lengths(rng, shape[1])), (1, *shape[1:])
        prefix, plain = lengths is None and rng.chance(0.4), rng.chance(0.2)
    elif op == "linear_cross_entropy":
        shape = (
            rng.integer(1, 40),
            draw_head(rng, 256),
            rng.pick({rng.integer(1, 400): 4, rng.integer(1000, 6000): 1}),
        )
        size = rng.pick({1.0: 4, 30.0: 1})
    else:
        width = rng.pick({draw_head(rng, 512): 4, rng.integer(513, 2100): 1})
        shape = (rng.integer(1, 130), max(2, width))
        plain = op == "gated_rms_norm" and rng.chance(0.3)
    ignored = rng.pick({0: 3, 3: 2, 1: 0.5})
    case = LayerCase(
        name, op, shape, "", lengths=lengths, prefix=prefix, plain=plain, size=size, ignored=ignored
    )
    x = layer_cases.inputs(case, dtype)
    douts = {key[1:]: x.pop(key) for key in list(x) if key in ("dy", "dtotal", "dloss")}
    options: dict[str, Any] = {} if op == "linear_cross_entropy" else {"eps": layer_cases.EPS}
    if op == "short_convolution":
        options = {"activation": "linear" if plain else "silu"}
    terms = layer_cases.STEPS + (shape[0] * shape[1] if op == "short_convolution" else sum(shape))
    words = [f"size={size:g}"] * (size != 1) + ["prefix"] * prefix + ["plain"] * plain
    return _Parts(x, douts, options, words, terms, layer=case)


def _draw_mixer(rng: Uniforms, name: str, op: str, dtype: torch.dtype, check: str, small: bool) -> _Parts:
    s = draw_sizes(rng, check, small)
    if s.T == 0 or s.B == 0:
        s.T, s.B, s.lengths = max(s.T, 1), max(s.B, 1), None
    wide = rng.chance(0.1)  # more than a kernel takes at once
    s.K, s.V = max(2, s.K if wide else min(s.K, 128)), max(2, s.V if wide else min(s.V, 256))
    packed = s.lengths is not None
    handed = check == "cut" or (not packed and rng.chance(0.4))
    kinds = {
        "keys": {"random": 6, "equal": 1, "near": 1, "zero": 1}, "b": {None: 6, 12.0: 1, 6.0: 1, -4.0: 1},
        "decay": {"plain": 6, "none": 1, "strong": 0.5, "reset": 2}, "W": {4: 8, 2: 1, 3: 1, 1: 0.3, 5: 0.3},
        "size": {1.0: 12, 1e-3: 1, 30.0: 1, 0.0: 0.5}, "scale": {None: 3, 1.0: 1},
    }  # fmt: skip
    drawn: dict[str, Any] = {key: rng.pick(values) for key, values in kinds.items()}
    if s.K < 32:
        drawn["size"] = min(drawn["size"], 1.0)
    if dtype == torch.float16 and (drawn["keys"] == "zero" or drawn["size"] == 0.0):
        drawn |= {"keys": "random", "size": 1.0}
    words = [f"{key}={value}" for key, value in drawn.items() if value != next(iter(kinds[key]))]
    case = MixerCase(
        name, s.B, s.T, s.H, s.K, s.V, "", s.HV, **drawn, reflect=rng.chance(0.4),
        lengths=tuple(s.lengths) if s.lengths is not None else None, bounds=rng.chance(0.5),
        before=not packed and rng.chance(0.4), loss=BOTH if handed else ("y",),
        short=rng.chance(0.3) and dtype != torch.float16, bias=rng.chance(0.7),
    )  # fmt: skip
    x = mixer_cases.inputs(case, dtype)
    words += s.words + ["reflect"] * case.reflect + ["before"] * case.before
    terms = layer_cases.STEPS + s.K + s.V + s.B * s.T
    return _Parts(x.tensors, x.douts, case.options(), words, terms, layer=case)


def _with_strides(rng: Uniforms, x: Tensor, *, expanded: bool = False) -> Tensor:
    """Returns x with the same values in another layout: now and then no dimension is contiguous."""
    style = rng.pick({"dense": 60, "turned": 12, "sliced": 12, "stepped": 8, "offset": 8})
    if x.dim() == 0 or not x.is_floating_point() or x.numel() == 0:
        return x
    if expanded and rng.chance(0.1):  # the gradient of a sum
        return x.flatten()[0].expand(x.shape)
    if style == "turned" and x.dim() >= 2:
        a, b = rng.pick([(0, 1), (-2, -1)])
        return x.transpose(a, b).contiguous().transpose(a, b)
    if style == "sliced":
        wide = x.new_zeros((*x.shape[:-1], x.shape[-1] + 3))
        wide[..., 1:-2] = x
        return wide[..., 1:-2]
    if style == "stepped":
        wide = x.new_zeros((*x.shape[:-1], 2 * x.shape[-1]))
        wide[..., ::2] = x
        return wide[..., ::2]
    if style == "offset":
        flat = x.new_zeros(x.numel() + 1)
        flat[1:] = x.flatten()
        return flat[1:].view(x.shape)
    return x


_DRAWS: Mapping[str, Callable[[Uniforms, str, str, torch.dtype, str, bool], _Parts]] = {
    "gated_delta_rule": _draw_rule,
    "gated_delta_rule_step": _draw_rule,
    "delta_residual": _draw_residual,
    "short_convolution": _draw_layer,
    "gated_rms_norm": _draw_layer,
    "add_rms_norm": _draw_layer,
    "linear_cross_entropy": _draw_layer,
    "gated_delta_layer": _draw_mixer,
}
