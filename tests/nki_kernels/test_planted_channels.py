"""Mistakes of one line in the NKI kernels of Kimi Delta Attention turn a small case
of its grid red.
"""

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
    Bug(
        "a right half's own decay is left out",
        f"{CHUNK}:build_levels",
        'table["strict_lower"], table["upper"]',
        'table["strict_lower"], table["strict_upper"]',
        "groups",
    ),
    Bug(
        "a level keeps the pairs inside of its halves",
        f"{CHUNK}:build_levels",
        "pair_sb, own_sb)",
        "pair_sb, table['identity'])",
        "groups",
    ),
    Bug(
        "blocks of 16 are cut one token late",
        f"{CHUNK}:multiply_levels",
        "views_ps[m - s : m, :, :, m : m + s]",
        "views_ps[m - s : m, :, :, m - 1 : m + s - 1]",
        "groups",
    ),
    Bug(
        "small blocks are masked by the level before",
        f"{CHUNK}:multiply_levels",
        "offset=level * rows + s",
        "offset=max(level - 1, 0) * rows + s",
        "groups",
    ),
    Bug(
        "a token reads its own write decayed",
        f"{CHUNK}:transpose_keys",
        "chunk.keys[:, 0, :, :], chunk.keys[:, 1, :, :]",
        "chunk.keys[:, 0, :, :], chunk.keys[:, 0, :, :]",
        "groups",
    ),
    Bug(
        "g is rounded to 2^-8",
        f"{CHUNK}:sum_channel_decays",
        "rest_sb, chunk.g, near_sb",
        "rest_sb, near_sb, near_sb",
        "groups",
    ),
    Bug(
        "g is summed in one part",
        f"{CHUNK}:sum_channel_decays",
        "op0=nl.add, operand0=ROUNDING",
        "op0=nl.multiply, operand0=0.0",
        "fading",
    ),
    Bug(
        "the carried state decays by one token",
        f"{CHUNK}:multiply_channel_decays",
        "[:, rows - 1 : rows]",
        "[:, 0:1]",
        "groups",
    ),
    Bug(
        "keys are not normalized",
        f"{CHUNK}:spread_keys",
        "chunk.qk[:, side, h, :], factor",
        "chunk.qk[:, side, h, :]",
        "groups",
    ),
    Bug(
        "a ragged chunk has fewer rows than its levels",
        f"{FORWARD}:take_table",
        'call["constants"]["rows"] if call["channels"] else pad_to_rows(tokens)',
        "pad_to_rows(tokens)",
        "groups",
    ),
    Bug(
        "-dV without beta",
        f"{GRADIENTS}:differentiate_writes",
        "chunk.minus_strength, chunk.share",
        "chunk.share, chunk.share",
        "groups",
    ),
    Bug(
        "dg counts a token's own write",
        f"{GRADIENTS}:begin_gradients",
        'table["strict_upper"]',
        'table["upper"]',
        "groups",
    ),
    Bug(
        "the decay of dg's carried part is left out",
        f"{GRADIENTS}:begin_gradients",
        "multiply(carried_sb, carried_sb, chunk.carry)",
        "pass",
        "groups",
    ),
    Bug(
        "dg of a level goes where its sums came from",
        f"{GRADIENTS}:differentiate_levels",
        'levels["sums_t"]',
        'levels["sums"]',
        "groups",
    ),
    Bug(
        "what a left half reads counts for q",
        f"{GRADIENTS}:compute_factors",
        "out_sb[:, 1, :, :], right)",
        "out_sb[:, 1, :, :])",
        "groups",
    ),
    Bug(
        "x and y are not decayed",
        f"{GRADIENTS}:weigh_keys",
        """multiply(made["x"][:, 1, lane, :], tiles[lane], made["factors"][:, 1, lane, :])""",
        """copy_scaled(made["x"][:, 1, lane, :], tiles[lane])""",
        "groups",
    ),
    Bug(
        "what q reads of a level is decayed as what k reads",
        f"{GRADIENTS}:weigh_queries",
        """x_ps, made["factors"][:, 0, :, :]""",
        """x_ps, made["factors"][:, 1, :, :]""",
        "groups",
    ),
    Bug(
        "all lanes and levels have the first one's factors",
        f"{CHUNK}:multiply_factors",
        "f_ps = ready[i]",
        "f_ps = ready[0]",
        "groups",
    ),
    Bug(
        "erasures are those of the level's reads",
        f"{GRADIENTS}:multiply_level",
        "H_sb[:, level, lane, :]",
        "G_sb[:, level, lane, :]",
        "groups",
    ),
    Bug(
        "pairs count for the token that reads alone",
        f"{GRADIENTS}:mask_pair_gradients",
        "add_selected(both_ps, identity, half_sb[:, lane, :], True)",
        "pass",
        "groups",
    ),
    Bug(
        "gradients of later pairs are kept",
        f"{GRADIENTS}:round_pair_gradients",
        "keep_triangle(half_sb, 1, 1)",
        "pass",
        "groups",
    ),
    Bug(
        "dq and dk lack what a token wrote itself",
        f"{GRADIENTS}:begin_gradients",
        "own_sb.reshape(by_side)[:, side, :], False)",
        "read_sb.reshape(by_side)[:, side, :], False)",
        "groups",
    ),
    Bug(
        "dk of a group is one head's",
        f"{GRADIENTS}:store_key_gradients",
        "[1, K], [K, group]",
        "[1, K], [0, group]",
        "groups",
    ),
    Bug(
        "the norms' gradients are added",
        f"{GRADIENTS}:sum_along_keys",
        "along_sb, -1.0)",
        "along_sb, 1.0)",
        "groups",
    ),
    Bug(
        "a decoded line decays as the first of its partition",
        f"{STEP}:decay_lines",
        "decay_sb[:, j : j + 1]",
        "decay_sb[:, 0:1]",
        "decoding",
    ),
    Bug(
        "a decoded token decays twice",
        f"{STEP}:load_vectors",
        "nisa.memset(dst=decay_sb, value=1.0)",
        "nisa.activation(dst=decay_sb, op=nl.exp, data=load(g[first:last, :1], nl.float32))",
        "decoding",
    ),
    Bug(
        "decoded heads of a later tile have the first one's decays",
        f"{STEP}:decay_lines",
        "first += S_sb.shape[0]",
        "first += 0",
        "decoding",
    ),
)
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
