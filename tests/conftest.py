"""Fixtures and options of all tests, and what must be set before the first import."""

import os
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

# Triton asks when it is first imported, which what follows may do. Workers of xdist get the
# environment.
if "--emulate" in sys.argv:
    os.environ["DELTA_TRN_EMULATE"] = "1"
if not torch.cuda.is_available() and "DELTA_TRN_EMULATE" not in os.environ:
    os.environ["TRITON_INTERPRET"] = "1"

from delta_trn.backends import dispatch, machine
from delta_trn.backends.dispatch import default_backend
from delta_trn.backends.gated_delta_rule import chunked_kernel
from delta_trn.backends.layers import cpu_kernel

TRITON = pytest.StashKey[str]()


def pytest_addoption(parser):
    parser.addoption(
        "--backend",
        action="append",
        default=[],
        help="test parity of this backend; fail if it cannot run here",
    )
    parser.addoption(
        "--emulate",
        action="store_true",
        help="without a GPU, compiled kernels of Triton run in the emulator",
    )
    parser.addoption(
        "--fuzz", type=int, help="new random cases of each operation, on every backend"
    )
    parser.addoption(
        "--part",
        default="1/1",
        help="I/N: of the chosen tests every Nth, from the Ith on; N such parts are all of them",
    )
    parser.addoption("--fuzz-blob", help="the one random case that hypothesis has printed")
    parser.addoption(
        "--other-products",
        action="store_true",
        help="NumPy makes torch's matrix products, as another machine would",
    )


def pytest_configure(config):
    # before anything imports a kernel: what runs it is settled then
    config.stash[TRITON] = choose_for_triton()
    if config.getoption("--other-products") and not hasattr(torch, "_other_products"):
        folder = Path(__file__).parent / "support" / "other_products"
        os.environ["PYTHONPATH"] = os.pathsep.join(
            [str(folder), *filter(None, [os.getenv("PYTHONPATH")])]
        )
        runpy.run_path(str(folder / "sitecustomize.py"))


def choose_for_triton():
    """Decides what runs Triton's kernels in this process, and says it."""
    if torch.cuda.is_available() or find_spec("triton") is None:
        return "on the GPU" if torch.cuda.is_available() else "nowhere, Triton is not installed"
    if os.environ.get("TRITON_INTERPRET") == "1":
        from tests.support import interpreter

        interpreter.patch_once()
        return "in Triton's interpreter"
    from tests.support.emulator import driver

    if driver.library().functions is None:
        raise pytest.UsageError(f"{driver.library().note}: no emulator; leave --emulate out")
    driver.install()
    return "compiled, in the emulator"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Leaves one part of what -m and -k have chosen."""
    text = config.getoption("--part")
    first, _, parts = text.partition("/")
    if not (first.isdigit() and parts.isdigit() and 1 <= int(first) <= int(parts)):
        raise pytest.UsageError(f"--part {text} is no part; expected I/N with I from 1 to N")
    chosen = items[int(first) - 1 :: int(parts)]
    others = [item for i, item in enumerate(items) if (i + 1 - int(first)) % int(parts)]
    config.hook.pytest_deselected(items=others)
    items[:] = chosen


def pytest_report_header(config):
    return f"Triton's kernels: {config.stash[TRITON]}"


@pytest.fixture(autouse=True)
def no_switches_of_a_run():
    """Restores the default backend and exact products, which a run in the test's own process sets.

    Fails a test after which PyTorch has another number of threads: what later tests compute in this
    process and in others would differ by rounding.
    """
    threads = torch.get_num_threads()
    with default_backend():
        yield
    machine.set_products("highest")
    left = torch.get_num_threads()
    torch.set_num_threads(threads)
    assert left == threads, f"PyTorch has {left} threads after this test, {threads} before it"


@pytest.fixture
def without_triton(monkeypatch):
    """Takes away what runs Triton's kernels on a CPU here, as it is for users."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(dispatch, "TRITON_DEVICES", set())


@pytest.fixture
def without_cpu_kernel(monkeypatch):
    """Lets the chunked backend compute in PyTorch, as it does where there is no compiler."""
    monkeypatch.setattr(chunked_kernel, "takes", lambda x: False)
    monkeypatch.setattr(cpu_kernel, "takes", lambda *tensors: False)


@pytest.fixture
def poison(monkeypatch):
    """Fills new memory with NaN, so that an output that nobody wrote cannot look right."""

    def poisoned(allocate):
        def wrapped(*args, **kwargs):
            x = allocate(*args, **kwargs)
            return x.fill_(float("nan")) if x.is_floating_point() else x

        return wrapped

    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
    for name in ("new_empty", "new_empty_strided"):
        monkeypatch.setattr(torch.Tensor, name, poisoned(getattr(torch.Tensor, name)))


@pytest.fixture
def version_of(monkeypatch):
    """Returns a function that lets every installed package have a version."""

    def set_version(version):
        monkeypatch.setattr(dispatch.metadata, "version", lambda name: version)
        dispatch._version.cache_clear()

    yield set_version
    dispatch._version.cache_clear()
