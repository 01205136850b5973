"""Who runs a call is decided from shapes and devices, said out loud, and never replaced in silence."""

import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import torch

from delta_trn import backends
from delta_trn.backends import BackendRefusal, default_backend, registry
from delta_trn.backends import __main__ as command
from delta_trn.backends.machine import ROOT
from delta_trn.backends.registry import BACKENDS, Backend, Call, Capability, choose, register

CALL = Call("gated_delta_rule", "cpu", torch.float32, {"H": 2, "HV": 2, "K": 64, "V": 64}, gradients=True)


@pytest.fixture(autouse=True)
def _selection():
    with default_backend():
        yield


@pytest.fixture
def registered(monkeypatch):
    """Backends added by a test are gone after it."""
    monkeypatch.setattr(registry, "BACKENDS", dict(BACKENDS))

    def add(name, **declared):
        capability = Capability(f"backends.{name}", frozenset({torch.float32}), **declared)
        registry.register(Backend(name, {"gated_delta_rule": capability}))

    return add


def test_cpu_tensors_take_chunked_and_recurrent_runs_only_by_name():
    assert choose(CALL).name == "chunked"
    assert choose(CALL, "recurrent").name == "recurrent"


def test_cuda_tensors_take_triton():
    if registry.BACKENDS["triton"].unavailable("cuda"):
        pytest.skip("triton is not installed, so nothing is chosen on cuda")
    assert choose(replace(CALL, device="cuda")).name == "triton"


def test_nothing_falls_back_on_a_device_without_its_own_backend():
    with pytest.raises(BackendRefusal) as refusal:
        choose(replace(CALL, device="xla"))
    said = " ".join(str(refusal.value).split())
    assert "no backend can run gated_delta_rule for H=2 HV=2 K=64 V=64 float32 on xla, gradients on" in said
    assert 'chunked runs on xla only when asked for: backend="chunked"' in said
    assert 'recurrent runs on xla only when asked for: backend="recurrent"' in said
    assert "triton runs on cpu, cuda; tensors are on xla" in said
    assert "nki-simulator runs on cpu; tensors are on xla" in said


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


def test_a_thread_has_the_main_threads_default_until_it_sets_its_own():
    names = []

    def work():
        names.append(choose(CALL).name)
        with default_backend("chunked"):
            names.append(choose(CALL).name)
        names.append(choose(CALL).name)

    with default_backend("recurrent"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert choose(CALL).name == "recurrent"
    assert names == ["recurrent", "chunked", "recurrent"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": "tritn"}, r"no backend is named 'tritn'; registered: triton, nki, chunked, "),
        ({"allow": ["nope"]}, r"no backend is named 'nope'"),
    ],
)
def test_an_unknown_name_is_refused_when_it_is_set(given, message):
    with pytest.raises(BackendRefusal, match=message):
        default_backend(**given)
    assert choose(CALL).name == "chunked"


@pytest.mark.parametrize(
    ("declared", "call", "reason"),
    [
        ({"limits": {"K": 128}}, {"sizes": {"K": 256}}, "K=256 is above 128"),
        ({"limits": {"V": 256}}, {"sizes": {"V": 512}}, "V=512 is above 256"),
        ({"packed": False}, {"packed": True}, "does not take packed sequences"),
        ({"gradients": False}, {}, r"has no backward; call it under torch.no_grad\(\)"),
        ({}, {"dtype": torch.float64}, "computes float32; tensors are float64"),
        ({"devices": frozenset({"cuda"})}, {}, "runs on cuda; tensors are on cpu"),
        ({}, {"op": "gated_delta_rule_step"}, "does not implement gated_delta_rule_step"),
    ],
)
def test_every_limit_has_its_reason(registered, declared, call, reason):
    registered("limited", **declared)
    with pytest.raises(BackendRefusal, match=rf"limited +{reason}"):
        choose(replace(CALL, **call), "limited")


def test_a_refusal_names_every_reason(registered):
    registered("limited", limits={"K": 32, "V": 32}, devices=frozenset({"cuda"}))
    with pytest.raises(BackendRefusal) as refusal:
        choose(CALL, "limited")
    assert [line.split("  ")[-1] for line in str(refusal.value).splitlines()[1:]] == [
        "runs on cuda; tensors are on cpu",
        "K=64 is above 32",
        "V=64 is above 32",
    ]


def test_what_is_declared_within_its_limits_is_accepted(registered):
    registered("limited", limits={"K": 64, "V": 64})
    assert choose(CALL, "limited").name == "limited"


def test_a_missing_package_is_a_reason(monkeypatch):
    missing = replace(
        BACKENDS["chunked"], unavailable=lambda device: f"needs a part for {device}: pip install it"
    )
    monkeypatch.setitem(BACKENDS, "chunked", missing)
    with pytest.raises(BackendRefusal, match=r"chunked +needs a part for cpu: pip install it"):
        choose(CALL)


def test_a_name_is_registered_once_and_operations_are_known():
    with pytest.raises(
        ValueError,
        match=r"'chunked' is registered already; choose another name",
    ):
        register(BACKENDS["chunked"])
    with pytest.raises(ValueError, match=r"declares \['softmax'\]; operations are"):
        register(Backend("new", {"softmax": Capability("backends.new", frozenset())}))
    assert "new" not in BACKENDS


def test_describe_says_what_runs_here_and_why_not():
    rows = {(row.op, row.backend): row for row in registry.describe(["cpu", "xla"])}
    assert set(rows) == {(op, name) for op in registry.OPERATIONS for name in BACKENDS}
    chunked = rows["gated_delta_rule", "chunked"]
    assert chunked.automatic == ("cpu",)
    assert chunked.named == ("cpu", "xla")
    triton = rows["gated_delta_rule", "triton"]
    assert "xla: runs on cpu, cuda; tensors are on xla" in triton.reasons
    assert "cuda: this machine has no such device" in triton.reasons
    assert {(row.op, row.backend) for row in backends.describe()} == set(rows)


def test_the_command_prints_every_backend_and_every_reason(capsys):
    assert command.main([]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith("devices here: ")
    assert all(name in said for name in (*BACKENDS, *registry.OPERATIONS))
    reasons = [reason for row in backends.describe() for reason in row.reasons]
    assert all(reason.split(": ")[0] in said for reason in reasons)


def test_adapters_are_imported_when_first_called_not_before():
    code = (
        "import sys, torch, delta_trn.backends\n"
        "rule = 'delta_trn.backends.gated_delta_rule.'\n"
        "kernels = 'delta_trn.triton_kernels'\n"
        "assert rule + 'triton_adapter' not in sys.modules and kernels not in sys.modules\n"
        "assert rule + 'recurrent' not in sys.modules\n"
        "x = torch.ones(1, 1, 1, 1)\n"
        "delta_trn.backends.gated_delta_rule(x, x, x, -x[..., 0], x[..., 0], backend='recurrent')\n"
        "assert rule + 'recurrent' in sys.modules and kernels not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
