"""What every test process needs before the first import, and what tests of backends share."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    # Triton reads it when it is first imported, which transformers does while tests are collected: too late
    # for a test module to set it.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from delta_trn.backends.parity.__main__ import subjects
from delta_trn.backends.registry import BACKENDS, use


def pytest_addoption(parser):
    parser.addoption(
        "--backend",
        action="append",
        default=[],
        help="test parity of this backend; fail if it cannot run here",
    )


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc):
    """`parity_subject`: every backend that runs here, or the ones asked for by --backend.

    Unasked, one that cannot run here, or only in an interpreter (minutes), is skipped with its reason; asked
    for by name, it runs, and one that cannot raises. A skip can so never pass for coverage. It varies fastest
    (trylast), so that the judge is asked once for all backends.
    """
    if "parity_subject" not in metafunc.fixturenames:
        return
    named = metafunc.config.getoption("--backend")
    if named:
        found = [pytest.param(subject, id=subject.backend) for subject in subjects(named)]
        metafunc.parametrize("parity_subject", found)
        return
    here = {subject.backend: subject for subject in subjects()}
    rows = []
    for name in BACKENDS:
        marks = []
        if name not in here:
            marks = [pytest.mark.skip(reason=f"{name} does not run here; python -m backends says why")]
        elif here[name].emulated:
            marks = [pytest.mark.skip(reason=f"{name} is emulated here: pytest --backend {name}")]
        rows.append(pytest.param(here.get(name), id=name, marks=marks))
    metafunc.parametrize("parity_subject", rows)


@pytest.fixture(autouse=True)
def default_backend():
    """A run in the test's own process sets the process's backend: the next test starts without."""
    with use():
        yield


@pytest.fixture
def poison(monkeypatch):
    """New memory is NaN, so an output that nobody wrote cannot look right."""

    def poisoned(allocate):
        def wrapped(*args, **kwargs):
            x = allocate(*args, **kwargs)
            return x.fill_(float("nan")) if x.is_floating_point() else x

        return wrapped

    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
    for name in ("new_empty", "new_empty_strided"):
        monkeypatch.setattr(torch.Tensor, name, poisoned(getattr(torch.Tensor, name)))
