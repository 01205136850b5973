"""Where kernels get NKI from: the one import site, and files written for the real package."""

import doctest
import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from delta_trn.nki_kernels.simulator import nisa, nki, nl
from delta_trn.nki_kernels.simulator.aliases import as_nki

ROOT = Path(__file__).parents[3]

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


def test_platform_target_is_the_target_where_a_run_names_none():
    kernel = nki.jit(platform_target="trn2")(identity_of_generation)
    assert kernel().item() == 3 and kernel[1]().item() == 3
    assert nki.simulate(kernel, target="trn1")().item() == 2
    assert nki.jit(mode="torchxla", debug_kernel=True)(identity_of_generation)().item() == 2, (
        "they are ignored"
    )
    with pytest.raises(ValueError, match="'trn9' is not one of"):
        nki.jit(platform_target="trn9")(identity_of_generation)()


def identity_of_generation():
    out = nl.ndarray((1, 1), nl.float32, nl.shared_hbm)
    tile = nl.full((1, 1), float(nisa.get_nc_version().value), nl.float32)
    nisa.dma_copy(dst=out, src=tile)
    return out


def test_collectives_can_be_imported_and_are_refused():
    with as_nki():
        collectives = importlib.import_module("nki.collectives")
        constants = importlib.import_module("nki.isa.constants")
    assert constants.dge_mode is nisa.dge_mode
    assert collectives.ReplicaGroup([[0, 1]]).groups == [[0, 1]]
    with pytest.raises(
        NotImplementedError, match=r"nki\.collectives\.all_reduce is not simulated; run the"
    ):
        _ = collectives.all_reduce


def run_import_site(path):
    code = "from delta_trn.nki_kernels.language import RUNTIME, nki; print(RUNTIME, nki.__name__)"
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={"PYTHONPATH": str(path)},
        timeout=60,
    )


@pytest.mark.skipif(
    importlib.util.find_spec("nki") is not None, reason="the real nki is installed here"
)
def test_without_nki_the_import_site_takes_the_simulator(tmp_path):
    assert run_import_site(tmp_path).stdout.split() == [
        "simulator",
        "delta_trn.nki_kernels.simulator.kernel",
    ]


def test_with_nki_the_import_site_takes_it(tmp_path):
    package = tmp_path / "nki"
    package.mkdir()
    for name in ("__init__", "isa", "language"):
        (package / f"{name}.py").touch()
    assert run_import_site(tmp_path).stdout.split() == ["neuron", "nki"]


def test_a_broken_nki_fails_loudly(tmp_path):
    (tmp_path / "nki.py").write_text("raise ImportError('driver is missing')")
    done = run_import_site(tmp_path)
    assert done.returncode != 0 and "driver is missing" in done.stderr


def test_the_simulator_imports_neither_torch_nor_transformers():
    code = (
        "import sys, delta_trn.nki_kernels.simulator; print({'torch', 'transformers'} & "
        "set(sys.modules))"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT
    ).stdout
    assert printed.strip() == "set()"


@pytest.mark.parametrize("module", ["kernel", "cost", "subset", "core.releases", "core.precedents"])
def test_examples_in_docstrings_run(module):
    results = doctest.testmod(importlib.import_module(f"delta_trn.nki_kernels.simulator.{module}"))
    assert results.attempted and not results.failed


def test_torch_tensors_are_refused_with_the_way_out():
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match="argument x is a Tensor; pass NumPy arrays"):
        nki.simulate(identity)(torch.ones(2))


def identity(x):
    return x
