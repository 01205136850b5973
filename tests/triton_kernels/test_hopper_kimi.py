"""Hopper's gradients of Kimi Delta Attention, in Gluon: they pass parity where decays are hard."""

from dataclasses import replace

import pytest
import torch

from delta_trn.backends.dispatch import TRITON_DEVICES

if "cpu" not in TRITON_DEVICES:
    pytest.skip(
        "compiled kernels run here with --emulate alone, as in make emulate",
        allow_module_level=True,
    )

from delta_trn.backends.kimi_delta_attention import kimi_delta_attention
from delta_trn.backends.parity import rule
from delta_trn.backends.parity.rule_cases import BOTH, Case
from delta_trn.backends.parity.rule_cases import inputs as inputs_of
from delta_trn.triton_kernels.kimi_delta_attention import gradients_hopper
from delta_trn.triton_kernels.launch import adjust, config
from tests.support.emulator import driver
from tests.support.planted_bugs import Bug, planted


def bounded(T, H, HV, K, **how):
    how = {"gates": "plain", "norm": "random"} | how
    return Case("hopper", 1, T, H, K, 16, "", HV=HV, lower_bound=-5.0, loss=BOTH, reflect=True,
                op="kimi_delta_attention", **how)  # fmt: skip


# value heads of a key head: 1, where the kernel takes the gradients through the norms, to 4; last
# chunks end in each of the four blocks of 16 tokens
CASES = {
    "two_slices_and_state": bounded(66, 2, 2, 64, state=True),
    "four_slices": bounded(90, 1, 1, 128),
    "three_slices_of_two_heads": bounded(47, 1, 2, 96, state=True),
    "packed_groups_of_three": bounded(70, 1, 3, 32, lengths=(0, 3, 0, 64, 1, 2), state=True),
    "one_token_of_four_heads": bounded(1, 1, 4, 32, state=True),
    "half_a_slice": bounded(64, 1, 1, 16),
    "gates_at_both_ends": bounded(64, 1, 1, 64, gates="wide", state=True),
    "gates_at_both_ends_and_zero_keys": bounded(130, 1, 1, 64, gates="wide", norm="zero"),
    # several documents in 16 tokens, one that begins in the second chunk, and one at its last token
    "documents": bounded(70, 2, 2, 64, documents=(3, 1, 18, 47, 1), state=True),
    "documents_of_groups": bounded(70, 1, 2, 96, documents=(16, 31, 2, 21)),
    "given_with_resets": replace(
        bounded(70, 2, 2, 64, state=True), gates=None, lower_bound=None, decay="bounded"
    ),
    "near_keys": bounded(64, 1, 1, 32, keys="near", beta=2.0),
    "hardly_a_decay": replace(bounded(64, 1, 1, 32, gates="wide"), lower_bound=-1e-3),
}


def agrees(case):
    """Returns whether all of a case agrees with the judge, as parity asks, and the verdicts."""
    count, takes = [], gradients_hopper.takes
    with pytest.MonkeyPatch.context() as patch:
        counted = lambda *given: count.append(takes(*given)) or count[-1]  # noqa: E731
        patch.setattr(gradients_hopper, "takes", counted)
        verdicts = rule.verdicts(case, torch.bfloat16, "triton", "cpu")
    assert count and all(count)
    return all(verdict.passed for verdict in verdicts), verdicts


@pytest.mark.parametrize("name", CASES)
def test_gradients_agree_with_the_judge(name):
    with driver.options(check=1) as reports:
        passed, verdicts = agrees(CASES[name])
    assert not reports
    assert passed, [str(verdict) for verdict in verdicts if not verdict.passed]


@pytest.mark.parametrize(("heads", "columns"), [(66, 64), (67, 128)])
def test_scans_of_any_number_of_heads_agree_with_the_judge(heads, columns):
    """They have tiles of their own, which one head would not take."""
    case = replace(bounded(130, 1, 1, 128, state=True), V=128)
    own = config(128, 128, itemsize=2, heads=heads, rule="kimi_")
    assert (own.scan.columns, own.reverse.columns) == (columns, columns)
    how = adjust(lambda row: replace(row, scan=own.scan, reverse=own.reverse))
    with how, driver.options(check=1) as reports:
        passed, verdicts = agrees(case)
    assert not reports
    assert passed, [str(verdict) for verdict in verdicts if not verdict.passed]


def test_gradients_are_the_same_bits_in_every_order_of_warps_and_copies():
    x = inputs_of(CASES["two_slices_and_state"], torch.bfloat16)
    results = []
    for order in range(3):
        with driver.options(late_copies=order % 2, late_products=order // 2, order=order):
            results.append(rule.outcome(x, "triton"))
    for name, y in results[0].items():
        assert all(torch.equal(y, other[name]) for other in results[1:]), name


def test_rows_of_one_tensor_give_the_bits_of_tensors_apart(monkeypatch):
    taken, takes = [], gradients_hopper.takes
    counted = lambda *given: taken.append(takes(*given)) or taken[-1]  # noqa: E731
    monkeypatch.setattr(gradients_hopper, "takes", counted)
    H, K, V, T = 8, 32, 16, 66
    make = torch.Generator().manual_seed(1)
    whole = torch.randn(1, T, 2 * H * K + H * V, generator=make).bfloat16()
    gates = torch.randn(1, T, H * K + H, generator=make).bfloat16()
    A_log = torch.rand(H, generator=make)

    def gradients(lay):
        leaves = [x.clone().requires_grad_() for x in (whole, gates)]
        q, k, v = leaves[0].split([H * K, H * K, H * V], -1)
        g, beta = leaves[1].split([H * K, H], -1)
        q, k, v, g = (lay(x.unflatten(2, (H, -1))) for x in (q, k, v, g))
        o, _ = kimi_delta_attention(
            q,
            k,
            v,
            g,
            lay(beta),
            A_log=A_log,
            lower_bound=-5.0,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            use_qk_l2norm_in_kernel=True,
            backend="triton",
        )
        return torch.autograd.grad(o.float().square().sum(), leaves)

    for x, y in zip(gradients(lambda x: x), gradients(torch.Tensor.contiguous), strict=True):
        assert torch.equal(x, y)
    assert taken and all(taken)


def test_a_given_decay_that_breaks_its_promise_is_the_same_one_in_all_kernels():
    """Below the bound it counts as the bound; so does -inf where the head's first channel has none."""
    x = inputs_of(CASES["given_with_resets"], torch.bfloat16)
    # so small that what was before such a token is still seen behind it
    kept = torch.full_like(x.g, -0.01)
    broken = kept.clone()
    for token, channel, g in ((2, 3, -9.0), (5, 0, -300.0), (8, 7, -torch.inf)):
        kept[:, token, :, channel], broken[:, token, :, channel] = -5.0, g
    expected, found = (rule.outcome(replace(x, g=g), "triton") for g in (kept, broken))
    for name, y in expected.items():
        assert torch.equal(y, found[name]), name


LAST = "triton_kernels.kimi_delta_attention.gradients_hopper:"
MISTAKES = (
    (
        "a pair of neighbors is left out",
        "_differentiate_blocks",
        "static_range(15 - n)",
        "static_range(14 - n)",
    ),
    (
        "a token decays its own write",
        "_sum_across",
        "b_written += _take(writes, t)",
        "b_written += _take(writes, (t + 1) % 16)",
    ),
    ("the middle of the chunk cuts nothing", "gradients_kernel", "apart >= 2", "apart >= 4"),
    (
        "the first block does not decay through the second",
        "gradients_kernel",
        "gl.where(block == 0, s_sums",
        "gl.where(block == 4, s_sums",
    ),
    (
        "keys right of a cut without beta",
        "gradients_kernel",
        "b_strength = gl.where(right[:, None, :], b_beta, 1.0)",
        "b_strength = 1.0 + 0.0 * b_right",
    ),
    (
        "dg without the state carried through",
        "gradients_kernel",
        "* exp2(b_all)",
        "* 0.0 * exp2(b_all)",
    ),
    (
        "copies are not waited for",
        "gradients_kernel",
        "async_copy.wait_group(1)",
        "async_copy.wait_group(2)",
    ),
    ("dq keeps its part along q", "_finish", "b_dx - b_x * b_along", "b_dx - 0.0 * b_x * b_along"),
)


@pytest.mark.parametrize(
    ("name", "place", "line", "mistake"), MISTAKES, ids=[bug[0] for bug in MISTAKES]
)
def test_a_planted_bug_is_seen(name, place, line, mistake):
    with planted(Bug(name, LAST + place, line, mistake, "")), driver.options(check=1) as reports:
        passed, _ = agrees(CASES["two_slices_and_state"])
    assert reports or not passed


RESETS = (
    ("pairs of two documents see each other", "gl.where(together, apart, 0)", "apart", "documents"),
    ("and those of a block", "b_row == b_column", "b_row < 64", "documents"),
    (
        "the state before passes into a document",
        "gl.where(b_first < 0, 1.0, 0.0)",
        "gl.where(b_first < 64, 1.0, 0.0)",
        "documents",
    ),
    (
        "a document before the last one writes the state",
        "gl.where(b_first == b_end, 1.0, 0.0)",
        "gl.where(b_first < 64, 1.0, 0.0)",
        "documents",
    ),
    (
        "the state is carried through",
        "gl.where(b_forgot[None, :] < 0, b_rest, 0.0)",
        "b_rest",
        "documents",
    ),
    ("-inf is no reset", '== -float("inf")', "> 99.0", "given_with_resets"),
)


@pytest.mark.parametrize(
    ("name", "line", "mistake", "case"), RESETS, ids=[bug[0] for bug in RESETS]
)
def test_a_planted_bug_of_resets_is_seen(name, line, mistake, case):
    with planted(Bug(name, LAST + "gradients_kernel", line, mistake, "")):
        passed, _ = agrees(CASES[case])
    assert not passed


def test_the_kernel_takes_the_gradients_through_norms_where_heads_are_no_groups():
    q = torch.ones(1, 1, 2, 96, dtype=torch.bfloat16)
    row = replace(config(96, 16, itemsize=2, rule="kimi_"), dot="tf32")
    grouped = q.repeat(1, 1, 2, 1)
    assert gradients_hopper.adds_norms(q, q, q, -5.0, row)
    assert not gradients_hopper.adds_norms(q, q, grouped, -5.0, row)
    assert not gradients_hopper.adds_norms(q, q, q, -5.1, row)
