"""Draws random cases of every operation: hypothesis chooses sizes, forms and options, and shrinks what fails.

Tensors are those of parity's cases, whose seed is drawn, changed by what `Changes` names. What is left out:

- keys longer than 1 without normalization: 1 - beta |k|^2 leaves [-1, 1], and the state grows without bound;
- heads of one feature that the operation normalizes, unless the norm is tiny: a unit vector of one feature
  has no derivative, and what is left of it is rounding. So no layer of large x with narrow heads either;
- norms above 1e13: the reciprocal root of Trainium's Scalar engine ends at 1e29;
- in float16 values and states above 30, scales above sqrt(K), values below 1e-3, and layers of keys that are
  0: operands of products have float16's range in every implementation that computes in the dtype of q.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from delta_trn.backends.checks import dtype_name
from delta_trn.backends.parity import layer_cases, mixer_cases, residual_cases, rule_cases
from delta_trn.backends.parity.layer_cases import LayerCase
from delta_trn.backends.parity.mixer_cases import MixerCase
from delta_trn.backends.parity.residual_cases import ResidualCase
from delta_trn.backends.parity.rule_cases import BOTH, DECAYS, Case
from delta_trn.backends.registry import BACKENDS

# what a case of an operation is checked for besides the judge; see `checks`
CHECKS: Mapping[str, tuple[str, ...]] = {
    "gated_delta_rule": ("judge", "again", "alone", "rows", "cut", "wanted", "steps"),
    "gated_delta_rule_step": ("judge", "again", "rows"),
    "gated_delta_layer": ("judge", "again", "alone", "rows", "cut", "wanted"),
    "short_convolution": ("judge", "again", "alone", "rows", "cut", "wanted"),
    "delta_residual": ("judge", "again", "rows", "wanted"),
    "gated_rms_norm": ("judge", "again", "rows", "wanted"),
    "add_rms_norm": ("judge", "again", "rows", "wanted"),
    "linear_cross_entropy": ("judge", "again", "wanted"),
}
SEAMS = (1, 2, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 192, 193, 256, 257, 321)
HEADS = (16, 32, 64, 1, 2, 3, 60, 96, 128, 192, 256)
# most multiply-adds of a case, and most elements of packed states; emulators take a thousand times as long
WORK, STATES = {False: 2e7, True: 1.5e6}, {False: 2e5, True: 2e4}


@dataclass(frozen=True)
class RandomCase:
    """Holds one case: a call, the gradients of its outputs, and what is checked.

    tensors     the arguments that are tensors, by name; with any strides
    options     the other arguments
    douts       the gradients of the outputs in the loss
    wanted      the tensors that require gradients; empty: the call runs without gradients
    check       the property that is checked besides the judge
    terms       how many float32 terms a result has added up
    layer       the case whose formula judges an operation of a layer
    device      the type of device on which the backend runs; the tensors here are on the CPU
    words       what it was made of, for people
    """

    op: str
    dtype: torch.dtype
    tensors: Mapping[str, Tensor]
    options: Mapping[str, Any]
    douts: Mapping[str, Tensor]
    wanted: tuple[str, ...]
    check: str
    terms: int
    layer: LayerCase | MixerCase | None = None
    device: str = "cpu"
    words: str = ""

    def __repr__(self) -> str:
        shapes = " ".join(f"{name}{list(x.shape)}" for name, x in self.tensors.items())
        return (
            f"{self.op} {dtype_name(self.dtype)} [{self.check}] {shapes}; {self.words}; wanted {self.wanted}"
        )

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))  # hypothesis would print every number

    def floats(self) -> list[str]:
        """Returns the names of the tensors that can have a gradient."""
        return [name for name, x in self.tensors.items() if x.is_floating_point()]


@dataclass(frozen=True)
class Changes:
    """Says how the tensors of a case of the rule differ from parity's.

    factors     tensor -> what it is multiplied by
    dtypes      tensor -> its dtype, where an operation takes several
    pairs       every second key is the one before
    resting     every third token writes nothing
    given       of projected gates: the one that is given, g or beta
    """

    factors: Mapping[str, float]
    dtypes: Mapping[str, torch.dtype]
    pairs: bool = False
    resting: bool = False
    given: str = ""
    bias: bool = True


PLAIN = Changes({}, {})


def rule_case(case: Case, dtype: torch.dtype, changes: Changes = PLAIN, check: str = "judge") -> RandomCase:
    """Returns a case of the rule, or of one token of it, with the gradients of all that it has."""
    inputs = rule_cases.inputs(case, dtype)
    x, options = inputs.tensors(), {n: y for n, y in inputs.arguments().items() if y is not None}
    for name in ("A_log", "dt_bias", "cu_seqlens"):
        options.pop(name, None)
    douts = {n: x.pop(key) for n, key in (("o", "do"), ("final_state", "dstate")) if key in x}
    if case.norm == "unit":  # rounding must leave no key longer than 1: with beta = 2 the state would grow
        x["k"] = x["k"] * (1 - 2 * torch.finfo(dtype).eps)
    if changes.pairs:
        x["k"][:, 1::2] = x["k"][:, : case.T - 1 : 2]
    if changes.given == "g":
        del options["use_gate_in_kernel"], x["A_log"], x["dt_bias"]
        x["g"] = -x["g"].abs() / 40
    elif changes.given == "beta":
        del options["use_beta_sigmoid_in_kernel"]
        options.pop("allow_neg_eigval")
        x["beta"] = x["beta"].abs() / 40
    elif not changes.bias:
        x.pop("dt_bias", None)
    if changes.resting:
        x["beta"][:, ::3] = -100.0 if case.gates and changes.given != "beta" else 0.0
    x = {n: y.to(changes.dtypes.get(n, y.dtype)) * changes.factors.get(n, 1) for n, y in x.items()}
    options |= {} if case.scale is None else {"scale": case.scale}
    if case.op == "gated_delta_rule_step":
        whole = ("A_log", "dt_bias", "initial_state")
        x = {name: y if name in whole else y[:, 0] for name, y in x.items()}
        x["state"] = x.pop("initial_state")
        douts = {("state" if n == "final_state" else n): y[:, 0] if n == "o" else y for n, y in douts.items()}
    else:
        options["output_final_state"] = "final_state" in douts or check in ("cut", "steps")
    changed = {f.name: getattr(case, f.name) for f in fields(case) if getattr(case, f.name) != f.default}
    words = f"{changed} {changes if changes != PLAIN else ''}"
    terms = case.K + case.V + min(case.T, 64)
    wanted = tuple(name for name in x if name != "cu_seqlens")
    return RandomCase(case.op, dtype, x, options, douts, wanted, check, terms, words=words)


class Draw:
    """Draws by hypothesis; the first of several choices is the simplest."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw

    def pick(self, *choices: Any) -> Any:
        return self.draw(st.sampled_from(choices))

    def integer(self, low: int, high: int) -> int:
        return self.draw(st.integers(low, high))

    def chance(self, one_in: int) -> bool:
        return self.draw(st.sampled_from((False,) * (one_in - 1) + (True,)))

    def head(self, most: int) -> int:
        return min(self.pick(self.pick(*HEADS), self.integer(1, 72), self.integer(1, most)), most)

    def time(self, small: bool) -> int:
        return min(self.pick(self.integer(1, 200), self.pick(*SEAMS)), 140 if small else 400)

    def lengths(self, T: int, most: int) -> tuple[int, ...]:
        """Cuts T tokens into at most so many sequences: a few, many, whole chunks; some may be empty."""
        style = self.pick("few", "few", "chunks", "many", "ones")
        if style == "ones":
            places = list(range(1, T))
        elif style == "chunks":
            places = [64 * n for n in range(1, T // 64 + 1)]
        elif style == "many":
            places = (
                np.random.default_rng(self.integer(0, 99)).integers(0, T + 1, self.integer(20, 300)).tolist()
            )
        else:
            places = self.draw(st.lists(st.one_of(st.integers(0, T), st.sampled_from((0, T))), max_size=5))
        places = sorted(places)[: most - 1]
        return tuple(b - a for a, b in zip([0, *places], [*places, T], strict=True))


def draw_sizes(d: Draw, check: str, small: bool) -> dict[str, Any]:
    """Returns B, T, H, K, V, HV and lengths, cut until the case is affordable."""
    B, H, group = d.pick(1, 1, 1, 2, 3, 4), d.pick(1, 2, 3, 4, 6), d.pick(1, 1, 1, 2, 3, 4, 8)
    T, K, V = d.time(small), d.head(256), d.head(512)
    packed = check == "alone" or (check not in ("cut", "rows", "steps") and d.chance(5))
    B, HV = 1 if packed else max(B, 2) if check == "rows" else B, H * group
    while WORK[small] < B * T * HV * (K * V + 64.0 * (K + V)):
        if B > 2:
            B -= 1
        elif HV > 4:
            H, HV = 1, min(group, 4)
        elif T > 100 and max(K, V) <= 64:
            T = 64 + T // 4
        elif max(K, V) > 40:
            K, V = (n if n <= 40 else n // 2 for n in (K, V))
        elif HV > 1:
            H, HV = 1, HV // 2
        else:
            T //= 2
    most = max(4, int(STATES[small] / (HV * K * V)))
    lengths = d.lengths(T, most) if packed else None
    return {"B": B, "T": T, "H": H, "K": K, "V": V, "HV": HV, "lengths": lengths}


def _draw_rule(d: Draw, name: str, op: str, dtype: torch.dtype, check: str, small: bool) -> RandomCase:
    step, half = op == "gated_delta_rule_step", dtype == torch.float16
    s = draw_sizes(d, "rows" if step else check, small)
    if step:
        s["T"] = 1
    elif d.chance(12):
        s["T" if d.chance(2) else "B"] = 0
        s["lengths"] = None
    norm = d.pick("unit", "unit", "random", "random", "zero", "tiny", "huge")
    if s["K"] == 1 and norm != "tiny":
        norm = "unit"
    full = torch.promote_types(dtype, torch.float32)
    gates = d.pick(None, None, "plain", "wide")
    values = d.pick(1.0, 1.0, 1.0, *((30.0, 1e-3) if half else (1e4, 1e-4, 1e-30)))
    case = Case(
        name, **s, reason="", op=op, norm=norm, values=values, gates=gates,
        decay=d.pick(*DECAYS, "reset"), beta=d.pick(None, None, None, 1.0, 2.0, 0.0, 1e-6),
        reflect=d.chance(3), keys=d.pick("random", "random", "random", "equal", "near", "alike"),
        scale=d.pick(None, None, s["K"] ** 0.5, 1.0, 0.0, -0.3, 1e-4 if half else 1e-20),
        state=step or d.chance(2), loss=BOTH if step else d.pick(("o",), BOTH, ("final_state",)),
    )  # fmt: skip
    factors: dict[str, float] = {}
    if norm in ("tiny", "huge") and not half:  # to 1e-25 and 1e13
        factor = d.pick(1.0, 1e-21 if norm == "tiny" else 1e9)
        factors |= {"q": factor, "k": factor}
    if case.state and not case.lengths:
        factors["initial_state"] = d.pick(1.0, 1.0, values, 1e-10 * values, 30.0 if half else 1e4)
    factors["g"] = d.pick(1.0, 1.0, 5.0)
    gate = d.pick(full, dtype)
    dtypes = {"g": gate, "beta": gate}
    if gates:
        parameter = d.pick(full, full, torch.float32, torch.bfloat16)
        dtypes |= {"A_log": parameter, "dt_bias": parameter}
        factors["A_log"] = d.pick(1.0, 1.0, 1.0, 30.0)  # decays that overflow
    changes = Changes(
        factors,
        dtypes,
        d.chance(10),
        d.chance(10),
        d.pick("", "", "g", "beta") if gates else "",
        not d.chance(3),
    )
    return rule_case(case, dtype, changes, check)


def _draw_residual(d: Draw, name: str, op: str, dtype: torch.dtype, check: str, small: bool) -> RandomCase:
    D = d.pick(d.head(256), d.integer(1, 2000))
    norm = d.pick(1.0, 0.0, 1e-5, 1e-3, 30.0, 30.0 if dtype == torch.float16 else 1e4)
    norm = min(norm, 1e-5) if D == 1 else norm
    case = ResidualCase(
        name, d.pick(1, 3, 40, 129) if D < 500 else d.integer(1, 8), D, d.integer(1, 8), "",
        beta=d.pick(None, None, 0.0, 1.0, 2.0), k_eps=d.pick(1e-5, None) if norm == 1.0 else 1e-5, norm=norm,
    )  # fmt: skip
    x = residual_cases.inputs(case, dtype)
    douts, terms = {"out": x.pop("dout")}, case.D + case.DV + residual_cases.STEPS
    return RandomCase(op, dtype, x, {"k_eps": case.k_eps}, douts, tuple(x), check, terms, words=str(case))


def _draw_layer(d: Draw, name: str, op: str, dtype: torch.dtype, check: str, small: bool) -> RandomCase:
    form: dict[str, Any] = {"size": d.pick(1.0, 1.0, 1.0, 1e-4, 30.0, 0.0), "plain": d.chance(4)}
    if op == "short_convolution":
        shape = (d.integer(1, 3), d.time(small), d.integer(1, 80), d.pick(4, 4, 4, 1, 2, 3, 8))
        if check == "alone" or (check == "judge" and d.chance(4)):
            form["lengths"], shape = d.lengths(shape[1], 300), (1, *shape[1:])
        elif d.chance(2):
            form["prefix"] = True
    elif op == "linear_cross_entropy":
        vocabulary = d.pick(d.integer(1, 400), d.integer(1000, 6000))
        shape = (d.integer(1, 40), d.head(256), vocabulary)
        form = {"size": d.pick(1.0, 1.0, 30.0), "ignored": d.pick(0, 2, 3, 1)}
    else:
        shape = (d.integer(1, 130), max(2, d.pick(d.head(512), d.integer(513, 2100))))
        form["plain"] = form["plain"] and op == "gated_rms_norm"
    case = LayerCase(name, op, shape, "", **form)
    x = layer_cases.inputs(case, dtype)
    douts = {key[1:]: x.pop(key) for key in list(x) if key in ("dy", "dtotal", "dloss")}
    options: dict[str, Any] = {} if op == "linear_cross_entropy" else {"eps": layer_cases.EPS}
    if op == "short_convolution":
        options = {"activation": "linear" if case.plain else "silu"}
    terms = layer_cases.STEPS + (shape[0] * shape[1] if op == "short_convolution" else sum(shape))
    wanted = tuple(n for n, y in x.items() if y.is_floating_point())
    return RandomCase(op, dtype, x, options, douts, wanted, check, terms, case, words=str(case))


def _draw_mixer(d: Draw, name: str, op: str, dtype: torch.dtype, check: str, small: bool) -> RandomCase:
    s = draw_sizes(d, check, small)
    wide = d.chance(10)  # more than a kernel takes at once
    s["K"], s["V"] = (
        max(2, s["K"] if wide else min(s["K"], 128)),
        max(2, s["V"] if wide else min(s["V"], 256)),
    )
    packed, half = s["lengths"] is not None, dtype == torch.float16
    sizes = (1.0, 1.0, 1e-3) + (() if half else (0.0,)) + ((30.0,) if s["K"] >= 32 else ())
    case = MixerCase(
        name, **s, reason="", W=d.pick(4, 4, 4, 2, 3, 1, 5), size=d.pick(*sizes),
        keys=d.pick("random", "random", "equal", "near", "random" if half else "zero"),
        b=d.pick(None, None, None, 12.0, 6.0, -4.0),
        decay=d.pick("plain", "plain", "none", "strong", "reset"),
        scale=d.pick(None, 1.0), reflect=d.chance(2), bounds=d.chance(2), before=not packed and d.chance(2),
        loss=mixer_cases.BOTH if check == "cut" or (not packed and d.chance(2)) else ("y",),
        short=d.chance(3) and not half, bias=not d.chance(3),
    )  # fmt: skip
    x = mixer_cases.inputs(case, dtype)
    wanted = tuple(n for n, y in x.tensors.items() if y.is_floating_point())
    terms = layer_cases.STEPS + case.K + case.V + case.B * case.T
    return RandomCase(
        op, dtype, x.tensors, case.options(), x.douts, wanted, check, terms, case, words=str(case)
    )


DRAWN = {
    "gated_delta_rule": _draw_rule, "gated_delta_rule_step": _draw_rule, "delta_residual": _draw_residual,
    "gated_delta_layer": _draw_mixer,
}  # fmt: skip


def with_strides(style: str, x: Tensor) -> Tensor:
    """Returns x with the same values in another layout."""
    if x.dim() == 0 or not x.is_floating_point() or x.numel() == 0 or style == "dense":
        return x
    if style == "turned":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if style == "sliced":
        wide = x.new_zeros((*x.shape[:-1], x.shape[-1] + 3))
        wide[..., 1:-2] = x
        return wide[..., 1:-2]
    if style == "stepped":
        wide = x.new_zeros((*x.shape[:-1], 2 * x.shape[-1]))
        wide[..., ::2] = x
        return wide[..., ::2]
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


@st.composite
def random_cases(draw: st.DrawFn, backend: str, op: str, check: str, device: str = "cpu") -> RandomCase:
    """Draws a case in a dtype of the backend; a small one where `device` is emulated."""
    d, capabilities = Draw(draw), BACKENDS[backend].capabilities
    # a backend without the layer computes it by its parts
    dtypes = capabilities.get(op, capabilities["gated_delta_rule"]).dtypes
    dtype = d.pick(*(x for x in (torch.float32, torch.bfloat16, torch.float16, torch.float64) if x in dtypes))
    seed = f"{op} {d.integer(0, 10**6)}"
    small = device in BACKENDS[backend].emulated
    case = DRAWN.get(op, _draw_layer)(d, seed, op, dtype, check, small)
    styles = [d.pick("dense", "dense", "dense", "turned", "sliced", "stepped", "offset") for _ in range(3)]
    tensors = {n: with_strides(styles[i % 3], x) for i, (n, x) in enumerate(case.tensors.items())}
    douts = {n: with_strides(styles[0], x) for n, x in case.douts.items()}
    if d.chance(10):  # the gradient of a sum
        douts = {n: x.flatten()[0].expand(x.shape) if x.numel() else x for n, x in douts.items()}
    wanted = tuple(case.floats())
    if check == "steps" or (op == "gated_delta_rule_step" and d.chance(2)):
        wanted = ()
    elif check == "wanted" or d.chance(5):
        kept = d.integer(0, 2 ** len(wanted) - 1)
        wanted = tuple(name for i, name in enumerate(wanted) if kept >> i & 1)
    words = f"{case.words} strides {styles}"
    return replace(case, tensors=tensors, douts=douts, wanted=wanted, device=device, words=words)
