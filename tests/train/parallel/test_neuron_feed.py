"""Batches sent ahead on Neuron: a checkpoint has the position
of the last batch that a step has taken.
"""

import importlib.util
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from delta_trn.backends import machine
from delta_trn.train.data.dataset import open_dataset
from delta_trn.train.data.loader import Loader, make_loader
from delta_trn.train.neuron.feed import DeviceFeed

STAND_IN = Path(__file__).parents[2] / "shims" / "torch_xla" / "distributed" / "parallel_loader.py"
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def ahead(monkeypatch):
    """Reads four batches ahead, as far as the package's two threads and queues may get."""
    spec = importlib.util.spec_from_file_location("stand_in_of_parallel_loader", STAND_IN)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(machine, "import_module", lambda name: module)


@pytest.fixture
def make(data):
    def make_one() -> Loader:
        options = {"batch": 2, "sequence": 8, "seed": 3, "rank": 1, "world": 2, "with_noise": True}
        return make_loader(open_dataset(data), "train", **options)

    return make_one


@pytest.mark.parametrize("taken", [0, 3])
def test_batches_and_position_are_those_of_a_loader_that_does_not_read_ahead(make, taken):
    loader, plain, again = make(), make(), make()
    feed = DeviceFeed(loader, CPU)
    for _ in range(taken):
        batch, expected = feed.next_batch(), plain.next_batch()
        assert batch.noise is not None and torch.equal(batch.noise, expected.noise)
        assert batch.position_ids is None and torch.equal(batch.targets, expected.targets)
    assert feed.state_dict() == plain.state_dict()
    again.load_state_dict(feed.state_dict())
    assert torch.equal(again.next_batch().inputs, feed.next_batch().inputs)
    # the loader itself has gone on: its own position would skip batches
    assert loader.state_dict()["samples"] > feed.state_dict()["samples"]


def test_what_reading_raises_is_raised_when_that_batch_is_taken(make, monkeypatch):
    loader, count = make(), itertools.count()
    read = loader.next_batch

    def fail_at_the_third() -> Any:
        if next(count) == 2:
            raise OSError("the disk is gone")
        return read()

    monkeypatch.setattr(loader, "next_batch", fail_at_the_third)
    feed = DeviceFeed(loader, CPU)
    feed.next_batch()
    feed.next_batch()
    with pytest.raises(OSError, match="the disk is gone"):
        feed.next_batch()


def test_a_closed_feed_reads_no_more(make):
    feed = DeviceFeed(make(), CPU)
    feed.next_batch()
    feed.close()
    with pytest.raises(RuntimeError, match="the feed is closed"):
        feed.next_batch()
