"""Data and a finished run that many tests read. No test may change them."""

from pathlib import Path

import pytest

from tests.support import tiny_run


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.prepare_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def finished(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs 12 steps, with checkpoints at 6, 8 and 12."""
    out = tmp_path_factory.mktemp("finished") / "run"
    tiny_run.train("run", "tiny", *tiny_run.keys(data, out))
    return out
