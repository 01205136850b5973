"""Mistakes of one line in the NKI kernels of Kimi Delta Attention turn a small case of its grid red."""

from dataclasses import replace
from functools import lru_cache

import pytest
import torch

from delta_trn.backends.parity import rule
from delta_trn.backends.parity.channel_cases import BY_NAME, STEPS
from tests.nki_kernels.test_kimi_delta_attention import NAME, errors_of_a_fading_state
from tests.support.planted_bugs import Bug, planted

CHUNK = "nki_kernels.kimi_delta_attention.chunk"
GRADIENTS = f"{CHUNK}_gradients"
FORWARD, STEP = "nki_kernels.gated_delta_rule_fwd", "nki_kernels.gated_delta_rule_step"
GROUPS = replace(BY_NAME["kimi_gva"], norm="random", T=150)
BUGS = (
    Bug("a right half's own decay is left out", f"{CHUNK}:build_levels",
        'table["strict_lower"], table["upper"]', 'table["strict_lower"], table["strict_upper"]', "groups"),
    Bug("blocks of 16 are cut one token late", f"{CHUNK}:copy_rectangles",
        "chunk.P_t[start:m, :, m:end]", "chunk.P_t[start:m, :, m - 1 : end - 1]", "groups"),
    Bug("small blocks are masked by the level before", f"{CHUNK}:copy_masked",
        "offset=level * half", "offset=max(level - 1, 0) * half", "groups"),
    Bug("a token reads its own write decayed", f"{CHUNK}:transpose_keys",
        "chunk.keys[:, 0, :, :], chunk.keys[:, 1, :, :]", "chunk.keys[:, 0, :, :], chunk.keys[:, 0, :, :]",
        "groups"),
    Bug("g is rounded to 2^-8", f"{CHUNK}:split_on_chip",
        "data1=g_sb, data2=near_sb", "data1=near_sb, data2=near_sb", "groups"),
    Bug("g is summed in one part", f"{CHUNK}:split_on_chip",
        "op0=nl.add, operand0=ROUNDING", "op0=nl.multiply, operand0=0.0", "fading"),
    Bug("value heads take the keys in turns", f"{CHUNK}:scale_by_channel",
        "[free, heads], [0, lanes // heads]", "[0, heads], [free, lanes // heads]", "groups"),
    Bug("the carried state decays by one token", f"{CHUNK}:sum_channel_decays",
        "chunk.gamma_t[:, :, rows - 1]", "chunk.gamma_t[:, :, 0]", "groups"),
    Bug("keys are not normalized", f"{CHUNK}:normalize_keys",
        "chunk.qk[:, side, h, :], factor", "chunk.qk[:, side, h, :]", "groups"),
    Bug("a ragged chunk has fewer rows than its levels", f"{FORWARD}:load_forward",
        'call["constants"]["rows"] if call["channels"] else pad_to_rows(tokens)', "pad_to_rows(tokens)",
        "groups"),
    Bug("-dV without beta", f"{GRADIENTS}:differentiate_writes",
        "chunk.minus_strength, chunk.share", "chunk.share, chunk.share", "groups"),
    Bug("dg counts a token's own write", f"{GRADIENTS}:begin_decay_gradient",
        'table["strict_upper"]', 'table["upper"]', "groups"),
    Bug("the decay of dg's carried part is left out", f"{GRADIENTS}:begin_decay_gradient",
        "multiply(carried_sb, carried_sb, chunk.carry)", "pass", "groups"),
    Bug("dg of a level goes where its sums came from", f"{GRADIENTS}:differentiate_level",
        'levels["sums_t"][:, level, :]', 'levels["sums"][:, level, :]', "groups"),
    Bug("x and y are not decayed", f"{GRADIENTS}:differentiate_level",
        "xy_sb, xy_sb, f_sb.ap", "xy_sb, xy_sb, chunk.gamma.ap", "groups"),
    Bug("a level's erasures are one-sided", f"{GRADIENTS}:mask_pair_gradients",
        "data1=dkk_sb, data2=dkk_t_sb", "data1=dkk_sb, data2=dkk_sb", "groups"),
    Bug("large blocks keep the pairs of a transposed one", f"{GRADIENTS}:copy_large_blocks",
        "for i in (1, 2):", "for i in (2,):", "groups"),
    Bug("small blocks of a level are masked as the first's", f"{GRADIENTS}:mask_small_blocks",
        "[rows, count], [0, lanes]", "[0, count], [0, lanes]", "groups"),
    Bug("dq and dk lack what a token wrote itself", f"{GRADIENTS}:mask_pair_gradients",
        'repeat_over_lanes(table, "identity", lanes)', 'repeat_over_lanes(table, "strict_upper", lanes)',
        "groups"),
    Bug("dk of a group is one head's", f"{GRADIENTS}:differentiate_keys",
        "for i in range(1, group):", "for i in range(1, 1):", "groups"),
    Bug("the norms' gradients are left out", f"{GRADIENTS}:differentiate_keys",
        "along_sb[:, h : h + 1], first)", "0.0, first)", "groups"),
    Bug("a decoded line decays as the first of its partition", f"{STEP}:update_states",
        "own = i * m + j if", "own = i * m if", "decoding"),
    Bug("a decoded token reads the state before it decays", f"{STEP}:run_groups",
        'multiply_elements(vectors["q"], vectors["decay"])', 'vectors["q"]', "decoding"),
    Bug("decoded heads of a later tile have the first one's decays", f"{STEP}:load_row_decays",
        "src=lines[start:stop, :]", "src=lines[0 : stop - start, :]", "decoding"),
)  # fmt: skip
CHECKS = {
    "groups": lambda: judged(rule.verdicts(GROUPS, torch.float32, NAME)),
    "fading": lambda: errors_of_a_fading_state() <= 1.0,
    "decoding": lambda: judged(
        rule.step_verdicts(replace(STEPS["decode_kimi_gva"], T=2, B=20, K=64), torch.float32, NAME)
    ),
}


def judged(verdicts):
    return all(verdict.passed for verdict in verdicts)


@lru_cache
def green(check):
    return CHECKS[check]()


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_turns_its_check_red(bug):
    assert green(bug.check), f"{bug.check} is red without a bug"
    with planted(bug):
        try:
            survived = CHECKS[bug.check]()
        except Exception:
            survived = False
    assert not survived, "the bug survives"
