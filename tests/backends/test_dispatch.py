"""Dispatch chooses a backend by sizes and devices, gives reasons,
and never falls back in silence.
"""

import re
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import torch

from delta_trn import backends
from delta_trn.backends import (
    BackendRefusal,
    default_backend,
    dispatch,
    find_layer_backend,
    machine,
)
from delta_trn.backends import __main__ as command
from delta_trn.backends.dispatch import BACKENDS, Backend, Call, Row, choose, describe, register
from delta_trn.backends.machine import ROOT
from tests.support.planted_bugs import Bug, planted

CALL = Call(
    "gated_delta_rule", "cpu", torch.float32, {"H": 2, "HV": 2, "K": 64, "V": 64}, gradients=True
)


def small_heads(call):
    for name in ("K", "V"):
        if call[name] > 32:
            yield f"{name}={call[name]} is above 32"
    if "packed" in call.options:
        yield "does not take packed sequences"


@pytest.fixture
def add_backend(monkeypatch):
    """Returns a function that registers a backend for the duration of a test."""
    monkeypatch.setattr(dispatch, "BACKENDS", dict(BACKENDS))

    def add(name, **declared):
        row = Row(f"backends.{name}", frozenset({torch.float32}), **declared)
        dispatch.register(Backend(name, {"gated_delta_rule": row}))

    return add


def test_cuda_tensors_run_on_triton():
    if dispatch.BACKENDS["triton"].unavailable("cuda"):
        pytest.skip("triton is not installed, so nothing is chosen on cuda")
    assert choose(replace(CALL, device="cuda")).name == "triton"


def test_nothing_falls_back_on_a_device_without_its_own_backend():
    with pytest.raises(BackendRefusal) as refusal:
        choose(replace(CALL, device="xla"))
    message = " ".join(str(refusal.value).split())
    assert (
        "no backend can run gated_delta_rule for H=2 HV=2 K=64 V=64 float32 on xla, gradients on"
        in message
    )
    assert 'chunked runs on xla only when asked for: backend="chunked"' in message
    assert 'recurrent runs on xla only when asked for: backend="recurrent"' in message
    assert "triton runs on cpu, cuda; tensors are on xla" in message
    assert "nki-simulator runs on cpu; tensors are on xla" in message


def test_a_backend_that_the_caller_allows_is_chosen_after_the_automatic_ones():
    with default_backend(allow=["chunked"]):
        assert choose(replace(CALL, device="xla")).name == "chunked"
        assert choose(CALL).name == "chunked"
    with pytest.raises(BackendRefusal):
        choose(replace(CALL, device="xla"))


def test_a_call_may_name_another_backend_than_the_default():
    default_backend("recurrent")
    assert choose(CALL).name == "recurrent"
    assert choose(CALL, "chunked").name == "chunked"
    default_backend()
    assert choose(CALL).name == "chunked"


def test_default_backend_restores_the_previous_one_even_after_an_exception():
    default_backend("recurrent")
    with pytest.raises(KeyError), default_backend("chunked"):
        assert choose(CALL).name == "chunked"
        raise KeyError
    assert choose(CALL).name == "recurrent"


def test_a_default_backend_entered_twice_ends_with_its_blocks():
    default = default_backend("recurrent")
    with default:
        with default:
            assert choose(CALL).name == "recurrent"
        assert choose(CALL).name == "recurrent"
    assert choose(CALL).name == "chunked"


def test_the_default_holds_in_every_thread():
    names = []
    with default_backend("recurrent"):
        thread = threading.Thread(target=lambda: names.append(choose(CALL).name))
        thread.start()
        thread.join()
    assert names == ["recurrent"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "tritn"}, r"no backend is named 'tritn'; registered: triton, nki, chunked, "),
        ({"allow": ["nope"]}, r"no backend is named 'nope'"),
    ],
)
def test_default_backend_refuses_an_unknown_name(arguments, message):
    with pytest.raises(BackendRefusal, match=message):
        default_backend(**arguments)
    assert choose(CALL).name == "chunked"


@pytest.mark.parametrize(
    ("declared", "call", "reason"),
    [
        ({"refuses": small_heads}, {"sizes": {"K": 256}}, "K=256 is above 32"),
        ({"refuses": small_heads}, {"options": ("packed",)}, "does not take packed sequences"),
        ({}, {"dtype": torch.float64}, "computes float32; tensors are float64"),
        ({"devices": frozenset({"cuda"})}, {}, "runs on cuda; tensors are on cpu"),
        ({}, {"op": "gated_delta_rule_step"}, "does not implement gated_delta_rule_step"),
    ],
)
def test_a_refusal_names_the_limit_that_a_call_exceeds(add_backend, declared, call, reason):
    add_backend("limited", **declared)
    with pytest.raises(BackendRefusal, match=rf"limited +{reason}"):
        choose(replace(CALL, **call), "limited")


def test_a_refusal_lists_every_reason(add_backend):
    add_backend("limited", refuses=small_heads, devices=frozenset({"cuda"}))
    with pytest.raises(BackendRefusal) as refusal:
        choose(CALL, "limited")
    assert [line.split("  ")[-1] for line in str(refusal.value).splitlines()[1:]] == [
        "runs on cuda; tensors are on cpu",
        "K=64 is above 32",
        "V=64 is above 32",
    ]


@pytest.mark.parametrize("op", sorted(dispatch.TABLE["triton"]))
@pytest.mark.parametrize(
    ("capability", "version", "reason"),
    [
        *(
            ((major, minor), "3.7.1", "")
            for major, minor in ((8, 0), (8, 6), (8, 9), (9, 0), (12, 0), (12, 1))
        ),
        *(((major, 0), "3.9.0", "") for major in (9, 10, 12)),
        ((10, 3), "3.9.0", ""),
        ((10, 0), "3.7.1", "needs Triton 3.9 on compute capability 10.0, where 3.7.1"),
        ((7, 5), "3.7.1", "8.x, 9.0, 10.x and 12.x; this GPU has 7.5"),
        ((11, 0), "3.9.0", "this GPU has 11.0"),
        ((9, 4), "3.9.0", "this GPU has 9.4"),  # as ROCm says of an MI300X
    ],
)
def test_triton_refuses_gpus_that_it_has_no_launches_for(
    op, capability, version, reason, version_of
):
    pytest.importorskip("triton", reason="the triton extra is not installed")
    version_of(version)
    call = Call(op, "cuda", torch.bfloat16, capability=capability)
    reasons = BACKENDS["triton"].refusals(call)
    assert bool(reasons) == bool(reason) and reason in "".join(reasons)
    if reason:
        with pytest.raises(BackendRefusal, match=re.escape(reason)):
            choose(call, "triton")


def test_a_call_on_a_gpu_is_refused_by_its_own_capability_before_anything_is_launched(monkeypatch):
    pytest.importorskip("triton", reason="the triton extra is not installed")
    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda place: asked.append(place) or (7, 0)
    )
    machine.compute_capability.cache_clear()
    try:
        arguments = torch.bfloat16, (("K", 64),), (), False
        with pytest.raises(BackendRefusal, match=r"this GPU has 7\.0"):
            dispatch.choose_name("gated_delta_rule", "cuda", 3, *arguments, None, None, (), True)
    finally:
        machine.compute_capability.cache_clear()
    assert asked == [3]


def test_a_kernel_of_a_whole_layer_is_not_found_on_a_backend_that_is_merely_allowed():
    x, weight = torch.zeros(1, 8, 112), torch.zeros(112, 4)
    with default_backend("chunked", allow=["nki-simulator"]):
        assert find_layer_backend(x, weight, 2, 16, 24) is None
    with default_backend("nki-simulator", allow=["chunked"]):
        assert find_layer_backend(x, weight, 2, 16, 24) == "nki-simulator"
        assert find_layer_backend(x, torch.zeros(112, 5), 2, 16, 24) is None


def test_a_refusal_names_a_missing_package(monkeypatch):
    missing = replace(
        BACKENDS["chunked"], unavailable=lambda device: f"needs a part for {device}: pip install it"
    )
    monkeypatch.setitem(BACKENDS, "chunked", missing)
    with pytest.raises(BackendRefusal, match=r"chunked +needs a part for cpu: pip install it"):
        choose(CALL)


def test_registering_a_used_name_or_an_unknown_operation_is_refused():
    with pytest.raises(
        ValueError,
        match=r"'chunked' is registered already; choose another name",
    ):
        register(BACKENDS["chunked"])
    with pytest.raises(ValueError, match=r"declares \['softmax'\]; operations are"):
        register(Backend("new", {"softmax": Row("backends.new", frozenset())}))
    assert "new" not in BACKENDS


def test_describe_lists_what_runs_on_a_device_and_why_the_rest_does_not():
    rows = {(row.op, row.backend): row for row in dispatch.describe(["cpu", "xla"])}
    assert set(rows) == {(op, name) for op in dispatch.OPERATIONS for name in BACKENDS}
    chunked = rows["gated_delta_rule", "chunked"]
    assert chunked.automatic == ("cpu",)
    assert chunked.named == ("cpu", "xla")
    triton = rows["gated_delta_rule", "triton"]
    assert "xla: runs on cpu, cuda; tensors are on xla" in triton.reasons
    assert "cuda: this machine has no such device" in triton.reasons
    assert {(row.op, row.backend) for row in backends.describe()} == set(rows)


def test_the_command_prints_every_backend_and_every_reason(capsys):
    assert command.main(["--all"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert output.startswith("devices here: ")
    assert all(name in output for name in (*BACKENDS, *dispatch.OPERATIONS))
    reasons = [reason for row in backends.describe() for reason in row.reasons]
    assert all(reason.split(": ")[0] in output for reason in reasons)


def test_the_command_prints_one_short_row_per_operation_unless_it_is_asked_for_more(capsys):
    assert command.main([]) == 0
    output = capsys.readouterr().out
    (row,) = (line for line in output.splitlines() if " gated_delta_rule " in line)
    assert [cell.strip() for cell in row.split("│")][2] == "chunked" or machine.platforms()[
        0
    ] != "cpu"
    assert "tensors are on" not in output and "delta-trn backends --all" in output


def test_adapters_and_kernels_are_imported_at_their_first_call():
    code = (
        "import sys, torch, delta_trn.backends, delta_trn.models\n"
        "rule = 'delta_trn.backends.gated_delta_rule.'\n"
        "kernels = 'delta_trn.triton_kernels'\n"
        "for name in (kernels, 'delta_trn.nki_kernels', 'torch_xla', rule + 'triton_adapter'):\n"
        "    assert name not in sys.modules, name\n"
        "assert rule + 'recurrent' not in sys.modules\n"
        "x = torch.ones(1, 1, 1, 1)\n"
        "delta_trn.backends.gated_delta_rule(x, x, x, -x[..., 0], x[..., 0], backend='recurrent')\n"
        "assert rule + 'recurrent' in sys.modules and kernels not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.parametrize(
    ("version", "refused"),
    [("3.4.0", True), ("3.7.0+cu130", True), ("3.7.1", False), ("3.10.0", False)],
)
def test_a_triton_without_fences_is_refused_on_hopper_and_not_before(version, refused, version_of):
    pytest.importorskip("triton", reason="the triton extra is not installed")
    version_of(version)
    for capability, concerned in (((9, 0), True), ((12, 0), True), ((8, 6), False)):
        call = replace(CALL, device="cuda", capability=capability)
        reasons = BACKENDS["triton"].refusals(call)
        assert bool(reasons) == (refused and concerned)
        assert not reasons or f"Triton {version} leaves out fences" in reasons[0]


def test_versions_of_packages_are_read_from_the_disk_once(version_of, monkeypatch):
    pytest.importorskip("triton", reason="the triton extra is not installed")
    version_of("3.7.1")
    call = replace(CALL, device="cuda", capability=(9, 0))
    assert not BACKENDS["triton"].refusals(call)
    monkeypatch.setattr(dispatch.metadata, "version", None)  # a second look would raise
    assert not BACKENDS["triton"].refusals(call)


class TestEntryPoints:
    """Packages that are installed name backends of theirs."""

    @pytest.fixture
    def install(self, tmp_path, monkeypatch):
        """Puts a module on the path, and what names it as a backend."""
        monkeypatch.setattr(dispatch, "_loaded", False)
        monkeypatch.setattr(dispatch, "BACKENDS", dict(dispatch.BACKENDS))
        monkeypatch.syspath_prepend(tmp_path)

        def install(module, text, value=None):
            (tmp_path / f"{module}.py").write_text(text)
            about = tmp_path / f"{module}-1.0.dist-info"
            about.mkdir()
            (about / "METADATA").write_text(
                f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n"
            )
            (about / "entry_points.txt").write_text(
                f"[delta_trn.backends]\n{module} = {value or module}\n"
            )

        return install

    REGISTER = "from delta_trn.backends.dispatch import Backend, register\n"

    def test_that_are_modules_are_imported_when_a_backend_is_asked_for(self, install):
        install("outside_module", self.REGISTER + 'register(Backend("outside-module", {}))\n')
        assert "outside-module" not in dispatch.BACKENDS
        with default_backend("outside-module"):
            pass
        assert "outside-module" in {row.backend for row in describe(["cpu"])}

    def test_that_are_functions_are_called_once(self, install):
        code = "def add():\n    register(Backend('outside-function', {}))\n"
        install("outside_function", self.REGISTER + code, "outside_function:add")
        for _ in range(2):
            assert "outside-function" in {row.backend for row in describe(["cpu"])}

    def test_that_fail_are_left_out_with_a_warning(self, install):
        install("outside_broken", "raise OSError('no library')\n")
        with pytest.warns(
            RuntimeWarning, match=r"outside_broken names .*OSError: no library.*mend"
        ):
            rows = describe(["cpu"])
        assert "chunked" in {row.backend for row in rows}

    def test_planted_bugs_are_seen(self, install):
        bug = Bug("", "backends.dispatch:_find", "load_entry_points()", "pass", "")
        with planted(bug), pytest.raises(BackendRefusal, match="no backend is named"):
            self.test_that_are_modules_are_imported_when_a_backend_is_asked_for(install)
