"""Deep Delta Learning's residual update, forward: one rank-1 correction per token.

Math, for one token, X [D, DV], k [D], v [DV], scalar beta; y = r k with r = (k.k + k_eps^2)^-1/2, or r = 1
where the operation does not normalize:

    p  = X^T y            [DV]    what the stream holds along y
    X' = X + beta y (v - p)^T     [D, DV]

Source: "Deep Delta Learning", the delta operator with a value row. Sums are float32.

Layout: x [M, D, DV]; k [M, D]; v [M, DV]; beta [M]; M tokens.

128 tokens at a time, one a partition: every product is then between numbers of one partition. The Vector
engine needs 4 D DV cycles (2 for X k, 2 for X + k w), the Scalar engine sums over D meanwhile. X stays on
chip between the two passes over D if D DV fits in RESIDENT; if not it is read twice.
"""

from delta_trn.nki_kernels.language import nisa, nki, nl
from delta_trn.nki_kernels.partitions import PARTITIONS, loaded, reciprocal_norm, row_sum, tile

RESIDENT = 8 * 1024  # numbers of X a partition: 32 of 192 KiB, and as much for X k
MOST_D = 12 * 1024
LEAST_EPS = 2.0**-43  # its square is above 2^-87, from where on the Scalar engine's rsqrt is right


@nki.jit
def delta_residual_fwd(x, k, v, beta, k_eps):
    """X' [M, D, DV] in x's dtype. k_eps: number, or None for k as it is."""
    M, D, DV = x.shape
    check(D, k_eps)
    out = nl.ndarray((M, D, DV), dtype=x.dtype, buffer=nl.shared_hbm)
    beta = beta.reshape((M, 1))
    for start in range(0, M, PARTITIONS):
        stop = min(start + PARTITIONS, M)
        keys = loaded(k[start:stop, :], k.dtype)
        value = loaded(v[start:stop, :], v.dtype)
        gate = loaded(beta[start:stop, :], nl.float32)
        resident = []
        p = tile((stop - start, DV), nl.float32)
        for d0, d1 in blocks(D, DV, RESIDENT):
            xt = loaded(x[start:stop, d0:d1, :], x.dtype)
            read_along(p, xt, keys, d0)
            resident.append(xt)
        w = tile((stop - start, DV), nl.float32)
        if k_eps == None:  # noqa: E711 (compilers before 0.7 know no `is`)
            nisa.tensor_tensor(dst=w, data1=value, data2=p, op=nl.subtract)
            nisa.tensor_scalar(dst=w, data=w, op0=nl.multiply, operand0=gate)
        else:
            r = reciprocal_norm(keys, k_eps * k_eps)
            nisa.scalar_tensor_tensor(
                dst=w, data=p, op0=nl.multiply, operand0=r, op1=nl.subtract, operand1=value, reverse1=True
            )
            nisa.tensor_scalar(dst=w, data=w, op0=nl.multiply, operand0=gate, op1=nl.multiply, operand1=r)
        for d0, d1 in blocks(D, DV, RESIDENT):
            xt = resident[0]
            if len(resident) > 1:
                xt = loaded(x[start:stop, d0:d1, :], x.dtype)
            add_outer(xt, xt, keys, w, d0)
            nisa.dma_copy(dst=out[start:stop, d0:d1, :], src=xt)
    return out


def check(D, k_eps):
    """Refuse keys that fill SBUF, and an epsilon that the Scalar engine's rsqrt would get wrong."""
    assert D <= MOST_D, f"D={D} exceeds {MOST_D}: keys stay on chip whole"
    if k_eps != None:  # noqa: E711
        assert k_eps >= LEAST_EPS, f"k_eps={k_eps} is below {LEAST_EPS}, where rsqrt of its square is wrong"


def blocks(D, DV, most):
    """(first, end) of the parts of D in which D DV numbers are at most `most`."""
    size = min(D, max(1, most // DV))
    found = []
    for d0 in range(0, D, size):
        found.append((d0, min(d0 + size, D)))
    return found


def read_along(p, xt, keys, d0):
    """p (+)= X^T k over one block of D; the first block (d0 = 0) sets p."""
    c, size, DV = xt.shape
    D = keys.shape[1]
    product = tile((c, size, DV), nl.float32)
    spread = keys.ap(pattern=[[D, c], [1, size], [0, DV]], offset=d0)
    nisa.tensor_tensor(dst=product, data1=xt, data2=spread, op=nl.multiply)
    part = p if d0 == 0 else tile((c, DV), nl.float32)
    for j in range(DV):
        row_sum(part[:, j : j + 1], product[:, :, j], nl.copy)
    if d0 > 0:
        nisa.tensor_tensor(dst=p, data1=p, data2=part, op=nl.add)


def add_outer(out, xt, keys, w, d0):
    """out = X + k w^T over one block of D; out may be xt."""
    size, DV = xt.shape[1], xt.shape[2]
    for j in range(DV):
        nisa.scalar_tensor_tensor(
            dst=out[:, :, j], data=keys[:, d0 : d0 + size], op0=nl.multiply, operand0=w[:, j : j + 1],
            op1=nl.add, operand1=xt[:, :, j],
        )  # fmt: skip


def example(M=256, D=768, DV=4, dtype="float32"):
    """(kernel, arguments) for the simulator's report."""
    import ml_dtypes
    import numpy as np

    rng = np.random.default_rng(0)
    kind = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}[dtype]

    def normal(*shape):
        return rng.standard_normal(shape, dtype=np.float32).astype(kind)

    beta = 2 * rng.random(M, dtype=np.float32)
    return delta_residual_fwd, (normal(M, D, DV), normal(M, D), normal(M, DV), beta, 1e-5)
