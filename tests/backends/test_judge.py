"""The criterion sees what one number per tensor does not see, and chance turns no case red."""

import math
import re
import sys
from dataclasses import replace

import pytest
import torch

from delta_trn.backends.parity import layer_cases, mixer_cases
from delta_trn.backends.parity.baseline import Noise, Rounding, add_up, invert
from delta_trn.backends.parity.judge import (
    DTYPES,
    ELEMENT_FACTOR,
    FACTOR,
    PART_FACTOR,
    Reference,
    Spread,
    absolute,
    chance_factor,
)
from delta_trn.backends.parity.rule import outcome, reference, reference_for
from delta_trn.backends.parity.rule_cases import BY_NAME, Case, inputs
from tests.support.fuzz.checks import count_effective_parts


def verdicts_with(case, dtype, **changes):
    """Returns chunked's verdicts by tensor, with some of its results changed."""
    expected = reference(BY_NAME[case], dtype)
    results = outcome(inputs(BY_NAME[case], dtype), "chunked")
    results |= {name: change(results[name].clone()) for name, change in changes.items()}
    return {verdict.tensor: verdict for verdict in expected.verdicts("chunked", results)}


def code_that_runs(function):
    """Returns the place of every Python function of this project that runs in a call,
    as "module:name".
    """
    places = set()

    def note(frame, event, argument):
        module = frame.f_globals.get("__name__", "")
        if event == "call" and module.startswith("delta_trn."):
            name = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)
            places.add(f"{module.removeprefix('delta_trn.')}:{name}")

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return places


FORMULAS = {
    **{
        op: (operation, next(case for case in layer_cases.CASES if case.op == op))
        for op, operation in layer_cases.OPERATIONS.items()
    },
    "gated_delta_layer": (mixer_cases.OPERATION, mixer_cases.BY_NAME["mixer_packed_empty"]),
}


def judge_and_sample(name):
    if name == "gated_delta_rule":
        return reference_for(inputs(BY_NAME["gates_packed"], torch.bfloat16))
    operation, case = FORMULAS[name]
    x = operation.inputs(case, torch.bfloat16)
    return operation.judge(x), next(operation.samples(x))


@pytest.mark.parametrize("name", ["gated_delta_rule", *FORMULAS])
def test_no_line_of_a_backend_runs_while_judge_and_samples_are_computed(name):
    """So the two share no mistake, neither in a formula nor in checks, defaults or gates."""
    places = code_that_runs(lambda: judge_and_sample(name))
    judges = ("backends.parity.", "backends.gated_delta_rule.recurrent:")
    own = {place for place in places if place.startswith(judges)}
    # the dataclasses of a call, which compute nothing but the number of sequences
    shared = {re.sub(r".*[.:]", "", place) for place in places - own}
    assert own and shared <= {"sequences", "__init__"}, places - own


@pytest.mark.parametrize(("tensor", "share"), [("dg", 0.5), ("dk", 0.2)])
def test_small_elements_that_are_zero_are_seen(tensor, share):
    """In one root mean square per tensor they are lost: 72% of dg and 34% of dk could be 0."""

    def forget_small_ones(x):
        return x.masked_fill_(x.abs() < x.abs().float().quantile(share), 0.0)

    assert verdicts_with("heavy", torch.bfloat16)[tensor].passed
    wrong = verdicts_with("heavy", torch.bfloat16, **{tensor: forget_small_ones})[tensor]
    assert wrong.error <= wrong.allowed and wrong.element > 1.0 and not wrong.passed


def test_one_wrong_head_and_one_wrong_element_are_seen():
    def disturb_head(x):
        x[0, :, 1] *= 1 + 3e-6
        return x

    def disturb_element(x):
        x[0, 17, 1, 3] *= 1 + 1e-4
        return x

    wrong = verdicts_with("gates", torch.float32, dq=disturb_head, o=disturb_element)
    assert wrong["dq"].part > 1.0 and not wrong["dq"].passed
    assert wrong["o"].element > 1.0 and not wrong["o"].passed
    assert all(verdict.passed for name, verdict in wrong.items() if name not in ("dq", "o"))


def test_an_error_of_twice_what_is_allowed_is_seen():
    """So is one of a few times the baseline's, where the baseline's error is above the floor."""
    generator = torch.Generator().manual_seed(0)
    for dtype in DTYPES:
        expected = reference(BY_NAME["reflect"], dtype)
        right = expected.verdicts("judge", expected.judge)
        assert all(verdict.passed and verdict.error == 0.0 for verdict in right)
        for verdict in right:
            exact = expected.judge[verdict.tensor]
            noise = torch.randn(exact.shape, generator=generator, dtype=torch.float64)
            size = exact.square().mean().sqrt() * verdict.allowed
            wrong = {verdict.tensor: exact + 2 * size * noise}
            assert not expected.verdicts("wrong", wrong, wrong)[0].passed
        assert any(verdict.allowed == FACTOR * verdict.baseline for verdict in right)


def test_an_error_that_lies_in_one_part_alone_is_seen():
    """Of 64 heads one is small, and off by 30%: too little for the whole and for any element."""
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(64, 200, generator=generator, dtype=torch.float64)
    exact[3] *= 1e-3
    noise = 1e-4 * torch.randn(2, 64, 200, generator=generator, dtype=torch.float64)
    noise[:, 3] *= 1e-3
    found = exact.clone()
    found[3] += 1.2 * PART_FACTOR * noise[0, 3].square().mean().sqrt()
    for parts, passed in ((None, True), (torch.arange(64), False)):
        spread = Spread(exact, parts)
        spread.add(exact + noise)
        expected = Reference("o", "c", torch.float32, {"o": exact}, {"o": spread}, 1)
        (verdict,) = expected.verdicts("chunked", {"o": found})
        assert verdict.error <= verdict.allowed and verdict.element <= 1.0
        assert verdict.passed == passed and (verdict.part <= 1.0) == passed


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [17.0, 300.0, 30_000.0])
def test_large_results_of_16_bits_are_judged(size, dtype):
    """All that is below half the largest number of the dtype."""
    exact = size * torch.tensor([0.9, -1.0, 1.05], dtype=torch.float64)
    spread = Spread(exact)
    spread.add([exact.to(dtype).double()])
    expected = Reference("o", "c", dtype, {"o": exact}, {"o": spread}, 1)
    for x, passed in ((exact, True), (1.1 * exact, False)):
        assert expected.verdicts("chunked", {"o": x.to(dtype)})[0].passed == passed


def test_what_underflows_may_be_zero():
    case = Case("underflow", 1, 2, 1, 4, 4, reason="exp(-200) is 0 in float32", state=True)
    x = inputs(case, torch.float32)
    x = replace(x, g=torch.full_like(x.g, -200.0))
    expected = reference_for(x)
    assert 0 < expected.judge["dg"].abs().max() < 1e-80
    for backend in ("chunked", "recurrent"):
        assert all(verdict.passed for verdict in expected.verdicts(backend, outcome(x, backend)))
    results = {**expected.judge, "dg": torch.full_like(expected.judge["dg"], 1e-20)}
    assert [v.tensor for v in expected.verdicts("wrong", results) if not v.passed] == ["dg"]


def test_a_difference_that_is_none_is_not_taken_from_the_samples():
    """Next to nothing was left of theirs, and beside it an honest backend's was many times
    as large.
    """
    exact, off = torch.zeros(4, dtype=torch.float64), absolute(torch.float32)
    spread = Spread(exact, absolute=off)
    spread.add([exact + 1.01 * off])
    reference = Reference("", "small", torch.float32, {"dg": exact}, {"dg": spread}, 10)
    for size, passed in ((1.5, True), (3.0, True), (4.0, False)):
        assert reference.verdicts("", {"dg": (exact + size * off).float()})[0].passed == passed


@pytest.mark.parametrize(
    "sizes", [(1, 7, 1), (5, 40, 1), (1, 40, 6), (64, 128, 64), (3, 1, 2), (3, 0, 2)]
)
def test_samples_add_terms_one_by_one_so_that_no_cpu_adds_them_otherwise(sizes):
    M, K, N = sizes
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 3, M, K, generator=generator), torch.randn(3, K, N, generator=generator)
    total = torch.zeros(2, 3, M, N)
    for i in range(K):
        total = total + a[..., :, i, None] * b[..., i, None, :]
    assert torch.equal(add_up(a, b, Rounding(torch.float32)), total)


def test_samples_invert_by_substitution():
    L = torch.randn(2, 20, 20, generator=torch.Generator().manual_seed(0)).double().tril(-1) / 4
    L.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: invert(x.tril(-1), Rounding(torch.float64)), L)
    eye = torch.eye(20, dtype=torch.float64)
    assert ((L + eye) @ invert(L, Rounding(torch.float64)) - eye).abs().max() < 1e-12


def test_what_is_0_must_be_as_near_to_0_as_the_samples():
    exact = torch.zeros(2, 3, dtype=torch.float64)
    spread = Spread(exact)
    reference = Reference("", "zero", torch.float32, {"dq": exact}, {"dq": spread}, 10)
    assert [reference.verdicts("", {"dq": exact + y})[0].passed for y in (0.0, 1e-7)] == [
        True,
        False,
    ]
    spread.add([exact + 1e-7])
    assert [reference.verdicts("", {"dq": exact + y})[0].passed for y in (2e-7, 3e-7)] == [
        True,
        False,
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_gradient_of_a_bfloat16_parameter_may_be_rounded_to_bfloat16(dtype):
    """Also where the rest of the case has a dtype of more digits,
    and each sample rounds to the judge.
    """
    exact = torch.linspace(1, 2, 99, dtype=torch.float64)
    reference = Reference(
        "", "short", dtype, {"dA_log": exact}, {"dA_log": Spread(exact)}, 100, dtype
    )
    results = (
        {"dA_log": y} for y in (exact.bfloat16(), exact.bfloat16() * 1.02, exact.to(dtype) * 1.003)
    )
    assert [reference.verdicts("", y)[0].passed for y in results] == [True, False, False]


def test_results_near_the_end_of_float16_may_be_rounded_four_times():
    """Numbers near 0 are 2^-24 apart. One rounding was allowed,
    and honest samples failed (8:1120).
    """
    exact = torch.full((2, 3), 2.06e-7, dtype=torch.float64)
    spread = Spread(exact, absolute=absolute(torch.float16))
    reference = Reference("", "end", torch.float16, {"o": exact}, {"o": spread}, 10)
    for steps, passed in ((5, True), (6, False), (1, False)):
        assert (
            reference.verdicts("", {"o": torch.full_like(exact, steps * 2**-24)})[0].passed
            == passed
        )


def test_the_bounds_are_those_of_the_documentation():
    exact = torch.tensor([[3.0, 4.0], [0.0, 5.0]], dtype=torch.float64)
    spread = Spread(exact, torch.arange(2), absolute(torch.float32))
    spread.add([exact + torch.tensor([[0.1, 0.0], [0.0, -0.2]]), exact - 0.01])
    assert spread.whole == pytest.approx((0.05 / 4) ** 0.5)
    assert spread.part.tolist() == pytest.approx([(0.01 / 2) ** 0.5, (0.04 / 2) ** 0.5])
    assert spread.element.flatten().tolist() == pytest.approx([0.1, 0.01, 0.01, 0.2])
    spread.add([exact * torch.nan])
    assert spread.count == 2, "what is not finite is no sample"
    assert (FACTOR, PART_FACTOR, ELEMENT_FACTOR) == (2.0, 4.0, 16.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_random_rounding_is_exact_on_average_and_keeps_what_the_dtype_has(dtype):
    rounding = Rounding(dtype, Noise(1))
    x = torch.tensor([1 + 0.3 * torch.finfo(dtype).eps, -0.7, 3e-3]).repeat_interleave(20_000)
    y = rounding.operand(x)
    assert torch.equal(y, y.to(dtype).float())
    for part, mean in zip(y.view(3, -1).mean(1), x.view(3, -1)[:, 0], strict=True):
        assert abs(part - mean) < 0.02 * torch.finfo(dtype).eps * mean.abs()
    assert torch.equal(rounding.operand(x.to(dtype).float()), x.to(dtype).float())


def chance(factor, parts, samples=14):
    """Returns how often one draw of chi-squared errors exceeds the largest
    of `samples` by a factor.
    """
    x = torch.linspace(-60, 7, 20_001, dtype=torch.float64).exp()
    half = torch.tensor(parts / 2, dtype=torch.float64)
    density = ((half - 1) * x.log() - x / 2 - half * math.log(2) - torch.lgamma(half)).exp()
    largest = torch.special.gammainc(half, x / (2 * factor**2)) ** samples
    return torch.trapezoid(density * largest, x).item()


def test_chance_exceeds_the_factor_of_a_whole_tensor_as_seldom_for_any_number_of_parts():
    """With twice the largest for every tensor, 2 in 1000 of one number were red."""
    assert 3e-6 < chance(PART_FACTOR, 1) < 4e-6 and chance(FACTOR, 1) > 1e-3
    for parts in (1, 1.25, 1.5, 2, 3, 4, 5):
        assert 2e-6 < chance(chance_factor(parts), parts) < 6e-6
    for parts in (5.3, 6, 8, 20):
        assert chance_factor(parts) == FACTOR and chance(FACTOR, parts) < 6e-6


@pytest.mark.parametrize(
    "sizes", [(1.0,), (1.0, 1.0, 1.0, 1.0), (1.0, 0.1, 0.1, 0.1), (3.0, 1.0, 1.0)], ids=str
)
def test_effective_parts_are_those_that_carry_the_error(sizes):
    """From few samples without bias: (sum s)^2 / sum s^2 for variances s.
    One that nobody misses counts 0.
    """
    exact, generator = (
        torch.zeros(len(sizes), dtype=torch.float64),
        torch.Generator().manual_seed(0),
    )
    draws = torch.randn(4000, len(sizes), generator=generator, dtype=torch.float64)
    draws, few = draws * torch.tensor(sizes, dtype=torch.float64) * 1e-90, []
    spread = Spread(exact, torch.arange(len(sizes)))
    spread.add(draws)
    variances = torch.tensor(sizes) ** 2
    expected = (variances.sum() ** 2 / variances.square().sum()).item()
    assert count_effective_parts(spread) == pytest.approx(expected, rel=0.1)
    for part in draws[:1400].split(14):
        spread = Spread(exact, torch.arange(len(sizes)))
        spread.add(part)
        few.append(count_effective_parts(spread))
    assert sum(few) / 100 == pytest.approx(expected, rel=0.15)
    assert count_effective_parts(Spread(exact, torch.arange(len(sizes)))) == len(sizes)
