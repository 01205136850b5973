"""A divided model is made in parts: no process has it whole,
and its weights are those of one process.
"""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from delta_trn.backends import machine
from delta_trn.models import DeltaForCausalLM
from delta_trn.train.parallel.team import assemble
from delta_trn.train.recipes import recipe
from delta_trn.train.run.model import make_model, model_config
from delta_trn.train.run.setup import make_sharding, set_up_process
from delta_trn.train.settings.overrides import apply, parse
from tests.support import team_run, tiny_run

CPU = torch.device("cpu")
LARGE = (
    "model.width=512",
    "model.heads=4",
    "model.layers=8",
    "model.vocab_size=2048",
    "device=cpu",
)
SMALL = ("model.width=32", "model.heads=4", "model.vocab_size=320", "device=cpu")
WAYS: dict[str, tuple[int, tuple[str, ...]]] = {
    "ddp": (2, ()),
    "fsdp": (2, ("distribution.mode=fsdp",)),
    "zero1": (2, ("distribution.mode=zero1",)),
    "tensor": (2, ("distribution.tensor=2",)),
    "tensor-2-fsdp-2": (4, ("distribution.tensor=2", "distribution.mode=fsdp")),
    "untied fsdp": (2, ("distribution.mode=fsdp", "model.tie_word_embeddings=false")),
}


def make_one(*keys: str, device: torch.device = CPU) -> DeltaForCausalLM:
    """Returns the model of one process."""
    config = apply(recipe("tiny"), parse(keys))
    configuration = model_config(config, rows=config.model.vocab_size or 0)
    return make_model(configuration, seed=config.seed, device=device)


def make_divided(world: int, keys: tuple[str, ...], logs: Path) -> list[dict[str, Any]]:
    """Makes the model on several processes. Returns what `_make_and_report` wrote on each."""
    team_run.train(world, keys, logs, _make_and_report)
    return [torch.load(logs / f"rank-{rank}.pt") for rank in range(world)]


def _make_and_report(arguments: list[str], log: str) -> None:
    tiny_run.redirect_output(log)
    config, device = set_up_process(apply(recipe("tiny"), parse(arguments)))
    with assemble(config, device) as team:
        machine.reset_peak_memory(device)
        before = machine.peak_memory(device)
        configuration = model_config(config, rows=config.model.vocab_size or 0)
        sharding = make_sharding(configuration, config, device, team)
        peak = machine.peak_memory(device) - before
        named = dict(sharding.model.named_parameters())
        weights = (
            {name: sharding.whole(name, p).clone() for name, p in named.items()}
            if peak < 2**25
            else {}
        )
        tied = sharding.model.lm_head.weight is sharding.model.model.embed.weight
        torch.save({"peak": peak, "weights": weights, "tied": tied}, f"{log}.pt")
    sys.stdout.flush()
    os._exit(0)


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[] if way == "fsdp" else [pytest.mark.slow]) for way in WAYS]
)
def test_a_divided_model_has_the_initial_weights_of_one_process_bit_for_bit(tmp_path, way):
    world, changes = WAYS[way]
    model = make_one(*SMALL, *(key for key in changes if key.startswith("model.")))
    expected = dict(model.named_parameters())
    for report in make_divided(world, (*SMALL, *changes), tmp_path):
        assert report["tied"] == (model.lm_head.weight is model.model.embed.weight)
        assert report["weights"].keys() == expected.keys()
        assert all(torch.equal(report["weights"][name], p) for name, p in expected.items())


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="only Linux resets a process's peak memory"
)
def test_no_process_of_fsdp_ever_has_the_whole_model_in_memory(tmp_path):
    """A process of two has half of the weights, and draws one matrix at a time.
    Under DDP it has all.
    """
    whole = sum(4 * p.numel() for p in make_one(*LARGE, device=torch.device("meta")).parameters())
    peaks = {}
    for way in ("ddp", "fsdp"):
        world, changes = WAYS[way]
        peaks[way] = max(r["peak"] for r in make_divided(world, (*LARGE, *changes), tmp_path / way))
    # half, a matrix that is drawn, and what an allocator and first calls take
    assert peaks["fsdp"] < 0.8 * whole
    assert peaks["ddp"] > 0.95 * whole
