"""Where functions come from tables, samples have tables of their own: what that allows, and what
not.
"""

import json
import zlib
from contextlib import contextmanager
from importlib import import_module
from itertools import product

import numpy as np
import pytest
import torch

from delta_trn.backends.parity import __main__ as parity
from delta_trn.backends.parity import rule, rule_cases, tables
from delta_trn.backends.parity.judge import error
from tests.support import planted_bugs

NAME = "nki-simulator"
# by what error the simulator's functions are off, from a uniform number; None: the simulator's own
SHAPES = {
    "own": None,
    "power": lambda u: u ** np.log2(10.0),
    "logarithmic": lambda u: 10.0 ** (-2 * u),  # median and maximum are the same
}


@contextmanager
def functions_off(
    monkeypatch, shape: str = "own", piece: int = 0, times: float = 1.0, seed: int = 1
):
    """Gives functions of the simulator's Scalar engine errors of tables.

    shape   of the distribution
    piece   low bits of an argument that do not matter
    times   what was measured
    """

    def err(name, inputs, results, seed):
        if name in ("copy", "square"):
            return results
        x = np.ascontiguousarray(inputs, np.float32)
        bits = (x.view(np.uint32) >> np.uint32(piece)).astype(np.uint64)
        salt = np.uint64(zlib.crc32(f"{seed}{name}".encode()))
        mixed = (bits + salt) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
        mixed *= np.uint64(0xBF58476D1CE4E5B9)
        mixed ^= mixed >> np.uint64(32)
        u = (mixed & np.uint64(0xFFFFFF)).astype(float) / 2**24
        sign = np.where(mixed >> np.uint64(40) & np.uint64(1), 1.0, -1.0)
        return (results * (1 + times * tables.MOST * sign * SHAPES[shape](u))).astype(np.float32)

    with monkeypatch.context() as patched:
        patched.setenv(tables.SIMULATED, f"measured:{seed}")
        if shape != "own":
            patched.setattr(import_module("nki_simulator.isa.activation"), "err", err)
        yield


def failed(case: str, dtype: str) -> list[str]:
    """Returns the tensors of a case that fail."""
    subject, found = parity.Subject(NAME, "cpu"), []
    for key, cases in subject.cases([case], slow=False).items():
        refused: dict = {}
        judged = parity.measure(subject, parity.GRIDS[key], cases, refused, [getattr(torch, dtype)])
        found += [v.tensor for v in judged if not v.passed]
        assert not refused
    return found


CASES = ("packed", "decode_gva_2", "decode_kimi_gva", "norm_head", "conv_packed", "loss_ignored")
SLOW = ("ragged", "mixer_groups", "kimi_gva", "residual_odd")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_a_backend_with_the_errors_that_were_measured_passes(case, dtype, monkeypatch):
    ways = [("own", 0), *product(("power", "logarithmic"), (0, 17))]
    if dtype == "bfloat16":  # there rounding decides, but for weights' gradients
        ways = ways[:1]
    for seed, (shape, piece) in enumerate(ways):
        with functions_off(monkeypatch, shape, piece, seed=seed):
            assert failed(case, dtype) == []


@pytest.mark.parametrize("case", ["packed", "decode_gva_2", "norm_head", "conv_packed"])
def test_errors_ten_times_as_large_do_not(case, monkeypatch):
    with functions_off(monkeypatch, "logarithmic", 0, times=10):
        assert len(failed(case, "float32")) >= 2


@pytest.mark.parametrize("case", ["packed", "norm_head", "loss_ignored"])
def test_the_old_criterion_does_not_pass_the_errors_that_were_measured(case, monkeypatch):
    monkeypatch.setattr(tables, "SIMULATED", "NOTHING")  # which judges_functions asks
    monkeypatch.setenv("DELTA_TRN_NKI_FUNCTIONS", "measured:1")
    assert failed(case, "float32")


@pytest.mark.parametrize(
    ("bug", "case"),
    [
        ("nki: dg without what tokens read from the state", "seam_129"),
        ("nki: dg without erasures", "seam_129"),
        ("nki: dk without what goes through the norm", "norm_zero"),
    ],
)
def test_a_term_that_a_kernel_leaves_out_fails_with_errors_of_functions_too(bug, case, monkeypatch):
    with functions_off(monkeypatch):
        assert failed(case, "float32") == []
        with planted_bugs.planted(planted_bugs.BY_NAME[bug]):
            assert failed(case, "float32")


def test_the_parity_command_says_that_functions_are_off(tmp_path, monkeypatch, capsys):
    """`DELTA_TRN_NKI_FUNCTIONS=measured:1 delta-trn parity --backend nki-simulator`."""
    lines = tmp_path / "lines"
    words = ["--backend", NAME, "--case", "conv_one", "--dtype", "float32", "--json", str(lines)]
    with functions_off(monkeypatch):
        assert parity.main(words) == 0
        assert "with functions off as measured:1" in " ".join(capsys.readouterr().out.split())
        rows = [json.loads(line) for line in lines.read_text().splitlines()]
        assert {row["functions"] for row in rows} == {"measured:1"}
    assert parity.main(words) == 0
    assert "functions off" not in " ".join(capsys.readouterr().out.split())
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    assert not any("functions" in row for row in rows)


def test_the_chip_is_judged_with_errors_of_functions_and_nothing_else_is(monkeypatch):
    monkeypatch.delenv(tables.SIMULATED, raising=False)
    assert tables.judges_functions("nki")
    for backend in ("nki-simulator", "chunked", "triton", "recurrent"):
        assert not tables.judges_functions(backend)
    monkeypatch.setenv(tables.SIMULATED, "measured:7")
    assert tables.judges_functions("nki-simulator") and not tables.judges_functions("chunked")


def test_without_errors_of_functions_the_allowance_is_what_it_was(monkeypatch):
    monkeypatch.delenv(tables.SIMULATED, raising=False)
    case = rule_cases.BY_NAME["two"]
    plain = rule.reference(case, torch.float32)
    off = rule.reference(case, torch.float32, inexact=True)
    assert max(plain.baseline.values()) < 1e-6
    assert max(off.baseline.values()) > 10 * max(plain.baseline.values())
    # where results are rounded to bfloat16, next to nothing is granted
    plain, off = (rule.reference(case, torch.bfloat16, inexact=x) for x in (False, True))
    for name in ("o", "dq", "dk", "dv"):
        assert off.baseline[name] == pytest.approx(plain.baseline[name], rel=0.2)


class TestTables:
    def test_errors_have_the_median_and_the_maximum_that_were_measured(self):
        x = -20 * torch.rand(100_000, generator=torch.Generator().manual_seed(0))
        for place in range(4):
            table = tables.Tables(3, 12)
            for _ in range(place):
                table.begin(1)
            e = (table.factors("exp", x).double() - 1).abs()
            # of pieces there are few
            assert e.median().item() == pytest.approx(tables.MEDIAN, rel=0.1 if place % 2 else 0.5)
            assert 0.5 * tables.MOST < e.max().item() <= tables.MOST * 1.01

    def test_a_table_gives_one_number_for_one_argument_and_each_sample_and_function_another(self):
        table = tables.Tables(3, 12)
        table.begin(4)
        x = torch.linspace(-5, 5, 1001).expand(4, 1001)
        e = table.factors("exp", x)
        assert torch.equal(e, table.factors("exp", x))
        assert torch.equal(e[:, ::2], table.factors("exp", x[:, ::2]))
        for i in range(1, 4):
            assert (e[0] == e[i]).float().mean() < 0.05
        assert (e[1] == table.factors("exp'", x)[1]).float().mean() < 0.05
        # every other sample has pieces
        same = (e[:, 1:] == e[:, :-1]).float().mean(1)
        assert same[1] > 0.5 > 0.05 > same[0] and same[3] > 0.5 > 0.05 > same[2]

    def test_the_samples_share_the_range_at_each_argument(self):
        """With exp(0) off, one number decides: the largest of the samples must be near MOST."""
        for x in (0.0, -1.0, 0.3):
            table, errors = tables.Tables(4, 12), []
            for _ in range(12):
                table.begin(1)
                errors.append(table.factors("exp", torch.tensor([x])).item() - 1)
            for half in (errors[::2], errors[1::2]):  # with and without pieces
                assert {np.sign(e) for e in half} >= {-1.0, 1.0}
            assert max(map(abs, errors)) > 0.5 * tables.MOST

    def test_the_gradient_is_that_of_the_function_with_an_error_of_its_own(self):
        x = torch.linspace(-3, 0, 50).requires_grad_()
        table = tables.Tables(5, 12)
        y = table(torch.exp, x)
        (dx,) = torch.autograd.grad(y.sum(), x)
        assert 0 < error(y.detach(), x.detach().double().exp()) < tables.MOST
        assert 0 < error(dx, x.detach().double().exp()) < tables.MOST
        assert not torch.equal(dx, y.detach())

    def test_other_dtypes_and_other_counts_are_refused(self):
        table = tables.Tables(5, 12)
        with pytest.raises(TypeError, match=r"float32 arguments, not torch\.float64"):
            table(torch.exp, torch.zeros(3, dtype=torch.float64))
        table.begin(3)
        with pytest.raises(ValueError, match="2 rows for 3 samples"):
            table(torch.exp, torch.zeros(2))
