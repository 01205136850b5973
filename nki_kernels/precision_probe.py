"""Measures how exact the Tensor engine's float32 products are; has kernels that measure rates.

    python -m delta_trn.nki_kernels.precision_probe

Public measurements disagree: either products round their operands to bfloat16 (errors of 1e-3), or they are
those of float32 (1e-7). The operands here are 1 + n 2^-12, n = 0 .. 15: float32 holds the sum of their
products to 1e-7, tfloat32 rounds them to 2^-11, bfloat16 to 1. Run it on a chip first, with and without
--auto-cast=none in NEURON_CC_FLAGS. Where it does not say float32, the parity of float32 inputs cannot be
green there.

`products` issues many products of one size: two counts differ in time by their products alone. `doubled`
takes an argument that may be None. `functions` makes the Scalar engine load tables. `make measure-trn1`
times them.
"""

import numpy as np

from delta_trn.nki_kernels.language import RUNTIME, nisa, nki, nl
from delta_trn.nki_kernels.tiles import load, psum, sbuf

SUMS = 4  # PSUM tiles, and stationary tiles, that take turns
# worst relative error where operands are rounded: 15 2^-12 to 0, and half of 2^-10
LIMITS = (("float32", 2e-6), ("tfloat32", 2.0**-10), ("bfloat16", 2.0**-7))


@nki.jit
def product(a_t, b):
    """Computes a b by one matmul from a^T [K, M] and b [K, N], float32."""
    a_t_sb, b_sb = load(a_t, nl.float32), load(b, nl.float32)
    out_ps = psum((a_t.shape[1], b.shape[1]))
    nisa.nc_matmul(dst=out_ps, stationary=a_t_sb, moving=b_sb)
    out_sb = sbuf(out_ps.shape)
    nisa.tensor_copy(dst=out_sb, src=out_ps)
    out = nl.ndarray(out_ps.shape, dtype=nl.float32, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=out_sb)
    return out


def operands():
    """Returns a^T and b."""
    rng = np.random.default_rng(0)
    return [(1 + rng.integers(0, 16, (128, 128)) * 2.0**-12).astype(np.float32) for _ in range(2)]


def verdict(result):
    """Names the precision of a result of `product` of `operands`, and returns its worst relative error."""
    a_t, b = (x.astype(np.float64) for x in operands())
    exact = a_t.T @ b
    error = float((np.abs(result - exact) / exact).max())
    for name, limit in LIMITS:
        if error <= limit:
            return name, error
    return "less than bfloat16", error


@nki.jit
def products(stationary, moving, count):
    """Returns the sum of `count` products of stationary [128, 512] and moving [128, N], [128, N] float32.

        product i = stationary[:, 128 (i mod 4) : 128 (i mod 4 + 1)].T @ moving

    Successive products have other stationary sides, as in our kernels, so that each loads its weights.
    """
    stationary_sb, moving_sb = load(stationary, stationary.dtype), load(moving, moving.dtype)
    sums_ps = []
    for _ in range(SUMS):
        sums_ps.append(psum((128, moving.shape[1])))
    for i in range(count):
        turn = i % SUMS
        nisa.nc_matmul(
            dst=sums_ps[turn], stationary=stationary_sb[:, 128 * turn : 128 * turn + 128], moving=moving_sb
        )
    out_sb = sbuf((128, moving.shape[1]))
    nisa.tensor_copy(dst=out_sb, src=sums_ps[0])
    for turn in range(1, SUMS):
        nisa.tensor_tensor(dst=out_sb, data1=out_sb, data2=sums_ps[turn], op=nl.add)
    out = nl.ndarray(out_sb.shape, dtype=nl.float32, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=out_sb)
    return out


@nki.jit
def doubled(x, nothing=None):
    """Returns 2 x for x [128, N] float32; `nothing` is not read."""
    x_sb = load(x, nl.float32)
    nisa.tensor_scalar(dst=x_sb, data=x_sb, op0=nl.multiply, operand0=2.0)
    out = nl.ndarray(x.shape, dtype=nl.float32, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=x_sb)
    return out


@nki.jit
def functions(x, count, in_turns):
    """Applies exp(-y) and SiLU(y) `count` times each to x [128, N] float32, in turns or all of one first.

    Each takes the result of the one before, so that nothing changes their order. In turns, 2 count - 2 more
    tables are loaded than otherwise.
    """
    y_sb = load(x, nl.float32)
    for i in range(2 * count):
        out_sb = sbuf(x.shape)
        is_exp = i % 2 == 0 if in_turns else i < count
        if is_exp:
            nisa.activation(dst=out_sb, op=nl.exp, data=y_sb, scale=-1.0)
        else:
            nisa.activation(dst=out_sb, op=nl.silu, data=y_sb)
        y_sb = out_sb
    out = nl.ndarray(x.shape, dtype=nl.float32, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=y_sb)
    return out


if __name__ == "__main__":
    name, error = verdict(product(*operands()))
    print(f"{RUNTIME}: float32 products are {name}, worst relative error {error:.2g}")
