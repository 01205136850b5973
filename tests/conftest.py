"""Fixtures and options of all tests, and what must be set before the first import."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    # Triton reads this when it is first imported. transformers imports it while tests are collected, so a
    # test module would set it too late.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from delta_trn.backends.parity.__main__ import subjects
from delta_trn.backends.registry import BACKENDS, default_backend


def pytest_addoption(parser):
    parser.addoption(
        "--backend",
        action="append",
        default=[],
        help="test parity of this backend; fail if it cannot run here",
    )


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc):
    """Gives `parity_subject` every backend that runs here, or those that --backend names.

    A backend that cannot run here, or only in an interpreter that takes minutes, is skipped with its reason.
    With --backend it must run, so a skip cannot pass for coverage. The subject varies fastest (trylast), so
    that the judge computes each case once for all backends.
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
def no_default_backend():
    """Restores the default backend, which a run in the test's own process sets."""
    with default_backend():
        yield


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
