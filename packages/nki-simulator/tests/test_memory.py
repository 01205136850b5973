"""Indexing, views, poison, capacity, and the nl functions on tiles."""

import tracemalloc

import numpy as np
import pytest
from simulator_harness import F32, normal, on_chip

from nki_simulator import ConstraintError, StrictError, nisa, nl, record
from nki_simulator.language import NKIObject


def inside(body, *args, target="trn1", **options):
    """Run `body` in a kernel and return what it returns in Python."""
    returned = []

    def kernel(*tensors):
        returned.append(body(*tensors))

    record(kernel, *args, target=target, check_source=False, **options)
    return returned[0]


def read_through(view_of, array):
    """Return what an instruction reads through a view of an SBUF tile that holds `array`."""

    def body(x):
        view = view_of(on_chip(x))
        out = nl.ndarray(view.shape, F32, nl.sbuf)
        nisa.tensor_copy(dst=out, src=view)
        return out.array.copy()

    return inside(body, array)


X = normal(4, 6, 8)


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        (lambda t: t[:, 1:3, ::2], X[:, 1:3, ::2]),
        (lambda t: t[:, 2], X[:, 2]),
        (lambda t: t[:, 2, 5], X[:, 2, 5:6]),
        (lambda t: t[0, ..., 1:3], X[0:1, :, 1:3]),
        (lambda t: t[..., nl.ds(3, 2)], X[..., 3:5]),
        (lambda t: t[:, -1], X[:, -1]),
        (lambda t: t.reshape((4, 48)), X.reshape(4, 48)),
        (lambda t: t.permute((0, 2, 1)), X.transpose(0, 2, 1)),
        (lambda t: t[:, 0:1].broadcast(1, 5), np.repeat(X[:, 0:1], 5, 1)),
        (lambda t: t.expand_dim(2), X[:, :, None]),
        (lambda t: t[:, 0:1].squeeze_dim(1), X[:, 0]),
        (lambda t: t.reshape_dim(2, (2, -1)), X.reshape(4, 6, 2, 4)),
        (lambda t: t.flatten_dims(1, 2), X.reshape(4, 48)),
        (lambda t: t.slice(1, 1, 5, 2), X[:, 1:5:2]),
        (lambda t: t.select(1, 3), X[:, 3]),
        (lambda t: t.rearrange(("p", ("a", "b"), "c"), ("p", "c", "b", "a"), {"a": 2}),
         X.reshape(4, 2, 3, 8).transpose(0, 3, 2, 1)),
        (lambda t: t.ap(pattern=[[48, 4], [8, 6], [1, 8]]), X),
        (lambda t: t.ap(pattern=[[48, 4], [1, 8], [8, 6]]), X.transpose(0, 2, 1)),
        (lambda t: t.ap(pattern=[[48, 4], [0, 3], [1, 8]], offset=8), np.repeat(X[:, 1:2], 3, 1)),
        (lambda t: t[:, 2:4].ap(pattern=[[48, 4], [1, 8]]), X[:, 2]),
    ],
)  # fmt: skip
def test_a_view_shows_the_elements_that_numpy_shows(view, expected):
    assert (read_through(view, X) == expected).all()


def test_a_view_shares_storage():
    def body():
        tile = nl.zeros((4, 8), F32)
        nisa.memset(dst=tile.reshape((4, 2, 4))[:, 1, :], value=3.0)
        return tile.array.copy()

    assert (inside(body) == np.repeat([[0, 0, 0, 0, 3, 3, 3, 3]], 4, 0)).all()


def test_a_view_knows_its_strides_offset_and_partition():
    def body():
        tile = nl.ndarray((8, 4, 16), F32, nl.sbuf, name="x")
        view = tile[2:6, 1, ::2]
        return view, tile

    view, tile = inside(body)
    assert (view.shape, view.strides, view.offset, view.partition) == (
        (4, 8),
        (64, 2),
        2 * 64 + 16,
        2,
    )
    assert view.get_pattern() == [[64, 4], [2, 8]]
    assert not view.is_contiguous() and tile.is_contiguous()
    assert repr(tile) == "NkiTensor(x, shape=(8, 4, 16), dtype=float32, buffer=sbuf)"


def test_hbm_drops_an_indexed_axis_and_chip_memory_does_not():
    def body(x):
        tile = nl.ndarray((4, 6), F32, nl.sbuf)
        return x[1].shape, x[1, 2, 3].shape, tile[1].shape, tile[:, 2].shape

    assert inside(body, X) == ((6, 8), (1,), (1, 6), (4, 1))


def test_a_view_reinterprets_bits_as_another_dtype():
    def body():
        tile = nl.full((2, 4), 1.0, F32)
        bits = tile.view(nl.uint32)
        return bits.shape, int(bits.array[0, 0]), tile.view(nl.uint8).shape

    assert inside(body) == ((2, 4), 0x3F800000, (2, 16))


@pytest.mark.parametrize(
    ("view", "message"),
    [
        (lambda t: t.reshape((6, 4, 8)), "reshape keeps the partition axis"),
        (lambda t: t.reshape((4, 47)), "192 elements against 188"),
        (lambda t: t.permute((0, 2, 1)).reshape((4, 48)), "would copy"),
        (lambda t: t.permute((1, 0, 2)), "keeps the partition axis outermost"),
        (lambda t: t.permute((0, 1)), "needs a permutation of 3 axes"),
        (lambda t: t.broadcast(0, 4), "broadcast of the partition axis is not a view"),
        (lambda t: t.broadcast(1, 4), "axis 1 has size 6"),
        (lambda t: t.expand_dim(0), "before the partition axis"),
        (lambda t: t[:, 3:2], "exceed dimension size"),
        (lambda t: t[:, ::-1], "is not positive"),
        (lambda t: t[0, 0, 0, 0], "indexed with 4 axes"),
        (lambda t: t.flatten_dims(0, 1), "cannot merge the partition axis"),
        (lambda t: t.indirect(t), "tensor indirection needs NeuronCore-v4 and is not simulated"),
    ],
)
def test_an_impossible_view_is_refused(view, message):
    with pytest.raises(ConstraintError, match=message):
        read_through(view, X)


def test_fresh_memory_is_poisoned():
    def body():
        return [
            nl.ndarray((2, 2), dtype, buffer).array.copy()
            for dtype in (nl.float32, nl.bfloat16, nl.int32, nl.uint8)
            for buffer in (nl.sbuf, nl.psum, nl.private_hbm)
        ]

    for i, fresh in enumerate(inside(body)):
        assert np.isnan(fresh.astype(np.float32)).all() if i < 6 else (fresh == 4).all()


def test_nan_from_outside_is_not_mistaken_for_poison():
    """A kernel that passes on the caller's NaN is right; one that reads unwritten memory is not."""

    def kernel(x):
        tile = nl.ndarray((4, 4), F32, nl.sbuf)
        nisa.dma_copy(dst=tile[0:2], src=x)
        total = nl.ndarray((4, 4), F32, nl.sbuf)
        nisa.tensor_scalar(dst=total, data=tile, op0=nl.add, operand0=1.0)
        out = nl.ndarray((2, 4), F32, nl.shared_hbm)
        nisa.dma_copy(dst=out, src=total[0:2])
        return out

    x = normal(2, 4)
    assert (record(kernel, x, check_source=False).outputs == x + 1).all(), (
        "unwritten lanes are not used"
    )
    x[0, 0] = np.nan
    assert np.isnan(record(kernel, x, check_source=False).outputs[0, 0])


def chain(tiles, keep):
    """`tiles` full SBUF columns of 64 KiB written one after the other;
    all read at the end if `keep`.
    """

    def kernel():
        out = nl.ndarray((1, 1), F32, nl.shared_hbm)
        columns = []
        for _ in range(tiles):
            tile = nl.ndarray((128, 16 * 1024), F32, nl.sbuf)
            nisa.memset(dst=tile, value=1.0)
            columns.append(tile)
        for tile in columns if keep else columns[-1:]:
            nisa.dma_copy(dst=out, src=tile[0:1, 0:1])
        return out

    return kernel


def test_capacity_counts_live_tiles_only():
    run = record(chain(20, keep=False), check_source=False)
    assert run.sbuf_peak == 64 * 1024
    assert record(chain(2, keep=True), check_source=False).sbuf_peak == 128 * 1024
    with pytest.raises(
        StrictError,
        match=r"sbuf capacity exceeded: 196608 .* live at instruction 2, trn1 has 180224",
    ):
        record(chain(3, keep=True), check_source=False)
    assert record(chain(3, keep=True), target="trn3", check_source=False).sbuf_peak == 192 * 1024


def test_psum_is_counted_in_banks():
    def kernel():
        out = nl.ndarray((1, 1), F32, nl.shared_hbm)
        one = nl.ones((4, 4), F32)
        small, wide = nl.ndarray((4, 4), F32, nl.psum), nl.ndarray((4, 3, 512), F32, nl.psum)
        nisa.nc_matmul(dst=small, stationary=one, moving=one)
        nisa.nc_matmul(dst=wide[:, 2, 0:4], stationary=one, moving=one)
        sb = nl.ndarray((4, 4), F32, nl.sbuf)
        nisa.tensor_tensor(dst=sb, data1=one, data2=small, op=nl.add)
        nisa.tensor_copy(dst=sb, src=wide[:, 2, 0:4])
        nisa.dma_copy(dst=out, src=sb[0:1, 0:1])
        return out

    assert record(kernel, check_source=False).psum_peak == 4


def live_products(columns):
    """Makes a kernel whose products of so many columns are all live at its end."""

    def kernel():
        out = nl.ndarray((1, 1), F32, nl.shared_hbm)
        one, moving = nl.ones((4, 4), F32), nl.ones((4, 512), F32)
        tiles = [nl.ndarray((4, own), F32, nl.psum) for own in columns]
        for tile in tiles:
            part = min(512, tile.shape[1])
            nisa.nc_matmul(dst=tile[:, 0:part], stationary=one, moving=moving[:, 0:part])
        for tile in tiles:
            sb = nl.ndarray((4, 1), F32, nl.sbuf)
            nisa.tensor_copy(dst=sb, src=tile[:, 0:1])
        nisa.dma_copy(dst=out, src=sb[0:1])
        return out

    return kernel


@pytest.mark.parametrize(
    ("columns", "banks"),
    [
        ((256,) * 12, 6),  # as a public kernel for Trn1 holds them
        ((128,) * 32, 8),
        ((384, 256, 128, 256), 2),  # the small one stands beside the first
        ((300,) * 8, 8),  # two are more than a bank, though all are 9,600 of 16,384 bytes
        ((1, 1024, 1, 1536), 6),  # what is wider than a bank has whole ones
    ],
)
def test_tiles_of_psum_share_a_bank_where_they_fit(columns, banks):
    assert record(live_products(columns), check_source=False).psum_peak == banks


@pytest.mark.parametrize("columns", [(300,) * 9, (128,) * 33, (1536, 1024, 1536, 1)])
def test_tiles_of_psum_that_fit_into_no_bank_are_refused(columns):
    with pytest.raises(StrictError, match="psum capacity exceeded: 9 banks of 2 KiB"):
        record(live_products(columns), check_source=False)


def test_a_bank_has_room_again_where_a_tile_is_dead():
    def kernel():
        out = nl.ndarray((1, 1), F32, nl.shared_hbm)
        one = nl.ones((4, 512), F32)
        for columns in (128, 384, 512) * 4:
            tile = nl.ndarray((4, columns), F32, nl.psum)
            nisa.nc_matmul(dst=tile, stationary=one[:, 0:4], moving=one[:, 0:columns])
            sb = nl.ndarray((4, 1), F32, nl.sbuf)
            nisa.tensor_copy(dst=sb, src=tile[:, 0:1])
        nisa.dma_copy(dst=out, src=sb[0:1])
        return out

    assert record(kernel, check_source=False).psum_peak == 1


def value(body, *arrays, target="trn1"):
    """Return what a tile holds that nl functions compute."""
    return inside(
        lambda *x: body(*map(nl.load, x)).array.astype(np.float64), *arrays, target=target
    )


A, B = np.abs(normal(5, 7)) + 0.1, normal(5, 7)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (lambda a, b: nl.add(a, b), A + B),
        (lambda a, b: nl.subtract(1.0, b), 1 - B),
        (lambda a, b: nl.divide(b, a), B / A),
        (
            lambda a, b: nl.multiply(b, nl.sum(a, axis=1, keepdims=True)),
            B * A.sum(1, keepdims=True),
        ),
        (lambda a, b: nl.max(b, axis=1), B.max(1, keepdims=True)),
        (lambda a, b: nl.min(b, axis=1), B.min(1, keepdims=True)),
        (lambda a, b: nl.prod(b, axis=1), B.prod(1, keepdims=True)),
        (lambda a, b: nl.mean(b, axis=1), B.mean(1, keepdims=True)),
        (lambda a, b: nl.var(b, axis=1), B.var(1, keepdims=True)),
        (lambda a, b: nl.rsqrt(a), A**-0.5),
        (lambda a, b: nl.cos(b), np.cos(B)),
        (lambda a, b: nl.tan(nl.multiply(a, 0.25)), np.tan(A * np.float32(0.25))),
        (lambda a, b: nl.floor(nl.multiply(b, 3.0)), np.floor(B * np.float32(3))),
        (lambda a, b: nl.ceil(nl.multiply(b, 3.0)), np.ceil(B * np.float32(3))),
        (lambda a, b: nl.trunc(nl.multiply(b, 3.0)), np.trunc(B * np.float32(3))),
        (lambda a, b: nl.mod(nl.multiply(b, 3.0), 2.0), np.mod(B * np.float32(3), 2)),
        (lambda a, b: nl.fmod(nl.multiply(b, 3.0), 2.0), np.fmod(B * np.float32(3), 2)),
        (lambda a, b: nl.negative(b), -B),
        (lambda a, b: nl.where(nl.greater(b, 0.0), a, b), np.where(B > 0, A, B)),
        (lambda a, b: nl.softmax(b), np.exp(B) / np.exp(B).sum(1, keepdims=True)),
        (
            lambda a, b: nl.rms_norm(b, a, axis=1, n=7),
            B / np.sqrt((B**2).mean(1, keepdims=True) + 1e-6) * A,
        ),
        (lambda a, b: nl.transpose(b), B.T),
        (lambda a, b: nl.matmul(a, nl.transpose(b)), A @ B.T),
        (lambda a, b: nl.broadcast_to(b[0:1], (64, 7)), np.repeat(B[0:1], 64, 0)),
        (lambda a, b: nl.shared_identity_matrix(6, dtype=nl.float32), np.eye(6)),
    ],
)
def test_tile_function_agrees_with_numpy(body, expected):
    result = value(body, A, B)
    np.testing.assert_allclose(result, expected, rtol=0, atol=3e-6 * np.abs(expected).max())


def test_tile_functions_do_not_broadcast_partitions():
    with pytest.raises(ConstraintError, match="do not broadcast the partition axis"):
        value(lambda a, b: nl.add(a, b[0:1]), A, B)


def test_configuration_objects_take_their_fields():
    class Shape(NKIObject):
        rows = None
        columns: int = 3

    assert (Shape(rows=2).rows, Shape(2).columns) == (2, 3)
    with pytest.raises(TypeError, match="Shape has no field depth"):
        Shape(depth=1)


def test_memory_of_dead_tiles_is_freed():
    """2,000 tiles of 64 KiB, one alive at a time: Python holds a few of them, not 128 MB."""

    def kernel():
        for _ in range(2000):
            nisa.memset(dst=nl.ndarray((128, 128), F32, nl.sbuf), value=0.0)

    tracemalloc.start()
    record(kernel, check_source=False)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8e6
