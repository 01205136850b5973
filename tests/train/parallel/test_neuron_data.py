"""Data parallelism on Neuron: flat buckets of gradients, batches sent ahead, the stand-ins' signatures."""

import importlib.util
import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from delta_trn.backends import machine
from delta_trn.train.data import Loader, make_loader, open_dataset
from delta_trn.train.neuron import reduction
from delta_trn.train.neuron.feed import DeviceFeed
from delta_trn.train.settings.errors import ConfigError
from tests.support import team_run, tiny_run

SHIMS = Path(__file__).parents[2] / "shims"
CPU = torch.device("cpu")
SHAPES = [(3, 4), (5,), (2, 2), (), (7, 1)]


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

    @pytest.mark.parametrize("text", ["0", "-1", "1.5", "much"])
    def test_a_size_that_is_no_whole_number_of_mb_is_refused(self, text, monkeypatch):
        monkeypatch.setenv(reduction.VARIABLE, text)
        with pytest.raises(ConfigError, match=f"{reduction.VARIABLE}={text}: expected a whole number of MB"):
            reduction.bucket_bytes()
        monkeypatch.setenv(reduction.VARIABLE, "3")
        assert reduction.bucket_bytes() == 3 * 2**20
        monkeypatch.delenv(reduction.VARIABLE)
        assert reduction.bucket_bytes() == 50 * 2**20


def reduce_on_four(arguments: list[str], log: str) -> None:
    """Averages over pairs of four processes, by the stand-in of torch_xla, and checks values and calls."""
    tiny_run.redirect_output(log)
    sys.path.insert(0, str(SHIMS))
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    groups = reduction.replica_groups(4, 2)
    assert groups == [[0, 2], [1, 3]]

    def values(of: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(of)
        return [torch.randn(shape, generator=generator) for shape in SHAPES]

    parameters = [torch.nn.Parameter(x) for x in values(10 + rank)]
    machine.broadcast(list(parameters), root=rank % 2, groups=groups)
    assert all(torch.equal(p, x) for p, x in zip(parameters, values(10 + rank % 2), strict=True))
    for p, gradient in zip(parameters, values(rank), strict=True):
        p.grad = gradient
    parameters.append(torch.nn.Parameter(torch.ones(2)))  # one that no gradient reaches
    held = [p.grad for p in parameters]
    from torch_xla.core import xla_model  # type: ignore[import-not-found]

    before, most = xla_model.calls["all_reduce"], 4 * 12
    reduction.average(parameters, 2, groups, most)
    count = len(list(reduction.buckets(values(0), most)))
    assert count == 3 and xla_model.calls["all_reduce"] - before == count
    pairs = zip(values(rank % 2), values(rank % 2 + 2), strict=True)
    for p, (a, b) in zip(parameters, pairs, strict=False):
        torch.testing.assert_close(p.grad, (a + b) / 2, rtol=2**-23, atol=0)
        assert not torch.equal(p.grad, a), "a process's own gradient is not the mean"
    assert all(p.grad is x for p, x in zip(parameters, held, strict=True))
    sys.stdout.flush()
    os._exit(0)


def test_gradients_of_two_replicas_are_averaged_by_one_collective_a_bucket(tmp_path):
    """Four processes, two of them with each part of the model; initial weights are the first replica's."""
    team_run.train(4, [], tmp_path, reduce_on_four)


class TestFeed:
    """The stand-in reads four batches ahead, as far as the package's two threads and queues may get."""

    @pytest.fixture(autouse=True)
    def ahead(self, monkeypatch):
        path = SHIMS / "torch_xla" / "distributed" / "parallel_loader.py"
        spec = importlib.util.spec_from_file_location("stand_in_of_parallel_loader", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        monkeypatch.setattr(machine, "import_module", lambda name: module)

    @pytest.fixture
    def loader(self, data) -> Loader:
        return self.make(data)

    def make(self, data: Path) -> Loader:
        return make_loader(open_dataset(data), "train", batch=2, sequence=8, seed=3, rank=1, world=2)

    @pytest.mark.parametrize("taken", [0, 1, 3, 9])
    def test_the_position_is_that_of_the_batches_that_were_taken(self, data, loader, taken):
        feed, plain = DeviceFeed(loader, CPU, with_noise=False), self.make(data)
        for _ in range(taken):
            assert torch.equal(feed.next_batch().inputs, plain.next_batch().inputs)
        assert feed.position() == plain.state_dict()
        again = self.make(data)
        again.load_state_dict(feed.position())
        assert torch.equal(again.next_batch().inputs, feed.next_batch().inputs)
        # the loader itself has gone on: its own position would skip batches
        assert loader.state_dict()["samples"] > feed.position()["samples"]

    def test_noise_is_that_of_its_batch(self, data, loader):
        feed, plain = DeviceFeed(loader, CPU, with_noise=True), self.make(data)
        for _ in range(3):
            noise, batch = plain.noise(), feed.next_batch()
            assert batch.noise is not None and torch.equal(batch.noise, noise)
            assert batch.position_ids is None and torch.equal(batch.targets, plain.next_batch().targets)

    def test_what_reading_raises_is_raised_when_that_batch_is_taken(self, loader, monkeypatch):
        read, count = loader.next_batch, itertools.count()

        def fail_at_the_third() -> Any:
            if next(count) == 2:
                raise OSError("the disk is gone")
            return read()

        monkeypatch.setattr(loader, "next_batch", fail_at_the_third)
        feed = DeviceFeed(loader, CPU, with_noise=False)
        feed.next_batch()
        feed.next_batch()
        with pytest.raises(OSError, match="the disk is gone"):
            feed.next_batch()

    def test_a_closed_feed_reads_no_more(self, loader):
        feed = DeviceFeed(loader, CPU, with_noise=False)
        feed.next_batch()
        feed.close()
        with pytest.raises(RuntimeError, match="the feed is closed"):
            feed.next_batch()


CHECK = """
from tests.support import published
import torch_xla.core.xla_model as xm, torch_xla.distributed.parallel_loader as pl

for source in published.PUBLISHED:
    assert published.differences(source) == [], published.differences(source)
# the check can fail, and so can a call
published.PUBLISHED[published.XLA]["torch_xla:sync"] = "(wait=True)"
(line,) = published.differences(published.XLA)
assert line.startswith("torch_xla:sync has (wait=False, reset_scope=True); published by")
for call in (
    lambda: xm.all_reduce("sum", [], bucket=1),
    lambda: iter(pl.MpDeviceLoader([], "cpu", prefetch=2)),
):
    try:
        call()
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
