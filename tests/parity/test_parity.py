"""Every backend of this machine meets parity's criterion on the whole grid,
and planted faults do not.
"""

import json
import math
from contextlib import contextmanager
from dataclasses import replace
from itertools import product

import pytest
import torch

from delta_trn.backends.checks import BackendRefusal, dtype_name
from delta_trn.backends.dispatch import BACKENDS, TRITON_DEVICES
from delta_trn.backends.gated_delta_rule import chunked
from delta_trn.backends.gated_delta_rule.contract import make_gates
from delta_trn.backends.parity import __main__ as parity
from delta_trn.backends.parity import baseline, channel_cases, layer_cases
from delta_trn.backends.parity.judge import DTYPES, FACTOR, Verdict, error, floor
from delta_trn.backends.parity.rule import (
    CHUNKS,
    TENSORS,
    reference,
    reference_for,
    step_verdicts,
    terms,
    verdicts,
)
from delta_trn.backends.parity.rule_cases import (
    BENCH,
    BY_NAME,
    CASES,
    SMALL,
    STEPS,
    inputs,
    select,
)
from tests.support import planted_bugs

SMALL_ONES = [case.name for case in select(tags=SMALL)]
ALL = [*(case.name for case in select()), *STEPS]
# Emulators run these cases of decoding by default.
DECODED = [
    "decode_one",
    "decode_odd",
    "decode_collide",
    "decode_gva_2",
    "decode_reset",
    "decode_gates",
    "decode_norm_zero_large",
]
# Groups of value heads that no power of two divides; the wide one takes an emulator a minute.
GROUPS = ["group_3", "group_3_long", "group_5", "group_5_long", "group_7", "group_7_long"]
# Whether Triton's kernels are compiled here, and run by the emulator: a fraction of a second for a
# case.
COMPILED = "cpu" in TRITON_DEVICES
# Of an emulator: the cases of the default suite, seconds each, and those that are slow, minutes
# each. NKI's simulator has one case by default for each thing that can go wrong.
EMULATED = {
    "triton": (ALL, []) if COMPILED else ([*SMALL_ONES, *DECODED], ALL),
    "nki-simulator": (
        [
            "one",
            "one_fresh",
            "two",
            "ragged",
            "seam_129",
            "no_decay",
            "forget",
            "mixed",
            "collide",
            "reflect",
            "erased",
            "k256_short",
            "gva_2",
            "gva_8",
            "odd",
            "packed",
            "packed_empty",
            "reset",
            "reset_packed",
            "final_only",
            "norm",
            "norm_tiny",
            "norm_huge",
            "norm_zero",
            "scale_up",
            "values_tiny",
            *GROUPS,
            *DECODED,
        ],
        [
            *SMALL_ONES,
            "wide_v",
            "wide_k",
            "group_3_wide",
            "k96",
            "k192",
            "k256",
            "heavy",
            "near_1",
            "near_2",
            "packed_gva",
            "long_free",
            *STEPS,
        ],
    ),
}
# To PyTorch's backends every other dtype is float32 with casts, or with more digits, and what
# `recurrent` has in float32 is a sample of the baseline: they are judged there on seams, ends,
# groups, packing, gates and extreme norms, and the judge itself in float64 on two. What two cases
# are about, for which the judge takes 10 s each, tests/backends/cpu_kernel tests, too.
LONG = ("packed_many", "packed_wide")
CAST = ("seam_65", "forget", "mixed", "gva_2", "packed_empty", "gates_wide", "reset_packed",
        "norm_zero_large")  # fmt: skip
ITSELF = ("packed_empty", "gates_wide")
# In Triton's interpreter a case is judged in float32 or bfloat16, by turns. Chunks have 32 tokens
# in the one, 64 in the other, so that both have some. What leaves the range of float16 is judged
# there, too; of an operation of a layer one case. Those about NKI's cells, 10 s each, are slow.
BOTH_WIDTHS = {"seam_65", "reflect", "gva_2", "packed_empty", "reset_packed"}
HALF = {
    "one_fresh",
    "forget",
    "gva_2",
    "packed_empty",
    "norm_zero_large",
    "norm_huge_weak",
    "scale_up",
    "conv_ragged",
    "norm_head",
    "sum_odd",
    "loss_ragged",
    "kimi_gva",
    "decode_kimi_odd",
}
CELLS = ("conv_cells", "conv_packed_cells")
# Compiled, a small case is judged in every dtype, one of K > 128 in 16 bits, any other by turns.
WIDE = ("k192", "k256", "packed_wide")
LAYERS = [*layer_cases.BY_NAME]
# Of Kimi Delta Attention, on PyTorch's backends: every case in float32, one in three in another
# dtype, too; in Triton's interpreter some, in float32 or bfloat16, by turns.
CHANNELS = [
    name
    for name, case in {**channel_cases.BY_NAME, **channel_cases.STEPS}.items()
    if "slow" not in case.tags
]
INTERPRETED = {
    *(
        "kimi_seam",
        "kimi_strong",
        "kimi_apart",
        "kimi_split",
        "kimi_deep",
        "kimi_reset",
        "kimi_reflect",
    ),
    *(
        "kimi_gva",
        "kimi_packed",
        "kimi_packed_single",
        "kimi_reset_packed",
        "kimi_norm_zero",
        "kimi_scale",
    ),
    *(f"kimi_{name}" for name in GROUPS),
    *("kimi_gates", "kimi_bound", "decode_kimi_one", "decode_kimi_reset", "decode_kimi_odd"),
    *("decode_kimi_gates", "decode_kimi_bound"),
}
GPU_DTYPES = (torch.bfloat16, torch.float32, torch.float16)


def is_usual(subject, name, dtype):
    """Returns whether the default suite judges a case in a dtype."""
    if name in CHANNELS:
        turn = CHANNELS.index(name)
        if subject.emulated and dtype == torch.float16:
            return subject.backend == "triton" and name in HALF
        if subject.emulated:
            every = COMPILED and subject.backend == "triton"
            return (every or name in INTERPRETED) and dtype == GPU_DTYPES[turn % 2]
        dtypes = {"chunked": (torch.float32,), "recurrent": ()}.get(subject.backend, GPU_DTYPES)
        few = (torch.bfloat16, torch.float64, torch.float16)[turn // 3 % 3]
        return dtype in dtypes or (dtype == few and turn % 3 == 0)
    name, backend = name.removeprefix("decode_"), subject.backend
    turn = [*BY_NAME, *LAYERS].index(name)
    if name in LAYERS and not subject.emulated:
        return dtype in (torch.float32, (torch.bfloat16, torch.float16, torch.float64)[turn % 3])
    if backend == "triton" and COMPILED and name not in CELLS:
        every = name in SMALL_ONES or (name in WIDE and dtype != torch.float32)
        return every or dtype == GPU_DTYPES[turn % 3]
    if backend in ("chunked", "recurrent"):
        few = ITSELF if (backend, dtype) == ("recurrent", torch.float64) else CAST
        return name in few or ((backend, dtype) == ("chunked", torch.float32) and name not in LONG)
    if dtype not in (torch.float32, torch.bfloat16):
        return name in HALF
    if name in CELLS:
        return backend == "nki-simulator" and dtype == torch.float32
    by_turns = (
        subject.emulated and (backend == "triton" or name in LAYERS) and name not in BOTH_WIDTHS
    )
    return not by_turns or dtype == (torch.float32, torch.bfloat16)[turn % 2]


def pytest_generate_tests(metafunc):
    """Gives the driver every backend that runs here, or those that --backend names, with its cases.

    The backend varies fastest, so that the judge computes each case of the rule once for all of
    them.
    """
    if "subject" not in metafunc.fixturenames:
        return
    rows = []
    subjects = parity.subjects(metafunc.config.getoption("--backend") or None)
    grids = (parity.GRIDS[key] for key in ("rule", "step", "channels", "channel step", "layers"))
    cases = [(grid, case) for grid in grids for case in grid.cases.values()]
    for (grid, case), dtype, subject in product(cases, DTYPES, subjects):
        quick, slow = EMULATED[subject.backend] if subject.emulated else (ALL, [])
        if dtype in subject.dtypes(case.op) and case.name in (*quick, *slow, *LAYERS, *CHANNELS):
            usual = case.name in (*quick, *LAYERS, *CHANNELS) and is_usual(
                subject, case.name, dtype
            )
            marks = [] if usual else [pytest.mark.slow]
            name = f"{subject.backend}-{case.name}-{dtype_name(dtype)}"
            rows.append(pytest.param(subject, grid, case, dtype, id=name, marks=marks))
    metafunc.parametrize(("subject", "grid", "case", "dtype"), rows)


def tensors_of(case):
    if case.op.endswith("_step"):
        return ["o", "final_state"]
    absent = {"dh0": not case.state, "dA_log": case.gates is None, "ddt_bias": case.gates is None}
    return [tensor for tensor in TENSORS if not absent.get(tensor)]


REFUSED = {
    ("nki-simulator", "conv_linear"): "computes silu; this call is linear",
    ("nki-simulator", "kimi_k256"): "K=256 is above 128",
}


@contextmanager
def watched(subject, case):
    """Lets the emulator run warps in another order by turns,
    and look at small cases with all checks.
    """
    if subject.backend != "triton" or not COMPILED:
        yield
        return
    from tests.support.emulator import driver

    small = case.name in (*SMALL_ONES, *DECODED, *LAYERS)
    order = [*BY_NAME, *STEPS, *LAYERS, *CHANNELS].index(case.name) % 3
    with driver.options(check=small, order=order, quantum=7 if order == 2 else 0) as reports:
        yield
    assert not reports


def test_backend_agrees_with_the_judge(subject, grid, case, dtype, poison):
    """Compares all tensors of a case in one test, because the judge is the costly part."""
    if refusal := REFUSED.get((subject.backend, case.name)):
        with pytest.raises(BackendRefusal, match=refusal):
            grid.verdicts(case, dtype, subject.backend, subject.device)
        return
    with watched(subject, case):
        judged = grid.verdicts(case, dtype, subject.backend, subject.device)
    if case.name not in LAYERS:
        assert [verdict.tensor for verdict in judged] == tensors_of(case)
    failures = [str(verdict) for verdict in parity.worst_first(judged) if not verdict.passed]
    assert judged and not failures, "\n".join(failures)


@pytest.mark.skipif(not COMPILED, reason="asks compiled kernels: --emulate, without a GPU")
@pytest.mark.parametrize("late", [0, 1], ids=["early", "late"])
@pytest.mark.parametrize("order", [0, 1, 2], ids=["ascending", "descending", "shuffled"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_name)
@pytest.mark.parametrize("name", ["k192", "k256"])
def test_wide_heads_on_triton_pass_in_every_order_with_all_checks(name, dtype, order, late):
    from tests.support.emulator import driver

    options = {"check": 1, "order": order, "quantum": 7 if order == 2 else 0}
    with driver.options(**options, late_copies=late, late_products=late) as reports:
        judged = parity.GRIDS["rule"].verdicts(BY_NAME[name], dtype, "triton", "cpu")
    failures = [str(verdict) for verdict in judged if not verdict.passed]
    assert judged and not failures and not reports, "\n".join([*failures, *reports])


def test_a_fault_of_decoding_turns_parity_red(monkeypatch):
    """The state is handed from token to token in bfloat16."""
    step, case = chunked.step, STEPS["decode_no_decay"]

    def rounded(call):
        o, state = step(call)
        return o, state.bfloat16().to(state.dtype)

    assert all(verdict.passed for verdict in step_verdicts(case, torch.float32, "chunked"))
    monkeypatch.setattr(chunked, "step", rounded)
    assert not any(verdict.passed for verdict in step_verdicts(case, torch.float32, "chunked"))


def test_the_decay_of_a_reset_grants_no_error():
    """Allowances for underflow grow with the largest factor of products;
    finfo.min as a logarithm is none.
    """
    spreads = reference(BY_NAME["reset"], torch.float32).spreads
    assert max(spread.absolute for spread in spreads.values()) < 1e-30


def test_every_case_has_its_own_name_and_reason():
    names = [name for grid in parity.GRIDS.values() for name in grid.cases]
    assert len(BY_NAME) == len(CASES) and len(set(names)) == len(names)
    assert all(len(case.reason) > 5 for case in CASES)
    assert len({case.reason for case in CASES}) == len(CASES)


def test_inputs_have_the_properties_that_their_cases_name():
    strong = inputs(BY_NAME["forget"], torch.float32)
    assert (strong.g == -20).all()
    equal = inputs(BY_NAME["collide"], torch.float32)
    assert (equal.k == equal.k[:, :1]).all() and (equal.beta == 1).all()
    near = inputs(BY_NAME["near_2"], torch.float64).k[0, :, 0]
    correlations = (near @ near.T)[~torch.eye(len(near), dtype=torch.bool)]
    assert (
        abs(correlations.mean() - 0.999) < 1e-3
        and (inputs(BY_NAME["near_2"], torch.float32).beta == 2).all()
    )
    alike = inputs(BY_NAME["alike"], torch.float64).k[0, :, 0]
    assert abs((alike @ alike.T).mean() - 1 / 1.09) < 0.01
    mixed = inputs(BY_NAME["mixed"], torch.float32).g
    assert (mixed < -1).any() and (mixed > -0.02).any() and mixed[:, :64].sum(1).min() < -50
    zero = inputs(BY_NAME["norm_zero"], torch.float32)
    assert (zero.k.norm(dim=-1) == 0).any() and not (zero.k.norm(dim=-1) == 0).all()
    for case in CASES:
        if case.tags & SMALL:
            x = inputs(case, torch.bfloat16)
            assert x.q.dtype == x.v.dtype == x.beta.dtype == torch.bfloat16
            beta_max = 0.0 if case.gates is None else 2.0 if case.reflect else 1.0
            g, beta = make_gates(x.g, x.beta, x.A_log, x.dt_bias, beta_max)
            assert x.g.dtype == torch.float32 and (g <= 0).all()
            assert ((beta >= 0) & (beta <= 2)).all()


@pytest.mark.parametrize(
    ("name", "dtype", "digest"),
    [
        ("seam_65", torch.float32, "dd8cafaedac68970"),
        ("packed_empty", torch.bfloat16, "3cdfa77ce7e88a76"),
        ("mixed", torch.float32, "ebeb43af626c2ae1"),
    ],
)
def test_inputs_are_the_same_on_every_machine(name, dtype, digest):
    """Goldens carry these digests: whoever changes an input must record every golden again."""
    assert inputs(BY_NAME[name], dtype).digest()[:16] == digest


def test_unknown_cases_are_refused_with_the_list():
    with pytest.raises(ValueError, match=r"no case is named 'seem_65'; there are: one, one_fresh"):
        select(["seem_65"])


def test_nan_and_infinity_never_pass():
    nan = float("nan")
    assert math.isnan(error(torch.tensor([1.0, nan]), torch.ones(2)))
    assert math.isnan(error(torch.tensor([0.0, nan]), torch.zeros(2)))
    good = Verdict("op", "case", torch.float32, "o", "b", error=1e-7, baseline=1e-7, allowed=2e-7)
    for value in (nan, math.inf):
        bad = replace(good, error=value)
        assert good.passed and not bad.passed and bad.ratio == math.inf
        assert parity.worst_first([good, bad]) == [bad, good]


def test_only_zero_passes_where_the_judge_is_zero():
    zero = torch.zeros(3)
    assert error(zero, zero) == 0.0
    assert error(torch.full((3,), 1e-30), zero) == math.inf
    expected = reference(BY_NAME["final_only"], torch.float32)
    outcome = dict(expected.judge)
    assert not outcome["dq"].any()
    assert all(verdict.passed for verdict in expected.verdicts("judge", outcome))
    outcome["dq"] = torch.full_like(outcome["dq"], 1e-12)
    assert [
        verdict.tensor for verdict in expected.verdicts("judge", outcome) if not verdict.passed
    ] == ["dq"]


def test_a_missing_or_misshapen_tensor_is_refused():
    expected = reference(BY_NAME["one"], torch.float32)
    with pytest.raises(ValueError, match="b returned no dg, dq for case one"):
        expected.verdicts(
            "b", {name: x for name, x in expected.judge.items() if name not in ("dq", "dg")}
        )
    with pytest.raises(ValueError, match="differs from the judge's"):
        error(torch.zeros(1, 3), torch.zeros(3))


def test_parity_allows_twice_the_baselines_error_or_the_floor():
    assert FACTOR == 2.0
    case = BY_NAME["seam_65"]
    single = floor(terms(case), torch.float32)
    assert single == pytest.approx(math.sqrt(32 + 32 + 64) * 2**-24)
    assert floor(terms(case), torch.bfloat16) == pytest.approx(single + 2**-8)
    expected = reference(case, torch.float32)
    for verdict in expected.verdicts("judge", expected.judge):
        assert verdict.error == 0.0
        assert verdict.allowed == max(2 * expected.baseline[verdict.tensor], single)


# A rounding at random to a shorter dtype costs .27 eps: half of .38 eps for four to the nearest
# (`parity.rule`), times sqrt(2). A result passes 4, its gradient 4 more. Of an error that is one
# number the largest of 13 samples is about twice its standard deviation. 2 sqrt(8) .27 eps are 3
# floors of eps / 2; in float32 the floor counts every term.
ROUNDINGS = 3.0
# Where every write erases the one before, o is the last of up to C writes of size sqrt(2) that
# cancel. Each is a product of two operands, so that C / 2 of them, the average, cost sqrt(C / 2)
# sqrt(2) sqrt(2) .27 eps.
ERASED = 2 * 0.27 * (2 * max(CHUNKS)) ** 0.5


def careless(case, dtype):
    """Returns the tensors in which the baseline errs more than by roundings that can be counted."""
    erased = case.keys == "equal" and dtype == torch.bfloat16
    most = (ERASED if erased else ROUNDINGS) * floor(terms(case), dtype)
    if case.has_channels and dtype == torch.bfloat16:
        # both factors of a pair are rounded after they decayed, and so is what reads a state
        most *= 2**0.5
    return [
        name
        for name, value in reference_for(inputs(case, dtype)).baseline.items()
        if not value < most
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "name",
    [
        *("one", "forget", "mixed", "packed_empty", "norm", "gates", "collide"),
        *("kimi_strong", "kimi_split", "kimi_packed", "kimi_bound"),
    ],
)
def test_the_baseline_errs_no_more_than_rounding(name, dtype):
    """A careless baseline would excuse every backend. Badly conditioned inverses are left out."""
    assert not careless({**BY_NAME, **channel_cases.BY_NAME}[name], dtype)


@pytest.mark.parametrize(
    ("name", "dtype", "tensors"),
    [
        ("mixed", torch.float32, ["o", "dq"]),
        ("norm", torch.bfloat16, ["o", "dv"]),
        ("collide", torch.bfloat16, ["o"]),
    ],
    ids=str,
)
def test_a_baseline_that_errs_by_more_than_rounding_is_seen(name, dtype, tensors, monkeypatch):
    """Decays that are differences of running sums in float32, or operands of two bits less."""

    def differences(g):
        b = g.cumsum(-1)
        above = torch.ones(2 * b.shape[-1:]).triu(1) > 0
        return (b[..., :, None] - b[..., None, :]).masked_fill(above, -torch.inf)

    def coarse(self, x):
        digits, exponent = x.frexp()
        return (
            torch.ldexp((64 * digits).round() / 64, exponent) if self.dtype == torch.bfloat16 else x
        )

    monkeypatch.setattr(baseline, "_segment_sums", differences)
    monkeypatch.setattr(baseline.Rounding, "operand", coarse)
    assert set(tensors) <= set(careless(BY_NAME[name], dtype))


def test_the_parity_command_holds_the_simulator_to_a_release(tmp_path, capsys, monkeypatch):
    file = tmp_path / "parity.jsonl"
    command = [
        "--backend",
        "nki-simulator",
        "--case",
        "one",
        "--dtype",
        "float32",
        "--json",
        str(file),
    ]
    monkeypatch.setenv("DELTA_TRN_NKI", "0.2.0")
    for release in ("0.2.0", "all"):
        assert parity.main(command) == 0
        assert (
            f"by the rules of NKI {release}: 1 cases, all 8 passed, at most 0."
            in capsys.readouterr().out
        )
        assert {json.loads(line)["nki"] for line in file.read_text().splitlines()} == {release}
        monkeypatch.delenv("DELTA_TRN_NKI", raising=False)
    monkeypatch.setenv("DELTA_TRN_NKI", "0.1.0")
    assert parity.main(command) == 2
    assert "0.1.0" in capsys.readouterr().err


def test_an_emulated_backend_runs_the_whole_grid_when_asked():
    simulator = parity.Subject("nki-simulator", "cpu")
    few, whole = simulator.cases(None, slow=False), simulator.cases(None, slow=False, whole=True)
    assert len(few["rule"]) < len(whole["rule"]) == sum("slow" not in case.tags for case in CASES)
    assert few["layers"] == whole["layers"]


def test_the_parity_command_reports_and_writes_rows(tmp_path, capsys):
    file, page = tmp_path / "parity.jsonl", tmp_path / "parity.md"
    command = ["--backend", "chunked", "--case", "one", "--case", "ragged", "--json", str(file)]
    assert parity.main([*command, "--markdown", str(page)]) == 0
    output = capsys.readouterr().out
    text = page.read_text()
    assert (
        text.startswith("# Passed: `chunked`\n\n0 of 60 tensors failed.")
        and "`chunked` float64" in text
    )
    assert f"| ragged | {BY_NAME['ragged'].reason} | 0." in text and "**" not in text
    assert "chunked float32: 2 cases, all 15 passed" in output
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(rows) == 60
    assert {row["tensor"] for row in rows} == set(tensors_of(BY_NAME["one"]))
    first = rows[0]
    assert {
        "torch",
        "device",
        "threads",
        "commit",
        "dirty",
        "error",
        "baseline",
        "allowed",
        "passed",
    } <= set(first)


def test_a_reason_with_bars_stays_in_its_cell(tmp_path):
    page, command = (
        tmp_path / "parity.md",
        "--backend chunked --case residual_tiny --dtype float32 --markdown",
    )
    assert parity.main([*command.split(), str(page)]) == 0
    (row,) = [line for line in page.read_text().splitlines() if line.startswith("| residual_tiny")]
    assert row.count("|") - row.count("\\|") == 4 and r"\|k\|" in row


def test_the_parity_command_keeps_what_was_judged_before_it_was_stopped(tmp_path, monkeypatch):
    def stopped(case, *rest):
        if case.name == "ragged":
            raise KeyboardInterrupt
        return verdicts(case, *rest)

    monkeypatch.setattr(parity, "GRIDS", {"rule": parity.Grid(BY_NAME, stopped)})
    file = tmp_path / "parity.jsonl"
    command = ["--backend", "chunked", "--case", "one", "--case", "ragged", "--dtype", "float32"]
    with pytest.raises(KeyboardInterrupt):
        parity.main([*command, "--json", str(file)])
    assert {json.loads(line)["case"] for line in file.read_text().splitlines()} == {"one"}


def test_the_parity_command_fails_on_a_planted_bug(capsys, tmp_path, without_cpu_kernel):
    file = tmp_path / "parity.jsonl"
    command = ["--backend", "chunked", "--case", "forget", "--json", str(file)]
    with planted_bugs.planted(planted_bugs.BY_NAME["chunked: decays are masked after exp"]):
        assert parity.main([*command, "--markdown", str(tmp_path / "parity.md")]) == 1
    text = (tmp_path / "parity.md").read_text()
    assert text.startswith("# Failed: `chunked`") and "| forget |" in text and "**inf** (" in text
    assert "failed" in capsys.readouterr().out
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert any(row["error"] is None and not row["passed"] for row in rows)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--backend", "nope"], "no backend is named 'nope'"),
        (["--case", "nope"], "no case is named 'nope'"),
        (["record"], "0 files named; name the one golden to write or to check"),
        (["check", "/no/such/file"], "No such file"),
    ],
)
def test_the_parity_command_names_a_wrong_argument(argv, message, capsys):
    assert parity.main(argv) == 2
    assert message in capsys.readouterr().err


def test_the_quarter_of_an_hour_has_a_case_of_each_operation_that_neuron_has():
    known = {name: case for grid in parity.GRIDS.values() for name, case in grid.cases.items()}
    assert set(BACKENDS["nki"].rows) == {known[name].op for name in parity.QUARTER}


def test_a_backend_that_cannot_run_here_is_refused_when_named(monkeypatch):
    monkeypatch.setitem(
        BACKENDS,
        "chunked",
        replace(BACKENDS["chunked"], unavailable=lambda device: f"no part for {device}"),
    )
    assert "chunked" not in {subject.backend for subject in parity.subjects()}
    with pytest.raises(BackendRefusal, match="backend chunked cannot run here:\n  no part for"):
        parity.subjects(["chunked"])


def test_a_case_outside_a_backends_limits_is_reported_not_failed(monkeypatch):
    def refuses(call):
        if call["K"] > 16:
            yield f"K={call['K']} is above 16"

    row = replace(BACKENDS["chunked"].rows["gated_delta_rule"], refuses=refuses)
    monkeypatch.setitem(
        BACKENDS, "chunked", replace(BACKENDS["chunked"], rows={"gated_delta_rule": row})
    )
    refused = {}
    subject = parity.Subject("chunked", "cpu")
    cases = [BY_NAME["one_fresh"], BY_NAME["one"]]
    judged = list(parity.measure(subject, parity.GRIDS["rule"], cases, refused))
    assert {verdict.case for verdict in judged} == {"one_fresh"}
    assert [name for name, _ in refused] == ["one"] * len(DTYPES)
    assert all("K=32 is above 16" in reason for reason in refused.values())


def test_parity_judges_the_first_and_last_sequence_of_a_large_batch():
    """Cases of the bench are too large to judge whole."""
    for name in ("ragged", "gates_wide"):
        large = replace(BY_NAME[name], name="large", B=5, tags=BENCH)
        x = reference(large, torch.float32).inputs
        assert x is not None
        q = x.q
        assert q.shape[0] == 2
        assert torch.equal(q[1], inputs(large, torch.float32).q[4])
        judged = verdicts(large, torch.float32, "chunked")
        assert all(verdict.passed for verdict in judged)
    assert {"dA_log", "ddt_bias"} <= {verdict.tensor for verdict in judged}


def test_a_case_that_raises_is_named_and_the_others_are_judged(tmp_path, capsys, monkeypatch):
    """A launch fails in many ways, and one must not cost the rest of a machine's time."""
    judge = parity.rule.verdicts

    def fail(case, dtype, *rest):
        if case.name == "two":
            raise RuntimeError("out of resource: shared memory\nsecond line")
        return judge(case, dtype, *rest)

    grid = parity.GRIDS["rule"]._replace(verdicts=fail)
    monkeypatch.setattr(parity, "GRIDS", {**parity.GRIDS, "rule": grid})
    file = tmp_path / "parity.jsonl"
    words = ("--backend", "chunked", "--case", "one", "--case", "two", "--dtype", "float32")
    assert parity.main([*words, "--json", str(file)]) == 1
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert {row["case"] for row in rows if "tensor" in row} == {"one"}
    (row,) = [row for row in rows if "failed" in row]
    assert (row["case"], row["dtype"], row["passed"]) == ("two", "float32", False)
    assert row["failed"] == "RuntimeError: out of resource: shared memory"
    output, error = capsys.readouterr()
    assert "case two failed in float32" in output and "ended by an exception: two" in error
