"""Makes tiles, and runs kernels of one instruction."""

import numpy as np

from nki_simulator import nisa, nl, record

F32 = nl.float32
R = np.random.default_rng(1)


def normal(*shape, dtype=np.float32):
    return R.standard_normal(shape, dtype=np.float32).astype(dtype)


def near(actual, expected, tolerance=2e-6):
    """Assert that no difference exceeds the tolerance,
    relative to the largest expected magnitude.
    """
    scale = np.abs(expected).max() + 1e-30
    np.testing.assert_allclose(
        np.asarray(actual, np.float64) / scale, expected / scale, rtol=0, atol=tolerance
    )


def sbuf(*shape, dtype=F32):
    return nl.ndarray(shape, dtype, nl.sbuf)


def psum(*shape, dtype=F32):
    return nl.ndarray(shape, dtype, nl.psum)


def ones(*shape, dtype=F32):
    return nl.ones(shape, dtype)


def product(*shape):
    """Return a PSUM tile that a matmul wrote."""
    tile = psum(*shape)
    nisa.nc_matmul(dst=tile, stationary=ones(4, shape[0]), moving=ones(4, shape[1]))
    return tile


def on_chip(array, buffer="sbuf", dtype=None):
    """Return a tile that holds the array."""
    tile = nl.ndarray(array.shape, dtype or array.dtype, nl.sbuf)
    nisa.dma_copy(dst=tile, src=array)
    if buffer == "sbuf":
        return tile
    moved = nl.ndarray(array.shape, tile.dtype, nl.psum)
    nisa.tensor_copy(dst=moved, src=tile)
    return moved


def execute(body, *arrays, shape, dtype=F32, target="trn1"):
    """Run body(out, *tiles) and return what it left in `out`."""

    def kernel(*args):
        tiles = [on_chip(a) for a in args]
        out = nl.ndarray(shape, dtype, nl.sbuf)
        body(out, *tiles)
        hbm = nl.ndarray(shape, dtype, nl.shared_hbm)
        nisa.dma_copy(dst=hbm, src=out)
        return hbm

    return record(kernel, *arrays, target=target, check_source=False, trace=False).outputs


def attempt(body, *args, target="trn1", strict=True):
    """Run a kernel body as it is."""
    return record(
        body, *args, target=target, strict=strict, check_source=False, trace=False
    ).outputs


def write_output():
    """Return the output that a kernel must have."""
    out = nl.ndarray((1, 1), F32, nl.shared_hbm)
    nisa.dma_copy(dst=out, src=ones(1, 1))
    return out
