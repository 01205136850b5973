"""Our models compute what the models of others compute, as recorded from their own code in float64."""

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from delta_trn import load_model, save_model
from delta_trn.models.ecosystem.foreign import FORMATS
from delta_trn.models.parameters import scaled_parameters
from tests.models.ecosystem.record_goldens import (
    AUTHORS_CASES,
    BETAS,
    FLA_CASES,
    HERE,
    MOMENTUM,
    RATE,
    fill,
    sketch,
    tokens,
)

CASES = [("fla", case) for case in FLA_CASES] + [("authors", case) for case in AUTHORS_CASES]
# Sums of float64 in another order. RoPE's angles are products in float32, in another order, too: that of the
# last of 70 positions may differ by 70 * 2^-24.
ALLOWED = {"hybrid": 2**-19}


class Golden:
    """One case: the weights in a folder as their code would have written them, and what it computed."""

    def __init__(self, format, case, folder):
        self.format, self.case, self.folder = FORMATS[format], case, folder
        self.allowed = ALLOWED.get(case, 2**-42)
        with safe_open(HERE / f"{format}.safetensors", "pt") as file:
            about = json.loads(file.metadata()["about"])[case]
            names = [name for name in file.keys() if name.startswith(f"{case}/")]  # noqa: SIM118 - not a dict
            self.recorded = {name.removeprefix(f"{case}/"): file.get_tensor(name) for name in names}
        self.theirs, self.stds = about["config"], about.get("stds")
        self.state = {name: fill(name, tuple(shape)) for name, shape in about["shapes"].items()}
        (folder / "config.json").write_text(json.dumps(self.theirs))
        if format == "fla":
            save_file(self.state, folder / "model.safetensors")
        else:  # as their save_pretrained writes it
            torch.save(self.state, folder / "pytorch_model.bin")
        self.model = load_model(folder, torch.float64).eval()

    def backward(self):
        """Computes logits and gradients; returns the logits."""
        ids = tokens(self.theirs["vocab_size"])
        logits = self.model(ids[:, : 1 + self.recorded["logits"].shape[1]]).logits
        self.model.zero_grad()
        F.cross_entropy(logits[:, : ids.shape[1] - 1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        return logits[:, : self.recorded["logits"].shape[1]].detach()

    def errors(self, of, ours):
        """Returns the relative error of every parameter's recorded sketch, ours under our names."""
        theirs = self.format.state(ours, self.theirs, self.model.config)
        recorded = {n.removeprefix(f"{of}/"): x for n, x in self.recorded.items() if n.startswith(f"{of}/")}
        assert set(recorded) <= set(theirs)
        return {
            name: ((sketch(theirs[name], name) - x).norm() / x.norm()).item() for name, x in recorded.items()
        }


@pytest.fixture(params=CASES, ids=lambda case: case[1])
def golden(request, tmp_path):
    return Golden(*request.param, tmp_path)


def relative(x, y):
    return ((x - y).norm() / y.norm()).item()


def test_logits_and_gradients_are_theirs(golden):
    logits = golden.backward()
    assert relative(logits, golden.recorded["logits"]) < golden.allowed
    if golden.case.startswith("gdn-mup"):
        return  # a factor of its forward pass is in our weights: its gradients are not ours
    errors = golden.errors("gradient", {name: p.grad for name, p in golden.model.named_parameters()})
    assert max(errors.values()) < 16 * golden.allowed, errors


def test_a_wrong_reading_of_their_weights_would_be_seen(golden):
    layer = golden.model.model.blocks[0]
    before = golden.backward()
    for module, change in (
        (layer.mixer.o_norm, {"eps": 2 * layer.mixer.o_norm.eps}),
        (layer.mixer_norm, {"eps": 2 * layer.mixer_norm.eps}),
        (layer.mixer, {"scale": 2 * layer.mixer.scale}),
        (layer.mlp, {"up_proj": layer.mlp.gate_proj, "gate_proj": layer.mlp.up_proj}),
    ):
        kept = {name: getattr(module, name) for name in change}
        for name, value in change.items():
            setattr(module, name, value)
        assert relative(golden.backward(), before) > 4 * golden.allowed, change
        for name, value in kept.items():
            setattr(module, name, value)


def test_the_way_back_restores_their_files_bit_for_bit(golden, tmp_path):
    format = "fla" if golden.case in FLA_CASES else "authors"
    save_model(load_model(golden.folder), tmp_path / "back", format)
    if golden.case in ("no_convolution", "gdn-mup 96"):  # in other weights: one tap; W_o with its factor
        golden.model = load_model(tmp_path / "back", torch.float64).eval()
        assert relative(golden.backward(), golden.recorded["logits"]) < golden.allowed
        return
    back = load_file(tmp_path / "back" / "model.safetensors")
    if format == "authors":
        assert torch.equal(back.pop("lm_head.weight"), back["transformer.wte.weight"])
    assert back.keys() == golden.state.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in golden.state.items())
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    for name, value in golden.theirs.items():
        if name in config and value not in (None, -1):
            assert config[name] == (pytest.approx(value) if isinstance(value, float) else value), name


@pytest.mark.parametrize("case", ["gdn 96", "gdn 160"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_one_step_of_training_is_theirs(case, optimizer, tmp_path):
    golden = Golden("authors", case, tmp_path)
    golden.backward()
    start = {name: p.detach().clone() for name, p in golden.model.named_parameters()}
    rows = scaled_parameters(golden.model, optimizer=optimizer, lr=RATE, weight_decay=0.0)
    groups = [{"params": [row.parameter], "lr": row.lr} for row in rows]
    if optimizer == "sgd":
        torch.optim.SGD(groups, lr=RATE, momentum=MOMENTUM, nesterov=True).step()
    else:
        torch.optim.AdamW(groups, lr=RATE, betas=BETAS, eps=0.0, weight_decay=0.0).step()
    moved = {name: p.detach() - start[name] for name, p in golden.model.named_parameters()}
    errors = golden.errors(optimizer, moved)
    assert max(errors.values()) < 2**-30, errors
    doubled = {name: x * (2 if name.endswith("dt_bias") else 1) for name, x in moved.items()}
    assert max(golden.errors(optimizer, doubled).values()) > 0.5


def test_the_released_initial_values_have_our_standard_deviations(tmp_path):
    golden = Golden("authors", "gdn 160", tmp_path)
    config = golden.model.config
    assert (config.init, config.parametrization, config.readout) == ("authors", "mup_authors", "none")
    rows = scaled_parameters(golden.model, optimizer="sgd", lr=1.0, weight_decay=0.0)
    ours = {row.name: torch.full(row.shape, row.init_std or 0.0) for row in rows}
    ours = golden.format.state(ours, golden.theirs, config)
    for name, drawn in golden.stds.items():
        spread = 5 / (2 * ours[name].numel()) ** 0.5  # five standard errors of a standard deviation
        assert ours[name].mean().item() == pytest.approx(drawn, rel=spread), name
