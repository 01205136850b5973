"""The launch table: every size has a row, every row is reached, and few heads have narrow tiles."""

from dataclasses import replace

import pytest

pytest.importorskip("triton", reason="the triton extra is not installed")

from types import SimpleNamespace

import torch

from delta_trn.backends.gated_delta_rule import triton_adapter
from delta_trn.triton_kernels.hopper.prepare import heads_together
from delta_trn.triton_kernels.launch import TABLE, Card, Tile, adjust, assume, config


@pytest.mark.parametrize("major", [8, 9, 10, 12])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_every_head_size_has_a_launch(itemsize, major):
    for K in range(1, 257):
        row = config(K, 512, itemsize=itemsize, card=Card(major))
        assert row.C in (16, 32, 64)
        assert min(x.columns for x in (row.scan, row.reverse, row.gradients)) >= 16


def test_scans_of_few_heads_stay_narrow_so_that_more_processors_work():
    wide, narrow = Tile(128, 8, 3), Tile(64, 4, 3)
    for heads, V, expected in [
        (66, 128, narrow),
        (67, 128, wide),
        (33, 256, narrow),
        (34, 256, wide),
    ]:
        row = config(128, V, itemsize=2, heads=heads)
        assert (row.scan, row.reverse) == (expected, replace(expected, stages=2))


def test_scans_have_32_columns_where_more_than_half_the_processors_and_no_more_than_all_then_work():
    narrow = Tile(64, 4, 3)
    fewest = Tile(32, 4, 3, upright=True)
    for heads, V in [(17, 128), (33, 128), (9, 256), (16, 256)]:
        row, wide = (config(K, V, itemsize=2, heads=heads) for K in (128, 256))
        assert (row.scan, row.reverse) == (fewest, fewest)
        # there a reverse scan of 32 columns would spill
        assert (wide.scan, wide.reverse) == (
            replace(fewest, stages=2),
            Tile(64, 8, 2, upright=True),
        )
    for heads, V in [(16, 128), (34, 128), (8, 256), (17, 256)]:
        assert config(128, V, itemsize=2, heads=heads).scan == narrow
    assert config(128, 128, itemsize=4, heads=32) == config(128, 128, itemsize=4)


def test_no_row_of_the_table_is_unreachable():
    """A row is dead where an earlier one of its kernel holds wherever it does."""
    for i, row in enumerate(TABLE):
        for other in TABLE[:i]:
            hides = set(row.kernels.split()) <= set(other.kernels.split())
            hides &= other.itemsize >= row.itemsize and other.height >= row.height
            hides &= not other.few or 0 < row.few <= other.few
            hides &= not other.majors or (bool(row.majors) and set(row.majors) <= set(other.majors))
            assert not (hides and other.width >= row.width), f"{row} comes after {other}"


def test_adjusted_launches_hold_within_the_block_alone():
    row = config(64, 64, itemsize=2)
    with adjust(lambda row: replace(row, C=16)):
        assert config(64, 64, itemsize=2) == replace(row, C=16)
    assert config(64, 64, itemsize=2) == row


def test_a_gpu_with_fewer_processors_has_few_heads_sooner():
    for processors, heads in ((132, 66), (114, 57), (78, 39)):
        card = Card(9, processors)
        assert config(128, 128, itemsize=2, heads=heads, card=card).scan.columns == 64
        assert config(128, 128, itemsize=2, heads=heads + 1, card=card).scan.columns == 128
        assert config(128, 128, itemsize=2, card=card).processors == processors


def test_launches_are_those_of_the_tensors_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    l40s = SimpleNamespace(major=8, multi_processor_count=142)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: l40s)
    find = triton_adapter.card_of.__wrapped__
    assert find(torch.device("cuda", 1)) == Card(8, 142)
    assert find(torch.device("cpu")) is None


def test_two_value_heads_share_a_program_where_a_key_head_has_an_even_number():
    pairs = {(16, 32): 2, (16, 64): 2, (2, 8): 2, (16, 48): 1, (16, 16): 1, (1, 3): 1, (3, 18): 2}
    assert {heads: heads_together(*heads) for heads in pairs} == pairs


def test_where_no_gpu_is_launches_are_those_of_the_one_assumed():
    hopper = config(128, 128, itemsize=2)
    with assume(Card(8, 108)):
        assert (
            config(128, 128, itemsize=2)
            == config(128, 128, itemsize=2, card=Card(8, 108))
            != hopper
        )
    assert config(128, 128, itemsize=2) == hopper
