"""python -m nki_kernels.precision_probe: how exact are the Tensor engine's float32 products?

Public measurements disagree: products of bfloat16 rounding (errors of 1e-3), or of float32 (1e-7). The
operands here are 1 + n 2^-12, n = 0 .. 15: float32 holds their products' sum to 1e-7, tfloat32 rounds them to
2^-11, bfloat16 to 1. Run it on a chip first, with and without --auto-cast=none in NEURON_CC_FLAGS; where it
does not say float32, the parity of float32 inputs cannot be green there.
"""

import numpy as np

from delta_trn.nki_kernels.language import RUNTIME, nisa, nki, nl

# worst relative error of an operand, when rounded: 15 2^-12 to 0, and half of 2^-10
LIMITS = (("float32", 2e-6), ("tfloat32", 2.0**-10), ("bfloat16", 2.0**-7))


@nki.jit
def product(at, b):
    """at [K, M], b [K, N] float32 -> at^T b, one matmul."""
    left = nl.ndarray(at.shape, dtype=nl.float32, buffer=nl.sbuf)
    right = nl.ndarray(b.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=left, src=at)
    nisa.dma_copy(dst=right, src=b)
    ps = nl.ndarray((at.shape[1], b.shape[1]), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=ps, stationary=left, moving=right)
    tile = nl.ndarray(ps.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=tile, src=ps)
    out = nl.ndarray(ps.shape, dtype=nl.float32, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=tile)
    return out


def operands():
    rng = np.random.default_rng(0)
    return [(1 + rng.integers(0, 16, (128, 128)) * 2.0**-12).astype(np.float32) for _ in range(2)]


def verdict(found):
    """(name of the precision, worst relative error) of what `product` made of `operands`."""
    at, b = (x.astype(np.float64) for x in operands())
    exact = at.T @ b
    error = float((np.abs(found - exact) / exact).max())
    for name, limit in LIMITS:
        if error <= limit:
            return name, error
    return "less than bfloat16", error


if __name__ == "__main__":
    name, error = verdict(product(*operands()))
    print(f"{RUNTIME}: float32 products are {name}, worst relative error {error:.2g}")
