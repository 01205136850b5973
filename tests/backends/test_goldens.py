"""Recorded outputs of a backend are judged again,
and refused where they or their inputs were changed.
"""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from delta_trn.backends.checks import BackendRefusal
from delta_trn.backends.parity import __main__ as parity
from delta_trn.backends.parity import goldens
from delta_trn.backends.parity.rule_cases import BY_NAME
from tests.support import planted_bugs


@pytest.fixture
def golden(tmp_path):
    path = tmp_path / "golden.safetensors"
    goldens.record(path, "chunked", [BY_NAME["one"], BY_NAME["packed_single"]], "cpu")
    return path


def rewrite(path, *, tensors=None, header=None):
    """Rewrites a golden with its tensors or its header changed."""
    with safe_open(path, framework="pt") as file:
        content_header = json.loads(file.metadata()["golden"])
    (header or (lambda _: None))(content_header)
    content = load_file(path)
    (tensors or (lambda content: None))(content)
    save_file(content, path, metadata={"golden": json.dumps(content_header)})


def test_a_golden_has_the_mode_of_every_new_file(golden):
    beside = golden.with_name("beside")
    beside.touch()
    assert golden.stat().st_mode == beside.stat().st_mode


def test_a_recorded_golden_is_judged_again(golden, capsys):
    judged = goldens.check(golden)
    assert len(judged) == 2 * 4 * 8 and all(v.passed for v in judged)
    assert parity.main(["check", str(golden)]) == 0
    assert "chunked float32: 2 cases" in capsys.readouterr().out


def test_a_golden_with_other_inputs_is_refused(golden):
    rewrite(golden, header=lambda header: header["rows"][0].update(inputs="0" * 64))
    with pytest.raises(
        goldens.GoldenRefusal, match="other inputs for case one in float32: 000000000000 there"
    ):
        goldens.check(golden)


def test_a_backend_that_lacks_dtypes_or_refuses_a_case_records_the_rest(tmp_path, monkeypatch):
    """Until a test looked, the command of docs/trainium.md ended at the first case's float16."""
    path, compute = tmp_path / "x.golden", goldens.outcome
    refused: dict = {}

    def outcome(x, backend):
        if x.case.name == "one":
            raise BackendRefusal("keys are too long")
        return compute(x, backend)

    monkeypatch.setattr(goldens, "outcome", outcome)
    cases = [BY_NAME["one"], BY_NAME["two"]]
    judged = goldens.record(path, "nki-simulator", cases, "cpu", refused)
    assert {name for name, _ in refused} == {"one"} and len(refused) == 2
    assert {v.dtype for v in judged} == {torch.float32, torch.bfloat16}
    assert [str(v) for v in goldens.check(path)] == [str(v) for v in judged]


def test_what_was_recorded_with_errors_of_functions_is_judged_with_them(tmp_path, monkeypatch):
    path = tmp_path / "x.golden"
    monkeypatch.setenv("DELTA_TRN_NKI_FUNCTIONS", "measured:1")
    judged = goldens.record(path, "nki-simulator", [BY_NAME["two"]], "cpu")
    monkeypatch.delenv("DELTA_TRN_NKI_FUNCTIONS")
    assert [str(v) for v in goldens.check(path)] == [str(v) for v in judged]
    rewrite(path, header=lambda header: header.update(inexact=False))
    pairs = list(zip(goldens.check(path), judged, strict=True))
    assert any(again.allowed < before.allowed for again, before in pairs)
    rewrite(path, header=lambda header: header.update(backend="nki") or header.pop("inexact"))
    allowed = [v.allowed for v in goldens.check(path)]
    assert allowed == [v.allowed for v in judged]


def test_a_golden_whose_outputs_were_changed_is_refused(golden):
    rewrite(golden, tensors=lambda content: content["one/float32/dq"].add_(1.0))
    with pytest.raises(
        goldens.GoldenRefusal, match=r"claims error .* the file or the judge was changed"
    ):
        goldens.check(golden)


def test_a_golden_recorded_from_a_faulty_backend_fails(tmp_path, without_cpu_kernel):
    path = tmp_path / "golden.safetensors"
    with planted_bugs.planted(planted_bugs.BY_NAME["chunked: the inverse is a power series"]):
        goldens.record(path, "chunked", [BY_NAME["collide"]], "cpu")
    assert any(not verdict.passed for verdict in goldens.check(path))


def test_a_file_that_is_no_golden_is_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(goldens.GoldenRefusal, match="is 'no golden', not"):
        goldens.check(path)
