"""What a GPU's first launch needs is asked in seconds, and each need that is not met has a remedy."""

import sysconfig
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="the triton extra is not installed")

from delta_trn.backends import __main__ as backends
from delta_trn.backends import card_adapter
from delta_trn.backends.card_adapter import needs
from delta_trn.backends.gpu_stand_in.cuda import CARDS, pretend
from delta_trn.backends.parity import __main__ as parity
from delta_trn.triton_kernels.compiling import trivial


def asked():
    return {need.name: need for need in needs()}


@pytest.fixture
def gpu(monkeypatch):
    """There is an H100, on which a trivial kernel is right."""
    monkeypatch.setattr(trivial, "double", lambda x, y: y.copy_(2 * x))
    with pretend(CARDS[9, 0]):
        yield


def test_all_needs_are_met_where_a_kernel_is_right(gpu):
    found = asked()
    assert list(found) == ["driver", "triton", "compiler", "headers", "launch"]
    assert found["driver"].met and "H100, compute capability 9.0" in str(found["driver"])
    assert found["triton"].met and found["launch"].met


@pytest.mark.parametrize(
    ("cuda", "remedy"), [(None, "install the build for CUDA"), ("13.0", "nvidia-smi must list one")]
)
def test_a_gpu_that_torch_does_not_see_is_explained(cuda, remedy, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    found = asked()
    assert (
        not found["driver"].met
        and remedy in str(found["driver"])
        and "MISSING" in str(found["driver"])
    )
    assert not found["launch"].met


def test_an_old_triton_is_named_with_the_one_to_install(gpu, version_of):
    version_of("3.6.0")
    assert "pip install --no-deps triton==3.7.1" in str(asked()["triton"])


def test_a_missing_compiler_and_missing_headers_are_named(monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(card_adapter.shutil, "which", lambda name: None)
    monkeypatch.setattr(sysconfig, "get_paths", lambda scheme: {"include": "/no/such/folder"})
    found = asked()
    assert "apt-get install gcc" in str(found["compiler"])
    assert "/no/such/folder/Python.h" in str(found["headers"]) and "-dev" in str(found["headers"])
    monkeypatch.setenv("CC", "/no/such/compiler")
    assert "/no/such/compiler does not run" in str(asked()["compiler"])


def test_a_launch_that_fails_or_is_wrong_is_told(gpu, monkeypatch):
    def fail(x, y):
        raise RuntimeError("CUDA error: no kernel image is available\nmore")

    monkeypatch.setattr(trivial, "double", fail)
    assert asked()["launch"][1:] == (
        False,
        "RuntimeError: CUDA error: no kernel image is available",
    )
    monkeypatch.setattr(trivial, "double", lambda x, y: y.copy_(x))
    assert not asked()["launch"].met and "its result is wrong" in str(asked()["launch"])


def test_each_operation_has_a_line_that_says_right_or_wrong(gpu, monkeypatch, capsys):
    """With verdicts of our own: `make measure` with DRY=1 has the kernels' in the emulator."""

    def judge(case, dtype, backend, device):
        assert (dtype, backend, device) == (torch.bfloat16, "triton", "cuda")
        if case.op == "short_convolution":
            raise RuntimeError("out of resource: shared memory")
        return [SimpleNamespace(passed=case.op != "gated_rms_norm", ratio=0.25)]

    grids = {name: grid._replace(verdicts=judge) for name, grid in parity.GRIDS.items()}
    monkeypatch.setattr(parity, "GRIDS", grids)
    assert backends.main([]) == 1
    lines = capsys.readouterr().out.splitlines()[-9:]
    assert [line.split()[1] for line in lines].count("right,") == 7
    told = {line.split()[0]: line for line in lines}
    assert "WRONG (norm_head)" in told["gated_rms_norm"]
    assert "FAILED (conv_packed): RuntimeError: out of" in told["short_convolution"]
    assert "right, error 0.25 of what is allowed" in told["gated_delta_rule"]
    monkeypatch.setattr(trivial, "double", lambda x, y: y.copy_(x))
    assert backends.main([]) == 2
