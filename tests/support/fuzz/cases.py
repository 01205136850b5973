"""Draws random cases of every operation: hypothesis chooses sizes, forms and options, and shrinks
what fails.

Tensors are those of parity's cases, whose seed is drawn. What is left out:

- keys longer than 1 without normalization: 1 - beta |k|^2 leaves [-1, 1], and the state grows without bound;
- heads of one feature that the operation normalizes, unless the norm is tiny: a unit vector of one feature
  has no derivative, and what is left of it is rounding. So no layer of large x with narrow heads
  either;
- norms above 1e13: the reciprocal root of Trainium's Scalar engine ends at 1e29;
- in float16 values and states above 30, scales above sqrt(K), values below 1e-3, and layers of keys that are
  0: operands of products have float16's range in every implementation that computes in the dtype of
  q.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from hypothesis import strategies as st
from torch import Tensor

from delta_trn.backends import (
    gated_delta_rule,
    gated_delta_rule_step,
    kimi_delta_attention,
    kimi_delta_attention_step,
)
from delta_trn.backends.checks import dtype_name
from delta_trn.backends.dispatch import BACKENDS
from delta_trn.backends.parity import layer_cases, mixer_cases, rule, rule_cases
from delta_trn.backends.parity.cases import Operation
from delta_trn.backends.parity.layer_cases import LayerCase
from delta_trn.backends.parity.mixer_cases import MixerCase
from delta_trn.backends.parity.rule_cases import BOTH, CHANNEL_DECAYS, DECAYS, PER_HEAD, Case

SEAMS = (1, 2, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 192, 193, 256, 257, 321)
HEADS = (16, 32, 64, 1, 2, 3, 60, 96, 128, 192, 256)
# most multiply-adds of a case, and most elements of packed states; emulators take a thousand times
# as long
WORK, STATES = {False: 2e7, True: 1.5e6}, {False: 2e5, True: 2e4}


@dataclass(frozen=True)
class RandomCase:
    """Holds one case: its tensors, with any strides, and the gradients that are wanted.

    case        the case of parity whose operation is called and whose formula judges
    douts       the gradients of the outputs in the loss
    wanted      the tensors that require gradients; empty: the call runs without gradients
    device      the type of device on which the backend runs; the tensors here are on the CPU
    """

    case: Any
    dtype: torch.dtype
    tensors: Mapping[str, Tensor]
    douts: Mapping[str, Tensor]
    wanted: tuple[str, ...]
    device: str = "cpu"

    def __repr__(self) -> str:
        shapes = " ".join(f"{n}{list(x.shape)}{list(x.stride())}" for n, x in self.tensors.items())
        return f"{dtype_name(self.dtype)} {self.case!r} {shapes} wanted {self.wanted}"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))  # hypothesis would print every number

    @property
    def operation(self) -> Operation:
        return OPERATIONS[self.case.op]

    def floats(self) -> tuple[str, ...]:
        """Returns the names of the tensors that can have a gradient."""
        return tuple(name for name, x in self.tensors.items() if x.is_floating_point())


def _run_rule(case: Case, x: Mapping[str, Tensor], backend: str) -> dict[str, Tensor]:
    """Calls the rule, or for one token the operation for it, with a state that is always there."""
    options = case.options() | {"backend": backend}
    scan: Any = gated_delta_rule
    step: Any = gated_delta_rule_step
    if case.has_channels:
        scan, step = kimi_delta_attention, kimi_delta_attention_step
    if not case.op.endswith("_step"):
        o, state = scan(**x, output_final_state="final_state" in case.loss, **options)
        return {"o": o} if state is None else {"o": o, "final_state": state}
    whole = (*PER_HEAD, "initial_state")
    token = {name: y[:, 0] for name, y in x.items() if name not in whole}
    gates = {name: x[name] for name in PER_HEAD if name in x}
    o, state = step(**token, **gates, state=x["initial_state"], **options)
    return {"o": o[:, None], "final_state": state}


def _rule_formula(
    case: Case, x: Mapping[str, Tensor], rounding: Any, chunk: int | None
) -> dict[str, Tensor]:
    results = rule.formula(case, x, rounding, chunk)
    return results if "final_state" in case.loss else {"o": results["o"]}


RULE = Operation(
    cast(Any, rule_cases.inputs), _rule_formula, _run_rule, lambda case, name: rule.terms(case),
    lambda case, name, y: rule.parts(case, name) if y.numel() else None, rounded=True,
)  # fmt: skip
OPERATIONS: Mapping[str, Operation] = {
    "gated_delta_rule": RULE,
    "gated_delta_rule_step": RULE,
    "kimi_delta_attention": RULE,
    "kimi_delta_attention_step": RULE,
    "gated_delta_layer": mixer_cases.OPERATION,
    **layer_cases.OPERATIONS,
}


def rule_case(case: Case, dtype: torch.dtype, factors: Mapping[str, float]) -> RandomCase:
    """Returns a case of the rule with the gradients of all that it has;
    `factors` multiply its tensors.
    """
    x = rule_cases.inputs(case, dtype).tensors()
    # rounding must leave no key longer than 1: with beta = 2 the state would grow
    if case.norm == "unit":
        x["k"] = x["k"] * (1 - 2 * torch.finfo(dtype).eps)
    x = {name: y * factors.get(name, 1) for name, y in x.items()}
    douts = {n: x.pop(key) for n, key in (("o", "do"), ("final_state", "dstate")) if key in x}
    return RandomCase(case, dtype, x, douts, tuple(n for n in x if n != "cu_seqlens"))


class Draw:
    """Draws by hypothesis; the first of several choices is the simplest."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw

    def pick(self, *choices: Any) -> Any:
        return self.draw(st.sampled_from(choices))

    def integer(self, low: int, high: int) -> int:
        return self.draw(st.integers(low, high))

    def chance(self, one_in: int) -> bool:
        return self.pick(*(False,) * (one_in - 1), True)

    def head(self, most: int) -> int:
        return min(self.pick(self.pick(*HEADS), self.integer(1, 72), self.integer(1, most)), most)

    def time(self, small: bool) -> int:
        return min(self.pick(self.integer(1, 200), self.pick(*SEAMS)), 140 if small else 400)

    def lengths(self, T: int, most: int) -> tuple[int, ...]:
        """Cuts T tokens into at most so many sequences: a few, many,
        whole chunks; some may be empty.
        """
        few = self.draw(st.lists(st.one_of(st.integers(0, T), st.sampled_from((0, T))), max_size=5))
        step = self.integer(1, 8)
        places = self.pick(
            few, few, range(64, T + 1, 64), [n for m in range(0, T, step) for n in (m, m)]
        )
        places = sorted(places)[: most - 1]
        return tuple(b - a for a, b in zip([0, *places], [*places, T], strict=True))

    def sizes(self, small: bool, packed: bool, cost: int = 1) -> dict[str, Any]:
        """Returns B, T, H, K, V, HV and lengths;
        the largest are halved until the case is affordable.
        """
        B, H, group = (
            self.pick(1, 1, 2, 3, 4),
            self.pick(1, 2, 3, 4, 6),
            self.pick(1, 1, 1, 2, 3, 4, 8),
        )
        s = {"B": 1 if packed else B, "T": self.time(small), "H": H, "group": group}
        s |= {"K": self.head(256), "V": self.head(512)}
        enough = {"B": 2, "H": 2, "group": 2, "T": 80, "K": 40, "V": 40}
        while WORK[small] < cost * s["B"] * s["T"] * s["H"] * s["group"] * (
            s["K"] * s["V"] + 64.0 * (s["K"] + s["V"])
        ):
            name = max(s, key=lambda name: s[name] / enough[name])
            s[name] = (s[name] + 1) // 2
        HV = s["H"] * s.pop("group")
        most = max(4, int(STATES[small] / (HV * s["K"] * s["V"])))
        return s | {"HV": HV, "lengths": self.lengths(s["T"], most) if packed else None}


def _draw_rule(d: Draw, name: str, op: str, dtype: torch.dtype, small: bool) -> RandomCase:
    step, half, channels = op.endswith("_step"), dtype == torch.float16, op.startswith("kimi")
    # the baseline of decays per channel has matrices [C, C, K]
    s = d.sizes(small, not step and d.chance(5), 6 if channels else 1)
    if step:
        s["T"] = 1
    elif d.chance(12):
        s |= {"T" if d.chance(2) else "B": 0, "lengths": None}
    norm = d.pick("unit", "unit", "random", "random", "zero", "tiny", "huge")
    norm = "unit" if s["K"] == 1 and norm != "tiny" else norm
    gates = d.pick(None, None, "plain", "wide")
    values = d.pick(1.0, 1.0, 1.0, *((30.0, 1e-3) if half else (1e4, 1e-4, 1e-30)))
    case = Case(
        name, **s, reason="", op=op, norm=norm, values=values, gates=gates,
        decay=d.pick(*DECAYS, "reset"), beta=d.pick(None, None, None, 1.0, 2.0, 0.0, 1e-6),
        reflect=d.chance(3), keys=d.pick("random", "random", "random", "equal", "near", "alike"),
        scale=d.pick(None, None, s["K"] ** 0.5, 1.0, 0.0, -0.3, 1e-4 if half else 1e-20),
        state=step or d.chance(2), loss=BOTH if step else d.pick(("o",), BOTH, ("final_state",)),
    )  # fmt: skip
    if channels:
        case = replace(case, decay=d.pick(case.decay, *CHANNEL_DECAYS))
        case = replace(case, lower_bound=d.pick(None, -5.0, -30.0) if gates else None)
    # decays that overflow
    factors = {"g": d.pick(1.0, 1.0, 5.0), "A_log": d.pick(1.0, 1.0, 1.0, 30.0)}
    if norm in ("tiny", "huge") and not half:  # to 1e-25 and 1e13
        factor = d.pick(1.0, 1e-21 if norm == "tiny" else 1e9)
        factors |= {"q": factor, "k": factor}
    if case.state and not case.lengths:
        factors["initial_state"] = d.pick(1.0, 1.0, values, 1e-10 * values, 30.0 if half else 1e4)
    x = rule_case(case, dtype, factors)
    full = torch.promote_types(dtype, torch.float32)
    gate, parameter = d.pick(full, dtype), d.pick(full, full, torch.float32, torch.bfloat16)
    dtypes: dict[Any, Any] = dict.fromkeys(("g", "beta"), gate) | dict.fromkeys(PER_HEAD, parameter)
    dropped = "dt_bias" if d.chance(3) else ""
    tensors = {n: y.to(dtypes.get(n, y.dtype)) for n, y in x.tensors.items() if n != dropped}
    return replace(x, tensors=tensors)


def _draw_layer(d: Draw, name: str, op: str, dtype: torch.dtype, small: bool) -> RandomCase:
    form: dict[str, Any] = {"size": d.pick(1.0, 1.0, 1.0, 1e-4, 30.0, 0.0), "plain": d.chance(4)}
    if op == "short_convolution":
        shape = (d.integer(1, 3), d.time(small), d.integer(1, 80), d.pick(4, 4, 4, 1, 2, 3, 8))
        if d.chance(4):
            form["lengths"], shape = d.lengths(shape[1], 300), (1, *shape[1:])
        elif d.chance(2):
            form["prefix"] = True
    elif op == "linear_cross_entropy":
        vocabulary = d.pick(d.integer(1, 400), d.integer(1000, 6000))
        shape = (d.integer(1, 40), d.head(256), vocabulary)
        form = {"size": d.pick(1.0, 1.0, 30.0), "ignored": d.pick(0, 2, 3, 1)}
    elif op == "delta_residual":
        D = d.pick(d.head(256), d.integer(1, 2000))
        shape = (d.pick(1, 3, 40, 129) if D < 500 else d.integer(1, 8), D, d.integer(1, 8))
        norm = d.pick(1.0, 0.0, 1e-5, 1e-3, 30.0, 30.0 if dtype == torch.float16 else 1e4)
        norm = min(norm, 1e-5) if D == 1 else norm
        k_eps = d.pick(1e-5, None) if norm == 1.0 else 1e-5
        form = {"beta": d.pick(None, None, 0.0, 1.0, 2.0), "k_eps": k_eps, "norm": norm}
    else:
        shape = (d.integer(1, 130), max(2, d.pick(d.head(512), d.integer(513, 2100))))
        form["plain"] = form["plain"] and op == "gated_rms_norm"
    x = layer_cases.inputs(LayerCase(name, op, shape, "", **form), dtype)
    return RandomCase(x.case, dtype, x.tensors, x.douts, ())


def _draw_mixer(d: Draw, name: str, op: str, dtype: torch.dtype, small: bool) -> RandomCase:
    s = d.sizes(small, d.chance(5))
    # more than a kernel takes at once, or what it takes
    most = (256, 512) if d.chance(10) else (128, 256)
    s["K"], s["V"] = (min(max(2, s[size]), limit) for size, limit in zip("KV", most, strict=True))
    packed, half = s["lengths"] is not None, dtype == torch.float16
    sizes = (1.0, 1.0, 1e-3) + (() if half else (0.0,)) + ((30.0,) if s["K"] >= 32 else ())
    both = not packed and d.chance(2)
    case = MixerCase(
        name,
        **s,
        reason="",
        W=d.pick(4, 4, 4, 2, 3, 1, 5),
        size=d.pick(*sizes),
        keys=d.pick("random", "random", "equal", "near", "random" if half else "zero"),
        b=d.pick(None, None, None, 12.0, 6.0, -4.0),
        decay=d.pick("plain", "plain", "none", "strong", "reset"),
        scale=d.pick(None, 1.0),
        reflect=d.chance(2),
        bounds=d.chance(2),
        before=not packed and d.chance(2),
        loss=mixer_cases.BOTH if both else ("y",),
        short=d.chance(3) and not half,
        bias=not d.chance(3),
    )
    x = mixer_cases.inputs(case, dtype)
    return RandomCase(case, dtype, x.tensors, x.douts, ())


DRAWN = {
    "gated_delta_layer": _draw_mixer,
    "gated_delta_rule": _draw_rule,
    "gated_delta_rule_step": _draw_rule,
    "kimi_delta_attention": _draw_rule,
    "kimi_delta_attention_step": _draw_rule,
}


def with_strides(style: str, x: Tensor) -> Tensor:
    """Returns x with the same values in another layout."""
    if x.dim() == 0 or not x.is_floating_point() or x.numel() == 0 or style == "dense":
        return x
    if style == "turned":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if style == "stepped":
        return torch.stack([x, torch.zeros_like(x)], -1)[..., 0]
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


@st.composite
def random_cases(draw: st.DrawFn, backend: str, op: str, device: str = "cpu") -> RandomCase:
    """Draws a case in a dtype of the backend; a small one where `device` is emulated."""
    d, dtypes = Draw(draw), BACKENDS[backend].rows[op].dtypes
    dtype = d.pick(
        *(x for x in (torch.float32, torch.bfloat16, torch.float16, torch.float64) if x in dtypes)
    )
    seed, small = f"{op} {d.integer(0, 10**6)}", device in BACKENDS[backend].emulated
    case = DRAWN.get(op, _draw_layer)(d, seed, op, dtype, small)
    styles = [d.pick("dense", "dense", "dense", "turned", "stepped", "offset") for _ in range(3)]
    tensors = {n: with_strides(styles[i % 3], x) for i, (n, x) in enumerate(case.tensors.items())}
    douts = {n: with_strides(styles[0], x) for n, x in case.douts.items()}
    if d.chance(10):  # the gradient of a sum
        douts = {n: x.flatten()[0].expand(x.shape) if x.numel() else x for n, x in douts.items()}
    wanted = case.floats()
    if d.chance(2):
        kept = d.integer(0, 2 ** len(wanted) - 1)
        wanted = tuple(name for i, name in enumerate(wanted) if kept >> i & 1)
    return replace(case, tensors=tensors, douts=douts, wanted=wanted, device=device)
