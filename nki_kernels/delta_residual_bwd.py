"""Deep Delta Learning's residual update, backward. Notation and layout are those of delta_residual_fwd.

With dX' given, s = dX'^T y and e = v - p:

    dX = dX' - beta y s^T     dv = beta s     dbeta = s . e
    a  = dX' e - X s          [D]
    dk = r beta a - k r^2 beta (dbeta - p . s)          (without normalization: dk = beta a)

for dy = beta a, dk = r (dy - y (y . dy)) and y . dy = beta (s . e - p . s). The gradients are derived here.

The Vector engine does 6 D DV cycles a tile of 128 tokens. `a` would take 4 more; the Tensor engine is idle,
so it sums dX'_j diag(e_j) - X_j diag(s_j) over the columns j, in float32 like everything else.
"""

from delta_trn.nki_kernels.delta_residual_fwd import add_outer, blocks, check, read_along
from delta_trn.nki_kernels.language import nisa, nki, nl
from delta_trn.nki_kernels.partitions import BANK, PARTITIONS, dot, identity, loaded, reciprocal_norm, tile

BANKS = 4  # of PSUM's 8 for a block of a
RESIDENT = 5 * 1024  # numbers of X, and of dX', a partition: 20 of 192 KiB each, and a bf16 copy


@nki.jit
def delta_residual_bwd(dout, x, k, v, beta, k_eps):
    """(dx, dk, dv, dbeta), each shaped and typed like its input."""
    M, D, DV = x.shape
    check(D, k_eps)
    dx = nl.ndarray((M, D, DV), dtype=x.dtype, buffer=nl.shared_hbm)
    dk = nl.ndarray((M, D), dtype=k.dtype, buffer=nl.shared_hbm)
    dv = nl.ndarray((M, DV), dtype=v.dtype, buffer=nl.shared_hbm)
    dbeta = nl.ndarray((M,), dtype=beta.dtype, buffer=nl.shared_hbm)
    beta, dbeta_rows = beta.reshape((M, 1)), dbeta.reshape((M, 1))
    eye = identity(PARTITIONS, nl.float32)
    parts = blocks(D, DV, min(RESIDENT, BANKS * BANK * DV))
    for start in range(0, M, PARTITIONS):
        stop = min(start + PARTITIONS, M)
        c = stop - start
        keys = loaded(k[start:stop, :], k.dtype)
        value = loaded(v[start:stop, :], v.dtype)
        gate = loaded(beta[start:stop, :], nl.float32)
        resident = []
        p, s = tile((c, DV), nl.float32), tile((c, DV), nl.float32)
        for d0, d1 in parts:
            xt = in_float32(x[start:stop, d0:d1, :])
            dt = in_float32(dout[start:stop, d0:d1, :])
            read_along(p, xt, keys, d0)
            read_along(s, dt, keys, d0)
            resident.append((xt, dt))

        r = gate
        step = tile((c, 1), nl.float32)  # r beta
        nisa.tensor_copy(dst=step, src=gate)
        if k_eps != None:  # noqa: E711 (compilers before 0.7 know no `is`)
            r = reciprocal_norm(keys, k_eps * k_eps)
            nisa.tensor_scalar(dst=p, data=p, op0=nl.multiply, operand0=r)
            nisa.tensor_scalar(dst=s, data=s, op0=nl.multiply, operand0=r)
            nisa.tensor_tensor(dst=step, data1=step, data2=r, op=nl.multiply)
        e = tile((c, DV), nl.float32)
        nisa.tensor_tensor(dst=e, data1=value, data2=p, op=nl.subtract)
        missed = dot(s, e)
        along = tile((c, 1), nl.float32)  # -r^2 beta (s . e - p . s): what dk has along k
        if k_eps != None:  # noqa: E711
            nisa.tensor_tensor(dst=along, data1=dot(p, s), data2=missed, op=nl.subtract)
            nisa.tensor_scalar(
                dst=along, data=along, op0=nl.multiply, operand0=step, op1=nl.multiply, operand1=r
            )
        store_scaled(dv[start:stop, :], s, gate)
        rounded = tile((c, 1), beta.dtype)
        nisa.tensor_copy(dst=rounded, src=missed)
        nisa.dma_copy(dst=dbeta_rows[start:stop, :], src=rounded)

        w = tile((c, DV), nl.float32)
        nisa.tensor_scalar(dst=w, data=s, op0=nl.multiply, operand0=step, op1=nl.multiply, operand1=-1.0)
        for d0, d1 in parts:
            xt, dt = resident[0]
            if len(resident) > 1:
                xt = in_float32(x[start:stop, d0:d1, :])
                dt = in_float32(dout[start:stop, d0:d1, :])
            sums = []
            for b0 in range(d0, d1, BANK):
                b1 = min(b0 + BANK, d1)
                sums.append((b0, b1, nl.ndarray((c, b1 - b0), dtype=nl.float32, buffer=nl.psum)))
            for j in range(DV):
                gain_e = diagonal(e[:, j : j + 1], eye, 1.0)
                gain_s = diagonal(s[:, j : j + 1], eye, -1.0)
                for b0, b1, a in sums:
                    nisa.nc_matmul(dst=a, stationary=gain_e, moving=dt[:, b0 - d0 : b1 - d0, j])
                    nisa.nc_matmul(dst=a, stationary=gain_s, moving=xt[:, b0 - d0 : b1 - d0, j])
            dx_tile = tile((c, d1 - d0, DV), x.dtype)
            add_outer(dx_tile, dt, keys, w, d0)  # meanwhile the Tensor engine sums
            nisa.dma_copy(dst=dx[start:stop, d0:d1, :], src=dx_tile)
            for b0, b1, a in sums:
                dk_tile = tile((c, b1 - b0), k.dtype)
                if k_eps == None:  # noqa: E711
                    nisa.tensor_scalar(dst=dk_tile, data=a, op0=nl.multiply, operand0=step)
                else:
                    back = tile((c, b1 - b0), nl.float32)
                    nisa.tensor_scalar(dst=back, data=keys[:, b0:b1], op0=nl.multiply, operand0=along)
                    nisa.scalar_tensor_tensor(
                        dst=dk_tile, data=a, op0=nl.multiply, operand0=step, op1=nl.add, operand1=back
                    )
                nisa.dma_copy(dst=dk[start:stop, b0:b1], src=dk_tile)
    return dx, dk, dv, dbeta


def in_float32(src):
    """src on chip in float32: the Tensor engine takes no bf16 beside float32. The Scalar engine converts."""
    out = loaded(src, src.dtype)
    if src.dtype == nl.float32:
        return out
    wide = tile(src.shape, nl.float32)
    nisa.activation(dst=wide, op=nl.copy, data=out)
    return wide


def store_scaled(dst, x, factor):
    """dst = factor x, rounded to dst's dtype on chip."""
    rounded = tile(x.shape, dst.dtype)
    nisa.tensor_scalar(dst=rounded, data=x, op0=nl.multiply, operand0=factor)
    nisa.dma_copy(dst=dst, src=rounded)


def diagonal(x, eye, sign):
    """[c, c]: diag(sign x), x [c, 1]."""
    c = x.shape[0]
    out = tile((c, c), nl.float32)
    nisa.tensor_scalar(
        dst=out, data=eye[0:c, 0:c], op0=nl.multiply, operand0=x, op1=nl.multiply, operand1=sign
    )
    return out


def example(M=256, D=768, DV=4, dtype="float32"):
    """(kernel, arguments) for the simulator's report."""
    import ml_dtypes
    import numpy as np

    rng = np.random.default_rng(0)
    kind = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}[dtype]

    def normal(*shape):
        return rng.standard_normal(shape, dtype=np.float32).astype(kind)

    beta = 2 * rng.random(M, dtype=np.float32)
    return delta_residual_bwd, (
        normal(M, D, DV), normal(M, D, DV), normal(M, D), normal(M, DV), beta, 1e-5,
    )  # fmt: skip
