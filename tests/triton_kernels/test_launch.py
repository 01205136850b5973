"""The launch table: every size has a row, and the rows taken are the ones that the table documents."""

from dataclasses import replace

import pytest

pytest.importorskip("triton", reason="the triton extra is not installed")

from delta_trn.triton_kernels import short_convolution
from delta_trn.triton_kernels.launch import TABLE, Config, Tile, adjusted, arithmetic, config, tile


@pytest.mark.parametrize("itemsize", [2, 4])
def test_every_head_size_has_a_launch(itemsize):
    for K in range(1, 257):
        row = config(K, 512, itemsize=itemsize)
        assert row.C in (16, 32, 64)
        assert min(x.columns for x in (row.scan, row.reverse, row.gradients)) >= 16


def test_launches_over_a_sequence_in_sixteen_bits():
    dot, four = arithmetic("tf32"), Tile(0, 4, 1, registers=128)
    deep, wide, narrow = Tile(128, 8, 3), Tile(128, 8, 2), Tile(64, 4, 2)
    upright = Tile(64, 8, 2, upright=True)
    for K, V, expected in [
        (32, 64, Config(64, dot, four, Tile(64, 4, 3), narrow, Tile(64, 4, 1))),
        (64, 64, Config(64, dot, four, narrow, narrow, Tile(64, 4, 1))),
        (64, 128, Config(64, dot, four, deep, Tile(128, 4, 2), Tile(64, 4, 1))),
        (96, 192, Config(64, dot, four, deep, narrow, Tile(64, 4, 1))),
        (128, 64, Config(64, dot, four, Tile(64, 4, 3), Tile(64, 4, 1), Tile(64, 4, 1))),
        (128, 128, Config(64, dot, four, deep, wide, Tile(64, 4, 1))),
        (128, 256, Config(64, dot, four, deep, wide, Tile(64, 4, 1))),
        (
            256,
            512,
            Config(64, dot, Tile(0, 4, 1, registers=168), upright, upright, Tile(32, 8, 3)),
        ),
    ]:
        assert config(K, V, itemsize=2) == expected


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


@pytest.mark.parametrize(
    ("K", "C", "columns", "warps", "for_gradients"),
    [(64, 32, 32, 4, 8), (128, 16, 16, 4, 4), (129, 16, 16, 8, 8)],
)
def test_launches_over_a_sequence_in_float32(K, C, columns, warps, for_gradients):
    one = Tile(columns, warps, 1)
    gradients = replace(one, warps=for_gradients)
    assert config(K, 256, itemsize=4) == Config(C, arithmetic(), Tile(0, warps, 1), one, one, gradients)


@pytest.mark.parametrize(
    ("kernel", "width", "height", "expected"),
    [
        ("chain", 128, 128, Tile(16, 4, 3, rows=32)),
        ("chain", 512, 256, Tile(16, 8, 3, rows=32)),
        ("step", 128, None, Tile(32, 4, 1)),
        ("delta_residual", 1, 768, Tile(1, 4, 1, rows=1024)),
        ("delta_residual", 4, 2048, Tile(4, 4, 1, rows=1024)),
        ("delta_residual", 512, 64, Tile(512, 4, 1, rows=16)),
        ("short_convolution", 3072, None, Tile(256, 4, 1, rows=4)),
        ("short_convolution", 24, None, Tile(32, 4, 1, rows=4)),
        ("short_convolution_forward", 3072, None, Tile(512, 4, 1, rows=8)),
        ("short_convolution_forward", 24, None, Tile(32, 4, 1, rows=8)),
        ("rms_norm", 128, None, Tile(128, 4, 1, rows=16)),
        ("rms_norm", 4096, None, Tile(4096, 8, 1, rows=1)),
        ("rms_norm", 4097, None, Tile(8192, 16, 1, rows=1)),
        ("cross_entropy", 50, None, Tile(128, 8, 1)),
        ("cross_entropy", 50257, None, Tile(4096, 8, 1)),
    ],
)
def test_launch_of_each_other_kernel(kernel, width, height, expected):
    assert tile(kernel, width, height) == expected


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
    with adjusted(lambda row: replace(row, C=16)):
        assert config(64, 64, itemsize=2) == replace(row, C=16)
    assert config(64, 64, itemsize=2) == row


@pytest.mark.parametrize(
    ("B", "T", "C", "spans", "tokens"),
    [
        (30, 1024, 3072, 240, 128),  # of a batch: long spans
        (1, 1024, 3072, 64, 16),  # of one sequence: short ones, so that it fills the GPU
        (1, 8192, 8192, 64, 128),
        (64, 32768, 3072, 1024, 2048),  # no more than 1,024 parts of the weights' gradient
        (4096, 16, 3072, 4096, 128),  # but one for each row
        (0, 16, 3072, 0, 16),
    ],
)
def test_spans_of_the_convolution_fill_a_gpu_and_are_not_too_many(B, T, C, spans, tokens):
    rows = tile("short_convolution", C).rows
    assert short_convolution.parts(B, T, C, 4, prefix=False) == (spans, tokens // rows)
