"""Checkpoints hold the same tensors however many processes write them,
and however many read them.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM

from delta_trn import models  # noqa: F401 - registers the architecture
from delta_trn.train.checkpoints.saver import Saver
from delta_trn.train.run.setup import resume
from delta_trn.train.settings.overrides import parse
from tests.support import team_run, tiny_run

STEP = 4
WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "ddp-2": (2, {}),
    "fsdp-2": (2, {"distribution.mode": "fsdp"}),
    "fsdp-3": (3, {"distribution.mode": "fsdp"}),  # divides no size of the model
    "fsdp-4": (4, {"distribution.mode": "fsdp"}),
    "zero1-2": (2, {"distribution.mode": "zero1"}),
    "zero1-4": (4, {"distribution.mode": "zero1"}),
    "tensor-2": (2, {"distribution.tensor": 2}),
    "tensor-2-fsdp-2": (4, {"distribution.tensor": 2, "distribution.mode": "fsdp"}),
    "context-2": (2, {"distribution.context": 2, "distribution.mode": "fsdp"}),
}


def keys(data: Path, out: Path, changes: dict[str, Any]) -> list[str]:
    values = {
        "steps": STEP,
        "batch.sequences": 12,
        "model.heads": 4,
        "model.width": 32,
        "model.attention_layers": "" if changes.get("distribution.context") else 1,
        "checkpoint.every": STEP,
        **changes,
    }
    return tiny_run.keys(data, out, **values)


def write_checkpoint(way: str, data: Path, out: Path) -> Path:
    """Runs training for a few steps and returns its last checkpoint."""
    world, changes = WAYS[way]
    team_run.train(
        world, ["run", "tiny", *keys(data, out, changes)], out.with_name(f"{out.name}-logs")
    )
    return out / "checkpoints" / f"step-{STEP:08d}"


def save_again(arguments: list[str], log: str) -> None:
    """Resumes the run on each process and at once saves its checkpoint again."""
    tiny_run.redirect_output(log)
    out, step, *changes = arguments
    with resume(Path(out), parse(changes), None, print) as run:
        assert run.state.step == int(step)
        saver = Saver(run)
        saver._saved = 0  # though this step has a checkpoint
        saver.save()


def load_tensors(folder: Path) -> dict[str, Tensor]:
    """Loads every tensor of a checkpoint and joins its parts by hand."""
    parts: dict[str, list[tuple[list[int], Tensor]]] = {}
    for path in folder.glob("*.safetensors"):
        if path.name == "random.safetensors":
            continue
        with safe_open(path, "pt") as file:
            places = json.loads((file.metadata() or {}).get("DCP_SHARDING_INFO", "{}"))
            for name in file.keys():  # noqa: SIM118 - the file is not a mapping
                part = file.get_tensor(name)
                offsets = places[name]["saved_offsets"] if name in places else [0] * part.dim()
                parts.setdefault(name, []).append((offsets, part))
    tensors = {}
    for name, pieces in parts.items():
        ends = [torch.tensor(offsets) + torch.tensor(part.shape) for offsets, part in pieces]
        shape = torch.stack(ends).amax(0).int().tolist()
        whole = torch.full(shape, float("nan"))
        for offsets, part in pieces:
            whole[tuple(slice(a, a + n) for a, n in zip(offsets, part.shape, strict=True))] = part
        assert not whole.isnan().any(), f"{name} has a hole"
        assert sum(part.numel() for _, part in pieces) == whole.numel(), f"{name} has parts twice"
        tensors[name] = whole
    return tensors


CHAINS = [
    ["fsdp-3", "alone"],
    pytest.param(["fsdp-3", "zero1-2", "alone"], marks=pytest.mark.slow),
    pytest.param(
        ["alone", "fsdp-4", "tensor-2", "tensor-2-fsdp-2", "zero1-4"], marks=pytest.mark.slow
    ),
    pytest.param(["tensor-2-fsdp-2", "fsdp-3", "ddp-2", "tensor-2"], marks=pytest.mark.slow),
    pytest.param(["context-2", "zero1-4", "fsdp-2"], marks=pytest.mark.slow),
    pytest.param(["zero1-4", "fsdp-4", "alone"], marks=pytest.mark.slow),
]


@pytest.mark.parametrize("chain", CHAINS, ids="+".join)
def test_checkpoints_pass_between_groups_of_processes_bit_for_bit(data, tmp_path, chain):
    out = tmp_path / "run"
    first = load_tensors(write_checkpoint(chain[0], data, out))
    assert any(name.endswith("/exp_avg_sq") for name in first)
    for n, way in enumerate(chain[1:], start=1):
        world, changes = WAYS[way]
        reset = {
            "distribution.mode": "ddp",
            "distribution.tensor": 1,
            "distribution.context": 1,
            **changes,
        }
        overrides = [f"{key}={value}" for key, value in reset.items()]
        team_run.train(world, [out, STEP, *overrides], tmp_path / f"logs-{n}", save_again)
        again = load_tensors(out / "checkpoints" / f"step-{STEP:08d}")
        assert again.keys() == first.keys()
        assert [name for name in first if not torch.equal(first[name], again[name])] == [], way


@pytest.mark.parametrize("way", ["fsdp-2", pytest.param("tensor-2-fsdp-2", marks=pytest.mark.slow)])
def test_transformers_loads_a_checkpoint_of_several_processes(data, tmp_path, way):
    folder = write_checkpoint(way, data, tmp_path / "run")
    alone = write_checkpoint("alone", data, tmp_path / "alone")
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    saved = load_tensors(folder)
    for name, tensor in model.named_parameters():
        assert torch.equal(tensor, saved[name]), name
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        assert (folder / name).read_bytes() == (alone / name).read_bytes(), name
    assert {path.suffix for path in folder.iterdir()} == {".safetensors", ".json"}, (
        "no file needs pickle"
    )
    assert len(list(folder.glob("optimizer-*"))) == WAYS[way][0], "each process writes its own"
