"""Random cases keep every property on every backend, and a planted defect breaks each property."""

import hashlib
import itertools
import json
from dataclasses import replace

import pytest
import torch

from delta_trn.backends.gated_delta_rule import chunked
from delta_trn.backends.parity import __main__ as parity
from delta_trn.backends.parity import certificate, dense, rule, rule_cases
from delta_trn.backends.parity.judge import error
from delta_trn.backends.parity.random import cases, fuzz, properties
from delta_trn.backends.parity.random.cases import PROPERTIES, draw

SEED = 20261122
# cases of the default suite, and how many stand in one test
CASES = {"chunked": (320, 40), "recurrent": (20, 20), "nki-simulator": (12, 12), "triton": (10, 10)}


def pytest_generate_tests(metafunc):
    if "piece" in metafunc.fixturenames:
        rows = []
        for subject in parity.subjects(metafunc.config.getoption("--backend") or None):
            cases, size = CASES.get(subject.backend, (40, 40))
            for first in range(0, cases, size):
                rows.append(pytest.param(subject, first, size, id=f"{subject.backend}-{first}"))
        metafunc.parametrize(("subject", "first", "piece"), rows)


def test_every_property_holds(subject, first, piece):
    plan = fuzz.Plan(subject.backend, subject.device, SEED, first + piece)
    failures = fuzz.run_piece(plan, first, piece).failures
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize(
    "name", ["ragged", "mixed", "near_2", "gva_2", "packed_empty", "carry", "norm", "odd", "gates_packed"]
)
def test_the_fast_judge_is_the_literal_recurrence(name):
    """In float64, to the last digits; the recurrence takes ten times as long.

    A sigmoid of 37.5 has a derivative of 5e-17. The judge had 0: a right backend was red (20261122301:190).
    """
    x = rule_cases.inputs(rule_cases.BY_NAME[name], torch.float64)
    if name == "gates_packed":
        x = replace(x, beta=x.beta + 37.5)
    leaves = {n: y.clone().requires_grad_(y.is_floating_point()) for n, y in x.tensors().items()}
    outputs = dense.gated_delta_rule(leaves, x.arguments(), dense.substitution)
    pairs = [(outputs[n], dy) for n, dy in (("o", x.do), ("final_state", x.dstate)) if dy is not None]
    torch.autograd.backward(*zip(*pairs, strict=True))
    expected = rule.outcome(x, "recurrent")
    for result, source in (("o", None), ("final_state", None), *rule.GRADIENTS.items()):
        if result in expected:
            y = outputs[result] if source is None else leaves[source].grad
            assert error(y, expected[result]) < 1e-12, result


@pytest.mark.parametrize(
    ("backend", "seed", "index"),
    [
        # float64, in which judge and samples made the same gates: a decay of e^-250 has 250 roundings
        ("chunked", 0, 189),
        # float64 cut in two: running sums of -170 were added up in the judge's order alone
        ("chunked", 20261122306, 503),
        # rates of e^84: samples whose gates multiplied infinity by 0 had no gradient
        ("chunked", 100, 8918),
        # 110 equal keys in one chunk of 128: (1 - beta)^110 is a difference of numbers near 1
        ("nki-simulator", 100, 1025),
        # beta = 1: the first token's U is v, which samples did not round, and <dO, U> almost cancels
        ("nki-simulator", 20261122403, 25),
        # a vocabulary of 1: samples took the target's logit from the others, and their loss was 0
        ("nki-simulator", 20261123222, 476),
    ],
)
def test_samples_have_the_rounding_that_every_implementation_has(backend, seed, index):
    """Cases that were red because the samples lacked it."""
    assert properties.check(draw(seed, index, backend, "cpu"), backend) <= 1


def test_a_tiny_scale_of_huge_queries_leaves_dq_its_digits():
    """scale r_q dO times r_k U was 0 in NKI's backward, and all of dq with it."""
    assert properties.check(draw(20261123002, 191, "nki-simulator", "cpu"), "nki-simulator") <= 1


def test_reads_that_cancel_leave_dg_its_digits():
    """K = 1, q = +-1 and a constant dO: F is P times a number per token, and P was rounded to bfloat16."""
    assert properties.check(draw(55, 3908, "nki-simulator", "cpu"), "nki-simulator") <= 1


@pytest.mark.parametrize(
    ("seed", "index"),
    [
        *((20261123010, 155), (20261123010, 173), (20261123010, 190), (777123, 1132), (20261122403, 8)),
        (20261123042, 210),  # norms of 1,000 and decays of e^-80, which shortened keys made underflow
    ],
)
def test_tiny_values_of_huge_keys_do_not_underflow(seed, index):
    """NKI's kernels multiply raw keys, and values by reciprocal norms: 1e-30 over 1e13 was 0."""
    assert properties.check(draw(seed, index, "nki-simulator", "cpu"), "nki-simulator") <= 1


def test_gates_of_a_transposed_tensor_have_the_bits_of_separate_sequences():
    """A sequence of one token had other exponentials alone than packed."""
    assert properties.check(draw(20261123000, 8593, "chunked", "cpu"), "chunked") <= 1


@pytest.mark.parametrize("path", ["kernel", "PyTorch"])
def test_dg_of_equal_keys_has_no_roundings_of_its_own(path, request):
    """Each row of (lam k) dS' was rounded for itself: an element of dg was 66 times as far off as samples."""
    if path == "PyTorch":
        request.getfixturevalue("without_cpu_kernel")
    assert properties.check(draw(20261122400, 2977, "chunked", "cpu"), "chunked") <= 1


@pytest.mark.parametrize(
    ("seed", "index"), [(777123, 253), (777123, 33), (20261123006, 61), (20261123006, 89), (15, 18)]
)
def test_tokens_that_write_almost_nothing_have_exact_gradients(seed, index):
    """NKI's backward divides by beta, of at least 2^-26. With 2^-100, v = 1e-30 underflowed; dk was not 0."""
    assert properties.check(draw(seed, index, "nki-simulator", "cpu"), "nki-simulator") <= 1


def test_where_no_sample_is_finite_a_result_must_be_finite_and_no_more(monkeypatch):
    case = draw(5, 4, "chunked")
    nan = {name: y * torch.nan for name, y in properties.judge(case).items()}
    monkeypatch.setattr(properties, "samples", lambda case: iter([nan, nan]))
    for factor, complaint in ((1.0, None), (3.0, None), (torch.nan, "is not finite")):
        results = {name: y * factor for name, y in properties.judge(case).items()}
        monkeypatch.setattr(properties, "outcome", lambda case, backend, results=results: results)
        if complaint is None:
            assert properties.check(replace(case, check="judge"), "chunked") == 0
            continue
        with pytest.raises(properties.Failure, match=complaint):
            properties.check(replace(case, check="judge"), "chunked")


def digest(case):
    fingerprint = hashlib.sha256(repr((case.op, case.dtype, case.options, case.wanted, case.check)).encode())
    for name, x in [*case.tensors.items(), *case.douts.items()]:
        fingerprint.update(f"{name}{x.dtype}{tuple(x.shape)}{x.stride()}".encode())
        fingerprint.update(x.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return fingerprint.hexdigest()[:8]


DIGESTS = ["e617e634", "179608ab", "40fb2007", "4b463c49", "2295e092", "eb069c7d"]


def test_a_case_is_the_same_on_every_machine():
    """So a line that one machine prints is a case on another. The fingerprints are of an AMD EPYC."""
    assert [digest(draw(7, index, "chunked")) for index in range(6)] == DIGESTS
    assert len({digest(draw(seed, 0, "chunked")) for seed in range(4)}) == 4


def test_cases_reach_what_they_are_for():
    """Of a thousand: every operation, dtype and property, empty inputs, hundreds of sequences, resets."""
    cases = [draw(1, index, "chunked") for index in range(600)]
    assert {case.op for case in cases} == set(PROPERTIES)
    assert {case.dtype for case in cases} == {torch.float64, torch.float32, torch.bfloat16, torch.float16}
    assert {(case.op, case.check) for case in cases} >= {
        (op, check) for op in ("gated_delta_rule", "delta_residual") for check in PROPERTIES[op]
    }
    rules = [case for case in cases if case.op == "gated_delta_rule"]
    assert any(case.tensors["q"].shape[1] == 0 for case in rules)
    assert any(case.tensors["q"].shape[0] == 0 for case in rules)
    assert max(len(case.tensors.get("cu_seqlens", ())) for case in rules) > 100
    assert any(case.tensors["g"].isinf().any() for case in rules)
    assert any((case.tensors["g"] == torch.finfo(torch.float32).min).any() for case in rules)
    assert not all(case.tensors["k"].is_contiguous() for case in rules)
    assert any(not case.wanted for case in rules) and any(len(case.wanted) == 1 for case in rules)


# A defect for each property: what the public operation returns instead of the right outputs.


def one_part_in_a_thousand(y, x, calls):
    return y * 1.001


def a_nan(y, x, calls):
    return y * torch.nan


def another_dtype(y, x, calls):
    return y.double()


def another_shape(y, x, calls):
    return y[..., None]


def a_bit_by_call(y, x, calls):
    return y * (1 + 2**-23 * calls)


def the_neighbors_sum(y, x, calls):
    return y + 1e-9 * y.sum().detach()


def a_state_not_handed_over(y, x, calls):
    return y * (1 + (calls >= 2))


def the_other_gradients(y, x, calls):
    return y * (1 + 2**-23 * sum(z.requires_grad for z in x.values()))


def an_unwanted_gradient(y, x, calls):
    return y + 0 * x["k" if "k" in x else "weight"].requires_grad_().sum()


def plant(defect, monkeypatch):
    """Lets a defect change o or y of `chunked`, not of the judge."""
    original, calls = properties.run, itertools.count()

    def run(case, x, backend):
        outputs = original(case, x, backend)
        name = "y" if case.op == "gated_delta_layer" else "o"
        return {**outputs, name: defect(outputs[name], x, next(calls))} if backend == "chunked" else outputs

    monkeypatch.setattr(properties, "run", run)


DEFECTS = [
    ("judge", one_part_in_a_thousand, "judge: .* [oy]: error"),
    ("judge", a_nan, "[oy] is not finite"),
    ("judge", another_dtype, "[oy] is torch.float64"),
    ("judge", another_shape, "[oy] is torch.float32"),
    ("again", a_bit_by_call, "again: .* other bits"),
    ("rows", the_neighbors_sum, "rows: .* other bits"),
    ("alone", a_state_not_handed_over, "alone"),
    ("cut", a_state_not_handed_over, "cut: "),
    ("steps", a_state_not_handed_over, "steps: "),
    ("wanted", the_other_gradients, "wanted: .* other bits"),
    ("wanted", an_unwanted_gradient, "(k|weight) requires no gradient"),
]
OPERATIONS = ("gated_delta_rule", "gated_delta_layer")


@pytest.mark.parametrize(
    ("op", "check", "defect", "complaint"),
    [(op, *row) for op in OPERATIONS for row in DEFECTS if row[0] in PROPERTIES[op]],
)
def test_a_planted_defect_breaks_the_property(op, check, defect, complaint, monkeypatch):
    monkeypatch.setattr(cases, "LAYERS", float(op == "gated_delta_layer"))
    monkeypatch.setattr(cases, "DTYPES", {torch.float32: 1})
    monkeypatch.setattr(cases, "PROPERTIES", {**PROPERTIES, op: {check: 1.0}})
    first, changed, output = ("q", "k", "o") if op == "gated_delta_rule" else ("x", "weight", "y")
    case = next(
        case
        for case in (draw(5, index, "chunked") for index in itertools.count())
        if (case.op, case.check) == (op, check)
        and case.tensors[first].numel() > 500
        and not any(word in case.words for word in ("beta=0", "scale", "keys", "tiny", "size=0"))
        and len(case.tensors[first]) >= (2 if check == "rows" and "cu_seqlens" not in case.tensors else 1)
        and (check == "alone") == ("cu_seqlens" in case.tensors)
        and (output in case.douts) == (check != "steps")
        and not (check == "wanted" and (changed in case.wanted or not case.wanted))
    )
    assert properties.check(case, "chunked") <= 1
    plant(defect, monkeypatch)
    with pytest.raises(properties.Failure, match=complaint):
        properties.check(case, "chunked")


def test_a_layer_is_judged_by_q_k_and_v_apart(monkeypatch):
    """dx of the keys' channels has a bound of its own, also where that of the values is much larger."""
    monkeypatch.setattr(cases, "LAYERS", 1.0)
    case = next(
        case
        for case in (draw(6, index, "chunked") for index in itertools.count())
        if (case.check, case.dtype, case.words) == ("judge", torch.float32, "") and "x" in case.wanted
    )
    results = properties.outcome(case, "chunked")
    keys = slice(case.layer.H * case.layer.K, 2 * case.layer.H * case.layer.K)
    criterion = properties.Criterion(case)
    assert criterion.require("judge", results) <= 1
    results["dx"][..., keys] *= 1.001
    with pytest.raises(properties.Failure, match="dx_k: error"):
        criterion.require("judge", results)


def test_another_bit_of_a_packed_sequence_on_chunk_boundaries_is_seen(monkeypatch):
    """Where sequences start on chunk boundaries, "alone" is bit for bit; elsewhere within the criterion."""
    case = draw(5, 262, "chunked")
    assert case.check == "alone" and case.tensors["cu_seqlens"].tolist() == [0, 64, 128, 144]
    assert properties.check(case, "chunked") <= 1
    plant(a_bit_by_call, monkeypatch)
    with pytest.raises(properties.Failure, match=r"alone, on chunk boundaries: .* other bits"):
        properties.check(case, "chunked")


# The runner


PLAN = fuzz.Plan("chunked", "cpu", 3, 12)


def test_random_cases_leave_pytorch_its_threads():
    """They left it one: a run in this process and its resumed half in another then differed by rounding."""
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    fuzz.run_piece(PLAN, 0, 1)
    left = torch.get_num_threads()
    torch.set_num_threads(threads)
    assert left == 3


def test_a_sample_of_the_baseline_can_stand_for_the_backend(capsys, monkeypatch):
    """So chance is measured. What errs by a hundredth is no honest sample."""
    words = ["fuzz", "--backend", "chunked", "--honest", "--cases", "5", "--seed", "3", "--processes", "1"]
    assert parity.main(words) == 0
    assert "the baseline, seed 3: 5 of 5 cases passed" in capsys.readouterr().out
    judge = properties.judge
    monkeypatch.setattr(properties, "judge", lambda x: {name: 1.01 * y for name, y in judge(x).items()})
    monkeypatch.setattr(properties, "samples", lambda x: iter([properties.judge(x)]))
    assert parity.main(words) == 1


def test_open_pieces_are_those_that_no_line_of_the_state_has():
    assert list(fuzz.open_pieces(PLAN, [], 5)) == [(0, 5), (5, 5), (10, 2)]
    assert list(fuzz.open_pieces(PLAN, [(5, 5), (0, 2)], 5)) == [(2, 3), (10, 2)]
    assert list(fuzz.open_pieces(PLAN, [(0, 12)], 5)) == []


def test_a_killed_run_goes_on_where_it_was(tmp_path, capsys, monkeypatch):
    """Nothing that stands in the file runs again, and a line that the kill cut short counts for nothing."""
    state, ran = tmp_path / "state.jsonl", []
    file = fuzz.State(state, PLAN)
    file.add(fuzz.run_piece(PLAN, 0, 4))
    file.add(fuzz.Piece(4, 4, failures=["the line of a failure"]))
    state.write_text(state.read_text() + '{"first": 8, "cou')
    original = fuzz.run_piece
    monkeypatch.setattr(fuzz, "run_piece", lambda plan, *work: ran.append(work) or original(plan, *work))
    words = ["fuzz", "--backend", "chunked", "--cases", "12", "--seed", "3", "--processes", "1"]
    assert parity.main([*words, "--state", str(state)]) == 1  # of the failure before the kill
    output = capsys.readouterr().out
    assert ran == [(8, 4)]
    assert "the line of a failure" in output and "8 of 12 cases passed, 1 failed" in output
    assert [json.loads(line)["first"] for line in state.read_text().splitlines()[1:]] == [0, 4, 8]
    other = ["fuzz", "--backend", "chunked", "--seed", "4", "--state", str(state)]
    assert parity.main(other) == 2 and "is of other cases" in capsys.readouterr().err


def test_a_failure_is_one_line_that_reproduces_it(capsys, monkeypatch):
    def check(case, backend):
        if case.name == "3:7":
            raise properties.Failure("o is\nwrong")
        return 0.5

    monkeypatch.setattr(properties, "check", check)
    words = ["fuzz", "--backend", "chunked", "--cases", "9", "--seed", "3", "--processes", "1"]
    assert parity.main(words) == 1
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "--only" in line)
    command, _, comment = line.partition("#")
    assert "o is wrong" in comment
    assert parity.main(command.split()[3:]) == 1
    assert "3:7 gated_delta_rule" in capsys.readouterr().out
    assert parity.main(["fuzz", "--backend", "chunked", "--only", "3:6"]) == 0
    assert parity.main(["fuzz", "--backend", "chunked", "--only", "3"]) == 2


# The certificate


def test_a_certificate_says_passed_or_what_failed(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(rule_cases, "CASES", [rule_cases.BY_NAME[name] for name in ("two", "packed")])
    monkeypatch.setattr(certificate, "DECODED", ("norm",))
    monkeypatch.setattr(certificate.residual_cases, "CASES", ())
    monkeypatch.setattr(certificate.layer_cases, "CASES", ())
    words = ["certificate", "--backend", "chunked", "--cases", "3", "--to", str(tmp_path)]
    assert parity.main(words) == 0
    page = (tmp_path / "chunked.md").read_text()
    assert (
        page.startswith("# Passed: `chunked`") and "| packed |" in page and "3 of 3 pass with seed 0" in page
    )
    assert (tmp_path / "chunked.png").read_bytes()[:4] == b"\x89PNG"
    original = chunked.forward

    def wrong(call, *, save):
        o, state, saved = original(call, save=save)
        return o * (1 + 1e-2 * torch.rand(())), state, saved

    monkeypatch.setattr(chunked, "forward", wrong)
    assert parity.main(words) == 1
    page = (tmp_path / "chunked.md").read_text()
    assert page.startswith("# Failed: `chunked`") and "gave other bits" in page and "random cases" in page
    assert page.count("**fail**") >= 3
