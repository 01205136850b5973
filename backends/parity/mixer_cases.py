"""The cases of `gated_delta_layer`, judged by its formulas in float64.

    judge       the convolution and the gated norm of `layer_cases`, and between them the literal
                recurrence
    samples     the same convolution and norm, and the rule by `baseline`; what one part hands to
                the next, and its gradient, is rounded to the dtype, as if the parts had been called
                one after the other

The convolution's channels are judged as three tensors, q, k and v, because their gradients differ
in size; each sequence and head is a part.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from delta_trn.backends import gated_delta_layer
from delta_trn.backends.parity import layer_cases, rule
from delta_trn.backends.parity.baseline import CHUNK, Rounding
from delta_trn.backends.parity.cases import STEPS, Inputs, Operation, Tensors
from delta_trn.backends.parity.layer_cases import EPS, LayerCase
from delta_trn.backends.parity.rule_cases import Case

RESET = 1e20  # of a: its decay is exactly 0
# with the weights' gradients, these are sums over all tokens
SHARED = ("dgain", "dA_log", "ddt_bias")


@dataclass(frozen=True)
class MixerCase:
    """Describes one case. Sizes are those of `backends.gated_delta_layer`; the rest describes the
    inputs.

    HV          value heads; None: H
    keys        what becomes keys is equal for all tokens, near (equal but for .03 of noise), or
                zero for some
    b           the gate's projection for every token; None: normal. At 20 the derivative of a
                sigmoid is 0 in float32, in the baseline as in a backend, so other cases judge db
    reflect     beta_max is 2
    decay       plain, none, strong (g = -20), or reset: one token in eight forgets
                everything
    lengths     packed sequences, given by position and, with `bounds`, by cu_seqlens, else by
                resets
    before      there are a prefix and an initial state
    loss        the outputs that the gradient comes from; with final_state, it is asked for
    size        of x
    short       a and b have the dtype of x
    bias        there is a dt_bias
    """

    name: str
    B: int
    T: int
    H: int
    K: int
    V: int
    reason: str
    HV: int | None = None
    W: int = 4
    keys: Literal["random", "equal", "near", "zero"] = "random"
    b: float | None = None
    reflect: bool = False
    decay: Literal["plain", "none", "strong", "reset"] = "plain"
    lengths: tuple[int, ...] | None = None
    bounds: bool = True
    before: bool = False
    loss: tuple[Literal["y", "final_state"], ...] = ("y",)
    size: float = 1.0
    scale: float | None = None
    short: bool = False
    bias: bool = True
    op: ClassVar[str] = "gated_delta_layer"

    @property
    def value_heads(self) -> int:
        return self.H if self.HV is None else self.HV

    @property
    def sequences(self) -> int:
        return len(self.lengths) if self.lengths is not None and self.bounds else self.B

    def options(self) -> dict[str, Any]:
        """Returns the operation's arguments that are no tensors."""
        return {
            "K": self.K, "beta_max": 2.0 if self.reflect else 1.0, "scale": self.scale, "eps": EPS,
            "output_final_state": "final_state" in self.loss,
        }  # fmt: skip


BOTH: tuple[Literal["y", "final_state"], ...] = ("y", "final_state")

# fmt: off
CASES: tuple[MixerCase, ...] = (
    #         name             B  T    H  K    V
    MixerCase("mixer_one",     8, 1,   2, 16,  24, "one token: three taps read zeros, no product of decays"),
    MixerCase("mixer_step",    8, 1,   2, 16,  24, "one token of decoding", before=True, loss=BOTH),
    MixerCase("mixer_short",   8, 2,   2, 16,  24, "fewer tokens than taps", before=True, loss=BOTH),
    MixerCase("mixer_many",    33, 3,  2, 16,  8,  "many sequences in one kernel call", loss=BOTH),
    MixerCase("mixer_ragged",  2, 70,  2, 16,  24, "no tile fits evenly"),
    MixerCase("mixer_127",     1, 127, 1, 16,  24, "one token less than a chunk", loss=BOTH),
    MixerCase("mixer_128",     1, 128, 1, 16,  24, "a chunk: nothing may be read behind it", loss=BOTH),
    MixerCase("mixer_129",     1, 129, 1, 16,  24, "one token more than a chunk", before=True, loss=BOTH),
    MixerCase("mixer_chunks",  1, 300, 3, 16,  24, "three chunks, the last one ragged"),
    MixerCase("mixer_groups",  1, 140, 2, 16,  24, "three value heads share a key", HV=6),
    MixerCase("mixer_one_key", 2, 70,  1, 32,  24, "all five value heads share the one key", HV=5, loss=BOTH),
    MixerCase("mixer_odd",     1, 131, 3, 50,  70, "no size is a power of two or a multiple of 8"),
    MixerCase("mixer_wide_v",  1, 130, 1, 16,  128, "V = 8 K", before=True, loss=BOTH),
    MixerCase("mixer_wide_k",  1, 130, 2, 64,  16, "K = 4 V", before=True, loss=BOTH),
    MixerCase("mixer_k128",    1, 130, 2, 128, 64, "keys that fill every partition", before=True, loss=BOTH),
    MixerCase("mixer_v256",    1, 66,  1, 64,  256, "the widest values of a kernel", loss=BOTH),
    MixerCase("mixer_k136",    1, 3,   1, 136, 16, "keys that no kernel takes whole"),
    MixerCase("mixer_taps",    1, 9,   1, 16,  24, "more taps than a kernel takes", W=5),
    MixerCase("mixer_two_taps", 2, 70, 2, 16,  24, "the fewest taps", W=2, before=True, loss=BOTH),
    MixerCase("mixer_packed",  1, 270, 2, 16,  24, "sequences end at seams of chunks",
              lengths=(1, 127, 2, 140)),
    MixerCase("mixer_packed_empty", 1, 139, 2, 16, 24, "empty sequences, some shorter than W",
              lengths=(0, 1, 2, 0, 3, 123, 10, 0), HV=4),
    MixerCase("mixer_packed_resets", 1, 139, 2, 16, 24, "packed by resets alone, as the models pack",
              lengths=(1, 63, 64, 2, 9), bounds=False, loss=BOTH),
    MixerCase("mixer_final",   2, 100, 2, 16,  24, "the gradient comes from the final state alone",
              before=True, loss=("final_state",)),
    MixerCase("mixer_carry",   2, 135, 2, 32,  32, "prefix and initial state, gradients of both",
              before=True, loss=BOTH),
    MixerCase("mixer_collide", 1, 130, 8, 16,  24, "equal keys, beta = 1: a write erases the one before",
              keys="equal", b=20.0, decay="none", before=True, loss=BOTH),
    MixerCase("mixer_reflect", 1, 130, 8, 16,  24, "all keys equal, beta = 2: the densest inverse",
              keys="equal", b=20.0, reflect=True, decay="none", before=True, loss=BOTH),
    MixerCase("mixer_near_1",  1, 130, 4, 32,  32, "keys nearly equal, beta = .998",
              keys="near", b=6.0, before=True, loss=BOTH),
    MixerCase("mixer_near_2",  1, 130, 4, 32,  32, "nearly equal, beta = 1.995, no decay: the worst inverse",
              keys="near", b=6.0, reflect=True, decay="none", before=True, loss=BOTH),
    MixerCase("mixer_reflect_random", 1, 200, 2, 32, 32, "beta up to 2, random keys",
              reflect=True, loss=BOTH),
    MixerCase("mixer_zero",    2, 40,  2, 16,  24, "x is 0: no key, no value, epsilons alone", size=0.0,
              before=True, loss=BOTH),
    MixerCase("mixer_zero_keys", 1, 140, 2, 16, 24, "stretches of keys that are 0 beside values that are not",
              keys="zero", before=True, loss=BOTH),
    MixerCase("mixer_forget",  1, 140, 2, 16,  24, "g = -20 for every token: exponents are masked before exp",
              decay="strong", before=True, loss=BOTH),
    MixerCase("mixer_reset",   1, 140, 2, 16,  24, "decays of exactly 0: the tokens around keep their digits",
              decay="reset", before=True, loss=BOTH),
    MixerCase("mixer_free",    1, 200, 4, 16,  24, "nothing decays, so that errors add up", decay="none",
              loss=BOTH),
    MixerCase("mixer_small",   1, 40,  2, 16,  24, "SiLU at 0, and the norms' epsilons decide", size=1e-3,
              loss=BOTH),
    MixerCase("mixer_large",   1, 40,  2, 16,  24, "SiLU far from 0", size=30.0, loss=BOTH),
    MixerCase("mixer_scale",   1, 40,  2, 16,  24, "a scale of 1, as the models use it, and no dt_bias",
              scale=1.0, bias=False),
    MixerCase("mixer_gates",   1, 70,  2, 16,  24, "projections of the gates in the dtype of x", short=True),
)
# fmt: on

BY_NAME: Mapping[str, MixerCase] = {case.name: case for case in CASES}


def inputs(case: MixerCase, dtype: torch.dtype) -> Inputs:
    """Makes the tensors of a case: activations in `dtype`, the rest in float32,
    or float64 with float64.
    """
    rng = np.random.Generator(np.random.PCG64(zlib.crc32(case.name.encode())))
    full = torch.float64 if dtype == torch.float64 else torch.float32
    (B, T, H, K, V), HV = (case.B, case.T, case.H, case.K, case.V), case.value_heads
    channels, before = 2 * H * K + HV * V, case.W - 1

    def tensor(x: np.ndarray, dtype: torch.dtype = full) -> Tensor:
        return torch.from_numpy(x).float().to(dtype)

    def normal(*shape: int) -> np.ndarray:
        return layer_cases.normal(rng, *shape)

    x = case.size * normal(B, before + T, channels)  # with the prefix
    keys = x[..., H * K : 2 * H * K]
    if case.keys in ("equal", "near"):
        keys[:] = keys[:, :1] + (0.03 * keys if case.keys == "near" else 0.0)
    elif case.keys == "zero":
        keys[:, np.arange(before + T) // 8 % 2 == 0] = 0.0
    a = normal(B, T, HV) - 2
    if case.decay in ("none", "strong"):
        a = 0 * a + {"none": -45.0, "strong": 20.0}[case.decay]
    elif case.decay == "reset":
        a = np.where(rng.random(a.shape) < 0.125, RESET, a - 2)
    tensors = {
        "x": tensor(x[:, before:], dtype),
        "weight": tensor(0.5 * normal(channels, case.W)),
        "a": tensor(a, dtype if case.short else full),
        "b": tensor(normal(B, T, HV) + 1, dtype if case.short else full),
        "gate": tensor(normal(B, T, HV, V), dtype),
        "gain": tensor(1 + 0.3 * normal(V)),
        "A_log": tensor(0.3 * normal(HV)),
    }
    if case.b is not None:
        tensors["b"].fill_(case.b)
    if case.bias:
        tensors["dt_bias"] = tensor(0.3 * normal(HV))
    if case.before:
        tensors["prefix"] = tensor(x[:, :before], dtype)
        tensors["initial_state"] = tensor(K**-0.5 * normal(case.sequences, HV, K, V))
    if case.lengths is not None:
        tensors["position"] = torch.cat([torch.arange(n) for n in case.lengths])
        if case.bounds:
            tensors["cu_seqlens"] = torch.tensor(np.cumsum([0, *case.lengths]))
        else:
            tensors["a"][:, tensors["position"] == 0] = RESET
    dy, dstate = tensor(normal(B, T, HV, V), dtype), tensor(normal(case.sequences, HV, K, V))
    douts = {"y": dy, "final_state": dstate}
    return Inputs(case, tensors, {name: douts[name] for name in case.loss})


def split(case: MixerCase, name: str, y: Tensor) -> dict[str, Tensor]:
    """Returns a result by its name, the gradient of the convolution's channels
    as those of q, k and v.
    """
    axis = {"dx": 2, "dprefix": 2, "dweight": 0}.get(name)
    if axis is None:
        return {name: y}
    return {f"{name}_{part}": x for part, x in _channels(case, y, axis).items()}


def _channels(case: MixerCase, x: Tensor, axis: int) -> dict[str, Tensor]:
    """Returns the channels of q, k and v, a head's beside each other."""
    shapes = {"q": (case.H, case.K), "k": (case.H, case.K), "v": (case.value_heads, case.V)}
    parts = x.split([heads * size for heads, size in shapes.values()], axis)
    return {
        name: y.unflatten(axis, shape)
        for (name, shape), y in zip(shapes.items(), parts, strict=True)
    }


def formula(
    case: MixerCase, x: Tensors, rounding: Rounding, chunk: int | None
) -> dict[str, Tensor]:
    """Returns the outputs by the formulas of the parts."""
    dtype = x["x"].dtype
    convolution = LayerCase(case.name, "short_convolution", (), case.reason, lengths=case.lengths)
    qkv = layer_cases.formula(convolution, _only(x, "x", "weight", "prefix"), rounding)["y"]
    tensors = {**_channels(case, qkv.to(dtype), 2), "g": x["a"], "beta": x["b"]}
    tensors |= _only(x, "A_log", "dt_bias", "initial_state", "cu_seqlens")
    same = Case(
        case.name,
        case.B,
        case.T,
        case.H,
        case.K,
        case.V,
        case.reason,
        gates="plain",
        norm="random",
        reflect=case.reflect,
        scale=case.scale,
    )
    results = rule.formula(same, tensors, rounding, chunk)
    norm = LayerCase(case.name, "gated_rms_norm", (), case.reason)
    o = {"x": results["o"].to(dtype), "gate": x["gate"], "weight": x["gain"]}
    outputs = {"y": layer_cases.formula(norm, o, rounding)["y"].to(dtype)}
    return outputs | (_only(results, "final_state") if "final_state" in case.loss else {})


def _run(case: MixerCase, x: Tensors, backend: str) -> dict[str, Tensor]:
    """Calls the public operation."""
    x = {name: y for name, y in x.items() if name != "cu_seqlens"}  # `position` says the same
    y, final_state = gated_delta_layer(**x, **case.options(), backend=backend)
    return {"y": y} if final_state is None else {"y": y, "final_state": final_state}


def _only(x: Tensors, *names: str) -> dict[str, Tensor]:
    return {name: x[name] for name in names if name in x}


def parts(case: MixerCase, name: str, y: Tensor) -> Tensor | None:
    """Returns the number of the sequence and head of each index of a tensor's first axes."""
    if name == "dgain" or y.numel() == 0:
        return None
    heads = torch.arange(case.H if name[-2:] in ("_q", "_k") else case.value_heads)
    if name in SHARED or name.startswith("dweight"):
        return heads
    if name in ("final_state", "dinitial_state"):
        sequence = torch.arange(case.sequences)
    elif case.lengths is not None:
        lengths = torch.tensor(case.lengths)
        sequence = torch.arange(len(lengths)).repeat_interleave(lengths)[None]
    else:
        tokens = case.W - 1 if name.startswith("dprefix") else case.T
        sequence = torch.arange(case.B)[:, None].expand(case.B, tokens)
    return sequence[..., None] * len(heads) + heads


def _terms(case: MixerCase, name: str) -> int:
    summed = name in SHARED or name.startswith("dweight")
    return STEPS + case.K + case.V + (case.B * case.T if summed else min(case.T, CHUNK))


CHUNKS = tuple(chunk for chunk in (16, 32, 64, 128) for _ in range(3))
OPERATION = Operation(
    inputs, formula, _run, _terms, parts, split, rounded=True, chunks=CHUNKS, seed=4
)
verdicts = OPERATION.verdicts
