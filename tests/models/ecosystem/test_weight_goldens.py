"""Our models compute what the models of others compute,
as recorded from their own code in float64.
"""

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from delta_trn import DeltaConfig, DeltaForCausalLM, load_model, save_model
from delta_trn.models.ecosystem.flash_linear_attention import from_state
from delta_trn.models.parameters import scaled_parameters
from tests.models.ecosystem.record_goldens import (
    AUTHORS_CASES,
    BETAS,
    FLA_CASES,
    HERE,
    KDA_CASES,
    MOMENTUM,
    RATE,
    fill,
    sketch,
    tokens,
)

ALLOWED = 2**-42  # sums of float64 in another order
# The paper's released code has flash-linear-attention's layers, under other names of parameters and
# settings.
AUTHORS_NAMES = {
    "transformer.wte.": "model.embeddings.",
    "transformer.h.": "model.layers.",
    "ln_f.": ("model.norm."),
}


def renamed(name):
    return next((name.replace(a, b) for a, b in AUTHORS_NAMES.items() if name.startswith(a)), name)


class Golden:
    """One case: its weights in a folder, as flash-linear-attention writes them,
    and what was computed.
    """

    def __init__(self, case, folder):
        self.case, self.folder = case, folder
        of_authors = case in AUTHORS_CASES
        kind = "authors" if of_authors else "kda" if case in KDA_CASES else "fla"
        with safe_open(HERE / f"{kind}.safetensors", "pt") as file:
            about = json.loads(file.metadata()["about"])[case]
            names = [name for name in file.keys() if name.startswith(f"{case}/")]  # noqa: SIM118 - not a dict
            self.recorded = {name.removeprefix(f"{case}/"): file.get_tensor(name) for name in names}
        self.theirs, self.stds = about["config"], about.get("stds")
        self.state = {
            renamed(name): fill(name, tuple(shape)) for name, shape in about["shapes"].items()
        }
        config = dict(self.theirs)
        if of_authors:
            config |= {"model_type": "gated_deltanet", "attn": None, "tie_word_embeddings": True}
            config["num_heads"] = config["num_attention_heads"]
        (folder / "config.json").write_text(json.dumps(config))
        save_file(self.state, folder / "model.safetensors")
        self.model = load_model(folder, torch.float64).eval()
        self.fla = self.model.config
        if of_authors and config["mup"]:
            base = config["hidden_size_base"]
            mup = {
                "parametrization": "mup_authors",
                "base_width": base,
                "initializer_range": 0.32 / base**0.5,
            }
            scaled = DeltaForCausalLM(DeltaConfig(**{**self.fla.to_dict(), **mup})).double().eval()
            scaled.load_state_dict(self.model.state_dict())
            self.model = scaled

    def backward(self):
        """Computes logits and gradients; returns the logits."""
        ids = tokens(self.theirs["vocab_size"])
        logits = self.model(ids[:, : 1 + self.recorded["logits"].shape[1]]).logits
        self.model.zero_grad()
        F.cross_entropy(
            logits[:, : ids.shape[1] - 1].flatten(0, 1), ids[:, 1:].flatten()
        ).backward()
        return logits[:, : self.recorded["logits"].shape[1]].detach()

    def errors(self, of, ours):
        """Returns the relative error of every parameter's recorded sketch, ours under our names."""
        theirs = from_state(ours, self.fla)
        recorded = {
            n.removeprefix(f"{of}/"): x for n, x in self.recorded.items() if n.startswith(f"{of}/")
        }
        assert {renamed(name) for name in recorded} <= set(theirs)
        return {
            name: ((sketch(theirs[renamed(name)], name) - x).norm() / x.norm()).item()
            for name, x in recorded.items()
        }


@pytest.fixture(params=[*FLA_CASES, *KDA_CASES, *AUTHORS_CASES])
def golden(request, tmp_path):
    return Golden(request.param, tmp_path)


def relative(x, y):
    return ((x - y).norm() / y.norm()).item()


def test_logits_and_gradients_are_theirs(golden):
    logits = golden.backward()
    assert relative(logits, golden.recorded["logits"]) < ALLOWED
    errors = golden.errors(
        "gradient", {name: p.grad for name, p in golden.model.named_parameters()}
    )
    assert max(errors.values()) < 16 * ALLOWED, errors
    # and a wrong reading of their weights would be seen
    layer = golden.model.model.blocks[0]
    wrong_bound = {"bound": None if getattr(layer.mixer, "bound", None) else -3.0}
    for module, change in (
        *(((layer.mixer, wrong_bound),) if golden.case in KDA_CASES else ()),
        (layer.mixer.o_norm, {"eps": 2 * layer.mixer.o_norm.eps}),
        (layer.mixer_norm, {"eps": 2 * layer.mixer_norm.eps}),
        (layer.mixer, {"scale": 2 * layer.mixer.scale}),
        (layer.mlp, {"up_proj": layer.mlp.gate_proj, "gate_proj": layer.mlp.up_proj}),
    ):
        kept = {name: getattr(module, name) for name in change}
        for name, value in change.items():
            setattr(module, name, value)
        assert relative(golden.backward(), logits) > 4 * ALLOWED, change
        for name, value in kept.items():
            setattr(module, name, value)


@pytest.mark.parametrize("case", [*FLA_CASES, *KDA_CASES])
def test_the_way_back_restores_their_files_bit_for_bit(case, tmp_path):
    golden = Golden(case, tmp_path)
    save_model(load_model(golden.folder), tmp_path / "back", "fla")
    if case == "no_convolution":  # in other weights: one tap
        golden.model = load_model(tmp_path / "back", torch.float64).eval()
        assert relative(golden.backward(), golden.recorded["logits"]) < ALLOWED
        return
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == golden.state.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in golden.state.items())
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    for name, value in golden.theirs.items():
        if name in config and value is not None:
            assert config[name] == (pytest.approx(value) if isinstance(value, float) else value), (
                name
            )


@pytest.mark.parametrize("case", ["gdn 96", "gdn 160"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_initial_values_and_one_step_of_training_are_the_released_codes(case, optimizer, tmp_path):
    golden = Golden(case, tmp_path)
    golden.backward()
    start = {name: p.detach().clone() for name, p in golden.model.named_parameters()}
    rows = scaled_parameters(golden.model, optimizer=optimizer, lr=RATE, weight_decay=0.0)
    groups = [{"params": [row.parameter], "lr": row.lr} for row in rows]
    stds = {row.name: row.init_std for row in rows}
    if optimizer == "sgd":
        torch.optim.SGD(groups, lr=RATE, momentum=MOMENTUM, nesterov=True).step()
    else:
        torch.optim.AdamW(groups, lr=RATE, betas=BETAS, eps=0.0, weight_decay=0.0).step()
    moved = {name: p.detach() - start[name] for name, p in golden.model.named_parameters()}
    errors = golden.errors(optimizer, moved)
    assert max(errors.values()) < 2**-30, errors
    doubled = {name: x * (2 if name.endswith("dt_bias") else 1) for name, x in moved.items()}
    assert max(golden.errors(optimizer, doubled).values()) > 0.5
    # it draws taps and the tied embedding as matrices, which we do not
    ours = {
        name.replace("blocks", "layers").replace(".mixer.", ".attn."): std
        for name, std in stds.items()
    }
    for name, drawn in golden.stds.items():
        if name.endswith("_proj.weight"):
            # five standard errors of an std
            spread = 5 / (2 * golden.state[renamed(name)].numel()) ** 0.5
            assert ours[renamed(name)] == pytest.approx(drawn, rel=spread), name
