"""A key takes the way from a model to a kernel that docs/extending.md lists."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from delta_trn.backends import default_backend
from delta_trn.backends.gated_delta_rule import chunked_kernel, nki_adapter
from tests.support.tiny_models import model, rows

PAGE = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()
# where the launch is caught
PLACES = {"chunked": (chunked_kernel, "takes"), "nki-simulator": (nki_adapter, "_prepare")}


class Launched(Exception):
    """Carries the names of this project's functions that are on the stack, the first call first."""


def stop(*given, **named):
    """Stands for what launches a kernel."""
    frame, names = sys._getframe(1), []
    while frame:
        if frame.f_globals.get("__name__", "").startswith("delta_trn."):
            names.append(frame.f_code.co_name)
        frame = frame.f_back
    raise Launched(names[::-1])


class Kernel:
    """Stands for a Triton kernel."""

    def __getitem__(self, grid):
        return stop


@pytest.mark.parametrize("backend", ["triton", "chunked", "nki-simulator"])
def test_a_key_goes_through_the_functions_that_the_page_lists(backend, monkeypatch):
    table = re.search(r"\| `k` on its way.*?\n\n", PAGE, re.S)
    assert table
    cells = [row.split("|")[2] for row in table[0].splitlines()[2:] if row]
    listed = [re.sub(r".*`(?:\w+\.)?(\w+)`.*", r"\1", cell) for cell in cells]
    if backend == "triton":
        pytest.importorskip("triton", reason="the triton extra is not installed")
        from delta_trn.triton_kernels import gated_delta_rule_fwd

        monkeypatch.setattr(gated_delta_rule_fwd, "prepare_kernel", Kernel())
    else:
        monkeypatch.setattr(*PLACES[backend], stop)
        listed.pop()
    mixer: Any = model(dtype=torch.float32, num_hidden_layers=1).model.blocks[0].mixer
    mixer._find_kernel = lambda *given: None  # of a whole layer, which NKI has
    with default_backend(backend), pytest.raises(Launched) as launched:
        mixer(torch.zeros(1, 70, 32), rows(70))
    (found,) = launched.value.args
    found = [name for name in found if name not in ("launch_alone", "stop")]
    assert found[found.index("_mix") :][: len(listed)] == listed
    assert len(found[found.index("_mix") :]) == len(listed)
