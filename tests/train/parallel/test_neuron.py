"""Replicas, divided heads and ZeRO-1 on Neuron give the run of one process, on stand-ins over gloo.

The stand-ins have the names and signatures of torch_xla and neuronx_distributed, and compute on the
CPU. Only a chip can show that AWS's own packages compute the same. test_distributed.py derives the
tolerances.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from delta_trn.backends import machine
from delta_trn.train.neuron import reduction
from delta_trn.train.neuron import sharding as neuron
from delta_trn.train.parallel import pytorch
from delta_trn.train.settings.errors import ConfigError
from delta_trn.train.settings.schema import DistributionSection
from tests.support import team_run, tiny_models, tiny_run
from tests.train.parallel.test_distributed import (
    BATCH,
    OPTIMIZERS,
    ORDERS,
    above,
    distances,
    tolerances,
    weights,
)

SHIMS = Path(__file__).parents[2] / "shims"
SHAPES = [(3, 4), (5,), (2, 2), (), (7, 1)]
WAYS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "replicas": (2, "sgd", {}),
    "heads": (4, "sgd", {"distribution.tensor": 2}),  # and two replicas
    "zero1": (2, "adamw", {"distribution.mode": "zero1"}),
}


def run_on_stand_in(arguments: list[str], log: str) -> None:
    """Runs one rank as if its CPU were a NeuronCore. No DistributedDataParallel may be made."""
    sys.path.insert(0, str(SHIMS))
    neuron.serves = lambda device: True
    pytorch.DistributedDataParallel = _refuse
    tiny_run.run_and_exit(arguments, log)


def _refuse(*arguments: Any, **options: Any) -> None:
    raise AssertionError("torch's DistributedDataParallel does not work on Neuron")


def run_with_a_bug(arguments: list[str], log: str) -> None:
    """Averages gradients over all processes, of which each replica has other heads."""
    average = reduction.average
    reduction.average = lambda parameters, count, groups, most: average(parameters, 4, None, most)
    run_on_stand_in(arguments, log)


def keys(data: Path, out: Path, optimizer: str, changes: dict[str, Any]) -> list[str]:
    every = {"evaluation.every": 5, "checkpoint.every": 5, "schedule.decay_steps": 12}
    values = {**BATCH, **OPTIMIZERS[optimizer], "model.layers": 1, "steps": 12, **every, **changes}
    return tiny_run.keys(data, out, **values)


@pytest.fixture(scope="module")
def alone(data, tmp_path_factory):
    """Returns a function: optimizer -> distances from the run of one process,
    and how large they may be.
    """

    @cache
    def run(optimizer: str) -> tuple[Callable[[Path], dict[str, float]], dict[str, float]]:
        folder = tmp_path_factory.mktemp(optimizer)
        tiny_run.train("run", "tiny", *keys(data, folder / "begin", optimizer, {"steps": 1}))
        begin = weights(folder / "begin")  # the first step's learning rate is 0
        for micro in (8, *ORDERS):
            changes = {"batch.micro": micro}
            tiny_run.train("run", "tiny", *keys(data, folder / f"{micro}", optimizer, changes))

        def from_it(other: Path) -> dict[str, float]:
            return distances(other, folder / "8", begin)

        return from_it, tolerances([from_it(folder / f"{micro}") for micro in ORDERS])

    return run


@pytest.mark.parametrize("way", WAYS)
def test_a_resumed_run_on_neuron_equals_the_run_of_one_process(data, alone, tmp_path, way):
    """The run is resumed after five of twelve steps, and after ten on one process."""
    out, (world, optimizer, changes) = tmp_path / "run", WAYS[way]
    first = ["run", "tiny", *keys(data, out, optimizer, {**changes, "steps": 5})]
    team_run.train(world, first, tmp_path / "first", run_on_stand_in)
    team_run.train(world, ["resume", out, "steps=10"], tmp_path / "second", run_on_stand_in)
    tiny_run.train("resume", out, "steps=12", "distribution.mode=ddp", "distribution.tensor=1")
    from_it, allowed = alone(optimizer)
    assert not above(from_it(out), allowed)


def test_gradients_of_all_processes_averaged_together_are_seen(data, alone, tmp_path):
    world, optimizer, changes = WAYS["heads"]
    arguments = ["run", "tiny", *keys(data, tmp_path / "run", optimizer, changes)]
    team_run.train(world, arguments, tmp_path / "logs", run_with_a_bug)
    from_it, allowed = alone(optimizer)
    assert above(from_it(tmp_path / "run"), allowed).keys() == allowed.keys()


@pytest.mark.parametrize(
    "changes", [{"mode": "fsdp"}, {"context": 2}, {"mode": "zero1", "tensor": 2}], ids=str
)
def test_what_neuron_does_not_divide_is_refused(changes):
    neuron.require(DistributionSection(tensor=2))
    with pytest.raises(
        ConfigError, match="is not there on Neuron; use mode=ddp, or mode=zero1 with"
    ):
        neuron.require(DistributionSection(**changes))


def test_a_missing_neuronx_distributed_is_refused_with_what_to_install(monkeypatch):
    monkeypatch.setattr(neuron, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"neuronx-distributed==0\.17\.26814 .* or use mode=ddp"):
        neuron.initialize(2)


def test_an_mlp_that_processes_cannot_have_equal_parts_of_is_refused(monkeypatch):
    names = ("set_tensor_model_parallel_attributes", "copy_to_tensor_model_parallel_region")
    functions = dict.fromkeys(
        (*names, "reduce_from_tensor_model_parallel_region"), lambda *_, **__: None
    )
    monkeypatch.setattr(neuron, "library", lambda module: SimpleNamespace(**functions))
    rank = SimpleNamespace(get_tensor_model_parallel_rank=lambda: 0)
    monkeypatch.setattr(neuron, "initialize", lambda parts: rank)
    neuron._divide_heads(tiny_models.model(intermediate_size=96), 4)
    with pytest.raises(ConfigError, match="tensor=4 does not divide 98, the inner size of an MLP"):
        neuron._divide_heads(tiny_models.model(intermediate_size=98), 4)


class TestBuckets:
    def sizes(self, numbers: list[int], most: int) -> list[list[int]]:
        gradients = [torch.zeros(n) for n in numbers]
        return [[g.numel() for g in bucket] for bucket in reduction.buckets(gradients, 4 * most)]

    def test_buckets_hold_all_gradients_once_last_first(self):
        assert self.sizes([1, 2, 3, 4], 5) == [[4], [3, 2], [1]]
        assert self.sizes([1, 2, 3, 4], 100) == [[4, 3, 2, 1]]

    def test_a_gradient_above_the_bound_is_alone(self):
        assert self.sizes([2, 9, 3, 9], 5) == [[9], [3], [9], [2]]

    def test_a_bucket_has_one_dtype(self):
        gradients = [torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16), torch.zeros(3)]
        found = [[(g.dtype, g.numel()) for g in b] for b in reduction.buckets(gradients, 2**20)]
        assert found == [[(torch.float32, 3), (torch.float32, 2)], [(torch.bfloat16, 2)]]

    @pytest.mark.parametrize("text", ["0", "1.5"])
    def test_a_size_that_is_no_whole_number_of_mb_is_refused(self, text, monkeypatch):
        monkeypatch.setenv(reduction.VARIABLE, text)
        with pytest.raises(
            ConfigError, match=f"{reduction.VARIABLE}={text}: expected a whole number of MB"
        ):
            reduction.bucket_bytes()
        monkeypatch.setenv(reduction.VARIABLE, "3")
        assert reduction.bucket_bytes() == 3 * 2**20
        monkeypatch.delenv(reduction.VARIABLE)
        assert reduction.bucket_bytes() == 50 * 2**20


def reduce_on_two(arguments: list[str], log: str) -> None:
    """Averages over two processes, by the stand-in of torch_xla, and checks values and calls."""
    tiny_run.redirect_output(log)
    sys.path.insert(0, str(SHIMS))
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()

    def values(of: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(of)
        return [torch.randn(shape, generator=generator) for shape in SHAPES]

    parameters = [torch.nn.Parameter(x) for x in values(10 + rank)]
    machine.broadcast(list(parameters), root=0, groups=None)
    assert all(torch.equal(p, x) for p, x in zip(parameters, values(10), strict=True))
    for p, gradient in zip(parameters, values(rank), strict=True):
        p.grad = gradient
    parameters.append(torch.nn.Parameter(torch.ones(2)))  # one that no gradient reaches
    held = [p.grad for p in parameters]
    from torch_xla.core import xla_model  # type: ignore[import-not-found]

    before, most = xla_model.calls["all_reduce"], 4 * 12
    reduction.average(parameters, 2, None, most)
    count = len(list(reduction.buckets(values(0), most)))
    assert count == 3 and xla_model.calls["all_reduce"] - before == count
    pairs = zip(values(0), values(1), strict=True)
    for p, (a, b) in zip(parameters, pairs, strict=False):
        torch.testing.assert_close(p.grad, (a + b) / 2, rtol=2**-23, atol=0)
    assert all(p.grad is x for p, x in zip(parameters, held, strict=True))
    sys.stdout.flush()
    os._exit(0)


def test_gradients_of_replicas_are_averaged_by_one_collective_a_bucket(tmp_path):
    """Initial weights are the first replica's."""
    team_run.train(2, [], tmp_path, reduce_on_two)


CHECK = """
from tests.support import published
import torch_xla.core.xla_model as xm

for source in published.PUBLISHED:
    assert published.differences(source) == [], published.differences(source)
# the check can fail, and so can a call
published.PUBLISHED[published.XLA]["torch_xla:sync"] = "(wait=True)"
(line,) = published.differences(published.XLA)
assert line.startswith("torch_xla:sync has (wait=False, reset_scope=True); published by")
try:
    xm.all_reduce("sum", [], bucket=1)
except TypeError as error:
    assert "unexpected keyword argument" in str(error)
else:
    raise AssertionError("a keyword that is not published was taken")
print("held")
"""


def test_stand_ins_have_the_published_signatures_and_refuse_other_calls():
    process = subprocess.run(
        [sys.executable, "-c", CHECK],
        cwd=SHIMS.parents[1],
        env={**os.environ, "PYTHONPATH": str(SHIMS)},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert process.stdout == "held\n", process.stderr
