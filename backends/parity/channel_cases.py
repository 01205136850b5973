"""The named cases of Kimi Delta Attention; `rule_cases` has the form of a case, and how inputs are made."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from delta_trn.backends.parity.rule_cases import SLOW, SMALL, Both, Case, Cpu, Small, decoded

_Case, _Both, _Small, _Cpu = (partial(x, op="kimi_delta_attention") for x in (Case, Both, Small, Cpu))

# fmt: off
CASES: tuple[Case, ...] = (
    #  name                    B   T     H   K    V
    _Small("kimi_one",         8,  1,    2,  32,  16,  "one token: no pair, no cut", state=True),
    _Small("kimi_fresh",       8,  1,    2,  16,  32,
           reason="one token from nothing: dg of every channel is exactly 0"),
    _Small("kimi_two",         8,  2,    2,  32,  32,  "one pair, whose cut has one row and one column"),
    _Case("kimi_ragged",       2,  63,   2,  32,  48,  "a chunk that ends inside of a cut", tags=SMALL),
    _Small("kimi_seam",        1,  129,  2,  32,  64,  state=True,
           reason="whole chunks and one token, from a state to a state"),
    _Small("kimi_none",        1,  130,  4,  32,  32,  decay="none",
           reason="g = 0 in every channel: errors of the decays' gradients add up"),
    _Small("kimi_strong",      1,  100,  4,  32,  32,  decay="strong", state=True,
           reason="g = -20 in every channel: a quotient of decays overflows"),
    _Small("kimi_apart",       1,  100,  4,  32,  32,  decay="apart", state=True,
           reason="one channel forgets at every token beside one that never does"),
    _Small("kimi_split",       1,  130,  4,  64,  32,  decay="split", state=True,
           reason="strong and weak decays in neighboring channels: each has a gradient of its own size"),
    _Small("kimi_deep",        1,  130,  4,  32,  32,  decay="deep", state=True,
           reason="g = -200 here and there: below what float32's exp holds, above what is raised to RESET"),
    _Small("kimi_reset",       1,  130,  4,  32,  32,  decay="reset", state=True,
           reason="some elements of g are -1e4, finfo.min or -inf: channels around them keep their digits"),
    _Both("kimi_mixed",        1,  200,  2,  64,  64,  decay="mixed", state=True,
          reason="decay sums of -100 beside decays of -0.01, channel by channel"),
    _Both("kimi_heavy",        1,  200,  2,  64,  128, decay="heavy",
          reason="strong decays of every size: dg cancels unless it is summed by the cuts"),
    _Small("kimi_collide",     1,  130,  8,  32,  32,  keys="equal", beta=1.0, decay="weak", state=True,
           reason="equal keys, beta = 1: writes erase each other, channels fade apart"),
    _Small("kimi_reflect",     1,  130,  8,  32,  32,  keys="equal", beta=2.0, decay="weak", state=True,
           reason="equal keys, beta = 2: the densest inverse, with decays per channel"),
    _Both("kimi_near",         1,  130,  4,  64,  64,  keys="near", beta=2.0, decay="none", state=True,
          reason="keys correlated .999, beta = 2, no decay: the worst conditioned inverse of all"),
    _Both("kimi_odd",          1,  70,   3,  60,  100, state=True,
          reason="no size is a multiple of a vector: channels of g are padded"),
    _Case("kimi_k96",          1,  130,  2,  96,  64,  "K is no power of two, chunks of 64"),
    _Both("kimi_k256",         1,  130,  1,  256, 128, "the largest K, many slices of channels", state=True),
    _Small("kimi_gva",         1,  130,  2,  32,  32,  HV=4, state=True,
           reason="two value heads share a key and have decays of their own"),
    _Both("kimi_gva_8",        2,  65,   1,  64,  32,  HV=8, norm="random",
          reason="eight value heads share one key: dq and dk are sums over their decays"),
    _Small("kimi_packed",      1,  135,  2,  32,  32,  lengths=(0, 5, 0, 65, 0, 0, 65, 0), state=True,
           reason="packed sequences, some empty: none reads its neighbor's channels"),
    _Small("kimi_packed_single", 1,  5,    2,  32,  16,  lengths=(1, 1, 1, 1, 1), state=True,
           reason="every packed sequence is one token"),
    _Both("kimi_packed_many",  1,  350,  2,  16,  24,  lengths=(3, 0, 1, 2, 1) * 50, norm="random",
          state=True, reason="250 packed sequences, fifty of them empty"),
    _Small("kimi_reset_packed", 1,  135,  2,  32,  64,  HV=4, decay="reset", norm="random",
           lengths=(1, 63, 0, 71), reflect=True, state=True,
           reason="resets of single channels of packed sequences, beside their seams"),
    _Case("kimi_final",        2,  100,  4,  32,  32,  state=True, loss=("final_state",), decay="weak",
          tags=SMALL, reason="the gradient comes from the final state alone"),
    _Small("kimi_norm",        2,  100,  2,  32,  32,  norm="random", state=True,
           reason="q and k normalized by the operation, then decayed"),
    _Small("kimi_norm_zero",   1,  70,   2,  32,  32,  norm="zero", values=100.0,
           reason="one key in eight is 0, beside values of 100"),
    _Small("kimi_norm_tiny",   1,  70,   2,  32,  32,  norm="tiny",
           reason="norms of 1e-4 beside the 1e-6 in the root, channels of them decayed"),
    _Small("kimi_gates",       1,  100,  4,  32,  32,  HV=8, gates="plain", norm="random", state=True,
           reason="the gate of softplus, a bias for each channel"),
    _Small("kimi_bound",       1,  100,  4,  32,  32,  HV=8, gates="plain", lower_bound=-5.0, norm="random",
           state=True, reason="the gate with a lower bound, a bias for each channel"),
    _Small("kimi_gates_wide",  2,  70,   4,  32,  32,  gates="wide", reflect=True, norm="random",
           reason="projections of -40 to 40: softplus keeps small values in every channel"),
    _Small("kimi_bound_wide",  2,  70,   4,  32,  32,  gates="wide", lower_bound=-30.0, reflect=True,
           norm="random", reason="projections of -40 to 40 times rates of 16"),
    _Small("kimi_scale",       1,  100,  4,  32,  32,  scale=32**0.5, norm="random", state=True,
           reason="scale K^+1/2, as our models use it"),
    _Small("kimi_values_tiny", 1,  70,   2,  32,  32,  values=1e-30,
           reason="values of 1e-30: only products of two of them may underflow"),
    _Both("kimi_long",         1,  2048, 1,  64,  64,  decay="weak", tags=SLOW,
          reason="32 hand-overs of a state whose rows fade apart"),
    _Cpu("kimi_train",         8,  512,  6,  32,  64,  "what a CPU user trains, with decays per channel"),
    _Cpu("kimi_2048",          1,  2048, 6,  32,  64,  "one sequence of 2048 tokens"),
)
# fmt: on

BY_NAME: Mapping[str, Case] = {case.name: case for case in CASES}
DECODED = (
    "kimi_one", "kimi_fresh", "kimi_none", "kimi_strong", "kimi_apart", "kimi_split", "kimi_deep",
    "kimi_reset", "kimi_collide", "kimi_reflect", "kimi_odd", "kimi_k96", "kimi_k256", "kimi_gva",
    "kimi_norm", "kimi_norm_zero", "kimi_gates", "kimi_bound", "kimi_scale", "kimi_values_tiny",
)  # fmt: skip
STEPS: Mapping[str, Case] = decoded(map(BY_NAME.__getitem__, DECODED))
