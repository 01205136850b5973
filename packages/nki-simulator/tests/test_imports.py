"""Files written for the real package, and what the simulator imports."""

import doctest
import importlib
import importlib.util
import subprocess
import sys

import numpy as np
import pytest

from nki_simulator import nisa, nki, nl
from nki_simulator.aliases import as_nki

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


def test_the_simulator_imports_neither_torch_nor_anything_of_delta_trn():
    code = (
        "import sys, nki_simulator; print({'torch', 'transformers', 'delta_trn'} & "
        "set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr


@pytest.mark.parametrize("module", ["kernel", "cost", "subset", "core.releases", "core.precedents"])
def test_examples_in_docstrings_run(module):
    results = doctest.testmod(importlib.import_module(f"nki_simulator.{module}"))
    assert results.attempted and not results.failed


def test_torch_tensors_are_refused_with_the_way_out():
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match="argument x is a Tensor; pass NumPy arrays"):
        nki.simulate(identity)(torch.ones(2))


def identity(x):
    return x


def test_who_looks_for_nki_or_removes_it_inside_gets_no_other_error():
    with as_nki():
        assert importlib.util.find_spec("nki").name == "nki"  # pyright: ignore[reportOptionalMemberAccess]
        del sys.modules["nki"]  # as Python does at its end
    assert "nki" not in sys.modules
