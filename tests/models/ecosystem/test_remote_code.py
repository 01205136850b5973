"""An exported model computes what ours does, bit for bit, where this package cannot be imported."""

import ast
import copy
import os
import random
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from delta_trn import DeltaForCausalLM
from delta_trn.backends.gated_delta_rule import chunked_kernel
from delta_trn.backends.layers import cpu_kernel
from delta_trn.backends.parity.judge import error
from delta_trn.models.ecosystem.remote_code import remote_code, write_remote_code
from tests.support.load_without_package import computed, inputs
from tests.support.tiny_models import VARIANTS, model
from tests.support.tiny_run import tolerance

SCRIPT = Path(__file__).parents[2] / "support" / "load_without_package.py"
EXPANDED = {"residual": "ddl", "ddl_value_channels": 3}
CONFIGURATIONS = {
    **VARIANTS,
    "token reads": {**EXPANDED, "ddl_compressor": "token", "input_embed_shortconv_kernel_size": 3},
    "channel reads": {**EXPANDED, "ddl_compressor": "channel", "attention_layers": [0, 2]},
    "ddl_lm": {"residual": "ddl_lm", "positions": "learned", "norm": "layer", "mlp": "gelu"},
    "all attention": {
        **{"attention_layers": [0, 1, 2], "use_qk_rmsnorm": True, "use_k_shift": True, "use_v_shift": True},
        **{"use_output_gate": True, "q_activation": "silu", "k_activation": "elu+1", "rope_ratio": 0.5},
    },
    "standard parametrization": {"parametrization": "sp", "init": "authors", "tie_word_embeddings": False},
}


def random_configuration(seed):
    """Returns a hybrid of sizes and options that were drawn."""
    draw = random.Random(seed)
    heads = draw.choice([1, 2, 5])
    return {
        "hidden_size": draw.choice([12, 20, 48]),
        "base_width": draw.choice([8, 48]),
        "num_heads": heads,
        "num_v_heads": heads * draw.choice([1, 3]),
        "head_dim_k": draw.choice([2, 7, 16]),
        "expand_v": draw.choice([1.0, 2.0]) if draw.random() < 0.5 else 4.0,
        "conv_size": draw.choice([1, 2, 5]),
        "parametrization": draw.choice(["mup", "mup_original", "sp"]),
        "tie_word_embeddings": draw.random() < 0.5,
        "allow_neg_eigval": draw.random() < 0.5,
        "readout": draw.choice(["sqrt_k", "none"]),
        "residual": draw.choice(["additive", "ddl", "write_only"]),
    }


ALL = {**CONFIGURATIONS, **{f"random {seed}": random_configuration(seed) for seed in range(3)}}


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """Returns for each configuration our model, and what a process without our package computes with it."""
    if hasattr(torch, "_other_products"):
        pytest.skip("a process without our package does not see PYTHONPATH, and has torch's own products")
    place = tmp_path_factory.mktemp("exported")
    ours, folders = {}, {name: place / name.replace(" ", "-") for name in ALL}
    for name, folder in folders.items():
        folder.mkdir()
        ours[name] = model(dtype=torch.float32, **ALL[name])
        write_remote_code(folder, ours[name].config)
        ours[name].save_pretrained(folder)
    environment = {
        **os.environ,
        "HF_HOME": str(place / "cache"),
        "OMP_NUM_THREADS": str(torch.get_num_threads()),  # sums in the same order
    }
    command = [sys.executable, "-I", str(SCRIPT), str(place / "out.pt"), *map(str, folders.values())]
    done = subprocess.run(command, env=environment, cwd=place, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    theirs = torch.load(place / "out.pt")
    return {name: (ours[name], theirs[str(folder)]) for name, folder in folders.items()}


@pytest.fixture
def in_pytorch(monkeypatch):
    """Has the package compute in PyTorch, as it does where there is no C++ compiler."""
    for kernel in (chunked_kernel, cpu_kernel):
        monkeypatch.setattr(kernel, "takes", lambda *tensors: False)


@pytest.mark.parametrize("name", ALL)
def test_logits_tokens_loss_and_gradients_are_ours_bit_for_bit(name, elsewhere, in_pytorch):
    ours, theirs = elsewhere[name]
    expected = computed(ours)
    if name == "gdn":  # the first also has other classes, and was saved and loaded again
        ids, mask = inputs()
        with torch.no_grad():
            expected["hidden"] = ours.hidden(ours.embed(ids), attention_mask=mask)
        expected["again"] = expected["logits"]
    assert set(theirs) == set(expected)
    different = [key for key, value in expected.items() if not torch.equal(theirs[key], value)]
    assert not different


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_logits_are_those_of_the_c_kernels_but_for_rounding(name, elsewhere):
    ours, theirs = elsewhere[name]
    ids, mask = inputs()
    real = mask.bool()
    with torch.no_grad():
        logits = ours(ids, attention_mask=mask).logits
        exact = copy.deepcopy(ours).double()(ids, attention_mask=mask).logits
    allowed = tolerance([error(logits[real], exact[real])])
    assert error(theirs["logits"][real], exact[real]) <= allowed


def test_another_rounding_of_one_weight_is_another_logit(elsewhere, in_pytorch):
    ours, theirs = elsewhere["gdn"]
    changed, (ids, mask) = copy.deepcopy(ours), inputs()
    with torch.no_grad():
        changed.blocks[0].mixer.A_log[0] *= 1 + 2**-22
    assert not torch.equal(changed(ids, attention_mask=mask).logits, theirs["logits"])


def statements(text):
    """Returns a file's statements without imports and dispatch's table, as text that knows no comments."""
    tree = ast.parse(text)
    tree.body = [x for x in tree.body if not ast.unparse(x).startswith("TABLE: ")]
    for node in ast.walk(tree):
        if hasattr(node, "body") and isinstance(node.body, list):
            node.body = [x for x in node.body if not isinstance(x, ast.ImportFrom)] or [ast.Pass()]
    return ast.dump(tree)


def test_exported_files_are_the_sources_but_for_imports():
    files = remote_code()
    anew = {"backends", "models_settings"}
    for name in sorted(set(files) - anew):
        if "written by its export" in files[name].splitlines()[0]:
            assert name.endswith("_kernel") and "compiler" not in files[name]
            continue
        module = files[name].splitlines()[0].split(", ")[1].split(". ")[0]
        source = Path(find_spec(module).origin).read_text()
        assert statements(files[name]) == statements(source), module
    assert {"models_language_model", "backends_gated_delta_rule_chunked", *anew} <= set(files)
    assert not any(word in name for name in files for word in ("triton_adapter", "nki", "compiler"))


def test_a_class_of_the_package_is_not_copied_beside_weights():
    """transformers would copy one file, and a reader would get an import error."""
    with pytest.raises(ValueError, match=r"delta-trn export RUN_DIR --to DIR --remote-code"):
        DeltaForCausalLM.register_for_auto_class("AutoModelForCausalLM")
