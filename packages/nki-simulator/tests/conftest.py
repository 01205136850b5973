"""Tests of instructions may use every form: the rules of releases have tests of their own."""

import pytest

from nki_simulator.kernel import RELEASE


@pytest.fixture(autouse=True)
def newest_release(monkeypatch):
    monkeypatch.setenv(RELEASE, "0.7.0")
