"""Lets a kernel's own tests run on the simulator: `import nki` finds it in every test file.

    pytest -p nki_simulator.pytest_plugin test_kernel.py

The fixture `nki_run` is `record`: it runs a kernel, and gives its outputs, instructions and memory.
Without `-p` nothing here is in effect, also where the package is installed.
"""

from collections.abc import Callable
from contextlib import ExitStack

import pytest

from nki_simulator.aliases import as_nki
from nki_simulator.kernel import Run, record


def pytest_configure(config: pytest.Config) -> None:
    """Puts the simulator in nki's place, before a test file is imported."""
    aliases = ExitStack()
    aliases.enter_context(as_nki())
    config.add_cleanup(aliases.close)


def pytest_report_header() -> str:
    return "nki: the simulator, which no chip was compared with"


@pytest.fixture
def nki_run() -> Callable[..., Run]:
    """Gives `nki_simulator.record`.

    def test_it_doubles(nki_run):
        run = nki_run(double, x)
        assert (run.outputs == 2 * x).all() and run.psum_peak == 0
    """
    return record
