"""The named cases of Kimi Delta Attention; `rule_cases` has the form of a case,
and how inputs are made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from delta_trn.backends.parity import rule_cases
from delta_trn.backends.parity.rule_cases import (
    SLOW,
    SMALL,
    Both,
    Case,
    Cpu,
    Headline,
    Hopper,
    Small,
    decoded,
)

OP = "kimi_delta_attention"
_Case, _Both, _Small, _Cpu, _Hopper = (partial(x, op=OP) for x in (Case, Both, Small, Cpu, Hopper))
_Headline = partial(Headline, op=OP, lower_bound=-5.0)


def _as(same: str, name: str, reason: str) -> Case:
    """Returns a case of the sizes and inputs of one of the gated delta rule's."""
    return replace(rule_cases.BY_NAME[same], name=name, reason=reason, op=OP)


# fmt: off
CASES: tuple[Case, ...] = (
    #  name                    B   T     H   K    V
    _as("one", "kimi_one", "one token: no pair, no cut"),
    _as("one_fresh", "kimi_fresh", "one token from nothing: dg of every channel is exactly 0"),
    _as("two", "kimi_two", "one pair, whose cut has one row and one column"),
    _Case("kimi_ragged",       2,  63,   2,  32,  48,  "a chunk that ends inside of a cut", tags=SMALL),
    _Small("kimi_seam",        1,  129,  2,  32,  64,  state=True,
           reason="whole chunks and one token, from a state to a state"),
    _as("no_decay", "kimi_none", "g = 0 in every channel: errors of the decays' gradients add up"),
    _as("forget", "kimi_strong", "g = -20 in every channel: a quotient of decays overflows"),
    _Small("kimi_apart",       1,  100,  4,  32,  32,  decay="apart", state=True,
           reason="one channel forgets at every token beside one that never does"),
    _Small("kimi_split",       1,  130,  4,  64,  32,  decay="split", state=True,
           reason="strong and weak decays in neighboring channels: each has a gradient of its own size"),
    _Small("kimi_deep",        1,  130,  4,  32,  32,  decay="deep", state=True,
           reason="g = -200 here and there: below what float32's exp holds, above what is raised to RESET"),
    _as("reset", "kimi_reset",
        "some elements of g are -1e4, finfo.min or -inf: channels around them keep their digits"),
    _Both("kimi_mixed",        1,  200,  2,  64,  64,  decay="mixed", state=True,
          reason="decay sums of -100 beside decays of -0.01, channel by channel"),
    _Both("kimi_heavy",        1,  200,  2,  64,  128, decay="heavy",
          reason="strong decays of every size: dg cancels unless it is summed by the cuts"),
    _as("collide", "kimi_collide", "equal keys, beta = 1: writes erase each other, channels fade apart"),
    _as("reflect", "kimi_reflect", "equal keys, beta = 2: the densest inverse, with decays per channel"),
    _Both("kimi_near",         1,  130,  4,  64,  64,  keys="near", beta=2.0, decay="none", state=True,
          reason="keys correlated .999, beta = 2, no decay: the worst conditioned inverse of all"),
    _as("odd", "kimi_odd", "no size is a multiple of a vector: channels of g are padded"),
    _Case("kimi_k96",          1,  130,  2,  96,  64,  "K is no power of two, chunks of 64"),
    _Both("kimi_k256",         1,  130,  1,  256, 128, "the largest K, many slices of channels", state=True),
    _as("gva_2", "kimi_gva", "two value heads share a key and have decays of their own"),
    _as("gva_8", "kimi_gva_8", "eight value heads share one key: dq and dk are sums over their decays"),
    _as("packed_empty", "kimi_packed", "packed sequences, some empty: none reads its neighbor's channels"),
    _as("packed_single", "kimi_packed_single", "every packed sequence is one token"),
    _Both("kimi_packed_many",  1,  350,  2,  16,  24,  lengths=(3, 0, 1, 2, 1) * 50, norm="random",
          state=True, reason="250 packed sequences, fifty of them empty"),
    _as("reset_packed", "kimi_reset_packed",
        "resets of single channels of packed sequences, beside their seams"),
    _as("final_only", "kimi_final", "the gradient comes from the final state alone"),
    _as("norm", "kimi_norm", "q and k normalized by the operation, then decayed"),
    _as("norm_zero_large", "kimi_norm_zero", "one key in eight is 0, beside values of 100"),
    _as("norm_tiny", "kimi_norm_tiny", "norms of 1e-4 beside the 1e-6 in the root, channels of them decayed"),
    _as("gates", "kimi_gates", "the gate of softplus, a bias for each channel"),
    _Small("kimi_bound",       1,  100,  4,  32,  32,  HV=8, gates="plain", lower_bound=-5.0, norm="random",
           state=True, reason="the gate with a lower bound, a bias for each channel"),
    _Small("kimi_gates_wide",  2,  70,   4,  32,  32,  gates="wide", reflect=True, norm="random",
           reason="projections of -40 to 40: softplus keeps small values in every channel"),
    _Small("kimi_bound_wide",  2,  70,   4,  32,  32,  gates="wide", lower_bound=-30.0, reflect=True,
           norm="random", reason="projections of -40 to 40 times rates of 16"),
    _Small("kimi_safe",        1,  150,  2,  96,  32,  decay="bounded", norm="random", state=True,
           reason="a safe gate's g, given: resets of heads, several in 16 tokens, and no other g below -5"),
    _Small("kimi_documents",   1,  150,  1,  32,  32,  HV=2, gates="plain", norm="random", state=True,
           documents=(64, 16, 1, 46, 1, 22),
           reason="documents of a row, told by places: the first one continues, softplus forgets no other"),
    _Small("kimi_documents_bound", 1, 150, 1, 32, 48,  HV=2, gates="plain", lower_bound=-5.0, norm="random",
           documents=(64, 16, 1, 46, 1, 22),
           reason="the same with a bounded gate, which alone forgets nothing at once"),
    _as("scale_up", "kimi_scale", "scale K^+1/2, as our models use it"),
    _as("values_tiny", "kimi_values_tiny", "values of 1e-30: only products of two of them may underflow"),
    _as("group_3", "kimi_group_3", "three value heads a key head, each with decays of its own"),
    _as("group_3_long", "kimi_group_3_long", "the same over a seam: dq and dk are sums of three parts"),
    _as("group_5", "kimi_group_5", "five value heads a key head, V = 1"),
    _as("group_5_long", "kimi_group_5_long", "the same over a seam, in three parts that differ"),
    _as("group_7", "kimi_group_7", "seven value heads a key head"),
    _as("group_7_long", "kimi_group_7_long", "the same over a seam, in four parts, V = 1"),
    _as("group_3_wide", "kimi_group_3_wide", "three wide heads a key head, over a seam"),
    _Both("kimi_long",         1,  2048, 1,  64,  64,  decay="weak", tags=SLOW,
          reason="32 hand-overs of a state whose rows fade apart"),
    _as("cpu_train", "kimi_train", "what a CPU user trains, with decays per channel"),
    _Hopper("kimi_hopper",     1,  130,  2,  gates="plain", lower_bound=-5.0, state=True,
            reason="heads of 128:128 with a bound, which a kernel of their own prepares on Hopper"),
    _Hopper("kimi_hopper_2",   2,  70,   1,  HV=2, gates="wide", lower_bound=-5.0, reflect=True,
            reason="the same, two value heads a key head, projections of -40 to 40"),
    _Hopper("kimi_hopper_3",   1,  168,  1,  HV=3, gates="plain", lower_bound=-5.0,
            lengths=(0, 3, 0, 100, 64, 1), reason="the same, packed, some sequences empty"),
    _Headline("kimi_8192",     1,  8192, 32, 128, 128, "Kimi Linear's heads, with a bound"),
    _Headline("kimi_four",     4,  8192, 32, 128, 128, "the same, four sequences"),
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
