"""No NKI kernel has a form that others measured to fail on a Trn1, and the command that counts
these forms can see each of them.
"""

import numpy as np
import pytest

from delta_trn.nki_kernels import (
    delta_residual,
    gated_delta_layer,
    gated_delta_rule_bwd,
    gated_delta_rule_fwd,
    gated_delta_rule_step,
    gated_rms_norm,
    plan,
    tiles,
)
from delta_trn.nki_kernels.kimi_delta_attention import bwd, fwd
from nki_simulator.core.errors import StrictError
from tests.nki_kernels.test_kernels import EXAMPLES, name
from tests.support.nki_judge import record_run
from tests.support.planted_bugs import Bug, planted
from tools import check_nki_kernels

WIDE = {"T": 40, "H": 2, "K": 160, "V": 144, "C": 32, "lanes": 2, "width": 2, "dtype": "bfloat16"}
SIZES = [  # that have sums, bundles and lines which the examples of all kernels have not
    gated_delta_rule_fwd.example(**WIDE),
    gated_delta_rule_bwd.example(**WIDE),
    gated_delta_rule_bwd.example(**WIDE | {"dtype": "float32", "H": 1, "HV": 3}),
    bwd.example(**WIDE | {"K": 64}),
    gated_delta_rule_step.example(H=2, HV=6, K=256, V=32),
    gated_delta_rule_step.example(B=2, H=3, K=64, V=16, channels=1),
    gated_delta_layer.example(T=72, H=2, HV=4, K=32, V=144, C=32, lanes=4, width=2, backward=1),
    gated_rms_norm.example(M=130, V=700, backward=1),
]


@pytest.mark.parametrize(("kernel", "arguments"), EXAMPLES + SIZES, ids=name)
def test_no_kernel_has_a_form_that_fails_on_trn1(kernel, arguments):
    findings, _ = check_nki_kernels.check(kernel, *arguments)
    assert findings.passed, findings


@pytest.mark.parametrize("group", [3, 5, 7])
@pytest.mark.parametrize("T", [3, 140])
@pytest.mark.parametrize("module", [fwd, bwd, gated_delta_rule_fwd, gated_delta_rule_bwd])
def test_odd_groups_of_value_heads_fit_and_have_no_such_form(module, T, group):
    how = plan.choose(1, 1, group, 16, 8, channels=module in (fwd, bwd))
    kernel, arguments = module.example(
        T=T, H=1, HV=group, K=16, V=8, dtype="bfloat16", lanes=how.lanes, width=how.width
    )
    findings, _ = check_nki_kernels.check(kernel, *arguments)
    assert findings.passed, findings


@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize(("H", "group"), [(1, 3), (2, 5), (3, 7), (2, 4), (4, 1), (3, 2)])
def test_bundles_hold_every_head_once_and_divide_groups_evenly(H, group, width):
    bundles = plan.list_bundles(2, H, H * group, width)
    heads = [(b["n"], head) for b in bundles for head in range(b["first"], b["first"] + b["lanes"])]
    assert heads == [(n, head) for n in range(2) for head in range(H * group)]
    assert max(b["lanes"] for b in bundles) <= max(width, 1)
    slots = plan.count_slots(H, H * group, width)
    assert slots % H == 0
    if group > width:
        sizes = [b["lanes"] for b in bundles]
        assert max(sizes) - min(sizes) <= 1 and slots == H * -(-group // width)
        assert all(b["slot"] // (slots // H) == b["key_first"] for b in bundles)


@pytest.mark.parametrize(("kernel", "arguments"), EXAMPLES + SIZES, ids=name)
def test_products_say_what_nki_would_decide(kernel, arguments, monkeypatch):
    """nki 0.2.0 has no accumulate= and decides by the view; later releases are told."""
    silent = record_run(kernel, *arguments, trace=False, check_source=False)
    monkeypatch.setattr(tiles, "multiply_tiles", tiles.multiply_and_say)
    told = record_run(kernel, *arguments, trace=False, check_source=False, nki="0.6.0")
    for a, b in zip(flat(silent.outputs), flat(told.outputs), strict=True):
        assert np.array_equal(a, b)


def test_a_product_that_says_the_wrong_thing_is_seen(monkeypatch):
    bug = Bug("", "nki_kernels.chunk:multiply_parts", "adds or part > 0", "adds", "")
    kernel, arguments = SIZES[0]
    with planted(bug), pytest.raises(AssertionError):
        test_products_say_what_nki_would_decide(kernel, arguments, monkeypatch)


def flat(outputs):
    return outputs if isinstance(outputs, tuple) else (outputs,)


PLANTED = {
    "gpsimd": (
        Bug("", "nki_kernels.tiles:combine", "op=op)", "op=op, engine=nisa.engine.gpsimd)", ""),
        delta_residual.example(M=3, D=96),
    ),
    "sums_at_risk": (
        Bug("", "nki_kernels.chunk:cut_lanes", " if len(parts) == 1 else 1", "", ""),
        SIZES[0],
    ),
    "open_sums_read": (
        Bug(
            "",
            "nki_kernels.chunk_gradients:compute_key_gradients",
            "add_tile(dk_ps, chunk.written[lane], table)",
            "copy_tile(dk_ps); add_tile(dk_ps, chunk.written[lane], table)",
            "",
        ),
        SIZES[1],
    ),
    "four_dimensions": (
        Bug(
            "",
            "nki_kernels.kimi_delta_attention.chunk_gradients:scale_level",
            'out_sb = sbuf(chunk.keys.shape, chunk.table["products"])',
            'out_sb = sbuf(chunk.keys.shape, chunk.table["products"])\n'
            "    rows, _, lanes, K = chunk.keys.shape\n"
            "    four = [[2 * lanes * K, rows], [lanes * K, 2], [16, 2], [4, 2], [1, 2]]\n"
            "    own = chunk.keys.ap(pattern=four, offset=0)\n"
            "    multiply(sbuf((rows, 2, 2, 2, 2)), own, own)",
            "",
        ),
        bwd.example(T=8, H=2, K=32, V=8, lanes=2, width=2, dtype="bfloat16"),
    ),
}
REFUSALS = {
    "gpsimd": "gpsimd products",
    "sums_at_risk": "several sums",
    "open_sums_read": "open sums",
    "four_dimensions": "four dimensions",
}


@pytest.mark.parametrize("form", PLANTED)
def test_the_scan_sees_each_form_and_the_simulator_refuses_it(form):
    bug, (kernel, arguments) = PLANTED[form]
    with planted(bug):
        findings, _ = check_nki_kernels.check(kernel, *arguments)
        with pytest.raises(StrictError, match=REFUSALS[form]):
            record_run(kernel, *arguments, trace=False, check_source=False)
    assert not findings.passed and getattr(findings, form) > 0


def test_the_command_runs_a_case_and_names_an_unknown_one(capsys):
    assert check_nki_kernels.main(["--case", "two", "--dtype", "bfloat16"]) == 0
    out = capsys.readouterr().out
    assert "gated_delta_rule_bwd" in out and out.endswith("passed\n")
    with pytest.raises(SystemExit):
        check_nki_kernels.main(["--case", "none such"])
    assert "no case of parity is named 'none such'" in capsys.readouterr().err


def test_the_command_fails_where_a_kernel_has_a_form(capsys):
    with planted(PLANTED["gpsimd"][0]):
        assert check_nki_kernels.main(["--case", "residual_odd", "--dtype", "float32"]) == 1
    assert capsys.readouterr().out.endswith("failed\n")
