"""The named cases of the delta rules, which parity, bench, goldens and tests share; each has a
reason.

Inputs are the same on machines that never meet. They are made of PCG64 uniforms and IEEE +, -, *,
/, sqrt in float64, without a mathematics library, and then rounded to float32 and to the case's
dtype. `digest` is their fingerprint.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray
T = TypeVar("T")

# name -> g as a function of uniforms x, y in [0, 1). "plain" has the quantiles of a newly
# initialized layer: decays .43, .88, .98 at 5, 50 and 75 percent
DECAYS: Mapping[str, str] = {
    "plain": "g = -x^3",
    "weak": "g = -x^3 / 50: memory of hundreds of tokens",
    "none": "g = 0",
    "strong": "g = -20 for every token",
    "mixed": "g = -20 y for one token in eight, -x / 50 for the others",
    "heavy": "g = -16 x, the strongest decay rate that initialization draws",
    "reset": "g in RESETS for one token in eight, -x / 50 for the others",
}
# the same of decays per channel
CHANNEL_DECAYS: Mapping[str, str] = {
    "apart": "-inf in the first channel, 0 in the second, plain in the others",
    "split": "g = -30 x in every other channel, -x / 1000 in those between",
    "deep": "g = -200 for one element in ten, -x / 20 for the others",
    "bounded": "g = -5 x, and -inf in all channels of one token of a head in eight: a safe gate's",
}
Decay = Literal[
    "plain",
    "weak",
    "none",
    "strong",
    "mixed",
    "heavy",
    "reset",
    "apart",
    "split",
    "deep",
    "bounded",
]
# logarithms of decays that are exactly 0 in float32: a mask's usual values, and sums that no dtype
# holds
RESETS = (-104.0, -1e4, -1e12, -1e16, float(np.finfo(np.float32).min), -np.inf)
Keys = Literal["random", "equal", "near", "alike"]
CORRELATIONS: Mapping[str, float] = {"equal": 1.0, "near": 0.999, "alike": 1 / 1.09}
Norm = Literal["unit", "random", "tiny", "huge", "zero"]
# name -> bound of the gates' projections, which are uniform between it and its negative. A_log is
# in
# [-3, 2.75] (exp(A_log) of .05 to 16, as initialization draws it), dt_bias in [-7, -2].
GATES: Mapping[str, float] = {"plain": 4.0, "wide": 40.0}
Projected = Literal["plain", "wide"]


@dataclass(frozen=True)
class Case:
    """Describes one case. Sizes are those of `backends.gated_delta_rule`; the rest describes the
    inputs.

    HV          value heads; None: H
    decay       see DECAYS and CHANNEL_DECAYS
    scale       None: K^-1/2
    values      v is multiplied by it
    beta        a constant; None: uniform in [0, 1), or with `reflect` in [0, 2)
    gates       None: g and beta themselves; else what a layer projects (GATES), beta up to 2 with
                `reflect`
    lower_bound     of the gate that has one
    keys        random, all equal, near: pairwise correlation .999, or alike: .92, as with .3 noise
    norm        unit: q and k are unit vectors; else the operation normalizes vectors of such norms
    lengths     packed sequences; T is their sum
    documents   what one row holds, told by tokens' places; T is the sum of their lengths. With
                `state` the first of them began some tokens before the row
    state       there is an initial state, and it gets a gradient
    loss        the outputs that the gradient comes from; (): there are no gradients
    tags        small: for interpreters and simulators; slow: not in default tests; bench,
                bench-cpu: timed; step: timed as one token of generation; headline: timed first on
                a new machine
    """

    name: str
    B: int
    T: int
    H: int
    K: int
    V: int
    reason: str
    HV: int | None = None
    decay: Decay = "plain"
    beta: float | None = None
    reflect: bool = False
    gates: Projected | None = None
    keys: Keys = "random"
    norm: Norm = "unit"
    scale: float | None = None
    values: float = 1.0
    lengths: tuple[int, ...] | None = None
    state: bool = False
    loss: tuple[Literal["o", "final_state"], ...] = ("o",)
    tags: frozenset[str] = frozenset()
    op: str = "gated_delta_rule"
    lower_bound: float | None = None
    documents: tuple[int, ...] | None = None

    @property
    def has_channels(self) -> bool:
        """Whether each channel of a key has a decay of its own."""
        return self.op.startswith("kimi_delta_attention")

    @property
    def per_head(self) -> tuple[int, ...]:
        """The shape of a head's decays."""
        return (self.value_heads, self.K) if self.has_channels else (self.value_heads,)

    @property
    def value_heads(self) -> int:
        return self.H if self.HV is None else self.HV

    @property
    def sequences(self) -> int:
        return self.B if self.lengths is None else len(self.lengths)

    @property
    def normalized_inside(self) -> bool:
        return self.norm != "unit"

    @property
    def exact_scale(self) -> float:
        return self.K**-0.5 if self.scale is None else self.scale

    @property
    def beta_max(self) -> float:
        return 0.0 if self.gates is None else 2.0 if self.reflect else 1.0

    def options(self) -> dict[str, Any]:
        """Returns the operation's arguments that are no tensors,
        but for those at their defaults.
        """
        options: dict[str, Any] = {"use_qk_l2norm_in_kernel": self.normalized_inside}
        options |= {} if self.scale is None else {"scale": self.scale}
        options |= {"safe_gate": True} if self.decay == "bounded" and not self.gates else {}
        if self.gates is None:
            return options
        gates = ("use_gate_in_kernel", "use_beta_sigmoid_in_kernel")
        options |= {} if self.lower_bound is None else {"lower_bound": self.lower_bound}
        return options | dict.fromkeys(gates, True) | {"allow_neg_eigval": self.reflect}

    def __str__(self) -> str:
        heads = f"{self.H}" if self.HV is None else f"{self.H}/{self.HV}"
        return f"{self.name}: B={self.B} T={self.T} H={heads} {self.K}:{self.V}"


SMALL = frozenset({"small"})
SLOW = frozenset({"slow"})
BENCH = frozenset({"slow", "bench"})
HEADLINE = BENCH | {"headline"}
TIMED = BENCH | {"bench-cpu"}
STEP = TIMED | {"step"}
BOTH: tuple[Literal["o", "final_state"], ...] = ("o", "final_state")
# what many rows of the table share
Both = partial(Case, loss=BOTH)
Small = partial(Both, tags=SMALL)
Cpu = partial(Case, norm="random", tags=TIMED)
Bench = partial(Case, norm="random", gates="plain", tags=BENCH)
Headline = partial(Bench, tags=HEADLINE)
Step = partial(Case, norm="random", state=True, tags=STEP)
# heads of 128:128, which kernels of their own compute on Hopper in 16 bits
Hopper = partial(Both, K=128, V=128, norm="random")

# Where nothing decays, the error of dg is one number per head. Cases about that have 4 heads or 8, so that
# the error is not a matter of luck: with 2 heads, seeds moved it by a factor of 9; with 8, by 2.
# fmt: off
CASES: tuple[Case, ...] = (
    #  name                  B   T     H   K    V
    Small("one",             8,  1,    2,  32,  16,  "one token: no chunk, no decay product", state=True),
    Small("one_fresh",       8,  1,    2,  16,  32,  "one token from nothing: dg is exactly 0"),
    Small("two",             8,  2,    2,  32,  32,  "the shortest chunk with an off-diagonal element"),
    Small("three",           8,  3,    2,  16,  32,  state=True,
          reason="the shortest chunk whose inverse has a product of two"),
    Case("ragged",           2,  63,   2,  32,  32,  "T is not a multiple of any chunk", tags=SMALL),
    Small("seam_64",         1,  64,   2,  32,  32,  state=True,
          reason="exactly one chunk: nothing may be read behind it"),
    Small("seam_65",         1,  65,   2,  32,  32,  "one token past a seam", state=True),
    Small("seam_129",        2,  129,  2,  32,  64,  "a middle chunk, and one token past it", state=True),
    Both("seam_192",         1,  192,  2,  64,  64,  "whole chunks only"),
    Small("no_decay",        1,  130,  4,  32,  32,  decay="none",
          reason="g = 0 is ungated DeltaNet: nothing fades, errors add up"),
    Small("forget",          1,  100,  4,  32,  32,  decay="strong", state=True,
          reason="exp(20 * 64) overflows: exponents are masked before exp"),
    Both("mixed",            1,  200,  4,  64,  64,  decay="mixed", state=True,
         reason="decay sums of -100 and more beside decays of -0.01 that must keep their digits"),
    Both("heavy",            1,  200,  4,  64,  128, decay="heavy",
         reason="the decay gradient cancels unless it is summed the right way"),
    Small("collide",         1,  130,  8,  32,  32,  keys="equal", beta=1.0, decay="weak", state=True,
          reason="all keys equal, beta = 1: every write erases the one before"),
    Small("reflect",         1,  130,  8,  32,  32,  keys="equal", beta=2.0, decay="weak", state=True,
          reason="all keys equal, beta = 2: eigenvalue -1, the densest inverse"),
    Small("overshoot",       1,  130,  8,  32,  32,  keys="equal", beta=1.6, decay="none", state=True,
          reason="all keys equal, beta = 1.6: the inverse falls off as 0.6^(i - j), to nothing"),
    Both("near_1",           1,  130,  8,  64,  64,  keys="near", beta=1.0, decay="weak", state=True,
         reason="keys correlated .999, beta = 1: a power series for the inverse loses every digit"),
    Both("near_2",           1,  130,  8,  64,  64,  keys="near", beta=2.0, decay="none", state=True,
         reason="keys correlated .999, beta = 2, no decay: the worst conditioned inverse"),
    Both("reflect_random",   1,  256,  4,  64,  64,  reflect=True, decay="weak",
         reason="beta up to 2 with random keys (allow_neg_eigval)"),
    Both("overwrite",        1,  128,  4,  32,  64,  beta=1.0, decay="none",
         reason="beta = 1 with random keys: the plain delta rule"),
    Both("wide_v",           1,  96,   2,  32,  128, "V = 4 K", state=True),
    Both("wide_k",           1,  96,   2,  128, 32,  "K = 4 V", state=True),
    Both("odd",              1,  70,   3,  60,  100, state=True,
         reason="no size is a power of two or a multiple of 8"),
    Case("k96",              1,  130,  2,  96,  192, "the paper's d = 768: K is no power of two"),
    Hopper("hopper_2",       2,  100,  1,  HV=2, gates="plain", state=True,
           reason="two value heads a key head, gates made in the kernels, from a state"),
    Hopper("hopper_3",       1,  168,  1,  HV=3, gates="plain", lengths=(0, 3, 0, 100, 64, 1), state=True,
           reason="three value heads a key head, packed, some sequences empty"),
    Hopper("hopper_4",       1,  130,  2,  HV=8, decay="reset", reflect=True,
           reason="four value heads a key head, gates given, resets"),
    Hopper("hopper_96",      1,  130,  1,  K=96, V=96, HV=2, gates="wide", state=True,
           reason="K is no power of two: keys are padded, and gates made in the kernels"),
    Both("k192",             1,  130,  1,  192, 384, "the paper's d = 1536"),
    Both("k256",             1,  130,  1,  256, 512, "the largest heads: d = 2048 and GDN 1.3B", state=True),
    Small("k256_short",      1,  3,    2,  256, 16,  state=True,
          reason="sums over K have two parts, also where an emulator has only time for three tokens"),
    Small("gva_2",           1,  130,  2,  32,  32,  HV=4, state=True,
          reason="two value heads share a key: dq, dk are sums"),
    Case("gva_4",            1,  70,   2,  32,  64,  "four value heads share a key", HV=8),
    Both("gva_8",            2,  65,   1,  64,  32,  HV=8, norm="random",
         reason="all eight value heads share one key"),
    Case("packed",           1,  137,  2,  32,  32,  lengths=(1, 63, 64, 9), tags=SMALL,
         reason="sequences end to end: none may see its neighbor"),
    Small("packed_empty",    1,  135,  2,  32,  32,  lengths=(0, 5, 0, 65, 0, 0, 65, 0), state=True,
          reason="empty sequences first, last and between: their state passes through"),
    Small("packed_single",   1,  5,    2,  32,  16,  lengths=(1, 1, 1, 1, 1), state=True,
          reason="every sequence is one token"),
    Both("packed_many",      1,  500,  6,  32,  64,  lengths=(5, 0, 3, 1, 1) * 50, norm="random", state=True,
         reason="250 sequences: one step of the scan has more rows than a block of a CPU's cache"),
    Both("packed_wide",      1,  40,   6,  256, 512, lengths=(9, 0, 17, 13, 1), state=True,
         reason="the same of the largest heads, of which a block has fewer than a chunk's"),
    Small("reset",           1,  130,  4,  32,  32,  decay="reset", state=True,
          reason="some g are -1e4, -1e16, finfo.min or -inf: the tokens around them keep their digits"),
    Small("reset_packed",    1,  135,  2,  32,  64,  HV=4, decay="reset", norm="random",
          lengths=(1, 63, 0, 71), reflect=True, state=True,
          reason="resets of packed sequences, beside their seams"),
    Both("reset_wide",       1,  130,  2,  96,  64,  decay="reset", reflect=True,
         reason="resets in the chunks of wide heads, beta up to 2"),
    Both("packed_gva",       1,  300,  2,  64,  64,  HV=4, lengths=(100, 129, 0, 71), norm="random",
         state=True, reason="packed, grouped and normalized at once"),
    Both("carry",            2,  100,  4,  64,  64,  state=True, decay="weak",
         reason="an initial state, and a gradient through the final one"),
    Case("final_only",       2,  100,  4,  32,  32,  state=True, loss=("final_state",), decay="weak",
         tags=SMALL, reason="the gradient comes from the final state alone: dq is exactly 0"),
    Case("erased",           1,  140,  4,  96,  32,  keys="equal", beta=1.0, state=True,
         loss=("final_state",),
         reason="equal keys erase what is read: dg is what roundings leave, less in every chunk"),
    Both("mirrored",         1,  64,   4,  64,  17,  keys="equal", beta=2.0, decay="none",
         reason="equal keys, beta = 2, no decay: writes mirror what is read, dg is what their sum leaves"),
    Small("norm",            2,  100,  2,  32,  32,  norm="random", state=True,
          reason="q and k normalized by the operation"),
    Small("gates",           1,  100,  4,  32,  32,  HV=8, gates="plain", norm="random", state=True,
          reason="decay and write strength made by the operation of what a layer projects"),
    Small("gates_wide",      2,  70,   8,  32,  32,  gates="wide", reflect=True, norm="random",
          reason="projections of -40 to 40: softplus and sigmoid keep their small values"),
    Small("gates_packed",    1,  135,  8,  32,  32,  gates="plain", norm="random", state=True,
          lengths=(0, 5, 0, 65, 0, 0, 65, 0),
          reason="what lies past a sequence's end must not decay nor write"),
    Small("norm_tiny",       1,  70,   2,  32,  32,  norm="tiny",
          reason="norms of 1e-4: the 1e-6 inside the root decides"),
    Small("norm_huge",       1,  70,   2,  32,  32,  norm="huge",
          reason="norms of 1e4: gradients of 1e-4 from differences of ones"),
    Small("norm_zero",       1,  70,   2,  32,  32,  norm="zero",
          reason="one vector in eight is 0: no division by it"),
    Small("norm_zero_large", 1,  70,   2,  32,  32,  norm="zero", values=100.0,
          reason="zero keys beside values of 100: the reciprocal of a zero norm must not multiply them"),
    Small("norm_huge_weak",  1,  70,   2,  32,  32,  norm="huge", beta=1e-6,
          reason="norms of 1e4, write strengths of 1e-6: float16 holds neither product"),
    Small("scale_up",        1,  100,  4,  32,  32,  scale=32**0.5, norm="random", state=True,
          reason="scale K^+1/2, as the models use it"),
    Small("values_tiny",     1,  70,   2,  32,  32,  values=1e-30,
          reason="values of 1e-30: their products among themselves underflow, and nothing else may"),
    Small("values_large",    2,  20,   2,  32,  32,  "values of 1e4, as large as float16 bears", values=1e4),
    Both("long",             1,  2048, 1,  128, 128, decay="weak",
         reason="32 state hand-overs: the error must not grow with T"),
    Both("long_free",        1,  1024, 2,  64,  64,  decay="none", reflect=True,
         reason="no decay over 16 chunks, beta up to 2: rounding errors never fade"),
    Both("alike",            1,  1024, 2,  128, 128, HV=4, keys="alike", beta=1.0, decay="none", tags=SLOW,
         reason="keys correlated .92, beta = 1, no decay: public kernels lose the final state"),
    Both("longest",          1,  65536, 1,  32,  32,  decay="weak", tags=SLOW,
         reason="a thousand chunks: indices, memory and error over 64k tokens"),
    # kernels that hold two or four heads side by side cut such groups into parts that differ
    Small("group_3",         1,  3,    2,  16,  8,   "three value heads a key head", HV=6, state=True),
    Small("group_3_long",    1,  140,  1,  16,  1,   "the same over a seam, and V = 1", HV=3),
    Small("group_5",         1,  3,    2,  16,  1,   "five value heads a key head, V = 1", HV=10),
    Small("group_5_long",    1,  140,  1,  16,  8,   "the same over a seam", HV=5, state=True),
    Small("group_7",         1,  3,    2,  16,  8,   "seven value heads a key head", HV=14, state=True),
    Small("group_7_long",    1,  140,  1,  16,  1,   "seven of them over a seam, V = 1", HV=7, state=True),
    Both("group_3_wide",     1,  140,  1,  128, 256, "three wide heads a key head, over a seam", HV=3),
    Cpu("cpu_train",         8,  512,  6,  32,  64,  "what a CPU user trains (width 256)"),
    Cpu("cpu_long",          1,  8192, 6,  32,  64,  "time linear in T"),
    Cpu("cpu_qwen",          1,  1024, 4,  128, 128, "Qwen3-Next's heads, a quarter of them", HV=8),
    Case("cpu_one_token",    1,  512,  6,  32,  64,  norm="random", lengths=(1,) * 512,
         tags=SLOW | {"bench-cpu"}, reason="hundreds of sequences of one token"),
    Bench("paper_256",       30, 1024, 6,  32,  64,  "arXiv:2606.04048, d = 256, its micro-batch under SGD"),
    Headline("paper_512",    30, 1024, 6,  64,  128, "the same, d = 512"),
    Bench("paper_768",       30, 1024, 6,  96,  192, "the same, d = 768"),
    Headline("paper_1024",   30, 1024, 6,  128, 256, "the same, d = 1024"),
    Bench("paper_2048",      30, 1024, 6,  256, 512, "the same family, d = 2048"),
    Bench("gdn_1b",          8,  2048, 6,  256, 512, "GDN 1.3B (arXiv:2412.06464)"),
    Headline("qwen3_next",   1,  8192, 16, 128, 128, "Qwen3-Next: 16 key heads, 32 value heads", HV=32),
    Headline("qwen3_four",   4,  8192, 16, 128, 128, "the same, four sequences", HV=32),
    Headline("qwen3_wide",   1,  8192, 16, 128, 128, "16 key heads, 64 value heads", HV=64),
    Bench("qwen3_packed",    1,  32768, 16, 128, 128, HV=32, lengths=(8192,) * 4,
          reason="the same, four sequences of 8192 packed"),
    Bench("qwen3_quarter",   1,  32768, 4,  128, 128, HV=8,
          reason="its heads over four devices, one long sequence: whole, it keeps 16 programs busy"),
    Headline("qwen3_eighth", 1,  32768, 2, 128, 128, "2 key heads, 8 value heads, one long sequence", HV=8),
    Step("step_paper_512",   1,  1,    6,  64,  128,
         reason="generation, one sequence of d = 512: the launch takes longer than the work"),
    Step("step_qwen3_next",  1,  1,    16, 128, 128, "generation, one sequence: 4 MB of states", HV=32),
    Step("step_qwen3_64",    64, 1,    16, 128, 128, "the same for 64 sequences: memory bounds it", HV=32),
    Step("step_gdn_1b_32",   32, 1,    6,  256, 512, "the largest heads, 32 sequences"),
)
# fmt: on

# Some tokens of these cases are decoded, too: one after the other, by the operation for one token.
# Among them are heads of all sizes, and every hard input that one token can meet.
DECODED = (
    "one",
    "one_fresh",
    "no_decay",
    "forget",
    "mixed",
    "heavy",
    "collide",
    "reflect",
    "overshoot",
    "near_1",
    "near_2",
    "wide_v",
    "wide_k",
    "odd",
    "k96",
    "k192",
    "k256",
    "gva_2",
    "gva_8",
    "reset",
    "reset_wide",
    "norm",
    "gates",
    "gates_wide",
    "norm_tiny",
    "norm_huge",
    "norm_zero",
    "norm_zero_large",
    "norm_huge_weak",
    "scale_up",
    "values_tiny",
    "values_large",
)
TOKENS = 8

# the fields of Inputs that all sequences share
PER_HEAD = ("A_log", "dt_bias")

BY_NAME: Mapping[str, Case] = {case.name: case for case in CASES}


def decoded(cases: Iterable[Case]) -> dict[str, Case]:
    """Returns the same cases by name, of which some tokens are decoded."""
    return {
        f"decode_{case.name}": replace(
            case, name=f"decode_{case.name}", T=min(case.T, TOKENS), loss=(), op=f"{case.op}_step"
        )
        for case in cases
    }


STEPS: Mapping[str, Case] = decoded(map(BY_NAME.__getitem__, DECODED))


def select(
    names: Sequence[str] | None = None, *, tags: frozenset[str] = frozenset(), slow: bool = False
) -> list[Case]:
    """Returns the cases of these names, or else all cases that have all of these tags.

    Slow cases come only with `slow`, or with a tag of timed cases. Raises ValueError, which
    lists the names, for an unknown name.
    """
    if names:
        return [find(name, BY_NAME) for name in names]
    slow_too = slow or bool(tags & TIMED)
    return [case for case in CASES if tags <= case.tags and (slow_too or "slow" not in case.tags)]


def find(name: str, cases: Mapping[str, T]) -> T:
    """Returns the case of this name. Raises ValueError, which lists the names, if there is none."""
    if name not in cases:
        raise ValueError(f"no case is named {name!r}; there are: {', '.join(cases)}")
    return cases[name]


@dataclass(frozen=True)
class Inputs:
    """Holds the tensors of a case.

    do and dstate are the gradients of o and final_state, None for an output that is not in the
    loss. With Case.gates, g and beta are the gates' projections; else A_log and dt_bias are None.
    """

    case: Case
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    initial_state: Tensor | None
    cu_seqlens: Tensor | None
    do: Tensor | None
    dstate: Tensor | None
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    position: Tensor | None = None

    def arguments(self) -> dict[str, Any]:
        """Returns the operation's arguments other than the tensors that have a row per token."""
        tensors = {"A_log": self.A_log, "dt_bias": self.dt_bias} if self.case.gates else {}
        tensors |= {} if self.position is None else {"position": self.position}
        return self.case.options() | tensors | {"cu_seqlens": self.cu_seqlens}

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors that the case has, by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def digest(self) -> str:
        """Returns the SHA-256 over names, dtypes, shapes and bytes."""
        fingerprint = hashlib.sha256()
        for name, x in self.tensors().items():
            fingerprint.update(f"{name} {x.dtype} {tuple(x.shape)}".encode())
            fingerprint.update(x.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return fingerprint.hexdigest()

    def to(self, device: torch.device | str) -> Inputs:
        return replace(self, **{name: x.to(device) for name, x in self.tensors().items()})

    def double(self) -> Inputs:
        """Returns the same numbers in float64, as the judge reads them."""
        return replace(
            self,
            **{name: x.double() for name, x in self.tensors().items() if x.is_floating_point()},
        )

    def rows(self, index: list[int]) -> Inputs:
        """Returns some sequences of an unpacked batch."""
        tensors = {name: x[index] for name, x in self.tensors().items() if name not in PER_HEAD}
        return replace(self, case=replace(self.case, B=len(index)), **tensors)


def inputs(case: Case, dtype: torch.dtype) -> Inputs:
    """Makes the case's tensors on the CPU: q, k, v, beta and do in `dtype`,
    g and states in float32.
    """
    rng = np.random.Generator(np.random.PCG64(zlib.crc32(case.name.encode())))
    HV, tokens = case.value_heads, (case.B, case.T)
    q = _vectors(rng, case, equal=False)
    k = _vectors(rng, case, equal=True)
    v = case.values * _normal(rng, (*tokens, HV, case.V))
    g = _decay(rng, case.decay, (*tokens, *case.per_head))
    beta = rng.random((*tokens, HV)) * (2.0 if case.reflect else 1.0)
    if case.beta is not None:
        beta = np.full_like(beta, case.beta)
    states = (case.sequences, HV, case.K, case.V)
    # a state in use has seen many writes: entries of about the size of v / sqrt(K)
    state = _normal(rng, states) / np.sqrt(case.K)
    do, dstate = _normal(rng, v.shape), _normal(rng, states)
    bounds = None if case.lengths is None else np.cumsum((0, *case.lengths))
    if bounds is not None and (case.B != 1 or bounds[-1] != case.T):
        raise ValueError(
            f"case {case.name} packs {bounds[-1]} tokens into B={case.B}, T={case.T}; they must "
            "agree"
        )
    position = None
    if case.documents is not None:
        if case.B != 1 or sum(case.documents) != case.T:
            raise ValueError(
                f"case {case.name} has documents of {sum(case.documents)} tokens in B={case.B} "
                f"rows of T={case.T}; they must agree"
            )
        position = torch.cat([torch.arange(n) for n in case.documents])[None]
        position[:, : case.documents[0]] += 3 * case.state
    full = torch.float64 if dtype == torch.float64 else torch.float32
    A_log = dt_bias = None
    if case.gates is not None:
        bound = GATES[case.gates]
        shapes = ((*tokens, *case.per_head), (*tokens, HV))
        g, beta = (bound * (2.0 * rng.random(shape) - 1.0) for shape in shapes)
        A_log = _tensor(5.75 * rng.random(HV) - 3.0, full)
        dt_bias = _tensor(5.0 * rng.random(case.per_head) - 7.0, full)
    return Inputs(
        case=case,
        q=_tensor(q, dtype),
        k=_tensor(k, dtype),
        v=_tensor(v, dtype),
        g=_tensor(g, full),
        beta=_tensor(beta, dtype),
        initial_state=_tensor(state, full) if case.state else None,
        cu_seqlens=None if bounds is None else torch.from_numpy(bounds.astype(np.int64)),
        do=_tensor(do, dtype) if "o" in case.loss else None,
        dstate=_tensor(dstate, full) if "final_state" in case.loss else None,
        A_log=A_log,
        dt_bias=dt_bias,
        position=position,
    )


def _tensor(x: Array, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(x.astype(np.float32)).to(dtype)


def _normal(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Draws nearly normal numbers of variance 1, as sums of four uniforms.

    True normals would need a logarithm, which libraries round differently.
    """
    total = rng.random(shape)
    for _ in range(3):
        total += rng.random(shape)
    return (total - 2.0) * np.sqrt(3.0)


def _unit(x: Array) -> Array:
    # summed along the first axis, one row after the other: along the last, the order depends on the
    # machine's vectors
    squares = np.ascontiguousarray(np.moveaxis(x * x, -1, 0))
    return x / np.sqrt(np.add.reduce(squares, axis=0))[..., None]


def _vectors(rng: np.random.Generator, case: Case, *, equal: bool) -> Array:
    """Draws q, or with `equal` k, which in some cases is alike for all tokens."""
    x = _normal(rng, (case.B, case.T, case.H, case.K))
    if equal and case.keys != "random":
        alike = _unit(_normal(rng, (case.B, 1, case.H, case.K)))
        rho = CORRELATIONS[case.keys]
        x = np.sqrt(rho) * alike + np.sqrt(1.0 - rho) * _unit(x)
    if case.norm == "random":
        return x * (0.25 + 4.0 * rng.random((*x.shape[:-1], 1)))
    x = _unit(x)
    if case.norm == "zero":
        return x * (rng.random((*x.shape[:-1], 1)) >= 0.125)
    return x * {"unit": 1.0, "tiny": 1e-4, "huge": 1e4}[case.norm]


def _decay(rng: np.random.Generator, decay: Decay, shape: tuple[int, ...]) -> Array:
    x, y, z = (rng.random(shape) for _ in range(3))
    channel = np.arange(shape[-1])
    return {
        "plain": -(x * x * x),
        "weak": -(x * x * x) / 50.0,
        "none": np.zeros(shape),
        "strong": np.full(shape, -20.0),
        "mixed": np.where(z < 0.125, -20.0 * y, -x / 50.0),
        "heavy": -16.0 * x,
        "apart": np.where(channel == 0, -np.inf, np.where(channel == 1, 0.0, -(x * x * x))),
        "split": np.where(channel % 2 == 0, -30.0 * x, -x / 1000.0),
        "deep": np.where(z < 0.1, -200.0, -x / 20.0),
        "bounded": np.where(z[..., :1] < 0.125, -np.inf, -5.0 * x),
        "reset": np.where(z < 0.125, np.take(RESETS, (y * len(RESETS)).astype(int)), -x / 50.0),
    }[decay]
