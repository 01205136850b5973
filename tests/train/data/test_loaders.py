"""Batches are next-token pairs of the shards' tokens; positions are exact; ranks share nothing."""

import json

import numpy as np
import pytest
import torch

from delta_trn.train.data.dataset import open_dataset
from delta_trn.train.data.loader import evaluation_batches, make_loader, mix64
from delta_trn.train.settings.errors import PositionMismatch, ShardError
from tests.support.corpus import prepare_text, write_jsonl

T = 16
both = pytest.mark.parametrize("kind", ["random_crop", "stream"])


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """Seven training shards of at most 2000 bytes, in documents that all differ."""
    root = tmp_path_factory.mktemp("loaders")
    source = write_jsonl(root / "corpus.jsonl", (f"{i:04x}" * 20 for i in range(170)))
    return open_dataset(prepare_text(source, root / "out", shard_tokens=2000))


def loader(dataset, kind, **options):
    return make_loader(
        dataset, "train", **{"kind": kind, "batch": 4, "sequence": T, "seed": 7, **options}
    )


def take(loader, count):
    return [loader.next_batch()[:2] for _ in range(count)]


def same(left, right):
    return len(left) == len(right) and all(
        torch.equal(a, b)
        for pair in zip(left, right, strict=True)
        for a, b in zip(*pair, strict=True)
    )


@both
def test_places_start_again_at_every_document_and_at_every_row(dataset, kind):
    bounded = loader(dataset, kind, boundaries=True)
    batches = [bounded.next_batch() for _ in range(10)]
    batches += evaluation_batches(dataset, batch=4, sequence=T, batches=10, boundaries=True)
    plain = take(loader(dataset, kind), 10)
    assert all(
        torch.equal(b.inputs, inputs) for b, (inputs, _) in zip(batches[:10], plain, strict=True)
    )
    restarts = 0
    for batch in batches:
        assert (
            batch.position_ids.dtype == torch.int32
            and batch.position_ids.shape == batch.inputs.shape
        )
        for ids, places in zip(batch.inputs.tolist(), batch.position_ids.tolist(), strict=True):
            expected = []
            for token in ids:
                begins = token == dataset.meta.bos_id or not expected
                restarts += begins and bool(expected)
                expected.append(0 if begins else expected[-1] + 1)
            assert places == expected
    assert restarts > 5, "there are rows with more than one document"
    assert loader(dataset, kind).next_batch().position_ids is None


# -- both kinds ------------------------------------------------------------------------------------


@both
def test_the_same_seed_gives_the_same_pairs_of_tokens_and_another_gives_others(dataset, kind):
    batches = take(loader(dataset, kind), 20)
    for inputs, targets in batches:
        for x in (inputs, targets):
            assert x.shape == (4, T) and x.dtype == torch.int64 and x.is_contiguous()
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert same(batches, take(loader(dataset, kind), 20))
    assert not same(batches, take(loader(dataset, kind, seed=8), 20))
    assert same(take(loader(dataset, kind, seed=-1), 2), take(loader(dataset, kind, seed=-1), 2))


@both
@pytest.mark.parametrize("stop", [0, 1, 13, 200])  # an epoch of the stream has about 200 batches
def test_a_loader_continues_where_its_state_was_taken(dataset, kind, stop):
    first = loader(dataset, kind)
    take(first, stop)
    state = json.loads(json.dumps(first.state_dict()))
    second = loader(dataset, kind)
    take(second, 3)
    second.load_state_dict(state)
    assert same(take(second, 5), take(first, 5))
    assert second.state_dict() == first.state_dict()


@both
def test_a_loader_refuses_a_position_of_other_data(dataset, kind, tmp_path):
    state = loader(dataset, kind).state_dict()
    source = write_jsonl(tmp_path / "c.jsonl", (f"other {i}" * 20 for i in range(50)))
    other = open_dataset(prepare_text(source, tmp_path / "out"))
    cases = {
        "seed": loader(dataset, kind, seed=8),
        "sequence": loader(dataset, kind, sequence=8),
        "kind": loader(dataset, {"random_crop": "stream", "stream": "random_crop"}[kind]),
        "dataset": loader(other, kind),
        "split": make_loader(dataset, "val", kind=kind, batch=1, sequence=T, seed=7),
    }
    for key, another in cases.items():
        with pytest.raises(PositionMismatch, match=rf"{key} was .*, is .*begin a new run"):
            another.load_state_dict(state)


# -- random crops ----------------------------------------------------------------------------------


def splitmix64(state: int) -> int:
    """The reference in plain integers: https://prng.di.unimi.it/splitmix64.c"""
    mask = 2**64 - 1
    z = (state + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def test_mix64_is_splitmix64():
    # the first outputs of the generator seeded with 0 are published constants
    states = [0, 0x9E3779B97F4A7C15]
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]
    assert mix64(np.array(states, np.uint64)).tolist() == list(map(splitmix64, states)) == published


def test_random_crops_start_where_the_documentation_says(dataset):
    """The documented algorithm once more, in plain integers and lists."""
    starts = [
        (shard, offset)
        for shard, tokens in enumerate(dataset.shards("train"))
        for offset in range(len(tokens) - T)  # T+1 tokens are left
    ]
    world, batch, seed = 3, 4, 7
    for rank in range(world):
        ours = loader(dataset, "random_crop", rank=rank, world=world)
        for b in range(5):
            inputs, targets = ours.next_batch()[:2]
            for row in range(batch):
                state = 0
                for word in (1, seed, (b * world + rank) * batch + row):
                    state = splitmix64(state ^ word)
                shard, offset = starts[state % len(starts)]
                expected = dataset.shards("train")[shard][offset : offset + T + 1].tolist()
                assert [*inputs[row].tolist(), int(targets[row, -1])] == expected


@both
@pytest.mark.parametrize(("world", "batch"), [(1, 24), (2, 12), (4, 6), (3, 4), (1, 1)])
def test_a_step_has_the_same_samples_however_it_is_divided(dataset, kind, world, batch):
    expected = torch.cat([inputs for inputs, _ in take(loader(dataset, kind, batch=24), 2)])
    ranks = [loader(dataset, kind, rank=rank, world=world, batch=batch) for rank in range(world)]
    rounds = 48 // (world * batch)
    got = torch.cat([rank.next_batch()[0] for _ in range(rounds) for rank in ranks])
    assert torch.equal(got, expected)


@both
def test_a_loader_continues_exactly_on_another_number_of_ranks(dataset, kind):
    one = loader(dataset, kind, batch=8)
    take(one, 3)
    two = [loader(dataset, kind, batch=4, rank=rank, world=2) for rank in range(2)]
    for rank in two:
        rank.load_state_dict(one.state_dict())
    assert torch.equal(torch.cat([rank.next_batch()[0] for rank in two]), one.next_batch()[0])
    with pytest.raises(
        PositionMismatch, match=r"24 samples .* world=1 x batch=7; choose a product that divides it"
    ):
        loader(dataset, kind, batch=7).load_state_dict({**one.state_dict(), "samples": 24})


# -- the stream ------------------------------------------------------------------------------------


def windows_of(loader, count):
    """[count * batch, T + 1]"""
    return torch.cat(
        [torch.cat([inputs, targets[:, -1:]], dim=1) for inputs, targets in take(loader, count)]
    )


def is_whole(windows: torch.Tensor, tokens: np.ndarray) -> bool:
    """Whether the targets of consecutive windows are tokens 1, 2, 3, ...
    with none left out or twice.
    """
    return windows[:, 1:].flatten().tolist() == tokens[1 : 1 + windows[:, 1:].numel()].tolist()


def in_order(dataset, ours, epoch=0):
    shards = dataset.shards("train")
    return np.concatenate([shards[i] for i in ours._shards_of(epoch)]).astype(np.int64)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_token_is_a_target_once_per_epoch(dataset, world):
    total = dataset.split("train").tokens
    count = (total - 1) // T
    ranks = [loader(dataset, "stream", batch=1, rank=rank, world=world) for rank in range(world)]
    windows = torch.cat([windows_of(rank, 1) for _ in range(-(-count // world)) for rank in ranks])[
        :count
    ]
    assert is_whole(windows, in_order(dataset, ranks[0]))
    assert total - 1 - T < windows[:, 1:].numel() <= total - 1


def test_epochs_of_a_stream_have_different_orders_and_the_same_tokens(dataset):
    ours = loader(dataset, "stream")
    orders = [ours._shards_of(epoch).tolist() for epoch in range(6)]
    assert len(set(map(tuple, orders))) > 3
    assert all(sorted(order) == list(range(len(dataset.shards("train")))) for order in orders)


def test_a_batch_may_begin_in_one_epoch_and_end_in_the_next(dataset):
    count = (dataset.split("train").tokens - 1) // T
    batch = 7
    while count % batch == 0:
        batch += 1
    ours = loader(dataset, "stream", batch=batch)
    windows = windows_of(ours, count // batch + 1)
    assert is_whole(windows[:count], in_order(dataset, ours, 0))
    assert is_whole(windows[count:], in_order(dataset, ours, 1))


# -- evaluation ------------------------------------------------------------------------------------


def test_evaluation_crops_do_not_depend_on_the_micro_batch(dataset):
    def crops(batch, batches, **options):
        crops = evaluation_batches(dataset, batch=batch, sequence=T, batches=batches, **options)
        assert len(crops) == batches and all(crop.inputs.shape == (batch, T) for crop in crops)
        return torch.cat([crop.inputs for crop in crops]), torch.cat(
            [crop.targets for crop in crops]
        )

    expected = crops(2, 12)
    for batch, batches in ((1, 24), (24, 1), (8, 3), (2, 12)):
        inputs, targets = crops(batch, batches)
        assert torch.equal(inputs, expected[0]) and torch.equal(targets, expected[1])
    assert not torch.equal(crops(2, 12, seed=1)[0], expected[0])


def test_evaluation_crops_are_spread_over_the_split(dataset):
    """One in each equal part: with as many parts as starts, every start once."""
    starts = sum(len(tokens) - T for tokens in dataset.shards("val"))
    batches = evaluation_batches(dataset, batch=1, sequence=T, batches=starts)
    expected = [
        tokens[i : i + T].tolist()
        for tokens in dataset.shards("val")
        for i in range(len(tokens) - T)
    ]
    assert [crop.inputs[0].tolist() for crop in batches] == expected
    more = evaluation_batches(dataset, batch=1, sequence=T, batches=starts + 10)
    assert len(more) == starts + 10


# -- bad input -------------------------------------------------------------------------------------


def test_make_loader_refuses_a_split_that_is_too_short_or_does_not_exist(dataset):
    with pytest.raises(
        ShardError, match=r"no shard of sequence \+ 1 = 2001 tokens, its longest has \d+; choose"
    ):
        loader(dataset, "random_crop", sequence=2000)
    with pytest.raises(
        ShardError, match="tokens, too few for sequence=1000000: that needs 1000001"
    ):
        loader(dataset, "stream", sequence=10**6)
    with pytest.raises(ShardError, match="no split 'test'"):
        make_loader(dataset, "test", batch=1, sequence=T, seed=0)  # pyright: ignore[reportArgumentType]
