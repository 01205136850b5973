"""Mistakes of one line in the NKI kernels of Kimi Delta Attention turn a small case of its grid red."""

import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
import torch

from delta_trn.backends.parity import rule
from delta_trn.backends.parity.channel_cases import BY_NAME, STEPS
from tests.nki_kernels.test_kimi_delta_attention import NAME, errors_of_a_fading_state
from tests.support.planted_bugs import Bug, planted

GROUPS = replace(BY_NAME["kimi_gva"], norm="random", T=150)
BUGS = [Bug(**row) for row in json.loads(Path(__file__).with_name("planted_channels.json").read_text())]
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
