"""Replicas, divided heads and ZeRO-1 on Neuron give the same run, on stand-ins over two gloo processes.

The stand-ins have the names and signatures of torch_xla and neuronx_distributed, and compute on the CPU. Only
a chip can show that AWS's own packages compute the same. test_distributed.py derives the tolerances.
"""

import sys
from pathlib import Path
from typing import Any

import pytest

from delta_trn.train.neuron import sharding as neuron
from delta_trn.train.parallel import sharding as whole
from delta_trn.train.settings.errors import ConfigError
from delta_trn.train.settings.schema import DistributionSection
from tests.support import team_run, tiny_run
from tests.train.parallel.test_distributed import BATCH, OPTIMIZERS, ORDERS, above, distances, tolerances

SHIMS = Path(__file__).parents[2] / "shims"
WAYS: dict[str, dict[str, Any]] = {
    "replicas": {},
    "heads": {"distribution.tensor": 2},
    "zero1": {"distribution.mode": "zero1"},
}


def run_on_stand_in(arguments: list[str], log: str) -> None:
    """Runs one rank as if its CPU were a NeuronCore. No DistributedDataParallel may be made."""
    sys.path.insert(0, str(SHIMS))
    neuron.serves = lambda device: True
    whole.DistributedDataParallel = _refuse
    tiny_run.run_and_exit(arguments, log)


def _refuse(*arguments: Any, **options: Any) -> None:
    raise AssertionError("torch's DistributedDataParallel does not work on Neuron")


def keys(data: Path, out: Path, optimizer: str, changes: dict[str, Any]) -> list[str]:
    every = {"evaluation.every": 5, "checkpoint.every": 5, "schedule.decay_steps": 12}
    values = {**BATCH, **OPTIMIZERS[optimizer], "model.layers": 1, "steps": 10, **every, **changes}
    return tiny_run.keys(data, out, **values)


def run(arguments: list[Any], logs: Path) -> None:
    team_run.train(2, arguments, logs, run_on_stand_in)


@pytest.mark.parametrize(("way", "optimizer"), [("replicas", "adamw"), ("heads", "sgd"), ("zero1", "adamw")])
def test_a_resumed_run_on_neuron_equals_the_run_of_one_process(data, tmp_path, way, optimizer):
    """The run is resumed after five of ten steps. One process runs all ten, and resumes both for two more."""
    out = tmp_path / "run"
    run(["run", "tiny", *keys(data, out, optimizer, {**WAYS[way], "steps": 5})], tmp_path / "first")
    run(["resume", out, "steps=10"], tmp_path / "second")
    alone = tmp_path / "alone"
    tiny_run.train("run", "tiny", *keys(data, alone, optimizer, {}))
    controls = []
    for micro in ORDERS:
        control = tmp_path / f"micro-{micro}"
        tiny_run.train("run", "tiny", *keys(data, control, optimizer, {"batch.micro": micro}))
        controls.append(distances(control, alone))
    allowed = tolerances(controls)
    assert not above(distances(out, alone), allowed)
    reset = {"distribution.mode": "ddp", "distribution.tensor": 1}
    tiny_run.train("resume", out, "steps=12", *(f"{key}={value}" for key, value in reset.items()))
    tiny_run.train("resume", alone, "steps=12")
    assert not above(distances(out, alone), allowed)


@pytest.mark.parametrize("changes", [{"mode": "fsdp"}, {"context": 2}], ids=str)
def test_fsdp_and_context_parallelism_are_refused_on_neuron(changes):
    neuron.require(DistributionSection(mode="zero1", tensor=2))
    with pytest.raises(ConfigError, match="is not there on Neuron; use mode=ddp or mode=zero1"):
        neuron.require(DistributionSection(**changes))


def test_a_missing_neuronx_distributed_is_refused_with_what_to_install(monkeypatch):
    monkeypatch.setattr(neuron, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"neuronx-distributed==0\.17\.26814 .* or use mode=ddp"):
        neuron.initialize(2)
