"""Parity of the Triton kernels under other launches, and faults planted in their kernels.

The grid itself runs in tests/parity/test_parity.py.
"""

from dataclasses import replace
from inspect import signature

import pytest
import torch

pytest.importorskip("triton", reason="the triton extra is not installed")

from delta_trn.backends.dispatch import TRITON_DEVICES
from delta_trn.backends.parity.rule import verdicts
from delta_trn.backends.parity.rule_cases import BY_NAME, Case, select
from delta_trn.triton_kernels import gated_delta_rule_bwd, gated_delta_rule_fwd
from delta_trn.triton_kernels.launch import adjust, config

SCANS = ("scan", "reverse")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COMPILED = DEVICE == "cuda" or DEVICE in TRITON_DEVICES
SLOW = pytest.mark.slow if DEVICE == "cpu" else ()


def judge(name, dtype=torch.float32):
    return {verdict.tensor: verdict for verdict in verdicts(BY_NAME[name], dtype, "triton", DEVICE)}


@pytest.mark.skipif(not COMPILED, reason="the interpreter knows no warps")
@pytest.mark.parametrize("warps", [2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "name",
    [pytest.param(case.name, marks=() if case.name == "gva_2" else SLOW) for case in select()],
)
def test_parity_holds_in_layouts_of_two_four_and_eight_warps(name, dtype, warps):
    """A product's layout follows the number of warps:
    Triton before 3.7.1 was wrong at 4 and right at 2.
    """

    def forced(row):
        tiles = ("prepare", "scan", "reverse", "gradients")
        return replace(row, **{tile: replace(getattr(row, tile), warps=warps) for tile in tiles})

    with adjust(forced):
        failures = [str(verdict) for verdict in judge(name, dtype).values() if not verdict.passed]
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize(
    ("groups", "dtype"),
    [(3, torch.bfloat16), (3, torch.float16), (5, torch.float32), (7, torch.bfloat16)],
    ids=str,
)
def test_parity_holds_for_any_number_of_value_heads_of_a_key_head(groups, dtype):
    """The grid has 1, 2, 4 and 8."""
    case = Case("gva", 1, 70, 2, 32, 32, "", HV=2 * groups, state=True, loss=("o", "final_state"))
    failures = [
        str(verdict) for verdict in verdicts(case, dtype, "triton", DEVICE) if not verdict.passed
    ]
    assert not failures, "\n".join(failures)


def test_parity_holds_in_the_wide_scans_of_many_heads():
    """Of two tiles of 128 columns, the second is half empty at V = 192.
    The case itself has few heads.
    """
    many = config(96, 192, itemsize=2)
    assert many.scan.columns == 128
    with adjust(lambda row: replace(row, scan=many.scan, reverse=replace(many.scan, stages=2))):
        failures = [
            str(verdict) for verdict in judge("k96", torch.bfloat16).values() if not verdict.passed
        ]
    assert not failures, "\n".join(failures)


# Without a GPU each of the first cases is judged in one dtype; the rest is slow there.
TURNED = {"seam_65": torch.float32, "reset_packed": torch.float16, "odd": torch.bfloat16,
          "norm_huge": torch.float16, "values_tiny": torch.bfloat16}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=() if dtype == TURNED.get(name) else SLOW)
        for name in (*TURNED, "reflect", "mixed", "packed_gva")
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
    ],
    ids=str,
)
@pytest.mark.parametrize("upright", [False, True], ids=["transposed", "upright"])
def test_parity_holds_in_scans_of_transposed_and_upright_tiles(name, upright, dtype):
    """The number of heads decides which of them the table has, up to K = 128."""

    def turned(row):
        return replace(
            row, **{kernel: replace(getattr(row, kernel), upright=upright) for kernel in SCANS}
        )

    with adjust(turned):
        failures = [str(verdict) for verdict in judge(name, dtype).values() if not verdict.passed]
    assert not failures, "\n".join(failures)


@pytest.mark.skipif(
    DEVICE not in TRITON_DEVICES, reason="only the emulator lets wgmma read as late as it may"
)
def test_parity_fails_where_a_tile_is_overwritten_before_its_product_is_done(monkeypatch):
    """A planted fault: a pipelined loop does not wait for the products
    of a tile that it also reads.
    """
    kernel = gated_delta_rule_bwd.gradients_kernel

    class Hasty:
        def __getitem__(self, grid):
            return lambda *given, **named: kernel[grid](*given, **named | {"PIPELINED": False})

    monkeypatch.setattr(gated_delta_rule_bwd, "gradients_kernel", Hasty())
    assert not judge("k192", torch.bfloat16)["dk"].passed


def test_parity_fails_when_a_scan_writes_its_tiles_transposed(monkeypatch):
    """A planted fault: each tile of U lies column after column."""
    original = gated_delta_rule_fwd.scan

    def transposed(*arguments, U, **named):
        original(*arguments, U=U, **named)
        U.copy_(U.mT.reshape(U.shape))

    monkeypatch.setattr(gated_delta_rule_fwd, "scan", transposed)
    assert not judge("odd")["dk"].passed


def test_parity_fails_when_one_term_of_the_decay_gradient_is_rounded(monkeypatch):
    """A planted fault: <dS', S> off by a bfloat16 rounding of dS' in a float32 call."""
    original = gated_delta_rule_bwd.gradients

    def rounded(*arguments, **named):
        given = signature(original).bind(*arguments, **named).arguments
        S, dS = given["S"], given["dS"]
        given["carry"][..., 0] += ((dS.bfloat16() - dS) * S).sum((2, 3))
        original(*arguments, **named)

    monkeypatch.setattr(gated_delta_rule_bwd, "gradients", rounded)
    assert {name for name, verdict in judge("seam_65").items() if not verdict.passed} == {"dg"}


def test_parity_fails_when_the_saved_states_are_rounded(monkeypatch):
    """A planted fault: states rounded to bfloat16 in a float32 call."""
    original = gated_delta_rule_fwd.scan

    def lossy(*arguments, S, U, **named):
        original(*arguments, S=S, U=U, **named)
        S.copy_(S.bfloat16())

    monkeypatch.setattr(gated_delta_rule_fwd, "scan", lossy)
    assert judge("seam_65")["dq"].ratio > 10
