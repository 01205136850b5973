"""An exported model computes what ours does, bit for bit, where this package cannot be imported."""

import copy
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from delta_trn.backends.gated_delta_rule import chunked_kernel
from delta_trn.backends.layers import cpu_kernel
from delta_trn.models.ecosystem.remote_code import remote_code, write_remote_code
from delta_trn.models.language_model import DeltaForCausalLM
from tests.support.load_without_package import computed, inputs
from tests.support.tiny_models import model

SCRIPT = Path(__file__).parents[2] / "support" / "load_without_package.py"
CONFIGURATIONS = {
    "gdn": {
        "num_v_heads": 8,
        "allow_neg_eigval": True,
        "tie_word_embeddings": False,
        "conv_size": 2,
    },
    "ddl": {
        "residual": "ddl",
        "ddl_value_channels": 3,
        "ddl_compressor": "channel",
        "attention_layers": [0, 2],
    },
    "kimi": {"mixer": "kimi_delta_attention", "decay_bound": -5.0},
    "ddl_lm": {"residual": "ddl_lm", "positions": "learned", "norm": "layer", "mlp": "gelu"},
}


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """Returns for each configuration our model,
    and what a process without our package computes with it.
    """
    if hasattr(torch, "_other_products"):
        pytest.skip(
            "a process without our package does not see PYTHONPATH, and has torch's own products"
        )
    place = tmp_path_factory.mktemp("exported")
    ours, folders = {}, {name: place / name for name in CONFIGURATIONS}
    for name, folder in folders.items():
        folder.mkdir()
        ours[name] = model(dtype=torch.float32, **CONFIGURATIONS[name])
        write_remote_code(folder, ours[name].config)
        ours[name].save_pretrained(folder)
    environment = {
        **os.environ,
        "HF_HOME": str(place / "cache"),
        "OMP_NUM_THREADS": str(torch.get_num_threads()),  # sums in the same order
    }
    command = [
        sys.executable,
        "-I",
        str(SCRIPT),
        str(place / "out.pt"),
        *map(str, folders.values()),
    ]
    done = subprocess.run(
        command, env=environment, cwd=place, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    theirs = torch.load(place / "out.pt")
    return {name: (ours[name], theirs[str(folder)]) for name, folder in folders.items()}


@pytest.fixture
def in_pytorch(monkeypatch):
    """Has the package compute in PyTorch, as it does where there is no C++ compiler."""
    for kernel in (chunked_kernel, cpu_kernel):
        monkeypatch.setattr(kernel, "takes", lambda *tensors: False)


def test_outputs_loss_and_gradients_are_ours_bit_for_bit(elsewhere, in_pytorch):
    for name, (ours, theirs) in elsewhere.items():
        expected = computed(ours)
        if name == "gdn":  # the first also has other classes, and was saved and loaded again
            ids, mask = inputs()
            with torch.no_grad():
                expected["hidden"] = ours.model.hidden(ours.model.embed(ids), attention_mask=mask)
            expected["again"] = expected["logits"]
        assert set(theirs) == set(expected)
        assert not [
            key for key, value in expected.items() if not torch.equal(theirs[key], value)
        ], name


def test_another_rounding_of_one_weight_is_another_logit(elsewhere, in_pytorch):
    ours, theirs = elsewhere["gdn"]
    changed, (ids, mask) = copy.deepcopy(ours), inputs()
    with torch.no_grad():
        changed.model.blocks[0].mixer.A_log[0] *= 1 + 2**-22
    assert not torch.equal(changed(ids, attention_mask=mask).logits, theirs["logits"])


def test_the_exported_file_has_the_sources_as_they_are():
    names: dict[str, Any] = {}
    # where the package is installed, its classes are those of the package
    exec(remote_code(), names)
    assert issubclass(names["DeltaForCausalLM"], DeltaForCausalLM)
    other = {"delta_trn", "delta_trn.models.settings"}
    sources = names["SOURCES"]
    for name in set(sources) - other:
        assert sources[name] == Path(str(import_module(name).__file__)).read_text(), name
    assert {"delta_trn.models.language_model", "delta_trn.backends.layers.pytorch", *other} <= set(
        sources
    )
    assert not any(word in name for name in sources for word in ("triton", "nki"))


def test_a_class_of_the_package_is_not_copied_beside_weights():
    """transformers would copy one file, and a reader would get an import error."""
    with pytest.raises(ValueError, match=r"delta-trn export RUN_DIR --to DIR --remote-code"):
        DeltaForCausalLM.register_for_auto_class("AutoModelForCausalLM")
