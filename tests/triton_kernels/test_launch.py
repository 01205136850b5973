"""The launch table: every size has a row, every row is reached, and few heads have narrow tiles."""

from dataclasses import replace

import pytest

pytest.importorskip("triton", reason="the triton extra is not installed")

from delta_trn.triton_kernels.launch import TABLE, Tile, adjust, config


@pytest.mark.parametrize("itemsize", [2, 4])
def test_every_head_size_has_a_launch(itemsize):
    for K in range(1, 257):
        row = config(K, 512, itemsize=itemsize)
        assert row.C in (16, 32, 64)
        assert min(x.columns for x in (row.scan, row.reverse, row.gradients)) >= 16


def test_scans_of_few_heads_stay_narrow_so_that_more_processors_work():
    wide, narrow = Tile(128, 8, 3), Tile(64, 4, 3)
    for heads, V, expected in [(66, 128, narrow), (67, 128, wide), (33, 256, narrow), (34, 256, wide)]:
        row = config(128, V, itemsize=2, heads=heads)
        assert (row.scan, row.reverse) == (expected, replace(expected, stages=2))


def test_scans_have_32_columns_where_more_than_half_the_processors_and_no_more_than_all_then_work():
    narrow = Tile(64, 4, 3)
    fewest = Tile(32, 4, 3, upright=True)
    for heads, V in [(17, 128), (33, 128), (9, 256), (16, 256)]:
        row, wide = (config(K, V, itemsize=2, heads=heads) for K in (128, 256))
        assert (row.scan, row.reverse) == (fewest, fewest)
        # there a reverse scan of 32 columns would spill
        assert (wide.scan, wide.reverse) == (replace(fewest, stages=2), Tile(64, 8, 2, upright=True))
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
            assert not (hides and other.width >= row.width), f"{row} comes after {other}"


def test_adjusted_launches_hold_within_the_block_alone():
    row = config(64, 64, itemsize=2)
    with adjust(lambda row: replace(row, C=16)):
        assert config(64, 64, itemsize=2) == replace(row, C=16)
    assert config(64, 64, itemsize=2) == row
