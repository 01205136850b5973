"""The tool that reads which forms of instructions public kernels have."""

import json

import pytest

from nki_simulator.core import precedents
from tools import precedents as tool

KERNEL = """
import nki.isa as nisa
import nki.language as nl
import other.isa_of_ours as theirs

def kernel(x):
    nisa.tensor_copy(dst=x, src=x, engine=nisa.gpsimd_engine)
    nisa.tensor_scalar(dst=x, data=x, op0=nl.power, operand0=2.0)
    nisa.activation(dst=x, data=x, op=given)
    theirs.tensor_reduce(dst=x, data=x, op=nl.bitwise_and)
    nisa.no_instruction(x)
"""
GIVEN = "import nki.language as nl\nGIVEN = nl.gelu_dx\n"


@pytest.fixture
def table(tmp_path, monkeypatch):
    """Gives the tool a table of its own, and returns its path."""
    monkeypatch.setattr(precedents, "FILE", tmp_path / "table.json")
    monkeypatch.setattr(precedents, "PUBLIC", {"tensor_copy": {"engine": ["vector"]}})
    return tmp_path / "table.json"


def test_forms_of_a_folder_join_the_table(table, tmp_path, capsys):
    folder = tmp_path / "kernels"
    folder.mkdir()
    (folder / "kernel.py").write_text(KERNEL)
    (folder / "given.py").write_text(GIVEN)
    (folder / "unrelated.py").write_text("from torch import nl\nnl.silu_dx\n")
    (folder / "template.py").write_text("def {{ name }}(:\n")
    assert tool.main([str(folder)]) == 0
    assert json.loads(table.read_text()) == {
        "activation": {"op": ["gelu_dx"]},
        "tensor_copy": {"engine": ["gpsimd", "vector"]},
        "tensor_scalar": {"op0": ["power"]},
    }
    printed = capsys.readouterr()
    assert "activation op=gelu_dx" in printed.out and "template.py is not read" in printed.err


def test_a_folder_without_kernels_is_refused(table, tmp_path, capsys):
    with pytest.raises(SystemExit):
        tool.main([str(tmp_path)])
    assert "has no Python files; name a checkout of kernels" in capsys.readouterr().err
    assert not table.exists()


def test_the_table_is_as_the_tool_writes_it():
    """So nobody has edited it, and adding nothing changes nothing."""
    assert precedents.FILE.read_text() == tool.write(tool.add_forms(precedents.PUBLIC, set()))
