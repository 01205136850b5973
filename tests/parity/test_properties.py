"""Random cases keep every property on every backend, and a planted defect breaks each property.

pytest tests/parity/test_properties.py --fuzz 3000 --backend chunked   so many new cases of each operation
pytest ... -k BACKEND-OPERATION --fuzz-blob BLOB      the one case of a failure, by the blob that is
                                                      printed
"""

import itertools
from dataclasses import replace

import pytest
import torch

from delta_trn.backends.checks import BackendRefusal
from delta_trn.backends.dispatch import BACKENDS
from delta_trn.backends.parity import __main__ as parity
from delta_trn.backends.parity.rule_cases import BOTH, Case
from tests.support.fuzz import checks
from tests.support.fuzz.cases import OPERATIONS, random_cases, rule_case
from tests.support.fuzz.run import fuzz

# cases of each operation in the default suite, and the operations of which it has some on the slow
# backends
FEW, FEWER = 8, 2
SLOW_ONES = ("gated_delta_rule", "gated_delta_rule_step", "kimi_delta_attention", "delta_residual")


def pytest_generate_tests(metafunc):
    if "subject" not in metafunc.fixturenames:
        return
    config, rows = metafunc.config, []
    for subject in parity.subjects(config.getoption("--backend") or None):
        few = (subject.emulated or subject.backend == "recurrent") and not config.getoption(
            "--fuzz"
        )
        cases = config.getoption("--fuzz") or (FEWER if few else FEW)
        rows += [
            pytest.param(subject, op, cases, id=f"{subject.backend}-{op}")
            for op in (SLOW_ONES if few else OPERATIONS)
            if op in BACKENDS[subject.backend].rows
        ]
    metafunc.parametrize(("subject", "op", "cases"), rows)


def test_every_property_holds(subject, op, cases, pytestconfig):
    refused = []

    def examine(case):
        try:
            checks.check(case, subject.backend)
        except BackendRefusal as refusal:
            refused.append(refusal)

    new, blob = bool(pytestconfig.getoption("--fuzz")), pytestconfig.getoption("--fuzz-blob")
    ran = fuzz(
        random_cases(subject.backend, op, subject.device), examine, cases, new=new, blob=blob
    )
    if op != "gated_delta_layer":  # whose limits are narrow
        assert 2 * len(refused) < ran, (
            f"{len(refused)} of {ran} cases refused, such as: {refused[0]}"
        )


HUGE = {"q": 1e9, "k": 1e9}
EMULATED, F32, BF16 = "nki-simulator", torch.float32, torch.bfloat16
# what random cases have found, in the sizes in which they did; the sentence says what was wrong
FOUND = [
    # a decay of e^-250 has 250 roundings, and judge and samples made the same gates
    (
        "chunked",
        torch.float64,
        Case(
            "0",
            1,
            65,
            1,
            20,
            1,
            "",
            gates="wide",
            keys="near",
            norm="random",
            state=True,
            loss=BOTH,
        ),
        {"g": 5.0},
    ),
    # rates of e^84: samples whose gates multiplied infinity by 0 had no gradient
    (
        "chunked",
        F32,
        Case("1", 2, 100, 4, 64, 64, "", gates="wide", norm="random", state=True),
        {"A_log": 30.0},
    ),
    # each row of (lam k) dS' was rounded for itself: an element of dg was 66 times as far off as
    # samples
    (
        "chunked",
        F32,
        Case(
            "3",
            3,
            395,
            2,
            96,
            16,
            "",
            keys="equal",
            beta=1.0,
            scale=-0.3,
            state=True,
            loss=("final_state",),
        ),
        {"initial_state": 1e4},
    ),
    # beta = 1: the first token's U is v, which samples did not round, and <dO, U> almost cancels
    (
        EMULATED,
        BF16,
        Case("4", 3, 41, 1, 16, 123, "", norm="tiny", decay="mixed", beta=1.0),
        {"g": 5.0},
    ),
    # scale r_q dO times r_k U was 0 in NKI's backward, and all of dq with it
    (
        EMULATED,
        BF16,
        Case("5", 2, 15, 1, 16, 32, "", HV=4, norm="huge", decay="heavy", scale=1e-20, loss=BOTH),
        HUGE,
    ),
    # K = 1, q = +-1 and a constant dO: F is P times a number per token, and P was rounded to
    # bfloat16
    (
        EMULATED,
        BF16,
        Case(
            "6",
            1,
            106,
            1,
            1,
            75,
            "",
            HV=2,
            keys="near",
            values=1e4,
            decay="mixed",
            scale=1.0,
            lengths=(6, 40, 0, 60),
        ),
        {"g": 5.0, "do": 1.0},
    ),
    # NKI's kernels multiply raw keys, and values by reciprocal norms: 1e-30 over 1e13 was 0
    (
        EMULATED,
        F32,
        Case(
            "7",
            1,
            72,
            1,
            64,
            128,
            "",
            keys="near",
            norm="huge",
            values=1e-30,
            decay="reset",
            beta=0.0,
            scale=8.0,
            state=True,
        ),
        HUGE,
    ),
    (
        EMULATED,
        BF16,
        Case(
            "8",
            2,
            141,
            1,
            125,
            28,
            "",
            norm="huge",
            values=1e-30,
            decay="reset",
            beta=1.0,
            state=True,
            loss=BOTH,
        ),
        HUGE,
    ),
    # norms of 1,000 and decays of e^-80, which shortened keys made underflow
    (
        EMULATED,
        BF16,
        Case(
            "9",
            3,
            13,
            4,
            9,
            64,
            "",
            norm="huge",
            gates="wide",
            reflect=True,
            state=True,
            scale=-0.3,
        ),
        {"g": 5.0},
    ),
    # NKI's backward divides by beta, of at least 2^-26. With 2^-100, v = 1e-30 underflowed; dk was
    # not 0
    (
        EMULATED,
        BF16,
        Case(
            "10",
            1,
            106,
            1,
            16,
            3,
            "",
            HV=4,
            norm="tiny",
            decay="none",
            beta=0.0,
            state=True,
            loss=BOTH,
        ),
        {},
    ),
    (
        EMULATED,
        F32,
        Case(
            "11",
            3,
            1,
            2,
            1,
            192,
            "",
            HV=6,
            keys="near",
            values=1e-30,
            beta=0.0,
            scale=1.0,
            state=True,
        ),
        {},
    ),
]


@pytest.mark.parametrize(
    ("backend", "dtype", "case", "factors"), FOUND, ids=[f"{x[0]}-{x[2].name}" for x in FOUND]
)
def test_what_random_cases_have_found_stays_right(backend, dtype, case, factors):
    x = rule_case(case, dtype, factors)
    if "do" in factors:
        x = replace(x, douts={"o": x.douts["o"].flatten()[0].expand(x.douts["o"].shape)})
    assert checks.check(x, backend) <= 1


def test_cases_reach_what_they_are_for():
    """Every dtype and form of the rule: no tokens, many sequences, resets,
    strides, zero keys and others.
    """
    drawn = []
    fuzz(random_cases("chunked", "gated_delta_rule"), drawn.append, 360)
    assert {case.dtype for case in drawn} == {
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
    }
    packed = [case.tensors["cu_seqlens"] for case in drawn if "cu_seqlens" in case.tensors]
    gates = [case.tensors["g"] for case in drawn]
    keys = [case.tensors["k"] for case in drawn if case.tensors["k"].numel()]
    forms = {
        "no tokens": any(g.numel() == 0 for g in gates),
        "one token": any(g.shape[1] == 1 for g in gates),
        "many sequences": max(map(len, packed)) > 20,
        "empty sequences": any((x.diff() == 0).any() for x in packed),
        "no empty sequence": any((x.diff() > 0).all() for x in packed),
        "resets": any(g.isinf().any() for g in gates),
        "no decay": any(g.numel() and not g.any() for g in gates),
        "strong decay": any((g == -20).any() for g in gates),
        "zero keys": any((k == 0).all(-1).any() for k in keys),
        "equal keys": any(k.shape[1] > 2 and torch.equal(k[:, 0], k[:, 1]) for k in keys),
        "beta of 2": any((case.tensors["beta"] == 2).any() for case in drawn),
        "groups": any(case.tensors["v"].shape[2] > case.tensors["k"].shape[2] for case in drawn),
        "K is not V": any(
            case.tensors["v"].shape[3] != case.tensors["k"].shape[3] for case in drawn
        ),
        "strides": any(not k.is_contiguous() for k in keys),
        "gates": any(case.case.gates for case in drawn),
        "states": any("initial_state" in case.tensors for case in drawn),
        "no gradient": any(not case.wanted for case in drawn),
        "one gradient": any(len(case.wanted) == 1 for case in drawn),
    }
    assert all(forms.values()), [form for form, reached in forms.items() if not reached]


# A defect for each property: what the public operation returns instead of the right outputs.


def one_part_in_a_thousand(y, x, calls):
    return y * 1.001


def a_bit_by_call(y, x, calls):
    return y * (1 + 2**-23 * calls)


def the_neighbors_sum(y, x, calls):
    """Changes a few last bits by a number that every row has a part in,
    however large the numbers are.
    """
    return y * (1 + 2**-21 * torch.frac(1000 * y.detach().sum()))


def the_other_gradients(y, x, calls):
    return y * (1 + 2**-23 * sum(z.requires_grad for z in x.values()))


def an_unwanted_gradient(y, x, calls):
    return y + 0 * x["k" if "k" in x else "weight"].requires_grad_().sum()


DEFECTS = [
    (one_part_in_a_thousand, "judge: .* [oy]: error"),
    (a_bit_by_call, "(rows|wanted): .* other bits"),
    (the_neighbors_sum, "rows: .* other bits"),
    (the_other_gradients, "wanted: .* other bits"),
    (an_unwanted_gradient, "(k|weight) requires no gradient"),
]


@pytest.mark.parametrize(("defect", "complaint"), DEFECTS)
def test_a_planted_defect_is_found_within_fifty_cases(defect, complaint, monkeypatch):
    original = checks.run

    def examine(case):
        calls = itertools.count()

        def run(case, x, backend):
            outputs = original(case, x, backend)
            name = "o" if "o" in outputs else "y"
            return {**outputs, name: defect(outputs[name], x, next(calls))}

        monkeypatch.setattr(checks, "run", run)
        try:
            checks.check(case, "chunked")
        finally:
            monkeypatch.setattr(checks, "run", original)

    with pytest.raises((checks.Failure, RuntimeError), match=complaint):
        in_float32 = random_cases("chunked", "gated_delta_rule").filter(
            lambda x: x.dtype == torch.float32
        )
        fuzz(in_float32, examine, 50, shrink=False)


def test_the_blob_of_a_failure_draws_it_again():
    """Cases of more than 40 tokens are red; the first is shrunk to one
    of one head without a state.
    """
    strategy, seen = random_cases("chunked", "gated_delta_rule"), []

    def examine(case):
        seen.append(case)
        assert case.tensors["q"].shape[1] <= 40

    with pytest.raises(AssertionError) as failure:
        fuzz(strategy, examine, 50)
    (note,) = (x for x in getattr(failure.value, "__notes__", ()) if "reproduce_failure" in x)
    with pytest.raises(AssertionError):
        fuzz(strategy, examine, 1, blob=note.split("b'")[1].split("'")[0])
    q = seen[-1].tensors["q"]
    assert q.shape[0] == q.shape[2] == 1 and "initial_state" not in seen[-1].tensors
