"""A kernel's own test file, which imports nki, runs on the simulator with one option."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import nki_simulator

KERNEL = """
import nki
import nki.isa as nisa
import nki.language as nl


@nki.jit
def double(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    tile = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=x)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=2.0)
    nisa.dma_copy(dst=out, src=tile)
    return out
"""
TEST = """
import numpy as np
from kernel import double

x = np.ones((128, 4), np.float32)


def test_it_doubles(nki_run):
    run = nki_run(double, x, target="trn2")
    assert (run.outputs == 2 * x).all() and run.instructions == 3 and run.psum_peak == 0


def test_it_triples():
    assert (double(x) == 3 * x).all()
"""


def pytest_of(folder: Path, *options: str) -> tuple[int, str]:
    """Returns status and output of pytest in a folder, in a process of its own."""
    source = str(Path(nki_simulator.__file__).parents[1])
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", *options]
    done = subprocess.run(
        command, cwd=folder, env=os.environ | {"PYTHONPATH": source}, capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr


def test_a_file_that_imports_nki_is_tested_and_its_failure_is_seen(tmp_path):
    (tmp_path / "kernel.py").write_text(KERNEL)
    (tmp_path / "test_kernel.py").write_text(TEST)
    status, output = pytest_of(tmp_path, "-p", "nki_simulator.pytest_plugin")
    assert status == 1 and "1 failed, 1 passed" in output, output
    assert "test_it_triples" in output
    if importlib.util.find_spec("nki") is None:
        status, output = pytest_of(tmp_path)  # without the option nothing is in nki's place
        assert status == 2 and "No module named 'nki'" in output, output
