"""Replicas on Neuron give the run of one process, on a stand-in over two gloo processes.

The stand-in has the names and signatures of torch_xla, and computes on the CPU. Only a chip can show that
torch_xla itself computes the same. test_distributed.py derives the tolerances.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from delta_trn.backends import machine
from delta_trn.train.neuron import reduction
from delta_trn.train.neuron import sharding as neuron
from delta_trn.train.parallel import sharding as whole
from delta_trn.train.parallel.team import Team
from delta_trn.train.settings.errors import ConfigError
from delta_trn.train.settings.schema import DistributionSection
from tests.support import team_run, tiny_run
from tests.train.parallel.test_distributed import BATCH, OPTIMIZERS, ORDERS, above, distances, tolerances

SHIMS = Path(__file__).parents[2] / "shims"
SHAPES = [(3, 4), (5,), (2, 2), (), (7, 1)]


def run_on_stand_in(arguments: list[str], log: str) -> None:
    """Runs one rank as if its CPU were a NeuronCore. No DistributedDataParallel may be made."""
    sys.path.insert(0, str(SHIMS))
    neuron.serves = lambda device: True
    whole.DistributedDataParallel = _refuse
    tiny_run.run_and_exit(arguments, log)


def _refuse(*arguments: Any, **options: Any) -> None:
    raise AssertionError("torch's DistributedDataParallel does not work on Neuron")


def keys(data: Path, out: Path, changes: dict[str, Any]) -> list[str]:
    every = {"evaluation.every": 5, "checkpoint.every": 5, "schedule.decay_steps": 12}
    values = {**BATCH, **OPTIMIZERS["sgd"], "model.layers": 1, "steps": 10, **every, **changes}
    return tiny_run.keys(data, out, **values)


def run(arguments: list[Any], logs: Path) -> None:
    team_run.train(2, arguments, logs, run_on_stand_in)


def test_a_resumed_run_on_neuron_equals_the_run_of_one_process(data, tmp_path):
    """The run is resumed after five of ten steps. One process runs all ten, and resumes both for two more."""
    out = tmp_path / "run"
    run(["run", "tiny", *keys(data, out, {"steps": 5})], tmp_path / "first")
    run(["resume", out, "steps=10"], tmp_path / "second")
    alone = tmp_path / "alone"
    tiny_run.train("run", "tiny", *keys(data, alone, {}))
    controls = []
    for micro in ORDERS:
        control = tmp_path / f"micro-{micro}"
        tiny_run.train("run", "tiny", *keys(data, control, {"batch.micro": micro}))
        controls.append(distances(control, alone))
    allowed = tolerances(controls)
    assert not above(distances(out, alone), allowed)
    tiny_run.train("resume", out, "steps=12")
    tiny_run.train("resume", alone, "steps=12")
    assert not above(distances(out, alone), allowed)


@pytest.mark.parametrize("changes", [{"mode": "fsdp"}, {"mode": "zero1"}, {"context": 2}], ids=str)
def test_what_neuron_does_not_divide_is_refused(changes):
    with pytest.raises(
        ConfigError, match="is not there on Neuron, where processes are replicas; use mode=ddp"
    ):
        model: Any = torch.nn.Linear(1, 1)
        neuron.NeuronSharding(model, DistributionSection(**changes), Team(world=2))


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
        with pytest.raises(ConfigError, match=f"{reduction.VARIABLE}={text}: expected a whole number of MB"):
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
    machine.broadcast(list(parameters), root=0)
    assert all(torch.equal(p, x) for p, x in zip(parameters, values(10), strict=True))
    for p, gradient in zip(parameters, values(rank), strict=True):
        p.grad = gradient
    parameters.append(torch.nn.Parameter(torch.ones(2)))  # one that no gradient reaches
    held = [p.grad for p in parameters]
    from torch_xla.core import xla_model  # type: ignore[import-not-found]

    before, most = xla_model.calls["all_reduce"], 4 * 12
    reduction.average(parameters, 2, most)
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

assert published.differences() == [], published.differences()
# the check can fail, and so can a call
published.PUBLISHED["torch_xla:sync"] = "(wait=True)"
(line,) = published.differences()
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
