"""Where kernels get NKI from: the one import site, and files written for the real package."""

import importlib.util
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from nki_kernels.simulator.aliases import as_nki

ROOT = Path(__file__).parents[1]

TUTORIAL_STYLE = """
import nki
import nki.isa as nisa
import nki.language as nl
from nki.typing import tensor

@nki.jit
def scaled(x: tensor, factor):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    for i in nl.affine_range(x.shape[0] // nl.tile_size.pmax):
        rows = nl.ds(i * nl.tile_size.pmax, nl.tile_size.pmax)
        tile = nl.load(x[rows, :])
        nl.store(out[rows, :], value=nl.multiply(tile, factor))
    return out
"""


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_file_that_imports_nki_runs_unmodified(tmp_path):
    path = tmp_path / "tutorial.py"
    path.write_text(TUTORIAL_STYLE)
    x = np.arange(256 * 3, dtype=np.float32).reshape(256, 3)
    with as_nki():
        assert (load(path).scaled(x, 2.0) == 2 * x).all()
    assert "nki" not in sys.modules


def run_import_site(path):
    code = "from nki_kernels.language import RUNTIME, nki; print(RUNTIME, nki.__name__)"
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={"PYTHONPATH": str(path)},
        timeout=60,
    )


@pytest.mark.skipif(importlib.util.find_spec("nki") is not None, reason="the real nki is installed here")
def test_without_nki_the_import_site_takes_the_simulator(tmp_path):
    assert run_import_site(tmp_path).stdout.split() == ["simulator", "nki_kernels.simulator.kernel"]


def test_with_nki_the_import_site_takes_it(tmp_path):
    package = tmp_path / "nki"
    package.mkdir()
    for name in ("__init__", "isa", "language"):
        (package / f"{name}.py").touch()
    assert run_import_site(tmp_path).stdout.split() == ["neuron", "nki"]


def test_a_broken_nki_fails_loudly(tmp_path):
    (tmp_path / "nki.py").write_text(textwrap.dedent("raise ImportError('driver is missing')"))
    done = run_import_site(tmp_path)
    assert done.returncode != 0 and "driver is missing" in done.stderr


def test_torch_tensors_are_refused_with_the_way_out():
    from nki_kernels.simulator import nki

    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match="argument x is a Tensor; pass NumPy arrays"):
        nki.simulate(identity)(torch.ones(2))


def identity(x):
    return x
