"""What kernels that keep one row a partition share: tiles, identities, norms and sums of rows.

Plain functions that a kernel inlines.
"""

from delta_trn.nki_kernels.language import nisa, nl

PARTITIONS = 128
BANK = 512  # float32 in one PSUM bank of a partition, the most that one product writes


def tile(shape, dtype):
    """An SBUF tile, its contents undefined."""
    return nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)


def loaded(src, dtype):
    """src, a slice of HBM, in a new tile of its shape."""
    out = nl.ndarray(src.shape, dtype=dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=out, src=src)
    return out


def identity(n, dtype):
    """[n, n]: ones where row and column agree."""
    out = nl.ndarray((n, n), dtype=dtype, buffer=nl.sbuf)
    nisa.memset(dst=out, value=1.0)
    nisa.affine_select(
        dst=out, pattern=[[-1, n]], channel_multiplier=1, on_true_tile=out, on_false_value=0.0,
        cmp_op=nl.equal,
    )  # fmt: skip
    return out


def row_sum(dst, data, op):
    """dst [P, 1] = the sum of op(data) [P, F] along the free axis, on the Scalar engine."""
    passed = nl.ndarray(data.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(
        dst=passed, op=op, data=data, reduce_op=nl.add, reduce_res=dst,
        reduce_cmd=nisa.reduce_cmd.reset_reduce,
    )  # fmt: skip


def reciprocal_norm(x, eps):
    """[P, 1] float32: (sum(x^2) + eps)^-1/2 of x [P, F].

    The Scalar engine's rsqrt is right from 2^-87 on, so eps has to be at least that.
    """
    total = nl.ndarray((x.shape[0], 1), dtype=nl.float32, buffer=nl.sbuf)
    row_sum(total, x, nl.square)
    nisa.tensor_scalar(dst=total, data=total, op0=nl.add, operand0=eps)
    r = nl.ndarray((x.shape[0], 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=r, op=nl.rsqrt, data=total)
    return r


def dot(x, y):
    """[P, 1] float32: x . y, row by row."""
    product = nl.ndarray(x.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=product, data1=x, data2=y, op=nl.multiply)
    out = nl.ndarray((x.shape[0], 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=out, op=nl.add, data=product, axis=1)
    return out
