"""Hopper's kernels in Gluon: T, P and rows are as exact as the plain kernel's;
gradients pass parity.
"""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch.nn.functional import logsigmoid, normalize, pad, softplus

from delta_trn.backends.dispatch import TRITON_DEVICES

if "cpu" not in TRITON_DEVICES:
    pytest.skip(
        "compiled kernels run here with --emulate alone, as in make emulate",
        allow_module_level=True,
    )

from delta_trn.backends.gated_delta_rule import triton_adapter
from delta_trn.backends.gated_delta_rule.triton_time_adapter import chunk_tables
from delta_trn.backends.parity import rule
from delta_trn.backends.parity.rule_cases import BOTH, Case
from delta_trn.backends.parity.rule_cases import inputs as inputs_of
from delta_trn.triton_kernels.gated_delta_rule_fwd import prepare
from delta_trn.triton_kernels.hopper import gradients as hopper_gradients
from delta_trn.triton_kernels.launch import config
from tests.support.emulator import driver
from tests.support.planted_bugs import Bug, planted

BF16, FP16 = torch.bfloat16, torch.float16
# tokens, heads, value heads, K, dtype; what is special
CASES = {
    "ragged": (130, 1, 2, 128, BF16, ""),
    "one_token": (1, 2, 4, 64, BF16, ""),
    "alike_keys": (128, 1, 1, 128, BF16, "alike"),
    "resets": (64, 1, 3, 96, BF16, "reset"),
    "zero_keys": (70, 1, 4, 256, BF16, "zero"),
    "given": (100, 2, 4, 32, FP16, "given"),
    "packed": (150, 2, 4, 64, BF16, "packed"),
    "wide_alike": (65, 1, 2, 192, BF16, "alike given"),
}


def inputs(T, H, HV, K, dtype, special):
    """Returns q, k, g, beta, A_log, dt_bias, cu_seqlens,
    whether q and k are normalized, and beta_max.
    """
    random = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, T, H, K, generator=random).to(dtype)
    g, beta = torch.randn(2, 1, T, HV, generator=random)
    if "alike" in special:
        k = k[:, :1] + 0.02 * k
    if "zero" in special:
        k[:, ::3] = 0
    if "given" in special or "reset" in special:
        g, beta, A_log, dt_bias, most = logsigmoid(g), beta.sigmoid() * 2, None, None, 0.0
    else:
        g, beta, A_log, dt_bias, most = (
            g.to(dtype),
            beta.to(dtype),
            torch.linspace(-1, 2, HV),
            beta[0, 0],
            2.0,
        )
    if "reset" in special:
        g[:, 5::7], g[:, 3::11], g[:, 1::5] = -torch.inf, -20.0, 0.0
    if "given" in special:
        q, k = normalize(q.float(), dim=-1).to(dtype), normalize(k.float(), dim=-1).to(dtype)
    cuts = torch.tensor([0, 3, 3, 80, T]) if "packed" in special else None
    return q, k, g, beta, A_log, dt_bias, cuts, "given" not in special, most


def exact(q, k, g, beta, A_log, dt_bias, start, l2norm, most):
    """Returns T and P [HV, 64, 64] in float64 of the 64 tokens or fewer from `start` on."""
    HV, here = g.shape[2], slice(*start)
    length = start[1] - start[0]
    q, k = (pad(x[0, here].double().movedim(1, 0), (0, 0, 0, 64 - length)) for x in (q, k))
    g, beta = (pad(x[0, here].double().mT, (0, 64 - length)) for x in (g, beta))
    if l2norm:
        q, k = (x * (x.pow(2).sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    q, k = (x.repeat_interleave(HV // x.shape[0], 0) for x in (q, k))
    if A_log is not None:
        g = -A_log.double().exp()[:, None] * softplus(g + dt_bias.double()[:, None])
        beta = most * beta.sigmoid()
    g, beta = (x * (torch.arange(64) < length) for x in (g.clamp(min=-128), beta))
    b = g.cumsum(-1)
    D = (
        (b[:, :, None] - b[:, None])
        .masked_fill(~torch.ones(64, 64).tril().bool(), -torch.inf)
        .exp()
    )
    L = (beta[..., None] * (k @ k.mT) * D).tril(-1)
    return torch.linalg.inv(torch.eye(64).double() + L), q.shape[-1] ** -0.5 * (q @ k.mT) * D


def distances(case):
    """Returns how far T and P are from the judge, and the rows,
    of the plain kernel and of Gluon's.
    """
    q, k, g, beta, A_log, dt_bias, cuts, l2norm, most = given = inputs(*CASES[case])
    K, HV = q.shape[3], g.shape[2]
    row = config(K, K, itemsize=2)
    chunks = chunk_tables(q, cuts, 64)
    bounds = [0, q.shape[1]] if cuts is None else cuts.tolist()
    starts = [
        (t, min(t + 64, end)) for first, end in pairwise(bounds) for t in range(first, end, 64)
    ]
    found = []
    for gluon in (False, True):
        T, P = torch.full((2, chunks.count, HV, 64, 64), torch.nan, dtype=q.dtype)
        rows = torch.full((chunks.count, HV, 9, 64), torch.nan)
        assert row.prepare.gluon
        chosen = replace(row, prepare=replace(row.prepare, gluon=gluon))
        prepare(q, k, g, beta, A_log, dt_bias, q_scaled=None, k_scaled=None, T=T, P=P, rows=rows,
                scale=K**-0.5, l2norm=l2norm, beta_max=most, chunks=chunks, config=chosen)  # fmt: skip
        errors = []
        for i, start in enumerate(starts):
            judge = exact(*given[:6], start, l2norm, most)
            errors.append(
                [(x[i].double() - y).norm() / y.norm() for x, y in zip((T, P), judge, strict=True)]
            )
        found.append((torch.tensor(errors), rows[: len(starts)]))
    return found


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("late", [0, 1], ids=["early", "late"])
def test_gluon_is_as_exact_as_the_plain_kernel(case, late):
    with driver.options(check=1, late_copies=late, late_products=late, order=2 * late) as reports:
        (control, rows), (errors, own) = distances(case)
    assert not reports
    assert (errors <= 1.02 * control).all(), (errors, control)
    assert (own - rows).abs().amax((1, 3)).le(2e-6 * rows.abs().amax((1, 3)).clamp(min=1e-30)).all()


PLACE, TILES = "triton_kernels.hopper.prepare:", "triton_kernels.hopper.tiles:"
BUGS = (
    ("nothing left of the diagonal", f"{PLACE}_decay_left", "i_w > part", "i_w > 3"),
    ("the block ends one token early", f"{PLACE}_decay_left", "part + 15", "part + 14"),
    ("k's norm from its first row", f"{TILES}sum_diagonal", "b_below == 0", "b_below == 8"),
    (
        "the last column eliminates nothing",
        f"{TILES}invert_blocks",
        "static_range(7)",
        "static_range(6)",
    ),
    (
        "products of halves have one word",
        f"{TILES}start_product",
        "a_low, b_high, x",
        "a_low, b_low, x",
    ),
    ("the third block is as the first", f"{TILES}invert", "s_low, 48, ACC16", "s_low, 16, ACC16"),
    ("words where they are not chosen", f"{TILES}choose", "not.b32 c, $1", "mov.b32 c, $1"),
    (
        "a head waits in the wrong order",
        f"{PLACE}prepare_kernel",
        "beside(own_k, M0",
        "beside(M0, own_k",
    ),
    ("q's norm is of its sum", f"{PLACE}prepare_kernel", "b_square * b_square", "b_square"),
)


@pytest.mark.parametrize(("name", "place", "line", "mistake"), BUGS, ids=[bug[0] for bug in BUGS])
def test_a_planted_bug_is_seen(name, place, line, mistake):
    with planted(Bug(name, place, line, mistake, "")):
        (control, rows), (errors, own) = distances("ragged")
        wrong = (own - rows).abs().max() > 1e-3
    assert wrong or not (errors <= 1.02 * control).all()


def test_columns_behind_k_that_are_read_are_seen():
    """K = 96 in tiles of 128: what lies behind a key is the next token's, or another tensor's."""
    line, mistake = "(o_t < length) & (o_k < K)", "(o_t < length) & (o_k < KP)"
    bug = Bug("", f"{PLACE}prepare_kernel", line, mistake, "")
    with planted(bug), driver.options(check=1) as reports:
        (control, _), (errors, _) = distances("resets")
    assert reports and not (errors <= 1.02 * control).all()


def of_size(B, T, H, HV, **how):
    return Case("hopper", B, T, H, 128, 128, "", HV=HV, loss=BOTH, **how)


# each of two processors has several chunks and heads, one after the other
GRADIENTS = {
    "gates_and_state": of_size(2, 100, 1, 2, gates="plain", norm="random", state=True),
    "packed_groups_of_three": of_size(
        1, 168, 1, 3, gates="plain", norm="random", lengths=(0, 3, 0, 100, 64, 1)
    ),
    "unit_keys_of_two_heads": of_size(1, 130, 2, 2, reflect=True),
    "resets": of_size(1, 70, 1, 4, decay="reset", norm="random", reflect=True),
    "alike_keys": of_size(1, 128, 1, 1, keys="alike", beta=1.0, decay="none", norm="random"),
    "strong_decays": of_size(1, 65, 2, 4, decay="strong", norm="zero"),
    # few heads: several tiles of V in the reverse scan
    "one_token_from_a_state": of_size(1, 5, 2, 2, lengths=(1, 1, 1, 1, 1), state=True),
}


def agrees(case, processors=2):
    """Returns whether all of a case agrees with the judge, as parity asks, and the verdicts."""
    count, launch = [], hopper_gradients.gradients
    with pytest.MonkeyPatch.context() as patch:
        counted = lambda *given, **how: count.append(1) or launch(*given, **how)  # noqa: E731
        patch.setattr(hopper_gradients, "gradients", counted)
        with triton_adapter.adjust(lambda row: replace(row, processors=processors)):
            x = inputs_of(case, BF16)
            verdicts = rule.reference_for(x).verdicts("triton", rule.outcome(x, "triton"))
    assert count
    return all(verdict.passed for verdict in verdicts), verdicts


def dg_of_a_state(monkeypatch, moved):
    """Returns dg; `moved` is taken from the last tile of V and given to the first, of what rounding
    took of the first state's gradient.
    """
    launch = hopper_gradients.gradients

    def launch_moved(*given, **how):
        *given, carry = given
        assert carry.shape[2] > 1
        carry[:, :, 0] += moved
        carry[:, :, -1] -= moved
        return launch(*given, carry, **how)

    monkeypatch.setattr(hopper_gradients, "gradients", launch_moved)
    x = inputs_of(GRADIENTS["one_token_from_a_state"], BF16)
    result = rule.outcome(x, "triton")["dg"]
    monkeypatch.undo()
    return result


def test_what_rounding_took_of_the_first_state_is_added_of_all_tiles(monkeypatch):
    judge = dg_of_a_state(monkeypatch, 0.0)
    assert (dg_of_a_state(monkeypatch, 64.0) - judge).abs().max() < 1e-3
    with planted(Bug("", f"{LAST}gates_kernel", "range(0, TILES)", "range(0, 1)", "")):
        assert (dg_of_a_state(monkeypatch, 64.0) - judge).abs().max() > 1.0


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_agree_with_the_judge(name):
    with driver.options(check=1) as reports:
        passed, verdicts = agrees(GRADIENTS[name])
    assert not reports
    assert passed, [verdict for verdict in verdicts if not verdict.passed]


def test_gradients_are_the_same_bits_on_any_number_of_processors():
    x = inputs_of(GRADIENTS["packed_groups_of_three"], BF16)
    results = []
    for processors in (1, 3, 132):
        late = processors % 2
        options = driver.options(late_copies=late, late_products=late, order=late)
        with options, triton_adapter.adjust(lambda row, n=processors: replace(row, processors=n)):
            results.append(rule.outcome(x, "triton"))
    for name, y in results[0].items():
        assert all(torch.equal(y, other[name]) for other in results[1:]), name


LAST = "triton_kernels.hopper.gradients:"
MISTAKES = (
    (
        "every value head is the first",
        "gradients_kernel",
        "i_h = i_hk * G + i\n",
        "i_h = i_hk * G\n",
    ),
    (
        "q and k of the next turn are this one's",
        "gradients_kernel",
        "q, k, start_next",
        "q, k, start",
    ),
    (
        "dY comes twice",
        "gradients_kernel",
        "length_next, tile_next, h_next",
        "length_next, tile, h_next",
    ),
    (
        "copies are not waited for",
        "gradients_kernel",
        "async_copy.wait_group(1)",
        "async_copy.wait_group(2)",
    ),
    (
        "a half of <S, dS'> for both",
        "gradients_kernel",
        "(s_S.slice(C, C, 0)",
        "(s_S.slice(0, C, 0)",
    ),
    ("a sum of the left half alone", "_get_sums", "left + right", "left + left"),
    ("a token reads what it wrote itself", "gates_kernel", "p_sums + 2 * C - 1", "p_sums + 2 * C"),
    (
        "dg without the state carried through",
        "gates_kernel",
        "b_dg += tl.exp2",
        "b_dg += 0 * tl.exp2",
    ),
    (
        "dbeta is not divided",
        "gates_kernel",
        "tl.load(p_sums + 3 * C) / b_beta",
        "tl.load(p_sums + 3 * C)",
    ),
)


@pytest.mark.parametrize(
    ("name", "place", "line", "mistake"), MISTAKES, ids=[bug[0] for bug in MISTAKES]
)
def test_a_bug_planted_in_the_gradients_is_seen(name, place, line, mistake):
    with planted(Bug(name, LAST + place, line, mistake, "")), driver.options(check=1) as reports:
        passed, _ = agrees(GRADIENTS["packed_groups_of_three"])
    assert reports or not passed
